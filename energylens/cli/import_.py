"""``energylens import``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from energylens.cli.output import check_output, show
from energylens.errors import SpecError


def import_spec(
    model: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with a Hugging Face config.json, or it.")
    ],
    name: Annotated[str | None, typer.Option(help="Name of the spec [that of the folder].")] = None,
    out: Annotated[Path | None, typer.Option(help="File (.yaml) to write [stdout].")] = None,
) -> None:
    """Turn a Hugging Face config.json into a spec, which `predict` and `explore` take."""
    from energylens.files import write_atomically
    from energylens.lower.memory import parameters
    from energylens.spec.hf import import_spec
    from energylens.spec.load import dump_spec

    if not model.exists():
        raise SpecError(f"{model}: no such file or folder; give a config.json or what holds it")
    check_output("--out", out, (".yaml", ".yml"))
    folder = model if model.is_dir() else model.parent
    spec = import_spec(model, _name(folder.resolve().name) if name is None else name)
    text = dump_spec(spec)
    if out is None:
        show(text.rstrip())
    else:
        write_atomically(out, text)
    sys.stderr.write(
        f"energylens: {spec.name}: {parameters(spec) / 1e9:.4g} B parameters, "
        f"{spec.layers} layers, {spec.precision.weights}; energylens predict {out or 'FILE'}\n"
    )


def _name(folder: str) -> str:
    """A folder's name as those of the shipped specs are."""
    name = re.sub(r"[^a-z0-9]+", "_", folder.lower()).strip("_")
    if not name:
        raise SpecError(f"--name: the folder {folder!r} gives none; add --name")
    return name
