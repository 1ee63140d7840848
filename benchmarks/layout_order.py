"""Layouts on two boards, measured with the real vLLM engine, against the predicted order.

    python benchmarks/layout_order.py measure --spec llama3_8b --out results/layouts_llama3_8b.json
    python benchmarks/layout_order.py compare results/layouts_llama3_8b.json

`measure` starts vLLM with random weights in every layout of two boards (two replicas, TP 2, PP 2),
one after another in one sitting, with anchors of both boards first, and takes time and board
energy of prefills and decode steps at a few batches. A batch is that of one engine: two replicas
serve two of them. With pipeline stages vLLM keeps several groups of sequences in flight, so a step
is counted in tokens: its time is the window times the batch over the tokens made.

`compare` predicts the same, and says at each batch and phase whether the order of layouts in energy
per token is the measured one, and what the predicted pick costs beyond the best (regret).
Nothing is fitted on these numbers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

LAYOUTS = {
    "2 replicas": {"replicas": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}
POINTS = (
    ("decode", 1, 1024),
    ("decode", 16, 1024),
    ("decode", 64, 1024),
    ("prefill", 1, 1024),
    ("prefill", 16, 512),
    ("prefill", 64, 128),
)
"""Phase, batch, prompt length; each prefill is one step of at most 8192 tokens."""
SETTLE_S, WINDOW_S = 1.0, 2.5
START_TIMEOUT_S = 240.0


def serve(
    devices: str, spec_name: str, degrees: dict[str, int], points: Any, gate: Any, results: Any
) -> None:
    """One engine in a process of its own: the windows of all points, all engines in step."""
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    from energylens.bench.vllm_engine import VllmEngine
    from energylens.spec.load import load_spec

    with VllmEngine(
        load_spec(spec_name), workers=degrees.get("tp", 1), stages=degrees.get("pp", 1)
    ) as engine:
        found = []
        for phase, batch, length in points:
            gate.wait(START_TIMEOUT_S)
            found.append(window(engine, phase, batch, length))
        gate.wait(START_TIMEOUT_S)
        results.put((devices, found, engine.facts()))


def finished(results: Any, processes: list[Any]) -> Any:
    """The next result; a process that died first ends the run at once."""
    while True:
        try:
            return results.get(timeout=1.0)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                raise SystemExit("an engine died; its own message is above") from None


def window(engine: Any, phase: str, batch: int, length: int) -> dict[str, Any]:
    """Tokens and seconds of steps in a steady window."""
    if phase == "prefill":
        found = engine.prefill(batch, length, settle_s=SETTLE_S, window_s=WINDOW_S)
        steps = len(found.times_s)
        return {
            "start_s": found.start_s,
            "end_s": found.end_s,
            "latency_s": found.mean_s,
            "context_len": found.context,
            "steps": steps,
            "sequences": steps * batch,
        }
    made, calls, before = 0, 0, 0
    with engine.tokens(batch, length) as tokens:
        settled = time.monotonic() + SETTLE_S
        while time.monotonic() < settled:
            before += tokens()
        start = now = time.monotonic()
        while now < start + WINDOW_S:
            made += tokens()
            calls += 1
            now = time.monotonic()
    return {
        "start_s": start,
        "end_s": now,
        "latency_s": (now - start) * batch / made,
        "context_len": length + 1 + (before + made / 2) / batch,
        "steps": calls,
        "sequences": made,
    }


def measure(spec_name: str, anchor: Path, out: Path, layouts: list[str]) -> None:
    """Run every layout and write what it took."""
    from energylens.meter.nvml import NvmlMeter

    meter = NvmlMeter()
    uuids = [info.uuid for info in meter.devices()[:2]]
    context = multiprocessing.get_context("spawn")
    document: dict[str, Any] = {
        "spec": spec_name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "anchors": json.loads(anchor.read_text(encoding="utf-8")),
        "rows": [],
        "engines": {},
    }
    with meter.recorder(uuids) as recorder:
        for name in layouts:
            degrees = LAYOUTS[name]
            groups = ["0", "1"] if "replicas" in degrees else ["0,1"]
            gate, results = context.Barrier(len(groups)), context.Queue()
            arguments = (spec_name, degrees, POINTS, gate, results)
            processes = [context.Process(target=serve, args=(g, *arguments)) for g in groups]
            for process in processes:
                process.start()
            engines = sorted(finished(results, processes) for _ in groups)
            for process in processes:
                process.join(60)
            document["engines"][name] = engines[0][2]
            for i, (phase, batch, length) in enumerate(POINTS):
                windows = [found[i] for _, found, _ in engines]
                shares = [uuids] if len(groups) == 1 else [[u] for u in uuids]
                energies = [
                    sum(recorder.reading(u, w["start_s"], w["end_s"]).energy_j for u in boards)
                    for w, boards in zip(windows, shares, strict=True)
                ]
                sequences = sum(w["sequences"] for w in windows)
                tokens = sequences * (length if phase == "prefill" else 1)
                row = {
                    "layout": name,
                    "phase": phase,
                    "batch": batch,
                    "prompt_len": length,
                    "context_len": sum(w["context_len"] for w in windows) / len(windows),
                    "latency_s": max(w["latency_s"] for w in windows),
                    "energy_per_token_j": sum(energies) / tokens,
                    "total_power_w": sum(
                        e / (w["end_s"] - w["start_s"])
                        for e, w in zip(energies, windows, strict=True)
                    ),
                    "calls_per_token": sum(w["steps"] for w in windows) / sequences,
                }
                document["rows"].append(row)
                print(json.dumps(row), flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def compare(path: Path) -> None:
    """Print errors of every row, and order and regret at each batch and phase."""
    from energylens.anchors import anchors_from_json
    from energylens.predict import Catalogue, predict
    from energylens.results import Infeasible
    from energylens.spec.system import Config, Parallelism, Phase, Workload

    document = json.loads(path.read_text(encoding="utf-8"))
    anchors = anchors_from_json(document["anchors"], where=str(path))
    catalogue = Catalogue()
    engine, device = catalogue.engine("vllm"), catalogue.device("h200")
    spec = catalogue.spec(document["spec"])
    energies: dict[Any, dict[str, tuple[float, float]]] = defaultdict(dict)
    print("layout      step              measured            error of latency, energy per token")
    for row in document["rows"]:
        phase = Phase(row["phase"])
        result = predict(
            spec,
            engine=engine,
            device=device,
            config=Config(parallelism=Parallelism(**LAYOUTS[row["layout"]])),
            workload=Workload(
                batch=row["batch"],
                prompt_len=row["prompt_len"],
                gen_len=1,
                context_len=row["context_len"],
            ),
            phases=(phase,),
            bundles=catalogue.bundles(device, engine),
            anchors=anchors,
            link=catalogue.link(device, 2),
        )
        step = f"{row['phase']} {row['batch']}x{row['prompt_len']}"
        if isinstance(result, Infeasible):
            print(f"{row['layout']:11s} {step:17s} not predicted: {result.reason}")
            continue
        found = result.phases[phase]
        # Energy of a phase is that of one batch on all boards: replicas serve one each.
        replicas = LAYOUTS[row["layout"]].get("replicas", 1)
        tokens = row["batch"] * replicas * (row["prompt_len"] if phase is Phase.PREFILL else 1)
        energy = found.energy_j / tokens
        measured = row["energy_per_token_j"]
        energies[(row["phase"], row["batch"])][row["layout"]] = (energy, measured)
        print(
            f"{row['layout']:11s} {step:17s} {row['latency_s'] * 1e3:8.2f} ms {measured:9.5f} J"
            f" {100 * (found.latency_s / row['latency_s'] - 1):+7.1f} %"
            f" {100 * (energy / measured - 1):+7.1f} %"
        )
    print("\nphase, batch     measured order (J/token)            predicted order   regret of pick")
    for (phase_name, batch), by_layout in energies.items():
        predicted_order = sorted(by_layout, key=lambda n: by_layout[n][0])
        measured_order = sorted(by_layout, key=lambda n: by_layout[n][1])
        best = by_layout[measured_order[0]][1]
        regret = 100 * (by_layout[predicted_order[0]][1] / best - 1)
        same = "same" if predicted_order == measured_order else " < ".join(predicted_order)
        shown = " < ".join(f"{n} {by_layout[n][1]:.4f}" for n in measured_order)
        print(f"{phase_name:8s} {batch:3d}  {shown:45s} {same:25s} {regret:5.1f} %")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("measure")
    run.add_argument("--spec", default="llama3_8b")
    run.add_argument("--anchor", type=Path, required=True, help="of both boards and their host")
    run.add_argument("--layout", action="append", choices=LAYOUTS, help="all by default")
    run.add_argument("--out", type=Path, required=True)
    verbs.add_parser("compare").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.verb == "measure":
        measure(options.spec, options.anchor, options.out, options.layout or list(LAYOUTS))
    else:
        compare(options.file)


if __name__ == "__main__":
    main()
