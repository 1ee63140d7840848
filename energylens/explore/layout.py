"""All batches of one layout at once: few steps priced exactly, lines between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from energylens.lower import Lowered
from energylens.predict import Machine, request_contexts
from energylens.spec.system import Mode, Parallelism, Phase, Sequences, Step, Workload, chunked

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

_TILE, _FINE_BATCH = 64, 2048  # cells above the captured sizes: one tile, from here an eighth more
_CONTEXT_RATIO = 1.5  # of two contexts with a line between them, at most
# Different last steps of prefills that are priced one by one; of more, so many: of those of up to
# so many tokens, whose prices jump with the captured sizes and the tiles, and of the longer ones.
_FINE_TOKENS, _FINE_STEPS, _LONG_STEPS = 2048, 128, 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """One layout; its steps are priced once."""

    lowered: Lowered
    machine: Machine
    parallelism: Parallelism
    workload: Workload

    def values(self, batches: IntArray) -> dict[str, Array]:
        """The values of each batch by name, each [batches]."""
        prefill_s, prefill_j = self._prefill(batches)
        nodes = request_contexts(self.workload)
        contexts = [*(context for _, context in nodes), self.workload.decode_context]
        decode_s, decode_j = self._decode(batches, contexts)
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
        return self.lowered.engine.modes.get(phase, Mode.EAGER)

    def _price(self, steps: Sequence[Step], *, lone: bool = False) -> Array:
        """Seconds and joules of each step, [steps, 2]; equal steps are priced once."""
        if not steps:
            return np.empty((0, 2))
        distinct = {step: i for i, step in enumerate(dict.fromkeys(steps))}
        prices = np.column_stack(
            [a[:, 0] for a in self.machine.price((self.lowered,), list(distinct), lone=lone)]
        )
        return prices[[distinct[step] for step in steps]]

    # -- decode

    def _decode(self, batches: IntArray, contexts: Sequence[float]) -> tuple[Array, Array]:
        """Seconds and joules of a step at each context, each [batches, contexts].

        Linear between the smallest and the largest batch that was asked for of each cell.
        """
        mode, dp = self._mode(Phase.DECODE), self.parallelism.dp
        serving = self.lowered.engine.serving
        shares = -(-batches // dp)
        table = mode is Mode.SERVING and serving is not None
        ends = _cell_ends(serving.capture_sizes if serving else (), int(shares.max()))
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
        prices = self._price(steps).reshape(2, len(low), len(nodes), 2)
        at_low, at_high = prices @ np.eye(2)
        width = np.maximum(high - low, 1)[cell]
        weight = ((shares - low[cell]) / width)[:, None, None]
        by_node = at_low[cell] * (1.0 - weight) + at_high[cell] * weight
        lines = np.array([np.interp(contexts, nodes, row) for row in np.eye(len(nodes))])
        return by_node[..., 0] @ lines, by_node[..., 1] @ lines

    # -- prefill

    def _prefill(self, batches: IntArray) -> tuple[Array, Array]:
        """Seconds and joules of the prefill, each [batches]."""
        mode, length = self._mode(Phase.PREFILL), self.workload.prompt_len
        serving, most = self.lowered.engine.serving, int(batches.max())
        whole = Step.prefill(most, length, mode)
        if mode is not Mode.SERVING or serving is None:
            steps = [Step.prefill(int(b), length, mode) for b in batches]
            prices = self._price(steps, lone=True)
            return prices[:, 0], prices[:, 1]
        limit = serving.offline_batch_tokens * self.parallelism.dp
        # All but the last step of a batch are those that a larger one begins with.
        full = self._price(chunked(whole, limit)[:-1])
        begun = np.concatenate((np.zeros((1, 2)), full.cumsum(axis=0)))
        before = -(-batches * length // limit) - 1
        last = [
            _remainder(int(b), length, int(n) * limit, mode)
            for b, n in zip(batches, before, strict=True)
        ]
        prices = begun[before]
        for lone in (True, False):
            own = np.flatnonzero((before == 0) == lone)
            prices[own] += self._last_steps([last[i] for i in own], lone=lone)
        return prices[:, 0], prices[:, 1]

    def _last_steps(self, steps: Sequence[Step], *, lone: bool) -> Array:
        """Seconds and joules, [steps, 2]; of many different ones, linear in the tokens of some."""
        # A worker's share makes the price: steps that have it in common stand for each other.
        shares = [step.share(self.parallelism.dp) for step in steps]
        standing = dict(zip(shares, steps, strict=True))
        distinct = sorted(standing, key=lambda s: (s.tokens, len(s.sequences), s.batch))
        fine = [s for s in distinct if s.tokens <= _FINE_TOKENS]
        nodes = [*_some(fine, _FINE_STEPS), *_some(distinct[len(fine) :], _LONG_STEPS)]
        if len(nodes) == len(distinct):
            return self._price([standing[s] for s in shares], lone=lone)
        prices = self._price([standing[s] for s in nodes], lone=lone)
        known = [s.tokens for s in nodes]
        return np.column_stack(
            [np.interp([s.tokens for s in shares], known, column) for column in prices.T]
        )


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
