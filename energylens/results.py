"""Values that the flows exchange: costs, predictions, profiles, validations. No I/O, no model."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from energylens.spec.system import Parallelism, Workload


class Source(enum.IntEnum):
    """Where a number comes from, strongest first; merging keeps the weakest (the maximum)."""

    MEASURED = 0
    INTERPOLATED = 1
    EXTRAPOLATED = 2
    TRANSFERRED = 3
    ROOFLINE = 4

    def __str__(self) -> str:
        return self.name.lower()


class Kind(enum.StrEnum):
    """Closed list of breakdown kinds (DESIGN section 5)."""

    GEMM = "gemm"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    MOE = "moe"
    ROUTER = "router"
    COPY = "copy"
    COLLECTIVE = "collective"
    SAMPLING = "sampling"
    WAIT = "wait"
    IDLE = "idle"
    OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One op executed once on one worker, alone, as if there were no power cap.

    The device then runs at its maximum clock.

    Attributes:
        latency_s: duration.
        energy_j: energy *above idle* (idle power is charged once, on the makespan, in `schedule`).
        compute_share: part of the latency that scales with 1/clock, 0 (memory or link bound) to 1.
        read_share: part of the latency that scales with a board's 1/(read bandwidth).
        dram_share: part of the above-idle power that scales with a board's memory power.
        latency_rel_se, energy_rel_se: relative standard errors.
        source: weakest source used; no default, so nobody claims a measurement by omission.
    """

    latency_s: float
    energy_j: float
    compute_share: float
    read_share: float
    dram_share: float
    latency_rel_se: float
    energy_rel_se: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Central interval of probability ``level`` for latency and energy."""

    level: float
    latency_s: tuple[float, float]
    energy_j: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownRow:
    """All executions of one op in a phase: time on the critical path, energy over all workers."""

    phase: str
    kind: Kind
    op: str
    count: int
    latency_s: float
    energy_j: float
    share: float
    source: Source
    limit_share: float | None = None
    """Physical limit (roofline time) over predicted time, or None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All launches of one kernel in a measured phase: ``count`` and ``latency_s`` are per step.

    ``share`` is of the phase's kernel time; kernels of several streams or devices add up.
    """

    phase: str
    kind: Kind
    op: str
    count: float
    latency_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """Latency and energy of one phase; energy over all workers, ``mean_power_w`` per GPU."""

    latency_s: float
    energy_j: float
    mean_power_w: float
    clock_hz: float | None
    interval: Interval
    source: Source
    regime: str
    """``device``, ``host`` (the device waits for the host) or ``capped`` (power limit reached)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Per-worker device memory of a configuration, in bytes."""

    weights_bytes: float
    kv_cache_bytes: float
    activations_bytes: float
    reserve_bytes: float
    capacity_bytes: float

    @property
    def used_bytes(self) -> float:
        """All that is held at the same time."""
        return (
            self.weights_bytes + self.kv_cache_bytes + self.activations_bytes + self.reserve_bytes
        )

    @property
    def fits(self) -> bool:
        """True where everything fits the device at the same time."""
        return self.used_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRef:
    """Which calibration a number stands on."""

    device: str
    provider: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardAnchor:
    """What one board does under the same four small loads (DESIGN law 8).

    ``None`` where a value was not measured.
    """

    board_uuid: str
    device: str
    idle_w: float
    stream_w: float
    gemm_tflops: float
    gemm_w: float
    gemm_mhz: float | None = None
    gemv_gbs: float | None = None
    stream_gbs: float | None = None
    gemv_w: float | None = None
    temperature_c: float | None = None
    time: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnchor:
    """How fast a host launches an empty kernel and a small eager module, microseconds per call.

    ``module_us`` is None where only the launch was measured (the truth CSV has no column for it).
    """

    launch_us: float
    module_us: float | None = None
    cpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """Contents of an ``energylens/anchor/v1`` file."""

    boards: tuple[BoardAnchor, ...] = ()
    host: HostAnchor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Returned instead of numbers: why a configuration cannot run, and what would.

    Attributes:
        reason: in one line.
        memory: of the configuration, or of what comes closest to fitting.
        counts: of a search of many.
    """

    reason: str
    memory: Memory | None = None
    counts: SearchCounts | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row that says why there are no others."""
        return [{"feasible": False, "reason": self.reason}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How unevenly one phase loads the experts and the workers that hold them.

    Attributes:
        experts, experts_touched: of a layer, and those that any token of a step chooses.
        load_max_over_mean: pairs on the fullest worker over the mean worker's; 1 where every worker
            holds a slice of every expert.
        expert_max_over_mean: tokens of the fullest expert over the mean expert's.
        waiting_j: energy of the phase that workers draw while they wait for the slowest.
    """

    experts: int
    experts_touched: float
    load_max_over_mean: float
    expert_max_over_mean: float
    waiting_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Everything that `predict` knows about one configuration; what was not asked for is None."""

    spec: str
    device: str
    engine: str
    parallelism: Parallelism
    workload: Workload
    memory: Memory
    phases: Mapping[str, PhaseResult]
    breakdown: tuple[BreakdownRow, ...]
    source: Source
    bundles: tuple[BundleRef, ...]
    anchors: Anchors | None
    notes: tuple[str, ...] = ()
    routing: str | None = None
    imbalance: Mapping[str, Imbalance] = field(default_factory=lambda: MappingProxyType({}))

    def rows(self) -> list[dict[str, Any]]:
        """A flat mapping for each phase, for `pandas.DataFrame`."""
        subject = {
            "feasible": True,
            "reason": None,
            "spec": self.spec,
            "device": self.device,
            "engine": self.engine,
            **asdict(self.parallelism),
            "gpus": self.parallelism.gpus,
            **asdict(self.workload),
            "context_len": self.workload.decode_context,
        }
        return [
            {
                **subject,
                "phase": phase,
                "latency_s": r.latency_s,
                "energy_j": r.energy_j,
                **{
                    f"{name}_{side}": getattr(r.interval, name)[i]
                    for name in ("latency_s", "energy_j")
                    for i, side in enumerate(("low", "high"))
                },
                "energy_per_sequence_j": self._per_sequence(phase),
                "mean_power_w": r.mean_power_w,
                "regime": r.regime,
                "source": str(r.source),
            }
            for phase, r in self.phases.items()
        ]

    def _phase(self, name: str) -> PhaseResult | None:
        return self.phases.get(name)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: latency of the prefill."""
        p = self._phase("prefill")
        return p.latency_s if p else None

    @property
    def ttlt_s(self) -> float | None:
        """Time to last token: latency of the request."""
        r = self._phase("request")
        return r.latency_s if r else None

    @property
    def tpot_s(self) -> float | None:
        """(TTLT - TTFT) / (gen_len - 1); None at gen_len 1."""
        if self.ttlt_s is None or self.ttft_s is None or self.workload.gen_len < 2:
            return None
        return (self.ttlt_s - self.ttft_s) / (self.workload.gen_len - 1)

    def _per_sequence(self, name: str) -> float | None:
        p = self._phase(name)
        # Each replica serves a batch of its own, and the energy is that of all of them.
        return p.energy_j / (self.workload.batch * self.parallelism.replicas) if p else None

    @property
    def energy_per_prompt_j(self) -> float | None:
        """Prefill energy over the batch."""
        return self._per_sequence("prefill")

    @property
    def energy_per_token_j(self) -> float | None:
        """Decode-step energy over the batch."""
        return self._per_sequence("decode")

    @property
    def energy_per_request_j(self) -> float | None:
        """Energy of the whole request over the batch."""
        return self._per_sequence("request")


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Mean and percentiles of a quantity over all requests that have it."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanMax:
    """Mean and maximum: over requests, or over the time of a simulation."""

    mean: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSummary:
    """Requests of all replicas; ``rate_per_s`` is None for a single request of a file."""

    rate_per_s: float | None
    arrivals: str
    requests: int
    duration_s: float
    prompt_len: MeanMax
    gen_len: MeanMax
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """KV cache of one replica; shares of its blocks that are held, mean over time and largest."""

    capacity_tokens: int
    mean_share: float
    peak_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInterval:
    """Central intervals of probability ``level``; ``tpot_s`` is of the mean."""

    level: float
    energy_per_request_j: tuple[float, float]
    tpot_s: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResult:
    """A service under traffic, from the first arrival to the last completion (``window_s``).

    Energy, power totals and throughputs are of all replicas; ``queue``, ``running``, ``kv_cache``,
    ``preemptions`` and ``steps`` are of one.

    Attributes:
        energy_per_request_j, energy_per_token_j: energy over all requests, and over all generated
            tokens; what the GPUs draw while they wait is part of it.
        mean_power_w: per GPU; total_power_w: of all GPUs.
        ttft_s: from the arrival to the end of the step that makes the first token.
        tpot_s: (last token - first token) / (generated tokens - 1); None where no request makes a
            second token.
        e2e_s: from the arrival to the last token.
        queue, running: requests that wait for the engine, and that it works on, over time.
        saturation_rate_per_s: largest rate that the configuration sustains.
        saturated: True where the traffic's rate is above it.
        utilisation: share of the time in which the engine executes a step. Decoding few requests
            keeps it as busy as decoding many: the load is the rate over the saturation rate.
    """

    spec: str
    device: str
    engine: str
    parallelism: Parallelism
    traffic: TrafficSummary
    window_s: float
    energy_per_request_j: float
    energy_per_token_j: float
    mean_power_w: float
    total_power_w: float
    energy_j: float
    ttft_s: Percentiles
    tpot_s: Percentiles | None
    e2e_s: Percentiles
    requests_per_s: float
    tokens_per_s: float
    queue: MeanMax
    running: MeanMax
    kv_cache: CacheUse
    preemptions: int
    steps: int
    saturation_rate_per_s: float
    saturated: bool
    utilisation: float
    interval: ServingInterval
    source: Source
    bundles: tuple[BundleRef, ...]
    anchors: Anchors | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured row (of a truth CSV or a profile): what ran, and what it took.

    Attributes:
        precision: that the weights are stored in, the spec's own by default.
        prefill_mode: of a request whose prefill is launched in another mode than its decode steps.
        latency_noise, energy_noise: half widths of the 95 % intervals of what was measured,
            relative to it; None where unknown.
        defect: why the measurement is not valid.
        kernels: kernel time of one step, from a profiled pass of its own.
    """

    record_id: str
    device: str
    engine: str
    spec: str
    phase: str
    mode: str
    batch: int
    prompt_len: int
    context_len: float | None = None
    gen_len: int | None = None
    latency_s: float | None = None
    energy_j: float | None = None
    parallelism: Parallelism = Parallelism()
    engine_version: str = ""
    precision: str | None = None
    regime: str = "device"
    power_limit_w: float | None = None
    anchors: Anchors | None = None
    prefill_mode: str | None = None
    latency_noise: float | None = None
    energy_noise: float | None = None
    defect: str | None = None
    kernels: tuple[KernelRow, ...] = ()
    labels: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """GPUs of one device that a search fills.

    Attributes:
        batch_tokens: most new tokens of a step of each worker group; None where there is no limit.
        captured_tokens: of the largest step that runs as captured graphs; None where that is no
            setting of the engine's.
    """

    device: str
    gpus: int
    batch_tokens: int | None
    captured_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPoint:
    """A decode step at one context: its energy for each sequence, with its interval."""

    context_len: int
    energy_per_token_j: float
    interval_j: tuple[float, float]
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPool:
    """Instances of their own that prefill, where others decode.

    Attributes:
        parallelism, batch: degrees, and prompts of a prefill; the replicas are the instances.
        utilisation: share of the time in which they prefill.
        transfer_bytes, transfer_s: KV cache of one request, and how long it is on its way.
    """

    parallelism: Parallelism
    batch: int
    utilisation: float
    transfer_bytes: float
    transfer_s: float

    @property
    def name(self) -> str:
        """Degrees, instances and batch in words."""
        p = self.parallelism
        return f"{p.layout}, replicas={p.replicas}, batch={self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredConfig:
    """One configuration of a search that fits the memory.

    Attributes:
        id: names it within the search.
        pool: GPUs that it runs on.
        parallelism, batch: degrees, and sequences of each replica.
        prefill: who prefills, where ``parallelism`` and ``batch`` are those of decoding alone.
        values: quantities by name, the unit in the name; what does not exist (the time per output
            token of one token) is absent. Costs are in the currency of the prices.
        intervals: of the same at the search's level; empty unless exact.
        exact: True where the values are those of `predict`, False where they are from the table.
        filtered_by: constraints that it does not meet.
        on_frontier: True where no configuration that meets the constraints is at least as good by
            all objectives and better by one.
        rank: place among those that meet the constraints by the first objective, from 1.
        dominated_by: a configuration of the front that is better, by ``id``.
        best_of, tied_on: objectives by which it is the best; by which its interval overlaps with
            the best one's.
        prediction: all that is known, where exact.
        by_context: decode steps at the contexts that were asked for and fit, where exact and on the
            front.
    """

    id: str
    parallelism: Parallelism
    batch: int
    pool: Pool
    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    exact: bool
    filtered_by: tuple[str, ...]
    on_frontier: bool = False
    rank: int | None = None
    dominated_by: str | None = None
    best_of: tuple[str, ...] = ()
    tied_on: tuple[str, ...] = ()
    prediction: Prediction | None = None
    by_context: tuple[ContextPoint, ...] = ()
    prefill: PrefillPool | None = None

    @property
    def unused_gpus(self) -> int:
        """Left over where the replicas do not divide the GPUs given; not in any number."""
        prefill = self.prefill.parallelism.gpus if self.prefill else 0
        return self.pool.gpus - self.parallelism.gpus - prefill


LIMIT_OPTIONS: Mapping[str, tuple[str, str, float]] = MappingProxyType(
    {
        "max_ttft_s": ("--max-ttft-ms", "ms", 1e3),
        "max_tpot_s": ("--max-tpot-ms", "ms", 1e3),
        "max_power_w": ("--max-w", "W", 1.0),
        "min_throughput_tokens_s": ("--min-throughput", "tokens/s", 1.0),
    }
)
"""Constraint of a search -> its option, the option's unit, and how many of it the SI unit is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCounts:
    """Configurations of a search.

    Attributes:
        tried, infeasible, filtered: all; those that cannot run; those that miss a constraint.
        infeasible_by, filtered_by: the same by reason, and by constraint: one that misses two is in
            both.
    """

    tried: int
    infeasible: int
    filtered: int
    infeasible_by: Mapping[str, int]
    filtered_by: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What a search found.

    Attributes:
        source_id: where the spec says that the model is from.
        pools: the GPUs that it may run on, one of them at a time.
        objectives: by name, the first one ranks; constraints, prices: by name, what was asked for.
        configs: all that fit the memory, by layout and batch.
        table_error: relative error of the values that are not exact, at most as far as was seen.
        level: of the intervals; source: weakest of the exact predictions.
        power_limit_w: of each board, where it was asked for.
        precision: what ``weights`` or ``kv_cache`` are stored in, where it is not the spec's.
    """

    spec: str
    source_id: str
    engine: str
    pools: tuple[Pool, ...]
    prompt_len: int
    gen_len: int
    objectives: tuple[str, ...]
    constraints: Mapping[str, float]
    prices: Mapping[str, float]
    configs: tuple[ScoredConfig, ...]
    counts: SearchCounts
    table_error: float
    level: float
    source: Source
    bundles: tuple[BundleRef, ...]
    anchors: Anchors | None
    notes: tuple[str, ...] = ()
    power_limit_w: float | None = None
    precision: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def front(self) -> tuple[ScoredConfig, ...]:
        """Configurations on the front, best by the first objective first."""
        return tuple(sorted((c for c in self.configs if c.on_frontier), key=lambda c: c.rank or 0))

    def best(self, objective: str) -> ScoredConfig:
        """The exactly predicted configuration that is the best by one of the objectives."""
        return next(c for c in self.configs if objective in c.best_of)

    def rows(self) -> list[dict[str, Any]]:
        """A flat mapping for each configuration, for `pandas.DataFrame` or a CSV file."""
        names = dict.fromkeys(name for c in self.configs for name in c.values)
        return [
            {
                "id": c.id,
                "device": c.pool.device,
                "tp": c.parallelism.tp,
                "ep": c.parallelism.ep,
                "dp": c.parallelism.dp,
                "pp": c.parallelism.pp,
                "replicas": c.parallelism.replicas,
                "batch": c.batch,
                "prefill": c.prefill.name if c.prefill else None,
                "unused_gpus": c.unused_gpus,
                **{name: c.values.get(name) for name in names},
                **{
                    f"{name}_{side}": c.intervals[name][i] if name in c.intervals else None
                    for name in names
                    for i, side in enumerate(("low", "high"))
                },
                "exact": c.exact,
                "on_frontier": c.on_frontier,
                "rank": c.rank,
                "dominated_by": c.dominated_by,
                "filtered_by": " ".join(c.filtered_by),
                "best_of": " ".join(c.best_of),
                "tied_on": " ".join(c.tied_on),
            }
            for c in self.configs
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a deployment.

    Attributes:
        kind, label: what is changed, and to what.
        values: compared quantities, each with the ends of its interval; empty where it cannot run.
        prediction: all that is known, or None where it cannot run.
        reason: why it cannot.
    """

    kind: str
    label: str
    values: Mapping[str, tuple[float, float, float]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    prediction: Prediction | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What single changes of a deployment are worth.

    Attributes:
        base: the deployment as it is; values: its compared quantities with their intervals.
        by: the quantity that ranks.
        changes: those that can run, the best first.
        refused: those that cannot, or that would make no difference.
    """

    base: Prediction
    values: Mapping[str, tuple[float, float, float]]
    by: str
    changes: tuple[Change, ...]
    refused: tuple[Change, ...]

    def saved(self, change: Change, name: str) -> tuple[float, float, float]:
        """What a change saves of a quantity, below 0 where it costs, and the ends of its interval.

        The interval takes the errors of both as independent of each other and at their worst.
        """
        now, low, high = self.values[name]
        then, then_low, then_high = change.values[name]
        return now - then, low - then_high, high - then_low

    def certain(self, change: Change, name: str) -> bool:
        """Whether the intervals before and after lie apart."""
        _, low, high = self.saved(change, name)
        return low > 0 or high < 0

    def rows(self) -> list[dict[str, Any]]:
        """A flat mapping for each change, for `pandas.DataFrame`."""
        return [
            {
                "kind": c.kind,
                "change": c.label,
                **{
                    f"{name}{suffix}": value
                    for name in self.values
                    for suffix, value in (
                        ("", c.values[name][0] if c.values else None),
                        ("_saved", self.saved(c, name)[0] if c.values else None),
                        ("_certain", self.certain(c, name) if c.values else None),
                    )
                },
                "source": str(c.prediction.source) if c.prediction else None,
                "reason": c.reason,
            }
            for c in (*self.changes, *self.refused)
        ]
