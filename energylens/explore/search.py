"""What to try, what to keep, and the search of both stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import Bundle, select
from energylens.cost.model import Key
from energylens.cost.roofline import LINK_EFFICIENCY
from energylens.errors import OutOfRangeError, SpecError
from energylens.explore.disaggregate import NOTE, Disaggregation, Found
from energylens.explore.front import (
    LIMITED,
    OBJECTIVES,
    TABLE_ERROR,
    Choice,
    Table,
    exact_values,
    placed,
    scored_configs,
)
from energylens.explore.layout import Layout
from energylens.explore.prices import Prices
from energylens.lower import Lowered, fullest, lower, staged, valid_tp
from energylens.lower.overlap import check_sms
from energylens.machine import Machine, StepSums, machine
from energylens.predict import predict
from energylens.results import (
    LIMIT_OPTIONS,
    Anchors,
    Infeasible,
    Memory,
    Prediction,
    SearchCounts,
    Source,
)
from energylens.results.search import ContextPoint, Frontier, Pool, ScoredConfig
from energylens.schedule import LEVEL
from energylens.spec.model import Spec
from energylens.spec.system import (
    Config,
    Device,
    Engine,
    Link,
    Overlapping,
    Parallelism,
    Phase,
    Workload,
)
from energylens.units import BYTES_PER_GB

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

DEFAULT_OBJECTIVES = ("energy_per_token", "tpot")
"""What a deployment costs, and what a user feels; the throughput of a GPU nearly follows the
first of them, and would only thicken the front."""


# Of the mean power over what the governor holds: rows above are at the lowest clock, whatever the
# table's error is; what is close to it is for the exact prediction to say.
_ABOVE_CAP = 0.01
_OF_ALL_REPLICAS = ("total_power_w", "gpus", "throughput_tokens_s")

_IN_FLIGHT = (
    "layouts with pp: as many parts of the batch in flight as there are stages, as vLLM schedules "
    "requests that keep coming; it runs a batch that comes at once in fewer parts, and slower"
)

_ALONE = "nothing is disaggregated: that takes a GPU to prefill and one to decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What to try; ``None`` stands for every degree that the model and the engine allow.

    Attributes:
        batches: sequences of a replica.
        tp, ep, dp, pp: degrees; by default ep is 1 or all workers of a stage, which is what engines
            launch.
        overlap: how the all-reduces of tensor parallelism run; None is the spec's own way.
    """

    batches: Sequence[int] = range(1, 257)
    tp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    overlap: tuple[Overlapping | None, ...] = (None,)

    def __post_init__(self) -> None:
        for name in ("batches", "tp", "ep", "dp", "pp"):
            given = getattr(self, name)
            if given is not None and (not given or min(given) < 1):
                raise OutOfRangeError(
                    f"{name}: every value must be at least 1, not {min(given, default='none')}"
                )

    def layouts(
        self, spec: Spec, engine: Engine, gpus: int
    ) -> Iterator[tuple[int, int, int, int, Overlapping | None]]:
        """(tp, ep, dp, pp, overlap) of each layout, the given degrees as they are, ascending."""
        data_parallel = spec.moe is not None and engine.dp_dispatch
        # Without any of the spec's own there is nothing to switch off.
        ways = dict.fromkeys(o if o or spec.overlap else None for o in self.overlap)
        for tp in sorted(set(self.tp or (n for n in valid_tp(spec) if n <= gpus))):
            most_dp = max(1, gpus // tp) if data_parallel else 1
            for dp in sorted(set(self.dp or range(1, most_dp + 1))):
                whole = {1, tp * dp} if spec.moe is not None else {1}
                most_pp = max(1, gpus // (tp * dp)) if engine.pipeline_tensors else 1
                pps = sorted(set(self.pp or range(1, most_pp + 1)))
                for ep in sorted(set(self.ep or whole)):
                    for overlap in ways if tp > 1 else (None,):
                        yield from ((tp, ep, dp, pp, overlap) for pp in pps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a configuration must keep; ``None`` where anything goes.

    ``max_power_w`` is of all its GPUs together, in the phase that draws more.
    """

    max_ttft_s: float | None = None
    max_tpot_s: float | None = None
    max_power_w: float | None = None
    min_throughput_tokens_s: float | None = None

    def given(self) -> dict[str, float]:
        """Those that are given, by name."""
        limits = {name: getattr(self, name) for name in LIMITED}
        return {name: limit for name, limit in limits.items() if limit is not None}


def explore(
    spec: Spec,
    *,
    engine: Engine,
    device: Device,
    gpus: int,
    prompt_len: int = 1024,
    gen_len: int = 128,
    space: SearchSpace = SearchSpace(),
    constraints: Constraints = Constraints(),
    objectives: Sequence[str] = DEFAULT_OBJECTIVES,
    prices: Prices = Prices(),
    exact: int = 20,
    contexts: Sequence[int] = (),
    disaggregate: bool = False,
    power_limit_w: float | None = None,
    routing: str | None = None,
    bundles: Sequence[Bundle] = (),
    anchors: Anchors | None = None,
    link: Link | None = None,
) -> Frontier | Infeasible:
    """The front of all configurations of a model on ``gpus`` devices.

    Args:
        spec: the model.
        engine: how it becomes kernels.
        device: what it runs on.
        gpus: devices to use; replicas fill them, and those left over are not counted.
        prompt_len: tokens of each prompt.
        gen_len: generated tokens of each sequence, the one that prefill makes included.
        space: what to try.
        constraints: what to keep.
        objectives: of `OBJECTIVES`; the first one ranks.
        prices: what objectives of cost and carbon stand on.
        exact: most configurations to predict exactly. Where more are candidates for the front,
            these are the best by each objective and others spread evenly along it.
        contexts: at which a decode step of the exactly predicted part of the front is priced, too.
        disaggregate: try pairs of layouts, too, of which one prefills and the other one decodes.
        power_limit_w: of each board, the calibration's by default.
        routing: how tokens choose experts, the spec's own way by default.
        bundles: calibrations, as for `energylens.predict.predict`.
        anchors: of the boards and their host, likewise.
        link: interconnect of the workers, likewise.

    Returns:
        All configurations that fit with the front among them; or why there is none, and what comes
        closest.

    Raises:
        SpecError: an objective is unknown, or no degrees that were asked for fit on the GPUs.
        OutOfRangeError: a number cannot be.
    """
    if exact < 1:
        raise OutOfRangeError(f"exact must be at least 1, not {exact}")
    check(
        device=device,
        gpus=gpus,
        gen_len=gen_len,
        constraints=constraints,
        objectives=objectives,
        prices=prices,
        power_limit_w=power_limit_w,
    )
    search = Search(
        spec=spec,
        engine=engine.on(device),
        device=device,
        gpus=gpus,
        workload=Workload(prompt_len=prompt_len, gen_len=gen_len),
        space=space,
        config=Config(power_limit_w=power_limit_w, routing=routing),
        prices=prices,
        contexts=tuple(contexts),
        max_power_w=constraints.max_power_w or np.inf,
        any_replicas="gpus" in objectives,
        bundles=tuple(bundles),
        anchors=anchors,
        link=link,
    )
    table, nearest = search.score()
    if table is None:
        return Infeasible(
            reason=search.nothing_runs(nearest), memory=nearest, counts=search.counts()
        )
    chosen = Choice(
        table=table,
        objectives=tuple(dict.fromkeys(objectives)),
        constraints=constraints.given(),
        limit=exact,
        prices=prices,
    )
    search.refine(chosen)
    pairs = Found()
    if disaggregate and gpus > 1:
        pairs = Disaggregation(search, chosen).found(search.pool)
    if not chosen.known and not pairs.configs:
        return Infeasible(reason=search.nothing_meets(chosen), counts=search.counts(chosen, pairs))
    found = search.frontier(chosen, pairs)
    alone = (_ALONE,) if disaggregate and gpus == 1 else ()
    return replace(found, notes=(*found.notes, *alone))


def check(
    *,
    device: Device,
    gpus: int,
    gen_len: int,
    constraints: Constraints,
    objectives: Sequence[str],
    prices: Prices,
    power_limit_w: float | None,
) -> None:
    """Refuse a search that cannot be; see `explore` for the arguments and errors."""
    if gpus < 1:
        raise OutOfRangeError(f"gpus must be at least 1, not {gpus}")
    unknown = [name for name in objectives if name not in OBJECTIVES]
    if unknown or not objectives:
        raise SpecError(
            f"--objective: unknown {unknown[0]!r}; allowed: {', '.join(OBJECTIVES)}"
            if unknown
            else f"--objective: none given; allowed: {', '.join(OBJECTIVES)}"
        )
    for name, limit in constraints.given().items():
        if not 0 < limit < float("inf"):
            raise OutOfRangeError(f"{name} must be a number above 0, not {limit:g}")
    if gen_len < 2:
        values = [OBJECTIVES[o][0] for o in objectives]
        values += [LIMITED[c][0] for c in constraints.given()]
        if any(v.startswith(("tpot", "throughput", "cost_per_million")) for v in values):
            raise SpecError(
                f"--gen-len {gen_len}: no token follows the first, so there is no TPOT, no cost of "
                "a token and no throughput; raise it to 2 or more, or choose other objectives and "
                "constraints, e.g. energy_per_request and ttft"
            )
    prices.check(objectives)
    if power_limit_w is not None and power_limit_w > device.power_limit_w:
        raise SpecError(
            f"a power limit of {power_limit_w:g} W: {device.name} allows up to "
            f"{device.power_limit_w:g} W"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Search:
    """A model, what it may run on, and what was counted on the way.

    There are as many replicas as ``max_power_w`` allows, with ``any_replicas`` fewer ones, too.
    """

    spec: Spec
    engine: Engine
    device: Device
    gpus: int
    workload: Workload
    space: SearchSpace
    config: Config
    prices: Prices
    contexts: tuple[int, ...]
    max_power_w: float
    any_replicas: bool
    bundles: tuple[Bundle, ...]
    anchors: Anchors | None
    link: Link | None
    infeasible: Counter[str] = field(default_factory=Counter)

    @cached_property
    def _batches(self) -> IntArray:
        return np.unique(np.array(self.space.batches, dtype=np.int64))

    def score(self) -> tuple[Table | None, Memory | None]:
        """All that fits, or None; and the memory of what comes closest to fitting."""
        parts: list[tuple[Parallelism, IntArray, dict[str, Array]]] = []
        nearest: Memory | None = None
        for stages, sums, parallelism in self._lowered():
            count = self._fitting(stages)
            if not count:
                held = fullest(stages, self._workload(int(self._batches[0])), self.device)
                nearest = min(nearest or held, held, key=_overflow)
            if count < len(self._batches):
                most = f"batches above {self._batches[count - 1]}" if count else "any batch"
                self.infeasible[f"memory: {parallelism.layout} at {most}"] += (
                    len(self._batches) - count
                )
            if not count:
                continue
            priced = self.machine(parallelism)
            layout = Layout(
                stages=stages,
                sums=sums,
                machine=priced,
                parallelism=parallelism,
                workload=self.workload,
            )
            fitting = self._batches[:count]
            values = layout.values(fitting)
            held_w = priced.cap_w * (1.0 + _ABOVE_CAP)
            holds = values["total_power_w"] / values["gpus"] <= held_w
            if not holds.all():
                self.infeasible[priced.cannot_hold] += int((~holds).sum())
            fitting, values = fitting[holds], {name: v[holds] for name, v in values.items()}
            parts += self._replicated(parallelism, fitting, values | self.prices.values(values))
        if not parts:
            return None, nearest
        rows = [len(batches) for _, batches, _ in parts]
        table = Table(
            parallelism=tuple(p for p, _, _ in parts),
            layout=np.repeat(np.arange(len(parts)), rows),
            batch=np.concatenate([batches for _, batches, _ in parts]),
            values={n: np.concatenate([v[n] for _, _, v in parts]) for n in parts[0][2]},
            runs=np.ones(sum(rows), dtype=np.bool_),
        )
        return table, nearest

    def _replicated(
        self, parallelism: Parallelism, batches: IntArray, values: Mapping[str, Array]
    ) -> Iterator[tuple[Parallelism, IntArray, dict[str, Array]]]:
        """The rows with as many replicas as the GPUs and the power allow.

        Where the number of GPUs counts, with each number of them.
        """
        full = parallelism.replicas
        each_w = values["total_power_w"] / full
        most = np.clip(np.floor(self.max_power_w / each_w), 1, full)
        for replicas in range(1, full + 1):
            own = np.flatnonzero((most == replicas) | (self.any_replicas & (most >= replicas)))
            if own.size:
                scaled = {name: v[own] for name, v in values.items()}
                for name in _OF_ALL_REPLICAS:
                    if name in scaled:
                        scaled[name] = scaled[name] * (replicas / full)
                yield replace(parallelism, replicas=replicas), batches[own], scaled

    def machine(self, parallelism: Parallelism) -> Machine:
        """Prices of a layout's steps."""
        return machine(
            self.device,
            workers=parallelism.workers,
            bundle=select(self.bundles, self.device.name, self.engine.provider),
            anchors=self.anchors,
            power_limit_w=self.config.power_limit_w,
            link=self.link,
            captured_tokens=self.engine.captured_tokens,
            stages=parallelism.pp,
        )

    def _lowered(self) -> Iterator[tuple[tuple[Lowered, ...], StepSums, Parallelism]]:
        """The layouts that the model and the engine allow; the others are counted.

        What all of them have in common is lowered and priced once.
        """
        fits = False
        model, costs = self.machine(Parallelism()).model, dict[Key, Array]()
        last: tuple[Parallelism, Lowered | Infeasible, StepSums] | None = None
        for tp, ep, dp, pp, overlap in self.space.layouts(self.spec, self.engine, self.gpus):
            if tp * dp * pp > self.gpus:
                pipeline = f", pp={pp}" if pp > 1 else ""
                reason = f"tp={tp}, dp={dp}{pipeline}: more than {self.gpus} GPUs"
                self.infeasible[reason] += len(self._batches)
                continue
            fits = True
            if tp * dp % ep:
                reason = f"ep={ep} does not divide tp={tp} x dp={dp}"
                self.infeasible[reason] += len(self._batches)
                continue
            replicas = self.gpus // (tp * dp * pp)
            parallelism = Parallelism(
                tp=tp, ep=ep, dp=dp, pp=pp, replicas=replicas, overlap=overlap
            )
            check_sms(self.spec, parallelism, self.device)
            stage = replace(parallelism, pp=1, replicas=1)
            if last is None or last[0] != stage:
                whole = lower(self.spec, self.engine, stage, routing=self.config.routing)
                last = stage, whole, StepSums(model, costs)
            _, whole, sums = last
            stages = whole if isinstance(whole, Infeasible) else staged(whole, pp)
            if isinstance(stages, Infeasible):
                self.infeasible[stages.reason] += len(self._batches)
            else:
                yield stages, sums, parallelism
        if not fits:
            raise SpecError(
                f"no layout asked for fits on {self.gpus} GPUs; lower --tp, --dp or --pp, or "
                "raise --gpus"
            )

    def _workload(self, batch: int) -> Workload:
        return replace(self.workload, batch=batch)

    def _fitting(self, stages: tuple[Lowered, ...]) -> int:
        """How many of the batches fit the memory, smallest first: it grows with the batch."""
        low, high = 0, len(self._batches)
        middle = high - 1  # nearly always all of them do
        while low < high:
            batch = int(self._batches[middle])
            if fullest(stages, self._workload(batch), self.device).fits:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        return low

    def refine(self, chosen: Choice) -> None:
        """Predict the candidates for the front, round by round, until it is known or limited."""
        table = chosen.table
        while rows := chosen.next_rows():
            for row in rows:
                parallelism, batch = table.parallelism[table.layout[row]], int(table.batch[row])
                result = self.exactly(parallelism, batch)
                chosen.exact[row] = result
                if isinstance(result, Infeasible):
                    table.runs[row] = False
                    self.infeasible[result.reason] += 1
                    continue
                others = [i for i in table.other_ways(row).tolist() if i not in chosen.exact]
                for name, (value, _, _) in exact_values(result, self.prices).items():
                    column = table.values[name]
                    # An overlap changes little or nothing, and the table errs alike: which of them
                    # are exact must not order what is the same.
                    column[others] *= value / column[row]
                    column[row] = value

    def exactly(
        self,
        parallelism: Parallelism,
        batch: int,
        phases: Sequence[Phase] = tuple(Phase),
        lengths: Workload | None = None,
    ) -> Prediction | Infeasible:
        """The prediction of a layout at a batch, of other ``lengths`` than the search's."""
        return predict(
            self.spec,
            engine=self.engine,
            device=self.device,
            config=replace(
                self.config, parallelism=parallelism, microbatches=min(parallelism.pp, batch)
            ),
            workload=replace(lengths or self.workload, batch=batch),
            bundles=self.bundles,
            anchors=self.anchors,
            phases=phases,
            link=self.link,
        )

    @property
    def pool(self) -> Pool:
        """The GPUs that are searched."""
        serving = self.engine.serving
        return Pool(
            device=self.device.name,
            gpus=self.gpus,
            batch_tokens=serving.offline_batch_tokens if serving else None,
            captured_tokens=self.engine.captured_tokens or None,
        )

    @property
    def link_w(self) -> float:
        """Above-idle power of a board with its links awake; 0 where nobody measured it."""
        return self.machine(Parallelism()).laws.link_w

    def counts(self, chosen: Choice | None = None, pairs: Found | None = None) -> SearchCounts:
        """What was tried; with the rows of a table, where anything can run, and pairs of them."""
        pairs = pairs or Found()
        infeasible, running, filtered = sum(self.infeasible.values()), 0, 0
        missed: dict[str, int] = {}
        if chosen is not None:
            runs = chosen.table.runs
            running, filtered = int(runs.sum()), int((runs & ~chosen.meets).sum())
            over = ((chosen.excess > 0) & runs[:, None]).sum(axis=0).tolist()
            missed = {
                name: n + pairs.filtered_by.get(name, 0)
                for name, n in zip(chosen.constraints, over, strict=True)
            }
        return SearchCounts(
            tried=running + infeasible + pairs.tried,
            infeasible=infeasible,
            filtered=filtered + pairs.filtered,
            infeasible_by=MappingProxyType(dict(self.infeasible)),
            filtered_by=MappingProxyType(missed),
        )

    def nothing_runs(self, nearest: Memory | None) -> str:
        """Why no configuration can run, and what comes closest."""
        reasons = "; ".join(self.infeasible)
        if nearest is None or any("cannot hold" in reason for reason in self.infeasible):
            return f"no layout of {self.spec.name} can run on {self.gpus} GPUs: {reasons}"
        capacity = nearest.capacity_bytes / BYTES_PER_GB
        return (
            f"{self.spec.name} does not fit {self.device.name} in any layout on {self.gpus} GPUs; "
            f"the closest needs {_overflow(nearest) / BYTES_PER_GB:.1f} GB more than the "
            f"{capacity:.1f} GB of each GPU at batch {self._batches[0]}; raise --gpus, or lower "
            "--batch or the lengths"
        )

    def nothing_meets(self, chosen: Choice) -> str:
        """Which configuration comes closest to all constraints, and what it misses."""
        table, excess = chosen.table, chosen.excess
        predictions = [p for p in chosen.exact.values() if isinstance(p, Prediction)]
        if not table.runs.any():
            return f"no configuration of {self.spec.name} can run: {'; '.join(self.infeasible)}"
        if chosen.meets.any() and not predictions:
            return (
                f"none of the {len(chosen.exact)} configurations of {self.spec.name} that look the "
                f"best can run: {'; '.join(self.infeasible)}"
            )
        worst = np.where(table.runs, excess.max(axis=1, initial=-np.inf), np.inf)
        row = int(worst.argmin())
        over = []
        for j, (name, limit) in enumerate(chosen.constraints.items()):
            if excess[row, j] > 0:
                value = float(table.values[LIMITED[name][0]][row])
                over.append(missed(name, value, limit))
        parallelism = table.parallelism[table.layout[row]]
        return (
            f"none of {len(table.batch)} configurations of {self.spec.name} meets the constraints; "
            f"the closest is {parallelism.layout}, replicas={parallelism.replicas} at batch "
            f"{table.batch[row]}, which misses {' and '.join(over)}"
        )

    def frontier(self, chosen: Choice, pairs: Found) -> Frontier:
        """The result, once the front is known; with disaggregated layouts, where there are any."""
        configs = scored_configs(chosen, self.pool)
        if pairs.configs:
            configs = placed([*configs, *pairs.configs], chosen.objectives)
        predictions = [c.prediction for c in configs if c.prediction is not None]
        notes = dict.fromkeys(note for p in predictions for note in p.notes)
        if any(p.pp > 1 for p in chosen.table.parallelism):
            notes[_IN_FLIGHT] = None
        if pairs.configs:
            watts = f"{self.link_w:.0f} W a GPU" if self.link_w else "not known, not counted"
            notes[NOTE.format(efficiency=LINK_EFFICIENCY, watts=watts)] = None
        return Frontier(
            spec=self.spec.name,
            source_id=self.spec.source,
            engine=self.engine.name,
            pools=(self.pool,),
            prompt_len=self.workload.prompt_len,
            gen_len=self.workload.gen_len,
            objectives=chosen.objectives,
            constraints=MappingProxyType(dict(chosen.constraints)),
            prices=MappingProxyType(self.prices.given()),
            configs=tuple(self._at_contexts(c) for c in configs),
            counts=self.counts(chosen, pairs),
            table_error=TABLE_ERROR,
            level=LEVEL,
            source=max((p.source for p in predictions), default=Source.ROOFLINE),
            bundles=tuple(dict.fromkeys(b for p in predictions for b in p.bundles)),
            anchors=self.anchors,
            notes=tuple(notes),
            power_limit_w=self.config.power_limit_w,
        )

    def _at_contexts(self, c: ScoredConfig) -> ScoredConfig:
        """The configuration with a decode step at each of the contexts that fits the memory."""
        points = []
        for context in self.contexts if c.exact and c.on_frontier else ():
            lengths = Workload(prompt_len=context - 1, gen_len=2)
            result = self.exactly(c.parallelism, c.batch, (Phase.DECODE,), lengths)
            if isinstance(result, Prediction):
                step, sequences = result.phases[Phase.DECODE], c.batch * c.parallelism.replicas
                low, high = step.interval.energy_j
                points.append(
                    ContextPoint(
                        context_len=context,
                        energy_per_token_j=step.energy_j / sequences,
                        interval_j=(low / sequences, high / sequences),
                        latency_s=step.latency_s,
                    )
                )
        return replace(c, by_context=tuple(points)) if points else c


def missed(constraint: str, value: float, limit: float) -> str:
    """What a configuration misses, in the words and units of the command line."""
    option, unit, factor = LIMIT_OPTIONS[constraint]
    return f"{option} {limit * factor:.4g} with {value * factor:.4g} {unit}"


def _overflow(held: Memory) -> float:
    """Bytes that a worker holds beyond its device's memory; below 0 where there is room."""
    return held.used_bytes - held.capacity_bytes
