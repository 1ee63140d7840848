"""How well is a model predicted that the calibration never saw?

For each shipped model: drop every sample of a shape that only this model has, and its layer
replays; fit again; predict the layer replays of that model. No end-to-end measurement is involved.

    python benchmarks/unseen_model.py [--samples calibration/samples/h200]
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from energylens.bench.plan import planned_steps
from energylens.fit import fit_bundle, mix_errors
from energylens.lower import lower_step
from energylens.results import Infeasible
from energylens.spec.load import load_spec
from energylens.spec.machines import load_device, load_engine
from energylens.spec.resources import list_resources
from energylens.spec.system import Parallelism
from energylens.store import Sample, Store

WIDTHS = {
    "gemm": ("n", "k"),
    "hf_rmsnorm": ("width",),
    "hf_silu_mul": ("width",),
    "hf_add": ("width",),
}
"""Sizes that tell whose shape it is, whatever the rows are."""


def shape(sample_op: object) -> tuple[object, ...]:
    """A kernel with the sizes that belong to a model, rows and contexts apart."""
    sizes = sample_op.sizes  # type: ignore[attr-defined]
    kernel = sample_op.kernel  # type: ignore[attr-defined]
    names = WIDTHS.get(kernel) or tuple(
        d for d in sizes if d in ("q_heads", "kv_heads", "head_dim", "width")
    )
    return kernel, *(sizes[n] for n in names)


def shapes_of(names: Iterable[str]) -> set[tuple[object, ...]]:
    """Every kernel shape of some models at one and two workers."""
    engine, found = load_engine("hf"), set()
    for name in names:
        spec = load_spec(name)
        for tp in (1, 2):
            for step in planned_steps(engine):
                ops = lower_step(spec, engine, Parallelism(tp=tp), step)
                found |= set() if isinstance(ops, Infeasible) else {shape(o) for o in ops}
    return found


def without(folder: Path, target: Path, own: set[tuple[object, ...]], name: str) -> None:
    """Copy a store without the samples of shapes in ``own`` and without model ``name``'s mixes."""

    def keep(s: Sample) -> bool:
        if s.block == "op":
            return shape(s.op) not in own
        return not (s.block == "mix" and s.label.startswith(name))

    shutil.copytree(folder, target)
    (target / "samples.csv").unlink()
    source = Store(folder)
    with Store(target) as store:
        for s in source.samples:
            if keep(s):
                store.append(s)


def main() -> None:
    """Print errors per model, and over all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=Path, default=Path("calibration/samples/h200"))
    options = parser.parse_args()
    device = load_device("h200")
    folders = sorted(p for p in options.samples.iterdir() if p.is_dir())
    replayed = {s.label.split()[0] for f in folders for s in Store(f).samples if s.block == "mix"}
    specs = [name for name in list_resources("specs") if name in replayed]
    everything: list[tuple[float, float]] = []
    for name in specs:
        own = shapes_of([name]) - shapes_of(n for n in specs if n != name)
        with tempfile.TemporaryDirectory() as scratch:
            kept = [Path(scratch) / f.name for f in folders]
            for f, target in zip(folders, kept, strict=True):
                without(f, target, own, name)
            bundle, _ = fit_bundle(kept, device=device, provider="torch")
        errors = {
            k: v for k, v in mix_errors(bundle, folders, device).items() if k.startswith(name)
        }
        for label, (t, e) in sorted(errors.items()):
            print(f"  {label:60s} time {t:+6.1f} %  energy {e:+6.1f} %")
        everything += errors.values()
        print(f"{name:14s} {len(errors):3d} replays  {_summary(list(errors.values()))}", flush=True)
    print(f"all models     {len(everything):3d} replays  {_summary(everything)}")


def _summary(errors: list[tuple[float, float]]) -> str:
    if not errors:
        return "none"
    t, e = zip(*errors, strict=True)

    def mape(values: tuple[float, ...]) -> float:
        return 100 * sum(abs(math.expm1(v / 100)) for v in values) / len(values)

    bias = [sum(values) / len(values) for values in (t, e)]
    return (
        f"time MAPE {mape(t):.1f} % (bias {bias[0]:+.1f}), "
        f"energy MAPE {mape(e):.1f} % (bias {bias[1]:+.1f})"
    )


if __name__ == "__main__":
    main()
