"""Figures of a phase from times and readings, against calculations of their own."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.meter.base import DeviceSeries, Reading, reading
from energylens.profiler.metrics import (
    BoardReading,
    WorkerWindow,
    latency,
    phase_profile,
    timing_flags,
    without_outliers,
)

T_9, T_3 = 2.2621571628, 3.1824463053
"""Student's 97.5 % quantile at 9 and 3 degrees of freedom, from a printed table."""


def window(times_s: list[float], start_s: float = 10.0, **fields: object) -> WorkerWindow:
    known = {"host_share": 0.1, "context_len": None}
    return WorkerWindow(
        times_s=tuple(times_s),
        start_s=start_s,
        end_s=start_s + math.fsum(times_s),
        **(known | fields),  # type: ignore[arg-type]
    )


def board(
    power_w: float, over: WorkerWindow, name: str = "b", idle_w: float = 100.0
) -> BoardReading:
    ticks = tuple((0.1 * i, power_w * 0.1 * i) for i in range(1, 300))
    series = DeviceSeries(uuid=name, energy=ticks, sm_clock=((11.0, 1.5e9), (12.0, 1.7e9)))
    seen = reading(series, over.start_s, over.end_s)
    return BoardReading(board=name, window=over, reading=seen, idle_w=idle_w)


def test_latency_is_what_the_statistics_module_says() -> None:
    times = [0.010, 0.011, 0.013, 0.012]
    found = latency(times)
    assert found.mean == pytest.approx(statistics.fmean(times))
    assert found.std == pytest.approx(statistics.stdev(times))
    assert found.p50 == pytest.approx(0.0115)
    assert found.p90 == pytest.approx(statistics.quantiles(times, n=10, method="inclusive")[-1])
    assert found.p99 == pytest.approx(statistics.quantiles(times, n=100, method="inclusive")[-1])
    half = T_3 * statistics.stdev(times) / 2
    assert found.ci95 == pytest.approx((found.mean - half, found.mean + half))


def test_the_interval_grows_with_iterations_that_resemble_their_neighbours() -> None:
    """Ten runs of ten equal times are ten observations, not a hundred."""
    means = [0.010, 0.014, 0.011, 0.015, 0.010, 0.013, 0.012, 0.016, 0.009, 0.012]
    times = [t for t in means for _ in range(10)]
    half = T_9 * statistics.stdev(means) / math.sqrt(10)
    assert latency(times).ci95[1] - statistics.fmean(times) == pytest.approx(half)
    shuffled = list(np.random.default_rng(1).permutation(times))
    assert latency(shuffled).ci95[1] - latency(shuffled).mean < half


def test_one_iteration_has_no_spread() -> None:
    found = latency([0.5])
    assert (found.mean, found.std, found.ci95) == (0.5, 0.0, (0.5, 0.5))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = latency(list(1 + 0.1 * draw.standard_normal(40))).ci95
        held += low <= 1 <= high
    assert 0.93 <= held / 400 <= 0.995


def test_outliers_are_left_out_by_the_stated_rule() -> None:
    steady = [0.0100 + 0.00001 * (i % 3) for i in range(30)]
    assert without_outliers([*steady, 0.0150]) == steady
    assert without_outliers([*steady, 0.01015]) == [*steady, 0.01015]  # within 2 %
    often = [*steady, *[0.0150] * 4]
    assert without_outliers(often) == often  # more than 10 %: so is the step


@given(st.lists(st.floats(1e-5, 10), min_size=1, max_size=60))
def test_outliers_are_few_and_the_rest_keeps_its_order(times: list[float]) -> None:
    kept = without_outliers(times)
    assert len(kept) >= 0.9 * len(times)
    remaining = iter(times)
    assert all(t in remaining for t in kept)


def test_b33_a_board_that_heats_up_is_not_steady() -> None:
    assert "not_steady" in timing_flags([0.0100 + 0.0015 * i / 99 for i in range(100)])


@pytest.mark.parametrize(
    ("spread", "flags"), [(0.001, []), (0.19, ["noisy"]), (0.8, ["imprecise"])]
)
def test_noise_is_a_label_until_the_mean_is_not_known(spread: float, flags: list[str]) -> None:
    """131 iterations that scatter by 19 % know their mean to 4 %: host-bound eager decode."""
    draw = np.random.default_rng(5)
    times = list(0.024 * np.maximum(0.1, 1 + spread * draw.standard_normal(131)))
    assert timing_flags(times) == flags


