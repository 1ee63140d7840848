"""Ops -> costs on a typical board: regressors where there are any, the roofline elsewhere."""

from __future__ import annotations

import abc
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from energylens.cost.features import features, prior, shares
from energylens.cost.overlap import OverlapLaw, Split, clock_share
from energylens.cost.regress import GaussianProcess
from energylens.cost.roofline import roofline
from energylens.cost.transfer import stand_in, transferred_rel_se
from energylens.graph import Op, make_op
from energylens.results import Cost, Source
from energylens.spec.system import Device, Link

Key = tuple[str, tuple[float, ...], str]
"""Kernel, shape and dtype; see `energylens.graph.Op.key`."""

INTERPOLATED_WITHIN = 1.5  # length scales to the nearest calibrated point
SAME = 1e-5  # features are stored to seven digits
UNVARIED_REL_SE = 0.1  # of an op that differs in a size that no calibrated point varied
# Latency and energy of a collective over another number of workers than was measured: by the
# published ratio of latencies, and without one.
PUBLISHED_WORKERS_REL_SE, UNKNOWN_WORKERS_REL_SE = (0.15, 0.25), (0.5, 0.5)
STAND_IN: Mapping[str, str] = {
    "vllm_all_reduce": "all_reduce",
    "limited_all_reduce": "all_reduce",
    "send": "all_gather",
}
"""Kernel -> the one that it is priced as where it was not calibrated itself."""
STAND_IN_REL_SE = 0.3
HANDOVER_BYTES = 8 * 2**20
"""Messages of vLLM's own all-reduce are smaller; others are NCCL's."""


class AbstractCostModel(abc.ABC):
    """Prices ops on a typical board of one device type."""

    @abc.abstractmethod
    def costs(self, ops: Sequence[Op]) -> list[Cost]:
        """Cost of one execution of each op, in order: at the maximum clock, energy above idle.

        Never fails for a known kernel: what was not calibrated comes back with a weaker `Source`
        and a wider standard error.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelModel:
    """Regressors of one kernel.

    Attributes:
        kernel: key of `graph.KERNELS`.
        latency: log(seconds / prior) at the maximum clock on a typical board.
        power: log(above-idle watts / prior) likewise.
        latency_rel_se, power_rel_se: root mean square of the held-out errors (whole shape groups
            left out).
        measured: ops (kernel, shape, dtype) that were calibrated as they are.
        keys: the op of each training point, where a point's own deviation from its neighbours is to
            be kept: a library's choice of tiles is no noise, and an op that was measured is
            predicted as it was measured.
        latency_repeat_sd, power_repeat_sd: how well one measurement repeats, in natural logs.
    """

    kernel: str
    latency: GaussianProcess
    power: GaussianProcess
    latency_rel_se: float
    power_rel_se: float
    measured: frozenset[Key]
    keys: tuple[Key, ...] = ()
    latency_repeat_sd: float = 0.01
    power_repeat_sd: float = 0.02

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Those that were calibrated."""
        return frozenset(dtype for _, _, dtype in self.measured)

    @cached_property
    def _own(self) -> Mapping[Key, tuple[float, float, int]]:
        """Deviation of each measured op from the regressors in log time and power; its points."""
        if not self.keys:
            return {}
        number = {key: i for i, key in enumerate(dict.fromkeys(self.keys))}
        groups = np.array([number[key] for key in self.keys])
        time = self.latency.deviations(groups, self.latency_repeat_sd).tolist()
        power = self.power.deviations(groups, self.power_repeat_sd).tolist()
        points = np.bincount(groups).tolist()
        return dict(zip(number, zip(time, power, points, strict=True), strict=True))

    def costs(
        self, ops: Sequence[Op], device: Device, compute_scale: float, compute_stretch: float
    ) -> list[Cost]:
        """Price ops of this kernel; see `AbstractCostModel.costs`."""
        x = features(ops, device)
        log_t, sd_t = self.latency.predict(x)
        log_p, sd_p = self.power.predict(x)
        near = self.latency.nearest(x)
        known = self.latency.x
        unvaried = (np.ptp(known, axis=0) < SAME) & (np.abs(x - known[0]) > SAME)
        out = []
        for i, op in enumerate(ops):
            p = prior(op, device)
            own_t, own_p, points = self._own.get(op.key, (0.0, 0.0, 0))
            if points:
                sd_t[i] = self.latency_repeat_sd / math.sqrt(points)
                sd_p[i] = self.power_repeat_sd / math.sqrt(points)
            latency = p.latency_s * math.exp(log_t[i] + own_t)
            power = p.energy_j / p.latency_s * math.exp(log_p[i] + own_p)
            s = shares(op, p, latency, compute_scale)
            latency *= 1.0 + compute_stretch * s.compute
            if op.key in self.measured:
                source = Source.MEASURED
            elif near[i] <= INTERPOLATED_WITHIN and not unvaried[i].any():
                source = Source.INTERPOLATED
            else:
                source = Source.EXTRAPOLATED
            # A collective's time depends on what runs around it: measured alone is not known.
            exact = source if not op.type.is_collective else max(source, Source.INTERPOLATED)
            latency_se = _rel_se(sd_t[i], self.latency_rel_se, exact)
            if unvaried[i].any():
                latency_se = math.hypot(latency_se, UNVARIED_REL_SE)
            out.append(
                Cost(
                    latency_s=latency,
                    energy_j=power * latency,
                    compute_share=s.compute,
                    read_share=s.read,
                    dram_share=s.dram,
                    latency_rel_se=latency_se,
                    energy_rel_se=math.hypot(
                        _rel_se(sd_p[i], self.power_rel_se, source), latency_se
                    ),
                    source=source,
                )
            )
        return out


