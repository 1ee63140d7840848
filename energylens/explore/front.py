"""Which configurations no other one beats, and which of them are still to be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from energylens.explore.prices import Prices
from energylens.results import Infeasible, Prediction
from energylens.results.search import Pool, ScoredConfig
from energylens.spec.system import Parallelism, Phase

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

OBJECTIVES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "energy_per_token": ("energy_per_token_j", 1),
        "energy_per_request": ("energy_per_request_j", 1),
        "energy_per_prompt": ("energy_per_prompt_j", 1),
        "ttft": ("ttft_s", 1),
        "tpot": ("tpot_s", 1),
        "throughput": ("throughput_tokens_s", -1),
        "throughput_per_gpu": ("throughput_per_gpu_tokens_s", -1),
        "gpus": ("gpus", 1),
        "cost_per_token": ("cost_per_million_tokens", 1),
        "cost_per_request": ("cost_per_request", 1),
        "carbon_per_token": ("carbon_per_million_tokens_g", 1),
        "carbon_per_request": ("carbon_per_request_g", 1),
    }
)
"""Objective -> the value that it looks at, and 1 where less is better, -1 where more is."""

TABLE_ERROR = 0.02
"""Relative error of the first stage. Seen in `benchmarks/explore_speed.py` and in sweeps of single
decode steps and prefills: 1.7 % at most (one step of a long generation), 0.1 % in the mean."""

_CHUNK_ROWS = 256  # of a comparison of all with the front
_TIE_DECIMALS = 9  # of the logarithms of objectives: below is rounding, e.g. of steps at host time
_REFUSED_ROUNDS = 5  # times the limit: rows that may turn out unable to run, e.g. at a power limit

LIMITED = {
    "max_ttft_s": ("ttft_s", 1),
    "max_tpot_s": ("tpot_s", 1),
    "max_power_w": ("total_power_w", 1),
    "min_throughput_tokens_s": ("throughput_tokens_s", -1),
}
"""Constraint -> the value that it limits, and 1 where from above, -1 where from below."""


def excess(values: Mapping[str, ArrayLike], limits: Mapping[str, float]) -> dict[str, Array]:
    """By how much each constraint is missed, as a logarithm: above 0 where it is."""
    columns = [(name, *LIMITED[name], limit) for name, limit in limits.items()]
    return {name: sign * np.log(np.asarray(values[v]) / limit) for name, v, sign, limit in columns}


def pareto(costs: Array) -> BoolArray:
    """Which rows of ``costs``, [rows, objectives], no other row dominates; less is better."""
    order = np.lexsort(costs.T[::-1])  # a row can only be dominated by one before it
    front = np.empty(0, dtype=np.int64)
    for start in range(0, len(order), _CHUNK_ROWS):
        rows = order[start : start + _CHUNK_ROWS]
        rows = rows[_dominators(costs[rows], costs[front]) < 0]
        rows = rows[_dominators(costs[rows], costs[rows]) < 0]
        front = np.concatenate((front, rows))
    return np.isin(np.arange(len(costs)), front)


def _dominators(costs: Array, front: Array) -> IntArray:
    """For each row of ``costs`` the first row of ``front`` that dominates it, -1 where none."""
    found = np.full(len(costs), -1)
    for start in range(0, len(costs) if len(front) else 0, _CHUNK_ROWS):
        rows = costs[start : start + _CHUNK_ROWS]
        as_good = np.ones((len(rows), len(front)), dtype=np.bool_)
        better = np.zeros_like(as_good)
        for column, others in zip(rows.T, front.T, strict=True):
            as_good &= others <= column[:, None]
            better |= others < column[:, None]
        as_good &= better
        found[start : start + len(rows)] = np.where(as_good.any(axis=1), as_good.argmax(axis=1), -1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All configurations that fit, with the best numbers known: ``values`` by name, each [rows]."""

    parallelism: tuple[Parallelism, ...]
    layout: IntArray
    batch: IntArray
    values: Mapping[str, Array]
    runs: BoolArray
    """False where the exact prediction says that it cannot."""

    def other_ways(self, row: int) -> IntArray:
        """Rows that only differ from ``row`` in how their all-reduces run."""
        own = replace(self.parallelism[self.layout[row]], overlap=None)
        same = np.array([replace(p, overlap=None) == own for p in self.parallelism])
        same_batch = self.batch == self.batch[row]
        return np.flatnonzero(same[self.layout] & same_batch & (np.arange(len(self.batch)) != row))


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The front of a table, and what is still to be predicted before it is known."""

    table: Table
    objectives: tuple[str, ...]
    constraints: Mapping[str, float]
    limit: int
    prices: Prices = Prices()
    exact: dict[int, Prediction | Infeasible] = field(default_factory=dict)

    @property
    def costs(self) -> Array:
        """Logarithms of the objectives, [rows, objectives]; less is better, equal is a tie."""
        columns = [OBJECTIVES[name] for name in self.objectives]
        return _logs([(self.table.values[v], sign) for v, sign in columns])

    @property
    def excess(self) -> Array:
        """By how much each constraint is missed, [rows, constraints]: above 0 where it is."""
        rows = list(excess(self.table.values, self.constraints).values())
        return np.column_stack(rows) if rows else np.empty((len(self.table.batch), 0))

    @property
    def meets(self) -> BoolArray:
        """Rows that run and keep every constraint."""
        return self.table.runs & (self.excess <= 0).all(axis=1)

    @property
    def front(self) -> IntArray:
        """Rows of the front, the best by the first objective first."""
        rows, costs = np.flatnonzero(self.meets), self.costs
        found = rows[pareto(costs[rows])]
        return found[np.lexsort(costs[found].T[::-1])]

    @property
    def known(self) -> list[int]:
        """Rows that are predicted exactly and keep every constraint."""
        meets = self.meets
        return [row for row, p in self.exact.items() if isinstance(p, Prediction) and meets[row]]

    def next_rows(self) -> list[int]:
        """Rows to predict exactly next: candidates for the front, as many as the limit allows.

        Rows that turned out unable to run do not count, within reason.
        """
        refused = sum(isinstance(p, Infeasible) for p in self.exact.values())
        if refused > _REFUSED_ROUNDS * self.limit:
            return []
        room, costs = self.limit + refused - len(self.exact), self.costs
        front = self.front
        front = front[~np.isin(front, list(self.exact))]
        if len(front) > room:  # of too many, those that look the best
            return self._spread(costs, front, room)
        error = np.full(len(self.table.batch), np.log1p(TABLE_ERROR))
        error[list(self.exact)] = 0.0
        by_objective = np.array([OBJECTIVES[name][0] != "gpus" for name in self.objectives])
        margin = error[:, None] * by_objective
        excess, runs = self.excess, self.table.runs
        may = np.flatnonzero(runs & (excess <= error[:, None]).all(axis=1))
        surely = np.flatnonzero(runs & (excess <= -error[:, None]).all(axis=1))
        worst = (costs + margin)[surely]
        worst = worst[pareto(worst)]
        candidates = may[_dominators((costs - margin)[may], worst) < 0]
        fresh = candidates[~np.isin(candidates, list(self.exact))]
        order = np.argsort(costs[fresh, 0], kind="stable")
        return [int(row) for row in fresh[order][: max(room, 0)]]

    def _spread(self, costs: Array, fresh: IntArray, room: int) -> list[int]:
        """The best by each objective, then always the one farthest from all that are known."""
        if room < 1:  # what looks like the best is always known exactly, within reason
            rows = np.flatnonzero(self.meets)
            best = {
                min(rows.tolist(), key=lambda row: _by_one(costs, row, j))
                for j in range(costs.shape[1])
                if rows.size
            }
            return sorted(best - set(self.exact)) if room > -self.limit else []
        done = [row for row, p in self.exact.items() if isinstance(p, Prediction)]
        bests = (
            [] if done else [int(fresh[costs[fresh, j].argmin()]) for j in range(costs.shape[1])]
        )
        picked = list(dict.fromkeys(bests))[:room]
        scale = np.ptp(costs[fresh], axis=0)
        points = costs / np.where(scale > 0, scale, 1.0)
        away = np.full(len(fresh), np.inf)
        for row in [*done, *picked]:
            away = np.minimum(away, np.abs(points[fresh] - points[row]).max(axis=1))
        while len(picked) < room:
            i = int(away.argmax())
            picked.append(int(fresh[i]))
            away = np.minimum(away, np.abs(points[fresh] - points[fresh[i]]).max(axis=1))
        return picked


def scored_configs(chosen: Choice, pool: Pool) -> tuple[ScoredConfig, ...]:
    """All rows that run, with their places."""
    table, excess, constraints = chosen.table, chosen.excess, tuple(chosen.constraints)
    names = list(table.values)
    values = np.column_stack([table.values[n] for n in names]).tolist()
    configs = []
    for i in np.flatnonzero(table.runs).tolist():
        found = chosen.exact.get(i)
        prediction = found if isinstance(found, Prediction) else None
        exact = exact_values(prediction, chosen.prices) if prediction else {}
        parallelism, batch = table.parallelism[table.layout[i]], int(table.batch[i])
        configs.append(
            ScoredConfig(
                id=config_id(parallelism, pool.gpus, batch),
                parallelism=parallelism,
                batch=batch,
                pool=pool,
                values=MappingProxyType(dict(zip(names, values[i], strict=True))),
                intervals=MappingProxyType({n: (lo, hi) for n, (_, lo, hi) in exact.items()}),
                exact=prediction is not None,
                filtered_by=tuple(n for j, n in enumerate(constraints) if excess[i, j] > 0),
                prediction=prediction,
            )
        )
    return placed(configs, chosen.objectives)


def config_id(parallelism: Parallelism, gpus: int, batch: int) -> str:
    """``tp2-ep1-dp1-b8``; with ``-x3`` where there might be more replicas."""
    layout = parallelism.layout.replace(", ", "-").replace("=", "")
    most = gpus // parallelism.replica_gpus
    fewer = f"-x{parallelism.replicas}" if parallelism.replicas < most else ""
    return f"{layout}{fewer}-b{batch}"


def placed(configs: Sequence[ScoredConfig], objectives: Sequence[str]) -> tuple[ScoredConfig, ...]:
    """The configurations with their places among those that meet the constraints."""
    columns = [OBJECTIVES[name] for name in objectives]
    costs = _logs([([c.values[v] for c in configs], sign) for v, sign in columns])
    rows = np.flatnonzero([not c.filtered_by for c in configs])
    ranks = np.zeros(len(configs), dtype=np.int64)
    ranks[rows[np.lexsort(costs[rows].T[::-1])]] = np.arange(1, len(rows) + 1)
    front = rows[pareto(costs[rows])]
    front = front[np.lexsort(costs[front].T[::-1])]
    dominators = np.full(len(configs), -1)
    dominators[rows] = _dominators(costs[rows], costs[front])
    on_front = np.isin(np.arange(len(configs)), front)
    marks = _marks(configs, [row for row in rows.tolist() if configs[row].exact], costs, objectives)
    return tuple(
        replace(
            c,
            on_frontier=bool(on_front[i]),
            rank=int(ranks[i]) or None,
            dominated_by=configs[front[dominators[i]]].id if dominators[i] >= 0 else None,
            best_of=marks[i][0] if i in marks else (),
            tied_on=marks[i][1] if i in marks else (),
        )
        for i, c in enumerate(configs)
    )


def _logs(columns: Sequence[tuple[ArrayLike, int]]) -> Array:
    """Logarithms of values, [rows, columns]; less is better, equal is a tie."""
    return np.column_stack([sign * np.log(v) for v, sign in columns]).round(_TIE_DECIMALS)


def _marks(
    configs: Sequence[ScoredConfig], exact: Sequence[int], costs: Array, objectives: Sequence[str]
) -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Row -> objectives by which it is the best of the exact ones, and by which it ties with it."""
    best: dict[int, list[str]] = {row: [] for row in exact}
    tied: dict[int, list[str]] = {row: [] for row in exact}
    for j, name in enumerate(objectives if exact else ()):
        winner = min(exact, key=lambda row: _by_one(costs, row, j))
        best[winner].append(name)
        value = OBJECTIVES[name][0]
        if value not in configs[winner].intervals:
            continue
        low, high = configs[winner].intervals[value]
        for row in exact:
            own_low, own_high = configs[row].intervals[value]
            if row != winner and own_low <= high and low <= own_high:
                tied[row].append(name)
    return {row: (tuple(best[row]), tuple(tied[row])) for row in exact}


