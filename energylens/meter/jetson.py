"""Jetson modules: energy from the power of their rails.

The headline is the power of the whole module. What a rail stands for is said by `rails`; a rail
that others draw from as well is labelled, and one without a name is never called the GPU's.

jtop answers once per interval of its service (1 s unless somebody asks for less), sysfs as often as
it is asked, so a window has to be long: `LEAST_WINDOW_S`. Replayed, not run on hardware.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energylens.errors import MeterError
from energylens.meter.base import (
    AbstractMeter,
    AbstractRecorder,
    Capability,
    DeviceInfo,
    SensorState,
    system_memory_bytes,
)
from energylens.meter.rails import ROLES, RailMap, RailRole, map_rails
from energylens.meter.tegra import (
    SOCKET,
    AbstractSource,
    Frame,
    JtopSource,
    State,
    SysfsSource,
    read_text,
    tegra_board,
)
from energylens.meter.window import SENSORS, DeviceSeries, plausible
from energylens.units import W_PER_MW

_log = logging.getLogger(__name__)

LEAST_WINDOW_S = 30.0
"""Shortest window for sensors of 1 to 10 values a second."""
UNTRIED = "the Jetson meter was tested on replayed sensors, not run on hardware"
"""Said wherever its results are shown."""

_FIRST_FRAME_S = 10.0
_MAX_FAILURES = 10
_IDLE, _OVER_CURRENT, _GOVERNOR = 0x1, 0x80, 1 << 24  # see `CLOCK_EVENT_REASONS`
_NO_COUNTER = "Jetson modules have no energy counter; power is integrated"
_CONTAINERS = (".dockerenv", "run/.containerenv")


@dataclass(slots=True)
class _Tracks:
    """Samples while they grow: of each role, and of the GPU's state."""

    roles: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {role: [] for role in ROLES}
    )
    state: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {s: [] for s in ("sm_clock", "temperature", "reasons")}
    )

    def add(self, t: float, frame: Frame, rails: RailMap, events: float | None, base: int) -> None:
        """Keep a frame.

        ``events`` is the count of over-current events before it, ``base`` the reasons that hold for
        every sample.
        """
        for role in rails.roles:
            watts = [frame.watts.get(rail) for rail in role.rails]
            known = [w for w in watts if w is not None]
            if known and len(known) == len(watts):  # a sum without a part is no sum
                self.roles[role.role].append((t, sum(known)))
        if frame.clock_hz is not None:
            self.state["sm_clock"].append((t, frame.clock_hz))
        if frame.temperature_c is not None:
            self.state["temperature"].append((t, frame.temperature_c))
        throttled = events is not None and (frame.over_current or 0.0) > events
        mask = (_OVER_CURRENT if throttled else 0) | (_IDLE if frame.load == 0 else 0)
        self.state["reasons"].append((t, base | mask))


