"""Models whose layers differ: windows, latent attention, shared experts, precisions by entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from energylens.errors import SpecError, UnsupportedError
from energylens.graph import Op
from energylens.lower import Lowered, lower, memory
from energylens.spec.load import load_spec, parse_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.model import Spec
from energylens.spec.system import Engine, Mode, Parallelism, Sequences, Step, Workload

H200 = load_device("h200")
VLLM, HF = load_engine("vllm"), load_engine("hf")
GPT, DEEPSEEK = load_spec("gpt_oss_20b"), load_spec("deepseek_v3")
DECODE = Step.decode(4, 1000, Mode.EAGER)
PREFILL = Step.prefill(2, 512, Mode.EAGER)


def lowered(spec: Spec, engine: Engine = VLLM, redundant: int = 0, **degrees: int) -> Lowered:
    found = lower(spec, engine, Parallelism(**degrees), redundant_experts=redundant)
    assert isinstance(found, Lowered), found
    return found


def named(ops: tuple[Op, ...], name: str) -> list[Op]:
    return [o for o in ops if o.name == name]


def kernels(ops: tuple[Op, ...]) -> dict[str, str]:
    return {o.name: o.kernel for o in ops}


# ---------------------------------------------------------------- sliding windows


def test_half_of_the_layers_of_gpt_oss_see_a_window() -> None:
    ops = lowered(GPT).ops(DECODE)
    (windowed,), (full,) = named(ops, "window_attention"), named(ops, "attention")
    assert (windowed.kernel, windowed.count) == ("vllm_window_decode", 12)
    assert (full.kernel, full.count) == ("vllm_attention_decode", 12)
    assert windowed.sizes == {**full.sizes, "window": 128}
    # 64 heads of 64: 128 tokens of 1000 each.
    assert windowed.flops / full.flops == pytest.approx(0.128)
    (prefill,) = named(lowered(GPT).ops(PREFILL), "window_attention")
    pairs = 128 * 129 / 2 + (512 - 128) * 128
    assert prefill.kernel == "vllm_window_prefill"
    assert prefill.flops == 4 * 2 * 64 * 64 * pairs


def test_a_window_bounds_what_a_layer_keeps() -> None:
    per_token = 12 * 2 * 8 * 64 * 2  # half of the layers, bytes of K and V

    def cache(prompt: int, **degrees: int) -> float:
        work = Workload(batch=3, prompt_len=prompt, gen_len=100)
        return memory(lowered(GPT, **degrees), work, H200).kv_cache_bytes

    assert cache(20) == 3 * 120 * 2 * per_token
    assert cache(1000) == 3 * (1100 + 128) * per_token
    assert cache(1000, tp=8) == cache(1000) / 8


def test_weights_of_gpt_oss_are_four_bits_in_the_experts_only() -> None:
    expert = 24 * 32 * 3 * 2880 * 2880
    rest = 20_914_757_184 - expert
    assert memory(lowered(GPT), Workload(), H200).weights_bytes == expert * 4.25 / 8 + rest * 2
    # openai/gpt-oss-20b holds 13.76 GB of tensors.
    assert expert * 4.25 / 8 + rest * 2 == pytest.approx(13.76e9, rel=1e-3)
    dtypes = {o.name: o.dtype for o in lowered(GPT).ops(DECODE)}
    assert dtypes["experts"] == "mxfp4"
    assert {dtypes[n] for n in ("q+k+v", "o", "router", "lm_head", "attention")} == {"bf16"}


def test_an_engine_without_windows_says_so() -> None:
    with pytest.raises(SpecError, match=r"engine hf has no kernel for 'window_decode'"):
        lowered(GPT, HF).ops(DECODE)


# ---------------------------------------------------------------- latent attention


def test_a_decode_step_attends_to_the_latent_vectors_themselves() -> None:
    ops = [o for o in lowered(DEEPSEEK, tp=8).ops(DECODE) if o.count == 58]
    (query,), (value,) = named(ops, "lift_query"), named(ops, "lift_value")
    assert query.sizes == {"heads": 16, "m": 4, "n": 512, "k": 128}
    assert value.sizes == {"heads": 16, "m": 4, "n": 128, "k": 512}
    assert {query.dtype, value.dtype} == {"bf16"}
    (attention,) = named(ops, "attention")
    assert attention.kernel == "vllm_latent_decode"
    assert attention.sizes == {
        "batch": 4, "new": 1, "context": 1000, "heads": 16, "latent": 512, "shared_key": 64,
    }  # fmt: skip
    # The cache is read once, whatever the heads.
    assert attention.bytes_read == 2 * 4 * 576 * (16 + 1000)
    (append,) = named(ops, "kv_append")
    assert append.sizes == {"rows": 4, "width": 576}


def test_a_prefill_lifts_its_whole_context() -> None:
    later = Step(sequences=(Sequences(count=2, new=100, context=300),), mode=Mode.EAGER)
    ops = [o for o in lowered(DEEPSEEK, tp=8).ops(later) if o.count == 3]
    (lift,) = named(ops, "lift")
    assert lift.sizes == {"m": 600, "n": 16 * (128 + 128), "k": 512}
    assert lift.dtype == "fp8_block"
    (attention,) = named(ops, "attention")
    assert attention.sizes == {
        "batch": 2, "new": 100, "context": 300, "heads": 16, "key_dim": 192, "value_dim": 128,
    }  # fmt: skip


def test_both_forms_of_latent_attention_are_one_contraction() -> None:
    # Absorbed or not, a pair costs what its form says: 192 + 128 or 576 + 512 multiply-adds.
    ops = {n: lowered(DEEPSEEK).ops(s) for n, s in (("decode", DECODE), ("prefill", PREFILL))}
    (decode,), (prefill,) = (named(ops[n], "attention")[:1] for n in ("decode", "prefill"))
    assert decode.flops == 2 * 128 * (576 + 512) * 4 * 1000
    assert prefill.flops == 2 * 128 * (192 + 128) * 2 * (512 * 513 / 2)


def test_the_latent_cache_is_the_same_on_every_worker() -> None:
    work = Workload(batch=4, prompt_len=1000, gen_len=24)
    for tp in (1, 8):
        held = memory(lowered(DEEPSEEK, tp=tp), work, H200)
        assert held.kv_cache_bytes == 4 * 1024 * 61 * 576 * 2


def test_projections_to_the_latent_space_are_one_gemm_on_every_worker() -> None:
    ops = lowered(DEEPSEEK, tp=8).ops(DECODE)
    down, up = named(ops, "q_a+kv_a+k_rope")[0], named(ops, "q_nope+q_rope")[0]
    assert down.sizes == {"m": 4, "n": 1536 + 512 + 64, "k": 7168}
    assert up.sizes == {"m": 4, "n": 128 // 8 * (128 + 64), "k": 1536}
    assert named(ops, "rope")[0].sizes["q_heads"] == 16
    assert named(ops, "rope")[0].sizes["kv_heads"] == 1


def test_weights_of_deepseek_by_hand() -> None:
    block = 1 + 4 / 128**2  # bytes of a value with its part of the scale
    replicated = 61 * 7168 * (1536 + 512 + 64) * block
    heads = 61 * 128 * (1536 * 192 + 512 * 256 + 128 * 7168) * block
    unpacked = 61 * 128 * 512 * 256 * 2  # the lift of the absorbed form
    dense = 3 * 3 * 7168 * 18432 * block
    expert = 58 * 3 * 7168 * 2048 * block
    router = 58 * (7168 + 1) * 256 * 2
    norms = (61 * (2 * 7168 + 1536 + 512) + 7168) * 2
    vocabulary = 2 * 129280 * 7168 * 2

    def worker(tp: int, experts: float) -> float:
        split = heads + unpacked + dense + expert + vocabulary
        return replicated + router + norms + split / tp + experts * expert

    for degrees, experts in (({"tp": 8}, 256 / 8), ({"tp": 8, "ep": 8}, 32)):
        held = memory(lowered(DEEPSEEK, **degrees), Workload(), H200)
        assert held.weights_bytes == pytest.approx(worker(8, experts), rel=1e-12)
        assert held.fits
    # Attention data parallelism holds all but the experts on each of the eight.
    held = memory(lowered(DEEPSEEK, dp=8, ep=8), Workload(batch=8), H200)
    assert held.weights_bytes == pytest.approx(worker(1, 32), rel=1e-12)


def test_an_engine_without_latent_attention_says_so() -> None:
    with pytest.raises(SpecError, match=r"hf has no kernel for 'latent_append'.*another engine$"):
        lowered(DEEPSEEK, HF).ops(DECODE)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kr[b,s,p]", cache: true', 'kr[b,s,p]"', "reads 512"),
        ('k[b,t,h,n]"}', 'k[b,t,h,n]", weights: bf16}', "stored alike; found 1 and 1"),
        ("Wv_lift[l,h,w] -> u", "Wv_lift[l,h,w] -> k", "found 2 and 0"),
    ],
)
def test_latent_attention_that_no_kernel_computes_is_refused(old: str, new: str, said: str) -> None:
    text = Path(DEEPSEEK.path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    with pytest.raises(UnsupportedError, match=said):
        lowered(parse_spec(text.replace(old, new)))


def test_latent_attention_with_a_window_is_refused() -> None:
    blocks = [replace(b, window=128) if b.name == "layer" else b for b in DEEPSEEK.blocks]
    with pytest.raises(UnsupportedError, match="latent attention with a window"):
        lowered(replace(DEEPSEEK, blocks=tuple(blocks)))


# ---------------------------------------------------------------- layers with and without experts


def test_only_the_first_layers_of_deepseek_are_dense() -> None:
    ops = lowered(DEEPSEEK).ops(DECODE)
    (dense,) = named(ops, "gate+up")
    assert (dense.count, dense.sizes["n"], dense.dtype) == (3, 2 * 18432, "fp8_block")
    (experts,) = named(ops, "experts")
    assert (experts.count, experts.sizes["hidden"]) == (58, 2048)
    assert experts.sizes["rows"] == pytest.approx(4 * 8)
    assert {o.count for o in named(ops, "attention")} == {3, 58}


def test_the_shared_expert_is_sliced_and_its_sum_is_reduced_with_the_others() -> None:
    for degrees in ({"tp": 8}, {"tp": 8, "ep": 8}):
        ops = lowered(DEEPSEEK, **degrees).ops(DECODE)
        (up,), (down,) = named(ops, "shared_gate+shared_up"), named(ops, "shared_down")
        assert up.sizes == {"m": 4, "n": 2 * 2048 // 8, "k": 7168}
        assert down.sizes == {"m": 4, "n": 7168, "k": 2048 // 8}
        reduced = [(o.name, o.count) for o in ops if "all_reduce" in o.name]
        # As vLLM does: one for the experts of a layer and the shared one together.
        assert reduced == [
            ("embed_all_reduce", 1), ("o_all_reduce", 3), ("down_all_reduce", 3),
            ("o_all_reduce", 58), ("down_all_reduce", 58),
        ]  # fmt: skip
        order = [o.name for o in ops if o.count == 58]
        assert order.index("down_all_reduce") > order.index("shared_down")


def test_data_parallel_experts_bring_their_sum_back_themselves() -> None:
    ops = lowered(DEEPSEEK, tp=2, dp=4, ep=8).ops(Step.decode(8, 100, Mode.EAGER))
    assert [o.name for o in ops if o.type.is_collective and o.count == 58] == [
        "o_all_reduce", "dispatch_all_gather", "combine_reduce_scatter", "shared_down_all_reduce",
    ]  # fmt: skip


@pytest.mark.parametrize(("spec", "experts"), [(GPT, 32), (DEEPSEEK, 256)], ids=lambda s: str(s))
def test_popular_experts_may_be_held_twice(spec: Spec, experts: int) -> None:
    plain, doubled = (lowered(spec, redundant=n, tp=8, ep=8) for n in (0, 16))
    work = Workload()
    more = memory(doubled, work, H200).weights_bytes - memory(plain, work, H200).weights_bytes
    values = 3 * spec.ranks["m"] * (2880 if spec is GPT else 2048)
    biases = 24 * (2 * 2880 + 2880) * 2 if spec is GPT else 0
    each = {GPT.name: 24 * values * 4.25 / 8, DEEPSEEK.name: 58 * values * (1 + 4 / 128**2)}
    assert more == pytest.approx(2 * (each[spec.name] + biases))
    step = Step.decode(64, 100, Mode.EAGER)
    for found in (plain, doubled):
        rows = [
            op.sizes["rows"] * op.count
            for ops in found.by_worker(step)
            for op in named(ops, "experts")
        ]
        assert sum(rows) == pytest.approx(64 * spec.moe["topk"] * (24 if spec is GPT else 58))
    (op, *_) = named(doubled.ops(step), "experts")
    assert op.sizes["experts"] == (experts + 16) / 8


# ---------------------------------------------------------------- partial sums


SUMS = """\
schema: energylens/spec/v1
name: sums
source: invented
ranks: {m: 8, f: 16}
blocks:
  - name: layer
    cascade:
      - {name: one, einsum: "x[b,s,f], Wone[f,m] -> y[b,s,m]"}
      - {name: two, einsum: "x[b,s,f], Wtwo[f,m] -> z[b,s,m]"}
      - {name: both, op: add, in: "y[b,s,m], z[b,s,m]"}
      - {name: norm, op: rmsnorm, in: "NORM[b,s,m]"}
parallelism: {tp: [f]}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SUMS.replace("NORM", "y"), ["one", "two", "both", "one_all_reduce", "norm"]),
        # Nothing reads the sum: it is reduced at the end of the block.
        (SUMS.replace("NORM", "other"), ["one", "two", "both", "norm", "one_all_reduce"]),
        # What is added to something whole is reduced before, what is written anew at once.
        (
            SUMS.replace("NORM", "y").replace("y[b,s,m], z", "w[b,s,m], z"),
            ["one", "two", "two_all_reduce", "both", "one_all_reduce", "norm"],
        ),
        (
            SUMS.replace("NORM", "y").replace("-> z", "-> y").replace("z", "q"),
            ["one", "two", "one_all_reduce", "two_all_reduce", "both", "norm"],
        ),
    ],
)
def test_partial_sums_are_reduced_once_before_they_are_read(text: str, expected: list[str]) -> None:
    engine = replace(HF, kernels={k: v for k, v in HF.kernels.items() if k != "prepare"})
    assert [o.name for o in lowered(parse_spec(text), engine, tp=2).ops(PREFILL)] == expected
