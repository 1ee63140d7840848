"""NVIDIA boards through NVML: the only file that imports pynvml, and only when a meter is made."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
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
from energylens.meter.window import COUNTER_POLL_S, SENSORS, DeviceSeries, plausible
from energylens.units import HZ_PER_MHZ, J_PER_MJ, W_PER_MW

_log = logging.getLogger(__name__)

# Numbers of NVML's stable binary interface.
_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 3, 4, 13
_LOST = (15, 16, 28)  # GPU is lost, reset required, GPU not found
_PERMANENT = (2, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND)
_POWER_AVERAGE_FIELD, _POWER_INSTANT_FIELD = 185, 186
_SCOPES = (("gpu", 0), ("module", 1))
_SM, _MEMORY = 1, 2
_FIELD_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

_INIT_HINTS = {
    _NO_PERMISSION: "ask for access to the /dev/nvidia* files",
    9: "load the NVIDIA driver (is there a GPU in this machine?)",
    12: "install the NVIDIA driver; in a container, pass the GPUs through (--gpus all)",
    18: "the driver was updated underneath: reboot",
}
_REQUIRED_API = (
    "NVMLError",
    "nvmlInit",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEnergyConsumption",
)
_PERIODS_S = {"energy": 0.0, "instant_power": 0.02}
_SLOW_PERIOD_S = 0.05
_MAX_FAILURES = 10
_PROBE_S = 0.3
_MIG_REASON = "mig: the board's sensors cover all slices"


class _SensorError(Exception):
    """A sensor gave no value; ``state`` None: it may work at the next try; ``lost``: board gone."""

    def __init__(self, text: str, state: SensorState | None, *, lost: bool = False) -> None:
        super().__init__(text)
        self.state = state
        self.lost = lost


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to read a sensor: a call that answers in vendor units, and what it covers."""

    read: Callable[[], object]
    factor: float
    scope: str | None = None


