"""Energy of a window from recorded sensor samples: values and pure functions.

`reading` turns a `DeviceSeries` and a window into joules. Times are monotonic seconds of one clock.
Missing is None with a reason, never 0. Which sensor gives the energy (the first that can):

1. ``counter_slope``. The energy counter of a board moves only every 20 to 110 ms, so the difference
   of two reads is wrong by up to a tick at either end. The slope between the first and the last
   *change* inside the window is not; energy = slope x duration.
2. ``trapezoid_instant``. Integral of instant power, linearly interpolated at both edges.
3. ``trapezoid_average``. The same with the moving average, for long windows only: it lags by 1 s.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from energylens.errors import OutOfRangeError
from energylens.units import J_PER_MJ, W_PER_MW

COUNTER_POLL_S = 0.002
"""Time between two looks at the energy counter; bounds the error of the time stamp of a change."""
AVERAGE_WINDOW_S = 1.0
"""Length of the moving average behind the average-power sensor."""
AVERAGE_MIN_S = 5.0
"""Shortest window that may be integrated from average power."""
CROSS_CHECK_MIN_S = 2.0
"""Shortest window in which counter and instant power are compared."""

Samples = tuple[tuple[float, float], ...]
"""(monotonic time in s, value) in strictly rising time."""
_T = TypeVar("_T")
Method = Literal["counter_slope", "trapezoid_instant", "trapezoid_average"]

SENSORS = (
    "energy",
    "instant_power",
    "average_power",
    "sm_clock",
    "memory_clock",
    "temperature",
    "reasons",
)
"""The sensors of a board: the names of the sample fields of `DeviceSeries`."""

CLOCK_EVENT_REASONS: Mapping[int, str] = MappingProxyType(
    {
        0x1: "gpu_idle",
        0x2: "clocks_setting",
        0x4: "sw_power_cap",
        0x8: "hw_slowdown",
        0x10: "sync_boost",
        0x20: "sw_thermal_slowdown",
        0x40: "hw_thermal_slowdown",
        0x80: "hw_power_brake",
        0x100: "display_clock",
        1 << 24: "governor",  # ours: the clock follows the load, as on a Jetson
    }
)
"""Name of each bit of NVML's clock event ("throttle") reasons, and of one more."""
THROTTLING = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""Reasons that make a window invalid. The software power cap is none: a large GEMM runs at it."""

INVALID_FLAGS = frozenset(
    {
        "too_short",
        "throttled",
        "sensor_disagreement",
        "counter_reset",
        "implausible_power",
        "no_sensor",
        "mig",
        "lost",
    }
)
"""Flags that make a reading invalid. The others are labels: ``power_capped``, ``gpu_idle``,
``counter_mistrusted``, ``clock_scaling``, ``sensors_differ`` (by 5 to 10 %) and ``coverage`` (below
95 %; below 80 % the reading is invalid, below 50 % there is none)."""

_MAX_POWER_W = 2.0**31 * W_PER_MW
"""NVML answers nonsense above 2^31 mW when a power sensor fails."""
_TEMPERATURE_RANGE_C = (-100.0, 200.0)
"""Outside lie sentinels such as -256 (sensor offline)."""
MARGIN_S = 2.0
"""How far outside of the window samples are looked at for edges and sensor periods."""
_COUNTER_STEP_J = J_PER_MJ
_DEFAULT_TICK_S = 0.1
_MIN_COVERAGE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeries:
    """Samples of one board. Samples whose time does not rise are dropped at construction.

    Attributes:
        energy: counter *changes* only, (s, J); the value found at the start is no change.
        energy_jitter_s: per change, how long before its stamp the counter may have moved; empty
            means `COUNTER_POLL_S`.
        instant_power, average_power: (s, W).
        sm_clock, memory_clock: (s, Hz).
        temperature: (s, degrees Celsius).
        reasons: (s, mask of `CLOCK_EVENT_REASONS`).
        scope: what power and energy cover: ``gpu``, or ``module`` (with a CPU and its memory).
        power_limit_w, sm_clock_max_hz: limits for the plausibility checks.
        power_step_w: resolution of the power samples.
        mig: True for a slice or a split board. lost_s: when the board fell off the bus.
        absent: sensor -> why it gives nothing (any more).
    """

    uuid: str
    name: str = ""
    energy: Samples = ()
    energy_jitter_s: tuple[float, ...] = ()
    instant_power: Samples = ()
    average_power: Samples = ()
    sm_clock: Samples = ()
    memory_clock: Samples = ()
    temperature: Samples = ()
    reasons: tuple[tuple[float, int], ...] = ()
    scope: str = "gpu"
    power_limit_w: float | None = None
    sm_clock_max_hz: float | None = None
    power_step_w: float = W_PER_MW
    mig: bool = False
    lost_s: float | None = None
    absent: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Keep the samples in rising time."""
        if self.energy_jitter_s and len(self.energy_jitter_s) != len(self.energy):
            raise OutOfRangeError(
                f"series {self.uuid}: {len(self.energy_jitter_s)} values of energy_jitter_s for "
                f"{len(self.energy)} of energy; give one per change or none"
            )
        jitter = self.energy_jitter_s or (COUNTER_POLL_S,) * len(self.energy)
        rising = _rising([t for t, _ in self.energy])
        object.__setattr__(self, "energy_jitter_s", tuple(jitter[i] for i in rising))
        for sensor in SENSORS:
            samples = getattr(self, sensor)
            kept = tuple(samples[i] for i in _rising([t for t, _ in samples]))
            object.__setattr__(self, sensor, kept)

    def between(self, start_s: float, end_s: float) -> DeviceSeries:
        """The samples from ``start_s`` to ``end_s``, both included."""
        first = bisect_left(self.energy, start_s, key=itemgetter(0))
        parts: dict[str, Any] = {
            sensor: tuple(_cut(getattr(self, sensor), start_s, end_s)) for sensor in SENSORS
        }
        jitter_s = self.energy_jitter_s[first : first + len(parts["energy"])]
        return replace(self, energy_jitter_s=jitter_s, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Energy and state of one board over one window.

    Attributes:
        energy_j, mean_power_w: None where ``reason`` says why; never 0 for missing.
        method: sensor that gave the energy; ticks: its updates inside the window.
        energy_rel_error: bound of the error from sampling, relative to ``energy_j`` (see
            `reading`); the gain error of the board's sensor, about 5 %, is not in it.
        instant_power_w: mean instant power, as a second opinion.
        sm_clock_hz, sm_clock_min_hz, sm_clock_max_hz: mean and range of the samples inside.
        reasons: fraction of the samples per clock event reason that occurred.
        coverage: part of the window that the used sensor observed.
        valid: fit for use; flags: labels and defects (`INVALID_FLAGS` tells them apart).
        reason: why ``energy_j`` is None.
        scope: what the energy covers, ``gpu`` or ``module``.
    """

    uuid: str
    start_s: float
    end_s: float
    duration_s: float
    energy_j: float | None
    mean_power_w: float | None
    method: Method | None
    ticks: int
    energy_rel_error: float | None
    instant_power_w: float | None
    sm_clock_hz: float | None
    sm_clock_min_hz: float | None
    sm_clock_max_hz: float | None
    temperature_start_c: float | None
    temperature_end_c: float | None
    reasons: Mapping[str, float]
    coverage: float
    valid: bool
    flags: tuple[str, ...]
    reason: str | None
    scope: str = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTrust:
    """Verdict on a board's energy counter.

    Attributes:
        trusted: None where the window allows no verdict; ``reason`` says why.
        ratio: counter slope over mean instant power.
    """

    trusted: bool | None
    ratio: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Estimate:
    power_w: float
    rel_error: float
    coverage: float
    updates: int
    low_w: float
    high_w: float


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Why a sensor gives no estimate; ``too_short`` where a longer window would help."""

    text: str
    too_short: bool


def reading(
    series: DeviceSeries,
    start_s: float,
    end_s: float,
    *,
    min_ticks: int = 4,
    trust_counter: bool = True,
) -> Reading:
    """Energy of ``series`` between ``start_s`` and ``end_s``.

    The error bound of ``counter_slope`` has two parts. Time stamps: one poll (about 2 ms) over the
    span from the first to the last change, so about poll / ((ticks - 1) x period), plus 1 mJ of
    resolution. Edges: the slope is extended over the parts before the first and after the last
    change; the error there is what instant power deviates from the slope or, without instant power,
    all that the neighbouring ticks allow. Bounds hold for a power that changes at most once between
    two samples of instant power (20 ms). So keep the load running a few samples past both ends of
    the window, or its fall is counted as a possible error.

    Args:
        series: samples that cover the window, better with a second to spare at both ends.
        start_s: begin of the window, monotonic seconds.
        end_s: end of the window, monotonic seconds.
        min_ticks: updates of a sensor that the window must hold; fewer are ``too_short``.
        trust_counter: False skips the counter (see `counter_trust`).

    Raises:
        OutOfRangeError: the window is empty or its ends are not finite.
    """
    if not (math.isfinite(start_s) and math.isfinite(end_s) and end_s > start_s):
        raise OutOfRangeError(
            f"window {start_s} to {end_s} s: must be finite and end after it starts"
        )
    near = series.between(start_s - MARGIN_S, end_s + MARGIN_S)
    watts = _sane(near, "instant_power")
    instant = _trapezoid(watts, start_s, end_s, min_ticks, near.power_step_w)
    counter = _counter_slope(near, start_s, end_s, min_ticks, watts)
    method, chosen, flags, why = _choose(
        near, start_s, end_s, min_ticks, counter, instant, trust_counter
    )
    duration_s = end_s - start_s
    clocks = [v for _, v in _cut(near.sm_clock, start_s, end_s) if v > 0]
    temperature = _edge_values(_sane(near, "temperature"), start_s, end_s)
    reasons = _reason_fractions([int(v) for _, v in _cut(near.reasons, start_s, end_s)])
    power_w = chosen.power_w if chosen else None
    if chosen:
        flags += _cross_check(counter, instant, duration_s) if method == "counter_slope" else ()
        flags += ("coverage",) if chosen.coverage < 0.95 else ()
    flags += _state_flags(near, power_w, clocks, reasons)
    coverage = chosen.coverage if chosen else 0.0
    return Reading(
        uuid=series.uuid,
        start_s=start_s,
        end_s=end_s,
        duration_s=duration_s,
        energy_j=None if power_w is None else power_w * duration_s,
        mean_power_w=power_w,
        method=method,
        ticks=chosen.updates if chosen else len(_cut(near.energy, start_s, end_s)),
        energy_rel_error=chosen.rel_error if chosen else None,
        instant_power_w=instant.power_w if isinstance(instant, _Estimate) else None,
        sm_clock_hz=statistics.fmean(clocks) if clocks else None,
        sm_clock_min_hz=min(clocks, default=None),
        sm_clock_max_hz=max(clocks, default=None),
        temperature_start_c=temperature[0],
        temperature_end_c=temperature[1],
        reasons=reasons,
        coverage=coverage,
        valid=power_w is not None and coverage >= 0.8 and not INVALID_FLAGS.intersection(flags),
        flags=flags,
        reason=why,
        scope=series.scope,
    )


def counter_trust(series: DeviceSeries, start_s: float, end_s: float) -> CounterTrust:
    """Compare the counter with the integral of instant power under a steady load of some seconds.

    Public reports know counters that are far off, so a board's counter is checked once before it
    is the primary source. 5 % apart or more means mistrusted.
    """
    seen = reading(series, start_s, end_s)
    steady = _trapezoid(_sane(series, "instant_power"), start_s, end_s, 4, series.power_step_w)
    if end_s - start_s < CROSS_CHECK_MIN_S:
        text = f"the window of {end_s - start_s:.3g} s is shorter than {CROSS_CHECK_MIN_S:g} s"
    elif seen.method != "counter_slope" or seen.mean_power_w is None:
        text = "the counter gives no slope in this window"
    elif not isinstance(steady, _Estimate):
        text = f"no instant power to compare with: {steady.text}"
    elif steady.high_w - steady.low_w > 0.2 * steady.power_w:
        text = f"the load is not steady: {steady.low_w:.0f} to {steady.high_w:.0f} W"
    else:
        ratio = seen.mean_power_w / steady.power_w
        trusted = abs(ratio - 1) < 0.05
        off = (
            f"the counter reads {ratio:.3f} of instant power under a steady {steady.power_w:.0f} W"
        )
        return CounterTrust(trusted=trusted, ratio=ratio, reason=None if trusted else off)
    return CounterTrust(trusted=None, ratio=None, reason=text)


def _rising(times: Sequence[float]) -> list[int]:
    """Indices of the samples whose time is above that of all samples before."""
    kept: list[int] = []
    latest = -math.inf
    for index, t in enumerate(times):
        if t > latest:
            kept.append(index)
            latest = t
    return kept


def _cut(
    samples: Sequence[tuple[float, _T]], start_s: float, end_s: float
) -> Sequence[tuple[float, _T]]:
    first = bisect_left(samples, start_s, key=itemgetter(0))
    return samples[first : bisect_right(samples, end_s, key=itemgetter(0))]


def plausible(sensor: str, value: float) -> bool:
    """False for what a failed sensor answers: no or negative power, sentinel temperatures."""
    if sensor in ("instant_power", "average_power"):
        return 0 < value < _MAX_POWER_W
    if sensor == "temperature":
        return _TEMPERATURE_RANGE_C[0] < value < _TEMPERATURE_RANGE_C[1]
    return value >= 0


def _sane(series: DeviceSeries, sensor: str) -> Samples:
    samples: Samples = getattr(series, sensor)
    return tuple(s for s in samples if plausible(sensor, s[1]))


def _period_s(samples: Sequence[tuple[float, float]]) -> float | None:
    gaps = [b[0] - a[0] for a, b in pairwise(samples)]
    return statistics.median(gaps) if gaps else None


def _too_few(what: str, found: int, needed: int, duration_s: float, period_s: float) -> _Shortage:
    least_s = (needed + 1) * period_s
    text = f"{found} {what} in {duration_s:.3g} s, {needed} needed"
    if duration_s > 3 * least_s:
        return _Shortage(f"{text}: the sensor stopped", too_short=False)
    return _Shortage(f"{text}; measure at least {least_s:.2g} s (repeat the work)", too_short=True)


def _trapezoid(
    samples: Samples, start_s: float, end_s: float, min_samples: int, step_w: float
) -> _Estimate | _Shortage:
    """Integral of power with interpolated edges; gaps over 3 sample periods are not observed."""
    inside = _cut(samples, start_s, end_s)
    near = _cut(samples, start_s - MARGIN_S, end_s + MARGIN_S)
    period_s = _period_s(near)
    if period_s is None:
        return _Shortage("no power samples", too_short=False)
    updates = [near[0], *(b for a, b in pairwise(near) if a[1] != b[1])]
    refresh_s = (_period_s(updates) or period_s) if len(updates) > 4 else period_s
    duration_s = end_s - start_s
    if len(inside) < min_samples or duration_s < min_samples * min(refresh_s, _DEFAULT_TICK_S):
        return _too_few("power samples", len(inside), min_samples, duration_s, refresh_s)
    area_j = error_j = observed_s = 0.0
    low_w, high_w = math.inf, 0.0
    for (t0, p0), (t1, p1) in pairwise(near):
        a, b = max(t0, start_s), min(t1, end_s)
        if b <= a or t1 - t0 > 3 * period_s:
            continue
        middle_w = p0 + (p1 - p0) * ((a + b) / 2 - t0) / (t1 - t0)
        area_j += middle_w * (b - a)
        error_j += max(abs(p0 - middle_w), abs(p1 - middle_w)) * (b - a)
        observed_s += b - a
        low_w, high_w = min(low_w, p0, p1), max(high_w, p0, p1)
    if observed_s <= 0:
        return _Shortage("power samples with gaps only", too_short=False)
    power_w = area_j / observed_s
    error_j += step_w * duration_s
    error_j += (duration_s - observed_s) * max(high_w - power_w, power_w - low_w)
    coverage = min(1.0, observed_s / duration_s)
    if coverage < _MIN_COVERAGE:
        return _Shortage(f"power samples cover {coverage:.0%} of the window only", too_short=False)
    return _Estimate(
        power_w, error_j / (power_w * duration_s), coverage, len(inside), low_w, high_w
    )


def _counter_slope(
    series: DeviceSeries, start_s: float, end_s: float, min_ticks: int, watts: Samples
) -> _Estimate | _Shortage:
    ticks = _cut(series.energy, start_s, end_s)
    period_s = _period_s(series.energy) or _DEFAULT_TICK_S
    if len(ticks) < min_ticks and "energy" in series.absent:
        return _Shortage(f"energy counter: {series.absent['energy']}", too_short=False)
    if len(ticks) < max(2, min_ticks):
        return _too_few("counter changes", len(ticks), min_ticks, end_s - start_s, period_s)
    if _has_reset(ticks):
        return _Shortage(
            "the energy counter went backwards (driver reload or GPU reset)", too_short=False
        )
    (t_first, e_first), (t_last, e_last) = ticks[0], ticks[-1]
    index = bisect_left(series.energy, t_first, key=itemgetter(0))
    jitter_s = max(series.energy_jitter_s[index], series.energy_jitter_s[index + len(ticks) - 1])
    span_s, rise_j = t_last - t_first, e_last - e_first
    if rise_j <= 2 * _COUNTER_STEP_J or span_s <= 2 * jitter_s:
        return _Shortage("the energy counter hardly moves", too_short=True)
    power_w = rise_j / span_s
    edges = (t_first - start_s, end_s - t_last)
    if watts:
        edge_j = _deviation_j(watts, start_s, t_first, power_w)
        edge_j += _deviation_j(watts, t_last - jitter_s, end_s, power_w)
    else:
        edge_j = _edge_bound_j(series.energy, index, len(ticks), edges, power_w)
    rel_error = jitter_s / (span_s - jitter_s) + _COUNTER_STEP_J / (rise_j - _COUNTER_STEP_J)
    rel_error += edge_j / (power_w * (end_s - start_s))
    coverage = 1 - sum(max(0.0, edge - period_s) for edge in edges) / (end_s - start_s)
    if coverage < _MIN_COVERAGE:
        return _Shortage(f"the counter covers {coverage:.0%} of the window only", too_short=False)
    return _Estimate(power_w, rel_error, coverage, len(ticks), power_w, power_w)


def _deviation_j(watts: Samples, start_s: float, end_s: float, power_w: float) -> float:
    """Bound of the energy error of taking ``power_w`` for the power between the two times."""
    total_j = seen_s = 0.0
    for (t0, p0), (t1, p1) in pairwise(watts):
        length_s = min(t1, end_s) - max(t0, start_s)
        if length_s > 0:
            total_j += max(abs(p0 - power_w), abs(p1 - power_w)) * length_s
            seen_s += length_s
    return total_j + power_w * max(0.0, end_s - start_s - seen_s)


def _edge_bound_j(
    energy: Samples, first: int, count: int, edges: tuple[float, float], power_w: float
) -> float:
    """The same for both edges by the ticks around: an edge holds 0 to all of its tick's energy."""
    last = first + count - 1
    before_j = energy[first][1] - energy[first - 1][1] if first > 0 else math.inf
    after_j = energy[last + 1][1] - energy[last][1] if last + 1 < len(energy) else math.inf
    total_j = 0.0
    for edge_s, tick_j in zip(edges, (before_j, after_j), strict=True):
        assumed_j = power_w * edge_s
        total_j += max(assumed_j, tick_j - assumed_j) if math.isfinite(tick_j) else assumed_j
    return total_j


def _has_reset(ticks: Sequence[tuple[float, float]]) -> bool:
    return any(b[1] < a[1] for a, b in pairwise(ticks))


def _choose(
    series: DeviceSeries,
    start_s: float,
    end_s: float,
    min_ticks: int,
    counter: _Estimate | _Shortage,
    instant: _Estimate | _Shortage,
    trust_counter: bool,
) -> tuple[Method | None, _Estimate | None, tuple[str, ...], str | None]:
    """Method, its estimate, flags, and the reason where there is none."""
    if series.mig:
        return None, None, ("mig",), "mig: board sensors cover all slices, no energy of one slice"
    if series.lost_s is not None and series.lost_s <= end_s:
        return (
            None,
            None,
            ("lost",),
            f"the GPU was lost at {series.lost_s:.3f} s, inside or before the window",
        )
    flags: tuple[str, ...] = () if trust_counter else ("counter_mistrusted",)
    if _has_reset(_cut(series.energy, start_s, end_s)):
        flags += ("counter_reset",)
    if trust_counter and isinstance(counter, _Estimate):
        return "counter_slope", counter, flags, None
    if isinstance(instant, _Estimate):
        return "trapezoid_instant", instant, flags, None
    average = _average_power(series, start_s, end_s, min_ticks)
    if isinstance(average, _Estimate):
        return "trapezoid_average", average, flags, None
    shortages = [s for s in (counter, instant, average) if isinstance(s, _Shortage)]
    too_short = [s for s in shortages if s.too_short]
    flags += ("too_short",) if too_short else ("no_sensor",)
    texts = dict.fromkeys(s.text for s in too_short or shortages)
    return (
        None,
        None,
        flags,
        "; ".join([*texts, *(f"{k}: {v}" for k, v in series.absent.items() if "power" in k)]),
    )


def _average_power(
    series: DeviceSeries, start_s: float, end_s: float, min_ticks: int
) -> _Estimate | _Shortage:
    average = _trapezoid(
        _sane(series, "average_power"), start_s, end_s, min_ticks, series.power_step_w
    )
    duration_s = end_s - start_s
    if isinstance(average, _Estimate):
        if duration_s < AVERAGE_MIN_S:
            text = f"average power lags in {duration_s:.3g} s; measure at least {AVERAGE_MIN_S:g} s"
            return _Shortage(text, too_short=True)
        lag_j = 0.5 * AVERAGE_WINDOW_S * (average.high_w - average.low_w)
        return replace(
            average, rel_error=average.rel_error + lag_j / (average.power_w * duration_s)
        )
    return average


def _cross_check(
    counter: _Estimate | _Shortage, instant: _Estimate | _Shortage, duration_s: float
) -> tuple[str, ...]:
    if not isinstance(counter, _Estimate) or not isinstance(instant, _Estimate):
        return ()
    if duration_s < CROSS_CHECK_MIN_S or instant.coverage < 0.95:
        return ()
    apart = abs(counter.power_w - instant.power_w) / max(counter.power_w, instant.power_w)
    if apart > 0.10:
        return ("sensor_disagreement",)
    return ("sensors_differ",) if apart > 0.05 else ()


def _reason_fractions(masks: Sequence[int]) -> Mapping[str, float]:
    counts: dict[str, int] = {}
    for mask in masks:
        for bit in (1 << i for i in range(mask.bit_length()) if mask >> i & 1):
            name = CLOCK_EVENT_REASONS.get(bit, f"unknown_{bit:#x}")
            counts[name] = counts.get(name, 0) + 1
    return MappingProxyType({name: count / len(masks) for name, count in counts.items()})


def _edge_values(
    samples: Sequence[tuple[float, float]], start_s: float, end_s: float
) -> tuple[float | None, float | None]:
    """Value at the window's start (or the first one inside) and the last one before its end."""
    until_end = [s for s in samples if s[0] <= end_s]
    if not until_end:
        return None, None
    until_start = [s for s in until_end if s[0] <= start_s]
    return (until_start[-1] if until_start else until_end[0])[1], until_end[-1][1]


def _state_flags(
    series: DeviceSeries,
    power_w: float | None,
    clocks: Sequence[float],
    reasons: Mapping[str, float],
) -> tuple[str, ...]:
    limit_w, clock_max_hz = series.power_limit_w, series.sm_clock_max_hz
    load = power_w / limit_w if power_w and limit_w else 0.0
    capped = "sw_power_cap" in reasons or (0.95 <= load <= 1.2 and not series.reasons)
    idle, governed = "gpu_idle" in reasons, "governor" in reasons
    slow = False
    if clocks and not capped and not idle:
        slow = min(clocks) < 0.8 * max(clocks)
        if clock_max_hz and "clocks_setting" not in reasons:
            slow = slow or statistics.fmean(clocks) < 0.8 * clock_max_hz
    found = {
        "power_capped": capped,
        "gpu_idle": idle,
        "throttled": (slow and not governed) or any(name in reasons for name in THROTTLING),
        "clock_scaling": slow and governed,
        "implausible_power": load > 1.2,
    }
    return tuple(name for name, present in found.items() if present)
