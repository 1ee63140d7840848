"""For any phase of ticks, samples and load, the true energy lies within the error reported."""

from __future__ import annotations

import math
from dataclasses import replace

from helpers_nvml import Steps, square
from hypothesis import given
from hypothesis import strategies as st

from energylens.meter.base import DeviceSeries, Reading, reading

ORIGIN, END = 995.0, 1015.0


def record(
    power: Steps, *, tick_s: float, phase: float, poll: list[float], instant: bool
) -> DeviceSeries:
    """What a recorder would see: whole millijoules, stamps late by up to one poll of 2 ms."""
    first = math.ceil((ORIGIN - phase) / tick_s)
    ticks = [phase + k * tick_s for k in range(first, int((END - phase) / tick_s))]
    energy = tuple(
        (t + 0.002 * poll[k % len(poll)], math.floor(power.energy(ORIGIN, t) * 1000) / 1000)
        for k, t in enumerate(ticks)
    )
    times = [ORIGIN + 0.0071 + 0.02 * k for k in range(int((END - ORIGIN) / 0.02))]
    watts = tuple((t, power.at(t)) for t in times) if instant else ()
    return DeviceSeries(uuid="GPU-a", energy=energy, instant_power=watts)


def within(seen: Reading, truth_j: float) -> bool:
    assert seen.energy_j is not None
    assert seen.energy_rel_error is not None
    slack_j = 1e-9 * truth_j
    return abs(seen.energy_j - truth_j) <= seen.energy_rel_error * seen.energy_j + slack_j


phases = st.floats(0, 0.1)
polls = st.lists(st.floats(0, 1), min_size=1, max_size=7)
starts = st.floats(1000, 1001)
lengths = st.floats(0.7, 8)
tick_lengths = st.sampled_from([0.02, 0.05, 0.1, 0.11])


@given(
    watts=st.floats(20, 1200),
    tick_s=tick_lengths,
    phase=phases,
    poll=polls,
    start=starts,
    length=lengths,
    instant=st.booleans(),
)
def test_constant_power_gives_power_times_time_for_any_phase(
    watts, tick_s, phase, poll, start, length, instant
):
    series = record(Steps(watts), tick_s=tick_s, phase=phase, poll=poll, instant=instant)
    seen = reading(series, start, start + length)
    assert seen.method == "counter_slope"
    assert within(seen, watts * length)
    if instant:
        assert seen.energy_rel_error is not None
        assert seen.energy_rel_error < 0.012


@given(
    low=st.floats(50, 300),
    high=st.floats(300, 700),
    period=st.floats(0.1, 3),
    duty=st.floats(0.25, 0.75),
    wave_phase=st.floats(0, 3),
    tick_s=tick_lengths,
    phase=phases,
    poll=polls,
    start=starts,
    length=lengths,
    sensors=st.sampled_from(["both", "counter", "instant"]),
)
def test_a_square_wave_lies_within_the_reported_bound(
    low, high, period, duty, wave_phase, tick_s, phase, poll, start, length, sensors
):
    power = square(low, high, period, duty, wave_phase)
    series = record(power, tick_s=tick_s, phase=phase, poll=poll, instant=sensors != "counter")
    if sensors == "instant":
        series = replace(series, energy=(), energy_jitter_s=())
    seen = reading(series, start, start + length)
    assert seen.method == ("trapezoid_instant" if sensors == "instant" else "counter_slope")
    assert within(seen, power.energy(start, start + length))


@given(watts=st.floats(20, 1200), phase=phases, poll=polls, start=starts, shift=st.floats(0, 5))
def test_shifting_the_window_does_not_change_the_power(watts, phase, poll, start, shift):
    series = record(Steps(watts), tick_s=0.1, phase=phase, poll=poll, instant=True)
    one, other = (reading(series, s, s + 1.5) for s in (start, start + shift))
    assert one.mean_power_w is not None
    assert other.mean_power_w is not None
    assert one.energy_rel_error is not None
    assert other.energy_rel_error is not None
    bound = one.energy_rel_error * one.mean_power_w + other.energy_rel_error * other.mean_power_w
    assert abs(one.mean_power_w - other.mean_power_w) <= bound


@given(watts=st.floats(20, 1200), start=starts, length=st.floats(0.001, 8), drop=st.integers(0, 3))
def test_energy_is_missing_or_positive_and_never_zero(watts, start, length, drop):
    series = record(Steps(watts), tick_s=0.1, phase=0.03, poll=[0.5], instant=drop < 2)
    if drop % 2:
        series = replace(series, energy=(), energy_jitter_s=())
    seen = reading(series, start, start + length)
    assert (seen.energy_j is None) == (seen.reason is not None)
    assert seen.energy_j is None or seen.energy_j > 0
    assert not seen.valid or seen.energy_j is not None


@given(
    watts=st.floats(20, 1200),
    back=st.lists(st.tuples(st.integers(0, 900), st.floats(0.1, 50)), max_size=5),
    start=starts,
)
def test_samples_with_time_going_backwards_change_nothing(watts, back, start):
    series = record(Steps(watts), tick_s=0.1, phase=0.01, poll=[0.2], instant=True)
    power = list(series.instant_power)
    for index, ago in back:
        at = power[index][0]
        power.insert(index + 1, (at - ago, 9999.0))
    mixed = replace(series, instant_power=tuple(power))
    assert reading(mixed, start, start + 2) == reading(series, start, start + 2)