def _standing_in(op: Op) -> Op:
    """The op that is priced in the place of one whose kernel was not calibrated."""
    values, workers = op.shape[:2]
    if op.kernel == "send":  # in an all-gather of two, each sends half of the result
        values *= workers
    return replace(op, kernel=STAND_IN[op.kernel], shape=(values, workers))


def _by_ratio(cost: Cost, ratio: float, rel_ses: tuple[float, float], source: Source) -> Cost:
    """A cost by a ratio; its latency and energy are as much less certain, its source no better."""
    return replace(
        cost,
        latency_s=cost.latency_s * ratio,
        energy_j=cost.energy_j * ratio,
        latency_rel_se=math.hypot(cost.latency_rel_se, rel_ses[0]),
        energy_rel_se=math.hypot(cost.energy_rel_se, rel_ses[1]),
        source=max(cost.source, source),
    )


def _rel_se(sd: float, held_out: float, source: Source) -> float:
    """The regressor's own spread; away from measured shapes at least the held-out error."""
    return float(sd) if source is Source.MEASURED else max(float(sd), held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published collective latencies: how time depends on the number of workers.

    Attributes:
        workers: counts of the table, ascending.
        values: message sizes (values of the result), ascending.
        latency_s: kernel -> seconds, [workers, values].
    """

    workers: tuple[int, ...]
    values: tuple[float, ...]
    latency_s: Mapping[str, NDArray[np.float64]]

    def ratio(self, kernel: str, values: float, workers: int, reference: int) -> float:
        """Time with ``workers`` over time with ``reference``, log-log interpolated in the size."""
        return self.seconds(kernel, values, workers) / self.seconds(kernel, values, reference)

    def seconds(self, kernel: str, values: float, workers: int) -> float:
        """Latency, log-log interpolated in the size and in the number of workers."""
        by_count = [
            np.interp(math.log(values), np.log(self.values), np.log(row))
            for row in self.latency_s[kernel]
        ]
        return math.exp(float(np.interp(math.log(workers), np.log(self.workers), by_count)))


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModelSet(AbstractCostModel):
    """Routes each op to its kernel's regressors.

    Attributes:
        device: datasheet of the device that is priced.
        kernels: kernel -> model.
        compute_scale, compute_stretch: from the mixes; see `energylens.cost.bundle.Laws`.
        overlap: how compute and collectives beside it hold each other up.
        link: interconnect, for collectives without a calibration.
        published: worker dependence of the collectives beyond those measured.
        one_shot: published latencies of an all-reduce by one kernel, which stand for vLLM's own.
    """

    device: Device
    kernels: Mapping[str, KernelModel] = field(default_factory=dict)
    compute_scale: float = 1.0
    compute_stretch: float = 0.0
    overlap: OverlapLaw = field(default_factory=OverlapLaw)
    link: Link | None = None
    published: Published | None = None
    one_shot: Published | None = None

    def costs(self, ops: Sequence[Op]) -> list[Cost]:
        """See `AbstractCostModel.costs`."""
        out: list[Cost | None] = [None] * len(ops)
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, op in enumerate(ops):
            groups[op.kernel, op.dtype].append(i)
        for indices in groups.values():
            batch = [ops[i] for i in indices]
            for i, cost in zip(indices, self._group_costs(batch), strict=True):
                out[i] = cost
        return [c for c in out if c is not None]

    def _group_costs(self, ops: Sequence[Op]) -> list[Cost]:
        """Costs of ops of one kernel and dtype; another dtype runs other kernels."""
        if ops[0].kernel == "overlapped_all_reduce":
            return [self._overlapped(op) for op in ops]
        model = self.kernels.get(ops[0].kernel)
        other = STAND_IN.get(ops[0].kernel, "")
        if model is None and other in self.kernels:
            costs = self._group_costs([_standing_in(op) for op in ops])
            return [self._stood_in(op, cost) for op, cost in zip(ops, costs, strict=True)]
        if model is None or ops[0].dtype not in model.dtypes:
            return self._transferred(ops)
        if not ops[0].type.is_collective:
            return self._own(model, ops)
        return [self._collective(model, op) for op in ops]

    def _transferred(self, ops: Sequence[Op]) -> list[Cost]:
        """Costs of ops of one kernel and dtype by the calibrated ones that stand for them."""
        others = [stand_in(op) for op in ops]
        model = self.kernels.get(others[0].kernel)
        collective = ops[0].type.is_collective
        if model is None or collective or others[0].dtype not in model.dtypes:
            return [roofline(op, self.device, self.link) for op in ops]
        costs = zip(ops, others, self._own(model, others), strict=True)
        return [self._scaled(op, other, cost) for op, other, cost in costs]

    def _scaled(self, op: Op, other: Op, cost: Cost) -> Cost:
        """The cost of ``op`` from that of another one, by the ratio of their priors."""
        own, its = prior(op, self.device), prior(other, self.device)
        latency = cost.latency_s * own.latency_s / its.latency_s
        s = shares(op, own, latency, self.compute_scale)
        latency_se, energy_se = transferred_rel_se(op, self.device)
        return replace(
            cost,
            latency_s=latency,
            energy_j=cost.energy_j * own.energy_j / its.energy_j,
            compute_share=s.compute,
            read_share=s.read,
            dram_share=s.dram,
            latency_rel_se=math.hypot(cost.latency_rel_se, latency_se),
            energy_rel_se=math.hypot(cost.energy_rel_se, energy_se),
            source=max(cost.source, Source.TRANSFERRED),
        )

    def _stood_in(self, op: Op, cost: Cost) -> Cost:
        """The cost of vLLM's own all-reduce from that of NCCL's, to which it hands over.

        Or that of one on few SMs from that of one on as many as NCCL likes, or that of sending one
        way from that of two workers that send each other as much.
        """
        is_own = op.kernel == "vllm_all_reduce"
        if is_own and op.bytes_read >= HANDOVER_BYTES:
            return cost
        ratio, table = 1.0, self.one_shot
        if op.kernel == "limited_all_reduce":
            whole = prior(_standing_in(op), self.device)
            ratio = prior(op, self.device).latency_s / whole.latency_s
        if is_own and table is not None:
            # Beyond the largest published size, time grows with the size as NCCL's does.
            largest = min(op.shape[0], table.values[-1])
            workers = int(op.sizes["workers"])
            at_largest = cost.latency_s * largest / op.shape[0] if largest < op.shape[0] else None
            published = table.seconds("all_reduce", largest, workers)
            ratio = min(1.0, published / (at_largest or cost.latency_s))
        return _by_ratio(cost, ratio, (STAND_IN_REL_SE, STAND_IN_REL_SE), Source.TRANSFERRED)

    def _collective(self, model: KernelModel, op: Op) -> Cost:
        """Measured worker counts directly; others by the published dependence on the count."""
        known = {int(key[1][1]) for key in model.measured}
        workers = int(op.sizes["workers"])
        if workers in known:
            return self._own(model, [op])[0]
        reference = max(known)
        same = replace(op, shape=(op.shape[0], float(reference), *op.shape[2:]))
        cost = self._own(model, [same])[0]
        table = self.published
        ratio, rel_ses = 1.0, UNKNOWN_WORKERS_REL_SE
        kernel = "all_reduce" if op.kernel == "limited_all_reduce" else op.kernel
        if table is not None and kernel in table.latency_s:
            ratio = table.ratio(kernel, op.shape[0], workers, reference)
            rel_ses = PUBLISHED_WORKERS_REL_SE
        return _by_ratio(cost, ratio, rel_ses, Source.EXTRAPOLATED)

    def _overlapped(self, op: Op) -> Cost:
        """What all-reduces beside a GEMM in chunks add to the GEMM's time, and their energy."""
        s, chunks = op.sizes, op.sizes["chunks"]
        rows = math.ceil(s["m"] / chunks)
        gemm, reduce = self.costs(
            (
                make_op("gemm", dtype=op.dtype, m=rows, n=s["n"], k=s["k"]),
                make_op(
                    "limited_all_reduce",
                    values=math.ceil(s["values"] / chunks),
                    workers=s["workers"],
                    sms=s["sms"],
                ),
            )
        )
        split = Split(
            chunks=chunks,
            rows=rows,
            columns=s["n"],
            sms=s["sms"],
            sm_count=self.device.sm_count,
        )

        def exposed_s(clock: float) -> float:
            gemm_s = gemm.latency_s * (gemm.compute_share / clock + 1.0 - gemm.compute_share)
            return self.overlap.seconds(gemm_s, reduce.latency_s, split) - chunks * gemm_s

        latency = exposed_s(1.0)
        together = self.overlap.rel_se * (latency + chunks * gemm.latency_s) / latency
        return Cost(
            latency_s=latency,
            energy_j=chunks * reduce.energy_j,
            compute_share=clock_share(exposed_s),
            read_share=0.0,
            dram_share=0.0,
            latency_rel_se=math.hypot(reduce.latency_rel_se, together),
            energy_rel_se=reduce.energy_rel_se,
            source=max(gemm.source, reduce.source, self._split_source(s["sms"])),
        )

    def _split_source(self, sms: float) -> Source:
        """Of collectives on so many SMs: no more than were calibrated tell how a GEMM fares."""
        model = self.kernels.get("limited_all_reduce")
        most = max((shape[2] for _, shape, _ in model.measured), default=0.0) if model else 0.0
        return Source.INTERPOLATED if sms <= most else Source.EXTRAPOLATED

    def _own(self, model: KernelModel, ops: Sequence[Op]) -> list[Cost]:
        return model.costs(ops, self.device, self.compute_scale, self.compute_stretch)
