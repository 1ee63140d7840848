"""Results as JSON documents for programs (DESIGN section 5) and as tables for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from energylens.anchors import anchors_to_json
from energylens.results import (
    BreakdownRow,
    BundleRef,
    Infeasible,
    Interval,
    Memory,
    PhaseResult,
    Prediction,
    ServingResult,
    Source,
)
from energylens.spec.system import Parallelism, Phase, Workload
from energylens.units import BYTES_PER_GB
from energylens.validate import Comparison, Summary, Validation, ValidationRow, summarise

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType
    from rich.table import Table

PREDICTION_SCHEMA = "energylens/prediction/v1"
SERVING_SCHEMA = "energylens/serving/v1"
VALIDATION_SCHEMA = "energylens/validation/v1"
LIST_SCHEMA = "energylens/list/v1"
DOCTOR_SCHEMA = "energylens/doctor/v1"

_DERIVED = (
    "ttft_s",
    "tpot_s",
    "ttlt_s",
    "energy_per_prompt_j",
    "energy_per_token_j",
    "energy_per_request_j",
)
_SUMMARY_COLUMNS = (
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
_LIMITERS = {"capped": "power cap", "device": "device", "host": "host"}
_SMALL_SHARE = 0.01
"""Ops below it in time and in energy share one line of the breakdown; ``--json`` has them all."""


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """The ``energylens/prediction/v1`` document; ``null_reasons`` says why a number is null."""
    p = prediction
    derived = {name: getattr(p, name) for name in _DERIVED}
    return {
        **_subject(p.spec, p.device, p.engine, p.parallelism, p.workload),
        "feasible": True,
        "reason": None,
        "memory": _memory(p.memory),
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
        **_subject(spec, device, engine, parallelism, workload),
        "feasible": False,
        "reason": infeasible.reason,
        "memory": _memory(infeasible.memory) if infeasible.memory else None,
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


def serving_document(result: ServingResult) -> dict[str, Any]:
    """The ``energylens/serving/v1`` document; ``null_reasons`` says why a number is null."""
    r = result
    reasons = {}
    if r.tpot_s is None:
        reasons = dict.fromkeys(("tpot_s", "interval.tpot_s"), "no request makes a second token")
    if r.traffic.rate_per_s is None:
        reasons["traffic.rate_per_s"] = "all requests of the file arrive at one time"
    return {
        "schema": SERVING_SCHEMA,
        **asdict(r),
        "feasible": True,
        "reason": None,
        "parallelism": {**asdict(r.parallelism), "gpus": r.parallelism.gpus},
        "source": str(r.source),
        "anchors": anchors_to_json(r.anchors) if r.anchors else None,
        "null_reasons": reasons,
    }


def serving_infeasible_document(
    infeasible: Infeasible, *, spec: str, device: str, engine: str, parallelism: Parallelism
) -> dict[str, Any]:
    """The ``energylens/serving/v1`` document of a service that cannot be."""
    return {
        "schema": SERVING_SCHEMA,
        **dict.fromkeys(ServingResult.__dataclass_fields__),
        "spec": spec,
        "device": device,
        "engine": engine,
        "parallelism": {**asdict(parallelism), "gpus": parallelism.gpus},
        "feasible": False,
        "reason": infeasible.reason,
        "bundles": [],
        "notes": [],
        "null_reasons": {},
    }


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


def prediction_table(prediction: Prediction) -> RenderableType:
    """Latency, energy and power with intervals, the memory fit, the breakdown, and the sources."""
    from rich.console import Group

    p = prediction
    return Group(
        _subject_line(p.spec, p.device, p.engine, p.parallelism, p.workload),
        _headline_table(p),
        memory_line(p.memory),
        *_imbalance_lines(p),
        *_breakdown_tables(p),
        *(f"note: {note}" for note in p.notes),
        _source_line(p),
    )


def serving_table(result: ServingResult) -> RenderableType:
    """Latencies, energy, power and load of a service, and the sources."""
    from rich.console import Group

    return Group(
        _service_line(result),
        _latency_table(result),
        _service_table(result),
        *(f"note: {note}" for note in result.notes),
        _source_line(result),
    )


def _imbalance_lines(p: Prediction) -> Iterator[str]:
    """One line a phase on how unevenly its experts are loaded."""
    for phase, i in p.imbalance.items():
        yield (
            f"experts in {phase} ({p.routing}): {i.experts_touched:.0f} of {i.experts} touched, "
            f"fullest worker {i.load_max_over_mean:.2f} x the mean, fullest expert "
            f"{i.expert_max_over_mean:.2f} x; {_quantity(i.waiting_j, 'J')} spent waiting"
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
    used, capacity = sum(parts.values()) / BYTES_PER_GB, memory.capacity_bytes / BYTES_PER_GB
    verdict = "fits" if memory.fits else "does not fit"
    return f"memory per GPU: {listed} = {used:.2f} of {capacity:.2f} GB, {verdict}"


def validation_table(validation: Validation) -> RenderableType:
    """A line for each regime, the groups, why rows are not predicted, and those that are."""
    from rich.console import Group

    return Group(
        *_regime_lines(validation.rows),
        _summary_table(validation.summary),
        *_reason_lines(validation.rows),
        _rows_table(validation.rows),
        _sources_line(validation.rows),
    )


def listing_document(known: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Names of each kind, and what they are, as an ``energylens/list/v1`` document."""
    return {
        "schema": LIST_SCHEMA,
        **{kind: list(entries) for kind, entries in known.items()},
        "descriptions": {kind: dict(entries) for kind, entries in known.items()},
    }


