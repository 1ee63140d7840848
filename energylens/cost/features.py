"""Op x device -> a physical prior and a feature vector; what predicting and fitting share.

The prior is a roofline with nominal efficiencies: it carries the scaling over decades, and
regressors learn only the (smooth, bounded) ratio of measurement to prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from energylens.graph import SPLIT_TOKENS, Op
from energylens.results import Kind
from energylens.spec.system import Device
from energylens.units import ARITHMETIC, bytes_per_value

Array = NDArray[np.float64]

COMPUTE_EFFICIENCY = 0.85  # nominal, of the dense peak at the maximum clock
BLOCK_EFFICIENCY = 0.75  # nominal, over that: scales of blocks are applied outside the matrix units
MEMORY_EFFICIENCY = 0.88  # nominal, of the datasheet bandwidth
LAUNCH_S = 1.5e-6  # nominal floor of one kernel in a graph
COLLECTIVE_S = 10e-6  # nominal floor of one collective
COLLECTIVE_BANDWIDTH_SHARE = 0.1  # nominal algorithm bandwidth over memory bandwidth
SM_LINK_BYTES_S = 20e9  # nominal algorithm bandwidth of one SM of a collective that has few
BASE_POWER_SHARE = 0.1  # nominal dynamic power of a kernel that does nothing, of (limit - idle)
COMPUTE_POWER_SHARE = (
    1.6  # the same of a GEMM at the dense peak and maximum clock: it would overrun the cap
)
MEMORY_POWER_SHARE = 0.8  # the same of a stream at full bandwidth

_TILES = ((64, 64, 0.55), (64, 128, 0.75), (64, 256, 0.85), (128, 128, 0.92), (256, 128, 1.0))
"""Tile height, width and relative efficiency of matrix kernels: enough to see wave quantisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Nominal time and above-idle energy of one execution, and what they were made of.

    ``compute_s`` and ``memory_s`` are the two roofs; ``compute_share`` in [0, 1] says how much of
    the time scales with 1/clock.
    """

    latency_s: float
    energy_j: float
    compute_s: float
    memory_s: float
    compute_share: float


def launches_of(op: Op) -> int:
    """CUDA kernels of one execution, by kernel: what a floor in time is made of.

    Not ``op.launches``, which is the engine's count of eager launches and differs between engines.
    """
    own = _fused_moe_launches(op.sizes) if op.kernel == "vllm_moe" else _LAUNCHES.get(op.kernel, 1)
    return own + len(_narrowed(op))


def _fused_moe_launches(sizes: Mapping[str, float]) -> int:
    """Kernels of vLLM's fused experts, as `fused_moe.py` of vLLM 0.24.0 launches them.

    Top-k, alignment to tiles (three), product, activation, product, sum. A few tokens skip the
    alignment for one fill; experts on other workers add zeros for the pairs that are theirs.
    """
    pairs = sizes["tokens"] * sizes["topk"]
    if sizes["rows"] < pairs:
        return 9
    return 6 if 4 * pairs <= sizes["experts"] else 8


def _narrowed(op: Op) -> tuple[float, ...]:
    """Values of each input that a kernel of its own brings to eight bits.

    That is so where the arithmetic is as narrow as the weights are: before a GEMM, and before both
    products of experts.
    """
    s = op.sizes
    if op.dtype not in _EIGHT_BITS:
        return ()
    if op.kernel == "gemm":
        return (s["m"] * s["k"],)
    if op.kernel == "vllm_moe":
        return (s["tokens"] * s["width"], s["tokens"] * s["topk"] * s["hidden"])
    return ()


_EIGHT_BITS = frozenset({"fp8", "fp8_block", "int8"})

_LAUNCHES: Mapping[str, int] = {
    "hf_rmsnorm": 6,
    "hf_rope": 10,
    "hf_silu_mul": 2,
    "hf_kv_concat": 2,
    "hf_repeat_kv": 2,
    "hf_prepare": 10,
    "attention_decode_masked": 2,
    # Router, sort, masks, two grouped products, the way back (transformers' integrations/moe.py).
    "hf_moe": 33,
}

_PASSES: Mapping[str, float] = {"hf_rmsnorm": 8.0, "hf_rope": 5.0, "hf_silu_mul": 5 / 3}
"""Eager modules write their intermediates: nominal device memory traffic over the least traffic.

