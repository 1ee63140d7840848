"""Collectives beside compute: the law by a simulation, the lowering by counting, the verbs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import energylens
from energylens.cli import main
from energylens.cost.overlap import OverlapLaw, Split, clock_share
from energylens.errors import OutOfRangeError, SpecError
from energylens.graph import Op, make_op
from energylens.lower import lower, lower_step
from energylens.lower.overlap import wanted
from energylens.predict import Catalogue
from energylens.results import Infeasible, Prediction, Source
from energylens.results.search import Frontier
from energylens.spec.model import Overlap
from energylens.spec.system import Mode, Overlapping, Parallelism, Step

CATALOGUE = Catalogue()
LLAMA, VLLM, HF = CATALOGUE.spec("llama3_8b"), CATALOGUE.engine("vllm"), CATALOGUE.engine("hf")
FREE = OverlapLaw(late=0.0, slow_gemm=0.0, slow_sms=0.0, slow_collective=0.0, handover_s=0.0)
PREFILL = Step.prefill(1, 2048, Mode.EAGER)

times = st.floats(1e-6, 1e-2)


def split(chunks: float = 4, sms: float = 16, rows: float = 4096, columns: float = 8192) -> Split:
    return Split(chunks=chunks, rows=rows, columns=columns, sms=sms, sm_count=132)


# ---------------------------------------------------------------- the law


def simulated(gemm_s: float, collective_s: float, chunks: int, late: int) -> float:
    """Chunk by chunk: a collective starts ``late`` chunks after its own, and after the others."""
    ends = [gemm_s * (i + 1) for i in range(chunks)]
    done = 0.0
    for i in range(chunks):
        done = max(done, ends[min(i + late, chunks - 1)]) + collective_s
    return done


@given(gemm_s=times, collective_s=times, chunks=st.integers(1, 16), late=st.integers(0, 2))
def test_without_losses_it_is_what_the_order_alone_allows(
    gemm_s: float, collective_s: float, chunks: int, late: int
) -> None:
    law = replace(FREE, late=float(late))
    found = law.seconds(gemm_s, collective_s, split(chunks))
    assert found == pytest.approx(simulated(gemm_s, collective_s, chunks, late))


@given(
    gemm_s=times,
    collective_s=times,
    chunks=st.integers(1, 16),
    late=st.floats(0, 2),
    slow=st.tuples(*[st.floats(0, 0.9)] * 3),
    handover_s=st.floats(0, 1e-5),
)
def test_it_is_never_faster_than_without_losses_and_grows_with_each_of_them(
    gemm_s: float,
    collective_s: float,
    chunks: int,
    late: float,
    slow: tuple[float, float, float],
    handover_s: float,
) -> None:
    law = OverlapLaw(
        late=late,
        slow_gemm=slow[0],
        slow_sms=slow[1],
        slow_collective=slow[2],
        handover_s=handover_s,
    )
    found = law.seconds(gemm_s, collective_s, split(chunks))
    least = max(gemm_s, collective_s) * chunks + min(gemm_s, collective_s)
    assert found >= least * (1 - 1e-9)
    for name, more in (("handover_s", 1e-6), ("slow_gemm", 0.1), ("slow_collective", 0.1)):
        worse = replace(law, **{name: getattr(law, name) + more})
        assert worse.seconds(gemm_s, collective_s, split(chunks)) >= found * (1 - 1e-9)


def test_sms_that_a_gemm_leaves_free_are_not_taken_from_it() -> None:
    law = replace(FREE, slow_sms=1.0)
    free = split(rows=128, columns=2048, sms=120)  # 8 tiles
    assert law.seconds(1e-3, 0.5e-3, free) == pytest.approx(4e-3 + 0.5e-3)
    taken = replace(free, rows=2048)
    assert law.seconds(1e-3, 0.5e-3, taken) == pytest.approx(4e-3 + 0.5e-3 + 3 * 0.5e-3 * 120 / 132)


def test_more_sms_than_were_calibrated_are_extrapolated() -> None:
    device = CATALOGUE.device("h200")
    (bundle,) = (b for b in CATALOGUE.bundles(device, VLLM) if b.provider == "torch")
    sizes = {"values": 2.0**25, "workers": 2, "chunks": 4, "m": 4096, "n": 8192, "k": 8192}
    few, many = bundle.model(device).costs(
        [make_op("overlapped_all_reduce", sms=n, **sizes) for n in (32, 33)]
    )
    assert few.source < Source.EXTRAPOLATED <= many.source


def test_one_chunk_takes_turns() -> None:
    law = OverlapLaw(handover_s=5e-6)
    assert law.seconds(3e-3, 1e-3, split(chunks=1)) == pytest.approx(4e-3 + 5e-6)


def test_a_slower_gemm_is_held_up_while_the_collective_runs_and_no_longer() -> None:
    law = replace(FREE, slow_gemm=0.25, slow_collective=0.5)
    # 1 ms of collective takes 2 ms beside the GEMM, which loses a quarter of these.
    assert law.seconds(5e-3, 1e-3, split(chunks=2)) == pytest.approx(6e-3 + 5e-3 + 0.5e-3)
    # 1 ms of GEMM takes 4/3 ms beside the collective, which loses half of these.
    assert law.seconds(1e-3, 5e-3, split(chunks=2)) == pytest.approx(6e-3 + 5e-3 + 2e-3 / 3)


def test_tiles_that_leave_sms_free_let_the_collective_start_at_once() -> None:
    few = split(rows=512, columns=8192)  # 4 x 32 tiles
    assert replace(few, sms=4).fits_beside
    assert not replace(few, sms=5).fits_beside
    late = replace(FREE, late=1.0)
    assert late.seconds(2e-3, 1e-3, replace(few, sms=4)) == FREE.seconds(2e-3, 1e-3, few)
    assert late.seconds(2e-3, 1e-3, few) == pytest.approx(4 * 2e-3 + 2e-3)


def test_the_clock_share_gives_the_time_at_the_cap() -> None:
    def seconds(clock: float) -> float:
        return 3.0 - 1.0 / clock

    share = clock_share(seconds)
    assert share == pytest.approx(-0.5)
    assert seconds(1.0) * (share / 0.75 + 1 - share) == pytest.approx(seconds(0.75))


# ---------------------------------------------------------------- lowering


def ops(overlap: Overlapping | None = None, spec: Any = LLAMA, **more: Any) -> tuple[Op, ...]:
    parallelism = Parallelism(tp=more.pop("tp", 2), overlap=overlap)
    found = lower_step(spec, more.pop("engine", VLLM), parallelism, more.pop("step", PREFILL))
    assert not isinstance(found, Infeasible)
    return found


def by_name(found: tuple[Op, ...]) -> Mapping[str, Op]:
    return {op.name: op for op in found}


def test_a_gemm_is_cut_and_its_all_reduce_runs_beside_it() -> None:
    before, after = by_name(ops()), by_name(ops(Overlapping(sm=16, chunks=4)))
    assert before.keys() == after.keys()
    for name in ("o", "down"):
        m, n, k = before[name].shape
        assert after[name].shape == (m / 4, n, k)
        assert after[name].count == 4 * before[name].count
        reduce = after[f"{name}_all_reduce"]
        assert reduce.kernel == "overlapped_all_reduce"
        assert reduce.shape == (m * n, 2, 16, 4, m, n, k)
        assert reduce.count == before[f"{name}_all_reduce"].count == 32
    changed = {"o", "down", "o_all_reduce", "down_all_reduce"}
    assert all(before[name] == after[name] for name in before.keys() - changed)


@given(tokens=st.integers(1, 5000), chunks=st.integers(1, 16), tp=st.sampled_from([2, 4, 8]))
def test_no_flop_and_no_message_is_lost(tokens: int, chunks: int, tp: int) -> None:
    step = Step.prefill(1, tokens, Mode.EAGER)
    whole, cut = ops(step=step, tp=tp), ops(Overlapping(sm=8, chunks=chunks), step=step, tp=tp)
    flops = [sum(op.flops * op.count for op in each) for each in (whole, cut)]
    assert flops[0] <= flops[1] <= flops[0] * (1 + chunks / tokens)  # chunks are rounded up
    sent = [
        sum(op.sizes["values"] * op.count for op in each if op.type.is_collective)
        for each in (whole, cut)
    ]
    assert sent[0] == sent[1]


def test_steps_of_few_rows_take_turns() -> None:
    asked = Overlapping(sm=16, chunks=4)
    decode = Step.decode(64, 1024, Mode.SERVING)
    assert ops(asked, step=decode) == ops(step=decode)
    short, long = (Step.prefill(1, n, Mode.EAGER) for n in (4 * 127, 4 * 128))
    assert ops(asked, step=short) == ops(step=short)
    assert ops(asked, step=long) != ops(step=long)


def test_one_worker_has_nothing_to_overlap() -> None:
    assert ops(Overlapping(sm=16, chunks=4), tp=1) == ops(tp=1)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("llama3_8b", ["o", "down"]),
        ("llama3_2_1b", ["o", "down"]),
        ("qwen3_moe", ["o"]),  # experts are no GEMM
        ("gpt_oss_20b", ["o"]),
    ],
)
def test_what_is_asked_for_everywhere_is_every_gemm_with_partial_sums(
    spec: str, names: list[str]
) -> None:
    asked = Parallelism(tp=2, overlap=Overlapping(sm=8, chunks=2))
    found = wanted(CATALOGUE.spec(spec), asked)
    assert [o.collective for o in found] == names
    assert all(o.beside == o.collective and (o.sm, o.chunks) == (8, 2) for o in found)
    assert (
        by_name(ops(Overlapping(sm=8, chunks=2), CATALOGUE.spec(spec)))["o_all_reduce"].kernel
        == "overlapped_all_reduce"
    )


def test_layers_of_experts_take_turns_where_dense_layers_overlap() -> None:
    spec = CATALOGUE.spec("deepseek_v3")  # `down` is a GEMM in 3 layers, and of experts in 58
    for own in (
        ops(Overlapping(sm=16, chunks=2), spec, tp=8),
        ops(spec=replace(spec, overlap=(Overlap(collective="down", beside="gate", sm=16),)), tp=8),
    ):
        reduces = {op.kernel: op.count for op in own if op.name == "down_all_reduce"}
        assert reduces == {"overlapped_all_reduce": 3, "vllm_all_reduce": 58}
    only_experts = replace(
        CATALOGUE.spec("qwen3_moe"), overlap=(Overlap(collective="down", beside="down", sm=16),)
    )
    notes = predicted(only_experts).notes
    assert "overlap of down: no all-reduce follows a GEMM of that name, so there is none" in notes


@pytest.mark.parametrize("beside", ["gate_up", "gate", "up"])
def test_a_spec_names_a_gemm_that_comes_after_by_its_members(beside: str) -> None:
    spec = replace(LLAMA, overlap=(Overlap(collective="o", beside=beside, sm=16, chunks=4),))
    plain, found = by_name(ops()), by_name(ops(spec=spec))
    m, n, k = plain["gate+up"].shape
    assert found["gate+up"].shape == (m / 4, n, k)
    assert found["o"] == plain["o"]
    assert found["o_all_reduce"].shape[-3:] == (m, n, k)
    assert found["down_all_reduce"] == plain["down_all_reduce"]


def test_the_command_line_goes_before_the_spec() -> None:
    own = Overlap(collective="o", beside="gate", sm=16, chunks=4)
    spec = replace(LLAMA, overlap=(own,))
    assert wanted(spec, Parallelism(tp=2)) == (own,)
    assert wanted(spec, Parallelism(tp=2, overlap=Overlapping())) == ()
    assert wanted(spec, Parallelism(tp=1)) == ()
    assert ops(Overlapping(), spec) == ops()


@pytest.mark.parametrize(
    ("overlaps", "why"),
    [
        ([Overlap(collective="o", beside="act", sm=1)], "'act' is no GEMM of it"),
        ([Overlap(collective="o", beside="lm_head", sm=1)], "is no GEMM of it"),
        (
            [Overlap(collective=c, beside="gate", sm=1) for c in ("o", "down")],
            "has a collective beside it already",
        ),
        (
            [Overlap(collective="o", beside=g, sm=1) for g in ("gate", "down")],
            "'o' runs beside another GEMM already",
        ),
    ],
)
def test_one_collective_runs_beside_one_gemm_of_its_block(
    overlaps: list[Overlap], why: str
) -> None:
    with pytest.raises(SpecError, match=why):
        ops(spec=replace(LLAMA, overlap=tuple(overlaps)))


def test_stages_of_a_pipeline_overlap_their_own_layers() -> None:
    whole = lower(LLAMA, VLLM, Parallelism(tp=2, overlap=Overlapping(sm=16, chunks=2)))
    assert not isinstance(whole, Infeasible)
    from energylens.lower import staged

    stages = staged(whole, 2)
    assert not isinstance(stages, Infeasible)
    counts = [by_name(own.ops(PREFILL))["o_all_reduce"].count for own in stages]
    assert counts == [16, 16]


# ---------------------------------------------------------------- predictions


def predicted(spec: Any = "llama3_70b", **more: Any) -> Prediction:
    asked: dict[str, Any] = {"tp": 2, "batch": 8, "prompt_len": 2048, "gen_len": 8}
    found = energylens.predict(spec, catalogue=CATALOGUE, **(asked | more))
    assert isinstance(found, Prediction)
    return found


def test_off_is_what_a_spec_without_overlap_has() -> None:
    plain, off = predicted(), predicted(overlap=Overlapping())
    assert off.phases == plain.phases
    assert off.notes == plain.notes


def test_the_exposed_part_and_the_gemm_make_the_time_of_both() -> None:
    """One layer's `down`, from the costs of its chunks alone and the law."""
    device = CATALOGUE.device("h200")
    (bundle,) = (b for b in CATALOGUE.bundles(device, VLLM) if b.provider == "vllm")
    model = bundle.model(device)
    spec = CATALOGUE.spec("llama3_70b")
    found = by_name(ops(Overlapping(sm=16, chunks=4), spec, step=Step.prefill(1, 4096, Mode.EAGER)))
    down, reduce = found["down"], found["down_all_reduce"]
    chunk = Op(name="", kernel="limited_all_reduce", shape=(1024 * 8192, 2, 16))
    gemm, alone, exposed = model.costs((down, chunk, reduce))
    law = bundle.laws.overlap
    assert 1024 / 128 * 8192 / 256 + 16 > 132  # tiles of a chunk leave no SM free
    a, g = alone.latency_s, gemm.latency_s
    slower = 1 - law.slow_gemm - law.slow_sms * 16 / 132
    lost = (1 - slower) * a / (1 - law.slow_collective)
    assert g > a + law.slow_collective * g / slower  # the GEMM is what takes longer
    first = 1 + law.late
    total = first * (g + a) + (4 - first) * (g + lost) + 4 * law.handover_s
    assert exposed.latency_s == pytest.approx(total - 4 * g, rel=1e-9)
    assert exposed.energy_j == pytest.approx(4 * alone.energy_j, rel=1e-9)
    assert exposed.source >= Source.INTERPOLATED


