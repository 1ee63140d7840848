"""Whole runs on scripted boards: windows, energies, workers, and the document that comes out."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers_nvml as fake
import pytest
from fake_engine import FakeEngine, Load, Machine, gpu, session
from helpers_nvml import COUNTER, INSTANT, PLAIN, Clock, FakeBoard, FakeNvml, Steps

from energylens.measured import MemoryProfile, profile_to_json
from energylens.profiler.metrics import WorkerWindow
from energylens.profiler.options import ProfileRequest
from energylens.profiler.session import MetricInput, machine_meter
from energylens.profiler.steps import Limits, run_window
from energylens.report.profile import profile_csv
from energylens.spec.system import Parallelism
from energylens.store import board_hash
from energylens.truth import read_measurements

DECODE = ProfileRequest(model="llama3_2_1b", phases=("decode",), size=False, batch=4, repeats=20)

KEYS = {
    *("schema", "record_id", "time", "model", "spec", "device", "device_name", "engine"),
    *("engine_version", "precision", "parallelism", "n_gpus", "workload", "modes", "memory"),
    *("prefill", "decode", "request", "ttft_s", "tpot_s", "ttlt_s", "energy_per_prompt_j"),
    *("energy_per_token_j", "energy_per_request_j", "model_size_gb", "cache_size_gb"),
    *("ttft_latency_ms", "ttft_energy_j_per_prompt", "tpot_latency_ms"),
    *("tpot_energy_j_per_token", "ttlt_latency_ms", "ttlt_energy_j_per_request"),
    *("throughput_tokens_s", "tokens_per_j", "bandwidth_utilisation", "compute_utilisation"),
    *(
        "breakdown",
        "throttle",
        "anchors",
        "environment",
        "meter",
        "power_timeline",
        "valid",
        "reasons",
    ),
    "energy_reason",
}
"""Of ``energylens/profile/v1``, as readers expect them."""
PHASE_KEYS = {
    *("latency_s", "energy_j", "mean_power_w", "total_power_w", "net_energy_j", "context_len"),
    *("n", "latency", "n_outliers", "energy_rel_se", "sm_clock_mhz", "gpu_temp_c", "regime"),
    *("ticks", "per_gpu", "valid", "flags"),
}


def test_energy_and_time_of_steps_are_those_that_were_scripted() -> None:
    engine = FakeEngine(Machine(gpu()))
    found = session(engine, DECODE).measure()
    decode = found.phases["decode"]
    assert decode.latency.mean == pytest.approx(0.02)
    assert decode.n >= 150  # three seconds
    assert decode.n_outliers == 0
    assert decode.energy_j == pytest.approx(0.02 * 600, rel=0.005)
    assert decode.net_energy_j == pytest.approx(0.02 * (600 - 120), rel=0.01)
    assert decode.regime == "device"
    assert decode.ticks == pytest.approx(30, abs=1)
    assert decode.energy_rel_se is not None
    assert abs(decode.energy_j / 12 - 1) <= 3 * decode.energy_rel_se
    assert found.valid
    assert found.energy_reason is None
    assert found.meter["idle_w"] == pytest.approx([120], rel=1e-3)


def test_a_step_that_waits_for_the_host_takes_as_long_as_its_launches() -> None:
    engine = FakeEngine(Machine(gpu()), step_s=lambda i: 0.001, launch_s=0.02)
    decode = session(engine, DECODE).measure().phases["decode"]
    assert decode.latency.mean == pytest.approx(0.02)
    assert decode.regime == "host"
    # 1 ms at 600 W and 19 ms of active idle, all charged to the step.
    assert decode.energy_j == pytest.approx(0.001 * 600 + 0.019 * 120, rel=0.02)


def test_the_first_steps_and_the_settling_are_not_in_the_window() -> None:
    """B27, B29: neither loading, nor compiling, nor idling enters the energy of a step."""
    engine = FakeEngine(Machine(gpu()), step_s=lambda i: 3.0 if i == 0 else 0.02)
    decode = session(engine, DECODE).measure().phases["decode"]
    assert max(decode.iterations) == pytest.approx(0.02)
    assert decode.energy_j == pytest.approx(12, rel=0.005)


def test_outliers_are_counted_and_left_out_of_the_mean() -> None:
    engine = FakeEngine(Machine(gpu()), step_s=lambda i: 0.03 if i % 50 == 0 else 0.02)
    decode = session(engine, DECODE).measure().phases["decode"]
    assert decode.latency.mean == pytest.approx(0.02)
    assert decode.n_outliers == sum(t > 0.025 for t in decode.iterations) >= 2


def test_long_steps_are_repeated_as_often_as_asked() -> None:
    engine = FakeEngine(Machine(gpu()), step_s=lambda i: 0.6)
    decode = session(engine, DECODE).measure().phases["decode"]
    assert 20 <= decode.n <= 22


def test_a_window_is_bounded_by_marks_that_the_device_passed() -> None:
    machine = Machine(gpu())
    engine = FakeEngine(machine)
    with engine.stepper("decode") as stepper:
        window = run_window(stepper, _Pair(lambda v: None, solo=True), Limits(), now=machine.clock)
    assert math.fsum(window.times_s) == pytest.approx(window.end_s - window.start_s, abs=1e-9)
    assert window.host_share == pytest.approx(0.05, abs=0.01)


# ------------------------------------------------------------------ workers


class _Pair:
    """Worker 0 of two: the other one answers what ``twin`` makes of each value."""

    worker = 0

    def __init__(self, twin: Any, *, solo: bool = False) -> None:
        self.twin, self.workers = twin, 1 if solo else 2

    def tell(self, order: Any) -> Any:
        return order

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.workers == 1 else [value, self.twin(value)]


def test_two_workers_energies_sum_the_slower_one_sets_the_latency() -> None:
    """The second worker takes 10 % longer; its board draws 300 W throughout."""
    mine, other = gpu(0), gpu(1, Steps(300.0))
    engine = FakeEngine(Machine(mine, other), uuids=[mine.uuid])

    def twin(value: Any) -> Any:
        if isinstance(value, WorkerWindow):
            times = tuple(1.1 * t for t in value.times_s[: int(len(value.times_s) / 1.1)])
            return WorkerWindow(
                times_s=times,
                start_s=value.start_s,
                end_s=value.start_s + math.fsum(times),
                host_share=0.99,
                context_len=value.context_len,
            )
        if isinstance(value, tuple):
            return (other.uuid,)
        if isinstance(value, MemoryProfile):
            return MemoryProfile(weights_bytes=2.7e9, model_bytes=2.5e9, cache_bytes=4e7)
        return value

    request = ProfileRequest(
        model="llama3_2_1b", phases=("decode",), batch=4, parallelism=Parallelism(tp=2)
    )
    found = session(engine, request, team=_Pair(twin)).measure()
    decode = found.phases["decode"]
    assert decode.latency.mean == pytest.approx(0.022)
    assert decode.energy_j == pytest.approx(0.02 * 600 + 0.022 * 300, rel=0.005)
    assert decode.total_power_w == pytest.approx(900, rel=0.005)
    assert decode.mean_power_w == pytest.approx(450, rel=0.005)
    assert decode.regime == "host"
    assert found.memory.weights_bytes == 2.7e9
    assert found.memory.total_cache_bytes == pytest.approx(33554432 + 4e7)
    document = profile_to_json(found)
    assert document["n_gpus"] == 2
    assert [g["board_uuid"] for g in document["decode"]["per_gpu"]] == [
        board_hash(mine.uuid),
        board_hash(other.uuid),
    ]


def test_b38_a_sensor_of_the_machine_counts_once_for_all_its_workers() -> None:
    machine = Machine(gpu(0, Steps(300.0)))
    engine = FakeEngine(machine, uuids=())  # no board belongs to a worker
    request = replace(DECODE, parallelism=Parallelism(tp=2))
    found = session(
        engine,
        request,
        team=_Pair(lambda value: value),
        meters=(lambda uuids: machine.meter([machine.boards[0].uuid]),),
    ).measure()
    decode = found.phases["decode"]
    assert decode.energy_j == pytest.approx(0.02 * 300, rel=0.005)
    assert len(decode.per_gpu) == 1


def test_replicas_share_the_energy_over_all_their_sequences() -> None:
    request = ProfileRequest(
        model="llama3_2_1b",
        phases=("decode",),
        size=False,
        batch=4,
        parallelism=Parallelism(replicas=2),
    )
    boards = gpu(0), gpu(1)
    engine = FakeEngine(Machine(*boards))
    document = profile_to_json(session(engine, request).measure())
    assert document["decode"]["energy_j"] == pytest.approx(2 * 12, rel=0.005)
    assert document["energy_per_token_j"] == pytest.approx(24 / 8, rel=0.005)
    assert document["throughput_tokens_s"] == pytest.approx(8 / 0.02)
    assert document["tokens_per_j"] == pytest.approx(8 / 24, rel=0.005)


def test_b34_b37_the_boards_of_the_run_are_metered_whatever_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work is on boards 4 to 7 of 8, which CUDA numbers from 0 and in another order."""
    boards = [gpu(i, Steps(100.0 * i)) for i in range(1, 9)]
    machine = Machine(*boards)
    used = [boards[i - 1].uuid for i in (7, 4, 5, 6)]
    engine = FakeEngine(machine, uuids=used)
    request = ProfileRequest(
        model="llama3_2_1b", phases=("decode",), size=False, parallelism=Parallelism(tp=4)
    )
    decode = session(engine, request).measure().phases["decode"]
    assert decode.total_power_w == pytest.approx(400 + 500 + 600 + 700, rel=0.005)
    assert [g.mean_power_w for g in decode.per_gpu] == pytest.approx(
        [700, 400, 500, 600], rel=0.005
    )
    # The factory of real runs finds the same boards by UUID, with or without prefix and case.
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*boards, clock=Clock()))
    _, infos = machine_meter([u.removeprefix("GPU-").upper() for u in used])
    assert [i.uuid for i in infos] == used


