"""The chain on one page: spec -> ops of a step -> costs -> composed step -> phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import Bundle, load_bundle, select
from energylens.cost.features import prior
from energylens.cost.overlap import NCCL_SMS
from energylens.errors import CalibrationError, EnergyLensError, OutOfRangeError, SpecError
from energylens.graph import Op, make_op
from energylens.lower import Experts, Lowered, fullest, lower_stages
from energylens.lower.overlap import LEAST_ROWS, Overlapped, check_sms, wanted
from energylens.machine import Machine, machine
from energylens.pipeline import pipelined
from energylens.results import (
    Anchors,
    BreakdownRow,
    Imbalance,
    Infeasible,
    Interval,
    Measurement,
    OpsPrediction,
    OverlapKind,
    OverlapRun,
    PhaseResult,
    Prediction,
)
from energylens.schedule import LAWS, LEVEL, LOWEST_CLOCK, StepResult
from energylens.spec.load import load_spec
from energylens.spec.machines import load_cluster, load_device, load_engine
from energylens.spec.model import Spec
from energylens.spec.resources import data_dir, list_resources
from energylens.spec.system import (
    Config,
    Device,
    Engine,
    Link,
    Mode,
    Parallelism,
    Phase,
    Step,
    Workload,
    chunked,
)
from energylens.units import BITS

_T = TypeVar("_T")
Array = NDArray[np.float64]

# Decode steps that stand for all of a request's: cost is nearly linear in the context.
_REQUEST_NODES = 4


def predict(
    spec: Spec,
    *,
    engine: Engine,
    device: Device,
    config: Config = Config(),
    workload: Workload = Workload(),
    bundles: Sequence[Bundle] = (),
    anchors: Anchors | None = None,
    phases: Sequence[Phase] = (Phase.PREFILL, Phase.DECODE, Phase.REQUEST),
    without: frozenset[str] = frozenset(),
    link: Link | None = None,
) -> Prediction | Infeasible:
    """Latency and energy of one configuration.

    Args:
        spec: the model.
        engine: how it becomes kernels.
        device: what it runs on.
        config: degrees, launch modes, power limit.
        workload: batch and lengths; with replicas, the batch of each of them.
        bundles: calibrations; the newest of this device and the engine's provider is used, else
            the roofline.
        anchors: of the boards meant, in the order of the workers, and of their host.
        phases: what to predict.
        without: composition laws to leave out (`energylens.schedule.LAWS`).
        link: interconnect of the workers, for collectives that no bundle has.

    Returns:
        A prediction, or why the configuration cannot run.

    Raises:
        SpecError: the engine has no kernel for an op of the spec, the power limit is above the
            device's, an overlap takes all of its SMs, or a law to leave out is unknown.
    """
    _check(device, config.power_limit_w, without)
    check_sms(spec, config.parallelism, device)
    engine, parallelism = _set(engine.on(device), config, workload), config.parallelism
    most = min(parallelism.pp, workload.batch)
    if config.microbatches is not None and not 1 <= config.microbatches <= most:
        allowed = f"from 1 to {most}" if most > 1 else "1"
        raise OutOfRangeError(
            f"microbatches must be {allowed} at pp={parallelism.pp} and a batch of "
            f"{workload.batch}, not {config.microbatches}"
        )
    stages = lower_stages(
        spec,
        engine,
        parallelism,
        routing=config.routing,
        redundant_experts=config.redundant_experts,
    )
    if isinstance(stages, Infeasible):
        return stages
    held = fullest(stages, workload, device, config.modes)
    if not held.fits:
        gb = {
            k: getattr(held, f"{k}_bytes") / 1e9
            for k in ("weights", "kv_cache", "activations", "reserve", "capacity")
        }
        return Infeasible(
            reason=(
                f"{spec.name} does not fit {device.name}: weights {gb['weights']:.1f} GB + "
                f"KV cache {gb['kv_cache']:.1f} GB + activations {gb['activations']:.1f} GB + "
                f"reserve {gb['reserve']:.1f} GB > "
                f"{gb['capacity']:.1f} GB per GPU; raise --tp, or lower --batch or the lengths"
            ),
            memory=held,
        )
    bundle = select(bundles, device.name, engine.provider)
    priced = machine(
        device,
        workers=parallelism.workers,
        bundle=bundle,
        anchors=anchors,
        power_limit_w=config.power_limit_w,
        link=link,
        captured_tokens=engine.captured_tokens,
        stages=parallelism.pp,
    )
    run = _Run(stages=stages, machine=priced, config=config, workload=workload, without=without)
    results = {p: run.phase(p) for p in phases}
    lowest_hz = LOWEST_CLOCK * device.clock_max_hz
    if any((r.clock_hz or math.inf) <= lowest_hz for r, _ in results.values()):
        return Infeasible(reason=priced.cannot_hold, memory=held)
    return Prediction(
        spec=spec.name,
        device=device.name,
        engine=engine.name,
        parallelism=parallelism,
        workload=workload,
        memory=held,
        phases=MappingProxyType({str(p): r for p, (r, _) in results.items()}),
        breakdown=tuple(row for _, rows in results.values() for row in rows),
        source=max(r.source for r, _ in results.values()),
        bundles=(bundle.ref,) if bundle else (),
        anchors=anchors,
        notes=_notes(spec, bundle, device, engine, anchors, parallelism, priced, workload, stages),
        routing=run.experts.routing.name if run.experts else None,
        imbalance=MappingProxyType(
            {str(p): i for p in phases if (i := run.imbalance(p)) is not None}
        ),
    )


def predict_ops(
    ops: Sequence[Op],
    *,
    device: Device,
    workers: int,
    bundle: Bundle | None,
    anchors: Anchors | None = None,
    power_limit_w: float | None = None,
    without: frozenset[str] = frozenset(),
    link: Link | None = None,
) -> OpsPrediction | Infeasible:
    """Latency and energy of ops that follow each other again and again, with no host in the way.

    Args:
        ops: what each worker executes.
        device: what it runs on.
        workers: how many do so.
        bundle: calibration, or None for the roofline.
        anchors: of the boards meant, in the order of the workers.
        power_limit_w: of each board, that of the calibration by default.
        without: composition laws to leave out (`energylens.schedule.LAWS`).
        link: interconnect of the workers, for collectives that the bundle does not have.

    Returns:
        A prediction, or why the ops cannot run.

    Raises:
        SpecError: the power limit is above the device's, or a law to leave out is unknown.
    """
    _check(device, power_limit_w, without)
    priced = machine(
        device,
        workers=workers,
        bundle=bundle,
        anchors=anchors,
        power_limit_w=power_limit_w,
        link=link,
    )
    step = priced.step(ops, Mode.CUDA_GRAPH, without)
    if step.clock <= LOWEST_CLOCK:
        return Infeasible(reason=priced.cannot_hold)
    return OpsPrediction(
        result=_phase_result([(1.0, step)], priced), bundles=(bundle.ref,) if bundle else ()
    )


def _check(device: Device, power_limit_w: float | None, without: frozenset[str]) -> None:
    """Refuse a power limit that the device has not, and laws that nobody knows."""
    if power_limit_w is not None and power_limit_w > device.power_limit_w:
        raise SpecError(
            f"a power limit of {power_limit_w:g} W: {device.name} allows up to "
            f"{device.power_limit_w:g} W"
        )
    for law in without - set(LAWS):
        raise SpecError(f"without: unknown law {law!r}; allowed: {', '.join(LAWS)}")


def _notes(
    spec: Spec,
    bundle: Bundle | None,
    device: Device,
    engine: Engine,
    anchors: Anchors | None,
    parallelism: Parallelism,
    priced: Machine,
    workload: Workload,
    stages: Sequence[Lowered],
) -> tuple[str, ...]:
    notes: list[str] = []
    workers = parallelism.replica_gpus
    if bundle is None:
        notes.append(
            f"no calibration of {device.name} for the {engine.provider} provider: datasheet "
            "roofline, wide intervals; "
            f"`energylens calibrate --device {device.name} --provider {engine.provider}` on such a "
            "machine measures one"
        )
    asked, measured = engine.asked_version, (bundle.versions if bundle else {}).get(engine.name)
    if asked and asked != measured:
        notes.append(
            f"{engine.name} {asked}: limits of {engine.version}, kernels and host times of "
            f"{measured or 'no version'}"
        )
    notes += _anchor_notes(bundle, anchors, parallelism)
    longest = max(workload.prompt_len + workload.gen_len, workload.context_len or 0)
    if spec.context is not None and longest > spec.context:
        notes.append(
            f"sequences of {longest:g} tokens: {spec.name} is made for {spec.context}, and servers "
            "refuse more"
        )
    notes += _overlap_notes(stages, parallelism)
    if parallelism.pp > 1:
        notes.append(
            "pipeline: layers split as vLLM does; a batch in one part passes the stages one by one "
            "while the others wait, parts in flight overlap (--microbatches: by default one for "
            "each step that the engine's limits make of the prefill); sends between stages are "
            "priced as collectives of as many bytes"
        )
    if workers > 1 and priced.model.link is None:
        notes.append(
            f"no link between {workers} {device.name} is known: collectives that were not measured "
            "are priced as between the GPUs of one machine"
        )
    limit = bundle.power_limit_w if bundle else device.power_limit_w
    notes += spec.notes
    weights = {spec.stored(e) for b in spec.blocks for e in b.cascade}
    for what, stored in (("weights", weights), ("a KV cache", {spec.precision.kv_cache})):
        if bundle is not None and (unknown := sorted(stored - bundle.dtypes)):
            notes.append(
                f"no kernel was calibrated with {what} in {' or '.join(unknown)}: priced by those "
                "in 16 bits, and what the datasheet says of bytes and arithmetic"
            )
    if priced.limit_change:
        notes.append(
            f"measured at a power limit of {limit:.0f} W: other limits follow the common-clock law"
        )
    return tuple(notes)


def _overlap_notes(stages: Sequence[Lowered], parallelism: Parallelism) -> Iterator[str]:
    """What is to be known of collectives beside compute, and which of them there are none of."""
    lowered = stages[0]
    beside = {i.collective for own in stages for i in own.items if isinstance(i, Overlapped)}
    if beside:
        yield (
            "overlap: what collectives beside GEMMs would be worth, which "
            f"{lowered.engine.name} does not do by itself; NCCL's all-reduces on so many SMs, in "
            f"steps of at least {LEAST_ROWS} tokens a chunk"
        )
    for overlap in wanted(lowered.spec, parallelism):
        if overlap.collective not in beside:
            yield (
                f"overlap of {overlap.collective}: no all-reduce follows a GEMM of that name, so "
                "there is none"
            )


def _anchor_notes(
    bundle: Bundle | None, anchors: Anchors | None, parallelism: Parallelism
) -> Iterator[str]:
    """What is to be known of the boards that were given."""
    workers = parallelism.replica_gpus
    boards = len(anchors.boards) if anchors else 0
    if boards and bundle is None:
        yield "anchors need a calibration to stand on; ignored"
    elif boards > workers:
        yield f"{boards} anchors given for {workers} workers: the first {workers} were used"
    elif 0 < boards < workers:
        yield f"{boards} anchors given for {workers} workers: the others are typical boards"
    if boards and bundle and parallelism.replicas > 1:
        yield "every replica is predicted on the boards of the first"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """One configuration, phase by phase."""

    stages: tuple[Lowered, ...]
    machine: Machine
    config: Config
    workload: Workload
    without: frozenset[str]

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of the model, or None."""
        return next((own.experts for own in self.stages if own.experts), None)

    def _mode(self, phase: Phase) -> Mode:
        return self.config.modes.get(phase) or self.stages[0].engine.modes.get(phase, Mode.EAGER)

    def phase(self, phase: Phase) -> tuple[PhaseResult, tuple[BreakdownRow, ...]]:
        """Result and breakdown of one phase."""
        steps = self._steps(phase)
        replicas = self.config.parallelism.replicas
        return _phase_result(steps, self.machine, replicas), self._breakdown(phase, steps)

    def _steps(self, phase: Phase) -> list[tuple[float, StepResult]]:
        """(count, step) of the steps that a phase consists of."""
        if phase is Phase.PREFILL:
            return list(self._prefill)
        if phase is Phase.DECODE:
            return [(1.0, self._decode(self.workload.decode_context))]
        return [
            *self._prefill,
            *((n, self._decode(c)) for n, c in request_contexts(self.workload)),
        ]

    def imbalance(self, phase: Phase) -> Imbalance | None:
        """How unevenly the experts of a phase are loaded, by its largest step, or None."""
        experts, engine = self.experts, self.stages[0].engine
        if experts is None or phase is Phase.REQUEST:
            return None
        if phase is Phase.PREFILL:
            step = max(self._prefill_steps, key=lambda s: s.tokens)
        else:
            step = self._decode_steps(self.workload.decode_context)[0]
        loads = experts.loads(engine, step.share(experts.dp))
        rows = sum(w.rows for w in loads)
        touched = sum(w.active for w in loads)
        held = experts.routing.experts
        waiting = sum(n * s.waiting_j for n, s in self._steps(phase))
        return Imbalance(
            experts=held,
            experts_touched=min(touched, float(held)),
            load_max_over_mean=loads[0].rows * len(loads) / rows,
            expert_max_over_mean=max(w.largest for w in loads) * held / rows,
            waiting_j=waiting * self.config.parallelism.replicas,
        )

    @cached_property
    def _prefill_steps(self) -> tuple[Step, ...]:
        """Steps of the prefill: several where the engine limits a step, or with microbatches."""
        sizes = microbatches(self.workload.batch, self.config.microbatches or 1)
        mode, length = self._mode(Phase.PREFILL), self.workload.prompt_len
        parts = [Step.prefill(size, length, mode) for size in sizes]
        serving = self.stages[0].engine.serving
        if mode is not Mode.SERVING or serving is None:
            return tuple(parts)
        limit = serving.offline_batch_tokens * self.stages[0].sharding.dp
        return tuple(step for part in parts for step in chunked(part, limit))

    def _decode_steps(self, context: float) -> tuple[Step, ...]:
        """Steps in which every sequence makes one token, the largest first: one, or microbatches'.

        Without more being asked for, those that the steps of the prefill have begun.
        """
        batch, most = self.workload.batch, min(len(self.stages), self.workload.batch)
        count = self.config.microbatches or min(most, len(self._prefill_steps))
        mode = self._mode(Phase.DECODE)
        return tuple(Step.decode(size, context, mode) for size in microbatches(batch, count))

    @cached_property
    def _prefill(self) -> tuple[tuple[float, StepResult], ...]:
        """(count, step) of each step of the prefill; a pipeline's are one."""
        lone = len(self._prefill_steps) == 1
        if len(self.stages) > 1:
            return ((1.0, self._pipelined(self._prefill_steps, lone=lone, rounds=False)),)
        counts = Counter(self._prefill_steps)
        return tuple((float(n), self._turns(s, lone=lone)[0]) for s, n in counts.items())

    @lru_cache(maxsize=64)  # noqa: B019 - a run lives no longer than its prediction
    def _decode(self, context: float) -> StepResult:
        steps = self._decode_steps(context)
        if len(self.stages) > 1:
            return self._pipelined(steps, lone=False, rounds=True)
        return self._turns(steps[0], lone=False)[0]

    def _pipelined(self, steps: Sequence[Step], *, lone: bool, rounds: bool) -> StepResult:
        turns = {s: self._turns(s, lone=lone) for s in dict.fromkeys(steps)}
        return pipelined([turns[s] for s in steps], self.machine.waiting, rounds=rounds)

    def _turns(self, step: Step, *, lone: bool) -> tuple[StepResult, ...]:
        return self.machine.turns(self.stages, step, self.without, lone=lone)

    def _breakdown(
        self, phase: Phase, steps: Sequence[tuple[float, StepResult]]
    ) -> tuple[BreakdownRow, ...]:
        """Parts of all steps by op name; they sum up to the phase in time and in energy."""
        replicas, device = self.config.parallelism.replicas, self.machine.device
        total = sum(n * s.energy_j for n, s in steps)
        rows: dict[tuple[str, str], BreakdownRow] = {}
        limits: dict[tuple[str, str], float] = {}
        counts: dict[tuple[str, str], float] = {}
        for n, s in steps:
            for part in s.parts:
                key = (str(part.kind), part.name)
                row = rows.get(key) or BreakdownRow(
                    phase=str(phase), kind=part.kind, op=part.name, count=0, latency_s=0.0,
                    energy_j=0.0, share=0.0, source=part.source,
                )  # fmt: skip
                rows[key] = replace(
                    row,
                    latency_s=row.latency_s + n * part.latency_s,
                    energy_j=row.energy_j + n * part.energy_j * replicas,
                    source=max(row.source, part.source),
                )
                counts[key] = counts.get(key, 0.0) + n * part.count
                # What a pipeline does beside its longest way takes no time of the phase.
                on_way = part.op is not None and part.latency_s > 0
                if part.op is not None and on_way and not part.op.type.is_collective:
                    limits[key] = limits.get(key, 0.0) + n * part.count * _physical_limit_s(
                        part.op, device
                    )
        return tuple(
            replace(
                row,
                count=round(counts[key]),
                share=row.energy_j / (total * replicas),
                limit_share=limits[key] / row.latency_s
                if key in limits and row.latency_s > 0
                else None,
            )
            for key, row in rows.items()
        )


