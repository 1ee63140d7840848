"""A measured run as tables, and as rows of a truth CSV; its JSON document is its own."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from energylens.report.table import digits, quantity, table
from energylens.units import BYTES_PER_GB

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BYTES_PER_GIB = float(2**30)
_LONGEST = 8
"""Kernels of a phase that the table names; the CSV file has all."""
_LABELS = {
    "prefill": ("TTFT", "J/prompt", "energy_per_prompt_j"),
    "decode": ("decode step", "J/token", "energy_per_token_j"),
    "request": ("TTLT", "J/request", "energy_per_request_j"),
}


def profile_table(document: Mapping[str, Any]) -> RenderableType:
    """Latency with its spread, energy and power, per GPU, memory, rates, and what is not valid."""
    from rich.console import Group

    parts: list[RenderableType] = [_subject(document)]
    measured = [phase for phase in _LABELS if document[phase] is not None]
    if measured:
        parts.append(_latency_table(document, measured))
        if document["energy_reason"] is None:
            parts.append(_energy_table(document, measured))
        if any(len(document[phase]["per_gpu"]) > 1 for phase in measured):
            parts.append(_gpu_table(document, measured))
    if document["breakdown"]:
        parts.append(_kind_table(document["breakdown"]))
        parts.append(_kernel_table(document["breakdown"]))
    if document["throttle"]:
        parts.append(_throttle_table(document["throttle"]))
    parts += list(_lines(document, measured))
    return Group(*parts)


def profile_csv(document: Mapping[str, Any]) -> str:
    """A header and a row per measured phase: the truth CSV of DESIGN section 5."""
    rows = [_row(document, phase) for phase in _LABELS if document[phase] is not None]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _cell(v) for k, v in row.items()} for row in rows)
    return text.getvalue()


def _row(document: Mapping[str, Any], phase: str) -> dict[str, Any]:
    found, work, split = document[phase], document["workload"], document["parallelism"]
    anchors = document["anchors"] or {"boards": [], "host": None}
    by_board = {b["board_uuid"]: b for b in anchors["boards"]}
    gpus = found["per_gpu"]
    boards = [by_board.get(g["board_uuid"], {}) for g in gpus]
    context = work["prompt_len"] if phase == "prefill" else found["context_len"]
    return {
        "record_id": f"{document['record_id']}-{phase}",
        "host_run": document["record_id"],
        "device": document["device"] or document["device_name"],
        "n_gpus": document["n_gpus"],
        "engine": document["engine"],
        "engine_version": document["engine_version"],
        "model": document["model"],
        "spec": document["spec"] or document["model"],
        "precision": document["precision"],
        "tp": split["tp"],
        "ep": split["ep"],
        "phase": phase,
        "mode": _mode(document, phase),
        "batch": work["batch"],
        "prompt_len": work["prompt_len"],
        "context_len": context,
        "latency_s": found["latency_s"],
        "energy_j": found["energy_j"],
        "mean_power_w": found["mean_power_w"],
        "sm_clock_mhz": found["sm_clock_mhz"],
        "gpu_temp_c": found["gpu_temp_c"],
        "ticks": found["ticks"],
        "regime": found["regime"],
        "board_uuid": _joined(g["board_uuid"] for g in gpus),
        "board_power_w": _joined(g["mean_power_w"] for g in gpus),
        **{
            f"anchor_{name}": _joined(b.get(name) for b in boards)
            for name in ("idle_w", "stream_w", "gemm_w", "gemm_mhz", "gemm_tflops", "gemv_gbs")
        },
        "replicas": split["replicas"],
        "power_limit_w": document["environment"].get("power_limit_w"),
        "gen_len": work["gen_len"],
        "host_launch_us": (anchors["host"] or {}).get("launch_us"),
    }


def _mode(document: Mapping[str, Any], phase: str) -> str | None:
    """Launch mode of a phase; of a request, that of its decode steps."""
    modes = document["modes"]
    found: str | None = modes.get(phase)
    return modes.get("decode") if phase == "request" and found is None else found


def _joined(values: Iterator[Any]) -> str:
    """One cell for all boards; empty where none has the value."""
    cells = [_cell(v) for v in values]
    return ";".join(cells) if any(cells) else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _subject(document: Mapping[str, Any]) -> str:
    degrees = "".join(f", {name} {n}" for name, n in document["parallelism"].items() if n > 1)
    work = document["workload"]
    return (
        f"{document['model']} on {document['n_gpus']} x {document['device_name']}, engine "
        f"{document['engine']} {document['engine_version']}{degrees}, {document['precision']}: "
        f"batch {work['batch']}, prompt {work['prompt_len']}, generate {work['gen_len']}, decode "
        f"context {work['context_len']:g}"
    )


def _latency_table(document: Mapping[str, Any], measured: list[str]) -> Table:
    rows = []
    for phase in measured:
        found = document[phase]
        t = found["latency"]
        half = (t["ci95"][1] - t["ci95"][0]) / 2
        rows.append(
            (
                _LABELS[phase][0],
                quantity(t["mean"], "s"),
                quantity(half, "s"),
                *(quantity(t[p], "s") for p in ("p50", "p90", "p99", "std")),
                str(found["n"]),
                str(found["n_outliers"]),
                _mode(document, phase) or "-",
                found["regime"] or "-",
            )
        )
    columns = (
        "",
        "mean",
        "± 95 %",
        "p50",
        "p90",
        "p99",
        "std",
        "n",
        "outliers",
        "mode",
        "waits for",
    )
    return table("latency", columns, rows, text=(0, 9, 10))


def _energy_table(document: Mapping[str, Any], measured: list[str]) -> Table:
    rows = []
    for phase in measured:
        found = document[phase]
        _, label, name = _LABELS[phase]
        sequences = document["workload"]["batch"] * document["parallelism"]["replicas"]
        net = found["net_energy_j"]
        error = found["energy_rel_se"]
        rows.append(
            (
                label,
                quantity(document[name], "J"),
                quantity(None if net is None else net / sequences, "J"),
                quantity(found["energy_j"], "J"),
                "-" if error is None else f"{100 * error:.1f} %",
                quantity(found["mean_power_w"], "W"),
                "-" if found["sm_clock_mhz"] is None else f"{found['sm_clock_mhz']:.0f} MHz",
                "-" if found["gpu_temp_c"] is None else f"{found['gpu_temp_c']:.0f} °C",
            )
        )
    columns = ("", "gross", "net of idle", "per step", "± (1 s)", "per GPU", "SM clock", "hottest")
    return table("energy", columns, rows, text=(0,))


def _gpu_table(document: Mapping[str, Any], measured: list[str]) -> Table:
    rows = [
        (
            phase,
            gpu["board_uuid"],
            quantity(gpu["energy_j"], "J"),
            quantity(gpu["mean_power_w"], "W"),
            "-" if gpu["sm_clock_mhz"] is None else f"{gpu['sm_clock_mhz']:.0f} MHz",
        )
        for phase in measured
        for gpu in document[phase]["per_gpu"]
    ]
    return table("per GPU", ("phase", "board", "per step", "power", "SM clock"), rows, text=(0, 1))


def _kind_table(kernels: Sequence[Mapping[str, Any]]) -> Table:
    sums: dict[tuple[str, str], list[float]] = {}
    for row in kernels:
        parts = sums.setdefault((row["phase"], row["kind"]), [0.0, 0.0, 0.0])
        for i, name in enumerate(("count", "latency_s", "share")):
            parts[i] += row[name]
    order = list(dict.fromkeys(row["phase"] for row in kernels))
    rows = [
        (phase, kind, f"{count:g}", quantity(seconds, "s"), f"{100 * share:.1f} %")
        for (phase, kind), (count, seconds, share) in sorted(
            sums.items(), key=lambda item: (order.index(item[0][0]), -item[1][1])
        )
    ]
    columns = ("phase", "op kind", "launches", "per step", "share")
    return table("kernel time, profiled pass", columns, rows, text=(0, 1))


def _kernel_table(kernels: Sequence[Mapping[str, Any]]) -> Table:
    longest = sorted(kernels, key=lambda row: -row["latency_s"])
    rows = [
        (row["phase"], row["kind"], row["op"], f"{row['count']:g}", quantity(row["latency_s"], "s"))
        for phase in dict.fromkeys(row["phase"] for row in kernels)
        for row in [r for r in longest if r["phase"] == phase][:_LONGEST]
    ]
    columns = ("phase", "op kind", "kernel", "launches", "per step")
    return table("longest kernels", columns, rows, text=(0, 1, 2), wrap=(2,))


def _throttle_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for check in checks:
        reasons = (f"{name} {100 * part:.0f} %" for name, part in check["reasons"].items())
        said = {True: "yes", False: "no", None: "-"}
        rows.append(
            (
                check["phase"],
                check["board_uuid"],
                _range(check["temperature_c"], "°C"),
                _range(check["sm_clock_mhz"], "MHz"),
                _range(check["power_w"], "W"),
                said[check["throttled"]],
                ", ".join(reasons) or "-",
            )
        )
    columns = ("phase", "board", "temperature", "SM clock", "power", "throttled", "clock events")
    return table("throttle check", columns, rows, text=(0, 1, 5, 6), wrap=(6,))


def _range(spread: Mapping[str, float] | None, unit: str) -> str:
    return "-" if spread is None else f"{spread['low']:.0f} to {spread['high']:.0f} {unit}"


def _lines(document: Mapping[str, Any], measured: list[str]) -> Iterator[str]:
    memory = document["memory"]
    sizes = {
        "model": document["model_size_gb"] and document["model_size_gb"] * BYTES_PER_GB,
        "weights per GPU": memory["weights_bytes"],
        "cache per GPU": memory["kv_cache_bytes"],
        "predicted": memory["predicted_kv_cache_bytes"],
        "peak": memory["peak_bytes"],
    }
    listed = ", ".join(f"{name} {_size(n)}" for name, n in sizes.items() if n is not None)
    if listed:
        yield f"memory: {listed}"
    rates = {
        "tokens/s": document["throughput_tokens_s"],
        "tokens/J": document["tokens_per_j"],
    }
    used = {
        "of the memory bandwidth (decode)": document["bandwidth_utilisation"],
        "of the bf16 peak (prefill)": document["compute_utilisation"],
    }
    parts = [f"{digits(v)} {name}" for name, v in rates.items() if v is not None]
    parts += [f"{100 * v:.1f} % {name}" for name, v in used.items() if v is not None]
    if parts:
        yield ", ".join(parts)
    if document["tpot_s"] is not None:
        yield f"(TTLT - TTFT) / (generated - 1): {quantity(document['tpot_s'], 's')}"
    for name, value in document["metrics"].items():
        yield f"{name}: {value}"
    for phase, check in document["environment"].get("graph_checks", {}).items():
        entries = check["entries_distance"]
        also = "" if entries is None else f", new cache entries by {100 * entries:.2f} %"
        yield (
            f"{phase}, captured against eager: logits differ by "
            f"{100 * check['logits_distance']:.2f} %{also}, same token in "
            f"{100 * check['same_tokens']:.0f} %"
        )
    for phase in measured:
        if document[phase]["flags"]:
            yield f"{phase}: {', '.join(document[phase]['flags'])}"
    if document["breakdown"]:
        yield "op kinds beside the prediction: energylens validate FILE, for the file of -o"
    for note in document["environment"].get("notes", ()):
        yield f"note: {note}"
    if document["energy_reason"] is not None:
        yield f"no energy: {document['energy_reason']}"
    for reason in document["reasons"]:
        yield f"not valid: {reason}"


def _size(count: float) -> str:
    return f"{digits(count / BYTES_PER_GB)} GB ({digits(count / _BYTES_PER_GIB)} GiB)"
