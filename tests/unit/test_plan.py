from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.bench.plan import (
    PlannedPoint,
    expected_s,
    load_plan,
    plan_for,
    roofline_s,
    shuffled,
    split,
)
from energylens.errors import SpecError, UnsupportedError
from energylens.graph import make_op
from energylens.lower import lower_step
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.resources import data_dir
from energylens.spec.system import Mode, Parallelism, Step

DEVICE = load_device("h200")
ENGINE = load_engine("hf")
SPEC = load_spec("llama3_8b")


def keys(plan):
    return [p.op.key for p in plan.points]


def plan(budget_s=60.0, **changes):
    arguments = {"specs": [SPEC], "tps": [1], "engine": ENGINE, "device": DEVICE}
    arguments |= changes
    return plan_for(**arguments, budget_s=budget_s)


def test_a_plan_is_the_same_each_time_and_keeps_to_its_budget():
    first, second = plan(), plan()
    assert keys(first) == keys(second)
    assert 55 < first.expected_s <= 60
    assert len(set(keys(first))) == len(first.points)


def test_the_seed_changes_the_order_and_nothing_else():
    a, b = plan(seed=0), plan(seed=1)
    assert keys(a) != keys(b)
    assert sorted(keys(a)) == sorted(keys(b))


def test_sizes_do_not_ascend():
    rows = [p.op.sizes["m"] for p in plan(200.0).points if p.op.kernel == "gemm"]
    correlation = np.corrcoef(np.arange(len(rows)), np.log2(rows))[0, 1]
    assert abs(correlation) < 0.5


def test_every_kernel_of_the_model_gets_a_few_points():
    steps = [
        Step.prefill(1, 1024, Mode.EAGER),
        Step.decode(8, 1024, Mode.EAGER),
        Step.decode(8, 1024, Mode.CUDA_GRAPH),
    ]
    used = {op.kernel for s in steps for op in lower_step(SPEC, ENGINE, Parallelism(), s)}
    planned = [p.op.kernel for p in plan(150.0).points]
    for kernel in used:
        assert planned.count(kernel) >= 5, kernel


def test_only_shapes_that_the_model_runs_are_planned():
    m, f, kv, v = 4096, 14336, 1024, 128256
    allowed = {(m, m), (kv, m), (f, m), (m, f), (v, m)}
    seen = {
        (int(p.op.sizes["n"]), int(p.op.sizes["k"]))
        for p in plan(200.0).points
        if p.op.kernel == "gemm"
    }
    assert seen <= allowed


def test_tensor_parallel_shapes_are_those_of_one_worker():
    seen = {
        (int(p.op.sizes["n"]), int(p.op.sizes["k"]))
        for p in plan(200.0, tps=[2]).points
        if p.op.kernel == "gemm"
    }
    assert (7168, 4096) in seen
    assert (14336, 4096) not in seen


def test_what_is_measured_already_is_not_planned_again_and_makes_room_for_more():
    first = plan(60.0)
    more = plan(60.0, existing=[p.op for p in first.points])
    assert not set(keys(first)) & set(keys(more))
    assert more.points


def test_a_neighbour_of_a_measured_op_is_less_urgent():
    first = [p.op for p in plan(250.0).points if p.op.kernel == "gemm"]
    near = [replace(op, shape=(op.shape[0] * 1.1, *op.shape[1:])) for op in first]
    again = plan(250.0, existing=near)
    assert sum(p.op.kernel == "gemm" for p in again.points) < len(first)


def test_nothing_larger_than_the_device_is_planned():
    small = replace(DEVICE, memory_bytes=24e9)
    sizes = [p.op for p in plan(200.0, device=small).points if p.op.kernel == "hf_kv_concat"]
    # 15 GB of weights (the embedding apart) leave 9 GB of cache: 68,664 tokens of 131,072 bytes.
    assert all(op.sizes["batch"] * op.sizes["context"] <= 68_664 for op in sizes)
    assert sizes


def test_a_degree_that_does_not_divide_is_left_out_and_alone_is_an_error():
    assert keys(plan(tps=[1, 3])) == keys(plan(tps=[1]))
    with pytest.raises(UnsupportedError, match="llama3_8b at tp=3"):
        plan(tps=[3])


def test_compute_bound_points_are_expected_to_take_longer():
    assert expected_s(make_op("gemm", m=8192, n=8192, k=8192), DEVICE) == 2.4
    assert expected_s(make_op("gemm", m=1, n=8192, k=8192), DEVICE) == 1.4
    assert expected_s(make_op("hf_add", rows=1, width=64), DEVICE) == 1.4


