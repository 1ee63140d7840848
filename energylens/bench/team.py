"""Collectives, measured by a team of workers: one process per GPU, worker 0 writes the samples.

Every worker takes the anchor of its own board; then all of them go through the same points in the
same order, and worker 0 tells the others when to stop. Power is the mean over the boards of worker
0's node, whose sensors it can read.
"""

from __future__ import annotations

import datetime
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from energylens.bench import collectives, layer
from energylens.bench.anchor import Session, measure_anchor, window_trial
from energylens.bench.board import (
    DATA,
    Provider,
    board_facts,
    host_facts,
    host_trial,
    now,
    versions,
)
from energylens.bench.kernels import TorchProvider
from energylens.bench.overlap import overlap_points
from energylens.bench.trial import HostPoint, MixPoint, Team, TrialLimits, Work
from energylens.errors import UnsupportedError
from energylens.graph import Op
from energylens.meter.base import AbstractMeter, AbstractRecorder, DeviceInfo
from energylens.meter.window import Reading
from energylens.results import Anchors, BoardAnchor
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device
from energylens.spec.model import Spec
from energylens.store import (
    Provenance,
    Sample,
    Store,
    Trial,
    board_hash,
    new_run_id,
    sample_key,
)

SPIN_S, SPIN_EDGE_S = 3.0, 0.4
BLOCKS = ("collectives", "overlaps")
"""What a team can measure; each also stands for what only several workers show of it."""


class Rig(Protocol):
    """What a team runs, seen from one worker; each call happens on all workers together."""

    @property
    def provider(self) -> Provider:
        """The worker's own board."""
        ...

    def ops(self) -> Sequence[Op]:
        """The collectives to measure."""
        ...

    def work(self, op: Op) -> Work:
        """A runnable for one collective after each of a row of fillers."""
        ...

    def filler(self) -> Work:
        """The fillers of `work` alone."""
        ...

    def measure(
        self,
        work: Work,
        recorder: AbstractRecorder | None,
        uuids: Sequence[str],
        limits: TrialLimits,
    ) -> tuple[Trial, list[Reading]] | None:
        """Worker 0's trial, and the readings of ``uuids`` over its window; None on the others."""
        ...

    def spin(self, seconds: float) -> float | None:
        """Spin in a collective for ``seconds``; when that began, None on the late worker."""
        ...

    def host_points(self, spec: Spec) -> Iterable[HostPoint]:
        """Host times of a model's eager steps over all workers."""
        ...

    def mix_points(self, spec: Spec) -> Sequence[MixPoint]:
        """Layers of a model on all workers, collectives in place."""
        ...

    def overlap_points(self) -> Iterable[MixPoint]:
        """Collectives on a few SMs, GEMMs, and both beside each other; see `bench.overlap`."""
        ...


@dataclass(frozen=True, slots=True)
class _Member:
    """One worker as the others know it."""

    node: str
    uuid: str
    facts: Mapping[str, Any]
    anchor: BoardAnchor


class _Scribe:
    """Worker 0's store and the sensors of its node."""

    def __init__(
        self,
        store: Store,
        recorder: AbstractRecorder,
        uuids: Sequence[str],
        run: Provenance,
    ) -> None:
        self.store, self.recorder, self.uuids, self._run = store, recorder, uuids, run
        self.boards = ";".join(board_hash(u) for u in uuids)
        store.begin(run)

    def write(
        self,
        block: str,
        label: str,
        ops: tuple[Op, ...],
        trial: Trial | None,
        *,
        mode: str = "",
        boards: str = "",
        reason: str = "",
    ) -> None:
        self.store.append(
            Sample(
                block=block,
                label=label,
                ops=ops,
                mode=mode,
                trial=trial,
                board_uuid=boards or self.boards,
                run_id=self._run.run_id,
                time=now().isoformat(timespec="seconds"),
                reason=reason,
            )
        )


