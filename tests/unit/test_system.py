"""Steps as an engine forms them: chunks of a prefill, and rows of captured graphs."""

from __future__ import annotations

import pytest

from energylens.spec.machines import load_engine
from energylens.spec.system import Mode, Sequences, Serving, Step, chunked

VLLM = load_engine("vllm").serving
assert VLLM is not None


def parts(step: Step) -> list[tuple[int, int, float]]:
    return [(s.count, s.new, s.context) for s in step.sequences]


def chunks(batch: int, prompt: int, tokens: int) -> list[list[tuple[int, int, float]]]:
    return [parts(s) for s in chunked(Step.prefill(batch, prompt, Mode.SERVING), tokens)]


def test_a_prefill_that_fits_is_one_step() -> None:
    whole = Step.prefill(8, 1024, Mode.SERVING)
    assert chunked(whole, 8192) == chunked(whole, 100_000) == (whole,)


def test_a_long_prompt_is_cut_and_its_later_chunks_see_all_before_them() -> None:
    assert chunks(1, 1000, 400) == [[(1, 400, 400)], [(1, 400, 800)], [(1, 200, 1000)]]


def test_a_sequence_that_is_cut_goes_on_first_in_the_next_step() -> None:
    # 3 x 300 tokens, 400 at a time: the second is cut after 100, the third after 200.
    assert chunks(3, 300, 400) == [
        [(1, 300, 300), (1, 100, 100)],
        [(1, 200, 300), (1, 200, 200)],
        [(1, 100, 300)],
    ]


def test_sequences_that_do_the_same_in_a_step_are_one_group() -> None:
    assert chunks(5, 100, 200) == [[(2, 100, 100)], [(2, 100, 100)], [(1, 100, 100)]]


def test_what_is_in_the_cache_already_is_seen_and_not_computed_again() -> None:
    step = Step(sequences=(Sequences(count=1, new=50, context=1050),), mode=Mode.SERVING)
    assert [parts(s) for s in chunked(step, 30)] == [[(1, 30, 1030)], [(1, 20, 1050)]]


def test_chunks_keep_the_mode() -> None:
    assert {s.mode for s in chunked(Step.prefill(2, 64, Mode.EAGER), 10)} == {Mode.EAGER}


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, 1), (3, 4), (8, 8), (9, 16), (17, 24), (248, 248), (249, 256), (257, 272), (511, 512)],
)
def test_steps_run_as_the_next_captured_size(tokens: int, rows: int) -> None:
    assert VLLM.padded(tokens) == rows


@pytest.mark.parametrize("tokens", [512, 513, 600, 8192])
def test_a_step_of_the_last_captured_size_or_above_is_not_padded(tokens: int) -> None:
    assert VLLM.padded(tokens) == tokens


def test_without_captured_sizes_nothing_is_padded() -> None:
    free = Serving(
        batch_tokens=8, offline_batch_tokens=8, max_sequences=8, block_size=16, memory_share=0.9,
        capture_sizes=(),
    )  # fmt: skip
    assert [free.padded(n) for n in (1, 3, 8)] == [1, 3, 8]