def test_the_roofline_is_the_slowest_of_compute_memory_and_launches():
    gemm = make_op("gemm", m=1, n=8192, k=8192)
    moved = 2 * (8192 + 8192 * 8192 + 8192)
    assert roofline_s(gemm, DEVICE) == pytest.approx(moved / (0.8 * 4.8e12))
    large = make_op("gemm", m=8192, n=8192, k=8192)
    assert roofline_s(large, DEVICE) == pytest.approx(2 * 8192**3 / (0.7 * 989.4e12))
    assert roofline_s(make_op("hf_add", rows=1, width=64), DEVICE) == 2e-6
    assert roofline_s(make_op("hf_rope", launches=10, **ROPE), DEVICE) == pytest.approx(2e-5)


ROPE = {"batch": 1, "new": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 64}


def points(count):
    ops = [make_op("gemm", m=m, n=64, k=64) for m in range(1, count + 1)]
    return shuffled([PlannedPoint(op=op) for op in ops], 0)


@given(count=st.integers(0, 60), boards=st.integers(1, 8), shared=st.floats(0, 1))
def test_a_split_covers_the_plan_and_shares_what_it_says(count, boards, shared):
    whole = points(count)
    parts = split(whole, boards, shared=shared)
    assert len(parts) == boards
    assert set().union(*(keys(p) for p in parts)) == set(keys(whole))
    if boards > 1:
        common = set(keys(parts[0])).intersection(*(keys(p) for p in parts[1:]))
        assert len(common) == round(shared * count)
        assert all({p.op.key for p in part.points if p.shared} == common for part in parts)
        assert sum(len(p.points) for p in parts) == count + (boards - 1) * len(common)
        assert max(len(p.points) for p in parts) - min(len(p.points) for p in parts) <= 1


def test_plans_merge_and_filter():
    a, b = points(4), points(6)
    assert sorted(keys(a.merge(b))) == sorted(keys(b))
    assert [p.op.shape[0] for p in a.filter(lambda p: p.op.shape[0] > 2).points] == [
        m for m in (p.op.shape[0] for p in a.points) if m > 2
    ]


@pytest.mark.parametrize(
    ("provider", "engine", "models"),
    [("torch", "hf", ["llama3_8b"]), ("vllm", "vllm", ["llama3_8b", "qwen3_moe"])],
)
def test_the_shipped_plans_are_complete(provider, engine, models):
    path = data_dir("calibration") / "plans" / f"{provider}_default.yaml"
    shipped = load_plan(path, DEVICE)
    assert 90 < len(shipped.points) < 160
    assert shipped.expected_s < 240
    launches = {
        op.kernel: op.launches
        for model in models
        for s in (Step.prefill(1, 128, Mode.EAGER), Step.decode(1, 128, Mode.CUDA_GRAPH))
        for op in lower_step(load_spec(model), load_engine(engine), Parallelism(), s)
    }
    planned = {p.op.kernel: p.op.launches for p in shipped.points}
    assert launches.items() <= planned.items()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text("schema: energylens/plan/v1\nname: p\n" + text)
    return path


def test_a_grid_is_the_product_of_its_keys_and_joint_sizes_stay_together(tmp_path):
    path = write(
        tmp_path,
        'points:\n- kernel: gemm\n  dtype: fp16\n  grid: {m: [1, 2], "n, k": [[3, 4], [5, 6]]}\n',
    )
    found = load_plan(path, DEVICE)
    assert {p.op.shape for p in found.points} == {(1, 3, 4), (2, 3, 4), (1, 5, 6), (2, 5, 6)}
    assert {p.op.dtype for p in found.points} == {"fp16"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("points: []", "points: found"),
        ("points: [{kernel: gem, grid: {m: [1]}}]", r"points\[0\].kernel: found 'gem'.*gemm"),
        ("points: [{kernel: gemm, grid: {m: [1]}}]", r"points\[0\].grid: .*needs m, n, k"),
        ("points: [{kernel: gemm, grid: {m: [0], n: [1], k: [1]}}]", r"grid.m\[0\]: found 0"),
        ("points: [{kernel: gemm, grid: {m: 3, n: [1], k: [1]}}]", r"grid.m: found 3"),
        (
            'points: [{kernel: gemm, grid: {m: [1], "n, k": [[1, 2, 3]]}}]',
            r"2 numbers, for n, k",
        ),
        ("points: [{kernel: gemm, sizes: {}}]", "unknown key 'sizes'"),
        ("points: [{kernel: gemm, dtype: bf17, grid: {}}]", r"dtype: found 'bf17'"),
        ("points: [", "broken YAML"),
    ],
)
def test_a_broken_plan_says_where(tmp_path, text, says):
    with pytest.raises(SpecError, match=says):
        load_plan(write(tmp_path, text), DEVICE)


def test_a_missing_plan_says_so(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load_plan(tmp_path / "none.yaml", DEVICE)
