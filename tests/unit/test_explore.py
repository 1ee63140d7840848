"""The search for a front: against predicting everything, its constraints, its errors, its verb."""

from __future__ import annotations

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import energylens
from energylens.cli import main
from energylens.cli.output import show
from energylens.errors import OutOfRangeError, SpecError
from energylens.explore import (
    OBJECTIVES,
    TABLE_ERROR,
    Constraints,
    Prices,
    SearchSpace,
    explore,
)
from energylens.explore.front import exact_values
from energylens.predict import Catalogue, predict
from energylens.report.frontier import frontier_plot, frontier_table
from energylens.report.launch import commands, launch_command
from energylens.results import Infeasible, Prediction
from energylens.results.search import Frontier
from energylens.spec.model import Overlap
from energylens.spec.resources import data_dir
from energylens.spec.system import Config, Overlapping, Parallelism, Workload

pytestmark = pytest.mark.usefixtures("no_debug")

Capture = pytest.CaptureFixture[str]

CATALOGUE = Catalogue()
H200 = CATALOGUE.device("h200")
ALL = 100_000
"""More exact predictions than any search here has configurations."""


def search(spec: str = "llama3_8b", engine: str = "vllm", **rest: object) -> Frontier | Infeasible:
    profile = CATALOGUE.engine(engine)
    gpus = rest.pop("gpus", 2)
    return explore(
        CATALOGUE.spec(spec),
        engine=profile,
        device=H200,
        gpus=gpus,  # type: ignore[arg-type]
        bundles=CATALOGUE.bundles(H200, profile),
        link=CATALOGUE.link(H200, 8),
        **rest,  # type: ignore[arg-type]
    )


def found(spec: str = "llama3_8b", engine: str = "vllm", **rest: object) -> Frontier:
    result = search(spec, engine, **rest)
    assert isinstance(result, Frontier), result
    return result


def exactly(frontier: Frontier, batch: int, parallelism: Parallelism) -> Prediction:
    engine = CATALOGUE.engine(frontier.engine)
    result = predict(
        CATALOGUE.spec(frontier.spec),
        engine=engine,
        device=H200,
        config=Config(parallelism=parallelism, microbatches=min(parallelism.pp, batch)),
        workload=Workload(batch=batch, prompt_len=frontier.prompt_len, gen_len=frontier.gen_len),
        bundles=CATALOGUE.bundles(H200, engine),
        link=CATALOGUE.link(H200, 8),
    )
    assert isinstance(result, Prediction), result
    return result


UNPRICED = [name for name in OBJECTIVES if not name.startswith(("cost", "carbon"))]

CASES = [
    ("llama3_8b", "vllm", 4, (1, 3, 40), 5000, 20),
    ("llama3_8b", "vllm", 2, (1, 2, 7, 8, 9, 33, 64), 1024, 128),
    ("llama3_8b", "vllm", 3, (1, 3, 17, 60, 61), 777, 3),
    ("llama3_8b", "hf", 2, (1, 8, 9), 512, 64),
    ("qwen3_moe", "vllm", 4, (5, 100), 1000, 200),
]


@pytest.mark.parametrize(("spec", "engine", "gpus", "batches", "prompt", "gen"), CASES)
def test_the_front_is_that_of_predicting_every_configuration(
    spec: str, engine: str, gpus: int, batches: tuple[int, ...], prompt: int, gen: int
) -> None:
    f = found(
        spec,
        engine,
        gpus=gpus,
        prompt_len=prompt,
        gen_len=gen,
        space=SearchSpace(batches=batches),
        objectives=("energy_per_request", "tpot", "throughput_per_gpu"),
        exact=ALL,
    )
    values = {
        c.id: {n: v for n, (v, _, _) in exact_values(exactly(f, c.batch, c.parallelism)).items()}
        for c in f.configs
    }
    costs = {
        # What differs by rounding only is equal.
        i: [float(f"{sign * v[n]:.9g}") for n, sign in (OBJECTIVES[o] for o in f.objectives)]
        for i, v in values.items()
    }

    def beaten(own: list[float]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, own, strict=True)) and other != own
            for other in costs.values()
        )

    front = {i for i, own in costs.items() if not beaten(own)}
    assert {c.id for c in f.front} == front
    assert all(c.exact for c in f.front)
    for c in f.configs:
        for name, value in values[c.id].items():
            assert c.values[name] == pytest.approx(value, rel=1e-12 if c.exact else TABLE_ERROR)
    ranked = sorted(f.front, key=lambda c: c.values["energy_per_request_j"])
    assert [c.id for c in f.front] == [c.id for c in ranked]


