"""Predictions against measurements: error per row, and what a group of rows says together. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from energylens.errors import SpecError
from energylens.results import (
    Anchors,
    BundleRef,
    Infeasible,
    Measurement,
    PhaseResult,
    Prediction,
    Source,
)

Predict = Callable[[Measurement, Anchors | None], Prediction | Infeasible | str]
"""Predicts one measured row for the given boards (None: a typical one), or says why it cannot."""

_FIELDS = ("device", "engine", "engine_version", "spec", "precision", "phase", "mode", "regime")
_NUMBERS = ("batch", "prompt_len")
_DEGREES = ("tp", "ep", "pp", "dp", "replicas", "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity of one row; None where it was not measured or cannot be predicted.

    Attributes:
        measured, predicted: in the unit of the quantity; ``predicted`` is for the row's boards.
        predicted_typical: the same for a typical board.
        interval: 90 % interval of ``predicted``.
    """

    measured: float | None
    predicted: float | None = None
    predicted_typical: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def error_pct(self) -> float | None:
        """Signed error of ``predicted`` in percent of the measurement."""
        return _error_pct(self.predicted, self.measured)

    @property
    def typical_error_pct(self) -> float | None:
        """Signed error of ``predicted_typical`` in percent of the measurement."""
        return _error_pct(self.predicted_typical, self.measured)

    @property
    def within_interval(self) -> bool | None:
        """Whether the measurement lies in the interval of ``predicted``."""
        if self.measured is None or self.interval is None:
            return None
        low, high = self.interval
        return low <= self.measured <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """One measured row beside its prediction; ``reason`` says why there is none."""

    measurement: Measurement
    latency_s: Comparison
    energy_j: Comparison
    source: Source | None = None
    bundles: tuple[BundleRef, ...] = ()
    predicted_regime: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a group of rows says together; None where no row has the quantity.

    Attributes:
        group: value of each grouping field; empty for all rows.
        n, n_unpredicted: rows, and those without a prediction.
        latency_mape_pct, energy_mape_pct, energy_typical_mape_pct: mean absolute error.
        latency_bias_pct, energy_bias_pct: mean signed error.
        kendall_tau_energy: rank correlation (tau-b) of predicted and measured energy.
        latency_coverage_pct, energy_coverage_pct: rows whose measurement lies in the interval.
    """

    group: Mapping[str, str | int]
    n: int
    n_unpredicted: int
    latency_mape_pct: float | None
    energy_mape_pct: float | None
    energy_typical_mape_pct: float | None
    latency_bias_pct: float | None
    energy_bias_pct: float | None
    kendall_tau_energy: float | None
    latency_coverage_pct: float | None
    energy_coverage_pct: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All rows, and their summaries: first of all rows, then of each group."""

    rows: tuple[ValidationRow, ...]
    summary: tuple[Summary, ...]

    def records(self) -> list[dict[str, Any]]:
        """A flat mapping for each row, for `pandas.DataFrame`."""
        return [
            {
                "record_id": row.measurement.record_id,
                **{
                    name: _field(row.measurement, name) for name in (*_FIELDS, *_NUMBERS, *_DEGREES)
                },
                **{
                    f"{quantity}_{name}": getattr(getattr(row, quantity), name)
                    for quantity in ("latency_s", "energy_j")
                    for name in ("measured", "predicted", "error_pct", "within_interval")
                },
                "source": None if row.source is None else str(row.source),
                "reason": row.reason,
            }
            for row in self.rows
        ]


def validate(
    measurements: Sequence[Measurement],
    predict: Predict,
    *,
    by: Sequence[str] = (),
    ignore_anchors: bool = False,
) -> Validation:
    """Predict every measured row and compare.

    Args:
        measurements: rows; one that cannot be predicted is kept, with the reason.
        predict: called with the row's anchors, and without any for the typical board.
        by: fields that make groups: of a `Measurement`, a degree, or a column of the truth file.
        ignore_anchors: predict all rows for a typical board.

    Raises:
        SpecError: ``by`` names a field that the rows do not have.
    """
    _check_fields(measurements, by)
    rows = tuple(_row(m, predict, ignore_anchors=ignore_anchors) for m in measurements)
    groups: dict[tuple[str | int, ...], list[ValidationRow]] = {}
    for row in rows if by else ():
        groups.setdefault(tuple(_field(row.measurement, name) for name in by), []).append(row)
    grouped = (summarise(g, dict(zip(by, key, strict=True))) for key, g in groups.items())
    return Validation(rows=rows, summary=(summarise(rows), *grouped))


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b, which corrects for ties; None where one side has no two different values."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    agreement, untied_a, untied_b = 0, 0, 0
    for i in range(len(a) - 1):
        up_a, up_b = np.sign(a[i + 1 :] - a[i]), np.sign(b[i + 1 :] - b[i])
        agreement += int(up_a @ up_b)
        untied_a += int(np.count_nonzero(up_a))
        untied_b += int(np.count_nonzero(up_b))
    if not untied_a or not untied_b:
        return None
    return agreement / math.sqrt(untied_a * untied_b)


