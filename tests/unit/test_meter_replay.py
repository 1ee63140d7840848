"""Recordings: saved, loaded, played back, and refused where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from energylens.errors import MeterError, SpecError
from energylens.meter.base import DeviceSeries
from energylens.meter.replay import ReplayMeter, load_recording, save_recording

FOLDER = Path(__file__).resolve().parents[1] / "data" / "meter"
STEP = FOLDER / "step_load.csv"
"""100 W; 600 W from 2 s to 5 s; counter ticks each 0.1 s from 0.05 s."""


def test_b27_the_window_of_the_load_is_not_diluted_by_idle(tmp_path):
    watts = tuple((float(t), 720.0 if 60 <= t < 120 else 100.0) for t in range(141))
    path = tmp_path / "power.csv"
    save_recording(path, [DeviceSeries(uuid="GPU-a", instant_power=watts)])
    recorder = ReplayMeter(path).recorder(["GPU-a"])
    assert recorder.reading("GPU-a", 61.5, 118.5).mean_power_w == pytest.approx(720)
    whole = recorder.reading("GPU-a", 0, 140).mean_power_w
    assert whole == pytest.approx(366, rel=0.01)


def test_what_is_saved_is_loaded(tmp_path):
    first = DeviceSeries(
        uuid="GPU-a",
        name="NVIDIA H200, 141GB",
        energy=((0.1, 1.0), (0.2, 1 / 3 + 4)),
        energy_jitter_s=(0.002, 0.0031),
        instant_power=((0.02, 300.123456789),),
        average_power=((0.05, 299.0),),
        sm_clock=((0.05, 1.98e9),),
        memory_clock=((0.05, 3.2e9),),
        temperature=((0.05, 45.0),),
        reasons=((0.05, 0x24),),
        scope="module",
        power_limit_w=700.0,
        sm_clock_max_hz=1.98e9,
        lost_s=0.3,
        absent={"temperature": 'it said "no", then nothing'},
    )
    second = DeviceSeries(uuid="MIG-b", mig=True)
    path = tmp_path / "run.csv"
    save_recording(path, [first, second])
    assert load_recording(path) == (first, second)
    assert [p.name for p in tmp_path.iterdir()] == ["run.csv"]


def test_the_replay_meter_tells_the_time_of_the_recording():
    meter = ReplayMeter(STEP)
    (info,) = meter.devices()
    assert (info.uuid, info.name, info.power_limit_w) == ("GPU-step", "NVIDIA H200", 700)
    assert {c.sensor for c in meter.capabilities() if c.state == "supported"} == {
        "energy",
        "instant_power",
        "sm_clock",
        "temperature",
        "reasons",
    }
    with meter.recorder(["GPU-step"]) as recorder:
        assert recorder.now() == 0
        meter.sleep(2.5)
        start = recorder.now()
        meter.sleep(2.0)
        seen = recorder.reading("GPU-step", start, recorder.now())
    assert seen.valid
    assert seen.energy_j == pytest.approx(1200, rel=0.002)
    assert seen.flags == ("power_capped",)
    assert seen.temperature_end_c == 52


def test_unknown_boards_and_empty_recordings_are_refused(tmp_path):
    meter = ReplayMeter(STEP)
    with pytest.raises(MeterError, match="GPU-x is not in the recording, only GPU-step"):
        meter.recorder(["GPU-x"])
    with pytest.raises(MeterError, match="is not recorded"):
        meter.recorder(["GPU-step"]).series("GPU-x")
    empty = tmp_path / "empty.csv"
    save_recording(empty, [])
    with pytest.raises(MeterError, match="holds no sample"):
        ReplayMeter(empty)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 must be uuid,sensor,t_s,value"),
        ("uuid,sensor,t_s,value\nGPU-a,energy,0.1\n", "line 2: 3 columns"),
        ("uuid,sensor,t_s,value\nGPU-a,energy,0.1,abc\n", "line 2: could not convert"),
        ("uuid,sensor,t_s,value\nGPU-a,reasons,0.1,inf\n", "line 2: 'inf' is not a finite"),
        ("uuid,sensor,t_s,value\nGPU-a,volts,0.1,1\n", "unknown sensor 'volts'; known: energy"),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=words):
        load_recording(path)


def test_a_missing_or_binary_file_is_one_clear_line(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load_recording(tmp_path / "none.csv")
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not a CSV file"):
        load_recording(path)
