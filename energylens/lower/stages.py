"""How a pipeline splits the layers of a model, and what goes from one stage to the next.

Every stage is a model of its own: some of the layers, what comes before them on the first stage,
what comes after them on the last. So it is lowered, held in memory and priced as any model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from energylens.lower.kernels import Lowered, lower, moved
from energylens.lower.shard import entry_ranks, product
from energylens.results import Infeasible
from energylens.spec.model import Block, Spec
from energylens.spec.system import Engine, Parallelism


def partition(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: evenly; one more for those before the last, from the back.

    The last stage has the head, and gets none of what is left over: `get_pp_indices` of vLLM
    0.24.0 (vllm/distributed/utils.py).
    """
    each, left = divmod(layers, stages)
    return tuple(each + (stages - 1 - left <= i < stages - 1) for i in range(stages))


def stage_specs(spec: Spec, stages: int) -> tuple[Spec, ...] | Infeasible:
    """The model of each stage.

    A tied weight whose other owner is on another stage is there a second time.
    """
    if stages == 1:
        return (spec,)
    layers = [i for i, b in enumerate(spec.blocks) if _is_layer(b)]
    total = sum(spec.blocks[i].repeat for i in layers)
    if stages > total:
        return Infeasible(reason=f"{spec.name}: pp={stages} is more than its {total} layers")
    begins = [0, *(spec.blocks[i].repeat for i in layers)]
    for i in range(1, len(begins)):
        begins[i] += begins[i - 1]
    found, start = [], 0
    for stage, count in enumerate(partition(total, stages)):
        blocks = [
            replace(spec.blocks[block], repeat=own)
            for block, first, last in zip(layers, begins, begins[1:], strict=False)
            if (own := min(last, start + count) - max(first, start)) > 0
        ]
        start += count
        before = spec.blocks[: layers[0]] if stage == 0 else ()
        after = spec.blocks[layers[-1] + 1 :] if stage == stages - 1 else ()
        found.append(replace(spec, blocks=_untied((*before, *blocks, *after))))
    return tuple(found)


def lower_stages(
    spec: Spec,
    engine: Engine,
    parallelism: Parallelism,
    *,
    routing: str | None = None,
    redundant_experts: int = 0,
) -> tuple[Lowered, ...] | Infeasible:
    """Each stage of a configuration, lowered; one where there is no pipeline.

    A stage ends with sending the engine's tensors, of which every worker of a tensor parallel group
    sends its part; the next one begins with putting them together. Stages that do the same are one
    and the same value. The arguments and errors are those of `lower`.
    """
    specs = stage_specs(spec, parallelism.pp)
    if isinstance(specs, Infeasible):
        return specs
    pp, tensors = parallelism.pp, engine.pipeline_tensors
    if pp > 1 and not tensors:
        return Infeasible(
            reason=f"engine {engine.name} has no pipeline parallelism; use tp or replicas, or pp=1"
        )
    width = _width(specs[0]) if pp > 1 else 0
    known: dict[tuple[object, ...], Lowered] = {}
    found = []
    for i, own in enumerate(specs):
        key = (tuple((b.name, b.repeat) for b in own.blocks), i == 0, i == pp - 1)
        if key not in known:
            lowered = lower(
                own, engine, parallelism, routing=routing, redundant_experts=redundant_experts
            )
            if isinstance(lowered, Infeasible):
                return lowered
            tp, dtype = lowered.sharding.tp, spec.precision.activations
            first = [moved("all_gather", dtype, width, tp, tensors)] if i and tp > 1 else []
            last = [moved("send", dtype, width / tp, 2, tensors)] if i < pp - 1 else []
            known[key] = replace(
                lowered,
                items=(*first, *lowered.items, *last),
                arriving=width * tensors if i else 0,
            )
        found.append(known[key])
    return tuple(found)


def _is_layer(block: Block) -> bool:
    """Whether a block is one of those that a pipeline splits: it is repeated, or has a context."""
    return block.repeat > 1 or any(e.cache or "t" in entry_ranks(e) for e in block.cascade)


def _untied(blocks: Sequence[Block]) -> tuple[Block, ...]:
    stored = {a.tensor for b in blocks for e in b.cascade if not e.tied for a in e.accesses}
    return tuple(
        replace(
            b,
            cascade=tuple(
                replace(e, tied=None) if e.tied is not None and e.tied not in stored else e
                for e in b.cascade
            ),
        )
        for b in blocks
    )


def _width(stage: Spec) -> int:
    """Values of a token between two layers: those of the last contraction's output."""
    outputs = [e.einsum.output for e in stage.blocks[-1].cascade if e.einsum is not None]
    return product(outputs[-1].ranks, stage.ranks)
