"""A real Hugging Face model against the sum over op kinds and against the host law of this host.

Two steps, since measuring needs a GPU and comparing does not:

    results=benchmarks/results/hf_llama3_8b.json
    python benchmarks/hf_reference.py measure --spec llama3_8b --out $results
    python benchmarks/hf_reference.py compare $results

`measure` builds the model with random weights (no checkpoint), runs eager prefills and decode
steps, and takes

* kernel times of one profiled pass per phase, by op kind. A profile of a few steps is not
  power-capped, so it is compared with the prediction without the cap law;
* time and energy of unprofiled steps: the host law where the device waits for the host, everything
  else elsewhere;
* the board's and the host's anchor, so that the comparison is for this board and this host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energylens.results import Prediction

PHASES = (
    ("prefill", 8, 1024),
    ("prefill", 1, 2048),
    ("prefill", 1, 512),
    ("prefill", 1, 128),
    ("decode", 16, 1024),
    ("decode", 1, 1024),
)
PROFILED = {("prefill", 1, 2048), ("decode", 16, 1024)}
WINDOW_S, SETTLE_S = 1.2, 1.0


def build(spec_name: str) -> tuple[Any, Any]:
    """The whole model with random weights on the GPU, and its spec."""
    import torch
    from transformers import AutoModelForCausalLM

    from energylens.bench.layer import random_fill, transformers_config
    from energylens.spec.load import load_spec

    spec = load_spec(spec_name)
    layers = max(b.repeat for b in spec.blocks)
    config = transformers_config(spec, 1, layers)
    config.vocab_size = spec.ranks["v"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)
    model = model.to_empty(device="cuda").eval()
    model.model.rotary_emb = rotary(config).to("cuda")
    with torch.no_grad():
        random_fill(model)
    return model, spec


def measure(spec_name: str, out: Path, recording: Path | None = None) -> None:
    """Run the model and write what it took; ``recording`` gets the sensors of the anchor."""
    import torch

    from energylens.anchors import anchors_to_json
    from energylens.bench.anchor import Session, measure_anchor
    from energylens.bench.kernels import TorchProvider
    from energylens.meter.nvml import NvmlMeter, match_cuda
    from energylens.results import Anchors

    provider, meter = TorchProvider(0), NvmlMeter()
    info = match_cuda(meter.devices(), [provider.uuid()])[0]
    rows, profiles = [], []
    with meter.recorder([info.uuid]) as recorder:
        session = Session(
            recorder=recorder, uuid=info.uuid, device="h200", power_limit_w=info.power_limit_w
        )
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        anchors = Anchors(
            boards=(measure_anchor(provider, session, time=stamp),), host=provider.host_anchor()
        )
        if recording:
            from energylens.meter.replay import save_recording

            save_recording(recording, [recorder.series(info.uuid)])
        model, spec = build(spec_name)
        for phase, batch, length in PHASES:
            step = stepper(model, phase, batch, length)
            with torch.inference_mode():
                times = timed(step, recorder.now)
                end = recorder.now()
                reading = recorder.reading(info.uuid, end - WINDOW_S, end - 0.05)
                rows.append(
                    {
                        "phase": phase,
                        "batch": batch,
                        "prompt_len": length,
                        "latency_s": statistics.median(times),
                        "p90_s": statistics.quantiles(times, n=10)[-1],
                        "n": len(times),
                        "mean_power_w": reading.mean_power_w,
                        "sm_clock_hz": reading.sm_clock_hz,
                        "ticks": reading.ticks,
                    }
                )
                if (phase, batch, length) in PROFILED:
                    profiles.append(
                        {
                            "phase": phase,
                            "batch": batch,
                            "prompt_len": length,
                            "kernel_s": profiled(model, step),
                        }
                    )
            print(json.dumps(rows[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "spec": spec.name,
        "time": stamp,
        "versions": dict(provider.versions()) | {"driver": info.driver},
        "anchors": anchors_to_json(anchors),
        "rows": rows,
        "profiles": profiles,
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def stepper(model: Any, phase: str, batch: int, length: int) -> Callable[[], object]:
    """One eager forward of the phase, always from the same state."""
    import torch

    ids = torch.randint(1000, (batch, length), device="cuda")
    if phase == "prefill":
        return lambda: model(ids, use_cache=True, logits_to_keep=1)
    with torch.inference_mode():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    filled = [(layer.keys, layer.values) for layer in cache.layers]

    def decode() -> object:
        for layer, (keys, values) in zip(cache.layers, filled, strict=True):
            layer.keys, layer.values = keys, values
        return model(ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)

    return decode


def timed(step: Callable[[], object], now: Callable[[], float]) -> list[float]:
    """Seconds of each step in a steady window, after settling."""
    import torch

    times = []
    begin = now()
    while (start := now()) < begin + SETTLE_S + WINDOW_S or len(times) < 8:
        step()
        torch.cuda.synchronize()
        if start > begin + SETTLE_S:
            times.append(now() - start)
    return times


def profiled(model: Any, step: Callable[[], object]) -> dict[str, float]:
    """Kernel seconds per op kind of one step, short and from a rested board.

    Over several hundred milliseconds the power limiter would step in, and hard at first.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from energylens.profiler.marks import marked
    from energylens.profiler.trace import breakdown, kernel_table

    with marked(model):
        step()
        torch.cuda.synchronize()
        time.sleep(3.0)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(trace))
        return {str(kind): s for kind, s in breakdown(kernel_table(trace))["step"].items()}


