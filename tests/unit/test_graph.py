"""FLOPs and bytes of every kernel by hand, and the ops that are refused."""

from __future__ import annotations

import pytest

from energylens.errors import SpecError
from energylens.graph import KERNELS, Op, count_einsum, kernel_type, make_op
from energylens.results import Kind
from energylens.spec.model import Access, Einsum

ROWS = {"rows": 3, "width": 5}
MOE = dict(
    zip(KERNELS["hf_moe"].dims, (6, 2, 8, 10, 4, 3, 8, 5), strict=True)
)  # tokens, topk, experts, rows, active, largest, width, hidden
HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}

OVERLAPPED = {"values": 1000, "workers": 2, "sms": 4, "chunks": 2, "m": 10, "n": 100, "k": 50}
BY_HAND = [
    # kernel, sizes, FLOPs, values read, values written
    ("gemm", {"m": 3, "n": 5, "k": 7}, 210, 21 + 35, 15),
    # 1 + 2 + 3 pairs; q is 4 x 8 a token, k and v are 2 x 8 each.
    ("attention_prefill", {"batch": 2, "new": 3, "context": 3, **HEADS}, 1536, 384, 192),
    # 4 + 5 pairs: two new tokens behind three cached ones.
    ("attention_prefill", {"batch": 1, "new": 2, "context": 5, **HEADS}, 1152, 224, 64),
    ("attention_decode", {"batch": 2, "new": 1, "context": 10, **HEADS}, 2560, 704, 64),
    ("attention_decode_masked", {"batch": 2, "new": 1, "context": 10, **HEADS}, 2560, 704, 64),
    ("hf_rmsnorm", ROWS, 60, 15 + 5, 15),
    ("hf_rope", {"batch": 2, "new": 3, **HEADS}, 864, 288, 288),
    ("hf_silu_mul", ROWS, 75, 30, 15),
    ("hf_add", ROWS, 15, 30, 15),
    ("hf_prepare", {"batch": 2, "new": 3, "context": 9, "head_dim": 8}, 0, 0, 48),
    ("embedding", ROWS, 0, 15, 15),
    (
        "hf_kv_concat",
        {"batch": 2, "new": 1, "context": 10, "kv_heads": 2, "head_dim": 8},
        0,
        640,
        640,
    ),
    ("hf_repeat_kv", {"batch": 2, "context": 10, **HEADS}, 0, 640, 1280),
    # x and the residual in, both out, and the norm's weight.
    ("vllm_add_rmsnorm", ROWS, 75, 30 + 5, 30),
    ("vllm_norm_rope", {"batch": 2, "new": 3, **HEADS}, 864, 288, 288),
    ("vllm_attention_prefill", {"batch": 1, "new": 2, "context": 5, **HEADS}, 1152, 224, 64),
    ("vllm_attention_decode", {"batch": 2, "new": 1, "context": 10, **HEADS}, 2560, 704, 64),
    # Of five tokens the last three see at most two: 2 each, of four tokens in all.
    (
        "vllm_window_prefill",
        {"batch": 1, "new": 3, "context": 5, "window": 2, **HEADS},
        768,
        224,
        96,
    ),
    # The first sees itself, the others two.
    (
        "vllm_window_prefill",
        {"batch": 1, "new": 3, "context": 3, "window": 2, **HEADS},
        640,
        192,
        96,
    ),
    (
        "vllm_window_decode",
        {"batch": 2, "new": 1, "context": 10, "window": 4, **HEADS},
        1024,
        320,
        64,
    ),
    (
        "vllm_window_decode",
        {"batch": 2, "new": 1, "context": 10, "window": 99, **HEADS},
        2560,
        704,
        64,
    ),
    # 9 pairs of 4 heads: 5 + 3 multiply-adds each; two queries, keys and values of five tokens.
    (
        "vllm_latent_prefill",
        {"batch": 1, "new": 2, "context": 5, "heads": 4, "key_dim": 5, "value_dim": 3},
        9 * 4 * 16,
        4 * (2 * 5 + 5 * 8),
        4 * 2 * 3,
    ),
    # 10 pairs of 4 heads: 8 + 6 multiply-adds each; the vector of a token is read once for all.
    (
        "vllm_latent_decode",
        {"batch": 2, "new": 1, "context": 10, "heads": 4, "latent": 6, "shared_key": 2},
        2 * 10 * 4 * 28,
        2 * 8 * (4 + 10),
        2 * 4 * 6,
    ),
    ("vllm_latent_write", ROWS, 0, 15, 15),
    ("vllm_bmm", {"heads": 2, "m": 3, "n": 5, "k": 7}, 420, 2 * (21 + 35), 30),
    ("vllm_sample", ROWS, 15, 15, 3),
    ("vllm_all_reduce", {"values": 1000, "workers": 4}, 0, 1000, 1000),
    ("vllm_rope", {"batch": 2, "new": 3, **HEADS}, 864, 288, 288),
    ("vllm_silu_mul", ROWS, 75, 30, 15),
    ("vllm_kv_write", {"batch": 2, "new": 3, "kv_heads": 2, "head_dim": 8}, 0, 192, 192),
    ("argmax", ROWS, 15, 15, 3),
    # 10 pairs of its own: 6 x width x hidden FLOPs each; weights of 4 experts, 6 tokens in, all 12
    # pairs with three hidden widths and one token width between the products, the sum out.
    ("hf_moe", MOE, 6 * 10 * 8 * 5, 3 * 4 * 8 * 5 + 6 * 8 + 12 * 23, 12 * 23 + 6 * 8),
    ("vllm_moe", MOE, 6 * 10 * 8 * 5, 3 * 4 * 8 * 5 + 6 * 8 + 12 * 23, 12 * 23 + 6 * 8),
    ("all_reduce", {"values": 1000, "workers": 4}, 0, 1000, 1000),
    ("all_gather", {"values": 1000, "workers": 4}, 0, 1000, 1000),
    ("reduce_scatter", {"values": 1000, "workers": 4}, 0, 1000, 1000),
    ("all_to_all", {"values": 1000, "workers": 4}, 0, 1000, 1000),
    ("send", {"values": 1000, "workers": 2}, 0, 1000, 1000),
    ("limited_all_reduce", {"values": 1000, "workers": 2, "sms": 4}, 0, 1000, 1000),
    ("overlapped_all_reduce", OVERLAPPED, 0, 1000, 1000),
]