def _phase_result(
    steps: Sequence[tuple[float, StepResult]], priced: Machine, replicas: int = 1
) -> PhaseResult:
    """What (count, step) of each step of a phase come to, of all replicas."""
    latency = sum(n * s.latency_s for n, s in steps)
    energy = sum(n * s.energy_j for n, s in steps)

    def bound(name: str, side: int) -> float:
        return float(sum(n * getattr(s.interval, name)[side] for n, s in steps))

    longest = max(steps, key=lambda p: p[0] * p[1].latency_s)[1]
    return PhaseResult(
        latency_s=latency,
        energy_j=energy * replicas,
        mean_power_w=energy / latency / len(priced.boards),
        clock_hz=longest.clock * priced.device.clock_max_hz,
        interval=Interval(
            level=LEVEL,
            latency_s=(bound("latency_s", 0), bound("latency_s", 1)),
            energy_j=(bound("energy_j", 0) * replicas, bound("energy_j", 1) * replicas),
        ),
        source=max(s.source for _, s in steps),
        regime=longest.regime,
    )


def microbatches(batch: int, count: int) -> tuple[int, ...]:
    """Sequences of each of ``count`` parts of a batch, as even as they divide, largest first."""
    each, left = divmod(batch, count)
    return tuple(each + (i < left) for i in range(count))


