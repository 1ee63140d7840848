"""Which ops to measure: from a file, or chosen for the models that will be predicted.

`plan_for` lowers a grid of engine steps of each model and degree. Of all distinct ops in them it
picks greedily the one whose measurement lowers the expected squared error of the predicted steps
most, per second. Errors follow a Gaussian process per kernel over the logarithms of the sizes, so
measuring an op removes doubt from its neighbours too, and the minutes go where the fit is least
sure. Doubt depends on locations only, never on measured values: a plan is known before the first
measurement and is the same on every machine.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from energylens.errors import SpecError, UnsupportedError
from energylens.graph import KERNELS, Op
from energylens.lower import lower_step
from energylens.results import Infeasible, Kind
from energylens.spec.fields import Field, parse_yaml
from energylens.spec.model import Spec
from energylens.spec.system import Device, Engine, Mode, Parallelism, Step
from energylens.units import BITS, bytes_per_value

PLAN_SCHEMA = "energylens/plan/v1"

PREFILLS = (
    (1, 128),
    (1, 512),
    (1, 1024),
    (1, 2048),
    (1, 4096),
    (1, 8192),
    (4, 1024),
    (8, 1024),
    (4, 4096),
    (16, 512),
    (16, 1024),
)
"""(batch, prompt length) of the prefills that a plan serves."""
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXTS = (513, 1025, 2049, 4097, 8193)
"""One past a round prompt: seven of eight contexts are not multiples of 8, and kernels care."""

MEMORY_BOUND_S, COMPUTE_BOUND_S = 1.4, 2.4
"""Expected seconds of a point; loads near the power limit settle longer."""

_FOOTPRINT_BYTES = 60e9  # largest op that is worth its memory in a calibration
_LEAST_POINTS = 8  # of each kernel, however small its share: without any there is no fit
_LENGTH_OCTAVES = 2.0  # length scale of the Gaussian process, in every size
_SMOOTH, _ROUGH = 0.25, 0.05  # relative deviation from the roofline: with neighbours, on its own
_NOISE = 0.02  # relative error of a measurement
_LAUNCH_S = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    """One op to measure.

    Attributes:
        op: what to measure, executed once.
        weight: share of the roofline time of the steps that the plan serves (1 for a plan file).
        expected_s: seconds that the point takes.
        shared: True where every board of a split plan measures it.
    """

    op: Op
    weight: float = 1.0
    expected_s: float = MEMORY_BOUND_S
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Points in the order in which they will be measured."""

    points: tuple[PlannedPoint, ...]
    seed: int = 0

    @property
    def expected_s(self) -> float:
        """Seconds that the whole plan takes."""
        return sum(p.expected_s for p in self.points)

    def filter(self, keep: Callable[[PlannedPoint], bool]) -> Plan:
        """The points that ``keep`` accepts, in the same order."""
        return replace(self, points=tuple(p for p in self.points if keep(p)))

    def merge(self, other: Plan) -> Plan:
        """Both plans' points, each op once, in a new random order."""
        points = {p.op.key: p for p in (*other.points, *self.points)}
        return shuffled(points.values(), self.seed)


def shuffled(points: Iterable[PlannedPoint], seed: int) -> Plan:
    """A plan in random order: in ascending order of size, warming up would become a size effect."""
    ordered = sorted(points, key=lambda p: p.op.key)
    order = np.random.default_rng(seed).permutation(len(ordered))
    return Plan(points=tuple(ordered[i] for i in order), seed=seed)


def split(plan: Plan, boards: int, *, shared: float = 0.15) -> tuple[Plan, ...]:
    """Spread a plan over several boards.

    Args:
        plan: what to measure.
        boards: number of boards.
        shared: fraction of the points that every board measures, which shows the spread of boards.

    Returns:
        One plan per board; the shared points are marked. With one board, the plan itself.
    """
    if boards < 1 or not 0 <= shared <= 1:
        raise SpecError(f"a plan splits over boards >= 1, shared in 0..1, not {boards}, {shared}")
    if boards == 1:
        return (plan,)
    count = min(len(plan.points), round(shared * len(plan.points)))
    common = [replace(p, shared=True) for p in plan.points[:count]]  # the order is random already
    own = plan.points[count:]
    return tuple(
        shuffled((*common, *own[board::boards]), plan.seed + board) for board in range(boards)
    )


