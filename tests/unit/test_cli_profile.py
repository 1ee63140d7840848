"""`energylens profile`: flags, what is refused before anything starts, exit codes, outputs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command import Capture, error_of
from made_profile import phase, run

import energylens.profiler.run as runner
from energylens.cli import main
from energylens.profiler.options import ProfileRequest, layout
from energylens.spec.system import Parallelism

pytestmark = pytest.mark.usefixtures("no_debug")

MODEL = "llama3_2_1b"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ProfileRequest]:
    """Requests that reach the engines, which are not there: each is answered by a made document."""
    asked: list[ProfileRequest] = []

    def answer(request: ProfileRequest, **rest: Any) -> Mapping[str, Any]:
        asked.append(request)
        document = made()
        rest["save"](document)
        return document

    monkeypatch.setattr(runner, "run", answer)
    return asked


def made(**fields: Any) -> dict[str, Any]:
    """A measured document as the profiler makes it: with every field."""
    whole = {
        "metrics": {},
        "model_size_gb": 2.5,
        "energy_per_prompt_j": None,
        "energy_per_token_j": 0.3125,
        "energy_per_request_j": None,
        "throughput_tokens_s": 1600.0,
        "tokens_per_j": 3.2,
        "bandwidth_utilisation": 0.2,
        "compute_utilisation": None,
        "memory": {"predicted_kv_cache_bytes": None, "peak_bytes": 3e9},
        "decode": phase(context_len=1025.0, iterations=[0.01, 0.0101]),
    }
    return run(**whole | fields)


ELANA = {
    "--ttft": [],
    "--tpot": [],
    "--ttlt": [],
    "--size": [],
    "--energy": [],
    "--cache_graph": [],
    "--batch_size": ["4"],
    "--prompt_len": ["256"],
    "--gen_len": ["32"],
    "--repeats": ["10"],
    "--ngpus": ["1"],
    "--device_map": ["auto"],
    "--torch_profile": [],
    "--log_level": ["info"],
    "--model_name": ["tiny"],
}


@pytest.mark.parametrize("spelling", ["_", "-"])
def test_command_lines_of_elana_run_unchanged(
    capsys: Capture, ran: list[ProfileRequest], spelling: str
) -> None:
    words = [
        word
        for flag, values in ELANA.items()
        for word in ("--" + flag[2:].replace("_", spelling), *values)
    ]
    assert main(["profile", MODEL, *words]) == 0
    (request,) = ran
    assert (request.batch, request.prompt_len, request.gen_len) == (4, 256, 32)
    assert request.phases == ("prefill", "decode", "request")
    assert (request.repeats, request.cache_graph, request.energy) == (10, True, True)
    assert capsys.readouterr().out.startswith("tiny on 1 x NVIDIA H200")


@pytest.mark.parametrize(
    ("flag", "value", "field", "expected"),
    [
        ("--energy-monitor", None, "energy", True),
        ("--energy_monitor", None, "energy", True),
        ("--reduce-strategy", "ring", "reduce_strategy", "ring"),
        ("--reduce_strategy", "tree", "reduce_strategy", "tree"),
        ("--sample-interval", "0.05", "sample_interval_s", 0.05),
        ("--sample_interval", "0.5", "sample_interval_s", 0.5),
        ("--random-weights", None, "random_weights", True),
        ("--random_weights", None, "random_weights", True),
        ("--dtype", "fp16", "dtype", "fp16"),
        ("--attn", "eager", "attention", "eager"),
        ("--seed", "7", "seed", 7),
        ("--context-len", "99", "context_len", 99),
        ("--prompt-file", "p.txt", "prompt_file", "p.txt"),
        ("--spec", "llama3_8b", "spec", "llama3_8b"),
        ("--plugin", "own.py", "plugins", ("own.py",)),
        ("--engine", "vllm", "engine", "vllm"),
        ("--torch_profile", None, "torch_profile", True),
        ("--kernel-profile", None, "kernel_profile", True),
        ("--kernel_profile", None, "kernel_profile", True),
        ("--throttle-check", None, "throttle_check", True),
        ("--throttle_check", None, "throttle_check", True),
        ("--trace-dir", "t", "trace_dir", "t"),
        ("--out", "t/x.json", "trace_dir", "t/x-traces"),
        ("--tp", "2", "parallelism", Parallelism(tp=2)),
        ("--ngpus", "2", "parallelism", Parallelism(replicas=2)),
    ],
)
def test_a_flag_reaches_the_request(
    ran: list[ProfileRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    value: str | None,
    field: str,
    expected: object,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    words = [flag] if value is None else [flag, value]
    assert main(["profile", MODEL, "--batch", "2", *words]) == 0
    assert getattr(ran[0], field) == expected


def test_the_model_may_be_an_option_but_is_given_once(
    capsys: Capture, ran: list[ProfileRequest]
) -> None:
    assert main(["profile", "--model", MODEL]) == 0
    assert ran[0].model == MODEL
    capsys.readouterr()
    assert "two found" in error_of(capsys, "profile", MODEL, "--model", MODEL)
    assert "none found" in error_of(capsys, "profile")


@pytest.mark.parametrize(
    ("flags", "phases", "size"),
    [
        ([], ("prefill", "decode", "request"), True),
        (["--ttft"], ("prefill",), False),
        (["--tpot", "--size"], ("decode",), True),
        (["--size"], (), True),
    ],
)
def test_what_is_chosen_is_measured_and_all_where_nothing_is(
    ran: list[ProfileRequest], flags: list[str], phases: tuple[str, ...], size: bool
) -> None:
    assert main(["profile", MODEL, *flags]) == 0
    assert (ran[0].phases, ran[0].size) == (phases, size)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batchsize", "4"], "--batchsize"),
        (["--ttfs"], "--ttfs"),
        (["--batch-size", "0"], "--batch: 0 found"),
        (["--gen-len", "0"], "--gen-len"),
        (["--context-len", "1"], "--context-len"),
        (["--dtype", "int3"], "--dtype: unknown value 'int3'; allowed: bf16, fp16, fp32"),
        (["--engine", "sglang"], "--engine: unknown value 'sglang'; allowed: hf, vllm"),
        (["--device_map", "balanced"], "--device_map"),
        (["--log_level", "LOUD"], "--log_level"),
        (["--reduce-strategy", "star"], "--reduce-strategy"),
        (["--sample-interval", "0"], "--sample-interval"),
        (["--json", "--csv"], "--json and --csv"),
        (["--ngpus", "3", "--tp", "2"], "--ngpus 3"),
        (["--ngpus", "2"], "does not divide over 2 replicas"),
    ],
)
def test_nothing_starts_on_a_wrong_command_line(
    capsys: Capture, ran: list[ProfileRequest], words: list[str], told: str
) -> None:
    assert main(["profile", MODEL, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert ran == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--pp", "2"], "--pp 2: no engine here runs a pipeline"),
        (["--replicas", "2", "--tp", "2"], "--replicas 2"),
        (["--tp", "4", "--ep", "2"], "--ep 2: transformers spreads experts over all workers"),
        (["--engine", "vllm", "--cache_graph"], "belong to engine hf"),
        (["--engine", "vllm", "--torch_profile"], "belong to engine hf"),
    ],
)
def test_layouts_that_no_engine_runs_are_refused(
    capsys: Capture, ran: list[ProfileRequest], words: list[str], told: str
) -> None:
    assert main(["profile", MODEL, *words]) != 0
    assert told in capsys.readouterr().err
    assert ran == []


def test_models_are_looked_for_before_anything_starts(capsys: Capture, tmp_path: Path) -> None:
    assert "no such folder" in error_of(capsys, "profile", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in error_of(capsys, "profile", str(tmp_path / "empty"))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}", encoding="utf-8")
    assert "add --random-weights" in error_of(capsys, "profile", str(bare))
    assert "no_such_spec" in error_of(capsys, "profile", MODEL, "--spec", "no_such_spec")


@pytest.mark.parametrize(
    ("fields", "energy", "code"),
    [
        ({}, True, 0),
        ({"energy_reason": "no meter"}, False, 0),
        ({"energy_reason": "no meter"}, True, 4),
        ({"valid": False, "reasons": ["decode: throttled"]}, False, 4),
        ({"valid": False, "reasons": ["interrupted before request"]}, False, 130),
    ],
)
def test_the_exit_code_says_whether_the_numbers_are_fit_for_use(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], energy: bool, code: int
) -> None:
    monkeypatch.setattr(runner, "run", lambda request, **rest: made(**fields))
    assert main(["profile", MODEL, *(["--energy"] if energy else [])]) == code


def test_json_is_one_document_and_files_hold_the_same(
    capsys: Capture, ran: list[ProfileRequest], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    assert main(["profile", MODEL, "--json", "-o", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(path.read_text(encoding="utf-8"))
    assert "iterations" not in document["decode"]
    assert main(["profile", MODEL, "--json", "--iterations"]) == 0
    assert json.loads(capsys.readouterr().out)["decode"]["iterations"] == [0.01, 0.0101]


def test_csv_rows_are_written_to_stdout_or_a_file(
    capsys: Capture, ran: list[ProfileRequest], tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    assert main(["profile", MODEL, "--csv", "-o", str(path)]) == 0
    text = capsys.readouterr().out
    assert text == path.read_text(encoding="utf-8")
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["phase"], row["mode"], row["latency_s"]) == ("decode", "cuda_graph", "0.01")


def test_the_table_names_what_was_measured(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = made(
        metrics={"experts_touched": 57.5},
        reasons=["decode: throttled"],
        environment={
            "graph_checks": {
                "decode": {
                    "logits_distance": 0.0521,
                    "entries_distance": 0.002,
                    "same_tokens": 0.88,
                }
            },
            "notes": ["said once"],
        },
    )
    monkeypatch.setattr(runner, "run", lambda request, **rest: document)
    main(["profile", MODEL])
    out = capsys.readouterr().out
    assert "decode step   10.0 ms" in out
    assert "cuda_graph" in out
    (row,) = (line.split() for line in out.splitlines() if "J/token" in line)
    assert row[:7] == ["J/token", "312", "mJ", "237", "mJ", "5.00", "J"]
    assert "experts_touched: 57.5" in out
    assert "logits differ by 5.21 %, new cache entries by 0.20 %, same token in 88 %" in out
    assert "note: said once" in out
    assert "not valid: decode: throttled" in out


# ------------------------------------------------------------------ degrees


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ngpus": 4, "batch": 8}, (Parallelism(replicas=4), 2)),
        ({"replicas": 2, "batch": 3}, (Parallelism(replicas=2), 3)),
        ({"tp": 2, "ep": 2, "batch": 5}, (Parallelism(tp=2, ep=2), 5)),
        ({"ngpus": 2, "tp": 2, "batch": 5}, (Parallelism(tp=2), 5)),
        ({"ngpus": 1, "batch": 5}, (Parallelism(), 5)),
    ],
)
def test_gpus_are_replicas_unless_degrees_are_given(
    given: dict[str, int], expected: tuple[Parallelism, int]
) -> None:
    known: dict[str, Any] = {"ngpus": None, "replicas": None, "tp": 1, "ep": 1, "pp": 1}
    assert layout(**known | given) == expected


def test_a_request_travels_to_the_workers_whole() -> None:
    request = ProfileRequest(
        model="m",
        phases=("decode",),
        parallelism=Parallelism(tp=2, ep=2),
        plugins=("a.py",),
        anchor_files=("b.json",),
        dtype="fp16",
    )
    assert ProfileRequest.from_json(request.to_json()) == request