def request_contexts(workload: Workload) -> list[tuple[float, float]]:
    """(steps, context) nodes that integrate the decode steps of a request by Gauss-Legendre."""
    steps = workload.gen_len - 1
    if steps < 1:
        return []
    first = workload.prompt_len + 1
    if steps <= _REQUEST_NODES:
        return [(1.0, float(first + i)) for i in range(steps)]
    nodes, weights = np.polynomial.legendre.leggauss(_REQUEST_NODES)
    # Steps see contexts first … first + steps - 1: midpoints of unit intervals around them.
    contexts = first - 0.5 + steps * (nodes + 1) / 2
    return [(float(steps * wt / 2), float(c)) for wt, c in zip(weights, contexts, strict=True)]


def _physical_limit_s(op: Op, device: Device) -> float:
    """Least time by the datasheet: peak arithmetic, or each byte once at full bandwidth."""
    compute = op.flops / device.peak(op.dtype) if prior(op, device).compute_s > 0 else 0.0
    return max(compute, (op.bytes_read + op.bytes_written) / device.memory_bandwidth_bytes_s)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """What is known by name; everything is read once.

    Attributes:
        bundle_files: bundles to use instead of the shipped ones.
    """

    bundle_files: tuple[Path, ...] = ()
    _cache: dict[tuple[str, str], object] = field(default_factory=dict, repr=False)

    def spec(self, name: str) -> Spec:
        """A model by name or file; see `energylens.spec.load.load_spec`."""
        return self._once("spec", name, load_spec)

    def engine(self, name: str) -> Engine:
        """An engine profile by name."""
        return self._once("engine", name, load_engine)

    def device(self, name: str) -> Device:
        """A device by name or alias."""
        return self._once("device", name, load_device)

    def link(self, device: Device, gpus: int) -> Link | None:
        """Interconnect of the smallest known cluster that holds ``gpus`` of the device, or None."""
        return self._once("link", f"{device.name}:{gpus}", lambda _: _link(device, gpus))

    def bundles(self, device: Device, engine: Engine) -> tuple[Bundle, ...]:
        """Bundles for a device: the given files, else those that are shipped."""
        paths = self.bundle_files or tuple(
            sorted((data_dir("calibration") / "bundles" / device.name).glob("*.json"))
        )
        bundles = tuple(
            self._once("bundle", str(p), lambda text: load_bundle(Path(text))) for p in paths
        )
        for b in bundles if self.bundle_files else ():
            if b.device != device.name:
                raise SpecError(
                    f"--bundle is of {b.device}, but --device is {device.name}; give one of that "
                    "device"
                )
        return bundles

    def list(self, kind: str) -> tuple[str, ...]:
        """Names of ``specs``, ``devices``, ``engines``, ``clusters`` or ``bundles``."""
        if kind != "bundles":
            return list_resources(kind)
        folder = data_dir("calibration") / "bundles"
        return tuple(
            sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.glob("*/*.json"))
        )

    def _once(self, kind: str, name: str, load: Callable[[str], _T]) -> _T:
        key = (kind, name)
        if key not in self._cache:
            self._cache[key] = load(name)
        return cast(_T, self._cache[key])


