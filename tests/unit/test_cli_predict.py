"""The verb `predict`, as a user meets it: documents, tables, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import Capture, error_of, run_json

from energylens.cli import main
from energylens.spec.resources import data_dir

MODEL = ("predict", "llama3_8b", "--engine", "hf")

pytestmark = pytest.mark.usefixtures("no_debug")


def test_json_is_one_document_and_all_that_stdout_holds(capsys: Capture) -> None:
    document = run_json(capsys, *MODEL)
    assert document["schema"] == "energylens/prediction/v1"
    assert document["feasible"] is True
    assert document["ttft_s"] > 0
    assert document["request"]["energy_j"] > document["prefill"]["energy_j"]


def test_defaults_are_those_of_the_contract(capsys: Capture) -> None:
    document = run_json(capsys, *MODEL)
    assert document["device"] == "h200"
    assert document["workload"] == {
        "batch": 1,
        "prompt_len": 1024,
        "gen_len": 128,
        "context_len": 1024 + 64,
    }
    assert document["parallelism"]["gpus"] == 1


def test_breakdown_adds_up_to_each_phase(capsys: Capture) -> None:
    document = run_json(capsys, *MODEL, "--tp", "2")
    for phase in ("prefill", "decode", "request"):
        rows = [r for r in document["breakdown"] if r["phase"] == phase]
        for quantity in ("latency_s", "energy_j"):
            total = sum(r[quantity] for r in rows)
            assert total == pytest.approx(document[phase][quantity], rel=1e-6)


def test_intervals_enclose_what_they_belong_to(capsys: Capture) -> None:
    document = run_json(capsys, *MODEL)
    for phase in ("prefill", "decode", "request"):
        result = document[phase]
        assert result["interval"]["level"] == 0.9
        for quantity in ("latency_s", "energy_j"):
            low, high = result["interval"][quantity]
            assert low < result[quantity] < high


def test_definitions_of_per_token_numbers(capsys: Capture) -> None:
    d = run_json(capsys, *MODEL, "--batch", "8", "--gen-len", "64")
    assert d["energy_per_token_j"] == pytest.approx(d["decode"]["energy_j"] / 8)
    assert d["energy_per_prompt_j"] == pytest.approx(d["prefill"]["energy_j"] / 8)
    assert d["tpot_s"] == pytest.approx((d["ttlt_s"] - d["ttft_s"]) / 63)


def test_one_generated_token_has_null_tpot(capsys: Capture) -> None:
    document = run_json(capsys, *MODEL, "--gen-len", "1")
    assert document["tpot_s"] is None
    assert document["null_reasons"]["tpot_s"]
    assert document["ttlt_s"] == pytest.approx(document["ttft_s"])


def test_a_longer_context_costs_more(capsys: Capture) -> None:
    short, long = (
        run_json(
            capsys, *MODEL, "--phase", "decode", "--mode", "cuda_graph", "--batch", "16",
            "--context-len", length,
        )
        for length in ("512", "32768")
    )  # fmt: skip
    assert long["decode"]["latency_s"] > short["decode"]["latency_s"]
    assert long["decode"]["energy_j"] > short["decode"]["energy_j"]
    assert short["prefill"] is None


def test_a_captured_graph_is_for_decode_and_frees_it_of_the_host(capsys: Capture) -> None:
    eager, captured, named = (
        run_json(capsys, *MODEL, *mode)
        for mode in (
            ("--mode", "eager"),
            ("--mode", "cuda_graph"),
            ("--mode", "prefill=eager", "--mode", "decode=cuda_graph"),
        )
    )
    assert eager["decode"]["regime"] == "host"
    assert captured["decode"]["regime"] != "host"
    assert captured["decode"]["latency_s"] < eager["decode"]["latency_s"]
    assert captured["prefill"] == eager["prefill"]
    assert named["request"] == captured["request"]


def test_gpus_alone_sets_tensor_parallelism(capsys: Capture) -> None:
    assert run_json(capsys, *MODEL, "--gpus", "2")["parallelism"]["tp"] == 2


def test_a_lower_power_limit_does_not_speed_up(capsys: Capture) -> None:
    free, capped = (
        run_json(capsys, *MODEL, "--phase", "prefill", "--batch", "8", *limit)
        for limit in ((), ("--power-limit", "400"))
    )
    assert capped["prefill"]["latency_s"] > free["prefill"]["latency_s"]
    assert capped["prefill"]["mean_power_w"] <= 400


def test_the_table_ends_with_where_the_numbers_come_from(capsys: Capture) -> None:
    assert main([*MODEL, "--tp", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for label in ("TTFT", "TPOT", "TTLT", "J/prompt", "J/token", "J/request", "W/GPU", "memory"):
        assert label in out
    last = out.strip().splitlines()[-1]
    assert "device h200" in last
    assert "engine hf" in last
    assert "weakest source:" in last


def test_a_device_without_a_bundle_answers_from_the_roofline(capsys: Capture) -> None:
    document = run_json(capsys, *MODEL, "--device", "a6000", "--batch", "1")
    assert document["source"] == "roofline"
    assert document["bundles"] == []
    low, high = document["prefill"]["interval"]["energy_j"]
    assert high / low > 1.5
    assert "energylens calibrate --device a6000" in " ".join(document["notes"])


@pytest.mark.parametrize(
    ("model", "narrow", "wide"),
    [
        (("gpt_oss_20b",), {"experts"}, {"q+k+v", "o", "lm_head"}),
        (
            ("deepseek_v3", "--tp", "8", "--ep", "8"),
            {"experts", "o", "q_a+kv_a+k_rope", "shared_down", "gate+up"},
            {"router", "lm_head"},
        ),
    ],
)
def test_quantised_weights_are_never_said_to_be_measured(
    capsys: Capture, model: tuple[str, ...], narrow: set[str], wide: set[str]
) -> None:
    document = run_json(capsys, "predict", *model)
    sources = {row["op"]: row["source"] for row in document["breakdown"]}
    assert narrow | wide <= sources.keys()
    assert {sources[op] for op in narrow} == {"transferred"}
    assert {sources[op] for op in wide} <= {"measured", "interpolated", "extrapolated"}
    assert any("no kernel was calibrated with weights in" in n for n in document["notes"])
    for phase in ("prefill", "decode", "request"):
        rows = [r for r in document["breakdown"] if r["phase"] == phase]
        total = document[phase]["energy_j"]
        assert sum(r["energy_j"] for r in rows) == pytest.approx(total, rel=1e-9)


def test_what_a_spec_leaves_out_is_noted(capsys: Capture) -> None:
    notes = run_json(capsys, "predict", "deepseek_v3", "--tp", "8")["notes"]
    assert "routing limited to 4 of 8 groups of experts is taken as 8 of all 256" in notes


@pytest.mark.parametrize(
    ("model", "gpus", "launched"),
    [("gpt_oss_20b", "1", "openai/gpt-oss-20b"), ("deepseek_v3", "8", "deepseek-ai/DeepSeek-V3")],
)
def test_models_whose_layers_differ_are_explored(
    capsys: Capture, model: str, gpus: str, launched: str
) -> None:
    document = run_json(capsys, "explore", model, "--gpus", gpus, "--batch", "1,32")
    front = [c for c in document["configs"] if c["on_frontier"]]
    assert front
    assert {c["source"] for c in front if c["source"]} <= {"transferred", "roofline"}
    assert main(["explore", model, "--gpus", gpus, "--batch", "1,32"]) == 0
    assert f"launch: vllm serve {launched} " in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_infeasible_with_its_memory(capsys: Capture) -> None:
    model = ("predict", "llama3_70b", "--engine", "hf", "--batch", "64")
    assert main([*model, "--json"]) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["feasible"] is False
    assert "does not fit" in document["reason"]
    assert document["memory"]["fits"] is False
    assert document["memory"]["weights_bytes"] == pytest.approx(141e9, rel=0.01)
    assert err.startswith("energylens: infeasible: ")
    assert "--tp" in error_of(capsys, *model, code=3)


def test_a_degree_that_does_not_divide_is_infeasible_and_names_those_that_do(
    capsys: Capture,
) -> None:
    line = error_of(capsys, "predict", "qwen2_5_7b", "--engine", "hf", "--tp", "8", code=3)
    assert "tp=8" in line
    assert "1, 2, 4" in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("predict", "lama3_8b", "--engine", "hf"), "llama3_8b"),
        (("predict", "no/such/folder/x.yaml", "--engine", "hf"), "no/such/folder/x.yaml"),
        ((*MODEL, "--device", "h300"), "h200"),
        (("predict", "llama3_8b", "--engine", "hff"), "'hff'"),
        (
            ("predict", "llama3_8b", "--engine", "x"),
            "try `energylens predict llama3_8b --engine hf`",
        ),
        ((*MODEL, "--phase", "prefil"), "allowed: prefill, decode, request, all"),
        ((*MODEL, "--phase", ""), "allowed: prefill, decode, request, all"),
        ((*MODEL, "--mode", "graph"), "allowed: eager, cuda_graph, serving"),
        ((*MODEL, "--mode", "request=eager"), "allowed: prefill, decode"),
        ((*MODEL, "--without", "caps"), "--without: unknown value 'caps'; allowed: cap, host"),
        ((*MODEL, "--batch", "0"), "batch must be at least 1, not 0"),
        ((*MODEL, "--batch", "two"), "--batch"),
        ((*MODEL, "--context-len", "nan"), "--context-len"),
        ((*MODEL, "--power-limit", "-1"), "--power-limit: -1 found"),
        ((*MODEL, "--tp", "2", "--ep", "3"), "ep=3 must divide"),
        ((*MODEL, "--tp", "2", "--gpus", "4"), "--gpus is 4"),
        ((*MODEL, "--anchor", "nowhere.json"), "nowhere.json: no such anchor file"),
        ((*MODEL, "--bundle", "nowhere.json"), "nowhere.json"),
        ((*MODEL, "--bacth", "2"), "--batch"),
        (("predict",), "SPEC"),
        (("predcit",), "predict"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: Capture, arguments: tuple[str, ...], told: str
) -> None:
    line = error_of(capsys, *arguments)
    assert line.startswith("energylens: error: ")
    assert told.lower() in line.lower()


def test_broken_yaml_is_named_with_its_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("name: [unclosed\n", encoding="utf-8")
    assert str(path) in error_of(capsys, "predict", str(path), "--engine", "hf")


def test_a_damaged_bundle_is_refused(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    path.write_text('{"schema": "energylens/bundle/v1", "device": "h2', encoding="utf-8")
    assert f"{path}: not a bundle, or cut off" in error_of(capsys, *MODEL, "--bundle", str(path))


def test_an_anchor_file_is_used_and_named_in_the_result(capsys: Capture, anchor_file: Path) -> None:
    document = run_json(capsys, *MODEL, "--anchor", str(anchor_file))
    assert document["anchors"]["boards"][0]["board_uuid"] == "GPU-1"
    assert main([*MODEL, "--anchor", str(anchor_file)]) == 0
    assert "device h200 (anchored GPU-1), " in capsys.readouterr().out.splitlines()[-1]
    line = error_of(capsys, *MODEL, "--device", "a6000", "--anchor", str(anchor_file))
    assert "--anchor: board GPU-1 is of h200, but the device is a6000" in line


SHIPPED_ANCHORS = sorted((data_dir("calibration") / "anchors").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED_ANCHORS, ids=lambda path: path.stem)
def test_a_shipped_anchor_is_of_the_same_kind_as_the_bundles(capsys: Capture, path: Path) -> None:
    typical = run_json(capsys, *MODEL, "--phase", "decode")["decode"]["latency_s"]
    anchored = run_json(capsys, *MODEL, "--phase", "decode", "--anchor", str(path))
    # Hosts differ by up to 2.4 times; more is another load, not another host.
    assert 1 / 2.4 < anchored["decode"]["latency_s"] / typical < 2.4


def test_an_unexpected_failure_is_one_line_and_exit_code_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, name: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("energylens.predict.Catalogue.spec", fail)
    line = error_of(capsys, *MODEL, code=1)
    assert line == (
        "energylens: unexpected failure: RuntimeError: two lines; ENERGYLENS_DEBUG=1 shows where"
    )
    monkeypatch.setenv("ENERGYLENS_DEBUG", "1")
    assert main(list(MODEL)) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    command = f"{sys.executable} -m energylens predict llama3_8b --engine hf | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_whole_process_is_small_and_quick() -> None:
    """Processor time stands for wall time here: other work on the machine does not move it."""
    code = (
        "import os, sys; from pathlib import Path; from energylens.cli import main\n"
        f"code = main({[*MODEL, '--json']!r})\n"
        "peak = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "spent = os.times()\n"
        "print(peak, spent.user + spent.system, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    peak_mb, seconds = [], []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        peak_kb, spent_s = done.stderr.split()
        peak_mb.append(int(peak_kb) / 1e3)
        seconds.append(float(spent_s))
    assert max(peak_mb) <= 150
    assert min(seconds) <= 1.0
