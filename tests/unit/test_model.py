"""Pricing of ops: sources, order, standard errors, worker counts that nobody measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from energylens.cost.features import features, prior
from energylens.cost.model import CostModelSet, KernelModel, Published
from energylens.cost.regress import GaussianProcess
from energylens.cost.roofline import roofline
from energylens.graph import Op, make_op
from energylens.results import Source
from energylens.spec.machines import load_device
from energylens.spec.system import Link

H200 = load_device("h200")
NOISE, HELD_OUT = 0.01, 0.04


def model_of(
    ops: list[Op], time: Callable[[Op], float], power: Callable[[Op], float]
) -> KernelModel:
    """Regressors that saw ``ops`` take ``time`` and ``power`` times their priors."""
    x = features(ops, H200)

    def process(ratio: Callable[[Op], float]) -> GaussianProcess:
        return GaussianProcess(
            x=x, y=np.log([ratio(o) for o in ops]), noise=np.full(len(ops), NOISE),
            length=np.full(x.shape[1], 2.0), signal=0.5, mean=0.0,
        )  # fmt: skip

    return KernelModel(
        kernel=ops[0].kernel, latency=process(time), power=process(power),
        latency_rel_se=HELD_OUT, power_rel_se=HELD_OUT, measured=frozenset(o.key for o in ops),
    )  # fmt: skip


def add(rows: float) -> Op:
    return make_op("hf_add", rows=rows, width=4096)


def reduce(values: float, workers: int) -> Op:
    return make_op("all_reduce", values=values, workers=workers)


MEASURED = [add(r) for r in (1, 4, 16, 64, 256, 1024)]
ADDS = model_of(MEASURED, lambda o: 1.2 + 0.01 * math.log2(o.shape[0]), lambda o: 0.9)
REDUCES = model_of([reduce(2.0**e, 2) for e in range(10, 24, 2)], lambda o: 1.3, lambda o: 0.7)
PUBLISHED = Published(
    workers=(2, 4, 8),
    values=(1024.0, 1048576.0),
    latency_s={"all_reduce": np.array([[1e-5, 4e-5], [2e-5, 6e-5], [3e-5, 9e-5]])},
)
MODEL = CostModelSet(
    device=H200, kernels={"hf_add": ADDS, "all_reduce": REDUCES}, published=PUBLISHED
)


def test_a_calibrated_point_comes_back_within_its_noise():
    for op, cost in zip(MEASURED, MODEL.costs(MEASURED), strict=True):
        nominal = prior(op, H200)
        measured_s = nominal.latency_s * (1.2 + 0.01 * math.log2(op.shape[0]))
        assert cost.latency_s == pytest.approx(measured_s, rel=NOISE)
        measured_w = 0.9 * nominal.energy_j / nominal.latency_s
        assert cost.energy_j / cost.latency_s == pytest.approx(measured_w, rel=NOISE)


def test_sources_weaken_with_the_distance_to_what_was_measured():
    ops = [add(16), add(24), add(64 * 1024**2), make_op("argmax", rows=1, width=128256)]
    assert [c.source for c in MODEL.costs(ops)] == [
        Source.MEASURED, Source.INTERPOLATED, Source.EXTRAPOLATED, Source.ROOFLINE,
    ]  # fmt: skip


def test_only_the_same_precision_was_measured():
    other = replace(add(16), dtype="fp32")
    mine, cost = MODEL.costs([add(16), other])
    assert mine.source is Source.MEASURED
    assert cost.source is Source.TRANSFERRED
    ratio = prior(other, H200).latency_s / prior(add(16), H200).latency_s
    assert cost.latency_s == pytest.approx(mine.latency_s * ratio) != mine.latency_s
    assert cost.latency_rel_se > 0.3


def test_name_count_and_launches_do_not_change_what_one_execution_costs():
    plain, other = MODEL.costs([add(16), replace(add(16), name="x", count=64, launches=3)])
    assert plain == other


def test_standard_errors_never_shrink_as_sources_weaken():
    measured, between, far = MODEL.costs([add(16), add(24), add(2.0**26)])
    assert measured.latency_rel_se <= 2 * NOISE
    assert between.latency_rel_se >= HELD_OUT
    assert far.latency_rel_se > between.latency_rel_se
    # Energy is power times time: both errors.
    assert between.energy_rel_se >= math.hypot(HELD_OUT, HELD_OUT) * (1 - 1e-12)


def test_costs_keep_the_order_of_the_ops():
    ops = [add(16), reduce(4096, 2), make_op("argmax", rows=1, width=64), add(1), reduce(1024, 2)]
    together = MODEL.costs(ops)
    for op, cost in zip(ops, together, strict=True):
        (own,) = MODEL.costs([op])
        assert cost.latency_s == pytest.approx(own.latency_s, rel=1e-9), op
        assert cost.source is own.source


def test_nothing_costs_nothing():
    assert MODEL.costs([]) == []


def test_a_kernel_without_regressors_is_the_rooflines_with_the_link():
    link = Link(name="l", bandwidth_bytes_s=1e11, latency_s=1e-6)
    op = make_op("all_gather", values=1e6, workers=2)
    assert replace(MODEL, link=link).costs([op]) == [roofline(op, H200, link)]


def test_unknown_worker_counts_scale_by_the_published_ratio_and_say_so():
    low, high = MODEL.costs([reduce(1024, 2), reduce(1024, 8)])
    assert high.latency_s == pytest.approx(3 * low.latency_s)
    assert high.energy_j == pytest.approx(3 * low.energy_j)
    assert low.source is Source.MEASURED
    assert high.source is Source.EXTRAPOLATED
    assert high.latency_rel_se > low.latency_rel_se
    assert high.energy_rel_se > low.energy_rel_se


def test_published_ratio_is_interpolated_in_logarithms():
    assert PUBLISHED.ratio("all_reduce", 1024, 8, 4) == pytest.approx(1.5)
    # Half-way between 2^10 and 2^20 values, and between 4 and 8 workers.
    expected = math.sqrt(2e-5 * 6e-5) ** 0.5 * math.sqrt(3e-5 * 9e-5) ** 0.5
    reference = math.sqrt(1e-5 * 4e-5)
    ratio = PUBLISHED.ratio("all_reduce", 2.0**15, 4 * 2**0.5, 2)
    assert ratio == pytest.approx(expected / reference)


@pytest.mark.parametrize("published", [None, PUBLISHED])
def test_a_worker_count_that_nothing_published_covers_is_no_failure(published: Published | None):
    gathers = model_of(
        [make_op("all_gather", values=2.0**e, workers=2) for e in (10, 14, 18, 22)],
        lambda o: 1.0,
        lambda o: 1.0,
    )
    model = CostModelSet(device=H200, kernels={"all_gather": gathers}, published=published)
    two, eight = model.costs([make_op("all_gather", values=2.0**14, workers=n) for n in (2, 8)])
    assert two.source is Source.MEASURED
    assert eight.source >= Source.EXTRAPOLATED
    assert eight.latency_s >= two.latency_s


def test_stretch_lengthens_compute_bound_work_only():
    gemms = [make_op("gemm", m=m, n=4096, k=4096) for m in (1, 64, 1024, 8192)]
    known = {"gemm": model_of(gemms, lambda o: 1.0, lambda o: 1.0)}
    plain = CostModelSet(device=H200, kernels=known)
    stretched = replace(plain, compute_stretch=0.1)
    for before, after in zip(plain.costs(gemms), stretched.costs(gemms), strict=True):
        share = before.compute_share
        assert after.latency_s == pytest.approx(before.latency_s * (1 + 0.1 * share))
        assert after.energy_j / after.latency_s == pytest.approx(before.energy_j / before.latency_s)
    assert plain.costs(gemms)[0].compute_share < 0.01
    assert plain.costs(gemms)[3].compute_share > 0.9


# ---------------------------------------------------------------- stand-ins


def own_reduce(values: float, workers: int) -> Op:
    return replace(reduce(values, workers), kernel="vllm_all_reduce")


@pytest.mark.parametrize(
    ("values", "workers", "source"),
    [
        (2.0**14, 2, Source.TRANSFERRED),  # measured as NCCL's
        (2.0**15, 2, Source.TRANSFERRED),  # interpolated
        (2.0**14, 8, Source.TRANSFERRED),  # extrapolated over the workers
    ],
)
def test_an_uncalibrated_all_reduce_is_priced_as_nccls_and_less_certain(
    values: float, workers: int, source: Source
):
    nccl, own = MODEL.costs([reduce(values, workers), own_reduce(values, workers)])
    assert own.latency_s == pytest.approx(nccl.latency_s)
    assert own.energy_j == pytest.approx(nccl.energy_j)
    assert nccl.source < own.source is source
    # A third more or less, beside what NCCL's own is uncertain by.
    assert own.latency_rel_se == pytest.approx(math.hypot(nccl.latency_rel_se, 0.3))
    assert own.energy_rel_se == pytest.approx(math.hypot(nccl.energy_rel_se, 0.3))


def test_a_calibrated_all_reduce_needs_no_stand_in():
    ops = [own_reduce(2.0**e, 2) for e in range(10, 24, 2)]
    known = {**MODEL.kernels, "vllm_all_reduce": model_of(ops, lambda o: 0.6, lambda o: 0.7)}
    nccl, own = replace(MODEL, kernels=known).costs([reduce(2.0**14, 2), own_reduce(2.0**14, 2)])
    assert own.source is Source.MEASURED
    assert own.latency_s == pytest.approx(nccl.latency_s * 0.6 / 1.3, rel=0.02)


def test_without_nccls_calibration_a_stand_in_is_the_rooflines():
    op = own_reduce(2.0**14, 2)
    (cost,) = CostModelSet(device=H200, kernels={"hf_add": ADDS}).costs([op])
    assert cost == roofline(op, H200)
    assert cost.source is Source.ROOFLINE


ONE_SHOT = Published(
    workers=(2, 4),
    values=(1024.0, 1048576.0),
    latency_s={"all_reduce": np.array([[4e-6, 2e-5], [5e-6, 3e-5]])},
)


@pytest.mark.parametrize(
    ("values", "workers", "seconds"),
    [
        (2.0**10, 2, 4e-6),
        (2.0**15, 2, math.sqrt(4e-6 * 2e-5)),  # half-way in both logarithms
        (2.0**9, 2, 4e-6),  # smaller messages take no less than the smallest published one
        (2.0**10, 4, 5e-6),
    ],
)
def test_published_times_of_one_kernel_stand_for_vllms_all_reduce_with_nccls_power(
    values: float, workers: int, seconds: float
):
    ops = [reduce(values, workers), own_reduce(values, workers)]
    nccl, own = replace(MODEL, one_shot=ONE_SHOT).costs(ops)
    assert nccl.latency_s > seconds
    assert own.latency_s == pytest.approx(seconds)
    assert own.energy_j / own.latency_s == pytest.approx(nccl.energy_j / nccl.latency_s)
    assert own.source is Source.TRANSFERRED
    assert own.latency_rel_se == pytest.approx(math.hypot(nccl.latency_rel_se, 0.3))


def test_one_kernel_is_never_slower_than_nccl_to_which_vllm_hands_over():
    slow = replace(ONE_SHOT, latency_s={"all_reduce": 1e3 * ONE_SHOT.latency_s["all_reduce"]})
    nccl, own = replace(MODEL, one_shot=slow).costs([reduce(2.0**12, 2), own_reduce(2.0**12, 2)])
    assert own.latency_s == pytest.approx(nccl.latency_s)


def test_messages_above_8_mib_are_nccls():
    # Values of two bytes: 2^22 of them are 8 MiB.
    ops = [reduce(2.0**23, 2), own_reduce(2.0**23, 2)]
    nccl, own = replace(MODEL, one_shot=ONE_SHOT).costs(ops)
    assert own == nccl
