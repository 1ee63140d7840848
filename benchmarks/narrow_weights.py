"""Weights in eight bits against a public table: GEMMs and fused experts of vLLM on an H200.

    python benchmarks/narrow_weights.py

The table is AIConfigurator's (NVIDIA, Apache-2.0; vLLM 0.22.0), latencies only; see
`benchmarks/moe_skew.py`. No kernel in eight bits is calibrated: their prices are those of the ones
in 16 bits, scaled by the priors (`energylens/cost/transfer.py`), or the roofline's. GEMMs of less
than 100 us are left out: below, the table shows the host. Experts are the balanced rows, all
degrees. `BLOCK_EFFICIENCY` was chosen with the GEMMs in view; nothing else is fitted here.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from moe_skew import TABLE, Layer, Prices, balanced_counts, fullest

from energylens.cost.bundle import select
from energylens.graph import Op, make_op
from energylens.predict import Catalogue

LEAST_S = 100e-6
FEW_TOKENS = 128
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block"}

Measured = tuple[str, Op, float]
"""Group, op and seconds."""


def gemms(path: Path) -> Iterator[Measured]:
    """Long enough rows of the GEMM table."""
    for r in _rows(path):
        dtype, seconds = DTYPES[r["gemm_dtype"]], float(r["latency_ms"]) / 1e3
        op = make_op("gemm", dtype=dtype, m=int(r["m"]), n=int(r["n"]), k=int(r["k"]))
        if seconds >= LEAST_S:
            yield f"gemm, {dtype}", op, seconds


def experts(path: Path) -> Iterator[Measured]:
    """Balanced rows of the table of experts."""
    for r in (r for r in _rows(path) if r["distribution"] == "balanced"):
        layer = Layer(
            experts=int(r["num_experts"]),
            topk=int(r["topk"]),
            width=int(r["hidden_size"]),
            hidden=int(r["inter_size"]),
        )
        tokens, dtype = int(r["num_tokens"]), DTYPES[r["moe_dtype"]]
        load = fullest(balanced_counts(layer, tokens), int(r["moe_ep_size"]))
        op = replace(layer.op(tokens, int(r["moe_tp_size"]), load), dtype=dtype)
        length = f"up to {FEW_TOKENS}" if tokens <= FEW_TOKENS else "more"
        name = r["shape_like_inferred"].removesuffix("-like")
        yield f"{name}, {dtype}, {length} tokens", op, float(r["latency_ms"]) / 1e3


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def print_errors(measured: Sequence[Measured], priced: Prices, roofline: Prices) -> None:
    """Mean absolute and signed error in percent of each group, priced and by the roofline."""
    groups: dict[str, list[tuple[Op, float]]] = defaultdict(list)
    for group, op, seconds in measured:
        groups[group].append((op, seconds))
    for group, rows in sorted(groups.items()):
        ops, seconds = [op for op, _ in rows], np.array([s for _, s in rows])
        errors = [100 * (p.seconds(ops)[:, 1] / seconds - 1) for p in (priced, roofline)]
        both = "   ".join(f"{np.mean(abs(e)):5.1f} % ({np.mean(e):+5.1f})" for e in errors)
        print(f"{group:46s} n={len(rows):4d}   {both}")


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", nargs="?", type=Path, default=TABLE.parent)
    folder = parser.parse_args().folder
    catalogue = Catalogue()
    device = catalogue.device("h200")
    bundle = select(catalogue.bundles(device, catalogue.engine("vllm")), device.name, "vllm")
    assert bundle is not None  # it is shipped
    print("mean absolute (signed) error: as priced, and by the roofline alone")
    print_errors(
        [*gemms(folder / "aic_op_gemm_power.csv"), *experts(folder / "aic_op_moe_power.csv")],
        Prices(bundle=bundle, device=device),
        Prices(bundle=replace(bundle, kernels={}), device=device),
    )


if __name__ == "__main__":
    main()
