"""Engine ``hf``: a transformers model, stepped eagerly or as a captured CUDA graph.

Every step starts from the same state. A prefill begins without a cache; a decode step finds the
cache that the prefill left, whose length is put back after each step, so that the KV length of all
measured steps is the same; a request is a prefill and greedy decode steps.

Eager decode uses transformers' dynamic cache. A captured graph needs the static one, which is as
long as the context of the decode step (or as prompt and answer of a request together), since
attention reads all of it.
"""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from energylens.errors import SpecError, UnsupportedError
from energylens.measured import MemoryProfile
from energylens.profiler.captured import (
    ENTRIES_LIMIT,
    LOGITS_LIMIT,
    Graph,
    disagreement,
    distance,
    newest_entries,
)
from energylens.profiler.loader import LoadedModel, Place
from energylens.profiler.marks import marked
from energylens.profiler.options import ProfileRequest
from energylens.profiler.tracing import record
from energylens.spec.load import load_spec
from energylens.spec.model import Spec
from energylens.spec.resources import list_resources

CHECKED_STEPS = 8
_CACHES = ("cache", "past_key_values", "cache_params")


_Steps = tuple[Callable[[], None], Callable[[], None] | None, float | None]
"""Queue a step; launch the same kernels one by one, where the step is a graph; KV length."""


