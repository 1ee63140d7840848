"""A service under traffic: definitions, policy, prices, saturation, errors, the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from energylens.cli import main
from energylens.errors import OutOfRangeError, SpecError
from energylens.lower import Lowered, lower
from energylens.machine import Machine, StepSums
from energylens.predict import Catalogue
from energylens.results import Infeasible
from energylens.results.service import ServingResult
from energylens.serving import (
    Limits,
    PriceTable,
    Replica,
    Requests,
    StepPricer,
    Traffic,
    attention_pairs,
    kv_tokens,
    percentiles,
    read_arrivals,
    read_lengths,
    requests_of,
    serve,
    tpot_s,
)
from energylens.serving.service import _limited
from energylens.spec.system import Config, Parallelism, Sequences, Serving, Step

pytestmark = pytest.mark.usefixtures("no_debug")

Capture = pytest.CaptureFixture[str]
Prices = tuple[np.ndarray, np.ndarray]

CATALOGUE = Catalogue()
VLLM, HF, H200 = CATALOGUE.engine("vllm"), CATALOGUE.engine("hf"), CATALOGUE.device("h200")
LLAMA = CATALOGUE.spec("llama3_8b")
LIMITS = Serving(
    batch_tokens=512,
    offline_batch_tokens=512,
    max_sequences=64,
    block_size=16,
    memory_share=0.9,
    capture_sizes=(1, 2, 4, 8, 16, 32, 64),
)
IDLE_W = 100.0


def pricer(
    serving: Serving = LIMITS,
    *,
    step_s: float = 4e-3,
    token_s: float = 2e-5,
    context_s: float = 1e-8,
    pair_s: float = 0.0,
    power_w: float = 500.0,
) -> StepPricer:
    """Linear in padded tokens, contexts of decoding sequences and pairs of chunks."""

    def seconds(step: Step) -> float:
        decoding = sum(s.count * s.context for s in step.sequences if s.new == 1)
        pairs = sum(
            s.count * attention_pairs(s.new, int(s.context)) for s in step.sequences if s.new > 1
        )
        rows = serving.padded(step.tokens)
        return step_s + token_s * rows + context_s * decoding + pair_s * pairs

    def price(steps: Sequence[Step]) -> Prices:
        latency = np.array([seconds(step) for step in steps])
        return latency, power_w * latency

    return price


def by_kind(prefill_s: float, decode_s: float) -> StepPricer:
    """One price for a step that prefills, another for one that only decodes; 1 J each."""

    def price(steps: Sequence[Step]) -> Prices:
        prefills = [any(s.new > 1 for s in step.sequences) for step in steps]
        return np.where(prefills, prefill_s, decode_s), np.ones(len(steps))

    return price


def replica(
    price: StepPricer | None = None,
    *,
    serving: Serving = LIMITS,
    blocks: int = 2000,
    ahead: bool = False,
) -> Replica:
    return Replica(
        prices=PriceTable(price or pricer(serving), serving=serving, longest=4096),
        serving=serving,
        blocks=blocks,
        idle_w=IDLE_W,
        ahead=ahead,
    )


def requests(*arrivals: float, lengths: Sequence[tuple[int, int]]) -> Requests:
    return requests_of(np.array(arrivals), lengths)


# ---------------------------------------------------------------- definitions


def test_stamps_at_0_100_110_120_ms_are_ttft_100_and_tpot_10() -> None:
    asked = requests(0.0, lengths=[(100, 3)])
    run = replica(by_kind(0.1, 0.01)).simulate(asked)
    assert run.first_token_s == pytest.approx([0.1])
    assert run.completion_s == pytest.approx([0.12])
    assert tpot_s(asked, run) == pytest.approx([0.01])


def test_a_request_of_one_token_has_no_tpot() -> None:
    asked = requests(0.0, 1.0, 2.0, lengths=[(100, 1), (100, 5)])
    assert len(tpot_s(asked, replica().simulate(asked))) == 1


def test_idle_power_is_charged_between_the_steps_and_only_there() -> None:
    run = replica(by_kind(0.1, 0.01)).simulate(requests(5.0, 7.0, lengths=[(100, 2)]))
    assert run.window_s == pytest.approx(2.11)
    assert run.busy_s == pytest.approx(0.22)
    assert run.energy_j == pytest.approx(4 * 1.0 + IDLE_W * (2.11 - 0.22))


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).exponential(1.0, 997)
    found = percentiles(values)
    assert found.mean == pytest.approx(values.mean())
    for share in (50, 90, 99):
        assert getattr(found, f"p{share}") == pytest.approx(np.percentile(values, share))


# ---------------------------------------------------------------- policy


def test_a_request_joins_at_the_next_step_and_one_later_where_steps_are_formed_ahead() -> None:
    asked = requests(0.0, 0.115, lengths=[(100, 100)])
    for ahead, joined in ((False, 0.12), (True, 0.13)):
        run = replica(by_kind(0.1, 0.01), ahead=ahead).simulate(asked)
        assert run.first_token_s[1] == pytest.approx(joined + 0.1)


def test_a_long_prompt_is_chunked_and_decoding_goes_on_beside_it() -> None:
    seen: list[int] = []

    def price(steps: Sequence[Step]) -> Prices:
        seen.extend(step.tokens for step in steps)
        return by_kind(0.1, 0.01)(steps)

    asked = requests(0.0, 0.1, lengths=[(100, 10), (1200, 1)])
    run = replica(price).simulate(asked)
    # 511 + 511 + 178 tokens beside the one that decodes, which makes a token in each step.
    assert run.first_token_s == pytest.approx([0.1, 0.4])
    assert run.completion_s[0] == pytest.approx(0.1 + 3 * 0.1 + 6 * 0.01)
    assert max(seen) <= LIMITS.batch_tokens


def test_seats_are_a_limit_and_the_queue_is_served_in_order() -> None:
    serving = replace(LIMITS, max_sequences=2)
    asked = requests(0.0, 0.0, 0.0, 0.0, lengths=[(16, 4)])
    run = replica(by_kind(0.1, 0.01), serving=serving).simulate(asked)
    assert run.running.max == 2
    assert run.queue.max == 2
    assert run.first_token_s == pytest.approx([0.1, 0.1, 0.23, 0.23])


def test_the_last_one_running_is_preempted_for_blocks_and_computed_again() -> None:
    asked = requests(0.0, 0.0, lengths=[(32, 40)])
    run = replica(by_kind(0.1, 0.01), blocks=6).simulate(asked)
    # Both start with 2 blocks; with the third block of each the cache is full, and the fourth of
    # the first one takes those of the second, which then has to wait until the first is done.
    assert run.preemptions == 1
    assert run.completion_s[0] == pytest.approx(0.1 + 39 * 0.01)
    assert run.first_token_s[1] == pytest.approx(0.1)
    # 17 tokens were made before; the prefill makes the next, and 22 are left.
    assert run.completion_s[1] == pytest.approx(run.completion_s[0] + 0.1 + 22 * 0.01)
    assert run.held_share.max == 1.0


def test_a_request_is_admitted_only_where_its_whole_prompt_fits() -> None:
    serving = replace(LIMITS, batch_tokens=64)
    asked = requests(0.0, 0.0, lengths=[(64, 60), (640, 1)])
    run = replica(by_kind(0.1, 0.01), serving=serving, blocks=42).simulate(asked)
    # The first chunk alone would fit beside the first request; the prompt does not until it left.
    assert run.preemptions == 0
    assert run.first_token_s[1] == pytest.approx(0.1 + 59 * 0.01 + 10 * 0.1)


# ---------------------------------------------------------------- prices


def test_prices_that_are_linear_are_met_exactly_and_padding_is_kept() -> None:
    price = pricer(power_w=321.0)
    table = PriceTable(price, serving=LIMITS, longest=4096)
    for batch, context in ((1, 5.0), (17, 300.5), (32, 300.5), (33, 77.0), (64, 4000.0)):
        exact = price([Step.decode(batch, context, VLLM.modes["decode"])])
        p = table.decode(batch, context)
        assert p.low <= context <= p.high
        further = context - p.low
        assert p.latency_s + p.latency_slope * further == pytest.approx(exact[0][0], rel=1e-12)
        assert p.energy_j + p.energy_slope * further == pytest.approx(exact[1][0], rel=1e-12)
    padded = [table.decode(batch, 64.0).latency_s for batch in (17, 32, 33)]
    assert padded[1] - padded[0] == pytest.approx(15 * 64 * 1e-8)
    assert padded[2] - padded[1] == pytest.approx(32 * 2e-5 + 64 * 1e-8)


@pytest.mark.parametrize("capture_sizes", [LIMITS.capture_sizes, (8, 24), ()])
def test_mixed_steps_are_met_exactly_whatever_is_captured(capture_sizes: tuple[int, ...]) -> None:
    serving = replace(LIMITS, capture_sizes=capture_sizes)
    table = PriceTable(pricer(serving, power_w=321.0), serving=serving, longest=4096)
    cases = ((100, 0, 0.0), (300, 20, 150.0), (90, 40, 999.0), (9, 5, 70.0), (448, 64, 70.0))
    for prefill, batch, context in cases:
        found = table.mixed(prefill, attention_pairs(prefill, prefill), batch, context)
        rows = serving.padded(prefill + batch)
        seconds = 4e-3 + 2e-5 * rows + 1e-8 * batch * context
        # A prompt of one token is a context of one token to decode: 1e-8 s at a corner or two.
        assert found == pytest.approx((seconds, 321.0 * seconds), rel=1e-6)


@pytest.mark.parametrize(
    "chunks",
    [
        ((512, 512),),
        ((500, 4000),),
        ((128, 128), (128, 128), (100, 100)),
        ((30, 700), (200, 200), (133, 133)),
        tuple((8, 8) for _ in range(50)),
    ],
)
def test_attention_of_any_chunks_is_priced_by_its_pairs(
    chunks: tuple[tuple[int, int], ...],
) -> None:
    price = pricer(pair_s=1e-9)
    table = PriceTable(price, serving=LIMITS, longest=4096)
    step = Step(
        sequences=tuple(Sequences(count=1, new=new, context=end) for new, end in chunks),
        mode=VLLM.modes["prefill"],
    )
    pairs = sum(attention_pairs(new, end) for new, end in chunks)
    found = table.mixed(step.tokens, pairs, 0, 0.0)
    assert found[0] == pytest.approx(price([step])[0][0], rel=2e-4)


def test_few_steps_are_priced_exactly() -> None:
    one = replica()
    times = Traffic(rate_per_s=20.0, duration_s=60.0).times_s()
    run = one.simulate(requests_of(times, [(200, 100)]))
    assert run.steps > 5000
    assert one.prices.priced < 400


# ---------------------------------------------------------------- saturation


@pytest.mark.parametrize("lengths", [[(128, 1)], [(128, 64)], [(300, 20), (20, 120)]])
def test_the_saturation_rate_parts_queues_that_stay_from_queues_that_grow(
    lengths: list[tuple[int, int]],
) -> None:
    one = replica()
    most = one.saturation_rate(lengths)

    def queue(load: float, seconds: float) -> float:
        times = Traffic(rate_per_s=load * most, duration_s=seconds, seed=1).times_s()
        return one.simulate(requests_of(times, lengths)).queue.mean

    # Twice the time: the same queue below saturation, a queue twice as long above.
    assert queue(0.6, 40.0) < 5
    assert queue(0.6, 80.0) < 1.3 * queue(0.6, 40.0)
    assert queue(1.2, 80.0) > 1.7 * queue(1.2, 40.0)
    # It grows by 0.2 of what is served up to the last arrival, and is then served: a triangle.
    assert queue(1.2, 40.0) == pytest.approx(0.2 * most * 40.0 / 2, rel=0.05)


def test_saturation_of_prompts_alone_is_their_cost_and_the_load_is_the_busy_share() -> None:
    one = replica(pricer(step_s=0.0, context_s=0.0))
    most = one.saturation_rate([(128, 1)])
    assert most == pytest.approx(1 / (128 * 2e-5))
    times = Traffic(rate_per_s=0.6 * most, duration_s=60.0).times_s()
    run = one.simulate(requests_of(times, [(128, 1)]))
    assert run.busy_s / run.window_s == pytest.approx(0.6, abs=0.03)


def test_a_longer_queue_follows_a_higher_rate_of_constant_arrivals() -> None:
    one, lengths = replica(), [(128, 64)]
    most = one.saturation_rate(lengths)
    queues = []
    for load in (0.2, 0.5, 0.8, 0.95, 1.05, 1.3, 2.0):
        times = Traffic(arrivals="constant", rate_per_s=load * most, duration_s=30.0).times_s()
        queues.append(one.simulate(requests_of(times, lengths)).queue.mean)
    assert queues == sorted(queues)


# ---------------------------------------------------------------- traffic


def test_poisson_arrivals_have_their_rate_their_duration_and_their_seed() -> None:
    one = Traffic(rate_per_s=50.0, duration_s=100.0, seed=3)
    times = one.times_s()
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] < 100
    assert len(times) == pytest.approx(5000, abs=4 * 5000**0.5)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert np.array_equal(times, one.times_s())
    assert not np.array_equal(times[:10], replace(one, seed=4).times_s()[:10])


def test_constant_arrivals_are_evenly_spaced_within_the_duration() -> None:
    times = Traffic(arrivals="constant", rate_per_s=4.0, duration_s=2.0).times_s()
    assert times == pytest.approx(np.arange(8) / 4)


def test_files_of_arrivals_and_lengths_skip_comments_and_blank_lines(tmp_path: Path) -> None:
    times, lengths = tmp_path / "times.txt", tmp_path / "lengths.csv"
    times.write_text("# seconds\n1\n\n1.5  # the second\n1.5\n9e0\n", encoding="utf-8")
    lengths.write_text("# p,g\n10,2\n\n 300 , 4 \n", encoding="utf-8")
    assert read_arrivals(str(times)).tolist() == [1.0, 1.5, 1.5, 9.0]
    assert read_lengths(lengths) == ((10, 2), (300, 4))
    cut = Traffic(arrivals=str(times), lengths=read_lengths(lengths), duration_s=2.0)
    asked = requests_of(cut.times_s(), cut.lengths)
    assert asked.arrival_s.tolist() == [1.0, 1.5, 1.5]
    assert asked.prompt_len.tolist() == [10, 300, 10]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0\nsoon\n", ":2: 'soon' found, and must be a time in seconds"),
        ("0\n\n5\n4.5\n", ":4: 4.5 s is before the arrival above it (5 s)"),
        ("-1\n", ":1: '-1' found"),
        ("nan\n", ":1: 'nan' found"),
        ("# nothing\n", ": holds no arrival times"),
    ],
)
def test_a_bad_arrivals_file_is_named_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "times.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        Traffic(arrivals=str(path)).times_s()
    assert f"{path}{told}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10,2\n10\n", ":2: '10' found, and must be `prompt_len,gen_len`"),
        ("10,2,3\n", ":1: "),
        ("10,0\n", ":1: "),
        ("10,1.5\n", ":1: "),
        ("\n", ": holds no lengths"),
    ],
)
def test_a_bad_lengths_file_is_named_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as error:
        read_lengths(path)
    assert f"{path}{told}" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "poisson arrivals need a rate"),
        ({"rate_per_s": 0.0}, "rate_per_s must be a number above 0, not 0"),
        ({"rate_per_s": -4.0}, "rate_per_s must be a number above 0, not -4"),
        ({"rate_per_s": float("nan")}, "rate_per_s must be a number above 0, not nan"),
        ({"rate_per_s": 1.0, "duration_s": 0.0}, "duration_s must be a number above 0"),
        ({"rate_per_s": 1.0, "seed": -1}, "seed must be at least 0"),
        (
            {"rate_per_s": 1.0, "lengths": ((5, 5), (0, 1))},
            "a request has at least 1 prompt and 1 generated token, not 0 and 1",
        ),
        ({"rate_per_s": 1.0, "lengths": ()}, "at least 1 prompt"),
        ({"rate_per_s": 1.0, "arrivals": "possion"}, "without a file: poisson, constant"),
        ({"arrivals": "possion"}, "possion: no such file; allowed: poisson, constant"),
        ({"rate_per_s": 1e5}, "100000 requests/s for 600 s are more than 10000000 requests"),
        ({"rate_per_s": 1e-9}, "no request arrives in 600 s at 1e-09/s"),
    ],
)
def test_bad_traffic_is_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises((SpecError, OutOfRangeError)) as error:
        Traffic(**fields).times_s()  # type: ignore[arg-type]
    assert told in str(error.value)


# ---------------------------------------------------------------- a service


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> StepPricer:
    """Analytic prices instead of those of the machine."""
    assert VLLM.serving is not None
    price = pricer(VLLM.serving, context_s=3e-8)

    def stand_in(
        self: Machine, sums: StepSums, stages: Sequence[Lowered], steps: Sequence[Step]
    ) -> Prices:
        latency, energy = price(steps)
        return latency[:, None], energy[:, None]

    monkeypatch.setattr(Machine, "price", stand_in, raising=False)
    return price


def service(traffic: Traffic, **rest: object) -> ServingResult | Infeasible:
    return serve(LLAMA, engine=VLLM, device=H200, traffic=traffic, **rest)  # type: ignore[arg-type]


def served(traffic: Traffic, **rest: object) -> ServingResult:
    result = service(traffic, **rest)
    assert isinstance(result, ServingResult)
    return result


def test_the_kv_cache_is_as_large_as_vllm_reports_it() -> None:
    assert VLLM.serving is not None
    # vLLM 0.24, Llama-3-8B, H200 (143,771 MiB), gpu_memory_utilization 0.85, 16,384 batch tokens.
    serving = replace(VLLM.serving, memory_share=0.85, batch_tokens=16384)
    engine = replace(VLLM, serving=serving)
    found = kv_tokens(lower(LLAMA, engine, Parallelism()), H200, 2048)
    assert found == pytest.approx(834_448, rel=0.03)
    assert found % 16 == 0
    two = kv_tokens(lower(LLAMA, engine, Parallelism(tp=2)), H200, 1)
    assert two > 2 * found


def test_layers_with_a_window_leave_room_for_more_tokens_of_long_requests() -> None:
    found = lower(CATALOGUE.spec("gpt_oss_20b"), VLLM, Parallelism())
    within, long = (kv_tokens(found, H200, n) for n in (128, 1280))
    # Twelve layers keep all tokens, and twelve a tenth of them.
    assert long / within == pytest.approx(2 / 1.1, rel=1e-3)


def test_a_result_holds_what_the_simulation_of_its_replica_does(priced: StepPricer) -> None:
    traffic = Traffic(rate_per_s=12.0, lengths=((600, 40), (90, 1)), duration_s=20.0)
    result = served(traffic)
    assert VLLM.serving is not None
    asked = requests_of(traffic.times_s(), traffic.lengths)
    one = Replica(
        prices=PriceTable(priced, serving=VLLM.serving, longest=640),
        serving=VLLM.serving,
        blocks=result.kv_cache.capacity_tokens // 16,
        idle_w=H200.idle_w,
        ahead=True,
    )
    run = one.simulate(asked)
    ttft, e2e = run.first_token_s - asked.arrival_s, run.completion_s - asked.arrival_s
    for found, raw in (
        (result.ttft_s, ttft),
        (result.e2e_s, e2e),
        (result.tpot_s, tpot_s(asked, run)),
    ):
        assert found is not None
        assert found.mean == pytest.approx(raw.mean())
        for share in (50, 90, 99):
            assert getattr(found, f"p{share}") == pytest.approx(np.percentile(raw, share))
    count, tokens = len(ttft), int(asked.gen_len.sum())
    assert result.traffic.requests == count
    assert result.requests_per_s == pytest.approx(count / run.window_s)
    assert result.tokens_per_s == pytest.approx(tokens / run.window_s)
    assert result.energy_j == pytest.approx(result.energy_per_request_j * count)
    assert result.energy_j == pytest.approx(result.energy_per_token_j * tokens)
    assert result.energy_j == pytest.approx(result.total_power_w * result.window_s)
    assert result.utilisation == pytest.approx(run.busy_s / run.window_s)
    assert (result.steps, result.preemptions) == (run.steps, run.preemptions)
    low, high = result.interval.energy_per_request_j
    assert low < result.energy_per_request_j < high
    assert result.interval.tpot_s is not None and result.tpot_s is not None
    assert result.interval.tpot_s[0] < result.tpot_s.mean < result.interval.tpot_s[1]


@pytest.mark.usefixtures("priced")
def test_replicas_share_the_arrivals_and_add_up() -> None:
    one = served(Traffic(arrivals="constant", rate_per_s=5.0, duration_s=20.0))
    two = served(
        Traffic(arrivals="constant", rate_per_s=10.0, duration_s=20.0),
        config=Config(parallelism=Parallelism(replicas=2)),
    )
    assert two.ttft_s == one.ttft_s
    assert two.mean_power_w == one.mean_power_w
    assert two.energy_per_request_j == one.energy_per_request_j
    assert two.energy_j == pytest.approx(2 * one.energy_j)
    assert two.total_power_w == pytest.approx(2 * one.total_power_w)
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s)
    assert two.saturation_rate_per_s == pytest.approx(2 * one.saturation_rate_per_s)
    assert "round robin" in " ".join(two.notes)


@pytest.mark.usefixtures("priced")
def test_a_rate_above_saturation_is_told_and_refused_where_a_steady_state_is_asked_for() -> None:
    traffic = Traffic(rate_per_s=500.0, duration_s=10.0)
    result = served(traffic)
    assert result.saturated
    most = f"saturates at {result.saturation_rate_per_s:.4g}/s"
    assert most in " ".join(result.notes)
    refused = service(traffic, steady_state=True)
    assert isinstance(refused, Infeasible)
    assert most in refused.reason
    below = served(replace(traffic, rate_per_s=5.0), steady_state=True)
    assert not below.saturated
    assert below.saturation_rate_per_s == result.saturation_rate_per_s


@pytest.mark.parametrize(
    ("limits", "captured"),
    [
        (Limits(), (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        (Limits(max_sequences=8), (1, 2, 4, 8, 16)),
        (Limits(max_sequences=1), (1, 2)),
        (Limits(batch_tokens=300), (1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300)),
        (Limits(batch_tokens=100), (1, 2, 4, *range(8, 97, 8), 100)),
        (Limits(batch_tokens=100, max_sequences=20), (1, 2, 4, 8, 16, 24, 32, 40)),
        (Limits(batch_tokens=3), (1, 2, 3)),
    ],
)
def test_captured_sizes_follow_the_limits_as_in_vllm(
    limits: Limits, captured: tuple[int, ...]
) -> None:
    # vLLM 0.24, config/vllm.py: up to min(2 * sequences, 512, tokens), and the tokens themselves
    # where they are not above that.
    assert _limited(VLLM, limits).capture_sizes == captured


@pytest.mark.usefixtures("priced")
def test_fewer_seats_and_tokens_sustain_less() -> None:
    traffic = Traffic(rate_per_s=1.0, duration_s=20.0)
    most = served(traffic).saturation_rate_per_s
    seats = served(traffic, limits=Limits(max_sequences=4))
    assert seats.saturation_rate_per_s < 0.5 * most
    tokens = served(traffic, limits=Limits(batch_tokens=256))
    assert tokens.saturation_rate_per_s < most


def test_requests_of_one_token_have_no_tpot_and_say_why(priced: StepPricer) -> None:
    result = served(Traffic(rate_per_s=1.0, lengths=((100, 1),), duration_s=20.0))
    assert result.tpot_s is None
    assert result.interval.tpot_s is None


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ({"engine": HF}, "engine hf has no `serving` section: it does not form steps out of requ"),
        ({"engine": HF}, "engines that do: vllm"),
        ({"limits": Limits(batch_tokens=0)}, "batch_tokens must be at least 1, not 0"),
        ({"limits": Limits(max_sequences=-1)}, "max_sequences must be at least 1, not -1"),
        (
            {"limits": Limits(batch_tokens=100, max_sequences=200)},
            "max_sequences=200 is above batch_tokens=100",
        ),
        (
            {"traffic": Traffic(rate_per_s=1.0, lengths=((100, 10), (2_000_000, 5)))},
            "request 2: 2000000 prompt + 5 generated tokens need 125001 blocks of 16",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    priced: StepPricer, rest: dict[str, object], told: str
) -> None:
    fields = {"engine": VLLM, "device": H200, "traffic": Traffic(rate_per_s=1.0)} | rest
    with pytest.raises((SpecError, OutOfRangeError)) as error:
        serve(LLAMA, **fields)  # type: ignore[arg-type]
    assert told in str(error.value)


@pytest.mark.usefixtures("priced")
def test_a_model_that_leaves_no_room_for_a_cache_is_infeasible() -> None:
    result = serve(
        CATALOGUE.spec("llama3_70b"),
        engine=VLLM,
        device=H200,
        traffic=Traffic(rate_per_s=1.0),
    )
    assert isinstance(result, Infeasible)
    assert "no room for a KV cache" in result.reason


# ---------------------------------------------------------------- command line

COMMAND = ("predict", "llama3_8b", "--engine", "vllm")
FIELDS = {
    "schema", "spec", "device", "engine", "parallelism", "overlap", "traffic", "window_s",
    "feasible", "reason", "energy_per_request_j", "energy_per_token_j", "mean_power_w",
    "total_power_w", "energy_j", "ttft_s", "tpot_s", "e2e_s", "requests_per_s", "tokens_per_s",
    "queue", "running", "kv_cache", "preemptions", "steps", "saturation_rate_per_s", "saturated",
    "utilisation", "interval", "source", "bundles", "anchors", "notes", "null_reasons",
}  # fmt: skip


@pytest.mark.usefixtures("priced")
def test_json_is_one_document_of_the_serving_schema(capsys: Capture) -> None:
    rate = ("--rate", "8", "--duration", "30", "--gpus", "1", "--prompt-len", "512")
    assert main([*COMMAND, *rate, "--gen-len", "32", "--seed", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert set(document) == FIELDS
    assert document["schema"] == "energylens/serving/v1"
    requests = document["traffic"].pop("requests")
    assert requests == len(Traffic(rate_per_s=8.0, duration_s=30.0, seed=5).times_s())
    assert document["traffic"] == {
        "rate_per_s": 8.0,
        "arrivals": "poisson",
        "duration_s": 30.0,
        "prompt_len": {"mean": 512.0, "max": 512},
        "gen_len": {"mean": 32.0, "max": 32},
        "seed": 5,
    }
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(document[name]) == {"mean", "p50", "p90", "p99"}
    for name in ("queue", "running"):
        assert set(document[name]) == {"mean", "max"}
    assert set(document["kv_cache"]) == {"capacity_tokens", "mean_share", "peak_share"}
    assert set(document["interval"]) == {"level", "energy_per_request_j", "tpot_s"}
    assert document["saturated"] is False
    assert document["parallelism"]["gpus"] == 1


@pytest.mark.usefixtures("priced")
def test_files_give_arrivals_and_lengths(capsys: Capture, tmp_path: Path) -> None:
    times, lengths = tmp_path / "times.txt", tmp_path / "lengths.csv"
    times.write_text("3\n4\n4.5\n7\n", encoding="utf-8")
    lengths.write_text("100,1\n200,3\n", encoding="utf-8")
    files = ("--arrivals", str(times), "--lengths", str(lengths))
    assert main([*COMMAND, *files, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["traffic"]["rate_per_s"] == pytest.approx(0.75)
    assert document["traffic"]["requests"] == 4
    assert document["traffic"]["prompt_len"] == {"mean": 150.0, "max": 200}
    times.write_text("3\n", encoding="utf-8")
    assert main([*COMMAND, *files, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["traffic"]["rate_per_s"] is None
    assert document["tpot_s"] is None
    assert set(document["null_reasons"]) == {
        "tpot_s", "interval.tpot_s", "traffic.rate_per_s"
    }  # fmt: skip


@pytest.mark.usefixtures("priced")
def test_the_table_names_what_it_shows_and_ends_with_the_sources(capsys: Capture) -> None:
    assert main([*COMMAND, "--rate", "8", "--duration", "30", "--replicas", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for label in ("TTFT", "TPOT", "p99", "J/request", "J/token", "W/GPU", "saturates", "KV cache"):
        assert label in out
    assert "2 x h200" in out
    assert "weakest source:" in out.strip().splitlines()[-1]


@pytest.mark.usefixtures("priced")
def test_an_overlap_is_named_as_in_a_prediction_of_one_batch(capsys: Capture) -> None:
    words = [*COMMAND, "--tp", "2", "--rate", "8", "--duration", "9", "--overlap", "16x4"]
    assert main(words) == 0
    assert "engine vllm, tp 2, overlap 16x4: " in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overlap"] == {"sm": 16, "chunks": 4}


@pytest.mark.usefixtures("priced")
def test_no_steady_state_is_exit_code_3_with_the_saturation_rate(capsys: Capture) -> None:
    rate = ("--rate", "900", "--duration", "20")
    assert main([*COMMAND, *rate, "--json"]) == 0
    most = json.loads(capsys.readouterr().out)["saturation_rate_per_s"]
    assert main([*COMMAND, *rate, "--steady-state", "--json"]) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) == FIELDS
    assert document["feasible"] is False
    assert document["energy_j"] is None
    assert f"saturates at {most:.4g}/s" in document["reason"]
    assert err == f"energylens: infeasible: {document['reason']}\n"


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--duration", "60"), "--duration is about traffic; give its --rate, or --arrivals FILE"),
        (("--arrivals", "constant"), "--arrivals is about traffic"),
        (("--max-batch-tokens", "8"), "--max-batch-tokens is about traffic"),
        (("--steady-state",), "--steady-state is about traffic"),
        (("--seed", "0"), "--seed is about traffic"),
        (("--rate", "0"), "--rate: 0 found, and must be a number above 0"),
        (("--rate", "-1"), "--rate: -1 found"),
        (("--rate", "1", "--duration", "0"), "--duration: 0 found"),
        (("--rate", "1", "--batch", "8"), "--batch is about one batch"),
        (("--rate", "1", "--mode", "eager"), "--mode is about one batch"),
        (("--rate", "1", "--engine", "hf"), "engines that do: vllm"),
        (("--rate", "1", "--arrivals", "possion"), "without a file: poisson, constant"),
        (("--arrivals", "possion"), "possion: no such file; allowed: poisson, constant"),
        (("--rate", "1", "--lengths", "nowhere.csv"), "nowhere.csv: no such file"),
        (("--rate", "1", "--max-num-seqs", "0"), "--max-num-seqs: 0 found"),
        (("--rate", "1", "--gen-len", "0"), "1 generated token, not 1024 and 0"),
        (("--rate", "0.001", "--duration", "1"), "raise the rate or the duration"),
        (("--rate", "1", "--engine", "vllm@next"), "found version 'next' of engine vllm"),
        (("--rate", "1", "--prompt-len", "2000000"), "request 1: 2000000 prompt"),
    ],
)
def test_bad_serving_options_are_one_line_and_exit_code_2(
    capsys: Capture, arguments: tuple[str, ...], told: str
) -> None:
    assert main([*COMMAND, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("energylens: error: ")
    assert err.count("\n") == 1
    assert told in err