def compare(path: Path) -> None:
    """Print signed errors of the prediction, by op kind and for whole steps."""
    from energylens.anchors import anchors_from_json
    from energylens.predict import Catalogue, predict
    from energylens.profiler.trace import LAWS_OFF
    from energylens.results import Infeasible
    from energylens.spec.system import Phase, Workload

    document = json.loads(path.read_text(encoding="utf-8"))
    anchors = anchors_from_json(document["anchors"], where=str(path))
    catalogue = Catalogue()
    spec, engine, device = (
        catalogue.spec(document["spec"]),
        catalogue.engine("hf"),
        catalogue.device("h200"),
    )

    def predicted(row: dict[str, Any], without: frozenset[str] = frozenset()) -> Any:
        phase = Phase(row["phase"])
        result = predict(
            spec,
            engine=engine,
            device=device,
            workload=Workload(
                batch=row["batch"],
                prompt_len=row["prompt_len"],
                gen_len=1,
                context_len=row["prompt_len"] + 1,
            ),
            bundles=catalogue.bundles(device, engine),
            anchors=anchors,
            phases=(phase,),
            without=without,
        )
        if isinstance(result, Infeasible):
            raise SystemExit(result.reason)
        return result

    print(f"{document['spec']} on {asdict(anchors.boards[0])['board_uuid']}, {document['time']}")
    print("\nkernel time by op kind, no cap and no host law: predicted / profiled, ms")
    for row in document["profiles"]:
        result = predicted(row, LAWS_OFF)
        parts: dict[str, float] = defaultdict(float)
        for part in result.breakdown:
            kind = "overhead" if str(part.kind) == "sampling" else str(part.kind)
            parts[kind] += part.latency_s
        print(f"  {row['phase']} {row['batch']}x{row['prompt_len']}")
        for kind in sorted(row["kernel_s"], key=row["kernel_s"].get, reverse=True):
            p, m = parts.get(kind, 0.0), row["kernel_s"][kind]
            print(f"    {kind:12s} {p * 1e3:9.3f} / {m * 1e3:9.3f}  {100 * (p / m - 1):+6.1f} %")
        p, m = sum(parts.values()), sum(row["kernel_s"].values())
        print(f"    {'all':12s} {p * 1e3:9.3f} / {m * 1e3:9.3f}  {100 * (p / m - 1):+6.1f} %")
    print("\nwhole steps with all laws: latency and energy error, regime as predicted")
    for row in document["rows"]:
        print(step_line(row, row["mean_power_w"], predicted(row)))


def step_line(row: Mapping[str, Any], power_w: float, predicted: Prediction) -> str:
    """A measured whole step of ``power_w``, and the errors of its prediction."""
    r, energy = predicted.phases[row["phase"]], power_w * row["latency_s"]
    inside = r.interval.latency_s[0] <= row["latency_s"] <= r.interval.latency_s[1]
    return (
        f"  {row['phase']:7s} {row['batch']:3d}x{row['prompt_len']:<5d} "
        f"{row['latency_s'] * 1e3:8.2f} ms {100 * (r.latency_s / row['latency_s'] - 1):+6.1f} %"
        f"  {energy:8.3f} J {100 * (r.energy_j / energy - 1):+6.1f} %"
        f"  {r.regime}{'' if inside else '  (outside the 90 % interval)'}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("measure")
    run.add_argument("--spec", default="llama3_8b")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--recording", type=Path, help="CSV for the sensor samples of the anchor")
    verbs.add_parser("compare").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.verb == "measure":
        measure(options.spec, options.out, options.recording)
    else:
        compare(options.file)


if __name__ == "__main__":
    main()
