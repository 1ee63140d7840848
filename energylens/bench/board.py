"""All blocks of one board: anchor, ops, mixes, host points, and a second look at the anchor.

Everything that is measured is on disk before the next point starts. A point that cannot run (out of
memory, no runnable for its kernel) is skipped with its reason, and the run goes on.
"""

from __future__ import annotations

import datetime
import logging
import os
import platform
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from energylens import __version__
from energylens.anchors import save_anchors
from energylens.bench.anchor import (
    AnchorLoads,
    Session,
    measure_anchor,
    measure_launching,
    recheck,
)
from energylens.bench.plan import PlannedPoint
from energylens.bench.trial import HostPoint, MixPoint, Work, measure
from energylens.errors import CalibrationError, EnergyLensError, MeterError, UnsupportedError
from energylens.graph import Op
from energylens.meter.base import DeviceInfo, Reading
from energylens.results import Anchors, HostAnchor
from energylens.spec.model import Spec
from energylens.store import Provenance, Sample, Store, Trial, new_run_id, sample_key

_log = logging.getLogger(__name__)

DATA = "random: activations and caches N(0, 1), weights N(0, 0.02)"
HEAD_S, MIX_S, TAIL_S = 20.0, 3.5, 30.0
"""Expected seconds of the anchors, of a mix, and of the host points with the second look."""
HEAD_WINDOWS, TAIL_WINDOWS = 5, 2
"""Windows in them that slow sensors lengthen."""

_DRIFT_LIMIT = 0.02
_MOST_FAILURES = 8


class Provider(AnchorLoads, Protocol):
    """Whose kernels are measured, bound to one device."""

    @property
    def name(self) -> str:
        """Key of `PROVIDERS`."""
        ...

    def uuid(self) -> str:
        """UUID of the device, to find its sensors."""
        ...

    def work(self, op: Op) -> Work:
        """A runnable for the op; `UnsupportedError` where there is none."""
        ...

    def mix_points(self, specs: Sequence[Spec], tps: Sequence[int]) -> Sequence[MixPoint]:
        """Mixes of these models; cheap, since each builds its work on demand."""
        ...

    def host_points(self, specs: Sequence[Spec]) -> Iterable[HostPoint]:
        """Host times of these models' eager steps, measured while they are iterated."""
        ...

    def host_anchor(self) -> HostAnchor:
        """Host time of an empty kernel and of a small eager module."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Software that decides which kernels run."""
        ...


@dataclass(kw_only=True, slots=True)
class BoardReport:
    """What happened on one board.

    Attributes:
        board: `board_hash`; folder: its store.
        measured, done_before, left: points measured and valid, measured by an earlier run, and not
            started because the time was up.
        invalid, skipped: reasons, and how many points each cost.
        seconds: duration; drift: see `energylens.bench.anchor.Drift`; notes: what was told.
    """

    board: str
    folder: str
    measured: int = 0
    done_before: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    left: int = 0
    seconds: float = 0.0
    drift: Mapping[str, float] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRequest:
    """What to measure on a board.

    Attributes:
        provider: name of the provider.
        models, tps: whose layers the mixes and host points run, and at which degrees.
        blocks: ``ops``, ``mixes``, ``host``; none measures the anchor alone.
        budget_s: seconds after which no point starts; may be infinite.
        mix_share: largest part of it that mixes take.
        resume: skip what the store holds.
        seed: order of the mixes, and for the record.
        anchors: folder of the anchor files.
    """

    provider: str
    models: tuple[Spec, ...]
    tps: tuple[int, ...]
    blocks: tuple[str, ...]
    budget_s: float
    mix_share: float
    resume: bool
    seed: int
    anchors: Path


class Bar(Protocol):
    """Progress of one block: expected seconds done, and what runs now."""

    def start(self, text: str, total_s: float) -> None:
        """A block begins."""
        ...

    def step(self, text: str, seconds: float) -> None:
        """A point of so many expected seconds is done."""
        ...

    def note(self, text: str) -> None:
        """Say one line."""
        ...


def now() -> datetime.datetime:
    """Time of day, in UTC."""
    return datetime.datetime.now(datetime.UTC)


