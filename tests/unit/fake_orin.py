"""An Orin Nano whose rails follow a fake board's load; time passes by waiting only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fake_board import FakeBoard, FakeClock
from helpers_jetson import FakeJtop, orin_nano
from helpers_nvml import Clock

from energylens.meter.jetson import JetsonMeter, JetsonRecorder

POLL_S = 0.5


class PolledClock(FakeClock):
    """Calls a hook at each half second that passes."""

    def __init__(self) -> None:
        self._now_s = self._polled_s = 1000.0
        self.hook: Callable[[float], None] = lambda t: None

    def now(self) -> float:
        return self._now_s

    @property
    def time_s(self) -> float:
        return self._now_s

    @time_s.setter
    def time_s(self, value: float) -> None:
        while self._polled_s + POLL_S <= value:
            self._polled_s += POLL_S
            self._now_s = self._polled_s
            self.hook(self._polled_s)
        self._now_s = value


class PolledMeter(JetsonMeter):
    """The meter of a tree; its recorder is polled by the clock instead of by a thread."""

    def recorder(self, uuids: Sequence[str]) -> JetsonRecorder:
        recorder = super().recorder(uuids)
        recorder.start = recorder._source.open  # type: ignore[method-assign]
        clock = self._clock.__self__  # type: ignore[attr-defined]
        before = clock.hook

        def hook(t: float) -> None:
            before(t)
            recorder.poll()

        clock.hook = hook
        return recorder


class FakeOrin:
    """The files of an Orin Nano in 15 W mode, and the board whose work moves its rails."""

    def __init__(self, root: Path) -> None:
        self.tree = orin_nano(root)
        self.clock = PolledClock()
        self.board = FakeBoard("whatever CUDA says", clock=self.clock, busy_w=10.0, idle_w=4.0)

    def _draw(self, t: float) -> None:
        watts = self.board._power(t - POLL_S / 2)
        self.tree.set("VDD_IN", 1000 * watts)
        self.tree.set("VDD_CPU_GPU_CV", 1000 * (watts - 3.0))

    def meter(self) -> PolledMeter:
        """The meter of its files, at whose side no jtop runs."""
        self.clock.hook = self._draw
        jtop = FakeJtop({}, clock=Clock(), error="The jtop.service is not active. Please run:")
        return PolledMeter(self.tree.root, jtop=jtop, clock=self.clock.now)
