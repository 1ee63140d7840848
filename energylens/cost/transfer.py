"""What stands for an op that was not calibrated: another one that was, and does nearly the same.

The regressors of a kernel learn the ratio of measurement to prior; where a kernel or a precision
has none, that of its stand-in is taken, and the priors carry what the two differ by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from energylens.graph import KERNELS, Op, Shape
from energylens.spec.system import Device
from energylens.units import bytes_per_value

TRANSFERRED_REL_SE = (0.3, 0.35)
"""Latency and energy of an op by its stand-in; `benchmarks/narrow_weights.py` shows latencies."""

UNPACKED_REL_SE = 0.35
"""On top of it where weights are unpacked to 16 bits, of which no kernel was compared.

Whole decode steps of gpt-oss-20b on an H100 (ML.ENERGY's table) took 1.4 times as long as priced.
"""

STAND_IN_DTYPE = "bf16"


def _gemm(s: Shape) -> dict[str, float]:
    """One GEMM over all heads: as many FLOPs and weights."""
    return {"m": s["m"], "n": s["heads"] * s["n"], "k": s["k"]}


def _short_prompts(s: Shape) -> dict[str, float]:
    """Prompts of two windows at most: as many (query, key) pairs a token as within the window."""
    new = min(s["new"], 2 * s["window"])
    return {
        "batch": s["batch"] * s["new"] / new,
        "new": new,
        "context": max(new, min(s["context"], s["window"] + new / 2)),
        **{d: s[d] for d in ("q_heads", "kv_heads", "head_dim")},
    }


def _short_context(s: Shape) -> dict[str, float]:
    return {
        **{d: s[d] for d in ("batch", "new", "q_heads", "kv_heads", "head_dim")},
        "context": min(s["context"], s["window"]),
    }


def _equal_heads(s: Shape) -> dict[str, float]:
    """Heads whose keys and values have the mean size."""
    return {
        **{d: s[d] for d in ("batch", "new", "context")},
        "q_heads": s["heads"],
        "kv_heads": s["heads"],
        "head_dim": (s["key_dim"] + s["value_dim"]) / 2,
    }


_STAND_INS: Mapping[str, tuple[str, Callable[[Shape], dict[str, float]]]] = {
    "vllm_bmm": ("gemm", _gemm),
    "vllm_window_prefill": ("vllm_attention_prefill", _short_prompts),
    "vllm_window_decode": ("vllm_attention_decode", _short_context),
    "vllm_latent_prefill": ("vllm_attention_prefill", _equal_heads),
}
"""Kernel -> the one that stands for it, and its sizes from those of the op."""


def transferred_rel_se(op: Op, device: Device) -> tuple[float, float]:
    """Relative standard errors of latency and energy of ``op`` by its stand-in, of that alone."""
    latency, energy = TRANSFERRED_REL_SE
    narrow = bytes_per_value(op.dtype) < bytes_per_value(STAND_IN_DTYPE)
    if narrow and device.peak(op.dtype) == device.peak(STAND_IN_DTYPE):
        return math.hypot(latency, UNPACKED_REL_SE), math.hypot(energy, UNPACKED_REL_SE)
    return latency, energy


def stand_in(op: Op) -> Op:
    """What is nearly ``op``, of a calibrated kernel and in 16 bits; maybe itself."""
    if op.kernel in _STAND_INS:
        kernel, sizes = _STAND_INS[op.kernel]
        shape = sizes(op.sizes)
        op = replace(op, kernel=kernel, shape=tuple(shape[d] for d in KERNELS[kernel].dims))
    return replace(op, dtype=STAND_IN_DTYPE)
