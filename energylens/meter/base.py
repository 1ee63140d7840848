"""The interfaces of every meter: boards, what can be measured on them, and recorders of samples."""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self

from energylens.errors import MeterError
from energylens.meter.rails import RailRole
from energylens.meter.window import (
    MARGIN_S,
    SENSORS,
    CounterTrust,
    DeviceSeries,
    Reading,
    counter_trust,
    reading,
)

__all__ = [
    "SENSORS",
    "AbstractMeter",
    "AbstractRecorder",
    "Capability",
    "CounterTrust",
    "DeviceInfo",
    "DeviceSeries",
    "Reading",
    "SensorState",
    "counter_trust",
    "reading",
    "require_energy",
]

POWER_SENSORS = ("energy", "instant_power", "average_power")
"""Sensors that give energy."""
SensorState = Literal["supported", "not_supported", "no_permission", "stuck", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a board says about itself; None where it does not say.

    Attributes:
        uuid: NVML UUID, ``GPU-...`` (``MIG-...`` for a slice); pci_bus_id: ``00000000:1b:00.0``.
        power_limit_w, default_power_limit_w: enforced and factory limits.
        sm_clock_max_hz: highest SM clock.
        memory_bytes: total; that of the system where ``unified_memory``.
        mig: True for a slice or a board that is split into slices (``mig_uuids``).
        other_pids: compute processes on the board, this one apart.
        integrated: True for a GPU inside of a module (Jetson), the only one that CUDA shows.
        power_scope: what power and energy cover, ``gpu`` or ``module``.
        power_mode: name of the mode that presets clocks and cores (nvpmodel). It is not a cap.
        power_source: what reads the power, and how often; power_step_w: its resolution.
        least_window_s: shortest window worth measuring with its sensors; 0 where any will do.
        clocks_hz: (name, Hz) of the clocks that the mode sets.
        rails: rails by role, where power comes from rails.
        notes: what a reader of its results has to know.
    """

    uuid: str
    name: str
    pci_bus_id: str | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    sm_clock_max_hz: float | None = None
    memory_bytes: float | None = None
    unified_memory: bool = False
    mig: bool = False
    mig_uuids: tuple[str, ...] = ()
    ecc: bool | None = None
    persistence: bool | None = None
    other_pids: tuple[int, ...] = ()
    integrated: bool = False
    power_scope: str = "gpu"
    power_mode: str | None = None
    power_source: str | None = None
    power_step_w: float | None = None
    least_window_s: float = 0.0
    clocks_hz: tuple[tuple[str, float], ...] = ()
    rails: tuple[RailRole, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rail_facts(self) -> dict[str, Any]:
        """What a record says of power from rails: which they are, and what shares them; else {}."""
        if not self.rails:
            return {}
        return {
            "power_scope": self.power_scope,
            "power_source": self.power_source,
            "power_step_w": self.power_step_w,
            "power_mode": self.power_mode,
            "clocks_hz": dict(self.clocks_hz),
            "rails": {r.role: asdict(r) for r in self.rails},
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a real read of one sensor of one board gave.

    Attributes:
        sensor: one of `SENSORS`.
        state: ``stuck`` = answers but does not move; ``absent`` = library or driver lack the call.
        reason: why it is not supported, else None.
        scope: ``gpu`` or ``module`` for instant and average power.
    """

    uuid: str
    sensor: str
    state: SensorState
    reason: str | None = None
    scope: str | None = None


class AbstractRecorder(abc.ABC):
    """Samples some boards while it is entered; may be asked at any time, from any thread."""

    def __init__(self) -> None:
        """Start with trust in every counter."""
        self._mistrusted: set[str] = set()

    def start(self) -> None:
        """Start to sample; returns after the first sample of every sensor. By default nothing."""
        return

    def stop(self) -> None:
        """Stop to sample; the samples stay readable. By default nothing."""
        return

    def __enter__(self) -> Self:
        """Start to sample."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop to sample."""
        self.stop()

    @abc.abstractmethod
    def now(self) -> float:
        """Monotonic seconds on the clock that stamps the samples."""

    @abc.abstractmethod
    def series(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> DeviceSeries:
        """Samples of ``uuid`` so far, between the two times.

        Raises:
            MeterError: ``uuid`` is not recorded.
        """

    def rails(
        self, uuid: str, start_s: float = -math.inf, end_s: float = math.inf
    ) -> Mapping[str, DeviceSeries]:
        """Role (see `energylens.meter.rails.ROLES`) -> power of its rails, for `reading`.

        Empty for boards without rails. A role that no rail measures has a series without samples.
        """
        return MappingProxyType({})

    def rail_readings(self, uuid: str, start_s: float, end_s: float) -> Mapping[str, Reading]:
        """Role -> `reading` of its rails; empty for boards without rails."""
        near = self.rails(uuid, start_s - MARGIN_S, end_s + MARGIN_S)
        return {role: reading(series, start_s, end_s) for role, series in near.items()}

    def reading(self, uuid: str, start_s: float, end_s: float, *, min_ticks: int = 4) -> Reading:
        """`reading` of ``uuid`` over a window that has passed."""
        near = self.series(uuid, start_s - MARGIN_S, end_s + MARGIN_S)
        trust = near.uuid not in self._mistrusted
        return reading(near, start_s, end_s, min_ticks=min_ticks, trust_counter=trust)

    def verify_counter(self, uuid: str, start_s: float, end_s: float) -> CounterTrust:
        """`counter_trust` over a steady window; later readings skip a mistrusted counter."""
        near = self.series(uuid, start_s - MARGIN_S, end_s + MARGIN_S)
        trust = counter_trust(near, start_s, end_s)
        if trust.trusted:
            self._mistrusted.discard(near.uuid)
        elif trust.trusted is not None:
            self._mistrusted.add(near.uuid)
        return trust


class AbstractMeter(abc.ABC):
    """The boards of a machine and how to measure them."""

    @abc.abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every board that the vendor library shows, in its order (never a CUDA ordinal).

        Raises:
            MeterError: the boards cannot be listed.
        """

    @abc.abstractmethod
    def capabilities(self) -> tuple[Capability, ...]:
        """One row per board and sensor, from real reads."""

    @abc.abstractmethod
    def recorder(self, uuids: Sequence[str]) -> AbstractRecorder:
        """A recorder of these boards; enter it to start.

        Raises:
            MeterError: a board is not known.
        """


def system_memory_bytes() -> float | None:
    """Memory of this machine, for boards that share it with the CPU."""
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if not all(name in os.sysconf_names for name in names):
        return None
    return float(os.sysconf(names[0]) * os.sysconf(names[1]))


def require_energy(meter: AbstractMeter, info: DeviceInfo) -> None:
    """Refuse a board without energy.

    Raises:
        MeterError: no sensor of the board gives power or energy.
    """
    if info.mig:
        raise MeterError(f"{info.name}: MIG is on, and no sensor belongs to one slice; turn it off")
    rows = [c for c in meter.capabilities() if c.uuid == info.uuid and c.sensor in POWER_SENSORS]
    if not any(c.state == "supported" for c in rows):
        why = "; ".join(f"{c.sensor}: {c.reason or c.state}" for c in rows)
        raise MeterError(f"{info.name}: energy cannot be measured ({why or 'no sensor'})")