class _Board:
    """Reads the sensors of one board; the first way that answers is used from then on."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._ways = self._all_ways()
        self._chosen: dict[str, _Way] = {}

    def scope(self, sensor: str) -> str | None:
        chosen = self._chosen.get(sensor)
        return chosen.scope if chosen else None

    def read(self, sensor: str) -> float:
        """Value in SI units.

        Raises:
            _SensorError: no value.
        """
        if sensor in self._chosen:
            return self._try(self._chosen[sensor])
        errors: list[_SensorError] = []
        for way in self._ways[sensor]:
            try:
                value = self._try(way)
            except _SensorError as error:
                if error.lost or error.state is None:
                    raise
                errors.append(error)
            else:
                self._chosen[sensor] = way
                return value
        raise next((e for e in errors if e.state == "no_permission"), errors[0])

    def _try(self, way: _Way) -> float:
        try:
            value = way.read()
        except self._nvml.NVMLError as error:
            raise _sensor_error(error) from error
        if not isinstance(value, int | float):
            raise _SensorError(f"answered {value!r}", "not_supported")
        return value * way.factor

    def _all_ways(self) -> dict[str, tuple[_Way, ...]]:
        def call(name: str, factor: float, *arguments: int) -> _Way:
            return _Way(partial(self._call, name, *arguments), factor)

        def power(field_id: int) -> tuple[_Way, ...]:
            return tuple(
                _Way(partial(self._field, field_id, number), W_PER_MW, scope)
                for scope, number in _SCOPES
            )

        return {
            "energy": (call("nvmlDeviceGetTotalEnergyConsumption", J_PER_MJ),),
            "instant_power": power(_POWER_INSTANT_FIELD),
            "average_power": (
                *power(_POWER_AVERAGE_FIELD),
                call("nvmlDeviceGetPowerUsage", W_PER_MW),
            ),
            "sm_clock": (call("nvmlDeviceGetClockInfo", HZ_PER_MHZ, _SM),),
            "memory_clock": (call("nvmlDeviceGetClockInfo", HZ_PER_MHZ, _MEMORY),),
            "temperature": (call("nvmlDeviceGetTemperature", 1, 0),),
            "reasons": (
                call("nvmlDeviceGetCurrentClocksEventReasons", 1),
                call("nvmlDeviceGetCurrentClocksThrottleReasons", 1),
            ),
        }

    def _call(self, name: str, *arguments: int) -> object:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise _SensorError(f"the NVML bindings have no {name}", "absent")
        result: object = function(self._handle, *arguments)
        return result

    def _field(self, field_id: int, scope: int) -> object:
        answer = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field_id, scope)])[0]
        if answer.nvmlReturn != 0:
            raise self._nvml.NVMLError(answer.nvmlReturn)
        value: object = getattr(answer.value, _FIELD_TYPES[answer.valueType])
        return value


@dataclass(slots=True)
class _Track:
    """Samples of one sensor of one board, while they grow."""

    board: _Board
    uuid: str
    sensor: str
    samples: list[tuple[float, float]] = field(default_factory=list)
    jitter_s: list[float] = field(default_factory=list)
    due_s: float = -math.inf
    failures: int = 0
    ended: str | None = None
    last: tuple[float, float, float] | None = None

    def add(self, start: float, t: float, value: float) -> None:
        """Keep a value whose read took from ``start`` to ``t``; of a counter, only its changes.

        A change happened after the *start* of the read before: the thread may have been held up
        between that read and its stamp.
        """
        before, self.failures = self.last, 0
        if before and t <= before[1]:
            return
        self.last = (start, t, value)
        if self.sensor != "energy":
            self.samples.append((t, value))
        elif before and value != before[2]:
            self.samples.append((t, value))
            self.jitter_s.append(t - before[0])


class NvmlRecorder(AbstractRecorder):
    """Samples boards in a thread while entered; `poll` is one look at every sensor that is due.

    Every sensor stands alone: one that fails for good is dropped with one warning.
    """

    def __init__(
        self, boards: Sequence[tuple[DeviceInfo, _Board | None]], clock: Callable[[], float]
    ) -> None:
        """Record ``boards``; None stands for a MIG slice, which has no sensors of its own."""
        super().__init__()
        self._infos = {_plain(info.uuid): info for info, _ in boards}
        self._clock = clock
        self._tracks = [
            _Track(board, _plain(info.uuid), sensor)
            for sensor in SENSORS
            for info, board in boards
            if board is not None
        ]
        self._lost_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread and wait for its first samples."""
        self._stop.clear()
        self._ready.clear()
        self._thread = threading.Thread(target=self._run, name="energylens-meter", daemon=True)
        self._thread.start()
        if not self._ready.wait(timeout=10):
            self._stop.set()
            raise MeterError("NVML did not answer within 10 s; reset the GPU or the driver")

    def stop(self) -> None:
        """Stop the thread; a call that hangs in the driver is not waited for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def now(self) -> float:
        """Seconds of the clock that stamps the samples."""
        return self._clock()

    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        """Samples so far."""
        key = _plain(uuid)
        if key not in self._infos:
            known = ", ".join(info.uuid for info in self._infos.values())
            raise MeterError(f"board {uuid} is not recorded; recorded are: {known}")
        thread = self._thread
        if thread is not None and not thread.is_alive() and not self._stop.is_set():
            raise MeterError("the thread that samples NVML ended early; its traceback says why")
        info = self._infos[key]
        parts: dict[str, Any] = {}
        absent: dict[str, str] = {}
        scope = "gpu"
        with self._lock:
            for track in (t for t in self._tracks if t.uuid == key):
                low = bisect_left(track.samples, start_s, key=itemgetter(0))
                high = bisect_right(track.samples, end_s, key=itemgetter(0))
                parts[track.sensor] = tuple(track.samples[low:high])
                if track.sensor == "energy":
                    parts["energy_jitter_s"] = tuple(track.jitter_s[low:high])
                if track.ended is not None:
                    absent[track.sensor] = track.ended
                if track.sensor == "instant_power":
                    scope = track.board.scope(track.sensor) or scope
            lost_s = self._lost_s.get(key)
        return DeviceSeries(
            uuid=info.uuid,
            name=info.name,
            scope=scope,
            power_limit_w=info.power_limit_w,
            sm_clock_max_hz=info.sm_clock_max_hz,
            mig=info.mig,
            lost_s=lost_s,
            absent=MappingProxyType(absent),
            **parts,
        )

    def poll(self) -> None:
        """Read every sensor that is due, each with its own time stamp."""
        for track in self._tracks:
            now_s = self._clock()
            if track.ended is not None or now_s < track.due_s:
                continue
            period_s = _PERIODS_S.get(track.sensor, _SLOW_PERIOD_S)
            track.due_s = now_s + period_s - COUNTER_POLL_S / 2
            try:
                value = track.board.read(track.sensor)
            except _SensorError as error:
                self._failed(track, error)
                continue
            with self._lock:
                track.add(now_s, self._clock(), value)

    def _failed(self, track: _Track, error: _SensorError) -> None:
        name = self._infos[track.uuid].uuid
        if error.lost:
            _log.warning("%s: %s; its series ends here", name, error)
            with self._lock:
                self._lost_s[track.uuid] = self._clock()
                for other in self._tracks:
                    if other.uuid == track.uuid:
                        other.ended = str(error)
            return
        track.failures += 1
        if error.state is None and track.failures < _MAX_FAILURES:
            return
        _log.warning("%s: no %s: %s", name, track.sensor, error)
        with self._lock:
            track.ended = str(error)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.poll()
                self._ready.set()
                self._stop.wait(COUNTER_POLL_S)
        finally:
            self._ready.set()


class NvmlMeter(AbstractMeter):
    """Every NVIDIA board of the machine."""

    def __init__(
        self,
        nvml: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Load and initialise NVML.

        Args:
            nvml: a module with NVML's functions; None imports pynvml.
            clock: monotonic seconds.
            sleep: waits for a number of seconds.

        Raises:
            MeterError: no bindings, the wrong bindings, no driver or no board.
        """
        self._nvml = _load() if nvml is None else nvml
        _check_api(self._nvml)
        self._clock = clock
        self._sleep = sleep
        try:
            self._nvml.nvmlInit()
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            hint = _INIT_HINTS.get(_code(error), "check that nvidia-smi works")
            raise MeterError(f"NVML cannot start: {error}; {hint}") from error
        self._handles = [h for h in map(self._handle, range(count)) if h is not None]
        if not self._handles:
            raise MeterError("NVML works but shows no GPU; check nvidia-smi -L and the container")

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every board in NVML's order, which is by PCI bus id."""
        return tuple(self._info(i, h) for i, h in enumerate(self._handles))

    def capabilities(self) -> tuple[Capability, ...]:
        """Real reads of every sensor; the energy counter must move within 0.3 s."""
        boards = [
            (i, _Board(self._nvml, h)) for i, h in zip(self.devices(), self._handles, strict=True)
        ]
        first = {(i.uuid, s): _probe(i, b, s) for i, b in boards for s in SENSORS}
        self._sleep(_PROBE_S)
        rows: list[Capability] = []
        for info, board in boards:
            for sensor in SENSORS:
                row, value = first[info.uuid, sensor]
                if sensor == "energy" and row.state == "supported":
                    again, later = _probe(info, board, sensor)
                    stuck = f"the counter stood still for {_PROBE_S:g} s"
                    row = replace(again, state="stuck", reason=stuck) if later == value else again
                rows.append(row)
        return tuple(rows)

    def recorder(self, uuids: Sequence[str]) -> NvmlRecorder:
        """A recorder of these boards; a MIG slice is recorded without sensors."""
        infos = self.devices()
        handles = {_plain(i.uuid): h for i, h in zip(infos, self._handles, strict=True)}
        boards: list[tuple[DeviceInfo, _Board | None]] = []
        for info in match_cuda(infos, uuids):
            board = None if info.mig else _Board(self._nvml, handles[_plain(info.uuid)])
            boards.append((info, board))
        return NvmlRecorder(boards, self._clock)

    def _handle(self, index: int) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            _log.warning("NVML device %d is left out: %s", index, error)
            return None

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Answer of an NVML function, or None where the board or the driver has none."""
        function = getattr(self._nvml, name, None)
        try:
            value = function(*arguments) if function else None
        except self._nvml.NVMLError as error:
            _log.debug("%s: %s", name, error)
            return None
        return value.decode() if isinstance(value, bytes) else value

    def _info(self, index: int, handle: Any) -> DeviceInfo:
        ask = self._ask
        pci = ask("nvmlDeviceGetPciInfo", handle)
        bus = getattr(pci, "busId", None)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        mig = (ask("nvmlDeviceGetMigMode", handle) or [0])[0] == 1
        ecc = ask("nvmlDeviceGetEccMode", handle)
        persistence = ask("nvmlDeviceGetPersistenceMode", handle)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        return DeviceInfo(
            uuid=ask("nvmlDeviceGetUUID", handle) or f"NVML-{index}",
            name=ask("nvmlDeviceGetName", handle) or "unknown",
            pci_bus_id=bus.decode() if isinstance(bus, bytes) else bus,
            driver=ask("nvmlSystemGetDriverVersion"),
            power_limit_w=_scaled(ask("nvmlDeviceGetEnforcedPowerLimit", handle), W_PER_MW),
            default_power_limit_w=_scaled(
                ask("nvmlDeviceGetPowerManagementDefaultLimit", handle), W_PER_MW
            ),
            sm_clock_max_hz=_scaled(ask("nvmlDeviceGetMaxClockInfo", handle, _SM), HZ_PER_MHZ),
            memory_bytes=float(memory.total) if memory else system_memory_bytes(),
            unified_memory=memory is None,
            mig=mig,
            mig_uuids=self._slices(handle) if mig else (),
            ecc=None if ecc is None else bool(ecc[0]),
            persistence=None if persistence is None else bool(persistence),
            other_pids=tuple(sorted(p.pid for p in processes if p.pid != os.getpid())),
        )

    def _slices(self, handle: Any) -> tuple[str, ...]:
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        slices = [self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(count)]
        uuids = [self._ask("nvmlDeviceGetUUID", s) for s in slices if s is not None]
        return tuple(u for u in uuids if u)


def visible_devices(infos: Sequence[DeviceInfo], env: Mapping[str, str]) -> tuple[DeviceInfo, ...]:
    """The boards that CUDA will show, in CUDA's order, by ``CUDA_VISIBLE_DEVICES``.

    The rules are those of the CUDA runtime: ordinals, ``GPU-`` UUIDs or unique prefixes of them, or
    MIG ids; the first entry that is invalid ends the list; an entry given twice hides everything. A
    MIG slice comes back with ``mig`` set. Without the variable all boards come in NVML's order;
    where the position matters, use `match_cuda`.

    Args:
        infos: all boards in NVML's order.
        env: environment variables.

    Raises:
        MeterError: ordinals are used, the boards differ and CUDA's order cannot be known.
    """
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(infos)
    entries = [entry.strip() for entry in value.split(",")]
    if any(info.integrated for info in infos):  # the only one, by whatever name CUDA knows it
        return () if entries[0] in ("", "-1", "NoDevFiles") else tuple(infos)
    if entries[0].startswith(("GPU-", "MIG-")):
        kind = entries[0][:4]
        found = [_by_prefix(infos, e) if e.startswith(kind) else None for e in entries]
    else:
        found = [infos[n] if 0 <= n < len(infos) else None for n in map(_ordinal, entries)]
    shown = tuple(found[: found.index(None)] if None in found else found)
    if len({info.uuid for info in shown if info}) < len(shown):
        return ()
    mixed = len({info.name for info in infos}) > 1
    by_bus = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if shown and mixed and not by_bus and not entries[0].startswith(("GPU-", "MIG-")):
        raise MeterError(
            f"CUDA_VISIBLE_DEVICES={value!r} counts in CUDA's order, which NVML does not know for "
            "boards of different kinds; set CUDA_DEVICE_ORDER=PCI_BUS_ID or give GPU- UUIDs"
        )
    return tuple(info for info in shown if info)


def match_cuda(infos: Sequence[DeviceInfo], cuda_ids: Sequence[str]) -> tuple[DeviceInfo, ...]:
    """The boards of these CUDA devices, in the order given, whatever CUDA's own order is.

    Args:
        infos: all boards in NVML's order.
        cuda_ids: per CUDA device its UUID (``GPU-`` and dashes optional), MIG id or PCI bus id.

    Raises:
        MeterError: an id belongs to no board.
    """
    return tuple(_match(infos, cuda_id) for cuda_id in cuda_ids)


def _match(infos: Sequence[DeviceInfo], cuda_id: str) -> DeviceInfo:
    for info in infos:
        if info.integrated or _plain(info.uuid) == _plain(cuda_id):
            return info
        if info.pci_bus_id and ":" in cuda_id and _bus(info.pci_bus_id) == _bus(cuda_id):
            return info
        if _plain(cuda_id) in map(_plain, info.mig_uuids):
            return replace(info, uuid=cuda_id, mig_uuids=())
    if cuda_id.startswith("MIG-"):
        return DeviceInfo(uuid=cuda_id, name="MIG slice", mig=True)
    known = ", ".join(f"{info.uuid} ({info.pci_bus_id})" for info in infos)
    raise MeterError(f"no board with id {cuda_id!r}; NVML shows: {known}")


def _by_prefix(infos: Sequence[DeviceInfo], entry: str) -> DeviceInfo | None:
    if entry.startswith("MIG-"):
        return _match(infos, entry)
    found = [info for info in infos if info.uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None


def _ordinal(entry: str) -> int:
    """Leading integer of ``entry`` as C's strtoul reads it, -1 where there is none."""
    digits = entry[1:] if entry[:1] in ("+", "-") else entry
    length = next((i for i, c in enumerate(digits) if c not in "0123456789"), len(digits))
    if length == 0:
        return -1
    return -int(digits[:length]) if entry.startswith("-") else int(digits[:length])


