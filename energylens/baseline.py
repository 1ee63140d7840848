"""Two measured runs of the same thing, phase by phase: what became worse beyond chance. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from energylens.errors import SpecError
from energylens.results import Measurement

CONTEXT_TOLERANCE = 0.02
"""Relative difference of the KV length at which two decode phases are still the same work."""

_SAME = ("spec", "device", "engine", "precision", "mode", "prefill_mode", "batch", "prompt_len")
_QUANTITIES = ("latency_s", "energy_j")


class Verdict(enum.StrEnum):
    """What a change is.

    ``missing``: the new run lacks what the baseline has. ``not_measured``: the baseline lacks it.
    ``invalid``: one of both says that its measurement is not valid.
    """

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    UNCHANGED = "unchanged"
    NOT_MEASURED = "not_measured"
    MISSING = "missing"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One quantity of one phase in both runs.

    Attributes:
        baseline, new: as measured; None where not measured.
        noise_pct: half width of the 95 % interval of the change, in percent of the baseline; None
            where a run does not say how well it knows its mean.
        reason: why there is no verdict on the change.
    """

    phase: str
    quantity: str
    baseline: float | None
    new: float | None
    noise_pct: float | None
    verdict: Verdict
    reason: str | None = None

    @property
    def change_pct(self) -> float | None:
        """Signed change in percent of the baseline; above 0 is worse."""
        if self.baseline is None or self.new is None:
            return None
        return 100 * (self.new / self.baseline - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """All changes; ``notes`` are differences that do not forbid to compare."""

    tolerance_pct: float
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """True where something became worse beyond tolerance and noise."""
        return any(c.verdict is Verdict.REGRESSION for c in self.changes)

    @property
    def incomplete(self) -> bool:
        """True where there is no verdict on something that the baseline has."""
        return any(c.verdict in (Verdict.MISSING, Verdict.INVALID) for c in self.changes)


def compare_runs(
    baseline: Sequence[Measurement], new: Sequence[Measurement], *, tolerance_pct: float
) -> BaselineComparison:
    """Compare the phases of two measured runs.

    A regression is worse by more than ``tolerance_pct`` and by more than the noise of both runs.

    Args:
        baseline: one row a phase.
        new: the same.
        tolerance_pct: change that is accepted, in percent.

    Raises:
        SpecError: the runs are not of the same thing, or hold several rows of one phase.
    """
    old_rows, new_rows = _by_phase(baseline, "baseline"), _by_phase(new, "new run")
    shared = [phase for phase in old_rows if phase in new_rows]
    if not shared:
        raise SpecError(
            f"the baseline holds {_listed(old_rows)}, the new run {_listed(new_rows)}: no phase to "
            "compare; measure the same phases"
        )
    differences = [d for phase in shared for d in _differences(old_rows[phase], new_rows[phase])]
    if differences:
        raise SpecError(
            f"not comparable: {'; '.join(dict.fromkeys(differences))}; measure the same spec, "
            "layout, workload and mode on the same kind of device"
        )
    changes = [
        _change(phase, quantity, old_rows.get(phase), new_rows.get(phase), tolerance_pct)
        for phase in dict.fromkeys((*old_rows, *new_rows))
        for quantity in _QUANTITIES
    ]
    notes = [n for phase in shared for n in _notes(old_rows[phase], new_rows[phase])]
    return BaselineComparison(
        tolerance_pct=tolerance_pct,
        changes=tuple(changes),
        notes=tuple(dict.fromkeys(notes)),
    )


def _listed(phases: Mapping[str, Measurement]) -> str:
    return ", ".join(phases) or "no phase"


def _by_phase(rows: Sequence[Measurement], what: str) -> dict[str, Measurement]:
    phases: dict[str, Measurement] = {}
    for row in rows:
        if row.phase in phases:
            raise SpecError(
                f"the {what} holds several {row.phase} rows ({phases[row.phase].record_id}, "
                f"{row.record_id}); give the profile of one run"
            )
        phases[row.phase] = row
    return phases


def _differences(old: Measurement, new: Measurement) -> Iterator[str]:
    """What makes two rows of a phase measurements of different things."""
    names = (*_SAME, "gen_len") if old.phase == "request" else _SAME
    before = {name: getattr(old, name) for name in names} | old.parallelism.degrees
    after = {name: getattr(new, name) for name in names} | new.parallelism.degrees
    for name, value in before.items():
        if value != after[name]:
            where = f" of {old.phase}" if name == "mode" else ""
            yield f"{name}{where} is {value} in the baseline and {after[name]} in the new run"
    contexts = (old.context_len, new.context_len)
    if old.phase == "decode" and None not in contexts:
        a, b = (float(c or 0) for c in contexts)
        if abs(b / a - 1) > CONTEXT_TOLERANCE:
            yield f"context_len is {a:g} in the baseline and {b:g} in the new run"


def _notes(old: Measurement, new: Measurement) -> Iterator[str]:
    if old.engine_version != new.engine_version:
        yield f"{old.engine} {old.engine_version} in the baseline, {new.engine_version} now"
    boards = [row.labels.get("board_uuid") or "" for row in (old, new)]
    if all(boards) and boards[0] != boards[1]:
        yield (
            f"other boards: {boards[0]} in the baseline, {boards[1]} now; boards of one type "
            "differ by several percent, so measure a baseline on these"
        )


def _change(
    phase: str,
    quantity: str,
    old: Measurement | None,
    new: Measurement | None,
    tolerance_pct: float,
) -> Change:
    before, after = (getattr(row, quantity) if row else None for row in (old, new))
    noise_pct = None
    if old is None or new is None or before is None or after is None:
        verdict = Verdict.NOT_MEASURED if before is None else Verdict.MISSING
        reason: str | None = _why_missing(quantity, {"baseline": old, "new run": new})
    elif old.defect or new.defect:
        verdict = Verdict.INVALID
        defects = (("baseline", old.defect), ("new run", new.defect))
        reason = "; ".join(f"{where} {defect}" for where, defect in defects if defect)
    else:
        reason = None
        noise_pct = _noise_pct(quantity, old, new, after / before)
        verdict = _verdict(100 * (after / before - 1), tolerance_pct, noise_pct)
    return Change(
        phase=phase,
        quantity=quantity,
        baseline=before,
        new=after,
        noise_pct=noise_pct,
        verdict=verdict,
        reason=reason,
    )


def _why_missing(quantity: str, runs: Mapping[str, Measurement | None]) -> str:
    without = {w: row for w, row in runs.items() if not row or getattr(row, quantity) is None}
    told = {str(row.labels.get("energy_reason") or "") for row in without.values() if row} - {""}
    why = f": {'; '.join(sorted(told))}" if told and quantity == "energy_j" else ""
    return f"not in the {' and the '.join(without)}{why}"


def _noise_pct(quantity: str, old: Measurement, new: Measurement, ratio: float) -> float | None:
    """Of the ratio of two means that err independently."""
    name = "latency_noise" if quantity == "latency_s" else "energy_noise"
    a, b = getattr(old, name), getattr(new, name)
    return None if a is None or b is None else 100 * ratio * math.hypot(a, b)


def _verdict(change_pct: float, tolerance_pct: float, noise_pct: float | None) -> Verdict:
    if abs(change_pct) <= max(tolerance_pct, noise_pct or 0.0):
        return Verdict.UNCHANGED
    return Verdict.REGRESSION if change_pct > 0 else Verdict.IMPROVEMENT
