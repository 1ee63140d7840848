"""Latent attention: the cache holds one vector per token, of which all heads are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from energylens.errors import UnsupportedError
from energylens.graph import Op
from energylens.lower.fuse import Group, engine_op
from energylens.lower.shard import product
from energylens.spec.model import Block, Spec
from energylens.spec.system import Engine, Sequences, Step
from energylens.units import bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention, and what is written to the cache before it, per group of sequences.

    A prefill lifts the latent vectors of its context to keys and values of each head. A decode step
    moves the lift of the keys to the query and that of the values behind the weighted sum (the
    absorbed form), so that all heads attend to the latent vectors as they are cached.

    Attributes:
        dtype: of the cache; lift: of the weights that lift; carried: of activations.
        heads: on a worker; latent, shared_key: cached values of a token, the same for all heads.
        key_dim, value_dim: of a head, the shared part of the key aside.
    """

    name: str
    dtype: str
    lift: str
    carried: str
    count: int
    heads: int
    latent: int
    shared_key: int
    key_dim: int
    value_dim: int

    @property
    def unpacked_bytes(self) -> float:
        """Memory for the lift as the absorbed form needs it, where it is stored in another form."""
        if self.lift == self.carried:
            return 0.0
        values = self.count * self.heads * self.latent * (self.key_dim + self.value_dim)
        return values * bytes_per_value(self.carried)

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """The ops of one step, the same on every worker."""
        for group in step.sequences:
            yield from self._group(engine, step, group)

    def _group(self, engine: Engine, step: Step, group: Sequences) -> Iterator[Op]:
        def op(key: str, name: str, dtype: str, sizes: Mapping[str, float]) -> Op:
            return engine_op(
                engine, step.mode, key, sizes, name=name, dtype=dtype, count=self.count
            )

        rows, heads, latent = group.count * group.new, self.heads, self.latent
        width = latent + self.shared_key
        yield op("latent_append", "kv_append", self.dtype, {"rows": rows, "width": width})
        seen = {"batch": group.count, "new": group.new, "context": group.context, "heads": heads}
        if group.new > 1:
            lifted = heads * (self.key_dim + self.value_dim)
            tokens = group.count * group.context
            yield op("einsum", "lift", self.lift, {"m": tokens, "n": lifted, "k": latent})
            key_dim = self.key_dim + self.shared_key
            sizes = {**seen, "key_dim": key_dim, "value_dim": self.value_dim}
            yield op("latent_prefill", self.name, self.carried, sizes)
            return

        def lift(name: str, n: int, k: int) -> Op:
            sizes = {"heads": heads, "m": rows, "n": n, "k": k}
            return op("batched_einsum", name, self.carried, sizes)

        yield lift("lift_query", latent, self.key_dim)
        sizes = {**seen, "latent": latent, "shared_key": self.shared_key}
        yield op("latent_decode", self.name, self.dtype, sizes)
        yield lift("lift_value", self.value_dim, latent)


def latent_attention(
    spec: Spec, group: Group, block: Block, sizes: Mapping[str, int], name: str
) -> Latent:
    """Lifts of keys and values, scores, softmax and context as one item.

    Args:
        spec: the model.
        group: the members: a contraction of the cached vector with a weight for the keys, one for
            the values, scores with the lifted keys and with those that are cached as they are.
        block: that they stand in.
        sizes: of each rank on a worker.
        name: of the attention.

    Raises:
        UnsupportedError: they are no such attention.
    """
    contractions = [e for e in group.members if e.einsum is not None]
    lifts = [e for e in contractions if any(a.is_weight for a in e.accesses)]
    scores = [e.einsum for e in contractions if e.mask == "causal" and e.einsum is not None]
    read = {a.tensor for s in scores for a in s.inputs}
    keys = [e for e in lifts if e.einsum is not None and e.einsum.output.tensor in read]
    values = [e for e in lifts if e not in keys]
    if len(keys) != 1 or len(values) != 1 or spec.stored(keys[0]) != spec.stored(values[0]):
        raise UnsupportedError(
            f"{spec.name}: latent attention {group.name!r} needs one lift of the cached vector to "
            f"keys and one to values, stored alike; found {len(keys)} and {len(values)}"
        )
    key, value = keys[0].einsum, values[0].einsum
    assert key is not None and value is not None  # they were chosen for their contractions
    own = next(s for s in scores if key.output.tensor in {a.tensor for a in s.inputs})
    latent, key_dim = product(key.reduced, sizes), product(own.reduced, sizes)
    shared_key = sum(product(s.reduced, sizes) for s in scores if s is not own)
    cached = sum(
        product(e.einsum.output.ranks, sizes)
        for e in block.cascade
        if e.cache and e.einsum is not None
    )
    if cached != latent + shared_key or value.reduced != key.reduced:
        raise UnsupportedError(
            f"{spec.name}: the cache holds {cached} values per token and layer, and latent "
            f"attention {group.name!r} reads {latent} + {shared_key} of one vector"
        )
    heads = product(key.output.ranks, sizes) // key_dim
    return Latent(
        name=name,
        dtype=spec.precision.kv_cache,
        lift=spec.stored(keys[0]),
        carried=spec.precision.activations,
        count=block.repeat,
        heads=heads,
        latent=latent,
        shared_key=shared_key,
        key_dim=key_dim,
        value_dim=product(value.output.ranks, sizes) // heads,
    )