class BoardRun:
    """All blocks of one board, one after another."""

    def __init__(
        self,
        request: BoardRequest,
        store: Store,
        session: Session,
        provider: Provider,
        info: DeviceInfo,
        bar: Bar,
        report: BoardReport,
    ) -> None:
        """Nothing is measured before `measure`."""
        self._request, self._store, self._session = request, store, session
        self._provider, self._bar, self._report = provider, bar, report
        self._failures = 0
        self._done = store.done if request.resume else frozenset()
        started = now()
        self._run = Provenance(
            run_id=new_run_id(started.isoformat(), [session.board], request.seed),
            time=started.isoformat(timespec="seconds"),
            device=session.device,
            provider=request.provider,
            power_limit_w=info.power_limit_w,
            power_mode=info.power_mode,
            boards={session.board: board_facts(info)},
            versions=versions(provider, info),
            host=host_facts(),
            seed=request.seed,
            data=DATA,
        )
        for note in _cautions(info):
            self._note(note)

    def measure(self, points: Sequence[PlannedPoint]) -> None:
        """Anchor, ops, mixes, host points, and a second look at the anchor."""
        start = self._session.recorder.now()
        self._store.begin(self._run)
        self._anchors()
        if self._request.blocks:
            end = start + self._request.budget_s
            mixes = self._mixes()
            tail_s = TAIL_S + TAIL_WINDOWS * self._session.least_window_s
            mix_s = self._takes(MIX_S) * len(mixes)
            mix_s = min(mix_s, self._request.mix_share * self._request.budget_s)
            if "ops" in self._request.blocks:
                self._ops(points, end - tail_s - mix_s)
            if mixes:
                self._mix_points(mixes, end - tail_s)
            if "host" in self._request.blocks:
                self._host_points()
            self._recheck()
        self._report.seconds = self._session.recorder.now() - start

    def _takes(self, expected_s: float) -> float:
        """Seconds on this board of what takes so many on one with fast sensors."""
        return expected_s * self._session.limits.stretch

    def _note(self, text: str) -> None:
        self._report.notes.append(text)
        self._bar.note(text)

    def _anchors(self) -> None:
        self._bar.start("anchors", HEAD_S)
        board = measure_anchor(self._provider, self._session, time=self._run.time)
        anchors = Anchors(boards=(board,), host=self._provider.host_anchor())
        self._run = replace(self._run, anchors=anchors)
        self._store.begin(self._run)
        name = f"{board.device}-{board.board_uuid}.json"
        save_anchors(anchors, self._request.anchors / name)
        self._append("idle", "launching", (), measure_launching(self._provider, self._session))
        self._bar.step("anchors", HEAD_S)

    def _ops(self, points: Sequence[PlannedPoint], end_s: float) -> None:
        self._bar.start("ops", sum(p.expected_s for p in points))
        for point in points:
            if self._is_done("op", point.op.name, (point.op,)):
                self._report.done_before += 1
            elif self._session.recorder.now() + self._takes(point.expected_s) > end_s:
                self._report.left += 1
            else:
                build = partial(self._provider.work, point.op)
                self._point("op", point.op.name, (point.op,), build)
            self._bar.step(f"ops {point.op.kernel}", point.expected_s)

    def _mixes(self) -> list[MixPoint]:
        if "mixes" not in self._request.blocks:
            return []
        found = self._provider.mix_points(self._request.models, self._request.tps)
        points = sorted(found, key=lambda p: p.label)
        random.Random(self._request.seed).shuffle(points)
        return points

    def _mix_points(self, points: Sequence[MixPoint], end_s: float) -> None:
        self._bar.start("mixes", MIX_S * len(points))
        for point in points:
            if self._is_done("mix", point.label, point.ops, str(point.mode)):
                self._report.done_before += 1
            elif self._session.recorder.now() + self._takes(MIX_S) > end_s:
                self._report.left += 1
            else:
                self._point("mix", point.label, point.ops, point.build, str(point.mode))
            self._bar.step("mixes", MIX_S)

    def _host_points(self) -> None:
        """Host times belong to this host now, so they are measured by every run."""
        self._bar.start("host", 1.0)
        try:
            for point in self._provider.host_points(self._request.models):
                reading = self._session.recorder.reading(
                    self._session.uuid, point.start_s, point.end_s
                )
                trial = host_trial(point, [reading])
                self._append("host", point.label, point.ops, trial, str(point.mode))
        except UnsupportedError as error:
            self._report.skipped[str(error)] += 1
        self._bar.step("host", 1.0)

    def _recheck(self) -> None:
        anchors = self._run.anchors
        if anchors is None:
            return
        try:
            again = recheck(self._provider, self._session, anchors.boards[0])
        except MeterError as error:  # the points are measured; their worth is the fit's to judge
            self._note(f"the anchor could not be measured again: {error}")
            return
        self._append("anchor", "gemm", (), again.gemm)
        self._append("anchor", "idle", (), again.idle)
        self._report.drift = asdict(again.drift)
        if again.drift.largest > _DRIFT_LIMIT:
            self._note(
                f"board {self._session.board} moved by {again.drift.largest:.1%} against its "
                "anchor while it was measured; let it warm up and run again with --fresh"
            )

    def _is_done(self, block: str, label: str, ops: tuple[Op, ...], mode: str = "") -> bool:
        return sample_key(block, ops, self._session.board, label=label, mode=mode) in self._done

    def _point(
        self,
        block: str,
        label: str,
        ops: tuple[Op, ...],
        build: Callable[[], Work],
        mode: str = "",
    ) -> None:
        """Measure one point, or record why it cannot run."""
        try:
            work = build()
            try:
                trial = measure(
                    work,
                    self._session.recorder,
                    self._session.uuid,
                    limits=self._session.limits,
                    sleep=self._session.sleep,
                )
            finally:
                work.close()
        except UnsupportedError as error:  # known before anything runs: not a failure of the board
            self._report.skipped[str(error)] += 1
            return
        except EnergyLensError:
            raise
        except (RuntimeError, MemoryError, ValueError) as error:
            self._failed(block, label, ops, mode, error)
            return
        self._failures = 0
        if "lost" in trial.flags:
            raise MeterError(
                f"{trial.reason}; {len(self._store.samples)} points are kept in "
                f"{self._store.folder}, and the same command goes on from there"
            )
        self._append(block, label, ops, trial, mode)

    def _failed(
        self, block: str, label: str, ops: tuple[Op, ...], mode: str, error: Exception
    ) -> None:
        text = str(error).strip() or type(error).__name__
        reason = "out of memory" if "out of memory" in text.lower() else text.splitlines()[0]
        self._report.skipped[reason] += 1
        self._store.append(self._sample(block, label, ops, mode, None, reason))
        _log.warning("%s %s was skipped: %s", block, label, reason)
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise CalibrationError(
                f"{self._failures} points in a row failed, the last with: {reason}; "
                f"{len(self._store.samples)} points are kept in {self._store.folder}"
            )

    def _append(
        self, block: str, label: str, ops: tuple[Op, ...], trial: Trial, mode: str = ""
    ) -> None:
        self._store.append(self._sample(block, label, ops, mode, trial, ""))
        if not trial.valid:
            self._report.invalid[trial.reason] += 1
        elif block in ("op", "mix", "host"):
            self._report.measured += 1

    def _sample(
        self,
        block: str,
        label: str,
        ops: tuple[Op, ...],
        mode: str,
        trial: Trial | None,
        reason: str,
    ) -> Sample:
        return Sample(
            block=block,
            label=label,
            ops=ops,
            mode=mode,
            trial=trial,
            board_uuid=self._session.board,
            run_id=self._run.run_id,
            time=now().isoformat(timespec="seconds"),
            reason=reason,
        )


