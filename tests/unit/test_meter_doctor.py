"""The diagnosis of a machine: values and hints, never an exception."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import helpers_nvml as fake
import pytest
from helpers_jetson import FakeJtop, Tree, orin_nano
from helpers_nvml import Clock, FakeBoard, FakeNvml

from energylens.meter.doctor import Diagnosis, diagnose
from energylens.meter.jetson import JetsonMeter
from energylens.meter.nvml import NvmlMeter, match_cuda, visible_devices
from energylens.report.facts import doctor_document, doctor_text


@pytest.fixture
def look(tmp_path):
    def run(
        *boards: FakeBoard, env: dict | None = None, init_error: int | None = None
    ) -> Diagnosis:
        clock = Clock()
        nvml = FakeNvml(*boards, clock=clock, init_error=init_error)
        return diagnose(
            env or {},
            root=tmp_path,
            open_meter=lambda: NvmlMeter(nvml, clock=clock, sleep=clock.sleep),
        )

    return run


def test_a_healthy_board_needs_nothing(look):
    seen = look(FakeBoard())
    assert seen.meter_error is None
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
    assert "install the NVIDIA driver" in (seen.meter_error or "")
    assert seen.meter_error in seen.hints


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
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/nv_tegra_release").write_text("# R36\n")
    if model:
        (tmp_path / "proc/device-tree").mkdir(parents=True)
        (tmp_path / "proc/device-tree/model").write_text(model)
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


# ----------------------------------------------------------------------- Jetson


def jetson(tree: Tree, error: str = "The jtop.service is not active. Please run:\nx") -> Diagnosis:
    """What the doctor says of a board on which jtop fails with ``error``."""

    def open_meter() -> JetsonMeter:
        return JetsonMeter(tree.root, jtop=FakeJtop({}, clock=Clock(), error=error))

    return diagnose({}, root=tree.root, open_meter=open_meter)


def test_b59_a_jetson_says_what_it_measures_how_and_what_could_be_better(tmp_path):
    seen = jetson(orin_nano(tmp_path))
    assert seen.meter_error is None
    assert seen.visible == ("JETSON-1424223005461",)
    assert "before measuring: sudo jetson_clocks" in "\n".join(seen.hints)
    text = doctor_text(doctor_document(asdict(seen)))
    for line in (
        "NVIDIA Jetson Orin Nano Developer Kit JETSON-1424223005461, power mode 15W, "
        "power monitors in sysfs, every 0.05 s, in steps of 40 mW, windows of 30 s and more",
        "  rails of total: VDD_IN",
        "  rails of gpu: VDD_CPU_GPU_CV (shared with cpu, cv)",
        "  rails of memory: none (no rail of this board measures the memory)",
        "  instant_power: supported (module)",
    ):
        assert line in text.splitlines()
    assert "note: the Jetson meter was tested on replayed sensors, not run on hardware" in text
    assert "start its service: sudo systemctl start jtop.service" in text


def test_b61_a_user_outside_of_the_group_is_told_apart_from_a_stopped_service(tmp_path):
    seen = jetson(orin_nano(tmp_path), "I can't access jtop.service.\nPlease logout")
    text = doctor_text(doctor_document(asdict(seen)))
    assert "join the group jtop" in text
    assert "systemctl" not in text


def test_b60_a_container_without_sensors_is_a_line_and_not_an_exception(tmp_path):
    tree = Tree(tmp_path)
    tree.write(".dockerenv", "")
    seen = jetson(tree)
    assert seen.devices == ()
    assert (seen.meter_error or "").startswith("no_sensor_in_container")
    assert seen.meter_error in seen.hints
    assert seen.calibrate_blockers[0] == seen.meter_error


def test_a_jetson_with_pinned_clocks_or_without_a_power_mode_says_so(tmp_path):
    tree = orin_nano(tmp_path)
    tree.gpu(cur=612e6, low=612e6, high=612e6)
    (tree.root / "var/lib/nvpmodel/status").unlink()
    hints = "\n".join(jetson(tree).hints)
    assert "jetson_clocks" not in hints
    assert "the power mode is not known" in hints


@pytest.mark.parametrize(
    ("value", "shown"), [(None, 1), ("0", 1), ("GPU-5aa1", 1), ("", 0), ("-1", 0)]
)
def test_the_gpu_of_a_module_is_shown_under_any_name_unless_it_is_hidden(tmp_path, value, shown):
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    devices = jetson(orin_nano(tmp_path)).devices
    assert visible_devices(devices, env) == devices[:shown]
    assert match_cuda(devices, ["GPU-5aa1"]) == devices
