"""The real vLLM engine against the prediction: steps, kernels by op kind, continuous batching.

Two steps, since measuring needs a GPU with vLLM and comparing does not:

    results=benchmarks/results/vllm_llama3_8b.json
    python benchmarks/vllm_reference.py measure --spec llama3_8b --anchor ANCHOR.json --out $results
    python benchmarks/vllm_reference.py compare $results

`measure` starts the engine with random weights and vLLM's own defaults, and takes

* time and energy of whole prefills and of decode steps in steady windows;
* kernel times of one profiled prefill and one decode step, from a rested board, so that the power
  limiter does not step in: they are compared with the prediction without the cap law;
* a minute of Poisson arrivals with mixed lengths, each request with its stamps, and the energy
  counter over all of it.

None of it is ever fitted on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

PROFILED = (("prefill", 1, 2048), ("decode", 16, 1024))
PROFILED_STEPS = 4
SETTLE_S, WINDOW_S, REST_S = 1.0, 1.5, 3.0
RATE_PER_S, DURATION_S = 20.0, 70.0
PROMPT, GENERATION = (600, 0.7, 64, 4096), (150, 0.6, 16, 600)
"""Median, logarithmic deviation, least and most tokens of a request's prompt and answer."""

KINDS = (
    ("gemm", ("nvjet", "splitk", "cutlass_80", "gemm", "gemv")),
    ("attention", ("flash", "attn")),
    ("norm", ("norm",)),
    ("copy", ("reshape_and_cache", "embedding")),
    ("sampling", ("gumbel", "argmax")),
    ("collective", ("nccl", "all_reduce", "cross_device_reduce")),
    ("elementwise", ("triton_poi",)),
)
"""Op kind -> parts of kernel names, tried in this order; what matches none is overhead."""


def kind_of(kernel: str) -> str:
    """Op kind of a CUDA kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(p in name for p in parts)), "overhead")


def traffic(seed: int = 1) -> dict[str, list[Any]]:
    """Arrival times in seconds, prompt and answer lengths of every request."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / RATE_PER_S, round(2 * RATE_PER_S * DURATION_S))
    arrivals = np.cumsum(gaps)
    arrivals = arrivals[arrivals < DURATION_S]

    def lengths(median: float, deviation: float, least: int, most: int) -> list[int]:
        drawn = random.lognormal(np.log(median), deviation, len(arrivals))
        return [int(n) for n in np.clip(drawn, least, most)]

    return {
        "arrivals_s": [round(float(t), 6) for t in arrivals],
        "prompt_len": lengths(*PROMPT),
        "gen_len": lengths(*GENERATION),
    }


def measure(spec_name: str, anchor: Path, out: Path, workers: int) -> None:
    """Run the engine and write what it took."""
    from energylens.bench.vllm_engine import WHOLE_STEPS, VllmEngine
    from energylens.bench.vllm_kernels import VllmProvider
    from energylens.meter.nvml import NvmlMeter, match_cuda
    from energylens.spec.load import load_spec

    spec, meter = load_spec(spec_name), NvmlMeter()
    providers = [VllmProvider(i) for i in range(workers)]
    infos = match_cuda(meter.devices(), [p.uuid() for p in providers])
    uuids = [info.uuid for info in infos]
    document: dict[str, Any] = {
        "spec": spec.name,
        "tp": workers,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": dict(providers[0].versions()) | {"driver": infos[0].driver},
        "anchors": json.loads(anchor.read_text(encoding="utf-8")),
        "rows": [],
        "profiles": [],
    }

    def save() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    with VllmEngine(spec, workers=workers) as engine, meter.recorder(uuids) as recorder:
        document["engine"] = engine.facts()

        def watts(start: float, end: float) -> list[float | None]:
            return [recorder.reading(u, start, end).mean_power_w for u in uuids]

        for phase, batch, length in PROFILED if workers == 1 else ():
            time.sleep(REST_S)
            document["profiles"].append(
                {
                    "phase": phase,
                    "batch": batch,
                    "prompt_len": length,
                    **profiled(engine, phase, batch, length),
                }
            )
        for phase, batch, length in WHOLE_STEPS:
            run = engine.decode if phase == "decode" else engine.prefill
            found = run(batch, length, settle_s=SETTLE_S, window_s=WINDOW_S)
            reading = recorder.reading(uuids[0], found.start_s, found.end_s)
            row = {
                "phase": phase,
                "batch": batch,
                "prompt_len": length,
                "context_len": found.context,
                "latency_s": found.mean_s,
                "median_s": statistics.median(found.times_s),
                "n": len(found.times_s),
                "power_w": watts(found.start_s, found.end_s),
                "sm_clock_hz": reading.sm_clock_hz,
                "ticks": reading.ticks,
            }
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
            save()
        if workers == 1:
            asked = traffic()
            served, start, end = engine.serve(
                asked["arrivals_s"], asked["prompt_len"], asked["gen_len"]
            )
            document["serving"] = {
                "rate_per_s": RATE_PER_S,
                "start_s": 0.0,
                "end_s": end - start,
                "power_w": watts(start, end),
                "requests": [list(asdict(s).values()) for s in served],
                "columns": list(asdict(served[0])),
            }
    save()


def profiled(engine: Any, phase: str, batch: int, length: int) -> dict[str, dict[str, float]]:
    """Kernel seconds by op kind and by kernel of one prefill, or per decode step of a few."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = 1 if phase == "prefill" else PROFILED_STEPS
    with (
        engine.stepper(phase, batch, length) as step,
        profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof,
    ):
        for _ in range(steps):
            step()
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in prof.events():
        if event.device_type == DeviceType.CUDA:
            seconds = 1e-6 * (event.time_range.end - event.time_range.start) / steps
            kinds[kind_of(event.name)] += seconds
            names[event.name[:80]] += seconds
    top = sorted(names, key=lambda n: names[n], reverse=True)[:24]
    return {"kernel_s": dict(kinds), "kernels": {n: names[n] for n in top}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("measure")
    run.add_argument("--spec", default="llama3_8b")
    run.add_argument("--tp", type=int, default=1)
    run.add_argument("--anchor", type=Path, required=True, help="of the boards and their host")
    run.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measure(options.spec, options.anchor, options.out, options.tp)


if __name__ == "__main__":
    main()
