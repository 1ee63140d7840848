"""Energy of a window from samples that are written down here."""

from __future__ import annotations

import math

import pytest

from energylens.errors import OutOfRangeError
from energylens.meter.base import DeviceSeries, counter_trust, reading


def samples(power_w: float, start: float, end: float, step: float) -> tuple:
    count = round((end - start) / step)
    return tuple((start + i * step, power_w) for i in range(count + 1))


def ticks(power_w: float, start: float, end: float, step: float = 0.1) -> tuple:
    return tuple((t, power_w * (t - start)) for t, _ in samples(0, start, end, step))


def board(**sensors: object) -> DeviceSeries:
    return DeviceSeries(uuid="GPU-a", **sensors)


def test_counter_slope_is_power_whatever_the_phase_of_the_window():
    series = board(energy=ticks(300, 0, 4), instant_power=samples(300, 0, 4, 0.02))
    for start in (1.0, 1.013, 1.05, 1.099):
        seen = reading(series, start, start + 0.75)
        assert seen.method == "counter_slope"
        assert seen.mean_power_w == pytest.approx(300)
        assert seen.energy_j == pytest.approx(225)
        assert seen.ticks in (7, 8)
        assert seen.energy_rel_error == pytest.approx(0.002 / ((seen.ticks - 1) * 0.1), rel=0.05)
        assert seen.valid
        assert seen.reason is None


def test_b3_no_sample_in_a_short_window_is_missing_and_says_how_long_to_measure():
    seen = reading(board(instant_power=samples(200, 0, 10, 0.1)), 5.01, 5.05)
    assert seen.energy_j is None
    assert seen.mean_power_w is None
    assert "too_short" in seen.flags
    assert not seen.valid
    assert "measure at least 0.5 s" in (seen.reason or "")


def test_b4_counter_and_instant_power_that_disagree_are_invalid_and_both_recorded():
    energy = ticks(37.4, 0, 9)
    seen = reading(board(energy=energy, instant_power=samples(65.4, 0, 9, 0.1)), 2, 7)
    assert seen.energy_j == pytest.approx(187.0)
    assert seen.instant_power_w == pytest.approx(65.4)
    assert not seen.valid
    assert "sensor_disagreement" in seen.flags


def test_sensors_seven_percent_apart_are_a_label_only():
    series = board(energy=ticks(300, 0, 9), instant_power=samples(321, 0, 9, 0.02))
    seen = reading(series, 2, 6)
    assert seen.flags == ("sensors_differ",)
    assert seen.valid
    assert reading(series, 2, 3.5).flags == ()  # too short to compare


def test_b5_a_step_is_covered_by_instant_power_and_not_claimed_by_the_average():
    times = [i * 0.02 for i in range(400)]
    instant = tuple((t, 300.0 if t >= 2.0 else 50.0) for t in times)
    average = tuple((t, 50 + 250 * min(1.0, max(0.0, t - 2.0))) for t in times)
    seen = reading(board(instant_power=instant, average_power=average), 2.0, 4.0)
    assert seen.method == "trapezoid_instant"
    assert seen.energy_j is not None
    assert seen.energy_rel_error is not None
    assert abs(seen.energy_j - 600) <= seen.energy_rel_error * seen.energy_j
    short = reading(board(average_power=average), 2.0, 4.0)
    assert short.energy_j is None
    assert "measure at least 5 s" in (short.reason or "")
    long = reading(board(average_power=average), 2.0, 7.5)
    assert long.method == "trapezoid_average"
    assert long.energy_j is not None
    assert long.energy_rel_error is not None
    assert abs(long.energy_j - 1650) <= long.energy_rel_error * long.energy_j


def test_b8_without_a_counter_ninety_watts_for_ten_seconds_are_900_joules():
    seen = reading(board(instant_power=samples(90, 0, 12, 0.1)), 1, 11)
    assert seen.method == "trapezoid_instant"
    assert seen.energy_j == pytest.approx(900, rel=0.01)
    averaged = reading(board(average_power=samples(90, 0, 12, 0.1)), 1, 11)
    assert averaged.method == "trapezoid_average"
    assert averaged.energy_j == pytest.approx(900, rel=0.01)


def test_b15_a_30_ms_kernel_under_a_100_ms_counter_is_too_short():
    series = board(energy=ticks(500, 0, 5), instant_power=samples(500, 0, 5, 0.02))
    seen = reading(series, 2.01, 2.04)
    assert seen.energy_j is None
    assert "too_short" in seen.flags
    assert seen.ticks == 0