Experts do so with their pairs: gathered, masked, multiplied out, masked, gated, multiplied in,
masked, weighted and sorted back, they are read and written twelve times in all.
"""


def prior(op: Op, device: Device) -> Prior:
    """Roofline with nominal efficiencies; also the fallback where nothing is measured."""
    if op.type.is_collective:
        return _collective_prior(op, device)
    moved = (op.bytes_read + op.bytes_written) * _PASSES.get(op.kernel, 1.0)
    moved += sum(_narrowed(op)) * op.carried_bytes  # read wide, and handed on narrow
    peak = device.peak(op.dtype) * (BLOCK_EFFICIENCY if op.dtype in ARITHMETIC else 1.0)
    compute = op.flops / (COMPUTE_EFFICIENCY * peak) if op.kernel in _MATRIX else 0.0
    memory = moved / (MEMORY_EFFICIENCY * device.memory_bandwidth_bytes_s)
    overlapped = memory
    if op.kernel == "hf_moe":
        s = op.sizes
        passes = 12 * (s["width"] + s["hidden"]) - 2 * (s["width"] + 3 * s["hidden"])
        more = s["tokens"] * s["topk"] * passes * bytes_per_value(op.dtype)
        memory += more / (MEMORY_EFFICIENCY * device.memory_bandwidth_bytes_s)
    if op.kernel == "vllm_moe":  # its activation and sum are kernels of their own
        s = op.sizes
        weights = 3 * s["active"] * s["width"] * s["hidden"] * bytes_per_value(op.dtype)
        overlapped = memory * weights / moved
    latency = LAUNCH_S * launches_of(op) + max(compute, overlapped) + (memory - overlapped)
    span = device.power_limit_w - device.idle_w
    power = span * (
        BASE_POWER_SHARE + (COMPUTE_POWER_SHARE * compute + MEMORY_POWER_SHARE * memory) / latency
    )
    share = compute**2 / (compute**2 + memory**2) if compute > 0 else 0.0
    return Prior(
        latency_s=latency,
        energy_j=power * latency,
        compute_s=compute,
        memory_s=memory,
        compute_share=share,
    )


def _collective_prior(op: Op, device: Device) -> Prior:
    seconds_per_byte = 1 / (COLLECTIVE_BANDWIDTH_SHARE * device.memory_bandwidth_bytes_s)
    if "sms" in op.sizes:
        seconds_per_byte += 1 / (SM_LINK_BYTES_S * op.sizes["sms"])
    latency = COLLECTIVE_S + op.bytes_read * seconds_per_byte
    power = 2 * BASE_POWER_SHARE * (device.power_limit_w - device.idle_w)
    return Prior(
        latency_s=latency, energy_j=power * latency, compute_s=0.0, memory_s=0.0, compute_share=0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the host time of a serving step depends on.

    Attributes:
        sequences, tokens: served, and new tokens of all of them.
        layers, expert_layers: of the model, and those of them that have experts.
        captured_tokens: of the largest step that the engine captures; vLLM's own by default.
    """

    sequences: float
    tokens: float
    layers: int
    expert_layers: int = 0
    captured_tokens: int = SPLIT_TOKENS

    @property
    def is_captured(self) -> bool:
        """Whether the step is small enough to be launched as captured graphs."""
        return self.tokens <= self.captured_tokens


