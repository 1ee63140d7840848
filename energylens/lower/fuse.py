"""Which entries of a cascade run as one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from energylens.spec.model import Block, Entry, Fusion, Spec
from energylens.spec.system import Engine


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
