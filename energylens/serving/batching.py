"""A service under traffic: continuous batching, simulated from event to event on predicted steps.

The policy is that of vLLM 0.24 (``v1/core/sched/scheduler.py``, first come first served, no prefix
caching). Each step first serves the running requests in order: a decoding one gets a token, one
whose prompt is not done the next chunk of it. Then waiting requests are admitted in order, none
skipped, while tokens of the step and seats are left and the free blocks of the KV cache hold the
whole prompt (``scheduler_reserve_full_isl``; blocks are taken only for the tokens of the step).
Where a running request finds no free block, the last one running loses its blocks and goes to the
head of the queue, to be computed again; no request is admitted in that step.

Three consequences keep this fast. At most one prompt is unfinished, and it is the last one running;
all decoding requests advance by one token in every step; so between two events (an arrival that can
be served, a completion, a lack of blocks) the decode steps differ only by a context that grows by
one, and any number of them is one closed formula.

Asynchronous scheduling (`Replica.ahead`, vLLM's default) forms a step when the one before it
starts. A request then joins one step later, and the seat and the blocks of one that is done are
free one step later, too.

Left out: the API server's own time, and the time to the first step after a pause.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from energylens.errors import OutOfRangeError
from energylens.results.service import MeanMax
from energylens.serving.prices import PriceTable, attention_pairs
from energylens.serving.traffic import Requests, requests_of
from energylens.spec.system import Serving

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """What one replica did, from the first arrival to the last completion.

    Attributes:
        first_token_s, completion_s: times of each request, [requests].
        window_s, busy_s: length of it all, and of the steps in it.
        energy_j: over the replica's GPUs, what they draw while idle included.
        queue, running: requests over time.
        held_share: part of the blocks of the KV cache that are held, over time.
        preemptions, steps: counts.
    """

    first_token_s: Array
    completion_s: Array
    window_s: float
    busy_s: float
    energy_j: float
    queue: MeanMax
    running: MeanMax
    held_share: MeanMax
    preemptions: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replica:
    """One engine with its KV cache.

    Attributes:
        prices: of its steps.
        serving: how it forms them.
        blocks: of the KV cache.
        idle_w: what its GPUs draw together between steps, in W.
        ahead: whether a step is formed when the one before it starts, not when it ends.
    """

    prices: PriceTable
    serving: Serving
    blocks: int
    idle_w: float
    ahead: bool = False

    def simulate(self, requests: Requests) -> Simulation:
        """Serve ``requests``, one at least.

        Raises:
            OutOfRangeError: one of them is longer than the KV cache.
        """
        self._check(requests)
        engine = _Engine(requests, self)
        engine.run()
        window = engine.busy_s + engine.idle_s
        joined = np.concatenate((requests.arrival_s, engine.preempted_s))
        served = np.array(engine.admitted_s + engine.resumed_s)
        return Simulation(
            first_token_s=np.array(engine.first_token_s),
            completion_s=np.array(engine.completion_s),
            window_s=window,
            busy_s=engine.busy_s,
            energy_j=engine.energy_j + self.idle_w * engine.idle_s,
            queue=_level(joined, served, window),
            running=MeanMax(mean=engine.running_s / window, max=engine.most_running),
            held_share=MeanMax(
                mean=engine.held_s / window / self.blocks, max=engine.most_held / self.blocks
            ),
            preemptions=len(engine.preempted_s),
            steps=engine.steps,
        )

    def saturation_rate(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Largest rate in requests/s that is sustained with requests of ``lengths``, cycled.

        Closed loop: all requests wait from the start, so that every step is as full as the limits
        allow. The rate is that of the completions after a warm-up of four batches and before the
        queue runs empty, over at least 16 batches and over whole rounds of the lengths. Where
        requests preempt each other under overload, a service that never gets there may sustain a
        little more.

        Raises:
            OutOfRangeError: a request is longer than the KV cache.
        """
        return self._sustained(tuple((p, g) for p, g in lengths))

    @lru_cache(maxsize=2)  # noqa: B019 - asked for again for each number of replicas
    def _sustained(self, lengths: tuple[tuple[int, int], ...]) -> float:
        size, seats = self.serving.block_size, self.serving.max_sequences
        mean_blocks = sum(-(-(p + g) // size) for p, g in lengths) / len(lengths)
        batch = min(seats, math.ceil(self.blocks / mean_blocks))
        warm_up = 4 * batch
        count = math.ceil(16 * batch / len(lengths)) * len(lengths)
        # Requests still wait when those that are counted are done: no more than the seats run.
        run = self.simulate(requests_of(np.zeros(warm_up + count + seats), lengths))
        done = np.sort(run.completion_s)
        return float(count / (done[warm_up + count - 1] - done[warm_up - 1]))

    def _check(self, requests: Requests) -> None:
        size = self.serving.block_size
        needed = -(-(requests.prompt_len + requests.gen_len) // size)
        if needed.max() > self.blocks:
            i = int(np.argmax(needed > self.blocks))
            raise OutOfRangeError(
                f"request {i + 1}: {requests.prompt_len[i]} prompt + {requests.gen_len[i]} "
                f"generated tokens need {needed[i]} blocks of {size}, and the KV cache holds "
                f"{self.blocks} ({self.blocks * size} tokens); shorten it, or raise --tp"
            )


def _level(joined_s: Array, left_s: Array, window_s: float) -> MeanMax:
    """Mean and maximum over time of how many have joined and not yet left."""
    times = np.concatenate((joined_s, left_s))
    change = np.repeat((1, -1), (len(joined_s), len(left_s)))
    moments, inverse = np.unique(times, return_inverse=True)
    level = np.cumsum(np.bincount(inverse, change))
    return MeanMax(
        mean=float((level[:-1] * np.diff(moments)).sum() / window_s), max=round(level.max())
    )


class _Engine:
    """One replica between two steps, and how it gets to the next.

    Requests are numbered in order of arrival; what is kept of them:

    - ``_tokens``: prompt, and what was generated before a preemption: what a prefill computes.
    - ``_left``: tokens to generate, before the prefill.
    - ``_base``: of a decoding one, tokens in the KV cache minus steps so far (it does not change).
    - ``_last``: of a decoding one, the step that makes its last token; of others 0.
    """

    def __init__(self, requests: Requests, replica: Replica) -> None:
        count = len(requests.arrival_s)
        self._arrival: list[float] = requests.arrival_s.tolist()
        self._tokens: list[int] = requests.prompt_len.tolist()
        self._left: list[int] = requests.gen_len.tolist()
        self._base = [0] * count
        self._last = [0] * count
        serving = replica.serving
        self._prices, self._blocks = replica.prices, replica.blocks
        self._budget, self._seats = serving.batch_tokens, serving.max_sequences
        self._size = serving.block_size
        self._next = 0  # the first that was never admitted
        self._preempted: list[int] = []  # the head of the queue, its first one last
        self._unfinished = -1  # whose prompt is not done, with the tokens that are
        self._done = 0
        self._running: list[int] = []  # decoding, in order; completed ones are left in it
        self._batch = 0  # how many decode
        self._base_sum = 0
        self._ends: list[tuple[int, int]] = []  # heap of (last step, request), outdated ones too
        self._phases = [0] * self._size  # decoding requests by their base modulo the block size
        self._held = 0
        self._ahead = replica.ahead
        self._leaving = self._leaving_blocks = 0  # done, but not yet when the next step was formed
        self._known_until = self.now = self._arrival[0]  # arrivals up to then are known
        self.steps = 0
        self.admitted_s = [math.nan] * count
        self.first_token_s = [math.nan] * count
        self.completion_s = [math.nan] * count
        self.preempted_s: list[float] = []
        self.resumed_s: list[float] = []
        self.energy_j = self.busy_s = self.idle_s = self.running_s = self.held_s = 0.0
        self.most_running = self.most_held = 0

    def run(self) -> None:
        """Serve all requests."""
        while True:
            if not self._batch and self._unfinished < 0:
                # Nothing runs on, so the next step is formed now.
                self._leaving = self._leaving_blocks = 0
                self._known_until = self.now
                if self._head() < 0:
                    if self._next == len(self._arrival):
                        return
                    self.idle_s += self._arrival[self._next] - self.now
                    self._known_until = self.now = self._arrival[self._next]
            head = self._head()
            prompts = self._unfinished >= 0 or (head >= 0 and self._admits(head))
            if prompts or not self._coast(waiting=head >= 0):
                self._step()

    def _head(self) -> int:
        """The request that is served next, or -1 where none is known to wait."""
        if self._preempted:
            return self._preempted[-1]
        if self._next < len(self._arrival) and self._arrival[self._next] <= self._known_until:
            return self._next
        return -1

    def _admits(self, request: int) -> bool:
        """Whether the next step has a seat and blocks for ``request`` beside those that decode."""
        blocks = self._need(0) + self._blocks_of(self._tokens[request])
        return self._batch + self._leaving < self._seats and blocks <= self._free

    @property
    def _free(self) -> int:
        """Blocks that the next step can take."""
        return self._blocks - self._held - self._leaving_blocks

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _need(self, after: int) -> int:
        """Blocks that the decoding requests take in the step that ``after`` others precede."""
        return self._phases[(-self.steps - after) % self._size]

    # -- one step with prompts, or without enough blocks

    def _step(self) -> None:
        preempted = False
        while self._need(0) + self._chunk_blocks() > self._free:
            self._preempt()
            preempted = True
        self._held += self._need(0)
        room = self._budget - self._batch
        ready: list[int] = []
        prefill = pairs = 0
        if self._unfinished >= 0:
            prefill, pairs = self._prefill(self._unfinished, self._done, room, ready)
        while not preempted and prefill < room:
            head = self._head()
            seats = self._seats - self._batch - self._leaving - len(ready)
            if head < 0 or not seats or self._blocks_of(self._tokens[head]) > self._free:
                break
            self._leave_queue(head)
            new, more = self._prefill(head, 0, room - prefill, ready)
            prefill, pairs = prefill + new, pairs + more
        context = self._base_sum / self._batch + self.steps + 1 if self._batch else 0.0
        if prefill:
            latency, energy = self._prices.mixed(prefill, pairs, self._batch, context)
        elif self._batch:
            price = self._prices.decode(self._batch, context)
            latency = price.latency_s + price.latency_slope * (context - price.low)
            energy = price.energy_j + price.energy_slope * (context - price.low)
        else:  # all that ran on was preempted, for blocks that are about to be free
            return
        running = self._batch + len(ready) + (self._unfinished >= 0)
        self.most_running = max(self.most_running, running)
        self.most_held = max(self.most_held, self._held)
        self.held_s += self._held * latency
        self._advance(1, latency, latency, energy, running)
        for request in ready:
            self._begin(request)
        self._complete()

    def _chunk_blocks(self) -> int:
        """Blocks that the next chunk of the unfinished prompt takes."""
        if self._unfinished < 0:
            return 0
        done = min(self._tokens[self._unfinished], self._done + self._budget - self._batch)
        return self._blocks_of(done) - self._blocks_of(self._done)

    def _preempt(self) -> None:
        """Send the last one that runs back to the head of the queue."""
        if self._unfinished >= 0:
            request, self._unfinished = self._unfinished, -1
            self._held -= self._blocks_of(self._done)
        else:
            while not self._last[self._running[-1]]:
                self._running.pop()
            request = self._running.pop()
            cached = self._base[request] + self.steps
            self._left[request] = self._last[request] - self.steps
            self._tokens[request] = cached + 1  # the newest token is not in the cache yet
            self._release(request)
        self._preempted.append(request)
        self.preempted_s.append(self.now)

    def _leave_queue(self, request: int) -> None:
        if self._preempted:
            self._preempted.pop()
            self.resumed_s.append(self.now)
        else:
            self._next += 1
            self.admitted_s[request] = self.now

    def _prefill(self, request: int, done: int, room: int, ready: list[int]) -> tuple[int, int]:
        """Put the next chunk of a prompt into the step; its new tokens and pairs."""
        new = min(self._tokens[request] - done, room)
        end = done + new
        self._held += self._blocks_of(end) - self._blocks_of(done)
        if end == self._tokens[request]:
            self._unfinished = -1
            ready.append(request)
        else:
            self._unfinished, self._done = request, end
        return new, attention_pairs(new, end)

    def _begin(self, request: int) -> None:
        """The prompt is done, and the first token made; start to decode."""
        if math.isnan(self.first_token_s[request]):
            self.first_token_s[request] = self.now
        self._left[request] -= 1
        if not self._left[request]:
            self._held -= self._blocks_of(self._tokens[request])
            self._leave(request, self._blocks_of(self._tokens[request]))
            return
        base = self._tokens[request] - self.steps
        last = self.steps + self._left[request]
        self._base[request], self._last[request] = base, last
        self._base_sum += base
        self._phases[base % self._size] += 1
        self._batch += 1
        self._running.append(request)
        heapq.heappush(self._ends, (last, request))

    # -- many decode steps at once

    def _coast(self, *, waiting: bool) -> bool:
        """Decode until something else happens; False where the next step lacks blocks.

        Args:
            waiting: whether the head of the queue waits for a seat or blocks, which only a
                completion (or a preemption) frees; else an arrival can be served.
        """
        ends = self._ends
        while self._last[ends[0][1]] != ends[0][0]:
            heapq.heappop(ends)
        context = self._base_sum / self._batch + self.steps + 1
        price = self._prices.decode(self._batch, context)
        # The price is one line up to the end of its range of contexts, and a step moves by one.
        count = min(ends[0][0] - self.steps, max(1, int(price.high - context) + 1))
        count = self._steps_with_blocks(1 if self._leaving else count)
        if not count:
            return False
        slope = price.latency_slope
        first = price.latency_s + slope * (context - price.low)
        if not waiting and self._batch < self._seats and self._next < len(self._arrival):
            gap = self._arrival[self._next] - self.now
            steps = _steps_until(gap, first, slope) if gap > 0 else 0
            count = min(count, steps + self._ahead)
        growth = count * (count - 1) / 2
        energy = count * (price.energy_j + price.energy_slope * (context - price.low))
        self._hold(count, first, slope)
        self._advance(
            count,
            count * first + slope * growth,
            first + slope * (count - 1),
            energy + price.energy_slope * growth,
            self._batch,
        )
        self._complete()
        return True

    def _steps_with_blocks(self, count: int) -> int:
        """How many of the next ``count`` decode steps find blocks."""
        free, batch, size = self._free, self._batch, self._size
        if batch * (count // size + 1) <= free:
            return count
        cycles = min(free // batch, count // size)
        steps = cycles * size
        free -= cycles * batch
        while steps < count:
            free -= self._need(steps)
            if free < 0:
                break
            steps += 1
        return steps

    def _hold(self, count: int, first: float, slope: float) -> None:
        """Take the blocks of ``count`` decode steps of ``first + i * slope`` seconds.

        Steps that are a multiple of the block size apart have taken whole rounds of one block for
        each request in between, so their sum of blocks times seconds is a polynomial.
        """
        size, batch, held = self._size, self._batch, self._held
        end = held + count // size * batch
        total = 0.0
        for i in range(min(count, size)):
            held += self._need(i)
            if i == count % size - 1:
                end += held - self._held
            n = (count - 1 - i) // size + 1
            seconds = first + slope * i
            total += n * held * seconds + (
                (batch * seconds + size * slope * held) * (n * (n - 1) / 2)
                + batch * size * slope * ((n - 1) * n * (2 * n - 1) / 6)
            )
        self.held_s += total
        self._held = end
        self.most_held = max(self.most_held, end)

    # -- both

    def _advance(
        self, steps: int, seconds: float, last_s: float, joules: float, running: int
    ) -> None:
        """Let time pass: ``steps`` that take ``seconds``, the last of them ``last_s``."""
        last_start = self.now + (seconds - last_s)
        self.steps += steps
        self.now += seconds
        self._known_until = last_start if self._ahead else self.now
        self._leaving = self._leaving_blocks = 0
        self.busy_s += seconds
        self.energy_j += joules
        self.running_s += running * seconds

    def _complete(self) -> None:
        """Let those go that made their last token."""
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            last, request = heapq.heappop(ends)
            if self._last[request] == last:
                self._release(request)
                self._leave(request, self._blocks_of(self._base[request] + self.steps))

    def _leave(self, request: int, blocks: int) -> None:
        self.completion_s[request] = self.now
        if self._ahead:
            self._leaving += 1
            self._leaving_blocks += blocks

    def _release(self, request: int) -> None:
        """Take a request that decodes out of the batch, and free its blocks."""
        base = self._base[request]
        self._last[request] = 0
        self._batch -= 1
        self._base_sum -= base
        self._phases[base % self._size] -= 1
        self._held -= self._blocks_of(base + self.steps)


def _steps_until(gap_s: float, first_s: float, slope_s: float) -> int:
    """Fewest steps, at least one, of ``first_s + i * slope_s`` that last for ``gap_s``."""

    def seconds(n: int) -> float:
        return n * first_s + slope_s * (n * (n - 1) / 2)

    linear = first_s - slope_s / 2
    root = math.sqrt(max(linear**2 + 2 * slope_s * gap_s, 0.0))
    n = max(1, math.ceil(2 * gap_s / (linear + root)))
    while seconds(n) < gap_s:
        n += 1
    while n > 1 and seconds(n - 1) >= gap_s:
        n -= 1
    return n
