"""Predictions do not move unseen; ``python tests/golden/refresh.py`` writes them anew."""

from __future__ import annotations

import json
from typing import Any

import pytest
from refresh import CASES, FOLDER, golden


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a document by their path."""
    if isinstance(value, dict):
        parts = {f"{path}.{name}": item for name, item in value.items()}
    elif isinstance(value, list):
        parts = {f"{path}[{i}]": item for i, item in enumerate(value)}
    else:
        return {path: value}
    return {k: v for name, item in parts.items() for k, v in flat(item, name).items()}


@pytest.mark.parametrize("case", CASES)
def test_prediction_is_the_golden_one(case: str) -> None:
    kept = flat(json.loads((FOLDER / f"{case}.json").read_text(encoding="utf-8")))
    now = flat(golden(case))
    assert now.keys() == kept.keys()
    for name, value in kept.items():
        if isinstance(value, float):
            # Other processors round a matrix product differently.
            assert now[name] == pytest.approx(value, rel=1e-4), name
        else:
            assert now[name] == value, name
