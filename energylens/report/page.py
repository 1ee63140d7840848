"""The front as one self-contained page: charts, filters, a table; it loads nothing from anywhere.

The charts are drawn by Chart.js (MIT licence), which the page holds: 210 kB, where plotting
libraries with more in them take megabytes. `web/page.js` draws what `_data` hands over.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from energylens.report.frontier import (
    FRONT_COLUMNS,
    count_lines,
    layout_name,
    pool_lines,
    pool_names,
    price_lines,
    provenance,
    trade_lines,
)
from energylens.report.launch import PredictCommand, command_lines
from energylens.report.prediction import memory_line
from energylens.results import Prediction
from energylens.results.search import Frontier, ScoredConfig

_WEB = Path(__file__).parent / "web"
_FIELDS = {
    "energy_per_token_j": ("energy per token", "J"),
    "energy_per_request_j": ("energy per request", "J"),
    "energy_per_prompt_j": ("energy per prompt", "J"),
    "tpot_s": ("TPOT", "s"),
    "ttft_s": ("TTFT", "s"),
    "ttlt_s": ("TTLT", "s"),
    "throughput_tokens_s": ("tokens/s", ""),
    "throughput_per_gpu_tokens_s": ("tokens/s per GPU", ""),
    "total_power_w": ("total power", "W"),
    "gpus": ("GPUs", "count"),
    "cost_per_million_tokens": ("cost of 1 M tokens", "money"),
    "cost_per_request": ("cost of a request", "money"),
    "carbon_per_million_tokens_g": ("CO2e of 1 M tokens", "g"),
    "carbon_per_request_g": ("CO2e of a request", "g"),
}
"""Value of a configuration -> how the page calls it, and its unit."""

_DIGITS = 10
"""Of values: with fewer, what is on the front by a hair would not be on the page's."""


def frontier_page(frontier: Frontier, predict_command: PredictCommand) -> str:
    """The page, as HTML.

    Args:
        frontier: what was found.
        predict_command: as for `frontier_document`.
    """
    data = json.dumps(_data(frontier, predict_command), allow_nan=False, separators=(",", ":"))
    chart = (_WEB / "chart.umd.min.js").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(f"{frontier.spec} on {pool_names(frontier)}: energy and latency"),
        "css": (_WEB / "page.css").read_text(encoding="utf-8"),
        "data": data.replace("<", "\\u003c"),  # so that no text in it can end the script
        "chart": chart.partition("//# sourceMappingURL")[0],
        "script": (_WEB / "page.js").read_text(encoding="utf-8"),
    }
    first, *rest = (_WEB / "page.html").read_text(encoding="utf-8").split("@")
    # The template alternates between its text and the names of what goes between.
    return first + "".join(parts[text] if i % 2 == 0 else text for i, text in enumerate(rest))


def _data(f: Frontier, predict_command: PredictCommand) -> dict[str, Any]:
    """What the page's script draws."""
    from energylens.explore.front import LIMITED, OBJECTIVES

    numbers: dict[str, int] = {}
    layouts = [numbers.setdefault(layout_name(f, c), len(numbers)) for c in f.configs]
    names = [name for name in _FIELDS if any(name in c.values for c in f.configs)]
    objectives = [
        {"name": name, "value": OBJECTIVES[name][0], "sign": OBJECTIVES[name][1]}
        for name in f.objectives
    ]
    across = [o["value"] for o in objectives[1:] if o["value"] != "gpus"] + ["tpot_s", "ttft_s"]
    up = objectives[0]["value"]
    return {
        "heading": f"{f.spec} on {pool_names(f)}",
        "subject": (
            f"engine {f.engine}, prompt {f.prompt_len}, generate {f.gen_len}; objectives "
            f"{', '.join(f.objectives)}"
        ),
        "level": f"{100 * f.level:g} %",
        "table_error": f"{100 * f.table_error:g} %",
        "fields": [{"name": n, "label": _FIELDS[n][0], "unit": _FIELDS[n][1]} for n in names],
        "columns": [name for name in FRONT_COLUMNS if name in names],
        "objectives": objectives,
        "axes": [next(name for name in across if name in names and name != up), up],
        "phase": "decode" if "tpot_s" in names else "prefill",
        "batch_of": "energy_per_token_j" if "tpot_s" in names else "energy_per_prompt_j",
        "limits": [
            {
                "name": name,
                "value": value,
                "sign": sign,
                "label": _FIELDS[value][0],
                "given": f.constraints.get(name),
            }
            for name, (value, sign) in LIMITED.items()
            if value in names
        ],
        "layouts": list(numbers),
        "configs": {
            "layout": layouts,
            "batch": [c.batch for c in f.configs],
            "prefills": [c.prefill.batch if c.prefill else None for c in f.configs],
            "values": {n: [_number(c.values.get(n)) for c in f.configs] for n in names},
        },
        "exact": [
            _exact(f, i, c, c.prediction, predict_command)
            for i, c in enumerate(f.configs)
            if c.prediction is not None
        ],
        "facts": [
            *pool_lines(f),
            *trade_lines(f),
            *price_lines(f),
            *(line.strip() for line in count_lines(f)),
            *f.notes,
            provenance(f),
        ],
    }


def _exact(
    f: Frontier, index: int, c: ScoredConfig, p: Prediction, predict_command: PredictCommand
) -> dict[str, Any]:
    """All that is known of an exactly predicted configuration."""
    return {
        "index": index,
        "intervals": {name: [_number(end) for end in c.intervals[name]] for name in c.intervals},
        "memory": memory_line(p.memory).partition(": ")[2],
        "source": str(p.source),
        "launch": list(command_lines(f, c, predict_command).items()),
        "breakdown": [
            {
                "phase": row.phase,
                "kind": row.kind.value,
                "op": row.op,
                "latency_s": _number(row.latency_s),
                "energy_j": _number(row.energy_j),
                "source": str(row.source),
            }
            for row in p.breakdown
        ],
        "by_context": [
            [point.context_len, *map(_number, (point.energy_per_token_j, *point.interval_j))]
            for point in c.by_context
        ],
    }


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
