"""All batches of one layout at once: few steps priced exactly, lines between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from energylens.lower import Lowered
from energylens.lower.overlap import Overlapped
from energylens.machine import Machine, StepSums
from energylens.predict import request_contexts
from energylens.spec.system import Mode, Parallelism, Phase, Sequences, Step, Workload, chunked

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

_TILE, _FINE_BATCH = 64, 2048  # cells above the captured sizes: one tile, from here an eighth more
_CONTEXT_RATIO = 1.5  # of two contexts with a line between them, at most
# Different last steps of prefills that are priced one by one; of more, so many: of those of up to
# so many tokens, whose prices jump with the captured sizes and the tiles, and of the longer ones.
_FINE_TOKENS, _FINE_STEPS, _LONG_STEPS = 2048, 128, 32


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parts:
    """How batches are split into parts that are in the stages of a pipeline at a time, [batches].

    ``larger`` parts of ``large`` sequences, the rest of the ``count`` of ``small`` ones.
    """

    count: IntArray
    larger: IntArray
    large: IntArray
    small: IntArray

    @classmethod
    def of(cls, batches: IntArray, stages: int) -> _Parts:
        """One part for each stage, where there are as many sequences."""
        count = np.minimum(batches, stages)
        small, larger = np.divmod(batches, count)
        return cls(count=count, larger=larger, large=small + (larger > 0), small=small)

    @property
    def sizes(self) -> IntArray:
        """All sizes of parts, ascending."""
        return np.unique(np.concatenate((self.large, self.small)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """One layout; its steps are priced once.

    Each batch is in as many parts as the pipeline has stages: what a server under steady load has
    in flight.
    """

    stages: tuple[Lowered, ...]
    sums: StepSums
    machine: Machine
    parallelism: Parallelism
    workload: Workload

    def values(self, batches: IntArray) -> dict[str, Array]:
        """The values of each batch by name, each [batches]."""
        parts = _Parts.of(batches, len(self.stages))
        prefill_s, prefill_j = self._prefill(parts)
        nodes = request_contexts(self.workload)
        contexts = [*(context for _, context in nodes), self.workload.decode_context]
        decode_s, decode_j = self._decode(parts, contexts)
        counts = np.array([steps for steps, _ in nodes])
        request_s = prefill_s + decode_s[:, :-1] @ counts
        request_j = prefill_j + decode_j[:, :-1] @ counts
        step_s, step_j = decode_s[:, -1], decode_j[:, -1]
        replicas, gpus = self.parallelism.replicas, self.parallelism.gpus
        values = {
            "energy_per_token_j": step_j / batches,
            "energy_per_request_j": request_j / batches,
            "energy_per_prompt_j": prefill_j / batches,
            "ttft_s": prefill_s,
            "ttlt_s": request_s,
            "total_power_w": replicas * np.maximum(prefill_j / prefill_s, step_j / step_s),
            "gpus": np.full(len(batches), float(gpus)),
            "gpu_s_per_request": gpus * request_s / (replicas * batches),
        }
        if self.workload.gen_len > 1:
            tpot_s = (request_s - prefill_s) / (self.workload.gen_len - 1)
            values["tpot_s"] = tpot_s
            values["throughput_tokens_s"] = replicas * batches / tpot_s
            values["throughput_per_gpu_tokens_s"] = replicas * batches / tpot_s / gpus
            values["gpu_s_per_token"] = gpus * tpot_s / (replicas * batches)
        return values

    def _mode(self, phase: Phase) -> Mode:
        return self.stages[0].engine.modes.get(phase, Mode.EAGER)

    @cached_property
    def _jumps(self) -> tuple[int, ...]:
        """Tokens of a worker above which the price of a step jumps.

        Steps are no captured graphs any more, or collectives run beside GEMMs.
        """
        captured = self.stages[0].engine.captured_tokens
        found = {i.most_in_turns for s in self.stages for i in s.items if isinstance(i, Overlapped)}
        return tuple(sorted(found | {captured} if captured else found))

    @cached_property
    def _waiting_w(self) -> Array:
        """What each stage draws while it waits, [stages]."""
        return np.array([w.idle_w + w.above_idle_w for w in self.machine.waiting])

    def _price(self, steps: Sequence[Step], *, lone: bool = False) -> Array:
        """Seconds and joules of each step, [steps, stages, 2]; equal steps are priced once."""
        if not steps:
            return np.empty((0, len(self.stages), 2))
        distinct = {step: i for i, step in enumerate(dict.fromkeys(steps))}
        found = self.machine.price(self.sums, self.stages, list(distinct), lone=lone)
        prices = np.stack(found, axis=-1)
        return prices[[distinct[step] for step in steps]]

    # -- decode

    def _decode(self, parts: _Parts, contexts: Sequence[float]) -> tuple[Array, Array]:
        """Seconds and joules of one token of each sequence at each context, [batches, contexts].

        The parts go round and round through the stages; see `energylens.pipeline.period`.
        """
        sizes = parts.sizes
        seconds, joules = self._decode_turns(sizes, contexts)
        large, small = np.searchsorted(sizes, parts.large), np.searchsorted(sizes, parts.small)
        more = parts.larger[:, None, None]
        rest = (parts.count - parts.larger)[:, None, None]
        busy = more * seconds[large] + rest * seconds[small]
        latency = np.maximum(busy.max(axis=2), seconds[large].sum(axis=2))
        working = (more * joules[large] + rest * joules[small]).sum(axis=2)
        return latency, working + (latency[..., None] - busy) @ self._waiting_w

    def _decode_turns(self, sizes: IntArray, contexts: Sequence[float]) -> tuple[Array, Array]:
        """Seconds and joules of a step of so many sequences, each [sizes, contexts, stages].

        Linear between the smallest and the largest size that was asked for of each cell.
        """
        mode, dp = self._mode(Phase.DECODE), self.parallelism.dp
        serving = self.stages[0].engine.serving
        shares = -(-sizes // dp)
        table = mode is Mode.SERVING and serving is not None
        ends = _cell_ends(serving.capture_sizes if serving else (), int(shares.max()))
        if len(self.stages) > 1:  # one of the stages may stop waiting for the host in between
            ends = sorted({*ends, *((a + b) // 2 for a, b in pairwise([0, *ends]))} - {0})
        ends = sorted({*ends, *self._jumps})
        cells = np.searchsorted(ends, shares) if table else shares
        _, cell = np.unique(cells, return_inverse=True)
        low = np.full(cell.max() + 1, np.iinfo(np.int64).max)
        high = np.zeros_like(low)
        np.minimum.at(low, cell, shares)
        np.maximum.at(high, cell, shares)
        nodes = _nodes(contexts) if table else list(dict.fromkeys(contexts))
        steps = [
            Step.decode(int(n) * dp, c, mode) for n in np.concatenate((low, high)) for c in nodes
        ]
        prices = self._price(steps).reshape(2, len(low), len(nodes), len(self.stages), 2)
        at_low, at_high = prices
        width = np.maximum(high - low, 1)[cell]
        weight = ((shares - low[cell]) / width)[:, None, None, None]
        by_node = at_low[cell] * (1.0 - weight) + at_high[cell] * weight
        lines = np.array([np.interp(contexts, nodes, row) for row in np.eye(len(nodes))])
        turns = np.moveaxis(by_node, 1, -1) @ lines
        return np.moveaxis(turns[:, :, 0], -1, 1), np.moveaxis(turns[:, :, 1], -1, 1)

    # -- prefill

    def _prefill(self, parts: _Parts) -> tuple[Array, Array]:
        """Seconds and joules of the prefill, each [batches].

        The chunks of one part after the other pass the stages; see `energylens.pipeline.makespan`.
        """
        mode, length = self._mode(Phase.PREFILL), self.workload.prompt_len
        serving, sizes = self.stages[0].engine.serving, parts.sizes
        largest = Step.prefill(int(sizes.max()), length, mode)
        limit = largest.tokens
        if mode is Mode.SERVING and serving is not None:
            limit = serving.offline_batch_tokens * self.parallelism.dp
        # All but the last step of a part are those that a larger one begins with.
        full = self._price(chunked(largest, limit)[:-1])
        before = -(-sizes * length // limit) - 1
        last = [
            _remainder(int(n), length, int(done) * limit, mode)
            for n, done in zip(sizes, before, strict=True)
        ]
        ends = np.zeros((2, len(sizes), len(self.stages), 2))  # of following, and of lone ones
        one_step = before[np.searchsorted(sizes, parts.small)] == 0
        alone = np.asarray((parts.count == 1) & one_step)
        for lone in (False, True):
            some = alone if lone else ~alone
            own = np.searchsorted(sizes, np.unique((parts.large[some], parts.small[some])))
            ends[int(lone), own] = self._last_steps([last[i] for i in own], lone=lone)
        done = np.zeros((len(parts.count), len(self.stages)))
        busy, working = np.zeros_like(done), np.zeros(len(parts.count))
        for part in range(len(self.stages)):
            own = np.searchsorted(sizes, np.where(part < parts.larger, parts.large, parts.small))
            chunks: IntArray = np.where(part < parts.count, before[own] + 1, 0)
            last_one = ends[alone.astype(int), own]
            for i in range(int(chunks.max())):
                turns = np.where(np.equal(chunks, i + 1)[:, None, None], last_one, 0.0)
                if i < len(full):
                    turns = np.where(np.greater(chunks, i + 1)[:, None, None], full[i], turns)
                busy += turns[..., 0]
                working += turns[..., 1].sum(axis=1)
                arrived = np.zeros(len(done))
                for stage in range(len(self.stages)):
                    arrived = np.maximum(done[:, stage], arrived) + turns[:, stage, 0]
                    done[:, stage] = arrived
        latency = done[:, -1]
        return latency, working + (latency[:, None] - busy) @ self._waiting_w

    def _last_steps(self, steps: Sequence[Step], *, lone: bool) -> Array:
        """Seconds and joules, [steps, stages, 2]; of many different ones, linear in the tokens."""
        # A worker's share makes the price: steps that have it in common stand for each other.
        shares = [step.share(self.parallelism.dp) for step in steps]
        standing = dict(zip(shares, steps, strict=True))
        distinct = sorted(standing, key=lambda s: (s.tokens, len(s.sequences), s.batch))
        fine = [s for s in distinct if s.tokens <= _FINE_TOKENS]
        nodes = [*_some(fine, _FINE_STEPS), *_some(distinct[len(fine) :], _LONG_STEPS)]
        for jump in self._jumps:
            above = bisect_right(distinct, jump, key=lambda s: s.tokens)
            nodes += distinct[max(0, above - 1) : above + 1]
        priced = set(nodes)
        nodes = [s for s in distinct if s in priced]
        if len(nodes) == len(distinct):
            return self._price([standing[s] for s in shares], lone=lone)
        prices = self._price([standing[s] for s in nodes], lone=lone)
        known, asked = [s.tokens for s in nodes], [s.tokens for s in shares]
        columns = prices.reshape(len(nodes), -1).T
        lines = np.column_stack([np.interp(asked, known, column) for column in columns])
        return lines.reshape(len(steps), *prices.shape[1:])


def _some(steps: Sequence[Step], most: int) -> list[Step]:
    """At most so many of the steps, evenly, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[i] for i in np.linspace(0, len(steps) - 1, most).round().astype(int)]


