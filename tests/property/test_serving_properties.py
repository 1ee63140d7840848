"""What holds for all traffic; and the fast simulation against an obvious one, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from energylens.serving import (
    PriceTable,
    Replica,
    Requests,
    Simulation,
    StepPricer,
    attention_pairs,
    requests_of,
)
from energylens.spec.system import Serving, Step

IDLE_W = 100.0
SECONDS = (3e-3, 2e-5, 1e-4, 3e-7)
"""Of a step, and of each of its padded tokens, decoding sequences, tokens of their contexts."""
JOULES = (0.7, 0.011, 0.03, 2e-4)


@dataclass(frozen=True)
class Case:
    """One replica and its traffic."""

    arrival_s: tuple[float, ...]
    lengths: tuple[tuple[int, int], ...]
    batch_tokens: int
    max_sequences: int
    block_size: int
    spare_blocks: int
    ahead: bool = False
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8)

    @property
    def requests(self) -> Requests:
        return requests_of(np.array(self.arrival_s), self.lengths)

    @property
    def serving(self) -> Serving:
        return Serving(
            batch_tokens=self.batch_tokens,
            offline_batch_tokens=self.batch_tokens,
            max_sequences=self.max_sequences,
            block_size=self.block_size,
            memory_share=0.9,
            capture_sizes=tuple(s for s in self.capture_sizes if s <= self.batch_tokens),
        )

    @property
    def blocks(self) -> int:
        """Enough for each request alone."""
        longest = max(p + g for p, g in self.lengths)
        return -(-longest // self.block_size) + self.spare_blocks

    def prices(self, price: StepPricer | None = None) -> PriceTable:
        longest = max(p + g for p, g in self.lengths)
        price = price or analytic(self.serving)
        return PriceTable(price, serving=self.serving, longest=longest)

    def replica(self, price: StepPricer | None = None) -> Replica:
        return Replica(
            prices=self.prices(price),
            serving=self.serving,
            blocks=self.blocks,
            idle_w=IDLE_W,
            ahead=self.ahead,
        )

    def simulate(self) -> Simulation:
        return self.replica().simulate(self.requests)


def analytic(serving: Serving) -> StepPricer:
    """A pricer of a closed form that `PriceTable` holds exactly."""

    def price(steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
        decoding = np.array(
            [[sum(s.count * s.context**i for s in step.sequences if s.new == 1) for i in (0, 1)]
             for step in steps]
        )  # fmt: skip
        tokens = np.array([serving.padded(step.tokens) for step in steps])
        known = np.column_stack((np.ones(len(steps)), tokens, decoding))
        return known @ np.array(SECONDS), known @ np.array(JOULES)

    return price


# ---------------------------------------------------------------- the twin


@dataclass(eq=False)
class Request:
    arrival_s: float
    prompt: int
    gen: int
    made: int = 0
    computed: int = 0
    blocks: int = 0
    decoding: bool = False
    first_s: float = math.nan
    done_s: float = math.nan


@dataclass
class Twin:
    """The policy as it is written, one step at a time, one request at a time."""

    case: Case
    now: float = 0.0
    energy_j: float = 0.0
    busy_s: float = 0.0
    queue_s: float = 0.0
    running_s: float = 0.0
    held_s: float = 0.0
    queue_max: int = 0
    running_max: int = 0
    held_max: int = 0
    preemptions: int = 0
    steps: int = 0
    tokens: int = 0
    """Tokens computed, those computed again included."""
    known_until: float = 0.0
    margin_s: float = math.inf
    """How close an arrival ever came to the end of a step: below rounding, either is right."""
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    leaving: list[Request] = field(default_factory=list)
    """Done in the last step, and still there for the next one where steps are formed ahead."""

    def run(self) -> list[Request]:
        case, prices = self.case, self.case.prices()
        requests = [
            Request(float(a), int(p), int(g))
            for a, p, g in zip(
                case.requests.arrival_s,
                case.requests.prompt_len,
                case.requests.gen_len,
                strict=True,
            )
        ]
        coming = list(requests)
        self.now = coming[0].arrival_s
        while coming or self.waiting or self.running:
            if not self.running:
                self.leaving = []
                self.known_until = self.now
                if not self.waiting:
                    self.known_until = self.now = max(self.now, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= self.known_until:
                self.waiting.append(coming.pop(0))
            self.step(coming, prices)
        return requests

    def free(self) -> int:
        return self.case.blocks - sum(r.blocks for r in [*self.running, *self.leaving])

    def more_blocks(self, request: Request, new: int) -> int:
        return -(-(request.computed + new) // self.case.block_size) - request.blocks

    def step(self, coming: list[Request], prices: PriceTable) -> None:
        scheduled, preempted = self.serve_running()
        if not preempted:
            scheduled += self.admit(self.case.batch_tokens - sum(new for _, new in scheduled))
        if not scheduled:
            return
        seconds, joules = self.price(scheduled, prices)
        self.leaving = []
        self.account(seconds, joules, scheduled, coming)
        for request, new in scheduled:
            request.computed += new
            if request.computed < request.prompt + request.made:
                continue
            request.decoding = True
            request.made += 1
            if request.made == 1:
                request.first_s = self.now
            if request.made == request.gen:
                request.done_s = self.now
                self.running.remove(request)
                if self.case.ahead:
                    self.leaving.append(request)

    def serve_running(self) -> tuple[list[tuple[Request, int]], bool]:
        """What the running get, and whether any was preempted for it."""
        budget, before = self.case.batch_tokens, self.preemptions
        scheduled: list[tuple[Request, int]] = []
        while len(scheduled) < len(self.running) and budget:
            request = self.running[len(scheduled)]
            new = min(request.prompt + request.made - request.computed, budget)
            while request in self.running and self.more_blocks(request, new) > self.free():
                last = self.running.pop()
                last.computed = last.blocks = 0
                last.decoding = False
                self.waiting.insert(0, last)
                self.preemptions += 1
            if request not in self.running:
                break
            request.blocks += self.more_blocks(request, new)
            scheduled.append((request, new))
            budget -= new
        return scheduled, self.preemptions > before

    def admit(self, budget: int) -> list[tuple[Request, int]]:
        scheduled = []
        while self.waiting and budget:
            request = self.waiting[0]
            whole = request.prompt + request.made
            if len(self.running) + len(self.leaving) == self.case.max_sequences:
                break
            if self.more_blocks(request, whole) > self.free():
                break
            new = min(whole, budget)
            request.blocks += self.more_blocks(request, new)
            self.running.append(self.waiting.pop(0))
            scheduled.append((request, new))
            budget -= new
        return scheduled

    def price(
        self, scheduled: list[tuple[Request, int]], prices: PriceTable
    ) -> tuple[float, float]:
        contexts = [r.computed + new for r, new in scheduled if r.decoding]
        chunks = [(new, r.computed + new) for r, new in scheduled if not r.decoding]
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        if chunks:
            pairs = sum(new * end - new * (new - 1) // 2 for new, end in chunks)
            return prices.mixed(sum(new for new, _ in chunks), pairs, len(contexts), mean)
        p = prices.decode(len(contexts), mean)
        assert p.low <= mean <= p.high
        further = mean - p.low
        return p.latency_s + p.latency_slope * further, p.energy_j + p.energy_slope * further

    def account(
        self,
        seconds: float,
        joules: float,
        scheduled: list[tuple[Request, int]],
        coming: list[Request],
    ) -> None:
        end = self.now + seconds
        within = [max(r.arrival_s, self.now) for r in coming if r.arrival_s < end]
        self.queue_s += len(self.waiting) * seconds + sum(end - a for a in within)
        self.queue_max = max(self.queue_max, len(self.waiting) + len(within))
        held = sum(r.blocks for r in self.running)
        self.running_s += len(self.running) * seconds
        self.held_s += held * seconds
        self.running_max = max(self.running_max, len(self.running))
        self.held_max = max(self.held_max, held)
        self.margin_s = min([self.margin_s, *(abs(r.arrival_s - end) for r in coming)])
        self.busy_s += seconds
        self.energy_j += joules
        self.steps += 1
        self.tokens += sum(new for _, new in scheduled)
        self.known_until = self.now if self.case.ahead else end
        self.now = end


# ---------------------------------------------------------------- properties


@st.composite
def cases(draw: st.DrawFn, *, most: int = 14) -> Case:
    count = draw(st.integers(1, most))
    gaps = draw(st.lists(st.floats(0, 0.08), min_size=count, max_size=count))
    batch_tokens = draw(st.integers(1, 48))
    return Case(
        arrival_s=tuple(np.cumsum(gaps).tolist()),
        lengths=tuple(
            draw(
                st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40)), min_size=1, max_size=5)
            )
        ),
        batch_tokens=batch_tokens,
        max_sequences=draw(st.integers(1, min(batch_tokens, 9))),
        block_size=draw(st.sampled_from((1, 2, 4, 16))),
        spare_blocks=draw(st.integers(0, 20)),
        ahead=draw(st.booleans()),
    )


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


# A request is preempted for blocks that another one is about to free, and computed again at once.
AT_ONCE = Case(
    arrival_s=(0.0, 0.0007),
    lengths=((2, 3),),
    batch_tokens=18,
    max_sequences=2,
    block_size=1,
    spare_blocks=1,
    ahead=True,
)


@settings(max_examples=400)
@given(cases())
@example(AT_ONCE)
def test_the_fast_simulation_does_what_the_slow_one_does(case: Case) -> None:
    twin = Twin(case)
    requests = twin.run()
    assume(twin.margin_s > 1e-9)
    run = case.simulate()
    assert run.first_token_s == close([r.first_s for r in requests])
    assert run.completion_s == close([r.done_s for r in requests])
    assert (run.steps, run.preemptions) == (twin.steps, twin.preemptions)
    window = twin.now - requests[0].arrival_s
    assert run.window_s == close(window)
    assert run.busy_s == close(twin.busy_s)
    assert run.energy_j == close(twin.energy_j + IDLE_W * (window - twin.busy_s))
    assert run.queue.mean == close(twin.queue_s / window)
    assert run.running.mean == close(twin.running_s / window)
    assert run.held_share.mean == close(twin.held_s / window / case.blocks)
    assert run.queue.max == twin.queue_max
    assert run.running.max == twin.running_max
    assert run.held_share.max == close(twin.held_max / case.blocks)


@given(cases())
def test_every_token_is_computed_once_and_again_only_after_a_preemption(case: Case) -> None:
    def a_joule_a_token(steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.array([float(step.tokens) for step in steps])
        return 1e-3 + 1e-5 * tokens, tokens

    replica = replace(case.replica(a_joule_a_token), idle_w=0.0)
    run, requests = replica.simulate(case.requests), case.requests
    # The last token of a request is made, and never read.
    once = int((requests.prompt_len + requests.gen_len - 1).sum())
    if run.preemptions:
        assert run.energy_j >= once * (1 - 1e-9)
    else:
        assert run.energy_j == close(once)


@given(cases())
def test_first_tokens_come_in_order_of_arrival_where_none_is_preempted(case: Case) -> None:
    run = case.simulate()
    assume(not run.preemptions)
    assert np.all(np.diff(run.first_token_s) >= 0)


@given(cases())
def test_times_energy_and_shares_stay_within_their_bounds(case: Case) -> None:
    run, requests = case.simulate(), case.requests
    assert np.all(run.first_token_s > requests.arrival_s)
    assert np.all(run.completion_s >= run.first_token_s)
    assert np.all((run.completion_s > run.first_token_s) == (requests.gen_len > 1))
    assert 0 < run.busy_s / run.window_s <= 1
    assert run.energy_j >= IDLE_W * run.window_s
    rounding = 1 + 1e-12
    assert 0 < run.held_share.mean <= run.held_share.max * rounding <= rounding
    assert 0 < run.running.mean <= run.running.max * rounding <= case.max_sequences * rounding
    assert 0 <= run.queue.mean <= run.queue.max * rounding <= len(requests.arrival_s) * rounding


@given(cases(most=1))
def test_a_lone_request_takes_its_prefill_and_its_steps(case: Case) -> None:
    run, prices = case.simulate(), case.prices()
    prompt, gen = case.lengths[0]
    ends = [*range(case.batch_tokens, prompt, case.batch_tokens), prompt]
    chunks = [(end - start, end) for start, end in zip([0, *ends], ends, strict=False)]
    prefill = sum(prices.mixed(new, attention_pairs(new, end), 0, 0.0)[0] for new, end in chunks)
    decode = 0.0
    for context in range(prompt + 1, prompt + gen):
        price = prices.decode(1, context)
        decode += price.latency_s + price.latency_slope * (context - price.low)
    assert run.first_token_s[0] - case.arrival_s[0] == close(prefill)
    assert run.completion_s[0] - run.first_token_s[0] == close(decode)
    assert run.steps == len(chunks) + gen - 1
    assert run.preemptions == 0


@given(cases(), st.floats(0.5, 60), st.floats(0.5, 60), st.integers(1, 30))
def test_a_higher_rate_never_shortens_the_queue_for_one_seat(
    case: Case, one: float, other: float, count: int
) -> None:
    """With one seat nothing is batched, and what a request waits can only grow with the rate."""
    assume(one != other)
    waiting = [
        replace(
            case, max_sequences=1, arrival_s=tuple((np.arange(count) / rate).tolist())
        ).simulate().queue.mean
        for rate in sorted((one, other))
    ]  # fmt: skip
    assert waiting[0] <= waiting[1] * (1 + 1e-9) + 1e-12
