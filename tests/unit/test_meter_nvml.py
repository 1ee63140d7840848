"""The NVML meter against a stand-in for the vendor's library, on a scripted clock."""

from __future__ import annotations

import logging
import sys
import time
import types

import helpers_nvml as fake
import pytest
from helpers_nvml import AVERAGE, COUNTER, INSTANT, PLAIN, Clock, FakeBoard, FakeNvml, Steps

from energylens.errors import MeterError
from energylens.meter.base import Reading
from energylens.meter.nvml import NvmlMeter, NvmlRecorder


def meter_of(*boards: FakeBoard) -> tuple[NvmlMeter, Clock, FakeNvml]:
    clock = Clock()
    nvml = FakeNvml(*boards, clock=clock)
    return NvmlMeter(nvml, clock=clock, sleep=clock.sleep), clock, nvml


def play(recorder: NvmlRecorder, clock: Clock, seconds: float) -> None:
    """Poll each 2 ms of scripted time."""
    for _ in range(round(seconds / 0.002)):
        recorder.poll()
        clock.sleep(0.002)


def measure(*boards: FakeBoard, seconds: float = 3.0) -> list[Reading]:
    """Readings of all boards over all but the first and last 0.25 s."""
    meter, clock, _ = meter_of(*boards)
    uuids = [b.uuid for b in boards]
    recorder = meter.recorder(uuids)
    start = recorder.now() + 0.25
    play(recorder, clock, seconds)
    return [recorder.reading(uuid, start, recorder.now() - 0.25) for uuid in uuids]


def boards_of(count: int, **each: object) -> list[FakeBoard]:
    return [
        FakeBoard(
            uuid=f"GPU-{i}{i}{i}{i}0000-1111-4222-8333-444444444444",
            bus=f"00000000:{i + 1}B:00.0",
            power=Steps(100.0 * i + 50),
            **each,
        )
        for i in range(count)
    ]


def test_b1_nvml_is_initialised_before_anything_else():
    (seen,) = measure(FakeBoard(power=Steps(300)))
    assert seen.method == "counter_slope"
    assert seen.mean_power_w == pytest.approx(300, rel=0.005)
    assert seen.valid


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (fake.UNINITIALIZED, "Uninitialized"),
        (fake.LIBRARY_NOT_FOUND, "install the NVIDIA driver"),
        (fake.DRIVER_NOT_LOADED, "load the NVIDIA driver"),
        (fake.NO_PERMISSION, "/dev/nvidia"),
    ],
)
def test_b1_a_library_that_never_initialises_is_an_error_and_not_zero_joules(code, words):
    with pytest.raises(MeterError, match=words) as caught:
        NvmlMeter(FakeNvml(init_error=code))
    assert "\n" not in str(caught.value)


def test_a_machine_without_boards_is_one_clear_line():
    nvml = FakeNvml()
    nvml.boards = ()
    with pytest.raises(MeterError, match="shows no GPU"):
        NvmlMeter(nvml)


def test_b48_the_wrong_pynvml_package_is_named(monkeypatch):
    stub = types.ModuleType("pynvml")
    stub.nvmlInit = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    with pytest.raises(MeterError, match="pip uninstall -y pynvml"):
        NvmlMeter()


def test_missing_bindings_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MeterError, match="pip install nvidia-ml-py"):
        NvmlMeter()


def test_b6_module_scope_is_used_where_gpu_scope_is_not_supported_and_labelled():
    board = FakeBoard(
        power=Steps(450),
        errors={COUNTER: fake.NOT_SUPPORTED, f"{INSTANT}.0": 3, f"{INSTANT}.1": 0},
    )
    (seen,) = measure(board)
    assert seen.scope == "module"
    assert seen.energy_j == pytest.approx(450 * seen.duration_s)


