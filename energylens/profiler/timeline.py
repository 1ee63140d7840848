"""The power of every board over a run, as one CSV file."""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from energylens.files import write_atomically
from energylens.meter.base import DeviceSeries
from energylens.profiler.throttle import reason_names
from energylens.store import board_hash
from energylens.units import HZ_PER_MHZ

COLUMNS = ("t_s", "phase", "board_uuid", "power_w", "sm_clock_mhz", "temperature_c", "reasons")


def write_timeline(
    path: Path,
    boards: Sequence[DeviceSeries],
    phases: Sequence[tuple[str, float, float]],
    *,
    interval_s: float,
) -> None:
    """Write a row per board and interval: the last sample of each sensor by then.

    Times count from the first power sample; ``phase`` is empty outside of the windows, ``reasons``
    are those of the clock events, joined by ``;``.

    Args:
        path: file to write.
        boards: what was sampled.
        phases: name, begin and end of each window on the samples' clock.
        interval_s: spacing of the rows.
    """
    watts = {one.uuid: one.instant_power or one.average_power for one in boards}
    times = [t for samples in watts.values() for t in (samples[0][0], samples[-1][0]) if samples]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    start_s, end_s = min(times, default=0.0), max(times, default=0.0)
    for i in range(round((end_s - start_s) / interval_s) + 1 if times else 0):
        t = start_s + i * interval_s
        phase = next((name for name, begin, end in phases if begin <= t <= end), "")
        for one in boards:
            clock = _at(one.sm_clock, t)
            reasons = _at(one.reasons, t)
            rows.writerow(
                (
                    f"{i * interval_s:.4f}",
                    phase,
                    board_hash(one.uuid),
                    _text(_at(watts[one.uuid], t)),
                    _text(None if clock is None else clock / HZ_PER_MHZ),
                    _text(_at(one.temperature, t)),
                    "" if reasons is None else ";".join(reason_names(int(reasons))) or "none",
                )
            )
    write_atomically(path, text.getvalue())


def _at(samples: Sequence[tuple[float, float]], t: float) -> float | None:
    """Value of the last sample by ``t``; None where there is none yet."""
    index = bisect_right(samples, t, key=itemgetter(0))
    return samples[index - 1][1] if index else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
