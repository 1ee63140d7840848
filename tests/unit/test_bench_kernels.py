"""What the torch provider can run, seen without torch."""

from __future__ import annotations

import pytest

from energylens.bench import vllm_kernels
from energylens.bench.collectives import COLLECTIVES, collective_ops
from energylens.bench.kernels import BUILDERS
from energylens.bench.plan import load_plan
from energylens.graph import KERNELS
from energylens.spec.machines import load_device, load_engine
from energylens.spec.resources import data_dir

NOT_RUN = {
    "vllm_bmm",
    "vllm_latent_decode",
    "vllm_latent_prefill",
    "vllm_latent_write",
    "vllm_window_decode",
    "vllm_window_prefill",
}
"""Kernels that no provider runs yet: another kernel stands for them, or the roofline."""


def test_every_runnable_is_a_kernel_that_can_be_costed() -> None:
    assert set(BUILDERS) <= set(KERNELS)


def test_the_provider_runs_every_kernel_that_its_engine_names() -> None:
    named = {k.kernel for k in load_engine("hf").kernels.values()}
    assert {name for name in named if not KERNELS[name].is_collective} <= set(BUILDERS)


def test_collectives_are_run_by_a_team_and_all_else_by_the_provider() -> None:
    computed = {name for name, kernel in KERNELS.items() if not kernel.is_collective}
    of_vllm = {name for name in KERNELS if name.startswith("vllm_")}
    assert set(BUILDERS) == computed - of_vllm
    assert set(vllm_kernels.BUILDERS) == set(BUILDERS) | (of_vllm & computed) - NOT_RUN
    priced_as_another = {"send"}
    of_overlaps = {"limited_all_reduce", "overlapped_all_reduce"}  # `energylens.bench.overlap`
    others = priced_as_another | of_overlaps
    assert set(COLLECTIVES) == set(KERNELS) - computed - of_vllm - others


@pytest.mark.parametrize(
    ("provider", "builders"), [("torch", BUILDERS), ("vllm", vllm_kernels.BUILDERS)]
)
def test_the_shipped_plans_ask_for_kernels_that_the_provider_runs(provider, builders) -> None:
    path = data_dir("calibration") / "plans" / f"{provider}_default.yaml"
    plan = load_plan(path, load_device("h200"))
    assert {p.op.kernel for p in plan.points} <= set(builders)


@pytest.mark.parametrize("workers", [2, 8])
def test_collectives_are_measured_from_8_kb_to_256_mb(workers: int) -> None:
    ops = collective_ops(workers)
    assert len({op.key for op in ops}) == len(ops) == 16 + 3 * 6
    assert {op.sizes["workers"] for op in ops} == {workers}
    for kind in COLLECTIVES:
        bytes_ = [op.bytes_written for op in ops if op.kernel == kind]
        assert (min(bytes_), max(bytes_)) == (8 * 1024, 256 * 1024**2)
