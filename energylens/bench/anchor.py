"""Anchors: what one board does under a few small loads (DESIGN law 8).

About 20 s a board, 3 minutes on a Jetson, without root: idle with a context, a stream over memory,
one large GEMM at the power cap, one weight read at M = 1. Launching empty kernels shows what a
board draws while it waits for its host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from energylens.bench.trial import AnchorLoad, TrialLimits, measure
from energylens.errors import MeterError
from energylens.meter.base import AbstractRecorder
from energylens.results import BoardAnchor
from energylens.store import Trial, board_hash
from energylens.units import HZ_PER_MHZ

IDLE_S, IDLE_SETTLE_S = 3.0, 1.0
AWAKE_S = 0.5
LAUNCHING_S, LAUNCHING_SETTLE_S = 2.0, 0.5
_SETTLE_S, _WINDOW_S = 1.5, 2.5


class AnchorLoads(Protocol):
    """Whoever can run the loads of an anchor."""

    def anchor_work(self, name: str) -> AnchorLoad:
        """One of ``stream``, ``gemm`` and ``gemv``."""
        ...

    def launching(self, seconds: float) -> None:
        """Launch empty kernels one by one for ``seconds``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The board that is being measured, and how to wait.

    Attributes:
        recorder: running recorder of its sensors.
        uuid: the board's own UUID; only its hash is ever written.
        device: canonical device name.
        power_limit_w: enforced power limit.
        least_window_s: shortest window worth measuring with its sensors.
        sleep: how to pause, in seconds.
    """

    recorder: AbstractRecorder
    uuid: str
    device: str
    power_limit_w: float | None
    least_window_s: float = 0.0
    sleep: Callable[[float], None] = time.sleep

    @property
    def board(self) -> str:
        """Name of the board in everything that is written."""
        return board_hash(self.uuid)

    @property
    def limits(self) -> TrialLimits:
        """Limits of an ordinary point on this board."""
        return TrialLimits(power_limit_w=self.power_limit_w).at_least(self.least_window_s)

    def at_least(self, seconds: float) -> float:
        """``seconds``, or as long as the sensors need."""
        return max(seconds, self.least_window_s)


def measure_idle(session: Session, seconds: float = IDLE_S) -> Trial:
    """Power of the board with a context and nothing running, over ``seconds`` after a second."""
    seconds = session.at_least(seconds)
    session.sleep(IDLE_SETTLE_S + seconds)
    end = session.recorder.now()
    return window_trial(session.recorder, session.uuid, end - seconds, end)


def window_trial(recorder: AbstractRecorder, uuid: str, start_s: float, end_s: float) -> Trial:
    """A board over a window in which nothing is repeated: one execution is all of it."""
    reading = recorder.reading(uuid, start_s, end_s)
    return Trial(
        latency_s=reading.duration_s,
        latency_rel_se=0.0,
        power_w=reading.mean_power_w,
        power_rel_se=reading.energy_rel_error,
        clock_hz=reading.sm_clock_hz,
        clock_min_hz=reading.sm_clock_min_hz,
        temperature_c=reading.temperature_end_c,
        ticks=reading.ticks,
        window_s=reading.duration_s,
        instant_power_w=reading.instant_power_w,
        flags=reading.flags,
        valid=reading.mean_power_w is not None,
        reason=reading.reason or "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A load's trial, and its rates."""

    trial: Trial
    power_w: float
    flop_s: float
    bytes_s: float


