"""Boards differ: what an anchor says, and how a typical board's costs become one's (DESIGN law 8).

Power above idle scales by two ratios: that of a memory stream, and that of a large GEMM brought to
the maximum clock. Time scales by memory bandwidth only; a board's speed at the power cap follows
from its GEMM power, in `schedule`, not from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from energylens.errors import CalibrationError
from energylens.results import BoardAnchor, Cost
from energylens.spec.system import Device

Array = NDArray[np.float64]

# Expected order statistics of a standard normal (Blom's approximation), for boards that nobody has
# measured.
_BLOM = 0.375


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One board relative to a typical one.

    Attributes:
        idle_w: power with a context and nothing running.
        memory_power, compute_power: above-idle power of memory-bound and compute-bound work at the
            maximum clock, over a typical board's.
        memory_time: time of a memory-bound read over a typical board's.
    """

    idle_w: float
    memory_power: float = 1.0
    compute_power: float = 1.0
    memory_time: float = 1.0

    def ratios(self, compute: float, read: float, dram: float) -> tuple[float, float]:
        """Time and above-idle power of work with these shares, over a typical board's."""
        time = 1.0 + read * (self.memory_time - 1.0)
        power = 1.0 + compute * (self.compute_power - 1.0) + dram * (self.memory_power - 1.0)
        return time, power

    def localise(self, costs: Sequence[Cost]) -> tuple[Array, Array]:
        """Seconds and above-idle joules on this board of ops, each [ops], from a typical one's."""
        ratios = [self.ratios(c.compute_share, c.read_share, c.dram_share) for c in costs]
        time, power = np.array(ratios, dtype=np.float64).reshape(-1, 2).T
        latency_s = np.array([c.latency_s for c in costs]) * time
        return latency_s, np.array([c.energy_j for c in costs]) * time * power


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Standard deviations between boards: of the natural logs of `Board`'s ratios, and of idle."""

    memory_power: float
    compute_power: float
    memory_time: float
    idle_w: float


def gemm_power_at_max_clock(anchor: BoardAnchor, device: Device, eta: float) -> float:
    """Above-idle watts that the anchor's GEMM would draw at the maximum clock, were there no cap.

    Dynamic energy per execution goes with clock**eta and executions per second with the clock.
    """
    clock = anchor.gemm_mhz * 1e6 if anchor.gemm_mhz else device.clock_max_hz
    stretch: float = (device.clock_max_hz / clock) ** (1.0 + eta)
    return (anchor.gemm_w - anchor.idle_w) * stretch


def board(anchor: BoardAnchor, typical: BoardAnchor, device: Device, eta: float) -> Board:
    """A board from its anchor, relative to the typical anchor of a bundle."""
    return Board(
        idle_w=anchor.idle_w,
        memory_power=(anchor.stream_w - anchor.idle_w) / (typical.stream_w - typical.idle_w),
        compute_power=gemm_power_at_max_clock(anchor, device, eta)
        / gemm_power_at_max_clock(typical, device, eta),
        memory_time=typical.gemv_gbs / anchor.gemv_gbs
        if anchor.gemv_gbs and typical.gemv_gbs
        else 1.0,
    )


def typical_anchor(anchors: Sequence[BoardAnchor]) -> BoardAnchor:
    """Geometric mean of anchors, field by field over the boards that have it."""

    def mean(name: str) -> float | None:
        values = [getattr(a, name) for a in anchors if getattr(a, name) is not None]
        return math.exp(sum(map(math.log, values)) / len(values)) if values else None

    def needed(name: str) -> float:
        value = mean(name)
        if value is None:
            raise CalibrationError(f"no anchor holds {name}; measure the anchors again")
        return value

    return BoardAnchor(
        board_uuid="typical",
        device=anchors[0].device,
        idle_w=needed("idle_w"),
        stream_w=needed("stream_w"),
        gemm_tflops=needed("gemm_tflops"),
        gemm_w=needed("gemm_w"),
        gemm_mhz=mean("gemm_mhz"),
        gemv_gbs=mean("gemv_gbs"),
        stream_gbs=mean("stream_gbs"),
        gemv_w=mean("gemv_w"),
        temperature_c=mean("temperature_c"),
    )


def typical_boards(count: int, idle_w: float, spread: Spread) -> tuple[Board, ...]:
    """``count`` boards that nobody has measured: at the expected order statistics of the spread.

    One board is the typical one; of several, the slowest is what sets the pace under tensor
    parallelism.
    """
    from statistics import NormalDist

    boards = []
    for i in range(count):
        z = NormalDist().inv_cdf((i + 1 - _BLOM) / (count + 1 - 2 * _BLOM))
        boards.append(
            Board(
                idle_w=idle_w + z * spread.idle_w,
                memory_power=math.exp(z * spread.memory_power),
                compute_power=math.exp(z * spread.compute_power),
                memory_time=math.exp(z * spread.memory_time),
            )
        )
    return tuple(boards)
