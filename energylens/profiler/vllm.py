"""Engine ``vllm``: the real engine with its own defaults, stepped in this process.

A step of it is one call: the engine forms it, launches it and hands out its tokens, so iterations
are timed by the host. Decode steps follow each other and the KV length grows; their mean context is
part of the result. The engine starts its own workers, whose boards all belong to this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from energylens.bench.vllm_engine import LONGEST, VllmEngine
from energylens.errors import UnsupportedError
from energylens.lower import parameters
from energylens.measured import MemoryProfile, Profile
from energylens.profiler.loader import find_source
from energylens.profiler.options import ProfileRequest
from energylens.profiler.plugins import load_plugins
from energylens.profiler.session import METERS, METRICS, Progress, Session, Solo
from energylens.profiler.steps import Limits, Stepper
from energylens.spec.load import load_spec
from energylens.spec.model import Spec
from energylens.units import bytes_per_value


class VllmSteps:
    """Implements `energylens.profiler.session.Engine`."""

    name = "vllm"

    def __init__(self, request: ProfileRequest, engine: VllmEngine, spec: Spec | None) -> None:
        """Bind to a running engine."""
        self._request, self._engine, self._spec = request, engine, spec
        self.modes = dict.fromkeys(("prefill", "decode", "request"), "serving")
        self.notes: list[str] = []

    def version(self) -> str:
        """Of vLLM."""
        import vllm

        return str(vllm.__version__)

    def precision(self) -> str:
        """Of the weights."""
        return self._request.dtype or "bf16"

    def spec(self) -> Spec | None:
        """The one that was named, or that the model was made from."""
        return self._spec

    def boards(self) -> list[str]:
        """The first boards that CUDA shows, one for each of the engine's workers."""
        import torch

        return [
            f"GPU-{torch.cuda.get_device_properties(i).uuid}"
            for i in range(self._request.parallelism.gpus)
        ]

    def device_name(self) -> str:
        """Name of the first board."""
        import torch

        return str(torch.cuda.get_device_name(0))

    def facts(self) -> Mapping[str, Any]:
        """Versions and what the engine chose."""
        import torch

        return {
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "vllm": self.version(),
            **self._engine.facts(),
        }

    def sizes(self) -> MemoryProfile:
        """Sizes that the spec counts; the engine's own memory is one pool, which says nothing."""
        if self._spec is None:
            return MemoryProfile()
        held = parameters(self._spec) * bytes_per_value(self._spec.precision.weights)
        return MemoryProfile(model_bytes=held)

    def peak_bytes(self) -> float | None:
        """Not known: the engine fills the device on purpose."""
        return None

    @contextmanager
    def stepper(self, phase: str) -> Iterator[Stepper]:
        """The phase, ready to run."""
        r = self._request
        prompt_len = r.decode_context - 1 if phase == "decode" else r.prompt_len
        with self._engine.stepper(
            phase, r.batch, prompt_len, r.gen_len if phase == "request" else 1
        ) as step:
            yield _HostStepper(step, phase, prompt_len, r.gen_len)

    def trace(self, phase: str, path: Path) -> None:
        """Never asked for: `ProfileRequest` refuses it."""
        raise UnsupportedError("vLLM's workers are traced by its own profiler")


class _HostStepper:
    """Implements `energylens.profiler.steps.Stepper` for a call that returns when it is done."""

    queued = False

    def __init__(
        self, step: Callable[[], object], phase: str, prompt_len: int, gen_len: int
    ) -> None:
        self._step = step
        self._phase, self._prompt_len, self._gen_len = phase, prompt_len, gen_len

    def step(self) -> None:
        self._step()

    def mark(self) -> Any:
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Nothing: a step that has returned is done."""

    def seconds(self, first: Any, second: Any) -> float:
        return float(second - first)

    def context_len(self, first: int, count: int) -> float | None:
        if self._phase == "decode":
            return self._prompt_len + 1 + first + (count - 1) / 2
        return self._prompt_len + self._gen_len / 2 if self._phase == "request" else None


@contextmanager
def vllm_session(
    request: ProfileRequest,
    *,
    progress: Progress,
    save: Callable[[Profile], None],
) -> Iterator[Session]:
    """Start the engine; the session that measures it."""
    load_plugins(request.plugins)
    source = find_source(request)
    spec = load_spec(request.spec) if request.spec else source.spec
    needed = max(request.prompt_len, request.decode_context) + request.gen_len
    with VllmEngine(
        source.spec,
        model=source.name,
        random_weights=request.random_weights or source.spec is not None,
        workers=request.parallelism.tp,
        expert_parallel=request.parallelism.ep > 1,
        longest=max(LONGEST, 2 * needed),
    ) as engine:
        yield Session(
            request=request,
            engine=VllmSteps(request, engine, spec),
            team=Solo(),
            limits=Limits(repeats=request.repeats),
            meters=METERS,
            metrics=METRICS,
            progress=progress,
            save=save,
        )
