"""Which entries of a cascade run as one kernel, and which one it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from energylens.errors import SpecError
from energylens.graph import KERNELS, Op, kernel_type
from energylens.spec.model import Block, Entry, Fusion, Spec
from energylens.spec.system import Engine, Kernel, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Entries that one kernel executes; ``kernel`` is the name that a fusion asks for, if any."""

    members: tuple[Entry, ...]
    kernel: str | None = None

    @property
    def name(self) -> str:
        """Entry names, joined."""
        return "+".join(e.name for e in self.members)


def groups(spec: Spec, engine: Engine, block: Block) -> tuple[Group, ...]:
    """The cascade of ``block`` as kernels: the spec's fusions, then the engine's over the rest.

    A fusion applies where the block has all of its members; the kernel then runs in place of the
    last of them. A fusion of a single member keeps it apart from the engine's fusions.
    """
    entries = {e.name: e for e in block.cascade}
    group_of: dict[str, Group] = {}
    for fusion in (*spec.fusion, *(Fusion(members=m) for m in engine.fusion)):
        if all(m in entries and m not in group_of for m in fusion.members):
            members = tuple(e for e in block.cascade if e.name in fusion.members)
            group_of |= dict.fromkeys(fusion.members, Group(members=members, kernel=fusion.kernel))
    whole = (group_of.get(e.name, Group(members=(e,))) for e in block.cascade)
    return tuple(g for g, e in zip(whole, block.cascade, strict=True) if e is g.members[-1])


def engine_op(
    engine: Engine,
    mode: Mode,
    key: str,
    sizes: Mapping[str, float],
    *,
    name: str,
    dtype: str,
    count: int,
) -> Op:
    """An op of the kernel that ``engine`` uses for ``key`` in ``mode``, with the sizes it needs."""
    kernel = engine.kernels.get(f"{key}.{mode}") or engine.kernels.get(key)
    if kernel is None:
        if key not in KERNELS or not KERNELS[key].is_collective:
            raise SpecError(
                f"engine {engine.name} has no kernel for {key!r} (entry {name!r}); it has "
                f"{', '.join(sorted(engine.kernels))}; take another engine"
            )
        kernel = Kernel(kernel=key, launches=1)
    dims = kernel_type(kernel.kernel).dims
    missing = [d for d in dims if d not in sizes]
    if missing:
        raise SpecError(
            f"engine {engine.name} runs {key!r} (entry {name!r}) as {kernel.kernel!r}, which needs "
            f"{missing[0]!r}; such entries have {', '.join(sizes)}"
        )
    return Op(
        name=name,
        kernel=kernel.kernel,
        shape=tuple(sizes[d] for d in dims),
        dtype=dtype,
        count=count,
        launches=kernel.launches,
    )
