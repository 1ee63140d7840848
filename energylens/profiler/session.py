"""One run on its workers: meter, idle power, sizes, phases, and the profile at any time.

Every worker makes the same calls; worker 0 holds the sensors of all boards of the node.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from energylens import __version__
from energylens.anchors import load_anchors
from energylens.bench.trial import Team
from energylens.errors import MeterError, SpecError
from energylens.measured import MemoryProfile, PhaseProfile, Profile, ThrottleCheck
from energylens.meter.base import (
    AbstractMeter,
    AbstractRecorder,
    DeviceInfo,
    Reading,
    require_energy,
)
from energylens.profiler.metrics import (
    BASELINE,
    FOREIGN,
    OUTLIER_RULE,
    VALIDITY_RULE,
    BoardReading,
    WorkerWindow,
    defect_text,
    phase_profile,
)
from energylens.profiler.options import ProfileRequest
from energylens.profiler.roofline import Yardstick
from energylens.profiler.steps import Limits, Stepper, run_window
from energylens.profiler.throttle import throttle_check
from energylens.profiler.timeline import write_timeline
from energylens.profiler.trace import annotate
from energylens.profiler.tracing import profiled_pass, trace_file
from energylens.results import Anchors, KernelRow
from energylens.spec.machines import load_device
from energylens.spec.model import Spec
from energylens.store import board_hash, new_run_id

_log = logging.getLogger(__name__)

IDLE_SETTLE_S, IDLE_S = 1.0, 4.0
"""Seconds until idle power is looked at, and for how long."""
BASELINE_CHANGE = 0.2
"""Idle power before and after a run that differs by more spoils both."""

MeterFactory = Callable[[Sequence[str]], tuple[AbstractMeter, Sequence[DeviceInfo]]]
"""(UUIDs of the run's CUDA devices) -> a meter and those of its devices that the run loads.

`MeterError` where the machine has no such meter.
"""


def machine_meter(uuids: Sequence[str]) -> tuple[AbstractMeter, Sequence[DeviceInfo]]:
    """The boards of these CUDA devices, whatever CUDA_VISIBLE_DEVICES makes of their order."""
    from energylens.meter.choose import choose_meter
    from energylens.meter.nvml import match_cuda

    if not uuids:
        raise MeterError("the model runs on the CPU, which no meter here covers")
    meter = choose_meter()
    return meter, match_cuda(meter.devices(), uuids)


METERS: list[MeterFactory] = [machine_meter]
"""Meters in the order in which they are tried; put one's own at the front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInput:
    """What an added metric may use, on every worker, after all that is measured.

    Attributes:
        engine: the engine, its model included.
        phases: what was measured, on worker 0.
    """

    request: ProfileRequest
    engine: Engine
    phases: Mapping[str, PhaseProfile]


Metric = Callable[[MetricInput], Mapping[str, Any]]
METRICS: list[Metric] = []
"""Added metrics: names and values that go into ``metrics`` of the document."""


class Engine(Protocol):
    """Whoever runs the model, on one worker.

    Attributes:
        modes: launch mode per phase; notes: what was to be said about them.
    """

    name: str
    modes: dict[str, str]
    notes: list[str]

    def version(self) -> str:
        """Version of the engine."""
        ...

    def precision(self) -> str:
        """Of the weights, by EnergyLens's names."""
        ...

    def spec(self) -> Spec | None:
        """Spec that describes the model, where one is known."""
        ...

    def boards(self) -> Sequence[str]:
        """UUIDs of the CUDA devices that this worker's steps run on."""
        ...

    def device_name(self) -> str:
        """What the steps run on."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What decides which kernels run."""
        ...

    def sizes(self) -> MemoryProfile:
        """Weights and cache of this worker; runs a prefill."""
        ...

    def peak_bytes(self) -> float | None:
        """Largest device memory of the phase that ran; None where it is not known."""
        ...

    def stepper(self, phase: str) -> AbstractContextManager[Stepper]:
        """The phase, ready to run."""
        ...

    def trace(self, phase: str, path: Path) -> None:
        """Write the kernel trace of some steps of a phase; a pass of its own."""
        ...


class Progress(Protocol):
    """Who shows how far the run is."""

    def start(self, text: str) -> None:
        """A part of the run begins."""
        ...

    def share(self, share: float) -> None:
        """So much of it is done, 0 to 1."""
        ...

    def note(self, text: str) -> None:
        """Say one line."""
        ...


class Quiet:
    """A `Progress` that shows nothing."""

    def start(self, text: str) -> None:
        """Nothing."""

    def share(self, share: float) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Solo:
    """A `Team` of one."""

    worker, workers = 0, 1

    def tell(self, order: Any) -> Any:
        """The order."""
        return order

    def gather(self, value: Any) -> list[Any]:
        """The value."""
        return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How time passes; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(kw_only=True)
class Session:
    """A run; `measure` does all of it, `profile` gives what there is so far.

    Attributes:
        limits: how long each phase is run; ``request.repeats`` wins over its own, and sensors that
            need longer windows get them.
        meters: tried in order.
        save: is given the profile after every phase, on worker 0.
    """

    request: ProfileRequest
    engine: Engine
    team: Team
    limits: Limits = field(default_factory=Limits)
    clock: Clock = field(default_factory=Clock)
    meters: Sequence[MeterFactory] = ()
    metrics: Sequence[Metric] = ()
    progress: Progress = field(default_factory=Quiet)
    save: Callable[[Profile], None] = lambda profile: None

    def __post_init__(self) -> None:
        """Nothing is measured yet."""
        self._started = datetime.datetime.now(datetime.UTC)
        self._recorder: AbstractRecorder | None = None
        self._infos: Sequence[DeviceInfo] = ()
        self._owners: list[int] = []
        self._meter_name: str | None = None
        self._energy_reason: str | None = "no phase has been measured"
        self._idle: list[list[float | None]] = []
        self._windows: dict[str, list[WorkerWindow]] = {}
        self._readings: dict[str, list[Reading]] = {}
        self._sizes: list[MemoryProfile] = []
        self._peaks: list[float | None] = []
        self._trust: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        self._kernels: tuple[KernelRow, ...] = ()
        self._notes: list[str] = []
        self._missing: list[str] = list(self.request.phases)
        self._interrupted = False

    # -- the run

    def measure(self) -> Profile:
        """Sizes, idle power, phases, idle power again, added metrics.

        An interruption ends it early; what was measured by then is in the profile.
        """
        with ExitStack() as stack:
            self._open_meter(stack)
            try:
                self._run()
            except KeyboardInterrupt:
                self._interrupted = True
            if self._recorder is not None and self.request.timeline:
                write_timeline(
                    Path(self.request.timeline),
                    [self._recorder.series(i.uuid) for i in self._infos],
                    self._marks(),
                    interval_s=self.request.sample_interval_s,
                )
        return self.profile()

    def _run(self) -> None:
        if self.request.size:
            self.progress.start("sizes")
            self._sizes = self.team.gather(self.engine.sizes())
        self._measure_idle()
        for phase in self.request.phases:
            self._phase(phase)
            if self.team.worker == 0:
                self.save(self.profile())
        self._measure_idle()
        given = MetricInput(
            request=self.request,
            engine=self.engine,
            phases={p: self._phase_profile(p) for p in self._windows if self.team.worker == 0},
        )
        for metric in self.metrics:
            self._found |= metric(given)
        if self.request.torch_profile or self.request.kernel_profile:
            self._trace()

    def _trace(self) -> None:
        """The profiled pass; worker 0, which has the meter, adds its samples to kept traces."""
        with profiled_pass(self.request, self.engine.trace, self.team, self.progress.start) as done:
            self._kernels, traces = done
            if not self._kernels:
                self._notes.append("the profiled pass saw no kernels of a GPU: no breakdown")
            if self._recorder is not None and self.request.torch_profile:
                series = [self._recorder.series(info.uuid) for info in self._infos]
                offset_s = time.time() - self._recorder.now()
                for phase in self.request.phases:
                    for worker, samples in zip(self._owners, series, strict=False):
                        path = trace_file(traces, phase, worker)
                        # CUDA numbers the boards as the workers are numbered.
                        annotate(path, {worker: samples}, path, unix_offset_s=offset_s)

    def _phase(self, phase: str) -> None:
        self.progress.start(phase)
        with self.engine.stepper(phase) as stepper:
            window = run_window(
                stepper,
                self.team,
                self.limits,
                now=self.clock.now,
                progress=self.progress.share,
            )
        windows: list[WorkerWindow] = self.team.gather(window)
        self._peaks += self.team.gather(self.engine.peak_bytes())
        for note in self.engine.notes:
            self.progress.note(note)
        if self.team.worker != 0:
            return
        self._windows[phase] = windows
        self._missing.remove(phase)
        if self._recorder is not None:
            self._readings[phase] = [
                self._read(info.uuid, self._window_of(windows, i))
                for i, info in enumerate(self._infos)
            ]

    def _window_of(self, windows: Sequence[WorkerWindow], board: int) -> WorkerWindow:
        """Window of the worker that loads a board; of the first one for a meter of the machine."""
        known = len(self._owners) == len(self._infos)
        return windows[self._owners[board] if known else 0]

    def _read(self, uuid: str, window: WorkerWindow) -> Reading:
        assert self._recorder is not None  # only called where there is one
        trust = self._recorder.verify_counter(uuid, window.start_s, window.end_s)
        if trust.ratio is not None:
            self._trust[board_hash(uuid)] = {"ratio": trust.ratio, "trusted": trust.trusted}
        return self._recorder.reading(uuid, window.start_s, window.end_s)

    def _measure_idle(self) -> None:
        """Power with the model loaded and nothing running; all workers wait."""
        if not self.team.tell(self._recorder is not None):
            return
        self.progress.start("idle power")
        self.team.gather(None)
        idle_s = max([IDLE_S, *(info.least_window_s for info in self._infos)])
        self.clock.sleep(IDLE_SETTLE_S + idle_s)
        if self._recorder is not None:
            end_s = self.clock.now()
            self._idle.append(
                [
                    self._recorder.reading(i.uuid, end_s - idle_s, end_s).mean_power_w
                    for i in self._infos
                ]
            )
        self.team.gather(None)

    # -- the meter

    def _open_meter(self, stack: ExitStack) -> None:
        boards: list[Sequence[str]] = self.team.gather(tuple(self.engine.boards()))
        if self.team.worker != 0:
            return
        self._owners = [worker for worker, own in enumerate(boards) for _ in own]
        uuids = [uuid for own in boards for uuid in own]
        reasons = []
        for factory in self.meters:
            try:
                meter, infos = factory(uuids)
                for info in infos:
                    require_energy(meter, info)
                recorder = stack.enter_context(meter.recorder([i.uuid for i in infos]))
            except MeterError as error:
                reasons.append(str(error))
                continue
            self._recorder, self._infos = recorder, tuple(infos)
            self._meter_name, self._energy_reason = type(meter).__name__, None
            slowest_s = max((info.least_window_s for info in infos), default=0.0)
            self.limits = self.limits.at_least(slowest_s)
            for note in dict.fromkeys(note for info in infos for note in info.notes):
                self.progress.note(note)
            return
        self._energy_reason = "; ".join(dict.fromkeys(reasons)) or "no meter was asked for"
        if self.request.throttle_check:
            self._notes.append("--throttle-check: no meter, so nothing is known of the boards")

    # -- the profile

    def profile(self) -> Profile:
        """All that is known by now; only worker 0 knows all."""
        request = self.request
        phases = {phase: self._phase_profile(phase) for phase in self._windows}
        info = self._infos[0] if self._infos else None
        device_name = info.name if info else self.engine.device_name()
        device = _sheet_name(device_name, info.power_mode if info else None)
        spec = self.engine.spec()
        memory = self._memory(spec, info)
        yardstick = Yardstick(spec, device, request, self.engine.modes)
        return Profile(
            record_id=new_run_id(
                self._started.isoformat(), [i.uuid for i in self._infos], request.seed
            ),
            time=self._started.isoformat(timespec="seconds"),
            model=request.model,
            spec=spec.name if spec else None,
            device=device,
            device_name=device_name,
            engine=self.engine.name,
            engine_version=self.engine.version(),
            precision=self.engine.precision(),
            parallelism=request.parallelism,
            batch=request.batch,
            prompt_len=request.prompt_len,
            gen_len=request.gen_len,
            context_len=self._context(phases),
            modes=dict(self.engine.modes),
            memory=memory,
            phases=phases,
            bandwidth_utilisation=yardstick.bandwidth(phases.get("decode")),
            compute_utilisation=yardstick.compute(phases.get("prefill")),
            metrics=dict(self._found),
            kernels=self._kernels,
            throttle=self._throttle(),
            anchors=self._anchors(),
            environment=self._environment(),
            meter=self._meter_facts(phases),
            power_timeline=request.timeline if self._recorder else None,
            reasons=tuple(self._reasons(phases)),
            energy_reason=self._energy_reason,
        )

    def _phase_profile(self, phase: str) -> PhaseProfile:
        return phase_profile(self._windows[phase], self._boards(phase), defects=self._defects())

    def _boards(self, phase: str) -> list[BoardReading]:
        windows = self._windows[phase]
        return [
            BoardReading(
                board=board_hash(info.uuid),
                window=self._window_of(windows, i),
                reading=reading,
                idle_w=self._idle_w(i),
            )
            for i, (info, reading) in enumerate(
                zip(self._infos, self._readings.get(phase, ()), strict=False)
            )
        ]

    def _idle_w(self, board: int) -> float | None:
        known = [w for row in self._idle if (w := row[board]) is not None]
        return math.fsum(known) / len(known) if known else None

    def _defects(self) -> list[str]:
        """What spoils every phase."""
        found = [FOREIGN] if self.request.foreign else []
        for board in range(len(self._infos)):
            watts = [w for row in self._idle if (w := row[board]) is not None]
            if watts and max(watts) > (1 + BASELINE_CHANGE) * min(watts) and BASELINE not in found:
                found.append(BASELINE)
        return found

    def _reasons(self, phases: Mapping[str, PhaseProfile]) -> Iterable[str]:
        for name, found in phases.items():
            if text := defect_text(name, found, self._boards(name)):
                yield text
        if self._interrupted:
            yield f"interrupted before {' and '.join(self._missing) or 'the end'}"

    def _context(self, phases: Mapping[str, PhaseProfile]) -> float:
        decode = phases.get("decode")
        if decode is not None and decode.context_len is not None:
            return decode.context_len
        return float(self.request.decode_context)

    def _memory(self, spec: Spec | None, info: DeviceInfo | None) -> MemoryProfile:
        peaks = [p for p in self._peaks if p is not None]
        weights = [s.weights_bytes for s in self._sizes if s.weights_bytes is not None]
        caches = [s.cache_bytes for s in self._sizes if s.cache_bytes is not None]
        first = self._sizes[0] if self._sizes else MemoryProfile()
        yardstick = Yardstick(spec, None, self.request, self.engine.modes)
        return MemoryProfile(
            weights_bytes=max(weights, default=None),
            model_bytes=first.model_bytes,
            cache_bytes=max(caches, default=None),
            total_cache_bytes=math.fsum(caches) if caches else None,
            predicted_cache_bytes=yardstick.cache_bytes(self.engine.name),
            peak_bytes=max(peaks, default=None),
            capacity_bytes=info.memory_bytes if info else None,
        )

    def _anchors(self) -> Anchors | None:
        files = self.request.anchor_files
        if not files:
            return None
        given = load_anchors(*(Path(f) for f in files))
        own = [board_hash(i.uuid) for i in self._infos]
        boards = {b.board_uuid: b for b in given.boards}
        return Anchors(boards=tuple(boards[b] for b in own if b in boards), host=given.host)

    def _environment(self) -> dict[str, Any]:
        info = self._infos[0] if self._infos else None
        return {
            "energylens": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {os.cpu_count()}",
            "driver": info.driver if info else None,
            "power_limit_w": info.power_limit_w if info else None,
            "default_power_limit_w": info.default_power_limit_w if info else None,
            "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "nccl_algo": os.environ.get("NCCL_ALGO"),
            "seed": self.request.seed,
            "worker_latency_s": {
                phase: [math.fsum(w.times_s) / len(w.times_s) for w in windows]
                for phase, windows in self._windows.items()
            },
            **self.engine.facts(),
            "notes": [*self.engine.notes, *self._notes],
        }

    def _meter_facts(self, phases: Mapping[str, PhaseProfile]) -> dict[str, Any]:
        return {
            "meter": self._meter_name,
            "boards": [board_hash(i.uuid) for i in self._infos],
            "idle_w": [self._idle_w(i) for i in range(len(self._infos))],
            "counter": self._trust,
            "window_s": self.limits.window_s,
            "settle_s": self.limits.settle_s,
            "outlier_rule": OUTLIER_RULE,
            "validity_rule": VALIDITY_RULE,
            "phases": {
                phase: [
                    _reading_facts(r) | self._rail_facts(r) for r in self._readings.get(phase, ())
                ]
                for phase in phases
            },
            **(self._infos[0].rail_facts if self._infos else {}),
        }

    def _throttle(self) -> tuple[ThrottleCheck, ...] | None:
        recorder = self._recorder
        if recorder is None or not self.request.throttle_check:
            return None
        return tuple(
            throttle_check(phase, recorder.series(info.uuid), start_s, end_s)
            for phase, start_s, end_s in self._marks()
            for info in self._infos
        )

    def _rail_facts(self, reading: Reading) -> dict[str, Any]:
        """Energy by role in the window of a reading, where a board has rails."""
        assert self._recorder is not None  # there is no reading without one
        window = reading.uuid, reading.start_s, reading.end_s
        roles = self._recorder.rail_readings(*window)
        if not roles:
            return {}
        keys = ("scope", "energy_j", "mean_power_w", "energy_rel_error", "reason")
        return {"rails": {name: {k: getattr(r, k) for k in keys} for name, r in roles.items()}}

    def _marks(self) -> list[tuple[str, float, float]]:
        return [
            (phase, min(w.start_s for w in ws), max(w.end_s for w in ws))
            for phase, ws in self._windows.items()
        ]


def _reading_facts(reading: Reading) -> dict[str, Any]:
    """How a board's energy was read, and what a second sensor says."""
    return {
        "method": reading.method,
        "scope": reading.scope,
        "window_s": reading.duration_s,
        "ticks": reading.ticks,
        "energy_rel_error": reading.energy_rel_error,
        "mean_power_w": reading.mean_power_w,
        "instant_power_w": reading.instant_power_w,
        "coverage": reading.coverage,
        "clock_events": dict(reading.reasons),
        "temperature_c": [reading.temperature_start_c, reading.temperature_end_c],
    }


def _sheet_name(device_name: str, mode: str | None) -> str | None:
    try:
        device = load_device(device_name)
        return load_device(f"{device_name}@{mode}").name if device.power_mode else device.name
    except SpecError:
        return None