def test_b7_boards_with_and_without_a_counter_get_their_own_methods():
    good, poor = boards_of(2)
    poor.errors = {COUNTER: fake.NOT_SUPPORTED}
    seen = measure(good, poor)
    assert [r.method for r in seen] == ["counter_slope", "trapezoid_instant"]
    meter, _, _ = meter_of(good, poor)
    rows = {(c.uuid, c.sensor): c for c in meter.capabilities()}
    assert rows[good.uuid, "energy"].state == "supported"
    assert rows[poor.uuid, "energy"].state == "not_supported"
    assert rows[poor.uuid, "energy"].reason == "Not Supported"


def test_b9_a_board_with_plain_power_alone_still_gives_energy():
    board = FakeBoard(
        power=Steps(200),
        errors=dict.fromkeys(
            (COUNTER, INSTANT, AVERAGE, "nvmlDeviceGetClockInfo"), fake.NOT_SUPPORTED
        ),
    )
    (seen,) = measure(board, seconds=7)
    assert seen.method == "trapezoid_average"
    assert seen.energy_j == pytest.approx(200 * seen.duration_s)
    assert seen.sm_clock_hz is None


def test_b11_a_sensor_that_is_not_supported_warns_once(caplog):
    board = FakeBoard(errors=dict.fromkeys((INSTANT, AVERAGE, PLAIN), fake.NOT_SUPPORTED))
    with caplog.at_level(logging.WARNING):
        (seen,) = measure(board)
    assert seen.method == "counter_slope"
    for sensor in ("instant_power", "average_power"):
        assert sum(f"no {sensor}" in r.getMessage() for r in caplog.records) == 1


def test_b12_unknown_errors_and_answers_of_none_become_named_reasons():
    every_power = (INSTANT, AVERAGE, PLAIN, COUNTER)
    (seen,) = measure(FakeBoard(errors=dict.fromkeys(every_power, fake.UNKNOWN)))
    assert seen.energy_j is None
    assert "code 999" in (seen.reason or "")
    (seen,) = measure(FakeBoard(answers=dict.fromkeys(every_power)))
    assert seen.energy_j is None
    assert "answered None" in (seen.reason or "")


def test_b14_a_counter_that_fails_midway_leaves_the_workload_alone():
    def third_sample_on(t: float) -> int | None:
        return fake.NOT_SUPPORTED if t > 1000.35 else None

    board = FakeBoard(errors=dict.fromkeys((COUNTER, INSTANT, AVERAGE, PLAIN), third_sample_on))
    (seen,) = measure(board)
    assert seen.energy_j is None
    assert not seen.valid
    assert "Not Supported" in (seen.reason or "")
    assert seen.sm_clock_hz == 1980e6


def test_a_single_failure_of_a_sensor_is_skipped():
    board = FakeBoard(errors={INSTANT: lambda t: fake.UNKNOWN if 1001 < t < 1001.03 else None})
    meter, clock, _ = meter_of(board)
    recorder = meter.recorder([board.uuid])
    play(recorder, clock, 3)
    series = recorder.series(board.uuid)
    assert not series.absent
    assert 140 < len(series.instant_power) <= 150


def test_b15_two_reads_within_a_tick_are_equal_and_no_change_is_recorded():
    board = FakeBoard(power=Steps(500), tick_s=0.1)
    meter, clock, _ = meter_of(board)
    recorder = meter.recorder([board.uuid])
    play(recorder, clock, 0.03)
    assert recorder.series(board.uuid).energy == ()
    seen = recorder.reading(board.uuid, 1000, 1000.03)
    assert seen.energy_j is None
    assert "too_short" in seen.flags


def test_b22_five_thousand_millijoules_are_five_joules():
    board = FakeBoard(power=Steps(50.0), tick_s=0.1)
    meter, clock, _ = meter_of(board)
    recorder = meter.recorder([board.uuid])
    play(recorder, clock, 0.35)
    (_, first), (_, second), *_ = recorder.series(board.uuid).energy
    assert second - first == pytest.approx(5.0)


def test_only_changes_of_the_counter_are_stored_with_their_jitter():
    board = FakeBoard(tick_s=0.1, phase_s=0.0013)
    meter, clock, nvml = meter_of(board)
    recorder = meter.recorder([board.uuid])
    play(recorder, clock, 2)
    series = recorder.series(board.uuid)
    assert len(series.energy) == 20
    assert all(j == pytest.approx(0.002) for j in series.energy_jitter_s)
    assert nvml.calls[COUNTER] == 1000
    assert 95 <= nvml.calls[INSTANT] <= 101
    assert 38 <= len(series.temperature) <= 41


