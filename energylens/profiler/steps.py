"""One phase on one worker: repeat its step in a steady state, time every iteration.

No iteration waits for the host to look at it: a mark follows each step on the device's own time
line, two steps are always in flight, and the seconds of an iteration are those between two marks,
so they add up to the window, launch gaps included::

             lone steps   settle               window                        tail
             |--|  |--|  |------------------|-------------------------------|-----|
    device   [s ]  [s ]  [s][s][s][s][s][s][s][s][s][s][s][s][s][s][s][s][s][s][s]
    marks                 '  '  '  '  '  '  S  '  '  '  '  '  '  '  '  '  '  E  '
    counter  '      '      '      '      '      '      '      '      '      '      '

* Lone steps do what is done once, show the pace, and whether the host or the device is the slower.
* The host stamps S and E right after the device has passed them, while the next step runs already;
  the energy of the window is read between them from the slope of the energy counter.
* The load outlasts the window, so that the sensors see its edges clearly.

Worker 0 decides how many steps follow, a quarter of a second at a time; all workers make the same.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from energylens.bench.trial import Team
from energylens.errors import MeterError
from energylens.profiler.metrics import WorkerWindow


class Stepper(Protocol):
    """A phase of an engine, ready to run.

    Attributes:
        queued: True where `step` returns before the device is done.
    """

    queued: bool

    def step(self) -> None:
        """Queue one step."""
        ...

    def mark(self) -> Any:
        """Mark the place after what is queued so far, on the device's time line."""
        ...

    def wait(self, mark: Any) -> None:
        """Block until the device has passed ``mark``."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds of the device between two marks that it has passed."""
        ...

    def context_len(self, first: int, count: int) -> float | None:
        """Mean KV length of ``count`` steps from number ``first`` on, the first of all being 0.

        The current token is included; None where the phase is no decode step.
        """
        ...


SLOW_SETTLE_S = 5.0
"""Seconds until a sensor of a few values a second has settled, and the governor of the clock."""
_ORDER_S = 0.25
"""Seconds of steps that worker 0 orders at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a phase is run.

    Attributes:
        repeats: least iterations of a window.
        settle_s: seconds under load before it; the power limiter needs one or two.
        window_s: least seconds of a window: some thirty ticks of an energy counter.
        tail_s: seconds of load after it.
        lone: lone steps, fewer where they take longer than ``settle_s`` together.
    """

    repeats: int = 20
    settle_s: float = 2.0
    window_s: float = 3.0
    tail_s: float = 0.15
    lone: int = 5

    def __post_init__(self) -> None:
        """Check what the type system cannot."""
        if self.repeats < 1:
            raise MeterError(f"--repeats: {self.repeats} found, and must be at least 1")

    def at_least(self, window_s: float) -> Limits:
        """The same for sensors that need windows of ``window_s``; unchanged where these do."""
        if window_s <= self.window_s:
            return self
        return replace(self, settle_s=max(self.settle_s, SLOW_SETTLE_S), window_s=window_s)


def run_window(
    stepper: Stepper,
    team: Team,
    limits: Limits,
    *,
    now: Callable[[], float] = time.monotonic,
    progress: Callable[[float], None] = lambda share: None,
) -> WorkerWindow:
    """Repeat the step of ``stepper`` on all workers, and time it on this one.

    Args:
        stepper: the phase.
        team: all workers; every one calls this with the same ``limits``.
        limits: how long.
        now: monotonic seconds, the clock of the sensors.
        progress: is told the share of the work that is done, 0 to 1.
    """
    lone = _lone_steps(stepper, team, limits, now)
    plan = _Plan(limits, lone.pace_s, now)
    marks: list[Any] = []
    passed_s: list[float] = []  # when the host saw the device pass each mark

    def step() -> None:
        stepper.step()
        marks.append(stepper.mark())
        if len(marks) > len(passed_s) + stepper.queued:  # one more in flight, where that can be
            stepper.wait(marks[len(passed_s)])
            passed_s.append(now())

    team.gather(None)  # nobody starts earlier than the last one
    begin: dict[str, int] = {}
    while (order := team.tell(plan.order(len(marks)))) is not None:
        part, count = order
        begin.setdefault(part, len(marks))
        for _ in range(count):
            step()
        progress(plan.share(len(marks)))
    stepper.wait(marks[-1])
    first, last = begin["window"] - 1, begin["tail"] - 1
    return WorkerWindow(
        times_s=tuple(stepper.seconds(a, b) for a, b in pairwise(marks[first : last + 1])),
        start_s=passed_s[first],
        end_s=passed_s[last],
        host_share=lone.host_share,
        context_len=stepper.context_len(lone.count + first + 1, last - first),
    )


class _Plan:
    """Worker 0's decisions: which part the next steps belong to, and how many they are."""

    def __init__(self, limits: Limits, pace_s: float, now: Callable[[], float]) -> None:
        self._limits, self._pace_s, self._now = limits, pace_s, now
        self._begin_s = now()
        self._window: tuple[float, int] | None = None
        self._tail = False

    def order(self, done: int) -> tuple[str, int] | None:
        """Part and number of the next steps, after ``done``; None where all is done."""
        limits, now_s = self._limits, self._now()
        if done > 1:  # the last one may still be in flight
            self._pace_s = max((now_s - self._begin_s) / (done - 1), 1e-9)
        if self._tail:
            return None
        if self._window is None:
            left_s = self._begin_s + limits.settle_s - now_s
            if not done or left_s > 0:
                return "settle", self._count(left_s)
            self._window = now_s, done
        left_s = self._window[0] + limits.window_s - now_s
        left = self._window[1] + limits.repeats - done
        if left_s > 0 or left > 0:
            return "window", self._count(max(left_s, left * self._pace_s))
        self._tail = True
        return "tail", max(1, math.ceil(limits.tail_s / self._pace_s))

    def share(self, done: int) -> float:
        """Part of the run that is done."""
        limits = self._limits
        window_s = max(limits.window_s, limits.repeats * self._pace_s)
        return min(1.0, (self._now() - self._begin_s) / (limits.settle_s + window_s))

    def _count(self, left_s: float) -> int:
        return max(1, math.ceil(min(left_s, _ORDER_S) / self._pace_s))


@dataclass(frozen=True, slots=True)
class _Lone:
    """Lone steps: how many, seconds of one, and the host's share of them."""

    count: int
    pace_s: float
    host_share: float | None


def _lone_steps(stepper: Stepper, team: Team, limits: Limits, now: Callable[[], float]) -> _Lone:
    shares: list[float] = []
    paces_s: list[float] = []
    begin = now()
    while True:
        start = now()
        stepper.step()
        launched = now()
        stepper.wait(stepper.mark())
        paces_s.append(max(now() - start, 1e-9))
        shares.append((launched - start) / paces_s[-1])
        done = len(paces_s)
        if not team.tell(done < 2 or (done < limits.lone and now() - begin < limits.settle_s)):
            break
    # The first one does what is done only once.
    share = statistics.median(shares[1:]) if stepper.queued else None
    return _Lone(len(paces_s), statistics.median(paces_s[1:]), share)
