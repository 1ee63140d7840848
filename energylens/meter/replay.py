"""Recordings of sensor samples as CSV, and a meter that plays them back.

Columns ``uuid,sensor,t_s,value``. A row is one sample; facts about a board have no time.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energylens.errors import MeterError, SpecError
from energylens.meter.base import AbstractMeter, AbstractRecorder, Capability, DeviceInfo
from energylens.meter.window import SENSORS, DeviceSeries

_COLUMNS = ("uuid", "sensor", "t_s", "value")
_JITTER = "energy_jitter_s"
_TEXTS = ("name", "scope")
_NUMBERS = ("power_limit_w", "sm_clock_max_hz", "power_step_w", "lost_s")
_ABSENT = "absent."


def save_recording(path: str | Path, series: Sequence[DeviceSeries]) -> None:
    """Write ``series`` to ``path``, whole or not at all."""
    target = Path(path)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for one in series:
            writer.writerows(_rows(one))
    scratch.replace(target)


def load_recording(path: str | Path) -> tuple[DeviceSeries, ...]:
    """Read what `save_recording` wrote, in the order of the boards in the file.

    Raises:
        SpecError: the file is missing or a row is wrong; the message names the line.
    """
    boards: dict[str, _Draft] = {}
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            if tuple(next(rows, ())) != _COLUMNS:
                raise SpecError(f"{path}: line 1 must be {','.join(_COLUMNS)}")
            for row in rows:
                if len(row) != len(_COLUMNS):
                    raise SpecError(f"{path}: line {rows.line_num}: {len(row)} columns, not 4")
                draft = boards.setdefault(row[0], _Draft())
                try:
                    draft.add(row[1], row[2], row[3])
                except ValueError as error:
                    raise SpecError(f"{path}: line {rows.line_num}: {error}") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: is not a CSV file of UTF-8 text: {error}") from error
    return tuple(draft.series(uuid) for uuid, draft in boards.items())


class ReplayMeter(AbstractMeter):
    """Plays a recording. Its time is that of the recording and moves only by `sleep`."""

    def __init__(self, path: str | Path) -> None:
        """Load ``path`` and stand at its first sample.

        Raises:
            SpecError: the file is wrong. MeterError: it holds no sample.
        """
        self._series = load_recording(path)
        times = [s[0] for one in self._series for sensor in SENSORS for s in getattr(one, sensor)]
        if not times:
            raise MeterError(f"{path}: the recording holds no sample")
        self._now_s: float = min(times)

    def now(self) -> float:
        """Position in the recording, monotonic seconds."""
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Let ``duration_s`` of the recording pass."""
        self._now_s += duration_s

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The boards of the recording."""
        return tuple(
            DeviceInfo(
                uuid=one.uuid,
                name=one.name,
                power_limit_w=one.power_limit_w,
                sm_clock_max_hz=one.sm_clock_max_hz,
                mig=one.mig,
            )
            for one in self._series
        )

    def capabilities(self) -> tuple[Capability, ...]:
        """A sensor is supported where the recording holds samples of it."""
        return tuple(
            Capability(
                uuid=one.uuid,
                sensor=sensor,
                state="supported" if getattr(one, sensor) else "absent",
                reason=None if getattr(one, sensor) else one.absent.get(sensor, "not recorded"),
            )
            for one in self._series
            for sensor in SENSORS
        )

    def recorder(self, uuids: Sequence[str]) -> ReplayRecorder:
        """A recorder of these boards at the meter's position."""
        known = {one.uuid: one for one in self._series}
        for uuid in uuids:
            if uuid not in known:
                raise MeterError(f"board {uuid} is not in the recording, only {', '.join(known)}")
        return ReplayRecorder(self, {uuid: known[uuid] for uuid in uuids})


class ReplayRecorder(AbstractRecorder):
    """Recorder whose samples are already there."""

    def __init__(self, meter: ReplayMeter, series: dict[str, DeviceSeries]) -> None:
        """Play ``series`` (by UUID) on the clock of ``meter``."""
        super().__init__()
        self._meter = meter
        self._series = series

    def now(self) -> float:
        """Position of the meter."""
        return self._meter.now()

    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        """Samples of the recording."""
        if uuid not in self._series:
            raise MeterError(
                f"board {uuid} is not recorded; recorded are: {', '.join(self._series)}"
            )
        return self._series[uuid].between(start_s, end_s)


@dataclass(slots=True)
class _Draft:
    """Fields of a series while its rows are read."""

    fields: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, sensor: str, t_s: str, value: str) -> None:
        """Take one row; ValueError where it is wrong."""
        if sensor in SENSORS:
            number = int(_finite(value)) if sensor == "reasons" else _finite(value)
            self.fields.setdefault(sensor, []).append((_finite(t_s), number))
        elif sensor == _JITTER:
            self.fields.setdefault(sensor, []).append(_finite(value))
        elif sensor in _TEXTS:
            self.fields[sensor] = value
        elif sensor in _NUMBERS:
            self.fields[sensor] = _finite(value)
        elif sensor == "mig":
            self.fields[sensor] = value == "1"
        elif sensor.startswith(_ABSENT):
            self.absent[sensor.removeprefix(_ABSENT)] = value
        else:
            raise ValueError(f"unknown sensor {sensor!r}; known: {', '.join(SENSORS)}")

    def series(self, uuid: str) -> DeviceSeries:
        """The finished series."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in self.fields.items()
        }
        return DeviceSeries(uuid=uuid, absent=MappingProxyType(self.absent), **values)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def _rows(one: DeviceSeries) -> list[tuple[str, str, str, str]]:
    facts = {key: getattr(one, key) for key in (*_TEXTS, *_NUMBERS)}
    facts["mig"] = "1" if one.mig else None
    facts |= {f"{_ABSENT}{sensor}": why for sensor, why in one.absent.items()}
    rows = [(one.uuid, key, "", str(value)) for key, value in facts.items() if value is not None]
    for sensor in SENSORS:
        rows += [(one.uuid, sensor, repr(t), repr(v)) for t, v in getattr(one, sensor)]
    stamps = zip(one.energy, one.energy_jitter_s, strict=True)
    return rows + [(one.uuid, _JITTER, repr(tick[0]), repr(jitter)) for tick, jitter in stamps]
