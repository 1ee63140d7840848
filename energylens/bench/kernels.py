"""The ``torch`` provider: a CUDA graph of PyTorch and transformers calls per compute kernel.

Temperature of the data follows the engine, since the same kernel draws up to 40 % less when its
input sits in the last-level cache: weights and the cache of earlier steps were last touched a
whole step ago and are *cold* (rotated over `ROTATE_BYTES`); activations were written by the kernel
before and stay as warm as their size allows (one buffer, reused). All data is random: zeros draw
up to a third less.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from energylens.bench.trial import AnchorLoad, HostPoint, MixPoint
from energylens.errors import UnsupportedError
from energylens.graph import Op, make_op
from energylens.results import HostAnchor
from energylens.spec.model import Spec

ROTATE_BYTES = 192e6  # more than three times the 60 MB of an H200's L2
MAX_NODES = 256
GRAPH_SECONDS = 6e-4  # one replay should outlast the host's launch of the next by far
WEIGHT_STD = 0.02

Call = Callable[[], object]
Built = tuple[list[Call], float]
"""One call per buffer set, and the bytes that all of them hold."""
Builder = Callable[["Maker", Mapping[str, int]], Built]


class GraphWork:
    """A CUDA graph that executes one op ``executions`` times per replay, over rotating buffers.

    Implements `energylens.bench.trial.Work`.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        *,
        repeats: int = 1,
        footprint_bytes: float = 0.0,
        device: int = 0,
    ):
        """Warm up on a side stream and capture.

        Args:
            calls: one closure per rotating buffer set; each executes the op once.
            repeats: passes over ``calls`` in one graph.
            footprint_bytes: device memory that the buffers hold.
            device: CUDA ordinal.
        """
        import torch

        self._torch = torch
        self._device = device
        self.executions = len(calls) * repeats
        self.footprint_bytes = footprint_bytes
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), torch.inference_mode():
                for _ in range(3):
                    calls[0]()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(self._graph, stream=stream):
                for _ in range(repeats):
                    for call in calls:
                        call()
            torch.cuda.synchronize()

    def enqueue(self, replays: int) -> object:
        """Queue ``replays`` graph launches; returns a token for `wait`."""
        with self._torch.cuda.device(self._device):
            for _ in range(replays):
                self._graph.replay()
            event = self._torch.cuda.Event()
            event.record()
        return event

    def wait(self, token: object) -> None:
        """Block until everything queued before ``token`` is done."""
        token.synchronize()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Free the graph and its buffers."""
        del self._graph
        self._torch.cuda.empty_cache()


class TorchProvider:
    """Runs ops with PyTorch, and transformers' own eager modules for the ``hf_*`` kernels."""

    name = "torch"

    def __init__(self, device: int = 0, builders: Mapping[str, Builder] | None = None) -> None:
        """Bind to one CUDA ordinal (after CUDA_VISIBLE_DEVICES).

        Args:
            device: the ordinal.
            builders: what runs each kernel, `BUILDERS` by default.
        """
        self.device = device
        self._builders = BUILDERS if builders is None else builders

    def work(self, op: Op) -> GraphWork:
        """Buffers and a captured graph for ``op``.

        Raises:
            UnsupportedError: this provider has no runnable for the op's kernel or sizes.
        """
        calls, footprint = self._calls(op)
        estimate_s = max(
            2e-6 * op.launches, (op.bytes_read + op.bytes_written) / 4e12, op.flops / 6e14
        )
        passes = max(1, math.ceil(GRAPH_SECONDS / (estimate_s * len(calls))))
        passes = max(1, min(passes, MAX_NODES // (len(calls) * op.launches) or 1))
        return GraphWork(calls, repeats=passes, footprint_bytes=footprint, device=self.device)

    def _calls(self, op: Op) -> Built:
        import torch

        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        if op.kernel not in self._builders:
            raise UnsupportedError(f"this provider has no runnable for kernel {op.kernel!r}")
        if op.dtype not in dtypes:
            raise UnsupportedError(f"this provider runs {', '.join(dtypes)}, not {op.dtype}")
        sizes = {d: int(v) for d, v in op.sizes.items()}
        with torch.cuda.device(self.device), torch.inference_mode():
            make = Maker(torch, f"cuda:{self.device}", dtypes[op.dtype])
            return self._builders[op.kernel](make, sizes)

    def mix_work(self, ops: Sequence[Op]) -> GraphWork:
        """One graph that executes each op ``op.count`` times in turn: one execution of the mix."""
        calls: list[Call] = []
        footprint = 0.0
        for op in ops:
            own, held = self._calls(op)
            calls += [own[i % len(own)] for i in range(op.count)]
            footprint += held

        def call() -> None:
            for c in calls:
                c()

        return GraphWork([call], footprint_bytes=footprint, device=self.device)

    def mix_points(self, specs: Sequence[Spec], tps: Sequence[int]) -> tuple[MixPoint, ...]:
        """Duty cycles, and layer replays of each model at each degree that it allows."""
        from energylens.bench import layer

        return (*layer.duty_points(self), *layer.layer_points(specs, tps, self.device))

    def host_points(self, specs: Sequence[Spec]) -> Iterator[HostPoint]:
        """Eager steps of tiny models on this host; see `energylens.bench.layer.host_points`."""
        from energylens.bench import layer

        for spec in specs:
            yield from layer.host_points(spec, device=self.device)

    def host_anchor(self) -> HostAnchor:
        """Microseconds per call of an empty kernel, back to back, and of a small eager module.

        The module is a two-layer decoder, far too small to keep the device busy: what it takes is
        the Python, dispatch and launch time of the very calls that an eager engine makes.
        """
        import torch

        from energylens.bench import layer

        with torch.cuda.device(self.device), torch.inference_mode():
            x = torch.ones(1, device=f"cuda:{self.device}")
            launch_s = _host_seconds(lambda: x.add_(0))
        module_s = layer.module_seconds(self.device)
        return HostAnchor(launch_us=1e6 * launch_s, module_us=1e6 * module_s, cpu=_cpu())

    def launching(self, seconds: float) -> None:
        """Launch empty kernels one by one: the device waits for its host nearly all the time."""
        import torch

        with torch.cuda.device(self.device), torch.inference_mode():
            x = torch.ones(1, device=f"cuda:{self.device}")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for _ in range(100):
                    x.add_(0)
                torch.cuda.synchronize()

    def anchor_work(self, name: str) -> AnchorLoad:
        """The loads of an anchor.

        ``stream`` scales 1 GB in place, ``gemm`` is 8192 cubed, ``gemv`` reads 1 GB of weights at
        M = 1.
        """
        import torch

        maker = Maker(torch, f"cuda:{self.device}", torch.bfloat16)
        with torch.cuda.device(self.device), torch.inference_mode():
            if name == "stream":
                # A copy would be captured as a memcpy node, which runs on a copy engine at two
                # thirds of the bandwidth; a scaling in place reads and writes through the SMs as
                # kernels do.
                values = 1 << 29
                x = maker.normal(values)
                work = GraphWork([lambda: x.mul_(1.0)], device=self.device)
                return AnchorLoad(work=work, flops=0.0, bytes=2.0 * 2 * values)
            if name == "gemm":
                op = make_op("gemm", m=8192, n=8192, k=8192)
            elif name == "gemv":
                op = make_op("gemm", m=1, n=65536, k=8192)
            else:
                raise UnsupportedError(f"unknown anchor load {name!r}; known: stream, gemm, gemv")
        return AnchorLoad(
            work=self.work(op), flops=op.flops, bytes=op.bytes_read + op.bytes_written
        )

    def versions(self) -> Mapping[str, str]:
        """Versions of everything that decides which kernels run."""
        import torch
        import transformers

        nccl = torch.cuda.nccl.version()
        return {
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
            "transformers": str(transformers.__version__),
        }

    def uuid(self) -> str:
        """UUID of the bound device as the driver prints it."""
        import torch

        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"


def _host_seconds(call: Call, calls: int = 2000, repeats: int = 5) -> float:
    """Median seconds per call of the host, with the queue drained before each repeat."""
    import torch

    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


def _cpu() -> str:
    """Model name of the processor, as the kernel prints it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


class Maker:
    """Random tensors of one dtype on one device."""

    def __init__(self, torch: Any, device: str, dtype: Any) -> None:
        """On ``device``, of ``dtype``; ``torch`` is the module."""
        self.torch, self.device, self.dtype = torch, device, dtype

    def normal(self, *shape: int, std: float = 1.0) -> Any:
        """N(0, std)."""
        return self.torch.empty(*shape, dtype=self.dtype, device=self.device).normal_(0.0, std)

    def heads(self, batch: int, length: int, heads: int, dim: int) -> Any:
        """A projection's output viewed as [batch, heads, length, dim], with its strides."""
        return self.normal(batch, length, heads, dim).transpose(1, 2)


def copies_of(cold_bytes: float, most: int = MAX_NODES) -> int:
    """Buffer sets that together outlast any cache, at ``cold_bytes`` each."""
    return max(1, min(most, math.ceil(ROTATE_BYTES / cold_bytes)))


def _gemm(make: Maker, s: Mapping[str, int]) -> Built:
    linear = make.torch.nn.functional.linear
    m, n, k = s["m"], s["n"], s["k"]
    copies = copies_of(2.0 * n * k)
    x = make.normal(m, k)
    weights = [make.normal(n, k, std=WEIGHT_STD) for _ in range(copies)]
    return [partial(linear, x, w) for w in weights], 2.0 * (copies * n * k + m * k + m * n)


class _Attention:
    """What transformers' SDPA wrapper reads from the module that calls it."""

    is_causal = True
    training = False

    def __init__(self, groups: int) -> None:
        self.num_key_value_groups = groups


def _attention(make: Maker, s: Mapping[str, int], *, masked: bool) -> Built:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if s["new"] not in (1, s["context"]):
        raise UnsupportedError(
            "the torch provider runs attention over a whole prompt or one new token only"
        )
    q = make.heads(s["batch"], s["new"], s["q_heads"], s["head_dim"])
    k, v = (make.normal(s["batch"], s["kv_heads"], s["context"], s["head_dim"]) for _ in range(2))
    mask = None
    if masked:
        shape = (s["batch"], 1, s["new"], s["context"])
        mask = make.torch.ones(shape, dtype=make.torch.bool, device=make.device)
    module = _Attention(s["q_heads"] // s["kv_heads"])
    scaling = s["head_dim"] ** -0.5

    def call() -> object:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling)

    return [call], 2.0 * (2 * k.numel() + 2 * q.numel())


def _rmsnorm(make: Maker, s: Mapping[str, int]) -> Built:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(s["width"]).to(device=make.device, dtype=make.dtype)
    x = make.normal(s["rows"], s["width"])
    return [lambda: norm(x)], 2.0 * 8 * x.numel()


def _rope(make: Maker, s: Mapping[str, int]) -> Built:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q = make.heads(s["batch"], s["new"], s["q_heads"], s["head_dim"])
    k = make.heads(s["batch"], s["new"], s["kv_heads"], s["head_dim"])
    cos, sin = (make.normal(1, s["new"], s["head_dim"]) for _ in range(2))
    return [lambda: apply_rotary_pos_emb(q, k, cos, sin)], 2.0 * 6 * (q.numel() + k.numel())


def _silu_mul(make: Maker, s: Mapping[str, int]) -> Built:
    silu = make.torch.nn.functional.silu
    gate, up = (make.normal(s["rows"], s["width"]) for _ in range(2))
    return [lambda: silu(gate) * up], 2.0 * 4 * gate.numel()


def _add(make: Maker, s: Mapping[str, int]) -> Built:
    x, y = (make.normal(s["rows"], s["width"]) for _ in range(2))
    return [lambda: x + y], 2.0 * 3 * x.numel()


def _prepare(make: Maker, s: Mapping[str, int]) -> Built:
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    torch = make.torch
    heads = 8
    config = LlamaConfig(
        hidden_size=heads * s["head_dim"],
        num_attention_heads=heads,
        num_key_value_heads=1,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    rotary = LlamaRotaryEmbedding(config).to(make.device)
    x = make.normal(s["batch"], s["new"], 1)
    past = s["context"] - s["new"]
    cache = DynamicCache(config=config)
    if past:
        cache.update(*(make.normal(s["batch"], 1, past, s["head_dim"]) for _ in range(2)), 0)

    def call() -> object:
        positions = (torch.arange(s["new"], device=make.device) + past).unsqueeze(0)
        if s["new"] > 1:  # a prefill is never captured, and needs no mask outside a capture
            return rotary(x, position_ids=positions)
        mask = create_causal_mask(
            config=config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=cache,
            position_ids=positions,
        )
        return mask, rotary(x, position_ids=positions)

    return [call], 4.0 * s["new"] * s["head_dim"] + 4.0 * s["batch"] * s["context"] * s["head_dim"]


def _embedding(make: Maker, s: Mapping[str, int]) -> Built:
    vocabulary = 1 << 15
    table = make.normal(vocabulary, s["width"], std=WEIGHT_STD)
    ids = make.torch.randint(vocabulary, (s["rows"],), device=make.device)
    embedding = make.torch.nn.functional.embedding
    return [lambda: embedding(ids, table)], 2.0 * (table.numel() + s["rows"] * s["width"])


def _kv_concat(make: Maker, s: Mapping[str, int]) -> Built:
    cat = make.torch.cat
    batch, heads, dim = s["batch"], s["kv_heads"], s["head_dim"]
    past_len = s["context"] - s["new"]
    k, v = (make.heads(batch, s["new"], heads, dim) for _ in range(2))
    if not past_len:
        empty = make.torch.tensor([], dtype=make.dtype, device=make.device)
        return [lambda: (cat([empty, k], dim=-2), cat([empty, v], dim=-2))], 2.0 * 4 * k.numel()
    copies = copies_of(2.0 * 2 * batch * heads * past_len * dim)
    pasts = [[make.normal(batch, heads, past_len, dim) for _ in range(2)] for _ in range(copies)]

    def append(past_k: Any, past_v: Any) -> object:
        return cat([past_k, k], dim=-2), cat([past_v, v], dim=-2)

    footprint = 2.0 * 2 * (copies + 1) * batch * heads * past_len * dim
    return [partial(append, *past) for past in pasts], footprint


def _repeat_kv(make: Maker, s: Mapping[str, int]) -> Built:
    from transformers.integrations.sdpa_attention import repeat_kv

    groups = s["q_heads"] // s["kv_heads"]
    k, v = (make.normal(s["batch"], s["kv_heads"], s["context"], s["head_dim"]) for _ in range(2))
    return [lambda: (repeat_kv(k, groups), repeat_kv(v, groups))], 2.0 * 2 * (
        1 + groups
    ) * k.numel()


def expert_choices(make: Maker, s: Mapping[str, int]) -> list[Any]:
    """Expert ids [tokens, topk] with the loads that the sizes name, one for each buffer set.

    Loads are quantiles of a log-normal distribution between the fullest expert and the others: as
    many active experts and as many pairs as asked for, and about the largest. Which expert has
    which load differs from set to set, so that weights come from memory. Pairs of other workers'
    experts get ids from ``experts`` on.
    """
    torch = make.torch
    tokens, topk, experts = s["tokens"], s["topk"], s["experts"]
    loads = expert_loads(s["rows"], s["active"], min(s["largest"], tokens))
    others = tokens * topk - s["rows"]
    used = 2.0 * 3 * s["active"] * s["width"] * s["hidden"]
    generator = torch.Generator().manual_seed(0)
    sets = []
    for _ in range(copies_of(used, most=16)):
        mine = torch.randperm(experts, generator=generator)[: s["active"]]
        ids = mine.repeat_interleave(torch.tensor(loads))
        if others:  # spread over as many experts of others as keep below one row per token each
            away = max(experts, -(-others // tokens))
            ids = torch.cat((ids, experts + torch.arange(others) * away // others))
        # Down the columns, an expert with no more rows than tokens meets no token twice.
        chosen = ids.view(topk, tokens).T[torch.randperm(tokens, generator=generator)]
        sets.append(chosen.contiguous().to(make.device))
    return sets


def expert_loads(rows: int, active: int, largest: int) -> list[int]:
    """Rows of each of ``active`` experts: one at least, ``largest`` at most, ``rows`` in all."""
    normal = statistics.NormalDist()
    z = [normal.inv_cdf((i + 0.5) / active) for i in range(active)]

    def spread(sigma: float) -> list[float]:
        weights = [math.exp(sigma * value) for value in z]
        return [rows * w / sum(weights) for w in weights]

    low, high = 0.0, 6.0
    for _ in range(40):
        sigma = (low + high) / 2
        low, high = (sigma, high) if max(spread(sigma)) < largest else (low, sigma)
    loads = [min(largest, max(1, round(n))) for n in spread(low)]
    i = 0
    while (left := rows - sum(loads)) != 0:  # what rounding left over, one by one
        step = 1 if left > 0 else -1
        if 1 <= loads[i % active] + step <= largest:
            loads[i % active] += step
        i += 1
    return loads


def _moe(make: Maker, s: Mapping[str, int]) -> Built:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch = make.torch
    config = Qwen3MoeConfig(
        hidden_size=s["width"],
        moe_intermediate_size=s["hidden"],
        num_experts=s["experts"],
        num_experts_per_tok=s["topk"],
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(make.device):
        block = Qwen3MoeSparseMoeBlock(config).to(make.dtype)
    for p in block.parameters():
        p.data.normal_(0.0, WEIGHT_STD)
    x = make.normal(s["tokens"], s["width"])
    # The router runs, but what it says is replaced: loads are what is varied.
    weights = torch.softmax(make.normal(s["tokens"], s["topk"]).float(), dim=-1).to(make.dtype)

    def call(ids: Any) -> object:
        block.gate(x)
        return block.experts(x, ids, weights)

    calls: list[Call] = [partial(call, ids) for ids in expert_choices(make, s)]
    held = sum(p.numel() for p in block.parameters())
    return calls, 2.0 * (held + s["tokens"] * s["topk"] * (3 * s["hidden"] + 4 * s["width"]))


def _argmax(make: Maker, s: Mapping[str, int]) -> Built:
    logits = make.normal(s["rows"], s["width"])
    return [lambda: logits.argmax(dim=-1)], 2.0 * logits.numel()


BUILDERS: Mapping[str, Builder] = {
    "gemm": _gemm,
    "attention_prefill": lambda make, s: _attention(make, s, masked=False),
    "attention_decode": lambda make, s: _attention(make, s, masked=False),
    "attention_decode_masked": lambda make, s: _attention(make, s, masked=True),
    "hf_rmsnorm": _rmsnorm,
    "hf_rope": _rope,
    "hf_silu_mul": _silu_mul,
    "hf_add": _add,
    "hf_prepare": _prepare,
    "embedding": _embedding,
    "hf_kv_concat": _kv_concat,
    "hf_repeat_kv": _repeat_kv,
    "hf_moe": _moe,
    "argmax": _argmax,
}
