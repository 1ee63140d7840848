"""A chunked prefill is the same tokens in the same order, only cut."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from energylens.spec.system import Mode, Sequences, Step, chunked

groups = st.builds(
    lambda count, new, before: Sequences(count=count, new=new, context=new + before),
    count=st.integers(1, 5),
    new=st.integers(1, 60),
    before=st.integers(0, 100) | st.floats(0, 100),
)
steps = st.lists(groups, min_size=1, max_size=4).map(
    lambda found: Step(sequences=tuple(found), mode=Mode.SERVING)
)


def slow_twin(step: Step, batch_tokens: int) -> list[Counter[tuple[int, float]]]:
    """Token by token: which sequence it is of, and how long that is with it."""
    tokens: list[tuple[int, float]] = []
    sequence = 0
    for group in step.sequences:
        for _ in range(group.count):
            before = group.context - group.new
            tokens += [(sequence, before + i + 1) for i in range(group.new)]
            sequence += 1
    found = []
    for start in range(0, len(tokens), batch_tokens):
        new: Counter[int] = Counter()
        context: dict[int, float] = {}
        for number, length in tokens[start : start + batch_tokens]:
            new[number] += 1
            context[number] = length
        found.append(Counter((new[i], round(context[i], 6)) for i in new))
    return found


@given(steps, st.integers(1, 200))
def test_chunks_are_the_tokens_in_order_cut_where_a_step_is_full(step: Step, tokens: int) -> None:
    def counted(part: Step) -> Counter[tuple[int, float]]:
        found: Counter[tuple[int, float]] = Counter()
        for s in part.sequences:  # two groups may differ by rounding only
            found[s.new, round(s.context, 6)] += s.count
        return found

    assert [counted(part) for part in chunked(step, tokens)] == slow_twin(step, tokens)


@given(steps, st.integers(1, 200))
def test_chunks_keep_all_tokens_and_fill_every_step_but_the_last(step: Step, tokens: int) -> None:
    cut = chunked(step, tokens)
    assert sum(part.tokens for part in cut) == step.tokens
    assert all(part.tokens == tokens for part in cut[:-1])
    assert 0 < cut[-1].tokens <= tokens


@given(steps, st.integers(1, 200))
def test_chunks_see_as_many_pairs_as_the_whole(step: Step, tokens: int) -> None:
    def pairs(s: Sequences) -> float:
        return s.count * (s.new * s.context - s.new * (s.new - 1) / 2)

    whole = sum(map(pairs, step.sequences))
    cut = sum(pairs(s) for part in chunked(step, tokens) for s in part.sequences)
    assert abs(cut - whole) <= 1e-9 * whole
