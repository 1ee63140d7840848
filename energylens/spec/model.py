"""A model as values: ranks, tensors, einsums, named ops, blocks (cascades) and annotations.

Everything here is frozen and holds no behaviour beyond lookup; `load` makes these from YAML,
`graph` counts them, `lower` turns them into kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

STEP_RANKS = ("b", "s", "t")
"""Ranks that the engine step sizes: sequences, new tokens per sequence, context per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One tensor with the ranks that an expression reads or writes it by, e.g. ``Wq[m,g,r,d]``."""

    tensor: str
    ranks: tuple[str, ...]

    @property
    def is_weight(self) -> bool:
        """Weights are written with a leading capital W."""
        return self.tensor.startswith("W")

    def __str__(self) -> str:
        return f"{self.tensor}[{','.join(self.ranks)}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Einsum:
    """A contraction: ``inputs -> output``; ranks of the inputs that the output lacks are summed."""

    inputs: tuple[Access, ...]
    output: Access

    @property
    def reduced(self) -> tuple[str, ...]:
        """Ranks that are summed over, in order of first appearance."""
        seen = dict.fromkeys(r for a in self.inputs for r in a.ranks)
        return tuple(r for r in seen if r not in self.output.ranks)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {self.output}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a cascade: an einsum, or a named op that is not a contraction.

    Attributes:
        name: unique within its block.
        einsum: the contraction, or None for a named op.
        op: name of the op (``rmsnorm``, ``rope``, ``silu_mul``…), or None for an einsum.
        inputs: what a named op reads (an einsum's inputs are in ``einsum``).
        mask: ``causal`` or None; which (s, t) pairs an attention contraction visits.
        cache: True where the output is kept for later steps (K and V).
        bias: True where a bias vector over the output's weight ranks is added, one for each expert
            where experts are summed over.
        tied: name of the weight that this entry shares with another one (no memory of its own).
        weights: precision of its weights, where they are not stored as the model's are.
    """

    name: str
    einsum: Einsum | None = None
    op: str | None = None
    inputs: tuple[Access, ...] = ()
    mask: str | None = None
    cache: bool = False
    bias: bool = False
    tied: str | None = None
    weights: str | None = None

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Everything that the entry reads."""
        return self.einsum.inputs if self.einsum is not None else self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A cascade of entries that is executed ``repeat`` times.

    With a ``window``, a token attends to no more than the last so many tokens, itself among them.
    """

    name: str
    cascade: tuple[Entry, ...]
    repeat: int = 1
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Entries that run as one kernel: what is between them never touches device memory."""

    members: tuple[str, ...]
    kernel: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A collective in ``chunks`` pieces beside compute, on ``sm`` streaming multiprocessors."""

    collective: str
    beside: str
    sm: int
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Stored precision of each role; keys of `energylens.units.BITS`."""

    weights: str = "bf16"
    activations: str = "bf16"
    kv_cache: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole model.

    Attributes:
        name: short name, e.g. ``llama3_8b``.
        source: where the sizes come from.
        ranks: size of each named rank; ``b``, ``s`` and ``t`` are sized by the engine step.
        blocks: in order of execution.
        parallelism: mesh axis (``tp``, ``ep``) -> ranks that it splits, in order of preference.
        fusion, overlap: annotations; they win over the engine profile's.
        moe: mixture-of-experts annotation as written (``rank``, ``topk``, ``routing``), or None.
        notes: what the spec leaves out or simplifies; every prediction says so.
        context: most tokens of a sequence that the model is made for, where the spec says.
        path: file that it came from, for messages; not part of equality.
    """

    name: str
    source: str
    ranks: Mapping[str, int]
    blocks: tuple[Block, ...]
    precision: Precision = Precision()
    parallelism: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    fusion: tuple[Fusion, ...] = ()
    overlap: tuple[Overlap, ...] = ()
    moe: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    context: int | None = None
    path: str = field(default="", compare=False)

    @property
    def layers(self) -> int:
        """Layers with attention."""
        return sum(b.repeat for b in self.blocks if any(e.mask for e in b.cascade))

    def stored(self, entry: Entry) -> str:
        """Precision of the weights of ``entry``; norms, sinks and biases are as activations are."""
        if entry.op not in (None, "embedding"):
            return self.precision.activations
        return entry.weights or self.precision.weights
