"""Predictions against measurements, as a JSON document and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from energylens.report.table import bundle_names, quantity, table
from energylens.validate import (
    Comparison,
    KindComparison,
    Summary,
    Validation,
    ValidationRow,
    summarise,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

VALIDATION_SCHEMA = "energylens/validation/v1"
SUMMARY_COLUMNS = (
    "predicted",
    "latency\nMAPE",
    "bias",
    "covered",
    "energy\nMAPE",
    "bias",
    "covered",
    "typical\nMAPE",
    "tau",
)
KIND_COLUMNS = ("op kind", "measured", "predicted", "error")


def validation_document(validation: Validation) -> dict[str, Any]:
    """The ``energylens/validation/v1`` document."""
    return {
        "schema": VALIDATION_SCHEMA,
        "rows": [_validation_row(row) for row in validation.rows],
        "bundles": [
            asdict(ref) for ref in dict.fromkeys(b for r in validation.rows for b in r.bundles)
        ],
        "summary": [_summary(summary) for summary in validation.summary],
    }


def validation_table(validation: Validation) -> RenderableType:
    """A line for each regime, the groups, why rows are not predicted, and those that are."""
    from rich.console import Group

    return Group(
        *regime_lines(validation.rows),
        _summary_table(validation.summary),
        *reason_lines(validation.rows),
        _rows_table(validation.rows),
        *_kinds_tables(validation.rows),
        sources_line(validation.rows),
    )


def _validation_row(row: ValidationRow) -> dict[str, Any]:
    return {
        "record_id": row.measurement.record_id,
        "latency_s": _comparison(row.latency_s),
        "energy_j": _comparison(row.energy_j),
        "source": None if row.source is None else str(row.source),
        "regime": row.measurement.regime,
        "predicted_regime": row.predicted_regime,
        "reason": row.reason,
        "kinds": [
            {
                "kind": str(k.kind),
                "measured_s": k.measured,
                "predicted_s": k.predicted,
                "error_pct": k.error_pct,
            }
            for k in row.kinds
        ],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "measured": comparison.measured,
        "predicted": comparison.predicted,
        "predicted_typical": comparison.predicted_typical,
        "error_pct": comparison.error_pct,
        "within_interval": comparison.within_interval,
        "interval": None if comparison.interval is None else list(comparison.interval),
    }


def _summary(summary: Summary) -> dict[str, Any]:
    fields = {name: getattr(summary, name) for name in Summary.__dataclass_fields__}
    return {**fields, "group": dict(summary.group)}


def regime_lines(rows: Sequence[ValidationRow]) -> Iterator[str]:
    """One line for each regime: what the device sets, and what the host sets, are two questions."""
    regimes = dict.fromkeys(row.measurement.regime for row in rows)
    for regime in sorted(regimes):
        s = summarise([row for row in rows if row.measurement.regime == regime])
        if s.n == s.n_unpredicted:
            yield f"{regime}-bound: none of {s.n} rows predicted"
            continue
        yield (
            f"{regime}-bound, {s.n - s.n_unpredicted} of {s.n} rows predicted: "
            f"latency MAPE {percent(s.latency_mape_pct)} "
            f"({whole_percent(s.latency_coverage_pct)} in the interval), "
            f"energy {percent(s.energy_mape_pct)} ({whole_percent(s.energy_coverage_pct)}), "
            f"energy as a typical board {percent(s.energy_typical_mape_pct)}"
        )


def reason_lines(rows: Sequence[ValidationRow]) -> Iterator[str]:
    """Why rows are not predicted, the most frequent reason first."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault(row.reason, []).append(row.measurement.record_id)
    for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
        many = f"{len(ids)} rows (the first: {ids[0]})" if len(ids) > 1 else ids[0]
        yield f"not predicted, {many}: {reason}"


def _rows_table(rows: Sequence[ValidationRow]) -> Table:
    predicted = [row for row in rows if row.reason is None]
    prefix = _common_prefix([row.measurement.record_id for row in predicted])
    cells = [
        (
            row.measurement.record_id.removeprefix(prefix),
            row.measurement.regime,
            *_compared(row.latency_s, "s"),
            *_compared(row.energy_j, "J"),
        )
        for row in predicted
    ]
    columns = ("regime", "latency", "predicted", "error", "energy", "predicted", "error")
    return table(
        "rows (* outside the 90 % interval)",
        (f"{prefix}..." if prefix else "record", *columns),
        cells,
        text=(0, 1),
    )


def sources_line(rows: Sequence[ValidationRow]) -> str:
    """Where the predictions come from, as the last line of every result says."""
    counts = Counter(row.source for row in rows if row.source is not None)
    sources = ", ".join(f"{n} {source}" for source, n in sorted(counts.items())) or "none"
    bundles = dict.fromkeys(ref for row in rows for ref in row.bundles)
    return f"bundle {bundle_names(list(bundles))}, rows by weakest source: {sources}"


def _common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dash; nothing for a single one."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first[: first.rfind("-", 0, same) + 1]


def _kinds_tables(rows: Sequence[ValidationRow]) -> Iterator[RenderableType]:
    """A line and a table for each row whose kernels were measured."""
    for row in rows:
        if row.kinds:
            yield f"kernels of {row.measurement.record_id}, without cap, host and gaps:"
            yield table("", KIND_COLUMNS, [kind_cells(k) for k in row.kinds], text=(0,))


def kind_cells(k: KindComparison) -> tuple[str, str, str, str]:
    """A line of a table whose columns are `KIND_COLUMNS`."""
    return (
        str(k.kind),
        quantity(k.measured, "s"),
        quantity(k.predicted, "s"),
        percent(k.error_pct, signed=True),
    )


def _compared(comparison: Comparison, unit: str) -> tuple[str, str, str]:
    mark = "*" if comparison.within_interval is False else " "
    return (
        quantity(comparison.measured, unit),
        quantity(comparison.predicted, unit),
        f"{percent(comparison.error_pct, signed=True)} {mark}",
    )


def _summary_table(summaries: Sequence[Summary]) -> Table:
    names = list(dict.fromkeys(name for s in summaries for name in s.group))
    title = "groups" if names else "all rows"
    cells = [summary_cells(s, names) for s in summaries]
    return table(title, (*names, *SUMMARY_COLUMNS), cells, text=range(len(names)))


def summary_cells(s: Summary, names: Sequence[str]) -> tuple[str, ...]:
    """A line of a table whose columns are ``names`` and `SUMMARY_COLUMNS`."""
    return (
        *(str(s.group.get(name, "" if i else "all")) for i, name in enumerate(names)),
        f"{s.n - s.n_unpredicted} of {s.n}",
        percent(s.latency_mape_pct),
        percent(s.latency_bias_pct, signed=True),
        whole_percent(s.latency_coverage_pct),
        percent(s.energy_mape_pct),
        percent(s.energy_bias_pct, signed=True),
        whole_percent(s.energy_coverage_pct),
        percent(s.energy_typical_mape_pct),
        "-" if s.kendall_tau_energy is None else f"{s.kendall_tau_energy:.3f}",
    )


def whole_percent(value: float | None) -> str:
    """A percentage without decimals; a dash for none."""
    return "-" if value is None else f"{value:.0f} %"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A percentage with one decimal; a dash for none."""
    return "-" if value is None else f"{value:{'+' if signed else ''}.1f} %"