def step_shape(ops: Sequence[Op]) -> StepShape:
    """Shape of the step that consists of ``ops``, from its attention.

    Blocks of layers are told apart by name and count of their attention.
    """
    attention = [o for o in ops if o.kind is Kind.ATTENTION]
    blocks = dict.fromkeys((o.name, o.count) for o in attention)
    first = next(iter(blocks), None)
    sizes = [o.sizes for o in attention if (o.name, o.count) == first]
    return StepShape(
        sequences=sum(s["batch"] for s in sizes),
        tokens=sum(s["batch"] * s["new"] for s in sizes),
        layers=sum(count for _, count in blocks),
        expert_layers=sum(o.count for o in ops if o.kind is Kind.MOE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How an op's time and power depend on clock and board; see `energylens.results.Cost`."""

    compute: float
    read: float
    dram: float


def shares(op: Op, p: Prior, latency_s: float, compute_scale: float) -> Shares:
    """Shares of an op that takes ``latency_s`` at the maximum clock.

    Time: over six H200s whose GEMV bandwidths differed by 8 %, weight reads (GEMMs at M = 1 … 8)
    and grouped-query decode attention followed the bandwidth; streams, copies and eager modules
    did not.
    Power: what a memory stream draws differed by 13 % between those boards; ops followed it in
    proportion to how much of the memory bandwidth they used, from not at all (rope, norms of few
    rows) to nearly fully (weight reads, cache copies).

    Args:
        op: the op.
        p: its prior.
        latency_s: its latency at the maximum clock.
        compute_scale: factor on the prior's compute share.
    """
    compute = min(1.0, compute_scale * p.compute_share)
    used = min(1.0, p.memory_s / latency_s)
    read = min(1.0 - compute, used) if op.kernel in _READERS else 0.0
    return Shares(compute=compute, read=read, dram=(1.0 - compute) * used)


_READERS = frozenset(
    {
        "gemm",
        "vllm_bmm",
        "attention_decode",
        "vllm_attention_decode",
        "vllm_window_decode",
        "vllm_latent_decode",
    }
)
_MATRIX = frozenset(
    {
        "gemm",
        "vllm_bmm",
        "attention_prefill",
        "attention_decode",
        "attention_decode_masked",
        "vllm_attention_prefill",
        "vllm_attention_decode",
        "vllm_window_prefill",
        "vllm_window_decode",
        "vllm_latent_prefill",
        "vllm_latent_decode",
        "hf_moe",
        "vllm_moe",
    }
)


def _log2(*values: float) -> list[float]:
    return [math.log2(max(v, 1e-9)) for v in values]


def wave_waste(m: float, n: float, sm_count: int) -> float:
    """log2 of the share of the device that the best tile keeps busy; 0 is all of it.

    Tiles do not fill their last wave over the SMs; small shapes fill no wave at all.
    """
    best = 0.0
    for height, width, efficiency in _TILES:
        tiles = math.ceil(m / height) * math.ceil(n / width)
        slots = math.ceil(tiles / sm_count) * sm_count * height * width
        best = max(best, efficiency * m * n / slots)
    return math.log2(best)


def _gemm(op: Op, device: Device) -> list[float]:
    m, n, k = op.shape
    return [*_log2(m, n, k), wave_waste(m, n, device.sm_count)]


def _attention_prefill(op: Op, device: Device) -> list[float]:
    s = op.sizes
    return _log2(
        s["new"],
        s["context"],
        s["batch"] * s["q_heads"],
        s["q_heads"] / s["kv_heads"],
        s["head_dim"],
    )


def _attention_decode(op: Op, device: Device) -> list[float]:
    s = op.sizes
    sizes = (s["context"], s["batch"] * s["kv_heads"], s["q_heads"] / s["kv_heads"], s["head_dim"])
    return [*_log2(*sizes), _aligned(s["context"])]


def _paged_prefill(op: Op, device: Device) -> list[float]:
    s = op.sizes
    return [*_attention_prefill(op, device), float(s["batch"] * s["new"] <= SPLIT_TOKENS)]


def _paged_decode(op: Op, device: Device) -> list[float]:
    return _attention_decode(op, device)[:-1]


def _aligned(context: float) -> float:
    """Whether rows of 16-bit values over the context start on 16-byte boundaries: kernels care."""
    return float(context % 8 == 0)


def _rope(op: Op, device: Device) -> list[float]:
    s = op.sizes
    return _log2(s["batch"] * s["new"], (s["q_heads"] + s["kv_heads"]) * s["head_dim"])


def _kv_write(op: Op, device: Device) -> list[float]:
    s = op.sizes
    return _log2(s["batch"] * s["new"], s["kv_heads"] * s["head_dim"])


def _kv_concat(op: Op, device: Device) -> list[float]:
    s = op.sizes
    return _log2(
        s["context"],
        s["batch"] * s["kv_heads"] * s["head_dim"],
        s["context"] / (s["context"] - s["new"] + 1),
    )


def _repeat_kv(op: Op, device: Device) -> list[float]:
    s = op.sizes
    width, group = s["batch"] * s["kv_heads"] * s["head_dim"], s["q_heads"] / s["kv_heads"]
    return [*_log2(s["context"], width, group), _aligned(s["context"])]


def _prepare(op: Op, device: Device) -> list[float]:
    s = op.sizes
    return _log2(s["new"], s["batch"], s["context"])


_MOE_FEATURES = ("tokens", "rows", "active", "skew", "width", "hidden")


def _moe(op: Op, device: Device) -> list[float]:
    s = op.sizes
    rows, active = max(s["rows"], 1.0), max(s["active"], 1.0)
    skew = max(s["largest"] * active / rows, 1.0)
    return _log2(s["tokens"], rows, active, skew, s["width"], s["hidden"])


def _hf_moe(op: Op, device: Device) -> list[float]:
    # Shares instead of counts: what a worker's part of the pairs changes, the prior knows.
    s = op.sizes
    rows, active = max(s["rows"], 1.0), max(s["active"], 1.0)
    own, skew = rows / (s["tokens"] * s["topk"]), max(s["largest"] * active / rows, 1.0)
    return _log2(s["tokens"], own, active / s["experts"], skew, s["width"], s["hidden"])


def _plain(op: Op, device: Device) -> list[float]:
    return _log2(*op.shape)


_FEATURES: Mapping[str, tuple[tuple[str, ...], Callable[[Op, Device], list[float]]]] = {
    "gemm": (("m", "n", "k", "wave"), _gemm),
    "attention_prefill": (("new", "context", "heads", "group", "head_dim"), _attention_prefill),
    "attention_decode": (("context", "kv", "group", "head_dim", "aligned"), _attention_decode),
    "attention_decode_masked": (
        ("context", "kv", "group", "head_dim", "aligned"),
        _attention_decode,
    ),
    "vllm_attention_prefill": (
        ("new", "context", "heads", "group", "head_dim", "split"),
        _paged_prefill,
    ),
    "vllm_attention_decode": (("context", "kv", "group", "head_dim"), _paged_decode),
    "hf_rope": (("tokens", "width"), _rope),
    "vllm_rope": (("tokens", "width"), _rope),
    "vllm_norm_rope": (("tokens", "width"), _rope),
    "vllm_kv_write": (("tokens", "width"), _kv_write),
    "hf_kv_concat": (("context", "width", "growth"), _kv_concat),
    "hf_repeat_kv": (("context", "width", "group", "aligned"), _repeat_kv),
    "hf_prepare": (("new", "batch", "context"), _prepare),
    "hf_moe": (("tokens", "own", "active", "skew", "width", "hidden"), _hf_moe),
    "vllm_moe": (_MOE_FEATURES, _moe),
}


def feature_names(kernel: str) -> tuple[str, ...]:
    """Names of the features of a kernel, in the order of `features`."""
    if kernel in _FEATURES:
        return _FEATURES[kernel][0]
    from energylens.graph import kernel_type

    return kernel_type(kernel).dims


def features(ops: Sequence[Op], device: Device) -> Array:
    """Feature matrix of ops of one kernel, [ops, features]."""
    function = _FEATURES[ops[0].kernel][1] if ops[0].kernel in _FEATURES else _plain
    return np.array([function(op, device) for op in ops], dtype=np.float64)
