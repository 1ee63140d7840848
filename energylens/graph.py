"""Ops, and how many FLOPs and bytes they stand for.

An `Op` is the unit that is costed, and also the unit that is calibrated: a sample is an op with a
measured cost. What a kernel computes and moves follows from its shape by the one table `KERNELS`.
`count_einsum` counts a contraction from its ranks; the property tests hold the two against each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from energylens.errors import SpecError
from energylens.results import Kind
from energylens.spec.model import Einsum
from energylens.units import bytes_per_value

Shape = Mapping[str, float]

SPLIT_TOKENS = 512
"""vLLM captures steps of up to so many tokens, and bounds how their attention is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelType:
    """What one calibrated kernel is.

    Attributes:
        kind: breakdown kind.
        dims: names of its shape dimensions, in order.
        flops: shape -> FLOPs (a multiply-add is two).
        read, write: shape -> values read and written (in units of one stored value; bytes follow
            from the dtype).
        stored: shape -> those of the values read that are weights or cache, where all else may be
            wider than they are; None: everything is in the op's dtype.
        is_collective: True where workers exchange data; the shape then holds ``values`` and
            ``workers``.
    """

    kind: Kind
    dims: tuple[str, ...]
    flops: Callable[[Shape], float]
    read: Callable[[Shape], float]
    write: Callable[[Shape], float]
    stored: Callable[[Shape], float] | None = None
    is_collective: bool = False


def _pairs(s: Shape) -> float:
    """Causal (query, key) pairs per head and sequence: a token sees itself and all before it."""
    new, context = s["new"], s["context"]
    return new * context - new * (new - 1) / 2


def _pairs_in_window(s: Shape) -> float:
    """The same where a token sees no more than the last ``window`` tokens, itself among them."""
    new, past, window = s["new"], s["context"] - s["new"], s["window"]
    growing = min(max(window - past, 0.0), new)  # new tokens that see all before them
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * window


def _seen_in_window(s: Shape) -> float:
    """Tokens that any of the new ones sees."""
    return min(s["context"], s["new"] + s["window"] - 1)


def _head(s: Shape, heads: str) -> float:
    return s[heads] * s["head_dim"]


def _none(_: Shape) -> float:
    return 0.0


def _rows(per_row: float) -> Callable[[Shape], float]:
    return lambda s: per_row * s["rows"] * s["width"]


def _rotated(per_value: float) -> Callable[[Shape], float]:
    """``per_value`` for each value of the queries and keys of the new tokens."""

    def count(s: Shape) -> float:
        return per_value * s["batch"] * s["new"] * (_head(s, "q_heads") + _head(s, "kv_heads"))

    return count


_COLLECTIVE = KernelType(
    kind=Kind.COLLECTIVE,
    dims=("values", "workers"),
    flops=_none,
    read=lambda s: s["values"],
    write=lambda s: s["values"],
    is_collective=True,
)


# On so many streaming multiprocessors, as collectives beside compute are kept.
_LIMITED = replace(_COLLECTIVE, dims=("values", "workers", "sms"))


_ATTENTION_DIMS = ("batch", "new", "context", "q_heads", "kv_heads", "head_dim")


def _attention_flops(s: Shape) -> float:
    # q·k and p·v, two FLOPs a pair and head dimension.
    return 4 * s["batch"] * _head(s, "q_heads") * _pairs(s)


_ATTENTION = KernelType(
    kind=Kind.ATTENTION,
    dims=_ATTENTION_DIMS,
    flops=_attention_flops,
    read=lambda s: (
        s["batch"] * (_head(s, "q_heads") * s["new"] + 2 * _head(s, "kv_heads") * s["context"])
    ),
    write=lambda s: s["batch"] * _head(s, "q_heads") * s["new"],
    stored=lambda s: 2 * s["batch"] * _head(s, "kv_heads") * s["context"],
)

