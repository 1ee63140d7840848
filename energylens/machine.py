"""What prices a step: a cost model with its laws, on the boards and the host of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from energylens.cost.board import Board, Spread, board, typical_boards
from energylens.cost.bundle import Bundle, HostLaw, Laws
from energylens.cost.features import StepShape, step_shape
from energylens.cost.model import CostModelSet, Key
from energylens.graph import SPLIT_TOKENS, Op
from energylens.lower import Experts, Lowered
from energylens.lower.items import Item
from energylens.pipeline import Waiting
from energylens.results import Anchors, Cost, HostAnchor, Kind, Source
from energylens.schedule import (
    LOWEST_CLOCK,
    Constants,
    Host,
    Kernels,
    Spreads,
    StepResult,
    Worker,
    kernel_result,
    paces,
    step,
    totals,
)
from energylens.spec.system import Device, Link, Mode, Step

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

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

    ``boards`` are those of all pipeline ``stages``, one after the other. ``limit_w`` is the power
    limit of each, of which its governor holds ``cap_w`` in the mean; ``limit_change`` is by how
    much of the calibration's limit it differs. Steps of an engine that serves are captured up to
    ``captured_tokens`` new tokens.
    """

    device: Device
    model: CostModelSet
    laws: Laws
    boards: tuple[Board, ...]
    spread: Spread
    limit_w: float
    cap_w: float
    limit_change: float
    host: HostLaw | None
    host_anchor: HostAnchor | None
    captured_tokens: int = SPLIT_TOKENS
    stages: int = 1

    @property
    def cannot_hold(self) -> str:
        """Why what draws more than the power limit at the lowest clock cannot run."""
        lowest_hz = LOWEST_CLOCK * self.device.clock_max_hz
        return (
            f"{self.device.name} cannot hold a power limit of {self.limit_w:g} W: even at "
            f"{lowest_hz / 1e6:.0f} MHz this workload draws more; raise --power-limit"
        )

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
        known = dict(zip((op.key for op in ops), costs, strict=True))
        new = {op.key: op for own in others for op in own if op.key not in known}
        known |= zip(new, self.model.costs(list(new.values())), strict=True)
        by_worker = [costs, *([known[op.key] for op in own] for own in others)]
        laws, spread = self.laws, self.spread
        result = step(
            ops,
            costs,
            self._workers(ops, by_worker, stage),
            constants=self._constants,
            spreads=Spreads(
                memory_power=spread.memory_power,
                compute_power=spread.compute_power,
                memory_time=spread.memory_time,
                latency=math.hypot(laws.latency_sd, _WHOLE_STEP_SD, _DATA_LATENCY_SD),
                energy=math.hypot(laws.energy_sd, _WHOLE_STEP_SD, _DATA_ENERGY_SD),
                cap=_CAP_REL_SE + _OTHER_LIMIT_REL_SE * self.limit_change,
            ),
            host=self._host(
                step_shape(ops), sum(o.count * o.launches for o in ops), mode, lone, stage
            ),
            mode=mode,
            without=without,
            linked=self.stages > 1,
        )
        if self.limit_change and result.clock < 1.0:
            return replace(result, source=max(result.source, Source.EXTRAPOLATED))
        return result

    def price(
        self,
        sums: StepSums,
        stages: Sequence[Lowered],
        steps: Sequence[Step],
        *,
        lone: bool = False,
    ) -> tuple[Array, Array]:
        """Seconds and joules of many steps on each stage, without intervals, each [steps, stages].

        The steps follow each other, or each is ``lone``. The same numbers as `step` gives, faster:
        ``sums`` knows what the ops of steps add up to.
        """
        latency, energy = np.empty((2, len(steps), len(stages)))
        for stage, lowered in enumerate(stages):
            alike = self._alike(stages, stage)
            if alike < stage:
                latency[:, stage], energy[:, stage] = latency[:, alike], energy[:, alike]
                continue
            found, boards = sums.of(lowered, steps), self._of(stage)
            hosts = [
                self._host(shape, launches, step.mode, lone, stage)
                for step, shape, launches in zip(steps, found.shapes, found.launches, strict=True)
            ]
            host = np.array(
                [
                    (0.0, 0.0) if step.mode is Mode.CUDA_GRAPH else (h.step_s, h.serial_s)
                    for step, h in zip(steps, hosts, strict=True)
                ]
            ).reshape(-1, 2)
            idle_w = np.array([b.idle_w for b in boards])
            latency[:, stage], energy[:, stage] = totals(
                self._kernels(found, boards, idle_w),
                idle_w,
                self.cap_w,
                self._constants,
                step_s=host[:, 0],
                serial_s=host[:, 1],
                linked=found.linked | (self.stages > 1),
            )
        return latency, energy

    def _kernels(self, found: SummedSteps, boards: Sequence[Board], idle_w: Array) -> Kernels:
        """The sums on the boards of a stage, the slowest of which are the fullest, as in a step."""
        gap_s = self.laws.gap_s
        if found.moments.shape[1] == 1:
            return found.on(boards, gap_s)
        fullest = found.first.on(boards, gap_s)
        time, energy = paces(fullest, idle_w, self.cap_w, self._constants, found.linked)
        slowest_first = np.lexsort((-energy, -time))
        return found.spread(slowest_first).on(boards, gap_s)

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

    def _workers(
        self, ops: Sequence[Op], by_worker: Sequence[Sequence[Cost]], stage: int
    ) -> list[Worker]:
        """A stage's boards, with the costs of the ops on each; one list of costs stands for all.

        Which worker is the fullest differs from layer to layer, but the slowest board holds all of
        them up: it is taken to be the fullest, the next slowest the next.
        """
        fullest, boards = by_worker[0], self._of(stage)
        workers = [self._on(b, fullest) for b in boards]
        if len(by_worker) == 1:
            return workers
        alone = [kernel_result(ops, fullest, w, self._constants) for w in workers]
        slowest_first = sorted(range(len(workers)), key=lambda i: alone[i][:2], reverse=True)
        loads = sorted(by_worker, key=lambda costs: -sum(c.latency_s for c in costs))
        for i, costs in zip(slowest_first, loads, strict=True):
            workers[i] = self._on(boards[i], costs)
        return workers

    def _on(self, board: Board, costs: Sequence[Cost]) -> Worker:
        latency_s, energy_j = board.localise(costs)
        return Worker(idle_w=board.idle_w, cap_w=self.cap_w, latency_s=latency_s, energy_j=energy_j)

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

    def _host(self, shape: StepShape, launches: float, mode: Mode, lone: bool, stage: int) -> Host:
        """Host time of a step of a shape, with so many launches.

        The first stage's has the forming of the step in it; the others launch their layers only.
        """
        law, shape = self.host, replace(shape, captured_tokens=self.captured_tokens)
        n = law.nearest(len(self.boards) // self.stages) if law else 0
        serial_s = layers_rel_se = 0.0
        if mode is Mode.SERVING:
            by_workers = (law.lone_steps if lone else law.steps) if law else {}
            if law is None or n not in by_workers:
                return Host(
                    step_s=0.0 if stage else _UNKNOWN_STEP_S,
                    rel_se=_UNKNOWN_HOST_REL_SE,
                    source=Source.ROOFLINE,
                )
            own = by_workers[n]
            step_s, serial_s = own.total_s(shape), own.serial_s(shape)
            if stage:
                step_s, serial_s = own.launched_s(shape), 0.0
            layers_rel_se = own.layers_rel_se(shape)
        else:
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
            # Between steps that follow each other it is no slower on a slower host.
            serial_s=serial_s * (ratio if lone else 1.0),
        )