# --------------------------------------------------------------------------- plan for models


def plan_for(
    specs: Sequence[Spec],
    tps: Sequence[int],
    engine: Engine,
    device: Device,
    *,
    budget_s: float,
    seed: int = 0,
    existing: Iterable[Op] = (),
) -> Plan:
    """Choose the ops to measure so that ``specs`` can be predicted on ``device`` at ``tps``.

    Everything is measured on one device, whatever the degree. Collectives are not part of it.

    Args:
        specs: models.
        tps: tensor-parallel degrees; one that does not divide a model is left out for that model.
        engine: profile that decides which kernels run.
        device: datasheet for the roofline weights and the memory.
        budget_s: seconds that the points may take.
        seed: order of the points.
        existing: ops that are measured already; they take doubt away and are not planned again.

    Raises:
        UnsupportedError: no degree divides any model.
    """
    candidates = _candidates(specs, tps, engine, device)
    return shuffled(_choose(candidates, device, budget_s, list(existing)), seed)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Distinct ops and their shares of the steps' roofline time, [steps, ops].

    The weights of the steps add up to 1; every model, degree, phase and mode weighs the same.
    """

    ops: tuple[Op, ...]
    shares: np.ndarray
    step_weights: np.ndarray


def _candidates(
    specs: Sequence[Spec], tps: Sequence[int], engine: Engine, device: Device
) -> _Candidates:
    columns: dict[object, int] = {}  # op key -> column
    ops: list[Op] = []
    cells: list[tuple[int, int, float]] = []
    groups: list[tuple[str, int, str]] = []  # one per step
    reason = ""
    for spec, tp, step in itertools.product(specs, tps, planned_steps(engine)):
        lowered = lower_step(spec, engine, Parallelism(tp=tp), step)
        if isinstance(lowered, Infeasible):
            reason = f"{spec.name} at tp={tp}: {lowered.reason}"
            continue
        if _resident_bytes(lowered) > device.memory_bytes:
            continue
        computed = [op for op in lowered if not op.type.is_collective]
        times = [op.count * roofline_s(op, device) for op in computed]
        for op, seconds in zip(computed, times, strict=True):
            if op.bytes_read + op.bytes_written > _FOOTPRINT_BYTES:
                continue
            if op.key not in columns:
                columns[op.key] = len(ops)
                ops.append(replace(op, count=1))
            cells.append((len(groups), columns[op.key], seconds / sum(times)))
        phase = "prefill" if step.tokens > step.batch else "decode"
        groups.append((spec.name, tp, f"{phase} {step.mode}"))
    if not ops:
        raise UnsupportedError(f"nothing to plan: {reason or 'no step of these models fits'}")
    shares = np.zeros((len(groups), len(ops)))
    for row, column, share in cells:
        shares[row, column] += share
    sizes = Counter(groups)
    weights = np.array([1 / (len(sizes) * sizes[group]) for group in groups])
    return _Candidates(tuple(ops), shares, weights)


def planned_steps(engine: Engine) -> tuple[Step, ...]:
    """Engine steps that a plan serves: prefills, and decode steps in every launch mode."""
    eager = engine.serving is None
    prefill_mode = Mode.EAGER if eager else Mode.SERVING
    prefills = [Step.prefill(batch, length, prefill_mode) for batch, length in PREFILLS]
    decodes = [
        Step.decode(batch, context, mode)
        for mode in ((Mode.EAGER, Mode.CUDA_GRAPH) if eager else (Mode.SERVING,))
        for batch in DECODE_BATCHES
        for context in DECODE_CONTEXTS
    ]
    return (*prefills, *decodes)


def _resident_bytes(ops: Sequence[Op]) -> float:
    """Least memory of a step on one worker: weights and cache, from its GEMMs and attention."""
    total = 0.0
    for op in ops:
        s = op.sizes
        if op.kernel == "gemm":
            total += op.count * s["n"] * s["k"] * bytes_per_value(op.dtype)
        elif op.kernel.startswith("attention"):
            values = 2 * s["batch"] * s["context"] * s["kv_heads"] * s["head_dim"]
            total += op.count * values * bytes_per_value(op.dtype)
    return total


def _rooflines(op: Op, device: Device) -> tuple[float, float]:
    """Seconds by compute and by memory; an eager module passes over its tensor once per launch."""
    peak = device.peak(op.dtype)
    moved = op.bytes_read + op.bytes_written
    if op.kind in (Kind.NORM, Kind.ELEMENTWISE):
        moved *= op.launches
    return op.flops / (0.7 * peak), moved / (0.8 * device.memory_bandwidth_bytes_s)


def roofline_s(op: Op, device: Device) -> float:
    """Rough seconds of one execution, for weights only: compute, memory or launches."""
    return max(*_rooflines(op, device), _LAUNCH_S * op.launches)


def expected_s(op: Op, device: Device) -> float:
    """Seconds that measuring the op takes."""
    compute, memory = _rooflines(op, device)
    return COMPUTE_BOUND_S if compute > max(memory, _LAUNCH_S) else MEMORY_BOUND_S


class _Doubt:
    """What is not known yet about one kernel: a Gaussian process over its candidates and samples.

    Two measured neighbours agree by a smooth part; what is left of each shape (a library's choice
    of tiles, say) only its own measurement tells. An observation lowers the covariance by one
    column of a Cholesky factor; values never enter.

    Attributes:
        gain: expected drop of the weighted squared error of the steps if a candidate is observed.
    """

    def __init__(self, sizes: np.ndarray, shares: np.ndarray) -> None:
        """Know nothing.

        Args:
            sizes: [points, dims]; candidates first, then ops that were measured before.
            shares: weighted shares of the candidates, [steps, candidates].
        """
        self._points = np.log2(sizes) / _LENGTH_OCTAVES
        used = shares.any(axis=1)
        self._shares = np.zeros((int(used.sum()), len(sizes)))
        self._shares[:, : shares.shape[1]] = shares[used]
        self._candidates = shares.shape[1]
        self._columns: list[np.ndarray] = []
        self._variance = np.full(len(sizes), _SMOOTH**2 + _ROUGH**2)
        prior = np.stack([self._prior(i) for i in range(len(sizes))])
        self._reach = self._shares @ prior  # covariance of each step's error with each point's

    def _prior(self, index: int) -> np.ndarray:
        distance: np.ndarray = ((self._points - self._points[index]) ** 2).sum(axis=1)
        own = np.where(distance == 0, _ROUGH**2, 0.0)
        return np.asarray(_SMOOTH**2 * np.exp(-0.5 * distance) + own)

    def observe(self, index: int) -> None:
        """Count a point as measured."""
        column = self._prior(index)
        for earlier in self._columns:
            column -= earlier * earlier[index]
        column /= np.sqrt(self._variance[index] + _NOISE**2)
        self._columns.append(column)
        self._variance = np.maximum(self._variance - column**2, 0.0)
        self._reach -= np.outer(self._shares @ column, column)

    @property
    def gain(self) -> np.ndarray:
        gains = (self._reach**2).sum(axis=0) / (self._variance + _NOISE**2)
        return np.asarray(gains[: self._candidates])


def _choose(
    candidates: _Candidates, device: Device, budget_s: float, existing: Sequence[Op]
) -> list[PlannedPoint]:
    """Greedy choice of `plan_for`: a few points of each kernel, then by gain per second.

    Ties go to the first candidate, so the choice is deterministic.
    """
    known = {op.key for op in existing}
    ops = candidates.ops
    seconds = np.array([expected_s(op, device) for op in ops])
    weighted = candidates.shares * np.sqrt(candidates.step_weights)[:, None]
    groups: dict[str, list[int]] = defaultdict(list)  # kernel -> candidates
    for i, op in enumerate(ops):
        groups[op.kernel].append(i)
    doubts: dict[str, _Doubt] = {}
    measured: Counter[str] = Counter()
    for kernel, members in groups.items():
        before = [op for op in existing if op.kernel == kernel]
        sizes = np.array([ops[i].shape for i in members] + [op.shape for op in before])
        doubts[kernel] = _Doubt(sizes, weighted[:, members])
        for row in range(len(members), len(sizes)):
            doubts[kernel].observe(row)
        measured[kernel] = len(before)

    gain = np.zeros(len(ops))
    for kernel, members in groups.items():
        gain[members] = doubts[kernel].gain
    is_open = np.array([op.key not in known for op in ops])
    weights = candidates.step_weights @ candidates.shares
    chosen: list[PlannedPoint] = []
    left = budget_s
    while (fits := is_open & (seconds <= left)).any():
        scarce = np.array([measured[op.kernel] < _LEAST_POINTS for op in ops])
        if (fits & scarce).any():
            fits &= scarce
        best = int(np.argmax(np.where(fits, gain / seconds, -1.0)))
        op = ops[best]
        chosen.append(
            PlannedPoint(op=op, weight=float(weights[best]), expected_s=float(seconds[best]))
        )
        left -= seconds[best]
        is_open[best] = False
        measured[op.kernel] += 1
        members = groups[op.kernel]
        doubts[op.kernel].observe(members.index(best))
        gain[members] = doubts[op.kernel].gain
    return chosen


# --------------------------------------------------------------------------- plan from a file


def load_plan(path: Path, device: Device, *, seed: int = 0) -> Plan:
    """Read a plan file: a list of kernels, each with a grid of sizes.

    A key of ``grid`` may name several dimensions that vary together, as in
    ``"n, k": [[4096, 4096], [14336, 4096]]``.

    Args:
        path: YAML file of schema ``energylens/plan/v1``.
        device: datasheet for the expected durations.
        seed: order of the points.

    Raises:
        SpecError: the file is missing, is not YAML, or holds an unknown kernel, dimension or size.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as text: {error}; give a plan file") from None
    fields = parse_yaml(text, str(path)).mapping(("schema", "name", "points"))
    fields["schema"].choice([PLAN_SCHEMA])
    points: dict[object, PlannedPoint] = {}
    for entry in fields["points"].items(1):
        for op in _grid_ops(entry):
            points.setdefault(op.key, PlannedPoint(op=op, expected_s=expected_s(op, device)))
    return shuffled(points.values(), seed)


