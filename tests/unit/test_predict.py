"""The whole chain on shipped models: definitions, feasibility, anchors, laws, the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest

from energylens.cost.bundle import select
from energylens.errors import CalibrationError, SpecError
from energylens.predict import Catalogue, predict, predict_measurement
from energylens.results import (
    Anchors,
    BoardAnchor,
    HostAnchor,
    Infeasible,
    Kind,
    Measurement,
    PhaseResult,
    Prediction,
    Source,
)
from energylens.spec.system import Config, Mode, Parallelism, Phase, Workload

CATALOGUE = Catalogue()
HF = CATALOGUE.engine("hf")
CAPTURED = MappingProxyType({Phase.DECODE: Mode.CUDA_GRAPH})
DECODE = (Phase.DECODE,)


def outcome(
    spec: str = "llama3_2_1b",
    *,
    device: str = "h200",
    tp: int = 1,
    replicas: int = 1,
    captured: bool = False,
    power_limit_w: float | None = None,
    workload: Workload = Workload(),
    **more: object,
) -> Prediction | Infeasible:
    on = CATALOGUE.device(device)
    parallelism = Parallelism(tp=tp, replicas=replicas)
    return predict(
        CATALOGUE.spec(spec),
        engine=HF,
        device=on,
        config=Config(
            parallelism=parallelism,
            modes=CAPTURED if captured else {},
            power_limit_w=power_limit_w,
        ),
        workload=workload,
        bundles=CATALOGUE.bundles(on, HF),
        link=CATALOGUE.link(on, parallelism.gpus),
        **more,
    )


def predicted(spec: str = "llama3_2_1b", **more: object) -> Prediction:
    result = outcome(spec, **more)
    assert isinstance(result, Prediction), result.reason
    return result


def decode(spec: str = "llama3_8b", **more: object) -> PhaseResult:
    return predicted(spec, phases=DECODE, **more).phases["decode"]


def prefill(spec: str = "llama3_8b", **more: object) -> PhaseResult:
    return predicted(spec, phases=(Phase.PREFILL,), **more).phases["prefill"]


def latency_width(result: PhaseResult) -> float:
    low, high = result.interval.latency_s
    return high / low


LARGE = Workload(batch=8, prompt_len=2048)  # a prefill that holds the power cap


# ---------------------------------------------------------------- request


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("prompt", "generated"), [(100, 22), (1021, 10), (512, 4)])
def test_a_request_is_its_prefill_and_every_decode_step(
    captured: bool, prompt: int, generated: int
):
    work = Workload(batch=2, prompt_len=prompt, gen_len=generated)
    whole = predicted(workload=work, captured=captured).phases
    steps = [
        decode(
            "llama3_2_1b",
            workload=replace(work, context_len=float(prompt + i)),
            captured=captured,
        )
        for i in range(1, generated)
    ]
    for quantity in ("latency_s", "energy_j"):
        steps_sum = sum(getattr(s, quantity) for s in steps)
        expected = getattr(whole["prefill"], quantity) + steps_sum
        assert getattr(whole["request"], quantity) == pytest.approx(expected, rel=0.003)


def test_one_token_is_the_prefill_alone_and_has_no_tpot():
    result = predicted(workload=Workload(gen_len=1))
    assert result.phases["request"].latency_s == result.phases["prefill"].latency_s
    assert result.phases["request"].energy_j == result.phases["prefill"].energy_j
    assert result.tpot_s is None


def test_operations_of_a_request_are_counted_whole():
    for generated in (2, 5, 6, 128):
        result = predicted(workload=Workload(prompt_len=64, gen_len=generated))
        counts = {r.op: r.count for r in result.breakdown if r.phase == "request"}
        layers = CATALOGUE.spec("llama3_2_1b").blocks[1].repeat
        assert counts["lm_head"] == generated
        assert counts["attn_norm"] == layers * generated


def test_default_decode_step_is_in_the_middle_of_the_generation():
    work = Workload(prompt_len=1000, gen_len=200)
    middle = decode(workload=replace(work, context_len=1100.0), captured=True)
    assert decode(workload=work, captured=True) == middle


def test_only_asked_phases_are_predicted():
    result = predicted(phases=DECODE)
    assert set(result.phases) == {"decode"}
    assert {r.phase for r in result.breakdown} == {"decode"}
    assert (result.ttft_s, result.ttlt_s, result.tpot_s) == (None, None, None)


# ---------------------------------------------------------------- feasibility


def test_a_degree_that_does_not_divide_is_infeasible_with_the_reason():
    result = outcome("qwen2_5_7b", tp=3)
    assert isinstance(result, Infeasible)
    assert "tp=3" in result.reason
    assert "1, 2, 4" in result.reason


def test_what_does_not_fit_is_infeasible_with_numbers_and_what_to_change():
    result = outcome("llama3_70b", workload=Workload(batch=64))
    assert isinstance(result, Infeasible)
    assert result.memory is not None
    assert not result.memory.fits
    # 70.55e9 parameters of two bytes.
    assert result.memory.weights_bytes == pytest.approx(141.1e9, rel=0.001)
    for told in ("141.1 GB", "150.8 GB per GPU", "KV cache", "--tp", "--batch"):
        assert told in result.reason


def test_a_70b_model_fits_one_board_whose_141_gb_are_143771_mib():
    assert not isinstance(outcome("llama3_70b"), Infeasible)


def test_a_cache_that_does_not_fit_is_infeasible_too():
    # 32 layers, K and V, 8 heads of 128, two bytes: 131072 bytes a token.
    work = Workload(batch=1024, prompt_len=1024, gen_len=128)
    result = outcome("llama3_8b", workload=work)
    assert isinstance(result, Infeasible)
    assert result.memory is not None
    assert result.memory.kv_cache_bytes == pytest.approx(131072 * 1024 * 1152, rel=0.001)


def test_more_gpus_make_it_fit():
    assert predicted("llama3_70b", tp=2).memory.fits


# ---------------------------------------------------------------- batch, context, power, replicas


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("spec", "tp"), [("llama3_2_1b", 1), ("llama3_8b", 1), ("llama3_70b", 2)])
def test_larger_batches_cost_more_per_step_and_less_per_token(spec: str, tp: int, captured: bool):
    batches = (1, 2, 4, 8, 16)
    energies = [
        decode(
            spec, tp=tp, captured=captured, workload=Workload(batch=b, prompt_len=256, gen_len=32)
        ).energy_j
        for b in batches
    ]
    # Kernels are priced as measured, and a GEMV at M = 1 may draw more than a GEMM at M = 2: up to
    # what one measurement repeats to.
    assert all(b >= 0.98 * a for a, b in pairwise(energies))
    per_token = [e / b for e, b in zip(energies, batches, strict=True)]
    assert per_token == sorted(per_token, reverse=True)


@pytest.mark.parametrize("captured", [False, True])
def test_a_longer_context_costs_more(captured: bool):
    """B123: generators that replay one graph have constant cost per token; attention does not."""
    lengths = (512.0, 2048.0, 8192.0, 32768.0)
    steps = [
        decode(captured=captured, workload=Workload(batch=8, context_len=c)) for c in lengths
    ]  # fmt: skip
    energies = [s.energy_j for s in steps]
    assert energies == sorted(energies)
    # At least the bytes of the cache, read once at the full bandwidth of the datasheet.
    read_s = 8 * (32768 - 512) * 131072 / 4.8e12
    assert steps[-1].latency_s - steps[0].latency_s > (read_s if captured else 0)


def test_a_lower_power_limit_is_slower_and_draws_less():
    results = [prefill(workload=LARGE, power_limit_w=w) for w in (700.0, 600.0, 500.0, 400.0)]
    latencies, powers = [r.latency_s for r in results], [r.mean_power_w for r in results]
    assert latencies == sorted(set(latencies))
    assert powers == sorted(set(powers), reverse=True)
    assert all(r.regime == "capped" for r in results)
    assert powers[-1] <= 400.0


def test_a_limit_that_is_not_reached_changes_nothing():
    free = decode(captured=True)
    assert free.mean_power_w < 500.0
    assert decode(captured=True, power_limit_w=650.0) == free


def test_a_limit_above_the_boards_is_an_error():
    with pytest.raises(SpecError, match="h200 allows up to 700 W"):
        predicted(power_limit_w=701.0)


def test_a_limit_that_no_clock_holds_is_infeasible():
    result = outcome(workload=LARGE, power_limit_w=150.0)
    assert isinstance(result, Infeasible)
    assert "raise --power-limit" in result.reason


def test_a_capped_step_at_another_limit_is_extrapolated_and_less_certain():
    at, below = (prefill(workload=LARGE, power_limit_w=w) for w in (700.0, 500.0))
    assert at.source < Source.EXTRAPOLATED <= below.source
    assert latency_width(below) > 1.05 * latency_width(at)


def test_replicas_with_anchors_are_noted():
    boards = anchored(own_board())
    assert any("every replica" in n for n in predicted(replicas=2, anchors=boards).notes)
    assert not any("replica" in n for n in predicted(replicas=2).notes)


def test_another_power_limit_is_noted():
    assert any("700 W" in n for n in predicted(power_limit_w=500.0).notes)
    assert not any("power limit" in n for n in predicted(power_limit_w=700.0).notes)


def test_replicas_multiply_energy_and_leave_latency_alone():
    one, three = predicted(tp=2), predicted(tp=2, replicas=3)
    for name, single in one.phases.items():
        triple = three.phases[name]
        assert triple.latency_s == single.latency_s
        assert triple.energy_j == pytest.approx(3 * single.energy_j)
        assert triple.mean_power_w == pytest.approx(single.mean_power_w)
        assert triple.interval.energy_j == pytest.approx([3 * e for e in single.interval.energy_j])
        rows = [r for r in three.breakdown if r.phase == name]
        assert sum(r.energy_j for r in rows) == pytest.approx(triple.energy_j)
        assert sum(r.share for r in rows) == pytest.approx(1.0)


# ---------------------------------------------------------------- boards and hosts


def own_board(**change: float) -> BoardAnchor:
    bundle = select(CATALOGUE.bundles(CATALOGUE.device("h200"), HF), "h200", "torch")
    return replace(bundle.typical, board_uuid="mine", **change)


def anchored(*boards: BoardAnchor, host: HostAnchor | None = None) -> Anchors:
    return Anchors(boards=boards, host=host)


def test_the_typical_board_as_an_anchor_only_narrows_the_interval():
    typical, mine = decode(captured=True), decode(captured=True, anchors=anchored(own_board()))
    assert mine.latency_s == pytest.approx(typical.latency_s)
    assert mine.energy_j == pytest.approx(typical.energy_j)
    assert width(mine) < width(typical)


def width(r: PhaseResult) -> float:
    return r.interval.energy_j[1] / r.interval.energy_j[0]


def test_a_hungrier_board_raises_energy():
    base = own_board()
    plain = anchored(base)
    stream = anchored(replace(base, stream_w=base.stream_w + 60))
    idle = anchored(replace(base, idle_w=base.idle_w + 10, stream_w=base.stream_w + 10))
    low_clock = anchored(replace(base, gemm_mhz=base.gemm_mhz - 60))
    for hungry in (stream, idle):
        assert decode(captured=True, anchors=hungry).energy_j > (
            decode(captured=True, anchors=plain).energy_j
        )
    # A board that holds a lower clock at the cap needs more joules per FLOP and more time.
    slow, fast = (prefill(workload=LARGE, anchors=a) for a in (low_clock, plain))
    assert slow.energy_j > fast.energy_j
    assert slow.latency_s > fast.latency_s


def test_a_board_with_less_bandwidth_is_slower_in_decode():
    slow = anchored(own_board(gemv_gbs=4000.0))
    assert decode(captured=True, anchors=slow).latency_s > decode(captured=True).latency_s


@pytest.mark.parametrize("work", [LARGE, Workload()])
def test_the_order_of_the_boards_does_not_matter(work: Workload):
    good, bad = own_board(stream_w=560.0), own_board(stream_w=640.0, gemm_mhz=1400.0, idle_w=130.0)
    one, other = (
        predicted("llama3_70b", tp=2, workload=work, anchors=anchored(*boards))
        for boards in ((good, bad), (bad, good))
    )
    for name, result in one.phases.items():
        assert other.phases[name].latency_s == pytest.approx(result.latency_s, rel=1e-9)
        assert other.phases[name].energy_j == pytest.approx(result.energy_j, rel=1e-9)


def test_missing_and_surplus_anchors_are_told():
    few = predicted("llama3_70b", tp=2, anchors=anchored(own_board()))
    assert any("1 anchors given for 2 workers" in n for n in few.notes)
    many = predicted(anchors=anchored(own_board(), own_board(idle_w=140.0)))
    assert any("2 anchors given for 1 workers" in n for n in many.notes)
    one = predicted(anchors=anchored(own_board()))
    assert many.phases == one.phases


def test_a_slower_host_slows_host_bound_steps_in_proportion():
    bundle = select(CATALOGUE.bundles(CATALOGUE.device("h200"), HF), "h200", "torch")
    assert bundle.host is not None
    module_us = bundle.host.anchor.module_us
    assert module_us is not None
    same, twice = (
        decode(anchors=anchored(host=replace(bundle.host.anchor, module_us=us)))
        for us in (module_us, 2 * module_us)
    )
    assert same.regime == twice.regime == "host"
    assert twice.latency_s == pytest.approx(2 * same.latency_s)
    assert same.source is twice.source is Source.TRANSFERRED


def test_more_workers_than_the_host_was_measured_with_are_less_certain():
    bundle = select(CATALOGUE.bundles(CATALOGUE.device("h200"), HF), "h200", "torch")
    assert max(bundle.host.launch_s) == 2

    two, four = (decode(tp=tp) for tp in (2, 4))
    assert two.regime == four.regime == "host"
    assert latency_width(four) > 1.01 * latency_width(two)


def test_the_wait_for_the_host_names_the_hosts_source():
    (wait,) = (r for r in predicted(phases=DECODE).breakdown if r.kind is Kind.WAIT)
    assert wait.source is Source.TRANSFERRED


def test_host_time_is_never_transferred_silently():
    assert decode().source is Source.TRANSFERRED
    assert decode(captured=True).source < Source.TRANSFERRED


# ---------------------------------------------------------------- no calibration


@pytest.mark.parametrize("captured", [False, True])
def test_a_device_without_a_bundle_answers_from_the_roofline_with_a_wide_interval(captured: bool):
    result = predicted(device="a6000", captured=captured, anchors=anchored(own_board()))
    assert result.source is Source.ROOFLINE
    assert result.bundles == ()
    for phase in result.phases.values():
        for quantity in ("latency_s", "energy_j"):
            low, high = getattr(phase.interval, quantity)
            assert low < 0.75 * getattr(phase, quantity)
            assert high > 1.4 * getattr(phase, quantity)
    assert any("energylens calibrate --device a6000" in n for n in result.notes)
    assert any("anchors" in n for n in result.notes)


def test_no_bundle_at_all_is_no_failure():
    on = CATALOGUE.device("h200")
    result = predict(CATALOGUE.spec("llama3_8b"), engine=HF, device=on)
    assert isinstance(result, Prediction)
    assert result.source is Source.ROOFLINE


# ---------------------------------------------------------------- laws


def test_without_the_cap_a_prefill_is_faster_and_overruns_the_limit():
    with_law, without = (prefill(workload=LARGE, without=frozenset(w)) for w in ((), ("cap",)))
    assert without.latency_s < with_law.latency_s
    assert without.mean_power_w > 700 > with_law.mean_power_w
    assert without.clock_hz == pytest.approx(1.98e9)
    assert with_law.clock_hz < 1.9e9


def test_without_the_host_an_eager_decode_takes_its_kernels():
    with_law, without = (decode(without=frozenset(w)) for w in ((), ("host",)))
    assert with_law.regime == "host"
    assert without.regime != "host"
    assert without.latency_s < with_law.latency_s
    assert without.source < Source.TRANSFERRED


def test_without_the_straggler_two_boards_take_their_mean():
    boards = anchored(own_board(gemv_gbs=4600.0), own_board(gemv_gbs=3900.0))
    with_law, without = (
        decode("llama3_70b", tp=2, captured=True, anchors=boards, without=frozenset(w))
        for w in ((), ("straggler",))
    )
    assert without.latency_s < with_law.latency_s


def test_without_the_gap_captured_kernels_follow_without_a_break():
    result, without = (
        predicted(captured=True, phases=DECODE, without=frozenset(w)) for w in ((), ("gap",))
    )
    (gap,) = (r for r in result.breakdown if r.op == "gaps between kernels")
    difference = result.phases["decode"].latency_s - without.phases["decode"].latency_s
    assert difference == pytest.approx(gap.latency_s)
    assert gap.latency_s > 0


def test_laws_that_do_not_act_change_nothing():
    plain = decode(captured=True)
    assert decode(captured=True, without=frozenset({"host"})) == plain
    assert decode(captured=True, without=frozenset({"straggler"})) == plain


# ---------------------------------------------------------------- rows of a truth file

Make = Callable[..., Measurement]


def beside(m: Measurement, catalogue: Catalogue = CATALOGUE) -> Prediction | Infeasible | str:
    return predict_measurement(m, anchors=None, without=frozenset(), catalogue=catalogue)


def test_a_measured_row_is_predicted_as_it_ran(make_measurement: Make):
    row = make_measurement(
        spec="llama3_8b", mode="cuda_graph", batch=4, prompt_len=512, context_len=520.5
    )
    result = beside(row)
    assert isinstance(result, Prediction)
    work = Workload(batch=4, prompt_len=512, gen_len=1, context_len=520.5)
    assert result.phases["decode"] == decode(captured=True, workload=work)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"spec": "gpt9"}, "gpt9"),
        ({"spec": "llama3_8b", "device": "h300"}, "h300"),
        ({"spec": "llama3_8b", "engine": "hff"}, "hff"),
        ({"spec": "llama3_8b", "precision": "fp7"}, "unknown precision 'fp7'"),
        ({"spec": "llama3_8b", "phase": "request"}, "gen_len"),
    ],
)
def test_a_row_that_cannot_be_predicted_comes_with_the_reason(
    make_measurement: Make, fields: dict[str, object], told: str
):
    reason = beside(make_measurement(**fields))
    assert isinstance(reason, str)
    assert told in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("prompt_len", "context_len", "noted"),
    [(130_944, None, False), (130_945, None, True), (64, 2e5, True)],
)
def test_a_sequence_beyond_what_the_model_is_made_for_is_noted(
    prompt_len: int, context_len: float | None, noted: bool
) -> None:
    work = Workload(prompt_len=prompt_len, gen_len=128, context_len=context_len)
    result = predicted("llama3_8b", workload=work)
    assert any("llama3_8b is made for 131072" in note for note in result.notes) is noted


def test_a_row_is_predicted_with_the_weights_that_it_names(make_measurement: Make) -> None:
    own, same, narrow = (
        beside(make_measurement(spec="llama3_8b", precision=p)) for p in (None, "bf16", "fp8")
    )
    assert isinstance(own, Prediction)
    assert isinstance(narrow, Prediction)
    assert own == same
    assert narrow.memory.weights_bytes < 0.51 * own.memory.weights_bytes


def test_a_row_that_cannot_run_is_infeasible(make_measurement: Make):
    result = beside(make_measurement(spec="qwen2_5_7b", parallelism=Parallelism(tp=8)))
    assert isinstance(result, Infeasible)


def test_a_damaged_bundle_is_not_taken_for_a_row_without_prediction(
    make_measurement: Make, tmp_path: Path
):
    path = tmp_path / "bundle.json"
    path.write_text('{"schema": "energylens/bundle/v1"', encoding="utf-8")
    with pytest.raises(CalibrationError, match=str(path)):
        beside(make_measurement(spec="llama3_8b"), Catalogue(bundle_files=(path,)))


# ---------------------------------------------------------------- the process

HEAVY = ("torch", "transformers", "sklearn", "pandas", "pynvml")


def test_predicting_needs_no_heavy_library_and_little_memory():
    arguments = ["predict", "specs/llama3_70b.yaml", "--engine", "hf", "--tp", "2", "--json"]
    code = (
        "import json, pathlib, resource, runpy, sys\n"
        f"sys.argv = ['energylens', *{arguments!r}]\n"
        "try:\n"
        "    runpy.run_module('energylens', run_name='__main__')\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        "status = pathlib.Path('/proc/self/status')\n"
        # On Linux ru_maxrss of a child starts at what its parent held; VmHWM does not.
        "if status.exists():\n"
        "    peak = int(status.read_text().split('VmHWM:')[1].split()[0]) * 1024\n"
        "else:\n"
        "    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps({'peak_bytes': peak, 'modules': sorted(sys.modules)}), file=sys.stderr)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["feasible"] is True
    facts = json.loads(done.stderr.splitlines()[-1])
    assert not [name for name in HEAVY if name in facts["modules"]]
    assert facts["peak_bytes"] < 150e6