def machine(
    device: Device,
    *,
    workers: int,
    bundle: Bundle | None,
    anchors: Anchors | None,
    power_limit_w: float | None = None,
    link: Link | None = None,
    captured_tokens: int = SPLIT_TOKENS,
    stages: int = 1,
) -> Machine:
    """Prices for boards of a device: as anchored, else typical with their spread.

    There are ``workers`` of them in each of the pipeline ``stages``; anchors are stage by stage.
    """
    measured_w = bundle.power_limit_w if bundle else device.power_limit_w
    limit = power_limit_w or measured_w
    laws = bundle.laws if bundle else Laws()
    # The name of a power mode is no cap: what was measured in it counts, above its watts too.
    is_capped = bundle is None or device.power_mode is None or power_limit_w is not None
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
        limit_w=limit,
        cap_w=laws.cap_fraction * limit if is_capped else math.inf,
        limit_change=abs(limit / measured_w - 1.0),
        host=bundle.host if bundle else None,
        host_anchor=anchors.host if anchors else None,
        captured_tokens=captured_tokens,
        stages=stages,
    )


# ---------------------------------------------------------------- many steps at once


@dataclass(frozen=True, kw_only=True, eq=False)
class SummedSteps:
    """What the ops of some steps add up to on a typical board.

    ``moments`` are sums over the ops, [steps, workers, moments], with one worker where all do the
    same; what they become on a board is linear in what is special about it.
    """

    moments: Array
    shapes: tuple[StepShape, ...]

    @property
    def launches(self) -> list[float]:
        """CUDA kernels that a worker launches, of each step."""
        launches: list[float] = self.moments[:, 0, 10].tolist()
        return launches

    @property
    def linked(self) -> BoolArray:
        """Which steps have collectives, [steps]."""
        return np.asarray(self.moments[:, 0, 11] > 0)

    @property
    def first(self) -> SummedSteps:
        """The fullest worker's, for all."""
        return replace(self, moments=self.moments[:, :1])

    def spread(self, boards: IntArray) -> SummedSteps:
        """The workers' sums, the longest on the first of the boards that are named, [steps, n]."""
        longest_first = np.argsort(-self.moments[..., _ALONE_S], axis=1, kind="stable")
        moments = np.empty_like(self.moments)
        own = np.take_along_axis(self.moments, longest_first[..., None], axis=1)
        np.put_along_axis(moments, boards[..., None], own, axis=1)
        return replace(self, moments=moments)

    def on(self, boards: Sequence[Board], gap_s: float) -> Kernels:
        """The sums on boards; the same as `Board.localise` and `kernel_sum` of every op."""
        slower = np.array([b.memory_time - 1.0 for b in boards])
        compute = np.array([b.compute_power - 1.0 for b in boards])
        memory = np.array([b.memory_power - 1.0 for b in boards])
        m = np.moveaxis(
            self.moments, -1, 0
        )  # [moments, steps, workers], as boards where they differ
        scaled = m[1] + m[3] * slower
        energy = m[4] + m[5] * compute + m[6] * memory
        energy = energy + (m[7] + m[8] * compute + m[9] * memory) * slower
        time = m[0] + m[2] * slower + m[10] * gap_s
        return Kernels(scaled_s=scaled, fixed_s=time - scaled, energy_j=energy)


