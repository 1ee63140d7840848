"""One microbenchmark point: keep a device busy with one work, read time and power off slopes.

An energy counter ticks about ten times a second, so no single execution can be metered. Instead the
work is kept running without a gap, in chunks of about 30 ms of which two are always in flight, and
what is measured is a window in the middle of a steady state::

     pilot      settle 0.25 s (1 s near the limit)   window >= 0.75 s, >= 6 ticks     drain
    |-----|-----------------------------------------|------------------------------|-------|
    device [chunk][chunk][chunk][chunk][chunk][chunk][chunk][chunk][chunk][chunk][chunk][chunk]
    stamps       ^      ^      ^      ^      ^      S      ^      ^      ^      ^      E
    counter   '      '      '      '      '      '      '      '      '      '      '      '

* A stamp is taken right after a chunk is known to be done, while the next one already runs, so the
  slope of the stamps over the number of executions is the device's pace, launch gaps hidden.
* Window edges S and E are stamps; power is the recorder's reading between them (a slope between
  counter ticks).
* A load near the power limit needs the longer settling: the limiter takes a second to find its
  clock.
* Boards without a counter, whose power comes once to ten times a second (Jetson), need windows of
  half a minute: `TrialLimits.at_least`.

Nothing here knows a vendor: a `Work` brings the device side, a recorder of `energylens.meter` the
sensors and the clock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from energylens.graph import Op
from energylens.meter.base import AbstractRecorder
from energylens.meter.window import INVALID_FLAGS, THROTTLING, Reading
from energylens.spec.system import Mode
from energylens.store import Trial
from energylens.units import HZ_PER_MHZ

__all__ = ["AnchorLoad", "HostPoint", "MixPoint", "Trial", "TrialLimits", "Work", "measure"]

POWER_CAPPED = "power_capped"
NOT_STEADY = "not_steady"


class Team(Protocol):
    """All workers of a run, seen from one of them."""

    worker: int
    workers: int

    def tell(self, order: Any) -> Any:
        """Worker 0's ``order``, on every worker."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, on every worker."""
        ...


