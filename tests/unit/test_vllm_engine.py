"""The real engine's stepping and the recorded comparison, as far as they run without a GPU."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from energylens.bench import vllm_engine
from energylens.bench.vllm_engine import HOST_STEPS, WHOLE_STEPS, shrunk
from energylens.cost.features import step_shape
from energylens.graph import SPLIT_TOKENS
from energylens.lower import lower_step
from energylens.spec.load import load_spec
from energylens.spec.machines import load_engine
from energylens.spec.system import Mode, Parallelism, Step

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "vllm_llama3_8b.json"
VLLM = load_engine("vllm")


# ---------------------------------------------------------------- shrunk models


@pytest.mark.parametrize(
    ("spec", "workers", "ranks"),
    [
        # An eighth of hidden size, MLP and heads; at least a KV head for each worker.
        ("llama3_8b", 1, {"m": 512, "f": 1792, "g": 1, "r": 4, "d": 128, "v": 4096}),
        ("llama3_8b", 2, {"m": 512, "f": 1792, "g": 2, "r": 2, "d": 128, "v": 4096}),
        ("qwen3_32b", 1, {"m": 640, "f": 3200, "g": 1, "r": 8, "d": 128, "v": 4096}),
        ("llama3_2_1b", 1, {"m": 256, "f": 1024, "g": 1, "r": 4, "d": 64, "v": 4096}),
    ],
)
def test_a_shrunk_model_has_an_eighth_of_its_widths(
    spec: str, workers: int, ranks: dict[str, int]
) -> None:
    small = shrunk(load_spec(spec), 2, workers)
    assert {name: small.ranks[name] for name in ranks} == ranks


@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_shrunk_model_is_lowered_with_its_layers(layers: int, workers: int) -> None:
    small = shrunk(load_spec("llama3_8b"), layers, workers)
    step = Step.prefill(16, 32, Mode.SERVING)
    ops = lower_step(small, VLLM, Parallelism(tp=workers), step)
    assert isinstance(ops, tuple)
    shape = step_shape(ops)
    assert (shape.sequences, shape.tokens, shape.layers) == (16, 512, layers)
    by_name = {op.name: op for op in ops}
    assert by_name["embed"].count == by_name["lm_head"].count == 1
    assert by_name["gate+up"].shape == (512, 2 * 1792 / workers, 512)


def test_host_steps_tell_sequences_tokens_and_capture_apart() -> None:
    prefills = [
        (batch, batch * length) for phase, batch, length in HOST_STEPS if phase == "prefill"
    ]
    assert len({batch for batch, _ in prefills}) >= 3
    assert len({tokens for _, tokens in prefills}) >= 3
    assert {tokens <= SPLIT_TOKENS for _, tokens in prefills} == {True, False}
    assert len({batch for phase, batch, _ in HOST_STEPS if phase == "decode"}) >= 3
    assert {phase for phase, _, _ in WHOLE_STEPS} == {"prefill", "decode"}


# ---------------------------------------------------------------- windows


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds of the monotonic clock, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(vllm_engine.time, "monotonic", lambda: now[0])
    yield now


def test_a_window_starts_after_settling_and_counts_whole_steps(clock: list[float]) -> None:
    durations = itertools.chain([0.9, 0.3, 0.2], itertools.repeat(0.1))

    def once() -> None:
        clock[0] += next(durations)

    found = vllm_engine._repeat(once, 1.0, 0.95, lambda repeats: 64 + 1 + repeats)
    # Three steps of 1.4 s settle; then ten of 0.1 s, the first whole window of 0.95 s.
    assert found.start_s == pytest.approx(101.4)
    assert found.times_s == pytest.approx([0.1] * 10)
    assert found.end_s == pytest.approx(102.4)
    assert found.mean_s == pytest.approx(0.1)
    # Steps 4 to 13, counted from zero: 3 before, and a middle of 4.5.
    assert found.context == 64 + 1 + 3 + 4.5


def test_slow_steps_are_repeated_five_times_at_least(clock: list[float]) -> None:
    def once() -> None:
        clock[0] += 2.0

    found = vllm_engine._repeat(once, 1.0, 1.5, lambda repeats: 7.0)
    assert len(found.times_s) == 5
    assert found.start_s == pytest.approx(106.0)


def test_what_the_user_put_into_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vllm_engine._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    vllm_engine.prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


# ---------------------------------------------------------------- the comparison


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return importlib.import_module("vllm_reference")


def test_the_traffic_of_a_run_is_the_same_each_time(reference: ModuleType) -> None:
    one = reference.traffic()
    assert one == reference.traffic()
    assert one != reference.traffic(seed=2)
    assert one["arrivals_s"] == sorted(one["arrivals_s"])
    assert one["arrivals_s"][-1] < 70.0
    assert len(one["arrivals_s"]) == pytest.approx(1400, abs=4 * 1400**0.5)
    for name, least, most in (("prompt_len", 64, 4096), ("gen_len", 16, 600)):
        assert least <= min(one[name]) <= max(one[name]) <= most
    served = json.loads(RESULT.read_text(encoding="utf-8"))["serving"]["requests"]
    asked = zip(one["arrivals_s"], one["prompt_len"], one["gen_len"], strict=True)
    assert [tuple(r[:3]) for r in served] == list(asked)


def test_compare_prints_a_line_for_everything_that_was_measured(
    reference: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.compare(RESULT)
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    for row in document["rows"]:
        (line,) = (x for x in lines if f"{row['batch']}x{row['prompt_len']} " in x and " J " in x)
        assert f"{row['latency_s'] * 1e3:.2f} ms" in line
    for row in document["profiles"]:
        kinds = {reference.kind_of(name) for name in row["kernels"]}
        start = lines.index(
            f"kernels of {row['phase']} {row['batch']}x{row['prompt_len']}, no cap, host or gap:"
        )
        assert {x.split()[0] for x in lines[start + 1 : start + 2 + len(kinds)]} == kinds | {"all"}
    (head,) = (x for x in lines if x.startswith("continuous batching: "))
    assert f" {len(document['serving']['requests'])} requests" in head
    after = lines[lines.index(head) + 1 :]
    assert len(after) == 6
