"""Prefill and decode on GPUs of their own: balance, the cache in between, limits, the verb."""

from __future__ import annotations

import json

import pytest

import energylens
from energylens.cli import main
from energylens.errors import SpecError
from energylens.explore import Constraints, Prices, SearchSpace, explore
from energylens.predict import Catalogue, predict
from energylens.results import Infeasible, Prediction
from energylens.results.search import Frontier, ScoredConfig
from energylens.spec.system import Config, Parallelism, Phase, Workload

pytestmark = pytest.mark.usefixtures("no_debug")

CATALOGUE = Catalogue()
H200, VLLM = CATALOGUE.device("h200"), CATALOGUE.engine("vllm")
LLAMA, MOE = CATALOGUE.spec("llama3_8b"), CATALOGUE.spec("qwen3_moe")
BUNDLES = CATALOGUE.bundles(H200, VLLM)
LINK = CATALOGUE.link(H200, 8)
OBJECTIVES = ("energy_per_request", "ttft", "tpot")


def search(**more: object) -> Frontier | Infeasible:
    given = {
        "gpus": 4,
        "space": SearchSpace(batches=range(1, 65), pp=(1, 2)),
        "objectives": OBJECTIVES,
        "exact": 12,
        "link": LINK,
        "disaggregate": True,
        **more,
    }
    return explore(LLAMA, engine=VLLM, device=H200, bundles=BUNDLES, **given)  # type: ignore[arg-type]


def found(**more: object) -> Frontier:
    result = search(**more)
    assert isinstance(result, Frontier), result
    return result


def pairs(f: Frontier, *, exact: bool = False) -> list[ScoredConfig]:
    own = [c for c in f.configs if c.prefill is not None and (c.exact or not exact)]
    assert own
    return own


def exactly(p: Parallelism, batch: int, f: Frontier) -> Prediction:
    result = predict(
        LLAMA,
        engine=VLLM,
        device=H200,
        config=Config(parallelism=p, microbatches=min(p.pp, batch)),
        workload=Workload(batch=batch, prompt_len=f.prompt_len, gen_len=f.gen_len),
        bundles=BUNDLES,
        link=LINK,
    )
    assert isinstance(result, Prediction), result
    return result


def test_a_pair_is_its_two_predictions_the_transfer_and_the_pauses() -> None:
    f = found(prices=Prices(per_gpu_hour=3.0))
    assert LINK is not None
    for c in pairs(f, exact=True)[:6]:
        assert c.prefill is not None
        a, b = c.prefill.parallelism, c.parallelism
        first, then = exactly(a, c.prefill.batch, f), exactly(b, c.batch, f)
        # Keys and values of 8 heads of 128 in 32 layers, 2 bytes each; at least a part of them
        # goes over each link.
        cache = f.prompt_len * 32 * 2 * 8 * 128 * 2
        assert c.prefill.transfer_bytes == pytest.approx(cache)
        ways = min(a.tp * a.pp, b.tp * b.pp)
        assert c.prefill.transfer_s == pytest.approx(
            LINK.latency_s + cache / ways / (0.7 * LINK.bandwidth_bytes_s)
        )
        assert c.values["ttft_s"] == pytest.approx(first.ttft_s + c.prefill.transfer_s)
        assert c.values["tpot_s"] == pytest.approx(then.tpot_s)
        assert c.values["energy_per_token_j"] == pytest.approx(then.energy_per_token_j)
        rate = b.replicas * c.batch / ((f.gen_len - 1) * then.tpot_s)
        busy = rate * first.ttft_s / (a.replicas * c.prefill.batch)
        assert c.prefill.utilisation == pytest.approx(min(busy, 1.0))
        idle_w = BUNDLES[0].typical.idle_w * a.gpus
        pause_j = idle_w * (1 - min(busy, 1.0)) / rate
        link_j = BUNDLES[0].laws.link_w * c.prefill.transfer_s * (a.tp * a.pp + b.tp * b.pp)
        assert c.values["energy_per_prompt_j"] == pytest.approx(
            first.energy_per_prompt_j + pause_j + link_j, rel=1e-3
        )
        decode_j = then.energy_per_request_j - then.energy_per_prompt_j
        assert c.values["energy_per_request_j"] == pytest.approx(
            c.values["energy_per_prompt_j"] + decode_j
        )
        assert c.values["gpus"] == a.gpus + b.gpus
        assert c.values["cost_per_request"] == pytest.approx(
            3.0 / 3600 * (a.gpus + b.gpus) / rate, rel=1e-6
        )
        for name, (low, high) in c.intervals.items():
            assert low <= c.values[name] * (1 + 1e-12) and c.values[name] <= high * (1 + 1e-12)


