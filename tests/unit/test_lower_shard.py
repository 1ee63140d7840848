"""Which tensor-parallel degrees a model allows, and how ranks are split (bug cases B101-B110)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from energylens.errors import SpecError
from energylens.graph import Op
from energylens.lower import lower_step, valid_tp
from energylens.results import Infeasible
from energylens.spec.load import load_spec
from energylens.spec.machines import load_engine
from energylens.spec.model import Spec
from energylens.spec.system import Mode, Parallelism, Step

HF = load_engine("hf")
LLAMA = load_spec("llama3_8b")
STEP = Step.prefill(2, 16, Mode.EAGER)


def make_llama(**ranks: int) -> Spec:
    return replace(LLAMA, ranks={**LLAMA.ranks, **ranks})


def ops_of(spec: Spec, tp: int, step: Step = STEP) -> dict[str, Op]:
    ops = lower_step(spec, HF, Parallelism(tp=tp), step)
    assert not isinstance(ops, Infeasible), ops
    return {o.name: o for o in ops}


def reason(spec: Spec, parallelism: Parallelism) -> str:
    result = lower_step(spec, HF, parallelism, STEP)
    assert isinstance(result, Infeasible)
    assert "\n" not in result.reason
    return result.reason


def test_28_heads_on_4_kv_heads_run_at_1_2_4_and_28() -> None:
    assert valid_tp(make_llama(g=4, r=7, f=28 * 512)) == (1, 2, 4, 28)


def test_qwen2_5_7b_stops_at_4_since_28_does_not_divide_its_hidden_width() -> None:
    assert valid_tp(load_spec("qwen2_5_7b")) == (1, 2, 4)


def test_a_degree_that_does_not_divide_names_the_ranks_and_the_degrees_that_do() -> None:
    text = reason(load_spec("qwen2_5_7b"), Parallelism(tp=8))
    assert "tp=8 does not divide g=4 x r=7 (nearest that do: 4 and 28)" in text
    assert text.endswith("allows tp 1, 2, 4")


def test_a_degree_above_all_heads_names_the_largest_that_divides() -> None:
    assert "(nearest that do: 32)" in reason(LLAMA, Parallelism(tp=64))


def test_hidden_width_must_divide() -> None:
    spec = make_llama(f=14338)  # 2 x 67 x 107
    assert valid_tp(spec) == (1, 2)
    assert "tp=4 does not divide f=14338 (nearest that do: 2 and 67)" in reason(
        spec, Parallelism(tp=4)
    )


def test_more_workers_than_kv_heads_replicate_them_and_split_the_query_heads() -> None:
    ops = ops_of(make_llama(g=4, r=8), tp=8)
    attention = ops["attention"].sizes
    assert (attention["q_heads"], attention["kv_heads"]) == (4, 1)
    assert ops["q"].sizes["n"] == 4 * 128
    assert ops["k"].sizes["n"] == ops["v"].sizes["n"] == 128
    assert ops["o"].sizes["k"] == 4 * 128
    assert ops["kv_append"].sizes["kv_heads"] == 1


def test_gpt_oss_heads_on_16_gpus() -> None:
    attention = ops_of(make_llama(g=8, r=8), tp=16)["attention"].sizes
    assert (attention["q_heads"], attention["kv_heads"]) == (4, 1)


def test_cache_of_8_kv_heads_at_tp_4_is_2_heads_per_worker() -> None:
    assert ops_of(LLAMA, tp=4)["kv_append"].sizes["kv_heads"] == 2


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    ops = ops_of(make_llama(v=151669), tp=4)
    assert ops["lm_head"].sizes["n"] == 151672 / 4
    assert ops["lm_head_all_gather"].sizes["values"] == 2 * 151672


def test_data_parallel_attention_of_a_dense_model_is_copies() -> None:
    assert "use replicas=2" in reason(LLAMA, Parallelism(dp=2))


def test_a_dense_model_has_no_experts_to_spread() -> None:
    assert "no experts for ep=2" in reason(LLAMA, Parallelism(tp=2, ep=2))


def test_replicas_do_not_change_what_a_worker_does() -> None:
    two = lower_step(LLAMA, HF, Parallelism(replicas=2), STEP)
    assert two == lower_step(LLAMA, HF, Parallelism(), STEP)


def test_a_spec_without_tp_ranks_runs_on_one_worker_only() -> None:
    spec = replace(LLAMA, parallelism={})
    assert valid_tp(spec) == (1,)
    assert "use tp=1" in reason(spec, Parallelism(tp=2))


def test_an_order_that_splits_one_rank_in_two_ways_is_refused() -> None:
    # Of tp=16, `q` splits g 8 ways and leaves 2 for m; `gate` splits m 16 ways.
    spec = replace(LLAMA, parallelism={"tp": ("g", "m", "r", "f")})
    with pytest.raises(SpecError, match="would split rank 'm' 2 ways and 16 ways"):
        lower_step(spec, HF, Parallelism(tp=16), STEP)
