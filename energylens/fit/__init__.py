"""Samples -> bundle: regressors per kernel, laws from the mixes, host law from the host points.

All samples are first brought to one reference, a typical board at the maximum clock: the clock law
undoes the power cap (an op that held it alone settled at its own clock), the board's anchor undoes
the board. Both directions use the same laws, so what they get wrong for an op alone cancels when
that op is predicted on such a board again.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from energylens.cost.board import Spread, board
from energylens.cost.bundle import Bundle, Laws
from energylens.cost.model import KernelModel, Published
from energylens.fit.host import fit_host
from energylens.fit.kernels import FEWEST_POINTS, KernelFit, fit_kernel, held_out
from energylens.fit.laws import (
    cap_fraction,
    composition,
    errors_of,
    fit_laws,
    fit_overlap,
    mix_errors,
    spin_w,
)
from energylens.fit.published import load_one_shot, load_published
from energylens.fit.samples import Data, gather
from energylens.graph import KERNELS
from energylens.spec.machines import load_engine
from energylens.spec.resources import list_resources
from energylens.spec.system import Device
from energylens.store import Provenance, Store

__all__ = [
    "FitReport",
    "KernelFit",
    "fit_bundle",
    "load_one_shot",
    "load_published",
    "mix_errors",
]

# What a handful of boards cannot tell about all boards, the less so as boards of one host are
# alike: never claim a smaller spread (natural logs, watts). Four other H200s drew 569 to 673 W
# under the same stream; pairs of boards differed by 3 to 5 % in the clock that they held at the
# cap, which is a deviation of 2.5 % for one, and twice that in power.
FLOOR = Spread(memory_power=0.09, compute_power=0.05, memory_time=0.01, idle_w=4.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class FitReport:
    """What `calibrate` prints after fitting.

    Attributes:
        kernels: held-out errors per kernel.
        mixes: label -> (latency, energy) error in percent of the composed prediction.
        skipped: reasons, and how many samples were not used for each.
    """

    kernels: tuple[KernelFit, ...]
    mixes: Mapping[str, tuple[float, float]]
    skipped: Mapping[str, int]


def fit_bundle(
    folders: Sequence[Path],
    *,
    device: Device,
    provider: str,
    published: Published | None = None,
    one_shot: Published | None = None,
    version: str | None = None,
) -> tuple[Bundle, FitReport]:
    """Fit everything that the samples of ``folders`` allow.

    Args:
        folders: stores of one device and power limit; runs of providers that ``provider`` does not
            stand on are left out.
        device: its datasheet.
        provider: whose kernels ran.
        published: collective latencies over worker counts, to be carried in the bundle.
        one_shot: latencies of an all-reduce by one kernel, likewise.
        version: of the bundle; by default the date of its newest run, so that fitting the same
            samples again gives the same bundle.

    Raises:
        CalibrationError: no usable samples, no anchors, or runs that do not belong together
            (devices, power limits, NCCL algorithms).
    """
    stores = [Store(f) for f in folders]
    data, skipped = gather(stores, device, provider)
    laws = Laws(cap_fraction=cap_fraction(data))
    models: dict[str, KernelModel] = {}
    for _ in range(2):  # the laws shape the regressors' targets, and the regressors the laws
        models = {
            k: fit_kernel(k, s, data, laws, models.get(k))
            for k, s in sorted(data.ops.items())
            if len(s) >= FEWEST_POINTS
        }
        laws = fit_laws(data, models, laws)
    errors = errors_of(data.mixes, data, models, laws)
    laws = replace(composition(errors, laws), spin_w=spin_w(data))
    laws = fit_overlap(data, models, laws)
    overlaps = errors_of(data.overlaps, data, models, laws)
    bundle = Bundle(
        device=device.name,
        provider=provider,
        version=version or max(r.time for r in data.runs)[:10],
        power_limit_w=data.limit_w if math.isfinite(data.limit_w) else device.power_limit_w,
        boards=tuple(data.anchors.values()),
        typical=data.typical,
        spread=_spread(data, laws.eta),
        kernels={k: m for k, m in models.items() if k in _kernels_of(provider)},
        laws=laws,
        host=fit_host(data, models, laws),
        published=published,
        one_shot=one_shot,
        versions=_merged_versions(data.runs),
    )
    fits = tuple(held_out(m, data.ops[k]) for k, m in models.items())
    facts: dict[str, Any] = {
        "points": {f.kernel: f.points for f in fits},
        "held_out": [asdict(f) for f in fits],
        "mixes": _rounded(errors),
        "overlaps": _rounded(overlaps),
        "runs": sorted({r.run_id for r in data.runs}),
        "samples_sha256": _samples_hash(folders),
    }
    if device.power_mode is not None:
        facts["power_mode"] = device.power_mode
    return replace(bundle, facts=facts), FitReport(kernels=fits, mixes=errors, skipped=skipped)


def _rounded(errors: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    return {label: [round(t, 2), round(e, 2)] for label, (t, e) in errors.items()}


def _samples_hash(folders: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for f in sorted(folders):
        digest.update((f / "samples.csv").read_bytes())
    return digest.hexdigest()


def _kernels_of(provider: str) -> frozenset[str]:
    """Kernels that the engines of a provider run, collectives included."""
    engines = [e for e in map(load_engine, list_resources("engines")) if e.provider == provider]
    used = {k.kernel for e in engines for k in e.kernels.values()}
    return frozenset(used | {name for name, k in KERNELS.items() if k.is_collective})


def _merged_versions(runs: Iterable[Provenance]) -> Mapping[str, str]:
    """Package -> version, or all versions where runs differ."""
    seen: dict[str, dict[str, None]] = defaultdict(dict)
    for run in runs:
        for name, v in run.versions.items():
            seen[name].setdefault(v)
    return {name: " / ".join(vs) for name, vs in sorted(seen.items())}


def _spread(data: Data, eta: float) -> Spread:
    """Standard deviations that a board which is none of the calibrated ones is to be expected at.

    From n boards, the deviation of another one is wider than theirs: by sqrt(1 + 1/n) since their
    mean is uncertain, and by Student's t since their deviation is. Never less than `FLOOR`.
    """
    from scipy.stats import norm, t

    boards = [board(a, data.typical, data.device, eta) for a in data.anchors.values()]
    n = len(boards)
    if n < 2:
        return FLOOR
    widen = math.sqrt(1 + 1 / n) * float(t.ppf(0.95, n - 1) / norm.ppf(0.95))

    def sd(values: Sequence[float]) -> float:
        return widen * float(np.std(values, ddof=1))

    return Spread(
        memory_power=max(FLOOR.memory_power, sd([math.log(b.memory_power) for b in boards])),
        compute_power=max(FLOOR.compute_power, sd([math.log(b.compute_power) for b in boards])),
        memory_time=max(FLOOR.memory_time, sd([math.log(b.memory_time) for b in boards])),
        idle_w=max(FLOOR.idle_w, sd([b.idle_w for b in boards])),
    )
