"""What the routers of a real model choose, recorded while it runs.

with recorded_routing(model) as routing:
    model.generate(...)
routing.save_histogram(Path("routing.txt"))   # histogram:routing.txt
routing.save_trace(Path("trace.txt"), layer=0)   # trace:trace.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energylens.errors import UnsupportedError
from energylens.files import write_atomically

ROUTER = "Router"  # part of the class name of a router in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """Expert ids that each layer's tokens chose, in order: per layer, arrays of [tokens, topk].

    Attributes:
        experts: of each layer.
        chosen: layer -> what each forward added.
    """

    experts: int
    chosen: list[list[NDArray[np.int64]]] = field(default_factory=list)

    def histogram(self) -> NDArray[np.int64]:
        """Tokens of each expert and layer, [experts, layers]."""
        counts = [
            sum(
                (np.bincount(ids.ravel(), minlength=self.experts) for ids in layer),
                np.zeros(self.experts, dtype=np.int64),
            )
            for layer in self.chosen
        ]
        return np.array(counts).T

    def save_histogram(self, path: Path) -> None:
        """Write what ``--routing histogram:FILE`` reads: a line an expert, a column a layer."""
        rows = (" ".join(map(str, row)) for row in self.histogram().tolist())
        write_atomically(path, "\n".join(rows) + "\n")

    def save_trace(self, path: Path, layer: int) -> None:
        """Write what ``--routing trace:FILE`` reads: the experts of one token a line."""
        ids = np.concatenate(self.chosen[layer])
        write_atomically(path, "\n".join(" ".join(map(str, row)) for row in ids.tolist()) + "\n")


@contextmanager
def recorded_routing(model: Any) -> Iterator[RoutingRecord]:
    """Record what the routers of a transformers model choose until the context ends.

    Args:
        model: a mixture of experts whose routers return their expert ids last, as [tokens, topk].

    Raises:
        UnsupportedError: the model has no such routers.
    """
    routers = [m for m in model.modules() if ROUTER in type(m).__name__]
    if not routers:
        raise UnsupportedError(f"{type(model).__name__} has no routers whose choices to record")
    record = RoutingRecord(experts=int(routers[0].num_experts), chosen=[[] for _ in routers])

    def listener(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            ids = np.asarray(output[-1].tolist(), dtype=np.int64)
            record.chosen[layer].append(ids.reshape(-1, ids.shape[-1]))

        return hook

    handles = [r.register_forward_hook(listener(i)) for i, r in enumerate(routers)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
