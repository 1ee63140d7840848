"""What a service under traffic comes to."""

from __future__ import annotations

from dataclasses import dataclass

from energylens.results import Anchors, BundleRef, Source
from energylens.spec.system import Parallelism


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
