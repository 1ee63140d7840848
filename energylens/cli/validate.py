"""``energylens validate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from energylens.cli.output import show

if TYPE_CHECKING:
    from energylens.results import Anchors, Measurement


def validate(
    truth: Annotated[
        list[Path], typer.Argument(metavar="TRUTH...", help="One or more truth CSV files.")
    ],
    by: Annotated[
        str | None, typer.Option(help="Fields that make groups, e.g. engine,phase,spec,tp.")
    ] = None,
    ignore_anchors: Annotated[
        bool, typer.Option("--ignore-anchors", help="Predict all rows as a typical board.")
    ] = False,
    anchor: AnchorFiles = None,
    bundle: Bundles = None,
    without: Without = None,
    as_json: Json = False,
) -> None:
    """Predictions against measurements: errors, bias, rank correlation, interval coverage."""
    from energylens.predict import Catalogue, predict_measurement
    from energylens.report import validation_document, validation_table
    from energylens.truth import read_measurements
    from energylens.validate import validate

    catalogue, laws = Catalogue(bundle_files=tuple(bundle or ())), parse_laws(without)
    given = load_anchors(anchor)
    result = validate(
        [_with_anchors(m, given) for m in read_measurements(truth)],
        lambda m, anchors: predict_measurement(
            m, anchors=anchors, without=laws, catalogue=catalogue
        ),
        by=split_list(by),
        ignore_anchors=ignore_anchors,
    )
    show(validation_document(result) if as_json else validation_table(result))


def _with_anchors(measurement: Measurement, given: Anchors | None) -> Measurement:
    """The row with the given boards and host where it holds none of its own."""
    own = measurement.anchors
    if given is None or own is None:
        return replace(measurement, anchors=own or given)
    merged = replace(own, boards=own.boards or given.boards, host=own.host or given.host)
    return replace(measurement, anchors=merged)
