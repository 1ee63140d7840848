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

Worker 0 decides how many steps there are; all workers make the same ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

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
    before, pace_s, host_share = _lone_steps(stepper, team, limits, now)
    settle, count, tail = team.tell(_counts(pace_s, limits))
    total = settle + count + tail
    marks: list[Any] = []
    start_s = end_s = math.nan
    team.gather(None)  # nobody starts earlier than the last one
    for queued in range(1, total + 1):
        stepper.step()
        marks.append(stepper.mark())
        done = queued - 1 if stepper.queued else queued  # one more in flight, where that can be
        if done >= 1:
            stepper.wait(marks[done - 1])
        if done == settle:
            start_s = now()
        if done == settle + count:
            end_s = now()
        progress(queued / total)
    stepper.wait(marks[-1])
    window = marks[settle - 1 : settle + count]
    return WorkerWindow(
        times_s=tuple(stepper.seconds(a, b) for a, b in pairwise(window)),
        start_s=start_s,
        end_s=end_s,
        host_share=host_share,
        context_len=stepper.context_len(before + settle, count),
    )


def _lone_steps(
    stepper: Stepper, team: Team, limits: Limits, now: Callable[[], float]
) -> tuple[int, float, float | None]:
    """Steps made, seconds of the last one, and the host's share of them."""
    shares: list[float] = []
    begin = now()
    done = 0
    while True:
        start = now()
        stepper.step()
        launched = now()
        stepper.wait(stepper.mark())
        pace_s = max(now() - start, 1e-9)
        done += 1
        shares.append((launched - start) / pace_s)
        if not team.tell(done < 2 or (done < limits.lone and now() - begin < limits.settle_s)):
            break
    # The first one does what is done only once.
    share = statistics.median(shares[1:]) if stepper.queued else None
    return done, pace_s, share


def _counts(pace_s: float, limits: Limits) -> tuple[int, int, int]:
    """Steps of settling, window and tail."""
    return (
        max(1, math.ceil(limits.settle_s / pace_s)),
        max(limits.repeats, math.ceil(limits.window_s / pace_s)),
        max(1, math.ceil(limits.tail_s / pace_s)),
    )
