"""What stands for kernels and precisions that were not calibrated, and what its price says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from energylens.cost.bundle import select
from energylens.cost.features import prior
from energylens.cost.model import CostModelSet
from energylens.cost.transfer import TRANSFERRED_REL_SE, stand_in, transferred_rel_se
from energylens.graph import Op, make_op
from energylens.predict import Catalogue
from energylens.results import Source

CATALOGUE = Catalogue()
H200 = CATALOGUE.device("h200")
HEADS = {"q_heads": 64, "kv_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module")
def model() -> CostModelSet:
    bundle = select(CATALOGUE.bundles(H200, CATALOGUE.engine("vllm")), "h200", "vllm")
    assert bundle is not None
    return bundle.model(H200)


@pytest.mark.parametrize(
    ("op", "kernel", "sizes"),
    [
        (make_op("gemm", dtype="mxfp4", m=3, n=5, k=7), "gemm", {"m": 3, "n": 5, "k": 7}),
        (make_op("vllm_bmm", heads=16, m=4, n=512, k=128), "gemm", {"m": 4, "n": 8192, "k": 128}),
        (
            make_op("vllm_window_decode", batch=4, new=1, context=999.5, window=128, **HEADS),
            "vllm_attention_decode",
            {"batch": 4, "new": 1, "context": 128, **HEADS},
        ),
        (
            make_op("vllm_window_decode", batch=4, new=1, context=99.5, window=128, **HEADS),
            "vllm_attention_decode",
            {"batch": 4, "new": 1, "context": 99.5, **HEADS},
        ),
        (
            make_op("vllm_window_prefill", batch=2, new=1024, context=1024, window=128, **HEADS),
            "vllm_attention_prefill",
            {"batch": 8, "new": 256, "context": 256, **HEADS},
        ),
        (
            make_op(
                "vllm_latent_prefill",
                batch=1, new=8, context=9, heads=16, key_dim=192, value_dim=128,
            ),
            "vllm_attention_prefill",
            {"batch": 1, "new": 8, "context": 9, "q_heads": 16, "kv_heads": 16, "head_dim": 160},
        ),
    ],
)  # fmt: skip
def test_another_kernel_does_nearly_the_same(op: Op, kernel: str, sizes: Mapping[str, Any]) -> None:
    assert stand_in(op).key == make_op(kernel, **sizes).key


@pytest.mark.parametrize("new", [64, 200, 256, 4096])
@pytest.mark.parametrize("past", [0, 100, 5000])
def test_prompts_within_a_window_have_the_tokens_and_about_the_pairs(new: int, past: int) -> None:
    op = make_op("vllm_window_prefill", batch=3, new=new, context=new + past, window=128, **HEADS)
    other = stand_in(op)
    assert other.sizes["batch"] * other.sizes["new"] == pytest.approx(3 * new)
    assert other.sizes["context"] >= other.sizes["new"]
    assert other.flops == pytest.approx(op.flops, rel=0.35)


@pytest.mark.parametrize(
    "op",
    [
        make_op("gemm", dtype="fp8_block", m=64, n=7168, k=2048),
        make_op("vllm_bmm", heads=16, m=4, n=512, k=128),
        make_op("vllm_window_decode", batch=4, new=1, context=999, window=128, **HEADS),
        make_op(
            "vllm_moe", dtype="mxfp4", tokens=64, topk=4, experts=32, rows=256, active=32,
            largest=12, width=2880, hidden=2880,
        ),
    ],
    ids=lambda op: op.kernel,
)  # fmt: skip
def test_a_stand_in_is_scaled_by_what_the_two_differ_by(model: CostModelSet, op: Op) -> None:
    other = stand_in(op)
    cost, known = model.costs([op, other])
    assert cost.source is Source.TRANSFERRED
    assert known.source < Source.TRANSFERRED
    ratio = prior(op, H200).latency_s / prior(other, H200).latency_s
    assert cost.latency_s == pytest.approx(known.latency_s * ratio)
    assert cost.latency_rel_se >= TRANSFERRED_REL_SE[0]
    assert cost.energy_rel_se >= TRANSFERRED_REL_SE[1]


def test_narrow_weights_are_never_priced_as_wide_ones(model: CostModelSet) -> None:
    wide = make_op("gemm", m=1, n=28672, k=8192)
    costs = model.costs([replace(wide, dtype=d) for d in ("bf16", "fp8_block", "mxfp4")])
    times = [c.latency_s for c in costs]
    assert times[0] / times[1] == pytest.approx(2, rel=0.1)
    assert times[0] / times[2] == pytest.approx(16 / 4.25, rel=0.1)
    assert [c.source for c in costs[1:]] == [Source.TRANSFERRED] * 2


def test_weights_that_are_unpacked_are_less_certain(model: CostModelSet) -> None:
    wide = make_op("gemm", m=1, n=28672, k=8192)
    packed, narrow = (replace(wide, dtype=d) for d in ("mxfp4", "fp8_block"))
    four, eight = model.costs([packed, narrow])
    assert four.latency_rel_se > 0.46 > eight.latency_rel_se
    # A device without arithmetic in eight bits unpacks those too.
    a6000 = CATALOGUE.device("a6000")
    assert transferred_rel_se(narrow, H200) == TRANSFERRED_REL_SE
    assert transferred_rel_se(narrow, a6000) == transferred_rel_se(packed, H200)
    assert transferred_rel_se(wide, a6000) == TRANSFERRED_REL_SE


@pytest.mark.parametrize("kernel", ["vllm_latent_decode", "vllm_latent_write"])
def test_what_nothing_stands_for_is_the_rooflines(model: CostModelSet, kernel: str) -> None:
    sizes = {
        "vllm_latent_decode": {
            "batch": 4, "new": 1, "context": 999, "heads": 16, "latent": 512, "shared_key": 64,
        },
        "vllm_latent_write": {"rows": 4, "width": 576},
    }  # fmt: skip
    (cost,) = model.costs([make_op(kernel, **sizes[kernel])])
    assert cost.source is Source.ROOFLINE


def test_a_collective_of_another_precision_is_the_rooflines(model: CostModelSet) -> None:
    (cost,) = model.costs([make_op("all_gather", dtype="fp8", values=65536, workers=2)])
    assert cost.source is Source.ROOFLINE