@pytest.mark.parametrize(("kernel", "sizes", "flops", "read", "written"), BY_HAND)
def test_flops_and_bytes_agree_with_hand_calculation(
    kernel: str, sizes: dict[str, float], flops: float, read: float, written: float
) -> None:
    op = make_op(kernel, **sizes)
    assert op.flops == flops
    assert op.bytes_read == 2 * read  # bf16
    assert op.bytes_written == 2 * written


def test_every_kernel_has_a_hand_calculation() -> None:
    assert {row[0] for row in BY_HAND} == set(KERNELS)


def test_causal_attention_counts_each_pair_once() -> None:
    for new, context in ((1, 1), (5, 5), (3, 11), (1, 40)):
        past = context - new
        pairs = sum(past + i + 1 for i in range(new))
        op = make_op("attention_prefill", batch=1, new=new, context=context, **HEADS)
        assert op.flops == 4 * 4 * 8 * pairs


def test_a_decode_step_reads_its_cache_once() -> None:
    op = make_op(
        "attention_decode", batch=16, new=1, context=1025, q_heads=32, kv_heads=8, head_dim=128
    )
    cache = 16 * 1025 * 2 * 8 * 128 * 2  # tokens, K and V, heads, bytes
    queries = 16 * 32 * 128 * 2
    assert op.bytes_read == cache + queries
    assert op.bytes_written == queries


def test_a_context_may_be_fractional() -> None:
    sizes = {"batch": 1, "new": 1, **HEADS}
    middle = make_op("attention_decode", context=10.5, **sizes)
    around = [make_op("attention_decode", context=c, **sizes) for c in (10, 11)]
    assert middle.flops == sum(op.flops for op in around) / 2
    assert middle.bytes_read == sum(op.bytes_read for op in around) / 2


@pytest.mark.parametrize(
    ("dtype", "bits"), [("fp32", 32), ("bf16", 16), ("fp8", 8), ("mxfp4", 4.25), ("nvfp4", 4.5)]
)
def test_bytes_follow_the_precision_and_flops_do_not(dtype: str, bits: float) -> None:
    op = make_op("gemm", dtype=dtype, m=1, n=64, k=32)
    # What goes in and out of a kernel has 16 bits at least, whatever its weights are stored as.
    assert op.bytes_read == 32 * max(bits, 16) / 8 + 32 * 64 * bits / 8
    assert op.bytes_written == 64 * max(bits, 16) / 8
    assert op.flops == 2 * 64 * 32


