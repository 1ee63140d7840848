"""The only conversion factors of EnergyLens: all inside is SI, vendors' units end at their door."""

from __future__ import annotations

J_PER_MJ = 1e-3  # NVML counts millijoules
W_PER_MW = 1e-3  # NVML reports milliwatts
W_PER_UW = 1e-6  # hwmon counts microwatts
HZ_PER_KHZ = 1e3
HZ_PER_MHZ = 1e6
BYTES_PER_GB = 1e9
J_PER_KWH = 3.6e6  # grid prices are per kWh
S_PER_HOUR = 3600.0  # and those of GPUs per hour

BITS: dict[str, float] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "fp8_block": 8 + 32 / (128 * 128),
    "int8": 8,
    "int4": 4,
    # Block formats hold a shared scale: fp8_block four bytes per 128 x 128 values, mxfp4 one byte
    # per 32, nvfp4 one byte per 16.
    "mxfp4": 4 + 8 / 32,
    "nvfp4": 4 + 8 / 16,
}
"""Bits per stored value of each precision, the scales of block formats included."""

ARITHMETIC: dict[str, str] = {"fp8_block": "fp8"}
"""Precision that a block format is multiplied in, on devices that can; 16 bits where none is named.
"""


def bytes_per_value(dtype: str) -> float:
    """Bytes that one value of ``dtype`` occupies, block scales included.

    Raises:
        KeyError: ``dtype`` is not one of `BITS`.
    """
    return BITS[dtype] / 8
