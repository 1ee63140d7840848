"""Decode as a captured CUDA graph: one step over a static cache, held against eager steps.

Two things are compared. The logits, relative to the size of the eager ones: rounding moves them by
0 to 3 % on one GPU and by 5 % on two (each all-reduce rounds differently), while a stale cache,
another token or half of the context missing moves them by 20 % and more. With random weights
attention is nearly even, so that a position or a length that is off by one moves the logits no
more than rounding does. So the cache entries that the steps wrote are compared too, in the first
layer that keeps all of them: there they depend on nothing but token and position. One rounding
moves them by 0.4 % at most, a position off by one by 14 % (RoPE), another slot by all of their
size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOGITS_LIMIT = 0.15
"""Largest distance of captured logits from eager ones, relative to the eager ones' size."""
ENTRIES_LIMIT = 0.05
"""The same of the cache entries that were written."""
_WARM_UPS = 3


class Graph:
    """One decode step over a static cache, captured."""

    def __init__(
        self,
        forward: Callable[[Any, Any], tuple[Any, Any]],
        config: Any,
        token: Any,
        length: int,
        rewind: int | None,
    ) -> None:
        """Make the cache.

        Args:
            forward: (ids, cache) -> logits of the last token, and the cache.
            config: the model's.
            token: ids that the first step is given; a copy is kept as ``token``.
            length: of the cache.
            rewind: KV length that each step starts from; None lets it grow.
        """
        import torch
        from transformers import StaticCache

        self._torch, self._forward, self._rewind = torch, forward, rewind
        self._length = length
        self._cache = StaticCache(config=config, max_cache_len=length)
        self._lengths: Any = None
        self._graph: Any = None
        self._logits: Any = None
        self.token = token.clone()

    def fill(self, ids: Any) -> Any:
        """Prefill the empty cache; the logits of the last token."""
        if self._lengths is not None:
            self._put_back(0)
        logits, _ = self._forward(ids, self._cache)
        if self._lengths is None:
            # The layers' positions as views of one tensor: put back by one kernel, not by one each.
            layers = [x for x in self._cache.layers if hasattr(x, "cumulative_length")]
            self._lengths = self._torch.full(
                (len(layers),), ids.shape[1], dtype=self._torch.long, device=ids.device
            )
            for layer, position in zip(layers, self._lengths, strict=True):
                layer.cumulative_length = position
        return logits

    def capture(self) -> None:
        """Warm up on a side stream, then capture one step; the position is as before."""
        torch = self._torch
        position = self._position()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._put_back(position)
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        self._put_back(position)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._logits = self._body()
        self._put_back(position)
        torch.cuda.synchronize()

    def step(self) -> None:
        """Queue one step."""
        self._graph.replay()

    def run(self) -> Any:
        """One step; its logits, which the next step overwrites."""
        self._graph.replay()
        return self._logits

    def _body(self) -> Any:
        if self._rewind is not None:
            self._lengths.fill_(self._rewind)
        logits, _ = self._forward(self.token, self._cache)
        following = logits.argmax(-1)
        if self._rewind is None:
            self.token.copy_(following)
        return logits

    def _position(self) -> int:
        """KV length that the next step starts from."""
        if self._rewind is not None:
            return self._rewind
        return int(self._lengths[0]) if len(self._lengths) else 0

    def _put_back(self, position: int) -> None:
        self._lengths.fill_(position)
        for layer in self._cache.layers:
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = position

    def eager(self) -> None:
        """One step that is launched kernel by kernel; the position is as before."""
        position, token = self._position(), self.token.clone()
        self._put_back(position)
        self._body()
        self._put_back(position)
        self.token.copy_(token)

    def entries(self, first: int, count: int) -> tuple[int, Any] | None:
        """Layer, and its keys and values of ``count`` tokens from slot ``first`` on.

        Of the first layer that keeps every token; None where there is none.
        """
        for index, layer in enumerate(self._cache.layers):
            keys = getattr(layer, "keys", None)
            if keys is None or getattr(layer, "is_sliding", False) or keys.ndim != 4:
                continue
            if keys.shape[2] == self._length:
                return index, self._torch.cat(
                    [t[:, :, first : first + count].flatten() for t in (keys, layer.values)]
                )
        return None


def distance(captured: Any, eager: Any) -> float:
    """Size of the difference over the size of ``eager``; the largest of all workers.

    Workers must come to the same decision, whatever their own parts of a model say.
    """
    import torch
    import torch.distributed as dist

    found = float((captured.float() - eager.float()).norm() / eager.float().norm())
    if not (dist.is_available() and dist.is_initialized()):
        return found
    largest = torch.tensor(found, device=eager.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def newest_entries(cache: Any, layer: int, count: int) -> Any:
    """Keys and values of the last ``count`` tokens in a layer of a dynamic cache."""
    import torch

    found = cache.layers[layer]
    return torch.cat([t[:, :, -count:].flatten() for t in (found.keys, found.values)])


def disagreement(check: dict[str, Any]) -> str | None:
    """What a check found wrong, for people; None where captured and eager steps agree."""
    for name, what in (("logits", "logits"), ("entries", "new cache entries")):
        found, limit = check[f"{name}_distance"], check[f"{name}_limit"]
        if found is not None and not found <= limit:
            return f"{what} differ by {found:.1%} of their size ({limit:.0%} allowed)"
    return None
