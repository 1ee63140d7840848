"""The vLLM profile: fused projections, additions inside the norms, new tokens into the cache."""

from energylens.lower import lower_step
from energylens.predict import Catalogue
from energylens.spec.system import Mode, Parallelism, Step

CATALOGUE = Catalogue()
VLLM = CATALOGUE.engine("vllm")


def layer_ops(spec, step, tp=1):
    ops = lower_step(CATALOGUE.spec(spec), VLLM, Parallelism(tp=tp), step)
    return {o.name: o for o in ops}


def test_projections_are_fused_and_additions_absorbed():
    ops = layer_ops("llama3_8b", Step.prefill(2, 512, Mode.SERVING))
    assert ops["q+k+v"].shape == (1024, (32 + 2 * 8) * 128, 4096)
    assert ops["gate+up"].shape == (1024, 2 * 14336, 4096)
    assert not {"attn_residual", "mlp_residual"} & set(ops)
    assert ops["attn_norm"].kernel == "vllm_add_rmsnorm"
    assert ops["sample"].kernel == "vllm_sample"


def test_decode_reads_grouped_heads_and_writes_new_tokens_only():
    ops = layer_ops("llama3_8b", Step.decode(16, 1025, Mode.SERVING), tp=2)
    assert ops["attention"].shape == (16, 1, 1025, 16, 4, 128)
    assert "repeat_kv" not in ops
    # K and V of 16 tokens, 4 local heads of 128 values of two bytes.
    assert ops["kv_append"].bytes_written == 2 * 16 * 4 * 128 * 2
    assert {"o_all_reduce", "down_all_reduce", "lm_head_all_gather"} <= set(ops)


def test_the_embedding_is_split_over_the_vocabulary_and_reduced():
    ops = layer_ops("llama3_8b", Step.decode(4, 100, Mode.SERVING), tp=2)
    assert ops["embed_all_reduce"].sizes["values"] == 4 * 4096