def _run(
    loads: AnchorLoads, name: str, session: Session, *, verify_counter: bool = False
) -> _Loaded:
    """Measure one load; where asked, first decide on it whether the energy counter is trusted."""
    load = loads.anchor_work(name)
    recorder, uuid = session.recorder, session.uuid
    limits = TrialLimits(
        power_limit_w=session.power_limit_w,
        settle_s=_SETTLE_S,
        capped_settle_s=_SETTLE_S,
        window_s=_WINDOW_S,
        capped_window_s=_WINDOW_S,
        max_window_s=2 * _WINDOW_S,
    ).at_least(session.least_window_s)
    try:
        first = replace(limits, retries=0) if verify_counter else limits
        trial = measure(load.work, recorder, uuid, limits=first, sleep=session.sleep)
        if verify_counter:
            end = recorder.now() - 0.1  # the last chunks drain after the window
            trust = recorder.verify_counter(uuid, end - 0.9 * _WINDOW_S, end)
            if trust.trusted is False or not trial.valid:
                trial = measure(load.work, recorder, uuid, limits=limits, sleep=session.sleep)
    finally:
        load.work.close()
    return _Loaded(
        trial=trial,
        power_w=_power(trial, f"anchor load {name!r}"),
        flop_s=load.flops / trial.latency_s,
        bytes_s=load.bytes / trial.latency_s,
    )


def _power(trial: Trial, what: str) -> float:
    """The trial's power.

    Raises:
        MeterError: there is none, or the trial is not valid.
    """
    if trial.power_w is None or not trial.valid:
        raise MeterError(f"{what}: no valid power ({trial.reason}); without it there is no anchor")
    return trial.power_w


def measure_anchor(loads: AnchorLoads, session: Session, *, time: str) -> BoardAnchor:
    """Anchor of one board.

    The stream, a steady load of several seconds, also decides whether the energy counter is
    trusted from here on.

    Args:
        loads: what can run the loads.
        session: the board.
        time: time stamp to record.

    Raises:
        MeterError: the board's power cannot be measured.
    """
    loads.launching(AWAKE_S)  # a board without a context sleeps at two thirds of its idle power
    idle_s = session.at_least(IDLE_S)
    session.sleep(IDLE_SETTLE_S + idle_s)
    idle_end = session.recorder.now()
    stream = _run(loads, "stream", session, verify_counter=True)
    # Read only now, with the sensor that is trusted.
    idle = window_trial(session.recorder, session.uuid, idle_end - idle_s, idle_end)
    gemv = _run(loads, "gemv", session)
    gemm = _run(loads, "gemm", session)
    clock = gemm.trial.clock_hz
    return BoardAnchor(
        board_uuid=session.board,
        device=session.device,
        idle_w=_power(idle, "idle"),
        stream_w=stream.power_w,
        stream_gbs=stream.bytes_s / 1e9,
        gemv_w=gemv.power_w,
        gemv_gbs=gemv.bytes_s / 1e9,
        gemm_w=gemm.power_w,
        gemm_mhz=clock / HZ_PER_MHZ if clock is not None else None,
        gemm_tflops=gemm.flop_s / 1e12,
        temperature_c=gemm.trial.temperature_c,
        time=time,
    )


def measure_launching(loads: AnchorLoads, session: Session, seconds: float = LAUNCHING_S) -> Trial:
    """Power of the board while it waits for its host, which launches empty kernels one by one."""
    seconds = session.at_least(seconds)
    start = session.recorder.now() + LAUNCHING_SETTLE_S
    loads.launching(LAUNCHING_SETTLE_S + seconds + LAUNCHING_SETTLE_S)
    return window_trial(session.recorder, session.uuid, start, start + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far the board moved while it was measured, relative to its anchor."""

    gemm_tflops: float
    gemm_w: float
    idle_w: float

    @property
    def largest(self) -> float:
        """Largest relative change."""
        return max(abs(self.gemm_tflops), abs(self.gemm_w), abs(self.idle_w))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The GEMM and idle loads of an anchor, measured again."""

    gemm: Trial
    idle: Trial
    drift: Drift


def recheck(loads: AnchorLoads, session: Session, anchor: BoardAnchor) -> Recheck:
    """Measure two loads of ``anchor`` again.

    Raises:
        MeterError: the board's power cannot be measured any more.
    """
    gemm = _run(loads, "gemm", session)
    idle = measure_idle(session)
    drift = Drift(
        gemm_tflops=gemm.flop_s / 1e12 / anchor.gemm_tflops - 1,
        gemm_w=gemm.power_w / anchor.gemm_w - 1,
        idle_w=_power(idle, "idle") / anchor.idle_w - 1,
    )
    return Recheck(gemm=gemm.trial, idle=idle, drift=drift)
