"""One front over several kinds of GPUs: many small boards against few large ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from energylens.errors import SpecError
from energylens.explore.front import placed
from energylens.results import Infeasible, SearchCounts
from energylens.results.search import Frontier
from energylens.spec.system import Device


def pairs(devices: Sequence[Device], gpus: Sequence[int]) -> list[tuple[Device, int]]:
    """Which device is searched on how many GPUs: one number for all, or one for each.

    Raises:
        SpecError: there are as many numbers as neither one nor devices.
    """
    many = max(len(devices), len(gpus))
    if not devices or not gpus or {len(devices), len(gpus)} - {1, many}:
        raise SpecError(
            f"--gpus names {len(gpus)} numbers and --device {len(devices)} devices: give one "
            "number for all devices, or one for each"
        )
    found = [
        (devices[i if len(devices) > 1 else 0], gpus[i if len(gpus) > 1 else 0])
        for i in range(many)
    ]
    names = Counter(f"{count} x {device.name}" for device, count in found)
    for name, n in names.items():
        if n > 1:
            raise SpecError(f"--device, --gpus: {name} is named {n} times; leave it once")
    return found


def together(found: Mapping[str, Frontier | Infeasible]) -> Frontier | Infeasible:
    """One front of several searches, by the name of the GPUs of each.

    What is on the front of all is on the front of its own search, so nothing is predicted again.
    """
    fronts = {name: f for name, f in found.items() if isinstance(f, Frontier)}
    reasons = {name: f.reason for name, f in found.items() if isinstance(f, Infeasible)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not fronts:
        return Infeasible(
            reason="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
            counts=_counts(found),
        )
    first = next(iter(fronts.values()))
    configs = [
        replace(c, id=f"{name.replace(' ', '')}-{c.id}")
        for name, f in fronts.items()
        for c in f.configs
    ]
    notes = [
        note if len(own) == len(fronts) else f"{', '.join(own)}: {note}"
        for note in dict.fromkeys(note for f in fronts.values() for note in f.notes)
        if (own := [name for name, f in fronts.items() if note in f.notes])
    ]
    notes += [f"{name} is left out: {reason}" for name, reason in reasons.items()]
    return replace(
        first,
        pools=tuple(pool for f in fronts.values() for pool in f.pools),
        configs=placed(configs, first.objectives),
        counts=_counts(found),
        source=max(f.source for f in fronts.values()),
        bundles=tuple(dict.fromkeys(b for f in fronts.values() for b in f.bundles)),
        anchors=next((f.anchors for f in fronts.values() if f.anchors), None),
        notes=tuple(notes),
    )


def _counts(found: Mapping[str, Frontier | Infeasible]) -> SearchCounts:
    counts = {name: f.counts for name, f in found.items() if f.counts is not None}
    filtered: Counter[str] = Counter()
    for c in counts.values():
        filtered.update(c.filtered_by)
    return SearchCounts(
        tried=sum(c.tried for c in counts.values()),
        infeasible=sum(c.infeasible for c in counts.values()),
        filtered=sum(c.filtered for c in counts.values()),
        infeasible_by=MappingProxyType(
            {
                f"{name}: {reason}": n
                for name, c in counts.items()
                for reason, n in c.infeasible_by.items()
            }
        ),
        filtered_by=MappingProxyType(dict(filtered)),
    )
