"""``energylens validate``."""

from __future__ import annotations

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
from energylens.cli.output import show


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
    from energylens import api
    from energylens.report import validation_document, validation_table

    result = api.validate(
        truth,
        by=split_list(by),
        ignore_anchors=ignore_anchors,
        without=parse_laws(without),
        anchors=load_anchors(anchor),
        bundles=bundle or (),
    )
    show(validation_document(result) if as_json else validation_table(result))
