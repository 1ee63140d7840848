"""``energylens profile``: check what was asked, start the workers, give back the document."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energylens.errors import EnergyLensError, MeterError, UnsupportedError
from energylens.measured import Profile, profile_to_json
from energylens.profiler import workers
from energylens.profiler.loader import find_source
from energylens.profiler.options import ProfileRequest
from energylens.profiler.progress import bar
from energylens.spec.load import load_spec

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)


class _WorkerError(EnergyLensError):
    """A worker's complaint, with its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


def run(
    request: ProfileRequest,
    *,
    measure_anchor: bool = False,
    save: Callable[[Mapping[str, Any]], None] = lambda document: None,
    console: Console | None = None,
) -> Mapping[str, Any]:
    """Measure, and give back the ``energylens/profile/v1`` document, iterations included.

    Args:
        request: what to measure.
        measure_anchor: take the anchors of the boards and the host first.
        save: is given the document after every phase, so that an interruption loses little.
        console: where progress goes; stderr by default.

    Raises:
        SpecError: there is no such model, spec or plugin.
        UnsupportedError: a library is missing, or the layout cannot run.
    """
    if request.spec is not None:
        load_spec(request.spec)
    find_source(request)
    _check_libraries(request)
    request = replace(request, foreign=_has_foreign_processes())
    with tempfile.TemporaryDirectory() as scratch:
        if measure_anchor:
            request = replace(
                request,
                anchor_files=(
                    *request.anchor_files,
                    *_measure_anchors(request.parallelism.gpus, Path(scratch)),
                ),
            )
        if request.engine == "hf" and request.parallelism.gpus > 1:
            return _over_workers(request, Path(scratch) / "profile.json", save)
        return _here(request, save, console)


def _here(
    request: ProfileRequest,
    save: Callable[[Mapping[str, Any]], None],
    console: Console | None,
) -> Mapping[str, Any]:
    def save_profile(profile: Profile) -> None:
        save(profile_to_json(profile, iterations=True))

    with bar(console) as progress:
        if request.engine == "vllm":
            from energylens.profiler.vllm import vllm_session

            with vllm_session(request, progress=progress, save=save_profile) as session:
                found = session.measure()
        else:
            found = workers.hf_session(
                request, None, progress=progress, save=save_profile
            ).measure()
    document = profile_to_json(found, iterations=True)
    save(document)
    return document


def _over_workers(
    request: ProfileRequest, out: Path, save: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any]:
    gpus = request.parallelism.gpus
    try:
        code = workers.start_workers(request, out, gpus)
    except KeyboardInterrupt:
        code = 130
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if workers.FAILED in document:
        raise _WorkerError(document[workers.FAILED], document["exit_code"])
    if not document:
        raise UnsupportedError(
            f"the {gpus} workers failed (exit code {code}) before anything was measured; their "
            "messages are above"
        )
    if code:
        document["valid"] = False
        document["reasons"].append(f"the workers ended early (exit code {code})")
    save(document)
    return document


def _check_libraries(request: ProfileRequest) -> None:
    """Refuse before anything starts where a library is missing."""
    needed = ("torch", "transformers", *(["vllm"] if request.engine == "vllm" else []))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "vllm" if "vllm" in missing else "gpu"
        raise UnsupportedError(
            f"profile needs {' and '.join(missing)}; pip install '.[{extra}]' in the checkout"
        )


def _has_foreign_processes() -> bool:
    """Whether others use the boards that CUDA shows, before this run does."""
    from energylens.meter.nvml import NvmlMeter, visible_devices

    try:
        boards = visible_devices(NvmlMeter().devices(), os.environ)
    except MeterError:
        return False
    busy = [b for b in boards if b.other_pids]
    for board in busy:
        _log.warning("%d other process(es) use %s", len(board.other_pids), board.name)
    return bool(busy)


def _measure_anchors(gpus: int, scratch: Path) -> list[str]:
    """Anchor files of the first boards and the host, taken by a process of its own.

    This process must not hold a context on boards that the workers will load.
    """
    command = [sys.executable, "-m", "energylens", "calibrate", "--anchor", "--json"]
    done = subprocess.run(
        [*command, "--gpus", str(gpus), "--out", str(scratch)],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    if done.returncode:
        raise _WorkerError(
            "--measure-anchor: the anchors cannot be taken (see above)", done.returncode
        )
    return list(json.loads(done.stdout)["anchors"])
