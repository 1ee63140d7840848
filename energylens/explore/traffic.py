"""The front of all layouts as services under traffic: each is simulated, not a batch predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from energylens.cost.bundle import Bundle
from energylens.errors import SpecError
from energylens.explore.front import LIMITED, config_id, excess, placed
from energylens.explore.prices import Prices
from energylens.explore.search import Constraints, SearchSpace, check, missed
from energylens.results import Anchors, Infeasible, SearchCounts
from energylens.results.search import Frontier, Pool, ScoredConfig
from energylens.results.service import ServingResult
from energylens.schedule import LEVEL
from energylens.serving import Limits, Traffic, service_of
from energylens.spec.model import Spec
from energylens.spec.system import Config, Device, Engine, Link, Parallelism

SLO_SHARE = 90
"""Percentile of the requests' TTFT and TPOT that objectives and constraints are about."""

_NOTE = (
    f"under traffic, TTFT and TPOT are those that {SLO_SHARE} % of the requests keep, joules "
    "include what GPUs draw while they wait, and W is the mean; TTFT has no interval"
)


def explore_traffic(
    spec: Spec,
    *,
    engine: Engine,
    device: Device,
    gpus: int,
    traffic: Traffic,
    space: SearchSpace,
    constraints: Constraints,
    objectives: Sequence[str],
    prices: Prices,
    power_limit_w: float | None = None,
    routing: str | None = None,
    bundles: Sequence[Bundle] = (),
    anchors: Anchors | None = None,
    link: Link | None = None,
) -> Frontier | Infeasible:
    """The front of the layouts, and of every number of replicas, that sustain the traffic.

    Args:
        spec: the model.
        engine: how it becomes kernels, and how requests become steps.
        device: what it runs on.
        gpus: devices at most; those that no replica is on are not counted.
        traffic: the requests of all replicas, which get them round robin.
        space: degrees to try; its batches are the most sequences of an engine. Services with
            attention data or pipeline parallelism are not simulated.
        constraints: what to keep.
        objectives: of `OBJECTIVES`; the first one ranks.
        prices: what objectives of cost and carbon stand on.
        power_limit_w: of each board, the calibration's by default.
        routing: how tokens choose experts, the spec's own way by default.
        bundles: calibrations, as for `energylens.predict.predict`.
        anchors: of the boards and their host, likewise.
        link: interconnect of the workers, likewise.

    Returns:
        All services that sustain the traffic, with the front among them; or why there is none.

    Raises:
        SpecError: an objective is unknown or not about traffic, or the engine forms no steps.
        OutOfRangeError: a degree or a limit cannot be.
    """
    absent = [name for name in objectives if "prompt" in name]
    if absent:
        raise SpecError(f"--objective {absent[0]} is about one batch, and --rate about traffic")
    if "throughput" in objectives:
        raise SpecError(
            "--objective throughput is what --rate asks for, the same of all services; choose "
            "another one, e.g. throughput_per_gpu"
        )
    if constraints.min_throughput_tokens_s is not None:
        raise SpecError(
            "--min-throughput says of batches what --rate says of services; raise --rate instead"
        )
    check(
        device=device,
        gpus=gpus,
        gen_len=max(generated for _, generated in traffic.lengths),
        constraints=constraints,
        objectives=objectives,
        prices=prices,
        power_limit_w=power_limit_w,
    )
    pool = Pool(
        device=device.name,
        gpus=gpus,
        batch_tokens=engine.serving.batch_tokens if engine.serving else None,
        captured_tokens=engine.captured_tokens,
    )
    search = _Search(
        spec=spec,
        engine=engine,
        device=device,
        pool=pool,
        traffic=traffic,
        config=Config(power_limit_w=power_limit_w, routing=routing),
        bundles=tuple(bundles),
        anchors=anchors,
        link=link,
    )
    limits = constraints.given()
    configs = [
        _scored(result, batch, pool, limits, prices)
        for layout in _layouts(space, spec, engine, gpus)
        for batch in space.batches
        for result in search.results(layout, batch)
    ]
    counts = _counts(configs, search.refused, limits)
    kept = [c for c in configs if not c.filtered_by]
    if not kept:
        return Infeasible(reason=search.nothing(configs, limits), counts=counts)
    results = [c.service for c in configs if c.service is not None]
    lengths = np.array(traffic.lengths)
    return Frontier(
        spec=spec.name,
        source_id=spec.source,
        engine=engine.name,
        pools=(pool,),
        prompt_len=round(float(lengths[:, 0].mean())),
        gen_len=round(float(lengths[:, 1].mean())),
        objectives=tuple(dict.fromkeys(objectives)),
        constraints=MappingProxyType(dict(limits)),
        prices=MappingProxyType(prices.given()),
        configs=placed(configs, tuple(dict.fromkeys(objectives))),
        counts=counts,
        table_error=0.0,
        level=LEVEL,
        source=max(r.source for r in results),
        bundles=tuple(dict.fromkeys(b for r in results for b in r.bundles)),
        anchors=anchors,
        notes=(_NOTE, *dict.fromkeys(note for r in results for note in r.notes)),
        power_limit_w=power_limit_w,
        rate_per_s=traffic.rate_per_s,
    )


