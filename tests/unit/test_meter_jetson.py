"""The Jetson meter on file systems and jtop answers made for it; not run on hardware."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers_jetson as fake
import numpy as np
import pytest
from helpers_jetson import FakeJtop, Tree, orin_nano
from helpers_nvml import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from energylens.errors import MeterError
from energylens.meter.base import Reading
from energylens.meter.jetson import LEAST_WINDOW_S, UNTRIED, JetsonMeter, JetsonRecorder
from energylens.meter.tegra import AbstractSource, Frame, has_rails, tegra_board


def sysfs_meter(tree: Tree, clock: Clock | None = None) -> JetsonMeter:
    """A meter of the tree where jetson-stats does not answer."""
    jtop = FakeJtop({}, clock=Clock(), error="The jtop.service is not active. Please run:\nsudo x")
    return JetsonMeter(tree.root, jtop=jtop, clock=clock or Clock())


def jtop_meter(
    root: Path,
    answer: Callable[[float], Mapping[str, Any]] | Mapping[str, Any],
    clock: Clock,
    **more: Any,
) -> tuple[JetsonMeter, FakeJtop]:
    jtop = FakeJtop(answer, clock=clock, **more)
    return JetsonMeter(root, jtop=jtop, clock=clock), jtop


def recorder_of(meter: JetsonMeter) -> JetsonRecorder:
    """A recorder that is polled by the test instead of by its thread."""
    recorder = meter.recorder([meter.devices()[0].uuid])
    recorder._source.open()
    return recorder


def play(
    recorder: JetsonRecorder, clock: Clock, until_s: float, at: Callable[[float], None]
) -> None:
    """Poll sysfs each 0.05 s of scripted time, after ``at`` has set the rails."""
    while clock() < until_s:
        at(clock())
        recorder.poll()
        clock.sleep(0.05)


def read(recorder: JetsonRecorder, start_s: float, end_s: float) -> Reading:
    return recorder.reading(recorder._info.uuid, start_s, end_s)


def by_role(recorder: JetsonRecorder, start_s: float, end_s: float) -> Mapping[str, Reading]:
    return recorder.rail_readings(recorder._info.uuid, start_s, end_s)


def trapezoid_j(t: np.ndarray, w: np.ndarray, start_s: float, end_s: float) -> float:
    """Integral between two times, without the package."""
    inside = t[(t > start_s) & (t < end_s)]
    grid = np.concatenate(([start_s], inside, [end_s]))
    watts = np.interp(grid, t, w)
    return float(((watts[1:] + watts[:-1]) / 2 * np.diff(grid)).sum())


def decode_trace_mw(t: float) -> dict[str, float]:
    """An Orin Nano that idles, prefills and decodes, in mW; the rails sum to less than VDD_IN."""
    load = 0.0 if t < 1010 else (1.0 if t < 1014 else 0.7 + 0.05 * np.sin(7 * t))
    gpu = 700 + 6800 * load + 90 * np.sin(23 * t)
    soc = 1400 + 900 * load
    return {"VDD_IN": 2300 + gpu + soc, "VDD_CPU_GPU_CV": gpu, "VDD_SOC": soc}


# ----------------------------------------------------------------------- energy


@pytest.mark.parametrize("window", [(1001.0, 1049.0), (1007.31, 1041.87), (1012.0, 1042.013)])
def test_sysfs_energy_of_every_rail_equals_an_independent_trapezoid(
    tmp_path: Path, window: tuple[float, float]
) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    recorder = recorder_of(sysfs_meter(tree, clock))
    written: list[tuple[float, dict[str, float]]] = []

    def at(t: float) -> None:
        written.append((t, {name: tree.set(name, mw) for name, mw in decode_trace_mw(t).items()}))

    play(recorder, clock, 1050.0, at)
    t = np.array([s for s, _ in written])
    expected = {
        name: trapezoid_j(t, np.array([watts[name] for _, watts in written]), *window)
        for name in fake.ORIN_NANO
    }
    total = read(recorder, *window)
    assert total.valid
    assert total.method == "trapezoid_instant"
    assert total.scope == "module"
    assert total.energy_j == pytest.approx(expected["VDD_IN"], rel=1e-3)
    roles = by_role(recorder, *window)
    assert roles["total"].energy_j == total.energy_j
    assert roles["gpu"].energy_j == pytest.approx(expected["VDD_CPU_GPU_CV"], rel=1e-3)
    assert roles["gpu"].scope == "gpu_shared_rail"
    assert roles["cpu"].energy_j == roles["gpu"].energy_j  # the same rail, never added up
    assert roles["soc"].energy_j == pytest.approx(expected["VDD_SOC"], rel=1e-3)
    assert roles["memory"].energy_j is None
    assert "no rail of this board measures the memory" in (roles["memory"].reason or "")


@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0])
def test_jtop_energy_equals_an_independent_trapezoid(tmp_path: Path, interval: float) -> None:
    clock, seen = Clock(), []

    def answer(t: float) -> Mapping[str, Any]:
        power = fake.power(decode_trace_mw(t))
        total = power["tot"]
        seen.append((t, total["volt"] * total["curr"] * 1e-6))
        return power

    meter, _ = jtop_meter(tmp_path, answer, clock, interval=interval)
    recorder = recorder_of(meter)
    while clock() < 1050:
        recorder.poll()
    window = (1006.27, 1045.4)
    times, watts = (np.array(x) for x in zip(*dict(seen).items(), strict=True))
    total = read(recorder, *window)
    assert total.valid
    assert total.energy_j == pytest.approx(trapezoid_j(times, watts, *window), rel=1e-3)
    assert total.ticks == pytest.approx(39.1 / interval, abs=2)


@settings(max_examples=20, deadline=None)
@given(watts=st.floats(2, 60), start=st.floats(1001, 1005), length=st.floats(30, 40))
def test_constant_power_gives_power_times_time_within_the_resolution(
    tmp_path_factory: pytest.TempPathFactory, watts: float, start: float, length: float
) -> None:
    clock = Clock()
    meter, _ = jtop_meter(
        tmp_path_factory.mktemp("board"), fake.power({"VDD_IN": 1000 * watts}), clock
    )
    recorder = recorder_of(meter)
    while clock() < 1050:
        recorder.poll()
    seen = read(recorder, start, start + length)
    assert seen.energy_j == pytest.approx(watts * length, rel=seen.energy_rel_error)
    assert seen.energy_rel_error < 0.005


def test_the_resolution_of_the_monitor_is_in_the_error(tmp_path: Path) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1035.0, lambda t: None)
    # 40 uV over 5 mOhm are 8 mA, at 5 V 40 mW.
    assert recorder.series(recorder._info.uuid).power_step_w == pytest.approx(0.04)
    assert read(recorder, 1001, 1034).energy_rel_error == pytest.approx(0.04 / 8.0)


@pytest.mark.parametrize(("in_sysfs", "step_w"), [(True, 0.04), (False, 0.005)])
def test_behind_jtop_the_resolution_is_still_that_of_the_monitor(
    tmp_path: Path, in_sysfs: bool, step_w: float
) -> None:
    root = orin_nano(tmp_path).root if in_sysfs else tmp_path
    meter, _ = jtop_meter(root, fake.power(fake.ORIN_NANO), Clock())
    assert meter.devices()[0].power_step_w == pytest.approx(step_w)  # else that of 1 mA at 5 V


def test_b2_only_samples_inside_the_window_count(tmp_path: Path) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1015, lambda t: tree.set("VDD_IN", 20e3 if t < 1010.02 else 5e3) and None)
    assert read(recorder, 1000.0, 1010.0).energy_j == pytest.approx(200.0, rel=1e-3)


def test_b2_the_thread_stops_when_it_is_told_to(tmp_path: Path) -> None:
    jtop = FakeJtop({}, clock=Clock(), error="not active")
    meter = JetsonMeter(orin_nano(tmp_path).root, jtop=jtop, clock=time.monotonic)
    with meter.recorder([meter.devices()[0].uuid]) as recorder:
        time.sleep(0.3)
        start = time.monotonic()
    assert time.monotonic() - start < 0.5
    count = len(recorder.series(recorder._info.uuid).instant_power)
    assert 3 <= count <= 8
    time.sleep(0.12)
    assert len(recorder.series(recorder._info.uuid).instant_power) == count


class Silent(AbstractSource):
    """A source that answers only once it is closed."""

    def __init__(self) -> None:
        super().__init__("silent", 0.0)
        self.closed = threading.Event()

    def open(self) -> None:
        pass

    def read(self) -> Frame:
        self.closed.wait()
        raise MeterError("closed")

    def close(self) -> None:
        self.closed.set()


def test_a_source_that_does_not_answer_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("energylens.meter.jetson._FIRST_FRAME_S", 0.05)
    meter = sysfs_meter(orin_nano(tmp_path))
    recorder = meter.recorder([meter.devices()[0].uuid])
    recorder._source = source = Silent()
    with pytest.raises(MeterError, match=r"silent did not answer within 0\.05 s"):
        recorder.start()
    assert source.closed.is_set()


def test_b3_a_window_without_samples_is_too_short_and_says_how_long_it_must_be(
    tmp_path: Path,
) -> None:
    clock = Clock()
    meter, _ = jtop_meter(tmp_path, fake.power(fake.ORIN_NANO), clock)
    recorder = recorder_of(meter)
    while clock() < 1040:
        recorder.poll()
    seen = read(recorder, 1010.1, 1010.14)
    assert seen.energy_j is None
    assert "too_short" in seen.flags
    assert "measure at least 5 s" in (seen.reason or "")
    assert meter.devices()[0].least_window_s == LEAST_WINDOW_S >= 30


def test_b69_power_above_the_name_of_the_mode_is_valid(tmp_path: Path) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    meter = sysfs_meter(tree, clock)
    (info,) = meter.devices()
    assert info.power_mode == "15W"
    assert info.power_limit_w is None
    recorder = recorder_of(meter)
    play(recorder, clock, 1035, lambda t: tree.set("VDD_IN", 18e3) and None)
    seen = read(recorder, 1001, 1034)
    assert seen.valid
    assert seen.flags == ()
    assert seen.mean_power_w == pytest.approx(18.0)


def test_b14_a_rail_that_fails_midway_leaves_the_workload_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    recorder = recorder_of(sysfs_meter(tree, clock))
    broken = tree.rails["VDD_IN"][0] / "curr1_input"

    def at(t: float) -> None:
        if t > 1002 and broken.exists():
            broken.unlink()

    with caplog.at_level(logging.WARNING):
        play(recorder, clock, 1040, at)
    seen = read(recorder, 1001, 1039)
    assert seen.energy_j is None
    assert not seen.valid
    assert "VDD_IN did not answer" in (seen.reason or "")
    assert sum("no power any more" in r.getMessage() for r in caplog.records) == 1
    assert read(recorder, 1000.2, 1001.8).valid


def test_a_sum_without_one_of_its_rails_is_no_sample(tmp_path: Path) -> None:
    clock = Clock()

    def answer(t: float) -> Mapping[str, Any]:
        power = fake.power(fake.AGX_ORIN)
        if 1010 < t < 1013:
            del power["rail"]["VDD_CPU_CV"]
        return power

    meter, _ = jtop_meter(tmp_path, answer, clock, interval=0.5)
    recorder = recorder_of(meter)
    while clock() < 1045:
        recorder.poll()
    seen = read(recorder, 1002, 1044)
    assert seen.mean_power_w == pytest.approx(17.0, rel=1e-3)
    assert seen.flags == ("coverage",)


def test_an_idle_rail_that_reads_zero_or_less_is_within_its_resolution(tmp_path: Path) -> None:
    tree, clock = Tree(tmp_path), Clock()
    tree.ina3221(fake.THOR | {"VDD_GPU": -390.0})
    tree.ina238(23e3)
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1035, lambda t: None)
    gpu = by_role(recorder, 1001, 1034)["gpu"]
    assert gpu.valid
    assert gpu.mean_power_w == pytest.approx(0.02)
    assert gpu.energy_rel_error == pytest.approx(2.0)
    assert read(recorder, 1001, 1034).mean_power_w == pytest.approx(23.0)


def test_over_current_events_make_the_window_invalid(tmp_path: Path) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    tree.over_current(27)
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1075, lambda t: 1040 < t < 1040.06 and tree.over_current(28))
    assert read(recorder, 1001, 1035).valid
    seen = read(recorder, 1036, 1070)
    assert not seen.valid
    assert seen.flags == ("throttled",)
    assert "hw_power_brake" in seen.reasons


@pytest.mark.parametrize(
    ("low", "flag", "valid"), [(306e6, "clock_scaling", True), (612e6, "throttled", False)]
)
def test_a_clock_that_falls_is_the_governors_unless_it_is_pinned(
    tmp_path: Path, low: float, flag: str, valid: bool
) -> None:
    tree, clock = orin_nano(tmp_path), Clock()
    tree.gpu(low=low)
    recorder = recorder_of(sysfs_meter(tree, clock))
    node = tree.root / "sys/class/devfreq/17000000.gpu/cur_freq"
    play(recorder, clock, 1036, lambda t: 1020 < t < 1020.06 and node.write_text("408000000\n"))
    seen = read(recorder, 1001, 1035)
    assert seen.flags == (flag,)
    assert seen.valid == valid
    assert read(recorder, 1001, 1019).flags == ()


def test_b64_an_offline_thermometer_is_missing_and_not_minus_256(tmp_path: Path) -> None:
    clock = Clock()
    meter, jtop = jtop_meter(tmp_path, fake.power(fake.ORIN_NANO), clock)
    jtop.temperature["gpu"] = {"temp": -256, "online": True}
    recorder = recorder_of(meter)
    while clock() < 1040:
        recorder.poll()
    seen = read(recorder, 1002, 1038)
    assert seen.valid
    assert seen.temperature_end_c is None
    jtop.temperature["gpu"] = {"temp": 50.0, "online": False}
    recorder.poll()
    assert recorder.series(recorder._info.uuid).temperature[-1][1] == -256


# ----------------------------------------------------------------------- where the rails come from


def test_jtop_comes_before_sysfs_and_is_followed_at_its_own_pace(tmp_path: Path) -> None:
    clock = Clock()
    meter, jtop = jtop_meter(
        orin_nano(tmp_path).root, fake.power(fake.ORIN_NANO), clock, interval=0.7
    )
    (info,) = meter.devices()
    assert info.power_source == "jtop 4.3.2, every 0.7 s"
    assert jtop.asked_s == [0.5, 0.7]  # another client has set the pace
    assert jtop.open_clients == 0  # none is left behind by the probe


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            "Mismatch version jtop service: [4.5.1] and client: [4.3.2]. Please run:\n\nsudo x",
            "of the same version",
        ),
        (
            "The jtop.service is not active. Please run:\nsudo jtop --install-service",
            "systemctl start jtop.service",
        ),
        ("I can't access jtop.service.\nPlease logout or reboot this board.", "--group-add"),
        ("Mismatch of Python versions between library and service", "of the same version"),
        ("Connection reset by peer", "jtop --health"),
    ],
)
def test_b50_b59_b61_sysfs_stands_in_for_jtop_with_the_reason_in_the_record(
    tmp_path: Path, error: str, hint: str
) -> None:
    jtop = FakeJtop({}, clock=Clock(), error=error)
    meter = JetsonMeter(orin_nano(tmp_path).root, jtop=jtop)
    (info,) = meter.devices()
    assert info.power_source == "power monitors in sysfs, every 0.05 s"
    (note,) = (n for n in info.notes if n.startswith("jtop: "))
    assert note.startswith(f"jtop: {error.splitlines()[0].split('. Please')[0].rstrip('.')}; ")
    assert hint in note
    assert note.endswith("is used instead")
    assert meter.capabilities()[1].state == "supported"


def test_jetson_stats_that_is_not_installed_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jtop", None)
    (info,) = JetsonMeter(orin_nano(tmp_path).root).devices()
    assert any("pip install '.[jetson]'" in note for note in info.notes)


def test_b60_a_container_without_sensors_says_how_to_start_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    jtop = FakeJtop({}, clock=Clock(), error="The jtop.service is not active. Please run:\nx")
    with pytest.raises(MeterError, match="no power rail answers") as caught:
        JetsonMeter(tree.root, jtop=jtop)
    assert "no_sensor_in_container" not in str(caught.value)
    tree.write(".dockerenv", "")
    with pytest.raises(MeterError, match=r"^no_sensor_in_container: ") as caught:
        JetsonMeter(tree.root, jtop=jtop)
    assert "-v /run/jtop.sock:/run/jtop.sock" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_b62_a_rail_may_have_power_alone(tmp_path: Path) -> None:
    clock = Clock()
    rails = {"VDD_CPU_GPU_CV": {"power": 4000}, "VDD_SOC": {"power": 1500}}
    answer = {"rail": rails, "tot": {"name": "VDD_IN", "power": 8000, "avg": 1}}
    meter, _ = jtop_meter(tmp_path, answer, clock)
    recorder = recorder_of(meter)
    while clock() < 1035:
        recorder.poll()
    assert read(recorder, 1002, 1033).mean_power_w == pytest.approx(8.0)


@pytest.mark.parametrize("answer", [{}, {"rail": {}, "tot": {"power": 0, "avg": 0}}, {"tot": {}}])
def test_b63_jtop_without_rails_is_a_reason_and_not_a_key_error(
    tmp_path: Path, answer: Mapping[str, Any]
) -> None:
    with pytest.raises(MeterError, match=r"jtop 4\.3\.2, every 1 s: no input rail among no rail"):
        jtop_meter(tmp_path, answer, Clock())


def test_b65_the_smoothed_average_of_jtop_is_not_used(tmp_path: Path) -> None:
    clock = Clock()
    answer = {"tot": fake.rail(10_000, avg=4_000, name="VDD_IN"), "rail": {}}
    meter, _ = jtop_meter(tmp_path, answer, clock)
    recorder = recorder_of(meter)
    while clock() < 1035:
        recorder.poll()
    assert read(recorder, 1002, 1033).mean_power_w == pytest.approx(10.0)


def test_b53_the_unnamed_total_of_jtop_is_not_used(tmp_path: Path) -> None:
    meter, _ = jtop_meter(tmp_path, fake.power(fake.AGX_ORIN), Clock())
    recorder = recorder_of(meter)
    for _ in range(40):
        recorder.poll()
    assert read(recorder, 1003, 1035).mean_power_w == pytest.approx(17.0)  # jtop says 18.5


@pytest.mark.parametrize(
    "more", [{"online": False}, {"type": "USB"}, {"type": "Mains", "status": "Charging"}]
)
def test_b58_supplies_and_rails_that_are_not_online_do_not_count(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    power = fake.power(fake.THOR | {"VIN": 60_000})
    power["rail"]["ucsi-source-psy-3-00081"] = fake.rail(45_000, **more)
    meter, _ = jtop_meter(tmp_path, power, Clock())
    recorder = recorder_of(meter)
    for _ in range(40):
        recorder.poll()
    assert read(recorder, 1003, 1035).mean_power_w == pytest.approx(60.0)


@pytest.mark.parametrize("label", [None, "VIN"])
def test_b58_the_ina238_counts_microwatts(tmp_path: Path, label: str | None) -> None:
    tree, clock = Tree(tmp_path, model="NVIDIA Jetson AGX Thor Developer Kit"), Clock()
    tree.ina3221(fake.THOR)
    chip = tree.ina238(60_000, label=label)
    assert (chip / "power1_input").read_text() == "60000000\n"
    tree.write("sys/class/power_supply/ucsi-source-psy-3-00081/voltage_now", "20000000\n")
    tree.write("sys/class/power_supply/ucsi-source-psy-3-00081/current_now", "3000000\n")
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1035, lambda t: None)
    assert read(recorder, 1001, 1034).mean_power_w == pytest.approx(60.0)


def test_a_power_register_that_contradicts_volts_and_amperes_is_left_out(tmp_path: Path) -> None:
    tree = orin_nano(tmp_path)
    chip = tree.ina238(60_000)
    (chip / "power1_input").write_text("60000\n")  # milliwatts where microwatts belong
    (info,) = sysfs_meter(tree).devices()
    assert any("its power is 0.06 W, but volts times amperes 60 W" in n for n in info.notes)
    assert info.rails[0].rails == ("VDD_IN",)


def test_b68_a_tx2_shows_its_rails_as_iio_devices(tmp_path: Path) -> None:
    tree, clock = Tree(tmp_path, model="quill", release="# R32 (release), REVISION: 7.6,"), Clock()
    tree.iio(fake.TX2)
    assert tegra_board(tree.root) == "quill"
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1035, lambda t: None)
    roles = by_role(recorder, 1001, 1034)
    watts = {role: seen.mean_power_w for role, seen in roles.items()}
    assert watts == pytest.approx({"total": 9.0, "gpu": 4.0, "cpu": 1.5, "soc": 1.0, "memory": 1.3})
    assert roles["gpu"].scope == "gpu"


def test_b54_b55_unknown_boards_and_releases_keep_going(tmp_path: Path) -> None:
    tree = Tree(tmp_path, model=None, release="# R39 (release), REVISION: 2.0, GCID: 7")
    tree.ina3221(fake.THOR)
    tree.ina238(23_000)
    (info,) = sysfs_meter(tree).devices()
    assert info.name == "Jetson"
    assert info.driver == "Jetson Linux 39.2.0"
    assert info.uuid == "JETSON-0"
    assert info.rails[0].rails == ("VIN",)
    tree.write("etc/nv_tegra_release", "something new\n")
    assert sysfs_meter(tree).devices()[0].driver is None


def test_each_monitor_counts_once_and_channels_without_a_load_or_a_name_not_at_all(
    tmp_path: Path,
) -> None:
    tree, clock = Tree(tmp_path, model="NVIDIA Jetson AGX Orin Developer Kit"), Clock()
    chips = tree.ina3221(fake.AGX_ORIN)
    (chips[1] / "in2_label").unlink()  # VDDQ_VDD2_1V8AO
    meter = sysfs_meter(tree, clock)
    assert set(meter._frame.watts) == {
        "VDD_GPU_SOC",
        "VDD_CPU_CV",
        "VIN_SYS_5V0",
        f"UNLABELLED_{chips[1].name.upper()}_CHANNEL_2",
    }
    recorder = recorder_of(meter)
    play(recorder, clock, 1035, lambda t: None)
    assert read(recorder, 1001, 1034).mean_power_w == pytest.approx(17.0)


def test_two_rails_of_one_name_do_not_hide_each_other(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.ina3221(fake.ORIN_NANO)
    tree.ina3221({"VDD_IN": 3000.0, "VDD_3V3": 100.0})
    frame = sysfs_meter(tree)._frame
    assert frame.watts["VDD_IN"] == pytest.approx(8.0)
    assert frame.watts["VDD_IN_2"] == pytest.approx(3.0)


@pytest.mark.parametrize("mw", [0.0, -500.0])
def test_an_input_rail_that_reads_nothing_is_no_sensor(tmp_path: Path, mw: float) -> None:
    tree = Tree(tmp_path)
    tree.ina3221(fake.ORIN_NANO | {"VDD_IN": mw})
    with pytest.raises(MeterError, match=rf"VDD_IN answers {mw / 1000:g} W"):
        sysfs_meter(tree)


def test_a_service_that_stops_ends_the_series(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    meter, _ = jtop_meter(tmp_path, fake.power(fake.ORIN_NANO), clock, dies_s=1020.0)
    recorder = recorder_of(meter)
    for _ in range(30):
        recorder.poll()
    seen = read(recorder, 1003, 1060)
    assert seen.energy_j is None
    assert "its service stopped" in (seen.reason or "")
    assert sum("no power any more" in r.getMessage() for r in caplog.records) == 1


# ----------------------------------------------------------------------- what the module says


def test_the_module_says_what_it_is(tmp_path: Path) -> None:
    (info,) = sysfs_meter(orin_nano(tmp_path)).devices()
    assert info.name == "NVIDIA Jetson Orin Nano Developer Kit"
    assert info.uuid == "JETSON-1424223005461"
    assert info.driver == "Jetson Linux 36.4.7"
    assert (info.integrated, info.unified_memory, info.power_scope) == (True, True, "module")
    assert info.sm_clock_max_hz == 612e6
    assert dict(info.clocks_hz) == {"gpu_min": 306e6, "gpu_max": 612e6, "cpu_max": 1510.4e6}
    assert info.notes[0] == UNTRIED
    assert "not run on hardware" in UNTRIED


@pytest.mark.parametrize(
    ("number", "names", "mode"),
    [(0, ("15W", "7W"), "15W"), (2, ("15W", "25W", "MAXN_SUPER"), "MAXN_SUPER"), (5, (), "MODE_5")],
)
def test_the_power_mode_is_read_from_the_files_of_nvpmodel(
    tmp_path: Path, number: int, names: tuple[str, ...], mode: str
) -> None:
    tree = orin_nano(tmp_path)
    tree.power_mode(number, names)
    assert sysfs_meter(tree).devices()[0].power_mode == mode
    (tree.root / "var/lib/nvpmodel/status").unlink()
    assert sysfs_meter(tree).devices()[0].power_mode is None


def test_jtop_knows_the_power_mode_in_a_container(tmp_path: Path) -> None:
    jtop = FakeJtop(fake.power(fake.ORIN_NANO), clock=Clock())
    jtop.nvpmodel = SimpleNamespace(name="25W", id=1)
    assert JetsonMeter(tmp_path, jtop=jtop).devices()[0].power_mode == "25W"
    jtop.nvpmodel = None
    assert JetsonMeter(tmp_path, jtop=jtop).devices()[0].power_mode is None


def test_every_sensor_has_a_row_with_its_state_or_reason(tmp_path: Path) -> None:
    meter = sysfs_meter(orin_nano(tmp_path))
    rows = {c.sensor: c for c in meter.capabilities()}
    assert len(rows) == 7
    assert rows["instant_power"].state == "supported"
    assert rows["instant_power"].scope == "module"
    assert "no energy counter" in (rows["energy"].reason or "")
    assert rows["sm_clock"].state == rows["temperature"].state == "supported"
    assert rows["memory_clock"].state == "absent"
    assert all((c.state == "supported") == (c.reason is None) for c in rows.values())


def test_another_board_is_not_recorded(tmp_path: Path) -> None:
    meter = sysfs_meter(orin_nano(tmp_path))
    with pytest.raises(MeterError, match="this module is JETSON-1424223005461"):
        meter.recorder(["GPU-1"])
    with pytest.raises(MeterError, match="is not recorded"):
        recorder_of(meter).series("GPU-1")


@pytest.mark.parametrize(
    ("model", "release", "board"),
    [
        ("NVIDIA Jetson AGX Orin Developer Kit", "# R36", "NVIDIA Jetson AGX Orin Developer Kit"),
        ("NVIDIA Jetson AGX Thor Developer Kit", None, "NVIDIA Jetson AGX Thor Developer Kit"),
        (None, "# R36", "Jetson"),
        ("GH200 480GB", None, None),  # aarch64 too, and no Jetson
        ("Raspberry Pi 5 Model B", None, None),
        (None, None, None),
    ],
)
def test_a_jetson_is_told_by_tegra_and_not_by_its_cpu(
    tmp_path: Path, model: str | None, release: str | None, board: str | None
) -> None:
    assert tegra_board(Tree(tmp_path, model=model, release=release).root) == board


def test_rails_of_other_machines_are_no_jetson(tmp_path: Path) -> None:
    tree = Tree(tmp_path, model=None, release=None)
    assert not has_rails(tree.root)
    tree.ina3221({"12V_MAIN": 30_000.0, "5V_AUX": 1000.0})
    assert not has_rails(tree.root)
    tree.ina3221(fake.ORIN_NANO)
    assert has_rails(tree.root)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
@pytest.mark.parametrize(
    ("rails", "older"),
    [
        (fake.ORIN_NANO, False),
        (fake.AGX_ORIN, False),
        (fake.AGX_XAVIER, False),
        (fake.THOR, False),
        (fake.NANO, True),
        (fake.TX2, True),
    ],
)
def test_jetson_stats_reads_the_same_from_these_trees(
    tmp_path: Path, rails: dict[str, float], older: bool
) -> None:
    """The library itself, where it is installed, finds in the trees what the stand-in answers."""
    jtop_power = pytest.importorskip("jtop.core.power")
    tree = Tree(tmp_path)
    if older:
        tree.iio(rails)
    else:
        tree.ina3221(rails)
    if rails is fake.THOR:
        tree.ina238(60_000)
        rails = rails | {"VIN": 60_000.0}
    service = object.__new__(jtop_power.PowerService)
    service._power_avg = {}
    service._power_sensor = jtop_power.find_all_i2c_power_monitor(
        str(tree.root / "sys/bus/i2c/devices")
    )
    status, expected = service.get_status(), fake.power(rails)
    assert status["tot"].get("name") == expected["tot"].get("name")
    for name, one in expected["rail"].items():
        read_w = {key: status["rail"][name][key] for key in ("volt", "curr", "power", "online")}
        assert read_w == {key: one[key] for key in read_w}
    assert status["tot"]["power"] == expected["tot"]["power"]
    meter, _ = jtop_meter(tmp_path / "none", status, Clock())
    assert meter._frame.watts == pytest.approx(sysfs_meter(tree)._frame.watts)


def test_samples_survive_a_recording(tmp_path: Path) -> None:
    from energylens.meter.replay import load_recording, save_recording

    tree, clock = orin_nano(tmp_path), Clock()
    recorder = recorder_of(sysfs_meter(tree, clock))
    play(recorder, clock, 1032, lambda t: None)
    series = recorder.series(recorder._info.uuid)
    save_recording(tmp_path / "run.csv", [series])
    (again,) = load_recording(tmp_path / "run.csv")
    assert replace(again, absent=series.absent) == series
