"""The profiled pass: a few steps of each phase under ``torch.profiler``, after all is measured.

A profiler slows the host down and its short pass meets a rested board, so no time and no energy of
it enters the figures; what it gives is whose kernels the device's time belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from energylens.profiler.steps import Stepper
from energylens.profiler.trace import MARK, kernel_table
from energylens.results import KernelRow

STEPS = {"prefill": 3, "decode": 10, "request": 1}
"""Steps of each phase in a trace."""


def trace_file(folder: Path, phase: str, worker: int) -> Path:
    """Where a worker's trace of a phase goes."""
    return folder / f"{phase}-worker{worker}.json.gz"


def record(
    stepper: Stepper,
    phase: str,
    path: Path,
    marks: AbstractContextManager[None],
    eager: Callable[[], None] | None,
) -> None:
    """Write the trace of some steps.

    Args:
        stepper: the phase.
        phase: its name.
        path: file to write.
        marks: within it, launches carry the kind of their op.
        eager: launches a step that is a graph kernel by kernel, so that the kernels of the graph
            get their kinds; None where steps are eager.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    stepper.step()
    stepper.wait(stepper.mark())
    watched = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if stepper.queued else [])]
    path.parent.mkdir(parents=True, exist_ok=True)
    with marks, profile(activities=watched) as run:
        if eager is not None:
            eager()
        for _ in range(STEPS[phase]):
            with record_function(MARK + phase):
                stepper.step()
        stepper.wait(stepper.mark())
    run.export_chrome_trace(str(path))


def kernels(folder: Path, phases: Sequence[str], worker: int) -> tuple[KernelRow, ...]:
    """Kernels of a worker's traces; none where nothing ran on a GPU."""
    tables = (kernel_table(trace_file(folder, p, worker), phase=p) for p in phases)
    return tuple(row for table in tables for row in table)
