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
            **self.parallelism.degrees,
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
class OpsPrediction:
    """Ops alone, without a model around them; what stands beside a measured `OverlapRun`."""

    result: PhaseResult
    bundles: tuple[BundleRef, ...]


class OverlapKind(enum.StrEnum):
    """How a GEMM and the all-reduce of its result were run.

    One of both alone, one after the other, or the all-reduce of each chunk beside the next chunk.
    """

    GEMM_ONLY = "gemm_only"
    ALLREDUCE_ONLY = "allreduce_only"
    SEQUENTIAL = "sequential"
    OVERLAP = "overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRun:
    """A GEMM on every worker and the all-reduce of its result over all of them.

    Attributes:
        kind: how both were run.
        tokens, n, k: rows, columns and inner size of the GEMM.
        dtype: that its weights are stored in.
        sms: streaming multiprocessors that NCCL may take, or None for its own choice.
        chunks: parts that the rows are cut into.
    """

    kind: OverlapKind
    tokens: int
    n: int
    k: int
    dtype: str = "bf16"
    sms: int | None = None
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured row (of a truth CSV or a profile): what ran, and what it took.

    Attributes:
        overlap: what a row ran that is no step of a model. Its kind is then the ``phase``, its
            tokens are those of one prompt, and ``spec`` is empty.
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
    overlap: OverlapRun | None = None
    labels: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


LIMIT_OPTIONS: Mapping[str, tuple[str, str, float]] = MappingProxyType(
    {
        "max_ttft_s": ("--max-ttft-ms", "ms", 1e3),
        "max_tpot_s": ("--max-tpot-ms", "ms", 1e3),
        "max_power_w": ("--max-w", "W", 1.0),
        "min_throughput_tokens_s": ("--min-throughput", "tokens/s", 1.0),
    }
)


"""Constraint of a search -> its option, the option's unit, and how many of it the SI unit is."""
