"""Documents of measured runs (``energylens/profile/v1``), made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PHASE: dict[str, Any] = {
    "latency_s": 0.01,
    "energy_j": 5.0,
    "mean_power_w": 500.0,
    "total_power_w": 500.0,
    "net_energy_j": 3.8,
    "context_len": None,
    "n": 400,
    "latency": {
        "mean": 0.01,
        "p50": 0.01,
        "p90": 0.0101,
        "p99": 0.0102,
        "std": 0.0001,
        "ci95": [0.00999, 0.01001],
    },
    "n_outliers": 1,
    "energy_rel_se": 0.002,
    "sm_clock_mhz": 1980.0,
    "gpu_temp_c": 55.0,
    "regime": "device",
    "ticks": 40,
    "per_gpu": [
        {
            "board_uuid": "dca3955ee6",
            "energy_j": 5.0,
            "mean_power_w": 500.0,
            "sm_clock_mhz": 1980.0,
            "gpu_temp_c": 55.0,
        }
    ],
    "valid": True,
    "flags": [],
}
RUN: dict[str, Any] = {
    "schema": "energylens/profile/v1",
    "record_id": "run",
    "time": "2026-11-30T10:00:00Z",
    "model": "meta-llama/Llama-3.1-8B",
    "spec": "llama3_8b",
    "device": "h200",
    "device_name": "NVIDIA H200",
    "engine": "hf",
    "engine_version": "5.17.0",
    "precision": "bf16",
    "parallelism": {"replicas": 1, "dp": 1, "tp": 1, "pp": 1, "ep": 1},
    "n_gpus": 1,
    "workload": {"batch": 16, "prompt_len": 1024, "gen_len": 128, "context_len": 1088.0},
    "modes": {"prefill": "eager", "decode": "cuda_graph"},
    "memory": {"weights_bytes": 16060522496, "kv_cache_bytes": None},
    "prefill": None,
    "decode": None,
    "request": None,
    "ttft_s": None,
    "tpot_s": None,
    "ttlt_s": None,
    "breakdown": None,
    "throttle": None,
    "anchors": None,
    "environment": {},
    "meter": {},
    "power_timeline": None,
    "valid": True,
    "reasons": [],
    "energy_reason": None,
}


def phase(latency_s: float = 0.01, energy_j: float | None = 5.0, **fields: Any) -> dict[str, Any]:
    """A measured phase whose latency is known to 0.1 % and its energy to 0.4 %."""
    interval = [0.999 * latency_s, 1.001 * latency_s]
    latency = {**PHASE["latency"], "mean": latency_s, "ci95": interval}
    return {**PHASE, "latency_s": latency_s, "energy_j": energy_j, "latency": latency, **fields}


def run(**fields: Any) -> dict[str, Any]:
    """A document with these fields; what is an object is merged."""
    document = json.loads(json.dumps(RUN))
    for name, value in fields.items():
        old = document.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        document[name] = old | value if both else value
    return document


def write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
