"""The comparison with a real model: what runs without a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "hf_llama3_8b.json"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return importlib.import_module("hf_reference")


def test_compare_prints_a_line_for_everything_that_was_measured(
    reference: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.compare(RESULT)
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    kinds = [kind for row in document["profiles"] for kind in row["kernel_s"]]
    profiled = [line for line in lines if line.endswith("%") and " J " not in line]
    assert len(profiled) == len(kinds) + len(document["profiles"])  # and one sum for each
    whole = [line for line in lines if " J " in line]
    assert len(whole) == len(document["rows"])
    for line, row in zip(whole, document["rows"], strict=True):
        assert f"{row['batch']}x{row['prompt_len']}" in line
        assert f"{row['latency_s'] * 1e3:.2f} ms" in line