_WINDOW = KernelType(
    kind=Kind.ATTENTION,
    dims=(*_ATTENTION_DIMS, "window"),
    flops=lambda s: 4 * s["batch"] * _head(s, "q_heads") * _pairs_in_window(s),
    read=lambda s: (
        s["batch"]
        * (_head(s, "q_heads") * s["new"] + 2 * _head(s, "kv_heads") * _seen_in_window(s))
    ),
    write=lambda s: s["batch"] * _head(s, "q_heads") * s["new"],
    stored=lambda s: 2 * s["batch"] * _head(s, "kv_heads") * _seen_in_window(s),
)

_ROPE = KernelType(
    kind=Kind.ELEMENTWISE,
    dims=("batch", "new", "q_heads", "kv_heads", "head_dim"),
    flops=_rotated(3),
    read=_rotated(1),
    write=_rotated(1),
)

_SILU_MUL = KernelType(
    kind=Kind.ELEMENTWISE,
    dims=("rows", "width"),
    flops=_rows(5),
    read=_rows(2),
    write=_rows(1),
)


def _between_experts(s: Shape) -> float:
    """Values between the products of experts, whose buffers hold the pairs of all workers."""
    return s["tokens"] * s["topk"] * (3 * s["hidden"] + s["width"])


_MOE = KernelType(
    # Experts of one worker, from the router's logits on. ``rows`` are the (token, expert) pairs
    # among the ``experts`` that it holds, of which ``active`` have any and the fullest ``largest``.
    kind=Kind.MOE,
    dims=("tokens", "topk", "experts", "rows", "active", "largest", "width", "hidden"),
    # Gate, up and down for each (token, expert) pair.
    flops=lambda s: 6 * s["rows"] * s["width"] * s["hidden"],
    # Weights of the experts that any token chose; what lies between the products; the sum.
    read=lambda s: (
        3 * s["active"] * s["width"] * s["hidden"] + s["tokens"] * s["width"] + _between_experts(s)
    ),
    write=lambda s: _between_experts(s) + s["tokens"] * s["width"],
    stored=lambda s: 3 * s["active"] * s["width"] * s["hidden"],
)

_SAMPLING = KernelType(
    kind=Kind.SAMPLING,
    dims=("rows", "width"),
    flops=_rows(1),
    read=_rows(1),
    write=lambda s: s["rows"],
)

