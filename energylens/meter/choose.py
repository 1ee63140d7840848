"""The one place where a meter is chosen: by what answers, not by what is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from energylens.errors import MeterError
from energylens.meter.base import POWER_SENSORS, AbstractMeter
from energylens.meter.jetson import JetsonMeter
from energylens.meter.nvml import NvmlMeter
from energylens.meter.tegra import has_rails, tegra_board


def choose_meter(
    *,
    root: Path = Path("/"),
    open_nvml: Callable[[], AbstractMeter] = NvmlMeter,
    open_jetson: Callable[[Path], AbstractMeter] = JetsonMeter,
) -> AbstractMeter:
    """The meter of this machine.

    On a Jetson the rails come first: NVML starts there and shows a board, but its power and energy
    are not supported. Elsewhere NVML does, unless none of its boards gives energy and sysfs shows
    the rails of a Jetson, as in a container that hides what machine it is on.

    Args:
        root: where the file system begins.
        open_nvml: makes the meter of NVML's boards.
        open_jetson: makes the meter of the module below ``root``.

    Returns:
        A meter with energy where there is one, else NVML's boards without: times work on those.

    Raises:
        MeterError: no meter works; the text says what was tried and what to do.
    """
    is_jetson = tegra_board(root) is not None
    reasons: list[str] = []
    if is_jetson:
        try:
            return open_jetson(root)
        except MeterError as error:
            reasons.append(str(error))
    try:
        nvml = open_nvml()
    except MeterError as error:
        reasons.append(str(error))
        if is_jetson or not has_rails(root):
            raise MeterError("; ".join(reasons)) from error
        return open_jetson(root)
    if gives_energy(nvml):
        return nvml
    if is_jetson:  # a board without energy says less than why the rails do not answer
        raise MeterError("; ".join(reasons))
    return open_jetson(root) if has_rails(root) else nvml


def gives_energy(meter: AbstractMeter) -> bool:
    """Whether any board of the meter has a sensor of energy or power that answers."""
    return any(
        row.sensor in POWER_SENSORS and row.state == "supported" for row in meter.capabilities()
    )
