"""`explore --rate`: services, each of which is what `predict --rate` says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import energylens
from energylens.cli import main
from energylens.errors import SpecError
from energylens.predict import Catalogue
from energylens.results import Infeasible
from energylens.results.search import Frontier
from energylens.serving import Limits, Traffic, serve
from energylens.spec.system import Config, Overlapping

CATALOGUE = Catalogue()
VLLM, H200 = CATALOGUE.engine("vllm"), CATALOGUE.device("h200")
LENGTHS = {"prompt_len": 512, "gen_len": 64}


def explored(spec: str = "llama3_8b", **more: Any) -> Frontier | Infeasible:
    asked: dict[str, Any] = {"gpus": 2, "rate_per_s": 8.0, **LENGTHS}
    return energylens.explore(spec, catalogue=CATALOGUE, **(asked | more))


def services(**more: Any) -> Frontier:
    found = explored(**more)
    assert isinstance(found, Frontier), found
    return found


def test_every_service_is_the_one_that_predict_simulates() -> None:
    found = services()
    tried = {(c.parallelism.tp, c.parallelism.replicas) for c in found.configs}
    assert tried == {(1, 1), (1, 2), (2, 1)}
    spec = CATALOGUE.spec("llama3_8b")
    for c in found.configs:
        alone = serve(
            spec,
            engine=VLLM,
            device=H200,
            traffic=Traffic(rate_per_s=8.0, lengths=((512, 64),)),
            config=Config(parallelism=c.parallelism),
            limits=Limits(max_sequences=c.batch),
            bundles=CATALOGUE.bundles(H200, VLLM),
            link=CATALOGUE.link(H200, 2),
        )
        assert not isinstance(alone, Infeasible)
        assert alone.tpot_s is not None
        assert c.values["energy_per_request_j"] == alone.energy_per_request_j
        assert c.values["energy_per_token_j"] == alone.energy_per_token_j
        assert c.values["ttft_s"] == alone.ttft_s.p90
        assert c.values["tpot_s"] == alone.tpot_s.p90
        assert c.values["total_power_w"] == alone.total_power_w
        assert c.intervals["energy_per_request_j"] == pytest.approx(
            alone.interval.energy_per_request_j
        )
        assert alone.interval.tpot_s is not None
        relative = [end / alone.tpot_s.mean for end in alone.interval.tpot_s]
        assert [end / alone.tpot_s.p90 for end in c.intervals["tpot_s"]] == pytest.approx(relative)
        # Requests leave as they come, so a GPU's time is shared between them.
        assert c.values["gpu_s_per_request"] == pytest.approx(c.parallelism.gpus / 8.0, rel=0.1)


def test_the_front_is_that_of_all_services() -> None:
    found = services(gpus=4, objectives=("energy_per_request", "ttft"))
    points = {c.id: (c.values["energy_per_request_j"], c.values["ttft_s"]) for c in found.configs}
    for c in found.configs:
        better = [
            other
            for other, p in points.items()
            if all(a <= b for a, b in zip(p, points[c.id], strict=True)) and p != points[c.id]
        ]
        assert c.on_frontier == (not better)
    assert found.best("energy_per_request").parallelism.replicas == 1  # GPUs that wait cost
    assert len({c.id for c in found.configs}) == len(found.configs)


def test_replicas_that_do_not_sustain_the_rate_are_counted_with_what_they_sustain() -> None:
    found = services(rate_per_s=150.0, tp=1, gpus=4)
    least = min(c.parallelism.replicas for c in found.configs)
    assert least > 1
    assert found.counts.infeasible == least - 1
    ((reason, n),) = found.counts.infeasible_by.items()
    assert n == least - 1
    sustained = float(reason.split("sustains ")[1].split()[0])
    assert (least - 1) * sustained < 150.0 <= least * sustained * 1.01
    assert found.counts.tried == 4


def test_more_than_all_sustain_says_how_much_is_possible() -> None:
    found = explored(rate_per_s=1000.0)
    assert isinstance(found, Infeasible)
    assert "sustains 1000 requests/s: the most is" in found.reason
    assert found.counts is not None and found.counts.infeasible == found.counts.tried == 3


def test_boards_that_cannot_hold_their_limit_are_not_said_to_sustain_too_little() -> None:
    found = explored(power_limit_w=100.0)
    assert isinstance(found, Infeasible)
    assert "can run: tp=1" in found.reason and "100 W" in found.reason
    assert "sustains" not in found.reason


def test_services_that_make_one_token_have_a_front_too() -> None:
    found = services(gen_len=1, objectives=("energy_per_request", "ttft"))
    assert all("tpot_s" not in c.values for c in found.configs)
    assert found.front


def test_limits_are_about_what_nine_of_ten_requests_meet() -> None:
    all_of_them = services()
    slowest = max(c.values["tpot_s"] for c in all_of_them.configs)
    limit = slowest * 0.999
    found = services(max_tpot_s=limit)
    assert [c.id for c in found.configs if c.filtered_by] == [
        c.id for c in all_of_them.configs if c.values["tpot_s"] > limit
    ]
    assert found.counts.filtered_by == {"max_tpot_s": 1}
    none = explored(max_tpot_s=1e-4)
    assert isinstance(none, Infeasible)
    assert "the closest is" in none.reason and "--max-tpot-ms 0.1 with" in none.reason


def test_batches_are_the_most_sequences_that_run() -> None:
    found = services(batch=(2, 64), tp=2)
    two, many = sorted(found.configs, key=lambda c: c.batch)
    assert (two.batch, many.batch) == (2, 64)
    assert two.service is not None and two.service.running.max == 2
    assert two.values["ttft_s"] > many.values["ttft_s"]


def test_overlaps_and_prices_are_those_of_a_search_of_batches() -> None:
    ways = (None, Overlapping(sm=16, chunks=2))
    found = services(
        tp=2, overlap=ways, price_per_gpu_hour=3.6, objectives=("cost_per_request", "tpot")
    )
    assert [c.parallelism.overlap for c in found.configs] == list(ways)
    for c in found.configs:
        assert c.values["cost_per_request"] == pytest.approx(0.001 * c.values["gpu_s_per_request"])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"objectives": ("energy_per_prompt",)}, "is about one batch, and --rate about traffic"),
        ({"objectives": ("throughput",)}, "is what --rate asks for, the same of all services"),
        ({"objectives": ("foo",)}, "--objective: unknown 'foo'"),
        ({"gen_len": 1}, "no token follows the first, so there is no TPOT"),
        ({"power_limit_w": 900.0}, "h200 allows up to 700 W"),
        ({"rate_per_s": 1e-6}, "raise the rate or the duration"),
        ({"overlap": (Overlapping(sm=132),)}, "h200 has 132, and the GEMM needs some"),
        ({"min_throughput_tokens_s": 100.0}, "raise --rate instead"),
        ({"pp": 2}, "--pp above 1"),
        ({"dp": (1, 2)}, "--dp above 1"),
        ({"tp": 4}, "no layout asked for fits on 2 GPUs"),
        ({"disaggregate": True}, "disaggregated services are not simulated"),
        ({"engine": "hf"}, "engine hf has no `serving` section"),
    ],
)
def test_what_is_not_about_services_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        explored(**more)


COMMAND = "explore llama3_8b --gpus 2 --rate 8 --prompt-len 512 --gen-len 64"


def test_the_command_shows_services_and_how_to_repeat_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "front.png"
    assert main([*COMMAND.split(), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "8 requests/s" in out
    assert "3 configurations tried, 0 cannot run, 0 miss a constraint, 3 simulated" in out
    assert "--rate 8 --max-num-seqs" in out
    assert "vllm bench serve" in out and "--request-rate 8 --num-prompts 4800" in out
    assert "energylens profile" not in out
    assert plot.stat().st_size > 1000


def test_the_document_holds_what_services_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rate_per_s"] == 8.0
    for config in document["configs"]:
        service = config["service"]
        assert service["ttft_s"]["p90"] == config["ttft_s"]
        assert service["saturation_rate_per_s"] >= 8.0
        assert config["source"] == "transferred"
    assert main([*COMMAND.split(), "--max-ttft-ms", "1", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["feasible"], document["rate_per_s"]) == (False, 8.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--rate 0", "--rate: 0 found, and must be a number above 0"),
        ("--rate 8 --html x.html", "--html is about batches"),
        ("--rate 8 --disaggregate", "disaggregated services are not simulated"),
    ],
)
def test_bad_options_are_refused_in_a_line(
    options: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", "llama3_8b", "--gpus", "2", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err
