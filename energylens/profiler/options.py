"""What a profile run is asked for: checked once, and handed to every worker as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from energylens.errors import SpecError, UnsupportedError
from energylens.spec.system import Parallelism

ENGINES = ("hf", "vllm")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Precision -> torch's name for it."""
PHASE_FLAGS = {"ttft": "prefill", "tpot": "decode", "ttlt": "request"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """One run.

    Attributes:
        model: hub id, local folder, folder or file with only a ``config.json``, or a spec's name.
        phases: some of ``prefill``, ``decode`` and ``request``.
        size: measure the sizes of model and cache.
        energy: energy was asked for, so that a run without is not good enough.
        batch: sequences of each replica.
        context_len: KV length of the decode step, current token included.
        cache_graph: decode by a captured CUDA graph over a static cache.
        dtype: one of `DTYPES`, or None for the model's own.
        attention: attention implementation by transformers' name, None for its default.
        random_weights: take no weights from the model.
        prompt_file: text of the prompts; random tokens where None.
        spec: name of the spec that describes the model, None to find it.
        sample_interval_s: spacing of the power time line.
        torch_profile: keep kernel traces; kernel_profile: keep a table of the kernels.
        throttle_check: report temperature, clocks and clock-event reasons of the boards.
        trace_dir: folder of the files of these three.
        plugins: modules or files that add loaders, metrics or a meter.
        anchor_files: anchors of the boards, to record along.
        foreign: boards that other processes used before the run started.
    """

    model: str
    phases: tuple[str, ...] = ("prefill", "decode", "request")
    size: bool = True
    energy: bool = False
    engine: str = "hf"
    parallelism: Parallelism = Parallelism()
    batch: int = 1
    prompt_len: int = 1024
    gen_len: int = 128
    context_len: int | None = None
    repeats: int = 20
    cache_graph: bool = False
    dtype: str | None = None
    attention: str | None = None
    random_weights: bool = False
    seed: int = 0
    prompt_file: str | None = None
    spec: str | None = None
    reduce_strategy: str | None = None
    power_timeline: str | None = None
    sample_interval_s: float = 0.1
    torch_profile: bool = False
    kernel_profile: bool = False
    throttle_check: bool = False
    trace_dir: str = "profile-traces"
    plugins: tuple[str, ...] = ()
    anchor_files: tuple[str, ...] = ()
    foreign: bool = False

    def __post_init__(self) -> None:
        """Check what the type system cannot."""
        for name, least in (("batch", 1), ("prompt_len", 1), ("gen_len", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise SpecError(f"--{flag}: {getattr(self, name)} found, and must be at least 1")
        if self.context_len is not None and self.context_len < 2:
            raise SpecError(f"--context-len: {self.context_len} found, and must be at least 2")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SpecError(
                f"--dtype: unknown value {self.dtype!r}; allowed: {', '.join(DTYPES)} (a quantised "
                "checkpoint brings its own)"
            )
        if self.engine not in ENGINES:
            raise SpecError(
                f"--engine: unknown value {self.engine!r}; allowed: {', '.join(ENGINES)}"
            )
        if self.engine == "vllm" and (self.torch_profile or self.kernel_profile):
            raise UnsupportedError(
                "--torch_profile and --kernel-profile belong to engine hf: vLLM's workers are "
                "processes of its own, which its own profiler traces"
            )
        self._check_layout()

    def _check_layout(self) -> None:
        p = self.parallelism
        if p.pp > 1:
            raise UnsupportedError(
                f"--pp {p.pp}: no engine here runs a pipeline; use --tp, --ep or --replicas"
            )
        if p.replicas > 1 and (p.tp > 1 or self.engine == "vllm"):
            raise UnsupportedError(
                f"--replicas {p.replicas}: replicas are whole models of engine hf, one a GPU; use "
                "them alone, or --tp and --ep alone"
            )
        if self.engine == "hf" and p.ep not in (1, p.tp):
            raise UnsupportedError(
                f"--ep {p.ep}: transformers spreads experts over all workers; give --ep {p.tp}"
            )
        if self.engine == "vllm" and (self.cache_graph or self.attention or self.prompt_file):
            raise UnsupportedError(
                "--cache_graph, --attn and --prompt-file belong to engine hf; vLLM decides alone"
            )

    @property
    def timeline(self) -> str | None:
        """File of the power time line; the throttle check has one of its own."""
        if self.power_timeline or not self.throttle_check:
            return self.power_timeline
        return str(Path(self.trace_dir) / "throttle.csv")

    @property
    def decode_context(self) -> int:
        """KV length of the decode step, current token included: by default the first one's."""
        return self.context_len or self.prompt_len + 1

    def to_json(self) -> str:
        """Everything, as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProfileRequest:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        values["parallelism"] = Parallelism(**values["parallelism"])
        return cls(**values | {k: tuple(values[k]) for k in ("phases", "plugins", "anchor_files")})


def layout(
    *,
    ngpus: int | None,
    replicas: int | None,
    tp: int,
    ep: int,
    pp: int,
    batch: int,
) -> tuple[Parallelism, int]:
    """Degrees and the batch of each replica, from what the command line says.

    ``--ngpus`` alone means what it means in ELANA: a replica on each GPU, which share the batch
    evenly. With ``--replicas`` each replica has a batch of its own, as in ``predict``.

    Raises:
        SpecError: the numbers contradict each other, or the batch does not divide.
    """
    given = Parallelism(tp=tp, ep=ep, pp=pp, replicas=replicas or 1)
    if ngpus is None or ngpus == given.gpus:
        return given, batch
    if replicas is not None or ngpus < 1 or ngpus % given.gpus:
        raise SpecError(
            f"--ngpus {ngpus}: --replicas {given.replicas}, --tp {tp} and --pp {pp} make "
            f"{given.gpus} GPUs; leave --ngpus out, or make them agree"
        )
    copies = ngpus // given.gpus
    if batch % copies:
        raise SpecError(
            f"--batch_size {batch} does not divide over {copies} replicas; give a multiple of "
            f"{copies}, or --replicas {copies} for {batch} sequences on each"
        )
    return replace(given, replicas=copies), batch // copies
