"""Power rails of Jetson modules: which add up to the module, and what draws from each.

A rail is called the GPU's only where a board's layout says so, and ``shared_with`` tells what else
draws from it: on most Orins no rail belongs to the GPU alone. Boards are told by the names of their
rails, not by their model string, which carriers and new releases leave empty or change.

Names and wiring: NVIDIA's Jetson Linux Developer Guide ("Software-based power consumption
modeling", releases 32.6 to 36), the tables of ``jetson/JetsonPowerRails.md`` in energymon/energymon
(from the device trees of L4T 32.6.1), and for Thor pull requests 750 and 900 of jetson_stats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ROLES = ("total", "gpu", "cpu", "soc", "memory")
"""What users ask about; ``total`` is the headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RailRole:
    """Which rails stand for a role on one board.

    Attributes:
        rails: their names; what the role draws is their sum. Empty where ``reason`` says why.
        shared_with: what else draws from them.
    """

    role: str
    rails: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def shared(self) -> bool:
        """True where the rails do not belong to the role alone."""
        return bool(self.shared_with)

    @property
    def scope(self) -> str:
        """Short label: ``module``, ``gpu``, or ``gpu_shared_rail`` where others draw from it."""
        if self.role == "total":
            return "module"
        return f"{self.role}_shared_rail" if self.shared else self.role


@dataclass(frozen=True, slots=True, kw_only=True)
class RailMap:
    """The rails of a board, by role.

    Attributes:
        boards: boards that have this layout, for people.
        roles: one for each of `ROLES`.
        note: what the total does not hold, or what is not certain.
    """

    boards: str
    roles: tuple[RailRole, ...]
    note: str | None = None

    def role(self, name: str) -> RailRole:
        """The rails of one of `ROLES`."""
        return next(r for r in self.roles if r.role == name)

    @property
    def total(self) -> RailRole:
        """The rails of the whole module."""
        return self.role("total")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rails that add up to the module, and what draws from the others."""

    boards: str
    total: tuple[str, ...]
    draws: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str | None = None


_LAYOUTS = (
    _Layout(
        "AGX Thor",
        ("VIN",),
        {"VDD_GPU": ("gpu",), "VDD_CPU_SOC_MSS": ("cpu", "soc", "memory")},
        "VIN holds the module and its carrier board",
    ),
    _Layout(
        "Orin Nano, Orin NX, Xavier NX",
        ("VDD_IN",),
        {"VDD_CPU_GPU_CV": ("cpu", "gpu", "cv"), "VDD_SOC": ("soc",)},
    ),
    _Layout(
        "TX2 NX",
        ("VDD_IN",),
        {"VDD_CPU_GPU": ("cpu", "gpu"), "VDD_SOC": ("soc",)},
    ),
    _Layout(
        "TX2",
        ("VDD_IN",),
        {
            "VDD_SYS_GPU": ("gpu",),
            "VDD_SYS_CPU": ("cpu",),
            "VDD_SYS_SOC": ("soc",),
            "VDD_SYS_DDR": ("memory",),
        },
    ),
    _Layout("Nano", ("POM_5V_IN",), {"POM_5V_GPU": ("gpu",), "POM_5V_CPU": ("cpu",)}),
    _Layout(
        "AGX Orin",
        ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
        {
            "VDD_GPU_SOC": ("gpu", "soc"),
            "VDD_CPU_CV": ("cpu", "cv"),
            "VDDQ_VDD2_1V8AO": ("memory",),
        },
        "no rail measures the whole module: the total is the sum of three, without VDDQ_VDD2_1V8AO "
        "(taken to be fed by one of them) and without the carrier board",
    ),
    _Layout(
        "AGX Xavier",
        ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
        {"GPU": ("gpu",), "CPU": ("cpu",), "SOC": ("soc",), "VDDRQ": ("memory",)},
        "no rail measures the whole module: the total is the sum of all six, without the carrier "
        "board",
    ),
)
_INPUTS = ("VIN", "VDD_IN", "POM_5V_IN", "5V_IN")
_TOKENS = {"GPU": "gpu", "CPU": "cpu", "SOC": "soc", "CV": "cv"} | dict.fromkeys(
    ("DDR", "DDRQ", "VDDRQ", "VDDQ", "DRAM", "MSS"), "memory"
)
_CHANNEL = re.compile(r"^(?:CH(?:ANNEL)?_?)?\d+_")


def rail_name(label: str) -> str:
    """One spelling of a rail's label: ``ch0: vdd_in`` is ``VDD_IN``."""
    plain = re.sub(r"[^A-Z0-9]+", "_", label.strip().upper()).strip("_")
    return _CHANNEL.sub("", plain)


def map_rails(names: Iterable[str]) -> RailMap:
    """The roles of these rails: of a known board, else by the words of their names.

    A board that nobody has described has a total only where one rail is its input; rails of an
    unknown board are never added up, since one may feed another.

    Args:
        names: as `rail_name` gives them.
    """
    present = tuple(names)
    known = next((x for x in _LAYOUTS if _fits(x, present)), None)
    layout = known or _by_words(present)
    return RailMap(
        boards=layout.boards,
        roles=tuple(_role(role, layout, present) for role in ROLES),
        note=layout.note,
    )


def is_known(names: Iterable[str]) -> bool:
    """Whether these are the rails of a Jetson that is described here."""
    present = tuple(names)
    return any(_fits(layout, present) for layout in _LAYOUTS)


def _fits(layout: _Layout, names: tuple[str, ...]) -> bool:
    return set(layout.total) <= set(names) and any(
        "gpu" in draws and rail in names for rail, draws in layout.draws.items()
    )


def _by_words(names: tuple[str, ...]) -> _Layout:
    inputs = [n for n in _INPUTS if n in names]
    draws = {
        n: tuple(dict.fromkeys(_TOKENS[w] for w in n.split("_") if w in _TOKENS)) for n in names
    }
    note = "unknown board: roles are told by the words of the rails' names"
    return _Layout("unknown board", tuple(inputs[:1]), draws, note)


def _role(role: str, layout: _Layout, names: tuple[str, ...]) -> RailRole:
    if role == "total":
        why = None if layout.total else f"no input rail among {', '.join(names) or 'no rail'}"
        return RailRole(role=role, rails=layout.total, reason=why)
    rails = tuple(n for n in names if role in layout.draws.get(n, ()))
    if not rails:
        return RailRole(role=role, reason=f"no rail of this board measures the {role}")
    others = {draw for rail in rails for draw in layout.draws[rail]} - {role}
    return RailRole(role=role, rails=rails, shared_with=tuple(sorted(others)))
