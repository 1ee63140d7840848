"""What one worker must hold: weights, cache, activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from energylens.graph import Op
from energylens.lower.kernels import Lowered
from energylens.lower.latent import Latent
from energylens.lower.shard import product
from energylens.results import Kind, Memory
from energylens.spec.model import Block, Entry, Spec
from energylens.spec.system import Device, Mode, Phase, Step, Workload, chunked
from energylens.units import bytes_per_value


def parameters(spec: Spec) -> int:
    """Parameters of the whole model: weights, biases and norm weights, tied ones once."""
    return sum(
        b.repeat * sum(_weight_values(spec, e, spec.ranks)) for b in spec.blocks for e in b.cascade
    )


def memory(
    lowered: Lowered,
    workload: Workload,
    device: Device,
    modes: Mapping[Phase, Mode] = MappingProxyType({}),
) -> Memory:
    """Memory of one worker of a stage, the one with the most experts, in bytes.

    Weights include replicas (KV heads fewer than workers, entries that the engine does not split).
    The cache is that of the whole batch at its longest context. Activations are an estimate: what
    the widest kernel of the prefill or of the last decode step reads and writes besides weights and
    cache, plus the residual stream. ``modes`` win over the engine's launch modes: captured steps
    hold other tensors than eager ones.
    """
    spec, engine = lowered.spec, lowered.engine
    batch = -(-workload.batch // lowered.sharding.dp)
    longest = max(workload.prompt_len + workload.gen_len, workload.context_len or 0)
    weights = 0.0
    for block, entry, sizes in _entries(lowered):
        stored, carried = _weight_values(spec, entry, sizes)
        weights += block.repeat * stored * bytes_per_value(spec.stored(entry))
        weights += block.repeat * carried * bytes_per_value(spec.precision.activations)
    for item, (part, whole) in zip(lowered.items, lowered.shares, strict=True):
        if isinstance(item, Latent):
            weights += item.unpacked_bytes * part / whole
    return Memory(
        weights_bytes=weights,
        kv_cache_bytes=cache_bytes(lowered, batch, longest),
        activations_bytes=_activations_bytes(lowered, workload, {**engine.modes, **modes}),
        reserve_bytes=engine.reserve_bytes,
        capacity_bytes=device.memory_bytes,
    )


def fullest(
    stages: Sequence[Lowered],
    workload: Workload,
    device: Device,
    modes: Mapping[Phase, Mode] = MappingProxyType({}),
) -> Memory:
    """`memory` of the stage that holds the most: it decides what fits."""
    distinct = {id(stage): stage for stage in stages}.values()
    held = [memory(stage, workload, device, modes) for stage in distinct]
    return max(held, key=lambda m: m.used_bytes)


def cache_bytes(lowered: Lowered, sequences: int, length: float) -> float:
    """Cache of sequences of a length on one worker; layers with a window keep no more than it."""
    values = 0.0
    for block, entry, sizes in _entries(lowered):
        if entry.cache and entry.einsum is not None:
            kept = length if block.window is None else min(length, block.window)
            values += block.repeat * product(entry.einsum.output.ranks, sizes) * sequences * kept
    return values * bytes_per_value(lowered.spec.precision.kv_cache)


def _entries(lowered: Lowered) -> Iterator[tuple[Block, Entry, Mapping[str, int]]]:
    experts = lowered.experts
    for block in lowered.spec.blocks:
        for entry in block.cascade:
            split = entry.name not in lowered.engine.tp_replicated
            sizes = lowered.sharding.sizes(split)
            if split and experts is not None:
                held = experts.routing.experts + experts.redundant
                sizes = {**sizes, experts.rank: -(-held // experts.ways)}
            yield block, entry, sizes


def _weight_values(spec: Spec, entry: Entry, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Values that an entry keeps: weights, and a bias, which is stored as activations are.

    A norm that names no weight has one vector. Experts that are summed have a bias each.
    """
    if entry.tied is not None:
        return 0, 0
    weights = [a for a in entry.accesses if a.is_weight]
    if entry.op == "rmsnorm" and not weights:
        return product(entry.inputs[0].ranks[-1:], sizes), 0
    bias = 0
    if entry.bias and entry.einsum is not None:
        held = {r for a in weights for r in a.ranks}
        expert = {spec.moe["rank"]} if spec.moe is not None else set()
        bias = product(held & (expert | set(entry.einsum.output.ranks)), sizes)
    return sum(product(a.ranks, sizes) for a in weights), bias


def _activations_bytes(lowered: Lowered, workload: Workload, modes: Mapping[Phase, Mode]) -> float:
    full = workload.prompt_len + workload.gen_len
    mode, serving = modes.get(Phase.PREFILL, Mode.EAGER), lowered.engine.serving
    prefill = Step.prefill(workload.batch, workload.prompt_len, mode)
    if mode is Mode.SERVING and serving is not None:
        limit = serving.offline_batch_tokens * lowered.sharding.dp
        begun = min(workload.batch, limit // workload.prompt_len + 1)
        prefill = chunked(Step.prefill(begun, workload.prompt_len, mode), limit)[0]
    steps = (
        prefill,
        Step.decode(workload.batch, full, modes.get(Phase.DECODE, Mode.EAGER)),
    )
    ops = [op for step in steps for op in lowered.ops(step)]
    tokens = max(step.share(lowered.sharding.dp).tokens for step in steps)
    arriving = tokens * lowered.arriving * bytes_per_value(lowered.spec.precision.activations)
    residual = max((op.bytes_written for op in ops if op.kernel == "embedding"), default=arriving)
    return residual + max((_live_bytes(op) for op in ops), default=0.0)


def _live_bytes(op: Op) -> float:
    """Bytes that an op reads and writes, weights and cached tensors aside."""
    if op.kind is Kind.GEMM:
        s = op.sizes
        return s.get("heads", 1.0) * s["m"] * (s["k"] + s["n"]) * op.carried_bytes
    if op.kind is Kind.ATTENTION:
        return 2 * op.bytes_written
    if op.kind is Kind.MOE:  # what one product writes and the next one reads
        return 2 * op.bytes_written
    if op.kind in (Kind.COPY, Kind.COLLECTIVE):
        return op.bytes_written
    return op.bytes_read + op.bytes_written