def test_old_drivers_spell_event_reasons_as_throttle_reasons():
    board = FakeBoard(errors={"nvmlDeviceGetCurrentClocksEventReasons": 13})
    (seen,) = measure(board)
    assert seen.reasons == {}
    board.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x4
    fake._ANSWERS["nvmlDeviceGetCurrentClocksThrottleReasons"] = lambda n, b: 0x4
    try:
        (seen,) = measure(board)
    finally:
        del fake._ANSWERS["nvmlDeviceGetCurrentClocksThrottleReasons"]
    assert seen.reasons == {"sw_power_cap": 1.0}
    assert seen.flags == ("power_capped",)


def test_b34_work_on_boards_four_to_seven_is_metered_on_those():
    boards = boards_of(8)
    meter, clock, _ = meter_of(*boards)
    recorder = meter.recorder([b.uuid for b in boards[4:]])
    play(recorder, clock, 3)
    total = sum(recorder.reading(b.uuid, 1000.25, 1002.75).mean_power_w or 0.0 for b in boards[4:])
    assert total == pytest.approx(400 + 500 + 600 + 700 + 4 * 50, rel=0.005)
    with pytest.raises(MeterError, match="is not recorded"):
        recorder.series(boards[0].uuid)


def test_b35_a_mig_slice_has_no_energy_and_does_not_crash():
    slice_id = "MIG-8e9b1c2d-0000-5000-9000-000000000000"
    board = FakeBoard(mig_slices=(slice_id,))
    meter, clock, _ = meter_of(board)
    assert meter.devices()[0].mig_uuids == (slice_id,)
    for uuid in (slice_id, board.uuid, "MIG-unknown"):
        recorder = meter.recorder([uuid])
        play(recorder, clock, 1)
        seen = recorder.reading(uuid, clock() - 0.8, clock() - 0.2)
        assert seen.energy_j is None
        assert seen.flags == ("mig",)
        assert (seen.reason or "").startswith("mig")
    energy = next(c for c in meter.capabilities() if c.sensor == "energy")
    assert energy.state == "not_supported"
    assert (energy.reason or "").startswith("mig")


def test_b47_memory_that_is_not_supported_is_the_systems_and_unified():
    board = FakeBoard(name="NVIDIA GB10", errors={"nvmlDeviceGetMemoryInfo": fake.NOT_SUPPORTED})
    meter, _, _ = meter_of(board)
    (info,) = meter.devices()
    assert info.unified_memory
    assert (info.memory_bytes or 0) > 1e8
    (seen,) = measure(board)
    assert seen.valid


def test_b146_a_counter_at_60_percent_is_skipped_after_it_was_verified():
    board = FakeBoard(power=Steps(300), gain=0.6)
    meter, clock, _ = meter_of(board)
    recorder = meter.recorder([board.uuid])
    play(recorder, clock, 12)
    assert "sensor_disagreement" in recorder.reading(board.uuid, 1001, 1011).flags
    assert recorder.verify_counter(board.uuid, 1001, 1011).trusted is False
    seen = recorder.reading(board.uuid, 1005, 1006)
    assert seen.method == "trapezoid_instant"
    assert seen.energy_j == pytest.approx(300)
    assert "counter_mistrusted" in seen.flags


def test_a_lost_gpu_ends_its_series_and_not_those_of_the_others(caplog):
    lost, other = boards_of(2)
    lost.errors["*"] = lambda t: fake.GPU_IS_LOST if t > 1002 else None
    meter, clock, _ = meter_of(lost, other)
    recorder = meter.recorder([lost.uuid, other.uuid])
    play(recorder, clock, 4)
    seen = recorder.reading(lost.uuid, 1000.5, 1003)
    assert seen.flags == ("lost",)
    assert seen.energy_j is None
    assert recorder.reading(lost.uuid, 1000.5, 1001.5).valid
    assert recorder.reading(other.uuid, 1000.5, 1003.5).valid
    assert sum("GPU is lost" in r.getMessage() for r in caplog.records) == 1


