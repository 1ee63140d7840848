"""The other verbs, and what all verbs share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from command import error_of

from energylens import __version__
from energylens.cli import app, main

pytestmark = pytest.mark.usefixtures("no_debug")

Capture = pytest.CaptureFixture[str]

FLAGS = {
    "predict": {
        "--phase",
        "--batch",
        "--prompt-len",
        "--gen-len",
        "--context-len",
        "--device",
        "--engine",
        "--mode",
        "--tp",
        "--ep",
        "--pp",
        "--dp",
        "--replicas",
        "--overlap",
        "--gpus",
        "--power-limit",
        "--precision",
        "--anchor",
        "--bundle",
        "--without",
        "--json",
        "--routing",
        "--redundant-experts",
        "--microbatches",
        "--rate",
        "--arrivals",
        "--lengths",
        "--duration",
        "--seed",
        "--max-batch-tokens",
        "--max-num-seqs",
        "--steady-state",
    },
    "explore": {
        "--gpus",
        "--prompt-len",
        "--gen-len",
        "--batch",
        "--tp",
        "--ep",
        "--dp",
        "--pp",
        "--disaggregate",
        "--rate",
        "--overlap",
        "--device",
        "--engine",
        "--power-limit",
        "--routing",
        "--max-ttft-ms",
        "--max-tpot-ms",
        "--max-w",
        "--min-throughput",
        "--objective",
        "--price-per-gpu-hour",
        "--price-per-kwh",
        "--pue",
        "--carbon-g-per-kwh",
        "--top",
        "--precision",
        "--anchor",
        "--bundle",
        "--csv",
        "--plot",
        "--html",
        "--json",
    },
    "profile": {
        "--torch-profile",
        "--torch_profile",
        "--kernel-profile",
        "--kernel_profile",
        "--throttle-check",
        "--throttle_check",
        "--trace-dir",
        "--trace_dir",
        "--model",
        "--ttft",
        "--tpot",
        "--ttlt",
        "--size",
        "--energy",
        "--energy-monitor",
        "--energy_monitor",
        "--batch-size",
        "--batch_size",
        "--batch",
        "--prompt-len",
        "--prompt_len",
        "--gen-len",
        "--gen_len",
        "--context-len",
        "--repeats",
        "--cache-graph",
        "--cache_graph",
        "--engine",
        "--ngpus",
        "--replicas",
        "--tp",
        "--ep",
        "--pp",
        "--device-map",
        "--device_map",
        "--reduce-strategy",
        "--reduce_strategy",
        "--dtype",
        "--attn",
        "--random-weights",
        "--random_weights",
        "--prompt-file",
        "--prompt_file",
        "--seed",
        "--spec",
        "--anchor",
        "--measure-anchor",
        "--power-timeline",
        "--power_timeline",
        "--sample-interval",
        "--sample_interval",
        "--plugin",
        "--model-name",
        "--model_name",
        "--iterations",
        "--log-level",
        "--log_level",
        "--json",
        "--csv",
        "-o",
        "--out",
    },
    "sweep": {"--out", "-o", "--csv", "--backend", "--jobs", "--scheduler", "--json"},
    "advise": {
        "--batch",
        "--prompt-len",
        "--gen-len",
        "--device",
        "--engine",
        "--mode",
        "--tp",
        "--ep",
        "--pp",
        "--dp",
        "--replicas",
        "--gpus",
        "--overlap",
        "--power-limit",
        "--routing",
        "--by",
        "--anchor",
        "--bundle",
        "--json",
    },
    "import": {"--name", "--out"},
    "validate": {
        "--by",
        "--ignore-anchors",
        "--anchor",
        "--bundle",
        "--without",
        "--max-num-seqs",
        "--report",
        "--plot",
        "--baseline",
        "--tolerance-pct",
        "--json",
    },
    "list": {"--json"},
    "doctor": {"--json"},
    "calibrate": {
        "--device",
        "--gpus",
        "--for",
        "--tp",
        "--plan",
        "--provider",
        "--minutes",
        "--anchor",
        "--out",
        "--resume",
        "--fresh",
        "--fit-only",
        "--blocks",
        "--nccl-algo",
        "--seed",
        "--json",
    },
}

COLUMNS = "record_id,device,engine,spec,phase,mode,batch,prompt_len,latency_s,energy_j,tp"
ROWS = (
    "one,h200,hf,llama3_8b,prefill,eager,8,1024,0.24,168,1",
    "two,h200,hf,llama3_8b,decode,cuda_graph,16,1024,0.01,6.5,1",
    "three,h200,hf,no_such_model,decode,eager,16,1024,0.01,6.5,1",
    "four,h200,hf,llama3_8b,decode,eager,16,1024,0.01,,3",
)


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    path = tmp_path / "truth.csv"
    path.write_text("\n".join((COLUMNS, *ROWS)) + "\n", encoding="utf-8")
    return path


def test_the_list_of_flags_is_the_documented_one() -> None:
    root = typer.main.get_command(app)
    commands = root.commands  # type: ignore[attr-defined]
    found = {
        name: {opt for p in command.params for opt in (*p.opts, *p.secondary_opts) if opt[0] == "-"}
        for name, command in commands.items()
    }
    assert found == FLAGS


@pytest.mark.parametrize("arguments", [[], ["--help"], *([verb, "--help"] for verb in FLAGS)])
def test_help_is_on_stdout_and_no_error(capsys: Capture, arguments: list[str]) -> None:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "Usage" in out
    assert err == ""


def test_version_is_the_packages(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"energylens {__version__}\n"


def test_validate_reports_every_row_and_counts_those_without_a_prediction(
    capsys: Capture, truth: Path
) -> None:
    assert main(["validate", str(truth), "--by", "phase,tp", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "energylens/validation/v1"
    rows = {row["record_id"]: row for row in document["rows"]}
    assert list(rows) == ["one", "two", "three", "four"]
    assert rows["one"]["energy_j"]["predicted"] > 0
    assert rows["one"]["reason"] is None
    assert rows["three"]["energy_j"]["predicted"] is None
    assert "no_such_model" in rows["three"]["reason"]
    assert "tp=3" in rows["four"]["reason"]
    everything, *groups = document["summary"]
    assert everything["group"] == {}
    assert (everything["n"], everything["n_unpredicted"]) == (4, 2)
    assert [g["group"] for g in groups] == [
        {"phase": "prefill", "tp": 1},
        {"phase": "decode", "tp": 1},
        {"phase": "decode", "tp": 3},
    ]


def test_validate_shows_a_table_with_the_reasons(capsys: Capture, truth: Path) -> None:
    assert main(["validate", str(truth)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("device-bound, 2 of 4 rows predicted: latency MAPE ")
    assert "not predicted, three: unknown spec 'no_such_model'" in out
    assert out.strip().splitlines()[-1].startswith("bundle h200/torch ")
    assert err == ""


def test_a_law_left_out_changes_the_prediction(capsys: Capture, truth: Path) -> None:
    predicted = []
    for extra in ([], ["--without", "cap"]):
        assert main(["validate", str(truth), "--json", *extra]) == 0
        document = json.loads(capsys.readouterr().out)
        predicted.append(document["rows"][0]["latency_s"]["predicted"])
    with_cap, without_cap = predicted
    assert without_cap < with_cap  # 8 x 1024 tokens hold the power cap


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--by", "engin"], "--by: unknown field 'engin'"),
        (["--without", "gravity"], "--without: unknown value 'gravity'; allowed: cap, host"),
        (["--bundle", "nowhere.json"], "nowhere.json"),
        (["--anchor", "nowhere.json"], "nowhere.json"),
    ],
)
def test_validate_refuses_bad_options(
    capsys: Capture, truth: Path, extra: list[str], told: str
) -> None:
    assert main(["validate", str(truth), *extra]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_validate_names_a_file_that_it_cannot_read(capsys: Capture, tmp_path: Path) -> None:
    assert main(["validate", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err
    assert main(["validate"]) == 2
    assert "TRUTH" in capsys.readouterr().err.upper()


def test_anchors_from_a_file_stand_in_for_rows_without_their_own(
    capsys: Capture, truth: Path, anchor_file: Path
) -> None:
    assert main(["validate", str(truth), "--anchor", str(anchor_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"][0]["n_unpredicted"] == 2
    text = anchor_file.read_text(encoding="utf-8")
    anchor_file.write_text(text.replace("h200", "a6000"), encoding="utf-8")
    line = error_of(capsys, "validate", str(truth), "--anchor", str(anchor_file))
    assert "--anchor: board GPU-1 is of a6000, but the device is h200" in line


def test_validate_covers_the_shared_truth(capsys: Capture, shared_truth: Path) -> None:
    files = [shared_truth / "h200_hf.csv", shared_truth / "h200_vllm.csv"]
    assert main(["validate", *map(str, files), "--json", "--by", "engine,phase,spec,tp"]) == 0
    document = json.loads(capsys.readouterr().out)
    lines = [line for f in files for line in f.read_text(encoding="utf-8").splitlines()[1:]]
    expected = [line.split(",")[0] for line in lines]
    assert [row["record_id"] for row in document["rows"]] == expected
    dense = [r for r in document["rows"] if r["record_id"].startswith("h200-hf-llama3_8b")]
    assert all(row["reason"] is None for row in dense)


@pytest.mark.parametrize("kind", ["specs", "devices", "engines", "clusters", "bundles"])
def test_list_names_what_is_known(capsys: Capture, kind: str) -> None:
    assert main(["list", kind, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["list", kind]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{kind}:"
    # One line for each name; a long description goes on below, further in.
    assert [line.split()[0] for line in lines if line[2] != " "] == document[kind]
    assert all(document["descriptions"][kind].values())


def test_list_without_a_kind_names_all(capsys: Capture) -> None:
    assert main(["list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"llama3_8b", "llama3_70b", "llama3_2_1b", "qwen2_5_7b", "qwen3_32b"} <= set(
        document["specs"]
    )
    assert {"h200", "a6000", "jetson_orin_nano"} <= set(document["devices"])
    assert "hf" in document["engines"]
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "devices:\n" in out
    assert "8.03 B parameters, 32 layers, bf16" in out


def test_list_refuses_an_unknown_kind(capsys: Capture) -> None:
    assert main(["list", "models"]) == 2
    assert "allowed: specs, devices, engines, clusters, bundles" in capsys.readouterr().err


def test_doctor_answers_on_any_machine(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"].startswith("energylens/doctor/")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal_cuts_no_cell(
    capsys: Capture, truth: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for arguments in (
        ["predict", "llama3_70b", "--engine", "hf", "--tp", "2"],
        ["validate", str(truth), "--by", "spec,tp,phase,regime"],
    ):
        assert main(arguments) == 0
        assert "…" not in capsys.readouterr().out


def test_a_prediction_fits_eighty_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["predict", "llama3_70b", "--engine", "hf", "--tp", "2"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_calibrate_refuses_degrees_that_are_none(capsys: Capture) -> None:
    assert main(["calibrate", "--for", "llama3_8b", "--tp", "1,x"]) == 2
    assert "--tp: '1,x' found" in capsys.readouterr().err
    assert main(["calibrate", "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_or_read_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, kind: str) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr("energylens.predict.Catalogue.list", refuse)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "energylens: error: /somewhere: Permission denied\n"
