"""Recording what routers choose: histogram and trace files that `predict --routing` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from energylens.bench.routing import recorded_routing
from energylens.errors import UnsupportedError
from energylens.lower.routing import inclusion, make_routing


class Handle:
    def __init__(self, hooks, hook):
        self._hooks, self._hook = hooks, hook

    def remove(self):
        self._hooks.remove(self._hook)


class TopKRouter:
    """A module with forward hooks, as torch's."""

    num_experts = 4

    def __init__(self, choices):
        self._choices, self.hooks = np.array(choices), []

    def register_forward_hook(self, hook):
        self.hooks.append(hook)
        return Handle(self.hooks, hook)

    def run(self):
        for hook in self.hooks:
            hook(self, (), ("logits", "scores", self._choices))


class Model:
    def __init__(self, *routers):
        self.routers = routers

    def modules(self):
        return [self, *self.routers, object()]


def test_choices_are_counted_per_layer_and_kept_in_order(tmp_path: Path) -> None:
    model = Model(TopKRouter([[0, 1], [0, 3]]), TopKRouter([[2, 1], [2, 0]]))
    with recorded_routing(model) as routing:
        for _ in range(2):
            for router in model.routers:
                router.run()
    assert not any(router.hooks for router in model.routers)
    assert routing.histogram().tolist() == [[4, 2], [2, 2], [0, 4], [2, 0]]

    routing.save_histogram(tmp_path / "h.txt")
    read = make_routing(f"histogram:{tmp_path / 'h.txt'}", experts=4, topk=2)
    chosen = [inclusion(layer, topk=2).tolist() for layer in read.popularity]
    assert chosen[0] == pytest.approx([1.0, 0.5, 0.0, 0.5], abs=0.05)
    assert chosen[1] == pytest.approx([0.5, 0.5, 1.0, 0.0], abs=0.05)

    routing.save_trace(tmp_path / "t.txt", layer=1)
    trace = make_routing(f"trace:{tmp_path / 't.txt'}", experts=4, topk=2).trace
    assert trace is not None
    assert trace.tolist() == [[2, 1], [2, 0], [2, 1], [2, 0]]


def test_hooks_are_removed_when_the_model_fails() -> None:
    model = Model(TopKRouter([[0, 1]]))
    with pytest.raises(ZeroDivisionError), recorded_routing(model):
        raise ZeroDivisionError
    assert not model.routers[0].hooks


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no routers"), recorded_routing(Model()):
        pass