def _link(device: Device, gpus: int) -> Link | None:
    clusters = [load_cluster(name) for name in list_resources("clusters")]
    fitting = [c for c in clusters if c.device == device.name and c.gpus >= gpus]
    best = min(fitting, key=lambda c: c.gpus, default=None)
    return best.link if best else None


def _set(engine: Engine, config: Config, workload: Workload) -> Engine:
    """The engine with the limit that the configuration sets."""
    most = config.max_sequences
    if most is None:
        return engine
    if engine.serving is None:
        raise SpecError(f"engine {engine.name} has no limit of sequences; leave --max-num-seqs out")
    if workload.batch > most:
        raise SpecError(
            f"a batch of {workload.batch} is above --max-num-seqs {most}; raise it, or lower "
            "--batch"
        )
    return replace(engine, serving=engine.serving.limited(max_sequences=most))


def predict_measurement(
    m: Measurement,
    *,
    anchors: Anchors | None,
    without: frozenset[str],
    catalogue: Catalogue,
    max_sequences: int | None = None,
) -> Prediction | OpsPrediction | Infeasible | str:
    """The prediction that stands beside a measured row, or why there is none.

    Args:
        m: the row.
        anchors: of the row's boards, or None for typical ones.
        without: composition laws to leave out.
        catalogue: where names are looked up.
        max_sequences: what rows of engines that serve were measured with, the engine's own by
            default.

    Raises:
        CalibrationError: a bundle is damaged.
    """
    try:
        if m.overlap is not None:
            return _predict_overlap(m, m.overlap, anchors, without, catalogue)
        spec, engine, device = (
            catalogue.spec(m.spec),
            catalogue.engine(m.engine),
            catalogue.device(m.device),
        )
        phase = Phase(m.phase)
        if m.precision is not None:
            if m.precision not in BITS:
                return f"unknown precision {m.precision!r}; known: {', '.join(BITS)}"
            spec = replace(spec, precision=replace(spec.precision, weights=m.precision))
        if phase is Phase.REQUEST and m.gen_len is None:
            return "a request needs gen_len, and the row has none"
        both = (Phase.PREFILL, Phase.DECODE) if phase is Phase.REQUEST else (phase,)
        modes = dict.fromkeys(both, Mode(m.mode))
        if m.prefill_mode is not None:
            modes[Phase.PREFILL] = Mode(m.prefill_mode)
        return predict(
            spec,
            engine=engine,
            device=device,
            config=Config(
                parallelism=m.parallelism,
                modes=MappingProxyType(modes),
                power_limit_w=m.power_limit_w,
                max_sequences=max_sequences if engine.serving else None,
            ),
            workload=Workload(
                batch=m.batch,
                prompt_len=m.prompt_len,
                gen_len=m.gen_len or 1,
                context_len=m.context_len or m.prompt_len + 1,
            ),
            bundles=catalogue.bundles(device, engine),
            anchors=anchors,
            phases=(phase,),
            without=without,
            link=catalogue.link(device, m.parallelism.replica_gpus),
        )
    except CalibrationError:  # of the calibration, not of the row: no row can be predicted with it
        raise
    except EnergyLensError as error:
        return str(error)


