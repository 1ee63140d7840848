"""Profiling on a Jetson: long windows, module energy, rails by role; on replayed rails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_board import FakeBoard
from fake_orin import FakeOrin

from energylens.measured import MemoryProfile
from energylens.meter.base import AbstractMeter, DeviceInfo
from energylens.meter.nvml import match_cuda
from energylens.profiler.options import ProfileRequest
from energylens.profiler.session import METERS, Clock, Session, Solo
from energylens.spec.model import Spec

STEP_S = 0.25


class Steps:
    """Steps of a quarter of a second on a fake board."""

    queued = True

    def __init__(self, board: FakeBoard) -> None:
        self.board = board

    def step(self) -> None:
        self.board.queue(STEP_S)

    def mark(self) -> float:
        return self.board.busy_until_s

    def wait(self, mark: float) -> None:
        self.board.advance(mark)

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def context_len(self, first: int, count: int) -> float | None:
        return None


class Model:
    """An engine whose steps all take the same."""

    name = "hf"

    def __init__(self, board: FakeBoard) -> None:
        self.board = board
        self.modes = {"prefill": "eager"}
        self.notes: list[str] = []

    def version(self) -> str:
        return "5.17"

    def precision(self) -> str:
        return "bf16"

    def spec(self) -> Spec | None:
        return None

    def boards(self) -> Sequence[str]:
        return ["GPU-5aa1c0de-whatever-cuda-says"]

    def device_name(self) -> str:
        return "Orin"

    def facts(self) -> Mapping[str, Any]:
        return {}

    def sizes(self) -> MemoryProfile:
        return MemoryProfile()

    def peak_bytes(self) -> float | None:
        return None

    @contextmanager
    def stepper(self, phase: str) -> Iterator[Steps]:
        yield Steps(self.board)


class Told:
    """A `Progress` that remembers its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, text: str) -> None: ...

    def share(self, share: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., Any]:
    orin = FakeOrin(tmp_path / "board")

    def meter_of(uuids: Sequence[str]) -> tuple[AbstractMeter, Sequence[DeviceInfo]]:
        meter = orin.meter()
        return meter, match_cuda(meter.devices(), uuids)

    def run(told: Told | None = None, **changes: Any) -> Any:
        if "mode" in changes:
            orin.tree.power_mode(1, ("15W", changes["mode"]))
        session = Session(
            request=ProfileRequest(model="x", phases=("prefill",), energy=True),
            engine=Model(orin.board),
            team=Solo(),
            clock=Clock(now=orin.clock.now, sleep=orin.board.sleep),
            meters=[meter_of],
            progress=told or Told(),
        )
        return session.measure()

    return run


def test_energy_is_that_of_the_module_over_half_a_minute(profile: Callable[..., Any]) -> None:
    found = profile()
    phase = found.phases["prefill"]
    assert found.energy_reason is None
    assert phase.valid
    assert phase.n >= 30 / STEP_S
    assert phase.latency.mean == pytest.approx(STEP_S)
    assert phase.energy_j == pytest.approx(10.0 * STEP_S, rel=2e-3)
    assert phase.net_energy_j == pytest.approx((10.0 - 4.0) * STEP_S, rel=5e-3)
    (facts,) = found.meter["phases"]["prefill"]
    assert facts["scope"] == "module"
    assert facts["method"] == "trapezoid_instant"
    assert 30 <= facts["window_s"] < 32
    assert facts["energy_rel_error"] == pytest.approx(0.04 / 10, rel=0.1)  # its resolution


def test_the_record_holds_every_role_and_tells_shared_rails_apart(
    profile: Callable[..., Any],
) -> None:
    meter = profile().meter
    (facts,) = meter["phases"]["prefill"]
    watts = {role: one["mean_power_w"] for role, one in facts["rails"].items()}
    assert watts["total"] == pytest.approx(10.0, rel=2e-3)
    assert watts["gpu"] == watts["cpu"] == pytest.approx(7.0, rel=2e-3)
    assert facts["rails"]["gpu"]["scope"] == "gpu_shared_rail"
    assert watts["memory"] is None
    assert "no rail of this board measures the memory" in facts["rails"]["memory"]["reason"]
    assert meter["rails"]["gpu"]["shared_with"] == ("cpu", "cv")
    assert (meter["power_mode"], meter["power_scope"]) == ("15W", "module")
    assert meter["clocks_hz"]["gpu_max"] == 612e6


@pytest.mark.parametrize(
    ("mode", "device"), [("25W", "jetson_orin_nano@25W"), ("7W", None), ("15W", "jetson_orin_nano")]
)
def test_the_device_of_the_record_is_that_of_the_power_mode(
    profile: Callable[..., Any], mode: str, device: str | None
) -> None:
    assert profile(mode=mode).device == device


def test_whoever_profiles_reads_that_jetsons_are_replayed(profile: Callable[..., Any]) -> None:
    told = Told()
    profile(told)
    assert sum("not run on hardware" in note for note in told.notes) == 1


def test_the_meter_of_a_profile_is_the_one_that_the_machine_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meter = FakeOrin(tmp_path).meter()
    monkeypatch.setattr("energylens.meter.choose.choose_meter", lambda: meter)
    (factory,) = METERS
    chosen, infos = factory(["GPU-5aa1c0de"])
    assert chosen is meter
    assert [info.name for info in infos] == ["NVIDIA Jetson Orin Nano Developer Kit"]