def _plain(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("gpu-").replace("-", "")


def _bus(bus_id: str) -> tuple[str, ...]:
    """Parts of a PCI bus id without leading zeros: ``00000000:1B:00.0`` equals ``0000:1b:00.0``."""
    parts = bus_id.strip().lower().replace(".", ":").split(":")
    return tuple(part.lstrip("0") for part in parts)


def _scaled(value: object, factor: float) -> float | None:
    return value * factor if isinstance(value, int | float) else None


def _probe(info: DeviceInfo, board: _Board, sensor: str) -> tuple[Capability, float | None]:
    row = Capability(uuid=info.uuid, sensor=sensor, state="supported")
    if info.mig and sensor in ("energy", "instant_power", "average_power"):
        return replace(row, state="not_supported", reason=_MIG_REASON), None
    try:
        value = board.read(sensor)
    except _SensorError as error:
        return replace(row, state=error.state or "not_supported", reason=str(error)), None
    row = replace(row, scope=board.scope(sensor))
    if not plausible(sensor, value):
        return replace(row, state="not_supported", reason=f"answers {value:g}"), None
    return row, value


def _code(error: Exception) -> int:
    return int(getattr(error, "value", 999))


def _sensor_error(error: Exception) -> _SensorError:
    code = _code(error)
    if code in _LOST:
        return _SensorError(str(error), "absent", lost=True)
    if code not in _PERMANENT:
        return _SensorError(f"{error} (NVML code {code})", None)
    states: dict[int, SensorState] = {
        _NO_PERMISSION: "no_permission",
        _FUNCTION_NOT_FOUND: "absent",
    }
    return _SensorError(str(error), states.get(code, "not_supported"))


def _load() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise MeterError("the NVML bindings are not installed; pip install nvidia-ml-py") from error
    return pynvml


def _check_api(nvml: Any) -> None:
    lacking = [name for name in _REQUIRED_API if not hasattr(nvml, name)]
    if lacking:
        raise MeterError(
            f"the module pynvml has no {lacking[0]}, so it is not NVIDIA's; run: "
            "pip uninstall -y pynvml nvidia-ml-py3 && pip install --force-reinstall nvidia-ml-py"
        )
