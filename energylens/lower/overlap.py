"""Collectives that run beside compute, in place of collectives and compute that take turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from energylens.errors import SpecError
from energylens.graph import Op
from energylens.lower.items import Item, Rowwise
from energylens.spec.model import Block, Entry, Overlap, Spec
from energylens.spec.system import Device, Engine, Parallelism, Step

LEAST_ROWS = 128
"""Rows of a chunk, at least: the tile of a matrix kernel. Smaller steps are not worth cutting."""

_MADE_BY = "_all_reduce"  # what follows the entry's name in that of its collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """A GEMM in chunks of its rows, and an all-reduce on a few SMs beside it.

    Attributes:
        gemm, reduce: as they are where they take turns.
        sm, chunks: see `energylens.spec.model.Overlap`.
    """

    gemm: Rowwise
    reduce: Rowwise
    sm: int
    chunks: int

    @property
    def collective(self) -> str:
        """The entry whose partial sums are added up."""
        return self.reduce.name.removesuffix(_MADE_BY)

    @property
    def most_in_turns(self) -> int:
        """Rows of the GEMM, at most, of steps in which both take turns."""
        return (LEAST_ROWS - 1) * self.chunks

    def ops(self, engine: Engine, step: Step, worker: int) -> Iterator[Op]:
        """See `energylens.lower.items.Item`; steps of few rows take turns."""
        (gemm,) = self.gemm.ops(engine, step, worker)
        (reduce,) = self.reduce.ops(engine, step, worker)
        m, n, k = gemm.shape
        if m <= self.most_in_turns:
            yield from (gemm, reduce)
            return
        values, workers = reduce.shape
        yield replace(
            gemm, shape=(math.ceil(m / self.chunks), n, k), count=gemm.count * self.chunks
        )
        yield replace(
            reduce,
            kernel="overlapped_all_reduce",
            shape=(values, workers, self.sm, self.chunks, m, n, k),
            dtype=gemm.dtype,
            launches=reduce.launches * self.chunks,
        )


def wanted(spec: Spec, parallelism: Parallelism) -> tuple[Overlap, ...]:
    """The overlaps of a model: those that were asked for, else its own.

    Asked for are all: each all-reduce beside the GEMM whose partial sums it adds up. A worker alone
    has none.
    """
    asked = parallelism.overlap
    if parallelism.tp == 1:
        return ()
    if asked is None:
        return spec.overlap
    names = dict.fromkeys(e.name for b in spec.blocks for e in b.cascade if _sums_up(spec, e))
    return tuple(
        Overlap(collective=name, beside=name, sm=asked.sm, chunks=asked.chunks)
        for name in names
        if asked
    )


def check_sms(spec: Spec, parallelism: Parallelism, device: Device) -> None:
    """Refuse a configuration whose overlaps leave no SM of the device to the GEMMs.

    Raises:
        SpecError: one does.
    """
    for overlap in wanted(spec, parallelism):
        if overlap.sm >= device.sm_count:
            raise SpecError(
                f"overlap of {overlap.collective!r} on {overlap.sm} SMs: {device.name} has "
                f"{device.sm_count}, and the GEMM needs some; use fewer"
            )


def _sums_up(spec: Spec, entry: Entry) -> bool:
    """Whether it is a GEMM that leaves partial sums under tensor parallelism."""
    if entry.einsum is None or not any(a.is_weight for a in entry.einsum.inputs):
        return False
    reduced = set(entry.einsum.reduced)
    of_experts = spec.moe is not None and any(
        spec.moe["rank"] in a.ranks for a in entry.einsum.inputs
    )
    return not of_experts and bool(reduced & set(spec.parallelism.get("tp", ())))


def overlapped(
    items: Sequence[Item],
    blocks: Sequence[int | None],
    overlaps: Sequence[Overlap],
    model: Sequence[Block],
) -> tuple[tuple[Item, ...], tuple[int | None, ...]]:
    """Items and the block of each, with every overlap in the place of its collective.

    In a block without the GEMM collective and compute take turns, where others have it. So do
    experts, which are no GEMM, and the all-reduce of their sums.

    Raises:
        SpecError: a collective is to run beside something that is no GEMM of any of its blocks, one
            beside two GEMMs, or two beside one.
    """
    kept: dict[int, Item] = dict(enumerate(items))
    for overlap in overlaps:
        name = overlap.collective + _MADE_BY
        reduces = {i: r for i, r in enumerate(items) if isinstance(r, Rowwise) and r.name == name}
        gemms = {i: _beside(items, blocks, overlap, blocks[i]) for i in reduces}
        may_lack = overlap.beside == overlap.collective or set(gemms.values()) != {None}
        for i, reduce in reduces.items():
            j = gemms[i]
            if j is None and may_lack:
                continue
            if j is None or j not in kept or kept[i] is not reduce:
                where = model[blocks[i] or 0].name
                why = f"{overlap.beside!r} is no GEMM of it"
                if j is not None:
                    why = f"{overlap.beside!r} has a collective beside it already"
                if kept[i] is not reduce:
                    why = f"{overlap.collective!r} runs beside another GEMM already"
                raise SpecError(
                    f"overlap of {overlap.collective!r} with {overlap.beside!r} in block "
                    f"{where!r}: {why}; name each collective once, with a GEMM of the block or "
                    f"with {overlap.collective!r} itself"
                )
            gemm = kept.pop(j)
            assert isinstance(gemm, Rowwise)  # `_beside` looks for nothing else
            kept[i] = Overlapped(gemm=gemm, reduce=reduce, sm=overlap.sm, chunks=overlap.chunks)
    order = sorted(kept)
    return tuple(kept[i] for i in order), tuple(blocks[i] for i in order)


def _beside(
    items: Sequence[Item], blocks: Sequence[int | None], overlap: Overlap, block: int | None
) -> int | None:
    """Index of the GEMM of a block that an overlap names: by an entry, or by all that it fuses."""
    for j, item in enumerate(items):
        if blocks[j] != block or not isinstance(item, Rowwise) or set(item.scaled) != {"m"}:
            continue
        members = item.name.split("+")
        if overlap.beside in members or overlap.beside == "_".join(members):
            return j
    return None
