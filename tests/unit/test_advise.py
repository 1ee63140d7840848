"""Advice: every change is what predicting it says, the best first, and doubt is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import energylens
from energylens.cli import main
from energylens.errors import SpecError
from energylens.predict import Catalogue
from energylens.results import Infeasible, Prediction
from energylens.results.search import Advice, Change
from energylens.spec.model import Overlap
from energylens.spec.system import Mode, Overlapping, Phase

pytestmark = pytest.mark.usefixtures("no_debug")

Capture = pytest.CaptureFixture[str]

CATALOGUE = Catalogue()


def advice(spec: Any = "llama3_8b", **rest: Any) -> Advice:
    result = energylens.advise(spec, catalogue=CATALOGUE, **rest)
    assert isinstance(result, Advice), result
    return result


def alone(spec: Any = "llama3_8b", **rest: Any) -> Prediction:
    result = energylens.predict(spec, catalogue=CATALOGUE, **rest)
    assert isinstance(result, Prediction), result
    return result


def change(found: Advice, label: str) -> Change:
    (one,) = (c for c in (*found.changes, *found.refused) if c.label == label)
    return one


LLAMA = CATALOGUE.spec("llama3_8b")
HERE: dict[str, Any] = {"tp": 2, "batch": 16, "prompt_len": 512, "gen_len": 64}


@pytest.mark.parametrize(
    ("label", "again"),
    [
        ("batch 32 (x 2)", {"batch": 32}),
        ("batch 8 (/ 2)", {"batch": 8}),
        ("replicas 2, batch 8", {"tp": 1, "replicas": 2, "batch": 8}),
        ("power limit 490 W", {"power_limit_w": 490.0}),
        ("engine hf", {"engine": "hf"}),
        ("device a6000", {"device": "a6000"}),
        ("mode eager", {"modes": dict.fromkeys((Phase.PREFILL, Phase.DECODE), Mode.EAGER)}),
        (
            "KV cache fp8",
            {"spec": replace(LLAMA, precision=replace(LLAMA.precision, kv_cache="fp8"))},
        ),
    ],
)
def test_a_change_is_what_predicting_it_says(label: str, again: dict[str, Any]) -> None:
    found = advice(**HERE)
    one, p, base = change(found, label), alone(**(HERE | again)), alone(**HERE)
    for name in ("energy_per_token_j", "energy_per_request_j", "tpot_s", "ttft_s", "ttlt_s"):
        then, now = getattr(p, name), getattr(base, name)
        assert one.values[name][0] == pytest.approx(then, rel=1e-9)
        saved, low, high = found.saved(one, name)
        assert saved == pytest.approx(now - then, rel=1e-6, abs=1e-9 * now)
        assert low <= saved <= high
    assert one.prediction is not None and one.prediction.source is p.source


def test_the_best_come_first_by_what_was_asked_for() -> None:
    for by in ("energy_per_request_j", "tpot_s"):
        found = advice(**HERE, by=by)
        then = [c.values[by][0] for c in found.changes]
        assert then == sorted(then, key=lambda v: float(f"{v:.9g}"))
        assert found.saved(found.changes[0], by)[0] > 0
        assert found.saved(found.changes[-1], by)[0] < 0


def test_a_change_within_the_intervals_is_not_certain() -> None:
    found = advice(**HERE)
    for c in found.changes:
        for name, (_, low, high) in c.values.items():
            _, base_low, base_high = found.values[name]
            assert found.certain(c, name) == (high < base_low or low > base_high)
    assert found.certain(change(found, "batch 8 (/ 2)"), "energy_per_token_j")
    assert not found.certain(change(found, "power limit 595 W"), "energy_per_token_j")


@pytest.mark.parametrize(
    ("spec", "words"),
    [("llama3_70b", {"tp": 4, "replicas": 2, "batch": 6}), ("qwen3_moe", {"tp": 4, "batch": 4})],
)
def test_layouts_keep_the_gpus_and_what_is_in_flight(spec: str, words: dict[str, Any]) -> None:
    found = advice(spec, **words)
    gpus, flight = found.base.parallelism.gpus, words["batch"] * words.get("replicas", 1)
    seen = {found.base.parallelism}
    for c in found.changes:
        if c.kind == "layout":
            assert c.prediction is not None
            p = c.prediction.parallelism
            assert p.gpus == gpus
            assert p.replicas * c.prediction.workload.batch == flight
            assert p not in seen
            seen.add(p)
    assert len(seen) > 2
    layouts = [c for c in (*found.changes, *found.refused) if c.kind == "layout"]
    if spec == "llama3_70b":
        (odd,) = (c for c in layouts if c.label == "replicas 8")
        assert odd.reason == "12 sequences in flight do not divide over 8 replicas"
        assert not any(" ep " in f" {c.label}" or " dp " in f" {c.label}" for c in layouts)
    else:
        assert any("ep 4" in c.label for c in layouts)


def test_what_cannot_be_made_says_why() -> None:
    on_a6000 = advice("llama3_8b", device="a6000", batch=1)
    assert change(on_a6000, "weights fp8").reason == "the datasheet of a6000 has no fp8"
    assert "does not fit jetson" in (change(on_a6000, "device jetson_orin_nano").reason or "")
    assert "no all-reduces" in (change(on_a6000, "overlap").reason or "")
    labels = [c.label for c in (*on_a6000.changes, *on_a6000.refused)]
    assert "power limit 255 W" in labels
    assert "batch 0 (/ 2)" not in labels
    assert len(labels) == len(set(labels))


def test_modes_and_fusions_are_those_of_the_engine() -> None:
    found = advice(engine="hf", batch=4)
    graph = change(found, "mode cuda_graph")
    p = alone(engine="hf", batch=4, modes={Phase.DECODE: Mode.CUDA_GRAPH})
    assert graph.values["tpot_s"][0] == p.tpot_s
    fused = [c.label for c in (*found.changes, *found.refused) if c.kind == "fusion"]
    assert fused == ["fuse q+k+v", "fuse gate+up"]
    assert found.saved(change(found, "fuse q+k+v"), "tpot_s")[0] > 0
    assert not [c for c in (*advice().changes, *advice().refused) if c.kind == "fusion"]


def test_layers_of_several_kinds_name_a_fusion_once() -> None:
    found = advice("gpt_oss_20b")
    labels = [c.label for c in (*found.changes, *found.refused)]
    assert len(labels) == len(set(labels))


def test_what_is_inside_a_larger_kernel_is_no_fusion_of_its_own() -> None:
    found = advice("qwen3_moe", tp=1, gen_len=8)  # vLLM runs whole experts as one kernel
    assert not [c for c in (*found.changes, *found.refused) if c.label == "fuse gate+up"]


def test_a_switch_that_changes_nothing_is_no_advice() -> None:
    beside = (Overlap(collective="o", beside="gate", sm=16, chunks=2),)
    found = advice(replace(LLAMA, overlap=beside), tp=2, prompt_len=64)
    assert change(found, "no overlap").reason == "it changes nothing that is priced"
    longer = advice(replace(LLAMA, overlap=beside), tp=2, prompt_len=2048)
    off = change(longer, "no overlap")
    assert off.values["ttft_s"][0] == alone(tp=2, prompt_len=2048).ttft_s != longer.base.ttft_s


def test_ways_to_overlap_are_compared_with_taking_turns() -> None:
    found = advice("llama3_70b", tp=2, batch=8, prompt_len=2048)
    tried = {c.label: c for c in found.changes if c.kind == "overlap"}
    assert set(tried) == {f"overlap {sm}x{n}" for sm in (8, 16) for n in (2, 4, 8)}
    for label, overlapped in tried.items():
        sm, chunks = map(int, label.removeprefix("overlap ").split("x"))
        overlap = Overlapping(sm=sm, chunks=chunks)
        p = alone("llama3_70b", tp=2, batch=8, prompt_len=2048, overlap=overlap)
        assert overlapped.values["ttft_s"][0] == p.ttft_s
    saved = {label: found.saved(c, "ttft_s")[0] for label, c in tried.items()}
    assert min(saved.values()) < 0 < max(saved.values())  # more is not always better
    now = advice("llama3_70b", tp=2, batch=8, prompt_len=2048, overlap=Overlapping(sm=8, chunks=2))
    assert change(now, "no overlap").values["ttft_s"][0] == found.base.ttft_s


def test_a_lower_power_limit_is_kept_and_only_lowered() -> None:
    found = advice(power_limit_w=400.0)
    watts = [c.label for c in (*found.changes, *found.refused) if c.kind == "power"]
    assert sorted(watts) == ["power limit 280 W", "power limit 385 W"]
    assert change(found, "batch 2 (x 2)").values["tpot_s"][0] == (
        alone(batch=2, power_limit_w=400.0).tpot_s
    )


def test_one_token_has_no_time_per_token() -> None:
    assert "tpot_s" not in advice(gen_len=1).values
    with pytest.raises(SpecError, match="--by tpot_s: there is none where gen_len is 1"):
        advice(gen_len=1, by="tpot_s")
    with pytest.raises(SpecError, match="--by: unknown value 'speed'; allowed: energy_per_token_j"):
        advice(by="speed")


# ---------------------------------------------------------------- the verb


def test_the_document_and_the_table_say_the_same(capsys: Capture) -> None:
    words = ["advise", "llama3_8b", "--tp", "2", "--batch", "16"]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["schema"] == "energylens/advice/v1"
    assert document["by"] == "energy_per_request_j"
    base = document["base"]["energy_per_request_j"]["value"]
    for c in document["changes"]:
        own = c["energy_per_request_j"]
        assert own["saved"] == pytest.approx(base - own["value"], abs=1e-9 * base)
        low, high = own["saved_interval"]
        assert own["certain"] == (low > 0 or high < 0)
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    start = next(i for i, line in enumerate(lines) if line.startswith(" as it is"))
    shown = lines[start + 1 : start + 1 + len(document["changes"])]
    for line, c in zip(shown, document["changes"], strict=True):
        assert line.startswith(f" {c['change']} ")
        assert ("not certain" in line) != c["energy_per_request_j"]["certain"]
    assert any(line.startswith("  device jetson_orin_nano: ") for line in lines)
    (note,) = (line for line in lines if "measured at a power limit of 700 W" in line)
    assert note.startswith("note on power limit ") and "batch" not in note


def test_a_deployment_that_cannot_run_exits_with_3(capsys: Capture) -> None:
    assert main(["advise", "llama3_70b", "--batch", "64", "--json"]) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["feasible"] is False and document["changes"] == []
    assert document["reason"] in err
    assert isinstance(energylens.advise("llama3_70b", batch=64), Infeasible)
    assert main(["advise", "llama3_8b", "--by", "speed"]) == 2
    assert "--by: unknown value 'speed'" in capsys.readouterr().err