def test_b147_one_millisecond_under_a_20_ms_tick_names_the_minimum_length():
    seen = reading(board(energy=ticks(500, 0, 5, 0.02)), 2.001, 2.002)
    assert seen.energy_j is None
    assert "measure at least 0.1 s" in (seen.reason or "")


def test_b32_a_clock_that_falls_without_a_power_cap_is_invalid():
    clocks = tuple((i * 0.05, 1980e6 if i < 60 else 1200e6) for i in range(120))
    quiet = tuple((t, 0) for t, _ in clocks)
    energy = ticks(300, 0, 6)
    seen = reading(board(energy=energy, sm_clock=clocks, reasons=quiet), 2, 4)
    assert not seen.valid
    assert "throttled" in seen.flags
    assert (seen.sm_clock_min_hz, seen.sm_clock_max_hz) == (1200e6, 1980e6)
    capped = tuple((t, 0x4) for t, _ in clocks)
    seen = reading(board(energy=energy, sm_clock=clocks, reasons=capped), 2, 4)
    assert seen.valid
    assert seen.flags == ("power_capped",)
    assert seen.reasons == {"sw_power_cap": 1.0}


def test_a_steady_clock_far_below_the_maximum_needs_a_reason():
    sensors = {
        "energy": ticks(300, 0, 6),
        "sm_clock": samples(1200e6, 0, 6, 0.05),
        "sm_clock_max_hz": 1980e6,
    }
    quiet = tuple((t, 0) for t, _ in samples(0, 0, 6, 0.05))
    assert not reading(board(**sensors, reasons=quiet), 2, 4).valid
    for mask in (0x1, 0x2, 0x4):
        given = tuple((t, mask) for t, _ in quiet)
        assert reading(board(**sensors, reasons=given), 2, 4).valid


@pytest.mark.parametrize("mask", [0x8, 0x20, 0x40, 0x80])
def test_one_thermal_or_brake_event_makes_the_window_invalid(mask):
    reasons = tuple((i * 0.1, mask if i == 30 else 0) for i in range(60))
    seen = reading(board(energy=ticks(300, 0, 6), reasons=reasons), 2.05, 4.05)
    assert not seen.valid
    assert seen.flags == ("throttled",)
    assert list(seen.reasons.values()) == [pytest.approx(1 / 20)]


def test_b146_a_counter_at_60_percent_is_mistrusted_and_skipped():
    series = board(energy=ticks(180, 0, 14), instant_power=samples(300, 0, 14, 0.02))
    trust = counter_trust(series, 2, 12)
    assert trust.trusted is False
    assert trust.ratio == pytest.approx(0.6)
    seen = reading(series, 2, 4, trust_counter=False)
    assert seen.method == "trapezoid_instant"
    assert seen.energy_j == pytest.approx(600)
    assert "counter_mistrusted" in seen.flags
    assert seen.valid


def test_a_good_counter_is_trusted_and_an_unsteady_load_gives_no_verdict():
    energy = ticks(300, 0, 14)
    assert counter_trust(
        board(energy=energy, instant_power=samples(306, 0, 14, 0.02)), 2, 12
    ).trusted
    wave = tuple((i * 0.02, 300.0 + 100 * math.sin(i)) for i in range(700))
    verdict = counter_trust(board(energy=energy, instant_power=wave), 2, 12)
    assert verdict.trusted is None
    assert "not steady" in (verdict.reason or "")
    assert counter_trust(board(energy=energy), 2, 12).trusted is None
    assert counter_trust(board(instant_power=wave), 2, 12).trusted is None
    assert "shorter" in (counter_trust(board(energy=energy), 2, 3).reason or "")


def test_a_counter_reset_inside_the_window_makes_it_invalid_and_never_negative():
    energy = tuple((t, e if t < 3 else e - 800) for t, e in ticks(300, 0, 6))
    seen = reading(board(energy=energy, instant_power=samples(300, 0, 6, 0.02)), 2, 4)
    assert not seen.valid
    assert "counter_reset" in seen.flags
    assert seen.method == "trapezoid_instant"
    assert seen.energy_j == pytest.approx(600)
    alone = reading(board(energy=energy), 2, 4)
    assert alone.energy_j is None
    assert "backwards" in (alone.reason or "")
    assert reading(board(energy=energy), 3.5, 5.5).energy_j == pytest.approx(600)


