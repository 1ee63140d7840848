"""Anchors: ratios by hand, and the published pair of hosts."""

import pytest

from energylens.cost.board import Spread, board, typical_anchor, typical_boards
from energylens.results import BoardAnchor, Cost, Source
from energylens.spec.machines import load_device

H200 = load_device("h200")


def anchor(idle, stream, gemm_w, mhz, tflops, gemv):
    return BoardAnchor(
        board_uuid="b", device="h200", idle_w=idle, stream_w=stream, gemm_w=gemm_w, gemm_mhz=mhz,
        gemm_tflops=tflops, gemv_gbs=gemv,
    )  # fmt: skip


TYPICAL = anchor(120.0, 620.0, 690.0, 1450.0, 655.0, 4200.0)


def memory_bound(energy_j=1.0):
    return Cost(
        latency_s=1e-3, energy_j=energy_j, compute_share=0.0, read_share=1.0, dram_share=1.0,
        latency_rel_se=0.0, energy_rel_se=0.0, source=Source.MEASURED,
    )  # fmt: skip


def test_the_typical_board_changes_nothing():
    b = board(TYPICAL, TYPICAL, H200, eta=1.1)
    assert b.localise([memory_bound()]) == ([memory_bound().latency_s], [memory_bound().energy_j])


def test_memory_power_scales_with_the_stream_above_idle_and_time_with_bandwidth():
    b = board(anchor(130.0, 680.0, 690.0, 1450.0, 655.0, 4000.0), TYPICAL, H200, eta=1.1)
    latency_s, energy_j = b.localise([memory_bound()])
    assert latency_s == pytest.approx([1e-3 * 4200 / 4000])
    power = energy_j / latency_s
    assert power == pytest.approx((1.0 / 1e-3) * (680 - 130) / (620 - 120))


def test_a_board_that_holds_a_higher_clock_at_the_cap_draws_less_per_flop():
    better = board(anchor(120.0, 620.0, 690.0, 1500.0, 678.0, 4200.0), TYPICAL, H200, eta=1.0)
    assert better.compute_power == pytest.approx((1450 / 1500) ** 2)


def test_missing_bandwidth_leaves_time_alone():
    b = board(anchor(120.0, 620.0, 690.0, 1450.0, 655.0, None), TYPICAL, H200, eta=1.0)
    assert b.memory_time == 1.0


def test_typical_anchor_is_the_geometric_mean_over_boards_that_have_the_field():
    mean = typical_anchor(
        [anchor(100, 400, 690, 1400, 600, None), anchor(144, 900, 690, 1400, 600, 4e3)]
    )
    assert mean.idle_w == pytest.approx(120.0)
    assert mean.stream_w == pytest.approx(600.0)
    assert mean.gemv_gbs == pytest.approx(4000.0)


def test_unmeasured_boards_are_spread_around_the_typical_one():
    spread = Spread(memory_power=0.1, compute_power=0.05, memory_time=0.01, idle_w=5.0)
    (one,) = typical_boards(1, 120.0, spread)
    assert (one.idle_w, one.compute_power) == (pytest.approx(120.0), pytest.approx(1.0))
    low, high = typical_boards(2, 120.0, spread)
    assert low.compute_power * high.compute_power == pytest.approx(1.0)
    # Expected maximum of two standard normals is 1/sqrt(pi) = 0.564; Blom's approximation 0.589.
    assert high.idle_w == pytest.approx(120 + 5 * 0.564, abs=0.2)
