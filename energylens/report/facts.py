"""What is not predicted: the names that are known, what this machine can do, what a run found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

LIST_SCHEMA = "energylens/list/v1"
DOCTOR_SCHEMA = "energylens/doctor/v1"
SWEEP_SCHEMA = "energylens/sweep/v1"


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


def sweep_document(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The ``energylens/sweep/v1`` document of the fields of a `sweep.Sweep`."""
    return {"schema": SWEEP_SCHEMA, **facts}


def sweep_text(facts: Mapping[str, Any]) -> str:
    """What a run did, for people."""
    return (
        f"{facts['cells']} cells in {facts['out']}: {facts['reused']} were there, "
        f"{facts['cells'] - facts['reused']} are new, {facts['infeasible']} of all cannot run"
    )


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
        lines.append(f"{board['name']} {board['uuid']}, {_power_of(board)}{hidden}")
        lines += [f"  rails of {role['role']}: {_rails_of(role)}" for role in board["rails"]]
        lines += [f"  note: {note}" for note in board["notes"]]
        for sensor in document["capabilities"]:
            if sensor["uuid"] == board["uuid"]:
                lines.append(f"  {sensor['sensor']}: {_state_of(sensor)}")
    for counter in document["host"]:
        lines.append(f"host {counter['uuid']} energy: {_state_of(counter)}")
    return "\n".join([*lines, *(f"to do: {hint}" for hint in document["hints"])])


def _state_of(sensor: Mapping[str, Any]) -> str:
    detail = sensor["reason"] or sensor["scope"]
    return f"{sensor['state']} ({detail})" if detail else str(sensor["state"])


def _power_of(board: Mapping[str, Any]) -> str:
    if board["power_source"] is not None:
        mode = board["power_mode"] or "unknown"
        window = f"windows of {board['least_window_s']:g} s and more"
        source = f"{board['power_source']}, in steps of {1e3 * board['power_step_w']:.3g} mW"
        return f"power mode {mode}, {source}, {window}"
    limit = board["power_limit_w"]
    return "power limit " + ("unknown" if limit is None else f"{limit:g} W")


def _rails_of(role: Mapping[str, Any]) -> str:
    if not role["rails"]:
        return f"none ({role['reason']})"
    shared = f" (shared with {', '.join(role['shared_with'])})" if role["shared_with"] else ""
    return " + ".join(role["rails"]) + shared


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
