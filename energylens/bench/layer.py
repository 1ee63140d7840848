"""Whole sharded layers: replayed as CUDA graphs (mixes), and launched eagerly (host time).

A *mix* is a sequence of ops measured together. Compared with the sum of its ops measured alone it
yields the gap per kernel, the power-cap law's constants and cache effects, without any end-to-end
measurement. The host points time the same layers where the device cannot be the bottleneck: what
is left is the host's time per launch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from energylens.bench.kernels import GraphWork
from energylens.bench.trial import HostPoint, MixPoint
from energylens.errors import UnsupportedError
from energylens.graph import Op, make_op
from energylens.lower import lower_step, valid_tp
from energylens.results import Infeasible
from energylens.spec.load import load_spec
from energylens.spec.machines import load_engine
from energylens.spec.model import Spec
from energylens.spec.system import Engine, Mode, Parallelism, Phase, Step

if TYPE_CHECKING:
    from energylens.bench.kernels import TorchProvider

COLD_BYTES = 256e6  # weights of the replayed layers together: more than any L2 keeps
HOST_LAYERS = (2, 8)
HOST_TOKENS = 64
ANCHOR_SPEC, ANCHOR_LAYERS, ANCHOR_REPEATS = "llama3_2_1b", 2, 1000
HOST_REPEATS = {2: 300, 8: 150}  # about a second each: long enough for the meter
DUTY_CYCLES = ((1, 0), (4, 4), (2, 8), (1, 16))
LAYER_STEPS = (
    Step.prefill(1, 512, Mode.EAGER),
    Step.prefill(4, 2048, Mode.EAGER),
    Step.decode(1, 1025, Mode.CUDA_GRAPH),
    Step.decode(16, 1025, Mode.CUDA_GRAPH),
    Step.decode(64, 2049, Mode.CUDA_GRAPH),
)


def layer_ops(
    spec: Spec, engine: Engine, tp: int, step: Step, *, collectives: bool = False
) -> tuple[Op, ...]:
    """The ops of one of the model's repeated layers on one worker, without the head.

    Raises:
        UnsupportedError: the configuration cannot run; the text says why.
    """
    block = max(spec.blocks, key=lambda b: b.repeat)
    one = replace(spec, blocks=(replace(block, repeat=1),))
    ops = lower_step(one, engine, Parallelism(tp=tp), step)
    if isinstance(ops, Infeasible):
        raise UnsupportedError(ops.reason)
    return tuple(
        o for o in ops if o.kernel != "hf_prepare" and (collectives or not o.type.is_collective)
    )


def transformers_config(spec: Spec, tp: int = 1, layers: int = 1) -> Any:
    """The transformers config of one worker's share of ``spec``.

    Raises:
        UnsupportedError: the spec is not of a family whose layers are known here.
    """
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    names = {e.name: e for b in spec.blocks for e in b.cascade}
    if not {"q", "k", "v", "o", "gate", "up", "down"} <= set(names):
        raise UnsupportedError(
            f"{spec.name}: layer replay knows dense decoder layers (q, k, v, o, gate, up, down) "
            "only"
        )
    narrow = spec.precision.weights != spec.precision.activations
    if narrow or any(b.window is not None for b in spec.blocks):
        raise UnsupportedError(
            f"{spec.name}: layer replay knows no quantised weights and no sliding windows"
        )
    r = spec.ranks
    kv_heads, q_heads = r["g"], r["g"] * r["r"]
    if q_heads % tp or r["f"] % tp:
        raise UnsupportedError(
            f"{spec.name}: tp={tp} does not divide its heads or its hidden width"
        )
    experts: dict[str, Any] = {}
    family = Qwen3Config if "q_norm" in names else Qwen2Config if names["q"].bias else LlamaConfig
    if spec.moe is not None:
        family = Qwen3MoeConfig
        experts = {
            "moe_intermediate_size": r["f"] // tp,
            "num_experts": r[spec.moe["rank"]],
            "num_experts_per_tok": spec.moe["topk"],
            "norm_topk_prob": True,
        }
    config = family(
        **experts,
        hidden_size=r["m"],
        num_attention_heads=q_heads // tp,
        num_key_value_heads=max(1, kv_heads // tp),
        head_dim=r["d"],
        intermediate_size=r["f"] // tp,
        num_hidden_layers=layers,
        vocab_size=1024,
    )
    config._attn_implementation = "sdpa"
    return config


def _parts(config: Any) -> tuple[Any, Any]:
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    return {
        "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding),
        "qwen2": (modeling_qwen2.Qwen2DecoderLayer, modeling_qwen2.Qwen2RotaryEmbedding),
        "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding),
    }[config.model_type]


def random_fill(module: Any, std: float = 0.02) -> None:
    """Fill every parameter with N(0, std), one-dimensional ones (norm weights, biases) around 1."""
    for p in module.parameters():
        p.data.normal_(0.0, std) if p.dim() > 1 else p.data.normal_(1.0, std)


class DecoderLayers:
    """Decoder layers of one worker with random weights and, for decode, a filled cache."""

    def __init__(self, spec: Spec, tp: int, step: Step, device: str) -> None:
        """Build as many layers as keep their weights out of the caches.

        Args:
            spec: the model.
            tp: tensor-parallel degree of which the layers are one worker's share.
            step: what `forward` does; its context is filled but for the new tokens.
            device: torch device.
        """
        import torch
        from transformers.cache_utils import DynamicCache

        gemms = [o for o in layer_ops(spec, load_engine("hf"), tp, step) if o.kernel == "gemm"]
        self.count = max(
            2, math.ceil(COLD_BYTES / sum(2 * o.sizes["n"] * o.sizes["k"] for o in gemms))
        )
        config = transformers_config(spec, tp, self.count)
        layer_type, rotary_type = _parts(config)
        self._group = step.sequences[0]
        batch, new, context = self._group.count, self._group.new, int(self._group.context)
        self._past = context - new
        with torch.device(device):
            self.modules = [
                layer_type(config, i).to(torch.bfloat16).eval() for i in range(self.count)
            ]
            rotary = rotary_type(config)
        for layer in self.modules:
            random_fill(layer)
        self._x = torch.randn(batch, new, config.hidden_size, dtype=torch.bfloat16, device=device)
        positions = (torch.arange(new, device=device) + self._past).unsqueeze(0)
        self._embeddings = rotary(self._x, position_ids=positions)
        self._mask = None
        if new == 1 and step.mode is Mode.CUDA_GRAPH:
            self._mask = torch.ones(batch, 1, 1, context, dtype=torch.bool, device=device)
        self._cache_type, self._config = DynamicCache, config
        shape = (batch, config.num_key_value_heads, self._past, config.head_dim)
        self._filled = [
            tuple(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
            for _ in range(self.count if self._past else 0)
        ]

    def forward(self) -> object:
        """One pass through the layers, from the same cache each time."""
        cache = self._cache_type(config=self._config)
        for i, (k, v) in enumerate(self._filled):
            layer = cache.layers[i]
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v
        h = self._x
        for layer in self.modules:
            h = layer(
                h,
                attention_mask=self._mask,
                position_embeddings=self._embeddings,
                past_key_values=cache,
                use_cache=True,
            )
        return h


def duty_points(provider: TorchProvider) -> tuple[MixPoint, ...]:
    """A large GEMM against a stream in several proportions: the load alone moves the clock."""
    gemm = make_op("gemm", name="gemm", m=4096, n=8192, k=8192)
    stream = make_op("hf_add", name="stream", rows=8192, width=8192)

    def point(gemms: int, streams: int) -> MixPoint:
        ops = tuple(o.times(n) for o, n in ((gemm, gemms), (stream, streams)) if n)
        return MixPoint(
            label=f"duty {gemms} gemm {streams} stream",
            ops=ops,
            mode=Mode.CUDA_GRAPH,
            build=lambda: provider.mix_work(ops),
        )

    return tuple(point(g, s) for g, s in DUTY_CYCLES)


def layer_points(
    specs: Sequence[Spec], tps: Sequence[int], device: int = 0
) -> tuple[MixPoint, ...]:
    """Layer replays of the models at the degrees that each allows.

    Prefills below and at the power cap, and captured decodes.

    Args:
        specs: the models.
        tps: tensor-parallel degrees whose per-worker shapes are replayed on one device.
        device: CUDA ordinal.
    """
    engine = load_engine("hf")
    points = []
    for spec in specs:
        for tp in tps:
            if tp in valid_tp(spec):
                points += [_alone(spec, engine, tp, step, device) for step in LAYER_STEPS]
    return tuple(points)


def _alone(spec: Spec, engine: Engine, tp: int, step: Step, device: int) -> MixPoint:
    def build() -> GraphWork:
        import torch

        with torch.cuda.device(device), torch.inference_mode():
            layers = DecoderLayers(spec, tp, step, f"cuda:{device}")
        work = GraphWork([layers.forward], device=device)
        work.executions = layers.count
        return work

    return layer_point(spec, engine, tp, step, build)


def layer_point(
    spec: Spec,
    engine: Engine,
    tp: int,
    step: Step,
    build: Callable[[], GraphWork],
    *,
    collectives: bool = False,
) -> MixPoint:
    """The point whose one execution is one layer of one worker, with or without its collectives."""
    g = step.sequences[0]
    phase = "prefill" if g.new > 1 else "decode"
    where = f"tp{tp} joint" if collectives else f"tp{tp}"
    return MixPoint(
        label=f"{spec.name} {where} layer {phase} {g.count}x{int(g.context)}",
        ops=layer_ops(spec, engine, tp, step, collectives=collectives),
        mode=step.mode,
        build=build,
    )


def tiny_model(spec: Spec, layers: int, device: str, workers: int = 1) -> Any:
    """A whole random transformers model of ``layers`` layers, the spec's widths divided by 8.

    Small enough that the device is never the bottleneck. With ``workers`` > 1 the model is sharded
    by transformers' own tensor parallelism over the default process group.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = transformers_config(spec, 1, layers)
    config.hidden_size //= 8
    config.intermediate_size //= 8
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if workers > 1:
        from transformers.distributed import DistributedConfig

        cls = type(model)
        distributed, _, mesh = cls.prepare_distribute_model(DistributedConfig(tp_size=workers))
        model = cls.maybe_distribute_model(model, distributed, mesh)
    rotary_type = type(model.model.rotary_emb)
    model = model.to_empty(device=device).eval()
    model.model.rotary_emb = rotary_type(config).to(device)
    with torch.no_grad():
        random_fill(model)
    return model


