"""Write the golden predictions anew: ``python tests/golden/refresh.py``. Review the difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energylens.predict import Catalogue, predict
from energylens.report.prediction import prediction_document
from energylens.results import Infeasible
from energylens.spec.system import Config, Parallelism, Workload

FOLDER = Path(__file__).parent
DIGITS = 6

ONE, TWO = Parallelism(), Parallelism(tp=2)
CASES = {
    "llama3_8b-h200-hf-tp1": ("llama3_8b", "h200", "hf", ONE, Workload()),
    "llama3_8b-h200-hf-tp2-b16": (
        "llama3_8b", "h200", "hf", TWO, Workload(batch=16, prompt_len=2048),
    ),
    "llama3_70b-h200-hf-tp2": ("llama3_70b", "h200", "hf", TWO, Workload()),
    "llama3_2_1b-a6000-hf-tp1": ("llama3_2_1b", "a6000", "hf", ONE, Workload(batch=4)),
    "gpt_oss_20b-h200-vllm-tp1": ("gpt_oss_20b", "h200", "vllm", ONE, Workload(batch=8)),
    "deepseek_v3-h200-vllm-tp8": (
        "deepseek_v3", "h200", "vllm", Parallelism(tp=8), Workload(batch=32),
    ),
    "deepseek_v3-h200-vllm-tp8-ep8": (
        "deepseek_v3", "h200", "vllm", Parallelism(tp=8, ep=8), Workload(),
    ),
    "qwen3_235b-h200-vllm-tp4-ep4": (
        "qwen3_235b", "h200", "vllm", Parallelism(tp=4, ep=4), Workload(batch=16),
    ),
    "llama3_1_405b-h200-vllm-tp8": (
        "llama3_1_405b", "h200", "vllm", Parallelism(tp=8), Workload(),
    ),
}  # fmt: skip


def golden(case: str) -> dict[str, Any]:
    """The document of a case as it is kept: without the breakdown, numbers to six digits."""
    spec, device_name, engine_name, parallelism, workload = CASES[case]
    catalogue = Catalogue()
    engine, device = catalogue.engine(engine_name), catalogue.device(device_name)
    result = predict(
        catalogue.spec(spec),
        engine=engine,
        device=device,
        config=Config(parallelism=parallelism),
        workload=workload,
        bundles=catalogue.bundles(device, engine),
        link=catalogue.link(device, parallelism.gpus),
    )
    if isinstance(result, Infeasible):
        raise SystemExit(f"{case}: {result.reason}")
    document = {k: v for k, v in prediction_document(result).items() if k != "breakdown"}
    return dict(_rounded(document))


def _rounded(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield name, dict(_rounded(value))
        elif isinstance(value, float):
            yield name, float(f"{value:.{DIGITS}g}")
        elif isinstance(value, list) and all(isinstance(v, float) for v in value):
            yield name, [float(f"{v:.{DIGITS}g}") for v in value]
        else:
            yield name, value


if __name__ == "__main__":
    for name in CASES:
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(golden(name), indent=1) + "\n", encoding="utf-8")
