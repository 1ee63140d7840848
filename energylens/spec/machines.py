"""YAML files to engines, devices and clusters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energylens.errors import SpecError
from energylens.spec.fields import Field
from energylens.spec.load import OPS
from energylens.spec.resources import (
    document,
    find,
    folder_of,
    list_resources,
    read_text,
    unknown,
)
from energylens.spec.system import Cluster, Device, Engine, Kernel, Link, Mode, Phase, Serving
from energylens.units import BITS, BYTES_PER_GB


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
    path = find(stem, "engines")
    fields = document(
        read_text(path),
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
        return _device(find(name, "devices"))
    known = list_resources("devices")
    wanted = _spelling(name)
    folder = folder_of("devices")
    if wanted in known:
        return _device(folder / f"{wanted}.yaml")
    for stem in known:
        device = _device(folder / f"{stem}.yaml")
        if wanted in map(_spelling, (device.name, *device.aliases)):
            return device
    raise unknown(name, "devices", known)


def _spelling(name: str) -> str:
    """What two spellings of one board have in common: no case, blanks, dashes, vendor's name."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _device(path: Path) -> Device:
    fields = document(
        read_text(path),
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
    path = find(name, "clusters")
    fields = document(
        read_text(path), str(path), "energylens/cluster/v1", ("device", "gpus"), ("link",)
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
