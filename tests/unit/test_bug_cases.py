"""Reports from the field that concern no single module; `tests/bug_cases.md` lists all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_board import FakeBoard, FakeClock, FakeMeter, FakeProvider, FakeWork
from helpers_nvml import Steps

from energylens.bench.anchor import Session, measure_anchor, recheck
from energylens.bench.calibrate import Machine, run
from energylens.bench.trial import measure
from energylens.errors import CalibrationError
from energylens.graph import make_op
from energylens.meter.base import DeviceSeries, reading
from energylens.store import Provenance, Sample, Store, Trial, board_hash


def power_of(steps: Steps, end_s: float, period_s: float = 0.1) -> DeviceSeries:
    times = [i * period_s for i in range(round(end_s / period_s) + 1)]
    return DeviceSeries(uuid="GPU-a", instant_power=tuple((t, steps.at(t)) for t in times))


def test_b18_a_baseline_that_doubles_while_measuring_is_told() -> None:
    board = FakeBoard(idle_w=52.0)
    session = Session(
        recorder=board, uuid=board.uuid, device="h200", power_limit_w=700.0, sleep=board.sleep
    )
    provider = FakeProvider(board)
    anchor = measure_anchor(provider, session, time="")
    board.idle_w = 101.0  # a monitor was started
    drift = recheck(provider, session, anchor).drift
    assert anchor.idle_w == pytest.approx(52.0)
    assert drift.idle_w == pytest.approx(101 / 52 - 1)
    assert drift.largest > 0.02  # above it, calibrate asks to run again


def test_b29_loading_the_model_is_not_in_the_energy_of_the_run() -> None:
    series = power_of(Steps(300.0, (30.05, 500.0), (40.05, 90.0)), 50)
    assert reading(series, 30.1, 40.0).energy_j == pytest.approx(500.0 * 9.9)
    assert reading(series, 0.0, 30.0).energy_j == pytest.approx(300.0 * 30)


def test_b30_the_steady_part_and_the_whole_run_are_two_numbers() -> None:
    ramp = Steps(100.0, (5.0, 200.0), (10.0, 400.0), (30.0, 200.0), (35.0, 100.0))
    series = power_of(ramp, 40)
    steady, whole = reading(series, 10.0, 29.8), reading(series, 0.0, 40.0)
    assert steady.mean_power_w == pytest.approx(400.0)
    assert whole.mean_power_w == pytest.approx(ramp.energy(0, 40) / 40, rel=0.005)


def test_b31_a_row_of_zero_energy_is_refused_with_its_number(tmp_path: Path) -> None:
    op = make_op("gemm", m=1, n=64, k=64)
    trial = Trial(
        latency_s=1.2e-3,
        latency_rel_se=0.01,
        power_w=400.0,
        power_rel_se=0.01,
        clock_hz=None,
        clock_min_hz=None,
        temperature_c=None,
        ticks=8,
        window_s=0.8,
    )
    run = Provenance(run_id="r", time="t", device="h200", provider="torch", power_limit_w=700.0)
    sample = Sample(
        block="op", label="q", ops=(op,), trial=trial, board_uuid="b", run_id="r", time="t"
    )
    with Store(tmp_path) as store:
        store.begin(run)
        store.append(sample)
    path = tmp_path / "samples.csv"
    path.write_text(path.read_text().replace("400.0", "0.0"))
    with pytest.raises(CalibrationError, match=r"samples\.csv, line 2: power_w is 0\.0"):
        Store(tmp_path)


def test_b33_a_board_that_heats_up_and_slows_down_is_not_steady() -> None:
    board = FakeBoard(pace=lambda t: 1 + 0.15 * min(1.0, (t - 1000.0) / 2))  # 10.0 to 11.5 ms
    work = FakeWork(board, seconds=10e-3, executions=1)
    trial = measure(work, board, board.uuid, sleep=board.sleep)
    assert "not_steady" in trial.flags
    assert trial.latency_rel_se > 0.01


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_b41_calibrate_meters_the_board_that_runs_whatever_the_two_orders_are(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    clock = FakeClock()
    boards = [FakeBoard(f"GPU-{i}", clock=clock, busy_w=300.0 + 100 * i) for i in (0, 1)]
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema: energylens/plan/v1\nname: small\n"
        'points:\n- {kernel: gemm, grid: {m: [1, 2, 4, 8], "n, k": [[64, 64]]}}\n'
    )
    machine = Machine(
        meter=lambda: FakeMeter(*boards),  # NVML's order
        provider=lambda name, ordinal: FakeProvider(boards[order[ordinal]]),  # CUDA's
        sleep=boards[0].sleep,
        torchrun=lambda workers, arguments: 0,
        environment={},
    )
    run(plan=plan, out=tmp_path / "out", machine=machine, gpus=2, blocks=["ops"])
    for board in boards:
        store = Store(tmp_path / "out" / "samples" / "h200" / board_hash(board.uuid))
        watts = [s.trial.power_w for s in store if s.block == "op" and s.trial]
        assert watts
        assert watts == pytest.approx([board.busy_w(0.0)] * len(watts), rel=0.01)


TABLE = Path(__file__).resolve().parents[1] / "bug_cases.md"


def table() -> dict[str, list[str]]:
    """Id -> test modules of the table."""
    rows = [line.split("|") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {
        row[1].strip(): re.findall(r"`(test_\w+)`", row[4])
        for row in rows
        if len(row) > 4 and re.fullmatch(r"B\d+", row[1].strip())
    }


def test_every_report_of_the_table_is_named_in_a_module_given_for_it() -> None:
    assert len(table()) == 52
    for number, modules in table().items():
        assert modules, number
        texts = [(TABLE.parent / "unit" / f"{m}.py").read_text(encoding="utf-8") for m in modules]
        word = re.compile(rf"{number}\b|_{number.lower()}_", re.IGNORECASE)
        assert any(word.search(text) for text in texts), f"{number}: not named in {modules}"
