"""Skewed experts: energy per token, and what workers draw while they wait for the fullest."""
# %% [markdown]
# Everything here comes from the shipped H200 calibration; no GPU is needed. Run it as a script, or
# open it as a notebook (percent format, jupytext). `SMOKE=1` shrinks the sweep for CI. The picture
# needs matplotlib, the numbers do not.

# %%
from __future__ import annotations

import os
from pathlib import Path

from energylens.predict import Catalogue, predict
from energylens.results import Infeasible, Prediction
from energylens.spec.system import Config, Parallelism, Phase, Workload

SMOKE = bool(os.environ.get("SMOKE"))
ALPHAS = (0.0, 1.5) if SMOKE else (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
WAYS = {"TP8": 1, "EP2": 2, "EP4": 4, "EP8": 8}  # groups that whole experts are spread over
PICTURE = Path("moe_imbalance.png")

PREFILL = Workload(batch=8, prompt_len=1024)
DECODE = Workload(batch=64, prompt_len=1024, context_len=1025)

catalogue = Catalogue()
spec, engine, device = (
    catalogue.spec("qwen3_moe"),
    catalogue.engine("vllm"),
    catalogue.device("h200"),
)


def step(phase: Phase, ep: int, alpha: float) -> Prediction:
    """One step on eight GPUs whose experts are as popular as rank**-alpha."""
    found = predict(
        spec,
        engine=engine,
        device=device,
        config=Config(
            parallelism=Parallelism(tp=8, ep=ep),
            routing=f"zipf:{alpha:g}" if alpha else "uniform",
        ),
        workload=PREFILL if phase is Phase.PREFILL else DECODE,
        bundles=catalogue.bundles(device, engine),
        phases=(phase,),
        link=catalogue.link(device, 8),
    )
    if isinstance(found, Infeasible):
        raise SystemExit(found.reason)
    return found


# %% [markdown]
# ## Energy per token against skew
# Attention is split over all eight workers; the experts are sliced eight ways (TP8), or whole ones
# are spread over two, four or eight groups. In a prefill a step waits for the fullest worker. In
# decode the experts' weights are what is read: skew leaves some of them out, and saves energy.

# %%
tokens = {Phase.PREFILL: PREFILL.batch * PREFILL.prompt_len, Phase.DECODE: DECODE.batch}
energy: dict[tuple[Phase, str, float], float] = {}  # J per token
waiting: dict[tuple[Phase, str, float], float] = {}  # share of the energy
for phase, n in tokens.items():
    for name, ep in WAYS.items():
        for alpha in ALPHAS:
            p = step(phase, ep, alpha)
            result, load = p.phases[str(phase)], p.imbalance[str(phase)]
            energy[phase, name, alpha] = result.energy_j / n
            waiting[phase, name, alpha] = load.waiting_j / result.energy_j
            print(
                f"{phase:7s} {name} alpha {alpha:4.2f}: {result.energy_j / n * 1e3:7.2f} mJ/token "
                f"({result.energy_j / n:.5f} J/token)  {result.latency_s * 1e3:6.2f} ms  "
                f"waiting {100 * load.waiting_j / result.energy_j:4.1f} %  "
                f"fullest worker {load.load_max_over_mean:.2f} x the mean, "
                f"{load.experts_touched:3.0f} experts touched"
            )

# %% [markdown]
# ## The picture

# %%
try:
    from matplotlib import pyplot as plt
except ModuleNotFoundError:
    print("matplotlib is not installed: no picture")
else:
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    most = 110 * max(waiting.values())
    titles = {Phase.PREFILL: "prefill, 8 x 1,024 tokens", Phase.DECODE: "decode, batch 64"}
    for row, (phase, title) in zip(panels, titles.items(), strict=True):
        for name in WAYS:
            row[0].plot(
                ALPHAS, [1e3 * energy[phase, name, a] for a in ALPHAS], marker="o", label=name
            )
            row[1].plot(ALPHAS, [100 * waiting[phase, name, a] for a in ALPHAS], marker="o")
        row[0].set(title=title, ylabel="energy, mJ per token")
        row[1].set(title=title, ylabel="spent waiting, % of energy", ylim=(0, most))
        row[0].set_ylim(bottom=0)
    for panel in panels[1]:
        panel.set_xlabel("Zipf exponent of the experts' popularity (0: uniform)")
    panels[0, 0].legend(title="experts")
    figure.suptitle("Qwen3-30B-A3B on 8 H200, vLLM")
    figure.savefig(PICTURE, dpi=120)
    print(f"wrote {PICTURE}")

# %%
skewed = ALPHAS[-1]
assert waiting[Phase.PREFILL, "EP8", skewed] > waiting[Phase.PREFILL, "EP8", 0.0], (
    "workers must wait longer for the fullest where experts are skewed"
)
assert energy[Phase.PREFILL, "EP8", skewed] > energy[Phase.PREFILL, "EP8", 0.0], (
    "waiting must cost energy"
)
assert energy[Phase.DECODE, "TP8", skewed] < energy[Phase.DECODE, "TP8", 0.0], (
    "a decode step that touches fewer experts must cost less"
)
