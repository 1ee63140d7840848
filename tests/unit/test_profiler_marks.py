"""Marks around the modules of real models, and the traces that the installed torch writes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from energylens.meter.base import DeviceSeries
from energylens.profiler.marks import marked
from energylens.profiler.trace import MARK, annotate, kernel_table
from energylens.results import Kind

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
DENSE = {Kind.GEMM: 2 * 7 + 1, Kind.NORM: 2 * 2 + 1, Kind.COPY: 1 + 2, Kind.ELEMENTWISE: 2 * 3}
# The router and the experts are one op; queries and keys have norms of their own.
MOE = {Kind.GEMM: 2 * 4 + 1, Kind.NORM: 2 * 4 + 1, Kind.COPY: 1 + 2, Kind.ELEMENTWISE: 2 * 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (("LlamaConfig", {}), {**DENSE, Kind.OVERHEAD: 1}),
        (
            (
                "Qwen3MoeConfig",
                {
                    "num_experts": 4,
                    "num_experts_per_tok": 2,
                    "head_dim": 16,
                    "moe_intermediate_size": 32,
                },
            ),
            {**MOE, Kind.MOE: 2, Kind.OVERHEAD: 1},
        ),
    ],
)
def test_every_part_of_a_model_is_marked_and_computes_the_same(
    tmp_path: Path, config: tuple[str, dict[str, Any]], expected: dict[Kind, int]
) -> None:
    made = getattr(transformers, config[0])(**SIZES, **config[1])
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    ids = torch.arange(8)[None]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.inference_mode():
        plain = model(ids).logits
        with marked(model), torch.profiler.profile(activities=activities) as run:
            assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())
    path = tmp_path / "trace.json.gz"
    run.export_chrome_trace(str(path))
    marks = Counter(e.name for e in run.events() if e.name.startswith(MARK))
    assert marks == {MARK + kind: n for kind, n in expected.items()}
    assert kernel_table(path) == ()  # nothing ran on a GPU


def test_marks_are_taken_off_after_a_failure() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(KeyError), marked(model):
        raise KeyError
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_trace_of_the_installed_torch_gets_counters(tmp_path: Path) -> None:
    import time

    source, out = tmp_path / "trace.json", tmp_path / "out.json"
    start = time.monotonic()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        torch.ones(64, 64) @ torch.ones(64, 64)
    end = time.monotonic()
    run.export_chrome_trace(str(source))
    series = DeviceSeries(uuid="GPU-a", instant_power=((start, 100.0), ((start + end) / 2, 200.0)))
    annotate(source, {0: series}, out, unix_offset_s=time.time() - time.monotonic())
    events = json.loads(out.read_text())["traceEvents"]
    (matmul,) = (e for e in events if e.get("name") == "aten::matmul")
    found = [e for e in events if e["ph"] == "C"]
    assert {e["args"]["W"] for e in found} == {100.0, 200.0}
    assert all(abs(e["ts"] - matmul["ts"]) < 1e6 * (end - start) + 1e3 for e in found)