def listing_table(known: Mapping[str, Mapping[str, str]]) -> RenderableType:
    """A line for each name and what it is, under its kind."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    parts: list[RenderableType] = []
    for kind, entries in known.items():
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in entries.items():
            table.add_row(name, text)
        parts += [f"{kind}:", Padding(table, (0, 0, 0, 2))]
    return Group(*parts)


def doctor_document(diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """The ``energylens/doctor/v1`` document of the fields of a `meter.doctor.Diagnosis`."""
    return {
        "schema": DOCTOR_SCHEMA,
        **diagnosis,
        "libraries": dict(diagnosis["libraries"]),
    }


def doctor_text(document: Mapping[str, Any]) -> str:
    """What works on this machine, what does not and why, and what to change, for people."""
    found = document["libraries"]
    blockers = document["calibrate_blockers"]
    lines = [
        f"python {document['python']} on {document['platform']}",
        "predict, validate, list: work",
        f"calibrate: {'no, ' + '; '.join(blockers) if blockers else 'works'}",
        "libraries: "
        + ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found.items()),
    ]
    if document["tegra"]:
        lines.append(f"Jetson: {document['tegra']}")
    for board in document["devices"]:
        hidden = "" if board["uuid"] in document["visible"] else ", hidden from CUDA"
        limit = "unknown" if board["power_limit_w"] is None else f"{board['power_limit_w']:g} W"
        lines.append(f"{board['name']} {board['uuid']}, power limit {limit}{hidden}")
        for sensor in document["capabilities"]:
            if sensor["uuid"] == board["uuid"]:
                detail = sensor["reason"] or sensor["scope"]
                note = f" ({detail})" if detail else ""
                lines.append(f"  {sensor['sensor']}: {sensor['state']}{note}")
    return "\n".join([*lines, *(f"to do: {hint}" for hint in document["hints"])])


def facts_text(facts: Mapping[str, Any]) -> str:
    """A document of facts as indented lines, lists of like records as aligned columns."""
    return "\n".join(_fact_lines(facts, 0))


def _fact_lines(facts: Mapping[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, item in facts.items():
        if name == "schema":
            continue
        if isinstance(item, Mapping) and item:
            yield f"{indent}{name}:"
            yield from _fact_lines(item, depth + 1)
        elif isinstance(item, list | tuple) and item and isinstance(item[0], Mapping):
            yield f"{indent}{name}:"
            yield from _record_lines(item, depth + 1)
        else:
            yield f"{indent}{name}: {_fact(item)}"


def _record_lines(records: Sequence[Mapping[str, Any]], depth: int) -> Iterator[str]:
    """Records with the same plain fields as columns; others one below the other."""
    columns = list(records[0])
    if any(
        list(r) != columns or any(isinstance(v, Mapping | list | tuple) for v in r.values())
        for r in records
    ):
        for record in records:
            yield from _fact_lines(record, depth)
        return
    cells = [columns, *([_fact(value) for value in record.values()] for record in records)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        padded = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(["  " * depth + f"{first:<{widths[0]}}", *padded]).rstrip()


def _fact(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list | tuple):
        return ", ".join(map(_fact, value)) or "none"
    return str(value)


def _subject(
    spec: str, device: str, engine: str, parallelism: Parallelism, workload: Workload
) -> dict[str, Any]:
    return {
        "schema": PREDICTION_SCHEMA,
        "spec": spec,
        "device": device,
        "engine": engine,
        "parallelism": {**asdict(parallelism), "gpus": parallelism.gpus},
        "workload": {**asdict(workload), "context_len": workload.decode_context},
    }


def _memory(memory: Memory) -> dict[str, Any]:
    return {**asdict(memory), "fits": memory.fits}


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


def _validation_row(row: ValidationRow) -> dict[str, Any]:
    return {
        "record_id": row.measurement.record_id,
        "latency_s": _comparison(row.latency_s),
        "energy_j": _comparison(row.energy_j),
        "source": None if row.source is None else str(row.source),
        "regime": row.measurement.regime,
        "predicted_regime": row.predicted_regime,
        "reason": row.reason,
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


def _table(
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

    table = Table(
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
        table.add_column(column, justify=justify, min_width=None if i in wrap else longest)
    for row in cells:
        table.add_row(*row)
    return table


def _subject_line(
    spec: str, device: str, engine: str, parallelism: Parallelism, workload: Workload
) -> str:
    degrees = "".join(f", {name} {n}" for name, n in asdict(parallelism).items() if n > 1)
    return (
        f"{spec} on {parallelism.gpus} x {device}, engine {engine}{degrees}: "
        f"batch {workload.batch}, prompt {workload.prompt_len}, generate {workload.gen_len}, "
        f"decode context {workload.decode_context:g}"
    )


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
            rows.append((label, _quantity(value, unit), interval, _limiter(result)))
    for name, result in p.phases.items():
        watts = _quantity(result.mean_power_w, "W")
        rows.append((f"W/GPU {name}", watts, "-", _limiter(result)))
    return _table("", ("", "value", f"{level} interval", "limited by"), rows, text=(0, 3))


def _service_line(r: ServingResult) -> str:
    t = r.traffic
    degrees = "".join(f", {name} {n}" for name, n in asdict(r.parallelism).items() if n > 1)
    rate = "at one time" if t.rate_per_s is None else f"at {t.rate_per_s:.4g}/s"
    return (
        f"{r.spec} on {r.parallelism.gpus} x {r.device}, engine {r.engine}{degrees}: "
        f"{t.requests} requests {rate} ({t.arrivals}), prompt {t.prompt_len.mean:.4g} (most "
        f"{t.prompt_len.max}), generate {t.gen_len.mean:.4g} (most {t.gen_len.max})"
    )


def _latency_table(r: ServingResult) -> Table:
    rows = [
        (name, *(_quantity(getattr(p, key), "s") for key in ("mean", "p50", "p90", "p99")))
        for name, p in (("TTFT", r.ttft_s), ("TPOT", r.tpot_s), ("end to end", r.e2e_s))
        if p is not None
    ]
    return _table("", ("", "mean", "p50", "p90", "p99"), rows, text=(0,))


def _service_table(r: ServingResult) -> Table:
    factor, prefix = _prefix(r.energy_per_request_j, "J")
    ends = " .. ".join(_digits(end / factor) for end in r.interval.energy_per_request_j)
    busy, cache, rate = f"busy {100 * r.utilisation:.1f} %", r.kv_cache, r.traffic.rate_per_s
    load = "" if rate is None else f"load {100 * rate / r.saturation_rate_per_s:.0f} %, "
    rows = [
        ("J/request", _quantity(r.energy_per_request_j, "J"), f"{ends} {prefix}J"),
        ("J/token", _quantity(r.energy_per_token_j, "J"), ""),
        ("W/GPU", _quantity(r.mean_power_w, "W"), f"{r.total_power_w:.4g} W in all"),
        ("requests/s", f"{r.requests_per_s:.4g}", f"{r.tokens_per_s:.4g} generated tokens/s"),
        ("saturates at", f"{r.saturation_rate_per_s:.4g}/s", f"{load}{busy} of the time"),
        ("waiting", f"{r.queue.mean:.3g}", f"most {r.queue.max}"),
        ("running", f"{r.running.mean:.3g}", f"most {r.running.max}"),
        (
            "KV cache held",
            f"{100 * cache.mean_share:.1f} %",
            f"most {100 * cache.peak_share:.1f} % of {cache.capacity_tokens} tokens",
        ),
        ("preemptions", str(r.preemptions), f"{r.steps} steps in {r.window_s:.4g} s"),
    ]
    interval = f"{100 * r.interval.level:g} % interval, and more"
    return _table("", ("", "value", interval), rows, text=(0, 2))


def _scaled(result: PhaseResult, value: float, unit: str) -> str:
    """Interval of ``value``, which is proportional to the phase's energy or latency."""
    interval = result.interval.energy_j if unit == "J" else result.interval.latency_s
    whole = result.energy_j if unit == "J" else result.latency_s
    factor, prefix = _prefix(value, unit)
    low, high = (_digits(end * value / whole / factor) for end in interval)
    return f"{low} .. {high} {prefix}{unit}"


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
                _quantity(line.latency_s, "s"),
                _quantity(line.energy_j, "J"),
                f"{100 * line.share:.1f} %",
                "-" if line.limit_share is None else f"{100 * line.limit_share:.0f} %",
            )
            for line in lines
        ]
        yield _table(f"{name}, by energy", columns, cells, text=(0, 1), wrap=(0,))


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


