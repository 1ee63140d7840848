"""YAML in, frozen values out: models, engines, devices and clusters, by name or by path.

A name stands for a file that ships with EnergyLens; a path wins over a name. Everything wrong in
a file is a `SpecError` of one line: file, dotted field path, what was found, what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energylens.errors import SpecError
from energylens.spec.einsum import parse_accesses, parse_einsum
from energylens.spec.fields import Field, dump_yaml, near, parse_yaml, twice
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
from energylens.spec.system import Cluster, Device, Engine, Kernel, Link, Mode, Phase, Serving
from energylens.units import BITS, BYTES_PER_GB

RESOURCES = ("specs", "devices", "engines", "clusters")
"""Kinds of files that ship in the folder ``specs``; models lie at its top."""

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


# ---- finding files -------------------------------------------------------------------------------


def data_dir(kind: str) -> Path:
    """Folder ``specs`` or ``calibration`` that ships with EnergyLens, in a wheel or in a checkout.

    Raises:
        SpecError: this installation has no such folder.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_data" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise SpecError(
        f"this installation of EnergyLens holds no folder {kind!r}; install it again, or give a "
        "path to a file"
    )


def _resource_dir(kind: str) -> Path:
    if kind not in RESOURCES:
        raise SpecError(f"unknown kind of resource {kind!r}; allowed: {', '.join(RESOURCES)}")
    folder = data_dir("specs")
    return folder if kind == "specs" else folder / kind


def list_resources(kind: str) -> tuple[str, ...]:
    """Names of the shipped files of a kind, sorted.

    Args:
        kind: one of `RESOURCES`.

    Raises:
        SpecError: there is no such kind.
    """
    return tuple(sorted(p.stem for p in _resource_dir(kind).glob("*.yaml")))


