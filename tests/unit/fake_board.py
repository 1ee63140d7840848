"""Fake hardware: a board of scripted power, clock and pace, whose time passes by waiting only."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from energylens.bench.trial import AnchorLoad, HostPoint, MixPoint
from energylens.graph import Op, make_op
from energylens.meter.base import (
    AbstractMeter,
    AbstractRecorder,
    Capability,
    DeviceInfo,
    SensorState,
)
from energylens.meter.window import DeviceSeries
from energylens.results import HostAnchor
from energylens.spec.model import Spec
from energylens.spec.system import Mode

Curve = Callable[[float], float]
TICK_S, INSTANT_S, STATE_S = 0.1, 0.02, 0.2


class FakeClock:
    """Time of all boards that share it."""

    def __init__(self) -> None:
        self.time_s = 1000.0


class FakeBoard(AbstractRecorder):
    """A board that draws ``busy_w`` while work is queued and ``idle_w`` otherwise.

    Attributes:
        busy_w, clock_hz: watts under load and SM clock at a time.
        pace: slow-down factor of the work at a time.
        reasons: mask of clock event reasons at a time.
        has_counter, has_instant: which energy sensors exist.
        counter_gain: what the counter shows of each joule.
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
        counter_gain: float = 1.0,
        clock: FakeClock | None = None,
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
        self.counter_gain = counter_gain
        self.clock = clock or FakeClock()
        self.busy_until_s = self.time_s
        self.lost_s: float | None = None
        self.busy: list[tuple[float, float, float]] = []  # from, to, watts
        self.pauses: list[float] = []
        self._sampled_s = self.time_s
        self._joules = 0.0
        self._energy: list[tuple[float, float]] = []
        self._instant: list[tuple[float, float]] = []
        self._state: list[tuple[float, float, int]] = []

    @property
    def time_s(self) -> float:
        return self.clock.time_s

    def now(self) -> float:
        return self.time_s

    def advance(self, to_s: float) -> None:
        self.clock.time_s = max(self.time_s, to_s)

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
            self._joules += watts * INSTANT_S * self.counter_gain
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
            lost_s=self.lost_s if self.lost_s is not None and self.lost_s <= self.time_s else None,
        )


def _on_grid(t: float, period: float) -> bool:
    return abs(t / period - round(t / period)) < 1e-6


class FakeWork:
    """``executions`` per replay, ``seconds`` each, at ``watts`` (by default each board's own)."""

    def __init__(
        self,
        *boards: FakeBoard,
        seconds: float,
        executions: int = 10,
        watts: float | None = None,
    ) -> None:
        self.boards, self.seconds, self.executions, self.watts = boards, seconds, executions, watts
        self.footprint_bytes = 1e6
        self.closed = False

    def enqueue(self, replays: int) -> object:
        seconds = replays * self.executions * self.seconds
        return max(board.queue(seconds, self.watts) for board in self.boards)

    def wait(self, token: object) -> None:
        assert isinstance(token, float)
        self.boards[0].advance(token)

    def close(self) -> None:
        self.closed = True


class FakeNode(AbstractRecorder):
    """Recorder of several boards that share a clock."""

    def __init__(self, boards: Sequence[FakeBoard]) -> None:
        super().__init__()
        self.boards = {b.uuid: b for b in boards}

    def now(self) -> float:
        return next(iter(self.boards.values())).now()

    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        return self.boards[uuid].series(uuid, start_s, end_s)


class FakeMeter(AbstractMeter):
    """A machine with these boards."""

    def __init__(
        self,
        *boards: FakeBoard,
        name: str = "NVIDIA H200",
        state: SensorState = "supported",
        mig: bool = False,
        other_pids: tuple[int, ...] = (),
    ) -> None:
        self.boards, self.name, self.state = boards, name, state
        self.mig, self.other_pids = mig, other_pids

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(
                uuid=b.uuid,
                name=self.name,
                driver="580.159",
                power_limit_w=b.power_limit_w,
                default_power_limit_w=700.0,
                sm_clock_max_hz=1.98e9,
                mig=self.mig,
                other_pids=self.other_pids,
            )
            for b in self.boards
        )

    def capabilities(self) -> tuple[Capability, ...]:
        reason = None if self.state == "supported" else "Not Supported"
        return tuple(
            Capability(uuid=b.uuid, sensor="energy", state=self.state, reason=reason)
            for b in self.boards
        )

    def recorder(self, uuids: Sequence[str]) -> AbstractRecorder:
        return FakeNode([b for b in self.boards if b.uuid in uuids])


class FakeProvider:
    """Runs every op in 1 ms; ``before`` is called with each op first, and may raise."""

    name = "torch"

    def __init__(self, board: FakeBoard, before: Callable[[Op], None] = lambda op: None) -> None:
        self.board, self.before = board, before
        self.ran: list[Op] = []
        self.works: list[FakeWork] = []

    def _work(self, seconds: float, watts: float | None) -> FakeWork:
        self.works.append(FakeWork(self.board, seconds=seconds, executions=1, watts=watts))
        return self.works[-1]

    def uuid(self) -> str:
        return self.board.uuid

    def work(self, op: Op) -> FakeWork:
        self.before(op)
        self.ran.append(op)
        return self._work(1e-3, None)

    def mix_points(self, specs: Sequence[Spec], tps: Sequence[int]) -> Sequence[MixPoint]:
        op = make_op("gemm", m=1, n=64, k=64, count=3)
        return [
            MixPoint(
                label=f"{spec.name} tp{tp}",
                ops=(op,),
                mode=Mode.CUDA_GRAPH,
                build=lambda: self._work(4e-3, None),
            )
            for spec in specs
            for tp in tps
        ]

    def host_points(self, specs: Sequence[Spec]) -> Iterator[HostPoint]:
        op = make_op("hf_add", rows=1, width=64, count=100)
        for spec in specs:
            start = self.board.now()
            self.board.advance(self.board.queue(1.0, 140.0))
            yield HostPoint(
                label=f"{spec.name} eager",
                ops=(op,),
                step_s=2e-3,
                spread=0.05,
                start_s=start,
                end_s=self.board.now(),
            )

    def host_anchor(self) -> HostAnchor:
        return HostAnchor(launch_us=3.0, module_us=40.0, cpu="fake cpu")

    def launching(self, seconds: float) -> None:
        self.board.advance(self.board.queue(seconds, 130.0))

    def anchor_work(self, name: str) -> AnchorLoad:
        seconds, watts, flops, moved = {
            "stream": (5e-4, 640.0, 0.0, 2e9),
            "gemm": (1e-3, 690.0, 6.5e11, 4e8),
            "gemv": (5e-5, 600.0, 2e8, 2e8),
        }[name]
        return AnchorLoad(work=self._work(seconds, watts), flops=flops, bytes=moved)

    def versions(self) -> Mapping[str, str]:
        return {"torch": "2.11"}
