"""What a search for the front costs, and how far its first stage is from exact predictions.

Run: ``python benchmarks/explore_speed.py [sample]``. Each search runs in a process of its own, the
time is that of `energylens.explore`, with everything loaded; the whole command is the first line.
Aim: 10,000 configurations of llama3_70b within 2 s on 2 cores, one process. ``sample``
configurations of each search are predicted exactly and compared with the table (0: none).
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time

import numpy as np
from predict_speed import ENERGYLENS, timed

import energylens
from energylens.explore.front import exact_values
from energylens.predict import Catalogue, predict
from energylens.results import Prediction
from energylens.results.search import Frontier
from energylens.spec.system import Config, Workload

COMMAND = ("explore", "llama3_70b", "--gpus", "8", "--prompt-len", "2048", "--gen-len", "512")
SEARCHES = {  # name -> spec, prompt, generated, largest batch, degrees of pp
    "10,000 of llama3_70b": ("llama3_70b", 128, 128, 667, None),
    "10,000 of llama3_70b, pp 1": ("llama3_70b", 128, 128, 2500, (1,)),
    "llama3_70b, all layouts": ("llama3_70b", 2048, 512, 256, None),
    "llama3_8b, odd lengths": ("llama3_8b", 300, 2000, 1000, None),
    "qwen3_moe, all layouts": ("qwen3_moe", 2048, 512, 256, None),
    "qwen3_moe, odd lengths": ("qwen3_moe", 1000, 300, 256, None),
}
GPUS = 8


def search(name: str, sample: int) -> None:
    """Run one search twice and print what the second took."""
    spec, prompt_len, gen_len, most, pp = SEARCHES[name]
    catalogue = Catalogue()
    engine, device = catalogue.engine("vllm"), catalogue.device("h200")
    model, bundles = catalogue.spec(spec), catalogue.bundles(device, engine)
    link = catalogue.link(device, GPUS)
    walls: dict[int, float] = {}
    for exact in (1, 1, 20):
        start = time.perf_counter()
        f = energylens.explore(
            spec,
            gpus=GPUS,
            prompt_len=prompt_len,
            gen_len=gen_len,
            batch=range(1, most + 1),
            pp=pp,
            top=exact,
            catalogue=catalogue,
        )
        walls[exact] = time.perf_counter() - start
    assert isinstance(f, Frontier)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}: {f.counts.tried} tried, {len(f.configs)} rows, {len(f.front)} on the front; "
        f"{walls[20]:.2f} s with 20 exact predictions, {walls[1]:.2f} s with the fewest; "
        f"{peak:.0f} MiB"
    )
    errors: dict[str, list[float]] = {}
    rows = [c for c in f.configs if not c.exact]
    for c in random.Random(1).sample(rows, min(sample, len(rows))):
        p = predict(
            model,
            engine=engine,
            device=device,
            config=Config(parallelism=c.parallelism, microbatches=min(c.parallelism.pp, c.batch)),
            workload=Workload(batch=c.batch, prompt_len=prompt_len, gen_len=gen_len),
            bundles=bundles,
            link=link,
        )
        assert isinstance(p, Prediction)
        for value, (exact_value, _, _) in exact_values(p).items():
            errors.setdefault(value, []).append(abs(c.values[value] / exact_value - 1))
    for value, found in errors.items():
        print(f"  {value}: off by {np.mean(found):.3%} in the mean, {max(found):.3%} at most")


def main(sample: int) -> None:
    """Run the whole command, then every search in a process of its own."""
    wall, peak_mib = timed((*ENERGYLENS, *COMMAND))
    print(f"energylens {' '.join(COMMAND)}: {wall:.2f} s, {peak_mib:.0f} MiB")
    for name in SEARCHES:
        subprocess.run([sys.executable, __file__, str(sample), name], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        search(sys.argv[2], int(sys.argv[1]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
