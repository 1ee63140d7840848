"""A stand-in for NVIDIA's pynvml module: boards with scripted power on a scripted clock.

It follows the vendor's documented behaviour: nothing works before ``nvmlInit``, the energy counter
counts millijoules and moves once per tick, the plain power call is a one-second average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 1, 3, 4, 6
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 9, 12, 13, 15, 999
COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
INSTANT, AVERAGE, PLAIN = "field186", "field185", "nvmlDeviceGetPowerUsage"


class NVMLError(Exception):
    """As in pynvml: the code is in ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        names = {
            UNINITIALIZED: "Uninitialized",
            NOT_SUPPORTED: "Not Supported",
            NO_PERMISSION: "Insufficient Permissions",
            NOT_FOUND: "Not Found",
            DRIVER_NOT_LOADED: "Driver Not Loaded",
            LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
            GPU_IS_LOST: "GPU is lost",
        }
        return names.get(self.value, "Unknown Error")


class Clock:
    """Seconds that pass only on demand."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Steps:
    """Power that jumps: ``Steps(100, (3.0, 700))`` is 100 W, and 700 W from 3 s on."""

    def __init__(self, first_w: float, *jumps: tuple[float, float]) -> None:
        self.jumps = [(-math.inf, first_w), *jumps]

    def at(self, t: float) -> float:
        return next(w for start, w in reversed(self.jumps) if start <= t)

    def energy(self, start_s: float, end_s: float) -> float:
        """Exact integral in joules."""
        total = 0.0
        ends = [start for start, _ in self.jumps[1:]] + [math.inf]
        for (begin, watts), end in zip(self.jumps, ends, strict=True):
            total += watts * max(0.0, min(end, end_s) - max(begin, start_s))
        return total


def square(low_w: float, high_w: float, period_s: float, duty: float, phase_s: float) -> Steps:
    """Square wave of 30 s around 1000 s."""
    count = int(30 / period_s) + 2
    starts = [985 + phase_s + i * period_s for i in range(count)]
    jumps = [(s + dt, w) for s in starts for dt, w in ((0.0, high_w), (duty * period_s, low_w))]
    return Steps(low_w, *jumps)


@dataclass
class FakeBoard:
    """One board.

    Attributes:
        errors: call name (``field186``, with ``.0`` or ``.1`` for one scope) -> NVML code, or a
            function of the time that returns a code or None.
        gain: of the energy counter. tick_s, phase_s: when the counter moves.
    """

    uuid: str = "GPU-8d2c1a7e-0000-4000-8000-000000000000"
    name: str = "NVIDIA H200"
    bus: str = "00000000:1B:00.0"
    power: Steps = field(default_factory=lambda: Steps(300.0))
    tick_s: float = 0.1
    phase_s: float = 0.0
    gain: float = 1.0
    born_s: float = 900.0
    reset_s: float = math.inf
    limit_w: float = 700.0
    sm_mhz: Callable[[float], int] = lambda t: 1980
    reasons: Callable[[float], int] = lambda t: 0
    temperature_c: Callable[[float], int] = lambda t: 45
    mig_slices: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    errors: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)

    def millijoules(self, t: float) -> int:
        tick = self.phase_s + math.floor((t - self.phase_s) / self.tick_s + 1e-9) * self.tick_s
        start = self.reset_s if t >= self.reset_s else self.born_s
        return int(self.gain * self.power.energy(start, max(tick, start)) * 1000)


class FakeNvml:
    """The module object. ``calls`` counts every function by name."""

    NVMLError = NVMLError

    def __init__(
        self,
        *boards: FakeBoard,
        clock: Callable[[], float] | None = None,
        init_error: int | None = None,
    ) -> None:
        self.boards = boards or (FakeBoard(),)
        self.clock = clock or Clock()
        self.init_error = init_error
        self.ready = False
        self.calls: dict[str, int] = {}

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.ready = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check()
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeBoard:  # noqa: N802
        self._check()
        return self.boards[index]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159"

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self, board: FakeBoard, fields: Sequence[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        return [self._field(board, number, scope) for number, scope in fields]

    def _field(self, board: FakeBoard, number: int, scope: int) -> SimpleNamespace:
        watts = board.power.at(self.clock()) if number == 186 else self._average(board)
        code = 0 if scope == 0 else NOT_SUPPORTED
        for name in (f"field{number}", f"field{number}.{scope}"):
            self.calls[name] = self.calls.get(name, 0) + 1
            code = self._code(board, name, code)
        answer = board.answers.get(f"field{number}", int(watts * 1000))
        value = SimpleNamespace(uiVal=answer, ullVal=None)
        return SimpleNamespace(nvmlReturn=code, valueType=1, value=value)

    def _average(self, board: FakeBoard) -> float:
        now = self.clock()
        return board.power.energy(now - 1, now)

    def _check(self) -> None:
        if not self.ready:
            raise NVMLError(UNINITIALIZED)

    def _code(self, board: FakeBoard, name: str, otherwise: int) -> int:
        error = board.errors.get("*", board.errors.get(name, otherwise))
        return (error(self.clock()) or otherwise) if callable(error) else error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _ANSWERS:
            raise AttributeError(name)

        def call(handle: Any, *arguments: Any) -> Any:
            self._check()
            self.calls[name] = self.calls.get(name, 0) + 1
            if isinstance(handle, str):
                return handle if name == "nvmlDeviceGetUUID" else None
            code = self._code(handle, name, 0)
            if code:
                raise NVMLError(code)
            if name in handle.answers:
                return handle.answers[name]
            return _ANSWERS[name](self, handle, *arguments)

        return call


def _mig_handle(nvml: FakeNvml, board: FakeBoard, index: int) -> str:
    if index >= len(board.mig_slices):
        raise NVMLError(NOT_FOUND)
    return board.mig_slices[index]


_ANSWERS: dict[str, Callable[..., Any]] = {
    COUNTER: lambda n, b: b.millijoules(n.clock()),
    PLAIN: lambda n, b: int(n._average(b) * 1000),
    "nvmlDeviceGetClockInfo": lambda n, b, kind: b.sm_mhz(n.clock()) if kind == 1 else 3201,
    "nvmlDeviceGetMaxClockInfo": lambda n, b, kind: 1980,
    "nvmlDeviceGetTemperature": lambda n, b, kind: b.temperature_c(n.clock()),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda n, b: b.reasons(n.clock()),
    "nvmlDeviceGetUUID": lambda n, b: b.uuid,
    "nvmlDeviceGetName": lambda n, b: b.name,
    "nvmlDeviceGetPciInfo": lambda n, b: SimpleNamespace(busId=b.bus.encode()),
    "nvmlDeviceGetEnforcedPowerLimit": lambda n, b: int(b.limit_w * 1000),
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda n, b: 700_000,
    "nvmlDeviceGetMemoryInfo": lambda n, b: SimpleNamespace(total=150_754_820_096),
    "nvmlDeviceGetMigMode": lambda n, b: [int(bool(b.mig_slices)), 0],
    "nvmlDeviceGetMaxMigDeviceCount": lambda n, b: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _mig_handle,
    "nvmlDeviceGetEccMode": lambda n, b: [1, 1],
    "nvmlDeviceGetPersistenceMode": lambda n, b: 1,
    "nvmlDeviceGetComputeRunningProcesses": lambda n, b: [SimpleNamespace(pid=p) for p in b.pids],
}
