"""Which samples a bundle is fitted on, and the boards that they were measured on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from energylens.cost.board import Board, board, typical_anchor
from energylens.cost.bundle import Laws
from energylens.errors import CalibrationError
from energylens.results import BoardAnchor
from energylens.spec.system import Device
from energylens.store import Provenance, Sample, Store, check_power_limits

CAPPED_BELOW = 0.97  # of the maximum clock: the op held the power cap
STANDS_ON: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "torch")}
"""Provider -> whose samples its bundle is fitted on, where not on its own alone.

vLLM leaves its GEMMs to PyTorch, and how kernels compose is a property of the board.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Usable samples with their boards.

    ``limit_w`` is infinite where the device has power modes, whose names are no caps.
    """

    device: Device
    runs: Sequence[Provenance]
    limit_w: float
    anchors: Mapping[str, BoardAnchor]
    typical: BoardAnchor
    ops: Mapping[str, list[Sample]]
    mixes: list[Sample]
    overlaps: list[Sample]
    hosts: list[Sample]
    idles: list[Sample]


def gather(
    stores: Sequence[Store], device: Device, provider: str
) -> tuple[Data, Mapping[str, int]]:
    """Usable samples for the bundle of a provider, and how many are left out for which reason.

    Raises:
        CalibrationError: no usable samples, no anchors, or runs that do not belong together.
    """
    runs = _runs(stores, provider)
    limit_w, anchors = _circumstances(runs, device, ", ".join(str(s.folder) for s in stores))
    skipped: dict[str, int] = defaultdict(int)
    ops: dict[str, list[Sample]] = defaultdict(list)
    blocks: dict[str, list[Sample]] = {"mix": [], "overlap": [], "host": [], "idle": []}
    wanted = {run.run_id: run for run in runs}
    for sample in (s for store in stores for s in store.samples if s.run_id in wanted):
        reason = _why_unused(sample, anchors)
        if reason:
            skipped[reason] += 1
        elif sample.block == "op":
            ops[sample.op.kernel].append(sample)
        elif sample.block in blocks and not _is_others_host(sample, wanted, provider):
            blocks[sample.block].append(sample)
    if not ops:
        raise CalibrationError(f"no usable samples: {dict(skipped) or 'the folders are empty'}")
    data = Data(
        device=device,
        runs=runs,
        limit_w=limit_w,
        anchors=anchors,
        typical=typical_anchor(list(anchors.values())),
        ops=ops,
        mixes=blocks["mix"],
        overlaps=blocks["overlap"],
        hosts=blocks["host"],
        idles=blocks["idle"],
    )
    return data, dict(skipped)


def _is_others_host(sample: Sample, runs: Mapping[str, Provenance], provider: str) -> bool:
    """Whether it is a host time of another provider's engine: kernels are shared, hosts are not."""
    return sample.block == "host" and runs[sample.run_id].provider != provider


def _runs(stores: Sequence[Store], provider: str) -> list[Provenance]:
    """Runs that the bundle of ``provider`` stands on."""
    wanted = STANDS_ON.get(provider, (provider,))
    runs = [run for store in stores for run in store.runs.values()]
    if not any(run.provider == provider for run in runs):
        others = ", ".join(sorted({run.provider for run in runs})) or "no run"
        raise CalibrationError(
            f"no run measured {provider}'s kernels (found: {others}); "
            f"`energylens calibrate --provider {provider}` measures them"
        )
    return [run for run in runs if run.provider in wanted]


def _circumstances(
    runs: Sequence[Provenance], device: Device, where: str
) -> tuple[float, Mapping[str, BoardAnchor]]:
    """Power limit of all runs, and the mean anchor of each board."""
    anchors: dict[str, list[BoardAnchor]] = defaultdict(list)
    check_power_limits(runs, where)
    for run in runs:
        if run.device != device.name:
            raise CalibrationError(f"run {run.run_id} is of {run.device}, not of {device.name}")
        for a in run.anchors.boards if run.anchors else ():
            anchors[a.board_uuid].append(a)
    algorithms = {run.versions["nccl_algo"] for run in runs if "nccl_algo" in run.versions}
    if len(algorithms) > 1:
        raise CalibrationError(
            f"collectives ran with different NCCL algorithms: {', '.join(sorted(algorithms))}; fit "
            "one at a time, the others' samples in a folder of their own (--out)"
        )
    if not anchors:
        raise CalibrationError(
            "no run has an anchor; `energylens calibrate` takes one at its start"
        )
    means = {
        u: replace(typical_anchor(a), board_uuid=u, time=a[-1].time) for u, a in anchors.items()
    }
    if device.power_mode is not None:
        return math.inf, means
    limits = [run.power_limit_w for run in runs if run.power_limit_w is not None]
    return (limits[0] if limits else device.power_limit_w), means


def _why_unused(sample: Sample, anchors: Mapping[str, BoardAnchor]) -> str:
    if sample.trial is None:
        return f"skipped: {sample.reason}"
    if not sample.trial.valid:
        return f"invalid: {sample.trial.reason}"
    powered = sample.block in ("op", "mix", "overlap")
    if powered and sample.trial.power_w is None:
        return "no power"
    if powered and any(u not in anchors for u in sample.board_uuid.split(";")):
        return "board without an anchor"
    return ""


def board_of(data: Data, uuids: str, laws: Laws) -> Board:
    """The board of a sample; of several workers, their mean."""
    boards = [board(data.anchors[u], data.typical, data.device, laws.eta) for u in uuids.split(";")]
    return Board(
        idle_w=float(np.mean([b.idle_w for b in boards])),
        memory_power=float(np.mean([b.memory_power for b in boards])),
        compute_power=float(np.mean([b.compute_power for b in boards])),
        memory_time=float(np.mean([b.memory_time for b in boards])),
    )


def clock_ratio(sample: Sample, device: Device) -> float:
    """Clock over the maximum of a sample that held the power cap, 1 of any other."""
    clock = sample.trial.clock_hz if sample.trial else None
    ratio = clock / device.clock_max_hz if clock else 1.0
    return ratio if ratio < CAPPED_BELOW else 1.0


def workers_of(sample: Sample) -> int:
    """Workers over which the sample ran."""
    return max((int(o.sizes["workers"]) for o in sample.ops if o.type.is_collective), default=1)


def above_idle_w(sample: Sample, data: Data) -> float | None:
    """Mean power per board of a sample above the boards' idle, or None where it cannot be told."""
    boards = [data.anchors.get(u) for u in sample.board_uuid.split(";")]
    known = [b.idle_w for b in boards if b is not None]
    if sample.trial is None or sample.trial.power_w is None or len(known) < len(boards):
        return None
    return sample.trial.power_w - float(np.mean(known))
