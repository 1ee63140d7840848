"""Time of a serving simulation, and how far its price table is from exact prices.

Run: ``python benchmarks/serving_speed.py [--speed] [SPEC [TP]]``. Aims: an hour of traffic at 10
requests/s within 5 s on 2 cores, exact prices aside; interpolation within 1 %.

The speed is measured on closed-form prices like those of Llama-3-8B on one H200. The error is that
of the table against `Machine.price` on random steps like those that traffic makes: decode steps,
steps with whole prompts, steps that also finish or start a chunk.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from energylens.cost.bundle import select
from energylens.lower import lower
from energylens.machine import StepSums, machine
from energylens.predict import Catalogue
from energylens.results import Infeasible
from energylens.serving import (
    PriceTable,
    Replica,
    StepPricer,
    Traffic,
    attention_pairs,
    requests_of,
)
from energylens.spec.system import Mode, Parallelism, Sequences, Serving, Step

BLOCKS = 52_000  # of 16 tokens: an H200 beside Llama-3-8B
Lengths = list[tuple[int, int]]
Case = tuple[int, float, list[tuple[int, int]]]
"""Decoding sequences, their mean context, (new, context) of the chunks."""


def spread_lengths(rng: np.random.Generator, count: int) -> Lengths:
    """Lognormal lengths like those of chats: median prompt 665, median answer 180."""
    prompts = rng.lognormal(6.5, 0.8, count).clip(8, 6000)
    answers = rng.lognormal(5.2, 0.7, count).clip(1, 1500)
    return [(int(p), int(g)) for p, g in zip(prompts, answers, strict=True)]


def closed_form(serving: Serving) -> StepPricer:
    """Weights and host, arithmetic beyond what the weights hide, cache, attention."""

    def seconds(step: Step) -> float:
        rows = serving.padded(step.tokens)
        cached = sum(s.count * s.context for s in step.sequences)
        pairs = sum(s.count * attention_pairs(s.new, int(s.context)) for s in step.sequences)
        return 4e-3 + max(0.0, 27e-6 * rows - 2e-3) + 3.3e-8 * cached + 1e-9 * pairs

    def price(steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
        latency = np.array([seconds(step) for step in steps])
        return latency, 600.0 * latency

    return price


def speed(serving: Serving) -> None:
    """Print what an hour of traffic takes to simulate."""
    mixes = {"1024/256": [(1024, 256)], "spread": spread_lengths(np.random.default_rng(0), 5000)}
    for name, lengths in mixes.items():
        for rate in (2.0, 10.0, 18.0):
            start = time.perf_counter()
            asked = requests_of(Traffic(rate_per_s=rate, duration_s=3600.0).times_s(), lengths)
            replica = Replica(
                prices=PriceTable(closed_form(serving), serving=serving, longest=7500),
                serving=serving,
                blocks=BLOCKS,
                idle_w=120.0,
                ahead=True,
            )
            most = replica.saturation_rate(lengths)
            middle = time.perf_counter()
            run = replica.simulate(asked)
            end = time.perf_counter()
            print(
                f"{name} at {rate:g}/s: {len(asked.arrival_s)} requests, {run.steps} steps, "
                f"{run.running.mean:.0f} running; saturation ({most:.1f}/s) {middle - start:.2f} "
                f"s, simulation {end - middle:.2f} s, {replica.prices.priced} exact prices"
            )


def cases(rng: np.random.Generator, count: int, budget: int) -> list[tuple[str, Case]]:
    """Random steps of fixed and of spread lengths at low to full load, the last prompt cut."""
    out: list[tuple[str, Case]] = []
    for i in range(count):
        batch = int(np.exp(rng.uniform(0, np.log(700))))
        context = float(rng.uniform(300, 4000))
        prompts = [p for p, _ in spread_lengths(rng, 6)] if i % 2 else [1024] * 6
        kind = ("decode", "a prompt", "several prompts", "prompts and a late chunk")[i // 2 % 4]
        chunks: list[tuple[int, int]] = []
        if kind != "decode":
            chunks = [(p, p) for p in prompts[: 1 if kind == "a prompt" else rng.integers(2, 6)]]
        if kind == "prompts and a late chunk":
            new = int(rng.integers(1, 2000))
            chunks.insert(0, (new, new + int(rng.integers(1, 6000))))
        room = budget - batch
        for j, (new, end) in enumerate(chunks):
            taken = min(new, room)
            chunks[j], room = (taken, end - new + taken), room - taken
        chunks = [chunk for chunk in chunks if chunk[0]]
        out.append((f"{kind}, {'spread' if i % 2 else '1024'}", (batch, context, chunks)))
    return out


def accuracy(name: str, tp: int) -> None:
    """Print how far the table is from exact prices."""
    catalogue = Catalogue()
    spec, engine, device = catalogue.spec(name), catalogue.engine("vllm"), catalogue.device("h200")
    lowered = lower(spec, engine, Parallelism(tp=tp))
    assert engine.serving is not None and not isinstance(lowered, Infeasible)
    bundle = select(catalogue.bundles(device, engine), device.name, engine.provider)
    priced = machine(
        device, workers=tp, bundle=bundle, anchors=None, link=catalogue.link(device, tp)
    )
    sums, spent = StepSums(priced.model), [0.0]

    def price(steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
        start = time.perf_counter()
        latency, energy = priced.price(sums, (lowered,), steps)
        spent[0] += time.perf_counter() - start
        return latency[:, 0], energy[:, 0]

    def step(case: Case) -> Step:
        batch, context, chunks = case
        decoding = (Sequences(count=batch, new=1, context=context),)
        prompts = {chunk: chunks.count(chunk) for chunk in chunks}
        return Step(
            sequences=decoding
            + tuple(Sequences(count=n, new=new, context=end) for (new, end), n in prompts.items()),
            mode=Mode.SERVING,
        )

    chosen = cases(np.random.default_rng(1), 1600, engine.serving.batch_tokens)
    exact = np.column_stack(price([step(case) for _, case in chosen]))
    each, spent[0] = spent[0] / len(chosen), 0.0
    table = PriceTable(price, serving=engine.serving, longest=8000)
    found = np.array([_look_up(table, case) for _, case in chosen])
    print(
        f"{name} tp {tp}: {1e3 * each:.2f} ms an exact price in one call of {len(chosen)}, "
        f"{1e3 * spent[0] / table.priced:.2f} ms in those of the table ({table.priced})"
    )
    errors = 100 * (found / exact - 1)
    for kind in sorted({kind for kind, _ in chosen}):
        off = errors[[k == kind for k, _ in chosen]]
        time_pct, energy_pct = np.abs(off).mean(axis=0)
        print(
            f"  {kind}: latency {time_pct:.2f} % (most {np.abs(off[:, 0]).max():.2f} %), "
            f"energy {energy_pct:.2f} % (most {np.abs(off[:, 1]).max():.2f} %), "
            f"bias {off[:, 0].mean():+.2f} %"
        )


def _look_up(table: PriceTable, case: Case) -> tuple[float, float]:
    batch, context, chunks = case
    if chunks:
        pairs = sum(attention_pairs(new, end) for new, end in chunks)
        return table.mixed(sum(new for new, _ in chunks), pairs, batch, context)
    p = table.decode(batch, context)
    further = context - p.low
    return p.latency_s + p.latency_slope * further, p.energy_j + p.energy_slope * further


def main(arguments: Sequence[str]) -> None:
    """Measure the speed, and the error unless only the speed is asked for."""
    serving = Catalogue().engine("vllm").serving
    assert serving is not None
    speed(serving)
    rest = [argument for argument in arguments if argument != "--speed"]
    if len(rest) == len(arguments):
        accuracy(rest[0] if rest else "llama3_8b", int(rest[1]) if len(rest) > 1 else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
