"""A prediction of one batch, or why it cannot run, as a JSON document and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from energylens.anchors import anchors_to_json
from energylens.report.table import digits, memory, prefix, quantity, source_line, table
from energylens.results import (
    BreakdownRow,
    Infeasible,
    Interval,
    Memory,
    PhaseResult,
    Prediction,
    Source,
)
from energylens.spec.system import Parallelism, Phase, Workload
from energylens.units import BYTES_PER_GB

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PREDICTION_SCHEMA = "energylens/prediction/v1"
_DERIVED = (
    "ttft_s",
    "tpot_s",
    "ttlt_s",
    "energy_per_prompt_j",
    "energy_per_token_j",
    "energy_per_request_j",
)
_LIMITERS = {"capped": "power cap", "device": "device", "host": "host"}
_SMALL_SHARE = 0.01
"""Ops below it in time and in energy share one line of the breakdown; ``--json`` has them all."""


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """The ``energylens/prediction/v1`` document; ``null_reasons`` says why a number is null."""
    p = prediction
    derived = {name: getattr(p, name) for name in _DERIVED}
    return {
        **subject(p.spec, p.device, p.engine, p.parallelism, p.workload),
        "feasible": True,
        "reason": None,
        "memory": memory(p.memory),
        **{phase.value: _phase(p.phases.get(phase), p.parallelism.gpus) for phase in Phase},
        **derived,
        "breakdown": [
            {**asdict(row), "kind": row.kind.value, "source": str(row.source)}
            for row in p.breakdown
        ],
        "source": str(p.source),
        "bundles": [asdict(bundle) for bundle in p.bundles],
        "anchors": anchors_to_json(p.anchors) if p.anchors else None,
        "notes": list(p.notes),
        "routing": p.routing,
        "imbalance": {phase: asdict(i) for phase, i in p.imbalance.items()} or None,
        "null_reasons": _null_reasons(p, derived),
    }


def infeasible_document(
    infeasible: Infeasible,
    *,
    spec: str,
    device: str,
    engine: str,
    parallelism: Parallelism,
    workload: Workload,
) -> dict[str, Any]:
    """The ``energylens/prediction/v1`` document of a configuration that cannot run."""
    return {
        **subject(spec, device, engine, parallelism, workload),
        "feasible": False,
        "reason": infeasible.reason,
        "memory": memory(infeasible.memory) if infeasible.memory else None,
        **dict.fromkeys(phase.value for phase in Phase),
        **dict.fromkeys(_DERIVED),
        "breakdown": [],
        "source": None,
        "bundles": [],
        "anchors": None,
        "notes": [],
        "routing": None,
        "imbalance": None,
        "null_reasons": {},
    }


def prediction_table(prediction: Prediction) -> RenderableType:
    """Latency, energy and power with intervals, the memory fit, the breakdown, and the sources."""
    from rich.console import Group

    p = prediction
    return Group(
        subject_line(p.spec, p.device, p.engine, p.parallelism, p.workload),
        _headline_table(p),
        memory_line(p.memory),
        *_imbalance_lines(p),
        *_breakdown_tables(p),
        *(f"note: {note}" for note in p.notes),
        source_line(p),
    )


def _imbalance_lines(p: Prediction) -> Iterator[str]:
    """One line a phase on how unevenly its experts are loaded."""
    for phase, i in p.imbalance.items():
        yield (
            f"experts in {phase} ({p.routing}): {i.experts_touched:.0f} of {i.experts} touched, "
            f"fullest worker {i.load_max_over_mean:.2f} x the mean, fullest expert "
            f"{i.expert_max_over_mean:.2f} x; {quantity(i.waiting_j, 'J')} spent waiting"
        )


def memory_line(memory: Memory) -> str:
    """Whether a worker's data fits its device, and what takes the room."""
    parts = {
        "weights": memory.weights_bytes,
        "KV cache": memory.kv_cache_bytes,
        "activations": memory.activations_bytes,
        "engine reserve": memory.reserve_bytes,
    }
    listed = " + ".join(f"{name} {size / BYTES_PER_GB:.2f}" for name, size in parts.items())
    used, capacity = memory.used_bytes / BYTES_PER_GB, memory.capacity_bytes / BYTES_PER_GB
    verdict = "fits" if memory.fits else "does not fit"
    return f"memory per GPU: {listed} = {used:.2f} of {capacity:.2f} GB, {verdict}"


def subject(
    spec: str, device: str, engine: str, parallelism: Parallelism, workload: Workload
) -> dict[str, Any]:
    """What was predicted, as documents begin."""
    return {
        "schema": PREDICTION_SCHEMA,
        "spec": spec,
        "device": device,
        "engine": engine,
        **parallelism_document(parallelism),
        "workload": {**asdict(workload), "context_len": workload.decode_context},
    }


def parallelism_document(parallelism: Parallelism) -> dict[str, Any]:
    """Degrees, and SMs and chunks of the collectives beside compute, None where none are asked."""
    return {
        "parallelism": {**parallelism.degrees, "gpus": parallelism.gpus},
        "overlap": asdict(parallelism.overlap) if parallelism.overlap is not None else None,
    }


def _phase(result: PhaseResult | None, gpus: int) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "latency_s": result.latency_s,
        "energy_j": result.energy_j,
        "mean_power_w": result.mean_power_w,
        "total_power_w": result.mean_power_w * gpus,
        "clock_hz": result.clock_hz,
        "interval": _interval(result.interval),
        "regime": result.regime,
        "source": str(result.source),
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {
        "level": interval.level,
        "latency_s": list(interval.latency_s),
        "energy_j": list(interval.energy_j),
    }


