"""What holds for every configuration that can be predicted."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energylens.cost.board import board
from energylens.cost.bundle import select
from energylens.lower import lower
from energylens.machine import StepSums, machine
from energylens.predict import Catalogue, predict
from energylens.results import Anchors, BoardAnchor, HostAnchor, Infeasible, Kind, Prediction
from energylens.spec.system import (
    Config,
    Mode,
    Overlapping,
    Parallelism,
    Phase,
    Sequences,
    Step,
    Workload,
)

CATALOGUE = Catalogue()
HF, VLLM = CATALOGUE.engine("hf"), CATALOGUE.engine("vllm")
STEPS = (Phase.PREFILL, Phase.DECODE)

specs = st.sampled_from(("llama3_2_1b", "llama3_8b", "qwen2_5_7b", "qwen3_32b", "llama3_70b"))
workloads = st.builds(
    Workload,
    batch=st.integers(1, 64),
    prompt_len=st.integers(1, 8192),
    gen_len=st.integers(1, 1000),
    context_len=st.none() | st.floats(1, 16384),
)
configs = st.builds(
    Config,
    parallelism=st.builds(
        Parallelism, tp=st.sampled_from((1, 2, 4, 8)), replicas=st.integers(1, 3)
    ),
    modes=st.sampled_from((Mode.EAGER, Mode.CUDA_GRAPH)).map(
        lambda mode: MappingProxyType({Phase.DECODE: mode})
    ),
    power_limit_w=st.none() | st.floats(300, 700),
)
laws = st.sets(st.sampled_from(("cap", "host", "straggler", "gap"))).map(frozenset)
anchors = st.builds(
    BoardAnchor,
    board_uuid=st.text("abcdef", min_size=1),
    device=st.just("h200"),
    idle_w=st.floats(105, 135),
    stream_w=st.floats(550, 680),
    gemm_tflops=st.floats(620, 700),
    gemm_w=st.floats(675, 695),
    gemm_mhz=st.floats(1350, 1550),
    gemv_gbs=st.none() | st.floats(3900, 4600),
)


def run(
    spec: str, config: Config, workload: Workload, device: str = "h200", **more: object
) -> Prediction | None:
    """The prediction, or None where the configuration cannot run."""
    on = CATALOGUE.device(device)
    result = predict(
        CATALOGUE.spec(spec),
        engine=HF,
        device=on,
        config=config,
        workload=workload,
        bundles=CATALOGUE.bundles(on, HF),
        link=CATALOGUE.link(on, config.parallelism.gpus),
        **more,
    )
    return result if isinstance(result, Prediction) else None


@given(
    spec=specs,
    config=configs,
    workload=workloads,
    without=laws,
    device=st.sampled_from(("h200", "h200", "a6000")),
)
@settings(max_examples=25)
def test_breakdown_adds_up_and_the_interval_holds_the_prediction(
    spec: str, config: Config, workload: Workload, without: frozenset[str], device: str
):
    if config.power_limit_w is not None:
        allowed = min(config.power_limit_w, CATALOGUE.device(device).power_limit_w)
        config = replace(config, power_limit_w=allowed)
    result = run(spec, config, workload, device, without=without)
    if result is None:
        return
    assert {r.kind for r in result.breakdown} <= set(Kind)
    for name, phase in result.phases.items():
        rows = [r for r in result.breakdown if r.phase == name]
        assert sum(r.latency_s for r in rows) == pytest.approx(phase.latency_s, rel=1e-9)
        assert sum(r.energy_j for r in rows) == pytest.approx(phase.energy_j, rel=1e-9)
        assert sum(r.share for r in rows) == pytest.approx(1.0)
        assert all(r.energy_j >= 0 for r in rows)
        assert max(r.source for r in rows) <= phase.source <= result.source
        for quantity in ("latency_s", "energy_j"):
            low, high = getattr(phase.interval, quantity)
            assert 0 < low <= getattr(phase, quantity) <= high
        assert phase.interval.level == 0.9
        gpus = config.parallelism.gpus
        assert phase.mean_power_w * phase.latency_s * gpus == pytest.approx(phase.energy_j)


@given(spec=specs, config=configs, workload=workloads)
@settings(max_examples=12)
def test_energy_is_at_least_idle_power_on_all_devices_for_the_makespan(
    spec: str, config: Config, workload: Workload
):
    result = run(spec, config, workload)
    if result is None:
        return
    bundle = select(CATALOGUE.bundles(CATALOGUE.device("h200"), HF), "h200", "torch")
    for phase in result.phases.values():
        idle_j = bundle.typical.idle_w * phase.latency_s * config.parallelism.gpus
        assert phase.energy_j > idle_j


@given(spec=specs, config=configs, workload=workloads, a=st.data())
@settings(max_examples=12)
def test_boards_may_be_named_in_any_order(
    spec: str, config: Config, workload: Workload, a: st.DataObject
):
    tp = config.parallelism.tp
    known = a.draw(st.lists(anchors, min_size=tp, max_size=tp))
    order = a.draw(st.permutations(known))
    one, other = (
        run(spec, config, workload, anchors=Anchors(boards=tuple(b)), phases=STEPS)
        for b in (known, order)
    )
    if one is None or other is None:
        return
    for name, phase in one.phases.items():
        assert other.phases[name].latency_s == pytest.approx(phase.latency_s, rel=1e-6)
        assert other.phases[name].energy_j == pytest.approx(phase.energy_j, rel=1e-6)


@given(spec=specs, workload=workloads, tp=st.sampled_from((1, 2)), watts=st.floats(250, 690))
@settings(max_examples=12)
def test_a_lower_limit_never_speeds_up_and_never_draws_more(
    spec: str, workload: Workload, tp: int, watts: float
):
    free, capped = (
        run(spec, Config(parallelism=Parallelism(tp=tp), power_limit_w=w), workload, phases=STEPS)
        for w in (700.0, watts)
    )
    if free is None or capped is None:
        return
    for name, phase in capped.phases.items():
        assert phase.latency_s >= free.phases[name].latency_s * (1 - 1e-9)
        assert phase.mean_power_w <= free.phases[name].mean_power_w * (1 + 1e-6)


@given(a=anchors)
def test_an_anchor_relative_to_itself_is_the_typical_board(a: BoardAnchor):
    own = board(a, a, CATALOGUE.device("h200"), 1.1)
    assert (own.memory_power, own.compute_power, own.memory_time) == pytest.approx((1, 1, 1))
    assert own.idle_w == a.idle_w


sequences = st.builds(
    lambda count, new, before: Sequences(count=count, new=new, context=new + before),
    count=st.integers(1, 300),
    new=st.just(1) | st.integers(1, 700),
    before=st.integers(0, 8000) | st.floats(0, 8000),
)
steps = st.lists(
    st.builds(
        lambda found, mode: Step(sequences=tuple(found), mode=mode),
        st.lists(sequences, min_size=1, max_size=3),
        st.sampled_from((Mode.SERVING, Mode.SERVING, Mode.EAGER, Mode.CUDA_GRAPH)),
    ),
    min_size=1,
    max_size=4,
)


@given(
    spec=specs,
    tp=st.sampled_from((1, 2, 4)),
    asked=steps,
    boards=st.lists(anchors, max_size=3),
    module_us=st.none() | st.floats(1000, 5000),
    watts=st.none() | st.floats(300, 700),
    overlap=st.none() | st.builds(Overlapping, sm=st.integers(1, 40), chunks=st.integers(1, 8)),
)
@settings(max_examples=25)
def test_many_steps_are_priced_at_once_as_one_by_one(
    spec: str,
    tp: int,
    asked: list[Step],
    boards: list[BoardAnchor],
    module_us: float | None,
    watts: float | None,
    overlap: Overlapping | None,
):
    on = CATALOGUE.device("h200")
    lowered = lower(CATALOGUE.spec(spec), VLLM, Parallelism(tp=tp, overlap=overlap))
    assert not isinstance(lowered, Infeasible)
    host = HostAnchor(launch_us=6.0, module_us=module_us) if module_us else None
    priced = machine(
        on,
        workers=tp,
        bundle=select(CATALOGUE.bundles(on, VLLM), "h200", "vllm"),
        anchors=Anchors(boards=tuple(boards), host=host),
        power_limit_w=watts,
        link=CATALOGUE.link(on, tp),
    )
    latency, energy = priced.price(StepSums(priced.model), (lowered,), asked)
    for step, latency_s, energy_j in zip(asked, latency[:, 0], energy[:, 0], strict=True):
        whole = priced.step(lowered.ops(step), step.mode, frozenset())
        assert latency_s == pytest.approx(whole.latency_s, rel=1e-9)
        assert energy_j == pytest.approx(whole.energy_j, rel=1e-9)
