"""`energylens calibrate`: which boards, which plan, who measures it, and the fit at the end.

An interrupted run keeps what it measured, and the same command goes on where it stopped. With
several GPUs the collectives run first, in processes of their own that torchrun starts (or in this
one, where torchrun started it, so that several nodes work the same way); then each board measures
its part of the plan, one after another, with some points in common.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energylens.bench.anchor import Session
from energylens.bench.board import (
    HEAD_S,
    HEAD_WINDOWS,
    TAIL_S,
    TAIL_WINDOWS,
    Bar,
    BoardReport,
    BoardRequest,
    BoardRun,
    Provider,
    host_trial,
    now,
)
from energylens.bench.plan import Plan, load_plan, plan_for, split
from energylens.bench.team import BLOCKS as TEAM_BLOCKS
from energylens.bench.team import collectives_worker
from energylens.bench.trial import TrialLimits
from energylens.errors import CalibrationError, MeterError, SpecError, UnsupportedError
from energylens.lower import valid_tp
from energylens.meter.base import AbstractMeter, DeviceInfo, require_energy
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.model import Spec
from energylens.spec.resources import data_dir
from energylens.spec.system import Device
from energylens.store import Sample, Store, board_hash

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Machine", "collectives_worker", "run"]

REPORT_SCHEMA = "energylens/calibration/v1"
BLOCKS = (*TEAM_BLOCKS, "ops", "mixes", "host")
PROVIDERS: Mapping[str, str] = {"torch": "hf", "vllm": "vllm"}
"""Provider -> engine profile whose kernels it runs."""
DEFAULT_MINUTES = 5.0
DEFAULT_SPEC = "llama3_8b"
"""Model whose layers stand for all where no model is named."""
MIX_SHARE = 0.25
"""Part of the time that mixes may take."""
SHARED = 0.15
"""Part of the points that all of several boards measure, to tell boards from shapes."""

Fitter = Callable[[Sequence[Path], Device, str, Path], Mapping[str, Any]]
"""(sample folders, device, provider, bundle file to write) -> facts for the report."""


def run(
    *,
    device: str | None = None,
    gpus: int = 1,
    specs: Sequence[str] = (),
    tp: Sequence[int] = (1,),
    plan: Path | None = None,
    provider: str = "torch",
    minutes: float | None = None,
    anchor: bool = False,
    out: Path = Path("calibration"),
    resume: bool = True,
    fit_only: bool = False,
    seed: int = 0,
    blocks: Sequence[str] | None = None,
    nccl_algo: str = "",
    fit: Fitter | None = None,
    console: Console | None = None,
    machine: Machine | None = None,
) -> Mapping[str, Any]:
    """Calibrate the boards of this machine; the verb ``energylens calibrate``.

    Args:
        device: device that must be present; None takes what is found.
        gpus: boards to measure; from 2 on, collectives too.
        specs: models whose per-worker shapes are measured; none measures a plan file.
        tp: degrees of ``specs``.
        plan: plan file, instead of ``specs`` or beside them.
        provider: whose kernels, a key of `PROVIDERS`.
        minutes: time to spend; `DEFAULT_MINUTES` by default for ``specs`` (on a board with slow
            sensors as much longer as a point takes longer), no limit for a plan.
        anchor: only measure the anchors of boards and host.
        out: folder that gets ``samples``, ``bundles`` and ``anchors``.
        resume: skip points that an earlier run measured.
        fit_only: measure nothing.
        seed: order of the points.
        blocks: some of `BLOCKS`; all by default.
        nccl_algo: algorithm of the collectives (``Ring``, ``Tree``); NCCL's own choice by default.
        fit: fits a bundle from samples; None fits nothing.
        console: where progress goes; stderr by default.
        machine: what the boards and clocks are; the real ones by default.

    Returns:
        A document of schema ``energylens/calibration/v1``.

    Raises:
        SpecError: an argument is wrong.
        UnsupportedError: another device than asked for, or fewer GPUs.
        MeterError: no GPU, no usable sensor, or nothing valid was measured.
        CalibrationError: samples in ``out`` cannot be used or are of another power limit.
    """
    request = _Request(
        device=device,
        gpus=gpus,
        specs=tuple(load_spec(name) for name in specs),
        tps=tuple(tp),
        plan=plan,
        provider=provider,
        minutes=minutes,
        anchor_only=anchor,
        out=out,
        resume=resume,
        seed=seed,
        blocks=tuple(blocks if blocks is not None else BLOCKS),
        nccl_algo=nccl_algo,
    )
    document: dict[str, Any] = {"schema": REPORT_SCHEMA, "provider": provider}
    if fit_only:
        found = _device_of_samples(request)
        return document | {"device": found.name} | _fitted(request, found, fit)
    _check(request)  # what the arguments alone can tell, before any hardware is looked for
    machine = machine or Machine()
    of_a_team = request.team_blocks
    if of_a_team and of_a_team == request.blocks and gpus == 1 and not machine.is_worker:
        raise SpecError(
            f"--blocks {','.join(of_a_team)}: only several GPUs show them; give --gpus of 2 or more"
        )
    meter = machine.meter()
    infos = machine.visible(meter.devices())
    if len(infos) < gpus:
        raise UnsupportedError(
            f"--gpus {gpus}: this machine shows {len(infos)} GPU(s); ask for fewer, or look at "
            "CUDA_VISIBLE_DEVICES"
        )
    found = _device(infos[:gpus], device)
    window_s = max(info.least_window_s for info in infos[:gpus])
    request = replace(request, least_window_s=window_s)
    document["device"] = found.name
    if request.team_blocks and not anchor and (gpus > 1 or machine.is_worker):
        if machine.is_worker:
            machine.join(request, found)
            return document | {"collectives": str(request.folder(found, f"x{machine.workers}"))}
        _check_algorithm(request, found, machine)
        document["collectives"] = _start_workers(request, found, machine)
        if request.provider == "vllm" and "host" in request.blocks:
            _engine_host(request, found, meter, infos[:gpus])
    if set(request.blocks) <= set(TEAM_BLOCKS) and not anchor:
        return document | _fitted(request, found, fit)
    with _bar(console) as bar:
        reports = _measure_boards(request, found, meter, machine, bar)
    document["boards"] = [_board_document(r) for r in reports]
    document["anchors"] = [str(p) for p in sorted((out / "anchors").glob("*.json"))]
    if anchor:
        return document
    if all(r.measured == r.done_before == 0 for r in reports) and any(r.invalid for r in reports):
        reasons = sum((r.invalid for r in reports), Counter[str]())
        raise MeterError(f"no point is valid: {reasons.most_common(1)[0][0]}")
    return document | _fitted(request, found, fit)


def _check(request: _Request) -> None:
    if request.device is not None:
        load_device(request.device)
    if request.plan is not None and not request.plan.is_file():
        raise SpecError(f"--plan: {request.plan} is no file; give a plan file")
    for spec in request.specs:
        allowed = valid_tp(spec)
        if not set(request.tps) & set(allowed):
            raise UnsupportedError(
                f"--tp {','.join(map(str, request.tps))}: none of them divides {spec.name}; it "
                f"allows {', '.join(map(str, allowed))}"
            )


# --------------------------------------------------------------------------- request and machine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for, checked."""

    device: str | None
    gpus: int
    specs: tuple[Spec, ...]
    tps: tuple[int, ...]
    plan: Path | None
    provider: str
    minutes: float | None
    anchor_only: bool
    out: Path
    resume: bool
    seed: int
    blocks: tuple[str, ...]
    nccl_algo: str
    least_window_s: float = 0.0  # shortest window worth measuring on the boards that were found

    def __post_init__(self) -> None:
        """Check what the type system cannot."""
        if self.provider not in PROVIDERS:
            raise SpecError(
                f"--provider: unknown provider {self.provider!r}; known: {', '.join(PROVIDERS)}"
            )
        if self.gpus < 1:
            raise SpecError(f"--gpus: found {self.gpus}; allowed: a whole number of at least 1")
        unknown = [name for name in self.blocks if name not in BLOCKS]
        if unknown:
            raise SpecError(f"unknown block {unknown[0]!r}; allowed: {', '.join(BLOCKS)}")

    @property
    def stretch(self) -> float:
        """How much longer a point takes than on a board with fast sensors."""
        return TrialLimits().at_least(self.least_window_s).stretch

    @property
    def budget_s(self) -> float:
        """Seconds to spend; without an end for a plan file alone."""
        if self.minutes is None and not self.specs:
            return math.inf
        return 60 * (self.minutes or DEFAULT_MINUTES * self.stretch)

    @property
    def team_blocks(self) -> tuple[str, ...]:
        """What several workers measure together."""
        return tuple(b for b in self.blocks if b in TEAM_BLOCKS)

    @property
    def layers_of(self) -> tuple[Spec, ...]:
        """Models whose layers the mixes and host points run."""
        return self.specs or (load_spec(DEFAULT_SPEC),)

    def for_board(self) -> BoardRequest:
        """The part of it that concerns one board."""
        return BoardRequest(
            provider=self.provider,
            models=self.layers_of,
            tps=self.tps,
            blocks=()
            if self.anchor_only
            else tuple(b for b in self.blocks if b not in TEAM_BLOCKS),
            budget_s=self.budget_s,
            mix_share=MIX_SHARE,
            resume=self.resume,
            seed=self.seed,
            anchors=self.out / "anchors",
        )

    def folder(self, device: Device, name: str) -> Path:
        """Store of one board or group of boards."""
        return self.out / "samples" / device.name / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The boards, processes and clocks that `run` uses; tests bring their own.

    Attributes:
        meter: opens the sensors.
        provider: binds a provider by name to a CUDA ordinal.
        sleep: pauses, in seconds.
        torchrun: starts one process per GPU with these arguments; returns the exit code.
        environment: environment variables.
    """

    meter: Callable[[], AbstractMeter] = field(default_factory=lambda: _meter)
    provider: Callable[[str, int], Provider] = field(default_factory=lambda: _provider)
    sleep: Callable[[float], None] = time.sleep
    torchrun: Callable[[int, Sequence[str]], int] = field(default_factory=lambda: _torchrun)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def visible(self, infos: Sequence[DeviceInfo]) -> tuple[DeviceInfo, ...]:
        """The boards that CUDA shows."""
        from energylens.meter.nvml import visible_devices

        return visible_devices(infos, self.environment)

    @property
    def is_worker(self) -> bool:
        """True where torchrun started this process."""
        return "RANK" in self.environment and "MASTER_ADDR" in self.environment

    @property
    def workers(self) -> int:
        """Workers of this torchrun."""
        return int(self.environment.get("WORLD_SIZE", "1"))

    def join(self, request: _Request, device: Device) -> None:
        """Measure collectives as one worker of a torchrun that is running."""
        from energylens.bench.collectives import main

        main(_worker_arguments(request, request.folder(device, f"x{self.workers}")))


def _meter() -> AbstractMeter:
    from energylens.meter.choose import choose_meter

    return choose_meter()


def _provider(name: str, ordinal: int) -> Provider:
    needs = {"torch": ("torch", "transformers"), "vllm": ("torch", "transformers", "vllm")}[name]
    missing = [m for m in needs if importlib.util.find_spec(m) is None]
    if missing:
        extra = "vllm" if "vllm" in missing else "gpu"
        raise UnsupportedError(
            f"the {name} provider needs {' and '.join(missing)}; `pip install '.[{extra}]'` in the "
            "checkout"
        )
    if name == "vllm":
        from energylens.bench.vllm_kernels import VllmProvider

        return VllmProvider(ordinal)
    from energylens.bench.kernels import TorchProvider

    return TorchProvider(ordinal)


def _torchrun(workers: int, arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={workers}", "-m", "energylens.bench.collectives", *arguments]
    # What the workers print goes to stderr: stdout belongs to the report.
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _worker_arguments(request: _Request, folder: Path) -> list[str]:
    arguments = ["--out", str(folder), "--seed", str(request.seed)]
    arguments += ["--provider", request.provider]
    for block in request.team_blocks:
        arguments += ["--block", block]
    for spec in request.layers_of:
        arguments += ["--spec", spec.path or spec.name]
    if request.nccl_algo:
        arguments += ["--nccl-algo", request.nccl_algo]
    if not request.resume:
        arguments.append("--fresh")
    if request.minutes is not None:
        arguments += ["--minutes", str(request.minutes)]
    return arguments


def _check_algorithm(request: _Request, device: Device, machine: Machine) -> None:
    """Refuse to mix collectives of two algorithms in a folder: they are different kernels.

    Raises:
        CalibrationError: the folder holds another algorithm's.
    """
    folder = request.folder(device, f"x{request.gpus}")
    if not folder.is_dir():
        return
    algorithm = request.nccl_algo or machine.environment.get("NCCL_ALGO", "auto")
    runs = Store(folder).runs.values()
    others = {a for run in runs if (a := run.versions.get("nccl_algo", algorithm)) != algorithm}
    if others:
        raise CalibrationError(
            f"{folder} holds collectives of NCCL algorithm {', '.join(sorted(others))}, not "
            f"{algorithm}; give each algorithm a folder of its own (--out)"
        )


def _start_workers(request: _Request, device: Device, machine: Machine) -> str:
    folder = request.folder(device, f"x{request.gpus}")
    code = machine.torchrun(request.gpus, _worker_arguments(request, folder))
    if code:
        raise CalibrationError(
            f"the collectives failed (torchrun exit code {code}); what was measured is kept in "
            f"{folder}; the single-board part runs with --gpus 1"
        )
    return str(folder)


def _engine_host(
    request: _Request, device: Device, meter: AbstractMeter, infos: Sequence[DeviceInfo]
) -> None:
    """Host times of the real engine over several workers, which it starts itself.

    They belong to the run that has just measured the collectives of the same boards.
    """
    from energylens.bench.vllm_engine import host_points

    uuids = [info.uuid for info in infos]
    with (
        Store(request.folder(device, f"x{request.gpus}")) as store,
        meter.recorder(uuids) as recorder,
    ):
        run = max(store.runs.values(), key=lambda r: r.time)
        for spec in request.layers_of:
            for point in host_points(spec, request.gpus):
                readings = [recorder.reading(u, point.start_s, point.end_s) for u in uuids]
                store.append(
                    Sample(
                        block="host",
                        label=point.label,
                        ops=point.ops,
                        mode=str(point.mode),
                        trial=host_trial(point, readings),
                        board_uuid=";".join(board_hash(u) for u in uuids),
                        run_id=run.run_id,
                        time=now().isoformat(timespec="seconds"),
                    )
                )


def _device(infos: Sequence[DeviceInfo], asked: str | None) -> Device:
    """Datasheet of the boards.

    Raises:
        UnsupportedError: they differ, are not what was asked for, or have no datasheet.
    """
    names = sorted({info.name for info in infos})
    if len(names) > 1:
        raise UnsupportedError(
            f"found boards of different kinds ({', '.join(names)}); calibrate one kind at a time"
        )
    name = names[0]
    wanted = load_device(asked) if asked is not None else None
    if wanted is not None and name in wanted.aliases:
        found = wanted
    else:
        try:
            found = load_device(name)
        except SpecError:
            text = f"found {name}, which has no datasheet; give a device file with that alias"
            raise UnsupportedError(f"{text} to --device") from None
    found = _in_mode(found, infos[0].power_mode, asked)
    if wanted is not None and wanted.name != found.name:
        mode = f" in power mode {found.power_mode}" if found.power_mode else ""
        raise UnsupportedError(
            f"found {name}{mode}, asked for {asked}; leave --device out to calibrate {found.name}"
        )
    return found


def _in_mode(device: Device, mode: str | None, asked: str | None) -> Device:
    """The device in the power mode of its board: each mode has samples and a bundle of its own.

    Raises:
        UnsupportedError: the mode is not known, or the datasheet has no figures for it.
    """
    if device.power_mode is None or mode == device.power_mode:
        return device
    if mode is None:
        raise UnsupportedError(
            f"{device.name}: the power mode of the board is not known, and results hold for one "
            "mode only; see `energylens doctor`"
        )
    if mode not in device.modes:
        known = ", ".join((device.power_mode, *device.modes))
        raise UnsupportedError(
            f"{asked or device.name}: the board is in power mode {mode}, the datasheet has figures "
            f"for {known}; switch with nvpmodel, or give --device a file with that mode"
        )
    return device.modes[mode]


def _device_of_samples(request: _Request) -> Device:
    if request.device is not None:
        return load_device(request.device)
    folder = request.out / "samples"
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    if len(names) != 1:
        raise SpecError(
            f"--fit-only: {folder} holds samples of {', '.join(names) or 'no device'}; name one "
            "with --device"
        )
    return load_device(names[0])


def _fitted(request: _Request, device: Device, fit: Fitter | None) -> dict[str, Any]:
    folders = sorted(p.parent for p in (request.out / "samples" / device.name).rglob("samples.csv"))
    if not folders:
        raise CalibrationError(f"{request.out}: no samples of {device.name} to fit")
    if fit is None:
        return {"bundle": None}
    bundle = request.out / "bundles" / device.name / f"{request.provider}.json"
    return {"bundle": str(bundle), "fit": fit(folders, device, request.provider, bundle)}


def _board_document(report: BoardReport) -> dict[str, Any]:
    return asdict(report) | {"invalid": dict(report.invalid), "skipped": dict(report.skipped)}


# --------------------------------------------------------------------------- progress


class _RichBar:
    """Implements `energylens.bench.board.Bar` on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def start(self, text: str, total_s: float) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=max(total_s, 1e-9))

    def step(self, text: str, seconds: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=seconds, description=text)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextmanager
