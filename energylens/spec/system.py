"""The machine and the work: devices, links, clusters, engines; steps, workloads, configurations."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from energylens.errors import OutOfRangeError
from energylens.units import ARITHMETIC


class Phase(enum.StrEnum):
    """Part of a request.

    ``prefill`` is one forward of the whole batch, ``decode`` one step of the whole batch.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    REQUEST = "request"


class Mode(enum.StrEnum):
    """How an engine launches the kernels of a step."""

    EAGER = "eager"
    CUDA_GRAPH = "cuda_graph"
    SERVING = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Datasheet of one accelerator.

    Attributes:
        name: canonical short name (``h200``); aliases: other spellings that users and NVML give it.
        memory_bytes, memory_bandwidth_bytes_s, l2_bytes: capacity, peak DRAM bandwidth, last-level
            cache.
        peak_flops: dense peak in FLOP/s by precision.
        sm_count, clock_max_hz: streaming multiprocessors and their maximum clock.
        power_limit_w: default board power limit; idle_w: power with a context and nothing running.
        unified_memory: True where the CPU shares the memory (Jetson).
        power_mode: mode that the figures hold for, where modes preset the clocks (nvpmodel). A mode
            is no cap: its watts are nominal, and more than that is drawn at times.
        modes: the device in its other modes, named ``NAME@MODE``.
        source: where the figures come from.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: float
    memory_bandwidth_bytes_s: float
    l2_bytes: float
    peak_flops: Mapping[str, float]
    sm_count: int
    clock_max_hz: float
    power_limit_w: float
    idle_w: float
    source: str
    unified_memory: bool = False
    power_mode: str | None = None
    modes: Mapping[str, Device] = field(default_factory=lambda: MappingProxyType({}))

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s with operands stored as ``dtype``.

        Where the device cannot multiply them as they are, they are unpacked to 16 bits.
        """
        peaks = self.peak_flops
        known = (peaks.get(name) for name in (dtype, ARITHMETIC.get(dtype, dtype), "bf16"))
        return next(filter(None, known), None) or max(peaks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An interconnect. ``bandwidth_bytes_s`` is one-way, per device; ``latency_s`` is one hop."""

    name: str
    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``gpus`` devices of one kind, all connected by ``link`` (None: a single device)."""

    name: str
    device: str
    gpus: int
    link: Link | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How an engine runs one op of a spec.

    Attributes:
        kernel: name of the calibrated kernel.
        launches: CUDA kernels that an eager call launches.
    """

    kernel: str
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How an engine forms steps out of requests; the engine's own defaults.

    Attributes:
        batch_tokens: most new tokens of a step when a server forms it; a longer prompt is chunked.
        offline_batch_tokens: the same when a batch is handed over at once, as `predict` does.
        max_sequences: most sequences that run at a time.
        block_size: tokens of one block of the KV cache.
        memory_share: part of the device memory that weights, activations and KV cache may take.
        capture_sizes: tokens of the captured graphs, ascending; a step is padded to the next of
            them, and above the last nothing is captured.
        small: the same on devices of less than ``small_memory_bytes``; None where it is no other.
    """

    batch_tokens: int
    offline_batch_tokens: int
    max_sequences: int
    block_size: int
    memory_share: float
    capture_sizes: tuple[int, ...]
    small_memory_bytes: float = 0.0
    small: Serving | None = None

    def padded(self, tokens: int) -> int:
        """Rows that the token-wise kernels of a step of ``tokens`` new tokens run on."""
        return next((size for size in self.capture_sizes if size >= tokens), tokens)

    def limited(
        self, *, batch_tokens: int | None = None, max_sequences: int | None = None
    ) -> Serving:
        """The same with other limits; what is not given follows as in the engine.

        Raises:
            OutOfRangeError: a limit cannot be.
        """
        for name, value in (("batch_tokens", batch_tokens), ("max_sequences", max_sequences)):
            if value is not None and value < 1:
                raise OutOfRangeError(f"{name} must be at least 1, not {value}")
        tokens = batch_tokens or self.batch_tokens
        sequences = max_sequences or min(self.max_sequences, tokens)
        if sequences > tokens:
            raise OutOfRangeError(
                f"max_sequences={sequences} is above batch_tokens={tokens}: a step holds a token "
                "of each sequence; lower --max-num-seqs or raise --max-batch-tokens"
            )
        # vLLM captures up to twice its sequences, and its largest step where not above it.
        largest = min(tokens, 2 * sequences, max(self.capture_sizes, default=0))
        captured = {size for size in self.capture_sizes if size <= largest}
        if tokens == largest:
            captured.add(tokens)
        return replace(
            self,
            batch_tokens=tokens,
            max_sequences=sequences,
            capture_sizes=tuple(sorted(captured)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How a graph becomes kernels.

    Attributes:
        name, version: engine and the versions that the profile describes.
        asked_version: the one that was asked for, where the profile is of the nearest known one.
        provider: whose microbenchmarks stand for its kernels (``torch``).
        modes: default launch mode per phase.
        kernels: spec op (or ``einsum``, ``attention_prefill``, ``attention_decode.<mode>``,
            ``kv_append``, ``repeat_kv``, ``prepare`` …) -> kernel.
        repeat_kv: launch modes in which decode copies the KV heads out to all query heads.
        fusion: default fusions by entry names; a spec's own fusion wins.
        absorbed: spec ops that other kernels of the engine do on the side (a residual addition in
            the norm that follows it).
        collective: implementation of the collectives (``nccl``).
        tp_replicated: entries that tensor parallelism leaves whole on each worker.
        gather_logits: True where sharded logits are gathered on every worker.
        moe_dispatch: ``allreduce`` or ``alltoall``.
        ep_replicates: True where all but the experts is left whole under expert parallelism.
        dp_dispatch: collectives that bring tokens to the experts and back where attention is data
            parallel; empty where the engine has no such mode.
        pipeline_tensors: tensors of a layer's width that a pipeline stage hands on for each token;
            0 where the engine has no pipelines.
        reserve_bytes: device memory that the engine and the CUDA context take for themselves.
        serving: how it forms steps out of requests; None where it has no scheduler.
    """

    name: str
    version: str
    provider: str
    modes: Mapping[Phase, Mode]
    kernels: Mapping[str, Kernel]
    repeat_kv: tuple[Mode, ...] = ()
    fusion: tuple[tuple[str, ...], ...] = ()
    absorbed: tuple[str, ...] = ()
    collective: str = "nccl"
    tp_replicated: tuple[str, ...] = ()
    gather_logits: bool = False
    moe_dispatch: str = "allreduce"
    ep_replicates: bool = False
    dp_dispatch: tuple[str, ...] = ()
    pipeline_tensors: int = 0
    reserve_bytes: float = 0.0
    serving: Serving | None = None
    asked_version: str | None = None
    source: str = ""

    @property
    def captured_tokens(self) -> int:
        """New tokens of the largest step that runs as captured graphs; 0 where none does."""
        return max(self.serving.capture_sizes, default=0) if self.serving else 0

    def on(self, device: Device) -> Engine:
        """The engine with its limits on ``device``."""
        serving = self.serving
        if serving is None or serving.small is None:
            return self
        if device.memory_bytes >= serving.small_memory_bytes:
            return self
        return replace(self, serving=serving.small)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """``count`` sequences that do the same in a step, ``new`` tokens each.

    ``context`` is the KV length at the end of the step: it includes the new tokens and may be
    fractional (a mean over a window of decode steps).
    """

    count: int
    new: int
    context: float

    def __post_init__(self) -> None:
        if self.count < 1 or self.new < 1 or self.context < self.new:
            raise OutOfRangeError(
                f"a step needs count >= 1, new >= 1 and context >= new, not count={self.count}, "
                f"new={self.new}, context={self.context}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One engine step: the primitive of all predictions.

    Prefill, decode and mixed steps differ only in their sequences.
    """

    sequences: tuple[Sequences, ...]
    mode: Mode

    @property
    def tokens(self) -> int:
        """New tokens of all sequences: rows of every token-wise op."""
        return sum(s.count * s.new for s in self.sequences)

    @property
    def batch(self) -> int:
        """Sequences served: rows of the ops that see one token per sequence."""
        return sum(s.count for s in self.sequences)

    def share(self, ways: int) -> Step:
        """The part of the fullest of ``ways`` workers that split the batch, group by group."""
        if ways == 1:
            return self
        return replace(
            self, sequences=tuple(replace(s, count=-(-s.count // ways)) for s in self.sequences)
        )

    @classmethod
    def prefill(cls, batch: int, prompt_len: int, mode: Mode) -> Step:
        """One forward of the whole batch over its prompts."""
        return cls(
            sequences=(Sequences(count=batch, new=prompt_len, context=prompt_len),), mode=mode
        )

    @classmethod
    def decode(cls, batch: int, context_len: float, mode: Mode) -> Step:
        """One step of the whole batch; ``context_len`` includes the current token."""
        return cls(sequences=(Sequences(count=batch, new=1, context=context_len),), mode=mode)


def chunked(step: Step, batch_tokens: int) -> tuple[Step, ...]:
    """A prefill as an engine runs it that takes at most ``batch_tokens`` new tokens at a time.

    Sequences go in order; the one that does not fit any more is cut, and its rest goes first next.
    """
    parts: list[list[tuple[int, float]]] = [[]]  # of each step: new tokens, context
    left = batch_tokens
    for group in step.sequences:
        for _ in range(group.count):
            done = group.context - group.new
            while done < group.context:
                if not left:
                    parts.append([])
                    left = batch_tokens
                new = min(left, int(group.context - done))
                done += new
                left -= new
                parts[-1].append((new, done))
    return tuple(
        replace(
            step,
            sequences=tuple(
                Sequences(count=count, new=new, context=context)
                for (new, context), count in Counter(own).items()
            ),
        )
        for own in parts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the model; ``gen_len`` counts the token that the prefill makes.

    ``context_len`` fixes the decode step that is reported; by default ``prompt_len + gen_len / 2``.
    """

    batch: int = 1
    prompt_len: int = 1024
    gen_len: int = 128
    context_len: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_len", "gen_len"):
            if getattr(self, name) < 1:
                raise OutOfRangeError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.context_len is not None and self.context_len < 1:
            raise OutOfRangeError(f"context_len must be at least 1, not {self.context_len}")

    @property
    def decode_context(self) -> float:
        """KV length, current token included, of the decode step that is reported."""
        if self.context_len is not None:
            return self.context_len
        return self.prompt_len + self.gen_len / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapping:
    """All-reduces on ``sm`` streaming multiprocessors beside GEMMs in ``chunks``; 0: none is.

    Written ``16x4``, or ``off``.
    """

    sm: int = 0
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.sm < 0 or self.chunks < 1 or (self.sm == 0 and self.chunks > 1):
            raise OutOfRangeError(
                f"an overlap needs at least one SM and one chunk, not {self.sm}x{self.chunks}"
            )

    @classmethod
    def parse(cls, text: str) -> Overlapping:
        """The overlap that is written so.

        Raises:
            OutOfRangeError: there is none.
        """
        sms, times, chunks = text.partition("x")
        if text == "off":
            return cls()
        if not (times and sms.isdecimal() and chunks.isdecimal() and int(sms) and int(chunks)):
            raise OutOfRangeError(
                f"{text!r} found, and must be off, or SMs and chunks above 0, e.g. 16x4"
            )
        return cls(sm=int(sms), chunks=int(chunks))

    def __bool__(self) -> bool:
        return self.sm > 0

    def __str__(self) -> str:
        return f"{self.sm}x{self.chunks}" if self else "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Degrees: GPUs = replicas · dp · tp · pp; ``ep`` regroups the tp·dp workers and adds none.

    ``overlap`` says how the all-reduces of a tensor parallel group run, by default as the model's
    spec has it.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    replicas: int = 1
    overlap: Overlapping | None = None

    def __post_init__(self) -> None:
        for name, degree in self.degrees.items():
            if degree < 1:
                raise OutOfRangeError(f"{name} must be at least 1, not {degree}")
        if (self.tp * self.dp) % self.ep:
            raise OutOfRangeError(
                f"ep={self.ep} must divide tp*dp = {self.tp}*{self.dp} = {self.tp * self.dp}"
            )

    @property
    def workers(self) -> int:
        """Workers of a pipeline stage: those that split a layer, and those that split a batch."""
        return self.tp * self.dp

    @property
    def replica_gpus(self) -> int:
        """Devices of a replica, which are linked to each other; replicas are on their own."""
        return self.workers * self.pp

    @property
    def gpus(self) -> int:
        """Devices that the configuration occupies."""
        return self.replicas * self.replica_gpus

    @property
    def degrees(self) -> dict[str, Any]:
        """All degrees by name."""
        return {name: getattr(self, name) for name in ("tp", "ep", "pp", "dp", "replicas")}

    @property
    def layout(self) -> str:
        """Degrees of a replica: ``tp=2, ep=1, dp=1``, and what else there is.

        ``pp=2`` of a pipeline, ``overlap=16x4`` where it was asked for.
        """
        pipeline = f", pp={self.pp}" if self.pp > 1 else ""
        overlap = f", overlap={self.overlap}" if self.overlap is not None else ""
        return f"tp={self.tp}, ep={self.ep}, dp={self.dp}{pipeline}{overlap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One point to evaluate.

    Attributes:
        parallelism: degrees.
        modes: launch mode per phase, where not the engine's own.
        power_limit_w: of each board, the calibration's by default.
        routing: how tokens choose experts (``zipf:1.2``), the spec's own way by default.
        redundant_experts: experts that are held twice.
        microbatches: parts of the batch that are in the stages of a pipeline at a time. By default
            as the engine does with a batch that it gets at once: one for each step that its limits
            make of the prefill, at most one for each stage.
        max_sequences: most sequences that the engine is set to run at a time, its own by default;
            vLLM captures steps of up to twice as many tokens.
    """

    parallelism: Parallelism = Parallelism()
    modes: Mapping[Phase, Mode] = field(default_factory=lambda: MappingProxyType({}))
    power_limit_w: float | None = None
    routing: str | None = None
    redundant_experts: int = 0
    microbatches: int | None = None
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        limit = self.power_limit_w
        if limit is not None and not 0 < limit < math.inf:
            raise OutOfRangeError(f"power_limit_w must be a number above 0, not {limit:g}")