def _error_pct(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or measured is None:
        return None
    return 100 * (predicted / measured - 1)


def _check_fields(measurements: Sequence[Measurement], by: Sequence[str]) -> None:
    columns = set().union(*(m.labels for m in measurements))
    known = dict.fromkeys((*_FIELDS, *_NUMBERS, *_DEGREES, *sorted(columns)))
    for name in by:
        if name not in known:
            raise SpecError(f"--by: unknown field {name!r}; allowed: {', '.join(known)}")


def _field(m: Measurement, name: str) -> str | int:
    if name in _DEGREES:
        return int(getattr(m.parallelism, name))
    if name in _NUMBERS:
        return int(getattr(m, name))
    return str(getattr(m, name) if name in _FIELDS else m.labels.get(name, ""))


def _row(m: Measurement, predict: Predict, *, ignore_anchors: bool) -> ValidationRow:
    typical = predict(m, None)
    own = typical if ignore_anchors or m.anchors is None else predict(m, m.anchors)
    result, reason = _phase(own, m.phase)
    typical_result, _ = _phase(typical, m.phase)

    def compare(name: str, measured: float | None) -> Comparison:
        if result is None:
            return Comparison(measured=measured)
        return Comparison(
            measured=measured,
            predicted=getattr(result, name),
            predicted_typical=getattr(typical_result, name) if typical_result else None,
            interval=getattr(result.interval, name),
        )

    return ValidationRow(
        measurement=m,
        latency_s=compare("latency_s", m.latency_s),
        energy_j=compare("energy_j", m.energy_j),
        source=result.source if result else None,
        bundles=own.bundles if isinstance(own, Prediction) else (),
        predicted_regime=result.regime if result else None,
        reason=reason,
    )


def _phase(
    outcome: Prediction | Infeasible | str, phase: str
) -> tuple[PhaseResult | None, str | None]:
    """The phase's result, or None and the reason."""
    if isinstance(outcome, str):
        return None, outcome
    if isinstance(outcome, Infeasible):
        return None, outcome.reason
    result = outcome.phases.get(phase)
    return result, None if result else f"the prediction holds no {phase} phase"


def summarise(
    rows: Sequence[ValidationRow], group: Mapping[str, str | int] = MappingProxyType({})
) -> Summary:
    """What ``rows`` say together; ``group`` is what they have in common."""
    latency, energy = [r.latency_s for r in rows], [r.energy_j for r in rows]
    latency_errors = _present(c.error_pct for c in latency)
    energy_errors = _present(c.error_pct for c in energy)
    typical_errors = _present(c.typical_error_pct for c in energy)
    pairs = [
        (c.predicted, c.measured)
        for c in energy
        if c.predicted is not None and c.measured is not None
    ]
    return Summary(
        group=MappingProxyType(dict(group)),
        n=len(rows),
        n_unpredicted=sum(r.reason is not None for r in rows),
        latency_mape_pct=_mean(map(abs, latency_errors)),
        energy_mape_pct=_mean(map(abs, energy_errors)),
        energy_typical_mape_pct=_mean(map(abs, typical_errors)),
        latency_bias_pct=_mean(latency_errors),
        energy_bias_pct=_mean(energy_errors),
        kendall_tau_energy=kendall_tau([p for p, _ in pairs], [m for _, m in pairs]),
        latency_coverage_pct=_coverage_pct(latency),
        energy_coverage_pct=_coverage_pct(energy),
    )


def _coverage_pct(comparisons: Iterable[Comparison]) -> float | None:
    return _mean(100.0 * w for w in _present(c.within_interval for c in comparisons))


def _present(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _mean(values: Iterable[float]) -> float | None:
    items = list(values)
    return math.fsum(items) / len(items) if items else None
