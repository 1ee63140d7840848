"""The chain on one page: spec -> ops of a step -> costs -> composed step -> phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from energylens.cost.board import Board, Spread, board, typical_boards
from energylens.cost.bundle import Bundle, HostLaw, Laws, load_bundle, select
from energylens.cost.features import prior, step_shape
from energylens.cost.model import CostModelSet
from energylens.errors import CalibrationError, EnergyLensError, OutOfRangeError, SpecError
from energylens.graph import Op
from energylens.lower import Experts, Lowered, fullest, lower_stages
from energylens.results import (
    Anchors,
    BreakdownRow,
    Cost,
    HostAnchor,
    Imbalance,
    Infeasible,
    Interval,
    Measurement,
    PhaseResult,
    Prediction,
    Source,
)
from energylens.schedule import (
    LEVEL,
    LOWEST_CLOCK,
    Constants,
    Host,
    Spreads,
    StepResult,
    Waiting,
    Worker,
    pipelined,
    step,
    totals,
)
from energylens.spec.load import (
    data_dir,
    list_resources,
    load_cluster,
    load_device,
    load_engine,
    load_spec,
)
from energylens.spec.model import Spec
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

_T = TypeVar("_T")
Array = NDArray[np.float64]

# Decode steps that stand for all of a request's: cost is nearly linear in the context.
_REQUEST_NODES = 4

# Between boards nobody has measured of a device nobody has calibrated: streaming power of four
# H200s spread by 7 %.
_UNKNOWN_SPREAD = Spread(memory_power=0.08, compute_power=0.06, memory_time=0.02, idle_w=6.0)
# Left over between a board and its anchor: repeatability of the anchor itself, and that one stream
# does not stand for every kernel (DESIGN law 8: 2.4 % in power, 1.4 % in time over pairs of
# hosts).
_ANCHORED_SPREAD = Spread(memory_power=0.02, compute_power=0.015, memory_time=0.01, idle_w=1.0)
# Real weights and activations against the random ones of a calibration: up to 2.5 % in power and
# 1.5 % in speed (DESIGN law 9), taken as two standard deviations.
_DATA_LATENCY_SD, _DATA_ENERGY_SD = 0.0075, 0.0125
# Whole steps against the layer replays that the laws were fitted on: three capped prefills of a
# whole model on two hosts were 1.7 % off (benchmarks/hf_reference.py), the replays 1.2 %.
_WHOLE_STEP_SD = 0.012
# Of hosts that nobody has measured: a launch, and a step of an engine that serves.
_UNKNOWN_LAUNCH_S, _UNKNOWN_STEP_S = 20e-6, 2e-3
_UNKNOWN_HOST_REL_SE, _OTHER_HOST_REL_SE, _ANCHORED_HOST_REL_SE = 0.6, 0.35, 0.15
_OTHER_WORKERS_HOST_REL_SE = 0.15
# What a board holds under a power limit: as measured, and how far that may be off for each part
# that another limit differs by, since nothing was measured there.
_CAP_REL_SE, _OTHER_LIMIT_REL_SE = 0.01, 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """Everything that prices a step: cost model, laws, boards and host of one configuration.

    ``boards`` are those of all pipeline ``stages``, one after the other. ``limit_change`` is by how
    much of the power limit of the calibration the given one differs.
    """

    device: Device
    model: CostModelSet
    laws: Laws
    boards: tuple[Board, ...]
    spread: Spread
    cap_w: float
    limit_change: float
    host: HostLaw | None
    host_anchor: HostAnchor | None
    stages: int = 1

    def step(
        self,
        ops: Sequence[Op],
        mode: Mode,
        without: frozenset[str],
        *,
        others: Sequence[Sequence[Op]] = (),
        lone: bool = False,
        stage: int = 0,
    ) -> StepResult:
        """Price and compose one step on all boards of a stage.

        Args:
            ops: what the worker with the most to do executes.
            mode: launch mode.
            others: what each other worker executes, op by op, where it is not the same.
            without: laws to leave out.
            lone: True where nothing runs before or after the step, so that the host's work for it
                has less to hide behind.
            stage: of the pipeline.
        """
        costs = self.model.costs(ops)
        by_worker = [costs, *(self.model.costs(o) for o in others)]
        laws, spread = self.laws, self.spread
        result = step(
            ops,
            costs,
            self._workers(by_worker, stage),
            constants=self._constants,
            spreads=Spreads(
                memory_power=spread.memory_power,
                compute_power=spread.compute_power,
                memory_time=spread.memory_time,
                latency=math.hypot(laws.latency_sd, _WHOLE_STEP_SD, _DATA_LATENCY_SD),
                energy=math.hypot(laws.energy_sd, _WHOLE_STEP_SD, _DATA_ENERGY_SD),
                cap=_CAP_REL_SE + _OTHER_LIMIT_REL_SE * self.limit_change,
            ),
            host=self._host(ops, mode, lone, stage),
            mode=mode,
            without=without,
            linked=self.stages > 1,
        )
        if self.limit_change and result.clock < 1.0:
            return replace(result, source=max(result.source, Source.EXTRAPOLATED))
        return result

    def price(
        self, stages: Sequence[Lowered], steps: Sequence[Step], *, lone: bool = False
    ) -> tuple[Array, Array]:
        """Seconds and joules of many steps on each stage, without intervals, each [steps, stages].

        The steps follow each other, or each is ``lone``. The same numbers as `step` gives, faster:
        each distinct op is priced once.
        """
        latency, energy = np.empty((2, len(steps), len(stages)))
        lowered = {id(own): own for own in stages}
        sequences = {key: [own.by_worker(s) for s in steps] for key, own in lowered.items()}
        every = (op for own in sequences.values() for step in own for ops in step for op in ops)
        distinct = list({op.key: op for op in every}.values())
        costs = dict(zip((op.key for op in distinct), self.model.costs(distinct), strict=True))
        for stage, key in enumerate(map(id, stages)):
            alike = self._alike(stages, stage)
            if alike < stage:
                latency[:, stage], energy[:, stage] = latency[:, alike], energy[:, alike]
                continue
            for i, (s, by_worker) in enumerate(zip(steps, sequences[key], strict=True)):
                own = [[costs[op.key] for op in ops] for ops in by_worker]
                latency[i, stage], energy[i, stage] = totals(
                    by_worker[0],
                    own[0],
                    self._workers(own, stage),
                    self._constants,
                    self._host(by_worker[0], s.mode, lone, stage),
                    s.mode,
                    linked=self.stages > 1,
                )
        return latency, energy

    def _alike(self, stages: Sequence[Lowered], stage: int) -> int:
        """The first stage that does the same on the same boards; the host forms steps for one."""
        return next(
            i
            for i in range(stage + 1)
            if i == stage
            or (i > 0 and stages[i] is stages[stage] and self._of(i) == self._of(stage))
        )

    def _of(self, stage: int) -> tuple[Board, ...]:
        """The boards of a stage."""
        workers = len(self.boards) // self.stages
        return self.boards[stage * workers : (stage + 1) * workers]

    def turns(
        self, stages: Sequence[Lowered], step: Step, without: frozenset[str], *, lone: bool
    ) -> tuple[StepResult, ...]:
        """The step composed on each stage; one and the same value on those that are alike."""
        found: list[StepResult] = []
        for stage, lowered in enumerate(stages):
            alike = self._alike(stages, stage)
            if alike < stage:
                found.append(found[alike])
                continue
            ops, *others = lowered.by_worker(step)
            found.append(self.step(ops, step.mode, without, others=others, lone=lone, stage=stage))
        return tuple(found)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """What each stage draws while it waits: its boards wait for the host or in a receive."""
        above_w = max(self._wait_w, self.laws.spin_w + self.laws.link_w)
        return tuple(
            Waiting(idle_w=sum(b.idle_w for b in boards), above_idle_w=above_w * len(boards))
            for boards in map(self._of, range(self.stages))
        )

    def _workers(self, by_worker: Sequence[Sequence[Cost]], stage: int = 0) -> list[Worker]:
        """A stage's boards, with the costs of the ops on each; one list of costs stands for all."""
        workers = []
        for i, b in enumerate(self._of(stage)):
            latency_s, energy_j = b.localise(by_worker[i if len(by_worker) > 1 else 0])
            workers.append(
                Worker(idle_w=b.idle_w, cap_w=self.cap_w, latency_s=latency_s, energy_j=energy_j)
            )
        return workers

    @property
    def _constants(self) -> Constants:
        laws = self.laws
        return Constants(
            eta=laws.eta,
            gap_s=laws.gap_s,
            wait_w=self._wait_w,
            spin_w=laws.spin_w,
            link_w=laws.link_w,
        )

    @property
    def _wait_w(self) -> float:
        return self.host.wait_w.get(self.host.nearest(len(self.boards)), 0.0) if self.host else 0.0

    def _host(self, ops: Sequence[Op], mode: Mode, lone: bool = False, stage: int = 0) -> Host:
        """Host time of a step that executes ``ops``.

        The first stage's has the forming of the step in it; the others launch their layers only.
        """
        law = self.host
        n = law.nearest(len(self.boards)) if law else 0
        serial_s = layers_rel_se = 0.0
        if mode is Mode.SERVING:
            by_workers = (law.lone_steps if lone else law.steps) if law else {}
            if law is None or n not in by_workers:
                return Host(
                    step_s=0.0 if stage else _UNKNOWN_STEP_S,
                    rel_se=_UNKNOWN_HOST_REL_SE,
                    source=Source.ROOFLINE,
                )
            own, shape = by_workers[n], step_shape(ops)
            step_s, serial_s = own.total_s(shape), own.serial_s(shape)
            if stage:
                step_s, serial_s = own.launched_s(shape), 0.0
            layers_rel_se = own.layers_rel_se(shape)
        else:
            launches = sum(o.count * o.launches for o in ops)
            if law is None or n not in law.launch_s:
                return Host(
                    step_s=launches * _UNKNOWN_LAUNCH_S,
                    rel_se=_UNKNOWN_HOST_REL_SE,
                    source=Source.ROOFLINE,
                )
            step_s = launches * law.launch_s[n]
        # More processes on a host than were measured slow each other's launches down.
        other = 0.0 if n == len(self.boards) else _OTHER_WORKERS_HOST_REL_SE
        here, ratio, rel_se = self.host_anchor, 1.0, _OTHER_HOST_REL_SE
        if here is not None:
            rel_se = _ANCHORED_HOST_REL_SE
            ratio = (
                here.module_us / law.anchor.module_us
                if here.module_us and law.anchor.module_us
                else here.launch_us / law.anchor.launch_us
            )
        return Host(
            step_s=step_s * ratio,
            rel_se=math.hypot(rel_se, law.rel_se, other, layers_rel_se),
            source=Source.TRANSFERRED,
            serial_s=serial_s * ratio,
        )


