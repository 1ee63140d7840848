"""Cold cost of ``energylens predict``: whole process, median and worst of several runs.

Run: ``python benchmarks/predict_speed.py [runs]``. Aims: 0.5 s on 2 cores, 150 MB.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

COMMAND = ("predict", "llama3_70b", "--engine", "hf", "--tp", "2", "--json")


ENERGYLENS = (sys.executable, "-m", "energylens")


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Seconds and peak MiB of one whole process, from its start to its end."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(log.read().decode(errors="replace")[-2000:])
    return wall, usage.ru_maxrss / 1024


def main(runs: int) -> None:
    """Run the command ``runs`` times and print what it took."""
    walls, peaks = zip(*(timed((*ENERGYLENS, *COMMAND)) for _ in range(runs)), strict=True)
    print(
        f"wall: median {statistics.median(walls):.3f} s, worst {max(walls):.3f} s; "
        f"peak memory {max(peaks):.0f} MiB ({runs} runs)"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
