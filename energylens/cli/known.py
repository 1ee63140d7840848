"""``energylens list`` and ``energylens doctor``: what is known, and what this machine can do."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from energylens.cli.options import Json, parse_choice
from energylens.cli.output import show
from energylens.units import BYTES_PER_GB

if TYPE_CHECKING:
    from energylens.predict import Catalogue


def list_known(
    kind: Annotated[
        str | None, typer.Argument(help="specs, devices, engines, clusters or bundles [all].")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is known: models, devices, engines, clusters, calibration bundles."""
    from energylens.predict import Catalogue
    from energylens.report.facts import listing_document, listing_table

    kinds = ("specs", "devices", "engines", "clusters", "bundles")
    chosen = kinds if kind is None else (parse_choice("list", kind, {k: k for k in kinds}),)
    catalogue = Catalogue()
    known = {k: {n: _describe(catalogue, k, n) for n in catalogue.list(k)} for k in chosen}
    show(listing_document(known) if as_json else listing_table(known))


def doctor(as_json: Json = False) -> None:
    """What this machine can measure, and why not."""
    from energylens.meter.doctor import diagnose
    from energylens.report.facts import doctor_document, doctor_text

    document = doctor_document(asdict(diagnose(os.environ)))
    show(document if as_json else doctor_text(document))


def _describe(catalogue: Catalogue, kind: str, name: str) -> str:
    """One line about a shipped spec, device, engine, cluster or bundle."""
    from energylens.cost.bundle import load_bundle
    from energylens.lower.memory import parameters
    from energylens.spec.machines import load_cluster
    from energylens.spec.resources import data_dir

    if kind == "specs":
        spec = catalogue.spec(name)
        size = f"{parameters(spec) / 1e9:.3g} B parameters, {spec.layers} layers"
        return f"{size}, {spec.precision.weights}; {spec.source}"
    if kind == "devices":
        d = catalogue.device(name)
        return (
            f"{d.memory_bytes / BYTES_PER_GB:.3g} GB, "
            f"{d.memory_bandwidth_bytes_s / 1e12:.3g} TB/s, "
            f"{d.peak_flops['bf16'] / 1e12:.3g} TFLOP/s bf16, {d.power_limit_w:g} W; "
            + (f"other power modes: @{', @'.join(d.modes)}; " if d.modes else "")
            + ("calibrated" if catalogue.bundles(d, catalogue.engine("hf")) else "datasheet only")
        )
    if kind == "engines":
        engine = catalogue.engine(name)
        modes = ", ".join(f"{phase} {mode}" for phase, mode in engine.modes.items())
        return f"{engine.version}; default modes: {modes}; kernels of provider {engine.provider}"
    if kind == "clusters":
        cluster = load_cluster(name)
        return f"{cluster.gpus} x {cluster.device}" + (
            f", {cluster.link.name}" if cluster.link else ""
        )
    bundle = load_bundle(data_dir("calibration") / "bundles" / f"{name}.json")
    return (
        f"{bundle.version}, {len(bundle.boards)} boards at {bundle.power_limit_w:g} W, "
        f"torch {bundle.versions.get('torch', '-')}, sha256 {bundle.sha256[:12]}"
    )
