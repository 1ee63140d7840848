"""The datasheet model by hand, and honest about being one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.cost.roofline import BUS_FACTOR, LINK_EFFICIENCY, roofline
from energylens.graph import KERNELS, make_op
from energylens.results import Source
from energylens.spec.machines import load_device
from energylens.spec.system import Link

H200 = load_device("h200")
NVLINK = Link(name="nvlink4", bandwidth_bytes_s=450e9, latency_s=2e-6)


def test_a_stream_runs_at_the_nominal_share_of_the_datasheet_bandwidth():
    cost = roofline(make_op("hf_add", rows=1 << 16, width=8192), H200)
    moved = 3 * (1 << 16) * 8192 * 2
    assert cost.latency_s == pytest.approx(moved / (0.88 * 4.8e12), rel=0.01)
    assert cost.compute_share == 0.0
    assert cost.dram_share == pytest.approx(1.0, rel=0.01)


def test_a_large_gemm_runs_at_the_nominal_share_of_the_peak():
    cost = roofline(make_op("gemm", m=8192, n=8192, k=8192), H200)
    assert cost.latency_s == pytest.approx(2 * 8192**3 / (0.85 * 989.4e12), rel=0.01)
    assert cost.compute_share > 0.9


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernel_is_priced_as_a_weak_source_with_a_wide_error(kernel: str):
    sizes = dict.fromkeys(KERNELS[kernel].dims, 64)
    if "workers" in sizes:
        sizes["workers"] = 2
    cost = roofline(make_op(kernel, **sizes), H200, NVLINK)
    assert cost.source is Source.ROOFLINE
    assert cost.latency_s > 0
    assert cost.energy_j > 0
    assert cost.latency_rel_se >= 0.3
    assert cost.energy_rel_se >= 0.3


@pytest.mark.parametrize(
    ("kernel", "workers", "factor"),
    [
        ("all_reduce", 8, 1.75),  # as nccl-tests tell it
        ("all_reduce", 2, 1.0),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("send", 2, 1.0),
    ],
)
def test_traffic_over_the_bus_is_that_of_nccl_tests(kernel: str, workers: int, factor: float):
    assert BUS_FACTOR[kernel](workers) == pytest.approx(factor)
    small, large = (
        roofline(make_op(kernel, values=v, workers=workers), H200, NVLINK).latency_s
        for v in (1e6, 1e9)
    )
    sent = factor * 2 * (1e9 - 1e6)
    assert large - small == pytest.approx(sent / (LINK_EFFICIENCY * 450e9))


@given(values=st.floats(1, 1e10), workers=st.integers(2, 64))
def test_more_workers_and_more_values_take_longer(values: float, workers: int):
    def seconds(v: float, n: int) -> float:
        return roofline(make_op("all_reduce", values=v, workers=n), H200, NVLINK).latency_s

    assert seconds(values, workers + 1) > seconds(values, workers)
    assert seconds(2 * values, workers) > seconds(values, workers)


def test_a_slower_link_takes_longer_at_the_same_power():
    op = make_op("all_reduce", values=1e8, workers=2)
    pcie = Link(name="pcie", bandwidth_bytes_s=25e9, latency_s=5e-6)
    slow, fast = roofline(op, H200, pcie), roofline(op, H200, NVLINK)
    assert slow.latency_s > 5 * fast.latency_s
    assert slow.energy_j / slow.latency_s == pytest.approx(fast.energy_j / fast.latency_s)


def test_without_a_link_a_collective_still_has_a_price():
    cost = roofline(make_op("all_reduce", values=1e8, workers=2), H200)
    assert cost.latency_s > 2e8 / 4.8e12
    assert cost.source is Source.ROOFLINE


def test_an_all_reduce_on_few_sms_takes_what_they_move():
    few, many = (
        roofline(make_op("limited_all_reduce", values=2**26, workers=2, sms=n), H200, NVLINK)
        for n in (1, 24)
    )
    whole = roofline(make_op("all_reduce", values=2**26, workers=2), H200, NVLINK)
    assert few.latency_s - whole.latency_s == pytest.approx(2 * 2**26 / 20e9)
    assert many.latency_s - whole.latency_s == pytest.approx(2 * 2**26 / (24 * 20e9))
