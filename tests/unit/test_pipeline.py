"""Pipelines: the layers of stages, what goes between them, who waits, and what it all comes to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from energylens.cli import main
from energylens.cost.bundle import select
from energylens.errors import OutOfRangeError
from energylens.lower import Lowered, fullest, lower, lower_stages, memory, parameters
from energylens.lower.stages import partition
from energylens.machine import StepSums, machine
from energylens.pipeline import Waiting, makespan, period, pipelined
from energylens.predict import Catalogue, microbatches, predict
from energylens.results import Anchors, BoardAnchor, Infeasible, Interval, Kind, Prediction, Source
from energylens.schedule import Part, StepResult
from energylens.spec.model import Spec
from energylens.spec.system import Config, Mode, Parallelism, Step, Workload

CATALOGUE = Catalogue()
H200, VLLM = CATALOGUE.device("h200"), CATALOGUE.engine("vllm")
BUNDLES = CATALOGUE.bundles(H200, VLLM)
LLAMA, TIED, MOE = (CATALOGUE.spec(n) for n in ("llama3_8b", "llama3_2_1b", "qwen3_moe"))
IDLE_W = select(BUNDLES, "h200", "vllm").typical.idle_w  # type: ignore[union-attr]


def stages(spec: Spec, **degrees: int) -> tuple[Lowered, ...]:
    found = lower_stages(spec, VLLM, Parallelism(**degrees))
    assert not isinstance(found, Infeasible), found
    return found


def run(
    spec: Spec = LLAMA,
    workload: Workload = Workload(),
    microbatches: int | None = None,
    anchors: Anchors | None = None,
    **degrees: int,
) -> Prediction:
    parallelism = Parallelism(**degrees)
    result = predict(
        spec,
        engine=VLLM,
        device=H200,
        config=Config(parallelism=parallelism, microbatches=microbatches),
        workload=workload,
        bundles=BUNDLES,
        anchors=anchors,
        link=CATALOGUE.link(H200, 8),
    )
    assert isinstance(result, Prediction), result
    return result


# ---------------------------------------------------------------- stages


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        # What get_pp_indices of vLLM 0.24.0 returned.
        (32, 1, (32,)),
        (32, 2, (16, 16)),
        (61, 2, (31, 30)),
        (80, 3, (27, 27, 26)),
        (32, 5, (6, 6, 7, 7, 6)),
        (61, 8, (7, 7, 8, 8, 8, 8, 8, 7)),
        (31, 8, (4, 4, 4, 4, 4, 4, 4, 3)),
    ],
)
def test_layers_are_split_as_vllm_does(layers: int, count: int, expected: tuple[int, ...]) -> None:
    assert partition(layers, count) == expected


@given(st.integers(1, 200), st.integers(1, 64))
def test_no_layer_is_lost(layers: int, count: int) -> None:
    found = partition(layers, count)
    assert sum(found) == layers
    assert max(found) - min(found) <= 1
    assert found[-1] == min(found)


@pytest.mark.parametrize("spec", [LLAMA, MOE])
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_the_weights_of_the_stages_are_those_of_the_model(spec: Spec, pp: int) -> None:
    specs = [s.spec for s in stages(spec, pp=pp)]
    assert sum(map(parameters, specs)) == parameters(spec)
    whole = memory(stages(spec)[0], Workload(), H200)
    held = [memory(s, Workload(), H200) for s in stages(spec, pp=pp)]
    assert sum(m.weights_bytes for m in held) == pytest.approx(whole.weights_bytes)
    assert sum(m.kv_cache_bytes for m in held) == pytest.approx(whole.kv_cache_bytes)
    most = fullest(stages(spec, pp=pp), Workload(), H200)
    assert most.used_bytes == max(m.used_bytes for m in held)


def test_a_tied_weight_is_held_on_both_ends() -> None:
    specs = [s.spec for s in stages(TIED, pp=2)]
    embedding = TIED.ranks["v"] * TIED.ranks["m"]
    assert sum(map(parameters, specs)) == parameters(TIED) + embedding


def test_layers_of_several_kinds_stay_in_order() -> None:
    layer = LLAMA.blocks[1]
    blocks = (
        LLAMA.blocks[0],
        replace(layer, name="first", repeat=3),
        replace(layer, name="single", repeat=1),
        replace(layer, name="last", repeat=5),
        LLAMA.blocks[2],
    )
    specs = [s.spec for s in stages(replace(LLAMA, blocks=blocks), pp=4)]
    assert [[(b.name, b.repeat) for b in s.blocks] for s in specs] == [
        [("embedding", 1), ("first", 2)],
        [("first", 1), ("single", 1)],
        [("last", 3)],
        [("last", 2), ("head", 1)],
    ]


def test_layers_with_and_without_a_window_take_turns() -> None:
    own = stages(CATALOGUE.spec("gpt_oss_20b"), pp=5)
    # 24 layers as 4, 5, 5, 5, 5 without the last: every other one has a window.
    found = [{b.name: b.repeat for b in s.spec.blocks} for s in own]
    assert [f["window_layer"] + f["layer"] for f in found] == [5, 5, 5, 5, 4]
    assert all(abs(f["window_layer"] - f["layer"]) <= 1 for f in found)


def test_a_stage_sends_hidden_states_and_residual_in_parts_of_its_workers() -> None:
    first, last = stages(LLAMA, tp=2, pp=2)
    step = Step.prefill(1, 100, Mode.SERVING)
    sent, gathered = first.ops(step)[-1], last.ops(step)[0]
    # 100 tokens run as the captured graph of 104.
    assert (sent.kernel, sent.count, sent.sizes) == (
        "send",
        2,
        {"values": 104 * 4096 / 2, "workers": 2},
    )
    assert (gathered.kernel, gathered.count, gathered.sizes) == (
        "all_gather",
        2,
        {"values": 104 * 4096, "workers": 2},
    )
    assert [op.kernel for op in first.ops(step)].count("embedding") == 1
    assert "embedding" not in {op.kernel for op in last.ops(step)}
    assert "lm_head" not in {op.name for op in first.ops(step)}


def test_stages_that_do_the_same_are_one_value() -> None:
    first, second, third, last = stages(LLAMA, pp=4)
    assert second is third
    assert len({id(s) for s in (first, second, last)}) == 3


@pytest.mark.parametrize("spec", [LLAMA, MOE])
@pytest.mark.parametrize("pp", [3, 5])
def test_a_stage_does_what_its_own_model_does(spec: Spec, pp: int) -> None:
    for own in stages(spec, tp=2, ep=1, pp=pp):
        alone = lower(own.spec, VLLM, Parallelism(tp=2))
        assert isinstance(alone, Lowered)
        for step in (Step.prefill(3, 500, Mode.SERVING), Step.decode(7, 900.5, Mode.SERVING)):
            between = ("stage_all_gather", "stage_send")
            assert [op for op in own.ops(step) if op.name not in between] == list(alone.ops(step))


def test_what_has_no_pipeline_says_so() -> None:
    hf = lower_stages(LLAMA, CATALOGUE.engine("hf"), Parallelism(pp=2))
    assert isinstance(hf, Infeasible)
    assert "engine hf has no pipeline parallelism" in hf.reason
    many = lower_stages(LLAMA, VLLM, Parallelism(pp=33))
    assert isinstance(many, Infeasible)
    assert "pp=33 is more than its 32 layers" in many.reason


@pytest.mark.parametrize("spec", [LLAMA, MOE])
def test_one_stage_is_the_model_as_it_was(spec: Spec) -> None:
    (own,) = stages(spec, tp=2)
    whole = lower(spec, VLLM, Parallelism(tp=2))
    assert isinstance(whole, Lowered)
    for step in (Step.prefill(3, 500, Mode.SERVING), Step.decode(7, 900.5, Mode.SERVING)):
        assert own.by_worker(step) == whole.by_worker(step)


# ---------------------------------------------------------------- turns

times = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 4)),
    elements=st.integers(1, 9).map(float),
)


def turn(latency_s: float, watts: float = 300.0) -> StepResult:
    joules = watts * latency_s
    return StepResult(
        latency_s=latency_s,
        energy_j=joules,
        clock=1.0,
        regime="device",
        parts=(
            Part(
                op=None,
                kind=Kind.GEMM,
                name="work",
                count=1,
                latency_s=latency_s,
                energy_j=joules,
                source=Source.MEASURED,
            ),
        ),
        interval=Interval(
            level=0.9,
            latency_s=(0.9 * latency_s, 1.1 * latency_s),
            energy_j=(0.8 * joules, 1.2 * joules),
        ),
        source=Source.MEASURED,
    )


def slow_makespan(own: np.ndarray) -> float:
    """The longest way from the first job on the first stage to the last on the last."""
    jobs, count = own.shape
    best = 0.0
    for cuts in itertools.combinations_with_replacement(range(jobs), count - 1):
        bounds = (0, *cuts, jobs - 1)
        best = max(
            best,
            sum(own[a : b + 1, s].sum() for s, (a, b) in enumerate(itertools.pairwise(bounds))),
        )
    return best


@given(times)
def test_the_makespan_is_the_longest_way(own: np.ndarray) -> None:
    assert float(makespan(own)) == pytest.approx(slow_makespan(own))


@given(times)
def test_rounds_settle_to_the_period_where_jobs_are_alike(own: np.ndarray) -> None:
    own = np.repeat(own[:1], len(own), axis=0)
    done = np.zeros(own.shape[1])
    ready = np.zeros(len(own))  # when each job has left the last stage
    ends = []
    for _ in range(30):
        for job, turns in enumerate(own):
            before = ready[job]
            for stage, seconds in enumerate(turns):
                done[stage] = before = max(done[stage], before) + seconds
            ready[job] = before
        ends.append(ready[-1])
    assert (ends[-1] - ends[9]) / 20 == pytest.approx(float(period(own)))


@pytest.mark.parametrize("rounds", [True, False])
@given(own=times)
def test_turns_and_waits_add_up(own: np.ndarray, rounds: bool) -> None:
    count = own.shape[1]
    waiting = [Waiting(idle_w=100.0 + s, above_idle_w=20.0) for s in range(count)]
    r = pipelined([[turn(t) for t in job] for job in own], waiting, rounds=rounds)
    assert max(own.sum(axis=0).max(), own.sum(axis=1).max()) <= r.latency_s <= own.sum()
    assert sum(p.latency_s for p in r.parts) == pytest.approx(r.latency_s)
    assert sum(p.energy_j for p in r.parts) == pytest.approx(r.energy_j)
    waits = sum(
        (r.latency_s - own[:, s].sum()) * (w.idle_w + w.above_idle_w) for s, w in enumerate(waiting)
    )
    assert r.energy_j == pytest.approx(300.0 * own.sum() + waits)
    low, high = r.interval.energy_j
    assert low < r.energy_j < high
    assert r.interval.latency_s == pytest.approx((0.9 * r.latency_s, 1.1 * r.latency_s))


def test_one_job_passes_stage_by_stage_and_the_others_wait() -> None:
    waiting = [Waiting(idle_w=100.0, above_idle_w=10.0)] * 2
    r = pipelined([[turn(2.0), turn(3.0)]], waiting, rounds=False)
    assert r.latency_s == 5.0
    assert r.energy_j == pytest.approx(300 * 5 + 110 * 5)
    waited = next(p for p in r.parts if p.name == "waiting stages")
    assert (waited.kind, waited.energy_j, waited.latency_s) == (Kind.WAIT, 50.0, 0.0)


# ---------------------------------------------------------------- predictions

workloads = st.builds(
    Workload, batch=st.integers(1, 64), prompt_len=st.integers(1, 4096), gen_len=st.integers(1, 99)
)


@given(
    spec=st.sampled_from((LLAMA, MOE)),
    workload=workloads,
    pp=st.sampled_from((2, 3, 4)),
    tp=st.sampled_from((1, 2)),
    data=st.data(),
)
@settings(max_examples=20)
def test_energy_and_time_of_a_pipeline_add_up_and_pay_for_idle_boards(
    spec: Spec, workload: Workload, pp: int, tp: int, data: st.DataObject
) -> None:
    most = min(pp, workload.batch)
    parts = data.draw(st.none() | st.integers(1, most))
    p = run(spec, workload, parts, pp=pp, tp=tp)
    for name, phase in p.phases.items():
        rows = [r for r in p.breakdown if r.phase == name]
        assert sum(r.latency_s for r in rows) == pytest.approx(phase.latency_s, rel=1e-9)
        assert sum(r.energy_j for r in rows) == pytest.approx(phase.energy_j, rel=1e-9)
        assert any(r.kind is Kind.WAIT and r.op == "waiting stages" for r in rows)
        assert any(r.op == "stage_send" for r in rows)
        assert phase.energy_j > 0.999 * IDLE_W * phase.latency_s * pp * tp
        for quantity in ("latency_s", "energy_j"):
            low, high = getattr(phase.interval, quantity)
            assert low <= getattr(phase, quantity) <= high


@given(
    spec=st.sampled_from((LLAMA, MOE)),
    batch=st.integers(1, 256),
    prompt_len=st.integers(1, 4096),
    pp=st.sampled_from((2, 4, 7)),
)
@settings(max_examples=20)
def test_a_lone_batch_is_never_faster_in_stages(
    spec: Spec, batch: int, prompt_len: int, pp: int
) -> None:
    batch = max(1, min(batch, 16384 // prompt_len))  # one step of prefill
    workload = Workload(batch=batch, prompt_len=prompt_len, gen_len=8)
    one, staged = run(spec, workload), run(spec, workload, pp=pp)
    for name, phase in one.phases.items():
        assert staged.phases[name].latency_s >= phase.latency_s * (1 - 1e-3)
        assert staged.phases[name].energy_j > phase.energy_j


def test_parts_in_flight_overlap() -> None:
    workload = Workload(batch=64, prompt_len=256, gen_len=64)
    alone, two = run(workload=workload, pp=2), run(workload=workload, microbatches=2, pp=2)
    decode, both = alone.phases["decode"], two.phases["decode"]
    assert both.latency_s < decode.latency_s
    # A step of half the batch takes each stage nearly as long: weights are read for it again.
    half = run(workload=replace(workload, batch=32), pp=2).phases["decode"]
    assert half.latency_s < both.latency_s * 1.001
    assert both.latency_s == pytest.approx(half.latency_s, rel=0.1)


def test_a_batch_is_as_many_parts_as_its_prefill_has_steps() -> None:
    for prompt_len, expected in ((1024, 1), (2048, 2), (8192, 2)):
        workload = Workload(batch=16, prompt_len=prompt_len, gen_len=16)
        own = run(workload=workload, pp=2).phases["decode"]
        asked = run(workload=workload, microbatches=expected, pp=2).phases["decode"]
        assert own.latency_s == asked.latency_s
    assert microbatches(7, 3) == (3, 2, 2)


def test_the_chunks_of_a_long_prefill_follow_each_other_through_the_stages() -> None:
    workload = Workload(batch=1, prompt_len=8 * 16384, gen_len=1)
    one, two = run(workload=workload), run(workload=workload, pp=2)
    ratio = two.phases["prefill"].latency_s / one.phases["prefill"].latency_s
    # The last chunk sees all of the context: what the second stage does of it adds to half.
    assert 0.5 < ratio < 0.65


def test_boards_are_named_stage_by_stage() -> None:
    def anchor(idle_w: float, gemv_gbs: float) -> BoardAnchor:
        return BoardAnchor(
            board_uuid="x",
            device="h200",
            idle_w=idle_w,
            stream_w=600.0,
            gemm_tflops=660.0,
            gemm_w=690.0,
            gemm_mhz=1450.0,
            gemv_gbs=gemv_gbs,
        )

    boards = [anchor(110.0, 4300.0), anchor(110.0, 3900.0)]
    workload = Workload(batch=1, prompt_len=100, gen_len=8, context_len=20000)
    slow_last, slow_first = (
        run(workload=workload, anchors=Anchors(boards=tuple(b)), pp=2)
        for b in (boards, boards[::-1])
    )
    # The last stage has the head beside as many layers.
    assert slow_last.phases["decode"].latency_s > slow_first.phases["decode"].latency_s
    assert not any("anchors given" in note for note in slow_last.notes)


def test_many_steps_are_priced_on_every_stage_as_one_by_one() -> None:
    own = stages(MOE, pp=4, tp=2, ep=2)
    priced = machine(
        H200,
        workers=2,
        stages=4,
        bundle=select(BUNDLES, "h200", "vllm"),
        anchors=None,
        link=CATALOGUE.link(H200, 8),
    )
    steps = [Step.decode(33, 700.0, Mode.SERVING), Step.prefill(2, 1500, Mode.SERVING)]
    sums = StepSums(priced.model)
    for lone in (False, True):
        latency, energy = priced.price(sums, own, steps, lone=lone)
        for i, step in enumerate(steps):
            turns = priced.turns(own, step, frozenset(), lone=lone)
            assert latency[i] == pytest.approx([t.latency_s for t in turns], rel=1e-9)
            assert energy[i] == pytest.approx([t.energy_j for t in turns], rel=1e-9)


@pytest.mark.parametrize(
    ("microbatches", "batch", "allowed"),
    [(3, 8, "from 1 to 2"), (2, 1, "1"), (0, 8, "from 1 to 2")],
)
def test_no_more_parts_than_stages_and_sequences(
    microbatches: int, batch: int, allowed: str
) -> None:
    with pytest.raises(OutOfRangeError, match=f"microbatches must be {allowed} at"):
        run(workload=Workload(batch=batch), microbatches=microbatches, pp=2)


def test_the_verb_predicts_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "llama3_70b", "--pp", "2", "--tp", "2", "--batch", "8"]
    assert main([*words, "--microbatches", "2"]) == 0
    out = capsys.readouterr().out
    assert "tp 2, pp 2" in out and "waiting stages" in out
    assert main([*words, "--microbatches", "3"]) == 2
    assert main(["predict", "llama3_8b", "--pp", "2", "--engine", "hf"]) == 3
    assert "engine hf has no pipeline parallelism" in capsys.readouterr().err
    assert main(["predict", "llama3_8b", "--pp", "2", "--rate", "1"]) == 3
    assert "with pipeline parallelism is not simulated" in capsys.readouterr().err


def test_a_send_is_priced_as_a_measured_collective_of_as_many_bytes() -> None:
    model = select(BUNDLES, "h200", "vllm").model(H200, None)  # type: ignore[union-attr]
    send = stages(LLAMA, pp=2)[0].ops(Step.prefill(1, 4096, Mode.SERVING))[-1]
    gather = replace(send, kernel="all_gather", shape=(2 * send.shape[0], 2))
    one, other = model.costs([send, gather])
    assert one.latency_s == other.latency_s
    assert one.source is Source.TRANSFERRED
    assert one.latency_rel_se > other.latency_rel_se
    # Not faster than the link.
    assert one.latency_s > send.bytes_read / 450e9
