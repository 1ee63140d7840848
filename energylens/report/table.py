"""What reports share: numbers with units, tables, the memory fit, and where numbers come from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from energylens.results import BundleRef, Memory, Prediction
from energylens.results.service import ServingResult

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

_PREFIXES = ((1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def memory(m: Memory) -> dict[str, Any]:
    """A worker's memory as documents have it."""
    return {**asdict(m), "fits": m.fits}


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Collection[int],
    wrap: Collection[int] = (),
) -> Table:
    """A table whose columns ``text`` hold words, and the others numbers.

    On a narrow terminal only the columns ``wrap`` give way.
    """
    from rich import box
    from rich.table import Table

    made = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    cells = list(rows)
    for i, column in enumerate(columns):
        justify: JustifyMethod = "left" if i in text else "right"
        longest = max(map(len, [*column.split("\n"), *(row[i] for row in cells)]))
        made.add_column(column, justify=justify, min_width=None if i in wrap else longest)
    for row in cells:
        made.add_row(*row)
    return made


def source_line(p: Prediction | ServingResult) -> str:
    """Whose numbers these are, and how good, as the last line of a result says."""
    return (
        f"device {p.device} ({_boards(p)}), engine {p.engine}, bundle {bundle_names(p.bundles)}, "
        f"weakest source: {p.source}"
    )


def _boards(p: Prediction | ServingResult) -> str:
    """Which boards and which host the numbers are for."""
    workers = p.parallelism.replica_gpus
    given = p.anchors.boards if p.anchors and p.bundles else ()
    used = given[:workers]
    if not used:
        boards = "typical boards" if workers > 1 else "a typical board"
    elif len(used) < workers:
        boards = f"{len(used)} of {workers} boards anchored"
    else:
        boards = "anchored " + " and ".join(board.board_uuid for board in used)
    return boards + (", anchored host" if p.anchors and p.anchors.host and p.bundles else "")


def bundle_names(bundles: Sequence[BundleRef]) -> str:
    """The bundles as one text."""
    return ", ".join(f"{b.device}/{b.provider} {b.version}" for b in bundles) or "none"


def prefix(value: float, unit: str) -> tuple[float, str]:
    """Factor and letter that keep ``value`` readable; seconds and watts never in kilo."""
    prefixes = _PREFIXES[1:] if unit in ("s", "W") else _PREFIXES
    return next((p for p in prefixes if abs(value) >= p[0]), prefixes[-1])


def digits(value: float) -> str:
    """Three significant digits, none dropped: columns of them can be compared at a glance."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def quantity(value: float | None, unit: str) -> str:
    """A value with its unit, in three significant digits; a dash for none."""
    if value is None:
        return "-"
    if value == 0:
        return f"0 {unit}"
    factor, letter = prefix(value, unit)
    return f"{digits(value / factor)} {letter}{unit}"
