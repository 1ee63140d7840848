"""Laws of the lowering that hold for every model, degree and step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from energylens.graph import Op, count_einsum
from energylens.lower import lower, lower_step, memory, parameters, valid_tp
from energylens.results import Infeasible, Kind
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.model import Spec
from energylens.spec.resources import list_resources
from energylens.spec.system import Engine, Mode, Parallelism, Sequences, Step, Workload
from energylens.units import bytes_per_value

HF = load_engine("hf")
H200 = load_device("h200")
SPLIT_ALL = replace(HF, tp_replicated=())
FUSED = replace(HF, fusion=(*HF.fusion, ("q", "k", "v"), ("gate", "up")))
DENSE = tuple(
    s for s in map(load_spec, list_resources("specs")) if s.moe is None and valid_tp(s) != (1,)
)
LLAMA = load_spec("llama3_8b")

sizes = st.integers(1, 6)


@st.composite
def llamas(draw: st.DrawFn) -> Spec:
    """Small dense models, and the shipped ones."""
    if draw(st.booleans()):
        return draw(st.sampled_from(DENSE))
    g, r, d = draw(sizes), draw(sizes), draw(sizes)
    ranks = {"m": 8, "g": g, "r": r, "d": d, "f": g * r * draw(sizes), "v": 50 + draw(sizes)}
    return replace(draw(st.sampled_from(DENSE)), ranks=ranks)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Spec, int]:
    spec = draw(llamas())
    return spec, draw(st.sampled_from(valid_tp(spec)))


groups = st.builds(
    lambda count, new, past: Sequences(count=count, new=new, context=new + past),
    st.integers(1, 8),
    st.integers(1, 64),
    st.integers(0, 500),
)
steps = st.builds(
    lambda s, mode: Step(sequences=tuple(s), mode=mode),
    st.lists(groups, min_size=1, max_size=3),
    st.sampled_from((Mode.EAGER, Mode.CUDA_GRAPH)),
)


def run(spec: Spec, step: Step, tp: int = 1, engine: Engine = HF) -> tuple[Op, ...]:
    ops = lower_step(spec, engine, Parallelism(tp=tp), step)
    assert not isinstance(ops, Infeasible), ops
    return ops


def by_name(ops: tuple[Op, ...], value: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for op in ops:
        amount = op.sizes["n"] * op.sizes["k"] if value == "weights" else op.flops
        total[op.name] = total.get(op.name, 0) + op.count * amount
    return total


def total_bytes(ops: tuple[Op, ...]) -> float:
    return sum(o.count * (o.bytes_read + o.bytes_written) for o in ops)


def total_flops(ops: tuple[Op, ...]) -> float:
    return sum(o.count * o.flops for o in ops)


@given(sharded(), steps)
def test_workers_together_do_the_flops_and_hold_the_weights_of_the_unsharded_model(
    case: tuple[Spec, int], step: Step
) -> None:
    spec, tp = case
    kv_copies = max(1, tp // spec.ranks["g"])
    padding = -(-spec.ranks["v"] // tp) * tp / spec.ranks["v"]
    factor = {"k": kv_copies, "v": kv_copies, "lm_head": padding}
    for value in ("flops", "weights"):
        kinds = (Kind.GEMM,) if value == "weights" else (Kind.GEMM, Kind.ATTENTION)
        whole, part = (
            by_name(tuple(o for o in run(spec, step, n) if o.kind in kinds), value) for n in (1, tp)
        )
        assert whole.keys() == part.keys()
        for name, amount in whole.items():
            expected = amount * factor.get(name, 1)
            assert abs(part[name] * tp - expected) <= 1e-9 * expected


@given(sharded())
def test_memory_of_all_workers_is_the_model_replicas_apart(case: tuple[Spec, int]) -> None:
    spec, tp = case
    spec = replace(spec, ranks={**spec.ranks, "v": spec.ranks["v"] * tp})  # no padding
    whole, part = (
        memory(lower(spec, SPLIT_ALL, Parallelism(tp=n)), Workload(), H200).weights_bytes
        for n in (1, tp)
    )
    assert whole == parameters(spec) * 2
    r, layers = spec.ranks, next(b.repeat for b in spec.blocks if b.name == "layer")
    layer = next(b for b in spec.blocks if b.name == "layer").cascade
    bias = any(e.bias for e in layer)
    norms = layers * (2 * r["m"] + 2 * r["d"] * any(e.name == "q_norm" for e in layer)) + r["m"]
    kv = layers * 2 * (r["m"] + bias) * r["g"] * r["d"]
    copies = norms * (tp - 1) + kv * (max(1, tp // r["g"]) - 1)
    assert part * tp == whole + 2 * copies


@given(sharded(), steps)
def test_a_gemm_has_the_flops_that_opt_einsum_counts(case: tuple[Spec, int], step: Step) -> None:
    spec, _ = case
    ops = {o.name: o for o in run(spec, step)}
    token_ranks = {**spec.ranks, "b": 1, "s": step.tokens}
    for entry in (e for b in spec.blocks for e in b.cascade if e.name in ops and e.einsum):
        rows = {"b": step.batch} if entry.name == "lm_head" else {}
        assert entry.einsum is not None
        counted = count_einsum(entry.einsum, {**token_ranks, **rows})
        op = ops[entry.name]
        width = bytes_per_value(op.dtype)
        assert op.flops == counted.flops
        assert op.bytes_read == (counted.weight_values + counted.input_values) * width
        assert op.bytes_written == counted.output_values * width


@given(sharded(), steps)
def test_fusion_adds_no_bytes_and_keeps_the_flops(case: tuple[Spec, int], step: Step) -> None:
    spec, tp = case
    apart, fused = run(spec, step, tp), run(spec, step, tp, FUSED)
    assert len(fused) == len(apart) - 3
    assert total_bytes(fused) < total_bytes(apart)
    assert abs(total_flops(fused) - total_flops(apart)) <= 1e-9 * total_flops(apart)


@given(groups)
def test_fused_attention_moves_no_more_than_its_contractions(group: Sequences) -> None:
    step = Step(sequences=(group,), mode=Mode.EAGER)
    (attention,) = (o for o in run(LLAMA, step) if o.name == "attention")
    ranks = {**LLAMA.ranks, "b": group.count, "s": group.new, "t": int(group.context)}
    entries = {e.name: e for b in LLAMA.blocks for e in b.cascade}
    apart = [
        count_einsum(e.einsum, ranks) for n in ("scores", "context") if (e := entries[n]).einsum
    ]
    moved = sum(c.input_values + c.output_values for c in apart) * 2
    assert attention.bytes_read + attention.bytes_written <= moved
    assert attention.flops <= sum(c.flops for c in apart)  # the mask leaves pairs out


@given(sharded(), groups, st.sampled_from((Mode.EAGER, Mode.CUDA_GRAPH)), st.data())
def test_a_token_more_never_costs_less(
    case: tuple[Spec, int], group: Sequences, mode: Mode, data: st.DataObject
) -> None:
    spec, tp = case
    more = [
        replace(group, count=group.count + 1),
        replace(group, context=group.context + 1),
    ]
    if group.new > 1:  # a second new token turns a decode step into a prefill, with other kernels
        more.append(replace(group, new=group.new + 1, context=group.context + 1))
    larger = data.draw(st.sampled_from(more))
    before, after = (run(spec, Step(sequences=(g,), mode=mode), tp) for g in (group, larger))
    assert total_flops(after) >= total_flops(before)
    assert total_bytes(after) >= total_bytes(before)


@given(sharded(), groups, st.sampled_from((Mode.EAGER, Mode.CUDA_GRAPH)))
def test_equal_groups_cost_what_one_group_costs(
    case: tuple[Spec, int], group: Sequences, mode: Mode
) -> None:
    spec, tp = case
    two = run(spec, Step(sequences=(group, group), mode=mode), tp)
    one = run(spec, Step(sequences=(replace(group, count=2 * group.count),), mode=mode), tp)
    assert abs(total_flops(two) - total_flops(one)) <= 1e-9 * total_flops(one)
    assert abs(total_bytes(two) - total_bytes(one)) <= 1e-9 * total_bytes(one)


@given(llamas(), st.integers(2, 80))
def test_a_degree_runs_exactly_where_it_is_valid(spec: Spec, tp: int) -> None:
    result = lower_step(spec, HF, Parallelism(tp=tp), Step.decode(1, 8, Mode.EAGER))
    assert isinstance(result, Infeasible) == (tp not in valid_tp(spec))
