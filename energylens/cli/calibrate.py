"""``energylens calibrate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from energylens.cli.options import Json, check_positive, parse_degrees, split_list
from energylens.cli.output import show

if TYPE_CHECKING:
    from energylens.spec.system import Device as DeviceSheet


def calibrate(
    device: Annotated[
        str | None, typer.Option(help="Device that must be present [the one found].")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs; from 2 on, collectives are measured too.")] = 1,
    for_spec: Annotated[
        list[str] | None,
        typer.Option(
            "--for", help="Models whose per-worker shapes to measure; repeat or join by commas."
        ),
    ] = None,
    tp: Annotated[str, typer.Option(help="Degrees of --for, joined by commas.")] = "1",
    plan: Annotated[Path | None, typer.Option(help="Plan file instead of --for.")] = None,
    provider: Annotated[str, typer.Option(help="Whose kernels to measure.")] = "torch",
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time to spend [5 with --for, longer with slow sensors; else till all is done]."
        ),
    ] = None,
    anchor: Annotated[
        bool,
        typer.Option(
            "--anchor", help="Only the boards and the host: 20 s a board, 3 min on a Jetson."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for samples, bundle and anchors.")] = Path(
        "calibration"
    ),
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Go on where the last run stopped, or start anew."),
    ] = True,
    fit_only: Annotated[
        bool, typer.Option("--fit-only", help="Measure nothing, fit the samples that are there.")
    ] = False,
    blocks: Annotated[
        str | None,
        typer.Option(help="Only these: collectives, overlaps, ops, mixes, host; joined by commas."),
    ] = None,
    nccl_algo: Annotated[
        str, typer.Option(help="NCCL algorithm of the collectives, e.g. Ring or Tree [NCCL's own].")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the measuring order.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure kernels or anchors on the GPUs present; write samples and a bundle."""
    from energylens.bench.calibrate import run
    from energylens.report.facts import facts_text

    found = run(
        device=device,
        gpus=gpus,
        specs=tuple(name for text in for_spec or () for name in split_list(text)),
        tp=parse_degrees(tp),
        plan=plan,
        provider=provider,
        minutes=check_positive("--minutes", minutes),
        anchor=anchor,
        out=out,
        resume=resume,
        fit_only=fit_only,
        seed=seed,
        blocks=split_list(blocks) or None,
        nccl_algo=nccl_algo,
        fit=_fit,
    )
    show(found if as_json else facts_text(found))


def _fit(
    folders: Sequence[Path], device: DeviceSheet, provider: str, bundle_file: Path
) -> Mapping[str, Any]:
    """Fit the samples of ``folders``, write the bundle, and say how good it is."""
    from energylens.cost.bundle import dump_bundle, load_bundle
    from energylens.files import write_atomically
    from energylens.fit import fit_bundle, load_one_shot, load_published
    from energylens.spec.resources import data_dir

    folder = data_dir("calibration") / "published"
    table, one_shot = folder / "nccl_latency.csv", folder / "one_shot_all_reduce.csv"
    bundle, quality = fit_bundle(
        folders,
        device=device,
        provider=provider,
        published=load_published(table, device.name) if table.exists() else None,
        one_shot=load_one_shot(one_shot) if provider == "vllm" else None,
    )
    write_atomically(bundle_file, dump_bundle(bundle))
    steps = [
        {"step": label, "latency_error_pct": latency, "energy_error_pct": energy}
        for label, (latency, energy) in quality.mixes.items()
    ]
    return {**asdict(load_bundle(bundle_file).ref), **asdict(quality), "mixes": steps}