def _layouts(space: SearchSpace, spec: Spec, engine: Engine, gpus: int) -> Iterator[Parallelism]:
    """Layouts of one replica that fit on the GPUs and can be simulated."""
    for name in ("dp", "pp"):
        if set(getattr(space, name) or (1,)) != {1}:
            raise SpecError(
                f"--{name} above 1: a service with it is not simulated; leave it out with --rate"
            )
    found = 0
    for tp, ep, _, _, overlap in replace(space, dp=(1,), pp=(1,)).layouts(spec, engine, gpus):
        if tp <= gpus and tp % ep == 0:
            found += 1
            yield Parallelism(tp=tp, ep=ep, overlap=overlap)
    if not found:
        raise SpecError(f"no layout asked for fits on {gpus} GPUs; lower --tp, or raise --gpus")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    """What is served, and the layouts that cannot: reason -> how many numbers of replicas."""

    spec: Spec
    engine: Engine
    device: Device
    pool: Pool
    traffic: Traffic
    config: Config
    bundles: tuple[Bundle, ...]
    anchors: Anchors | None
    link: Link | None
    refused: Counter[str] = field(default_factory=Counter)
    sustained: dict[str, float] = field(default_factory=dict)

    def results(self, layout: Parallelism, batch: int) -> Iterator[ServingResult]:
        """A layout with every number of replicas that sustains the traffic, most sequences given.

        Prices and the engine are the same for each of them.
        """
        full = self.pool.gpus // layout.workers
        service = service_of(
            self.spec,
            engine=self.engine,
            device=self.device,
            config=replace(self.config, parallelism=layout),
            limits=Limits(max_sequences=batch),
            bundles=self.bundles,
            anchors=self.anchors,
            link=self.link,
        )
        replica = service.replica(longest=max(p + g for p, g in self.traffic.lengths))
        if isinstance(replica, Infeasible):
            self.refused[f"{layout.layout}: {replica.reason}"] += full
            return
        each = replica.saturation_rate(self.traffic.lengths)
        name = f"{layout.layout}, at most {batch} sequences"
        self.sustained[name] = full * each
        for replicas in range(1, full + 1):
            if replicas * each < (self.traffic.rate_per_s or 0.0):
                self.refused[f"{name}: a replica sustains {each:.4g} requests/s"] += 1
                continue
            result = service.with_replicas(replicas).serve(replica, self.traffic)
            if isinstance(result, Infeasible):
                self.refused[f"{layout.layout}: {result.reason}"] += 1
            else:
                yield result

    def nothing(self, configs: Sequence[ScoredConfig], limits: dict[str, float]) -> str:
        """Why there is no service, and what comes closest."""
        where = f"{self.spec.name} on {self.pool.gpus} x {self.device.name}"
        if configs:
            c = min(configs, key=lambda c: max(excess(c.values, limits).values()))
            over = [
                missed(name, c.values[LIMITED[name][0]], limits[name]) for name in c.filtered_by
            ]
            return (
                f"none of {len(configs)} services of {where} meets the constraints; the closest is "
                f"{c.id}, which misses {' and '.join(over)}"
            )
        rate = self.traffic.rate_per_s or 0.0
        name, most = max(self.sustained.items(), key=lambda item: item[1], default=("", math.inf))
        if most >= rate:
            return f"no layout of {where} can run: {'; '.join(self.refused)}"
        return (
            f"no layout of {where} sustains {rate:g} requests/s: the most is "
            f"{most:.4g}/s ({name}); lower --rate, or raise --gpus"
        )


def _scored(
    r: ServingResult, batch: int, pool: Pool, limits: dict[str, float], prices: Prices
) -> ScoredConfig:
    """A service as a configuration of a search."""
    gpus = float(r.parallelism.gpus)
    values: dict[str, float] = {
        "energy_per_token_j": r.energy_per_token_j,
        "energy_per_request_j": r.energy_per_request_j,
        "ttft_s": r.ttft_s.p90,
        "ttlt_s": r.e2e_s.p90,
        "total_power_w": r.total_power_w,
        "gpus": gpus,
        "gpu_s_per_request": gpus / r.requests_per_s,
    }
    if r.tpot_s is not None:
        values |= {
            "tpot_s": r.tpot_s.p90,
            "throughput_tokens_s": r.tokens_per_s,
            "throughput_per_gpu_tokens_s": r.tokens_per_s / gpus,
            "gpu_s_per_token": gpus / r.tokens_per_s,
        }
    ends = [end / r.energy_per_request_j for end in r.interval.energy_per_request_j]
    intervals = {
        name: (values[name] * ends[0], values[name] * ends[1])
        for name in ("energy_per_token_j", "energy_per_request_j")
    }
    if r.tpot_s is not None and r.interval.tpot_s is not None:
        low, high = (end / r.tpot_s.mean for end in r.interval.tpot_s)
        intervals["tpot_s"] = values["tpot_s"] * low, values["tpot_s"] * high
    costs = prices.values({name: np.array(value) for name, value in values.items()})
    values |= {name: float(value) for name, value in costs.items()}
    return ScoredConfig(
        id=config_id(r.parallelism, pool.gpus, batch),
        parallelism=r.parallelism,
        batch=batch,
        pool=pool,
        values=MappingProxyType(values),
        intervals=MappingProxyType(intervals),
        exact=True,
        filtered_by=tuple(n for n, over in excess(values, limits).items() if over > 0),
        service=r,
    )


def _counts(
    configs: Sequence[ScoredConfig], refused: Counter[str], limits: Mapping[str, float]
) -> SearchCounts:
    return SearchCounts(
        tried=len(configs) + sum(refused.values()),
        infeasible=sum(refused.values()),
        filtered=sum(bool(c.filtered_by) for c in configs),
        infeasible_by=MappingProxyType(dict(refused)),
        filtered_by=MappingProxyType(
            {name: sum(name in c.filtered_by for c in configs) for name in limits}
        ),
    )
