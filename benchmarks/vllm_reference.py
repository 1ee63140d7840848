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
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hf_reference import step_line

from energylens.profiler.trace import LAWS_OFF, kind_of

PROFILED = (("prefill", 1, 2048), ("decode", 16, 1024))
PROFILED_STEPS = 4
SETTLE_S, WINDOW_S, REST_S = 1.0, 1.5, 3.0
RATE_PER_S, DURATION_S = 20.0, 70.0
PROMPT, GENERATION = (600, 0.7, 64, 4096), (150, 0.6, 16, 600)
"""Median, logarithmic deviation, least and most tokens of a request's prompt and answer."""


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
                    "kernels": profiled(engine, phase, batch, length),
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


def profiled(engine: Any, phase: str, batch: int, length: int) -> dict[str, float]:
    """Seconds of each CUDA kernel in one prefill, or per decode step of a few."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = 1 if phase == "prefill" else PROFILED_STEPS
    with (
        engine.stepper(phase, batch, length) as step,
        profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof,
    ):
        for _ in range(steps):
            step()
    names: dict[str, float] = defaultdict(float)
    for event in prof.events():
        if event.device_type == DeviceType.CUDA:
            names[event.name[:80]] += 1e-6 * (event.time_range.end - event.time_range.start) / steps
    return dict(names)


def compare(path: Path) -> None:
    """Print signed errors of the prediction: by op kind, of whole steps, of continuous batching."""
    from energylens.anchors import anchors_from_json
    from energylens.predict import Catalogue, predict
    from energylens.results import Infeasible
    from energylens.serving import Limits, Traffic, serve
    from energylens.spec.system import Config, Parallelism, Phase, Workload

    document = json.loads(path.read_text(encoding="utf-8"))
    anchors = anchors_from_json(document["anchors"], where=str(path))
    catalogue = Catalogue()
    engine, device = catalogue.engine("vllm"), catalogue.device("h200")
    config = Config(parallelism=Parallelism(tp=document["tp"]))
    common: dict[str, Any] = {
        "engine": engine,
        "device": device,
        "config": config,
        "bundles": catalogue.bundles(device, engine),
        "anchors": anchors,
        "link": catalogue.link(device, document["tp"]),
    }
    spec = catalogue.spec(document["spec"])

    def predicted(row: dict[str, Any], without: frozenset[str] = frozenset()) -> Any:
        result = predict(
            spec,
            workload=Workload(
                batch=row["batch"],
                prompt_len=row["prompt_len"],
                gen_len=1,
                context_len=row.get("context_len", row["prompt_len"] + PROFILED_STEPS),
            ),
            phases=(Phase(row["phase"]),),
            without=without,
            **common,
        )
        if isinstance(result, Infeasible):
            raise SystemExit(result.reason)
        return result

    print(f"{document['spec']} tp{document['tp']}, {document['time']}, {document['versions']}")
    for row in document["profiles"]:
        print(
            f"\nkernels of {row['phase']} {row['batch']}x{row['prompt_len']}, no cap, host or gap:"
        )
        parts: dict[str, float] = defaultdict(float)
        for part in predicted(row, LAWS_OFF).breakdown:
            parts[str(part.kind)] += part.latency_s
        found: dict[str, float] = defaultdict(float)
        for name, seconds in row["kernels"].items():
            found[kind_of(name)] += seconds
        pairs = [(k, parts.get(k, 0.0), m) for k, m in found.items()]
        pairs.sort(key=lambda p: -p[2])
        for kind, p, m in (*pairs, ("all", sum(parts.values()), sum(found.values()))):
            print(f"  {kind:12s} {p * 1e3:9.3f} / {m * 1e3:9.3f} ms {100 * (p / m - 1):+6.1f} %")
    print("\nwhole steps, all laws: measured, error of latency and of energy, regime")
    for row in document["rows"]:
        print(step_line(row, sum(row["power_w"]), predicted(row)))
    if "serving" not in document:
        return
    measured = _served(document["serving"])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as arrivals:
        arrivals.write("\n".join(map(str, measured["arrival_s"])))
        arrivals.flush()
        result = serve(
            spec,
            traffic=Traffic(
                arrivals=arrivals.name,
                lengths=tuple(zip(measured["prompt_len"], measured["gen_len"], strict=True)),
            ),
            limits=Limits(batch_tokens=document["engine"]["batch_tokens"]),
            **common,
        )
    if isinstance(result, Infeasible):
        raise SystemExit(result.reason)
    first, last = (np.array(measured[k]) for k in ("first_s", "last_s"))
    arrival, gen = np.array(measured["arrival_s"]), np.array(measured["gen_len"])
    tpot = (last - first)[gen > 1] / (gen[gen > 1] - 1)
    rate = len(arrival) / (arrival[-1] - arrival[0])
    print(
        f"\ncontinuous batching: {len(arrival)} requests, {rate:.1f}/s, predicted to saturate at "
        f"{result.saturation_rate_per_s:.1f}/s ({100 * rate / result.saturation_rate_per_s:.0f} %)"
    )
    energy = sum(document["serving"]["power_w"]) * (measured["end_s"] - arrival[0])
    for name, p, m in (
        ("J/request", result.energy_per_request_j, energy / len(arrival)),
        ("mean TPOT, ms", 1e3 * result.tpot_s.mean, 1e3 * tpot.mean()),
        ("p99 TPOT, ms", 1e3 * result.tpot_s.p99, 1e3 * np.percentile(tpot, 99)),
        ("mean TTFT, ms", 1e3 * result.ttft_s.mean, 1e3 * (first - arrival).mean()),
        ("p99 TTFT, ms", 1e3 * result.ttft_s.p99, 1e3 * np.percentile(first - arrival, 99)),
        ("mean W", result.total_power_w, sum(document["serving"]["power_w"])),
    ):
        print(f"  {name:14s} {p:9.2f} / {m:9.2f} {100 * (p / m - 1):+6.1f} %")


def _served(serving: dict[str, Any]) -> dict[str, Any]:
    """Columns of the served requests, and the end of the run."""
    columns = zip(*serving["requests"], strict=True)
    return dict(zip(serving["columns"], columns, strict=True)) | {"end_s": serving["end_s"]}


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
    verbs.add_parser("compare").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.verb == "measure":
        measure(options.spec, options.anchor, options.out, options.tp)
    else:
        compare(options.file)


if __name__ == "__main__":
    main()
