"""What a configuration costs in money and in carbon, from its GPU time and its energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from energylens.errors import OutOfRangeError, SpecError
from energylens.units import J_PER_KWH, S_PER_HOUR

Array = NDArray[np.float64]

_PER = {"token": (1e6, "million_tokens"), "request": (1.0, "request")}
"""Unit of an objective -> how many of it a value is for, and its name in there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of GPU time and of energy, in one currency; ``None`` where it is not counted.

    Attributes:
        per_gpu_hour: of one GPU, busy or not.
        per_kwh: of energy that the data centre takes from the grid.
        pue: power usage effectiveness: energy from the grid over that of the GPUs; None is 1.
        carbon_g_per_kwh: grams of CO2-equivalent of a kWh from the grid.
    """

    per_gpu_hour: float | None = None
    per_kwh: float | None = None
    pue: float | None = None
    carbon_g_per_kwh: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            least = 1.0 if name == "pue" else 0.0
            if not least <= value < np.inf or value == 0:
                raise OutOfRangeError(
                    f"{name} must be a number {'of at least 1' if least else 'above 0'}, "
                    f"not {value:g}"
                )
        if self.pue is not None and self.per_kwh is None and self.carbon_g_per_kwh is None:
            raise SpecError(
                "pue multiplies the price and the carbon of energy, and neither is given: add "
                "--price-per-kwh or --carbon-g-per-kwh, or leave it out"
            )

    def given(self) -> dict[str, float]:
        """Those that are given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def check(self, objectives: Iterable[str]) -> None:
        """Refuse an objective whose prices are missing."""
        for name in objectives:
            if name.startswith("cost") and self.per_gpu_hour is None and self.per_kwh is None:
                raise SpecError(
                    f"objective {name} needs a price: give --price-per-gpu-hour, --price-per-kwh "
                    "or both"
                )
            if name.startswith("carbon") and self.carbon_g_per_kwh is None:
                raise SpecError(f"objective {name} needs --carbon-g-per-kwh")

    def values(self, known: Mapping[str, Array]) -> dict[str, Array]:
        """Costs by name, of values that hold GPU time and energy of a token and of a request."""
        found = {}
        for unit, (many, name) in _PER.items():
            kwh = many * known[f"energy_per_{unit}_j"] * (self.pue or 1.0) / J_PER_KWH
            time_s = known.get(f"gpu_s_per_{unit}")
            if (self.per_gpu_hour or self.per_kwh) and time_s is not None:
                hours = many * time_s / S_PER_HOUR
                found[f"cost_per_{name}"] = hours * (self.per_gpu_hour or 0.0) + kwh * (
                    self.per_kwh or 0.0
                )
            if self.carbon_g_per_kwh:
                found[f"carbon_per_{name}_g"] = kwh * self.carbon_g_per_kwh
        return found
