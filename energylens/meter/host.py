"""Energy of a machine's CPUs and their memory (RAPL), beside that of its boards.

The counters belong to the machine: several processes on it read the same ones, so they count once.
They hold microjoules and start anew at ``max_energy_range_uj``, after minutes under load
(``Documentation/power/powercap/powercap.rst`` of the Linux kernel). Most systems let only root read
them.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from energylens.errors import MeterError
from energylens.meter.base import Capability, SensorState
from energylens.meter.tegra import read_text
from energylens.meter.window import Reading
from energylens.units import J_PER_UJ

_FOLDER = "sys/class/powercap"
_MOST_W = 1000.0  # of one package: within range / this, a counter starts anew at most once


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """Energy of one part of a host over a window.

    Attributes:
        sensor: name that is the same for all processes of the machine and for no other machine.
        scope: ``cpu_pkg`` or ``dram``.
        energy_j: None where ``reason`` says why.
    """

    sensor: str
    scope: str
    energy_j: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """Counters at one time: sensor -> joules, or why it cannot be read."""

    time_s: float
    joules: Mapping[str, float]
    errors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Domain:
    sensor: str
    scope: str
    folder: Path


class HostMeter:
    """The RAPL counters of this machine; none where it has no such."""

    def __init__(
        self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Find the counters below ``root``; packages and memory, not the parts of a package."""
        self._clock = clock
        machine = read_text(root / "etc/machine-id") or platform.node()
        prefix = hashlib.sha256(machine.encode()).hexdigest()[:10]
        self._domains: list[_Domain] = []
        for folder in sorted(root.glob(f"{_FOLDER}/intel-rapl:*")):
            name = read_text(folder / "name") or ""
            if name.startswith("package"):
                self._domains.append(_Domain(f"{prefix}/{name}", "cpu_pkg", folder))
            elif name == "dram":
                package = folder.name.split(":")[1]
                self._domains.append(_Domain(f"{prefix}/dram-{package}", "dram", folder))

    def read(self) -> HostSnapshot:
        """All counters now."""
        joules: dict[str, float] = {}
        errors: dict[str, str] = {}
        for domain in self._domains:
            try:
                joules[domain.sensor] = J_PER_UJ * int((domain.folder / "energy_uj").read_text())
            except PermissionError:
                errors[domain.sensor] = "no permission to read RAPL; ask for read access to it"
            except (OSError, ValueError) as error:
                errors[domain.sensor] = f"cannot be read: {error}"
        return HostSnapshot(
            time_s=self._clock(), joules=MappingProxyType(joules), errors=MappingProxyType(errors)
        )

    def capabilities(self) -> tuple[Capability, ...]:
        """One row a counter, from real reads."""
        now = self.read()
        rows = []
        for domain in self._domains:
            reason = now.errors.get(domain.sensor)
            state: SensorState = "supported"
            if reason is not None:
                state = "no_permission" if "permission" in reason else "not_supported"
            rows.append(
                Capability(
                    uuid=domain.sensor,
                    sensor="energy",
                    state=state,
                    reason=reason,
                    scope=domain.scope,
                )
            )
        return tuple(rows)

    def energy(self, snapshots: Sequence[HostSnapshot]) -> tuple[HostReading, ...]:
        """Energy from the first of the snapshots to the last, a reading for each counter.

        A long window needs snapshots in between, at least one each time that a counter may start
        anew.

        Raises:
            MeterError: fewer than two snapshots make no window.
        """
        if len(snapshots) < 2:
            raise MeterError(f"energy of a host needs two snapshots; {len(snapshots)} found")
        return tuple(self._energy(domain, snapshots) for domain in self._domains)

    def _energy(self, domain: _Domain, snapshots: Sequence[HostSnapshot]) -> HostReading:
        range_uj = read_text(domain.folder / "max_energy_range_uj")
        range_j = float(range_uj) * J_PER_UJ if range_uj and range_uj.isdigit() else None
        total_j = 0.0
        for before, after in pairwise(snapshots):
            why = before.errors.get(domain.sensor) or after.errors.get(domain.sensor)
            if why is None:
                rise_j = after.joules[domain.sensor] - before.joules[domain.sensor]
                if range_j is not None and after.time_s - before.time_s > range_j / _MOST_W:
                    why = "read too seldom: the counter may have started anew more than once"
                elif rise_j < 0 and range_j is None:
                    why = "the counter went backwards, and its range cannot be read"
                total_j += rise_j if rise_j >= 0 else rise_j + (range_j or 0.0)
            if why is not None:
                return HostReading(
                    sensor=domain.sensor, scope=domain.scope, energy_j=None, reason=why
                )
        return HostReading(sensor=domain.sensor, scope=domain.scope, energy_j=total_j)


def machine_energy_j(
    boards: Iterable[Reading], hosts: Iterable[HostReading]
) -> tuple[float | None, str | None]:
    """Energy of boards and hosts together, or why there is none.

    A sensor that several processes read counts once. Where the power of a board is that of its
    module, the module's CPU is in it already and the host adds nothing.

    Args:
        boards: one reading a board.
        hosts: readings of all processes.
    """
    boards = tuple(boards)
    missing = [b.reason or b.uuid for b in boards if b.energy_j is None]
    total_j = sum(b.energy_j for b in boards if b.energy_j is not None)
    if not any(b.scope == "module" for b in boards):
        known_last = sorted(hosts, key=lambda h: h.energy_j is not None)
        once = {h.sensor: h for h in known_last}.values()
        missing += [h.reason or h.sensor for h in once if h.energy_j is None]
        total_j += sum(h.energy_j for h in once if h.energy_j is not None)
    return (None, "; ".join(missing)) if missing else (total_j, None)
