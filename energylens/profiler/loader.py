"""From a name to a model on a device: checkpoints, bare configs with random weights, specs.

A loader of one's own is a subclass of `Loader` in `LOADERS`; the first one that accepts a request
loads it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energylens.errors import SpecError, UnsupportedError
from energylens.profiler.options import DTYPES, ProfileRequest
from energylens.spec.load import load_spec
from energylens.spec.model import Spec
from energylens.spec.resources import list_resources

CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a worker's model goes; ``device`` is a torch device."""

    device: str
    worker: int = 0
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a name stands for.

    Attributes:
        kind: ``spec``; ``checkpoint`` (a folder with weights); ``config`` (no weights); ``hub``.
        name: what transformers is given: a path or a hub id.
    """

    kind: str
    name: str
    spec: Spec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device.

    Attributes:
        model: called with ``input_ids``, a cache and ``use_cache``, it gives logits and the cache.
        config: its text config.
        weights: ``checkpoint`` or ``random``.
        precision: of the weights, by EnergyLens's names.
        model_bytes: parameters and buffers of the whole model, once.
        spec: that it was made from, if any.
    """

    model: Any
    config: Any
    weights: str
    precision: str
    model_bytes: float
    spec: Spec | None = None


class Loader(abc.ABC):
    """Makes the model of a request."""

    @abc.abstractmethod
    def accepts(self, request: ProfileRequest) -> bool:
        """True where this loader is the one for the request."""

    @abc.abstractmethod
    def load(self, request: ProfileRequest, place: Place) -> LoadedModel:
        """The model in evaluation mode, this worker's share of it on ``place.device``.

        Raises:
            SpecError: there is no such model. UnsupportedError: it cannot be loaded this way.
        """


def find_source(request: ProfileRequest) -> Source:
    """What the request's model is; only local files are looked at.

    Raises:
        SpecError: a path that holds no model, or a config without weights where random ones were
            not asked for.
    """
    path = Path(request.model)
    if path.suffix in (".yaml", ".yml") or request.model in list_resources("specs"):
        return Source(kind="spec", name=request.model, spec=load_spec(request.model))
    folder = path.parent if path.is_file() else path
    if not path.exists():
        if path.is_absolute() or request.model.startswith((".", "~")):
            raise SpecError(
                f"{request.model}: no such folder or file; give a folder with a {CONFIG}, a hub id "
                f"or a spec ({', '.join(list_resources('specs'))})"
            )
        return Source(kind="hub", name=request.model)
    if not (folder / CONFIG).is_file() and not path.is_file():
        raise SpecError(
            f"{request.model}: holds no {CONFIG}; give a folder of a transformers model"
        )
    if path.is_dir() and any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        return Source(kind="checkpoint", name=str(path))
    if not request.random_weights:
        raise SpecError(
            f"{request.model}: holds a config but no weights; add --random-weights, or give a "
            "folder with the checkpoint"
        )
    return Source(kind="config", name=str(path))


