"""What a worker executes once the step is known: kernels by rows, attention, experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from energylens.graph import Op
from energylens.lower.fuse import engine_op
from energylens.lower.routing import Routing, WorkerLoad, worker_loads
from energylens.spec.system import Engine, Mode, Sequences, Step


class Item(Protocol):
    """Part of a lowered model that becomes ops once the step is known."""

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """The ops of one step on one worker, the one with the most to do being the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rowwise:
    """A kernel whose work grows with the rows of the step.

    Attributes:
        per: step rank that makes the rows: ``s`` (all new tokens, padded to the next captured size
            where the engine does that), ``b`` (sequences), ``""`` (one).
        scaled: sizes per row; fixed: sizes that do not depend on the step.
    """

    name: str
    key: str
    dtype: str
    count: int
    per: str
    scaled: Mapping[str, float]
    fixed: Mapping[str, float]

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """See `Item.ops`."""
        tokens = _padded_tokens(engine, step)
        rows = {"s": tokens, "b": step.batch, "": 1}[self.per]
        sizes = dict(self.fixed)
        for dim, per_row in self.scaled.items():
            sizes[dim] = rows * per_row
        if len({s.new for s in step.sequences}) == 1 and tokens == step.tokens:
            sizes["batch"], sizes["new"] = step.batch, step.sequences[0].new
        else:  # a mixed or padded step: all tokens as one sequence
            sizes["batch"], sizes["new"] = 1, tokens
        name, dtype, count = self.name, self.dtype, self.count
        yield engine_op(engine, step.mode, self.key, sizes, name=name, dtype=dtype, count=count)


@lru_cache(maxsize=256)
def moved(kind: str, dtype: str, values: float, workers: int, count: int) -> Item:
    """``count`` tensors of so many values a token that go between the stages of a pipeline."""
    return Rowwise(
        name=f"stage_{kind}",
        key=kind,
        dtype=dtype,
        count=count,
        per="s",
        scaled={"values": values},
        fixed={"workers": workers},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention and what is done to the cache before it, per group of sequences.

    With a ``window``, a token sees no more than so many tokens.
    """

    name: str
    kernel: str | None
    dtype: str
    count: int
    q_heads: int
    kv_heads: int
    head_dim: int
    cached: bool
    window: int | None

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """See `Item.ops`."""
        for group in step.sequences:
            yield from self._group(engine, step.mode, group)

    def _group(self, engine: Engine, mode: Mode, group: Sequences) -> Iterator[Op]:
        def op(key: str, name: str, kv_heads: int) -> Op:
            sizes = {
                "batch": group.count,
                "new": group.new,
                "context": group.context,
                "q_heads": self.q_heads,
                "kv_heads": kv_heads,
                "head_dim": self.head_dim,
                "rows": group.count * group.new,
                "width": kv_heads * self.head_dim,
            }
            if self.window is not None:
                sizes["window"] = self.window
            return engine_op(
                engine, mode, key, sizes, name=name, dtype=self.dtype, count=self.count
            )

        decode = group.new == 1
        kv_heads = self.kv_heads
        if self.cached and "kv_append" in engine.kernels:
            yield op("kv_append", "kv_append", kv_heads)
        if decode and mode in engine.repeat_kv and kv_heads < self.q_heads:
            yield op("repeat_kv", "repeat_kv", kv_heads)
            kv_heads = self.q_heads
        key = "attention" if self.window is None else "window"
        key = f"{key}_decode" if decode else f"{key}_prefill"
        yield op(self.kernel or key, self.name, kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer, from the router's logits (or, by the engine, its input) to the sum.

    Attributes:
        rank: of the experts in the spec.
        routing, topk: how tokens choose.
        ways: workers over which whole experts are spread.
        redundant: experts that are held twice.
        workers, dp: that the experts are spread over or sliced between; parts of the batch.
        width, hidden: of a token, and of one expert's slice on a worker.
    """

    name: str
    dtype: str
    count: int
    rank: str
    routing: Routing
    topk: int
    ways: int
    redundant: int
    workers: int
    dp: int
    width: int
    hidden: int

    def loads(self, engine: Engine, step: Step) -> tuple[WorkerLoad, ...]:
        """Expected load of each group of workers in their ``step``, the fullest first."""
        tokens = self.dp * _padded_tokens(engine, step)
        return worker_loads(self.routing, self.topk, tokens, self.ways, self.redundant)

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """One kernel with the worker's load, between the collectives of data parallelism."""
        loads = self.loads(engine, step)
        load = loads[worker % len(loads)]
        tokens = self.dp * _padded_tokens(engine, step)
        sizes: dict[str, float] = {
            "tokens": tokens,
            "topk": self.topk,
            "experts": load.experts,
            "rows": load.rows,
            "active": load.active,
            "largest": load.largest,
            "width": self.width,
            "hidden": self.hidden,
        }
        dtype, count = self.dtype, self.count

        def op(key: str, name: str, sizes: Mapping[str, float]) -> Op:
            return engine_op(engine, step.mode, key, sizes, name=name, dtype=dtype, count=count)

        def moved(kind: str) -> Mapping[str, float]:
            # Everyone gets all tokens, or each pair goes to where its expert is.
            pairs = tokens // self.dp * self.topk if kind == "all_to_all" else tokens
            return {"values": pairs * self.width, "workers": self.workers}

        if self.dp > 1:
            there = engine.dp_dispatch[0]
            yield op(there, f"dispatch_{there}", moved(there))
        yield op("moe", self.name, sizes)
        if self.dp > 1:
            back = engine.dp_dispatch[1]
            yield op(back, f"combine_{back}", moved(back))


def _padded_tokens(engine: Engine, step: Step) -> int:
    """Rows of a step's token-wise kernels: its new tokens, or those of the next captured graph."""
    if step.mode is Mode.SERVING and engine.serving is not None:
        return engine.serving.padded(step.tokens)
    return step.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """What a step prepares once for all layers."""

    dtype: str
    head_dim: int

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """See `Item.ops`."""
        group = step.sequences[0]
        sizes = {
            "batch": group.count,
            "new": group.new,
            "context": group.context,
            "head_dim": self.head_dim,
        }
        yield engine_op(
            engine, step.mode, "prepare", sizes, name="prepare", dtype=self.dtype, count=1
        )
