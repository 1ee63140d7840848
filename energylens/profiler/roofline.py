"""What the spec says that a model needs: cache bytes, and how near to its limits a device came."""

from __future__ import annotations

import math
from collections.abc import Mapping

from energylens.lower import lower, lower_step, memory
from energylens.measured import PhaseProfile
from energylens.profiler.options import ProfileRequest
from energylens.results import Infeasible
from energylens.spec.machines import load_device, load_engine
from energylens.spec.model import Spec
from energylens.spec.system import Device, Mode, Step, Workload


class Yardstick:
    """Counted FLOPs and bytes of the request's model; None all over where no spec describes it."""

    def __init__(
        self,
        spec: Spec | None,
        device: str | None,
        request: ProfileRequest,
        modes: Mapping[str, str],
    ) -> None:
        """Nothing is counted yet."""
        self._spec, self._request, self._modes = spec, request, modes
        self._device: Device | None = load_device(device) if device else None

    def cache_bytes(self, engine: str) -> float | None:
        """Cache of the fullest worker after the prefill."""
        r = self._request
        if self._spec is None:
            return None
        lowered = lower(self._spec, load_engine(engine), r.parallelism)
        if isinstance(lowered, Infeasible):
            return None
        # A cache grows by the token, so its bytes are those of one token more, less one token.
        work = Workload(batch=r.batch, prompt_len=r.prompt_len, gen_len=1)
        held = memory(lowered, work, load_device("h200")).kv_cache_bytes
        return held * r.prompt_len / (r.prompt_len + 1)

    def bandwidth(self, decode: PhaseProfile | None) -> float | None:
        """Bytes that a decode step must read, over its time, over the device's peak."""
        if decode is None or decode.context_len is None or self._device is None:
            return None
        # The eager step: a captured one copies caches that need not be copied.
        step = Step.decode(self._request.batch, decode.context_len, Mode.EAGER)
        counted = self._count(step)
        if counted is None:
            return None
        return counted[1] / decode.latency.mean / self._device.memory_bandwidth_bytes_s

    def compute(self, prefill: PhaseProfile | None) -> float | None:
        """FLOPs of a prefill, over its time, over the device's dense bf16 peak."""
        if prefill is None or self._device is None:
            return None
        step = Step.prefill(self._request.batch, self._request.prompt_len, Mode.EAGER)
        counted = self._count(step)
        if counted is None:
            return None
        return counted[0] / prefill.latency.mean / self._device.peak_flops["bf16"]

    def _count(self, step: Step) -> tuple[float, float] | None:
        """FLOPs, and bytes read from weights and cache, of a step on one worker."""
        if self._spec is None:
            return None
        ops = lower_step(self._spec, load_engine("hf"), self._request.parallelism, step)
        if isinstance(ops, Infeasible):
            return None
        flops = math.fsum(o.count * o.flops for o in ops)
        kinds = ("gemm", "moe", "attention")
        return flops, math.fsum(o.count * o.bytes_read for o in ops if o.kind.value in kinds)
