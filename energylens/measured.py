"""What a profile run found, and its ``energylens/profile/v1`` document. No I/O.

Units are SI; what was not measured is None. Energies are summed over the GPUs of the run; powers
named ``mean_power_w`` are per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from energylens.anchors import anchors_to_json
from energylens.results import Anchors, KernelRow
from energylens.spec.system import Parallelism
from energylens.units import BYTES_PER_GB

PROFILE_SCHEMA = "energylens/profile/v1"
PHASES = ("prefill", "decode", "request")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds of a step over the iterations that were kept; ``ci95`` is of the mean."""

    mean: float
    p50: float
    p90: float
    p99: float
    std: float
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One board in one phase; ``energy_j`` is of one step."""

    board_uuid: str
    energy_j: float | None
    mean_power_w: float | None
    sm_clock_mhz: float | None
    gpu_temp_c: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProfile:
    """One phase: a prefill, a decode step or a whole request of the batch.

    Attributes:
        latency: of the slowest worker; n: iterations kept; n_outliers: left out.
        energy_j: of one step, gross; net_energy_j: less idle power times latency.
        context_len: KV length, current token included; for a decode step its mean.
        energy_rel_se: relative standard error from sampling the sensors; ticks: their updates
            within the window, of the board with the fewest.
        regime: ``device``, ``host`` where the device waits for the host, None where unknown.
        flags: labels and defects; valid: False where a defect spoils time or energy.
        iterations: seconds of every iteration, outliers included.
    """

    latency: Latency
    n: int
    n_outliers: int
    context_len: float | None
    energy_j: float | None
    net_energy_j: float | None
    mean_power_w: float | None
    total_power_w: float | None
    energy_rel_se: float | None
    sm_clock_mhz: float | None
    gpu_temp_c: float | None
    regime: str | None
    ticks: int | None
    per_gpu: tuple[GpuProfile, ...]
    valid: bool
    flags: tuple[str, ...]
    iterations: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Least, mean and largest sample of a window."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleCheck:
    """State of a board over the window of a phase.

    Attributes:
        reasons: clock-event reason -> part of the samples in which it held.
        throttled: one of them is a slow-down that spoils a measurement; None where not known.
    """

    phase: str
    board_uuid: str
    temperature_c: Spread | None
    sm_clock_mhz: Spread | None
    power_w: Spread | None
    reasons: Mapping[str, float]
    throttled: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Device memory of the fullest worker; ``model_bytes`` is the model once, whole.

    ``cache_bytes`` is the cache of one worker after the prefill, ``total_cache_bytes`` of all.
    """

    weights_bytes: float | None = None
    model_bytes: float | None = None
    cache_bytes: float | None = None
    total_cache_bytes: float | None = None
    predicted_cache_bytes: float | None = None
    peak_bytes: float | None = None
    capacity_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that a run found.

    Attributes:
        batch: sequences of each replica.
        modes: launch mode per phase.
        metrics: what added metrics returned.
        kernels: of the profiled pass, on worker 0; throttle: per phase and board, where asked for.
        environment, meter: facts about software and host, and about how energy was measured.
        reasons: why the run is not valid, or is incomplete.
        energy_reason: why there is no energy.
    """

    record_id: str
    time: str
    model: str
    spec: str | None
    device: str | None
    device_name: str
    engine: str
    engine_version: str
    precision: str
    parallelism: Parallelism
    batch: int
    prompt_len: int
    gen_len: int
    context_len: float
    modes: Mapping[str, str]
    memory: MemoryProfile
    phases: Mapping[str, PhaseProfile]
    bandwidth_utilisation: float | None = None
    compute_utilisation: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    kernels: tuple[KernelRow, ...] = ()
    throttle: tuple[ThrottleCheck, ...] | None = None
    anchors: Anchors | None = None
    environment: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    meter: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    power_timeline: str | None = None
    reasons: tuple[str, ...] = ()
    energy_reason: str | None = None

    @property
    def valid(self) -> bool:
        """True where every phase is, and the run is complete."""
        return not self.reasons and all(p.valid for p in self.phases.values())

    def latency_s(self, phase: str) -> float | None:
        """Mean seconds of a phase, None where it was not measured."""
        found = self.phases.get(phase)
        return found.latency.mean if found else None

    @property
    def tpot_s(self) -> float | None:
        """(TTLT - TTFT) / (gen_len - 1); None where one was not measured, or at gen_len 1."""
        first, last = self.latency_s("prefill"), self.latency_s("request")
        if first is None or last is None or self.gen_len < 2:
            return None
        return (last - first) / (self.gen_len - 1)

    def per_sequence_j(self, phase: str) -> float | None:
        """Energy of a step over the sequences of all replicas."""
        found = self.phases.get(phase)
        if found is None or found.energy_j is None:
            return None
        return found.energy_j / (self.batch * self.parallelism.replicas)


def profile_to_json(profile: Profile, *, iterations: bool = False) -> dict[str, Any]:
    """The ``energylens/profile/v1`` document.

    Args:
        profile: the run.
        iterations: with the seconds of every iteration.
    """
    p = profile
    ttft, step, ttlt = (p.latency_s(phase) for phase in PHASES)
    per_prompt, per_token, per_request = (p.per_sequence_j(phase) for phase in PHASES)
    return {
        "schema": PROFILE_SCHEMA,
        "record_id": p.record_id,
        "time": p.time,
        "model": p.model,
        "spec": p.spec,
        "device": p.device,
        "device_name": p.device_name,
        "engine": p.engine,
        "engine_version": p.engine_version,
        "precision": p.precision,
        "parallelism": p.parallelism.degrees,
        "n_gpus": p.parallelism.gpus,
        "workload": {
            "batch": p.batch,
            "prompt_len": p.prompt_len,
            "gen_len": p.gen_len,
            "context_len": p.context_len,
        },
        "modes": dict(p.modes),
        "memory": {
            "weights_bytes": p.memory.weights_bytes,
            "kv_cache_bytes": p.memory.cache_bytes,
            "predicted_kv_cache_bytes": p.memory.predicted_cache_bytes,
            "peak_bytes": p.memory.peak_bytes,
            "capacity_bytes": p.memory.capacity_bytes,
        },
        **{phase: _phase(p.phases.get(phase), iterations) for phase in PHASES},
        "ttft_s": ttft,
        "tpot_s": p.tpot_s,
        "ttlt_s": ttlt,
        "energy_per_prompt_j": per_prompt,
        "energy_per_token_j": per_token,
        "energy_per_request_j": per_request,
        # ELANA's names, its energies divided by the batch.
        "model_size_gb": _scaled(p.memory.model_bytes, 1 / BYTES_PER_GB),
        "cache_size_gb": _scaled(p.memory.total_cache_bytes, 1 / BYTES_PER_GB),
        "ttft_latency_ms": _scaled(ttft, 1e3),
        "ttft_energy_j_per_prompt": per_prompt,
        "tpot_latency_ms": _scaled(step, 1e3),
        "tpot_energy_j_per_token": per_token,
        "ttlt_latency_ms": _scaled(ttlt, 1e3),
        "ttlt_energy_j_per_request": per_request,
        **_rates(p),
        "bandwidth_utilisation": p.bandwidth_utilisation,
        "compute_utilisation": p.compute_utilisation,
        "breakdown": [asdict(row) for row in p.kernels] or None,
        "throttle": None if p.throttle is None else [asdict(check) for check in p.throttle],
        "metrics": dict(p.metrics),
        "anchors": anchors_to_json(p.anchors) if p.anchors else None,
        "environment": dict(p.environment),
        "meter": dict(p.meter),
        "power_timeline": p.power_timeline,
        "valid": p.valid,
        "reasons": list(p.reasons),
        "energy_reason": p.energy_reason,
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rates(p: Profile) -> dict[str, float | None]:
    """Generated tokens per second and per joule: of decode steps, else of whole requests."""
    for phase, tokens in (("decode", 1), ("request", p.gen_len)):
        found = p.phases.get(phase)
        if found is not None:
            made = tokens * p.batch * p.parallelism.replicas
            per_j = None if not found.energy_j else made / found.energy_j
            return {"throughput_tokens_s": made / found.latency.mean, "tokens_per_j": per_j}
    return {"throughput_tokens_s": None, "tokens_per_j": None}


def _phase(found: PhaseProfile | None, iterations: bool) -> dict[str, Any] | None:
    if found is None:
        return None
    document = {
        "latency_s": found.latency.mean,
        "energy_j": found.energy_j,
        "mean_power_w": found.mean_power_w,
        "total_power_w": found.total_power_w,
        "net_energy_j": found.net_energy_j,
        "context_len": found.context_len,
        "n": found.n,
        "latency": {**asdict(found.latency), "ci95": list(found.latency.ci95)},
        "n_outliers": found.n_outliers,
        "energy_rel_se": found.energy_rel_se,
        "sm_clock_mhz": found.sm_clock_mhz,
        "gpu_temp_c": found.gpu_temp_c,
        "regime": found.regime,
        "ticks": found.ticks,
        "per_gpu": [asdict(gpu) for gpu in found.per_gpu],
        "valid": found.valid,
        "flags": list(found.flags),
    }
    return document | ({"iterations": list(found.iterations)} if iterations else {})