# ------------------------------------------------------------------ what goes wrong


def reasons_of(*boards: FakeBoard, **fields: Any) -> Any:
    return session(FakeEngine(Machine(*boards)), DECODE, **fields).measure()


def test_b1_without_a_sensor_energy_is_missing_with_the_reason() -> None:
    codes = dict.fromkeys((COUNTER, INSTANT, PLAIN, "field185"), fake.NOT_SUPPORTED)
    found = reasons_of(gpu(errors=codes))
    assert found.phases["decode"].energy_j is None
    assert "energy cannot be measured" in (found.energy_reason or "")
    assert found.phases["decode"].latency.mean == pytest.approx(0.02)
    assert found.valid  # the latency is; whether energy was needed is the command line's affair


def test_b35_a_mig_slice_has_latency_and_a_reason() -> None:
    found = reasons_of(gpu(mig_slices=("MIG-8e9b",)))
    assert "MIG is on" in (found.energy_reason or "")
    assert found.phases["decode"].latency.mean == pytest.approx(0.02)


def test_b14_a_sensor_that_dies_spoils_the_energy_and_not_the_run() -> None:
    def dies(t: float) -> int | None:
        return fake.GPU_IS_LOST if t > 1009 else None

    found = reasons_of(gpu(errors={"*": dies}))
    assert found.phases["decode"].latency.mean == pytest.approx(0.02)
    assert not found.valid
    assert any(r.startswith("decode: ") for r in found.reasons)


