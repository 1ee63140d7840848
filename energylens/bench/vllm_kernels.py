"""The ``vllm`` provider: vLLM's own kernels, called as its engine calls them.

* Attention is FlashAttention over a paged cache whose blocks lie scattered, cold for decode; the
  number of splits follows the engine's rule (bounded for steps that are captured).
* Norms, rotary embedding and activation are the package's modules compiled by Inductor, as the
  engine compiles them, since that is what runs by default and not the package's C kernels.
* GEMMs and the embedding are PyTorch's, and come from the ``torch`` provider.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from energylens.bench.collectives import interleaved
from energylens.bench.kernels import BUILDERS as TORCH_BUILDERS
from energylens.bench.kernels import (
    WEIGHT_STD,
    Builder,
    Built,
    Call,
    GraphWork,
    Maker,
    TorchProvider,
    copies_of,
    expert_choices,
)
from energylens.bench.trial import AnchorLoad, HostPoint, MixPoint
from energylens.bench.vllm_engine import host_points, prepare_environment
from energylens.graph import SPLIT_TOKENS, Op
from energylens.results import HostAnchor
from energylens.spec.model import Spec

if TYPE_CHECKING:
    from energylens.bench.collectives import Team

BLOCK_SIZE = 16
MAX_MODEL_LEN = 32768  # a captured step is scheduled for the longest sequence that may come
_MOST_COMPILED = 256  # versions of one function: widths, and one for a single row each
COMPILED_ROWS = 16384  # rows of the engine's own compile run, which choose the kernels' block sizes


class VllmProvider:
    """Runs ops with vLLM's operators, and those that vLLM leaves to PyTorch with PyTorch."""

    name = "vllm"

    def __init__(self, device: int = 0) -> None:
        """Bind to one CUDA ordinal (after CUDA_VISIBLE_DEVICES)."""
        prepare_environment()
        self._torch = TorchProvider(device, builders=BUILDERS)

    def work(self, op: Op) -> GraphWork:
        """See `TorchProvider.work`."""
        return self._torch.work(op)

    def mix_points(self, specs: Sequence[Spec], tps: Sequence[int]) -> tuple[MixPoint, ...]:
        """None: how kernels compose is a property of the board, which the torch provider shows."""
        return ()

    def host_points(self, specs: Sequence[Spec]) -> Iterable[HostPoint]:
        """Steps of the real engine; see `energylens.bench.vllm_engine`."""
        for spec in specs:
            yield from host_points(spec)

    def host_anchor(self) -> HostAnchor:
        """See `TorchProvider.host_anchor`."""
        return self._torch.host_anchor()

    def launching(self, seconds: float) -> None:
        """See `TorchProvider.launching`."""
        self._torch.launching(seconds)

    def anchor_work(self, name: str) -> AnchorLoad:
        """See `TorchProvider.anchor_work`."""
        return self._torch.anchor_work(name)

    def versions(self) -> Mapping[str, str]:
        """Versions of everything that decides which kernels run."""
        import vllm

        return {**self._torch.versions(), "vllm": str(vllm.__version__)}

    def uuid(self) -> str:
        """UUID of the bound device as the driver prints it."""
        return self._torch.uuid()


def join_workers() -> None:
    """Make the communicators of vLLM's tensor parallelism over the workers of a torchrun."""
    import torch

    prepare_environment()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    workers, worker = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    with set_current_vllm_config(_config()):
        init_distributed_environment(world_size=workers, rank=worker, local_rank=local)
        initialize_model_parallel(workers)