KERNELS: Mapping[str, KernelType] = MappingProxyType(
    {
        "gemm": KernelType(
            kind=Kind.GEMM,
            dims=("m", "n", "k"),
            flops=lambda s: 2 * s["m"] * s["n"] * s["k"],
            read=lambda s: s["m"] * s["k"] + s["k"] * s["n"],
            write=lambda s: s["m"] * s["n"],
            stored=lambda s: s["k"] * s["n"],
        ),
        # As many GEMMs as there are heads, each with an input and a weight of its own.
        "vllm_bmm": KernelType(
            kind=Kind.GEMM,
            dims=("heads", "m", "n", "k"),
            flops=lambda s: 2 * s["heads"] * s["m"] * s["n"] * s["k"],
            read=lambda s: s["heads"] * (s["m"] * s["k"] + s["k"] * s["n"]),
            write=lambda s: s["heads"] * s["m"] * s["n"],
            stored=lambda s: s["heads"] * s["k"] * s["n"],
        ),
        # Causal attention over new and cached tokens, grouped-query.
        "attention_prefill": _ATTENTION,
        "attention_decode": _ATTENTION,
        # The same with an explicit mask, which keeps SDPA from its flash kernels: a captured HF
        # decode step.
        "attention_decode_masked": _ATTENTION,
        # transformers' modules, eager: each is several CUDA kernels with intermediates in device
        # memory, so the traffic below is the least that the module could move, not what it does.
        "hf_rmsnorm": KernelType(
            kind=Kind.NORM,
            dims=("rows", "width"),
            flops=_rows(4),
            read=lambda s: s["rows"] * s["width"] + s["width"],
            write=_rows(1),
        ),
        "hf_rope": _ROPE,
        "hf_silu_mul": _SILU_MUL,
        "hf_add": KernelType(
            kind=Kind.ELEMENTWISE,
            dims=("rows", "width"),
            flops=_rows(1),
            read=_rows(2),
            write=_rows(1),
        ),
        # vLLM's: attention over a paged cache, modules that Inductor fuses (nothing in between
        # touches device memory), its own all-reduce for messages that fit its buffers.
        "vllm_attention_prefill": _ATTENTION,
        "vllm_attention_decode": _ATTENTION,
        "vllm_window_prefill": _WINDOW,
        "vllm_window_decode": _WINDOW,
        # Latent attention. A prefill has keys and values of each head, of different sizes; a decode
        # step takes the latent vector of a token for both, and the keys' common part beside it.
        "vllm_latent_prefill": KernelType(
            kind=Kind.ATTENTION,
            dims=("batch", "new", "context", "heads", "key_dim", "value_dim"),
            flops=lambda s: (
                2 * s["batch"] * s["heads"] * (s["key_dim"] + s["value_dim"]) * _pairs(s)
            ),
            read=lambda s: (
                s["batch"]
                * s["heads"]
                * (s["key_dim"] * s["new"] + (s["key_dim"] + s["value_dim"]) * s["context"])
            ),
            write=lambda s: s["batch"] * s["heads"] * s["value_dim"] * s["new"],
        ),
        "vllm_latent_decode": KernelType(
            kind=Kind.ATTENTION,
            dims=("batch", "new", "context", "heads", "latent", "shared_key"),
            flops=lambda s: (
                2 * s["batch"] * s["heads"] * (2 * s["latent"] + s["shared_key"]) * _pairs(s)
            ),
            read=lambda s: (
                s["batch"]
                * (s["latent"] + s["shared_key"])
                * (s["heads"] * s["new"] + s["context"])
            ),
            write=lambda s: s["batch"] * s["heads"] * s["latent"] * s["new"],
            stored=lambda s: s["batch"] * (s["latent"] + s["shared_key"]) * s["context"],
        ),
        "vllm_latent_write": KernelType(
            kind=Kind.COPY, dims=("rows", "width"), flops=_none, read=_rows(1), write=_rows(1)
        ),
        "vllm_add_rmsnorm": KernelType(
            kind=Kind.NORM,
            dims=("rows", "width"),
            flops=_rows(5),
            read=lambda s: 2 * s["rows"] * s["width"] + s["width"],
            write=_rows(2),
        ),
        "vllm_rope": _ROPE,
        "vllm_norm_rope": _ROPE,
        "vllm_silu_mul": _SILU_MUL,
        # K and V of the new tokens into their pages.
        "vllm_kv_write": KernelType(
            kind=Kind.COPY,
            dims=("batch", "new", "kv_heads", "head_dim"),
            flops=_none,
            read=lambda s: 2 * s["batch"] * s["new"] * _head(s, "kv_heads"),
            write=lambda s: 2 * s["batch"] * s["new"] * _head(s, "kv_heads"),
        ),
        # Cosine and sine tables, positions and (under capture) the mask: what a step prepares once
        # for all layers.
        "hf_prepare": KernelType(
            kind=Kind.OVERHEAD,
            dims=("batch", "new", "context", "head_dim"),
            flops=_none,
            read=_none,
            write=lambda s: 2 * s["new"] * s["head_dim"],
        ),
        "embedding": KernelType(
            kind=Kind.COPY, dims=("rows", "width"), flops=_none, read=_rows(1), write=_rows(1)
        ),
        # The growing cache: K and V of all earlier tokens are copied, and the new ones put behind.
        "hf_kv_concat": KernelType(
            kind=Kind.COPY,
            dims=("batch", "new", "context", "kv_heads", "head_dim"),
            flops=_none,
            read=lambda s: 2 * s["batch"] * s["context"] * _head(s, "kv_heads"),
            write=lambda s: 2 * s["batch"] * s["context"] * _head(s, "kv_heads"),
        ),
        "hf_repeat_kv": KernelType(
            kind=Kind.COPY,
            dims=("batch", "context", "kv_heads", "q_heads", "head_dim"),
            flops=_none,
            read=lambda s: 2 * s["batch"] * s["context"] * _head(s, "kv_heads"),
            write=lambda s: 2 * s["batch"] * s["context"] * _head(s, "q_heads"),
        ),
        "argmax": _SAMPLING,
        "vllm_sample": _SAMPLING,
        # The whole block of transformers, router included; vLLM's top-k and fused experts.
        # Both run what lies between the products over the pairs of other workers' experts too.
        "hf_moe": _MOE,
        "vllm_moe": _MOE,
        # ``values`` = values of the result on each worker (of the input, for a reduce-scatter).
        "all_reduce": _COLLECTIVE,
        "all_gather": _COLLECTIVE,
        "reduce_scatter": _COLLECTIVE,
        "all_to_all": _COLLECTIVE,
        "vllm_all_reduce": _COLLECTIVE,
        "limited_all_reduce": _LIMITED,
        # What a GEMM in chunks of its rows does not hide of the all-reduces beside it: ``values``
        # of all chunks, then how they are run, then the sizes of the whole GEMM. The op's dtype is
        # that of the GEMM's weights.
        "overlapped_all_reduce": replace(
            _LIMITED, dims=(*_LIMITED.dims, "chunks", "m", "n", "k"), stored=_none
        ),
        # From a worker of one pipeline stage to one of the next: two workers, all values one way.
        "send": _COLLECTIVE,
    }
)
"""Every kernel that can be costed.

A new one is one entry here, a runnable in `bench` and a feature row in `cost`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Work that one worker does: a kernel with a shape.

    Attributes:
        name: entry of the spec that it stands for (``gate``), or what the engine adds
            (``repeat_kv``).
        kernel: key of `KERNELS`.
        shape: sizes in the order of the kernel's ``dims``; a context may be fractional.
        dtype: precision of what is stored (weights for a GEMM, the cache for attention).
        count: executions per step.
        launches: CUDA kernels that one eager execution launches (host time follows them).
    """

    name: str
    kernel: str
    shape: tuple[float, ...]
    dtype: str = "bf16"
    count: int = 1
    launches: int = 1

    def __post_init__(self) -> None:
        kernel_type(self.kernel)
        dims = KERNELS[self.kernel].dims
        if len(self.shape) != len(dims):
            raise SpecError(
                f"{self.kernel} needs the sizes {', '.join(dims)}, not {len(self.shape)} sizes"
            )

    @property
    def type(self) -> KernelType:
        """Row of `KERNELS`."""
        return KERNELS[self.kernel]

    @property
    def kind(self) -> Kind:
        """Breakdown kind."""
        return self.type.kind

    @property
    def sizes(self) -> Shape:
        """Shape as a mapping, dimension name -> size."""
        return dict(zip(self.type.dims, self.shape, strict=True))

    @property
    def flops(self) -> float:
        """FLOPs of one execution."""
        return self.type.flops(self.sizes)

    @property
    def bytes_read(self) -> float:
        """Bytes that one execution reads, each input once."""
        read, width = self.type.read(self.sizes), bytes_per_value(self.dtype)
        if self.type.stored is None or width == self.carried_bytes:
            return read * width
        stored = self.type.stored(self.sizes)
        return stored * width + (read - stored) * self.carried_bytes

    @property
    def bytes_written(self) -> float:
        """Bytes that one execution writes, each output once."""
        return self.type.write(self.sizes) * self.carried_bytes

    @property
    def carried_bytes(self) -> float:
        """Bytes of one value that a kernel takes from another or hands on.

        16 bits at least where only weights or a cache are stored in less.
        """
        width = bytes_per_value(self.dtype)
        return width if self.type.stored is None else max(width, bytes_per_value("bf16"))

    @property
    def key(self) -> tuple[str, tuple[float, ...], str]:
        """What makes two ops the same work: kernel, shape and precision."""
        return self.kernel, self.shape, self.dtype

    def times(self, count: int) -> Op:
        """The same op, executed ``count`` times as often."""
        return replace(self, count=self.count * count)