def test_some_overlaps_save_and_others_cost() -> None:
    turns = predicted().ttft_s
    assert turns is not None
    saved = {
        text: turns - (predicted(overlap=Overlapping(sm=sm, chunks=n)).ttft_s or math.nan)
        for text, sm, n in (("16x8", 16, 8), ("2x4", 2, 4))
    }
    assert saved["16x8"] > 0 > saved["2x4"]


def test_a_prediction_says_that_the_engine_does_not_overlap_by_itself() -> None:
    asked = Overlapping(sm=16, chunks=4)
    assert any("vllm does not do by itself" in n for n in predicted(overlap=asked).notes)
    assert not any("overlap" in n for n in predicted(LLAMA, overlap=asked, tp=1).notes)
    missing = replace(LLAMA, overlap=(Overlap(collective="q", beside="gate", sm=16),))
    notes = predicted(missing).notes
    assert "overlap of q: no all-reduce follows a GEMM of that name, so there is none" in notes


def test_breakdown_and_intervals_hold_with_overlap() -> None:
    found = predicted(overlap=Overlapping(sm=4, chunks=8))
    for name, phase in found.phases.items():
        rows = [r for r in found.breakdown if r.phase == name]
        assert sum(r.latency_s for r in rows) == pytest.approx(phase.latency_s)
        assert sum(r.energy_j for r in rows) == pytest.approx(phase.energy_j)
        low, high = phase.interval.latency_s
        assert low < phase.latency_s < high