def all_reduce_work(op: Op, team: Team) -> GraphWork:
    """As `energylens.bench.collectives.collective_work`, by vLLM's communicators.

    Up to 8 MB vLLM reduces with a kernel of its own, above it hands over to NCCL; which of them
    runs is its own choice here too.
    """
    import torch
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import get_tp_group

    device = f"cuda:{team.local}"
    values = int(op.sizes["values"])
    x = torch.empty(values, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    # The buffers of a captured all-reduce are made known to the other workers after the capture.
    communicator = get_tp_group().device_communicator.ca_comm
    with communicator.capture() if communicator is not None else nullcontext():
        return interleaved(team, lambda: tensor_model_parallel_all_reduce(x))


@lru_cache(maxsize=1)
def _config() -> Any:
    """VLLM's configuration in force while its layers are made: Inductor in place of custom ops."""
    from vllm.config import CompilationConfig, VllmConfig

    return VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))


def _layer(make: Maker, build: Callable[[], Any]) -> Any:
    """A layer of the package on the device, its weights random."""
    from vllm.config import set_current_vllm_config

    torch = make.torch
    before = torch.get_default_dtype()
    torch.set_default_dtype(make.dtype)
    try:
        with set_current_vllm_config(_config()), torch.device(make.device):
            layer = build()
    finally:
        torch.set_default_dtype(before)
    for p in layer.parameters():
        p.data.normal_(1.0, WEIGHT_STD)
    return layer


def _compiled(make: Maker, function: Callable[..., Any], *examples: Any) -> Callable[..., Any]:
    """``function`` compiled for any number of rows and these widths, as the engine compiles it.

    Compiled on `COMPILED_ROWS` rows first, since Inductor chooses block sizes by its first example.
    Widths must stay constants (``dynamic=False``): with a symbolic width the kernels of a second
    model divide 64-bit numbers, and took two and a half times as long.
    """
    from vllm.ir import enable_torch_wrap

    torch = make.torch
    options = {"combo_kernels": True, "benchmark_combo_kernel": True}  # as vLLM's own backend
    compiled = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    modes = partial(
        torch._dynamo.config.patch, recompile_limit=_MOST_COMPILED, fail_on_recompile_limit_hit=True
    )
    with enable_torch_wrap(False), modes():  # wrapped, the norm would be opaque to Inductor
        for e in examples:
            torch._dynamo.mark_dynamic(e, 0)
        compiled(*examples)

    def call(*tensors: Any) -> Any:
        with enable_torch_wrap(False), modes():
            return compiled(*tensors)

    return call


_COMPILED: dict[tuple[object, ...], Callable[..., Any]] = {}


