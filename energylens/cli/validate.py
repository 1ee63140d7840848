"""``energylens validate``."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from energylens.cli.options import (
    AnchorFiles,
    Bundles,
    Json,
    Without,
    load_anchors,
    parse_laws,
    split_list,
)
from energylens.cli.output import EXIT_INFEASIBLE, EXIT_INVALID, check_output, fail, show
from energylens.errors import SpecError


def validate(
    truth: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRUTH...",
            help="Truth CSV files (of steps, of overlaps) and profiles (.json), mixed.",
        ),
    ],
    by: Annotated[
        str | None, typer.Option(help="Fields that make groups, e.g. engine,phase,spec,tp.")
    ] = None,
    ignore_anchors: Annotated[
        bool, typer.Option("--ignore-anchors", help="Predict all rows as a typical board.")
    ] = False,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Limit of sequences that vLLM's rows were measured with [its own]."),
    ] = None,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    without: Without = None,
    report: Annotated[
        Path | None, typer.Option(help="File (.md) for a page about what is off, and why.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Image (.png, .svg, .pdf) of predicted against measured."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Profile of an earlier run: compare TRUTH with it, predict nothing."),
    ] = None,
    tolerance_pct: Annotated[
        float | None, typer.Option(help="With --baseline: change that is accepted, in % [3].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predictions against measurements, or one measured run against an earlier one."""
    if baseline is not None:
        of_predictions = {
            "--by": by,
            "--ignore-anchors": ignore_anchors,
            "--anchor": anchor,
            "--bundle": bundle,
            "--without": without,
            "--max-num-seqs": max_num_seqs,
            "--report": report,
            "--plot": plot,
        }
        if meant := [option for option, value in of_predictions.items() if value]:
            raise SpecError(f"{meant[0]}: has no meaning with --baseline, which predicts nothing")
        _against_baseline(baseline, truth, tolerance_pct, as_json)
        return
    if tolerance_pct is not None:
        raise SpecError("--tolerance-pct: is about --baseline OLD.json; give both or none")
    from energylens import api
    from energylens.files import write_atomically
    from energylens.report.frontier import figure
    from energylens.report.validation import validation_document, validation_table
    from energylens.report.validation_page import validation_page, validation_plot

    check_output("--report", report, (".md",))
    check_output("--plot", plot, (".png", ".svg", ".pdf"))
    if plot is not None:
        figure()
    result = api.validate(
        truth,
        by=split_list(by),
        ignore_anchors=ignore_anchors,
        without=parse_laws(without),
        max_num_seqs=max_num_seqs,
        anchors=load_anchors(anchor),
        bundles=bundle or (),
    )
    if plot is not None:
        validation_plot(result, plot)
    if report is not None:
        address = os.path.relpath(plot, report.parent) if plot else None
        write_atomically(report, validation_page(result, address))
    show(validation_document(result) if as_json else validation_table(result))


def _against_baseline(
    baseline: Path, truth: list[Path], tolerance_pct: float | None, as_json: bool
) -> None:
    from energylens.baseline import compare_runs
    from energylens.report.baseline import comparison_document, comparison_table
    from energylens.truth import read_measurements

    if len(truth) != 1:
        raise SpecError(f"--baseline: {len(truth)} files found to compare with it, and must be one")
    tolerance = 3.0 if tolerance_pct is None else tolerance_pct
    if not 0 <= tolerance < math.inf:
        raise SpecError(f"--tolerance-pct: {tolerance:g} found, and must be 0 or more")
    found = compare_runs(
        read_measurements([baseline]), read_measurements(truth), tolerance_pct=tolerance
    )
    show(comparison_document(found) if as_json else comparison_table(found))
    if found.regressed:
        raise typer.Exit(EXIT_INFEASIBLE)
    if found.incomplete:
        what = "no verdict on all that the baseline holds; its reasons are above"
        raise typer.Exit(fail("incomplete", what, EXIT_INVALID))