class HfEngine:
    """Steps of one worker's model."""

    name = "hf"

    def __init__(self, request: ProfileRequest, loaded: LoadedModel, place: Place) -> None:
        """Draw or read the prompts; nothing runs yet."""
        import torch

        self._torch = torch
        self.request, self.loaded, self.place = request, loaded, place
        self.model = loaded.model
        self.on_gpu = place.device.startswith("cuda")
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = next((n for n in _CACHES if n in names), None)
        if self._cache_name is None:
            raise SpecError(
                f"{request.model}: its forward takes no cache ({', '.join(_CACHES)}); profile "
                "needs a model that generates token by token"
            )
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        self.modes = {"prefill": "eager", "decode": "eager", "request": "eager"}
        self.notes: list[str] = []
        self.graph_checks: dict[str, dict[str, Any]] = {}
        length = max(request.prompt_len, request.decode_context - 1)
        self._ids = _prompt_ids(request, loaded, place, length)

    def facts(self) -> Mapping[str, Any]:
        """What decides which kernels run."""
        torch, config = self._torch, self.loaded.config
        import transformers

        nccl = torch.cuda.nccl.version() if self.on_gpu else None
        return {
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
            "attention": getattr(config, "_attn_implementation", None),
            "experts": getattr(config, "_experts_implementation", None),
            "weights": self.loaded.weights,
            "layers": getattr(config, "num_hidden_layers", None),
            "graph_checks": self.graph_checks,
        }

    def version(self) -> str:
        """Of transformers."""
        import transformers

        return str(transformers.__version__)

    def precision(self) -> str:
        """Of the weights."""
        return self.loaded.precision

    def spec(self) -> Spec | None:
        """The one that was named, the one that the model was made from, or the shipped one."""
        if self.request.spec is not None:
            return load_spec(self.request.spec)
        return self.loaded.spec or matching_spec(self.loaded.config)

    def boards(self) -> list[str]:
        """This worker's GPU, if any."""
        if not self.on_gpu:
            return []
        return [f"GPU-{self._torch.cuda.get_device_properties(self.place.device).uuid}"]

    def device_name(self) -> str:
        """Name of the GPU, or of the processor."""
        if self.on_gpu:
            return str(self._torch.cuda.get_device_name(self.place.device))
        return platform.processor() or platform.machine()

    def sizes(self) -> MemoryProfile:
        """Weights of this worker, the model as a whole, and the cache that a prefill leaves."""
        found = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found[local.data_ptr(), local.numel()] = local.numel() * local.element_size()
        with self._torch.inference_mode():
            _, cache = self.forward(self._ids[:, : self.request.prompt_len], None)
        return MemoryProfile(
            weights_bytes=float(sum(found.values())),
            model_bytes=self.loaded.model_bytes,
            cache_bytes=float(tensor_bytes(cache)),
        )

    def peak_bytes(self) -> float | None:
        """Largest device memory of the phase; None on a CPU."""
        return float(self._torch.cuda.max_memory_allocated()) if self.on_gpu else None

    # -- steps

    def forward(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        """Logits of the last token, and the cache."""
        given = {} if cache is None else {str(self._cache_name): cache}
        out = self.model(input_ids=ids, **given, **self._options)
        found = next((c for n in _CACHES if (c := getattr(out, n, None)) is not None), cache)
        return out.logits[:, -1:], found

    @contextmanager
    def stepper(self, phase: str) -> Iterator[_TorchStepper]:
        """The phase, ready to run; what it holds is freed afterwards."""
        with self._torch.inference_mode():
            make = {"prefill": self._prefill, "decode": self._decode, "request": self._request}
            step, eager, context = make[phase]()
            if self.on_gpu:  # what checks held beside the step is no part of it
                self._torch.cuda.empty_cache()
                self._torch.cuda.reset_peak_memory_stats()
            yield _TorchStepper(self._torch, self.on_gpu, step, eager, context)
            if self.on_gpu:
                self._torch.cuda.synchronize()
                del step
                self._torch.cuda.empty_cache()

    def trace(self, phase: str, path: Path) -> None:
        """Write the kernel trace of some steps of a phase."""
        with self.stepper(phase) as stepper:
            record(stepper, phase, path, marked(self.model), stepper.eager)

    def _prefill(self) -> _Steps:
        ids = self._ids[:, : self.request.prompt_len]

        def step() -> None:
            logits, _ = self.forward(ids, None)
            logits.argmax(-1)

        return step, None, None

    def _decode(self) -> _Steps:
        context = self.request.decode_context
        ids, token = self._ids[:, : context - 1], self._ids[:, :1].clone()
        _, cache = self.forward(ids, None)
        layers = getattr(cache, "layers", ())
        # An update of a dynamic layer binds new tensors, so the old ones can be put back.
        states = [dict(layer.__dict__) for layer in layers]

        def eager() -> Any:
            for layer, state in zip(layers, states, strict=True):
                layer.__dict__.update(state)
            logits, _ = self.forward(token, cache)
            logits.argmax(-1)
            return logits

        graph = self._captured(context, rewind=context - 1)
        if graph is not None:
            graph.fill(ids)
            graph.token.copy_(token)
            graph.capture()
            pair = (graph.run(), eager())
            if self._agrees("decode", graph, [pair], cache, first=context - 1):
                states.clear()
                layers = ()
                del cache
                return graph.step, graph.eager, float(context)
        return lambda: void(eager()), None, float(context)

    def _request(self) -> _Steps:
        gen_len = self.request.gen_len
        ids = self._ids[:, : self.request.prompt_len]
        context = self.request.prompt_len + gen_len / 2

        def eager() -> None:
            logits, cache = self.forward(ids, None)
            for _ in range(gen_len - 1):
                logits, cache = self.forward(logits.argmax(-1), cache)
            logits.argmax(-1)

        graph = self._captured(self.request.prompt_len + gen_len) if gen_len > 1 else None
        if graph is not None:
            graph.token.copy_(graph.fill(ids).argmax(-1))
            graph.capture()
            if self._generates_alike(graph, ids):

                def captured() -> None:
                    graph.token.copy_(graph.fill(ids).argmax(-1))
                    for _ in range(gen_len - 1):
                        graph.step()

                return captured, graph.eager, context
        return eager, None, context

    def _captured(self, length: int, rewind: int | None = None) -> Graph | None:
        """A graph to fill and capture; None where steps are eager."""
        if not self.request.cache_graph:
            return None
        if not self.on_gpu:
            self._note("--cache_graph: there is no CUDA device, decode is eager")
            return None
        return Graph(self.forward, self.loaded.config, self._ids[:, :1], length, rewind)

    def _generates_alike(self, graph: Graph, ids: Any) -> bool:
        """Captured steps against eager ones over the first tokens, the eager ones' fed to both."""
        logits, cache = self.forward(ids, None)
        graph.fill(ids)
        pairs = []
        for _ in range(min(CHECKED_STEPS, self.request.gen_len - 1)):
            token = logits.argmax(-1)
            graph.token.copy_(token)
            logits, cache = self.forward(token, cache)
            pairs.append((graph.run().clone(), logits))
        return self._agrees("request", graph, pairs, cache, first=ids.shape[1])

    def _agrees(
        self, phase: str, graph: Graph, pairs: list[tuple[Any, Any]], cache: Any, *, first: int
    ) -> bool:
        """Whether captured steps do what eager ones do; says so in modes, checks and notes.

        Args:
            phase: that the steps belong to.
            graph: which made the captured steps.
            pairs: captured and eager logits of each step.
            cache: of the eager steps.
            first: slot of the first step's token.
        """
        a, b = (self._torch.cat([p[side] for p in pairs], dim=1) for side in (0, 1))
        own = graph.entries(first, len(pairs))
        check = {
            "steps": len(pairs),
            "logits_distance": distance(a, b),
            "logits_limit": LOGITS_LIMIT,
            "entries_distance": own and distance(own[1], newest_entries(cache, own[0], len(pairs))),
            "entries_limit": ENTRIES_LIMIT,
            "same_tokens": float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        }
        self.graph_checks[phase] = check
        wrong = disagreement(check)
        if wrong is None:
            self.modes[phase] = "cuda_graph"
            return True
        self._note(f"{phase}: captured and eager decode disagree, so it is eager: {wrong}")
        return False

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _TorchStepper:
    """Implements `energylens.profiler.steps.Stepper` for a callable that queues a step."""

    def __init__(
        self,
        torch: Any,
        on_gpu: bool,
        step: Callable[[], None],
        eager: Callable[[], None] | None,
        context: float | None,
    ) -> None:
        self._torch, self.queued, self.eager = torch, on_gpu, eager
        self._step, self._context = step, context

    def step(self) -> None:
        self._step()

    def mark(self) -> Any:
        if not self.queued:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        if self.queued:
            mark.synchronize()

    def seconds(self, first: Any, second: Any) -> float:
        if not self.queued:
            return float(second - first)
        return float(first.elapsed_time(second)) * 1e-3

    def context_len(self, first: int, count: int) -> float | None:
        return self._context


def void(_: Any) -> None:
    """Drop a value."""


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a cache, each memory once."""
    import torch

    found: dict[int, int] = {}
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            size = item.numel() * item.element_size()
            found[item.data_ptr()] = max(size, found.get(item.data_ptr(), 0))
        elif isinstance(item, Mapping):
            for part in item.values():
                walk(part)
        elif isinstance(item, list | tuple):
            for part in item:
                walk(part)
        elif hasattr(item, "layers") or type(item).__module__.startswith("transformers.cache"):
            walk(vars(item))

    walk(value)
    return sum(found.values())


def _prompt_ids(request: ProfileRequest, loaded: LoadedModel, place: Place, length: int) -> Any:
    """Token ids, batch x length: of the prompt file, or random ones without special tokens.

    Replicas get prompts of their own; workers that share a model, the same.
    """
    import torch

    if request.prompt_file is not None:
        from transformers import AutoTokenizer

        with open(request.prompt_file, encoding="utf-8") as file:  # noqa: PTH123
            tokens = AutoTokenizer.from_pretrained(request.model)(file.read())["input_ids"]
        if not tokens:
            raise SpecError(f"--prompt-file: {request.prompt_file} holds no text")
        needed = request.batch * length
        repeated = (tokens * (needed // len(tokens) + 1))[:needed]
        return torch.tensor(repeated, device=place.device).view(request.batch, length)
    seed = request.seed + (place.worker if request.parallelism.replicas > 1 else 0)
    generator = torch.Generator().manual_seed(seed)
    special: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = getattr(loaded.config, name, None)
        special |= set(found if isinstance(found, list) else [] if found is None else [found])
    allowed = torch.tensor(sorted(set(range(loaded.config.vocab_size)) - special))
    chosen = torch.randint(len(allowed), (request.batch, length), generator=generator)
    return allowed[chosen].to(place.device)


def matching_spec(config: Any) -> Spec | None:
    """The shipped spec with the sizes of a transformers config; None where there is none."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not heads or not kv_heads:
        return None
    wanted = {
        "m": config.hidden_size,
        "g": kv_heads,
        "r": heads // kv_heads,
        "f": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "v": config.vocab_size,
    }
    for name in list_resources("specs"):
        spec = load_spec(name)
        layers = max(b.repeat for b in spec.blocks)
        if layers == config.num_hidden_layers and wanted.items() <= dict(spec.ranks).items():
            return spec
    return None


def default_device(worker: int) -> str:
    """Torch device of a worker: its GPU, where there are any; the CPU for all otherwise.

    Raises:
        UnsupportedError: there are GPUs, but fewer than workers.
    """
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    if worker >= torch.cuda.device_count():
        raise UnsupportedError(
            f"worker {worker} has no GPU: {torch.cuda.device_count()} are visible; ask for fewer, "
            "or look at CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(worker)
    return f"cuda:{worker}"
