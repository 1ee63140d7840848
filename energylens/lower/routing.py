"""Which experts tokens choose, and what that loads on each worker.

A routing is the popularity of each expert. Of it follow, for a step of ``T`` tokens that choose
``k`` experts each, without replacement,

* the probability ``q`` that a token chooses an expert: successive sampling by popularity ``p``
  takes the experts whose exponential clocks of rate ``p`` ring first, so ``q = 1 - exp(-p tau)``
  with ``tau`` such that the ``q`` add up to ``k``; for equal popularity that is ``k / E`` exactly;
* distinct experts that any token chose: the sum of ``1 - (1 - q)**T``;
* pairs on a worker: normal with mean ``T sum(q)`` over its experts, and the expected maximum over
  the workers is what a step waits for;
* rows of the fullest expert: the expected maximum of as many nearly normal counts.

A trace knows more than popularity: which tokens come together. Its loads are counted over windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energylens.errors import SpecError

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

DRAWS = 8  # popularities that are averaged over: every layer has its own
WINDOWS = 32  # of a trace
_ALWAYS = 1.0 - 1e-9  # how often an expert is chosen that every token was seen to choose
_GRID = np.linspace(-9.0, 9.0, 181)  # standard deviations around the largest mean


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Expected load of one worker in one layer.

    Attributes:
        experts: that it holds.
        rows: (token, expert) pairs among them; active: those with any; largest: rows of the
            fullest.
    """

    experts: int
    rows: float
    active: float
    largest: float


@dataclass(frozen=True, eq=False)
class Routing:
    """How tokens are spread over the experts of a model.

    Attributes:
        name: as it is written on a command line, e.g. ``zipf:1.2``.
        popularity: of each expert, adding up to 1, [draws, experts].
        trace: ids of the experts that consecutive tokens chose, [tokens, topk], or None.
    """

    name: str
    popularity: Array
    trace: IntArray | None = None

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.popularity.shape[1])


def make_routing(
    annotation: Mapping[str, Any] | str, experts: int, topk: int, seed: int = 0
) -> Routing:
    """A routing from a spec's annotation, or from ``kind[:parameter]`` as on a command line.

    Kinds: ``uniform``; ``zipf:alpha``; ``dirichlet:c``; ``histogram:FILE`` with one number of
    tokens per expert a line (several columns: one for each layer); ``trace:FILE`` with the ids of
    one token's experts a line.

    Args:
        annotation: what was asked for.
        experts: of a layer.
        topk: experts of a token.
        seed: of the popularities that are drawn.

    Raises:
        SpecError: unknown kind, a parameter that cannot be, or a file that does not fit the model.
    """
    if isinstance(annotation, str):
        kind, _, parameter = annotation.partition(":")
    else:
        kind = str(annotation["kind"])
        parameter = str(next((v for k, v in annotation.items() if k != "kind"), ""))
    name = f"{kind}:{parameter}" if parameter else kind
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        if parameter:
            raise SpecError(f"routing {name!r}: uniform has no parameter")
        popularity = np.full((1, experts), 1.0 / experts)
    elif kind == "zipf":
        ranks = np.arange(1, experts + 1, dtype=np.float64)
        weights = ranks ** -_number(name, parameter)
        popularity = rng.permuted(np.tile(weights / weights.sum(), (DRAWS, 1)), axis=1)
    elif kind == "dirichlet":
        popularity = rng.dirichlet(np.full(experts, _number(name, parameter)), size=DRAWS)
    elif kind == "histogram":
        popularity = _popularity(_histogram(_path(name, parameter), experts), topk)
    elif kind == "trace":
        trace = _trace(_path(name, parameter), experts, topk)
        counts = np.bincount(trace.ravel(), minlength=experts).astype(np.float64)
        return Routing(name, _popularity(counts[None, :], topk), trace)
    else:
        raise SpecError(
            f"unknown routing {name!r}; allowed: uniform, zipf:ALPHA, dirichlet:C, histogram:FILE, "
            "trace:FILE"
        )
    return Routing(name, popularity)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SpecError(f"routing {name!r}: found {text or 'nothing'!r}; allowed: a number above 0")
    return value