@given(sm=st.integers(1, 64), chunks=st.integers(1, 16), watts=st.floats(300, 700))
def test_no_overlap_is_faster_than_its_parts_or_lighter_than_idle(
    sm: int, chunks: int, watts: float
) -> None:
    found = energylens.predict(
        "llama3_70b", catalogue=CATALOGUE, tp=2, batch=4, prompt_len=1024, gen_len=2,
        overlap=Overlapping(sm=sm, chunks=chunks), power_limit_w=watts, phases=("prefill",),
    )  # fmt: skip
    assume(isinstance(found, Prediction))
    assert isinstance(found, Prediction)
    phase = found.phases["prefill"]
    busy = sum(r.latency_s for r in found.breakdown if r.kind != "collective")
    assert phase.latency_s >= busy
    assert 120 < phase.mean_power_w <= watts * 1.001


def test_where_nothing_was_calibrated_the_datasheet_prices_it() -> None:
    found = predicted("llama3_8b", device="a6000", overlap=Overlapping(sm=16, chunks=4))
    assert found.source is Source.ROOFLINE


# ---------------------------------------------------------------- the verbs


def explored(**more: Any) -> Frontier:
    asked: dict[str, Any] = {"gpus": 2, "batch": (1, 8, 32), "prompt_len": 2048, "gen_len": 8}
    found = energylens.explore("llama3_70b", catalogue=CATALOGUE, **(asked | more))
    assert isinstance(found, Frontier)
    return found


