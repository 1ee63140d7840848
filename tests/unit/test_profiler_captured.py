"""What the check of captured decode catches and what it lets pass, on a small random model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from energylens.profiler.captured import Graph, distance  # noqa: E402
from energylens.profiler.hf import HfEngine  # noqa: E402
from energylens.profiler.loader import LoadedModel, Place  # noqa: E402
from energylens.profiler.options import ProfileRequest  # noqa: E402

PROMPT, VOCABULARY, GENERATED = 48, 500, 6


class Replayed(Graph):
    """A graph without CUDA: what it would replay is launched each time."""

    def capture(self) -> None:
        start = self._position()
        self._body()
        self._put_back(start)

    def step(self) -> None:
        self._logits = self._body()

    def run(self) -> Any:
        self.step()
        return self._logits


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    return LoadedModel(
        model=model, config=config, weights="random", precision="bf16", model_bytes=1.0
    )


class Engine(HfEngine):
    """Captures although there is no GPU, and lets a test spoil the graph before it is checked."""

    spoil: Callable[[Any], None] = staticmethod(lambda graph: None)

    def _captured(self, length: int, rewind: int | None = None) -> Graph:
        graph = Replayed(self.forward, self.loaded.config, self._ids[:, :1], length, rewind)
        capture = graph.capture

        def capture_and_spoil() -> None:
            capture()
            self.spoil(graph)

        graph.capture = capture_and_spoil  # type: ignore[method-assign]
        return graph


def engine(loaded: LoadedModel, spoil: Callable[[Any], None] | None = None) -> Engine:
    request = ProfileRequest(
        model="tiny", batch=4, prompt_len=PROMPT, gen_len=GENERATED, cache_graph=True
    )
    made = Engine(request, loaded, Place(device="cpu"))
    if spoil is not None:
        made.spoil = spoil  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("phase", ["decode", "request"])
def test_a_right_graph_agrees(loaded: LoadedModel, phase: str) -> None:
    found = engine(loaded)
    with found.stepper(phase) as stepper:
        stepper.step()
        stepper.step()
        stepper.eager()
    check = found.graph_checks[phase]
    assert check["steps"] == (1 if phase == "decode" else GENERATED - 1)
    assert check["logits_distance"] < 0.05
    assert check["entries_distance"] < 0.01
    assert found.modes == {"prefill": "eager", "decode": "eager", "request": "eager"} | {
        phase: "cuda_graph"
    }
    assert found.notes == []


def test_a_captured_request_generates_what_the_eager_one_does(loaded: LoadedModel) -> None:
    """The model's own generate is the independent one."""
    found = engine(loaded)
    graphs: list[Graph] = []
    found.spoil = graphs.append  # type: ignore[method-assign]
    ids = found._ids[:, :PROMPT]
    expected = loaded.model.generate(
        ids, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False, pad_token_id=0
    )
    with found.stepper("request") as stepper:
        stepper.step()
    assert graphs[0].token[:, 0].tolist() == expected[:, -1].tolist()


def stale_cache(graph: Any) -> None:
    """What other prompts left."""
    fill = graph.fill
    graph.fill = lambda ids: fill(ids.flip(0))
    for layer in graph._cache.layers:
        layer.keys.copy_(layer.keys.flip(0))
        layer.values.copy_(layer.values.flip(0))


def frozen_slot(graph: Any) -> None:
    """The length of the capture for ever, as over a cache that concatenates."""
    forward = graph._forward

    def frozen(ids: Any, cache: Any) -> Any:
        if ids.shape[1] == 1:
            graph._lengths.fill_(PROMPT // 2)
        return forward(ids, cache)

    graph._forward = frozen


def other_token(graph: Any) -> None:
    forward = graph._forward
    graph._forward = lambda ids, cache: forward((ids + 1) % VOCABULARY, cache)


def step_never_written(graph: Any) -> None:
    """Logits of the capture, replayed."""
    logits = graph._body()
    graph._put_back(graph._position())
    for layer in graph._cache.layers:
        layer.keys[:, :, PROMPT:] = 0
        layer.values[:, :, PROMPT:] = 0
    graph._body = lambda: logits


@pytest.mark.parametrize("phase", ["decode", "request"])
@pytest.mark.parametrize("fault", [stale_cache, frozen_slot, other_token, step_never_written])
def test_a_fault_is_refused_and_the_mode_says_what_runs(
    loaded: LoadedModel, phase: str, fault: Callable[[Any], None]
) -> None:
    found = engine(loaded, fault)
    with found.stepper(phase) as stepper:
        stepper.step()
        assert stepper.eager is None
    assert found.modes[phase] == "eager"
    (note,) = found.notes
    assert note.startswith(f"{phase}: captured and eager decode disagree, so it is eager: ")


def test_a_position_off_by_one_shows_in_the_keys_and_not_in_the_logits(
    loaded: LoadedModel,
) -> None:
    """Why the cache entries are compared: the logits alone would let it pass."""

    def off_by_one(graph: Any) -> None:
        def moved(ids: Any, cache: Any) -> Any:
            position = graph._lengths[:1].expand(len(ids), 1) + 1
            given = {str(found._cache_name): cache, "position_ids": position}
            out = loaded.model(input_ids=ids, **given)
            return out.logits[:, -1:], cache

        graph._forward = moved

    found = engine(loaded, off_by_one)
    with found.stepper("decode"):
        pass
    check = found.graph_checks["decode"]
    assert check["logits_distance"] < 0.05
    assert check["entries_distance"] > 0.1
    assert found.modes["decode"] == "eager"
    assert "new cache entries differ by" in found.notes[0]


def test_workers_judge_by_the_largest_distance_of_all() -> None:
    """Here a group of one: that the collective runs, on the device and with the type at hand."""
    import torch.distributed as dist

    eager = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert distance(eager + torch.tensor([0.0, 1.0]), eager) == pytest.approx(0.2)
    finally:
        dist.destroy_process_group()