class Work(Protocol):
    """A piece of device work that can be queued over and over.

    Attributes:
        executions: how often the op is executed by one replay.
        footprint_bytes: device memory that the work holds, in bytes.
    """

    executions: int
    footprint_bytes: float

    def enqueue(self, replays: int) -> object:
        """Queue ``replays`` replays and return at once, with a token for `wait`."""
        ...

    def wait(self, token: object) -> None:
        """Block until everything up to ``token`` is done."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorLoad:
    """One load of an anchor: its work, and the FLOPs and bytes moved of one execution."""

    work: Work
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixPoint:
    """A mix to measure: its label, the ops that one execution stands for, and how to build it."""

    label: str
    ops: tuple[Op, ...]
    mode: Mode
    build: Callable[[], Work]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoint:
    """Steps that wait for the host, or show what part of its time the device does not hide.

    Attributes:
        label: model, phase, layers and workers.
        ops: what one forward launches, as the lowering counts it.
        step_s: median seconds of a forward; spread: relative standard deviation of the repeats.
        start_s, end_s: window of the repeats on the monotonic clock, for the meter.
    """

    label: str
    ops: tuple[Op, ...]
    step_s: float
    spread: float
    start_s: float
    end_s: float
    mode: Mode = Mode.EAGER


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """How long and how often a point is measured; the defaults are those of the module's time line.

    Attributes:
        power_limit_w: enforced power limit of the board; None switches everything about the limit
            off.
        chunk_s: duration of a chunk.
        settle_s, capped_settle_s: settling time, and that of loads near the power limit.
        window_s, capped_window_s, max_window_s: least window, the same near the power limit, and
            longest window.
        min_ticks: counter ticks that a window must hold, where a counter ticks at all.
        min_chunks: chunks that a window must hold, for works whose replay takes longer than a chunk
            should.
        steady_rel: largest relative difference of pace between the halves of a window.
        retries, pause_s: repetitions after a hardware slow-down, and the pause before each.
    """

    power_limit_w: float | None = None
    chunk_s: float = 0.03
    settle_s: float = 0.25
    capped_settle_s: float = 1.0
    window_s: float = 0.75
    capped_window_s: float = 1.0
    max_window_s: float = 2.5
    min_ticks: int = 6
    min_chunks: int = 6
    steady_rel: float = 0.02
    retries: int = 2
    pause_s: float = 5.0

    @property
    def stretch(self) -> float:
        """How much longer an ordinary point takes than with fast sensors."""
        usual = TrialLimits()
        return (self.settle_s + self.window_s) / (usual.settle_s + usual.window_s)

    def at_least(self, window_s: float) -> TrialLimits:
        """The same for sensors that need windows of ``window_s``; unchanged where these do."""
        if window_s <= self.window_s:
            return self
        return replace(
            self,
            settle_s=max(self.settle_s, _SLOW_SETTLE_S),
            capped_settle_s=max(self.capped_settle_s, _SLOW_SETTLE_S),
            window_s=window_s,
            capped_window_s=window_s,
            max_window_s=max(self.max_window_s, 2 * window_s),
        )


_SLOW_SETTLE_S = 5.0  # several samples of a slow sensor, and of the governor of its clock
_NEAR_LIMIT = 0.92  # of the power limit: settle longer
_CAPPED = 0.96  # of the power limit: the load holds it
_MAX_REPLAYS = 1 << 20
_HOPELESS = frozenset({"no_sensor", "mig", "lost"})  # flags of a reading that a retry cannot mend


def measure(
    work: Work,
    recorder: AbstractRecorder,
    uuid: str,
    *,
    limits: TrialLimits = TrialLimits(),
    sleep: Callable[[float], None] = time.sleep,
) -> Trial:
    """Measure one point.

    A hardware slow-down or thermal event (never the power limit, which is the normal state of a
    large GEMM) makes the trial invalid; it is repeated up to ``limits.retries`` times after a
    pause.

    Args:
        work: what to run.
        recorder: running recorder of the board's sensors; its clock stamps the chunks.
        uuid: board that ``work`` runs on.
        limits: durations and thresholds.
        sleep: how to pause, in seconds.

    Returns:
        The last attempt, valid or with its reason.
    """
    trial = _attempt(work, recorder, uuid, limits)
    for _ in range(limits.retries):
        if trial.valid or not _HOPELESS.isdisjoint(trial.flags):
            break
        sleep(limits.pause_s)
        trial = _attempt(work, recorder, uuid, limits)
    return trial


def _pilot(work: Work, now: Callable[[], float], chunk_s: float) -> int:
    """Replays that take about ``chunk_s``."""
    work.wait(work.enqueue(1))  # whatever is done lazily at the first execution
    replays = 1
    while True:
        start = now()
        work.wait(work.enqueue(replays))
        elapsed = now() - start
        if elapsed >= chunk_s / 3 or replays >= _MAX_REPLAYS:
            return max(1, round(replays * chunk_s / max(elapsed, chunk_s / 3)))
        replays *= 2


def _attempt(work: Work, recorder: AbstractRecorder, uuid: str, limits: TrialLimits) -> Trial:
    now = recorder.now
    chunk = _pilot(work, now, limits.chunk_s)
    in_flight: deque[object] = deque(work.enqueue(chunk) for _ in range(2))

    def stamp() -> float:
        work.wait(in_flight.popleft())
        at = now()
        in_flight.append(work.enqueue(chunk))
        return at

    def run_until(end_s: float) -> float:
        while (at := stamp()) < end_s:
            pass
        return at

    begin = stamp()
    start = run_until(begin + limits.settle_s)
    capped = _near_limit(recorder, uuid, begin, start, limits)
    if capped:
        start = run_until(begin + limits.capped_settle_s)

    stamps = [start]
    least = limits.capped_window_s if capped else limits.window_s
    while (length := stamps[-1] - start) < limits.max_window_s:
        long_enough = length >= least and len(stamps) > limits.min_chunks
        if long_enough and recorder.reading(uuid, start, stamps[-1]).ticks >= limits.min_ticks:
            break
        stamps.append(stamp())
    for token in in_flight:  # the load outlasts the window, so the sensors see its edge clearly
        work.wait(token)
    reading = recorder.reading(uuid, start, stamps[-1])
    return _trial(stamps, chunk * work.executions, reading, limits)


def _near_limit(
    recorder: AbstractRecorder, uuid: str, start: float, end: float, limits: TrialLimits
) -> bool:
    """Whether the load comes near the power limit.

    By its highest instant sample, as a mean would still hold the ramp from idle.
    """
    if limits.power_limit_w is None:
        return False
    series = recorder.series(uuid, start, end)
    samples = series.instant_power or series.average_power
    return max((w for _, w in samples), default=0.0) > _NEAR_LIMIT * limits.power_limit_w


def _pace(stamps: Sequence[float]) -> tuple[float, float, float]:
    """Seconds per chunk by least squares, its relative error, relative drift between the halves."""
    at = np.asarray(stamps)
    index = np.arange(len(at))
    pace = float(np.polyfit(index, at - at[0], 1)[0]) if len(at) > 2 else float(at[-1] - at[0])
    chunks = np.diff(at)
    if len(chunks) < 4:
        return pace, float(np.ptp(chunks) / pace), 0.0
    half = len(chunks) // 2
    drift = float(chunks[-half:].mean() - chunks[:half].mean()) / pace
    return pace, float(chunks.std(ddof=1)) / math.sqrt(len(chunks)) / pace, drift


def _trial(
    stamps: Sequence[float], executions: int, reading: Reading, limits: TrialLimits
) -> Trial:
    pace, pace_rel_se, drift = _pace(stamps)
    power, limit = reading.mean_power_w, limits.power_limit_w
    flags = list(reading.flags)
    if POWER_CAPPED not in flags and power and limit and power > _CAPPED * limit:
        flags.append(POWER_CAPPED)
    if abs(drift) > limits.steady_rel:
        flags.append(NOT_STEADY)
        pace_rel_se = max(pace_rel_se, abs(drift) / 2)
    error = reading.energy_rel_error
    return Trial(
        latency_s=pace / executions,
        latency_rel_se=pace_rel_se,
        power_w=power,
        power_rel_se=error / math.sqrt(3) if error is not None else None,
        clock_hz=reading.sm_clock_hz,
        clock_min_hz=reading.sm_clock_min_hz,
        temperature_c=reading.temperature_end_c,
        ticks=reading.ticks,
        window_s=stamps[-1] - stamps[0],
        instant_power_w=reading.instant_power_w,
        flags=tuple(flags),
        valid=reading.valid,
        reason="" if reading.valid else _why_invalid(reading),
    )


def _why_invalid(reading: Reading) -> str:
    if reading.reason:
        return reading.reason
    defects = [f for f in reading.flags if f in INVALID_FLAGS or f == "coverage"]
    events = [name for name in THROTTLING if name in reading.reasons]
    clocks = ""
    if "throttled" in defects and reading.sm_clock_hz and reading.sm_clock_min_hz:
        mean, least = reading.sm_clock_hz / HZ_PER_MHZ, reading.sm_clock_min_hz / HZ_PER_MHZ
        clocks = f"; SM clock {mean:.0f} MHz, at least {least:.0f} MHz"
    return ", ".join((*defects, *events)) + clocks
