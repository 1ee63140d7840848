"""YAML files to models and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

from energylens.spec.einsum import parse_accesses, parse_einsum
from energylens.spec.fields import Field, dump_yaml, twice
from energylens.spec.model import (
    STEP_RANKS,
    Access,
    Block,
    Entry,
    Fusion,
    Overlap,
    Precision,
    Spec,
)
from energylens.spec.resources import (
    document,
    find,
    read_text,
)
from energylens.units import BITS

OPS = (
    "add",
    "argmax",
    "embedding",
    "layernorm",
    "rmsnorm",
    "rope",
    "scan",
    "silu_mul",
    "softmax",
    "topk",
)
"""Named ops, which are no contractions. Each writes the first activation that it reads."""
MESH_AXES = ("tp", "ep")
"""Mesh axes that split ranks."""
ROUTINGS: Mapping[str, str | None] = MappingProxyType(
    {"uniform": None, "zipf": "alpha", "dirichlet": "c", "histogram": "file", "trace": "file"}
)
"""Kinds of expert routing and the parameter that each needs."""


def load_spec(name_or_path: str) -> Spec:
    """The model of a YAML file, or of a shipped one by name, e.g. ``llama3_8b``.

    Raises:
        SpecError: no such model, or something in the file is wrong.
    """
    path = find(name_or_path, "specs")
    return parse_spec(read_text(path), path=str(path))


def parse_spec(text: str, *, path: str = "") -> Spec:
    """The model that a YAML text describes; ``path`` names it in messages.

    Raises:
        SpecError: something in the text is wrong.
    """
    fields = document(
        text,
        path or "<text>",
        "energylens/spec/v1",
        ("ranks", "blocks"),
        ("context", "precision", "parallelism", "fusion", "overlap", "moe", "notes"),
    )
    ranks = {name: field.integer() for name, field in fields["ranks"].pairs().items()}
    for rank in STEP_RANKS:
        if rank in ranks:
            raise fields["ranks"].error(f"rank {rank!r} is sized by the engine step; remove it")
    blocks = tuple(_block(field, ranks) for field in fields["blocks"].items(1))
    if again := twice(block.name for block in blocks):
        raise fields["blocks"].error(f"two blocks have the name {again!r}; names must differ")
    _check_tied(fields["blocks"], blocks, ranks)
    parallelism = {}
    if "parallelism" in fields:
        axes = fields["parallelism"].mapping((), MESH_AXES)
        parallelism = {axis: field.choices(ranks) for axis, field in axes.items()}
    return Spec(
        name=fields["name"].text(),
        source=fields["source"].text(),
        ranks=MappingProxyType(ranks),
        blocks=blocks,
        precision=_precision(fields["precision"]) if "precision" in fields else Precision(),
        parallelism=MappingProxyType(parallelism),
        fusion=_fusions(fields["fusion"], blocks) if "fusion" in fields else (),
        overlap=_overlaps(fields["overlap"], blocks) if "overlap" in fields else (),
        moe=_moe(fields["moe"], ranks) if "moe" in fields else None,
        notes=fields["notes"].texts() if "notes" in fields else (),
        context=fields["context"].integer() if "context" in fields else None,
        path=path,
    )


def _block(field: Field, ranks: Mapping[str, int]) -> Block:
    fields = field.mapping(("name", "cascade"), ("repeat", "window"))
    cascade = tuple(_entry(item, ranks) for item in fields["cascade"].items(1))
    if again := twice(entry.name for entry in cascade):
        raise fields["cascade"].error(f"two entries have the name {again!r}; names must differ")
    window = fields["window"].integer() if "window" in fields else None
    if window is not None and not any(entry.mask for entry in cascade):
        raise fields["window"].error("this block has no entry with a `mask`; remove it")
    return Block(
        name=fields["name"].text(),
        cascade=cascade,
        repeat=fields["repeat"].integer() if "repeat" in fields else 1,
        window=window,
    )


def _entry(field: Field, ranks: Mapping[str, int]) -> Entry:
    keys = field.pairs()
    if ("einsum" in keys) == ("op" in keys):
        raise field.error("an entry is either a contraction or a named op; give one of: einsum, op")
    return _named_op(field, ranks) if "op" in keys else _contraction(field, ranks)


def _named_op(field: Field, ranks: Mapping[str, int]) -> Entry:
    fields = field.mapping(("name", "op", "in"), ("weights",))
    inputs = fields["in"].parsed(parse_accesses)
    _check_ranks(fields["in"], inputs, ranks)
    op = fields["op"].choice(OPS)
    if "weights" in fields and op != "embedding":
        raise fields["weights"].error(f"weights of {op} are stored as activations are; remove it")
    return Entry(name=fields["name"].text(), op=op, inputs=inputs, weights=_weights(fields, inputs))


def _weights(fields: Mapping[str, Field], inputs: tuple[Access, ...]) -> str | None:
    """Precision of an entry's own weights, or None for the model's."""
    if "weights" not in fields:
        return None
    if not any(access.is_weight for access in inputs):
        raise fields["weights"].error("this entry reads no weight; remove it")
    return fields["weights"].choice(BITS)


def _contraction(field: Field, ranks: Mapping[str, int]) -> Entry:
    fields = field.mapping(("name", "einsum"), ("mask", "cache", "bias", "tied", "weights"))
    einsum = fields["einsum"].parsed(parse_einsum)
    _check_ranks(fields["einsum"], einsum.inputs, ranks)
    bias = fields["bias"].flag() if "bias" in fields else False
    weights = [a for a in einsum.inputs if a.is_weight]
    if bias and not weights:
        raise fields["bias"].error("a bias needs a weight, and this contraction reads none")
    if "tied" in fields and len(weights) != 1:
        raise fields["tied"].error(
            f"only a contraction with one weight can share it; this one has {len(weights)}"
        )
    return Entry(
        name=fields["name"].text(),
        einsum=einsum,
        mask=fields["mask"].choice(["causal"]) if "mask" in fields else None,
        cache=fields["cache"].flag() if "cache" in fields else False,
        bias=bias,
        tied=fields["tied"].text() if "tied" in fields else None,
        weights=_weights(fields, einsum.inputs),
    )


def _check_ranks(field: Field, accesses: tuple[Access, ...], ranks: Mapping[str, int]) -> None:
    """Every rank has a size; those of a weight do not depend on the engine step."""
    for access in accesses:
        allowed = tuple(ranks) if access.is_weight else (*STEP_RANKS, *ranks)
        for rank in access.ranks:
            if rank not in allowed:
                problem = "is no rank of a weight" if rank in STEP_RANKS else "has no size"
                raise field.error(
                    f"rank {rank!r} of {access} {problem}; allowed: {', '.join(allowed)}, or add a "
                    "size to `ranks`"
                )


def _check_tied(field: Field, blocks: Sequence[Block], ranks: Mapping[str, int]) -> None:
    """A tied weight must exist in another entry, with as many values."""

    def values(access: Access) -> int:
        return math.prod(ranks[r] for r in access.ranks)

    entries = [(i, j, entry) for i, b in enumerate(blocks) for j, entry in enumerate(b.cascade)]
    stored = {a.tensor: a for *_, e in entries if not e.tied for a in e.accesses if a.is_weight}
    for i, j, entry in entries:
        if entry.tied is None:
            continue
        place = Field(entry.tied, f"{field.path}[{i}].cascade[{j}].tied", field.file)
        target = stored.get(place.choice(stored))
        own = next(a for a in entry.accesses if a.is_weight)
        if target is not None and values(own) != values(target):
            raise place.error(f"{target} and {own} do not have the same number of values")


def _precision(field: Field) -> Precision:
    fields = field.mapping((), ("weights", "activations", "kv_cache"))
    return Precision(**{role: value.choice(BITS) for role, value in fields.items()})


def _fusions(field: Field, blocks: Sequence[Block]) -> tuple[Fusion, ...]:
    return tuple(_fusion(item, blocks) for item in field.items())


def _fusion(field: Field, blocks: Sequence[Block]) -> Fusion:
    if isinstance(field.value, list):
        members, kernel = field, None
    else:
        fields = field.mapping(("members",), ("kernel",))
        members, kernel = fields["members"], fields.get("kernel")
    members.items(2)
    names = members.choices(_entry_names(blocks))
    if not any(set(names) <= {entry.name for entry in block.cascade} for block in blocks):
        raise members.error(f"{', '.join(names)} are not entries of one block")
    return Fusion(members=names, kernel=kernel.text() if kernel is not None else None)


def _overlaps(field: Field, blocks: Sequence[Block]) -> tuple[Overlap, ...]:
    # Neighbours that an engine fuses go by their joined names: gate_up stands for gate and up.
    joined = [
        "_".join(entry.name for entry in block.cascade[i:j])
        for block in blocks
        for i, j in combinations(range(len(block.cascade) + 1), 2)
    ]
    names = _entry_names(blocks)
    overlaps = []
    for item in field.items():
        fields = item.mapping(("collective", "with", "sm"), ("chunks",))
        beside = fields["with"]
        overlaps.append(
            Overlap(
                collective=fields["collective"].choice(names),
                beside=beside.text() if beside.value in joined else beside.choice(names),
                sm=fields["sm"].integer(),
                chunks=fields["chunks"].integer() if "chunks" in fields else 1,
            )
        )
    return tuple(overlaps)


def _entry_names(blocks: Sequence[Block]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.name for block in blocks for entry in block.cascade))


def _moe(field: Field, ranks: Mapping[str, int]) -> Mapping[str, Any]:
    fields = field.mapping(("rank", "topk"), ("routing",))
    rank = fields["rank"].choice(ranks)
    topk = fields["topk"].integer()
    if topk > ranks[rank]:
        raise fields["topk"].expected(f"1 to {ranks[rank]}, the size of rank {rank!r}")
    moe: dict[str, Any] = {"rank": rank, "topk": topk}
    if "routing" in fields:
        kind = fields["routing"].pairs().get("kind")
        parameter = ROUTINGS[kind.choice(ROUTINGS)] if kind is not None else None
        routing = fields["routing"].mapping(("kind", *([parameter] if parameter else [])))
        moe["routing"] = MappingProxyType(
            {
                key: value.number() if key in ("alpha", "c") else value.text()
                for key, value in routing.items()
            }
        )
    return MappingProxyType(moe)


def dump_spec(spec: Spec) -> str:
    """The model as YAML; `parse_spec` of it gives an equal model."""
    document: dict[str, Any] = {
        "schema": "energylens/spec/v1",
        "name": spec.name,
        "source": spec.source,
        "ranks": dict(spec.ranks),
        "precision": {
            role: getattr(spec.precision, role) for role in ("weights", "activations", "kv_cache")
        },
        "blocks": [
            {
                "name": block.name,
                "repeat": block.repeat,
                **({"window": block.window} if block.window is not None else {}),
                "cascade": [_dump_entry(entry) for entry in block.cascade],
            }
            for block in spec.blocks
        ],
        "parallelism": {axis: list(ranks) for axis, ranks in spec.parallelism.items()},
        "fusion": [
            {"members": list(f.members), "kernel": f.kernel} if f.kernel else list(f.members)
            for f in spec.fusion
        ],
        "overlap": [
            {"collective": o.collective, "with": o.beside, "sm": o.sm, "chunks": o.chunks}
            for o in spec.overlap
        ],
        "moe": _thaw(spec.moe),
        "notes": list(spec.notes),
        "context": spec.context,
    }
    filled = {key: value for key, value in document.items() if value not in (None, [], {})}
    return dump_yaml(filled)


def _dump_entry(entry: Entry) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": entry.name,
        "einsum": str(entry.einsum) if entry.einsum is not None else None,
        "op": entry.op,
        "in": ", ".join(map(str, entry.inputs)),
        "mask": entry.mask,
        "cache": entry.cache,
        "bias": entry.bias,
        "tied": entry.tied,
        "weights": entry.weights,
    }
    return {key: value for key, value in fields.items() if value}


def _thaw(value: object) -> object:
    return {k: _thaw(v) for k, v in value.items()} if isinstance(value, Mapping) else value
