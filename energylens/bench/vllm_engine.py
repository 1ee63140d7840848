"""The real vLLM engine with random weights, stepped in this process: host times, reference runs.

Kernels are measured one by one elsewhere; what only the engine shows is the time that its Python
takes to form, launch and finish a step. On models far too small to keep the device busy a step
takes just that.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energylens.bench.layer import transformers_config
from energylens.bench.trial import HostPoint
from energylens.errors import UnsupportedError
from energylens.lower import lower_step
from energylens.results import Infeasible
from energylens.spec.machines import load_engine
from energylens.spec.model import Spec
from energylens.spec.system import Mode, Parallelism, Step

HOST_LAYERS = (2, 8)
SHRINK = 8  # widths and heads of the models whose steps wait for the host
HOST_STEPS = (
    ("decode", 1, 64),
    ("decode", 32, 64),
    ("decode", 256, 64),
    ("prefill", 1, 64),
    ("prefill", 16, 32),
    ("prefill", 1, 1024),
    ("prefill", 32, 64),
    ("prefill", 1, 4096),
)
"""Phase, batch, prompt length; steps of up to 512 tokens are captured, others are not."""
WHOLE_STEPS = (
    ("decode", 16, 1024),
    ("decode", 1, 1024),
    ("decode", 64, 2048),
    ("decode", 128, 512),
    ("decode", 256, 256),
    ("prefill", 8, 1024),
    ("prefill", 1, 2048),
    ("prefill", 1, 8192),
    ("prefill", 1, 768),
    ("prefill", 1, 512),
    ("prefill", 1, 128),
)
SMALL_VOCABULARY = 4096
LONGEST = 16384  # tokens of a sequence
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that it can be stepped
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to the report
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment() -> None:
    """What vLLM reads from the environment when it is first imported; given values are kept."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Steps of one kind in a steady window.

    Attributes:
        times_s: seconds of each.
        start_s, end_s: the window on the monotonic clock, for the meter.
        context: mean KV length, current token included.
    """

    times_s: tuple[float, ...]
    start_s: float
    end_s: float
    context: float

    @property
    def mean_s(self) -> float:
        """Pace: the window over its steps."""
        return (self.end_s - self.start_s) / len(self.times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Stamps of one request on the clock of its arrival: first and last token, in seconds."""

    arrival_s: float
    prompt_len: int
    gen_len: int
    first_s: float
    last_s: float