def _grid_ops(entry: Field) -> list[Op]:
    fields = entry.mapping(("kernel", "grid"), ("dtype", "launches"))
    kernel = fields["kernel"].choice(KERNELS)
    dtype = fields["dtype"].choice(BITS) if "dtype" in fields else "bf16"
    launches = fields["launches"].integer() if "launches" in fields else 1
    dims = KERNELS[kernel].dims
    axes = [_axis(key, values) for key, values in fields["grid"].pairs().items()]
    given = [name for names, _ in axes for name in names]
    if sorted(given) != sorted(dims):
        raise fields["grid"].error(
            f"found the sizes {', '.join(given)}; {kernel} needs {', '.join(dims)}, each once"
        )
    ops = []
    for rows in itertools.product(*(rows for _, rows in axes)):
        sizes = dict(zip(given, itertools.chain(*rows), strict=True))
        shape = tuple(sizes[dim] for dim in dims)
        ops.append(Op(name=kernel, kernel=kernel, shape=shape, dtype=dtype, launches=launches))
    return ops


def _axis(key: str, values: Field) -> tuple[list[str], list[list[float]]]:
    """Dimensions of one key of a grid, and the sizes that they take together."""
    names = [name.strip() for name in key.split(",")]
    rows = []
    for item in values.items(1):
        row = [size.number() for size in (item.items() if len(names) > 1 else [item])]
        if len(row) != len(names):
            raise item.expected(f"{len(names)} numbers, for {', '.join(names)}")
        rows.append(row)
    return names, rows
