"""The datasheet model: what is said where nothing was measured, with an honest, wide interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from energylens.cost.features import COLLECTIVE_S, SM_LINK_BYTES_S, prior, shares
from energylens.graph import Op
from energylens.results import Cost, Source
from energylens.spec.system import Device, Link

# An unfitted roofline was 12 % off for GEMMs, and up to twice for eager modules and small kernels.
LATENCY_REL_SE = 0.35
ENERGY_REL_SE = 0.40
LINK_EFFICIENCY = 0.7  # nominal


def roofline(op: Op, device: Device, link: Link | None = None) -> Cost:
    """Cost from the datasheet alone.

    Args:
        op: any op; a collective needs ``link``.
        device: datasheet.
        link: interconnect of the workers; without one, collectives cost their nominal prior.
    """
    if op.type.is_collective:
        return _collective(op, device, link)
    p = prior(op, device)
    s = shares(op, p, p.latency_s, 1.0)
    return Cost(
        latency_s=p.latency_s,
        energy_j=p.energy_j,
        compute_share=s.compute,
        read_share=s.read,
        dram_share=s.dram,
        latency_rel_se=LATENCY_REL_SE,
        energy_rel_se=ENERGY_REL_SE,
        source=Source.ROOFLINE,
    )


BUS_FACTOR: Mapping[str, Callable[[float], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "vllm_all_reduce": lambda n: 2 * (n - 1) / n,
    "limited_all_reduce": lambda n: 2 * (n - 1) / n,
    "overlapped_all_reduce": lambda n: 2 * (n - 1) / n,  # as if nothing of it were hidden
    "send": lambda n: 1.0,
}
"""Traffic per worker over the size of the result, as nccl-tests define bus bandwidth."""


def _collective(op: Op, device: Device, link: Link | None) -> Cost:
    p = prior(op, device)
    latency = p.latency_s
    if link is not None:
        workers = op.sizes["workers"]
        traffic = BUS_FACTOR[op.kernel](workers) * op.bytes_read
        latency = (
            COLLECTIVE_S
            + link.latency_s * (workers - 1)
            + traffic / (LINK_EFFICIENCY * link.bandwidth_bytes_s)
        )
        if "sms" in op.sizes:
            latency += op.bytes_read / (SM_LINK_BYTES_S * op.sizes["sms"])
    return Cost(
        latency_s=latency,
        energy_j=p.energy_j * latency / p.latency_s,
        compute_share=0.0,
        read_share=0.0,
        dram_share=0.0,
        latency_rel_se=LATENCY_REL_SE,
        energy_rel_se=ENERGY_REL_SE,
        source=Source.ROOFLINE,
    )
