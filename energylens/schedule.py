"""Composition: priced ops of a step -> time and energy of all workers (DESIGN section 4).

Each law is a function of its own, so that `validate --without` can show what it is worth:

1. `kernel_sum`: kernels of a captured graph add up, plus a gap per launch.
2. `common_clock` (``cap``): where the mix would overrun the power limit, all ops share the clock
at which it holds it.
3. `step` (``host``): a step takes as long as its host at least, and a part of the host's time runs
beside no kernel; waiting draws its own power.
4. `step` (idle): idle power is charged once, on the makespan; op energies are above idle.

Workers are boards: under tensor parallelism the slowest sets the pace, and the others spin
(``straggler``). Errors are propagated by perturbation: each variance component (errors of one op
kind, the boards' spread, the composition itself, the host) moves its inputs by one standard error,
and the step is composed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from energylens.graph import Op
from energylens.results import Cost, Interval, Kind, Source
from energylens.spec.system import Mode

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

LAWS = ("cap", "host", "straggler", "gap")
LEVEL = 0.90
_CLOCK_STEP = 1e-6
LOWEST_CLOCK = 0.25  # of the maximum; the governor does not go below, whatever the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One board with the costs of its ops on it.

    Attributes:
        idle_w: power with a context and nothing running.
        cap_w: mean power that the governor holds.
        latency_s, energy_j: of one execution of each op at the maximum clock, energy above idle,
            [ops].
    """

    idle_w: float
    cap_w: float
    latency_s: Array
    energy_j: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of the laws; see `energylens.cost.bundle.Laws` for where they come from."""

    eta: float
    gap_s: float
    wait_w: float
    spin_w: float
    link_w: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host time of a step.

    Attributes:
        step_s: seconds; rel_se: its relative standard error.
        source: where the numbers come from.
        serial_s: part of it during which no kernel of the step runs, whatever the device does: a
            scheduler that forms the step, outputs that are handed on.
    """

    step_s: float
    rel_se: float
    source: Source
    serial_s: float = 0.0