def _remainder(batch: int, length: int, done: int, mode: Mode) -> Step:
    """The step that ends the prefill of ``batch`` prompts after ``done`` of their tokens."""
    whole, part = divmod(done, length)
    left = batch - whole - (1 if part else 0)
    groups = [Sequences(count=1, new=length - part, context=length)] if part else []
    if left:
        groups.append(Sequences(count=left, new=length, context=length))
    return Step(sequences=tuple(groups), mode=mode)


def _cell_ends(captured: Sequence[int], most: int) -> list[int]:
    """Largest batch of each cell: the captured sizes, then whole tiles, up to at least ``most``.

    Powers of two are cells of their own: calibrations measure them, and what was measured may lie
    beside the fit of all else.
    """
    ends = list(captured)
    while not ends or ends[-1] < most:
        last = ends[-1] if ends else 0
        tiles = max(1, last // _FINE_BATCH * _FINE_BATCH // 8 // _TILE)
        end = (last // _TILE + tiles) * _TILE
        ends += [end - 1, end] if end & (end - 1) == 0 else [end]
    return ends


def _nodes(contexts: Sequence[float]) -> list[float]:
    """Contexts from the least to the greatest, none too far from the next."""
    low, high = min(contexts), max(contexts)
    if low == high:
        return [low]
    count = int(np.ceil(np.log(high / low) / np.log(_CONTEXT_RATIO))) + 1
    nodes: list[float] = np.geomspace(low, high, max(count, 2)).tolist()
    return [low, *nodes[1:-1], high]
