"""Predictions against measurements: error per row, what rows say together, what dominates. Pure."""

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
    BreakdownRow,
    BundleRef,
    Infeasible,
    KernelRow,
    Kind,
    Measurement,
    OpsPrediction,
    PhaseResult,
    Prediction,
    Source,
)

Outcome = Prediction | OpsPrediction | Infeasible | str
"""A prediction, or why there is none."""

Predict = Callable[[Measurement, Anchors | None], Outcome]
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
class KindComparison:
    """Kernel seconds of one op kind in one step; None where one side has no such op."""

    kind: Kind
    measured: float | None
    predicted: float | None

    @property
    def error_pct(self) -> float | None:
        """Signed error of ``predicted`` in percent of the measurement."""
        return _error_pct(self.predicted, self.measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """One measured row beside its prediction; ``reason`` says why there is none.

    ``kinds`` is by op kind, the longest first, where kernels were measured.
    """

    measurement: Measurement
    latency_s: Comparison
    energy_j: Comparison
    source: Source | None = None
    bundles: tuple[BundleRef, ...] = ()
    predicted_regime: str | None = None
    reason: str | None = None
    kinds: tuple[KindComparison, ...] = ()


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
    predict_kernels: Predict | None = None,
    by: Sequence[str] = (),
    ignore_anchors: bool = False,
) -> Validation:
    """Predict every measured row and compare.

    Args:
        measurements: rows; one that cannot be predicted is kept, with the reason.
        predict: called with the row's anchors, and without any for the typical board.
        predict_kernels: the same for the sums of kernels, of rows that have them measured.
        by: fields that make groups: of a `Measurement`, a degree, or a column of the truth file.
        ignore_anchors: predict all rows for a typical board.

    Raises:
        SpecError: ``by`` names a field that the rows do not have.
    """
    _check_fields(measurements, by)
    rows = tuple(
        _row(m, predict, predict_kernels, ignore_anchors=ignore_anchors) for m in measurements
    )
    groups = (summarise(own, group) for group, own in grouped(rows, by)) if by else ()
    return Validation(rows=rows, summary=(summarise(rows), *groups))


def grouped(
    rows: Iterable[ValidationRow], by: Sequence[str]
) -> list[tuple[Mapping[str, str | int], list[ValidationRow]]]:
    """Rows with the same value of every field of ``by``, beside these values."""
    groups: dict[tuple[str | int, ...], list[ValidationRow]] = {}
    for row in rows:
        groups.setdefault(tuple(_field(row.measurement, name) for name in by), []).append(row)
    return [(dict(zip(by, key, strict=True)), own) for key, own in groups.items()]


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


def compare_kinds(
    predicted: Iterable[BreakdownRow], measured: Iterable[KernelRow]
) -> tuple[KindComparison, ...]:
    """Predicted against measured kernel time of one phase by op kind, the longest kind first.

    Args:
        predicted: breakdown of the phase, without the laws that do not act on short profiled passes
            (`energylens.profiler.trace.LAWS_OFF`); waiting and idling are no kernels.
        measured: kernels of the same phase.
    """
    ours, theirs = _by_kind(predicted), _by_kind(measured)
    kinds = sorted(ours | theirs, key=lambda k: -max(ours.get(k, 0.0), theirs.get(k, 0.0)))
    return tuple(
        KindComparison(kind=k, measured=theirs.get(k), predicted=ours.get(k)) for k in kinds
    )


def _by_kind(rows: Iterable[BreakdownRow | KernelRow]) -> dict[Kind, float]:
    seconds: dict[Kind, float] = {}
    for row in rows:
        if row.latency_s > 0 and row.kind not in (Kind.WAIT, Kind.IDLE):
            seconds[row.kind] = seconds.get(row.kind, 0.0) + row.latency_s
    return seconds


def _row(
    m: Measurement, predict: Predict, predict_kernels: Predict | None, *, ignore_anchors: bool
) -> ValidationRow:
    anchors = None if ignore_anchors else m.anchors
    typical = m.defect or predict(m, None)
    own = typical if m.defect or anchors is None else predict(m, anchors)
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
        bundles=own.bundles if isinstance(own, Prediction | OpsPrediction) else (),
        predicted_regime=result.regime if result else None,
        reason=reason,
        kinds=_kinds(m, predict_kernels, anchors) if result else (),
    )


def _kinds(
    m: Measurement, predict_kernels: Predict | None, anchors: Anchors | None
) -> tuple[KindComparison, ...]:
    if not _by_kind(m.kernels) or predict_kernels is None:
        return ()
    outcome = predict_kernels(m, anchors)
    if not isinstance(outcome, Prediction):
        return ()
    return compare_kinds([r for r in outcome.breakdown if r.phase == m.phase], m.kernels)


def _phase(outcome: Outcome, phase: str) -> tuple[PhaseResult | None, str | None]:
    """The phase's result, or None and the reason."""
    if isinstance(outcome, OpsPrediction):
        return outcome.result, None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShare:
    """A group's part of all absolute error, beside its part of the rows; both in percent."""

    group: Mapping[str, str | int]
    n: int
    error_pct: float
    rows_pct: float


def error_shares(
    rows: Sequence[ValidationRow], quantity: str, by: Sequence[str]
) -> tuple[ErrorShare, ...]:
    """Which groups hold the absolute error (in percent of each measurement), the largest first.

    Args:
        rows: those without an error count nothing.
        quantity: ``latency_s`` or ``energy_j``.
        by: as for `validate`.
    """

    def errors(own: Iterable[ValidationRow]) -> list[float]:
        return [abs(e) for e in _present(getattr(r, quantity).error_pct for r in own)]

    total, n = math.fsum(errors(rows)), len(errors(rows))
    shares = [
        ErrorShare(
            group=group,
            n=len(errors(own)),
            error_pct=100 * math.fsum(errors(own)) / total if total else 0.0,
            rows_pct=100 * len(errors(own)) / n,
        )
        for group, own in grouped(rows, by)
        if errors(own)
    ]
    return tuple(sorted(shares, key=lambda s: -s.error_pct))


def bias_share_pct(comparisons: Iterable[Comparison]) -> float | None:
    """Part of the mean squared error that one common factor would take away; the rest scatters."""
    errors = _present(c.error_pct for c in comparisons)
    squared = math.fsum(e * e for e in errors)
    return 100 * math.fsum(errors) ** 2 / len(errors) / squared if squared else None


def power_mape_pct(rows: Iterable[ValidationRow]) -> float | None:
    """Mean absolute error of power, which is what energy has beside the error of time."""
    pairs = [(r.energy_j, r.latency_s) for r in rows]
    return _mean(
        abs(100 * (e.predicted / e.measured * t.measured / t.predicted - 1))
        for e, t in pairs
        if e.predicted and e.measured and t.predicted and t.measured
    )


def _coverage_pct(comparisons: Iterable[Comparison]) -> float | None:
    return _mean(100.0 * w for w in _present(c.within_interval for c in comparisons))


def _present(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _mean(values: Iterable[float]) -> float | None:
    items = list(values)
    return math.fsum(items) / len(items) if items else None
