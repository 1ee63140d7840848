"""Mixes: which ops one execution stands for, and what they are called. Nothing is built here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from energylens.bench.collectives import joint_points
from energylens.bench.layer import DUTY_CYCLES, duty_points, layer_ops, layer_points
from energylens.errors import UnsupportedError
from energylens.graph import Op
from energylens.lower import lower_step
from energylens.spec.load import load_spec
from energylens.spec.machines import load_engine
from energylens.spec.system import Mode, Parallelism, Step

HF = load_engine("hf")
LLAMA = load_spec("llama3_8b")
QWEN3 = load_spec("qwen3_32b")
DECODE = Step.decode(4, 1025, Mode.CUDA_GRAPH)


def rows(ops: tuple[Op, ...]) -> list[tuple[str, str, tuple[float, ...], int]]:
    return [(o.name, o.kernel, o.shape, o.count) for o in ops]


def test_a_layer_of_one_worker_is_the_known_list_of_kernels() -> None:
    # 4 sequences on one of two workers: 16 of 32 query heads, 4 of 8 KV heads, 7168 of 14336.
    assert rows(layer_ops(LLAMA, HF, 2, DECODE)) == [
        ("attn_norm", "hf_rmsnorm", (4, 4096), 1),
        ("q", "gemm", (4, 2048, 4096), 1),
        ("k", "gemm", (4, 512, 4096), 1),
        ("v", "gemm", (4, 512, 4096), 1),
        ("rope", "hf_rope", (4, 1, 16, 4, 128), 1),
        ("kv_append", "hf_kv_concat", (4, 1, 1025, 4, 128), 1),
        ("repeat_kv", "hf_repeat_kv", (4, 1025, 4, 16, 128), 1),
        ("attention", "attention_decode_masked", (4, 1, 1025, 16, 16, 128), 1),
        ("o", "gemm", (4, 4096, 2048), 1),
        ("attn_residual", "hf_add", (4, 4096), 1),
        ("mlp_norm", "hf_rmsnorm", (4, 4096), 1),
        ("gate", "gemm", (4, 7168, 4096), 1),
        ("up", "gemm", (4, 7168, 4096), 1),
        ("act", "hf_silu_mul", (4, 7168), 1),
        ("down", "gemm", (4, 4096, 7168), 1),
        ("mlp_residual", "hf_add", (4, 4096), 1),
    ]


def test_collectives_belong_to_a_layer_where_asked() -> None:
    alone = layer_ops(LLAMA, HF, 2, DECODE)
    joint = layer_ops(LLAMA, HF, 2, DECODE, collectives=True)
    added = [o for o in joint if o.type.is_collective]
    assert rows(tuple(added)) == [
        ("o_all_reduce", "all_reduce", (4 * 4096, 2), 1),
        ("down_all_reduce", "all_reduce", (4 * 4096, 2), 1),
    ]
    assert tuple(o for o in joint if o not in added) == alone


@pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=lambda s: s.name)
def test_a_model_is_its_layers_and_what_surrounds_them(spec) -> None:
    whole = lower_step(spec, HF, Parallelism(tp=1), DECODE)
    layers = max(b.repeat for b in spec.blocks)
    repeated = tuple(replace(o, count=1) for o in whole if o.count == layers)
    assert layer_ops(spec, HF, 1, DECODE) == repeated
    outside = [o.name for o in whole if o.count == 1]
    assert outside == ["prepare", "embed", "final_norm", "lm_head", "sample"]


def test_a_degree_that_does_not_divide_the_model_has_no_layer() -> None:
    with pytest.raises(UnsupportedError, match="tp=3"):
        layer_ops(LLAMA, HF, 3, DECODE)


def test_duty_cycles_mix_one_gemm_and_one_stream_in_several_proportions() -> None:
    points = duty_points(SimpleNamespace())
    assert [p.label for p in points] == [
        "duty 1 gemm 0 stream",
        "duty 4 gemm 4 stream",
        "duty 2 gemm 8 stream",
        "duty 1 gemm 16 stream",
    ]
    for point, (gemms, streams) in zip(points, DUTY_CYCLES, strict=True):
        counts = {o.name: o.count for o in point.ops}
        assert counts == {n: c for n, c in (("gemm", gemms), ("stream", streams)) if c}
        assert point.mode is Mode.CUDA_GRAPH
    gemm, stream = points[1].ops
    assert gemm.flops == 2 * 4096 * 8192 * 8192
    assert stream.bytes_read + stream.bytes_written == 3 * 2 * 8192**2


def test_a_duty_cycle_builds_the_mix_of_its_ops() -> None:
    asked = []
    points = duty_points(SimpleNamespace(mix_work=asked.append))
    for point in points:
        point.build()
    assert asked == [p.ops for p in points]


def test_layers_are_replayed_at_the_degrees_that_the_model_allows() -> None:
    points = layer_points([LLAMA], [1, 2, 3])
    steps = [
        "prefill 1x512",
        "prefill 4x2048",
        "decode 1x1025",
        "decode 16x1025",
        "decode 64x2049",
    ]
    assert [p.label for p in points] == [
        f"llama3_8b tp{tp} layer {step}" for tp in (1, 2) for step in steps
    ]
    modes = [Mode.EAGER] * 2 + [Mode.CUDA_GRAPH] * 3
    assert [p.mode for p in points] == modes * 2
    assert not [o for p in points for o in p.ops if o.type.is_collective]


def test_joint_layers_hold_their_collectives() -> None:
    points = joint_points(LLAMA, SimpleNamespace(workers=2, local=0))
    assert [p.label for p in points] == [
        "llama3_8b tp2 joint layer prefill 1x512",
        "llama3_8b tp2 joint layer prefill 4x2048",
        "llama3_8b tp2 joint layer decode 1x1025",
        "llama3_8b tp2 joint layer decode 64x2049",
    ]
    for point in points:
        assert [o.kernel for o in point.ops].count("all_reduce") == 2


def test_a_model_that_so_many_workers_cannot_share_has_no_joint_layers() -> None:
    assert joint_points(LLAMA, SimpleNamespace(workers=3, local=0)) == ()
