"""The shipped files against figures that others publish."""

from __future__ import annotations

import math

import pytest

from energylens.graph import KERNELS, count_einsum
from energylens.spec.load import load_spec
from energylens.spec.machines import load_cluster, load_device, load_engine
from energylens.spec.model import STEP_RANKS, Spec
from energylens.spec.resources import list_resources
from energylens.spec.system import Mode, Phase

# fmt: off
ENTRIES = [
    "attn_norm", "q", "k", "v", "q_norm", "k_norm", "rope", "scores", "softmax",
    "context", "o", "attn_residual", "mlp_norm", "router", "topk", "gate", "up",
    "act", "down", "mlp_residual",
]
# fmt: on

MIXED = ("gpt_oss_20b", "deepseek_v3")
"""Models whose layers differ, or have another attention."""


def parameters(spec: Spec) -> int:
    """Weights and biases by the ranks alone; a tied weight is stored where it is first used.

    Experts that are summed have a bias each.
    """
    total = 0
    for block in spec.blocks:
        for entry in block.cascade:
            if entry.tied is None:
                weights = (a.ranks for a in entry.accesses if a.is_weight)
                total += block.repeat * sum(math.prod(spec.ranks[r] for r in w) for w in weights)
            if entry.bias and entry.einsum is not None:
                bias = [r for r in entry.einsum.output.ranks if r not in STEP_RANKS]
                bias += ["e"] if "e" in entry.einsum.reduced else []
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
        ("qwen3_235b", 235_093_634_560),
        ("llama3_1_405b", 405_853_388_800),
        ("gpt_oss_20b", 20_914_757_184),  # the model card says 20.9 B
        ("deepseek_v3", 671_026_419_200),  # README_WEIGHTS.md says 671 B without the MTP module
    ],
)
def test_the_ranks_of_a_model_add_up_to_its_published_parameters(name: str, published: int) -> None:
    assert parameters(load_spec(name)) == published


@pytest.mark.parametrize(
    ("name", "published"), [("gpt_oss_20b", 3.61e9), ("deepseek_v3", 36.6e9), ("qwen3_235b", 22e9)]
)
def test_as_many_parameters_work_on_a_token_as_published(name: str, published: float) -> None:
    # The published counts leave the embedding out, and the ones of gpt-oss hold the head.
    spec = load_spec(name)
    assert spec.moe is not None
    idle = 1 - spec.moe["topk"] / spec.ranks["e"]
    experts = sum(
        block.repeat * math.prod(spec.ranks[r] for r in access.ranks)
        for block in spec.blocks
        for entry in block.cascade
        for access in entry.accesses
        if access.is_weight and {"e", "m"} < set(access.ranks)
    )
    embedding = spec.ranks["v"] * spec.ranks["m"]
    active = parameters(spec) - idle * experts - embedding
    assert active == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama3_8b", 131_072),
        ("qwen3_32b", 262_144),
        ("llama3_70b", 327_680),
        ("gpt_oss_20b", 49_152),  # of which half within the window
        ("deepseek_v3", 70_272),  # 61 layers of 512 + 64 values
    ],
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


@pytest.mark.parametrize("name", [n for n in list_resources("specs") if n not in MIXED])
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


def test_every_other_layer_of_gpt_oss_sees_a_window_and_is_the_same_else() -> None:
    spec = load_spec("gpt_oss_20b")
    _, windowed, full, _ = spec.blocks
    assert (windowed.repeat, windowed.window) == (12, 128)
    assert (full.repeat, full.window) == (12, None)
    assert windowed.cascade == full.cascade
    assert spec.precision.weights == "mxfp4"
    weighted = [e for e in full.cascade if e.einsum and any(a.is_weight for a in e.accesses)]
    experts = {e.name for e in weighted if spec.stored(e) == "mxfp4"}
    assert experts == {"gate", "up", "down"}
    assert {e.name for e in full.cascade if e.bias} == experts | {"q", "k", "v", "o", "router"}


def test_the_first_layers_of_deepseek_have_no_experts_and_the_others_one_for_all() -> None:
    spec = load_spec("deepseek_v3")
    _, dense, sparse, _ = spec.blocks
    assert (dense.repeat, sparse.repeat) == (3, 58)
    attention = [e for e in dense.cascade if e in sparse.cascade]
    assert [e.name for e in attention][-2:] == ["mlp_norm", "mlp_residual"]
    shared = [e for e in sparse.cascade if e.name.startswith("shared")]
    assert len(attention) + len(shared) + 6 == len(sparse.cascade)
    narrow = {e.name for b in spec.blocks for e in b.cascade if spec.stored(e) == "fp8_block"}
    assert {"router", "embed", "lm_head", "attn_norm"} & narrow == set()
    assert {"q_a", "k_lift", "o", "gate", "shared_down"} < narrow
    assert len(spec.notes) == 2


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