def _source_line(p: Prediction | ServingResult) -> str:
    return (
        f"device {p.device} ({_boards(p)}), engine {p.engine}, bundle {_bundle_names(p.bundles)}, "
        f"weakest source: {p.source}"
    )


def _boards(p: Prediction | ServingResult) -> str:
    """Which boards and which host the numbers are for."""
    workers, given = p.parallelism.workers, p.anchors.boards if p.anchors and p.bundles else ()
    used = given[:workers]
    if not used:
        boards = "typical boards" if workers > 1 else "a typical board"
    elif len(used) < workers:
        boards = f"{len(used)} of {workers} boards anchored"
    else:
        boards = "anchored " + " and ".join(board.board_uuid for board in used)
    return boards + (", anchored host" if p.anchors and p.anchors.host and p.bundles else "")


def _bundle_names(bundles: Sequence[BundleRef]) -> str:
    return ", ".join(f"{b.device}/{b.provider} {b.version}" for b in bundles) or "none"


def _regime_lines(rows: Sequence[ValidationRow]) -> Iterator[str]:
    """One line for each regime: what the device sets, and what the host sets, are two questions."""
    regimes = dict.fromkeys(row.measurement.regime for row in rows)
    for regime in sorted(regimes):
        s = summarise([row for row in rows if row.measurement.regime == regime])
        if s.n == s.n_unpredicted:
            yield f"{regime}-bound: none of {s.n} rows predicted"
            continue
        yield (
            f"{regime}-bound, {s.n - s.n_unpredicted} of {s.n} rows predicted: "
            f"latency MAPE {_percent(s.latency_mape_pct)} "
            f"({_whole(s.latency_coverage_pct)} in the interval), "
            f"energy {_percent(s.energy_mape_pct)} ({_whole(s.energy_coverage_pct)}), "
            f"energy as a typical board {_percent(s.energy_typical_mape_pct)}"
        )