def test_prefill_feeds_decode_and_both_fit() -> None:
    f = found()
    for c in pairs(f):
        assert c.prefill is not None
        a, b = c.prefill.parallelism, c.parallelism
        assert a.gpus + b.gpus + c.unused_gpus == 4 and c.unused_gpus >= 0
        assert 0 < c.prefill.utilisation <= 1
        if not c.exact:  # one instance less would not be enough
            assert c.prefill.utilisation > 1 - 1 / a.replicas - 1e-9
        assert c.prefill.batch * f.prompt_len <= 16384 * a.pp


def test_what_is_from_the_table_is_close_to_what_is_exact() -> None:
    table = {c.id: c for c in pairs(found(exact=1)) if not c.exact}
    both = [(table[c.id], c) for c in pairs(found(exact=40), exact=True) if c.id in table]
    assert len(both) > 10
    for guess, exact in both:
        for name, value in exact.values.items():
            assert guess.values[name] == pytest.approx(value, rel=0.02), (exact.id, name)


def test_pairs_stand_among_the_others() -> None:
    f, alone = found(), found(disaggregate=False)
    assert {c.id for c in alone.configs} <= {c.id for c in f.configs}
    assert f.counts.tried > alone.counts.tried
    assert len({c.id for c in f.configs}) == len(f.configs)
    front = [c for c in f.front if c.prefill is not None]
    assert front
    # A batch that decodes together need not have been prefilled together.
    slow = [c.values["ttft_s"] for c in alone.front if c.batch == 64]
    fast = [c.values["ttft_s"] for c in front if c.batch == 64]
    assert min(fast) < 0.2 * min(slow)
    assert any("disaggregated layouts" in note for note in f.notes)
    best = f.best("energy_per_request")
    assert best.exact and best.on_frontier


@pytest.mark.parametrize(
    "limits",
    [
        Constraints(max_ttft_s=0.05),
        Constraints(max_tpot_s=0.006, max_power_w=1500.0),
        Constraints(min_throughput_tokens_s=8000.0),
    ],
)
def test_constraints_hold_for_pairs_too(limits: Constraints) -> None:
    f = found(constraints=limits)
    for c in f.front:
        if c.prefill is None:
            continue
        assert c.values["ttft_s"] <= (limits.max_ttft_s or 1e9)
        assert c.values["tpot_s"] <= (limits.max_tpot_s or 1e9)
        assert c.values["total_power_w"] <= (limits.max_power_w or 1e9)
        assert c.values["throughput_tokens_s"] >= (limits.min_throughput_tokens_s or 0)
    counts = f.counts
    assert counts.filtered > 0
    assert set(counts.filtered_by) == set(limits.given())


def test_a_limit_that_only_pairs_keep_is_met() -> None:
    # 64 prompts of 2048 tokens at once take longer than one: decoding in large batches is only
    # possible beside quick answers where others prefill.
    limits = Constraints(max_ttft_s=0.15, min_throughput_tokens_s=6000.0)
    more = {"prompt_len": 2048, "constraints": limits, "space": SearchSpace(batches=(1, 2, 64))}
    assert isinstance(search(disaggregate=False, gpus=2, **more), Infeasible)
    f = found(gpus=4, **more)
    assert all(c.prefill is not None for c in f.front)


def test_the_fewest_gpus_that_serve_are_found() -> None:
    limits = Constraints(max_ttft_s=0.05, min_throughput_tokens_s=2500.0)
    f = found(gpus=8, objectives=("gpus", "ttft", "energy_per_request"), constraints=limits)
    few = [c for c in pairs(f) if c.on_frontier]
    assert min(c.values["gpus"] for c in few) == 2
    assert len({c.values["gpus"] for c in few}) > 2
    assert all(c.values["gpus"] == 8 - c.unused_gpus for c in few)


def test_one_gpu_makes_no_pair(capsys: pytest.CaptureFixture[str]) -> None:
    f = found(gpus=1, space=SearchSpace(batches=(1, 8)))
    assert all(c.prefill is None for c in f.configs)
    words = ["explore", "llama3_2_1b", "--gpus", "1,2", "--disaggregate", "--batch", "1"]
    assert main(words) == 0  # one GPU has no link, and needs none
    assert "note: 1 x h200: nothing is disaggregated" in capsys.readouterr().out