def measure_collectives(
    team: Team,
    rig: Rig,
    meter: AbstractMeter,
    *,
    node: str,
    out: Path,
    seed: int,
    specs: Sequence[str],
    minutes: float,
    blocks: Sequence[str] = BLOCKS,
    resume: bool = True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Measure the collectives, a worker that spins in one, and the host times of sharded models.

    Called by every worker with the same arguments, but for its own ``rig`` and ``node``.

    Args:
        team: all workers.
        rig: what they run.
        meter: sensors of this worker's node.
        node: name of this worker's node, to tell which sensors worker 0 can read.
        out: folder of the samples; worker 0 writes.
        seed: order of the points.
        specs: models whose host times are measured.
        minutes: no point starts later.
        blocks: some of `BLOCKS`.
        resume: leave out what the folder already holds.
        clock: monotonic seconds.
        sleep: how to pause, in seconds.
    """
    from energylens.meter.nvml import match_cuda

    end = clock() + 60 * minutes
    info = match_cuda(meter.devices(), [rig.provider.uuid()])[0]
    limits = TrialLimits(power_limit_w=info.power_limit_w)
    started = now()
    members: list[_Member] = team.gather(_member(rig.provider, meter, info, node, started, sleep))
    with ExitStack() as stack:
        scribe: _Scribe | None = None
        if team.worker == 0:
            uuids = [m.uuid for m in members if m.node == node]
            store = stack.enter_context(Store(out))
            recorder = stack.enter_context(meter.recorder(uuids))
            run = _provenance(rig.provider, info, members, started, seed)
            scribe = _Scribe(store, recorder, uuids, run)
        done: frozenset[str] = team.tell(
            (scribe.store.done if resume else frozenset()) if scribe else None
        )
        boards: str = team.tell(scribe.boards if scribe else None)
        turn = _Turn(
            team=team,
            rig=rig,
            scribe=scribe,
            limits=limits,
            boards=boards,
            done=done,
            is_over=lambda: clock() > end,
        )
        if "collectives" in blocks:
            turn.collectives(_shuffled(rig.ops(), seed))
            turn.spin()
            models = [load_spec(name) for name in specs]
            for model in models:
                turn.host(model)
            for model in models:
                turn.points("mix", rig.mix_points(model))
        if "overlaps" in blocks:
            turn.points("overlap", rig.overlap_points())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What all workers go through together, seen from one of them.

    ``done`` are the samples of ``boards`` that are left out; worker 0's ``is_over`` tells when no
    point is to start any more.
    """

    team: Team
    rig: Rig
    scribe: _Scribe | None
    limits: TrialLimits
    boards: str
    done: frozenset[str]
    is_over: Callable[[], bool]

    def collectives(self, ops: Sequence[Op]) -> None:
        """Each collective between fillers, which are then taken off."""
        filler = self._measure(self.rig.filler)
        for op in ops:
            if sample_key("op", (op,), self.boards) in self.done:
                continue
            if self.team.tell(self.is_over()):
                break
            pair = self._measure(partial(self.rig.work, op))
            if self.scribe and pair and filler:
                self.scribe.write("op", op.name, (op,), without_filler(pair, filler))

    def points(self, block: str, found: Iterable[MixPoint]) -> None:
        """Mixes; one of a single op is that op alone."""
        for point in found:
            alone = len(point.ops) == 1
            own, mode = ("op", "") if alone else (block, str(point.mode))
            if sample_key(own, point.ops, self.boards, label=point.label, mode=mode) in self.done:
                continue
            if self.team.tell(self.is_over()):
                break
            trial = self._measure(point.build)
            if self.scribe and trial:
                self.scribe.write(own, point.label, point.ops, trial, mode=mode)

    def _measure(self, build: Callable[[], Work]) -> Trial | None:
        """Measure one work on all workers; the trial over worker 0's boards, there."""
        work, scribe = build(), self.scribe
        try:
            result = self.rig.measure(
                work,
                scribe.recorder if scribe else None,
                scribe.uuids if scribe else (),
                self.limits,
            )
        finally:
            work.close()
        return over_boards(*result) if result else None

    def spin(self) -> None:
        """Power of a board whose worker waits for the others inside a collective."""
        starts: list[float | None] = self.team.gather(self.rig.spin(SPIN_S))
        scribe = self.scribe
        if scribe is None:
            return
        for uuid, start in zip(scribe.uuids, starts, strict=False):
            if start is None:
                continue
            trial = window_trial(
                scribe.recorder, uuid, start + SPIN_EDGE_S, start + SPIN_S - SPIN_EDGE_S
            )
            scribe.write("idle", "spin", (), trial, boards=board_hash(uuid))

    def host(self, spec: Spec) -> None:
        """Host times of a sharded model's eager steps."""
        scribe = self.scribe
        try:
            for point in self.rig.host_points(spec):
                if scribe:
                    start, end = point.start_s, point.end_s
                    readings = [scribe.recorder.reading(u, start, end) for u in scribe.uuids]
                    trial = host_trial(point, readings)
                    scribe.write("host", point.label, point.ops, trial, mode=str(point.mode))
        except UnsupportedError as error:
            if scribe:
                scribe.write("host", spec.name, (), None, mode="eager", reason=str(error))


def _member(
    provider: Provider,
    meter: AbstractMeter,
    info: DeviceInfo,
    node: str,
    started: datetime.datetime,
    sleep: Callable[[float], None],
) -> _Member:
    """This worker, with its board's anchor."""
    with meter.recorder([info.uuid]) as recorder:
        session = Session(
            recorder=recorder,
            uuid=info.uuid,
            device=load_device(info.name).name,
            power_limit_w=info.power_limit_w,
            sleep=sleep,
        )
        anchor = measure_anchor(provider, session, time=started.isoformat(timespec="seconds"))
    return _Member(node, info.uuid, board_facts(info), anchor)


def _provenance(
    provider: Provider,
    info: DeviceInfo,
    members: Sequence[_Member],
    started: datetime.datetime,
    seed: int,
) -> Provenance:
    boards = {m.anchor.board_uuid: m.facts for m in members}
    return Provenance(
        run_id=new_run_id(started.isoformat(), boards, seed),
        time=started.isoformat(timespec="seconds"),
        device=members[0].anchor.device,
        provider=provider.name,
        power_limit_w=info.power_limit_w,
        boards=boards,
        versions=versions(provider, info) | {"nccl_algo": os.environ.get("NCCL_ALGO", "auto")},
        host=host_facts() | {"nodes": len({m.node for m in members})},
        seed=seed,
        data=DATA,
        anchors=Anchors(boards=tuple(m.anchor for m in members), host=provider.host_anchor()),
    )


def _shuffled(ops: Iterable[Op], seed: int) -> list[Op]:
    ordered = sorted(ops, key=lambda op: op.key)
    random.Random(seed).shuffle(ordered)
    return ordered


def without_filler(pair: Trial, filler: Trial) -> Trial:
    """The collective's part of a trial of fillers and collectives: the rest of time and energy."""
    latency = pair.latency_s - filler.latency_s
    if latency <= 0:
        return replace(
            pair,
            valid=False,
            reason="the collective took no time beside its filler; measure it again",
        )
    errors = (pair.latency_rel_se * pair.latency_s, filler.latency_rel_se * filler.latency_s)
    power, power_rel_se = None, None
    if pair.power_w is not None and filler.power_w is not None:
        joules = (pair.power_w * pair.latency_s, filler.power_w * filler.latency_s)
        power = (joules[0] - joules[1]) / latency
        joule_errors = (
            j * (t.power_rel_se or 0.0) for j, t in zip(joules, (pair, filler), strict=True)
        )
        power_rel_se = math.hypot(*joule_errors) / (power * latency) if power > 0 else None
    return replace(
        pair,
        latency_s=latency,
        latency_rel_se=math.hypot(*errors) / latency,
        power_w=power if power is not None and power > 0 else None,
        power_rel_se=power_rel_se,
        instant_power_w=None,
    )


def over_boards(trial: Trial, readings: Sequence[Reading]) -> Trial:
    """A trial with the mean power per board over several boards, valid where all are."""
    watts = [r.mean_power_w for r in readings]
    known = [w for w in watts if w is not None]
    errors = [r.energy_rel_error or 0.0 for r in readings]
    whole = len(known) == len(watts)
    bad = next((r for r in readings if not r.valid), None)
    return replace(
        trial,
        power_w=sum(known) / len(known) if whole else None,
        power_rel_se=math.hypot(*errors) / len(errors) / math.sqrt(3) if whole else None,
        flags=tuple(dict.fromkeys([*trial.flags, *(f for r in readings for f in r.flags)])),
        valid=trial.valid and bad is None,
        reason=trial.reason or (bad.reason or ", ".join(bad.flags) if bad else ""),
    )


class _TorchRig:
    """Implements `Rig` with torch.distributed."""

    def __init__(self, team: collectives.Team) -> None:
        self._team = team
        self.provider: Provider = TorchProvider(team.local)

    def ops(self) -> Sequence[Op]:
        return collectives.collective_ops(self._team.workers)

    def work(self, op: Op) -> Work:
        return collectives.collective_work(op, self._team)

    def filler(self) -> Work:
        return collectives.filler_work(self._team)

    def measure(
        self,
        work: Work,
        recorder: AbstractRecorder | None,
        uuids: Sequence[str],
        limits: TrialLimits,
    ) -> tuple[Trial, list[Reading]] | None:
        return collectives.measure_everywhere(self._team, work, recorder, uuids, limits)

    def spin(self, seconds: float) -> float | None:
        return collectives.spin_work(self._team, seconds)

    def mix_points(self, spec: Spec) -> Sequence[MixPoint]:
        return collectives.joint_points(spec, self._team)

    def overlap_points(self) -> Iterable[MixPoint]:
        return overlap_points(self._team)

    def host_points(self, spec: Spec) -> Iterable[HostPoint]:
        return layer.host_points(spec, device=self._team.local, workers=self._team.workers)


class _VllmRig(_TorchRig):
    """The all-reduce of vLLM's engine; what several workers share otherwise the torch rig shows."""

    def __init__(self, team: collectives.Team) -> None:
        from energylens.bench.vllm_kernels import VllmProvider

        super().__init__(team)
        self.provider = VllmProvider(team.local)

    def ops(self) -> Sequence[Op]:
        return collectives.all_reduce_ops("vllm_all_reduce", self._team.workers)

    def work(self, op: Op) -> Work:
        from energylens.bench.vllm_kernels import all_reduce_work

        return all_reduce_work(op, self._team)

    def mix_points(self, spec: Spec) -> Sequence[MixPoint]:
        return ()

    def host_points(self, spec: Spec) -> Iterable[HostPoint]:
        return ()  # the engine starts workers of its own; see `energylens.bench.calibrate`


def collectives_worker(
    team: collectives.Team,
    *,
    out: Path,
    seed: int,
    specs: Sequence[str],
    minutes: float,
    provider: str,
    blocks: Sequence[str],
    resume: bool,
    node: str,
) -> None:
    """`measure_collectives` with torch.distributed, or vLLM's communicators, on this machine."""
    from energylens.meter.choose import choose_meter

    measure_collectives(
        team,
        _VllmRig(team) if provider == "vllm" else _TorchRig(team),
        choose_meter(),
        node=node,
        out=out,
        seed=seed,
        specs=specs,
        minutes=minutes,
        blocks=blocks,
        resume=resume,
    )