def _by_one(costs: Array, row: int, j: int) -> tuple[float, ...]:
    """Key of an order by objective ``j``, then by the others, so that the first is on the front."""
    return (float(costs[row, j]), *costs[row].tolist(), row)


def exact_values(p: Prediction, prices: Prices = Prices()) -> dict[str, tuple[float, float, float]]:
    """Value and interval ends by name, as the first stage names them."""
    prefill, decode, request = (p.phases[phase] for phase in Phase)
    replicas, batch, gpus = p.parallelism.replicas, p.workload.batch, p.parallelism.gpus
    sequences = batch * replicas
    found: dict[str, tuple[float, float, float]] = {}
    for name, phase in (("token", decode), ("request", request), ("prompt", prefill)):
        low, high = phase.interval.energy_j
        found[f"energy_per_{name}_j"] = (
            phase.energy_j / sequences,
            low / sequences,
            high / sequences,
        )
    for name, phase in (("ttft_s", prefill), ("ttlt_s", request)):
        found[name] = (phase.latency_s, *phase.interval.latency_s)
    watts = [phase.mean_power_w * gpus for phase in (prefill, decode)]
    found["total_power_w"] = (max(watts),) * 3
    found["gpus"] = (float(gpus),) * 3
    first, middle, last = (gpus * seconds / sequences for seconds in found["ttlt_s"])
    found["gpu_s_per_request"] = first, middle, last
    if p.workload.gen_len > 1:
        # A request is its prefill and its decode steps, and so are the ends of its interval.
        ttft, ttlt = found["ttft_s"], found["ttlt_s"]
        tpot_s, low, high = (
            (b - a) / (p.workload.gen_len - 1) for a, b in zip(ttft, ttlt, strict=True)
        )
        found["tpot_s"] = tpot_s, low, high
        rates = sequences / tpot_s, sequences / high, sequences / low
        found["throughput_tokens_s"] = rates
        found["throughput_per_gpu_tokens_s"] = rates[0] / gpus, rates[1] / gpus, rates[2] / gpus
        found["gpu_s_per_token"] = gpus / rates[0], gpus / rates[2], gpus / rates[1]
    costs = prices.values({name: np.array(ends) for name, ends in found.items()})
    return found | {name: tuple(ends.tolist()) for name, ends in costs.items()}