def _once(key: tuple[object, ...], build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Compiled functions by what they were compiled for: compiling takes seconds."""
    if key not in _COMPILED:
        _COMPILED[key] = build()
    return _COMPILED[key]


def _add_rmsnorm(make: Maker, s: Mapping[str, int]) -> Built:
    width = s["width"]

    def build() -> Callable[..., Any]:
        from vllm.model_executor.layers.layernorm import RMSNorm

        norm = _layer(make, lambda: RMSNorm(width))
        examples = [make.normal(COMPILED_ROWS, width) for _ in range(2)]
        return _compiled(make, lambda x, residual: norm.forward_native(x, residual), *examples)

    norm = _once((make.device, "add_rmsnorm", width), build)
    x, residual = (make.normal(s["rows"], width) for _ in range(2))
    return [lambda: norm(x, residual)], 2.0 * 4 * x.numel()


def _rope(make: Maker, s: Mapping[str, int], *, norms: bool) -> Built:
    dim, q_heads, kv_heads = s["head_dim"], s["q_heads"], s["kv_heads"]
    widths = [q_heads * dim, kv_heads * dim, kv_heads * dim]
    torch = make.torch

    def build() -> Callable[..., Any]:
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.rotary_embedding import get_rope

        rotary = _layer(
            make,
            lambda: get_rope(
                dim,
                max_position=MAX_MODEL_LEN,
                rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
            ),
        ).to(make.device)
        q_norm, k_norm = (_layer(make, lambda: RMSNorm(dim)) for _ in range(2))

        def function(positions: Any, qkv: Any) -> Any:
            q, k, v = qkv.split(widths, dim=-1)
            if norms:
                q, k = (
                    norm.forward_native(x.view(x.shape[0], -1, dim)).view(x.shape)
                    for norm, x in ((q_norm, q), (k_norm, k))
                )
            return rotary.forward_native(positions, q, k), v

        positions = torch.arange(COMPILED_ROWS, device=make.device)
        return _compiled(make, function, positions, make.normal(COMPILED_ROWS, sum(widths)))

    rope = _once((make.device, "rope", norms, dim, q_heads, kv_heads), build)
    tokens = s["batch"] * s["new"]
    qkv = make.normal(tokens, sum(widths))
    positions = torch.arange(tokens, device=make.device) % s["new"]
    return [lambda: rope(positions, qkv)], 2.0 * 2 * qkv.numel()


def _silu_mul(make: Maker, s: Mapping[str, int]) -> Built:
    width = s["width"]

    def build() -> Callable[..., Any]:
        from vllm.model_executor.layers.activation import SiluAndMul

        act = _layer(make, lambda: SiluAndMul(compile_native=False))
        example = make.normal(COMPILED_ROWS, 2 * width)
        return _compiled(make, lambda x: act.forward_native(x), example)

    act = _once((make.device, "silu_mul", width), build)
    x = make.normal(s["rows"], 2 * width)
    return [lambda: act(x)], 2.0 * 1.5 * x.numel()


def _pool(make: Maker, blocks: int, kv_heads: int, dim: int) -> Any:
    """K and V of so many blocks, as the engine lays them out: [blocks, 2, block, heads, dim]."""
    return make.normal(blocks, 2, BLOCK_SIZE, kv_heads, dim)


def _kv_write(make: Maker, s: Mapping[str, int]) -> Built:
    from vllm.v1.attention.backends.fa_utils import reshape_and_cache_flash

    torch = make.torch
    tokens, heads, dim = s["batch"] * s["new"], s["kv_heads"], s["head_dim"]
    per_sequence = -(-s["new"] // BLOCK_SIZE)
    copies = copies_of(2.0 * 2 * tokens * heads * dim, most=32)
    pool = _pool(make, copies * s["batch"] * per_sequence, heads, dim)
    key = make.normal(tokens, heads, dim)
    value = make.normal(tokens, 2 * heads, dim)[:, heads:]  # a slice of the fused projection
    one = torch.ones(1, device=make.device)
    order = torch.randperm(len(pool), device=make.device).view(copies, s["batch"], per_sequence)
    within = torch.arange(s["new"], device=make.device)

    def write(blocks: Any) -> Call:
        slots = (blocks[:, within // BLOCK_SIZE] * BLOCK_SIZE + within % BLOCK_SIZE).flatten()
        return partial(
            reshape_and_cache_flash, key, value, pool[:, 0], pool[:, 1], slots, "auto", one, one
        )

    return [write(blocks) for blocks in order], 2.0 * (pool.numel() + 3 * key.numel())


def _attention(make: Maker, s: Mapping[str, int]) -> Built:
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    torch = make.torch
    batch, new, context = s["batch"], s["new"], s["context"]
    q_heads, kv_heads, dim = s["q_heads"], s["kv_heads"], s["head_dim"]
    captured = batch * new <= SPLIT_TOKENS
    splits = _config().attention_config.flash_attn_max_num_splits_for_cuda_graph if captured else 0
    longest = MAX_MODEL_LEN if new == 1 else context
    per_sequence = -(-context // BLOCK_SIZE)
    copies = copies_of(2.0 * 2 * batch * context * kv_heads * dim)
    pool = _pool(make, copies * batch * per_sequence, kv_heads, dim)
    q = make.normal(batch * new, q_heads, dim)
    out = torch.empty_like(q)
    starts = torch.arange(0, (batch + 1) * new, new, dtype=torch.int32, device=make.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=make.device)
    order = torch.randperm(len(pool), dtype=torch.int32, device=make.device)
    version = get_flash_attn_version()
    metadata = None
    if version == 3:
        metadata = get_scheduler_metadata(
            batch_size=batch,
            max_seqlen_q=new,
            max_seqlen_k=longest,
            num_heads_q=q_heads,
            num_heads_kv=kv_heads,
            headdim=dim,
            cache_seqlens=lengths,
            qkv_dtype=make.dtype,
            cu_seqlens_q=starts,
            page_size=BLOCK_SIZE,
            causal=True,
            window_size=(-1, -1),
            num_splits=splits,
        )

    def call(blocks: Any) -> object:
        return flash_attn_varlen_func(
            q=q,
            k=pool[:, 0],
            v=pool[:, 1],
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=new,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=dim**-0.5,
            causal=True,
            block_table=blocks,
            scheduler_metadata=metadata,
            fa_version=version,
            num_splits=splits,
        )

    tables = order.view(copies, batch, per_sequence)
    return [partial(call, blocks) for blocks in tables], 2.0 * (pool.numel() + 2 * q.numel())


def _moe(make: Maker, s: Mapping[str, int]) -> Built:
    """Top-k of the router's logits, and the fused experts; others' experts map to -1."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts, fused_topk

    torch = make.torch
    tokens, topk, experts = s["tokens"], s["topk"], s["experts"]
    width, hidden = s["width"], s["hidden"]
    x = make.normal(tokens, width)
    gate_up = make.normal(experts, 2 * hidden, width, std=WEIGHT_STD)
    down = make.normal(experts, width, hidden, std=WEIGHT_STD)
    chosen = expert_choices(make, s)
    everywhere = max(experts, *(int(ids.max()) + 1 for ids in chosen))
    experts_map = None
    if everywhere > experts:
        experts_map = torch.full((everywhere,), -1, dtype=torch.int32, device=make.device)
        experts_map[:experts] = torch.arange(experts, dtype=torch.int32, device=make.device)

    def logits(ids: Any) -> Any:
        """Logits whose top-k are these experts."""
        values = make.normal(tokens, everywhere)
        return values.scatter_add_(1, ids, torch.full_like(ids, 20, dtype=make.dtype))

    def call(values: Any) -> object:
        weights, ids, _ = fused_topk(x, values, topk, renormalize=True)
        return fused_experts(
            x,
            gate_up,
            down,
            weights,
            ids,
            global_num_experts=everywhere,
            expert_map=experts_map,
        )

    with set_current_vllm_config(_config()):
        calls: list[Call] = [partial(call, logits(ids)) for ids in chosen]
        calls[0]()
    rows = s["rows"]
    held = 3 * experts * width * hidden + rows * (3 * hidden + width) + tokens * width
    return calls, 2.0 * held


def _sample(make: Maker, s: Mapping[str, int]) -> Built:
    """Greedy sampling: the logits as 32-bit floats, then the largest."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    torch = make.torch
    rows = s["rows"]
    logits = make.normal(rows, s["width"])
    index = torch.arange(rows, dtype=torch.int32, device=make.device)
    temperature = torch.zeros(rows, dtype=torch.float32, device=make.device)
    seeds = torch.zeros(rows, dtype=torch.int64, device=make.device)
    positions = torch.ones(rows, dtype=torch.int64, device=make.device)

    def call() -> object:
        wide = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        return gumbel_sample(wide, index, temperature, seeds, positions, apply_temperature=False)

    return [call], 6.0 * logits.numel()


BUILDERS: Mapping[str, Builder] = {
    **TORCH_BUILDERS,
    "vllm_attention_prefill": _attention,
    "vllm_attention_decode": _attention,
    "vllm_add_rmsnorm": _add_rmsnorm,
    "vllm_rope": lambda make, s: _rope(make, s, norms=False),
    "vllm_norm_rope": lambda make, s: _rope(make, s, norms=True),
    "vllm_silu_mul": _silu_mul,
    "vllm_kv_write": _kv_write,
    "vllm_sample": _sample,
    "vllm_moe": _moe,
}
