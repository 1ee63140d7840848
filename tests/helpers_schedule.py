"""Steps of a few workers for the array twin of `energylens.schedule.step`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from energylens.graph import Op
from energylens.results import Cost
from energylens.schedule import Constants, Host, Kernels, Worker, totals


def totals_of(
    ops: Sequence[Op],
    costs: Sequence[Cost],
    workers: Sequence[Worker],
    constants: Constants,
    host: Host,
) -> tuple[float, float]:
    """Seconds and joules of one step."""
    count = np.array([op.count for op in ops])
    compute = np.array([cost.compute_share for cost in costs])
    gaps_s = constants.gap_s * sum(op.count * op.launches for op in ops)
    latency, energy = totals(
        Kernels(
            scaled_s=np.array([(count * w.latency_s * compute).sum() for w in workers]),
            fixed_s=np.array([(count * w.latency_s * (1 - compute)).sum() for w in workers])
            + gaps_s,
            energy_j=np.array([(count * w.energy_j).sum() for w in workers]),
        ),
        np.array([w.idle_w for w in workers]),
        workers[0].cap_w,
        constants,
        step_s=np.array(host.step_s),
        serial_s=np.array(host.serial_s),
        linked=np.array(any(op.type.is_collective for op in ops)),
    )
    return float(latency), float(energy)