@pytest.mark.parametrize(
    ("spec", "prompt", "gen"), [("llama3_70b", 2048, 512), ("qwen3_moe", 333, 1500)]
)
def test_the_table_is_as_good_as_it_says(spec: str, prompt: int, gen: int) -> None:
    space = SearchSpace(batches=range(1, 200), tp=(2, 4), dp=(1,))
    f = found(spec, gpus=4, prompt_len=prompt, gen_len=gen, space=space, exact=1)
    rows = [c for c in f.configs if not c.exact]
    for c in rows[:: len(rows) // 8]:
        for name, (value, _, _) in exact_values(exactly(f, c.batch, c.parallelism)).items():
            assert c.values[name] == pytest.approx(value, rel=TABLE_ERROR), (c.id, name)


def test_the_table_knows_where_prefills_are_no_captured_graphs_any_more() -> None:
    """With so many steps that not each of them is priced: of up to 512 tokens, and of more."""
    space = SearchSpace(batches=range(1, 600), tp=(2,), pp=(2,))
    f = found(gpus=4, prompt_len=8, gen_len=20, space=space, exact=1)
    for c in (c for c in f.configs if 126 <= c.batch <= 130):
        for name, (value, _, _) in exact_values(exactly(f, c.batch, c.parallelism)).items():
            assert c.values[name] == pytest.approx(value, rel=TABLE_ERROR), (c.id, name)


@pytest.mark.parametrize("prompt", [333, 20000])
def test_the_table_is_as_good_for_pipelines(prompt: int) -> None:
    space = SearchSpace(batches=range(1, 70), tp=(1, 2), pp=(2, 3, 4))
    f = found(gpus=8, prompt_len=prompt, gen_len=30, space=space, exact=1)
    rows = [c for c in f.configs if not c.exact]
    for c in rows[:: len(rows) // 12]:
        for name, (value, _, _) in exact_values(exactly(f, c.batch, c.parallelism)).items():
            assert c.values[name] == pytest.approx(value, rel=TABLE_ERROR), (c.id, name)
    assert any("as many parts of the batch in flight" in note for note in f.notes)


def test_pipelines_of_any_degree_are_tried_and_launched(capsys: Capture) -> None:
    f = found("llama3_70b", gpus=8, space=SearchSpace(batches=(16,), tp=(2,)))
    assert {c.parallelism.pp: (c.parallelism.replicas, c.unused_gpus) for c in f.configs} == {
        1: (4, 0),
        2: (2, 0),
        3: (1, 2),
        4: (1, 0),
    }
    deep = next(c for c in f.configs if c.parallelism.pp == 4)
    assert deep.id == "tp2-ep1-dp1-pp4-b16"
    command = launch_command(f, deep)
    assert command is not None
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 4 --max-num-seqs 16 " in command
    words = ["explore", "llama3_70b", "--gpus", "8", "--batch", "16", "--tp", "2", "--pp", "4"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    again = document["picks"][0]["predict"].split()[1:]
    assert "--pp 4 --microbatches 4 --batch 16" in " ".join(again)
    assert main([*again, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["tpot_s"] == document["configs"][0]["tpot_s"]


def test_an_engine_without_pipelines_has_none() -> None:
    f = found(engine="hf", gpus=8, space=SearchSpace(batches=(1,)))
    assert {c.parallelism.pp for c in f.configs} == {1}
    with pytest.raises(SpecError, match="no layout asked for fits on 2 GPUs"):
        search(space=SearchSpace(pp=(4,)))


def test_a_limited_search_knows_the_best_exactly_and_the_rest_from_the_table() -> None:
    space = SearchSpace(batches=range(1, 33))
    f, whole = found(space=space, exact=6), found(space=space, exact=ALL)
    assert 6 <= sum(c.exact for c in f.configs) <= 12
    assert len(f.front) > 6
    for name in f.objectives:
        value = OBJECTIVES[name][0]
        best, truth = f.best(name), whole.best(name)
        assert best.exact and best.on_frontier
        assert best.values[value] == pytest.approx(truth.values[value], rel=TABLE_ERROR)
        low, high = best.intervals[value]
        assert low < best.values[value] < high
        for c in f.configs:
            overlaps = c.exact and c.intervals[value][0] <= high and low <= c.intervals[value][1]
            assert (name in c.tied_on) == (overlaps and c is not best)


def test_counts_add_up_and_say_why() -> None:
    f = found(
        "llama3_70b",
        gpus=4,
        prompt_len=2048,
        gen_len=512,
        space=SearchSpace(batches=(1, 4, 8, 400), tp=(1, 2, 3, 4, 8), pp=(1,)),
        constraints=Constraints(max_tpot_s=0.03),
    )
    counts = f.counts
    assert counts.tried == 20
    assert counts.infeasible == sum(counts.infeasible_by.values()) == 20 - len(f.configs)
    assert counts.filtered == sum(bool(c.filtered_by) for c in f.configs)
    assert counts.filtered_by == {"max_tpot_s": counts.filtered}
    reasons = " / ".join(counts.infeasible_by)
    assert "tp=3 does not divide" in reasons
    assert "tp=8, dp=1: more than 4 GPUs" in reasons
    assert "memory: tp=1, ep=1, dp=1 at batches above 4" in reasons
    assert all(c.values["tpot_s"] <= 0.03 for c in f.front)
    assert all(c.rank is None and not c.on_frontier for c in f.configs if c.filtered_by)


def test_replicas_fill_the_gpus_and_the_rest_is_not_counted() -> None:
    f = found(
        gpus=7, space=SearchSpace(batches=(4,), pp=(1,)), exact=ALL, objectives=tuple(UNPRICED)
    )
    by_tp = {c.parallelism.tp: c for c in f.configs}
    assert {tp: (c.parallelism.replicas, c.unused_gpus) for tp, c in by_tp.items()} == {
        1: (7, 0),
        2: (3, 1),
        4: (1, 3),
    }
    for c in f.configs:
        v = c.values
        assert v["gpus"] == c.parallelism.gpus == 7 - c.unused_gpus
        assert v["throughput_tokens_s"] == pytest.approx(
            4 * c.parallelism.replicas / v["tpot_s"], rel=1e-9
        )


def test_nothing_that_meets_names_the_closest_and_what_it_misses() -> None:
    space = SearchSpace(batches=(1, 8))
    result = search(space=space, constraints=Constraints(max_tpot_s=1e-4, max_power_w=9e3))
    assert isinstance(result, Infeasible)
    assert "the closest is tp=2, ep=1, dp=1, replicas=1 at batch 1" in result.reason
    assert "misses --max-tpot-ms 0.1 with " in result.reason
    assert "--max-w" not in result.reason


def test_nothing_that_fits_says_how_much_is_missing() -> None:
    result = search("llama3_70b", gpus=1, space=SearchSpace(batches=(64, 128)))
    assert isinstance(result, Infeasible)
    assert "GB more than the 150.8 GB of each GPU at batch 64" in result.reason
    assert result.memory is not None and not result.memory.fits


def test_a_power_limit_that_cannot_be_held_is_a_reason() -> None:
    result = search(power_limit_w=135.0, space=SearchSpace(batches=(256,), tp=(1,)))
    assert isinstance(result, Infeasible)
    assert result.reason.count("cannot hold") == 1, "layouts with the same reason say it once"


def test_a_power_limit_that_few_or_none_can_hold_still_ends_in_an_answer(capsys: Capture) -> None:
    result = search(power_limit_w=135.0, gpus=1, space=SearchSpace(batches=range(1, 65)), exact=2)
    assert isinstance(result, Infeasible)
    start = "no layout of llama3_8b can run on 1 GPUs: h200 cannot hold a power limit of 135 W: "
    assert result.reason.startswith(start)
    words = ["explore", "llama3_8b", "--gpus", "1", "--power-limit", "150", "--batch", "1..64"]
    assert main([*words, "--top", "2"]) == 3
    assert "cannot hold" in capsys.readouterr().err


def test_rows_that_cannot_hold_a_power_limit_are_refused_one_by_one() -> None:
    # Prefills of large batches draw more than small ones, whatever the clock.
    f = found(power_limit_w=250.0, space=SearchSpace(batches=range(1, 65), tp=(1,), pp=(1,)))
    refused = sum(n for reason, n in f.counts.infeasible_by.items() if "cannot hold" in reason)
    assert 0 < refused == f.counts.infeasible < 64
    assert f.counts.tried == 64 == len(f.configs) + refused
    for batch in (min(c.batch for c in f.configs), max(c.batch for c in f.configs)):
        engine = CATALOGUE.engine("vllm")
        p = predict(
            CATALOGUE.spec("llama3_8b"),
            engine=engine,
            device=H200,
            config=Config(power_limit_w=250.0),
            workload=Workload(batch=batch),
            bundles=CATALOGUE.bundles(H200, engine),
        )
        assert isinstance(p, Prediction)


def test_fewer_replicas_where_gpus_or_power_count() -> None:
    space = SearchSpace(batches=(16, 64), tp=(1, 2), pp=(1,))
    f = found(gpus=4, space=space, objectives=("gpus", "energy_per_token"), exact=ALL)
    best = f.best("gpus")
    assert best.parallelism.replicas == best.values["gpus"] == 1
    assert {c.parallelism.replicas for c in f.configs if c.parallelism.tp == 1} == {1, 2, 3, 4}
    assert {c.id for c in f.configs} >= {"tp1-ep1-dp1-x1-b64", "tp1-ep1-dp1-b64"}
    # Each replica is what it is alone, and there are as many tokens as replicas make.
    one, four = (
        next(c for c in f.configs if c.id == f"tp1-ep1-dp1{x}-b64").values for x in ("-x1", "")
    )
    assert one["energy_per_token_j"] == pytest.approx(four["energy_per_token_j"])
    for name in ("total_power_w", "throughput_tokens_s", "gpus"):
        assert 4 * one[name] == pytest.approx(four[name])
    limits = Constraints(max_power_w=1500.0)
    g = found(gpus=4, space=space, constraints=limits, exact=ALL)
    kept = {c.parallelism.tp: c for c in g.configs if c.batch == 64 and not c.filtered_by}
    assert {tp: c.parallelism.replicas for tp, c in kept.items()} == {1: 2, 2: 1}
    assert all(c.values["total_power_w"] <= 1500 for c in kept.values())


def test_the_best_of_equal_ones_is_on_the_front() -> None:
    # Steps that wait for the host take the same time at any small batch, but for rounding.
    f = found("llama3_8b", "hf", space=SearchSpace(batches=range(1, 33), tp=(1,)), exact=4)
    for name in f.objectives:
        assert f.best(name).on_frontier and f.best(name).dominated_by is None
    assert f.best("tpot").batch > 16
    assert len(f.front) < 4


def test_a_largest_batch_that_memory_sets_is_no_hint_to_go_further(capsys: Capture) -> None:
    words = ["explore", "llama3_2_1b", "--gpus", "1", "--device", "jetson_orin_nano"]
    assert main(words) == 0
    assert "can go further" not in capsys.readouterr().out
    assert main([*words, "--batch", "1..4"]) == 0
    assert "can go further" in capsys.readouterr().out


def test_a_launch_command_quotes_what_a_spec_says_of_its_source() -> None:
    f = replace(found(gpus=1, space=SearchSpace(batches=(1,))), source_id="a;b config.json")
    command = launch_command(f, f.front[0])
    assert command is not None and command.startswith("vllm serve 'a;b' --tensor-parallel-size 1 ")


def test_a_front_of_other_objectives_is_no_line_in_the_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    drawn: list[str] = []
    monkeypatch.setattr(axes.Axes, "plot", lambda *_, **rest: drawn.append(rest["label"]))
    space = SearchSpace(batches=(1, 8))
    frontier_plot(found(objectives=("ttft", "throughput"), space=space), tmp_path / "a.png")
    assert not drawn
    frontier_plot(found(space=space), tmp_path / "b.png")
    assert drawn == ["front"]


def test_costs_are_gpu_time_and_energy_at_their_prices() -> None:
    prices = Prices(per_gpu_hour=3.0, per_kwh=0.25, pue=1.2, carbon_g_per_kwh=400.0)
    f = found(
        gpus=3,
        space=SearchSpace(batches=(1, 7, 40)),
        objectives=("cost_per_token", "carbon_per_request", "cost_per_request"),
        prices=prices,
        exact=3,
    )
    assert {c.exact for c in f.configs} == {True, False}
    for c in f.configs:
        p, sequences = exactly(f, c.batch, c.parallelism), c.batch * c.parallelism.replicas
        assert p.tpot_s and p.ttlt_s and p.energy_per_token_j and p.energy_per_request_j
        gpu_hours = [p.parallelism.gpus * s / 3600 / sequences for s in (p.tpot_s, p.ttlt_s)]
        kwh = [1.2 * j / 3.6e6 for j in (p.energy_per_token_j, p.energy_per_request_j)]
        expected = {
            "cost_per_million_tokens": 1e6 * (3.0 * gpu_hours[0] + 0.25 * kwh[0]),
            "cost_per_request": 3.0 * gpu_hours[1] + 0.25 * kwh[1],
            "carbon_per_million_tokens_g": 1e6 * 400.0 * kwh[0],
            "carbon_per_request_g": 400.0 * kwh[1],
        }
        for name, value in expected.items():
            assert c.values[name] == pytest.approx(value, rel=1e-9 if c.exact else TABLE_ERROR)
            if c.exact:
                low, high = c.intervals[name]
                assert low < value < high
    best = min(f.configs, key=lambda c: c.values["cost_per_million_tokens"])
    assert f.best("cost_per_token") is best


def test_power_alone_ranks_as_energy_does() -> None:
    space, objectives = SearchSpace(batches=(1, 8, 64)), ("energy_per_token", "energy_per_request")
    costs = tuple(name.replace("energy", "cost") for name in objectives)
    by_energy = found(space=space, objectives=objectives, exact=ALL)
    by_cost = found(space=space, objectives=costs, prices=Prices(per_kwh=0.3), exact=ALL)
    assert [c.id for c in by_cost.front] == [c.id for c in by_energy.front]
    assert not any(name.startswith("carbon") for name in by_cost.configs[0].values)


def test_one_token_needs_other_objectives() -> None:
    with pytest.raises(SpecError, match="energy_per_request and ttft"):
        search(gen_len=1)
    f = found(
        gen_len=1,
        objectives=("energy_per_prompt", "ttft"),
        space=SearchSpace(batches=(1, 8)),
    )
    assert "tpot_s" not in f.front[0].values


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"objectives": ("speed",)}, SpecError, "unknown 'speed'; allowed: energy_per_token"),
        ({"objectives": ()}, SpecError, "none given"),
        ({"gpus": 0}, OutOfRangeError, "gpus must be at least 1"),
        ({"exact": 0}, OutOfRangeError, "exact must be at least 1"),
        ({"power_limit_w": 1e4}, SpecError, "allows up to 700 W"),
        ({"space": SearchSpace(tp=(4, 8))}, SpecError, "no layout asked for fits on 2 GPUs"),
        ({"constraints": Constraints(max_ttft_s=-1.0)}, OutOfRangeError, "max_ttft_s"),
        ({"objectives": ("cost_per_token",)}, SpecError, "cost_per_token needs a price"),
        ({"objectives": ("carbon_per_request",)}, SpecError, "needs --carbon-g-per-kwh"),
    ],
)
def test_what_cannot_be_is_refused(
    wrong: dict[str, object], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        search(**wrong)
    with pytest.raises(OutOfRangeError, match="batches: every value must be at least 1, not 0"):
        SearchSpace(batches=(0, 1))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"per_gpu_hour": 0.0}, "per_gpu_hour must be a number above 0, not 0"),
        ({"per_kwh": float("inf")}, "per_kwh must be a number above 0, not inf"),
        ({"pue": 0.9, "per_kwh": 1.0}, "pue must be a number of at least 1, not 0.9"),
        ({"pue": 1.1, "per_gpu_hour": 2.0}, "pue multiplies the price and the carbon"),
    ],
)
def test_prices_that_cannot_be_are_refused(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Prices(**wrong)


def test_rows_are_flat_and_alike() -> None:
    rows = found(space=SearchSpace(batches=(1, 8))).rows()
    assert len({tuple(row) for row in rows}) == 1
    assert all(isinstance(v, str | int | float | None) for row in rows for v in row.values())


# ---------------------------------------------------------------- several devices


def test_several_devices_share_one_front_at_the_same_limits() -> None:
    words: dict[str, Any] = {"batch": (1, 3, 8, 40), "max_tpot_s": 0.030, "top": ALL}
    both = energylens.explore("llama3_8b", device=["h200", "a6000"], gpus=[1, 4], **words)
    large = energylens.explore("llama3_8b", device="h200", gpus=1, **words)
    small = energylens.explore("llama3_8b", device="a6000", gpus=4, **words)
    assert isinstance(both, Frontier)
    assert isinstance(large, Frontier) and isinstance(small, Frontier)
    assert [(pool.device, pool.gpus) for pool in both.pools] == [("h200", 1), ("a6000", 4)]
    own = [c for f in (large, small) for c in f.configs]
    assert [c.values for c in both.configs] == [c.values for c in own]
    assert len({c.id for c in both.configs}) == len(own)
    assert both.counts.tried == large.counts.tried + small.counts.tried
    costs = {
        c.id: (c.values["energy_per_token_j"], c.values["tpot_s"])
        for c in both.configs
        if not c.filtered_by
    }
    front = {
        i
        for i, (j, s) in costs.items()
        if not any(a <= j and b <= s and (a, b) != (j, s) for a, b in costs.values())
    }
    assert {c.id for c in both.front} == front
    assert {c.pool.device for c in both.front} == {"h200"}
    best = min(costs, key=lambda i: costs[i])
    assert both.best("energy_per_token").id == best
    dominated = [c for c in both.configs if c.pool.device == "a6000" and not c.filtered_by]
    assert dominated and all((c.dominated_by or "").startswith("1xh200-") for c in dominated)


def test_a_device_that_cannot_is_left_out_and_named() -> None:
    found_both = energylens.explore("llama3_70b", device=["h200", "a6000"], gpus=2, batch=(1, 64))
    assert isinstance(found_both, Frontier)
    assert {c.pool.device for c in found_both.configs} == {"h200"}
    assert any(
        note.startswith("2 x a6000 is left out: llama3_70b does not fit a6000")
        for note in found_both.notes
    )
    assert len(found_both.notes) == len(set(found_both.notes))
    neither = energylens.explore("llama3_70b", device=["h200", "a6000"], gpus=1, batch=64)
    assert isinstance(neither, Infeasible)
    assert "1 x h200: llama3_70b does not fit h200" in neither.reason
    assert "1 x a6000: llama3_70b does not fit a6000" in neither.reason


def test_devices_and_numbers_of_gpus_go_in_pairs(capsys: Capture) -> None:
    words = ["explore", "llama3_8b", "--batch", "1,8", "--tp", "1"]
    assert main([*words, "--device", "h200,a6000", "--gpus", "1,4"]) == 0
    out = capsys.readouterr().out
    assert "llama3_8b on 1 x h200 or 4 x a6000, engine vllm" in out
    assert "4 x a6000, best energy_per_token: tp1 x 4, batch 8, rank " in out
    assert main([*words, "--device", "a6000", "--gpus", "1,2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"] is None
    assert document["pools"] == [{"device": "a6000", "gpus": n} for n in (1, 2)]
    for pick in document["picks"]:
        assert "--device a6000" in pick["predict"]
    assert len(document["notes"]) == len(set(document["notes"]))
    assert not any(note.startswith("1 x a6000, 2 x a6000:") for note in document["notes"])
    assert main([*words, "--device", "h200,a6000", "--gpus", "1,2,4"]) == 2
    assert "--gpus names 3 numbers and --device 2 devices" in capsys.readouterr().err
    board = str(next((data_dir("calibration") / "anchors").glob("h200-*.json")))
    both = [*words, "--device", "h200,a6000", "--gpus", "1", "--anchor", board, "--json"]
    for limit, has in ((["--max-w", "310"], False), (["--max-tpot-ms", "9"], True)):
        assert main([*both, *limit]) == 0
        pick = json.loads(capsys.readouterr().out)["picks"][0]
        assert (board in pick["predict"]) == has, "only a board's own device takes its anchor"
        assert main(shlex.split(pick["predict"])[1:]) == 0
        capsys.readouterr()
    assert main([*words, "--device", "h200,h200", "--gpus", "1"]) == 2
    assert "1 x h200 is named 2 times" in capsys.readouterr().err


def test_an_anchor_file_is_read_once(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(map(str, (data_dir("calibration") / "anchors").glob("h200-*.json")))[:2]
    read, read_text = list[str](), Path.read_text

    def noted(path: Path, *arguments: str, **more: str) -> str:
        read.append(str(path))
        return read_text(path, *arguments, **more)

    monkeypatch.setattr(Path, "read_text", noted)
    words = ["explore", "llama3_8b", "--batch", "1,8", "--tp", "1", "--json"]
    words += ["--device", "h200,a6000", "--gpus", "1"]
    assert main([*words, *(word for path in files for word in ("--anchor", path))]) == 0
    assert sorted(path for path in read if path in files) == files
    pick = json.loads(capsys.readouterr().out)["picks"][0]
    assert all(f"--anchor {path}" in pick["predict"] for path in files)


# ---------------------------------------------------------------- overlaps

WAYS = (Overlapping(), Overlapping(sm=16, chunks=4), Overlapping(sm=16, chunks=8))


def test_what_no_overlap_changes_is_not_ordered_by_what_is_exact() -> None:
    f = found(space=SearchSpace(batches=range(1, 33), tp=(2,), overlap=WAYS), exact=6)
    assert 0 < sum(c.exact for c in f.configs) < len(f.configs) / 3
    for batch in range(1, 33):  # tokens of a decode step: too few for a chunk
        plain, *others = (c for c in f.configs if c.batch == batch)
        assert plain.parallelism.overlap is None and len(others) == 2
        for c in others:
            for name in ("tpot_s", "energy_per_token_j"):
                assert c.values[name] == pytest.approx(plain.values[name], rel=1e-9)
            assert c.on_frontier == plain.on_frontier
            assert c.values["ttft_s"] != plain.values["ttft_s"]


def test_a_switched_off_overlap_of_the_spec_is_told_from_its_own(capsys: Capture) -> None:
    spec = CATALOGUE.spec("llama3_8b")
    own = replace(spec, overlap=(Overlap(collective="all_reduce", beside="down", sm=16),))
    f = energylens.explore(own, gpus=2, tp=2, batch=(1,), overlap=(None, *WAYS[:2]))
    assert isinstance(f, Frontier)
    assert [row["overlap"] for row in f.rows()] == [None, "off", "16x4"]
    show(frontier_table(f, lambda device: "energylens predict"))
    lines = capsys.readouterr().out.splitlines()
    columns = [line.split()[7] for line in lines if re.match(r" +\d+ +2 +1 ", line)]
    assert set(columns) == {"-", "off", "16x4"}


# ---------------------------------------------------------------- the verb

SMALL = ["explore", "llama3_8b", "--gpus", "2", "--batch", "1..4,16"]


def test_the_document_holds_every_configuration(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    assert main([*SMALL, "--max-tpot-ms", "6", "--json", "--csv", str(path)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["schema"] == "energylens/frontier/v1"
    assert document["objectives"] == ["energy_per_token", "tpot"]
    assert document["constraints"] == {"max_tpot_s": 0.006}
    configs = {c["id"]: c for c in document["configs"]}
    counts = document["counts"]
    assert counts["tried"] == 15 == len(configs) + counts["infeasible"]
    for c in configs.values():
        places = [c["on_frontier"], c["dominated_by"] is not None, bool(c["filtered_by"])]
        assert sum(places) == 1, c
        assert (c["intervals"] is not None) == c["exact"] == (c["memory"] is not None)
        if c["dominated_by"]:
            assert configs[c["dominated_by"]]["on_frontier"]
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list(configs)
    assert [float(row["tpot_s"]) for row in rows] == [c["tpot_s"] for c in configs.values()]


def test_a_missed_constraint_is_named_as_it_was_given(capsys: Capture) -> None:
    assert main([*SMALL, "--max-tpot-ms", "5.2", "--max-w", "1300"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  \d+ miss --max-tpot-ms 5.2$", out, re.M)
    assert "max_tpot_s" not in out


@pytest.mark.parametrize("missed", [["--max-ttft-ms", "1"], ["--batch", "60000"]])
def test_a_document_of_nothing_has_every_key(missed: list[str], capsys: Capture) -> None:
    assert main([*SMALL, "--json"]) == 0
    keys = list(json.loads(capsys.readouterr().out))
    assert main([*SMALL, "--price-per-kwh", "0.2", *missed, "--json"]) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert list(document) == keys
    assert document["reason"] in err
    assert document["objectives"] == ["energy_per_token", "tpot"]
    assert document["prices"] == {"per_kwh": 0.2}
    counts, fitting = document["counts"], missed[0] == "--max-ttft-ms"
    assert document["constraints"] == ({"max_ttft_s": 0.001} if fitting else {})
    assert counts["tried"] == counts["filtered"] + counts["infeasible"] == (15 if fitting else 3)
    assert counts["filtered_by"] == ({"max_ttft_s": 15} if fitting else {})
    assert sum(counts["infeasible_by"].values()) == counts["infeasible"] == (0 if fitting else 3)


def test_prices_reach_the_table_and_the_files(capsys: Capture, tmp_path: Path) -> None:
    priced = [*SMALL, "--price-per-gpu-hour", "2", "--carbon-g-per-kwh", "300"]
    csv_file = tmp_path / "all.csv"
    objectives = ["--objective", "cost_per_request,carbon_per_token"]
    assert main([*priced, *objectives, "--json", "--csv", str(csv_file)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prices"] == {"per_gpu_hour": 2.0, "carbon_g_per_kwh": 300.0}
    assert [pick["objective"] for pick in document["picks"]] == document["objectives"]
    assert main(priced) == 0
    out = capsys.readouterr().out
    assert "cost of" in out and "CO2e of" in out
    assert "prices: per gpu hour 2, carbon g per kwh 300" in out
    with csv_file.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    name = "cost_per_million_tokens"
    assert [float(r[name]) for r in rows] == [c[name] for c in document["configs"]]


def test_the_line_that_reproduces_a_number_does(capsys: Capture) -> None:
    arguments = ["explore", "qwen3_moe", "--gpus", "4", "--batch", "24", "--dp", "2", "--ep", "4"]
    assert main([*arguments, "--tp", "2", "--routing", "zipf:1.1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    pick, (config,) = document["picks"][0], document["configs"]
    assert pick["launch"] == (
        "vllm serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 --data-parallel-size 2 "
        "--enable-expert-parallel --max-num-seqs 12 --max-cudagraph-capture-size 512 "
        "--max-num-batched-tokens 16384 --max-model-len 1152"
    )
    program, *again = pick["predict"].split()
    assert program == "energylens"
    assert main([*again, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["energy_per_token_j"] == config["energy_per_token_j"]
    assert predicted["tpot_s"] == config["tpot_s"]


def test_experts_over_some_workers_have_no_launch_command(capsys: Capture) -> None:
    arguments = ["explore", "qwen3_moe", "--gpus", "4", "--batch", "4", "--tp", "4", "--ep", "2"]
    assert main(arguments) == 0
    assert "launch: none, vllm spreads experts over all" in capsys.readouterr().out
    assert main(["explore", "llama3_8b", "--gpus", "1", "--batch", "4", "--engine", "hf"]) == 0
    assert "launch: no server of engine hf is known" in capsys.readouterr().out


def command(found_config: dict[str, int], name: str, batch: int = 24) -> str | None:
    """A command of a layout of qwen3_moe."""
    degrees = {"tp": 1, "ep": 1, "dp": 1, "pp": 1} | found_config
    gpus = degrees["tp"] * degrees["dp"] * degrees["pp"]
    space = SearchSpace(batches=(batch,), **{k: (v,) for k, v in degrees.items()})
    f = found("qwen3_moe", gpus=gpus, prompt_len=1000, gen_len=200, space=space)
    return commands(f, f.front[0], lambda device: f"predict {device}")[name]


def test_other_servers_get_the_same_layout_in_their_own_words() -> None:
    sglang = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B "
    limits = "--chunked-prefill-size 16384 --context-length 1200"
    assert command({"tp": 2}, "sglang") == (
        f"{sglang}--tp-size 2 --max-running-requests 24 --cuda-graph-max-bs 24 {limits}"
    )
    assert command({"tp": 2, "dp": 2, "ep": 4}, "sglang") == (
        f"{sglang}--tp-size 4 --dp-size 2 --enable-dp-attention --ep-size 4 "
        f"--max-running-requests 24 --cuda-graph-max-bs 12 {limits}"
    )
    trtllm = "trtllm-serve Qwen/Qwen3-30B-A3B "
    assert command({"tp": 2, "ep": 2, "pp": 2}, "trtllm") == (
        f"{trtllm}--tp_size 2 --ep_size 2 --pp_size 2 --max_batch_size 24 --max_num_tokens 16384 "
        "--max_seq_len 1200"
    )
    assert command({"dp": 2, "ep": 2}, "trtllm") == (
        f"{trtllm}--tp_size 2 --ep_size 2 --max_batch_size 12 --max_num_tokens 16384 "
        "--max_seq_len 1200 --extra_llm_api_options <(echo 'enable_attention_dp: true')"
    )
    assert command({"tp": 2, "dp": 2}, "trtllm") is None


def test_a_pick_says_what_would_falsify_it() -> None:
    assert command({"tp": 2}, "bench") == (
        "vllm bench serve --model Qwen/Qwen3-30B-A3B --dataset-name random --random-input-len 1000 "
        "--random-output-len 200 --ignore-eos --num-prompts 24 --max-concurrency 24 "
        "--percentile-metrics ttft,tpot,e2el"
    )
    assert command({"tp": 2, "ep": 2}, "profile") == (
        "energylens profile Qwen/Qwen3-30B-A3B --engine vllm --tp 2 --ep 2 --batch-size 24 "
        "--prompt-len 1000 --gen-len 200 --context-len 1100 --ttft --tpot --ttlt --energy"
    )
    assert command({"dp": 2}, "profile") is None


@pytest.mark.parametrize("columns", ["60", "200"])
def test_the_table_says_what_to_choose_and_what_it_costs(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*SMALL, "--max-tpot-ms", "6"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    lines = out.splitlines()
    launch = next(line for line in lines if line.startswith("launch: "))
    assert launch.startswith("launch: vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size ")
    assert any(line.startswith("check: energylens predict llama3_8b ") for line in lines)
    for start in ("sglang, not calibrated: python -m sglang.", "trtllm, not calibrated: trtllm-s"):
        assert any(line.startswith(start) for line in lines)
    assert any(line.startswith("measure energy, too: energylens profile ") for line in lines)
    assert "best energy_per_token" in out
    assert re.search(r"the best tpot \(tp2-ep1-dp1-b\d+\) costs", " ".join(out.split()))
    assert "15 configurations tried" in out


def test_the_plot_is_an_image(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "front.png"
    assert main([*SMALL, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["front.png"]


def test_a_missing_plotting_library_is_told_before_the_work(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("no", name="matplotlib")

    monkeypatch.setattr("energylens.report.frontier.figure", missing)
    assert main([*SMALL, "--plot", str(tmp_path / "a.png")]) == 2
    assert "matplotlib is not installed; pip install '.[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--batch", "0"], "--batch: '0' found, and must be a number above 0 or FIRST..LAST"),
        (["--batch", "9..3"], "--batch: '9..3' found"),
        (["--batch", "1..999999999999"], "--batch: 999999999999 found, and must be at most 65536"),
        (["--batch", ","], "--batch: ',' names no number"),
        (["--tp", "two"], "--tp: 'two' found"),
        (["--objective", "energy_per_token,speed"], "unknown 'speed'; allowed: energy_per_token"),
        (["--max-tpot-ms", "0"], "--max-tpot-ms: 0 found, and must be a number above 0"),
        (["--plot", "front.txt"], "--plot: front.txt found, and must end in .png, .svg, .pdf"),
        (["--plot", "front.png", "--gen-len", "1"], "--plot is about time per token"),
        (["--csv", "/dev/null/no/a.csv"], "--csv: /dev/null/no/a.csv cannot be written"),
        (["--tp", "4"], "no layout asked for fits on 2 GPUs"),
        (["--engine", "nobody"], "unknown engine"),
        (["--top", "0"], "--top: 0 found, and must be at least 1"),
        (["--gen-len", "0"], "--gen-len: 0 found, and must be at least 1"),
        (["--prompt-len", "-3"], "--prompt-len: -3 found"),
        (["--gen-len", "1"], "--gen-len 1: no token follows the first"),
        (["--price-per-kwh", "-1"], "--price-per-kwh: -1 found"),
        (["--objective", "cost_per_token"], "--price-per-gpu-hour, --price-per-kwh or both"),
        (["--pue", "1.3"], "--price-per-kwh or --carbon-g-per-kwh"),
    ],
)
def test_bad_input_is_one_line_before_the_work(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, extra: list[str], told: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("worked before it complained")

    monkeypatch.setattr("energylens.explore.search.predict", refuse)
    assert main([*SMALL, *extra]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_nothing_left_exits_with_3_and_a_document(capsys: Capture) -> None:
    assert main([*SMALL, "--min-throughput", "1e9", "--json"]) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["feasible"] is False
    assert document["configs"] == []
    assert document["reason"] in err
    assert "misses --min-throughput 1e+09 with " in document["reason"]


def test_an_engine_without_limits_is_searched_too() -> None:
    engine = replace(CATALOGUE.engine("vllm"), serving=None)
    f = explore(
        CATALOGUE.spec("llama3_8b"),
        engine=engine,
        device=H200,
        gpus=1,
        space=SearchSpace(batches=(1, 40)),
    )
    assert isinstance(f, Frontier)
    (pool,) = f.pools
    assert pool.batch_tokens is pool.captured_tokens is None
    assert f.source.name == "ROOFLINE"


def test_a_search_in_another_precision_launches_and_checks_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--precision", "weights=fp8,kv_cache=fp8", "--json"]
    assert main([*SMALL, *words]) == 0
    pick = json.loads(capsys.readouterr().out)["picks"][0]
    assert pick["launch"].endswith("--quantization fp8 --kv-cache-dtype fp8")
    assert "--quantization fp8 --kv-cache-dtype fp8_e4m3" in pick["sglang"]
    assert pick["trtllm"] is pick["profile"] is None
    assert "--precision weights=fp8,kv_cache=fp8" in pick["predict"]
    check = shlex.split(pick["predict"])[1:]
    assert main([*check, "--json"]) == 0
    assert "no kernel was calibrated with weights in fp8" in capsys.readouterr().out
    assert main([*SMALL, "--precision", "weights=int4"]) == 0  # takes a checkpoint of its own
    out = capsys.readouterr().out
    assert "launch: none, vllm does not make weights in int4 of this checkpoint" in out
    assert "sglang" not in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fp8", "--precision: 'fp8' found, and must be weights=TYPE or kv_cache=TYPE"),
        ("activations=fp8", "must be weights=TYPE or kv_cache=TYPE"),
        ("weights=fp7", "--precision weights: unknown value 'fp7'; allowed: fp32, bf16"),
    ],
)
def test_a_wrong_precision_is_told(
    capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    assert main([*SMALL, "--precision", text]) == 2
    assert complaint in capsys.readouterr().err
