"""From the times of iterations and the readings of boards to the figures of a phase. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from energylens.measured import GpuProfile, Latency, PhaseProfile
from energylens.meter.base import Reading
from energylens.meter.window import INVALID_FLAGS
from energylens.units import HZ_PER_MHZ

OUTLIER_DEVIATIONS = 8.0
"""Robust standard deviations (1.4826 x the median distance from the median) to an outlier."""
OUTLIER_LEAST = 0.02
"""A distance from the median below this part of it is no outlier, however even the others are."""
OUTLIER_MOST = 0.1
"""A larger part of the iterations than this is no outlier, but how the step is."""
OUTLIER_RULE = (
    f"left out: farther from the median than {OUTLIER_DEVIATIONS:g} robust standard deviations "
    f"(1.4826 MAD) and than {OUTLIER_LEAST:.0%} of it; none where that were more than "
    f"{OUTLIER_MOST:.0%} of the iterations"
)
BLOCKS = 10
"""Consecutive parts of a window whose means tell how well its mean is known.

Neighbouring iterations resemble each other, above all where the host is what takes time, so that
their number alone would promise too much.
"""
DRIFT_LIMIT, DRIFT_ERRORS = 0.05, 3.0
"""Halves of a window that differ by more than both (relative, standard errors) are not steady."""
NOISY_FROM, IMPRECISE_FROM = 0.02, 0.1
"""Half width of the mean's interval, relative: worth a label, and no longer a measurement."""
VALIDITY_RULE = (
    f"the 95 % interval of the mean, from {BLOCKS} consecutive blocks, is within "
    f"{IMPRECISE_FROM:.0%} of it (above {NOISY_FROM:.0%}: noisy, still valid), and the halves of "
    f"the window differ by no more than {DRIFT_LIMIT:.0%} or {DRIFT_ERRORS:g} standard errors; "
    "the spread of single iterations does not matter, nor a drift where the device waits for the "
    "host, which wanders: there the interval tells enough"
)
HOST_SHARE = 0.9
"""Part of a lone step that its launches take, from which on the device waits for the host."""
NOT_STEADY, IMPRECISE, NOISY = "not_steady", "imprecise", "noisy"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWindow:
    """What one worker saw of a phase.

    Attributes:
        times_s: seconds of each iteration, in order.
        start_s, end_s: the window on the monotonic clock of the node, for the meter.
        host_share: part of a lone step until the host has launched it; None where launching and
            running are one.
        context_len: mean KV length of the steps.
    """

    times_s: tuple[float, ...]
    start_s: float
    end_s: float
    host_share: float | None
    context_len: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardReading:
    """A board over its worker's window; idle power is with the model loaded, nothing running."""

    board: str
    window: WorkerWindow
    reading: Reading
    idle_w: float | None

    @property
    def energy_j(self) -> float | None:
        """Of one step: the energy of the window over the steps in it."""
        joules = self.reading.energy_j
        return None if joules is None else joules / len(self.window.times_s)

    @property
    def idle_j(self) -> float | None:
        """What the board would have drawn in the time of one step, had nothing run."""
        if self.idle_w is None:
            return None
        window = self.window
        return self.idle_w * (window.end_s - window.start_s) / len(window.times_s)


def without_outliers(times_s: Sequence[float]) -> list[float]:
    """The iterations that `OUTLIER_RULE` keeps."""
    median = statistics.median(times_s)
    deviation = 1.4826 * statistics.median(abs(t - median) for t in times_s)
    allowed = max(OUTLIER_DEVIATIONS * deviation, OUTLIER_LEAST * median)
    kept = [t for t in times_s if abs(t - median) <= allowed]
    return kept if len(kept) >= (1 - OUTLIER_MOST) * len(times_s) else list(times_s)


def latency(kept_s: Sequence[float]) -> Latency:
    """Mean, percentiles and spread of the iterations.

    The interval is Student's, over the iterations or over the means of `BLOCKS` consecutive blocks
    of two and more, whichever is wider; it has no width for a lone value.
    """
    values = np.asarray(kept_s)
    mean, n = float(values.mean()), len(values)
    half = _half_width(values)
    if n >= 2 * BLOCKS:
        half = max(half, _half_width(_block_means(values)))
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Latency(
        mean=mean,
        p50=p50,
        p90=p90,
        p99=p99,
        std=float(values.std(ddof=1)) if n > 1 else 0.0,
        ci95=(mean - half, mean + half),
    )


def _half_width(values: NDArray[np.float64]) -> float:
    n = len(values)
    if n < 2:
        return 0.0
    return float(stdtrit(n - 1, 0.975)) * float(values.std(ddof=1)) / math.sqrt(n)


def _block_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([part.mean() for part in np.array_split(values, min(BLOCKS, len(values)))])