def _predict_overlap(
    m: Measurement,
    run: OverlapRun,
    anchors: Anchors | None,
    without: frozenset[str],
    catalogue: Catalogue,
) -> OpsPrediction | Infeasible:
    """The prediction beside a row that ran a GEMM and its all-reduce."""
    device, workers = catalogue.device(m.device), m.parallelism.workers
    engine = catalogue.engine("hf")  # its kernels are torch's, and so are those of the row
    return predict_ops(
        overlap_ops(run, device, workers),
        device=device,
        workers=workers,
        bundle=select(catalogue.bundles(device, engine), device.name, engine.provider),
        anchors=anchors,
        power_limit_w=m.power_limit_w,
        without=without,
        link=catalogue.link(device, workers),
    )


def overlap_ops(run: OverlapRun, device: Device, workers: int) -> tuple[Op, ...]:
    """What each worker of a measured GEMM and all-reduce executes.

    Args:
        run: the row.
        device: what it ran on.
        workers: how many GPUs.

    Raises:
        SpecError: the results of the dtype are not summed up in 16 bits, or the number of SMs that
            NCCL took is not known.
    """
    known = [name for name, bits in BITS.items() if bits <= BITS["bf16"]]
    if run.dtype not in known:
        raise SpecError(f"overlaps in {run.dtype!r} are not priced; known: {', '.join(known)}")
    rows = math.ceil(run.tokens / run.chunks)
    gemm = make_op("gemm", dtype=run.dtype, count=run.chunks, m=rows, n=run.n, k=run.k)
    if run.kind is OverlapKind.GEMM_ONLY:
        return (gemm,)
    own = NCCL_SMS.get((device.name, workers))
    if run.sms is None and own is None:
        raise SpecError(
            f"NCCL's own number of SMs on {workers} {device.name} is not known; give it as ctas"
        )
    values, sms = run.tokens * run.n, min(n for n in (run.sms, own) if n is not None)
    if sms >= device.sm_count:
        raise SpecError(
            f"ctas is {sms}: {device.name} has {device.sm_count} SMs, and the number that NCCL "
            "takes of them is not known"
        )
    if run.kind is OverlapKind.ALLREDUCE_ONLY:
        return (make_op("limited_all_reduce", values=values, workers=workers, sms=sms),)
    reduce = make_op(
        "overlapped_all_reduce",
        dtype=run.dtype,
        values=values,
        workers=workers,
        sms=sms,
        chunks=run.chunks,
        m=run.tokens,
        n=run.n,
        k=run.k,
    )
    return gemm, reduce