def test_a_noisy_phase_is_valid_and_an_imprecise_one_is_not() -> None:
    draw = np.random.default_rng(5)
    for spread, flag, valid in ((0.19, "noisy", True), (0.8, "imprecise", False)):
        over = window(list(0.024 * np.maximum(0.1, 1 + spread * draw.standard_normal(131))))
        found = phase_profile([over], [board(300.0, over)])
        assert flag in found.flags
        assert found.valid is valid
        # Other programs disturb a processor, and no energy hangs on it there.
        assert phase_profile([over], []).valid


@pytest.mark.parametrize(("share", "valid"), [(0.2, False), (0.95, True)])
def test_a_drift_spoils_a_device_and_not_a_host_that_wanders(share: float, valid: bool) -> None:
    over = window([0.030 + 0.004 * i / 99 for i in range(100)], host_share=share)
    found = phase_profile([over], [board(300.0, over)])
    assert "not_steady" in found.flags
    assert found.valid is valid


def test_energy_of_a_step_is_power_times_time_and_net_of_idle() -> None:
    over = window([0.05] * 100)
    found = phase_profile([over], [board(400.0, over)])
    assert found.energy_j == pytest.approx(400 * 0.05)
    assert found.net_energy_j == pytest.approx(300 * 0.05)
    assert (found.mean_power_w, found.total_power_w) == pytest.approx((400, 400))
    assert found.per_gpu[0].sm_clock_mhz == pytest.approx(1600)
    assert found.n == 100
    assert found.valid


def test_energies_of_workers_add_up_and_the_slowest_one_sets_the_pace() -> None:
    fast, slow = window([0.05] * 100), window([0.06] * 80, start_s=10.2)
    found = phase_profile([fast, slow], [board(400.0, fast, "a"), board(500.0, slow, "b", 120.0)])
    assert found.latency.mean == pytest.approx(0.06)
    assert found.n == 80
    assert found.energy_j == pytest.approx(400 * 0.05 + 500 * 0.06)
    assert found.net_energy_j == pytest.approx(300 * 0.05 + 380 * 0.06)
    assert found.mean_power_w == pytest.approx(450)
    assert found.total_power_w == pytest.approx(900)
    assert [g.board_uuid for g in found.per_gpu] == ["a", "b"]
    assert [g.energy_j for g in found.per_gpu] == pytest.approx([20, 30])


def test_a_missing_energy_makes_the_sum_missing_and_never_smaller() -> None:
    over = window([0.05] * 100)
    blind = replace(board(400.0, over), reading=_without_energy(board(400.0, over).reading))
    found = phase_profile([over, over], [board(400.0, over), blind])
    assert (found.energy_j, found.net_energy_j, found.energy_rel_se) == (None, None, None)
    assert found.total_power_w is None
    assert not found.valid


def _without_energy(seen: Reading) -> Reading:
    return replace(seen, energy_j=None, mean_power_w=None, valid=False, reason="no sensor")


def test_b3_b15_a_window_between_two_ticks_is_missing_energy_and_not_zero() -> None:
    over = window([0.005] * 8)  # 40 ms against ticks of 100 ms
    found = phase_profile([over], [board(400.0, over)])
    assert found.energy_j is None
    assert "too_short" in found.flags
    assert not found.valid
    assert found.latency.mean == pytest.approx(0.005)


@pytest.mark.parametrize(("share", "regime"), [(0.2, "device"), (0.95, "host"), (None, None)])
def test_the_regime_is_who_the_step_waits_for(share: float | None, regime: str | None) -> None:
    assert phase_profile([window([0.01] * 20, host_share=share)], []).regime == regime


def test_the_error_of_a_sum_is_smaller_than_that_of_its_parts() -> None:
    over = window([0.05] * 100)
    one = phase_profile([over], [board(400.0, over)]).energy_rel_se
    two = phase_profile([over] * 2, [board(400.0, over)] * 2).energy_rel_se
    assert one is not None
    assert two == pytest.approx(one / math.sqrt(2))