def test_experts_are_disaggregated_too() -> None:
    f = explore(
        MOE,
        engine=VLLM,
        device=H200,
        gpus=4,
        space=SearchSpace(batches=(1, 16, 64)),
        objectives=OBJECTIVES,
        exact=5,
        bundles=BUNDLES,
        link=LINK,
        disaggregate=True,
    )
    assert isinstance(f, Frontier)
    assert pairs(f, exact=True)


def test_what_cannot_be_disaggregated_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="--disaggregate needs something to decode"):
        search(gen_len=1, objectives=("energy_per_prompt",))
    with pytest.raises(SpecError, match="none is known between 4 x h200"):
        search(link=None)
    words = ["explore", "llama3_2_1b", "--gpus", "2", "--device", "a6000", "--disaggregate"]
    assert main(words) == 2
    assert "between 2 x a6000; leave --disaggregate out" in capsys.readouterr().err


def test_devices_without_a_known_link_do_not_keep_the_others_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"batch": (1, 16), "objectives": OBJECTIVES, "top": 6, "disaggregate": True}
    both = energylens.explore("llama3_8b", device=("a6000", "h200"), gpus=(8, 2), **asked)
    alone = energylens.explore("llama3_8b", gpus=2, **asked)
    plain = energylens.explore(
        "llama3_8b", device="a6000", gpus=8, **asked | {"disaggregate": False}
    )
    assert isinstance(both, Frontier) and isinstance(alone, Frontier)
    assert isinstance(plain, Frontier)
    assert {c.pool.device for c in pairs(both)} == {"h200"}
    assert both.counts.tried == alone.counts.tried + plain.counts.tried
    why = "the KV cache goes over a link, and none is known between 8 x a6000"
    assert f"8 x a6000: nothing is disaggregated: {why}" in both.notes
    words = ["explore", "llama3_2_1b", "--device", "a6000", "--gpus", "1,2", "--disaggregate"]
    assert main(words) == 2  # nor any other that could
    assert f"{why.replace('8 x', '2 x')}; leave --disaggregate out" in capsys.readouterr().err


def test_pools_overlap_where_it_is_worth_something(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explore", "llama3_8b", "--gpus", "4", "--tp", "2", "--pp", "1", "--batch", "1..16"]
    words += ["--prompt-len", "4096", "--overlap", "off,16x4,16x8", "--disaggregate"]
    words += ["--objective", "ttft,energy_per_prompt,energy_per_token"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    own = [c for c in document["configs"] if c["prefill"]]
    assert own and {c["overlap"] and c["overlap"]["sm"] for c in own} == {None}  # decodes nothing
    assert {"sm": 16, "chunks": 4} in [c["prefill"]["overlap"] for c in own]
    alone = [c for c in document["configs"] if not c["prefill"]]
    assert {c["overlap"] and c["overlap"]["chunks"] for c in alone} == {None, 4, 8}
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("  16x4/-  " in line for line in lines) and any("  -/-  " in line for line in lines)


def test_the_verb_shows_both_pools_and_how_to_start_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["explore", "llama3_8b", "--gpus", "4", "--batch", "1,2,64", "--disaggregate"]
    words += ["--objective", "energy_per_request", "--max-ttft-ms", "60", "--prompt-len", "1024"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    pick = document["picks"][0]
    config = next(c for c in document["configs"] if c["id"] == pick["id"])
    own = config["prefill"]
    assert own is not None and own["parallelism"]["gpus"] + config["parallelism"]["gpus"] <= 4
    for name in ("launch", "launch_prefill"):
        assert "--kv-transfer-config" in pick[name] and "NixlConnector" in pick[name]
    for name, phase in (("predict_prefill", Phase.PREFILL), ("predict", Phase.DECODE)):
        assert main([*pick[name].split()[1:], "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        if phase is Phase.DECODE:
            assert again["tpot_s"] == config["tpot_s"]
        else:
            assert again["ttft_s"] == pytest.approx(config["ttft_s"] - own["transfer_s"])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "launch, prefill: vllm serve" in out and "launch, decode: vllm serve" in out
    assert "in front of both: a proxy" in out
    p = own["parallelism"]
    assert f"{p['tp']}/{config['parallelism']['tp']}" in out


def test_rows_of_both_kinds_are_alike() -> None:
    rows = found().rows()
    assert len({tuple(row) for row in rows}) == 1
    named = [row["prefill"] for row in rows if row["prefill"]]
    assert named and all("replicas=" in name for name in named)