def kernel_type(name: str) -> KernelType:
    """Row of `KERNELS`.

    Raises:
        SpecError: there is no such kernel.
    """
    try:
        return KERNELS[name]
    except KeyError:
        raise SpecError(f"unknown kernel {name!r}; known: {', '.join(sorted(KERNELS))}") from None


def make_op(
    kernel: str,
    *,
    name: str = "",
    dtype: str = "bf16",
    count: int = 1,
    launches: int = 1,
    **sizes: float,
) -> Op:
    """An op from named sizes, e.g. ``make_op("gemm", m=16, n=4096, k=4096)``.

    Raises:
        SpecError: unknown kernel, or a size is missing or not one of its dimensions.
    """
    dims = kernel_type(kernel).dims
    if set(sizes) != set(dims):
        raise SpecError(
            f"{kernel} needs the sizes {', '.join(dims)}, not {', '.join(sizes) or 'none'}"
        )
    return Op(
        name=name or kernel,
        kernel=kernel,
        shape=tuple(sizes[d] for d in dims),
        dtype=dtype,
        count=count,
        launches=launches,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EinsumCount:
    """What a contraction stands for.

    Attributes:
        flops: FLOPs (a multiply-add is two).
        weight_values, input_values, output_values: values of weights, other inputs and output.
        m, n, k: the contraction seen as a GEMM (see `count_einsum`).
    """

    flops: float
    weight_values: float
    input_values: float
    output_values: float
    m: float
    n: float
    k: float


def count_einsum(einsum: Einsum, sizes: Mapping[str, float]) -> EinsumCount:
    """Count a contraction from its ranks; FLOPs by opt_einsum's cost for the order that it chooses.

    ``m`` is the product of the output ranks that come from non-weight inputs, ``n`` of the
    weight's output ranks, ``k`` of the reduced ranks.

    Args:
        einsum: the contraction.
        sizes: size of each rank.

    Raises:
        SpecError: a rank has no size.
    """
    from opt_einsum import contract_path
    from opt_einsum.helpers import compute_size_by_dict

    ranks = list(dict.fromkeys(r for a in (*einsum.inputs, einsum.output) for r in a.ranks))
    missing = [r for r in ranks if r not in sizes]
    if missing:
        raise SpecError(f"rank {missing[0]!r} of {einsum} has no size; add it to `ranks`")
    letter = {r: chr(ord("a") + i) for i, r in enumerate(ranks)}

    def subscript(rs: tuple[str, ...]) -> str:
        return "".join(letter[r] for r in rs)

    def values(rs: tuple[str, ...]) -> float:
        return float(compute_size_by_dict(subscript(rs), by_letter))

    by_letter = {letter[r]: int(sizes[r]) for r in ranks}
    equation = (
        ",".join(subscript(a.ranks) for a in einsum.inputs) + "->" + subscript(einsum.output.ranks)
    )
    shapes = [tuple(int(sizes[r]) for r in a.ranks) for a in einsum.inputs]
    _, info = contract_path(
        equation, *shapes, shapes=True, optimize="optimal" if len(shapes) > 2 else "auto"
    )
    weight_ranks = {r for a in einsum.inputs if a.is_weight for r in a.ranks}
    out = einsum.output.ranks
    return EinsumCount(
        flops=float(info.opt_cost),
        weight_values=sum(values(a.ranks) for a in einsum.inputs if a.is_weight),
        input_values=sum(values(a.ranks) for a in einsum.inputs if not a.is_weight),
        output_values=values(out),
        m=values(tuple(r for r in out if r not in weight_ranks)),
        n=values(tuple(r for r in out if r in weight_ranks)),
        k=values(einsum.reduced),
    )
