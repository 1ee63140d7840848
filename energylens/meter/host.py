"""The energy counters (RAPL) of a machine's CPUs and their memory, for the diagnosis.

The energy of a run is that of its boards: these counters belong to the machine, other programs on
it included, and most systems let only root read them. ``docs/profiler.md`` has a meter of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from energylens.meter.base import Capability, SensorState
from energylens.meter.tegra import read_text

_FOLDER = "sys/class/powercap"


def host_capabilities(root: Path = Path("/")) -> tuple[Capability, ...]:
    """One row a counter, from real reads; packages and memory, not the parts of a package.

    Args:
        root: where the file system begins.
    """
    return tuple(
        _capability(name, scope, folder / "energy_uj") for name, scope, folder in _counters(root)
    )


def _counters(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Name, scope and folder of each."""
    for folder in sorted(root.glob(f"{_FOLDER}/intel-rapl:*")):
        name = read_text(folder / "name") or ""
        if name.startswith("package"):
            yield name, "cpu_pkg", folder
        elif name == "dram":
            yield f"dram-{folder.name.split(':')[1]}", "dram", folder


def _capability(name: str, scope: str, register: Path) -> Capability:
    state: SensorState = "supported"
    reason = None
    try:
        int(register.read_text())
    except PermissionError:
        state, reason = "no_permission", "no permission to read RAPL; ask for read access to it"
    except (OSError, ValueError) as error:
        state, reason = "not_supported", f"cannot be read: {error}"
    return Capability(uuid=name, sensor="energy", state=state, reason=reason, scope=scope)
