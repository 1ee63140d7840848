"""Write the golden predictions anew: ``python tests/golden/refresh.py``. Review the difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energylens.predict import Catalogue, predict
from energylens.report import prediction_document
from energylens.results import Infeasible
from energylens.spec.system import Config, Parallelism, Workload

FOLDER = Path(__file__).parent
DIGITS = 6

CASES = {
    "llama3_8b-h200-hf-tp1": ("llama3_8b", "h200", 1, Workload()),
    "llama3_8b-h200-hf-tp2-b16": ("llama3_8b", "h200", 2, Workload(batch=16, prompt_len=2048)),
    "llama3_70b-h200-hf-tp2": ("llama3_70b", "h200", 2, Workload()),
    "llama3_2_1b-a6000-hf-tp1": ("llama3_2_1b", "a6000", 1, Workload(batch=4)),
}


def golden(case: str) -> dict[str, Any]:
    """The document of a case as it is kept: without the breakdown, numbers to six digits."""
    spec, device_name, tp, workload = CASES[case]
    catalogue = Catalogue()
    engine, device = catalogue.engine("hf"), catalogue.device(device_name)
    result = predict(
        catalogue.spec(spec),
        engine=engine,
        device=device,
        config=Config(parallelism=Parallelism(tp=tp)),
        workload=workload,
        bundles=catalogue.bundles(device, engine),
        link=catalogue.link(device, tp),
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