NO_HOST = Host(step_s=0.0, rel_se=0.0, source=Source.MEASURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """Relative standard errors that no single op carries: of boards and of the composition.

    Attributes:
        memory_power, compute_power, memory_time: between the board predicted and the board meant.
        latency, energy: of composed steps.
        cap: of the power that the governor holds.
    """

    memory_power: float
    compute_power: float
    memory_time: float
    latency: float
    energy: float
    cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one op, or law, adds to a step: critical-path time, above-idle energy of all workers."""

    op: Op | None
    kind: Kind
    name: str
    count: int
    latency_s: float
    energy_j: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A composed step.

    Attributes:
        latency_s, energy_j: of the step, energy over all workers.
        clock: of the slowest worker, over the maximum.
        regime: what holds the step up: ``host``, ``capped`` or ``device``.
        parts: what adds up to the step.
        waiting_j: part of the energy that workers draw while they wait for the slowest.
    """

    latency_s: float
    energy_j: float
    clock: float
    regime: str
    parts: tuple[Part, ...]
    interval: Interval
    source: Source
    waiting_j: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ops:
    """Arrays over the ops of a step, [ops]; ``linked`` where the links are awake meanwhile."""

    count: Array
    launches: Array
    compute_share: Array
    read_share: Array
    dram_share: Array
    linked: bool


def kernel_sum(
    ops: _Ops, worker: Worker, constants: Constants, clock: float = 1.0
) -> tuple[float, float]:
    """Seconds and above-idle joules of a worker's kernels and gaps at a clock over the maximum."""
    stretch = ops.compute_share / clock + 1.0 - ops.compute_share
    time = float((ops.count * worker.latency_s * stretch).sum()) + constants.gap_s * float(
        ops.launches.sum()
    )
    return time, float((ops.count * worker.energy_j).sum()) * clock**constants.eta


def common_clock(ops: _Ops, worker: Worker, constants: Constants, pause_s: float = 0.0) -> float:
    """Clock over the maximum at which the mix draws no more than the cap; 1.0 where it never would.

    Mean power ``idle + D f**eta / (t(f) + pause)`` rises with the clock, so the root is bracketed;
    bisection to 1e-6. The governor averages over longer than a step, pauses between steps included.
    """
    scaled_s = float((ops.count * worker.latency_s * ops.compute_share).sum())
    fixed_s = kernel_sum(ops, worker, constants)[0] - scaled_s + pause_s
    above_idle_j = float((ops.count * worker.energy_j).sum())
    base_w = worker.idle_w + _link_w(ops, constants)

    def power(f: float) -> float:
        time = scaled_s / f + fixed_s
        return base_w + above_idle_j * float(f**constants.eta) / time

    if power(1.0) <= worker.cap_w:
        return 1.0
    low, high = LOWEST_CLOCK, 1.0
    if power(low) >= worker.cap_w:
        return low
    while high - low > _CLOCK_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < worker.cap_w else (low, middle)
    return low


def _link_w(ops: _Ops, constants: Constants) -> float:
    return constants.link_w if ops.linked else 0.0


def _arrays(ops: Sequence[Op], costs: Sequence[Cost], linked: bool = False) -> _Ops:
    return _Ops(
        count=np.array([o.count for o in ops], dtype=np.float64),
        launches=np.array([o.count * o.launches for o in ops], dtype=np.float64),
        compute_share=np.array([c.compute_share for c in costs]),
        read_share=np.array([c.read_share for c in costs]),
        dram_share=np.array([c.dram_share for c in costs]),
        linked=linked or any(o.type.is_collective for o in ops),
    )


def kernel_result(
    ops: Sequence[Op],
    costs: Sequence[Cost],
    worker: Worker,
    constants: Constants,
    pause_s: float = 0.0,
) -> tuple[float, float, float]:
    """Seconds, joules with idle and clock over the maximum: a worker's kernels under its cap.

    ``pause_s`` follows the kernels and is in neither sum.
    """
    arrays = _arrays(ops, costs)
    clock = common_clock(arrays, worker, constants, pause_s)
    time, energy = kernel_sum(arrays, worker, constants, clock)
    return time, energy + (worker.idle_w + _link_w(arrays, constants)) * time, clock


@dataclass(frozen=True, slots=True)
class _Composed:
    latency_s: float
    energy_j: float
    device_s: float
    slowest: int
    clocks: tuple[float, ...]
    wait_j: float
    link_j: float
    waiting_j: float


def _compose(
    ops: _Ops,
    workers: Sequence[Worker],
    constants: Constants,
    host: Host,
    without: frozenset[str],
) -> _Composed:
    """Latency and total energy (idle included) of a step."""
    clocks = tuple(
        1.0 if "cap" in without else common_clock(ops, w, constants, host.serial_s) for w in workers
    )
    sums = [kernel_sum(ops, w, constants, f) for w, f in zip(workers, clocks, strict=True)]
    if "straggler" in without:
        device_s = sum(t for t, _ in sums) / len(sums)
    else:
        device_s = max(t for t, _ in sums)
    slowest = max(range(len(sums)), key=lambda i: sums[i][0])
    latency = max(device_s + host.serial_s, host.step_s)
    # A worker that is done first spins in the next collective.
    waits = [max(0.0, device_s - t) for t, _ in sums]
    spin_j = sum(waits) * constants.spin_w
    link_w = _link_w(ops, constants)
    waiting_j = sum(
        t * (w.idle_w + constants.spin_w + link_w) for t, w in zip(waits, workers, strict=True)
    )
    host_j = (latency - device_s) * constants.wait_w * len(workers)
    link_j = device_s * link_w * len(workers)
    idle_j = latency * sum(w.idle_w for w in workers)
    energy = sum(e for _, e in sums) + spin_j + host_j + link_j + idle_j
    return _Composed(latency, energy, device_s, slowest, clocks, spin_j + host_j, link_j, waiting_j)


def step(
    ops: Sequence[Op],
    costs: Sequence[Cost],
    workers: Sequence[Worker],
    *,
    constants: Constants,
    spreads: Spreads,
    host: Host | None = None,
    mode: Mode = Mode.EAGER,
    without: frozenset[str] = frozenset(),
    linked: bool = False,
) -> StepResult:
    """Compose one step.

    Args:
        ops: what each worker executes.
        costs: the same ops on a typical board: shares, standard errors and sources are taken from
            here.
        workers: the boards, with the ops' costs on each.
        constants: of the laws.
        spreads: standard errors that no single op carries.
        host: host time of the step; a captured graph alone has none.
        mode: launch mode.
        without: laws to leave out, of `LAWS`.
        linked: True where the links are awake even if none of the ops is a collective.
    """
    arrays = _arrays(ops, costs, linked)
    if "gap" in without:
        constants = replace(constants, gap_s=0.0)
    counts = host is not None and mode is not Mode.CUDA_GRAPH and "host" not in without
    bound = host if host is not None and counts else NO_HOST
    composed = _compose(arrays, workers, constants, bound, without)
    capped = min(composed.clocks) < 1.0
    waits = bound.step_s > composed.device_s + bound.serial_s
    sources = [c.source for c in costs]
    if waits or bound.serial_s:
        sources.append(bound.source)
    return StepResult(
        latency_s=composed.latency_s,
        energy_j=composed.energy_j,
        clock=min(composed.clocks),
        regime="host" if waits else "capped" if capped else "device",
        parts=_parts(ops, costs, arrays, workers, constants, composed, bound),
        interval=_interval(ops, costs, arrays, workers, constants, spreads, bound, without),
        source=max(sources, default=Source.MEASURED),
        waiting_j=composed.waiting_j,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the kernels of many steps come to at the maximum clock, each [..., workers].

    Attributes:
        scaled_s, fixed_s: seconds that scale with 1/clock, and all others, gaps included.
        energy_j: above idle.
    """

    scaled_s: Array
    fixed_s: Array
    energy_j: Array


def totals(
    kernels: Kernels,
    idle_w: Array,
    cap_w: float,
    constants: Constants,
    *,
    step_s: Array,
    serial_s: Array,
    linked: BoolArray,
) -> tuple[Array, Array]:
    """Seconds and joules of many steps, as `step` composes one, and nothing else, each [...].

    Args:
        kernels: of the steps.
        idle_w: of the boards, [..., workers].
        cap_w: mean power that the governor holds.
        constants: of the laws.
        step_s: host time of the steps, [...].
        serial_s: part of it that no kernel runs beside, [...].
        linked: where the links are awake, [...].
    """
    link_w = np.where(linked, constants.link_w, 0.0)[..., None]
    clock = _clocks(kernels, idle_w + link_w, cap_w, constants.eta, serial_s[..., None])
    time = kernels.scaled_s / clock + kernels.fixed_s
    device_s = time.max(axis=-1)
    latency = np.maximum(device_s + serial_s, step_s)
    spin_j = (device_s[..., None] - time).sum(axis=-1) * constants.spin_w
    workers = time.shape[-1]
    waiting_j = (latency - device_s) * constants.wait_w * workers
    link_j = device_s * link_w[..., 0] * workers
    idle_j = latency * np.broadcast_to(idle_w, time.shape).sum(axis=-1)
    working_j = (kernels.energy_j * clock**constants.eta).sum(axis=-1)
    return latency, working_j + spin_j + waiting_j + link_j + idle_j


def paces(
    kernels: Kernels, idle_w: Array, cap_w: float, constants: Constants, linked: BoolArray
) -> tuple[Array, Array]:
    """Seconds and joules of each worker's kernels alone, [..., workers]; see `kernel_result`."""
    base_w = idle_w + np.where(linked, constants.link_w, 0.0)[..., None]
    clock = _clocks(kernels, base_w, cap_w, constants.eta, np.zeros(kernels.energy_j.shape))
    time = kernels.scaled_s / clock + kernels.fixed_s
    return time, kernels.energy_j * clock**constants.eta + base_w * time


def _clocks(kernels: Kernels, base_w: Array, cap_w: float, eta: float, pause_s: Array) -> Array:
    """`common_clock` of each worker, [..., workers]."""
    shape = kernels.energy_j.shape
    scaled, fixed = kernels.scaled_s, kernels.fixed_s + pause_s
    clock = np.ones(shape)
    over = base_w + kernels.energy_j / (scaled + fixed) > cap_w
    scaled, fixed, energy = scaled[over], fixed[over], kernels.energy_j[over]
    room_w = cap_w - np.broadcast_to(base_w, shape)[over]
    low, high = np.full(room_w.shape, LOWEST_CLOCK), np.ones(room_w.shape)
    hopeless = energy * low**eta >= room_w * (scaled / low + fixed)
    width = 1.0 - LOWEST_CLOCK
    while width > _CLOCK_STEP:
        middle = (low + high) / 2
        below = energy * middle**eta < room_w * (scaled / middle + fixed)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
        width /= 2
    clock[over] = np.where(hopeless, LOWEST_CLOCK, low)
    return clock


def _parts(
    ops: Sequence[Op],
    costs: Sequence[Cost],
    arrays: _Ops,
    workers: Sequence[Worker],
    constants: Constants,
    composed: _Composed,
    host: Host,
) -> tuple[Part, ...]:
    """Each op's part, then what the laws add; they sum up to the step in time and in energy."""
    slow, clock = workers[composed.slowest], composed.clocks[composed.slowest]
    stretch = arrays.compute_share / clock + 1.0 - arrays.compute_share
    times = arrays.count * slow.latency_s * stretch
    energies = sum(
        arrays.count * w.energy_j * f**constants.eta
        for w, f in zip(workers, composed.clocks, strict=True)
    )
    parts = [
        Part(
            op=o,
            kind=o.kind,
            name=o.name,
            count=o.count,
            latency_s=float(t),
            energy_j=float(e),
            source=c.source,
        )
        for o, c, t, e in zip(ops, costs, times, np.asarray(energies), strict=True)
    ]
    weakest = max((c.source for c in costs), default=Source.MEASURED)

    def add(
        kind: Kind, name: str, latency_s: float, energy_j: float, source: Source = weakest
    ) -> None:
        parts.append(
            Part(
                op=None,
                kind=kind,
                name=name,
                count=1,
                latency_s=latency_s,
                energy_j=energy_j,
                source=source,
            )
        )

    gap_s = composed.device_s - float(
        times.sum()
    )  # with "straggler" left out, also the mean's distance to the slowest
    if gap_s:
        add(Kind.OVERHEAD, "gaps between kernels", gap_s, 0.0)
    if composed.wait_j or composed.latency_s > composed.device_s:
        wait_s = composed.latency_s - composed.device_s
        source = host.source if wait_s > 0 else weakest
        add(Kind.WAIT, "wait", wait_s, composed.wait_j, source)
    if composed.link_j:
        add(Kind.COLLECTIVE, "links awake", 0.0, composed.link_j)
    add(Kind.IDLE, "idle", 0.0, composed.latency_s * sum(w.idle_w for w in workers))
    return tuple(parts)


def _interval(
    ops: Sequence[Op],
    costs: Sequence[Cost],
    arrays: _Ops,
    workers: Sequence[Worker],
    constants: Constants,
    spreads: Spreads,
    host: Host,
    without: frozenset[str],
) -> Interval:
    """Central interval from the variance components, lognormal in time and in energy."""
    # The step as if the host never held it up beyond its serial part; that comes on top at the end.
    serial = replace(host, step_s=host.serial_s)
    base = _compose(arrays, workers, constants, serial, without)

    def shifted(
        latency: Array | float, energy: Array | float, cap: float = 1.0
    ) -> tuple[float, float]:
        moved = [
            replace(
                w,
                latency_s=w.latency_s * latency,
                energy_j=w.energy_j * energy,
                cap_w=w.cap_w * cap,
            )
            for w in workers
        ]
        c = _compose(arrays, moved, constants, serial, without)
        return math.log(c.latency_s / base.latency_s), math.log(c.energy_j / base.energy_j)

    kinds = np.array([str(o.kind) for o in ops])
    t_se = np.array([c.latency_rel_se for c in costs])
    e_se = np.array([c.energy_rel_se for c in costs])
    p_se = np.sqrt(np.maximum(e_se**2 - t_se**2, 0.0))
    dram, compute = arrays.dram_share, arrays.compute_share
    slower = 1.0 + arrays.read_share * spreads.memory_time
    moves = [
        shifted(slower, slower),
        # Boards that draw more for memory draw more for arithmetic too: one component, not two.
        shifted(1.0, 1.0 + dram * spreads.memory_power + compute * spreads.compute_power),
        shifted(1.0, 1.0, 1.0 + spreads.cap),
    ]
    for kind in dict.fromkeys(kinds):
        own = kinds == kind
        moves.append(shifted(1.0 + own * t_se, 1.0 + own * t_se))
        moves.append(shifted(1.0, 1.0 + own * p_se))
    wait_w = sum(w.idle_w + constants.wait_w for w in workers)
    serial_s = serial.step_s * host.rel_se
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    sd_t = math.hypot(spreads.latency, serial_s / base.latency_s, *(m[0] for m in moves))
    sd_e = math.hypot(spreads.energy, wait_w * serial_s / base.energy_j, *(m[1] for m in moves))
    host_s = [host.step_s * math.exp(s * z * host.rel_se) for s in (-1, 1)]
    latency = [
        max(base.latency_s * math.exp(s * z * sd_t), h)
        for s, h in zip((-1, 1), host_s, strict=True)
    ]
    energy = [
        base.energy_j * math.exp(s * z * sd_e) + wait_w * max(0.0, h - base.latency_s)
        for s, h in zip((-1, 1), host_s, strict=True)
    ]
    return Interval(
        level=LEVEL, latency_s=(latency[0], latency[1]), energy_j=(energy[0], energy[1])
    )
