"""What this machine can measure, and what to change where it cannot."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from energylens.errors import MeterError
from energylens.meter.base import POWER_SENSORS, AbstractMeter, Capability, DeviceInfo
from energylens.meter.choose import choose_meter
from energylens.meter.host import host_capabilities
from energylens.meter.nvml import visible_devices
from energylens.meter.tegra import tegra_board

INSTALL = "pip install '.[{}]' in the checkout of EnergyLens"
"""How to get an extra."""
CALIBRATE_LIBRARIES = ("torch", "transformers", "sklearn", "pandas", "pynvml")
LIBRARIES = (*CALIBRATE_LIBRARIES, "jtop")
"""Optional libraries that are looked for, by import name."""
_MODE_HINT = "let /var/lib/nvpmodel/status and /etc/nvpmodel.conf be read, or use jtop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """State of a machine.

    Attributes:
        python, platform: version of the interpreter; system and CPU architecture.
        tegra: name of the Jetson board, or None on other machines.
        libraries: (import name, found) of `LIBRARIES`; found without importing them.
        meter_error: why no meter can be used, or None where one works.
        devices: every board; visible: UUIDs of those that CUDA will show.
        visible_error: why ``visible`` is not known, or None.
        capabilities: one row per board and sensor.
        host: one row per energy counter of the machine's CPUs and memory.
        calibrate_blockers: why `energylens calibrate` cannot run here; empty where it can.
        hints: what to change, one line each, the most important first.
    """

    python: str
    platform: str
    tegra: str | None
    libraries: tuple[tuple[str, bool], ...]
    meter_error: str | None
    devices: tuple[DeviceInfo, ...]
    visible: tuple[str, ...]
    visible_error: str | None
    capabilities: tuple[Capability, ...]
    host: tuple[Capability, ...]
    calibrate_blockers: tuple[str, ...]
    hints: tuple[str, ...]


def diagnose(
    env: Mapping[str, str],
    *,
    root: Path = Path("/"),
    open_meter: Callable[[], AbstractMeter] | None = None,
) -> Diagnosis:
    """Look at everything once; what fails becomes a line of the result, never an exception.

    Args:
        env: environment variables.
        root: where the file system begins.
        open_meter: makes the meter to probe; `choose_meter` by default.
    """
    tegra = tegra_board(root)
    open_meter = open_meter or partial(choose_meter, root=root)
    libraries = tuple((name, _is_importable(name)) for name in LIBRARIES)
    devices: tuple[DeviceInfo, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    visible: tuple[str, ...] = ()
    meter_error = visible_error = None
    try:
        meter = open_meter()
        devices, capabilities = meter.devices(), meter.capabilities()
    except MeterError as error:
        meter_error = str(error)
    try:
        visible = tuple(info.uuid for info in visible_devices(devices, env))
    except MeterError as error:
        visible_error = str(error)
    spared = {"pynvml"} if any(info.integrated for info in devices) else set()
    lacking = [n for n in CALIBRATE_LIBRARIES if not dict(libraries)[n] and n not in spared]
    hints = [
        *_machine_hints(lacking, meter_error),
        *([visible_error] if visible_error else []),
        *(hint for info in devices for hint in _device_hints(info, capabilities)),
    ]
    if devices and not visible and not visible_error:
        value = env.get("CUDA_VISIBLE_DEVICES")
        hints.append(f"CUDA_VISIBLE_DEVICES={value!r} hides every board; unset it or name a board")
    return Diagnosis(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        tegra=tegra,
        libraries=libraries,
        meter_error=meter_error,
        devices=devices,
        visible=visible,
        visible_error=visible_error,
        capabilities=capabilities,
        host=host_capabilities(root),
        calibrate_blockers=tuple(_calibrate_blockers(lacking, visible, visible_error, meter_error)),
        hints=tuple(hints),
    )


def _calibrate_blockers(
    lacking: Sequence[str],
    visible: Sequence[str],
    visible_error: str | None,
    meter_error: str | None,
) -> Iterator[str]:
    if meter_error or not visible:
        yield meter_error or visible_error or "no board is visible to CUDA"
    if lacking:
        yield f"{', '.join(lacking)} not installed"


def _is_importable(name: str) -> bool:
    if name in sys.modules:
        return True
    return importlib.util.find_spec(name) is not None


def _machine_hints(lacking: Sequence[str], meter_error: str | None) -> Iterator[str]:
    if meter_error:
        yield meter_error
    if lacking:
        names = ", ".join(lacking)
        yield f"on a machine with a GPU, calibrate needs {names}: {INSTALL.format('gpu')}"


def _device_hints(info: DeviceInfo, capabilities: tuple[Capability, ...]) -> list[str]:
    rows = [c for c in capabilities if c.uuid == info.uuid]
    energy = [c for c in rows if c.sensor in POWER_SENSORS]
    hints = []
    if info.mig:
        hints.append("MIG is on, so no energy of a slice is known; turn it off: nvidia-smi -mig 0")
    elif not any(c.state == "supported" for c in energy):
        why = "; ".join(dict.fromkeys(f"{c.sensor}: {c.reason}" for c in energy))
        hints.append(f"no energy on this board ({why}); times work without it")
    if any(c.state == "no_permission" for c in rows):
        hints.append("some sensors need a permission; ask the administrator of this machine")
    if info.other_pids:
        pids = ", ".join(map(str, info.other_pids))
        hints.append(f"other processes run on the board (pid {pids}); stop them before measuring")
    limit_w, default_w = info.power_limit_w, info.default_power_limit_w
    if limit_w and default_w and limit_w < default_w:
        hints.append(
            f"the power limit is {limit_w:g} W instead of {default_w:g} W; results hold for it only"
        )
    clocks = dict(info.clocks_hz)
    if clocks.get("gpu_min", 0.0) < clocks.get("gpu_max", 0.0):
        hints.append("the clock of the GPU follows the load; before measuring: sudo jetson_clocks")
    if info.integrated and info.power_mode is None:
        hints.append(f"the power mode is not known, and calibrate needs it: {_MODE_HINT}")
    return [f"{info.uuid}: {hint}" for hint in hints]
