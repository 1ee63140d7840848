"""The same search by EnergyLens and by AIConfigurator, in one run: wall time, memory, rows, watts.

    python -m venv aic && aic/bin/pip install aiconfigurator
    python benchmarks/against_aiconfigurator.py aic/bin/aiconfigurator [spec ...]

Both look for the best layouts of eight H200s under vLLM for 2048 + 512 tokens within 40 ms a token,
as whole processes that start cold and write their CSV. AIConfigurator reads the model's config.json
from a folder, so neither needs a network. Rows are those of the CSV files (of AIConfigurator its
aggregated and disaggregated fronts); "with energy" are those whose energy or power is above 0.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from predict_speed import ENERGYLENS, timed

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "data" / "configs"
GPUS, PROMPT, GENERATE, TPOT_MS, TTFT_MS = "8", "2048", "512", "40", "60000"


def rows(files: Sequence[Path], energy: str) -> tuple[int, int]:
    """Rows of CSV files, and those of them whose column ``energy`` is above 0."""
    found = [row for file in files for row in csv.DictReader(file.open(encoding="utf-8"))]
    return len(found), sum(float(row[energy] or 0) > 0 for row in found)


def energylens(spec: str, folder: Path) -> tuple[float, float, int, int]:
    """Seconds, MiB, rows, rows with energy."""
    out = folder / "all.csv"
    command = [*ENERGYLENS, "explore", spec, "--gpus", GPUS]
    command += ["--prompt-len", PROMPT, "--gen-len", GENERATE, "--max-tpot-ms", TPOT_MS]
    took = timed([*command, "--csv", str(out)])
    return *took, *rows([out], "energy_per_token_j")


def aiconfigurator(program: str, spec: str, folder: Path) -> tuple[float, float, int, int]:
    """Seconds, MiB, rows, rows with energy."""
    model, out = folder / spec, folder / "out"
    model.mkdir()
    shutil.copy(CONFIGS / f"{spec}.json", model / "config.json")
    command = [program, "cli", "default", "--model-path", str(model), "--total-gpus", GPUS]
    command += ["--system", "h200_sxm", "--backend", "vllm", "--isl", PROMPT, "--osl", GENERATE]
    command += ["--tpot", TPOT_MS, "--ttft", TTFT_MS, "--no-color", "--save-dir", str(out)]
    took = timed(command)
    return *took, *rows(sorted(out.rglob("pareto.csv")), "power_w")


def main() -> None:
    """Print a table."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(
        f"{'model':14s} {'tool':16s} {'wall s':>8s} {'MiB':>7s} {'rows':>7s} {'with energy':>12s}"
    )
    for spec in sys.argv[2:] or ["llama3_70b", "qwen3_moe"]:
        with tempfile.TemporaryDirectory() as scratch:
            found = {
                "energylens": energylens(spec, Path(scratch)),
                "aiconfigurator": aiconfigurator(sys.argv[1], spec, Path(scratch)),
            }
        for tool, (wall, peak, count, with_energy) in found.items():
            print(f"{spec:14s} {tool:16s} {wall:8.2f} {peak:7.0f} {count:7d} {with_energy:12d}")


if __name__ == "__main__":
    main()
