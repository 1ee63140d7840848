"""The options that verbs share, and how their texts become values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from energylens.errors import OutOfRangeError, SpecError
from energylens.spec.system import Mode, Overlapping, Phase
from energylens.units import BITS

if TYPE_CHECKING:
    from energylens.predict import Catalogue
    from energylens.results import Anchors
    from energylens.spec.system import Engine as EngineProfile

_MAX_INTEGER = 65536
"""Largest batch or degree of a list; longer ranges would fill the memory before any is tried."""


_T = TypeVar("_T")


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


Device = Annotated[
    str, typer.Option(help="Device by name (`energylens list devices`) or YAML file.")
]


Engine = Annotated[
    str,
    typer.Option(
        help="Engine profile by name (`energylens list engines`), name@version, or YAML file."
    ),
]


Bundles = Annotated[
    list[Path] | None,
    typer.Option("--bundle", help="Calibration bundle to use instead of the shipped ones."),
]


AnchorFiles = Annotated[
    list[Path] | None,
    typer.Option("--anchor", help="Anchor file of the boards or the host; repeatable."),
]


Stored = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="Store the model otherwise: weights=fp8, kv_cache=fp8, or both joined by a comma "
        "[the spec's].",
    ),
]


Overlap = Annotated[
    str | None,
    typer.Option(
        help="All-reduces beside GEMMs: SMSxCHUNKS, e.g. 16x4 on 16 SMs in 4 chunks, or off "
        "[the spec's]."
    ),
]


Without = Annotated[
    str | None,
    typer.Option(
        help="Composition laws to leave out, joined by commas: cap, host, straggler, gap."
    ),
]


def split_list(text: str | None) -> tuple[str, ...]:
    """The parts of a list joined by commas, without spaces or empty ones."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def parse_choice(option: str, text: str, allowed: Mapping[str, _T]) -> _T:
    """What ``text`` stands for; an error names the option and what is allowed."""
    if text not in allowed:
        raise SpecError(f"{option}: unknown value {text!r}; allowed: {', '.join(allowed)}")
    return allowed[text]


def check_positive(option: str, value: float | None) -> float | None:
    """The value, refused where it is not a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise SpecError(f"{option}: {value:g} found, and must be a number above 0")
    return value


def check_least(option: str, value: int, least: int = 1) -> int:
    """The value, refused where it is below ``least``."""
    if value < least:
        raise SpecError(f"{option}: {value} found, and must be at least {least}")
    return value


def milliseconds(option: str, milliseconds: float | None) -> float | None:
    """Seconds of an option given in ms, which must be above 0."""
    given = check_positive(option, milliseconds)
    return None if given is None else given * 1e-3


def parse_degrees(text: str) -> tuple[int, ...]:
    """Parallel degrees joined by commas, each once."""
    parts = split_list(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SpecError(f"--tp: {text!r} found, and must be degrees joined by commas, e.g. 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """``1,16,64``, ``1..256`` for every integer from the first to the last, or both."""
    found: list[int] = []
    for part in split_list(text):
        first, dots, last = part.partition("..")
        ends = (first, last) if dots else (first, first)
        if not all(end.isdecimal() and int(end) > 0 for end in ends) or int(ends[0]) > int(ends[1]):
            raise SpecError(
                f"{option}: {part!r} found, and must be a number above 0 or FIRST..LAST, "
                "e.g. 1,2,4 or 1..256"
            )
        if int(ends[1]) > _MAX_INTEGER:
            raise SpecError(f"{option}: {ends[1]} found, and must be at most {_MAX_INTEGER}")
        found += range(int(ends[0]), int(ends[1]) + 1)
    if not found:
        raise SpecError(f"{option}: {text!r} names no number; give e.g. 1,2,4 or 1..256")
    return tuple(dict.fromkeys(found))


def parse_precision(text: str | None) -> dict[str, str]:
    """What ``--precision`` names: ``weights`` or ``kv_cache`` -> data type."""
    found = {}
    for part in split_list(text):
        role, equals, dtype = part.partition("=")
        if not equals or role not in ("weights", "kv_cache"):
            raise SpecError(
                f"--precision: {part!r} found, and must be weights=TYPE or kv_cache=TYPE, e.g. "
                "weights=fp8"
            )
        found[role] = parse_choice(f"--precision {role}", dtype, {name: name for name in BITS})
    return found


def parse_overlap(text: str | None) -> Overlapping | None:
    """``16x4``: all-reduces on 16 SMs, beside GEMMs in 4 chunks; ``off``: none is.

    None is left to the spec.
    """
    try:
        return Overlapping.parse(text) if text else None
    except OutOfRangeError as error:
        raise SpecError(f"--overlap: {error}") from None


def parse_laws(text: str | None) -> frozenset[str]:
    """The composition laws that ``--without`` names."""
    from energylens.schedule import LAWS

    allowed = {law: law for law in LAWS}
    return frozenset(parse_choice("--without", part, allowed) for part in split_list(text))


def parse_modes(texts: Sequence[str]) -> dict[Phase, Mode]:
    """``[PHASE=]MODE`` of each text; a mode alone is for both phases, a CUDA graph for decode."""
    phases = {phase.value: phase for phase in (Phase.PREFILL, Phase.DECODE)}
    modes: dict[Phase, Mode] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        mode = parse_choice("--mode", value, {m.value: m for m in Mode})
        if name:
            modes[parse_choice("--mode", name, phases)] = mode
        else:
            both = (Phase.DECODE,) if mode is Mode.CUDA_GRAPH else (Phase.PREFILL, Phase.DECODE)
            modes.update(dict.fromkeys(both, mode))
    return modes


def load_anchors(paths: Sequence[Path] | None) -> Anchors | None:
    """The boards and hosts of anchor files, or None where none is given."""
    if not paths:
        return None
    from energylens.anchors import load_anchors

    return load_anchors(*paths)


def find_engine(catalogue: Catalogue, name: str, command: str) -> EngineProfile:
    """The engine profile; where there is none, the error ends with a command that works."""
    try:
        return catalogue.engine(name)
    except SpecError as error:
        if Path(name).exists() or name.partition("@")[0] in catalogue.list("engines"):
            raise
        known = catalogue.list("engines")[0]
        raise SpecError(f"{error}; try `{command} --engine {known}`") from None