def _strip_suffix(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


def _find(name: str, kind: str) -> Path:
    """File that ``name`` stands for: a path that exists, or else a shipped file.

    A path that does not exist still means the shipped file of that name where it looks like one
    (``specs/llama3_8b.yaml`` from another folder); other folders are an error, not a guess.
    """
    path = Path(name)
    if path.is_file():
        return path
    folder = _resource_dir(kind)
    if path.parent == Path() or path.parent.name == folder.name:
        shipped = folder / f"{_strip_suffix(path.name)}.yaml"
        if shipped.is_file():
            return shipped
    raise _unknown(name, kind, list_resources(kind))


def _unknown(name: str, kind: str, known: Sequence[str]) -> SpecError:
    hint = near(_strip_suffix(Path(name).name).lower().removeprefix("nvidia "), known)
    return SpecError(
        f"unknown {kind.removesuffix('s')} {name!r}: neither a file nor a known name{hint}; "
        f"known: {', '.join(known)}; or give a path to a YAML file"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}; give a text file in UTF-8") from error


def _document(
    text: str, file: str, schema: str, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Field]:
    """The fields of a file whose ``schema`` is as it must be."""
    root = parse_yaml(text, file)
    declared = root.pairs().get("schema")
    if declared is None:
        raise root.error(f"key 'schema' is missing; allowed: {schema}")
    declared.choice([schema])
    return root.mapping(("schema", "name", "source", *required), optional)


# ---- models --------------------------------------------------------------------------------------


def load_spec(name_or_path: str) -> Spec:
    """The model of a YAML file, or of a shipped one by name, e.g. ``llama3_8b``.

    Raises:
        SpecError: no such model, or something in the file is wrong.
    """
    path = _find(name_or_path, "specs")
    return parse_spec(_read(path), path=str(path))


def parse_spec(text: str, *, path: str = "") -> Spec:
    """The model that a YAML text describes; ``path`` names it in messages.

    Raises:
        SpecError: something in the text is wrong.
    """
    fields = _document(
        text,
        path or "<text>",
        "energylens/spec/v1",
        ("ranks", "blocks"),
        ("precision", "parallelism", "fusion", "overlap", "moe", "notes"),
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


# ---- engines, devices, clusters ------------------------------------------------------------------


def load_engine(name: str) -> Engine:
    """The engine profile of a YAML file, or of a shipped one by name, e.g. ``hf``.

    ``vllm@0.28.0`` asks for one version: limits that differ between versions are then those of the
    newest known version that is not newer, else of the oldest.

    Raises:
        SpecError: no such engine, or something in the file is wrong.
    """
    stem, _, asked = name.rpartition("@")
    if not stem or "/" in asked:  # no version: a folder may have an @ in its name
        stem, asked = name, ""
    path = _find(stem, "engines")
    fields = _document(
        _read(path),
        str(path),
        "energylens/engine/v1",
        ("version", "provider", "modes", "kernels"),
        ("versions", *_ENGINE_OPTIONS),
    )
    modes = fields["modes"].mapping((Phase.PREFILL, Phase.DECODE))
    optional = {key: read(fields[key]) for key, read in _ENGINE_OPTIONS.items() if key in fields}
    version = fields["version"].text()
    if asked:
        version, named, changed = _version(fields, asked)
        optional |= named
        optional["serving"] = replace(optional["serving"], **changed)
    return Engine(
        name=fields["name"].text(),
        version=version,
        provider=fields["provider"].text(),
        modes=MappingProxyType({Phase(p): Mode(f.choice(Mode)) for p, f in modes.items()}),
        kernels=MappingProxyType({op: _kernel(f) for op, f in fields["kernels"].pairs().items()}),
        source=fields["source"].text(),
        **optional,
    )


_ENGINE_OPTIONS: Mapping[str, Callable[[Field], Any]] = MappingProxyType(
    {
        "repeat_kv": lambda field: tuple(Mode(m) for m in field.choices(Mode)),
        "fusion": lambda field: tuple(item.texts() for item in field.items()),
        "absorbed": lambda field: tuple(field.choices(OPS)),
        "collective": Field.text,
        "tp_replicated": Field.texts,
        "gather_logits": Field.flag,
        "moe_dispatch": lambda field: field.choice(("allreduce", "alltoall")),
        "dp_dispatch": lambda field: tuple(
            item.choice(("all_gather", "reduce_scatter", "all_to_all")) for item in field.items(2)
        ),
        "pipeline_tensors": Field.integer,
        "ep_replicates": Field.flag,
        "reserve_bytes": Field.number,
        "serving": lambda field: _serving(field),
    }
)
"""Optional keys of an engine profile -> how each is read."""


def _serving(field: Field) -> Serving:
    sizes = ("batch_tokens", "offline_batch_tokens", "max_sequences", "block_size")
    fields = field.mapping((*sizes, "memory_share", "capture_sizes"), ("small",))
    usual = Serving(
        batch_tokens=fields["batch_tokens"].integer(),
        offline_batch_tokens=fields["offline_batch_tokens"].integer(),
        max_sequences=fields["max_sequences"].integer(),
        block_size=fields["block_size"].integer(),
        memory_share=fields["memory_share"].number(),
        capture_sizes=tuple(
            sorted({size for item in fields["capture_sizes"].items() for size in _range(item)})
        ),
    )
    if "small" not in fields:
        return usual
    limits = fields["small"].mapping(("below_memory_bytes", *sizes[:3]))
    small = replace(
        usual,
        batch_tokens=limits["batch_tokens"].integer(),
        offline_batch_tokens=limits["offline_batch_tokens"].integer(),
        max_sequences=limits["max_sequences"].integer(),
    )
    return replace(usual, small_memory_bytes=limits["below_memory_bytes"].number(), small=small)


def _version(fields: Mapping[str, Field], asked: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The known version that stands for ``asked``, what is asked for, what changes in serving."""
    if "versions" not in fields or "serving" not in fields:
        raise SpecError(f"engine {fields['name'].text()} knows no versions; leave @{asked} out")
    versions = fields["versions"].pairs()
    for version in (asked, *versions):
        if not re.fullmatch(r"\d+(\.\d+){0,3}", version):
            raise SpecError(
                f"found version {version!r} of engine {fields['name'].text()}; allowed: numbers "
                "and dots, e.g. 0.24.0"
            )

    def numbers(version: str) -> list[int]:
        parts = [int(n) for n in version.split(".")]
        return parts + [0] * (4 - len(parts))

    not_newer = [v for v in versions if numbers(v) <= numbers(asked)]
    chosen = max(not_newer, key=numbers) if not_newer else min(versions, key=numbers)
    limits = versions[chosen].mapping((), ("batch_tokens", "memory_share"))
    changed: dict[str, Any] = {}
    if "batch_tokens" in limits:
        changed["batch_tokens"] = limits["batch_tokens"].integer()
    if "memory_share" in limits:
        changed["memory_share"] = limits["memory_share"].number()
    is_known = numbers(chosen) == numbers(asked)
    return chosen, {"asked_version": chosen if is_known else asked}, changed


def _range(field: Field) -> range:
    """``[first, last, step]``, the last included."""
    bounds = [item.integer() for item in field.items()]
    if len(bounds) != 3:
        raise field.expected("[first, last, step]")
    first, last, step = bounds
    return range(first, last + 1, step)


def _kernel(field: Field) -> Kernel:
    fields = field.mapping(("kernel", "launches"))
    return Kernel(kernel=fields["kernel"].text(), launches=fields["launches"].integer())


def load_device(name: str) -> Device:
    """The datasheet of a YAML file, or of a shipped one by any usual spelling (``NVIDIA H200``).

    ``NAME@MODE`` is a device in one of its power modes.

    Raises:
        SpecError: no such device or mode, or something in the file is wrong.
    """
    base, at, mode = name.rpartition("@")
    if not at or Path(name).is_file():
        return _device_by_name(name)
    device, mode = _device_by_name(base), mode.upper()
    if mode == device.power_mode:
        return device
    if mode not in device.modes:
        known = ", ".join(filter(None, (device.power_mode, *device.modes))) or "none"
        raise SpecError(
            f"device {device.name} has no figures for power mode {mode!r}; known: {known}; add it "
            "under modes of a device file"
        )
    return device.modes[mode]


def _device_by_name(name: str) -> Device:
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        return _device(_find(name, "devices"))
    known = list_resources("devices")
    wanted = _spelling(name)
    folder = _resource_dir("devices")
    if wanted in known:
        return _device(folder / f"{wanted}.yaml")
    for stem in known:
        device = _device(folder / f"{stem}.yaml")
        if wanted in map(_spelling, (device.name, *device.aliases)):
            return device
    raise _unknown(name, "devices", known)


def _spelling(name: str) -> str:
    """What two spellings of one board have in common: no case, blanks, dashes, vendor's name."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _device(path: Path) -> Device:
    fields = _document(
        _read(path),
        str(path),
        "energylens/device/v1",
        (
            "memory_bytes",
            "memory_bandwidth_bytes_s",
            "l2_bytes",
            "peak_flops",
            "sm_count",
            "clock_max_hz",
            "power_limit_w",
            "idle_w",
        ),
        ("aliases", "unified_memory", "power_mode", "modes"),
    )
    peaks = fields["peak_flops"].mapping((), tuple(BITS))
    if not peaks:
        raise fields["peak_flops"].expected(f"at least one of: {', '.join(BITS)}")
    device = Device(
        name=fields["name"].text(),
        aliases=fields["aliases"].texts() if "aliases" in fields else (),
        memory_bytes=fields["memory_bytes"].number(),
        memory_bandwidth_bytes_s=fields["memory_bandwidth_bytes_s"].number(),
        l2_bytes=fields["l2_bytes"].number(),
        peak_flops=MappingProxyType({dtype: f.number() for dtype, f in peaks.items()}),
        sm_count=fields["sm_count"].integer(),
        clock_max_hz=fields["clock_max_hz"].number(),
        power_limit_w=fields["power_limit_w"].number(),
        idle_w=fields["idle_w"].number(),
        source=fields["source"].text(),
        unified_memory=fields["unified_memory"].flag() if "unified_memory" in fields else False,
        power_mode=fields["power_mode"].text().upper() if "power_mode" in fields else None,
    )
    modes = fields["modes"].pairs() if "modes" in fields else {}
    if modes and device.power_mode is None:
        raise fields["modes"].error("key 'power_mode' is missing: which mode are the figures of?")
    named = {mode.upper(): _in_mode(device, mode.upper(), field) for mode, field in modes.items()}
    return replace(device, modes=MappingProxyType(named))


def _in_mode(device: Device, mode: str, field: Field) -> Device:
    """The device in another power mode; its peaks go with the clock."""
    given = field.mapping(("clock_max_hz", "memory_bandwidth_bytes_s", "power_limit_w"))
    clock_hz = given["clock_max_hz"].number()
    peaks = {d: peak * clock_hz / device.clock_max_hz for d, peak in device.peak_flops.items()}
    return replace(
        device,
        name=f"{device.name}@{mode}",
        power_mode=mode,
        peak_flops=MappingProxyType(peaks),
        clock_max_hz=clock_hz,
        memory_bandwidth_bytes_s=given["memory_bandwidth_bytes_s"].number(),
        power_limit_w=given["power_limit_w"].number(),
    )


def load_cluster(name: str) -> Cluster:
    """The cluster of a YAML file, or of a shipped one by name, e.g. ``h200x8``.

    Raises:
        SpecError: no such cluster, or something in the file is wrong.
    """
    path = _find(name, "clusters")
    fields = _document(
        _read(path), str(path), "energylens/cluster/v1", ("device", "gpus"), ("link",)
    )
    gpus = fields["gpus"].integer()
    if gpus > 1 and "link" not in fields:
        raise fields["gpus"].error(f"found {gpus} GPUs without a link; add the key 'link'")
    return Cluster(
        name=fields["name"].text(),
        device=fields["device"].text(),
        gpus=gpus,
        link=_link(fields["link"]) if "link" in fields else None,
        source=fields["source"].text(),
    )


_DIRECTIONS = {"bandwidth_gb_s_per_direction": 1.0, "bandwidth_gb_s_bidirectional": 0.5}


def _link(field: Field) -> Link:
    fields = field.mapping(("name", "latency_s"), tuple(_DIRECTIONS))
    given = [key for key in _DIRECTIONS if key in fields]
    if len(given) != 1:
        raise field.error(f"found {len(given)} bandwidths; give one of: {', '.join(_DIRECTIONS)}")
    bandwidth_gb_s = fields[given[0]].number() * _DIRECTIONS[given[0]]
    return Link(
        name=fields["name"].text(),
        bandwidth_bytes_s=bandwidth_gb_s * BYTES_PER_GB,
        latency_s=fields["latency_s"].number(),
    )