def _path(name: str, text: str) -> Path:
    if not text:
        raise SpecError(f"routing {name!r}: found 'nothing'; allowed: the name of a file")
    return Path(text)


def _rows(path: Path) -> list[tuple[int, list[float]]]:
    """Line number and numbers of each line that holds any."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as text ({error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].replace(",", " ").split()
        try:
            values = [float(word) for word in text]
        except ValueError:
            raise SpecError(f"{path}:{number}: found {line.strip()!r}; allowed: numbers") from None
        if values:
            rows.append((number, values))
    return rows


def _histogram(path: Path, experts: int) -> Array:
    rows = _rows(path)
    if len(rows) != experts:
        raise SpecError(
            f"{path}: {len(rows)} lines with numbers, and the model has {experts} experts"
        )
    width = len(rows[0][1])
    for number, values in rows:
        if len(values) != width:
            raise SpecError(
                f"{path}:{number}: {len(values)} columns, and the first line has {width}"
            )
        for value in values:
            if not 0 <= value < math.inf:
                raise SpecError(f"{path}:{number}: found {value:g}; allowed: numbers from 0 on")
    counts = np.array([values for _, values in rows]).T
    if (counts.sum(axis=1) <= 0).any():
        raise SpecError(f"{path}: a column without any token")
    return counts


def _trace(path: Path, experts: int, topk: int) -> IntArray:
    rows = _rows(path)
    if not rows:
        raise SpecError(f"{path}: no token; one line of {topk} expert ids for each")
    for number, values in rows:
        ids = [int(v) if math.isfinite(v) else -1 for v in values]
        if len(ids) != topk or len(set(ids)) != topk or ids != values:
            raise SpecError(f"{path}:{number}: a token needs {topk} different expert ids")
        if min(ids) < 0 or max(ids) >= experts:
            raise SpecError(
                f"{path}:{number}: expert id {max(ids) if max(ids) >= experts else min(ids)}; "
                f"allowed: 0 to {experts - 1}"
            )
    return np.array([values for _, values in rows], dtype=np.int64)


def _popularity(counts: Array, topk: int) -> Array:
    """Popularity by which tokens choose as often as was counted, both [draws, experts].

    What was counted is how often an expert was chosen, at most once by a token: the inverse of
    `inclusion`.
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    chosen = np.array([_at_most_once(own, topk) for own in shares])
    rates = -np.log1p(-np.minimum(chosen, _ALWAYS))
    return np.asarray(rates / rates.sum(axis=1, keepdims=True))


def _at_most_once(shares: Array, topk: int) -> Array:
    """Shares scaled to add up to ``topk`` with none above 1; what is cut off goes to the others."""
    full = np.zeros(len(shares), dtype=bool)
    while full.sum() < topk < len(shares):
        rest = np.where(full, 0.0, shares)
        if rest.sum() == 0.0:  # fewer experts were counted than a token chooses
            rest = np.where(full, 0.0, 1.0)
        scaled = np.where(full, 1.0, rest * (topk - full.sum()) / rest.sum())
        if (scaled <= 1.0).all():
            return scaled
        full |= scaled > 1.0
    return np.where(full, 1.0, 0.0) if full.any() else np.ones(len(shares))


def inclusion(popularity: Array, topk: int) -> Array:
    """Probability that a token chooses each expert, [experts]; they add up to ``topk``."""
    chosen = popularity > 0
    left = topk - int(chosen.sum())
    if left >= 0:  # all of these, and others as they come
        rest = len(popularity) - int(chosen.sum())
        return np.where(chosen, 1.0, min(left / max(rest, 1), 1.0))
    rates = np.log(popularity, where=chosen, out=np.full(len(popularity), -np.inf))
    low, high = 0.0, 800.0  # log(tau): the smallest popularity that a float holds is exp(-745)
    with np.errstate(over="ignore"):
        for _ in range(64):
            middle = (low + high) / 2
            enough = -np.expm1(-np.exp(rates + middle)).sum() >= topk
            low, high = (low, middle) if enough else (middle, high)
        return np.asarray(-np.expm1(-np.exp(rates + high)))