class JetsonRecorder(AbstractRecorder):
    """Samples a module in a thread while entered; `poll` is one look at it."""

    def __init__(
        self, info: DeviceInfo, source: AbstractSource, rails: RailMap, clock: Callable[[], float]
    ) -> None:
        """Record the module ``info`` from ``source``."""
        super().__init__()
        self._info, self._source, self._map, self._clock = info, source, rails, clock
        self._tracks = _Tracks()
        clocks = dict(info.clocks_hz)
        is_pinned = "gpu_min" in clocks and clocks["gpu_min"] == clocks.get("gpu_max")
        self._base = 0 if is_pinned else _GOVERNOR
        self._events: float | None = None
        self._failures = 0
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread and wait for its first frame."""
        self._stop.clear()
        self._ready.clear()
        self._source.open()
        self._thread = threading.Thread(target=self._run, name="energylens-meter", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout=_FIRST_FRAME_S):
            self.stop()
            raise MeterError(f"{self._source.name} did not answer within {_FIRST_FRAME_S:g} s")

    def stop(self) -> None:
        """Stop the thread after the frame that it waits for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        self._source.close()

    def now(self) -> float:
        """Seconds of the clock that stamps the samples."""
        return self._clock()

    def poll(self) -> None:
        """Take one frame, stamped when it is there; ten failures in a row end the series."""
        if self._ended is not None:
            return
        try:
            frame = self._source.read()
        except MeterError as error:
            self._failed(str(error), lasting=True)
            return
        t = self._clock()
        lacking = [rail for rail in self._map.total.rails if rail not in frame.watts]
        if lacking:
            self._failed(f"{', '.join(lacking)} did not answer")
        else:
            self._failures = 0
        with self._lock:
            self._tracks.add(t, frame, self._map, self._events, self._base)
        if frame.over_current is not None:
            self._events = frame.over_current

    def _failed(self, why: str, *, lasting: bool = False) -> None:
        self._failures += 1
        if lasting or self._failures >= _MAX_FAILURES:
            _log.warning("%s: no power any more: %s", self._info.name, why)
            self._ended = why

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self._ended is None:
                self.poll()
                self._ready.set()
                self._stop.wait(self._source.wait_s)
        finally:
            self._ready.set()

    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        """Power of the whole module so far."""
        return self._series(self._known(uuid).total, start_s, end_s)

    def rails(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> Mapping[str, DeviceSeries]:
        """Power by role; an idle rail that reads 0 or less is taken as half of its resolution."""
        return MappingProxyType(
            {r.role: self._series(r, start_s, end_s) for r in self._known(uuid).roles}
        )

    def _known(self, uuid: str) -> RailMap:
        if uuid != self._info.uuid:
            raise MeterError(f"board {uuid} is not recorded; recorded is: {self._info.uuid}")
        return self._map

    def _series(self, role: RailRole, start_s: float, end_s: float) -> DeviceSeries:
        def cut(samples: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
            first = bisect_left(samples, start_s, key=itemgetter(0))
            return tuple(samples[first : bisect_right(samples, end_s, key=itemgetter(0))])

        step_w = self._source.step_w(role.rails)
        with self._lock:
            watts = cut(self._tracks.roles[role.role])
            state: dict[str, Any] = {k: cut(v) for k, v in self._tracks.state.items()}
        if role.role != "total":
            watts = tuple((t, max(w, step_w / 2)) for t, w in watts)
        state["reasons"] = tuple((t, int(mask)) for t, mask in state["reasons"])
        why = role.reason or self._ended
        return DeviceSeries(
            uuid=self._info.uuid,
            name=self._info.name,
            scope=role.scope,
            instant_power=watts,
            power_step_w=max(step_w, W_PER_MW),
            sm_clock_max_hz=self._info.sm_clock_max_hz,
            absent=MappingProxyType(
                {"energy": _NO_COUNTER} | ({"instant_power": why} if why else {})
            ),
            **state,
        )


class JetsonMeter(AbstractMeter):
    """The one module of a Jetson."""

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        jtop: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Find rails that answer: through jtop, else in sysfs.

        Args:
            root: where the file system of the board begins.
            jtop: a module with jtop's ``jtop`` and ``JtopException``; None imports jtop.
            clock: monotonic seconds.

        Raises:
            MeterError: no rail answers; the text says what was tried and what to do.
        """
        self._root, self._clock = root, clock
        self._state = State(root)
        self._notes: list[str] = []
        tried = []
        for make in (
            lambda: JtopSource(jtop, self._state),
            lambda: SysfsSource(self._state),
        ):
            try:
                found = _probe(make())
                break
            except MeterError as error:
                tried.append(str(error))
        else:
            raise MeterError(self._nothing(tried))
        self._source, self._rails, self._frame = found.source, found.rails, found.frame
        self._mode = found.mode or self._state.mode()
        self._notes += [f"{text}; {self._source.name} is used instead" for text in tried]

    def _nothing(self, tried: Sequence[str]) -> str:
        text = "no power rail answers: " + "; ".join(tried)
        if not any((self._root / name).exists() for name in _CONTAINERS):
            return text
        return (
            f"no_sensor_in_container: {text}; start the container with -v /{SOCKET}:/{SOCKET} and "
            "--group-add with the number of the group jtop, or with /sys from the host, read-only"
        )

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The module."""
        serial = read_text(self._root / "proc/device-tree/serial-number")
        release = self._state.release()
        notes = (
            UNTRIED,
            *self._notes,
            *([self._rails.note] if self._rails.note else []),
            *(f"rail {name} is left out: {why}" for name, why in self._source.lost.items()),
        )
        return (
            DeviceInfo(
                uuid=f"JETSON-{serial or 0}",
                name=tegra_board(self._root) or f"Jetson ({self._rails.boards})",
                driver=f"Jetson Linux {release}" if release else None,
                sm_clock_max_hz=self._state.gpu_hz("max"),
                memory_bytes=system_memory_bytes(),
                unified_memory=True,
                integrated=True,
                power_scope="module",
                power_mode=self._mode,
                power_source=self._source.name,
                power_step_w=self._source.step_w(self._rails.total.rails),
                least_window_s=LEAST_WINDOW_S,
                clocks_hz=self._state.clocks_hz(),
                rails=self._rails.roles,
                notes=notes,
            ),
        )

    def capabilities(self) -> tuple[Capability, ...]:
        """What a frame held."""
        (info,) = self.devices()
        frame = self._frame
        values = {
            "instant_power": sum(frame.watts[rail] for rail in self._rails.total.rails),
            "sm_clock": frame.clock_hz,
            "temperature": frame.temperature_c,
            "reasons": frame.over_current if frame.over_current is not None else frame.load,
        }
        rows = []
        for sensor in SENSORS:
            value = values.get(sensor)
            state: SensorState = "supported"
            reason = None
            if value is None:
                state, reason = "absent", "neither jtop nor sysfs gives it"
            elif not plausible(sensor, value):
                state, reason = "not_supported", f"answers {value:g}"
            if sensor in ("energy", "average_power"):
                state, reason = "not_supported", _NO_COUNTER
            scope = "module" if sensor == "instant_power" else None
            rows.append(
                Capability(uuid=info.uuid, sensor=sensor, state=state, reason=reason, scope=scope)
            )
        return tuple(rows)

    def recorder(self, uuids: Sequence[str]) -> JetsonRecorder:
        """A recorder of the module."""
        (info,) = self.devices()
        for uuid in uuids:
            if uuid != info.uuid:
                raise MeterError(f"no board with id {uuid!r}; this module is {info.uuid}")
        return JetsonRecorder(info, self._source, self._rails, self._clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A source that works, its rails, its first frame, and the power mode where it knows it."""

    source: AbstractSource
    rails: RailMap
    frame: Frame
    mode: str | None


def _probe(source: AbstractSource) -> _Found:
    """Read a source once, for real.

    Raises:
        MeterError: it does not answer, or nothing in it is the power of the module.
    """
    source.open()
    try:
        frame = source.read()
        rails = map_rails(frame.watts)
        total = rails.total
        if total.reason:
            raise MeterError(f"{source.name}: {total.reason}")
        watts = sum(frame.watts[rail] for rail in total.rails)
        if not plausible("instant_power", watts):
            raise MeterError(f"{source.name}: {' + '.join(total.rails)} answers {watts:g} W")
        return _Found(source=source, rails=rails, frame=frame, mode=source.mode())
    finally:
        source.close()