def test_b18_another_load_on_the_board_shows_in_its_idle_power() -> None:
    board = gpu()
    engine = FakeEngine(Machine(board), on_step=lambda i: setattr(board.power, "idle_w", 190.0))
    found = session(engine, DECODE).measure()
    assert "baseline_unstable" in found.phases["decode"].flags
    assert not found.valid


def test_foreign_processes_spoil_every_phase() -> None:
    request = ProfileRequest(model="llama3_2_1b", phases=("decode",), size=False, foreign=True)
    found = session(FakeEngine(Machine(gpu())), request).measure()
    assert found.phases["decode"].flags == ("foreign_process",)
    assert found.reasons == ("decode: foreign_process",)


def test_b32_a_board_that_throttles_is_not_valid_and_one_at_its_cap_is() -> None:
    hot = reasons_of(gpu(reasons=lambda t: 0x40))
    assert "throttled" in hot.phases["decode"].flags
    assert not hot.valid
    capped = reasons_of(gpu(reasons=lambda t: 0x4))
    assert "power_capped" in capped.phases["decode"].flags
    assert capped.valid


def test_an_interruption_keeps_what_was_measured() -> None:
    def interrupt(number: int) -> None:
        if engine.phase == "request":
            raise KeyboardInterrupt

    request = ProfileRequest(model="llama3_2_1b", size=False)
    engine = FakeEngine(Machine(gpu()), on_step=interrupt)
    saved: list[set[str]] = []
    found = session(engine, request, save=lambda p: saved.append(set(p.phases))).measure()
    assert saved == [{"prefill"}, {"prefill", "decode"}]
    assert set(found.phases) == {"prefill", "decode"}
    assert found.reasons == ("interrupted before request",)


