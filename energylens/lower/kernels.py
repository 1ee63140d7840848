"""From entries to kernels: what a worker executes, collectives and the engine's extras too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from energylens.errors import SpecError, UnsupportedError
from energylens.graph import EinsumCount, Op, count_einsum
from energylens.lower.fuse import Group, groups
from energylens.lower.items import Attention, Experts, Item, Prepare, Rowwise
from energylens.lower.latent import Latent, latent_attention
from energylens.lower.overlap import overlapped, wanted
from energylens.lower.routing import Routing, make_routing
from energylens.lower.shard import Sharding, entry_ranks, product, shard
from energylens.results import Infeasible
from energylens.spec.model import STEP_RANKS, Access, Block, Einsum, Entry, Spec
from energylens.spec.system import Engine, Parallelism, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A model, or a stage of a pipeline, on an engine at one degree of parallelism, for any step.

    Attributes:
        spec, engine, sharding: what was lowered, and how it is split.
        items: what one worker executes, in order.
        blocks: for each item the block of the model that it is of; None where it is of every stage.
        shares: for each item how many of how many repetitions are executed: all, or on a stage
            those of its layers.
        arriving: values of each token that come from the stage before.
    """

    spec: Spec
    engine: Engine
    sharding: Sharding
    items: tuple[Item, ...]
    blocks: tuple[int | None, ...]
    shares: tuple[tuple[int, int], ...]
    arriving: int = 0

    def ops(self, step: Step, worker: int = 0) -> tuple[Op, ...]:
        """The ops that one worker executes in ``step``; a step without sequences has none.

        Args:
            step: sequences of all workers, and launch mode.
            worker: which one, where experts make a difference: the first has the most to do.

        Raises:
            SpecError: the engine has no kernel for an op in this mode.
        """
        if not step.sequences:
            return ()
        own = step.share(self.sharding.dp)
        return tuple(op for i in range(len(self.items)) for op in self._ops(i, own, worker))

    def _ops(self, index: int, own: Step, worker: int) -> Iterator[Op]:
        """Ops of an item; ``own`` is the worker's part of the step."""
        part, whole = self.shares[index]
        for op in self.items[index].ops(self.engine, own, worker):
            yield op if part == whole else replace(op, count=op.count * part // whole)

    def by_worker(self, step: Step) -> tuple[tuple[Op, ...], ...]:
        """The ops of each worker, the fullest first; one entry where all do the same."""
        s = self.sharding
        if s.ep == 1 or not step.sequences:
            return (self.ops(step),)
        own, workers = step.share(s.dp), range(s.tp * s.dp)
        # All but the experts is the same for everyone.
        parts = [
            [tuple(self._ops(i, own, w)) for w in workers]
            if isinstance(item, Experts)
            else [tuple(self._ops(i, own, 0))] * len(workers)
            for i, item in enumerate(self.items)
        ]
        return tuple(tuple(op for part in parts for op in part[w]) for w in workers)

    @property
    def experts(self) -> Experts | None:
        """The first mixture of experts in it, or None; others differ in their count alone."""
        return next((item for item in self.items if isinstance(item, Experts)), None)


def lower_step(
    spec: Spec, engine: Engine, parallelism: Parallelism, step: Step
) -> tuple[Op, ...] | Infeasible:
    """The ops that the worker with the most to do executes in an engine step.

    Args:
        spec: the model.
        engine: whose kernels, fusions and extra copies to use.
        parallelism: degrees; pipeline stages and replicas do not matter here.
        step: the sequences served, and the launch mode.

    Returns:
        Ops in order of execution, named after the entries that they stand for; or why there are
        none.

    Raises:
        SpecError: the engine has no kernel for an entry, or experts cannot be held twice.
        UnsupportedError: an entry or a fusion has a form that no kernel computes.
    """
    lowered = lower(spec, engine, parallelism)
    return lowered if isinstance(lowered, Infeasible) else lowered.ops(step)


def lower(
    spec: Spec,
    engine: Engine,
    parallelism: Parallelism,
    *,
    routing: str | None = None,
    redundant_experts: int = 0,
) -> Lowered | Infeasible:
    """Everything of `lower_step` that does not depend on the step; use it for many steps.

    A pipeline is lowered stage by stage: `energylens.lower.stages.lower_stages`.

    Args:
        spec: the model.
        engine: whose kernels to use.
        parallelism: degrees.
        routing: how tokens choose experts (see `energylens.lower.routing.make_routing`), the
            spec's own way by default.
        redundant_experts: experts that are held twice.

    Raises:
        SpecError: the engine has no kernel for an entry, or a collective cannot run beside what the
            spec names.
        UnsupportedError: an entry or a fusion has a form that no kernel computes.
    """
    sharding = shard(spec, parallelism, experts_only=engine.ep_replicates)
    if isinstance(sharding, Infeasible):
        return sharding
    if sharding.dp > 1 and not engine.dp_dispatch:
        return Infeasible(
            reason=f"engine {engine.name} has no attention data parallelism; use tp, or dp=1"
        )
    if redundant_experts:
        if spec.moe is None:
            raise SpecError(f"{spec.name} has no experts; leave the redundant ones out")
        experts = spec.ranks[spec.moe["rank"]]
        if sharding.ep == 1 or not 0 < redundant_experts <= experts:
            raise SpecError(
                f"{spec.name}: found {redundant_experts} redundant experts with ep={sharding.ep}; "
                f"allowed: 0 to {experts}, and more than 0 with ep above 1"
            )
    walk = _Lowering(spec, engine, sharding, _routing(spec, routing), redundant_experts)
    items, blocks = overlapped(*walk.run(), wanted(spec, parallelism), spec.blocks)
    return Lowered(
        spec=spec,
        engine=engine,
        sharding=sharding,
        items=items,
        blocks=blocks,
        shares=((1, 1),) * len(items),
    )


def _routing(spec: Spec, asked: str | None) -> Routing | None:
    """How tokens choose the experts of ``spec``; None for a dense model."""
    if spec.moe is None:
        if asked is not None:
            raise SpecError(f"{spec.name} has no experts; leave the routing out")
        return None
    annotation = spec.moe.get("routing", "uniform") if asked is None else asked
    return make_routing(annotation, spec.ranks[spec.moe["rank"]], spec.moe["topk"])


@lru_cache(maxsize=4096)
def _count(einsum: Einsum, sizes: tuple[tuple[str, int], ...]) -> EinsumCount:
    return count_einsum(einsum, dict(sizes))


def _count_row(einsum: Einsum, sizes: Mapping[str, int]) -> EinsumCount:
    """Count a contraction for one row: b, s and t are 1."""
    ranks = sorted({r for a in (*einsum.inputs, einsum.output) for r in a.ranks})
    known = {**sizes, **dict.fromkeys(STEP_RANKS, 1)}
    return _count(einsum, tuple((r, known[r]) for r in ranks if r in known))


def _activations(entry: Entry) -> tuple[Access, ...]:
    return tuple(a for a in entry.accesses if not a.is_weight)


def _weights(entry: Entry) -> tuple[Access, ...]:
    return tuple(a for a in entry.accesses if a.is_weight)


def _per(entry: Entry) -> str:
    """Step rank that makes an entry's rows; one that reads weights only is a lookup by token."""
    ranks = {r for a in _activations(entry) for r in a.ranks} or {"s"}
    return next((r for r in ("s", "b") if r in ranks), "")


class _Lowering:
    """One walk over the blocks; knows which tensors are split at each point of it."""

    def __init__(
        self,
        spec: Spec,
        engine: Engine,
        sharding: Sharding,
        routing: Routing | None,
        redundant: int,
    ) -> None:
        self._spec, self._engine, self._sharding = spec, engine, sharding
        self._routing, self._redundant = routing, redundant
        self._items: list[Item] = []
        # By tensor. Named ops name no output: what no einsum wrote is as the last entry was.
        self._is_split: dict[str, bool] = {}
        self._was_split = True
        self._partial: dict[str, Rowwise] = {}  # by tensor: the all-reduce that it needs
        einsums = [e for b in spec.blocks for e in b.cascade if e.einsum is not None]
        self._logits = einsums[-1] if einsums else None

    def run(self) -> tuple[tuple[Item, ...], tuple[int | None, ...]]:
        """The items in order, and the block of each."""
        blocks: list[int | None] = []
        for index, block in enumerate(self._spec.blocks):
            for group in groups(self._spec, self._engine, block):
                splits = [self._enter(e, block) for e in group.members]
                if not all(e.op in self._engine.absorbed for e in group.members):
                    self._kernel(group, block, splits)
                for entry, split in zip(group.members, splits, strict=True):
                    self._leave(entry, block, split)
            self._reduce(*self._partial)
            blocks += [index] * (len(self._items) - len(blocks))
        attention = next((i for i in self._items if isinstance(i, Attention)), None)
        if attention is not None and "prepare" in self._engine.kernels:
            dtype = self._spec.precision.activations
            self._items.insert(0, Prepare(dtype=dtype, head_dim=attention.head_dim))
            blocks.insert(0, None)
        return tuple(self._items), tuple(blocks)

    # -- tensors and collectives

    def _enter(self, entry: Entry, block: Block) -> bool:
        """Whether a worker does only its part of ``entry``: weights decide, else its inputs do.

        Gathers the split inputs of an entry that the engine leaves whole, and reduces partial sums
        that it reads, unless all that it does is to add them up.
        """
        summed = [a.tensor for a in _activations(entry) if a.tensor in self._partial]
        if entry.op == "add" and len(summed) == len(entry.inputs):
            for tensor in summed[1:]:
                del self._partial[tensor]
        else:
            self._reduce(*summed)
        carried = [a for a in _activations(entry) if self._sharding.splits(a.ranks)]
        split_inputs = [a for a in carried if self._is_split.get(a.tensor, self._was_split)]
        weights_split = any(self._sharding.splits(a.ranks) for a in _weights(entry))
        split = bool(weights_split or split_inputs)
        if entry.name in self._engine.tp_replicated:
            split = False
            for access in split_inputs:
                values = product(access.ranks, self._padded)
                gather = self._collective("all_gather", access.tensor, _per(entry), values, block)
                self._items.append(gather)
                self._is_split[access.tensor] = False
        if entry.einsum is not None:
            out = entry.einsum.output
            self._is_split[out.tensor] = split and self._sharding.splits(out.ranks)
        self._was_split = split
        return split

    def _leave(self, entry: Entry, block: Block, split: bool) -> None:
        """The collectives that follow ``entry``: of partial sums, and of the logits."""
        if not split:
            return
        out = self._output_ranks(entry)
        moe, dp = self._spec.moe, self._sharding.dp
        if dp > 1 and moe and moe["rank"] in entry_ranks(entry) - set(out):
            return  # the experts bring their sums back themselves
        if self._sharding.splits(entry_ranks(entry) - set(out)):
            values = product(out, self._sharding.local)
            reduce = self._collective("all_reduce", entry.name, _per(entry), values, block)
            if entry.einsum is None:
                self._items.append(reduce)
            else:
                tensor = entry.einsum.output.tensor
                self._reduce(*({tensor} & set(self._partial)))
                self._partial[tensor] = reduce
        einsum = entry.einsum if entry is self._logits else None
        if einsum is not None and self._engine.gather_logits and self._sharding.splits(out):
            values = product(out, self._padded)
            gather = self._collective("all_gather", entry.name, _per(entry), values, block)
            self._items.append(gather)
            self._is_split[einsum.output.tensor] = False

    def _reduce(self, *tensors: str) -> None:
        """The all-reduces of these partial sums."""
        self._items += [self._partial.pop(tensor) for tensor in tensors]

    def _output_ranks(self, entry: Entry) -> tuple[str, ...]:
        if entry.einsum is not None:
            return entry.einsum.output.ranks
        return (*(r for a in _activations(entry) for r in a.ranks), self._width_rank(entry))

    @property
    def _padded(self) -> Mapping[str, int]:
        """Rank sizes of a tensor that is put together from all workers' parts."""
        s = self._sharding
        return {r: n * s.ways.get(r, 1) for r, n in s.local.items()}

    def _collective(self, kind: str, name: str, per: str, values: float, block: Block) -> Rowwise:
        return Rowwise(
            name=f"{name}_{kind}",
            key=kind,
            dtype=self._spec.precision.activations,
            count=block.repeat,
            per=per,
            scaled={"values": values},
            fixed={"workers": self._sharding.tp},
        )

    # -- kernels

    def _kernel(self, group: Group, block: Block, splits: Sequence[bool]) -> None:
        contracts_context = [
            e.einsum is not None and any("t" in a.ranks for a in e.einsum.inputs)
            for e in group.members
        ]
        if sum(contracts_context) > 1:
            self._items.append(self._attention(group, block, splits[0]))
        elif self._routing is not None and any(e.op == "topk" for e in group.members):
            self._items.append(self._experts(group, block, splits[-1], self._routing))
        elif any("t" in entry_ranks(e) for e in group.members):
            raise SpecError(
                f"{self._spec.name}: engine {self._engine.name} has no kernel for {group.name!r} "
                "alone; fuse attention, e.g. `fusion: [[scores, softmax, context]]` in the spec"
            )
        elif all(e.einsum is not None for e in group.members):
            self._items.append(self._gemm(group, block, splits))
        elif all(e.op is not None for e in group.members):
            self._items.append(self._named(group, block, splits))
        else:
            raise UnsupportedError(
                f"{self._spec.name}: engine {self._engine.name} has no kernel for {group.name!r}, "
                "contractions and named ops in one; take them apart in `fusion`"
            )

    def _gemm(self, group: Group, block: Block, splits: Sequence[bool]) -> Rowwise:
        """Contractions of one input with one weight each, side by side as one GEMM."""
        n, shared, stored = 0.0, set(), {self._spec.stored(e) for e in group.members}
        for entry, split in zip(group.members, splits, strict=True):
            einsum = entry.einsum
            assert einsum is not None  # chosen by `_kernel`
            c = _count_row(einsum, self._sharding.sizes(split))
            if c.input_values != c.m * c.k or c.weight_values != c.k * c.n:
                raise UnsupportedError(
                    f"{self._spec.name}: {entry.name!r} ({einsum}) is not a GEMM of one input and "
                    "one weight, the only contraction that there is a kernel for"
                )
            n += c.n
            shared.add((_activations(entry), c.m, c.k))
        if len(shared) > 1 or len(stored) > 1:
            raise UnsupportedError(
                f"{self._spec.name}: {group.name!r} cannot be one GEMM, its members read different "
                "inputs or are stored differently; take them apart in `fusion`"
            )
        ((_, m, k),), (dtype,) = shared, stored
        return Rowwise(
            name=group.name,
            key=self._hint(group) or "einsum",
            dtype=dtype,
            count=block.repeat,
            per=_per(group.members[0]),
            scaled={"m": m},
            fixed={"n": n, "k": k},
        )

    def _experts(self, group: Group, block: Block, split: bool, routing: Routing) -> Experts:
        """Top-k, the chosen experts' products and their sum as one kernel."""
        moe = self._spec.moe
        down = group.members[-1].einsum
        assert moe is not None  # there is a routing
        if down is None or moe["rank"] not in down.reduced:
            raise UnsupportedError(
                f"{self._spec.name}: the experts {group.name!r} must end with a contraction over "
                f"rank {moe['rank']!r}, which adds up what the chosen experts say"
            )
        sizes = self._sharding.sizes(split)
        return Experts(
            name="experts",
            dtype=self._spec.stored(group.members[-1]),
            count=block.repeat,
            rank=moe["rank"],
            routing=routing,
            topk=moe["topk"],
            ways=self._sharding.ep,
            redundant=self._redundant,
            workers=self._sharding.tp * self._sharding.dp,
            dp=self._sharding.dp,
            width=product(down.output.ranks, sizes),
            hidden=product((r for r in down.reduced if r != moe["rank"]), sizes),
        )

    def _named(self, group: Group, block: Block, splits: Sequence[bool]) -> Rowwise:
        """Named ops over the rows of their first input; heads are counted from the first two."""
        entry, sizes = group.members[-1], self._sharding.sizes(splits[-1])
        width = self._width_rank(entry)
        heads = [product((r for r in a.ranks if r != width), sizes) for a in _activations(entry)]
        return Rowwise(
            name=group.name,
            key=self._hint(group) or "+".join(e.op for e in group.members if e.op),
            dtype=self._spec.precision.activations,
            count=block.repeat,
            per=_per(entry),
            scaled={"rows": heads[0] if heads else 1},
            fixed={
                "width": product((width,), sizes),
                "q_heads": heads[0] if heads else 0,
                "kv_heads": heads[1] if len(heads) > 1 else 0,
                "head_dim": product((width,), sizes),
            },
        )

    def _width_rank(self, entry: Entry) -> str:
        """The rank that a named op works along: the last of its weight, else of its first input."""
        accesses = _weights(entry) or _activations(entry)
        if not accesses or not accesses[0].ranks:
            raise SpecError(f"{self._spec.name}: {entry.name!r} reads nothing with ranks; add `in`")
        return accesses[0].ranks[-1]

    def _attention(self, group: Group, block: Block, split: bool) -> Attention | Latent:
        """Scores, softmax and context as one kernel."""
        name = "attention" if block.window is None else "window_attention"
        before = [i for i in self._items if isinstance(i, Attention | Latent)]
        if any(i.name == name and i.count == block.repeat for i in before):
            name = f"{block.name}_{name}"  # see `step_shape`: a step is known by its attention
        scores = group.members[0]
        if _weights(scores):
            if block.window is not None:
                raise UnsupportedError(
                    f"{self._spec.name}: there is no kernel for latent attention with a window "
                    f"({group.name!r}); remove `window`"
                )
            sizes = self._sharding.sizes(split)
            return latent_attention(self._spec, group, block, sizes, name)
        einsum = scores.einsum
        if einsum is None or len(einsum.inputs) != 2 or scores.mask != "causal":
            raise UnsupportedError(
                f"{self._spec.name}: attention {group.name!r} must start with a contraction of "
                "queries and keys with `mask: causal`, the only one that there is a kernel for"
            )
        query, key = sorted(einsum.inputs, key=lambda a: "t" in a.ranks)
        sizes = self._sharding.sizes(split)
        head = einsum.reduced
        kv_heads = product((r for r in key.ranks if r not in head), sizes)
        head_dim = product(head, sizes)
        cache = [e for e in block.cascade if e.cache]
        cached_values = sum(product(self._output_ranks(e), sizes) for e in cache)
        if cache and cached_values != 2 * kv_heads * head_dim:
            raise UnsupportedError(
                f"{self._spec.name}: the cache holds {cached_values} values per token and layer; "
                f"there are kernels only for keys and values of {kv_heads} x {head_dim} each"
            )
        return Attention(
            name=name,
            window=block.window,
            kernel=self._hint(group),
            dtype=self._spec.precision.kv_cache,
            count=block.repeat,
            q_heads=product((r for r in query.ranks if r not in head), sizes),
            kv_heads=kv_heads,
            head_dim=head_dim,
            cached=bool(cache),
        )

    def _hint(self, group: Group) -> str | None:
        """The kernel that a fusion asks for, where the engine has one of that name."""
        return group.kernel if group.kernel in self._engine.kernels else None