def test_nonsense_power_is_dropped():
    power = list(samples(300, 0, 6, 0.02))
    for index, nonsense in ((110, 2.0**32 / 1000), (120, -5.0), (130, 0.0)):
        power[index] = (power[index][0], nonsense)
    seen = reading(board(instant_power=tuple(power)), 2, 4)
    assert seen.energy_j == pytest.approx(600)
    assert seen.coverage == pytest.approx(1)


def test_sentinel_temperatures_are_missing():
    seen = reading(board(energy=ticks(9, 0, 6), temperature=samples(-256, 0, 6, 1)), 2, 4)
    assert seen.temperature_start_c is None
    assert seen.temperature_end_c is None
    warming = tuple((float(t), 40.0 + t) for t in range(6))
    seen = reading(board(energy=ticks(9, 0, 6), temperature=warming), 2.5, 4.5)
    assert (seen.temperature_start_c, seen.temperature_end_c) == (42, 44)


def test_time_going_backwards_drops_those_samples():
    energy = list(ticks(300, 0, 6))
    energy.insert(31, (2.0, energy[30][1]))
    power = [*samples(300, 0, 3, 0.02), (1.0, 900.0), *samples(300, 3.02, 6, 0.02)]
    seen = reading(board(energy=tuple(energy), instant_power=tuple(power)), 2, 4)
    assert seen.energy_j == pytest.approx(600)
    assert seen.instant_power_w == pytest.approx(300)


def test_gaps_cost_coverage_and_much_of_it_makes_the_window_invalid():
    power = samples(300, 0, 10, 0.02)
    little = tuple(s for s in power if not 4.0 < s[0] < 4.3)
    seen = reading(board(instant_power=little), 2, 6)
    assert seen.coverage == pytest.approx(1 - 0.3 / 4, abs=0.01)
    assert seen.valid
    assert seen.flags == ("coverage",)
    assert seen.energy_j == pytest.approx(1200)
    much = tuple(s for s in power if not 4.0 < s[0] < 5.0)
    assert not reading(board(instant_power=much), 2, 6).valid


def test_a_window_before_the_recording_starts_has_low_coverage():
    series = board(energy=ticks(300, 3, 8))
    seen = reading(series, 1, 5)
    assert not seen.valid
    assert seen.coverage < 0.8
    assert seen.energy_rel_error is not None
    assert seen.energy_rel_error > 0.5


def test_samples_are_interpolated_at_both_edges():
    power = tuple((float(t), 100.0 * t) for t in range(12))  # 100 t watts: 50 t^2 joules
    seen = reading(board(instant_power=power), 2.5, 8.25)
    assert seen.energy_j == pytest.approx(50 * (8.25**2 - 2.5**2))


def test_power_above_the_limit_of_the_board_is_implausible():
    seen = reading(board(energy=ticks(900, 0, 6), power_limit_w=700.0), 2, 4)
    assert not seen.valid
    assert seen.flags == ("implausible_power",)


def test_a_stuck_counter_is_no_energy_and_no_reason_to_measure_longer():
    seen = reading(board(energy=((0.5, 10.0),)), 1, 9)
    assert seen.energy_j is None
    assert "stopped" in (seen.reason or "")
    assert seen.flags == ("no_sensor",)


def test_a_sensor_that_is_missing_gives_its_reason():
    series = board(absent={"energy": "Not Supported", "instant_power": "Insufficient Permissions"})
    seen = reading(series, 0, 5)
    assert seen.energy_j is None
    assert seen.flags == ("no_sensor",)
    assert "Not Supported" in (seen.reason or "")
    assert "instant_power: Insufficient Permissions" in (seen.reason or "")


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 2), (math.nan, 2), (0, math.inf)])
def test_an_empty_or_endless_window_is_refused(start, end):
    with pytest.raises(OutOfRangeError, match="window"):
        reading(board(), start, end)


def test_jitter_must_match_the_counter_changes():
    with pytest.raises(OutOfRangeError, match="energy_jitter_s"):
        board(energy=ticks(1, 0, 1), energy_jitter_s=(0.001,))


def test_an_irregular_poll_enters_the_error():
    energy = ticks(300, 0, 4)
    slow = board(energy=energy, energy_jitter_s=(0.02,) * len(energy))
    fine = board(energy=energy)
    slow_error = reading(slow, 1.05, 2.05).energy_rel_error
    fine_error = reading(fine, 1.05, 2.05).energy_rel_error
    assert slow_error is not None
    assert fine_error is not None
    assert slow_error - fine_error == pytest.approx(0.02 / 0.88 - 0.002 / 0.898, rel=1e-3)