def _reason_lines(rows: Sequence[ValidationRow]) -> Iterator[str]:
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
    return _table(
        "rows (* outside the 90 % interval)",
        (f"{prefix}..." if prefix else "record", *columns),
        cells,
        text=(0, 1),
    )


def _sources_line(rows: Sequence[ValidationRow]) -> str:
    """Where the predictions come from, as the last line of every result says."""
    counts = Counter(row.source for row in rows if row.source is not None)
    sources = ", ".join(f"{n} {source}" for source, n in sorted(counts.items())) or "none"
    bundles = dict.fromkeys(ref for row in rows for ref in row.bundles)
    return f"bundle {_bundle_names(list(bundles))}, rows by weakest source: {sources}"


def _common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dash; nothing for a single one."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first[: first.rfind("-", 0, same) + 1]


def _compared(comparison: Comparison, unit: str) -> tuple[str, str, str]:
    mark = "*" if comparison.within_interval is False else " "
    return (
        _quantity(comparison.measured, unit),
        _quantity(comparison.predicted, unit),
        f"{_percent(comparison.error_pct, signed=True)} {mark}",
    )


def _summary_table(summaries: Sequence[Summary]) -> Table:
    names = list(dict.fromkeys(name for s in summaries for name in s.group))
    cells = [
        (
            *(str(s.group.get(name, "" if i else "all")) for i, name in enumerate(names)),
            f"{s.n - s.n_unpredicted} of {s.n}",
            _percent(s.latency_mape_pct),
            _percent(s.latency_bias_pct, signed=True),
            _whole(s.latency_coverage_pct),
            _percent(s.energy_mape_pct),
            _percent(s.energy_bias_pct, signed=True),
            _whole(s.energy_coverage_pct),
            _percent(s.energy_typical_mape_pct),
            "-" if s.kendall_tau_energy is None else f"{s.kendall_tau_energy:.3f}",
        )
        for s in summaries
    ]
    title = "groups" if names else "all rows"
    return _table(title, (*names, *_SUMMARY_COLUMNS), cells, text=range(len(names)))


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:{'+' if signed else ''}.1f} %"


_PREFIXES = ((1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def _prefix(value: float, unit: str) -> tuple[float, str]:
    """Factor and letter that keep ``value`` readable; seconds and watts never in kilo."""
    prefixes = _PREFIXES[1:] if unit in ("s", "W") else _PREFIXES
    return next((p for p in prefixes if abs(value) >= p[0]), prefixes[-1])


def _digits(value: float) -> str:
    """Three significant digits, none dropped: columns of them can be compared at a glance."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if value == 0:
        return f"0 {unit}"
    factor, prefix = _prefix(value, unit)
    return f"{_digits(value / factor)} {prefix}{unit}"
