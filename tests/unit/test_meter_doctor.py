"""The diagnosis of a machine: values and hints, never an exception."""

from __future__ import annotations

import subprocess
import sys

import helpers_nvml as fake
import pytest
from helpers_nvml import Clock, FakeBoard, FakeNvml

from energylens.meter.doctor import Diagnosis, diagnose
from energylens.meter.nvml import NvmlMeter


@pytest.fixture
def look(tmp_path):
    def run(
        *boards: FakeBoard, env: dict | None = None, init_error: int | None = None
    ) -> Diagnosis:
        clock = Clock()
        nvml = FakeNvml(*boards, clock=clock, init_error=init_error)
        return diagnose(
            env or {},
            tegra_release=tmp_path / "nv_tegra_release",
            device_tree=tmp_path / "model",
            open_meter=lambda: NvmlMeter(nvml, clock=clock, sleep=clock.sleep),
        )

    return run


def test_a_healthy_board_needs_nothing(look):
    seen = look(FakeBoard())
    assert seen.nvml_error is None
    assert {c.state for c in seen.capabilities} == {"supported"}
    assert seen.visible == (FakeBoard().uuid,)
    assert not any(FakeBoard().uuid in hint for hint in seen.hints)
    assert seen.tegra is None
    assert dict(seen.libraries).keys() >= {"torch", "pynvml"}


def test_b7_every_board_and_sensor_has_a_row_and_what_lacks_a_hint(look):
    energy_calls = (fake.COUNTER, fake.INSTANT, fake.AVERAGE, fake.PLAIN)
    poor = FakeBoard(
        uuid="GPU-poor",
        errors=dict.fromkeys(energy_calls, fake.NO_PERMISSION),
    )
    seen = look(FakeBoard(), poor)
    assert len(seen.capabilities) == 14
    hints = [h for h in seen.hints if h.startswith("GPU-poor")]
    assert "no energy on this board (energy: Insufficient Permissions" in hints[0]
    assert "permission" in hints[1]


def test_no_driver_is_a_line_and_not_an_exception(look):
    seen = look(init_error=fake.LIBRARY_NOT_FOUND)
    assert seen.devices == ()
    assert "install the NVIDIA driver" in (seen.nvml_error or "")
    assert seen.nvml_error in seen.hints


def test_a_lowered_limit_mig_other_processes_and_hidden_boards_are_told(look):
    slice_id = "MIG-0"
    seen = look(
        FakeBoard(limit_w=500, mig_slices=(slice_id,), pids=(7, 9)),
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    text = "\n".join(seen.hints)
    for words in ("500 W instead of 700 W", "MIG is on", "pid 7, 9", "hides every board"):
        assert words in text


def test_a_mixed_machine_with_ordinals_says_what_to_set(look):
    seen = look(
        FakeBoard(), FakeBoard(uuid="GPU-t4", name="NVIDIA T4"), env={"CUDA_VISIBLE_DEVICES": "0"}
    )
    assert "PCI_BUS_ID" in (seen.visible_error or "")


@pytest.mark.parametrize(
    ("release", "model", "tegra"),
    [
        (True, "NVIDIA Jetson AGX Orin Developer Kit\0", "NVIDIA Jetson AGX Orin Developer Kit"),
        (False, "NVIDIA Jetson Orin Nano\0", "NVIDIA Jetson Orin Nano"),
        (True, None, "Jetson"),
        (False, "Raspberry Pi 5 Model B", None),
        (False, None, None),
    ],
)
def test_jetson_is_found_by_its_files_and_not_by_its_cpu(look, tmp_path, release, model, tegra):
    if release:
        (tmp_path / "nv_tegra_release").write_text("# R36\n")
    if model:
        (tmp_path / "model").write_text(model)
    seen = look(FakeBoard())
    assert seen.tegra == tegra


def test_looking_for_libraries_does_not_import_them():
    code = (
        "import sys\n"
        "from energylens.meter.doctor import LIBRARIES, diagnose\n"
        "from energylens.errors import MeterError\n"
        "def no_meter(): raise MeterError('none')\n"
        "diagnose({}, open_meter=no_meter)\n"
        "sys.exit(bool(set(LIBRARIES) & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
