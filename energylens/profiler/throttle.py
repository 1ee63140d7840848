"""Temperature, clocks and clock-event reasons of a board over a window."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from energylens.measured import Spread, ThrottleCheck
from energylens.meter.base import DeviceSeries
from energylens.meter.window import CLOCK_EVENT_REASONS, THROTTLING
from energylens.store import board_hash
from energylens.units import HZ_PER_MHZ


def throttle_check(phase: str, series: DeviceSeries, start_s: float, end_s: float) -> ThrottleCheck:
    """What slowed a board down between two times, and how warm and fast it was meanwhile."""
    seen = series.between(start_s, end_s)
    shares = reason_shares([int(mask) for _, mask in seen.reasons])
    return ThrottleCheck(
        phase=phase,
        board_uuid=board_hash(series.uuid),
        temperature_c=_spread([v for _, v in seen.temperature]),
        sm_clock_mhz=_spread([v / HZ_PER_MHZ for _, v in seen.sm_clock]),
        power_w=_spread([v for _, v in seen.instant_power or seen.average_power]),
        reasons=shares,
        throttled=None if not seen.reasons else any(name in THROTTLING for name in shares),
    )


def reason_names(mask: int) -> list[str]:
    """Names of the bits of a mask of clock-event reasons."""
    return [name for bit, name in CLOCK_EVENT_REASONS.items() if mask & bit]


def reason_shares(masks: list[int]) -> dict[str, float]:
    """Part of the samples in which each reason held."""
    found = Counter(name for mask in masks for name in reason_names(mask))
    return {name: count / len(masks) for name, count in found.items()}


def _spread(values: list[float]) -> Spread | None:
    return Spread(low=min(values), mean=fmean(values), high=max(values)) if values else None
