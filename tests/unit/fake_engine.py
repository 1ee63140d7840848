"""A machine without hardware for runs of the profiler: boards that draw what is queued on them."""

from __future__ import annotations

import gzip
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from helpers_nvml import Clock, FakeBoard, FakeNvml
from made_trace import BASE_NS, START_US, MadeTrace

from energylens.measured import MemoryProfile
from energylens.meter.base import AbstractMeter, DeviceInfo
from energylens.meter.nvml import NvmlMeter, NvmlRecorder, match_cuda
from energylens.profiler.options import ProfileRequest
from energylens.profiler.session import Clock as SessionClock
from energylens.profiler.session import Session, Solo
from energylens.spec.load import load_spec
from energylens.spec.model import Spec

POLL_S = 0.0031


class Load:
    """Power of a board: ``idle_w``, and ``busy_w`` (of the time) while a step runs."""

    def __init__(self, idle_w: float, busy_w: Callable[[float], float] | float) -> None:
        self.idle_w = idle_w
        self.busy_w = busy_w if callable(busy_w) else lambda t: busy_w
        self.busy: list[tuple[float, float]] = []
        self._whole = [0.0]  # joules above idle of the intervals before each

    def add(self, start_s: float, end_s: float) -> None:
        watts = self.busy_w(start_s) - self.idle_w
        self._whole.append(self._whole[-1] + watts * (end_s - start_s))
        self.busy.append((start_s, end_s))

    def at(self, t: float) -> float:
        last = bisect_right(self.busy, t, key=itemgetter(0)) - 1
        return self.busy_w(t) if last >= 0 and t < self.busy[last][1] else self.idle_w

    def energy(self, start_s: float, end_s: float) -> float:
        return self._until(end_s) - self._until(start_s)

    def _until(self, t: float) -> float:
        last = bisect_right(self.busy, t, key=itemgetter(0)) - 1
        if last < 0:
            return self.idle_w * t
        a, b = self.busy[last]
        return (
            self.idle_w * t + self._whole[last] + (self.busy_w(a) - self.idle_w) * (min(b, t) - a)
        )


class Time(Clock):
    """A scripted clock that lets recorders look while it passes."""

    recorder: NvmlRecorder | None = None
    due_s = 1000.0

    def sleep(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.due_s <= end_s:
            self.now_s = max(self.now_s, self.due_s)
            if self.recorder is not None:
                self.recorder.poll()
            self.due_s += POLL_S
        self.now_s = max(self.now_s, end_s)


class _Polled(NvmlRecorder):
    """Samples when the scripted time passes, not in a thread."""

    def start(self) -> None:
        self._clock.recorder = self  # type: ignore[attr-defined]
        self.poll()

    def stop(self) -> None:
        self._clock.recorder = None  # type: ignore[attr-defined]


class _PolledMeter(NvmlMeter):
    def recorder(self, uuids: Sequence[str]) -> NvmlRecorder:
        made = super().recorder(uuids)
        made.__class__ = _Polled
        return made


class Machine:
    """Boards, the clock, and a meter factory for a `Session`."""

    def __init__(self, *boards: FakeBoard) -> None:
        self.clock = Time()
        self.boards = boards
        self.nvml = FakeNvml(*boards, clock=self.clock)

    def meter(self, uuids: Sequence[str]) -> tuple[AbstractMeter, Sequence[DeviceInfo]]:
        meter = _PolledMeter(self.nvml, clock=self.clock, sleep=self.clock.sleep)
        return meter, match_cuda(meter.devices(), uuids)


class FakeEngine:
    """Steps that take ``step_s(number)`` on the device and ``launch_s`` on the host."""

    name = "hf"

    def __init__(
        self,
        machine: Machine,
        *,
        uuids: Sequence[str] | None = None,
        step_s: Callable[[int], float] = lambda i: 0.02,
        launch_s: float = 0.001,
        on_step: Callable[[int], None] = lambda i: None,
    ) -> None:
        self.machine, self.step_s, self.launch_s = machine, step_s, launch_s
        self.uuids = tuple(b.uuid for b in machine.boards) if uuids is None else tuple(uuids)
        self.on_step = on_step
        self.modes = {"prefill": "eager", "decode": "eager", "request": "eager"}
        self.notes: list[str] = []
        self.busy_until_s = 0.0
        self.steps = 0

    def version(self) -> str:
        return "5.17.0"

    def precision(self) -> str:
        return "bf16"

    def spec(self) -> Spec | None:
        return load_spec("llama3_2_1b")

    def boards(self) -> Sequence[str]:
        return self.uuids

    def device_name(self) -> str:
        return "a processor"

    def facts(self) -> Mapping[str, Any]:
        return {"torch": "2.11.0"}

    def sizes(self) -> MemoryProfile:
        return MemoryProfile(weights_bytes=2.5e9, model_bytes=2.5e9, cache_bytes=33554432.0)

    def peak_bytes(self) -> float | None:
        return 3e9 + self.steps

    @contextmanager
    def stepper(self, phase: str) -> Iterator[FakeEngine]:
        self.phase, self.begin = phase, self.steps
        yield self

    def trace(self, phase: str, path: Path) -> None:
        """Two steps of two kernels, launched now."""
        made = MadeTrace()
        for step in range(2):
            start = 100.0 * step
            made.span("user_annotation", f"energylens::{phase}", start, 90.0)
            made.span("user_annotation", "energylens::norm", start + 1, 20.0)
            made.launch("vectorized_elementwise", start + 2, 4.0)
            made.span("user_annotation", "energylens::gemm", start + 40, 20.0)
            made.launch("nvjet_a", start + 42, 12.0)
        now_ns = time.time_ns() - int(START_US * 1000)
        text = made.text().replace(str(BASE_NS), str(now_ns))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))

    queued = True

    def step(self) -> None:
        self.on_step(self.steps)
        clock = self.machine.clock
        clock.sleep(self.launch_s)
        start_s = max(clock.now_s, self.busy_until_s)
        self.busy_until_s = start_s + self.step_s(self.steps)
        for board in self.machine.boards:
            if board.uuid in self.uuids and isinstance(board.power, Load):
                board.power.add(start_s, self.busy_until_s)
        self.steps += 1

    def mark(self) -> Any:
        return self.busy_until_s

    def wait(self, mark: Any) -> None:
        self.machine.clock.sleep(mark - self.machine.clock.now_s)

    def seconds(self, first: Any, second: Any) -> float:
        return float(second - first)

    def context_len(self, first: int, count: int) -> float | None:
        return 1025.0 if self.phase == "decode" else None


def gpu(number: int = 0, power: Any = None, **fields: Any) -> FakeBoard:
    return FakeBoard(
        uuid=f"GPU-{number}{number}{number}{number}0000-1111-4222-8333-444444444444",
        bus=f"00000000:{number + 1}B:00.0",
        power=power or Load(120.0, 600.0),
        **fields,
    )


def session(engine: FakeEngine, request: ProfileRequest, **fields: Any) -> Session:
    clock = engine.machine.clock
    return Session(
        request=request,
        engine=engine,
        clock=SessionClock(now=clock, sleep=clock.sleep),
        **{"team": Solo(), "meters": (engine.machine.meter,)} | fields,
    )
