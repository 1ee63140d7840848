"""A recording of a real H200, played back: asleep, stream, weight reads, a GEMM at the cap, awake.

``h200_anchor.csv`` holds what `NvmlRecorder` saw of a board (named anew) during the loads of an
anchor and for some seconds after them. Expected numbers are computed from the rows of the file,
without the package.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from energylens.meter.base import AbstractRecorder
from energylens.meter.replay import ReplayMeter, load_recording, save_recording

PATH = Path(__file__).resolve().parents[1] / "data" / "meter" / "h200_anchor.csv"
BOARD = "GPU-h200"

# Seconds after the first row of instant power.
ASLEEP = (0.5, 3.5)
STREAM = (5.0, 8.0)
CAPPED = (13.2, 16.2)
AWAKE = (18.0, 25.0)
FIRST_LOAD = (2.5, 6.5)

Rows = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Sensor -> [samples, (seconds since the first row, value)], straight from the file."""
    found = defaultdict(list)
    with PATH.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["t_s"]:
                found[row["sensor"]].append((float(row["t_s"]), float(row["value"])))
    zero = found["instant_power"][0][0]
    return {name: np.array(values) - (zero, 0.0) for name, values in found.items()}


@pytest.fixture(scope="module")
def recorder() -> AbstractRecorder:
    return ReplayMeter(PATH).recorder([BOARD])


def read(recorder: AbstractRecorder, window: tuple[float, float]):
    zero = recorder.series(BOARD).instant_power[0][0]
    return recorder.reading(BOARD, zero + window[0], zero + window[1])


def inside(rows: Rows, sensor: str, window: tuple[float, float]) -> np.ndarray:
    t = rows[sensor][:, 0]
    return rows[sensor][(t >= window[0]) & (t <= window[1])]


def slope_w(rows: Rows, window: tuple[float, float]) -> float:
    """Least-squares slope of the energy counter, W."""
    ticks = inside(rows, "energy", window)
    return float(np.polyfit(ticks[:, 0], ticks[:, 1] - ticks[0, 1], 1)[0])


def instant_w(rows: Rows, window: tuple[float, float]) -> float:
    """Trapezoid integral of instant power over its span, W."""
    t, w = inside(rows, "instant_power", window).T
    return float(((w[1:] + w[:-1]) / 2 * np.diff(t)).sum() / (t[-1] - t[0]))


def test_a_board_without_a_context_sleeps_at_77_w(recorder: AbstractRecorder, rows: Rows) -> None:
    seen = read(recorder, ASLEEP)
    assert seen.valid
    assert seen.method == "counter_slope"
    assert seen.mean_power_w == pytest.approx(77, abs=1)
    assert seen.mean_power_w == pytest.approx(slope_w(rows, ASLEEP), rel=0.01)
    assert seen.flags == ("gpu_idle",)


def test_a_board_with_a_context_idles_at_120_w_and_full_clock(
    recorder: AbstractRecorder, rows: Rows
) -> None:
    seen = read(recorder, AWAKE)
    assert seen.valid
    assert seen.mean_power_w == pytest.approx(120, abs=2)
    assert seen.mean_power_w == pytest.approx(slope_w(rows, AWAKE), rel=0.01)
    assert seen.sm_clock_hz == 1.98e9
    assert seen.flags == ()


def test_counter_and_instant_power_agree_under_a_steady_stream(
    recorder: AbstractRecorder, rows: Rows
) -> None:
    seen = read(recorder, STREAM)
    assert seen.valid
    assert seen.method == "counter_slope"
    assert seen.mean_power_w == pytest.approx(slope_w(rows, STREAM), rel=0.01)
    assert seen.instant_power_w == pytest.approx(instant_w(rows, STREAM), rel=0.002)
    assert seen.mean_power_w == pytest.approx(seen.instant_power_w, rel=0.03)
    assert seen.ticks == len(inside(rows, "energy", STREAM))


def test_the_counter_of_a_good_board_is_trusted(recorder: AbstractRecorder) -> None:
    zero = recorder.series(BOARD).instant_power[0][0]
    trust = recorder.verify_counter(BOARD, zero + STREAM[0], zero + STREAM[1])
    assert trust.trusted
    assert trust.ratio == pytest.approx(1, abs=0.03)


def test_a_gemm_at_the_power_cap_is_labelled_and_valid(
    recorder: AbstractRecorder, rows: Rows
) -> None:
    seen = read(recorder, CAPPED)
    clocks = inside(rows, "sm_clock", CAPPED)[:, 1]
    assert seen.valid
    assert seen.flags == ("power_capped",)
    assert seen.reasons == {"sw_power_cap": 1.0}
    assert seen.sm_clock_hz < 1.5e9
    assert seen.sm_clock_hz == pytest.approx(clocks.mean())
    assert (seen.sm_clock_min_hz, seen.sm_clock_max_hz) == (clocks.min(), clocks.max())
    assert seen.mean_power_w == pytest.approx(slope_w(rows, CAPPED), rel=0.01)
    assert seen.mean_power_w == pytest.approx(instant_w(rows, CAPPED), rel=0.03)


def test_energy_across_the_start_of_a_load_is_right_within_its_bound(
    recorder: AbstractRecorder, rows: Rows
) -> None:
    seen = read(recorder, FIRST_LOAD)
    expected_j = instant_w(rows, FIRST_LOAD) * (FIRST_LOAD[1] - FIRST_LOAD[0])
    assert seen.energy_rel_error < 0.2
    assert seen.energy_j == pytest.approx(expected_j, rel=seen.energy_rel_error + 0.02)


@pytest.mark.parametrize("length_s", [0.5, 1.0, 2.0])
def test_the_power_of_a_steady_load_does_not_depend_on_the_window(
    recorder: AbstractRecorder, length_s: float
) -> None:
    starts = np.arange(STREAM[0], STREAM[1] - length_s, 0.13)
    watts = [read(recorder, (s, s + length_s)).mean_power_w for s in starts]
    assert max(watts) / min(watts) < 1.08


def test_a_real_recording_survives_being_saved_again(tmp_path: Path) -> None:
    series = load_recording(PATH)
    save_recording(tmp_path / "again.csv", series)
    assert load_recording(tmp_path / "again.csv") == series