class HfLoader(Loader):
    """Whatever transformers' ``AutoModelForCausalLM`` knows."""

    def accepts(self, request: ProfileRequest) -> bool:
        """Always."""
        return True

    def load(self, request: ProfileRequest, place: Place) -> LoadedModel:
        """Read the config, check the layout, then load or draw the weights."""
        source = find_source(request)
        config = self.config(request, source)
        text = config.get_text_config()
        check_layout(text, request)
        quantised = _quantisation(config)
        random = request.random_weights or source.kind == "spec"
        if quantised and random:
            raise UnsupportedError(
                f"{request.model}: is quantised ({quantised}); its checkpoint is needed, leave "
                "--random-weights out"
            )
        if quantised and request.dtype:
            raise UnsupportedError(
                f"{request.model}: is quantised ({quantised}); leave --dtype out"
            )
        dtype = request.dtype or _precision(text)
        if random:
            model = random_model(config, dtype, request, place)
        else:
            model = self._checkpoint(source.name, config, dtype, quantised, request, place)
        return LoadedModel(
            model=model,
            config=text,
            weights="random" if random else "checkpoint",
            precision=quantised or dtype,
            model_bytes=float(
                sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
            ),
            spec=source.spec,
        )

    def config(self, request: ProfileRequest, source: Source) -> Any:
        """The model's transformers config.

        Raises:
            SpecError: there is none.
        """
        if source.spec is not None:
            from energylens.bench.layer import transformers_config

            config = transformers_config(source.spec, 1, max(b.repeat for b in source.spec.blocks))
            config.vocab_size = source.spec.ranks["v"]
            return config
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(source.name)
        except (OSError, ValueError) as error:
            raise SpecError(f"{request.model}: {str(error).strip().splitlines()[0]}") from None

    def _checkpoint(
        self,
        name: str,
        config: Any,
        dtype: str,
        quantised: str | None,
        request: ProfileRequest,
        place: Place,
    ) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        arguments: dict[str, Any] = {"config": config}
        if request.attention:
            arguments["attn_implementation"] = request.attention
        if quantised:
            arguments["device_map"] = {"": place.device}
        else:
            arguments["dtype"] = getattr(torch, DTYPES[dtype])
        sharded = request.parallelism.workers > 1
        if sharded:
            arguments["distributed_config"] = _distributed(request)
        try:
            model = AutoModelForCausalLM.from_pretrained(name, **arguments)
        except (OSError, ValueError, ImportError) as error:
            raise SpecError(f"{request.model}: {str(error).strip().splitlines()[0]}") from None
        return (model if sharded or quantised else model.to(place.device)).eval()


def random_model(config: Any, dtype: str, request: ProfileRequest, place: Place) -> Any:
    """The model of ``config`` with the weights that transformers would begin to train it with.

    Those are N(0, 0.02) with most models. All workers draw from one seed, so that what is not
    sharded is the same everywhere.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if request.attention:
        config._attn_implementation = request.attention
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[dtype]))
    if request.parallelism.workers > 1:
        cls = type(model)
        distributed, _, mesh = cls.prepare_distribute_model(_distributed(request))
        model = cls.maybe_distribute_model(model, distributed, mesh)
    model = model.to_empty(device=place.device).eval()
    model.tie_weights()
    torch.manual_seed(request.seed)
    model.initialize_weights()
    return model


def _distributed(request: ProfileRequest) -> Any:
    from transformers.distributed import DistributedConfig

    p = request.parallelism
    return DistributedConfig(tp_size=p.workers, enable_expert_parallel=p.ep > 1)


def check_layout(config: Any, request: ProfileRequest) -> None:
    """Refuse degrees that transformers only fails at in the middle of a forward.

    Raises:
        UnsupportedError: the heads or experts do not divide; the text lists what does.
    """
    tp, ep = request.parallelism.tp, request.parallelism.ep
    found = (getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
    experts = next((int(n) for n in found if n), 0)
    if ep > 1:
        if not experts or experts % ep:
            raise UnsupportedError(
                f"--ep {ep}: the model has {experts or 'no'} experts; allowed: "
                f"{_divisors(experts or 1)}"
            )
        return  # expert plans leave attention whole
    found = (getattr(config, name, None) for name in ("num_key_value_heads", "num_attention_heads"))
    heads = next((int(n) for n in found if n), tp)
    if heads % tp:
        raise UnsupportedError(
            f"--tp {tp}: does not divide the model's {heads} KV heads; allowed: {_divisors(heads)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _precision(config: Any) -> str:
    """The model's own precision by EnergyLens's names; bf16 where the config does not say."""
    own = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    return next((name for name, torch_name in DTYPES.items() if torch_name == own), "bf16")


def _quantisation(config: Any) -> str | None:
    """Precision of a quantised checkpoint's weights, None for a plain one."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    facts = found if isinstance(found, dict) else found.to_dict()
    method = str(facts.get("quant_method", "unknown"))
    bits = facts.get("bits") or facts.get("w_bit")
    if facts.get("load_in_4bit"):
        bits = 4
    elif facts.get("load_in_8bit"):
        bits = 8
    return f"int{bits}" if bits else method.rpartition(".")[2]


LOADERS: list[Loader] = [HfLoader()]
"""Loaders in the order in which they are asked; put one's own at the front."""


def load(request: ProfileRequest, place: Place) -> LoadedModel:
    """The model of the request, by the first loader that accepts it."""
    return next(one for one in LOADERS if one.accepts(request)).load(request, place)