def placement(loads: Array, workers: int, *, balanced: bool = False) -> list[IntArray]:
    """Experts of each worker, as even as they divide, from the load of each expert.

    In order, as vLLM and transformers place them; or balanced, as vLLM does where it holds experts
    twice: the next popular one goes to the worker that has the least to do.
    """
    in_order = np.array_split(np.arange(len(loads)), workers)
    if not balanced:
        return in_order
    held: list[list[int]] = [[] for _ in in_order]
    totals = [0.0] * workers
    for expert in np.argsort(-loads, kind="stable").tolist():
        free = (w for w in range(workers) if len(held[w]) < len(in_order[w]))
        least = min(free, key=totals.__getitem__)
        held[least].append(expert)
        totals[least] += float(loads[expert])
    return [np.array(own, dtype=np.int64) for own in held]


@lru_cache(maxsize=4096)
def worker_loads(
    routing: Routing, topk: int, tokens: int, workers: int, redundant: int = 0
) -> tuple[WorkerLoad, ...]:
    """Expected loads of the workers of an expert-parallel group in one layer, the fullest first.

    Args:
        routing: popularity of the experts.
        topk: experts of a token.
        tokens: of the step.
        workers: over which whole experts are spread; 1: one worker has them all.
        redundant: experts that are held twice, the most popular ones, their tokens shared.
    """
    if routing.trace is not None:
        seen = min(tokens, len(routing.trace))  # a longer step goes on like the trace
        counts = _window_counts(routing.trace, seen, routing.experts) * (tokens / seen)
        counts = _doubled(counts, redundant, whole=True)
        held = placement(counts.mean(axis=0), workers, balanced=redundant > 0)
        return _counted(counts, held)
    per_draw = [
        _expected(q, tokens, held) for q, held in _spread(routing, topk, workers, redundant)
    ]
    return tuple(
        WorkerLoad(
            experts=max(w.experts for w in loads),
            rows=float(np.mean([w.rows for w in loads])),
            active=float(np.mean([w.active for w in loads])),
            largest=float(np.mean([w.largest for w in loads])),
        )
        for loads in zip(*per_draw, strict=True)
    )


@lru_cache(maxsize=256)
def _spread(
    routing: Routing, topk: int, workers: int, redundant: int
) -> tuple[tuple[Array, list[IntArray]], ...]:
    """For each popularity: how often a token chooses each expert, and who holds which."""
    found = []
    for popularity in routing.popularity:
        q = _doubled(inclusion(popularity, topk)[None, :], redundant)[0]
        found.append((q, placement(q, workers, balanced=redundant > 0)))
    return tuple(found)


def _doubled(values: Array, redundant: int, *, whole: bool = False) -> Array:
    """Share the largest columns of [draws, experts] between themselves and a copy each."""
    if not redundant:
        return values
    hottest = np.argsort(-values.mean(axis=0), kind="stable")[:redundant]
    copies = values[:, hottest] / 2
    if whole:
        copies = np.floor(copies)
    out = values.copy()
    out[:, hottest] -= copies
    return np.concatenate((out, copies), axis=1)


def _expected(q: Array, tokens: int, held: list[IntArray]) -> tuple[WorkerLoad, ...]:
    """Loads by the closed forms of the module, from the probability of each expert."""
    means = tokens * np.array([q[own].sum() for own in held])
    order = np.argsort(-means, kind="stable")
    rows = means[order]
    if len(held) > 1:
        # Workers' pairs add up to a constant: equal ones vary as independent values do around the
        # mean of these, so that their maximum exceeds the mean by what that of independent ones
        # does.
        variances = tokens * np.array([(q[own] * (1 - q[own])).sum() for own in held])
        most = min(_expected_maximum(means, variances), float(tokens * len(held[order[0]])))
        most = max(most, float(rows[0]))
        rest = rows[1:].sum()
        left = max(means.sum() - most, 0.0)  # rounding may leave a little less than nothing
        rows = np.concatenate(([most], rows[1:] * left / rest if rest else rows[1:]))
    # The fullest worker is so for what tokens chose: as if they had chosen its experts more often.
    return tuple(
        _one(q[held[i]] * (float(r) / means[i] if means[i] else 0.0), float(r), tokens)
        for i, r in zip(order, rows, strict=True)
    )