def machine(
    device: Device,
    *,
    workers: int,
    bundle: Bundle | None,
    anchors: Anchors | None,
    power_limit_w: float | None = None,
    link: Link | None = None,
    stages: int = 1,
) -> Machine:
    """Prices for boards of a device: as anchored, else typical with their spread.

    There are ``workers`` of them in each of the pipeline ``stages``; anchors are stage by stage.
    """
    measured_w = bundle.power_limit_w if bundle else device.power_limit_w
    limit = power_limit_w or measured_w
    laws = bundle.laws if bundle else Laws()
    idle_w = bundle.typical.idle_w if bundle else device.idle_w
    spread = bundle.spread if bundle else _UNKNOWN_SPREAD
    given = anchors.boards if anchors else ()
    boards: tuple[Board, ...] = ()
    left = spread
    for stage in range(stages):
        own = given[stage * workers : (stage + 1) * workers] if bundle else ()
        known = tuple(board(a, bundle.typical, device, laws.eta) for a in own) if bundle else ()
        boards += known + typical_boards(workers - len(known), idle_w, spread)
    if bundle and len(given) >= workers * stages:
        left = _ANCHORED_SPREAD
    return Machine(
        device=device,
        model=bundle.model(device, link) if bundle else CostModelSet(device=device, link=link),
        laws=laws,
        boards=boards,
        spread=left,
        cap_w=laws.cap_fraction * limit,
        limit_change=abs(limit / measured_w - 1.0),
        host=bundle.host if bundle else None,
        host_anchor=anchors.host if anchors else None,
        stages=stages,
    )


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
        SpecError: the engine has no kernel for an op of the spec, or the power limit is above the
            device's.
    """
    if config.power_limit_w is not None and config.power_limit_w > device.power_limit_w:
        raise SpecError(
            f"a power limit of {config.power_limit_w:g} W: {device.name} allows up to "
            f"{device.power_limit_w:g} W"
        )
    engine, parallelism = engine.on(device), config.parallelism
    most = min(parallelism.pp, workload.batch)
    if config.microbatches is not None and not 1 <= config.microbatches <= most:
        raise OutOfRangeError(
            f"microbatches must be from 1 to {most} at pp={parallelism.pp} and a batch of "
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
        stages=parallelism.pp,
    )
    run = _Run(stages=stages, machine=priced, config=config, workload=workload, without=without)
    results = {p: run.phase(p) for p in phases}
    lowest_hz = LOWEST_CLOCK * device.clock_max_hz
    if any((r.clock_hz or math.inf) <= lowest_hz for r, _ in results.values()):
        return Infeasible(
            reason=(
                f"{device.name} cannot hold {priced.cap_w:.0f} W: even at {lowest_hz / 1e6:.0f} "
                "MHz this workload draws more; raise --power-limit"
            ),
            memory=held,
        )
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
        notes=_notes(spec, bundle, device, engine, anchors, parallelism, priced),
        routing=run.experts.routing.name if run.experts else None,
        imbalance=MappingProxyType(
            {str(p): i for p in phases if (i := run.imbalance(p)) is not None}
        ),
    )


def _notes(
    spec: Spec,
    bundle: Bundle | None,
    device: Device,
    engine: Engine,
    anchors: Anchors | None,
    parallelism: Parallelism,
    priced: Machine,
) -> tuple[str, ...]:
    notes = []
    workers = parallelism.workers * parallelism.pp
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
    boards = len(anchors.boards) if anchors else 0
    if boards and bundle is None:
        notes.append("anchors need a calibration to stand on; ignored")
    elif boards > workers:
        notes.append(f"{boards} anchors given for {workers} workers: the first {workers} were used")
    elif 0 < boards < workers:
        notes.append(f"{boards} anchors given for {workers} workers: the others are typical boards")
    if boards and bundle and parallelism.replicas > 1:
        notes.append("every replica is predicted on the boards of the first")
    if spec.overlap:
        notes.append("overlap of the spec is not priced: collectives and compute take turns")
    if parallelism.pp > 1:
        notes.append(
            "pipeline: layers split as vLLM does; a batch in one part passes the stages one by one "
            "while the others wait, parts in flight overlap (--microbatches: by default one for "
            "each step that the engine's limits make of the prefill); sends between stages are "
            "priced as collectives of as many bytes"
        )
    limit = bundle.power_limit_w if bundle else device.power_limit_w
    if priced.limit_change:
        notes.append(
            f"measured at a power limit of {limit:.0f} W: other limits follow the common-clock law"
        )
    return tuple(notes)


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
        return self._result(steps), self._breakdown(phase, steps)

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

    def _result(self, steps: Sequence[tuple[float, StepResult]]) -> PhaseResult:
        latency = sum(n * s.latency_s for n, s in steps)
        energy = sum(n * s.energy_j for n, s in steps)
        replicas = self.config.parallelism.replicas

        def bound(name: str, side: int) -> float:
            return float(sum(n * getattr(s.interval, name)[side] for n, s in steps))

        longest = max(steps, key=lambda p: p[0] * p[1].latency_s)[1]
        return PhaseResult(
            latency_s=latency,
            energy_j=energy * replicas,
            mean_power_w=energy / latency / len(self.machine.boards),
            clock_hz=longest.clock * self.machine.device.clock_max_hz,
            interval=Interval(
                level=LEVEL,
                latency_s=(bound("latency_s", 0), bound("latency_s", 1)),
                energy_j=(bound("energy_j", 0) * replicas, bound("energy_j", 1) * replicas),
            ),
            source=max(s.source for _, s in steps),
            regime=longest.regime,
        )

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
    peak = device.peak_flops.get(op.dtype, max(device.peak_flops.values()))
    compute = op.flops / peak if prior(op, device).compute_s > 0 else 0.0
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


def predict_measurement(
    m: Measurement, *, anchors: Anchors | None, without: frozenset[str], catalogue: Catalogue
) -> Prediction | Infeasible | str:
    """The prediction that stands beside a measured row, or why there is none.

    Args:
        m: the row.
        anchors: of the row's boards, or None for typical ones.
        without: composition laws to leave out.
        catalogue: where names are looked up.

    Raises:
        CalibrationError: a bundle is damaged.
    """
    try:
        spec, engine, device = (
            catalogue.spec(m.spec),
            catalogue.engine(m.engine),
            catalogue.device(m.device),
        )
        phase = Phase(m.phase)
        if m.precision != spec.precision.weights:
            return f"the spec {spec.name} is {spec.precision.weights}, the row {m.precision}"
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
            link=catalogue.link(device, m.parallelism.gpus),
        )
    except CalibrationError:  # of the calibration, not of the row: no row can be predicted with it
        raise
    except EnergyLensError as error:
        return str(error)