def test_only_weights_and_caches_are_narrower_than_16_bits() -> None:
    sizes = {"batch": 2, "new": 3, "context": 9, **HEADS}
    attention = make_op("vllm_attention_prefill", dtype="fp8", **sizes)
    queries, cache = 2 * 3 * 4 * 8, 2 * 2 * 9 * 2 * 8
    assert attention.bytes_read == 2 * queries + cache
    assert attention.bytes_written == 2 * queries
    moe = make_op("vllm_moe", dtype="mxfp4", **MOE)
    weights = 3 * 4 * 8 * 5
    assert moe.bytes_read == weights * 4.25 / 8 + 2 * (6 * 8 + 12 * 23)
    # What nothing is said about is in one precision throughout.
    add = make_op("hf_add", dtype="fp8", **ROWS)
    assert (add.bytes_read, add.bytes_written) == (30, 15)


def test_the_table_is_closed() -> None:
    with pytest.raises(TypeError):
        KERNELS["other"] = KERNELS["gemm"]  # type: ignore[index]
    assert {name for name, k in KERNELS.items() if k.is_collective} == {
        name for name, k in KERNELS.items() if k.kind is Kind.COLLECTIVE
    }


def test_an_unknown_kernel_is_answered_with_those_that_exist() -> None:
    for ask in (
        lambda: kernel_type("gem"),
        lambda: make_op("gem", m=1, n=1, k=1),
        lambda: Op(name="x", kernel="gem", shape=(1, 1, 1)),
    ):
        with pytest.raises(SpecError, match=r"unknown kernel 'gem'; known: .*argmax, .*gemm"):
            ask()


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({}, "none"),
        ({"m": 1, "n": 1}, "m, n"),
        ({"m": 1, "n": 1, "k": 1, "batch": 1}, "m, n, k, batch"),
    ],
)
def test_sizes_must_be_those_of_the_kernel(sizes: dict[str, float], found: str) -> None:
    with pytest.raises(SpecError, match=f"gemm needs the sizes m, n, k, not {found}$"):
        make_op("gemm", **sizes)


def test_an_op_needs_as_many_sizes_as_its_kernel() -> None:
    with pytest.raises(SpecError, match="gemm needs the sizes m, n, k, not 2 sizes"):
        Op(name="x", kernel="gemm", shape=(1, 2))


def test_named_sizes_are_put_into_the_order_of_the_kernel() -> None:
    op = make_op("gemm", k=7, m=3, n=5)
    assert op.shape == (3, 5, 7)
    assert op.sizes == {"m": 3, "n": 5, "k": 7}
    assert (op.name, op.dtype, op.count, op.launches) == ("gemm", "bf16", 1, 1)


def test_the_same_work_has_the_same_key_whatever_its_name_and_count() -> None:
    gate = make_op("gemm", name="gate", m=1, n=2, k=3, count=32, launches=2)
    up = make_op("gemm", name="up", m=1, n=2, k=3)
    assert gate.key == up.key
    assert gate.key != make_op("gemm", m=1, n=2, k=3, dtype="fp8").key
    assert gate.key != make_op("gemm", m=1, n=3, k=2).key


def test_repeating_an_op_multiplies_its_count_only() -> None:
    op = make_op("hf_add", rows=1, width=2, count=3)
    assert op.times(4).count == 12
    assert op.times(4).flops == op.flops


PROJECTION = Einsum(
    inputs=(
        Access(tensor="x", ranks=("b", "s", "m")),
        Access(tensor="Wk", ranks=("m", "g", "d")),
    ),
    output=Access(tensor="k", ranks=("b", "s", "g", "d")),
)


def test_a_projection_is_a_gemm() -> None:
    c = count_einsum(PROJECTION, {"b": 2, "s": 3, "m": 8, "g": 2, "d": 5})
    assert (c.m, c.n, c.k) == (6, 10, 8)
    assert c.flops == 2 * 6 * 10 * 8
    assert (c.weight_values, c.input_values, c.output_values) == (80, 48, 60)


def test_a_rank_without_a_size_is_named() -> None:
    with pytest.raises(SpecError, match=r"rank 'g' of .* has no size; add it to `ranks`"):
        count_einsum(PROJECTION, {"b": 2, "s": 3, "m": 8, "d": 5})
