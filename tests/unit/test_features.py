"""Priors by hand, and features that mean the same for fitting and predicting."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energylens.cost.features import (
    feature_names,
    features,
    launches_of,
    prior,
    shares,
    step_shape,
    wave_waste,
)
from energylens.graph import KERNELS, Op, make_op
from energylens.lower import lower_step
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.system import Mode, Parallelism, Sequences, Step

H200 = load_device("h200")
SIZES = {
    "batch": 2, "new": 1, "context": 777.0, "q_heads": 32, "kv_heads": 8, "head_dim": 128,
    "rows": 16, "width": 4096, "m": 16, "n": 4096, "k": 4096, "values": 65536, "workers": 4,
    "tokens": 4, "topk": 4, "experts": 64, "active": 14, "largest": 3, "hidden": 768,
    "window": 128, "heads": 16, "key_dim": 192, "value_dim": 128, "latent": 512, "shared_key": 64,
    "sms": 16, "chunks": 4,
}  # fmt: skip


def sized(kernel: str, **sizes: float) -> Op:
    known = {d: SIZES[d] for d in KERNELS[kernel].dims}
    return make_op(kernel, **(known | sizes))


def test_prior_of_a_large_gemm_is_its_arithmetic():
    p = prior(make_op("gemm", m=8192, n=8192, k=8192), H200)
    compute_s = 2 * 8192**3 / (0.85 * 989.4e12)
    memory_s = 3 * 8192**2 * 2 / (0.88 * 4.8e12)
    assert p.compute_s == pytest.approx(compute_s)
    assert p.memory_s == pytest.approx(memory_s)
    assert p.latency_s == pytest.approx(1.5e-6 + compute_s)
    assert p.compute_share == pytest.approx(compute_s**2 / (compute_s**2 + memory_s**2))
    # 580 W between idle and limit: a tenth for running at all, the rest by how busy the two are.
    power_w = 580 * (0.1 + (1.6 * compute_s + 0.8 * memory_s) / p.latency_s)
    assert p.energy_j == pytest.approx(power_w * p.latency_s)


def test_prior_of_a_weight_read_is_its_bytes():
    p = prior(make_op("gemm", m=1, n=28672, k=8192), H200)
    moved = (8192 + 28672 * 8192 + 28672) * 2
    assert p.latency_s == pytest.approx(1.5e-6 + moved / (0.88 * 4.8e12))
    assert p.compute_share < 1e-3


def test_elementwise_work_never_scales_with_the_clock():
    for kernel in ("hf_add", "hf_rmsnorm", "hf_rope", "hf_silu_mul", "hf_kv_concat", "argmax"):
        p = prior(sized(kernel), H200)
        assert (p.compute_s, p.compute_share) == (0.0, 0.0)


def test_fp8_arithmetic_is_twice_as_fast_and_half_the_bytes():
    bf16 = make_op("gemm", m=8192, n=8192, k=8192)
    fast, slow = prior(replace(bf16, dtype="fp8"), H200), prior(bf16, H200)
    assert slow.compute_s / fast.compute_s == pytest.approx(1978.9 / 989.4)
    # What goes in and out stays in 16 bits, and a kernel before the GEMM narrows what goes in.
    assert slow.memory_s / fast.memory_s == pytest.approx(3 * 2 / (2 * 2 + 1 + 2))
    assert launches_of(replace(bf16, dtype="fp8")) == 2
    # Scales of blocks take a quarter of the arithmetic's speed; a bit in 4096 of the bytes.
    block = prior(replace(bf16, dtype="fp8_block"), H200)
    assert block.compute_s == pytest.approx(fast.compute_s / 0.75)
    assert block.memory_s == pytest.approx(fast.memory_s, rel=1e-4)


def test_a_precision_that_the_device_lacks_computes_as_bf16():
    bf16 = make_op("gemm", m=8192, n=8192, k=8192)
    assert prior(replace(bf16, dtype="int4"), H200).compute_s == prior(bf16, H200).compute_s


@pytest.mark.parametrize(
    ("tokens", "rows", "launches"),
    [
        (4, 32, 6),  # 4 x 4 x 8 pairs are not more than the experts: no alignment
        (5, 40, 8),
        (5, 20, 9),  # half of the pairs belong to another worker's experts
        (1, 4, 9),
    ],
)
def test_launches_of_fused_experts_follow_the_engines_paths(tokens, rows, launches):
    op = sized("vllm_moe", tokens=tokens, topk=8, rows=rows, experts=128)
    assert launches_of(op) == launches


def test_prior_of_fused_experts_adds_what_runs_after_the_products():
    sizes = {"tokens": 1024, "topk": 8, "experts": 128, "rows": 8192, "active": 128, "largest": 84}
    op = make_op("vllm_moe", **sizes, width=2048, hidden=768)
    compute_s = 6 * 8192 * 2048 * 768 / (0.85 * 989.4e12)
    weights_s = 2 * 3 * 128 * 2048 * 768 / (0.88 * 4.8e12)
    buffers_s = 2 * 2 * (8192 * (3 * 768 + 2048) + 1024 * 2048) / (0.88 * 4.8e12)
    assert prior(op, H200).latency_s == pytest.approx(
        8 * 1.5e-6 + max(compute_s, weights_s) + buffers_s
    )


def test_launches_of_a_kernel_are_not_the_engines():
    op = sized("hf_rmsnorm")
    assert launches_of(op) == launches_of(replace(op, launches=99)) > 1
    assert launches_of(sized("gemm")) == 1


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernel_has_a_prior_and_named_finite_features(kernel: str):
    op = sized(kernel)
    p, x = prior(op, H200), features([op, op], H200)
    assert p.latency_s > 0
    assert p.energy_j > 0
    assert x.shape == (2, len(feature_names(kernel)))
    assert np.isfinite(x).all()


def test_features_do_not_depend_on_how_often_or_under_which_name_an_op_runs():
    op = sized("gemm")
    other = replace(op, name="down", count=32, launches=7)
    assert (features([op], H200) == features([other], H200)).all()


def test_cached_heads_count_over_the_whole_batch():
    few = sized("attention_decode", batch=8, kv_heads=1, q_heads=4)
    many = sized("attention_decode", batch=1, kv_heads=8, q_heads=32)
    assert (features([few], H200) == features([many], H200)).all()


def test_contexts_that_start_on_16_bytes_are_marked():
    names = feature_names("attention_decode_masked")
    column = names.index("aligned")
    contexts = (1024, 1025, 1032, 1024.5)
    ops = [sized("attention_decode_masked", context=c) for c in contexts]
    assert features(ops, H200)[:, column].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_full_waves_of_the_largest_tile_waste_nothing():
    assert wave_waste(256 * 132, 128, 132) == pytest.approx(0.0)
    # One more row of tiles starts a second wave for them: half of the device idles.
    assert wave_waste(256 * 132 + 256, 128, 132) < -0.5


SIZE = st.integers(1, 1 << 16)


@given(m=SIZE, n=SIZE)
def test_no_shape_is_better_than_full_waves(m: int, n: int):
    assert -60 < wave_waste(m, n, 132) <= 1e-12


@given(
    kernel=st.sampled_from(sorted(k for k in KERNELS if not KERNELS[k].is_collective)),
    slowness=st.floats(0.2, 50.0),
    scale=st.floats(0.3, 3.0),
    tokens=st.integers(1, 1 << 14),
)
def test_shares_are_parts_of_a_whole(kernel: str, slowness: float, scale: float, tokens: int):
    grows = next(d for d in ("m", "rows", "new", "context") if d in KERNELS[kernel].dims)
    sizes = {grows: tokens} | ({"context": tokens} if grows == "new" else {})
    op = sized(kernel, **{d: v for d, v in sizes.items() if d in KERNELS[kernel].dims})
    p = prior(op, H200)
    s = shares(op, p, p.latency_s * slowness, scale)
    assert 0 <= s.compute <= 1
    assert 0 <= s.dram <= 1 - s.compute + 1e-12
    assert 0 <= s.read <= s.dram + s.compute + 1e-12
    assert s.compute + s.read <= 1 + 1e-12
    if "decode" not in kernel.removesuffix("_masked") and kernel not in ("gemm", "vllm_bmm"):
        assert s.read == 0


@given(
    kernel=st.sampled_from(("gemm", "attention_decode", "hf_add", "hf_rmsnorm", "hf_kv_concat")),
    tokens=st.integers(1, 1 << 15),
)
def test_one_more_token_never_costs_less(kernel: str, tokens: int):
    grows = next(d for d in ("m", "rows", "context") if d in KERNELS[kernel].dims)
    less, more = (prior(sized(kernel, **{grows: t}), H200) for t in (tokens, tokens + 1))
    assert more.latency_s >= less.latency_s
    assert more.energy_j >= less.energy_j * (1 - 1e-12)
    assert math.isfinite(more.energy_j)


# ---------------------------------------------------------------- the shape of a step


def attention(batch: int, new: int, context: float, layers: int, name: str = "attention") -> Op:
    return make_op(
        "vllm_attention_decode" if new == 1 else "vllm_attention_prefill", name=name, count=layers,
        batch=batch, new=new, context=context, q_heads=32, kv_heads=8, head_dim=128,
    )  # fmt: skip


def test_the_shape_of_a_step_is_read_off_its_attention():
    gemm = make_op("gemm", m=999, n=64, k=64, count=99)
    shape = step_shape([gemm, attention(3, 1, 90.5, 32), attention(2, 100, 100, 32)])
    assert (shape.sequences, shape.tokens, shape.layers) == (5, 203, 32)


def test_blocks_of_layers_add_up_and_serve_the_same_sequences():
    first = [attention(3, 1, 90.5, 3), attention(2, 100, 100, 3)]
    others = [replace(op, count=58) for op in first]
    windows = [replace(op, name="window_attention") for op in first]
    shape = step_shape([*first, *others, *windows])
    assert (shape.sequences, shape.tokens, shape.layers) == (5, 203, 64)


@pytest.mark.parametrize(("tokens", "captured"), [(1, True), (512, True), (513, False)])
def test_a_step_of_up_to_512_tokens_is_captured(tokens: int, captured: bool):
    assert step_shape([attention(tokens, 1, 100, 2)]).is_captured is captured
    assert step_shape([attention(1, tokens, tokens, 2)]).is_captured is captured


def test_a_step_without_attention_has_no_shape():
    shape = step_shape([make_op("gemm", m=1, n=64, k=64)])
    assert (shape.sequences, shape.tokens, shape.layers) == (0, 0, 0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "engine", "layers", "expert_layers"),
    [
        ("llama3_8b", "vllm", 32, 0),
        ("llama3_8b", "hf", 32, 0),
        ("qwen3_moe", "hf", 48, 48),
        ("gpt_oss_20b", "vllm", 24, 24),
        ("deepseek_v3", "vllm", 61, 58),
    ],
)
def test_the_shape_of_a_lowered_step_is_that_of_the_step(
    model: str, engine: str, layers: int, expert_layers: int, tp: int
):
    sequences = (
        Sequences(count=17, new=1, context=300.5),
        Sequences(count=2, new=64, context=64),
        Sequences(count=1, new=300, context=900),
    )
    step = Step(sequences=sequences, mode=Mode.SERVING if engine == "vllm" else Mode.EAGER)
    ops = lower_step(load_spec(model), load_engine(engine), Parallelism(tp=tp), step)
    shape = step_shape(ops)
    # Padding to a captured size does not count: there are 17 + 128 + 300 new tokens.
    assert (shape.sequences, shape.tokens) == (20, 445)
    assert (shape.layers, shape.expert_layers) == (layers, expert_layers)
