"""``energylens sweep``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from energylens.cli.options import Json
from energylens.cli.output import check_output, show


def sweep(
    grid: Annotated[
        Path, typer.Argument(metavar="GRID", help="YAML file of axes (energylens/grid/v1).")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="File of results, a line a cell; what it holds is not done again "
            "[GRID.jsonl, here].",
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="File for all results as a table.")] = None,
    backend: Annotated[
        str, typer.Option(help="Who runs the cells: loky (processes), threading, dask or ray.")
    ] = "loky",
    jobs: Annotated[int, typer.Option(help="Processes or threads [all cores].")] = -1,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Address of a Dask scheduler, e.g. tcp://host:8786, or of a Ray cluster: "
            "ray://host:10001, or auto on one of its machines [a local cluster]."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict a grid of models, devices, engines, layouts, workloads and rates; resumable."""
    from energylens.report.facts import sweep_document, sweep_text
    from energylens.sweep import read_grid, write_csv
    from energylens.sweep import sweep as run

    results = out or Path(f"{grid.stem}.jsonl")
    check_output("--out", results)
    check_output("--csv", csv)
    found = run(
        read_grid(grid), results, backend=backend, jobs=jobs, scheduler=scheduler, watch=_progress
    )
    if csv is not None:
        write_csv(results, csv)
    facts = {**asdict(found), "out": str(found.out)}
    show(sweep_document(facts) if as_json else sweep_text(facts))


def _progress(done: Iterable[None], total: int) -> Iterable[None]:
    """The same, with a bar on stderr where a person looks at it."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(
        done, total=total, description="cells", console=console, disable=not sys.stderr.isatty()
    )