def test_overlaps_are_a_dimension_of_the_search() -> None:
    ways = (Overlapping(), Overlapping(sm=16, chunks=8), Overlapping(sm=2, chunks=4))
    found = explored(overlap=ways, objectives=("ttft", "energy_per_request"), pp=1)
    tried = {(c.parallelism.overlap, c.batch) for c in found.configs if c.parallelism.tp == 2}
    assert tried == {(o or None, n) for o in ways for n in (1, 8, 32)}
    assert all(c.parallelism.overlap is None for c in found.configs if c.parallelism.tp == 1)
    plain = explored(objectives=("ttft", "energy_per_request"), pp=1)
    assert found.counts.tried == plain.counts.tried + 2 * 3
    for c in found.configs:
        alone = energylens.predict(
            "llama3_70b", catalogue=CATALOGUE, tp=c.parallelism.tp, replicas=c.parallelism.replicas,
            overlap=c.parallelism.overlap, batch=c.batch, prompt_len=2048, gen_len=8,
        )  # fmt: skip
        assert isinstance(alone, Prediction)
        assert c.values["ttft_s"] == pytest.approx(alone.ttft_s, rel=found.table_error)
    rows = [r for r in found.rows() if r["tp"] == 2]
    assert {r["overlap"] for r in rows} == {None, "16x8", "2x4"}
    assert len({r["id"] for r in found.rows()}) == len(found.rows())


