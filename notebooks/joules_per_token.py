"""Joules per token: against the batch, and what each law is worth."""
# %% [markdown]
# Everything here comes from the shipped H200 calibration; no GPU is needed. Run it as a script, or
# open it as a notebook (percent format, jupytext). `SMOKE=1` shrinks the sweep for CI.

# %%
from __future__ import annotations

import os

from energylens.predict import Catalogue, predict
from energylens.results import Infeasible, Prediction
from energylens.schedule import LAWS
from energylens.spec.system import Config, Mode, Parallelism, Phase, Workload

SMOKE = bool(os.environ.get("SMOKE"))
BATCHES = (1, 16) if SMOKE else (1, 2, 4, 8, 16, 32, 64, 128)

catalogue = Catalogue()
spec, engine, device = catalogue.spec("llama3_8b"), catalogue.engine("hf"), catalogue.device("h200")


def decode(batch: int, tp: int, without: frozenset[str] = frozenset()) -> Prediction:
    """One captured decode step at 2,048 tokens of context."""
    found = predict(
        spec,
        engine=engine,
        device=device,
        config=Config(parallelism=Parallelism(tp=tp), modes={Phase.DECODE: Mode.CUDA_GRAPH}),
        workload=Workload(batch=batch, prompt_len=2048, context_len=2049),
        bundles=catalogue.bundles(device, engine),
        phases=(Phase.DECODE,),
        without=without,
    )
    if isinstance(found, Infeasible):
        raise SystemExit(found.reason)
    return found


# %% [markdown]
# ## Energy per token against batch
# A captured Hugging Face step copies the KV heads out to all query heads, so its energy per token
# stops falling early.

# %%
table = {}
for tp in (1, 2):
    for batch in BATCHES:
        p = decode(batch, tp)
        step = p.phases["decode"]
        low, high = (e / batch for e in step.interval.energy_j)
        table[tp, batch] = p.energy_per_token_j
        print(
            f"tp{tp} batch {batch:4d}: {p.energy_per_token_j:7.3f} J/token "
            f"[{low:.3f}, {high:.3f}]  "
            f"{step.latency_s * 1e3:7.2f} ms  {step.mean_power_w:5.0f} W/GPU  {step.regime}"
        )

# %% [markdown]
# ## What each law is worth
# A prefill with one law left out at a time.

# %%
for law in (None, *LAWS):
    found = predict(
        spec,
        engine=engine,
        device=device,
        config=Config(parallelism=Parallelism(tp=2)),
        workload=Workload(batch=8, prompt_len=1024),
        bundles=catalogue.bundles(device, engine),
        phases=(Phase.PREFILL,),
        without=frozenset({law} if law else ()),
    )
    if isinstance(found, Infeasible):
        raise SystemExit(found.reason)
    result = found.phases["prefill"]
    name = f"without {law}" if law else "all laws"
    print(f"{name:18s} {result.latency_s * 1e3:7.1f} ms {result.energy_j:7.1f} J")

# %%
assert table[1, 16] < table[1, 1], "a batch of 16 must cost less per token than one sequence"
