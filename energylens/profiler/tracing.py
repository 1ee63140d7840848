"""The profiled pass: a few steps of each phase under ``torch.profiler``, after all is measured.

A profiler slows the host down and its short pass meets a rested board, so no time and no energy of
it enters the figures; what it gives is whose kernels the device's time belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from energylens.bench.trial import Team
from energylens.files import write_atomically
from energylens.profiler.options import ProfileRequest
from energylens.profiler.steps import Stepper
from energylens.profiler.trace import MARK, kernel_csv, kernel_table
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


@contextmanager
def profiled_pass(
    request: ProfileRequest,
    trace: Callable[[str, Path], None],
    team: Team,
    begins: Callable[[str], None],
) -> Iterator[tuple[tuple[KernelRow, ...], Path]]:
    """Trace every phase on every worker; the kernels of this one, and the folder of all traces.

    Traces that are not asked for are thrown away at the end.

    Args:
        request: the run.
        trace: writes the trace of a phase to a file.
        team: all workers; every one calls this.
        begins: is told which phase begins.
    """
    folder = Path(request.trace_dir)
    with ExitStack() as stack:
        traces = folder
        if not request.torch_profile:
            traces = Path(stack.enter_context(TemporaryDirectory()))
        for phase in request.phases:
            begins(f"{phase}, kernels")
            team.gather(None)
            trace(phase, trace_file(traces, phase, team.worker))
        rows = tuple(
            row
            for phase in request.phases
            for row in kernel_table(trace_file(traces, phase, team.worker), phase=phase)
        )
        if request.kernel_profile:
            write_atomically(folder / f"kernels-worker{team.worker}.csv", kernel_csv(rows))
        team.gather(None)
        yield rows, traces
