"""Skew of experts against a public table: fused experts of vLLM on an H200, op by op.

    python benchmarks/moe_skew.py [TABLE.csv] [--out benchmarks/results/moe_skew_h200.csv]

The table is the MoE part of AIConfigurator's performance database (NVIDIA, Apache-2.0; vLLM
0.22.0), latencies only. What its rows are is read from its collector (`collector/vllm/
collect_moe.py`, `collector/helper.py`):

* ``num_tokens`` T is the whole batch, which every rank sees, so T times top-k pairs are spread over
  all experts; measured is rank 0, which holds the first experts / ``moe_ep_size`` of them, each of
  width ``inter_size`` / ``moe_tp_size``.
* ``balanced``: token t chooses experts t, t + 16, t + 32 … of 128; all loads are equal, and a few
  tokens touch as many experts as they can, more than by uniform chance.
* ``power_law_a``: the *load* of each expert is drawn from a density x^-a between 1 and 0.8 T (0.01
  and 2 where there are no more pairs than experts), scaled to T top-k pairs, cut at T; neighbours
  make up a rank, and the fullest one is measured. A row is a mean over five draws. This is not
  Zipf: ``zipf:a`` says that the r-th popular expert is r^-a times as popular as the first.
* The top-k itself is not in these latencies; in the product's kernel it is.

Nothing is fitted on this table: it is only compared with.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import Bundle, select
from energylens.graph import Op, make_op
from energylens.lower.routing import WorkerLoad, make_routing, worker_loads
from energylens.predict import Catalogue
from energylens.schedule import Constants, Worker, kernel_result
from energylens.spec.system import Device

TABLE = Path(__file__).resolve().parents[2] / "shared" / "data" / "public" / "aic_op_moe_power.csv"
SPEC = "qwen3_moe"
SETTINGS = {"tp1": (1, 1), "ep2": (1, 2), "ep8": (1, 8), "tp2": (2, 1)}
"""Name -> slices of an expert, and ranks that whole experts are spread over."""
SKEWED_TOKENS = 8192
DRAWS = 200  # of the table's power law; the table itself has five

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Experts of one layer: how many, of a token, width of a token and of an expert."""

    experts: int
    topk: int
    width: int
    hidden: int

    def op(self, tokens: int, slices: int, load: WorkerLoad) -> Op:
        """The kernel of a worker with ``load``."""
        return make_op(
            "vllm_moe",
            tokens=tokens,
            topk=self.topk,
            experts=load.experts,
            rows=load.rows,
            active=load.active,
            largest=load.largest,
            width=self.width,
            hidden=self.hidden // slices,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured row beside its prices, in seconds.

    Attributes:
        setting, distribution, tokens: which row.
        measured_s: by the table; full_clock_s: price at the maximum clock.
        capped_s: price at the power limit, as if the kernel ran for long, which the table's did.
        uniform_s: the same for uniform routing, beside ``balanced`` rows only.
    """

    setting: str
    distribution: str
    tokens: int
    measured_s: float
    full_clock_s: float
    capped_s: float
    uniform_s: float | None = None

    @property
    def error_pct(self) -> float:
        """Signed error of the price at the power limit, in percent."""
        return 100 * (self.capped_s / self.measured_s - 1.0)


def read_table(path: Path, layer: Layer) -> dict[tuple[int, int, str, int], float]:
    """Seconds of the bf16 rows of ``layer``: (slices, ranks, distribution, tokens) -> latency."""
    shape = {
        "moe_dtype": "bfloat16",
        "hidden_size": str(layer.width),
        "inter_size": str(layer.hidden),
        "topk": str(layer.topk),
        "num_experts": str(layer.experts),
    }
    with path.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if all(r[k] == v for k, v in shape.items())]
    found = {
        (
            int(r["moe_tp_size"]),
            int(r["moe_ep_size"]),
            r["distribution"],
            int(r["num_tokens"]),
        ): float(r["latency_ms"]) / 1e3
        for r in rows
    }
    if len(found) != len(rows):
        raise SystemExit(f"{path}: {len(rows) - len(found)} settings occur more than once")
    return found


def balanced_counts(layer: Layer, tokens: int) -> IntArray:
    """Rows of each expert as the table's ``balanced`` spreads them."""
    stride = -(-layer.experts // layer.topk)
    first = np.arange(tokens)[:, None] * (1.0 if tokens >= stride else stride / tokens)
    chosen = (first + np.arange(layer.topk) * stride).astype(int) % layer.experts
    return np.bincount(chosen.ravel(), minlength=layer.experts)


def power_law_counts(layer: Layer, tokens: int, alpha: float, rng: np.random.Generator) -> IntArray:
    """Rows of each expert as one draw of the table's power law, near enough."""
    pairs = tokens * layer.topk
    low, high = (1.0, 0.8 * tokens) if pairs > layer.experts else (0.01, 2.0)
    exponent = 1.0 - alpha
    u = rng.random(layer.experts)
    loads = (low**exponent + (high**exponent - low**exponent) * u) ** (1.0 / exponent)
    counts = np.minimum(np.rint(loads / loads.sum() * pairs).astype(np.int64), tokens)
    while (missing := pairs - int(counts.sum())) > 0:  # to the emptiest
        emptiest = np.argsort(counts, kind="stable")
        counts[emptiest[counts[emptiest] < tokens][:missing]] += 1
    while (extra := int(counts.sum()) - pairs) > 0:  # from the fullest
        fullest_first = np.argsort(-counts, kind="stable")
        counts[fullest_first[counts[fullest_first] > 0][:extra]] -= 1
    return counts


def fullest(counts: IntArray, ranks: int) -> WorkerLoad:
    """Load of the fullest of ranks that hold neighbouring experts."""
    own = max(np.array_split(counts, ranks), key=lambda part: int(part.sum()))
    return WorkerLoad(
        experts=len(own),
        rows=float(own.sum()),
        active=float((own > 0).sum()),
        largest=float(own.max()),
    )


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Seconds of one kernel by a calibration, on a typical board."""

    bundle: Bundle
    device: Device

    def seconds(self, ops: Sequence[Op]) -> NDArray[np.float64]:
        """At the maximum clock, and at the power limit of the calibration, [ops, 2]."""
        laws = self.bundle.laws
        constants = Constants(eta=laws.eta, gap_s=0.0, wait_w=0.0, spin_w=0.0, link_w=0.0)
        found = []
        for op, cost in zip(ops, self.bundle.model(self.device, None).costs(ops), strict=True):
            worker = Worker(
                idle_w=self.bundle.typical.idle_w,
                cap_w=laws.cap_fraction * self.bundle.power_limit_w,
                latency_s=np.array([cost.latency_s]),
                energy_j=np.array([cost.energy_j]),
            )
            found.append((cost.latency_s, kernel_result([op], [cost], worker, constants)[0]))
        return np.array(found)


def table_loads(layer: Layer, distribution: str, tokens: int, ranks: int) -> list[WorkerLoad]:
    """Loads of the measured rank: one, or as many as are drawn."""
    if distribution == "balanced":
        return [fullest(balanced_counts(layer, tokens), ranks)]
    alpha, rng = float(distribution.removeprefix("power_law_")), np.random.default_rng(0)
    counts = (power_law_counts(layer, tokens, alpha, rng) for _ in range(DRAWS))
    return [fullest(c, ranks) for c in counts]


def routed_load(layer: Layer, routing: str, tokens: int, ranks: int) -> WorkerLoad:
    """Load of the fullest worker as the product expects it."""
    made = make_routing(routing, layer.experts, layer.topk)
    return worker_loads(made, layer.topk, tokens, ranks)[0]


def compare(
    layer: Layer, prices: Prices, table: Mapping[tuple[int, int, str, int], float]
) -> list[Row]:
    """Every row of the settings beside the price of the loads that it was measured with."""
    names = {degrees: name for name, degrees in SETTINGS.items()}
    rows = []
    for (slices, ranks, distribution, tokens), measured in sorted(table.items()):
        if (slices, ranks) not in names:
            continue
        loads = table_loads(layer, distribution, tokens, ranks)
        full, capped = prices.seconds([layer.op(tokens, slices, w) for w in loads]).mean(axis=0)
        uniform = None
        if distribution == "balanced":
            load = routed_load(layer, "uniform", tokens, ranks)
            uniform = float(prices.seconds([layer.op(tokens, slices, load)])[0, 1])
        rows.append(
            Row(
                setting=names[slices, ranks],
                distribution=distribution,
                tokens=tokens,
                measured_s=measured,
                full_clock_s=float(full),
                capped_s=float(capped),
                uniform_s=uniform,
            )
        )
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    """Latencies of the balanced rows, then mean errors of all."""
    print("balanced: microseconds measured, priced at the power limit, error; uniform routing")
    for setting in SETTINGS:
        for r in (r for r in rows if (r.setting, r.distribution) == (setting, "balanced")):
            assert r.uniform_s is not None  # of every balanced row
            print(
                f"  {setting:4s} {r.tokens:6d} tokens {1e6 * r.measured_s:8.1f} "
                f"{1e6 * r.capped_s:8.1f} {r.error_pct:+7.1f} %   {1e6 * r.uniform_s:8.1f}"
            )
    print("mean absolute and signed error in percent, worst row; the same at the maximum clock")
    for distribution in sorted({r.distribution for r in rows}):
        for setting in SETTINGS:
            own = [r for r in rows if (r.setting, r.distribution) == (setting, distribution)]
            errors = np.array([r.error_pct for r in own])
            full = np.array([100 * (r.full_clock_s / r.measured_s - 1.0) for r in own])
            worst = own[int(np.abs(errors).argmax())]
            print(
                f"  {distribution:14s} {setting:4s} n {len(own):3d}  "
                f"MAPE {np.abs(errors).mean():5.1f}  bias {errors.mean():+6.1f}  "
                f"worst {worst.error_pct:+6.1f} ({worst.tokens} tokens)   "
                f"{np.abs(full).mean():5.1f} {full.mean():+6.1f}"
            )


def print_skew(
    layer: Layer, prices: Prices, table: Mapping[tuple[int, int, str, int], float]
) -> None:
    """Skewed over balanced latency at EP8, measured and priced."""
    slices, ranks = SETTINGS["ep8"]
    tokens = SKEWED_TOKENS
    found = {d: s for (tp, ep, d, t), s in table.items() if (tp, ep, t) == (slices, ranks, tokens)}
    print(f"EP{ranks}, {tokens} tokens: {len(found)} rows in the table, one a distribution")
    routings = {
        "balanced": table_loads(layer, "balanced", tokens, ranks),
        **{d: table_loads(layer, d, tokens, ranks) for d in sorted(found) if d != "balanced"},
        **{r: [routed_load(layer, r, tokens, ranks)] for r in ("uniform", "zipf:1.01", "zipf:1.2")},
    }
    base = prices.seconds([layer.op(tokens, slices, w) for w in routings["balanced"]])[0]
    for name, loads in routings.items():
        seconds = prices.seconds([layer.op(tokens, slices, w) for w in loads])
        ratio = seconds / base
        over_mean = np.mean([w.rows for w in loads]) * ranks / (tokens * layer.topk)
        spread = ratio[:, 1].std() / 5**0.5
        measured = (
            f"measured {1e6 * found[name]:6.1f} us, ratio {found[name] / found['balanced']:.3f}"
            if name in found
            else ""
        )
        print(
            f"  {name:14s} load {over_mean:.2f} x the mean; "
            f"priced {1e6 * seconds[:, 1].mean():6.1f} us, ratio {ratio[:, 1].mean():.3f}"
            + (f" (+- {spread:.2f} over five draws)" if len(loads) > 1 else "")
            + f", at the maximum clock {ratio[:, 0].mean():.3f}; {measured}".rstrip("; ")
        )


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """All rows as CSV, seconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["setting", "distribution", "tokens", "measured_s", "capped_s", "full_clock_s",
             "uniform_s", "error_pct"]
        )  # fmt: skip
        for r in rows:
            seconds = (r.measured_s, r.capped_s, r.full_clock_s, r.uniform_s)
            writer.writerow(
                [r.setting, r.distribution, r.tokens,
                 *("" if s is None else f"{s:.4g}" for s in seconds), f"{r.error_pct:.1f}"]
            )  # fmt: skip


def main() -> None:
    """Print the comparison, and write its rows where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--out", type=Path, help="CSV file for all rows")
    options = parser.parse_args()
    if not options.table.is_file():
        print(f"skipped: no {options.table}; give the MoE table of AIConfigurator as CSV")
        return
    catalogue = Catalogue()
    spec, engine, device = catalogue.spec(SPEC), catalogue.engine("vllm"), catalogue.device("h200")
    bundle = select(catalogue.bundles(device, engine), device.name, engine.provider)
    if bundle is None or spec.moe is None:
        raise SystemExit(f"{SPEC} needs experts, and {device.name} a vllm bundle")
    layer = Layer(
        experts=spec.ranks[spec.moe["rank"]],
        topk=spec.moe["topk"],
        width=spec.ranks["m"],
        hidden=spec.ranks["f"],
    )
    table, prices = read_table(options.table, layer), Prices(bundle=bundle, device=device)
    rows = compare(layer, prices, table)
    print_rows(rows)
    print_skew(layer, prices, table)
    if options.out:
        write_rows(rows, options.out)


if __name__ == "__main__":
    main()
