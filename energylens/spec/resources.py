"""Where specs, engines, devices and clusters are found, and how their files are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from energylens.errors import SpecError
from energylens.spec.fields import Field, near, parse_yaml

RESOURCES = ("specs", "devices", "engines", "clusters")
"""Kinds of files that ship in the folder ``specs``; models lie at its top."""


def data_dir(kind: str) -> Path:
    """Folder ``specs`` or ``calibration`` that ships with EnergyLens, in a wheel or in a checkout.

    Raises:
        SpecError: this installation has no such folder.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_data" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise SpecError(
        f"this installation of EnergyLens holds no folder {kind!r}; install it again, or give a "
        "path to a file"
    )


def folder_of(kind: str) -> Path:
    """Folder of the shipped files of a kind, one of `RESOURCES`."""
    if kind not in RESOURCES:
        raise SpecError(f"unknown kind of resource {kind!r}; allowed: {', '.join(RESOURCES)}")
    folder = data_dir("specs")
    return folder if kind == "specs" else folder / kind


def list_resources(kind: str) -> tuple[str, ...]:
    """Names of the shipped files of a kind, sorted.

    Args:
        kind: one of `RESOURCES`.

    Raises:
        SpecError: there is no such kind.
    """
    return tuple(sorted(p.stem for p in folder_of(kind).glob("*.yaml")))


def _strip_suffix(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


def find(name: str, kind: str) -> Path:
    """File that ``name`` stands for: a path that exists, or else a shipped file.

    A path that does not exist still means the shipped file of that name where it looks like one
    (``specs/llama3_8b.yaml`` from another folder); other folders are an error, not a guess.
    """
    path = Path(name)
    if path.is_file():
        return path
    folder = folder_of(kind)
    if path.parent == Path() or path.parent.name == folder.name:
        shipped = folder / f"{_strip_suffix(path.name)}.yaml"
        if shipped.is_file():
            return shipped
    raise unknown(name, kind, list_resources(kind))


def unknown(name: str, kind: str, known: Sequence[str]) -> SpecError:
    """The error for a name that is none of ``known``, with the nearest of them."""
    hint = near(_strip_suffix(Path(name).name).lower().removeprefix("nvidia "), known)
    return SpecError(
        f"unknown {kind.removesuffix('s')} {name!r}: neither a file nor a known name{hint}; "
        f"known: {', '.join(known)}; or give a path to a YAML file"
    )


def read_text(path: Path) -> str:
    """The text of a file; an error names it where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}; give a text file in UTF-8") from error


def document(
    text: str, file: str, schema: str, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Field]:
    """The fields of a file whose ``schema`` is as it must be."""
    root = parse_yaml(text, file)
    declared = root.pairs().get("schema")
    if declared is None:
        raise root.error(f"key 'schema' is missing; allowed: {schema}")
    declared.choice([schema])
    return root.mapping(("schema", "name", "source", *required), optional)
