"""Prices of the many steps of a simulation, from few that are priced exactly."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energylens.spec.system import Mode, Sequences, Serving, Step

Array = NDArray[np.float64]

StepPricer = Callable[[Sequence[Step]], tuple[Array, Array]]
"""Steps -> their latencies in s and their energies in J over all GPUs, each [steps]."""

_Node = tuple[tuple[int, int, float], ...]
"""(count, new, context) of the sequences of a step."""

_TILE = 64  # matrix kernels take rows by so many: prices may jump where the next tile begins
_FINE_TOKENS = 2048  # up to here a cell is one tile; beyond, an eighth of its tokens at most
_SHORTEST_CONTEXT, _SHORTEST_PREFILL = 64, 16
_RATIOS = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 2.0)


class DecodePrice(NamedTuple):
    """A decode step of some sequences, linear in their mean context from ``low`` to ``high``.

    Latency in s and energy in J are those at ``low``, the slopes are per token of mean context.
    """

    latency_s: float
    latency_slope: float
    energy_j: float
    energy_slope: float
    low: float
    high: float


class PriceTable:
    """Prices of steps: multilinear in cells whose corners are priced exactly when first needed.

    A step is known by its new tokens, its decoding sequences and their mean context. In the tokens,
    a cell is what runs as one captured graph or takes the same tiles of a matrix kernel, and has
    both its ends priced, so that the jumps between cells stay. The chunks of a mixed step count as
    one prompt of as many tokens; what their (query, key) pairs differ by is added at a marginal
    price per pair, for which there is a second table over tokens and pairs.

    Against exact prices of random steps of Llama-3-8B and 70B (`benchmarks/serving_speed.py`),
    latency and energy of decode steps were off by 0.07 % in the mean and 0.6 % at most, of steps
    with one prompt by 0.2 % and 1 %, of steps with prompts of several lengths by 0.6 % and 3 %: an
    exact price takes each length for a kernel of its own.
    """

    def __init__(self, price: StepPricer, *, serving: Serving, longest: int) -> None:
        """A table of ``price``, for contexts of up to ``longest`` tokens."""
        self._price = price
        self._token_ends = _token_ends(serving)
        octaves = _doubled(_SHORTEST_CONTEXT, longest)
        self._contexts = [1.0, *map(float, octaves)]
        self._fine_contexts = [1.0, *sorted(x * n for n in octaves for x in (1.0, 1.5))]
        powers = _doubled(1, serving.max_sequences)
        self._batches = sorted({*powers, *(3 * n // 2 for n in powers if n >= 64)})
        self._prefills = _doubled(_SHORTEST_PREFILL, serving.batch_tokens)
        most = 2 * longest / _SHORTEST_PREFILL + 1
        self._ratios = [*_RATIOS, *(2.0 * n for n in _doubled(2, math.ceil(most / 2)))]
        self._known: dict[_Node, tuple[float, float]] = {}
        self._decode: dict[tuple[int, int], DecodePrice] = {}
        self._mixed: dict[tuple[int, int, int], list[list[float]]] = {}
        self._marginal: dict[tuple[int, int], list[list[float]]] = {}

    @property
    def priced(self) -> int:
        """Steps that were priced exactly so far."""
        return len(self._known)

    def decode(self, batch: int, context: float) -> DecodePrice:
        """Price of a step that only decodes.

        Args:
            batch: sequences.
            context: their mean context, current token included.
        """
        j = _interval(self._fine_contexts, context)
        found = self._decode.get((batch, j))
        if found is None:
            start, end = self._token_cell(batch)
            low, high = self._fine_contexts[j : j + 2]
            corners = self._exactly([((n, 1, c),) for n in (start, end) for c in (low, high)])
            at, slope = _multilinear(corners.reshape(2, 2, 2), (end - start, high - low))
            (latency, energy), (latency_slope, energy_slope) = (
                at + slope * (batch - start)
            ).tolist()
            found = DecodePrice(latency, latency_slope, energy, energy_slope, low, high)
            self._decode[batch, j] = found
        return found

    def mixed(self, prefill: int, pairs: int, batch: int, context: float) -> tuple[float, float]:
        """Latency in s and energy in J of a step that prefills.

        Args:
            prefill: new tokens of all chunks.
            pairs: their (query, key) pairs; see `attention_pairs`.
            batch: sequences that decode beside them.
            context: mean context of those.
        """
        start, end = self._token_cell(prefill + batch)
        k = j = 0
        if batch:
            # Where a cell begins there is room for so many beside a prompt; its last interval of
            # the batch goes on above that.
            most = max(bisect_right(self._batches, start - 1) - 1, 1 if end > 2 else 0)
            k = min(bisect_left(self._batches, batch), most) + 1
            j = _interval(self._contexts, context)
        found = self._mixed.get((end, k, j))
        if found is None:
            found = self._mixed[end, k, j] = self._mixed_cell(start, end, k, j)
        u, v, w = prefill + batch - start, 0, 0.0
        if batch:
            v, w = batch - self._batches[max(k - 2, 0)], context - self._contexts[j]
        latency, energy = (
            a[0] + a[1] * w + v * (a[2] + a[3] * w) + u * (a[4] + a[5] * w + v * (a[6] + a[7] * w))
            for a in found
        )
        extra = pairs - attention_pairs(prefill, prefill)
        if extra:
            per_pair_s, per_pair_j = self._per_pair(prefill, 2.0 * pairs / prefill**2)
            latency += extra * per_pair_s
            energy += extra * per_pair_j
        return latency, energy

    def _mixed_cell(self, start: int, end: int, k: int, j: int) -> list[list[float]]:
        """Coefficients for latency and energy; ``k`` is 0 without, n up to the n-th batch."""
        batches = (self._batches[max(k - 2, 0)], self._batches[k - 1]) if k else (0, 0)
        contexts = self._contexts[j : j + 2]
        nodes: list[_Node] = []
        for tokens in (start, end):
            for batch in batches:
                prompt = max(1, tokens - batch)
                for context in contexts:
                    decoding = ((batch, 1, context),) if batch else ()
                    nodes.append((*decoding, (1, prompt, float(prompt))))
        corners = self._exactly(nodes).reshape(2, 2, 2, 2)
        widths = (end - start, batches[1] - batches[0], contexts[1] - contexts[0])
        coefficients: list[list[float]] = _multilinear(corners, widths).reshape(8, 2).T.tolist()
        return coefficients

    def _per_pair(self, prefill: int, ratio: float) -> tuple[float, float]:
        """Seconds and joules of one more (query, key) pair of the chunks.

        Args:
            prefill: new tokens of the chunks.
            ratio: their pairs over those of one prompt of as many tokens, about.
        """
        prefills, ratios = self._prefills, self._ratios
        prefill = min(max(prefill, prefills[0]), prefills[-1])
        ratio = min(max(ratio, ratios[0]), ratios[-1])
        i, j = _interval(prefills, prefill), _interval(ratios, ratio)
        found = self._marginal.get((i, j))
        if found is None:
            sizes, shapes = prefills[i : i + 2], ratios[j : j + 2]
            corners = np.array([self._marginal_price(p, r) for p in sizes for r in shapes])
            widths = (sizes[1] - sizes[0], shapes[1] - shapes[0])
            found = _multilinear(corners.reshape(2, 2, 2), widths).reshape(4, 2).T.tolist()
            self._marginal[i, j] = found
        u, v = prefill - prefills[i], ratio - ratios[j]
        latency, energy = (a[0] + a[1] * v + u * (a[2] + a[3] * v) for a in found)
        return latency, energy

    def _marginal_price(self, prefill: int, ratio: float) -> Array:
        """Price per pair, [2], of many short prompts or of one late chunk against one prompt."""
        if ratio < 1:
            count = min(round(1 / ratio), prefill // 2)
            new = context = prefill // count
        else:
            count, new, context = 1, prefill, math.ceil((ratio * prefill + prefill - 1) / 2)
        other, one = self._exactly(
            [((count, new, float(context)),), ((1, prefill, float(prefill)),)]
        )
        pairs = count * attention_pairs(new, context) - attention_pairs(prefill, prefill)
        return np.asarray((other - one) / pairs)

    def _exactly(self, nodes: Sequence[_Node]) -> Array:
        """Latency and energy of steps, [nodes, 2]; those not yet known are priced in one call."""
        fresh = [node for node in dict.fromkeys(nodes) if node not in self._known]
        if fresh:
            steps = [
                Step(
                    sequences=tuple(Sequences(count=c, new=n, context=x) for c, n, x in node),
                    mode=Mode.SERVING,
                )
                for node in fresh
            ]
            prices = np.column_stack(self._price(steps)).tolist()
            for node, (latency_s, energy_j) in zip(fresh, prices, strict=True):
                self._known[node] = latency_s, energy_j
        return np.array([self._known[node] for node in nodes])

    def _token_cell(self, tokens: int) -> tuple[int, int]:
        """Fewest and most tokens of the cell of ``tokens``."""
        i = bisect_left(self._token_ends, tokens)
        return self._token_ends[i - 1] + 1 if i else 1, self._token_ends[i]


def attention_pairs(new: int, context: int) -> int:
    """Causal (query, key) pairs of ``new`` tokens, the last of which sees ``context``."""
    return new * context - new * (new - 1) // 2


def _token_ends(serving: Serving) -> list[int]:
    """Most tokens of each cell: the captured sizes, then whole tiles up to the largest step."""
    ends = list(serving.capture_sizes) or _doubled(1, _TILE)
    while ends[-1] < serving.batch_tokens:
        tiles = max(1, ends[-1] // _FINE_TOKENS * _FINE_TOKENS // 8 // _TILE)
        ends.append((ends[-1] // _TILE + tiles) * _TILE)
    return ends


def _doubled(first: int, most: int) -> list[int]:
    """``first``, twice it and so on, at least two of them and up to at least ``most``."""
    values = [first, 2 * first]
    while values[-1] < most:
        values.append(2 * values[-1])
    return values


def _interval(nodes: Sequence[float], value: float) -> int:
    """Which two of the ascending nodes enclose ``value``, the outer ones where none do."""
    return min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)


def _multilinear(corners: Array, widths: Sequence[float]) -> Array:
    """Coefficients of the multilinear function of the offsets from the low corner of a cell.

    Args:
        corners: values at the low and the high end, an axis of 2 for each width, then any.
        widths: of the cell; 0 where both ends are one.
    """
    for axis, width in enumerate(widths):
        low, high = np.take(corners, 0, axis), np.take(corners, 1, axis)
        slope = (high - low) / width if width else np.zeros_like(low)
        corners = np.stack((low, slope), axis)
    return corners
