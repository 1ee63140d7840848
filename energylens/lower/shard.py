"""How tensor parallelism splits the ranks of a model, and which degrees it allows.

``parallelism: {tp: [g, r, f, v]}`` names the ranks in order of preference. Those of them that occur
together in one entry form a *chain*: the first takes as much of the degree as it can, the next what
is left. So with 4 KV heads (g) and 8 query heads for each (r), a degree of 8 splits g 4 ways and r
2 ways; entries that carry only g (the K and V projections) are then replicated on pairs of workers,
as engines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from energylens.errors import SpecError
from energylens.results import Infeasible
from energylens.spec.model import STEP_RANKS, Entry, Spec
from energylens.spec.system import Parallelism

VOCABULARY = "v"
"""The rank that is padded up where a degree does not divide it; every other rank must divide."""

Chain = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How one configuration splits a model.

    Attributes:
        tp, ep, dp: tensor-, expert- and attention-data-parallel degrees.
        ways: rank -> number of parts; ranks that stay whole are absent.
        whole, local: size of each rank in the model, and on one worker.
    """

    tp: int
    ways: Mapping[str, int]
    whole: Mapping[str, int]
    local: Mapping[str, int]
    ep: int = 1
    dp: int = 1

    def splits(self, ranks: Iterable[str]) -> bool:
        """True where at least one of ``ranks`` is split."""
        return any(r in self.ways for r in ranks)

    def sizes(self, split: bool) -> Mapping[str, int]:
        """Rank sizes of an entry that is split, or that stays whole on each worker."""
        return self.local if split else self.whole


