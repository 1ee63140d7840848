"""Fitting finds the overlap law again that made-up overlaps were made with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from made_up import (
    CAP_W,
    ETA,
    GAP_S,
    H200,
    LINK_W,
    STRETCH,
    board,
    calibration,
    provenance,
    sample,
    simulate,
    trial,
    typical,
    write,
)
from test_fit import fit

from energylens.cost.features import prior, shares
from energylens.cost.overlap import OverlapLaw
from energylens.graph import Op, make_op
from energylens.store import Sample

LATE, SLOW_GEMM, SLOW_SMS, SLOW_COLLECTIVE, HANDOVER_S = 0.7, 0.1, 1.2, 0.4, 4e-6
RUNS = provenance(module_us=2000.0), provenance("slow", module_us=4000.0)
SHAPES = [(4096, 4096, 4096), (2048, 14336, 4096), (8192, 4096, 14336)]


def reduced(values: float, sms: float) -> Op:
    return make_op("limited_all_reduce", values=values, workers=2, sms=sms)


def parts(op: Op) -> tuple[float, float, float]:
    """Seconds that scale with 1/clock, other seconds, and joules of an op on boards a and b."""
    _, memory, compute, slow = np.mean([board(u) for u in "ab"], axis=0)
    t, w = typical(op)
    s = shares(op, prior(op, H200), t, 1.0)
    t *= (1 + s.read * (slow - 1)) * (1 + STRETCH * s.compute)
    joules = t * w * (1 + s.compute * (compute - 1) + s.dram * (memory - 1))
    return t * s.compute, t * (1 - s.compute), joules


def beside(m: int, n: int, k: int, sms: int, chunks: int) -> tuple[float, float, float]:
    """Seconds, gross watts per board and clock of a GEMM and the all-reduces beside it."""
    idle = float(np.mean([board(u)[0] for u in "ab"])) + LINK_W
    scaled, fixed, gemm_j = parts(make_op("gemm", m=m / chunks, n=n, k=k))
    _, reduce_s, reduce_j = parts(reduced(m * n / chunks, sms))
    free = math.ceil(m / chunks / 128) * math.ceil(n / 256) + sms <= 132
    alone = min(chunks, 1 if free else 1 + LATE)
    taken = 0 if free else sms / 132
    gemm_rate, reduce_rate = 1 - SLOW_GEMM - SLOW_SMS * taken, 1 - SLOW_COLLECTIVE

    def seconds(f: float) -> float:
        gemm_s = scaled / f + fixed
        if reduce_s / reduce_rate < gemm_s / gemm_rate:  # the collective is done first
            both = gemm_s + (1 - gemm_rate) * reduce_s / reduce_rate
        else:
            both = reduce_s + (1 - reduce_rate) * gemm_s / gemm_rate
        total = alone * (gemm_s + reduce_s) + (chunks - alone) * both
        return total + chunks * HANDOVER_S + (chunks + 1) * GAP_S

    def watts(f: float) -> float:
        return idle + chunks * (gemm_j + reduce_j) * f**ETA / seconds(f)

    low, high = (1.0, 1.0) if watts(1.0) <= CAP_W else (0.25, 1.0)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if watts(middle) < CAP_W else (low, middle)
    return seconds(low), watts(low), low


def overlaps() -> Iterator[Sample]:
    for m, n, k in SHAPES:
        for sms in (2, 8, 16, 32):
            for chunks in (1, 2, 4, 8):
                ops = [
                    make_op("gemm", m=m // chunks, n=n, k=k, count=chunks),
                    make_op(
                        "overlapped_all_reduce", values=m * n, workers=2, sms=sms, chunks=chunks,
                        m=m, n=n, k=k,
                    ),
                ]  # fmt: skip
                result = trial(*beside(m, n, k, sms, chunks))
                yield sample("overlap", ops, "ab", result, f"{m} {n} {k} {sms} {chunks}")


def made() -> Iterator[Sample]:
    yield from calibration()
    yield from overlaps()
    gemms = {(m // chunks, n, k) for m, n, k in SHAPES for chunks in (1, 2, 4, 8)}
    for m, n, k in sorted(gemms):
        op = make_op("gemm", m=m, n=n, k=k)
        yield sample("op", [op], "ab", trial(*simulate([op], "ab")), "gemm")
    for values in sorted({m * n // chunks for m, n, _ in SHAPES for chunks in (1, 2, 4, 8)}):
        for sms in (2, 8, 16, 32):
            op = reduced(values, sms)
            # Back to back, the links are awake all the time.
            result = trial(*simulate([op], "ab", link_w=LINK_W))
            yield sample("op", [op], "ab", result, "limited")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory):
    return fit(write(tmp_path_factory.mktemp("overlaps") / "s", made(), *RUNS))


def test_the_law_is_found_again(fitted) -> None:
    law = fitted[0].laws.overlap
    assert law.late == pytest.approx(LATE, abs=0.05)
    assert law.slow_gemm + law.slow_sms * 16 / 132 == pytest.approx(
        SLOW_GEMM + SLOW_SMS * 16 / 132, abs=0.03
    )
    assert law.slow_collective == pytest.approx(SLOW_COLLECTIVE, abs=0.03)
    assert law.handover_s == pytest.approx(HANDOVER_S, abs=1e-6)
    assert law.rel_se < 0.01


def test_overlaps_are_predicted_as_they_were_measured_in_energy_too(fitted) -> None:
    errors = np.array(list(fitted[0].facts["overlaps"].values()))
    assert len(errors) == 3 * 4 * 4
    assert np.abs(errors).mean(axis=0) == pytest.approx([0, 0], abs=0.6)


def test_without_overlaps_the_law_stays_as_it_is(tmp_path: Path) -> None:
    bundle, _ = fit(write(tmp_path / "s", calibration(), *RUNS))
    assert bundle.laws.overlap == OverlapLaw()
    assert bundle.facts["overlaps"] == {}
