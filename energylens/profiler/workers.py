"""The processes of a run with several workers: one per GPU, started by torchrun's launcher.

Run as ``python -m energylens.profiler.workers REQUEST.json PROFILE.json`` under torchrun; worker 0
writes the document after every phase, so that what was measured is there whatever happens later.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from energylens.bench.trial import Team
from energylens.errors import EnergyLensError
from energylens.files import write_atomically
from energylens.measured import Profile, profile_to_json
from energylens.profiler.options import ProfileRequest
from energylens.profiler.session import METERS, METRICS, Progress, Quiet, Session, Solo
from energylens.profiler.steps import Limits

FAILED = "error"
"""Key of the document that a run writes instead of a profile where it cannot go on."""


class TorchTeam:
    """All workers of a torchrun; orders travel over a CPU group of their own."""

    def __init__(self, device: str) -> None:
        """Join the process group that torchrun describes in the environment."""
        import torch
        import torch.distributed as dist

        if device.startswith("cuda"):
            dist.init_process_group("nccl", device_id=torch.device(device))
        else:
            dist.init_process_group("gloo")
        self._dist = dist
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        self._cpu = dist.new_group(backend="gloo")

    def tell(self, order: Any) -> Any:
        """Worker 0's ``order``, on every worker."""
        box = [order]
        self._dist.broadcast_object_list(box, src=0, group=self._cpu)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, on every worker."""
        out: list[Any] = [None] * self.workers
        self._dist.all_gather_object(out, value, group=self._cpu)
        return out

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


def hf_session(
    request: ProfileRequest,
    team: Team | None,
    *,
    progress: Progress | None = None,
    save: Callable[[Profile], None] = lambda profile: None,
) -> Session:
    """Load this worker's share of the model; the session that measures it.

    Args:
        request: the run.
        team: all workers, or None to run alone.
        progress: who shows how far it is.
        save: is given the profile after every phase.
    """
    from energylens.profiler.hf import HfEngine, default_device
    from energylens.profiler.loader import Place, load
    from energylens.profiler.plugins import load_plugins

    load_plugins(request.plugins)
    team = team or Solo()
    place = Place(device=default_device(team.worker), worker=team.worker, workers=team.workers)
    return Session(
        request=request,
        engine=HfEngine(request, load(request, place), place),
        team=team,
        limits=Limits(repeats=request.repeats),
        meters=METERS,
        metrics=METRICS,
        progress=progress or Quiet(),
        save=save,
    )


def start_workers(request: ProfileRequest, out: Path, workers: int) -> int:
    """Run ``workers`` processes on this node; the exit code of the launcher.

    What they print goes to stderr: stdout belongs to the report.
    """
    asked = out.with_name("request.json")
    asked.write_text(request.to_json(), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={workers}", "-m", "energylens.profiler.workers"]
    environment = dict(os.environ)
    if request.reduce_strategy:
        environment["NCCL_ALGO"] = request.reduce_strategy.capitalize()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    return subprocess.run(
        [*command, str(asked), str(out)], stdout=sys.stderr, check=False, env=environment
    ).returncode


def main(arguments: list[str]) -> int:
    """One worker."""
    from energylens.profiler.hf import default_device
    from energylens.profiler.progress import bar

    logging.getLogger("energylens").addHandler(logging.StreamHandler(sys.stderr))
    request = ProfileRequest.from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    out = Path(arguments[1])
    team = TorchTeam(default_device(int(os.environ["LOCAL_RANK"])))

    def save(profile: Profile) -> None:
        if team.worker == 0:
            document = profile_to_json(profile, iterations=True)
            write_atomically(out, json.dumps(document))

    try:
        with bar(enabled=team.worker == 0) as progress:
            save(hf_session(request, team, progress=progress, save=save).measure())
    except EnergyLensError as error:
        if team.worker == 0:
            failure = {FAILED: str(error), "exit_code": error.exit_code}
            write_atomically(out, json.dumps(failure))
        return error.exit_code
    finally:
        team.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
