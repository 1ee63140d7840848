"""What holds for all fronts: nothing on them is dominated, in any order; constraints only take."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from energylens.explore import Constraints, SearchSpace, explore, pareto
from energylens.explore.front import _dominators
from energylens.predict import Catalogue
from energylens.results import Infeasible
from energylens.results.search import Frontier

CATALOGUE = Catalogue()
H200, VLLM, LLAMA = (
    CATALOGUE.device("h200"),
    CATALOGUE.engine("vllm"),
    CATALOGUE.spec("llama3_8b"),
)

costs = hnp.arrays(
    np.float64,
    st.tuples(st.integers(0, 300), st.integers(1, 3)),
    elements=st.integers(-6, 6).map(float),
)


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


@given(costs)
@settings(max_examples=50)
def test_a_row_is_on_the_front_where_no_other_dominates_it(rows: np.ndarray) -> None:
    on_front = pareto(rows)
    unique = np.unique(rows, axis=0)
    for row, on in zip(rows, on_front, strict=True):
        assert on != any(dominates(other, row) for other in unique)


@given(costs, st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_front_does_not_depend_on_the_order(rows: np.ndarray, random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert pareto(rows[order]).tolist() == pareto(rows)[order].tolist()


@given(costs)
@settings(max_examples=50)
def test_what_is_off_the_front_is_dominated_by_a_row_of_it(rows: np.ndarray) -> None:
    on_front = pareto(rows)
    front = rows[on_front]
    for row, on, by in zip(rows, on_front, _dominators(rows, front), strict=True):
        assert (by < 0) == on
        assert on or dominates(front[by], row)


def search(batches: tuple[int, ...], tp: tuple[int, ...], limits: Constraints) -> set[str]:
    """Configurations that meet the limits; none of the front may beat another one."""
    f = explore(
        LLAMA,
        engine=VLLM,
        device=H200,
        gpus=4,
        space=SearchSpace(batches=batches, tp=tp),
        constraints=limits,
        bundles=CATALOGUE.bundles(H200, VLLM),
        link=CATALOGUE.link(H200, 4),
        exact=3,
    )
    if isinstance(f, Infeasible):
        return set()
    assert isinstance(f, Frontier)
    points = [np.array([c.values["energy_per_token_j"], c.values["tpot_s"]]) for c in f.front]
    assert not any(dominates(a, b) for a in points for b in points)
    return {c.id for c in f.configs if not c.filtered_by}


@given(
    st.lists(st.integers(1, 128), min_size=1, max_size=3, unique=True),
    st.permutations((1, 2, 4)),
    st.floats(1.0, 12.0),
    st.floats(50.0, 20000.0),
)
@settings(max_examples=5)
def test_a_constraint_never_adds_and_the_order_never_matters(
    batches: list[int], tp: tuple[int, ...], tpot_ms: float, throughput: float
) -> None:
    every = search(tuple(batches), tuple(tp), Constraints())
    one = search(tuple(batches), tuple(tp), Constraints(max_tpot_s=tpot_ms / 1e3))
    both = Constraints(max_tpot_s=tpot_ms / 1e3, min_throughput_tokens_s=throughput)
    two = search(tuple(batches), tuple(tp), both)
    assert two <= one <= every
    assert search(tuple(reversed(batches)), (1, 2, 4), Constraints()) == every