def _null_reasons(p: Prediction, derived: Mapping[str, float | None]) -> dict[str, str]:
    reasons = {phase.value: "not asked for" for phase in Phase if phase not in p.phases}
    for name, value in derived.items():
        if value is None:
            reasons[name] = "its phase was not asked for"
    if derived["tpot_s"] is None and p.workload.gen_len < 2:
        reasons["tpot_s"] = "gen_len is 1: no token follows the first"
    for name, result in p.phases.items():
        if result.clock_hz is None:
            reasons[f"{name}.clock_hz"] = "the calibration holds no clock for this"
    return reasons


def subject_line(
    spec: str, device: str, engine: str, parallelism: Parallelism, workload: Workload
) -> str:
    """What was predicted, as tables begin."""
    return (
        f"{machine_line(spec, device, engine, parallelism)}: "
        f"batch {workload.batch}, prompt {workload.prompt_len}, generate {workload.gen_len}, "
        f"decode context {workload.decode_context:g}"
    )


def machine_line(spec: str, device: str, engine: str, parallelism: Parallelism) -> str:
    """What runs on what, in which layout."""
    degrees = "".join(f", {name} {n}" for name, n in parallelism.degrees.items() if n > 1)
    if parallelism.overlap is not None:
        degrees += f", overlap {parallelism.overlap}"
    return f"{spec} on {parallelism.gpus} x {device}, engine {engine}{degrees}"


def _headline_table(p: Prediction) -> Table:
    level = next((f"{100 * r.interval.level:g} %" for r in p.phases.values()), "90 %")
    rows = []
    step = p.phases.get(Phase.DECODE)
    per_token = ("TPOT", p.tpot_s)
    if p.tpot_s is None and step is not None:
        per_token = ("decode step", step.latency_s)
    for label, value, unit, phase in (
        ("TTFT", p.ttft_s, "s", Phase.PREFILL),
        (*per_token, "s", Phase.DECODE),
        ("TTLT", p.ttlt_s, "s", Phase.REQUEST),
        ("J/prompt", p.energy_per_prompt_j, "J", Phase.PREFILL),
        ("J/token", p.energy_per_token_j, "J", Phase.DECODE),
        ("J/request", p.energy_per_request_j, "J", Phase.REQUEST),
    ):
        result = p.phases.get(phase)
        if result is not None and value is not None:
            interval = _scaled(result, value, unit)
            rows.append((label, quantity(value, unit), interval, _limiter(result)))
    for name, result in p.phases.items():
        watts = quantity(result.mean_power_w, "W")
        rows.append((f"W/GPU {name}", watts, "-", _limiter(result)))
    return table("", ("", "value", f"{level} interval", "limited by"), rows, text=(0, 3))


def _scaled(result: PhaseResult, value: float, unit: str) -> str:
    """Interval of ``value``, which is proportional to the phase's energy or latency."""
    interval = result.interval.energy_j if unit == "J" else result.interval.latency_s
    whole = result.energy_j if unit == "J" else result.latency_s
    factor, letter = prefix(value, unit)
    low, high = (digits(end * value / whole / factor) for end in interval)
    return f"{low} .. {high} {letter}{unit}"


def _limiter(result: PhaseResult) -> str:
    return _LIMITERS.get(result.regime, result.regime)


def _breakdown_tables(p: Prediction) -> Iterator[Table]:
    columns = ("op", "source", "count", "latency", "energy", "share", "of limit")
    # A request is the sum of the other two: its rows would only repeat theirs.
    for name in [n for n in p.phases if n != Phase.REQUEST] or list(p.phases):
        lines = _merged([row for row in p.breakdown if row.phase == name], p.phases[name])
        cells = [
            (
                line.op,
                str(line.source),
                str(line.count),
                quantity(line.latency_s, "s"),
                quantity(line.energy_j, "J"),
                f"{100 * line.share:.1f} %",
                "-" if line.limit_share is None else f"{100 * line.limit_share:.0f} %",
            )
            for line in lines
        ]
        yield table(f"{name}, by energy", columns, cells, text=(0, 1), wrap=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of the breakdown: one op, twins, or all small ones."""

    op: str
    source: Source
    count: int
    latency_s: float
    energy_j: float
    share: float
    limit_share: float | None


def _merged(rows: Sequence[BreakdownRow], phase: PhaseResult) -> list[_Line]:
    """Lines by falling energy: ops that cost the same as one line, small ones as the last."""
    twins: dict[tuple[Any, ...], list[BreakdownRow]] = {}
    small: list[BreakdownRow] = []
    for row in sorted(rows, key=lambda r: -r.energy_j):
        if max(row.share, row.latency_s / phase.latency_s) < _SMALL_SHARE:
            small.append(row)
        else:
            key = (row.kind, row.source, row.count, row.latency_s, row.energy_j)
            twins.setdefault(key, []).append(row)
    lines = [_line(", ".join(r.op for r in group), group) for group in twins.values()]
    lines.sort(key=lambda line: -line.energy_j)
    if small:
        lines.append(_line(f"{len(small)} smaller ops", small))
    return lines


def _line(op: str, rows: Sequence[BreakdownRow]) -> _Line:
    limits = {r.limit_share for r in rows}
    return _Line(
        op=op,
        source=max(r.source for r in rows),
        count=sum(r.count for r in rows),
        latency_s=math.fsum(r.latency_s for r in rows),
        energy_j=math.fsum(r.energy_j for r in rows),
        share=math.fsum(r.share for r in rows),
        limit_share=limits.pop() if len(limits) == 1 else None,
    )
