"""What single changes of a deployment are worth, as a JSON document and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from energylens.anchors import anchors_to_json
from energylens.report.prediction import subject, subject_line
from energylens.report.table import quantity, source_line, table
from energylens.results import Infeasible
from energylens.results.search import Advice, Change

if TYPE_CHECKING:
    from rich.console import RenderableType

ADVICE_SCHEMA = "energylens/advice/v1"
_COLUMNS = {
    "energy_per_token_j": "J/token",
    "energy_per_request_j": "J/request",
    "tpot_s": "TPOT",
    "ttft_s": "TTFT",
    "ttlt_s": "TTLT",
}
_ROUNDING = 1e-9
"""Relative difference below which a change makes none."""


def advice_document(advice: Advice) -> dict[str, Any]:
    """The ``energylens/advice/v1`` document; ``saved`` is above 0 where a change saves."""
    base = advice.base
    return {
        **subject(base.spec, base.device, base.engine, base.parallelism, base.workload),
        "schema": ADVICE_SCHEMA,
        "feasible": True,
        "reason": None,
        "by": advice.by,
        "level": _level(advice),
        "base": {name: _ends(ends) for name, ends in advice.values.items()},
        "changes": [_change(advice, c) for c in advice.changes],
        "refused": [
            {"kind": c.kind, "change": c.label, "reason": c.reason} for c in advice.refused
        ],
        "source": str(base.source),
        "bundles": [asdict(bundle) for bundle in base.bundles],
        "anchors": anchors_to_json(base.anchors) if base.anchors else None,
        "notes": list(base.notes),
    }


def advice_infeasible_document(infeasible: Infeasible, **what: Any) -> dict[str, Any]:
    """The document of a deployment that cannot run; ``what`` it is as for `subject`."""
    return {
        **subject(**what),
        "schema": ADVICE_SCHEMA,
        "feasible": False,
        "reason": infeasible.reason,
        "changes": [],
        "refused": [],
    }


def _change(advice: Advice, c: Change) -> dict[str, Any]:
    assert c.prediction is not None
    return {
        "kind": c.kind,
        "change": c.label,
        **{
            name: {
                **_ends(c.values[name]),
                "saved": advice.saved(c, name)[0],
                "saved_interval": list(advice.saved(c, name)[1:]),
                "certain": advice.certain(c, name),
            }
            for name in advice.values
        },
        "source": str(c.prediction.source),
        "notes": list(c.prediction.notes),
    }


def _ends(ends: tuple[float, float, float]) -> dict[str, Any]:
    value, low, high = ends
    return {"value": value, "interval": [low, high]}


def _level(advice: Advice) -> float:
    return next(iter(advice.base.phases.values())).interval.level


def advice_table(advice: Advice) -> RenderableType:
    """The deployment, and what each change adds to it or takes away."""
    from rich.console import Group

    base, names = advice.base, list(advice.values)
    units = {name: name[-1].upper() if name.endswith("_j") else "s" for name in names}
    rows = [
        (
            "as it is",
            *(quantity(advice.values[n][0], units[n]) for n in names),
            "",
            str(base.source),
        )
    ]
    for c in advice.changes:
        assert c.prediction is not None
        cells = [_difference(advice, c, name, units[name]) for name in names]
        verdict = (
            "not certain"
            if not advice.certain(c, advice.by)
            else ("saves" if advice.saved(c, advice.by)[0] > 0 else "costs")
        )
        rows.append((c.label, *cells, verdict, str(c.prediction.source)))
    columns = ("change", *(_COLUMNS[name] for name in names), "", "source")
    last = len(columns) - 1
    return Group(
        subject_line(base.spec, base.device, base.engine, base.parallelism, base.workload),
        table(f"single changes, by {_COLUMNS[advice.by]}", columns, rows, text=(0, last - 1, last)),
        f"not certain: the {100 * _level(advice):g} % intervals before and after overlap (they "
        "share errors, so a change may be surer than that); layouts keep the GPUs and the "
        "sequences in flight",
        *_refusals(advice),
        *(f"note: {note}" for note in base.notes),
        *_change_notes(advice),
        source_line(base),
    )


def _difference(advice: Advice, c: Change, name: str, unit: str) -> str:
    saved, now = advice.saved(c, name)[0], advice.values[name][0]
    if abs(saved) < _ROUNDING * now:
        return "same"
    sign = "-" if saved > 0 else "+"
    return f"{sign}{quantity(abs(saved), unit)} {sign}{100 * abs(saved) / now:.0f} %"


def _refusals(advice: Advice) -> Iterator[str]:
    if advice.refused:
        yield "cannot be made, or make no difference:"
    for c in advice.refused:
        yield f"  {c.label}: {(c.reason or '').partition('; raise ')[0]}"


def _change_notes(advice: Advice) -> Iterator[str]:
    """What is to be known of changes, and not of the deployment as it is."""
    labels: dict[str, list[str]] = {}
    for c in advice.changes:
        for note in c.prediction.notes if c.prediction else ():
            if note not in advice.base.notes:
                labels.setdefault(note, []).append(c.label)
    for note, own in labels.items():
        yield f"note on {'; '.join(own)}: {note}"
