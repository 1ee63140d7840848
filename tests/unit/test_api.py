"""The library's front door: names in, values for pandas out, the same numbers as everywhere."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import energylens
from energylens import api
from energylens.anchors import load_anchors
from energylens.cli import main
from energylens.errors import OutOfRangeError, SpecError
from energylens.predict import Catalogue
from energylens.results import Infeasible, Prediction, Source
from energylens.results.search import Advice, Frontier
from energylens.spec.resources import data_dir
from energylens.spec.system import Mode, Phase

Capture = pytest.CaptureFixture[str]

CATALOGUE = Catalogue()


def predicted(spec: str = "llama3_8b", **rest: object) -> Prediction:
    result = energylens.predict(spec, **rest)
    assert isinstance(result, Prediction), result
    return result


@pytest.mark.parametrize("name", ["explore", "predict", "validate"])
def test_a_verb_is_a_function_and_a_module(name: str) -> None:
    module = importlib.import_module(f"energylens.{name}")
    assert getattr(energylens, name) is module
    assert callable(module)
    assert callable(getattr(module, name)), "the module's own function stays"
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        module()


@pytest.mark.parametrize(
    "code",
    [
        "import energylens; energylens.predict('llama3_8b')",
        "from energylens.predict import Catalogue; import energylens; "
        "energylens.predict('llama3_8b', catalogue=Catalogue())",
        "import energylens.predict as p; p.Catalogue(); p('llama3_8b')",
        "from energylens import predict; predict('llama3_8b')",
        "from energylens.explore.search import SearchSpace; import energylens; "
        "energylens.explore('llama3_8b', gpus=1, batch=1)",
    ],
)
def test_any_order_of_imports_works(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, energylens; print(*[m for m in sys.modules if 'energylens' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["energylens"]
    with pytest.raises(AttributeError, match="has no attribute 'nobody'"):
        _ = energylens.nobody  # type: ignore[attr-defined]


def test_predict_takes_names_files_and_values(capsys: Capture) -> None:
    spec = CATALOGUE.spec("llama3_8b")
    by_name = predicted(tp=2, batch=16, prompt_len=2048)
    by_value = predicted(
        spec,  # type: ignore[arg-type]
        device=CATALOGUE.device("h200"),
        engine=CATALOGUE.engine("vllm"),
        gpus=2,
        batch=16,
        prompt_len=2048,
        catalogue=CATALOGUE,
    )
    by_file = predicted(
        data_dir("specs") / "llama3_8b.yaml",  # type: ignore[arg-type]
        tp=2,
        batch=16,
        prompt_len=2048,
        bundles=sorted((data_dir("calibration") / "bundles" / "h200").glob("*.json")),
    )
    assert by_name == by_value == by_file
    words = "predict llama3_8b --tp 2 --batch 16 --prompt-len 2048 --json"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["request"]["energy_j"] == (
        by_name.phases["request"].energy_j
    )


def test_rows_of_a_prediction_make_a_frame() -> None:
    p = predicted(batch=4, tp=2, replicas=2)
    frame = pd.DataFrame(p.rows()).set_index("phase")
    assert list(frame.index) == ["prefill", "decode", "request"]
    assert frame.loc["decode", "energy_per_sequence_j"] == p.energy_per_token_j
    assert frame.loc["prefill", "latency_s"] == p.ttft_s
    assert (frame["energy_j_low"] < frame["energy_j"]).all()
    assert (frame["energy_j"] < frame["energy_j_high"]).all()
    assert set(frame["gpus"]) == {4}
    decode = pd.DataFrame(p.breakdown).groupby("phase")["energy_j"].sum()
    assert decode["decode"] == pytest.approx(frame.loc["decode", "energy_j"], rel=1e-9)


def test_phases_and_modes_may_be_words() -> None:
    p = predicted(engine="hf", phases=["decode"], modes={Phase.DECODE: Mode.CUDA_GRAPH})
    assert list(p.phases) == ["decode"]
    assert p.phases["decode"].latency_s < predicted(engine="hf").phases["decode"].latency_s


def test_rows_of_advice_make_a_frame() -> None:
    found = energylens.advise("llama3_8b", tp=2, batch=16)
    assert isinstance(found, Advice)
    frame = pd.DataFrame(found.rows())
    assert len(frame) == len(found.changes) + len(found.refused)
    assert frame["energy_per_request_j_saved"].dropna().is_monotonic_decreasing
    assert frame["reason"].notna().sum() == len(found.refused)


def test_explore_is_what_the_verb_shows(capsys: Capture) -> None:
    f = energylens.explore(
        "llama3_8b", gpus=2, batch=(1, 8), tp=1, pp=1, objectives="energy_per_token"
    )
    assert isinstance(f, Frontier)
    frame = pd.DataFrame(f.rows())
    assert list(frame["batch"]) == [1, 8]
    assert frame["tpot_s"].dtype == float
    words = "explore llama3_8b --gpus 2 --batch 1,8 --tp 1 --pp 1 --objective energy_per_token "
    assert main([*words.split(), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["configs"]
    assert [c["tpot_s"] for c in shown] == list(frame["tpot_s"])


def test_what_cannot_run_is_a_row_with_the_reason() -> None:
    for result in (
        energylens.predict("llama3_70b", batch=64),
        energylens.explore("llama3_70b", gpus=1, batch=64),
    ):
        assert isinstance(result, Infeasible)
        frame = pd.DataFrame(result.rows())
        assert not frame["feasible"].any()
        assert "does not fit h200" in frame["reason"][0]


def test_validate_takes_files_and_rows(tmp_path: Path) -> None:
    truth = tmp_path / "truth.csv"
    p = predicted(batch=8, phases=["decode"]).phases["decode"]
    truth.write_text(
        "record_id,device,engine,spec,phase,mode,batch,prompt_len,context_len,energy_j\n"
        f"a,h200,vllm,llama3_8b,decode,serving,8,1024,1088,{p.energy_j / 1.1!r}\n"
    )
    whole = energylens.validate(truth, by=["phase"])
    assert whole.rows[0].energy_j.error_pct == pytest.approx(10.0)
    frame = pd.DataFrame(whole.records())
    assert frame["energy_j_predicted"].tolist() == [p.energy_j]
    assert frame["tp"].tolist() == [1] and frame["latency_s_error_pct"].tolist() == [None]
    assert energylens.validate([row.measurement for row in whole.rows]).rows == whole.rows


def test_anchors_are_files_or_values_of_the_device(anchor_file: Path) -> None:
    anchors = load_anchors(anchor_file)
    assert predicted(anchors=anchors) == predicted(anchors=anchor_file)
    assert predicted(anchors=anchors) == predicted(anchors=[anchor_file])
    assert predicted(anchors=anchors) != predicted()
    with pytest.raises(SpecError, match="board GPU-1 is of h200, but the device is a6000"):
        energylens.predict("llama3_8b", device="a6000", anchors=anchors)


def test_replicas_are_linked_inside_and_not_to_each_other() -> None:
    # 16 GPUs have no known link, and the 8 of a replica have one.
    words = {"tp": 1, "dp": 8, "ep": 8, "batch": 16, "catalogue": CATALOGUE}
    one, two = predicted("qwen3_moe", **words), predicted("qwen3_moe", **words, replicas=2)
    assert {p: r.latency_s for p, r in one.phases.items()} == {
        p: r.latency_s for p, r in two.phases.items()
    }
    assert not [note for note in two.notes if "link" in note]


@pytest.mark.parametrize("watts", [0.0, -3.0, float("nan")])
def test_a_power_limit_is_a_number_above_0(watts: float) -> None:
    for verb in (energylens.predict, energylens.advise):
        with pytest.raises(OutOfRangeError, match="power_limit_w must be a number above 0"):
            verb("llama3_8b", power_limit_w=watts, catalogue=CATALOGUE)
    with pytest.raises(OutOfRangeError, match="power_limit_w must be a number above 0"):
        energylens.explore("llama3_8b", gpus=1, power_limit_w=watts, catalogue=CATALOGUE)


def test_a_law_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(SpecError, match="without: unknown law 'caps'; allowed: cap, host"):
        energylens.predict("llama3_8b", without=["caps"], catalogue=CATALOGUE)


def test_degrees_that_do_not_make_the_gpus_are_refused() -> None:
    assert api.parallelism(gpus=4).tp == 4
    with pytest.raises(SpecError, match="--gpus is 4, but replicas x dp x tp x pp = 2"):
        energylens.predict("llama3_8b", gpus=4, tp=2)
    with pytest.raises(OutOfRangeError, match="batches: every value must be at least 1"):
        energylens.explore("llama3_8b", gpus=1, batch=0)


def test_a_model_may_be_stored_otherwise() -> None:
    plain = energylens.predict("llama3_8b")
    narrow = energylens.predict("llama3_8b", precision={"weights": "fp8", "kv_cache": "fp8"})
    assert isinstance(plain, Prediction)
    assert isinstance(narrow, Prediction)
    # Half as wide, but for the 65 norms of 4096 values, which stay 16 bits.
    assert narrow.memory.weights_bytes == plain.memory.weights_bytes / 2 + 65 * 4096
    assert narrow.memory.kv_cache_bytes == pytest.approx(plain.memory.kv_cache_bytes / 2)
    assert narrow.source >= Source.TRANSFERRED
    assert any("no kernel was calibrated with weights in fp8" in note for note in narrow.notes)


def test_batches_may_come_from_an_iterator() -> None:
    def counts(batch: object) -> list[str]:
        front = energylens.explore("llama3_8b", gpus=[1, 2], batch=batch, top=1)
        assert isinstance(front, Frontier)
        return sorted(f"{c.pool.gpus} {c.id}" for c in front.configs)

    assert counts(iter([1, 8])) == counts([1, 8])