def timing_flags(times_s: Sequence[float]) -> list[str]:
    """What `VALIDITY_RULE` says about the iterations of a window: ``noisy`` is only a label."""
    kept = without_outliers(times_s)
    found = latency(kept)
    half = (found.ci95[1] - found.mean) / found.mean
    flags = [NOT_STEADY] if _drifts(np.asarray(kept)) else []
    if half > IMPRECISE_FROM:
        flags.append(IMPRECISE)
    elif half > NOISY_FROM:
        flags.append(NOISY)
    return flags


def _drifts(kept_s: NDArray[np.float64]) -> bool:
    """Whether the second half is slower or faster than chance allows."""
    means = _block_means(kept_s)
    half = len(means) // 2
    if half < 2:
        return False
    first, second = means[:half], means[-half:]
    drift = abs(float(second.mean() - first.mean()))
    error = math.sqrt((first.var(ddof=1) + second.var(ddof=1)) / half)
    return drift > max(DRIFT_LIMIT * float(kept_s.mean()), DRIFT_ERRORS * error)


def phase_profile(
    windows: Sequence[WorkerWindow],
    boards: Sequence[BoardReading],
    *,
    defects: Sequence[str] = (),
) -> PhaseProfile:
    """One phase over all workers: the slowest worker's time, the sum of the boards' energies.

    Args:
        windows: one per worker.
        boards: every board of the run, none where energy is not measured.
        defects: flags of the whole run that spoil it.
    """
    slowest = max(windows, key=lambda w: statistics.fmean(without_outliers(w.times_s)))
    kept = without_outliers(slowest.times_s)
    gpus = tuple(_gpu(b) for b in boards)
    energy_j, idle_j = _sum([b.energy_j for b in boards]), _sum([b.idle_j for b in boards])
    total_w = _sum([g.mean_power_w for g in gpus])
    regime = _regime([w.host_share for w in windows])
    timing = [f for w in windows for f in timing_flags(w.times_s)]
    flags = dict.fromkeys([*defects, *(f for b in boards for f in b.reading.flags), *timing])
    return PhaseProfile(
        latency=latency(kept),
        n=len(kept),
        n_outliers=len(slowest.times_s) - len(kept),
        context_len=slowest.context_len,
        energy_j=energy_j,
        net_energy_j=None if energy_j is None or idle_j is None else energy_j - idle_j,
        mean_power_w=None if total_w is None else total_w / len(gpus),
        total_power_w=total_w,
        energy_rel_se=_energy_error(boards),
        sm_clock_mhz=_mean([g.sm_clock_mhz for g in gpus]),
        gpu_temp_c=max((g.gpu_temp_c for g in gpus if g.gpu_temp_c is not None), default=None),
        regime=regime,
        ticks=min((b.reading.ticks for b in boards), default=None),
        per_gpu=gpus,
        # Other programs disturb a processor, whose energy is not measured; a GPU should be alone.
        valid=not defects
        and not (boards and IMPRECISE in timing)
        and not (boards and NOT_STEADY in timing and regime != "host")
        and all(b.reading.valid for b in boards),
        flags=tuple(flags),
        iterations=tuple(slowest.times_s),
    )


def _gpu(board: BoardReading) -> GpuProfile:
    clock_hz = board.reading.sm_clock_hz
    return GpuProfile(
        board_uuid=board.board,
        energy_j=board.energy_j,
        mean_power_w=board.reading.mean_power_w,
        sm_clock_mhz=None if clock_hz is None else clock_hz / HZ_PER_MHZ,
        gpu_temp_c=board.reading.temperature_end_c,
    )


def _sum(parts: Sequence[float | None]) -> float | None:
    """The sum, None where a part is missing or there is none."""
    known = [p for p in parts if p is not None]
    return math.fsum(known) if known and len(known) == len(parts) else None


def _energy_error(boards: Sequence[BoardReading]) -> float | None:
    """Standard error of the sum; a reading's bound is taken as a uniform distribution."""
    total = _sum([b.energy_j for b in boards])
    errors = [b.reading.energy_rel_error for b in boards]
    if not total or None in errors:
        return None
    parts = [
        (e or 0.0) / math.sqrt(3) * (b.energy_j or 0.0) for e, b in zip(errors, boards, strict=True)
    ]
    return math.hypot(*parts) / total


def _regime(shares: Sequence[float | None]) -> str | None:
    known = [s for s in shares if s is not None]
    if not known:
        return None
    return "host" if max(known) >= HOST_SHARE else "device"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def defect_text(phase: str, profile: PhaseProfile, boards: Sequence[BoardReading]) -> str | None:
    """Why a phase is not valid, for people; None where it is."""
    if profile.valid:
        return None
    why = [b.reading.reason for b in boards if b.reading.reason]
    spoiled = [f for f in profile.flags if f in INVALID_FLAGS or f in _OWN_DEFECTS]
    return f"{phase}: {'; '.join(dict.fromkeys(why)) or ', '.join(spoiled) or 'not valid'}"


FOREIGN, BASELINE = "foreign_process", "baseline_unstable"
_OWN_DEFECTS = frozenset({NOT_STEADY, IMPRECISE, FOREIGN, BASELINE, "coverage"})