def product(ranks: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Values per row of a tensor: the product of its ranks, those that the step sizes aside.

    Raises:
        SpecError: a rank has no size.
    """
    try:
        return math.prod(sizes[r] for r in ranks if r not in STEP_RANKS)
    except KeyError as e:
        raise SpecError(f"rank {e} has no size; add it to `ranks`") from None


def entry_ranks(entry: Entry) -> set[str]:
    """Every rank that an entry reads or writes."""
    ranks = {r for a in entry.accesses for r in a.ranks}
    return ranks | set(entry.einsum.output.ranks) if entry.einsum is not None else ranks


def shard(
    spec: Spec, parallelism: Parallelism, *, experts_only: bool = False
) -> Sharding | Infeasible:
    """Split a model over the workers of a pipeline stage.

    Expert parallelism of degree ``ep`` regroups all ``tp * dp`` workers for the experts: each holds
    whole ones (as even as they divide), sliced ``tp * dp / ep`` ways. All else is split ``tp``
    ways, and ``dp`` groups of workers have parts of the batch.

    Args:
        spec: the model.
        parallelism: degrees.
        experts_only: True where an engine that spreads experts leaves all else whole.

    Returns:
        The sharding, or why there is none and which degrees there are.

    Raises:
        SpecError: two chains of the spec ask for different splits of one rank.
    """
    tp, ep, dp = parallelism.tp, parallelism.ep, parallelism.dp
    if dp > 1 and spec.moe is None:
        return Infeasible(
            reason=f"{spec.name}: dp={dp} of a dense model are {dp} independent copies; use "
            f"replicas={dp}"
        )
    if ep > 1 or dp > 1:
        return _shard_experts(spec, parallelism, experts_only)
    if tp > 1 and not spec.parallelism.get("tp"):
        return Infeasible(reason=f"{spec.name} names no ranks that tp may split; use tp=1")
    ways: dict[str, int] = {}
    for chain in _chains(spec):
        split = _split(chain, spec.ranks, tp)
        if split is None:
            return Infeasible(reason=_explain(spec, chain, tp))
        for rank, parts in split.items():
            if ways.setdefault(rank, parts) != parts:
                raise SpecError(
                    f"{spec.name}: tp={tp} would split rank {rank!r} {ways[rank]} ways and {parts} "
                    "ways; reorder the ranks of `parallelism.tp`"
                )
    ways = {r: n for r, n in ways.items() if n > 1}
    local = {r: -(-size // ways.get(r, 1)) for r, size in spec.ranks.items()}
    return Sharding(tp=tp, ways=ways, whole=spec.ranks, local=local)


def _shard_experts(
    spec: Spec, parallelism: Parallelism, experts_only: bool
) -> Sharding | Infeasible:
    """Split with experts over other groups of workers than all else; see `shard`."""
    tp, ep, dp = parallelism.tp, parallelism.ep, parallelism.dp
    slices = parallelism.workers // ep
    if spec.moe is None:
        return Infeasible(reason=f"{spec.name} has no experts for ep={ep} to spread; use ep=1")
    rank = spec.moe["rank"]
    experts = spec.ranks[rank]
    if ep > experts:
        return Infeasible(reason=f"{spec.name}: ep={ep} is more than its {experts} experts")
    sliced = sorted(
        {
            r
            for b in spec.blocks
            for e in b.cascade
            for a in e.accesses
            if a.is_weight and rank in a.ranks
            for r in a.ranks
            if r in spec.parallelism.get("tp", ())
        }
    )
    ways = {rank: ep, **dict.fromkeys(sliced, slices)}
    for r in sliced:
        if spec.ranks[r] % slices:
            return Infeasible(
                reason=f"{spec.name}: tp={tp}, dp={dp} with ep={ep} does not divide "
                f"{r}={spec.ranks[r]} of each expert {slices} ways"
            )
    if not experts_only:
        for chain in (c for c in _chains(spec) if not set(c) <= set(sliced)):
            split = _split(chain, spec.ranks, tp)
            if split is None:
                return Infeasible(reason=_explain(spec, chain, tp))
            ways |= split
    ways = {r: n for r, n in ways.items() if n > 1}
    local = {r: -(-size // ways.get(r, 1)) for r, size in spec.ranks.items()}
    return Sharding(tp=tp, ep=ep, dp=dp, ways=ways, whole=spec.ranks, local=local)


def valid_tp(spec: Spec) -> tuple[int, ...]:
    """Tensor-parallel degrees that every rank of the model allows, ascending, 1 among them."""
    chains = [c for c in _chains(spec) if VOCABULARY not in c]
    most = min((product(c, spec.ranks) for c in chains), default=1)
    return tuple(
        tp
        for tp in range(1, most + 1)
        if all(_split(c, spec.ranks, tp) is not None for c in chains)
    )


def _chains(spec: Spec) -> tuple[Chain, ...]:
    """Maximal sets of tp ranks that occur in one entry, each in order of preference."""
    order = spec.parallelism.get("tp", ())
    carried = (entry_ranks(e) for b in spec.blocks for e in b.cascade)
    found = dict.fromkeys(tuple(r for r in order if r in ranks) for ranks in carried)
    return tuple(c for c in found if c and not any(set(c) < set(other) for other in found))


def _split(chain: Chain, sizes: Mapping[str, int], tp: int) -> dict[str, int] | None:
    """Parts of each rank of a chain, or None where they do not multiply to ``tp``."""
    ways, left = {}, tp
    for rank in chain:
        parts = left if rank == VOCABULARY else math.gcd(sizes[rank], left)
        if parts not in (left, sizes[rank]):
            return None
        ways[rank] = parts
        left //= parts
    return ways if left == 1 else None


def _explain(spec: Spec, chain: Chain, tp: int) -> str:
    """One line: which ranks ``tp`` does not divide, the nearest degrees, those of the model."""
    most = product(chain, spec.ranks)
    below = next(n for n in range(min(tp, most), 0, -1) if _split(chain, spec.ranks, n))
    above = next((n for n in count(tp) if n > most or _split(chain, spec.ranks, n)), most + 1)
    nearest = f"{below} and {above}" if above <= most else f"{below}"
    found = " x ".join(f"{r}={spec.ranks[r]}" for r in chain)
    valid = ", ".join(map(str, valid_tp(spec)))
    return (
        f"{spec.name}: tp={tp} does not divide {found} (nearest that do: {nearest}); "
        f"the whole model allows tp {valid}"
    )