def host_trial(point: HostPoint, readings: Sequence[Reading]) -> Trial:
    """A host point as a trial: its time, and the mean power of the boards that waited."""
    powers = [r.mean_power_w for r in readings if r.mean_power_w is not None]
    first = readings[0]
    return Trial(
        latency_s=point.step_s,
        latency_rel_se=point.spread,
        power_w=sum(powers) / len(powers) if len(powers) == len(readings) else None,
        power_rel_se=first.energy_rel_error,
        clock_hz=first.sm_clock_hz,
        clock_min_hz=first.sm_clock_min_hz,
        temperature_c=first.temperature_end_c,
        ticks=first.ticks,
        window_s=first.duration_s,
        instant_power_w=first.instant_power_w,
    )


def board_facts(info: DeviceInfo) -> dict[str, Any]:
    """What is kept about a board; neither its UUID nor who else uses it.

    A board whose power comes from rails also says which rails its power is the sum of, and with
    what the GPU shares its own.
    """
    facts = {
        "name": info.name,
        "driver": info.driver,
        "power_limit_w": info.power_limit_w,
        "default_power_limit_w": info.default_power_limit_w,
        "sm_clock_max_hz": info.sm_clock_max_hz,
        "memory_bytes": info.memory_bytes,
        "ecc": info.ecc,
        "persistence": info.persistence,
        "shared": bool(info.other_pids),
    }
    return facts | info.rail_facts


def _cautions(info: DeviceInfo) -> Iterator[str]:
    yield from info.notes
    if info.other_pids:
        yield f"{len(info.other_pids)} other process(es) use the board; their energy is counted too"
    limit, default = info.power_limit_w, info.default_power_limit_w
    if limit is not None and default is not None and limit < default:
        yield f"the power limit is {limit:.0f} W, below the default of {default:.0f} W"


def versions(provider: Provider, info: DeviceInfo) -> dict[str, str]:
    """Software that a run stands on."""
    found = {"energylens": __version__, **provider.versions()}
    return found | ({"driver": info.driver} if info.driver else {})


def host_facts() -> dict[str, Any]:
    """What is kept about the host; not its name."""
    return {"python": platform.python_version(), "system": f"{platform.system()} {os.cpu_count()}"}
