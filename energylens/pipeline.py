"""Turns of the stages of a pipeline: how long they take together, and what those that wait draw.

Each turn is a step on one stage, composed by the laws of `energylens.schedule` as if the stage were
alone; here is who waits for whom. Idle power of the pauses is charged here, that of the turns is in
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from energylens.results import Interval, Kind
from energylens.schedule import LEVEL, Part, StepResult

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What the boards of a pipeline stage draw while it waits for its turn.

    ``idle_w`` of them together, and ``above_idle_w`` on top.
    """

    idle_w: float
    above_idle_w: float


def makespan(times: Array) -> Array:
    """When the last of some jobs leaves the last stage; all start at 0 and go in order.

    A stage takes one job at a time.

    Args:
        times: of each job in each stage, [jobs, stages, ...].

    Returns:
        Seconds, [...].
    """
    done = np.zeros(times.shape[1:])
    for job in times:
        before = np.zeros(times.shape[2:])
        for stage, turn in enumerate(job):
            done[stage] = before = np.maximum(done[stage], before) + turn
    return np.asarray(done[-1])


def period(times: Array) -> Array:
    """Time in which jobs that go round and round pass all stages once each.

    The busiest stage takes that long, or the job with the longest way: one that has left the last
    stage begins anew, and never before.

    Args:
        times: of each job in each stage, [jobs, stages, ...].

    Returns:
        Seconds, [...].
    """
    busiest, longest = times.sum(axis=0).max(axis=0), times.sum(axis=1).max(axis=0)
    return np.asarray(np.maximum(busiest, longest))


def pipelined(
    turns: Sequence[Sequence[StepResult]], waiting: Sequence[Waiting], *, rounds: bool
) -> StepResult:
    """Compose the turns of jobs in the stages of a pipeline.

    The clock of a turn is that of the stage's own work: no credit for the pauses between turns.

    Args:
        turns: of each job the step on each stage.
        waiting: of each stage.
        rounds: True where the jobs come back as soon as they are through (tokens of microbatches
            that decode), False where they come once (chunks of a prefill).
    """
    span, critical = (period, _critical_round) if rounds else (makespan, _critical_way)

    own = np.array([[turn.latency_s for turn in job] for job in turns])
    latency_s = float(span(own))
    waits = latency_s - own.sum(axis=0)
    idle_j = float(sum(t * w.idle_w for t, w in zip(waits, waiting, strict=True)))
    wait_j = float(sum(t * w.above_idle_w for t, w in zip(waits, waiting, strict=True)))
    every = [turn for job in turns for turn in job]
    working_j = sum(turn.energy_j for turn in every)
    ends = [
        float(span(np.array([[turn.interval.latency_s[i] for turn in job] for job in turns])))
        for i in (0, 1)
    ]
    joules = [
        sum(turn.interval.energy_j[i] for turn in every) + (idle_j + wait_j) * end / latency_s
        for i, end in enumerate(ends)
    ]
    source = max(turn.source for turn in every)
    slowest = max(every, key=lambda turn: turn.latency_s)

    def part(kind: Kind, name: str, energy_j: float) -> Part:
        return Part(
            op=None, kind=kind, name=name, count=1, latency_s=0.0, energy_j=energy_j, source=source
        )

    return StepResult(
        latency_s=latency_s,
        energy_j=working_j + idle_j + wait_j,
        clock=min(turn.clock for turn in every),
        regime=slowest.regime,
        parts=(
            *_turn_parts(turns, critical(own)),
            part(Kind.WAIT, "waiting stages", wait_j),
            part(Kind.IDLE, "idle", idle_j),
        ),
        interval=Interval(
            level=LEVEL, latency_s=(ends[0], ends[1]), energy_j=(joules[0], joules[1])
        ),
        source=source,
        waiting_j=sum(turn.waiting_j for turn in every),
    )


def _critical_way(times: Array) -> list[tuple[int, int]]:
    """(job, stage) of the turns that follow each other without a gap and make the makespan."""
    jobs, stages = times.shape
    ends = np.zeros(
        (jobs + 1, stages + 1)
    )  # of the first so many jobs, in the first so many stages
    for j in range(jobs):
        for s in range(stages):
            ends[j + 1, s + 1] = max(ends[j, s + 1], ends[j + 1, s]) + times[j, s]
    job, stage, found = jobs - 1, stages - 1, []
    while job >= 0 and stage >= 0:
        found.append((job, stage))
        if ends[job, stage + 1] >= ends[job + 1, stage]:
            job -= 1
        else:
            stage -= 1
    return found


def _critical_round(times: Array) -> list[tuple[int, int]]:
    """(job, stage) of the turns that make the period: all of a stage, or all of a job."""
    by_stage, by_job = times.sum(axis=0), times.sum(axis=1)
    if by_stage.max() > by_job.max():
        return [(job, int(by_stage.argmax())) for job in range(len(times))]
    return [(int(by_job.argmax()), stage) for stage in range(times.shape[1])]


def _turn_parts(
    turns: Sequence[Sequence[StepResult]], critical: Sequence[tuple[int, int]]
) -> Iterator[Part]:
    """Parts of all turns; only those of the critical ones take time."""
    results = {id(turn): turn for job in turns for turn in job}
    total = Counter(id(turn) for job in turns for turn in job)
    on_way = Counter(id(turns[job][stage]) for job, stage in critical)
    for key, turn in results.items():
        for n, time in ((on_way[key], 1.0), (total[key] - on_way[key], 0.0)):
            for p in turn.parts if n else ():
                yield replace(
                    p,
                    count=n * p.count,
                    latency_s=n * time * p.latency_s,
                    energy_j=n * p.energy_j,
                )