def test_an_added_metric_sees_what_was_measured() -> None:
    def metric(given: MetricInput) -> dict[str, Any]:
        return {"steps_per_minute": 60 / given.phases["decode"].latency.mean}

    found = reasons_of(gpu(), metrics=(metric,))
    assert profile_to_json(found)["metrics"]["steps_per_minute"] == pytest.approx(3000)


# ------------------------------------------------------------------ documents


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    engine = FakeEngine(Machine(gpu(sm_mhz=lambda t: 1900, temperature_c=lambda t: 51)))
    request = ProfileRequest(model="llama3_2_1b", batch=4, prompt_len=256, gen_len=11)
    return profile_to_json(session(engine, request).measure(), iterations=True)


def test_the_document_has_the_agreed_fields(document: dict[str, Any]) -> None:
    assert set(document) - {"metrics"} == KEYS
    for phase in ("prefill", "decode", "request"):
        assert set(document[phase]) == PHASE_KEYS | {"iterations"}
        assert set(document[phase]["latency"]) == {"mean", "p50", "p90", "p99", "std", "ci95"}
    assert set(document["memory"]) == {
        *("weights_bytes", "kv_cache_bytes", "predicted_kv_cache_bytes", "peak_bytes"),
        "capacity_bytes",
    }
    assert document["schema"] == "energylens/profile/v1"
    assert document["device"] == "h200"


def test_ela_names_carry_the_same_numbers_divided_by_the_batch(document: dict[str, Any]) -> None:
    """B121: an energy of 12 J a step is 3 J a token at batch 4."""
    assert document["ttft_latency_ms"] == pytest.approx(20)
    assert document["tpot_energy_j_per_token"] == pytest.approx(12 / 4, rel=0.005)
    assert document["energy_per_prompt_j"] == document["ttft_energy_j_per_prompt"]
    assert document["model_size_gb"] == pytest.approx(2.5)
    # One value per key and value head, layer and token: 2 x 8 x 64 x 16 x 256 x 4 sequences, bf16.
    assert document["memory"]["predicted_kv_cache_bytes"] == 2 * 8 * 64 * 16 * 256 * 4 * 2


def test_b126_b132_the_time_between_tokens_follows_from_both_ends() -> None:
    engine = FakeEngine(
        Machine(gpu()), step_s=lambda i: {"prefill": 0.1, "request": 0.12}[engine.phase]
    )
    for gen_len, expected in ((3, 0.01), (1, None)):
        request = ProfileRequest(
            model="llama3_2_1b", phases=("prefill", "request"), size=False, gen_len=gen_len
        )
        found = session(engine, request).measure().tpot_s
        assert found == (None if expected is None else pytest.approx(expected))


def test_rows_of_a_truth_csv_say_what_the_document_says(
    document: dict[str, Any], tmp_path: Path
) -> None:
    text = profile_csv(document)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [r["phase"] for r in rows] == ["prefill", "decode", "request"]
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    for row, read in zip(rows, read_measurements([path]), strict=True):
        phase = document[row["phase"]]
        assert read.latency_s == pytest.approx(phase["latency_s"], rel=1e-5)
        assert read.energy_j == pytest.approx(phase["energy_j"], rel=1e-5)
        assert (read.spec, read.device, read.batch, read.mode) == (
            "llama3_2_1b",
            "h200",
            4,
            "eager",
        )
        assert float(row["board_power_w"]) == pytest.approx(600, rel=0.005)
        assert (row["sm_clock_mhz"], row["gpu_temp_c"]) == ("1900", "51")


