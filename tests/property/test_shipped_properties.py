"""What holds for every shipped model, whatever its attention, its experts and its precisions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energylens.graph import Op, count_einsum
from energylens.lower import Lowered, lower, memory, parameters
from energylens.results import Infeasible, Kind
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.model import Entry, Spec
from energylens.spec.resources import list_resources
from energylens.spec.system import Mode, Parallelism, Sequences, Step, Workload
from energylens.units import bytes_per_value

H200 = load_device("h200")
VLLM = replace(load_engine("vllm"), tp_replicated=())
SPECS = {name: load_spec(name) for name in list_resources("specs")}
DEGREES = tuple(
    Parallelism(tp=tp, ep=ep, dp=dp)
    for tp, ep, dp in ((2, 1, 1), (8, 1, 1), (2, 2, 1), (8, 4, 1), (8, 8, 1), (1, 8, 8), (2, 4, 4))
)
WHOLE = Parallelism()

pytestmark = pytest.mark.parametrize("name", SPECS)

groups = st.builds(
    lambda count, new, past: Sequences(count=8 * count, new=new, context=new + past),
    st.integers(1, 4),
    st.just(1) | st.integers(2, 300),
    st.integers(0, 500),
)


def lowered(spec: Spec, degrees: Parallelism) -> Lowered | None:
    found = lower(spec, VLLM, degrees)
    return None if isinstance(found, Infeasible) else found


def by_name(per_worker: Sequence[Sequence[Op]], workers: int) -> dict[str, float]:
    """FLOPs of all workers by op; one list of ops stands for all of them."""
    total: dict[str, float] = defaultdict(float)
    for ops in per_worker:
        for op in ops:
            total[op.name] += op.count * op.flops * workers / len(per_worker)
    return dict(total)


def parts(found: Lowered, entry: Entry) -> int:
    """Workers between which the weights of an entry are split."""
    ranks = {r for a in entry.accesses if a.is_weight for r in a.ranks}
    return math.prod(ways for rank, ways in found.sharding.ways.items() if rank in ranks)


@settings(max_examples=25)
@given(degrees=st.sampled_from(DEGREES), group=groups)
def test_workers_together_do_the_flops_of_the_unsharded_model(
    name: str, degrees: Parallelism, group: Sequences
) -> None:
    # A vocabulary that all degrees divide, so that nothing is padded.
    spec = replace(SPECS[name], ranks={**SPECS[name].ranks, "v": 8 * 1024})
    found, whole = lowered(spec, degrees), lowered(spec, WHOLE)
    if found is None:
        return
    assert whole is not None
    step = Step(sequences=(group,), mode=Mode.EAGER)
    one = by_name(whole.by_worker(step), 1)
    all_ = by_name(found.by_worker(step), degrees.workers)
    # All with a weight but the experts, whose op has a load of its own on each worker.
    entries = {
        e.name: e
        for b in spec.blocks
        for e in b.cascade
        for a in e.accesses
        if e.einsum is not None and a.is_weight and ("e" not in a.ranks or len(a.ranks) == 2)
    }
    matrix = {o.name for o in whole.ops(step) if o.kind in (Kind.GEMM, Kind.ATTENTION, Kind.MOE)}
    for op_name in matrix:
        members = [entries[n] for n in op_name.split("+") if n in entries]
        expected = one[op_name]
        if members:  # whole weights do their work on each worker that has a part of the batch
            counted = [_flops(e, spec, group) for e in members]
            copies = [degrees.tp / parts(found, e) for e in members]
            ratio = sum(c * n for c, n in zip(counted, copies, strict=True)) / sum(counted)
            expected *= ratio
        assert all_[op_name] == pytest.approx(expected, rel=1e-9), op_name


def _flops(entry: Entry, spec: Spec, group: Sequences) -> float:
    assert entry.einsum is not None
    sizes = {**spec.ranks, "b": group.count, "s": group.new, "t": int(group.context)}
    return count_einsum(entry.einsum, sizes).flops


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_workers_together_hold_the_weights_of_the_model_and_its_replicas(
    name: str, degrees: Parallelism
) -> None:
    spec = replace(SPECS[name], ranks={**SPECS[name].ranks, "v": 8 * 1024})
    found, whole = lowered(spec, degrees), lowered(spec, WHOLE)
    if found is None:
        return
    assert whole is not None
    work = Workload(batch=8)
    held = memory(found, work, H200).weights_bytes * degrees.workers
    once = memory(whole, work, H200).weights_bytes
    replicas = 0.0
    for block in spec.blocks:
        for e in block.cascade:
            weights = [a for a in e.accesses if a.is_weight and e.tied is None]
            values = sum(math.prod(spec.ranks[r] for r in a.ranks) for a in weights)
            width = bytes_per_value(spec.stored(e))
            unpacked = 2 if e.name in ("k_lift", "v_lift") else 0  # the absorbed form's own copy
            copies = degrees.workers / parts(found, e) - 1
            replicas += block.repeat * copies * values * (width + unpacked)
            if e.bias and e.einsum is not None:
                held_by = {r for a in weights for r in a.ranks}
                ranks = held_by & {*e.einsum.output.ranks, "e"}
                split = math.prod(n for r, n in found.sharding.ways.items() if r in ranks)
                bias = math.prod(spec.ranks[r] for r in ranks)
                replicas += block.repeat * (degrees.workers / split - 1) * bias * 2
    assert held == pytest.approx(once + replicas, rel=1e-12)


def test_an_unsharded_model_holds_each_parameter_once(name: str) -> None:
    spec = SPECS[name]
    found = lowered(spec, WHOLE)
    assert found is not None
    held = memory(found, Workload(), H200).weights_bytes
    widths = [bytes_per_value(spec.stored(e)) for b in spec.blocks for e in b.cascade]
    unpacked = 61 * 2 * 512 * 128 * (128 + 128) if name == "deepseek_v3" else 0
    assert min(*widths, 2) * parameters(spec) <= held - unpacked <= 2 * parameters(spec)


@settings(max_examples=25)
@given(degrees=st.sampled_from(DEGREES), group=groups)
def test_pairs_of_tokens_and_experts_are_conserved_over_workers(
    name: str, degrees: Parallelism, group: Sequences
) -> None:
    spec = SPECS[name]
    found = lowered(spec, degrees)
    if spec.moe is None or found is None:
        return
    step = Step(sequences=(group,), mode=Mode.EAGER)
    workers = found.by_worker(step)
    per_layer: dict[int, float] = defaultdict(float)
    for ops in workers:
        for op in (o for o in ops if o.kind is Kind.MOE):
            # Each group of workers that holds whole experts counts its pairs once.
            per_layer[op.count] += op.sizes["rows"] / len(workers) * degrees.ep
    layers = [b.repeat for b in spec.blocks if any(e.op == "topk" for e in b.cascade)]
    pairs = step.tokens * spec.moe["topk"]
    assert per_layer == pytest.approx({n: layers.count(n) * pairs for n in layers})


@settings(max_examples=25)
@given(group=groups, data=st.data())
def test_a_token_more_never_costs_less(name: str, group: Sequences, data: st.DataObject) -> None:
    found = lowered(SPECS[name], WHOLE)
    assert found is not None
    more = [replace(group, count=group.count + 1), replace(group, context=group.context + 1)]
    if group.new > 1:  # a second new token turns a decode step into a prefill, with other kernels
        more.append(replace(group, new=group.new + 1, context=group.context + 1))
    larger = data.draw(st.sampled_from(more))
    before, after = (found.ops(Step(sequences=(g,), mode=Mode.EAGER)) for g in (group, larger))
    assert [o.name for o in before] == [o.name for o in after]
    for less, most in zip(before, after, strict=True):
        slack = 1 - 1e-9  # expected loads are sums of many small numbers
        assert most.flops >= less.flops * slack
        moved = most.bytes_read + most.bytes_written
        assert moved >= (less.bytes_read + less.bytes_written) * slack


@settings(max_examples=15)
@given(group=groups)
def test_equal_groups_cost_what_one_group_costs(name: str, group: Sequences) -> None:
    found = lowered(SPECS[name], WHOLE)
    assert found is not None
    two = found.ops(Step(sequences=(group, group), mode=Mode.EAGER))
    one = found.ops(Step(sequences=(replace(group, count=2 * group.count),), mode=Mode.EAGER))
    for count in (lambda o: o.flops, lambda o: o.bytes_written):
        assert sum(o.count * count(o) for o in two) == pytest.approx(
            sum(o.count * count(o) for o in one), rel=1e-9
        )
