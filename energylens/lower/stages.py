"""How a pipeline splits the layers of a model, and what goes from one stage to the next.

Every stage is a model of its own: some of the layers, what comes before them on the first stage,
what comes after them on the last. So it is held in memory and priced as any model is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from energylens.lower.items import moved
from energylens.lower.kernels import Lowered, lower
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


def repeats(spec: Spec, stages: int) -> tuple[tuple[int, ...], ...] | Infeasible:
    """How often each stage executes each block of the model, [stages][blocks]."""
    layers = [i for i, b in enumerate(spec.blocks) if _is_layer(b)]
    counts = [spec.blocks[i].repeat for i in layers]
    order = [i for i, count in zip(layers, counts, strict=True) for _ in range(count)]
    if any(b.window is not None for b in spec.blocks):  # with and without a window take turns
        turns = [(n + 0.5) / count for count in counts for n in range(count)]
        order = [i for _, i in sorted(zip(turns, order, strict=True))]
    if stages > len(order):
        return Infeasible(reason=f"{spec.name}: pp={stages} is more than its {len(order)} layers")
    found = []
    bounds = pairwise(accumulate(partition(len(order), stages), initial=0))
    for stage, (start, end) in enumerate(bounds):
        own = Counter(order[start:end])
        for i, b in enumerate(spec.blocks):
            if (stage == 0 and i < layers[0]) or (stage == stages - 1 and i > layers[-1]):
                own[i] = b.repeat
        found.append(tuple(own[i] for i in range(len(spec.blocks))))
    return tuple(found)


def lower_stages(
    spec: Spec,
    engine: Engine,
    parallelism: Parallelism,
    *,
    routing: str | None = None,
    redundant_experts: int = 0,
) -> tuple[Lowered, ...] | Infeasible:
    """Each stage of a configuration, lowered; see `lower` for the arguments, and `staged`."""
    whole = lower(spec, engine, parallelism, routing=routing, redundant_experts=redundant_experts)
    return whole if isinstance(whole, Infeasible) else staged(whole, parallelism.pp)


def staged(whole: Lowered, pp: int) -> tuple[Lowered, ...] | Infeasible:
    """The stages of a lowered model; stages that do the same are one and the same value.

    A stage ends with sending the engine's tensors, of which every worker of a tensor parallel group
    sends its part; the next one begins with putting them together.
    """
    if pp == 1:
        return (whole,)
    spec, tensors, tp = whole.spec, whole.engine.pipeline_tensors, whole.sharding.tp
    if not tensors:
        return Infeasible(
            reason=f"engine {whole.engine.name} has no pipeline parallelism; use tp or replicas, "
            "or pp=1"
        )
    counts = repeats(spec, pp)
    if isinstance(counts, Infeasible):
        return counts
    width, dtype = _width(spec), spec.precision.activations
    gather = moved("all_gather", dtype, width, tp, tensors)
    send = moved("send", dtype, width / tp, 2, tensors)
    known: dict[tuple[object, ...], Lowered] = {}
    found = []
    for stage, own in enumerate(counts):
        key = own, stage == 0
        if key not in known:
            items = [
                (
                    item,
                    block,
                    (own[block], spec.blocks[block].repeat) if block is not None else (1, 1),
                )
                for item, block in zip(whole.items, whole.blocks, strict=True)
                if block is None or own[block]
            ]
            if stage and tp > 1:
                items.insert(0, (gather, None, (1, 1)))
            if stage < pp - 1:
                items.append((send, None, (1, 1)))
            known[key] = replace(
                whole,
                spec=_stage_spec(spec, own),
                items=tuple(item for item, _, _ in items),
                blocks=tuple(block for _, block, _ in items),
                shares=tuple(share for _, _, share in items),
                arriving=width * tensors if stage else 0,
            )
        found.append(known[key])
    return tuple(found)


def _is_layer(block: Block) -> bool:
    """Whether a block is one of those that a pipeline splits: it is repeated, or has a context."""
    return block.repeat > 1 or any(e.cache or "t" in entry_ranks(e) for e in block.cascade)


def _stage_spec(spec: Spec, counts: Sequence[int]) -> Spec:
    """The model that a stage holds; a tied weight without its other owner is there once more."""
    blocks = [replace(b, repeat=n) for b, n in zip(spec.blocks, counts, strict=True) if n]
    stored = {a.tensor for b in blocks for e in b.cascade if not e.tied for a in e.accesses}
    return replace(
        spec,
        blocks=tuple(
            replace(
                b,
                cascade=tuple(
                    replace(e, tied=None) if e.tied is not None and e.tied not in stored else e
                    for e in b.cascade
                ),
            )
            for b in blocks
        ),
    )


def _width(spec: Spec) -> int:
    """Values of a token between two layers: those of the last contraction's output."""
    last = [b for b in spec.blocks if _is_layer(b)][-1]
    outputs = [e.einsum.output for e in last.cascade if e.einsum is not None]
    return product(outputs[-1].ranks, spec.ranks)
