"""Routings: what they read, what loads follow of them, and the slow twin of the closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from energylens.errors import SpecError
from energylens.lower.routing import (
    Routing,
    WorkerLoad,
    inclusion,
    make_routing,
    placement,
    sampled_loads,
    worker_loads,
)

QWEN, MIXTRAL = (128, 8), (8, 2)

# Relative errors of the closed forms against sampled loads, measured over `ROUTINGS`, both shapes
# and 1, 2 and 8 workers: up to so many tokens, of rows, distinct experts and rows of the fullest
# expert on the fullest worker, rounded up. Counts of one or two are no normal variable: the
# largest errors are those of a worker with one expert of Mixtral, and of the fullest expert.
TOLERANCES = {4: (0.16, 0.16, 0.45), 64: (0.06, 0.06, 0.20), 2048: (0.05, 0.03, 0.06)}
# The same of the distinct experts of all workers, the error of so few drawn steps included.
ALL_ACTIVE = {4: 0.09, 64: 0.03, 2048: 0.02}
ROUTINGS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.5", "dirichlet:0.3", "dirichlet:1")


def write(folder: Path, lines: list[str], name: str = "routing.txt") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def histogram(folder: Path, counts: list[float], topk: int) -> Routing:
    file = write(folder, [f"{c:g}" for c in counts])
    return make_routing(f"histogram:{file}", len(counts), topk)


def trace(folder: Path, tokens: list[list[int]], experts: int) -> Routing:
    file = write(folder, [" ".join(map(str, ids)) for ids in tokens])
    return make_routing(f"trace:{file}", experts, len(tokens[0]))


def error(annotation: str, experts: int = 8, topk: int = 2) -> str:
    with pytest.raises(SpecError) as found:
        make_routing(annotation, experts, topk)
    assert "\n" not in str(found.value)
    return str(found.value)


# ---------------------------------------------------------------- popularity


def test_uniform_routing_chooses_each_expert_alike() -> None:
    routing = make_routing("uniform", *QWEN)
    assert routing.experts == 128
    assert inclusion(routing.popularity[0], 8) == pytest.approx(np.full(128, 8 / 128), rel=1e-12)


def test_a_spec_says_it_with_keys_and_a_command_line_with_a_colon() -> None:
    one = make_routing({"kind": "zipf", "alpha": 1.2}, *QWEN)
    other = make_routing("zipf:1.2", *QWEN)
    assert one.name == other.name == "zipf:1.2"
    assert (one.popularity == other.popularity).all()


def test_zipf_popularity_falls_by_rank_and_each_layer_has_its_own_order() -> None:
    popularity = make_routing("zipf:1.2", *QWEN).popularity
    ranked = -np.sort(-popularity, axis=1)
    expected = np.arange(1, 129) ** -1.2
    assert ranked == pytest.approx(np.tile(expected / expected.sum(), (len(popularity), 1)))
    assert len({tuple(own) for own in popularity}) == len(popularity) > 1


def test_popularities_are_drawn_by_seed() -> None:
    for name in ("zipf:1", "dirichlet:1"):
        a, b, c = (make_routing(name, *QWEN, seed=s).popularity for s in (0, 0, 1))
        assert (a == b).all()
        assert (a != c).any()


@pytest.mark.parametrize("alpha", ["0.5", "1.2", "30", "1e300"])
def test_tokens_choose_their_number_of_experts_however_steep_popularity_is(alpha: str) -> None:
    q = inclusion(make_routing(f"zipf:{alpha}", *QWEN).popularity[0], 8)
    assert q.sum() == pytest.approx(8)
    assert q.max() <= 1
    assert q.min() >= 0


def test_all_experts_are_chosen_where_a_token_takes_all() -> None:
    assert (inclusion(make_routing("zipf:2", 4, 4).popularity[0], 4) == 1).all()


# ---------------------------------------------------------------- files


def test_a_histogram_is_read_back_as_it_was_counted(tmp_path: Path) -> None:
    # Of 100 tokens with two experts each, every one chose the first.
    routing = histogram(tmp_path, [100, 40, 30, 20, 10, 0, 0, 0], 2)
    q = inclusion(routing.popularity[0], 2)
    assert q == pytest.approx([1, 0.4, 0.3, 0.2, 0.1, 0, 0, 0], abs=1e-6)


def test_a_histogram_of_drawn_tokens_has_the_loads_of_what_drew_them(tmp_path: Path) -> None:
    zipf = make_routing("zipf:1.2", *QWEN)
    rng = np.random.default_rng(0)
    keys = np.log(zipf.popularity[0]) + rng.gumbel(size=(20_000, 128))
    chosen = np.argpartition(-keys, 7, axis=1)[:, :8]
    counts = np.bincount(chosen.ravel(), minlength=128)
    routing = histogram(tmp_path, counts.tolist(), 8)
    found = inclusion(routing.popularity[0], 8)
    assert found == pytest.approx(counts / 20_000, abs=1e-6)
    assert found.max() > 0.9


def test_no_expert_of_a_histogram_is_chosen_twice_by_a_token(tmp_path: Path) -> None:
    # Nine tenths of the pairs cannot be of one expert where a token has two: it gets half.
    q = inclusion(histogram(tmp_path, [90, 5, 5, 0], 2).popularity[0], 2)
    assert q == pytest.approx([1, 0.5, 0.5, 0], abs=1e-6)
    # Fewer experts than a token has: the others share what is left.
    q = inclusion(histogram(tmp_path, [7, 0, 0, 0], 2).popularity[0], 2)
    assert q == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3], abs=1e-6)


def test_columns_of_a_histogram_are_layers_and_comments_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, ["# layer 0, layer 1", "1, 3", "1 1", "", "1 0", "1 0  # cold"])
    popularity = make_routing(f"histogram:{file}", 4, 1).popularity
    assert popularity.shape == (2, 4)
    assert inclusion(popularity[0], 1) == pytest.approx([0.25] * 4)
    assert inclusion(popularity[1], 1) == pytest.approx([0.75, 0.25, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1"] * 7, "7 lines with numbers, and the model has 8 experts"),
        (["1"] * 9, "9 lines with numbers, and the model has 8 experts"),
        (["1"] * 7 + ["-2"], ":8: found -2; allowed: numbers from 0 on"),
        (["1"] * 7 + ["inf"], ":8: found inf; allowed: numbers from 0 on"),
        (["nan"] + ["1"] * 7, ":1: found nan; allowed: numbers from 0 on"),
        (["0"] * 8, "a column without any token"),
        (["1 0"] * 8, "a column without any token"),
        (["1 2"] * 7 + ["1"], ":8: 1 columns, and the first line has 2"),
        (["many"] + ["1"] * 7, ":1: found 'many'; allowed: numbers"),
    ],
)
def test_a_histogram_that_cannot_be_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    assert said in error(f"histogram:{write(tmp_path, lines)}")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["0 8"], ":1: expert id 8; allowed: 0 to 7"),
        (["0 1", "3 -1"], ":2: expert id -1; allowed: 0 to 7"),
        (["3 3"], ":1: a token needs 2 different expert ids"),
        (["0 1", "1 2 3"], ":2: a token needs 2 different expert ids"),
        (["1.5 2"], ":1: a token needs 2 different expert ids"),
        (["nan 2"], ":1: a token needs 2 different expert ids"),
        (["# nothing"], "no token; one line of 2 expert ids for each"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    assert said in error(f"trace:{write(tmp_path, lines)}")


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        ("skewed", "unknown routing 'skewed'; allowed: uniform, zipf:ALPHA, dirichlet:C"),
        ("uniform:2", "uniform has no parameter"),
        ("zipf", "allowed: a number above 0"),
        ("zipf:0", "found '0'; allowed: a number above 0"),
        ("zipf:-1", "found '-1'; allowed: a number above 0"),
        ("dirichlet:nan", "found 'nan'; allowed: a number above 0"),
        ("zipf:inf", "found 'inf'; allowed: a number above 0"),
        ("zipf:1:2", "found '1:2'; allowed: a number above 0"),
        ("histogram", "allowed: the name of a file"),
        ("trace:", "allowed: the name of a file"),
        ("trace:/no/such/file", "/no/such/file: cannot be read as text"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(annotation: str, said: str) -> None:
    assert said in error(annotation)


# ---------------------------------------------------------------- placement


def test_experts_that_do_not_divide_are_spread_as_evenly_as_they_can_be() -> None:
    held = placement(np.ones(128), 6)
    assert [len(own) for own in held] == [22, 22, 21, 21, 21, 21]
    assert np.concatenate(held).tolist() == list(range(128))


def test_a_balanced_placement_deals_the_popular_ones_to_whoever_has_least() -> None:
    held = placement(np.array([8.0, 1, 1, 1, 1, 2]), 2, balanced=True)
    assert [sorted(own.tolist()) for own in held] == [[0, 3, 4], [1, 2, 5]]


# ---------------------------------------------------------------- loads


def check(closed: WorkerLoad, sampled: WorkerLoad, tokens: int, what: object) -> None:
    limits = next(limits for most, limits in TOLERANCES.items() if tokens <= most)
    for name, limit in zip(("rows", "active", "largest"), limits, strict=True):
        found, expected = getattr(closed, name), getattr(sampled, name)
        assert found == pytest.approx(expected, rel=limit), (what, name)


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shape", [QWEN, MIXTRAL], ids=["128x8", "8x2"])
def test_closed_forms_agree_with_drawn_tokens(
    shape: tuple[int, int], name: str, workers: int
) -> None:
    routing, topk = make_routing(name, *shape), shape[1]
    for tokens in (1, 4, 32, 256, 2048):
        draws = 8 * max(3, min(60, 3000 // tokens))  # each popularity as often
        sampled = sampled_loads(
            routing, topk, tokens, workers, draws=draws, rng=np.random.default_rng(1)
        )
        closed = worker_loads(routing, topk, tokens, workers)
        check(closed[0], sampled[0], tokens, (tokens, draws))
        limit = next(limit for most, limit in ALL_ACTIVE.items() if tokens <= most)
        active = sum(w.active for w in sampled)
        assert sum(w.active for w in closed) == pytest.approx(active, rel=limit), tokens


def test_the_fullest_of_two_uniform_workers_is_off_the_mean_as_a_halved_count_is() -> None:
    # Pairs on one of two workers: hypergeometric by token, so that |X - mean| is known.
    tokens, (experts, topk) = 1024, QWEN
    variance = tokens * topk * 0.5 * 0.5 * (experts - topk) / (experts - 1)
    mean = tokens * topk / 2
    found = worker_loads(make_routing("uniform", *QWEN), topk, tokens, 2)[0].rows
    assert found - mean == pytest.approx(np.sqrt(2 * variance / np.pi), rel=0.01)


def test_skew_leaves_experts_out_in_decode_and_overloads_a_worker_in_prefill() -> None:
    # Distinct experts of 128 that 16 tokens choose, by Monte Carlo.
    for name, active in (
        ("uniform", 82.4),
        ("zipf:0.5", 75),
        ("zipf:1", 59),
        ("dirichlet:0.3", 49),
    ):
        found = worker_loads(make_routing(name, *QWEN), 8, 16, 1)[0]
        assert found.active == pytest.approx(active, rel=0.03), name
    over_mean = [
        worker_loads(make_routing(name, *QWEN), 8, 2048, 8)[0].rows / 2048
        for name in ("uniform", "zipf:0.5", "zipf:1", "zipf:1.5")
    ]
    assert over_mean == sorted(over_mean)
    assert over_mean[0] == pytest.approx(1.03, abs=0.01)


def test_one_token_touches_as_many_experts_as_it_has_pairs() -> None:
    for name in ROUTINGS:
        for workers in (1, 2, 8):
            for load in worker_loads(make_routing(name, *QWEN), 8, 1, workers):
                # Less where the fullest worker would choose an expert more than once.
                assert load.active == pytest.approx(load.rows, rel=0.06), (name, workers)
                assert load.active <= load.rows * (1 + 1e-12)


def test_experts_that_are_held_twice_take_load_off_the_fullest_worker() -> None:
    routing = make_routing("zipf:1.2", *QWEN)
    loads = {n: worker_loads(routing, 8, 2048, 8, n) for n in (0, 8, 64)}
    assert [loads[n][0].experts for n in loads] == [16, 17, 24]
    assert loads[0][0].rows > 1.5 * loads[8][0].rows
    assert loads[8][0].largest < 0.65 * loads[0][0].largest
    assert loads[8][0].rows == pytest.approx(2048, rel=0.05)
    assert loads[64][0].largest < loads[8][0].largest


# ---------------------------------------------------------------- traces


def test_a_trace_of_agreeing_neighbours_touches_fewer_experts_than_its_histogram(
    tmp_path: Path,
) -> None:
    # Runs of 16 tokens that agree, and over all of them each expert as often.
    tokens = [[8 * run + i for i in range(8)] for run in range(16) for _ in range(16)]
    recorded = trace(tmp_path, tokens, 128)
    counted = histogram(tmp_path, np.bincount(np.ravel(tokens), minlength=128).tolist(), 8)
    assert inclusion(counted.popularity[0], 8) == pytest.approx(np.full(128, 1 / 16))
    for length in (2, 16, 64):
        own, other = (worker_loads(r, 8, length, 1)[0] for r in (recorded, counted))
        assert own.rows == other.rows == pytest.approx(8 * length)
        assert own.active < 0.75 * other.active, length
        assert own.largest > other.largest, length
    assert worker_loads(recorded, 8, 1, 1)[0].active == 8


def test_a_step_longer_than_the_trace_goes_on_like_it(tmp_path: Path) -> None:
    tokens = [[i % 8, (i + 1) % 8] for i in range(8)]  # every expert twice
    routing = trace(tmp_path, tokens, 8)
    for length, rows in ((8, 8.0), (9, 9.0), (800, 800.0)):
        first, second = worker_loads(routing, 2, length, 2)
        assert (first.rows, second.rows) == pytest.approx((rows, rows))
        assert (first.active, second.active) == (4, 4)
        assert first.largest == pytest.approx(rows / 4)


def test_ids_of_a_trace_are_where_engines_put_them(tmp_path: Path) -> None:
    # The first half of the experts is the first worker's.
    routing = trace(tmp_path, [[0, 1], [1, 3], [2, 7]], 8)
    first, second = worker_loads(routing, 2, 3, 2)
    assert (first.rows, first.active, first.largest) == (5, 4, 2)
    assert (second.rows, second.active, second.largest) == (1, 1, 1)


def test_rows_of_a_trace_are_shared_with_a_copy_one_by_one(tmp_path: Path) -> None:
    routing = trace(tmp_path, [[0, 1], [0, 2], [0, 3]], 4)
    loads = worker_loads(routing, 2, 3, 1, 1)
    assert (loads[0].experts, loads[0].rows, loads[0].active, loads[0].largest) == (5, 6, 5, 2)
    single = worker_loads(routing, 2, 1, 1, 1)[0]
    assert (single.rows, single.active, single.largest) == (2, 2, 1)


def test_workers_that_nothing_reaches_have_nothing_to_do() -> None:
    """One expert takes every token: rounding once left the others less than no rows."""
    loads = worker_loads(make_routing("zipf:40", 16, 1), 1, 2, 8)
    assert loads[0].rows == pytest.approx(2.0)
    assert all(0.0 <= w.rows < 1e-9 for w in loads[1:])
