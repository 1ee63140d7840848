"""A Hugging Face ``config.json`` -> a model: what `energylens import` writes.

Only the file is read, without transformers. What it leaves out is what the classes of transformers
take where it is not given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energylens.errors import SpecError
from energylens.spec.fields import Field, dump_yaml
from energylens.spec.load import parse_spec
from energylens.spec.model import Spec

CONFIG = "config.json"
_MOST_LAYERS = 10_000

Entry = dict[str, Any]


def import_spec(path: Path, name: str) -> Spec:
    """The model of a ``config.json``, or of a folder that holds one.

    Args:
        path: of either.
        name: of the model.

    Raises:
        SpecError: no such file, an architecture or a value in it that the language does not carry.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        root = Field(json.loads(file.read_text(encoding="utf-8")), "", str(file))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{file}: cannot be read as a Hugging Face config ({reason})") from None
    model_type = _Config(root).value("model_type").choice(_MODELS)
    config = _Config(replace(root, value={**_DEFAULTS.get(model_type, {}), **root.value}))
    described = _MODELS[model_type](config)
    text = described.document(name, config.source(file))
    if config.has("max_position_embeddings"):
        text["context"] = config.size("max_position_embeddings")
    return parse_spec(dump_yaml(text), path=str(file))


@dataclass(frozen=True, slots=True)
class _Config:
    """The fields of a ``config.json``; one that is null counts as absent."""

    root: Field

    def value(self, key: str) -> Field:
        path = f"{self.root.path}.{key}" if self.root.path else key
        return self.root.pairs().get(key) or Field(None, path, self.root.file)

    def has(self, key: str) -> bool:
        return self.value(key).value is not None

    def size(self, key: str, default: int | None = None) -> int:
        if default is not None and not self.has(key):
            return default
        return self.value(key).integer()

    def count(self, key: str, default: int) -> int:
        """A whole number of at least 0."""
        return _count(self.value(key)) if self.has(key) else default

    def counts(self, key: str) -> list[int]:
        """A list of them, empty where there is none."""
        return [_count(item) for item in self.value(key).items()] if self.has(key) else []

    @property
    def layers(self) -> int:
        """How many there are; each is looked at, so a number without sense is refused."""
        layers = self.size("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise self.value("num_hidden_layers").expected(f"1 to {_MOST_LAYERS}")
        return layers

    def flag(self, key: str, default: bool = False) -> bool:
        return self.value(key).flag() if self.has(key) else default

    def quotient(self, key: str, by: str) -> int:
        """One size over another one, which must divide it."""
        whole, parts = self.size(key), self.size(by)
        if whole % parts:
            raise self.value(key).error(f"found {whole}; allowed: a multiple of {by}={parts}")
        return whole // parts

    def source(self, file: Path) -> str:
        """Where the sizes come from: the id that the file names, else its folder."""
        return f"{self.value('_name_or_path').value or file.parent.resolve()} {file.name}"

    def only(self, key: str, *allowed: object) -> None:
        """Refuse another value than the ones that the language carries."""
        if self.has(key) and self.value(key).value not in allowed:
            raise self.value(key).expected(", ".join(map(str, allowed)))


def _count(field: Field) -> int:
    return 0 if field.value == 0 and not isinstance(field.value, bool) else field.integer()


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Layers that are the same: entries of their attention and of what follows it."""

    name: str
    repeat: int
    attention: Sequence[Entry]
    mlp: Sequence[Entry]
    window: int | None = None

    def document(self) -> dict[str, Any]:
        cascade = [
            _op("attn_norm", "rmsnorm", "x[b,s,m], Wattn_norm[m]"),
            *self.attention,
            _op("attn_residual", "add", "x[b,s,m], y[b,s,m]"),
            _op("mlp_norm", "rmsnorm", "x[b,s,m], Wmlp_norm[m]"),
            *self.mlp,
            _op("mlp_residual", "add", "x[b,s,m], y[b,s,m]"),
        ]
        window = {"window": self.window} if self.window is not None else {}
        return {"name": self.name, "repeat": self.repeat, **window, "cascade": cascade}


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What a config describes."""

    ranks: Mapping[str, int]
    blocks: Sequence[_Block]
    split: Sequence[str]
    weights: str
    tied: bool
    carried: str
    attention: Mapping[str, Any]
    topk: int | None = None
    notes: Sequence[str] = field(default=())

    def document(self, name: str, source: str) -> dict[str, Any]:
        wide = {"weights": self.carried} if self.weights != self.carried else {}
        tied = {"tied": "Wemb"} if self.tied else {}
        head = _einsum("lm_head", "x[b,m], Wlm[v,m] -> logits[b,v]", **tied, **wide)
        moe = {"rank": "e", "topk": self.topk, "routing": {"kind": "uniform"}}
        return {
            "schema": "energylens/spec/v1",
            "name": name,
            "source": source,
            "ranks": dict(self.ranks),
            "precision": {
                "weights": self.weights,
                "activations": self.carried,
                "kv_cache": self.carried,
            },
            "blocks": [
                {
                    "name": "embedding",
                    "cascade": [{**_op("embed", "embedding", "Wemb[v,m]"), **wide}],
                },
                *(block.document() for block in self.blocks),
                {
                    "name": "head",
                    "cascade": [
                        _op("final_norm", "rmsnorm", "x[b,s,m], Wfinal_norm[m]"),
                        head,
                        _op("sample", "argmax", "logits[b,v]"),
                    ],
                },
            ],
            "parallelism": {"tp": list(self.split)} | ({"ep": ["e"]} if self.topk else {}),
            "fusion": [dict(self.attention)],
            **({"moe": moe} if self.topk else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }


def _op(name: str, op: str, inputs: str) -> Entry:
    return {"name": name, "op": op, "in": inputs}


def _einsum(name: str, einsum: str, **more: object) -> Entry:
    """A contraction; of what else is said about it, what is true."""
    return {"name": name, "einsum": einsum, **{k: v for k, v in more.items() if v}}


# ---------------------------------------------------------------- parts of a layer


_FLASH = {"members": ["scores", "softmax", "context"], "kernel": "flash_attention"}


def _heads(config: _Config) -> dict[str, int]:
    """Ranks of grouped-query attention."""
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.value("num_key_value_heads").error(
            f"found {kv_heads}; allowed: a divisor of num_attention_heads={heads}"
        )
    head_dim = (
        config.size("head_dim")
        if config.has("head_dim")
        else config.quotient("hidden_size", "num_attention_heads")
    )
    return {"g": kv_heads, "r": heads // kv_heads, "d": head_dim}


def _grouped(
    *, norms: bool = False, sinks: bool = False, bias: str = "", weights: str | None = None
) -> list[Entry]:
    """Entries of grouped-query attention; ``bias`` names the projections that have one."""

    def projection(name: str, einsum: str, **more: object) -> Entry:
        return _einsum(name, einsum, **more, bias=name in bias, weights=weights)

    return [
        projection("q", "x[b,s,m], Wq[m,g,r,d] -> q[b,s,g,r,d]"),
        projection("k", "x[b,s,m], Wk[m,g,d] -> k[b,s,g,d]", cache=True),
        projection("v", "x[b,s,m], Wv[m,g,d] -> v[b,s,g,d]", cache=True),
        *(
            [
                _op("q_norm", "rmsnorm", "q[b,s,g,r,d], Wq_norm[d]"),
                _op("k_norm", "rmsnorm", "k[b,s,g,d], Wk_norm[d]"),
            ]
            if norms
            else []
        ),
        _op("rope", "rope", "q[b,s,g,r,d], k[b,s,g,d]"),
        _einsum("scores", "q[b,s,g,r,d], k[b,t,g,d] -> p[b,g,r,s,t]", mask="causal"),
        _op("softmax", "softmax", "p[b,g,r,s,t]" + (", Wsinks[g,r]" if sinks else "")),
        _einsum("context", "p[b,g,r,s,t], v[b,t,g,d] -> c[b,s,g,r,d]"),
        projection("o", "c[b,s,g,r,d], Wo[g,r,d,m] -> y[b,s,m]"),
    ]


def _latent() -> list[Entry]:
    """Entries of latent attention."""
    return [
        _einsum("q_a", "x[b,s,m], Wq_a[m,q] -> qa[b,s,q]"),
        _einsum("kv_a", "x[b,s,m], Wkv_a[m,l] -> c[b,s,l]", cache=True),
        _einsum("k_rope", "x[b,s,m], Wk_rope[m,p] -> kr[b,s,p]", cache=True),
        _op("q_a_norm", "rmsnorm", "qa[b,s,q], Wq_a_norm[q]"),
        _op("kv_a_norm", "rmsnorm", "c[b,s,l], Wkv_a_norm[l]"),
        _einsum("q_nope", "qa[b,s,q], Wq_nope[q,h,n] -> qn[b,s,h,n]"),
        _einsum("q_rope", "qa[b,s,q], Wq_rope[q,h,p] -> qr[b,s,h,p]"),
        _op("rope", "rope", "qr[b,s,h,p], kr[b,s,p]"),
        _einsum("k_lift", "c[b,t,l], Wk_lift[l,h,n] -> k[b,t,h,n]"),
        _einsum("v_lift", "c[b,t,l], Wv_lift[l,h,w] -> u[b,t,h,w]"),
        _einsum("scores", "qn[b,s,h,n], k[b,t,h,n] -> p[b,h,s,t]", mask="causal"),
        _einsum("rope_scores", "qr[b,s,h,p], kr[b,t,p] -> p[b,h,s,t]", mask="causal"),
        _op("softmax", "softmax", "p[b,h,s,t]"),
        _einsum("context", "p[b,h,s,t], u[b,t,h,w] -> z[b,s,h,w]"),
        _einsum("o", "z[b,s,h,w], Wo[h,w,m] -> y[b,s,m]"),
    ]


def _dense(bias: bool = False) -> list[Entry]:
    return [
        _einsum("gate", "x[b,s,m], Wgate[m,f] -> gate[b,s,f]", bias=bias),
        _einsum("up", "x[b,s,m], Wup[m,f] -> up[b,s,f]", bias=bias),
        _op("act", "silu_mul", "gate[b,s,f], up[b,s,f]"),
        _einsum("down", "gate[b,s,f], Wdown[f,m] -> y[b,s,m]", bias=bias),
    ]


def _experts(
    width: str = "f", *, bias: bool = False, router_bias: bool = False, router: str | None = None
) -> list[Entry]:
    """Entries of routed experts; ``router``: precision of its weights, where not the model's."""
    logits = "x[b,s,m], Wrouter[m,e] -> logits[b,s,e]"
    inner = f"b,s,e,{width}"
    return [
        _einsum("router", logits, bias=router_bias, weights=router),
        _op("topk", "topk", "logits[b,s,e]"),
        _einsum("gate", f"x[b,s,m], Wgate[e,m,{width}] -> gate[{inner}]", bias=bias),
        _einsum("up", f"x[b,s,m], Wup[e,m,{width}] -> up[{inner}]", bias=bias),
        _op("act", "silu_mul", f"gate[{inner}], up[{inner}]"),
        _einsum("down", f"gate[{inner}], Wdown[e,{width},m] -> y[b,s,m]", bias=bias),
    ]


def _shared() -> list[Entry]:
    """Entries of the expert of every token, after the routed ones."""
    return [
        _einsum("shared_gate", "x[b,s,m], Wshared_gate[m,u] -> shared[b,s,u]"),
        _einsum("shared_up", "x[b,s,m], Wshared_up[m,u] -> shared_up[b,s,u]"),
        _op("shared_act", "silu_mul", "shared[b,s,u], shared_up[b,s,u]"),
        _einsum("shared_down", "shared[b,s,u], Wshared_down[u,m] -> z[b,s,m]"),
        _op("shared_sum", "add", "y[b,s,m], z[b,s,m]"),
    ]


# ---------------------------------------------------------------- what a config says of all layers


_DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})


def _precision(config: _Config, *quantised: str) -> tuple[str, str]:
    """Precision of the weights and of what is carried between kernels.

    Of quantised weights, embedding, head and router stay as they were.
    """
    key = "dtype" if config.has("dtype") else "torch_dtype"
    carried = _DTYPES[config.value(key).choice(_DTYPES)] if config.has(key) else "bf16"
    if not config.has("quantization_config"):
        return carried, carried
    own = _Config(config.value("quantization_config"))
    method = own.value("quant_method").choice(quantised)
    if method == "fp8" and own.has("weight_block_size"):
        own.only("weight_block_size", [128, 128])
        return "fp8_block", carried
    return method, carried


def _wide(precision: tuple[str, str]) -> str | None:
    """What weights are stored as that are not quantised with the others; None where none are."""
    weights, carried = precision
    return carried if weights != carried else None


def _windows(config: _Config, layers: int, default: Sequence[int | None]) -> list[int | None]:
    """The window of each layer, None for those that see all."""
    if not config.has("layer_types"):
        return list(default)
    kinds = config.value("layer_types").items()
    if len(kinds) != layers:
        raise config.value("layer_types").error(
            f"found {len(kinds)} layers; allowed: num_hidden_layers={layers}"
        )
    named = {"full_attention": False, "sliding_attention": True}
    return [config.size("sliding_window") if named[k.choice(named)] else None for k in kinds]


def _blocks(
    windows: Sequence[int | None],
    attention: Sequence[Entry],
    mlps: Sequence[tuple[str, Sequence[Entry]]],
) -> Iterator[_Block]:
    """Layers that are alike as one block each, in order of their first one.

    Args:
        windows: of each layer.
        attention: entries of all.
        mlps: of each layer, what a block of such layers is called, and the entries.
    """
    kinds = list(zip(windows, (name for name, _ in mlps), strict=True))
    entries = dict(mlps)
    for window, name in dict.fromkeys(kinds):
        yield _Block(
            name=name if window is None else f"window_{name}",
            repeat=kinds.count((window, name)),
            attention=attention,
            mlp=entries[name],
            window=window,
        )


# ---------------------------------------------------------------- architectures


def _grouped_model(
    config: _Config,
    precision: tuple[str, str],
    *,
    widths: Mapping[str, int],
    attention: Sequence[Entry],
    mlps: Sequence[tuple[str, Sequence[Entry]]],
    windows: Sequence[int | None],
    topk: int | None = None,
) -> _Model:
    """A decoder with grouped-query attention.

    Args:
        config: that describes it.
        precision: of weights, and of what is carried.
        widths: ranks of the layers beside those of attention; the experts are ``e``.
        attention: its entries.
        mlps: of each layer, name and entries.
        windows: of each layer, where the config does not name them.
        topk: experts of a token.
    """
    config.only("hidden_act", "silu")
    weights, carried = precision
    seen = _windows(config, len(mlps), windows)
    return _Model(
        ranks={
            "m": config.size("hidden_size"),
            **_heads(config),
            **widths,
            "v": config.size("vocab_size"),
        },
        blocks=list(_blocks(seen, attention, mlps)),
        split=("g", "r", *(rank for rank in widths if rank != "e"), "v"),
        weights=weights,
        carried=carried,
        tied=config.flag("tie_word_embeddings"),
        attention=_FLASH,
        topk=topk,
    )


def _decoder(config: _Config, *, norms: bool = False, bias: str = "") -> _Model:
    """A dense one of the families of Llama and Qwen."""
    layers = config.layers
    mlp = _dense(config.flag("mlp_bias"))
    return _grouped_model(
        config,
        _precision(config, "fp8"),
        widths={"f": config.size("intermediate_size")},
        attention=_grouped(norms=norms, bias=bias),
        mlps=[("layer", mlp)] * layers,
        windows=_late_windows(config, layers),
    )


def _bias(config: _Config, default: bool = False) -> str:
    return "qkvo" if config.flag("attention_bias", default) else ""


def _late_windows(config: _Config, layers: int) -> list[int | None]:
    """Of Qwen: with ``use_sliding_window``, the layers from ``max_window_layers`` on have one."""
    if not config.flag("use_sliding_window") or not config.has("sliding_window"):
        return [None] * layers
    first, window = config.count("max_window_layers", 28), config.size("sliding_window")
    return [None if i < first else window for i in range(layers)]


def _qwen3_moe(config: _Config) -> _Model:
    layers, step = config.layers, config.size("decoder_sparse_step", 1)
    dense = set(config.counts("mlp_only_layers"))
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    width = "f" if all(sparse) else "i"
    own = {} if all(sparse) else {"f": config.size("intermediate_size")}
    precision = _precision(config, "fp8")
    routed = _experts(width, router=_wide(precision))
    return _grouped_model(
        config,
        precision,
        widths={
            "e": config.size("num_experts"),
            **own,
            width: config.size("moe_intermediate_size"),
        },
        attention=_grouped(norms=True, bias=_bias(config)),
        mlps=[("layer", routed) if s else ("dense_layer", _dense()) for s in sparse],
        windows=_late_windows(config, layers),
        topk=config.size("num_experts_per_tok"),
    )


def _mixtral(config: _Config) -> _Model:
    layers = config.layers
    window = config.size("sliding_window") if config.has("sliding_window") else None
    precision = _precision(config, "fp8")
    routed = _experts(router=_wide(precision))
    return _grouped_model(
        config,
        precision,
        widths={"e": config.size("num_local_experts"), "f": config.size("intermediate_size")},
        attention=_grouped(),
        mlps=[("layer", routed)] * layers,
        windows=[window] * layers,
        topk=config.size("num_experts_per_tok"),
    )


def _gpt_oss(config: _Config) -> _Model:
    layers, window = config.layers, config.size("sliding_window", 128)
    precision = _precision(config, "mxfp4")
    wide = _wide(precision)
    routed = _experts(bias=True, router_bias=True, router=wide)
    return _grouped_model(
        config,
        precision,
        widths={"e": config.size("num_local_experts"), "f": config.size("intermediate_size")},
        attention=_grouped(sinks=True, bias=_bias(config, True), weights=wide),
        mlps=[("layer", routed)] * layers,
        windows=[window if i % 2 == 0 else None for i in range(layers)],
        topk=config.size("num_experts_per_tok"),
    )


def _deepseek_v3(config: _Config) -> _Model:
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    config.only("moe_layer_freq", 1)
    precision = _precision(config, "fp8")
    layers = config.layers
    first = min(config.count("first_k_dense_replace", 3), layers)
    routed = _experts("i", router_bias=True, router=_wide(precision))
    mlps = [("dense_layer", _dense())] * first
    mlps += [("layer", [*routed, *_shared()])] * (layers - first)
    width, experts = config.size("moe_intermediate_size"), config.size("n_routed_experts")
    topk, groups = config.size("num_experts_per_tok"), config.size("n_group", 1)
    chosen, notes = config.size("topk_group", groups), []
    if chosen < groups:
        notes.append(
            f"routing limited to {chosen} of {groups} groups of experts is taken as {topk} of all "
            f"{experts}"
        )
    if config.count("num_nextn_predict_layers", 0):
        notes.append("the module that predicts a second token is left out")
    return _Model(
        ranks={
            "m": config.size("hidden_size"),
            "q": config.size("q_lora_rank"),
            "l": config.size("kv_lora_rank"),
            "h": config.size("num_attention_heads"),
            "n": config.size("qk_nope_head_dim"),
            "p": config.size("qk_rope_head_dim"),
            "w": config.size("v_head_dim"),
            "f": config.size("intermediate_size"),
            "e": experts,
            "i": width,
            "u": config.size("n_shared_experts", 1) * width,
            "v": config.size("vocab_size"),
        },
        blocks=list(_blocks([None] * layers, _latent(), mlps)),
        split=("h", "f", "i", "u", "v"),
        weights=precision[0],
        carried=precision[1],
        tied=config.flag("tie_word_embeddings"),
        attention={
            "members": ["k_lift", "v_lift", "scores", "rope_scores", "softmax", "context"],
            "kernel": "latent_attention",
        },
        topk=topk,
        notes=notes,
    )


_MODELS: Mapping[str, Callable[[_Config], _Model]] = MappingProxyType(
    {
        "llama": lambda config: _decoder(config, bias=_bias(config)),
        "qwen2": lambda config: _decoder(config, bias="qkv"),
        "qwen3": lambda config: _decoder(config, norms=True, bias=_bias(config)),
        "qwen3_moe": _qwen3_moe,
        "mixtral": _mixtral,
        "gpt_oss": _gpt_oss,
        "deepseek_v3": _deepseek_v3,
    }
)
"""``model_type`` -> what its config describes."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
        "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
        "mixtral": {"num_key_value_heads": 8},
        "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64},
        "deepseek_v3": {"n_group": 8, "topk_group": 4},
    }
)
"""What a class of transformers takes for a key that is not there; null means something else."""
