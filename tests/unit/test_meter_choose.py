"""The meter is chosen by what answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import helpers_jetson as fake
import helpers_nvml
import pytest
from helpers_jetson import FakeJtop, Tree, orin_nano
from helpers_nvml import Clock, FakeBoard, FakeNvml

from energylens.errors import MeterError
from energylens.meter.base import AbstractMeter
from energylens.meter.choose import choose_meter, gives_energy
from energylens.meter.jetson import JetsonMeter
from energylens.meter.nvml import NvmlMeter


def no_jtop(root: Path) -> JetsonMeter:
    return JetsonMeter(root, jtop=FakeJtop({}, clock=Clock(), error="not active"))


def nvml(board: FakeBoard | None = None, init_error: int | None = None) -> Callable[[], NvmlMeter]:
    clock = Clock()
    module = FakeNvml(board or FakeBoard(), clock=clock, init_error=init_error)
    return lambda: NvmlMeter(module, clock=clock, sleep=clock.sleep)


def orin_in_nvml() -> FakeBoard:
    """What NVML shows on a Jetson: it starts, there is a board, and no reading is supported."""
    calls = (helpers_nvml.COUNTER, helpers_nvml.INSTANT, helpers_nvml.AVERAGE, helpers_nvml.PLAIN)
    return FakeBoard(name="Orin (nvgpu)", errors=dict.fromkeys(calls, helpers_nvml.NOT_SUPPORTED))


@pytest.fixture
def choose(tmp_path: Path) -> Callable[..., AbstractMeter]:
    return partial(choose_meter, root=tmp_path, open_jetson=no_jtop)


def test_a_server_is_measured_by_nvml(choose: Callable[..., AbstractMeter]) -> None:
    assert isinstance(choose(open_nvml=nvml()), NvmlMeter)


@pytest.mark.parametrize("says_tegra", [True, False])
def test_b46_rails_are_used_where_nvml_starts_but_supports_no_reading(
    choose: Callable[..., AbstractMeter], tmp_path: Path, says_tegra: bool
) -> None:
    tree = orin_nano(tmp_path)
    if not says_tegra:  # a container that hides what it runs on
        (tree.root / "etc/nv_tegra_release").unlink()
        (tree.root / "proc/device-tree/model").unlink()
    meter = choose(open_nvml=nvml(orin_in_nvml()))
    assert isinstance(meter, JetsonMeter)
    assert gives_energy(meter)


def test_rails_come_first_on_a_jetson_even_where_nvml_answers(
    choose: Callable[..., AbstractMeter], tmp_path: Path
) -> None:
    orin_nano(tmp_path)
    assert isinstance(choose(open_nvml=nvml()), JetsonMeter)


def test_a_jetson_without_rails_may_have_a_board_of_its_own(
    choose: Callable[..., AbstractMeter], tmp_path: Path
) -> None:
    Tree(tmp_path, model="NVIDIA IGX Orin Developer Kit")
    assert isinstance(choose(open_nvml=nvml()), NvmlMeter)


@pytest.mark.parametrize(
    "open_nvml", [nvml(orin_in_nvml()), nvml(init_error=helpers_nvml.LIBRARY_NOT_FOUND)]
)
def test_a_jetson_where_nothing_answers_says_why_the_rails_do_not(
    choose: Callable[..., AbstractMeter], tmp_path: Path, open_nvml: Callable[[], NvmlMeter]
) -> None:
    Tree(tmp_path)
    with pytest.raises(MeterError, match=r"no power rail answers: jtop: not active.*sysfs shows"):
        choose(open_nvml=open_nvml)


def test_a_server_without_a_driver_says_what_nvml_says(
    choose: Callable[..., AbstractMeter],
) -> None:
    with pytest.raises(MeterError, match=r"^NVML cannot start.*install the NVIDIA driver"):
        choose(open_nvml=nvml(init_error=helpers_nvml.LIBRARY_NOT_FOUND))


def test_rails_stand_in_where_nvml_is_not_there(
    choose: Callable[..., AbstractMeter], tmp_path: Path
) -> None:
    Tree(tmp_path, model=None, release=None).ina3221(fake.ORIN_NANO)
    meter = choose(open_nvml=nvml(init_error=helpers_nvml.LIBRARY_NOT_FOUND))
    assert meter.devices()[0].name == "Jetson (Orin Nano, Orin NX, Xavier NX)"


def test_a_server_without_energy_keeps_nvml_whatever_else_it_meters(
    choose: Callable[..., AbstractMeter], tmp_path: Path
) -> None:
    Tree(tmp_path, model=None, release=None).ina3221({"12V_MAIN": 30_000.0})
    meter = choose(open_nvml=nvml(orin_in_nvml()))
    assert isinstance(meter, NvmlMeter)
    assert not gives_energy(meter)
