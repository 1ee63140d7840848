"""Recorded runs of `energylens profile` on H200 against truth rows of the same steps.

The boards are others than those of the truth file, so both are brought to the same anchors first
(DESIGN section 4, law 8). Nothing is fitted on either.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from energylens.cli import main
from energylens.truth import read_measurements

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "profile_h200"
PAGE = Path(__file__).parents[2] / "docs" / "profiler.md"
LIMIT = 0.03

STEPS = {
    # Run, phase -> tp, batch, mode of the truth row (prompts of 1024); the board is at its cap.
    ("llama3_8b_prefill", "prefill"): (1, 8, "eager", True),
    ("llama3_8b_tp2_prefill", "prefill"): (2, 8, "eager", True),
    ("llama3_8b_decode", "decode"): (1, 16, "cuda_graph", False),
    ("qwen3_moe_decode", "decode"): (1, 16, "cuda_graph", False),
}
ONE_BOARD = RUNS / "one_board.csv"
"""Truth rows, all that was kept of some runs."""
KEPT_AS_A_ROW = {"qwen3_moe_decode": "e232f9338a26-decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A measured phase over the truth row, as it is and with the row brought to its boards."""

    raw_latency: float
    raw_energy: float
    latency: float
    energy: float


def document(name: str) -> dict[str, Any]:
    if name in KEPT_AS_A_ROW:
        with ONE_BOARD.open(encoding="utf-8") as file:
            row = next(r for r in csv.DictReader(file) if r["record_id"] == KEPT_AS_A_ROW[name])
        anchor = {n.removeprefix("anchor_"): v for n, v in row.items() if n.startswith("anchor_")}
        board = {n: float(v) for n, v in anchor.items()}
        measured = {n: float(row[n]) for n in ("latency_s", "energy_j")}
        return {"spec": row["spec"], "anchors": {"boards": [board]}, row["phase"]: measured}
    found: dict[str, Any] = json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def pair(shared_truth: Path) -> Callable[[str, str], Pair]:
    with (shared_truth / "h200_hf.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def found(name: str, phase: str) -> Pair:
        tp, batch, mode, capped = STEPS[name, phase]
        wanted = {"phase": phase, "tp": tp, "batch": batch, "mode": mode, "prompt_len": 1024}
        wanted |= {"spec": document(name)["spec"]}
        (row,) = (r for r in rows if all(r[k] == str(v) for k, v in wanted.items()))
        return compared(document(name), phase, row, capped=capped)

    return found


def compared(run: dict[str, Any], phase: str, row: dict[str, str], *, capped: bool) -> Pair:
    """Capped: time follows the slowest board's GEMM, power is the cap's. Else: time follows its
    weight reads, power above idle follows that of a stream."""
    new = run["anchors"]["boards"]
    latency_s, energy_j = float(row["latency_s"]), float(row["energy_j"])

    def old(name: str) -> list[float]:
        return [float(cell) for cell in row[name].split(";")]

    def faster(name: str) -> float:
        return min(float(board[name]) for board in new) / min(old(f"anchor_{name}"))

    if capped:
        expected_s = latency_s / faster("gemm_tflops")
        expected_w = sum(old("board_power_w"))
    else:
        expected_s = latency_s / faster("gemv_gbs")
        expected_w = sum(
            board["idle_w"] + (watts - idle) * (board["stream_w"] - board["idle_w"]) / (top - idle)
            for watts, idle, top, board in zip(
                old("board_power_w"), old("anchor_idle_w"), old("anchor_stream_w"), new, strict=True
            )
        )
    measured = run[phase]
    return Pair(
        raw_latency=measured["latency_s"] / latency_s - 1,
        raw_energy=measured["energy_j"] / energy_j - 1,
        latency=measured["latency_s"] / expected_s - 1,
        energy=measured["energy_j"] / (expected_s * expected_w) - 1,
    )


@pytest.mark.parametrize(("name", "phase"), STEPS)
def test_profiles_agree_with_the_truth_at_the_same_anchors(
    pair: Callable[[str, str], Pair], name: str, phase: str
) -> None:
    found = pair(name, phase)
    assert abs(found.latency) <= LIMIT
    assert abs(found.energy) <= LIMIT


@pytest.mark.parametrize(("name", "phase"), STEPS)
def test_the_page_prints_these_differences(
    pair: Callable[[str, str], Pair], name: str, phase: str
) -> None:
    found = pair(name, phase)
    (line,) = (
        text
        for text in PAGE.read_text(encoding="utf-8").splitlines()
        if text.startswith("|") and f"`{name}`" in text
    )
    shown = [
        f"{100 * x:+.1f} %"
        for x in (found.raw_latency, found.raw_energy, found.latency, found.energy)
    ]
    assert [cell.strip() for cell in line.strip("|").split("|")][-4:] == shown


def test_validate_reads_every_recorded_run(capsys: pytest.CaptureFixture[str]) -> None:
    files = [*sorted(RUNS.glob("*.json")), ONE_BOARD]
    assert len(files) >= 10
    assert main(["validate", *map(str, files), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    measured = [m for path in files for m in read_measurements([path])]
    assert len(rows) == len(measured) >= 15
    refused = [row["reason"] for row in rows if row["reason"]]
    assert refused == ["not valid as measured: imprecise"]  # prefills that waited for the host


def test_boards_are_told_apart_by_what_cuda_shows() -> None:
    """Runs with CUDA_VISIBLE_DEVICES=0 and 1 metered the two boards of the run over both."""
    alone = [document(f"llama3_2_1b_board{i}")["meter"]["boards"] for i in (0, 1)]
    assert [*alone[0], *alone[1]] == document("llama3_2_1b_replicas2")["meter"]["boards"]


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.json")), ids=lambda p: p.stem)
def test_recorded_energies_follow_from_power_and_time(path: Path) -> None:
    run = json.loads(path.read_text(encoding="utf-8"))
    for phase in ("prefill", "decode"):
        found = run[phase]
        if found is None:
            continue
        assert sum(g["energy_j"] for g in found["per_gpu"]) == pytest.approx(found["energy_j"])
        assert found["mean_power_w"] * run["n_gpus"] == pytest.approx(found["total_power_w"])
        assert found["total_power_w"] * found["latency_s"] == pytest.approx(
            found["energy_j"], rel=0.01
        )
        sequences = run["workload"]["batch"] * run["parallelism"]["replicas"]
        name = {"prefill": "energy_per_prompt_j", "decode": "energy_per_token_j"}[phase]
        assert run[name] == pytest.approx(found["energy_j"] / sequences)