class VllmEngine:
    """One engine; use it as a context manager."""

    def __init__(
        self,
        spec: Spec | None,
        *,
        model: str = "",
        random_weights: bool = True,
        longest: int = LONGEST,
        layers: int | None = None,
        shrink: int = 1,
        workers: int = 1,
        stages: int = 1,
        expert_parallel: bool = False,
        memory_share: float = 0.85,
        batch_tokens: int | None = None,
    ) -> None:
        """Start the engine.

        Args:
            spec: the model, with random weights; None takes ``model``.
            model: hub id, or folder of a checkpoint or a config.
            random_weights: read no weights of ``model``.
            longest: most tokens of a sequence.
            layers: number of layers, the model's own by default.
            shrink: divides widths and heads.
            workers: tensor-parallel degree.
            stages: pipeline-parallel degree.
            expert_parallel: whole experts on each worker instead of slices of all.
            memory_share: part of the device memory for weights and cache.
            batch_tokens: most tokens of a step, vLLM's own default for offline use if None.

        Raises:
            UnsupportedError: the model is of no family that is known here.
        """
        prepare_environment()
        from vllm import LLM

        self._folder = tempfile.TemporaryDirectory()
        if spec is not None:
            _config(spec, layers, shrink, workers).save_pretrained(self._folder.name)
        self._random = np.random.default_rng(0)
        self._longest = longest
        limits: dict[str, Any] = {}
        if batch_tokens is not None:
            limits["max_num_batched_tokens"] = batch_tokens
        self._llm = LLM(
            model=self._folder.name if spec is not None else model,
            load_format="dummy" if random_weights else "auto",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=longest,
            gpu_memory_utilization=memory_share,
            tensor_parallel_size=workers,
            pipeline_parallel_size=stages,
            enable_expert_parallel=expert_parallel,
            **limits,
        )
        self.engine = self._llm.llm_engine
        self._vocabulary = self.engine.vllm_config.model_config.get_vocab_size()
        self._requests = 0

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        import torch
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.engine, self._llm
        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()
        self._folder.cleanup()

    def facts(self) -> dict[str, Any]:
        """What the engine chose: limits, cache size, attention, launch modes."""
        config = self.engine.vllm_config
        return {
            "batch_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_sequences": config.scheduler_config.max_num_seqs,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "block_size": config.cache_config.block_size,
            "kv_cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "memory_share": config.cache_config.gpu_memory_utilization,
            "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    # -- steps

    def _prompts(self, lengths: Sequence[int]) -> list[Any]:
        from vllm.inputs import TokensPrompt

        return [
            TokensPrompt(prompt_token_ids=self._random.integers(1, self._vocabulary, n).tolist())
            for n in lengths
        ]

    def _add(self, prompts: Sequence[Any], gen_len: int) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        names = []
        for prompt in prompts:
            self._requests += 1
            names.append(str(self._requests))
            parameters = SamplingParams(
                temperature=0.0,
                max_tokens=gen_len,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.engine.add_request(names[-1], prompt, parameters)
        return names

    def _drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    @contextmanager
    def stepper(
        self, phase: str, batch: int, prompt_len: int, gen_len: int = 1
    ) -> Iterator[Callable[[], object]]:
        """What runs one step: a whole prefill or request alone, or one of many decode steps."""
        if phase != "decode":
            prompts = self._prompts([prompt_len] * batch)

            def whole() -> None:
                self._add(prompts, gen_len)
                self._drain()

            whole()
            yield whole
            return
        with self.tokens(batch, prompt_len) as decode:
            yield decode

    @contextmanager
    def tokens(self, batch: int, prompt_len: int) -> Iterator[Callable[[], int]]:
        """What runs one engine step of a batch that only decodes, and tells the tokens it made.

        With pipeline stages these are those of one group of sequences, else of all.
        """
        import torch

        started: set[str] = set()
        names = self._add(self._prompts([prompt_len] * batch), self._longest - prompt_len)
        while len(started) < batch:
            started |= {o.request_id for o in self.engine.step()}

        def step() -> int:
            return sum(len(o.outputs[0].token_ids) for o in self.engine.step())

        yield step
        self.engine.abort_request(names)
        self._drain()
        torch.cuda.synchronize()

    def prefill(self, batch: int, prompt_len: int, *, settle_s: float, window_s: float) -> Repeats:
        """Whole batches of prompts, each handed over when the one before has its first tokens."""
        with self.stepper("prefill", batch, prompt_len) as step:
            return _repeat(step, settle_s, window_s, lambda _: float(prompt_len))

    def decode(self, batch: int, prompt_len: int, *, settle_s: float, window_s: float) -> Repeats:
        """Steps of a batch that only decodes."""
        with self.stepper("decode", batch, prompt_len) as step:
            return _repeat(step, settle_s, window_s, lambda middle: prompt_len + 1 + middle)

    def serve(
        self, arrivals_s: Sequence[float], prompt_lens: Sequence[int], gen_lens: Sequence[int]
    ) -> tuple[list[Served], float, float]:
        """Requests as they arrive; their stamps, and start and end on the monotonic clock."""
        prompts = self._prompts(prompt_lens)
        index: dict[str, int] = {}
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        due = 0
        start = time.monotonic()
        while len(last) < len(prompts):
            now = time.monotonic() - start
            while due < len(prompts) and arrivals_s[due] <= now:
                index[self._add([prompts[due]], gen_lens[due])[0]] = due
                due += 1
            if not self.engine.has_unfinished_requests():
                time.sleep(max(0.0, min(arrivals_s[due] - now, 0.01)))
                continue
            outputs = self.engine.step()
            now = time.monotonic() - start
            for output in outputs:
                number = index[output.request_id]
                first.setdefault(number, now)
                if output.finished:
                    last[number] = now
        served = [
            Served(
                arrival_s=arrivals_s[i],
                prompt_len=prompt_lens[i],
                gen_len=gen_lens[i],
                first_s=first[i],
                last_s=last[i],
            )
            for i in range(len(prompts))
        ]
        return served, start, time.monotonic()


def _config(spec: Spec, layers: int | None, shrink: int, workers: int) -> Any:
    """The transformers config of the model, or of a smaller one."""
    own = max(b.repeat for b in spec.blocks)
    config = transformers_config(spec, 1, layers or own)
    config.architectures = [_ARCHITECTURES[config.model_type]]
    config.dtype = "bfloat16"
    config.vocab_size = spec.ranks["v"] if shrink == 1 else SMALL_VOCABULARY
    config.hidden_size //= shrink
    config.intermediate_size //= shrink
    if spec.moe is not None:
        config.moe_intermediate_size //= shrink
    config.num_attention_heads = max(workers, config.num_attention_heads // shrink)
    config.num_key_value_heads = max(workers, config.num_key_value_heads // shrink)
    config.max_position_embeddings = 2 * LONGEST
    return config


def _repeat(
    once: Callable[[], object],
    settle_s: float,
    window_s: float,
    context: Callable[[float], float],
) -> Repeats:
    """Repeat ``once``; ``context`` maps the mean number of repeats so far to a KV length."""
    begin = time.monotonic()
    before = 0
    while time.monotonic() < begin + settle_s or before < 3:
        once()
        before += 1
    times: list[float] = []
    start = now = time.monotonic()
    while now < start + window_s or len(times) < 5:
        once()
        after = time.monotonic()
        times.append(after - now)
        now = after
    return Repeats(
        times_s=tuple(times),
        start_s=start,
        end_s=now,
        context=context(before + (len(times) - 1) / 2),
    )


def host_points(spec: Spec, workers: int = 1) -> Iterator[HostPoint]:
    """Steps of the real engine: on small models with few and more layers, and on the whole model.

    Decode steps follow each other, so that most of what the host does for one runs beside the
    device's work for the one before; prefills stand alone. On small models a step takes what the
    host takes; on the whole model the device takes longer, and what the step takes beyond its
    kernels is the part of the host's time that nothing hides.

    Args:
        spec: the model.
        workers: tensor-parallel degree.

    Raises:
        UnsupportedError: the model cannot run with so many workers; the text says why.
    """
    for layers in HOST_LAYERS:
        small = shrunk(spec, layers, workers)
        with VllmEngine(
            spec, layers=layers, shrink=SHRINK, workers=workers, memory_share=0.4
        ) as run:
            yield from _points(run, small, f"{layers} layers", workers, HOST_STEPS, 0.3, 0.8)
    with VllmEngine(spec, workers=workers) as run:
        yield from _points(run, spec, "whole", workers, WHOLE_STEPS, 1.0, 1.5)


def shrunk(spec: Spec, layers: int, workers: int = 1) -> Spec:
    """The model that `VllmEngine` runs with ``shrink=SHRINK``."""
    r = spec.ranks
    heads, kv_heads = (max(workers, n // SHRINK) for n in (r["g"] * r["r"], r["g"]))
    small = {
        "m": r["m"] // SHRINK,
        "f": r["f"] // SHRINK,
        "g": kv_heads,
        "r": heads // kv_heads,
        "v": SMALL_VOCABULARY,
    }
    blocks = tuple(replace(b, repeat=layers) if b.repeat > 1 else b for b in spec.blocks)
    return replace(spec, ranks={**r, **small}, blocks=blocks)


def _points(
    run: VllmEngine,
    spec: Spec,
    what: str,
    workers: int,
    steps: Sequence[tuple[str, int, int]],
    settle_s: float,
    window_s: float,
) -> Iterator[HostPoint]:
    engine = load_engine("vllm")
    for phase, batch, length in steps:
        measure = run.prefill if phase == "prefill" else run.decode
        found = measure(batch, length, settle_s=settle_s, window_s=window_s)
        step = (
            Step.prefill(batch, length, Mode.SERVING)
            if phase == "prefill"
            else Step.decode(batch, found.context, Mode.SERVING)
        )
        ops = lower_step(spec, engine, Parallelism(tp=workers), step)
        if isinstance(ops, Infeasible):
            raise UnsupportedError(ops.reason)
        yield HostPoint(
            label=f"{spec.name} {phase} {batch}x{length} {what} tp{workers}",
            ops=ops,
            step_s=found.mean_s,
            spread=statistics.pstdev(found.times_s) / found.mean_s,
            start_s=found.start_s,
            end_s=found.end_s,
            mode=Mode.SERVING,
        )
