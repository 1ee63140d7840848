"""The shipped files against figures that others publish."""

from __future__ import annotations

import math

import pytest

from energylens.graph import KERNELS, count_einsum
from energylens.spec.load import (
    list_resources,
    load_cluster,
    load_device,
    load_engine,
    load_spec,
)
from energylens.spec.model import STEP_RANKS, Spec
from energylens.spec.system import Mode, Phase

# fmt: off
ENTRIES = [
    "attn_norm", "q", "k", "v", "q_norm", "k_norm", "rope", "scores", "softmax",
    "context", "o", "attn_residual", "mlp_norm", "router", "topk", "gate", "up",
    "act", "down", "mlp_residual",
]
# fmt: on


def parameters(spec: Spec) -> int:
    """Weights and biases by the ranks alone; a tied weight is stored where it is first used."""
    total = 0
    for block in spec.blocks:
        for entry in block.cascade:
            if entry.tied is None:
                weights = (a.ranks for a in entry.accesses if a.is_weight)
                total += block.repeat * sum(math.prod(spec.ranks[r] for r in w) for w in weights)
            if entry.bias and entry.einsum is not None:
                bias = (r for r in entry.einsum.output.ranks if r not in STEP_RANKS)
                total += block.repeat * math.prod(spec.ranks[r] for r in bias)
    return total


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_2_1b", 1_235_814_400),
        ("qwen2_5_7b", 7_615_616_512),
        ("qwen3_32b", 32_762_123_264),
        ("qwen3_moe", 30_532_122_624),
    ],
)
def test_the_ranks_of_a_model_add_up_to_its_published_parameters(name: str, published: int) -> None:
    assert parameters(load_spec(name)) == published


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("llama3_8b", 131_072), ("qwen3_32b", 262_144), ("llama3_70b", 327_680)],
)
def test_the_cache_grows_by_the_kv_heads_only(name: str, bytes_per_token: int) -> None:
    spec = load_spec(name)
    values = sum(
        block.repeat * math.prod(spec.ranks.get(r, 1) for r in entry.einsum.output.ranks)
        for block in spec.blocks
        for entry in block.cascade
        if entry.cache and entry.einsum is not None
    )
    assert 2 * values == bytes_per_token


def test_qwen3_32b_takes_the_head_size_of_its_config() -> None:
    spec = load_spec("qwen3_32b")
    q = next(e for e in spec.blocks[1].cascade if e.name == "q")
    assert q.einsum is not None
    sizes = {**spec.ranks, "b": 1, "s": 1}
    assert count_einsum(q.einsum, sizes).weight_values == 41_943_040


@pytest.mark.parametrize("name", list_resources("specs"))
def test_every_model_has_the_blocks_and_entries_that_lowering_knows(name: str) -> None:
    spec = load_spec(name)
    assert [b.name for b in spec.blocks] == ["embedding", "layer", "head"]
    embedding, layer, head = ([e.name for e in b.cascade] for b in spec.blocks)
    assert embedding == ["embed"]
    left_out = set() if name.startswith("qwen3") else {"q_norm", "k_norm"}
    left_out |= set() if spec.moe else {"router", "topk"}
    assert layer == [e for e in ENTRIES if e not in left_out]
    assert head == ["final_norm", "lm_head", "sample"]
    assert [e.name for e in spec.blocks[1].cascade if e.cache] == ["k", "v"]
    biased = ["q", "k", "v"] if name.startswith("qwen2_5") else []
    assert [e.name for e in spec.blocks[1].cascade if e.bias] == biased
    experts = {"ep": ("e",)} if spec.moe else {}
    assert dict(spec.parallelism) == {"tp": ("g", "r", "f", "v")} | experts
    assert [f.kernel for f in spec.fusion] == ["flash_attention"]


def test_every_kernel_of_an_engine_can_be_costed() -> None:
    for name in list_resources("engines"):
        kernels = {k.kernel for k in load_engine(name).kernels.values()}
        assert kernels <= set(KERNELS)


def test_hf_copies_the_heads_out_only_under_a_captured_graph() -> None:
    hf = load_engine("hf")
    assert hf.repeat_kv == (Mode.CUDA_GRAPH,)
    assert dict(hf.modes) == {Phase.PREFILL: Mode.EAGER, Phase.DECODE: Mode.EAGER}
    assert hf.kernels["attention_decode.eager"].kernel == "attention_decode"
    assert hf.kernels["attention_decode.cuda_graph"].kernel == "attention_decode_masked"
    assert hf.fusion[0] == ("scores", "softmax", "context")


def test_the_peak_of_each_board_follows_from_its_clock_and_units() -> None:
    # Dense 16-bit multiply-adds per SM and clock: Hopper 2048, GA102 512, Orin 1024.
    for name, fma, clock_hz in (("h200", 2048, 1830e6), ("a6000", 512, 1800e6)):
        device = load_device(name)
        assert device.peak_flops["bf16"] == pytest.approx(
            2 * fma * device.sm_count * clock_hz, rel=2e-3
        )
    orin = load_device("jetson_orin_nano")
    assert orin.peak_flops["fp16"] == pytest.approx(
        2 * 1024 * orin.sm_count * orin.clock_max_hz, rel=0.03
    )
    assert orin.unified_memory
    # 40 sparse INT8 TOPS at 625 MHz and 67 at 1020 MHz are the same units.
    assert load_device("jetson_orin_nano@MAXN_SUPER").peak_flops["int8"] == pytest.approx(
        67e12 / 2, rel=0.03
    )


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_h200_clusters_hold_known_boards_on_one_way_links(gpus: int) -> None:
    cluster = load_cluster(f"h200x{gpus}")
    assert (load_device(cluster.device).name, cluster.gpus) == ("h200", gpus)
    if gpus == 1:
        assert cluster.link is None
    else:
        assert cluster.link is not None
        assert cluster.link.bandwidth_bytes_s == 450e9
