"""Parameters, cache and memory per worker (bug cases B72-B79, B105, B117)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from energylens.lower import lower, memory, parameters
from energylens.results import Memory
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.model import Block, Precision, Spec
from energylens.spec.system import Mode, Parallelism, Phase, Workload

HF = load_engine("hf")
H200 = load_device("h200")
LLAMA = load_spec("llama3_8b")


def make_llama(**ranks: int) -> Spec:
    return replace(LLAMA, ranks={**LLAMA.ranks, **ranks})


def held(spec: Spec, tp: int = 1, workload: Workload | None = None) -> Memory:
    return memory(lower(spec, HF, Parallelism(tp=tp)), workload or Workload(), H200)


def cache_per_token(spec: Spec, tp: int = 1) -> float:
    return held(spec, tp, Workload(batch=1, prompt_len=1, gen_len=1)).kv_cache_bytes / 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The figures of the checkpoints' safetensors indices.
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_2_1b", 1_235_814_400),  # tied embedding counted once
        ("qwen2_5_7b", 7_615_616_512),  # with biases of q, k and v
        ("qwen3_32b", 32_762_123_264),  # with norms of q and k
    ],
)
def test_parameters_are_those_of_the_checkpoint(name: str, expected: int) -> None:
    assert parameters(load_spec(name)) == expected


def test_q_proj_of_qwen3_uses_the_explicit_head_dim() -> None:
    spec = load_spec("qwen3_32b")
    layer = next(b for b in spec.blocks if b.name == "layer")
    q = next(e for e in layer.cascade if e.name == "q")
    only_q = replace(spec, blocks=(Block(name="layer", cascade=(q,)),))
    assert parameters(only_q) == 41_943_040


def test_cache_uses_kv_heads() -> None:
    assert cache_per_token(make_llama(g=8, r=4)) == 131_072


def test_cache_of_multi_head_attention_uses_all_heads() -> None:
    assert cache_per_token(make_llama(g=32, r=1)) == 524_288


def test_cache_uses_the_explicit_head_dim() -> None:
    assert cache_per_token(load_spec("qwen3_32b")) == 262_144


def test_cache_follows_its_own_precision() -> None:
    spec = replace(LLAMA, precision=Precision(kv_cache="fp8"))
    assert cache_per_token(spec) == 65_536


def test_cache_of_8_kv_heads_at_tp_4_is_a_quarter() -> None:
    assert cache_per_token(LLAMA, tp=4) == 131_072 / 4


def test_cache_of_4_kv_heads_at_tp_8_is_one_head_per_worker() -> None:
    assert cache_per_token(make_llama(g=4, r=8), tp=8) == 32 * 2 * 128 * 2


def test_cache_is_that_of_the_whole_batch_at_its_longest() -> None:
    m = held(LLAMA, workload=Workload(batch=3, prompt_len=1000, gen_len=24))
    assert m.kv_cache_bytes == 131_072 * 3 * 1024
    longer = held(LLAMA, workload=Workload(batch=3, prompt_len=8, gen_len=8, context_len=2048))
    assert longer.kv_cache_bytes == 131_072 * 3 * 2048


def test_a_worker_holds_its_part_of_the_weights_and_all_that_is_replicated() -> None:
    # On hf the embedding and the norms are whole on each worker, the rest is halved.
    whole = 128256 * 4096 + 65 * 4096
    assert held(LLAMA, tp=2).weights_bytes == 2 * (whole + (8_030_261_248 - whole) / 2)


def test_replicated_kv_projections_are_held_by_each_worker() -> None:
    spec = make_llama(g=4, r=8)
    kv = 32 * 2 * 4096 * 4 * 128
    whole = 128256 * 4096 + 65 * 4096
    rest = parameters(spec) - whole - kv
    assert held(spec, tp=8).weights_bytes == 2 * (whole + kv / 4 + rest / 8)


def test_four_bit_weights_count_their_scales() -> None:
    spec = replace(LLAMA, precision=Precision(weights="nvfp4"))
    norms = (2 * 32 + 1) * 4096  # stay as activations are
    assert held(spec).weights_bytes == (parameters(spec) - norms) * 9 / 16 + norms * 2


def test_activations_hold_the_widest_kernel_and_the_residual() -> None:
    m = held(LLAMA, workload=Workload(batch=2, prompt_len=4096, gen_len=1))
    tokens = 2 * 4096
    act = tokens * 3 * 14336 * 2  # gate, up and their product
    assert m.activations_bytes == act + tokens * 4096 * 2


def test_activations_are_those_of_the_launch_modes_meant() -> None:
    # A captured decode repeats the KV heads of a long cache; an eager one attends to it in place.
    work = Workload(batch=64, prompt_len=1, gen_len=4096)
    modes = ({Phase.DECODE: mode} for mode in (Mode.EAGER, Mode.CUDA_GRAPH))
    eager, captured = (memory(lower(LLAMA, HF, Parallelism()), work, H200, m) for m in modes)
    assert captured.activations_bytes > eager.activations_bytes
    assert eager == held(LLAMA, workload=work)


def test_a_batch_of_70b_fits_two_h200_but_not_one() -> None:
    spec, batch = load_spec("llama3_70b"), Workload(batch=64)
    assert not held(spec, tp=1, workload=batch).fits
    assert held(spec, tp=2, workload=batch).fits
    assert held(spec, tp=2).reserve_bytes == HF.reserve_bytes
    assert held(spec, tp=2).capacity_bytes == H200.memory_bytes
