"""What a search over configurations finds, and what advice says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from energylens.results import Anchors, BundleRef, Prediction, SearchCounts, Source
from energylens.results.service import ServingResult
from energylens.spec.system import Parallelism


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
        service: the same of a configuration that was simulated under traffic; its ``batch`` is the
            most sequences of a replica, and its times are 90th percentiles.
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
    service: ServingResult | None = None
    by_context: tuple[ContextPoint, ...] = ()
    prefill: PrefillPool | None = None

    @property
    def unused_gpus(self) -> int:
        """Left over where the replicas do not divide the GPUs given; not in any number."""
        prefill = self.prefill.parallelism.gpus if self.prefill else 0
        return self.pool.gpus - self.parallelism.gpus - prefill


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
        rate_per_s: requests/s of all replicas, where services under traffic were searched.
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
    rate_per_s: float | None = None

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
                "overlap": None if c.parallelism.overlap is None else str(c.parallelism.overlap),
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