def test_the_power_time_line_names_phases_and_boards(tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    request = ProfileRequest(
        model="llama3_2_1b", phases=("decode",), size=False, power_timeline=str(path)
    )
    board = gpu()
    document = profile_to_json(session(FakeEngine(Machine(board)), request).measure())
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    inside = [float(r["power_w"]) for r in rows if r["phase"] == "decode"]
    outside = [float(r["power_w"]) for r in rows if not r["phase"]]
    assert len(inside) == pytest.approx(30, abs=1)
    assert set(inside) == {600.0}
    assert 120.0 in outside
    assert {r["board_uuid"] for r in rows} == {board_hash(board.uuid)}
    assert document["power_timeline"] == str(path)


def test_the_throttle_check_tells_heat_clocks_and_reasons_of_each_phase(tmp_path: Path) -> None:
    board = gpu(
        temperature_c=lambda t: 45 + int((t - 1000) * 2),
        sm_mhz=lambda t: 1980 if t < 1009 else 1200,
        reasons=lambda t: 0 if t < 1009 else 0x20,
    )
    request = ProfileRequest(
        model="llama3_2_1b",
        phases=("decode",),
        size=False,
        throttle_check=True,
        trace_dir=str(tmp_path),
    )
    document = profile_to_json(session(FakeEngine(Machine(board)), request).measure())
    (check,) = document["throttle"]
    assert (check["phase"], check["board_uuid"]) == ("decode", board_hash(board.uuid))
    assert (check["sm_clock_mhz"]["low"], check["sm_clock_mhz"]["high"]) == (1200, 1980)
    assert check["temperature_c"]["low"] < 63 <= check["temperature_c"]["high"]
    assert check["throttled"] is True
    assert 0 < check["reasons"]["sw_thermal_slowdown"] < 1
    assert "throttled" in document["decode"]["flags"]
    rows = csv.DictReader((tmp_path / "throttle.csv").read_text(encoding="utf-8").splitlines())
    after = [r for r in rows if r["sm_clock_mhz"] == "1200"]
    assert {r["reasons"] for r in after} == {"sw_thermal_slowdown"}


def traced(folder: Path, **fields: bool) -> dict[str, Any]:
    request = ProfileRequest(
        model="llama3_2_1b", phases=("decode",), size=False, trace_dir=str(folder), **fields
    )
    engine = FakeEngine(Machine(gpu()))
    return profile_to_json(session(engine, request).measure())


def test_the_profiled_pass_gives_kernels_by_op_kind_and_no_energy(tmp_path: Path) -> None:
    plain = traced(tmp_path / "none")
    document = traced(tmp_path, torch_profile=True, kernel_profile=True)
    assert document["decode"]["energy_j"] == pytest.approx(plain["decode"]["energy_j"])
    assert [
        (r["kind"], r["count"], round(r["latency_s"] * 1e6)) for r in document["breakdown"]
    ] == [
        ("gemm", 1, 12),
        ("norm", 1, 4),
    ]
    assert [r["share"] for r in document["breakdown"]] == pytest.approx([0.75, 0.25])
    trace = json.loads(gzip.decompress((tmp_path / "decode-worker0.json.gz").read_bytes()))
    counters = {e["name"]: e["args"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters["GPU 0 power"] == {"W": 120.0}  # the scripted board rests meanwhile
    assert counters["GPU 0 SM clock"] == {"MHz": pytest.approx(1980)}
    rows = csv.DictReader((tmp_path / "kernels-worker0.csv").read_text("utf-8").splitlines())
    assert [r["op"] for r in rows] == ["nvjet_a", "vectorized_elementwise"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    (row,) = read_measurements([path])
    assert [k.kind for k in row.kernels] == ["gemm", "norm"]


def test_a_kernel_table_alone_leaves_no_trace(tmp_path: Path) -> None:
    document = traced(tmp_path, kernel_profile=True)
    assert [p.name for p in tmp_path.iterdir()] == ["kernels-worker0.csv"]
    assert len(document["breakdown"]) == 2
    assert traced(tmp_path / "none")["breakdown"] is None


def test_loads_integrate_exactly() -> None:
    load = Load(100.0, 500.0)
    load.add(1.0, 2.0)
    load.add(2.5, 3.0)
    assert load.energy(0, 2.75) == pytest.approx(100 * 2.75 + 400 * 1.25)