class StepSums:
    """Sums over the ops of steps, item by item: each op is priced, each step lowered once.

    The items of a lowered model are those of its stages too, however many there are.
    """

    def __init__(self, model: CostModelSet, costs: dict[Key, Array] | None = None) -> None:
        """Sums at the costs of ``model``, of which ``costs`` are known; others are put there."""
        self._model = model
        self._costs = {} if costs is None else costs
        self._items: dict[int, Item] = {}  # kept, so that no other one gets the same id
        self._numbers: dict[Step, int] = {}
        self._known: dict[tuple[int, int], Array] = {}  # by item, and number of the step

    def of(self, lowered: Lowered, steps: Sequence[Step]) -> SummedSteps:
        """The sums of some steps of a model, or of a stage."""
        sharding = lowered.sharding
        workers = sharding.tp * sharding.dp if sharding.ep > 1 else 1
        own = [s.share(sharding.dp) for s in steps]
        numbers = [self._numbers.setdefault(s, len(self._numbers)) for s in own]
        self._learn(lowered, dict(zip(numbers, own, strict=True)), workers)
        moments = np.zeros((len(steps), workers, _MOMENTS))
        for item, (part, whole) in zip(lowered.items, lowered.shares, strict=True):
            rows = [self._known[id(item), n] for n in numbers]
            found = np.array(rows).reshape(len(steps), -1, _MOMENTS)
            moments += found * np.where(_WEIGHTED, part / whole, 1.0)
        shapes = tuple(
            StepShape(sequences=s.batch, tokens=s.tokens, layers=round(n), expert_layers=round(e))
            for s, (n, e) in zip(own, moments[:, 0, _LAYER_COUNTS].tolist(), strict=True)
        )
        return SummedSteps(moments=moments, shapes=shapes)

    def _learn(self, lowered: Lowered, steps: Mapping[int, Step], workers: int) -> None:
        """Lower what is not known yet, and price what is new of it."""
        fresh: list[tuple[tuple[int, int], list[tuple[Op, ...]]]] = []
        for item in lowered.items:
            self._items[id(item)] = item
            by_worker = range(workers) if isinstance(item, Experts) else range(1)
            fresh += [
                ((id(item), n), [tuple(item.ops(lowered.engine, s, w)) for w in by_worker])
                for n, s in steps.items()
                if (id(item), n) not in self._known
            ]
        if not fresh:
            return
        ops = [op for _, own in fresh for each in own for op in each]
        distinct = {op.key: op for op in ops}
        new = [op for key, op in distinct.items() if key not in self._costs]
        for op, cost in zip(new, self._model.costs(new), strict=True):
            self._costs[op.key] = _moments(op, cost)
        place = {key: i for i, key in enumerate(distinct)}
        each_of = np.array([self._costs[key] for key in distinct])
        moments = each_of[[place[op.key] for op in ops]]
        # As in a step, the part that scales with the clock is that of the first worker's op.
        first = [op.key for _, own in fresh for _ in own for op in own[0]]
        share = (each_of[:, 1] / each_of[:, 0])[[place[key] for key in first]]
        moments[:, 1], moments[:, 3] = moments[:, 0] * share, moments[:, 2] * share
        counts = np.array([op.count for op in ops], dtype=np.float64)
        of_kind = np.array([[op.kind is kind for kind in _LAYERS] for op in ops])
        sizes = [len(each) for _, own in fresh for each in own]
        starts = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64)))
        sums = np.add.reduceat(counts[:, None] * moments, starts)
        layers = np.maximum.reduceat(counts[:, None] * of_kind, starts)
        rows = np.concatenate((sums, layers, np.add.reduceat(moments[:, :1], starts)), axis=1)
        ends = np.cumsum([len(own) for _, own in fresh]).tolist()
        for (key, own), end in zip(fresh, ends, strict=True):
            self._known[key] = rows[end - len(own) : end]


_LAYERS = (Kind.ATTENTION, Kind.MOE)
_MOMENTS = 15
_LAYER_COUNTS, _ALONE_S = slice(12, 14), 14  # the last: latencies of the ops, each once
_WEIGHTED = np.arange(_MOMENTS) != _ALONE_S


def _moments(op: Op, cost: Cost) -> Array:
    """What `SummedSteps` sums: time and energy by shares, launches, collectives."""
    compute, read, dram = cost.compute_share, cost.read_share, cost.dram_share
    time = cost.latency_s * np.array((1.0, compute, read, read * compute))
    by_power = cost.energy_j * np.array((1.0, compute, dram))
    other = (float(op.launches), float(op.type.is_collective))
    return np.concatenate((time, by_power, by_power * read, other))