@pytest.mark.parametrize(
    ("prompt_len", "chunks", "last"),
    [
        (2, 8, 1016),  # sequences of a decode step, at most, that takes turns
        (37, 32, 109),  # prompts of a prefill of 4064 tokens
    ],
)
def test_the_table_knows_where_steps_begin_to_overlap(
    prompt_len: int, chunks: int, last: int
) -> None:
    slow = Overlapping(sm=1, chunks=chunks)
    lengths = {"prompt_len": prompt_len, "gen_len": 20}
    batches = range(max(1, last - 110), last + 200)
    found = explored(overlap=(slow,), tp=2, pp=1, gpus=2, batch=batches, **lengths)
    for c in (c for c in found.configs if abs(c.batch - last) <= 2):
        alone = energylens.predict(
            "llama3_70b", catalogue=CATALOGUE, tp=2, overlap=slow, batch=c.batch, **lengths
        )
        assert isinstance(alone, Prediction)
        for name in ("ttft_s", "tpot_s", "energy_per_request_j"):
            assert c.values[name] == pytest.approx(getattr(alone, name), rel=found.table_error)


def test_too_few_sms_are_not_on_the_front_of_ttft() -> None:
    ways = (None, Overlapping(sm=2, chunks=4))
    found = explored(overlap=ways, objectives=("ttft",), tp=2, pp=1, batch=8)
    assert found.best("ttft").parallelism.overlap is None


