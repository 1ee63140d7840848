"""A service under traffic, or why it cannot be, as a JSON document and as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from energylens.anchors import anchors_to_json
from energylens.report.prediction import machine_line, parallelism_document
from energylens.report.table import digits, prefix, quantity, source_line, table
from energylens.results import Infeasible
from energylens.results.service import ServingResult
from energylens.spec.system import Parallelism

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SERVING_SCHEMA = "energylens/serving/v1"


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
        **parallelism_document(r.parallelism),
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
        **parallelism_document(parallelism),
        "feasible": False,
        "reason": infeasible.reason,
        "bundles": [],
        "notes": [],
        "null_reasons": {},
    }


def serving_table(result: ServingResult) -> RenderableType:
    """Latencies, energy, power and load of a service, and the sources."""
    from rich.console import Group

    return Group(
        _service_line(result),
        _latency_table(result),
        _service_table(result),
        *(f"note: {note}" for note in result.notes),
        source_line(result),
    )


def _service_line(r: ServingResult) -> str:
    t = r.traffic
    rate = "at one time" if t.rate_per_s is None else f"at {t.rate_per_s:.4g}/s"
    return (
        f"{machine_line(r.spec, r.device, r.engine, r.parallelism)}: "
        f"{t.requests} requests {rate} ({t.arrivals}), prompt {t.prompt_len.mean:.0f} (most "
        f"{t.prompt_len.max}), generate {t.gen_len.mean:.0f} (most {t.gen_len.max})"
    )


def _latency_table(r: ServingResult) -> Table:
    rows = [
        (name, *(quantity(getattr(p, key), "s") for key in ("mean", "p50", "p90", "p99")))
        for name, p in (("TTFT", r.ttft_s), ("TPOT", r.tpot_s), ("end to end", r.e2e_s))
        if p is not None
    ]
    return table("", ("", "mean", "p50", "p90", "p99"), rows, text=(0,))


def _service_table(r: ServingResult) -> Table:
    factor, letter = prefix(r.energy_per_request_j, "J")
    ends = " .. ".join(digits(end / factor) for end in r.interval.energy_per_request_j)
    busy, cache, rate = f"busy {100 * r.utilisation:.1f} %", r.kv_cache, r.traffic.rate_per_s
    load = "" if rate is None else f"load {100 * rate / r.saturation_rate_per_s:.0f} %, "
    rows = [
        ("J/request", quantity(r.energy_per_request_j, "J"), f"{ends} {letter}J"),
        ("J/token", quantity(r.energy_per_token_j, "J"), ""),
        ("W/GPU", quantity(r.mean_power_w, "W"), f"{r.total_power_w:.4g} W in all"),
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
    return table("", ("", "value", interval), rows, text=(0, 2))
