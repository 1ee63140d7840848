"""Predictions against measurements as a page to read: what is off, by how much, and why; a plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from energylens.report.frontier import figure, save_figure
from energylens.report.table import quantity
from energylens.report.validation import (
    KIND_COLUMNS,
    SUMMARY_COLUMNS,
    kind_cells,
    percent,
    reason_lines,
    regime_lines,
    sources_line,
    summary_cells,
    whole_percent,
)
from energylens.results import Kind
from energylens.validate import (
    KindComparison,
    Validation,
    ValidationRow,
    bias_share_pct,
    error_shares,
    grouped,
    power_mape_pct,
    summarise,
)

_GROUP = ("phase", "regime", "engine", "spec")
_QUANTITIES = {"latency_s": ("latency", "s"), "energy_j": ("energy", "J")}
_MOST_WORST = 8
_LARGE_PCT = 10.0


def validation_page(validation: Validation, plot: str | None = None) -> str:
    """One page of Markdown.

    Args:
        validation: at least one row.
        plot: address of the image of `validation_plot`, as seen from the page.
    """
    rows = validation.rows
    sections = (
        ("", _list((*regime_lines(rows), sources_line(rows)))),
        ("", f"![predicted against measured]({plot})" if plot else ""),
        ("By phase", _summaries(rows)),
        ("What dominates the error", _list(_dominant_lines(rows))),
        ("Kernels by op kind, without cap, host and gaps", _kinds(rows)),
        (f"Farthest off (* outside the 90 % interval, {_MOST_WORST} at most)", _worst(rows)),
        ("Not predicted", _list(reason_lines(rows))),
    )
    parts = ["# Predictions against measurements"]
    for title, text in sections:
        if text:
            parts += [f"## {title}", text] if title else [text]
    return "\n\n".join(parts) + "\n"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], text: int) -> str:
    """A table whose first ``text`` columns hold words, the others numbers; nothing for no rows."""
    rule = ["---" if i < text else "---:" for i in range(len(columns))]
    body = [[" ".join(cell.replace("|", "/").split()) for cell in row] for row in rows]
    head = [column.replace("\n", " ") for column in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body)) if body else ""


def _summaries(rows: Sequence[ValidationRow]) -> str:
    groups = sorted(grouped(rows, _GROUP), key=lambda item: [str(v) for v in item[0].values()])
    summaries = [summarise(rows), *(summarise(own, group) for group, own in groups)]
    cells = [summary_cells(s, _GROUP) for s in summaries]
    return _table((*_GROUP, *SUMMARY_COLUMNS), cells, len(_GROUP))


def _dominant_lines(rows: Sequence[ValidationRow]) -> Iterator[str]:
    """Which rows hold the error, whether it is one factor or scatter, time or power, which op."""
    for name, (word, _) in _QUANTITIES.items():
        shares = error_shares(rows, name, _GROUP)
        if not shares:
            continue
        for share in shares[:2]:
            yield (
                f"{word}: {' '.join(map(str, share.group.values()))} holds "
                f"{whole_percent(share.error_pct)} of the absolute error in "
                f"{whole_percent(share.rows_pct)} of the rows ({share.n})"
            )
    for group, own in sorted(grouped(rows, ("regime",)), key=lambda item: str(item[0])):
        power, summary = power_mape_pct(own), summarise(own)
        if summary.n == summary.n_unpredicted:
            continue
        biases = {"latency_s": summary.latency_bias_pct, "energy_j": summary.energy_bias_pct}
        for name, bias in biases.items():
            if bias is not None:
                biased = bias_share_pct(getattr(row, name) for row in own)
                yield (
                    f"{group['regime']}-bound {_QUANTITIES[name][0]}: {percent(bias, signed=True)} "
                    f"on the mean, {whole_percent(biased)} of the squared error; the rest scatters"
                )
        if power is not None:
            yield (
                f"{group['regime']}-bound: energy is time times power, and time is off by "
                f"{percent(summary.latency_mape_pct)}, power by {percent(power)}"
            )
    for phase, kinds in _kind_sums(rows):
        gaps = {str(k.kind): (k.predicted or 0.0) - (k.measured or 0.0) for k in kinds}
        far = max(gaps, key=lambda kind: abs(gaps[kind]))
        part = 100 * gaps[far] / sum(k.measured or 0.0 for k in kinds)
        yield (
            f"kernels of {phase}: {far} is farthest off, by {percent(part, signed=True)} of all "
            "measured kernel time"
        )


def _kind_sums(rows: Sequence[ValidationRow]) -> Iterator[tuple[str, list[KindComparison]]]:
    """Sums over the rows of a phase whose kernels were measured, the longest kind first."""
    for group, own in grouped([r for r in rows if r.kinds], ("phase",)):
        sums: dict[Kind, tuple[float | None, float | None]] = {}
        for k in (k for row in own for k in row.kinds):
            before = sums.get(k.kind, (None, None))
            sums[k.kind] = (_plus(before[0], k.measured), _plus(before[1], k.predicted))
        kinds = [KindComparison(kind=k, measured=m, predicted=p) for k, (m, p) in sums.items()]
        yield str(group["phase"]), sorted(kinds, key=lambda k: -(k.measured or 0.0))


def _plus(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b


def _kinds(rows: Sequence[ValidationRow]) -> str:
    cells = [(phase, *kind_cells(k)) for phase, kinds in _kind_sums(rows) for k in kinds]
    return _table(("phase", *KIND_COLUMNS), cells, 2)


def _worst(rows: Sequence[ValidationRow]) -> str:
    def farthest(row: ValidationRow) -> float:
        return max(abs(c.error_pct or 0.0) for c in (row.latency_s, row.energy_j))

    cells = []
    for row in sorted((r for r in rows if r.reason is None), key=farthest, reverse=True):
        line = [row.measurement.record_id, row.measurement.regime]
        for name, (_, unit) in _QUANTITIES.items():
            c = getattr(row, name)
            mark = " *" if c.within_interval is False else ""
            line += [quantity(c.measured, unit), percent(c.error_pct, signed=True) + mark]
        cells.append([*line, str(row.source)])
    columns = ("row", "regime", "latency", "error", "energy", "error", "source")
    return _table(columns, cells[:_MOST_WORST], 2)


def validation_plot(validation: Validation, path: Path) -> None:
    """Predicted against measured latency and energy of every row, by phase, as an image.

    Args:
        validation: what was found; rows without a prediction are left out.
        path: file to write; its suffix says which format.
    """
    canvas = figure()(figsize=(11, 5.6), layout="constrained")
    for i, (name, (word, unit)) in enumerate(_QUANTITIES.items()):
        axes = canvas.add_subplot(
            1,
            2,
            i + 1,
            xscale="log",
            yscale="log",
            aspect="equal",
            xlabel=f"measured {word}, {unit}",
            ylabel=f"predicted {word}, {unit}",
        )
        seen: list[float] = []
        groups = grouped(validation.rows, ("phase", "regime"))
        for j, (group, own) in enumerate(sorted(groups, key=lambda item: str(item[0]))):
            points = [c for c in (getattr(r, name) for r in own) if c.error_pct is not None]
            if not points:
                continue
            x, y = [c.measured for c in points], [c.predicted for c in points]
            spans = [c.interval or (c.predicted, c.predicted) for c in points]
            below = [c.predicted - low for c, (low, _) in zip(points, spans, strict=True)]
            above = [high - c.predicted for c, (_, high) in zip(points, spans, strict=True)]
            axes.errorbar(
                x,
                y,
                yerr=(below, above),
                fmt="osD^v<"[j % 6],
                color=f"C{j}",
                markersize=4,
                elinewidth=0.7,
                label=f"{group['phase']}, {group['regime']}-bound",
            )
            seen += [*x, *y]
        if seen:
            ends = [min(seen) / 1.5, max(seen) * 1.5]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            band = _LARGE_PCT / 100
            axes.fill_between(
                ends,
                [v * (1 - band) for v in ends],
                [v * (1 + band) for v in ends],
                color="0.9",
                zorder=0,
                label=f"within {_LARGE_PCT:g} %",
            )
            axes.set(xlim=ends, ylim=ends)
            axes.legend(fontsize="small")
        axes.grid(which="major", linewidth=0.3)
        axes.set_title(f"{word}, bars: 90 % interval of the prediction", fontsize="medium")
    save_figure(canvas, path)