def _one(q: Array, rows: float, tokens: int) -> WorkerLoad:
    """Load of a worker with ``rows`` pairs; ``q``: how often a token chooses its experts."""
    q = np.minimum(q, 1.0)
    active = float((1 - (1 - q) ** tokens).sum())
    # Half a row between whole counts and the normal curve through them.
    fullest = _expected_maximum(tokens * q, tokens * q * (1 - q)) + 0.5
    return WorkerLoad(
        experts=len(q),
        rows=rows,
        active=active,
        largest=min(max(fullest, rows / active if active else 0.0), float(tokens), rows),
    )


def _expected_maximum(means: Array, variances: Array) -> float:
    """Expected maximum of independent normal values, by quadrature; of equal ones, exactly them."""
    widest = math.sqrt(float(variances.max(initial=0.0)))
    if widest == 0.0:
        return float(means.max())
    at = means.max() + widest * _GRID
    sd = np.sqrt(np.maximum(variances, 1e-12 * widest**2))
    z = (at[:, None] - means[None, :]) / sd[None, :]
    below = np.exp(np.log(np.maximum(_normal_cdf(z), 1e-300)).sum(axis=1))
    step = at[1] - at[0]
    return float(at[-1] - step * (below[:-1] + below[1:]).sum() / 2)


def _normal_cdf(z: Array) -> Array:
    """Standard normal distribution by a rational approximation (Abramowitz & Stegun 26.2.17)."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    tail = (
        np.exp(-(z**2) / 2)
        / math.sqrt(2 * math.pi)
        * t
        * (
            0.319381530
            + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
        )
    )
    return np.where(z > 0, 1.0 - tail, tail)


def _window_counts(trace: IntArray, tokens: int, experts: int) -> Array:
    """Rows of each expert in windows of consecutive tokens, [windows, experts]."""
    starts = np.unique(np.linspace(0, len(trace) - tokens, WINDOWS).astype(int))
    return np.array(
        [np.bincount(trace[s : s + tokens].ravel(), minlength=experts) for s in starts],
        dtype=np.float64,
    )


def _counted(counts: Array, held: list[IntArray]) -> tuple[WorkerLoad, ...]:
    """Mean loads over counted windows, the workers sorted in each of them."""
    rows = np.array([counts[:, own].sum(axis=1) for own in held]).T  # [windows, workers]
    active = np.array([(counts[:, own] > 0).sum(axis=1) for own in held]).T
    largest = np.array([counts[:, own].max(axis=1) for own in held]).T
    order = np.argsort(-rows, axis=1, kind="stable")
    sizes = np.array([len(own) for own in held])
    return tuple(
        WorkerLoad(
            experts=int(sizes[order[:, i]].max()),
            rows=float(np.take_along_axis(rows, order[:, i : i + 1], 1).mean()),
            active=float(np.take_along_axis(active, order[:, i : i + 1], 1).mean()),
            largest=float(np.take_along_axis(largest, order[:, i : i + 1], 1).mean()),
        )
        for i in range(len(held))
    )


def sampled_loads(
    routing: Routing, topk: int, tokens: int, workers: int, *, draws: int, rng: np.random.Generator
) -> tuple[WorkerLoad, ...]:
    """`worker_loads` by drawing the experts of every token, the slow and obvious way."""
    counts = []
    for i in range(draws):
        popularity = routing.popularity[i % len(routing.popularity)]
        with np.errstate(divide="ignore"):
            keys = np.log(popularity) + rng.gumbel(size=(tokens, routing.experts))
        chosen = np.argpartition(-keys, topk - 1, axis=1)[:, :topk]
        counts.append(np.bincount(chosen.ravel(), minlength=routing.experts))
    found = np.array(counts, dtype=np.float64)
    return _counted(found, placement(found[0], workers))
