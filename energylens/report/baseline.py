"""Two measured runs side by side, as a JSON document and as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from energylens.baseline import BaselineComparison, Change, Verdict
from energylens.report.table import quantity, table
from energylens.report.validation import percent

if TYPE_CHECKING:
    from rich.console import RenderableType

COMPARISON_SCHEMA = "energylens/comparison/v1"


def comparison_document(comparison: BaselineComparison) -> dict[str, Any]:
    """The ``energylens/comparison/v1`` document."""
    return {
        "schema": COMPARISON_SCHEMA,
        "tolerance_pct": comparison.tolerance_pct,
        "regressed": comparison.regressed,
        "incomplete": comparison.incomplete,
        "changes": [
            {**asdict(c), "change_pct": c.change_pct, "verdict": str(c.verdict)}
            for c in comparison.changes
        ],
        "notes": list(comparison.notes),
    }


def comparison_table(comparison: BaselineComparison) -> RenderableType:
    """Each quantity of each phase in both runs, what was not compared and why, the verdict."""
    from rich.console import Group

    found = comparison.changes
    columns = ("", "baseline", "new", "change", "noise", "verdict")
    return Group(
        table("change against the baseline", columns, [_cells(c) for c in found], text=(0, 5)),
        *(f"{_name(c)}: {c.reason}" for c in found if c.reason),
        *(f"note: {note}" for note in comparison.notes),
        _verdict_line(comparison),
    )


def _cells(c: Change) -> tuple[str, ...]:
    unit = c.quantity[-1].upper() if c.quantity.endswith("_j") else "s"
    return (
        _name(c),
        quantity(c.baseline, unit),
        quantity(c.new, unit),
        percent(c.change_pct, signed=True),
        "unknown" if c.noise_pct is None else f"± {percent(c.noise_pct)}",
        str(c.verdict).replace("_", " "),
    )


def _name(c: Change) -> str:
    return f"{c.phase} {'energy' if c.quantity == 'energy_j' else 'latency'}"


def _verdict_line(comparison: BaselineComparison) -> str:
    worse = [_name(c) for c in comparison.changes if c.verdict is Verdict.REGRESSION]
    limit = f"beyond {comparison.tolerance_pct:g} % and noise"
    return f"regression {limit}: {', '.join(worse)}" if worse else f"no regression {limit}"