def host_points(spec: Spec, device: int = 0, workers: int = 1) -> Iterator[HostPoint]:
    """Host time of eager prefill and decode steps of tiny models with few and more layers.

    The launches are those that the lowering counts, so that a fit over the points gives seconds per
    launch and per step in the very units that predictions use. All workers must call this at once.

    Raises:
        UnsupportedError: the model cannot run with so many workers; the text says why.
    """
    import torch

    engine = load_engine("hf")
    for layers in HOST_LAYERS:
        model = tiny_model(spec, layers, f"cuda:{device}", workers)
        ids = torch.randint(1024, (1, HOST_TOKENS), device=f"cuda:{device}")
        block = max(spec.blocks, key=lambda b: b.repeat)
        small = replace(
            spec,
            blocks=tuple(replace(b, repeat=layers) if b is block else b for b in spec.blocks),
        )
        for phase in (Phase.PREFILL, Phase.DECODE):
            step = (
                Step.prefill(1, HOST_TOKENS, Mode.EAGER)
                if phase is Phase.PREFILL
                else Step.decode(1, HOST_TOKENS + 1, Mode.EAGER)
            )
            ops = lower_step(small, engine, Parallelism(tp=workers), step)
            if isinstance(ops, Infeasible):
                raise UnsupportedError(ops.reason)
            start = time.monotonic()
            times = _time_forward(model, ids, phase, HOST_REPEATS[layers])
            median = statistics.median(times)
            yield HostPoint(
                label=f"{spec.name} {phase} {layers} layers tp{workers}",
                ops=ops,
                step_s=median,
                spread=statistics.pstdev(times) / median,
                start_s=start,
                end_s=time.monotonic(),
            )
        del model


def module_seconds(device: int = 0) -> float:
    """Median host seconds of an eager prefill of a tiny two-layer model; see `tiny_model`."""
    import torch

    model = tiny_model(load_spec(ANCHOR_SPEC), ANCHOR_LAYERS, f"cuda:{device}")
    ids = torch.randint(1024, (1, HOST_TOKENS), device=f"cuda:{device}")
    return statistics.median(_time_forward(model, ids, Phase.PREFILL, ANCHOR_REPEATS))


def _time_forward(model: Any, ids: Any, phase: Phase, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` forwards, the first tenth dropped.

    The count is fixed, since all workers of a tensor-parallel model must make the same calls.
    """
    import torch

    times = []
    with torch.inference_mode():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(repeats):
            if phase is Phase.DECODE:
                for layer in cache.layers:
                    layer.keys = layer.keys[:, :, : ids.shape[1]]
                    layer.values = layer.values[:, :, : ids.shape[1]]
            torch.cuda.synchronize()
            start = time.perf_counter()
            if phase is Phase.PREFILL:
                model(ids, use_cache=True, logits_to_keep=1)
            else:
                model(ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return times[repeats // 10 :]
