"""Marks around the modules of a Hugging Face model, so that its kernels count to the right op kind.

Eager norms and rotary embeddings are made of kernels that other ops use too: only what is around
their launch tells whose they are (`energylens.profiler.trace`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from energylens.profiler.trace import MARK
from energylens.results import Kind

MODULES: tuple[tuple[str, Kind], ...] = (
    ("MoeBlock", Kind.MOE),
    ("MoE", Kind.MOE),
    ("Linear", Kind.GEMM),
    ("Norm", Kind.NORM),
    ("RotaryEmbedding", Kind.OVERHEAD),
    ("Embedding", Kind.COPY),
    ("MLP", Kind.ELEMENTWISE),
    ("DecoderLayer", Kind.ELEMENTWISE),  # what no child takes: the residual additions
)
"""End of a class's name -> kind of the kernels that no module inside it takes."""

_FUNCTIONS = (
    ("{model}", "apply_rotary_pos_emb", Kind.ELEMENTWISE),
    ("transformers.cache_utils:DynamicLayer", "update", Kind.COPY),
    ("transformers.cache_utils:StaticLayer", "update", Kind.COPY),
    ("transformers.integrations.sdpa_attention", "repeat_kv", Kind.COPY),
)
"""Module or class, a function of it, and the kind; those that a model or version lacks are left."""


@contextmanager
def marked(model: Any) -> Iterator[None]:
    """Mark every module and function of ``model`` with the op kind that its kernels count as."""
    undo: list[Callable[[], None]] = []
    try:
        for module in _outermost(model):
            kind = _kind_of(module)
            if kind is not None:
                module.forward = _wrapped(module.forward, kind)
                undo.append(lambda m=module: delattr(m, "forward"))  # type: ignore[misc]
        for place, name, kind in _FUNCTIONS:
            owner = _find(place.format(model=type(model).__module__))
            original = getattr(owner, name, None)
            if original is not None:
                setattr(owner, name, _wrapped(original, kind))
                undo.append(lambda o=owner, n=name, f=original: setattr(o, n, f))  # type: ignore[misc]
        yield
    finally:
        for step in undo:
            step()


def _outermost(module: Any) -> Iterator[Any]:
    """The module and all inside it, but nothing inside a mixture of experts: that is one op."""
    yield module
    if _kind_of(module) is not Kind.MOE:
        for child in module.children():
            yield from _outermost(child)


def _kind_of(module: Any) -> Kind | None:
    name = type(module).__name__
    return next((kind for end, kind in MODULES if name.endswith(end)), None)


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    return getattr(owner, name, None) if name else owner


def _wrapped(function: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    from torch.profiler import record_function

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + kind):
            return function(*args, **kwargs)

    return call