@pytest.mark.parametrize(
    "text", ["16", "16x", "x4", "0x4", "16x0", "-1x2", "on", "16x4x2", "a x b"]
)
def test_what_is_no_overlap_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["predict"], ["advise"], ["explore", "--gpus", "2"]):
        assert main([verb[0], "llama3_8b", *verb[1:], f"--overlap={text}"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "--overlap" in err
        assert "e.g. 16x4" in err


@pytest.mark.parametrize("way", ["asked for", "of the spec"])
def test_a_collective_leaves_some_sms_to_the_gemm(way: str) -> None:
    asked = Overlapping(sm=84) if way == "asked for" else None
    own = () if asked else (Overlap(collective="o", beside="gate", sm=84),)
    spec, more = replace(LLAMA, overlap=own), {"overlap": asked, "device": "a6000"}  # has 84
    with pytest.raises(SpecError, match="a6000 has 84, and the GEMM needs some; use fewer"):
        predicted(spec, **more)
    with pytest.raises(SpecError, match="a6000 has 84, and the GEMM needs some; use fewer"):
        energylens.explore(
            spec, catalogue=CATALOGUE, gpus=2, device="a6000", overlap=(asked,), batch=1
        )
    assert predicted(spec, **more | {"tp": 1, "batch": 1}).phases


def test_overlaps_are_at_least_one_sm_and_chunk() -> None:
    for sm, chunks in ((-1, 1), (0, 2), (4, 0)):
        with pytest.raises(OutOfRangeError):
            Overlapping(sm=sm, chunks=chunks)
    assert str(Overlapping(sm=16, chunks=4)) == "16x4"
    assert str(Overlapping()) == "off"
    assert not Overlapping()


def test_commands_of_an_overlapping_pick_say_what_servers_cannot_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = "explore llama3_70b --gpus 2 --tp 2 --pp 1 --batch 8 --prompt-len 2048 --gen-len 8"
    assert main([*arguments.split(), "--objective", "ttft", "--overlap", "off,16x8"]) == 0
    out = capsys.readouterr().out
    assert "without the overlap, for which vllm has no switch" in out
    assert "--tp 2 --overlap 16x8 --batch 8" in out
