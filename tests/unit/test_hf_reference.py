"""The comparison with a real model: what runs without a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def event(name: str, above: object = None, *durations_us: float) -> SimpleNamespace:
    kernels = [SimpleNamespace(duration=d) for d in durations_us]
    return SimpleNamespace(name=name, cpu_parent=above, kernels=kernels)


def test_a_kernel_counts_to_the_nearest_mark_above_its_launch(reference: ModuleType) -> None:
    layer = event("energylens::elementwise")
    norm = event("energylens::norm", layer)
    sdpa = event("aten::scaled_dot_product_attention", layer)
    events = [
        layer,
        norm,
        sdpa,
        event("aten::add", layer, 10.0),
        event("aten::mul", event("aten::pow", norm), 20.0, 5.0),
        event("aten::_flash_attention", sdpa, 40.0),
        event("aten::arange", None, 2.0),
    ]
    seconds = reference.kernel_seconds(events, 2)
    assert seconds == pytest.approx(
        {"elementwise": 5e-6, "norm": 12.5e-6, "attention": 20e-6, "overhead": 1e-6}
    )