def _bar(console: Console | None) -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    shown = console or Console(stderr=True)
    with Progress(*columns, console=shown, disable=not shown.is_terminal) as progress:
        yield _RichBar(progress)


# --------------------------------------------------------------------------- boards


def _measure_boards(
    request: _Request, device: Device, meter: AbstractMeter, machine: Machine, bar: Bar
) -> list[BoardReport]:
    from energylens.meter.nvml import match_cuda

    plans = split(_plan(request, device), request.gpus, shared=SHARED)
    reports = []
    for ordinal in range(request.gpus):
        provider = machine.provider(request.provider, ordinal)
        info = match_cuda(meter.devices(), [provider.uuid()])[0]
        require_energy(meter, info)
        folder = request.folder(device, board_hash(info.uuid))
        report = BoardReport(board=board_hash(info.uuid), folder=str(folder))
        reports.append(report)
        with Store(folder) as store, meter.recorder([info.uuid]) as recorder:
            session = Session(
                recorder=recorder,
                uuid=info.uuid,
                device=device.name,
                power_limit_w=info.power_limit_w,
                least_window_s=info.least_window_s,
                sleep=machine.sleep,
            )
            board = BoardRun(request.for_board(), store, session, provider, info, bar, report)
            try:
                board.measure(plans[ordinal].points)
            except KeyboardInterrupt:
                bar.note(
                    f"interrupted: {len(store.samples)} points are kept in {folder}; the same "
                    "command goes on from there"
                )
                raise
    return reports


def _plan(request: _Request, device: Device) -> Plan:
    """Ops of the request: of the models, of the file, of both, or of the shipped plan."""
    path = request.plan
    if path is None and not request.specs:
        path = data_dir("calibration") / "plans" / f"{request.provider}_default.yaml"
    plan = Plan(points=(), seed=request.seed)
    if path is not None:
        plan = load_plan(path, device, seed=request.seed)
    if request.specs:
        engine = load_engine(PROVIDERS[request.provider])
        reserve = HEAD_S + TAIL_S + (HEAD_WINDOWS + TAIL_WINDOWS) * request.least_window_s
        if "mixes" in request.blocks:
            reserve += MIX_SHARE * request.budget_s
        one_board = max(0.2 * request.budget_s, request.budget_s - reserve) / request.stretch
        left = one_board * (1 + (1 - SHARED) * (request.gpus - 1)) - plan.expected_s
        chosen = plan_for(
            request.specs,
            request.tps,
            engine,
            device,
            budget_s=left,
            seed=request.seed,
            existing=[p.op for p in plan.points],
        )
        plan = plan.merge(chosen)
    return plan
