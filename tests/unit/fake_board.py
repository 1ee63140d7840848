"""Fake hardware: a board of scripted power, clock and pace, whose time passes by waiting only."""

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from energylens.meter.base import (
    AbstractMeter,
    AbstractRecorder,
    Capability,
    DeviceInfo,
)
from energylens.meter.window import DeviceSeries

Curve = Callable[[float], float]
TICK_S, INSTANT_S, STATE_S = 0.1, 0.02, 0.2


class FakeBoard(AbstractRecorder):
    """A board that draws ``busy_w`` while work is queued and ``idle_w`` otherwise.

    Attributes:
        busy_w, clock_hz: watts under load and SM clock at a time.
        pace: slow-down factor of the work at a time.
        reasons: mask of clock event reasons at a time.
        has_counter, has_instant: which energy sensors exist.
    """

    def __init__(
        self,
        uuid: str = "GPU-fake",
        *,
        busy_w: Curve | float = 400.0,
        idle_w: float = 100.0,
        clock_hz: Curve | float = 1.98e9,
        pace: Curve | float = 1.0,
        reasons: Callable[[float], int] = lambda t: 0,
        power_limit_w: float | None = 700.0,
        has_counter: bool = True,
        has_instant: bool = True,
    ) -> None:
        super().__init__()
        self.uuid = uuid
        self.busy_w = busy_w if callable(busy_w) else lambda t: busy_w
        self.idle_w = idle_w
        self.clock_hz = clock_hz if callable(clock_hz) else lambda t: clock_hz
        self.pace = pace if callable(pace) else lambda t: pace
        self.reasons = reasons
        self.power_limit_w = power_limit_w
        self.has_counter, self.has_instant = has_counter, has_instant
        self.time_s = 1000.0
        self.busy_until_s = self.time_s
        self.busy: list[tuple[float, float, float]] = []  # from, to, watts
        self.pauses: list[float] = []
        self._sampled_s = self.time_s
        self._joules = 0.0
        self._energy: list[tuple[float, float]] = []
        self._instant: list[tuple[float, float]] = []
        self._state: list[tuple[float, float, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def now(self) -> float:
        return self.time_s

    def advance(self, to_s: float) -> None:
        self.time_s = max(self.time_s, to_s)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.advance(self.time_s + seconds)

    def queue(self, seconds: float, watts: float | None = None) -> float:
        """Keep the board busy for ``seconds`` more; returns when that is done."""
        start = max(self.time_s, self.busy_until_s)
        self.busy_until_s = start + seconds * self.pace(start)
        self.busy.append((start, self.busy_until_s, self.busy_w(start) if watts is None else watts))
        return self.busy_until_s

    def _power(self, t: float) -> float:
        for start, end, watts in reversed(self.busy):
            if start <= t < end:
                return watts
            if end <= t:
                break
        return self.idle_w

    def _sample(self) -> None:
        """Sensors up to now, on a grid of one INSTANT_S."""
        while self._sampled_s + INSTANT_S <= self.time_s:
            self._sampled_s = round(self._sampled_s + INSTANT_S, 6)
            t = self._sampled_s
            watts = self._power(t - INSTANT_S / 2)
            self._joules += watts * INSTANT_S
            self._instant.append((t, watts))
            if _on_grid(t, TICK_S):
                self._energy.append((t, self._joules))
            if _on_grid(t, STATE_S):
                self._state.append((t, self.clock_hz(t), self.reasons(t)))

    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        assert uuid == self.uuid
        self._sample()

        def cut(samples: Sequence[tuple]) -> tuple:
            return tuple(s for s in samples if start_s <= s[0] <= end_s)

        state = cut(self._state)
        return DeviceSeries(
            uuid=uuid,
            energy=cut(self._energy) if self.has_counter else (),
            instant_power=cut(self._instant) if self.has_instant else (),
            sm_clock=tuple((t, clock) for t, clock, _ in state),
            temperature=tuple((t, 50.0) for t, _, _ in state),
            reasons=tuple((t, mask) for t, _, mask in state),
            power_limit_w=self.power_limit_w,
            sm_clock_max_hz=1.98e9,
        )


def _on_grid(t: float, period: float) -> bool:
    return abs(t / period - round(t / period)) < 1e-6


class FakeWork:
    """``executions`` per replay, ``seconds`` each, at ``watts`` (by default the board's own)."""

    def __init__(
        self,
        board: FakeBoard,
        seconds: float,
        *,
        executions: int = 10,
        watts: float | None = None,
    ) -> None:
        self.board, self.seconds, self.executions, self.watts = board, seconds, executions, watts
        self.footprint_bytes = 1e6
        self.closed = False
        self.queued = 0

    def enqueue(self, replays: int) -> object:
        self.queued += replays
        return self.board.queue(replays * self.executions * self.seconds, self.watts)

    def wait(self, token: object) -> None:
        assert isinstance(token, float)
        self.board.advance(token)

    def close(self) -> None:
        self.closed = True


class FakeMeter(AbstractMeter):
    """A machine with these boards."""

    def __init__(self, *boards: FakeBoard, name: str = "NVIDIA H200") -> None:
        self.boards, self.name = boards, name

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(
                uuid=b.uuid,
                name=self.name,
                driver="580.159",
                power_limit_w=b.power_limit_w,
                sm_clock_max_hz=1.98e9,
            )
            for b in self.boards
        )

    def capabilities(self) -> tuple[Capability, ...]:
        return tuple(
            Capability(uuid=b.uuid, sensor="energy", state="supported") for b in self.boards
        )

    def recorder(self, uuids: Sequence[str]) -> AbstractRecorder:
        (board,) = (b for b in self.boards if b.uuid in uuids)
        return board
