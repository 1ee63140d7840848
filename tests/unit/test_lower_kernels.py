"""Which kernels an engine runs for a model, by name, shape and count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from energylens.errors import SpecError, UnsupportedError
from energylens.graph import Op
from energylens.lower import lower, lower_step
from energylens.results import Infeasible
from energylens.spec.load import load_spec
from energylens.spec.machines import load_engine
from energylens.spec.model import Fusion, Precision, Spec
from energylens.spec.system import Engine, Kernel, Mode, Parallelism, Sequences, Step

HF = load_engine("hf")
LLAMA = load_spec("llama3_8b")
QWEN3 = load_spec("qwen3_32b")
PREFILL = Step.prefill(8, 1024, Mode.EAGER)
ATTENTION = Fusion(members=("scores", "softmax", "context"))


def run(spec: Spec, step: Step, tp: int = 1, engine: Engine = HF) -> tuple[Op, ...]:
    ops = lower_step(spec, engine, Parallelism(tp=tp), step)
    assert not isinstance(ops, Infeasible), ops
    return ops


def named(ops: tuple[Op, ...], name: str) -> Op:
    (op,) = (o for o in ops if o.name == name)
    return op


def test_prefill_of_llama_on_hf_is_the_known_list_of_kernels() -> None:
    layer = [
        ("attn_norm", "hf_rmsnorm", (8192, 4096)),
        ("q", "gemm", (8192, 4096, 4096)),
        ("k", "gemm", (8192, 1024, 4096)),
        ("v", "gemm", (8192, 1024, 4096)),
        ("rope", "hf_rope", (8, 1024, 32, 8, 128)),
        ("kv_append", "hf_kv_concat", (8, 1024, 1024, 8, 128)),
        ("attention", "attention_prefill", (8, 1024, 1024, 32, 8, 128)),
        ("o", "gemm", (8192, 4096, 4096)),
        ("attn_residual", "hf_add", (8192, 4096)),
        ("mlp_norm", "hf_rmsnorm", (8192, 4096)),
        ("gate", "gemm", (8192, 14336, 4096)),
        ("up", "gemm", (8192, 14336, 4096)),
        ("act", "hf_silu_mul", (8192, 14336)),
        ("down", "gemm", (8192, 4096, 14336)),
        ("mlp_residual", "hf_add", (8192, 4096)),
    ]
    expected = [
        ("prepare", "hf_prepare", (8, 1024, 1024, 128), 1),
        ("embed", "embedding", (8192, 4096), 1),
        *((*row, 32) for row in layer),
        ("final_norm", "hf_rmsnorm", (8192, 4096), 1),
        ("lm_head", "gemm", (8, 128256, 4096), 1),
        ("sample", "argmax", (8, 128256), 1),
    ]
    assert [(o.name, o.kernel, o.shape, o.count) for o in run(LLAMA, PREFILL)] == expected


def test_launches_come_from_the_engine() -> None:
    ops = run(LLAMA, PREFILL)
    assert named(ops, "attn_norm").launches == HF.kernels["rmsnorm"].launches
    assert named(ops, "attention").launches == HF.kernels["attention_prefill"].launches


def test_tensor_parallelism_adds_two_all_reduces_per_layer_and_gathers_the_logits() -> None:
    collectives = [o for o in run(LLAMA, PREFILL, tp=2) if o.type.is_collective]
    assert [(o.name, o.kernel, o.shape, o.count) for o in collectives] == [
        ("o_all_reduce", "all_reduce", (8192 * 4096, 2), 32),
        ("down_all_reduce", "all_reduce", (8192 * 4096, 2), 32),
        ("lm_head_all_gather", "all_gather", (8 * 128256, 2), 1),
    ]
    assert not [o for o in run(LLAMA, PREFILL) if o.type.is_collective]


def test_logits_stay_split_where_the_engine_does_not_gather_them() -> None:
    ops = run(LLAMA, PREFILL, tp=2, engine=replace(HF, gather_logits=False))
    assert not [o for o in ops if o.kernel == "all_gather"]
    assert named(ops, "sample").shape == (8, 128256 / 2)


def test_a_split_embedding_leaves_partial_sums() -> None:
    ops = run(LLAMA, PREFILL, tp=2, engine=replace(HF, tp_replicated=()))
    assert named(ops, "embed_all_reduce").shape == (8192 * 4096, 2)


def test_an_entry_left_whole_gathers_its_split_input_and_reduces_nothing() -> None:
    ops = run(LLAMA, PREFILL, tp=2, engine=replace(HF, tp_replicated=("embed", "o")))
    assert named(ops, "c_all_gather").shape == (8192 * 4096, 2)
    assert named(ops, "o").shape == (8192, 4096, 4096)
    assert "o_all_reduce" not in {o.name for o in ops}


def test_an_mlp_left_whole_needs_no_collective() -> None:
    whole = ("embed", "gate", "up", "act", "down")
    ops = run(LLAMA, PREFILL, tp=2, engine=replace(HF, tp_replicated=whole))
    assert named(ops, "act").shape == (8192, 14336)
    names = {o.name for o in ops if o.type.is_collective}
    assert names == {"o_all_reduce", "lm_head_all_gather"}


def test_attention_follows_projections_that_stay_whole() -> None:
    whole = ("embed", "q", "k", "v", "o")
    ops = run(LLAMA, PREFILL, tp=2, engine=replace(HF, tp_replicated=whole))
    assert named(ops, "rope").shape == (8, 1024, 32, 8, 128)
    assert named(ops, "attention").shape == (8, 1024, 1024, 32, 8, 128)
    assert not [o for o in ops if o.name in ("c_all_gather", "o_all_reduce")]


def test_query_and_key_norms_see_one_row_per_local_head() -> None:
    ops = run(QWEN3, PREFILL, tp=2)
    assert named(ops, "q_norm").shape == (8192 * 32, 128)
    assert named(ops, "k_norm").shape == (8192 * 4, 128)


def test_eager_decode_reads_grouped_kv_heads() -> None:
    ops = run(LLAMA, Step.decode(16, 1088.5, Mode.EAGER))
    attention = named(ops, "attention")
    assert (attention.kernel, attention.shape) == (
        "attention_decode",
        (16, 1, 1088.5, 32, 8, 128),
    )
    assert "repeat_kv" not in {o.name for o in ops}


def test_captured_decode_copies_kv_heads_out_and_reads_them_all() -> None:
    ops = run(LLAMA, Step.decode(16, 1088.5, Mode.CUDA_GRAPH))
    assert named(ops, "repeat_kv").shape == (16, 1088.5, 8, 32, 128)
    attention = named(ops, "attention")
    assert (attention.kernel, attention.shape) == (
        "attention_decode_masked",
        (16, 1, 1088.5, 32, 32, 128),
    )


def test_captured_decode_without_grouped_heads_copies_nothing() -> None:
    spec = replace(LLAMA, ranks={**LLAMA.ranks, "g": 32, "r": 1})
    ops = run(spec, Step.decode(16, 1024, Mode.CUDA_GRAPH))
    assert "repeat_kv" not in {o.name for o in ops}


def test_a_mixed_step_has_one_attention_per_group_and_shares_the_rest() -> None:
    groups = (Sequences(count=1, new=512, context=600), Sequences(count=15, new=1, context=100))
    ops = run(LLAMA, Step(sequences=groups, mode=Mode.EAGER))
    assert named(ops, "q").sizes["m"] == 512 + 15
    assert named(ops, "lm_head").sizes["m"] == 16
    assert named(ops, "rope").shape == (1, 527, 32, 8, 128)
    assert [(o.kernel, o.shape[:3]) for o in ops if o.name == "attention"] == [
        ("attention_prefill", (1, 512, 600)),
        ("attention_decode", (15, 1, 100)),
    ]
    assert [o.shape[:3] for o in ops if o.name == "kv_append"] == [(1, 512, 600), (15, 1, 100)]
    assert named(ops, "prepare").shape[:3] == (1, 512, 600)


def test_an_empty_step_costs_nothing() -> None:
    assert run(LLAMA, Step(sequences=(), mode=Mode.EAGER)) == ()


def test_the_smallest_step_is_one_token_of_one_sequence() -> None:
    ops = run(LLAMA, Step.prefill(1, 1, Mode.EAGER))
    assert named(ops, "q").sizes["m"] == 1
    assert named(ops, "attention").kernel == "attention_decode"


def test_projections_of_one_input_fuse_into_one_gemm() -> None:
    engine = replace(HF, fusion=(*HF.fusion, ("q", "k", "v"), ("gate", "up")))
    ops = run(LLAMA, PREFILL, tp=2, engine=engine)
    assert named(ops, "q+k+v").shape == (8192, (4096 + 2 * 1024) / 2, 4096)
    assert named(ops, "gate+up").shape == (8192, 14336, 4096)
    assert not {"q", "k", "v", "gate", "up"} & {o.name for o in ops}


def test_a_fusion_of_the_spec_wins_over_the_engine() -> None:
    engine = replace(HF, fusion=(*HF.fusion, ("q", "k", "v")))
    spec = replace(LLAMA, fusion=(*LLAMA.fusion, Fusion(members=("q",))))
    assert {"q", "k", "v"} <= {o.name for o in run(spec, PREFILL, engine=engine)}


def test_fused_named_ops_are_looked_up_by_their_joined_names() -> None:
    kernels = {**HF.kernels, "add+rmsnorm": Kernel(kernel="hf_rmsnorm", launches=1)}
    engine = replace(HF, fusion=(("attn_residual", "mlp_norm"),), kernels=kernels)
    op = named(run(LLAMA, PREFILL, engine=engine), "attn_residual+mlp_norm")
    assert (op.kernel, op.shape, op.launches) == ("hf_rmsnorm", (8192, 4096), 1)


def test_a_fusion_that_the_engine_has_no_kernel_for_is_an_error() -> None:
    engine = replace(HF, fusion=(("attn_residual", "mlp_norm"),))
    with pytest.raises(SpecError, match=r"hf has no kernel for 'add\+rmsnorm'"):
        run(LLAMA, PREFILL, engine=engine)


def test_a_fusion_of_contraction_and_named_op_is_unsupported() -> None:
    engine = replace(HF, fusion=(("up", "act"),))
    with pytest.raises(UnsupportedError, match=r"no kernel for 'up\+act'"):
        run(LLAMA, PREFILL, engine=engine)


def test_a_fusion_of_different_inputs_is_unsupported() -> None:
    engine = replace(HF, fusion=(("o", "gate"),))
    with pytest.raises(UnsupportedError, match="different inputs"):
        run(LLAMA, PREFILL, engine=engine)


def test_attention_that_is_not_fused_is_an_error_that_says_how_to_fuse_it() -> None:
    with pytest.raises(SpecError, match=r"no kernel for 'scores' alone; fuse attention"):
        run(replace(LLAMA, fusion=()), PREFILL, engine=replace(HF, fusion=()))


def test_attention_without_a_causal_mask_is_unsupported() -> None:
    blocks = tuple(
        replace(b, cascade=tuple(replace(e, mask=None) for e in b.cascade)) for b in LLAMA.blocks
    )
    with pytest.raises(UnsupportedError, match="mask: causal"):
        run(replace(LLAMA, blocks=blocks), PREFILL)


def test_a_cache_of_another_layout_is_unsupported() -> None:
    blocks = tuple(
        replace(b, cascade=tuple(replace(e, cache=e.name == "k") for e in b.cascade))
        for b in LLAMA.blocks
    )
    with pytest.raises(UnsupportedError, match="cache holds 1024 values per token"):
        run(replace(LLAMA, blocks=blocks), PREFILL)


def test_an_op_that_the_engine_does_not_know_names_entry_and_engine() -> None:
    kernels = {k: v for k, v in HF.kernels.items() if k != "silu_mul"}
    with pytest.raises(SpecError, match=r"engine hf has no kernel for 'silu_mul' \(entry 'act'\)"):
        run(LLAMA, PREFILL, engine=replace(HF, kernels=kernels))


def test_a_kernel_whose_sizes_an_entry_lacks_is_an_error() -> None:
    kernels = {**HF.kernels, "add": Kernel(kernel="gemm", launches=1)}
    with pytest.raises(SpecError, match="needs 'm'"):
        run(LLAMA, PREFILL, engine=replace(HF, kernels=kernels))


def test_a_spec_may_ask_for_a_kernel_that_the_engine_has() -> None:
    kernels = {**HF.kernels, "flash_attention": Kernel(kernel="attention_prefill", launches=1)}
    op = named(run(LLAMA, PREFILL, engine=replace(HF, kernels=kernels)), "attention")
    assert (op.kernel, op.launches) == ("attention_prefill", 1)


def test_engines_without_extras_add_none() -> None:
    extras = ("kv_append", "prepare")
    kernels = {k: v for k, v in HF.kernels.items() if k not in extras}
    ops = run(LLAMA, PREFILL, engine=replace(HF, kernels=kernels))
    assert not set(extras) & {o.name for o in ops}


def test_each_role_has_its_precision() -> None:
    precision = Precision(weights="fp8", activations="fp16", kv_cache="int8")
    ops = run(replace(LLAMA, precision=precision), PREFILL, tp=2)
    roles = {"q": "fp8", "attn_norm": "fp16", "o_all_reduce": "fp16", "attention": "int8"}
    assert {n: named(ops, n).dtype for n in roles} == roles
    assert named(ops, "kv_append").dtype == "int8"


def test_lowering_once_serves_many_steps() -> None:
    lowered = lower(LLAMA, HF, Parallelism(tp=2))
    assert not isinstance(lowered, Infeasible)
    for step in (PREFILL, Step.decode(4, 8192, Mode.CUDA_GRAPH)):
        assert lowered.ops(step) == run(LLAMA, step, tp=2)


def test_flops_of_a_token_are_twice_the_parameters_plus_attention() -> None:
    # 8 030 261 248 parameters; neither the embedding nor the 65 norm vectors multiply.
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    context = 1000
    ops = run(LLAMA, Step.decode(1, context, Mode.EAGER))
    gemms = sum(o.flops * o.count for o in ops if o.kernel == "gemm")
    attention = sum(o.flops * o.count for o in ops if o.name == "attention")
    assert gemms == 2 * matrices
    assert attention == 32 * 4 * 32 * 128 * context