def test_a_reset_of_the_counter_is_seen():
    board = FakeBoard(reset_s=1001.5, errors={INSTANT: fake.NOT_SUPPORTED})
    (seen,) = measure(board)
    assert "counter_reset" in seen.flags
    assert seen.energy_j is None


def test_no_permission_is_told_from_not_supported():
    board = FakeBoard(errors={f"{INSTANT}.0": fake.NO_PERMISSION, COUNTER: fake.NO_PERMISSION})
    meter, _, _ = meter_of(board)
    states = {c.sensor: c.state for c in meter.capabilities()}
    assert states["energy"] == "no_permission"
    assert states["instant_power"] == "no_permission"
    assert states["temperature"] == "supported"


def test_the_probe_reads_for_real():
    stuck = FakeBoard(
        answers={COUNTER: 77, INSTANT: 2**32 - 1, "nvmlDeviceGetTemperature": -256},
        errors={"nvmlDeviceGetCurrentClocksEventReasons": fake.FUNCTION_NOT_FOUND},
    )
    meter, _, _ = meter_of(stuck)
    rows = {c.sensor: c for c in meter.capabilities()}
    assert rows["energy"].state == "stuck"
    assert rows["instant_power"].state == "not_supported"
    assert rows["temperature"].reason == "answers -256"
    assert rows["reasons"].state == "absent"
    assert rows["average_power"].scope == "gpu"


def test_devices_say_what_they_are():
    board = FakeBoard(limit_w=500, pids=(4242,), errors={"nvmlDeviceGetEccMode": 3})
    meter, _, _ = meter_of(board)
    (info,) = meter.devices()
    assert (info.uuid, info.name, info.pci_bus_id) == (board.uuid, "NVIDIA H200", board.bus)
    assert (info.power_limit_w, info.default_power_limit_w) == (500, 700)
    assert (info.sm_clock_max_hz, info.memory_bytes) == (1980e6, 150_754_820_096)
    assert (info.driver, info.ecc, info.persistence) == ("580.159", None, True)
    assert info.other_pids == (4242,)
    assert not info.mig


def test_uuids_are_matched_as_torch_prints_them():
    board = FakeBoard()
    meter, clock, _ = meter_of(board)
    printed = board.uuid.removeprefix("GPU-").upper()
    recorder = meter.recorder([printed])
    play(recorder, clock, 1)
    assert recorder.reading(printed, 1000.1, 1000.9).uuid == board.uuid
    with pytest.raises(MeterError, match="no board with id 'GPU-ffff'"):
        meter.recorder(["GPU-ffff"])


def test_the_thread_samples_in_real_time_and_stops():
    board = FakeBoard(power=Steps(250), tick_s=0.02, born_s=0)
    nvml = FakeNvml(board, clock=time.monotonic)
    with NvmlMeter(nvml).recorder([board.uuid]) as recorder:
        start = recorder.now()
        time.sleep(0.4)
        end = recorder.now()
        while_running = recorder.reading(board.uuid, start, end)
    assert while_running.energy_j is not None
    assert while_running.energy_rel_error is not None
    assert while_running.energy_j == pytest.approx(
        250 * (end - start), rel=while_running.energy_rel_error + 1e-6
    )
    count = len(recorder.series(board.uuid).energy)
    time.sleep(0.06)
    assert len(recorder.series(board.uuid).energy) == count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sampling_thread_that_dies_is_reported():
    nvml = FakeNvml(clock=time.monotonic)
    meter = NvmlMeter(nvml)
    uuid = nvml.boards[0].uuid
    with meter.recorder([uuid]) as recorder:
        nvml.boards[0].answers["nvmlDeviceGetTemperature"] = "broken"
        recorder._tracks = None  # type: ignore[attr-defined]
        time.sleep(0.05)
        with pytest.raises(MeterError, match="ended early"):
            recorder.series(uuid)
