"""Laws of composition: what the mixes say that their ops alone do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import Bundle, Laws
from energylens.cost.model import CostModelSet, KernelModel
from energylens.cost.overlap import OverlapLaw
from energylens.fit.kernels import FEWEST_POINTS, retarget, rms
from energylens.fit.samples import Data, above_idle_w, board_of, clock_ratio, gather
from energylens.spec.system import Device
from energylens.store import Sample, Store

Array = NDArray[np.float64]

LAYER = " layer "  # in the label of a mix that is a layer of a model, not a duty cycle
HELD_ABOVE = 0.93  # of the limit: a lower mean is not the cap's doing


def cap_fraction(data: Data) -> float:
    """Mean power over the limit of what held the cap: of mixes, as steps are, else of ops."""
    for samples in (data.mixes, [s for group in data.ops.values() for s in group]):
        held = [
            s.trial.power_w / data.limit_w
            for s in samples
            if s.trial
            and s.trial.power_w
            and clock_ratio(s, data.device) < 1.0
            and s.trial.power_w > HELD_ABOVE * data.limit_w
        ]
        if len(held) >= FEWEST_POINTS:
            return float(np.mean(held))
    return Laws().cap_fraction


def compose(
    sample: Sample,
    data: Data,
    models: Mapping[str, KernelModel],
    laws: Laws,
    pause_s: float = 0.0,
) -> tuple[float, float, float]:
    """Predicted (latency, energy with idle, clock ratio) of a sample's ops on its own board."""
    from energylens.schedule import Constants, Worker, kernel_result

    of_a_model = sample.block in ("host", "overlap") or LAYER in sample.label
    costs = CostModelSet(
        device=data.device,
        kernels=models,
        compute_scale=laws.compute_scale,
        compute_stretch=laws.compute_stretch if of_a_model else 0.0,
        overlap=laws.overlap,
    ).costs(sample.ops)
    own = board_of(data, sample.board_uuid, laws)
    latency_s, energy_j = own.localise(costs)
    worker = Worker(
        idle_w=own.idle_w,
        cap_w=laws.cap_fraction * data.limit_w,
        latency_s=latency_s,
        energy_j=energy_j,
    )
    constants = Constants(
        eta=laws.eta, gap_s=laws.gap_s, wait_w=0.0, spin_w=0.0, link_w=laws.link_w
    )
    return kernel_result(sample.ops, costs, worker, constants, pause_s)


def mix_errors(
    bundle: Bundle, folders: Sequence[Path], device: Device
) -> Mapping[str, tuple[float, float]]:
    """Errors of a bundle on the mixes of some stores, whether it was fitted on them or not.

    Returns:
        label and board -> (latency, energy) error in percent, as 100 times the log of the ratio.
    """
    data, _ = gather([Store(f) for f in folders], device, bundle.provider)
    seen = replace(data, typical=bundle.typical)
    return errors_of(seen.mixes, seen, bundle.kernels, bundle.laws)


def errors_of(
    samples: Sequence[Sample], data: Data, models: Mapping[str, KernelModel], laws: Laws
) -> dict[str, tuple[float, float]]:
    """See `mix_errors`; of mixes or overlaps."""
    out = {}
    for s in samples:
        if s.trial is None or s.trial.power_w is None or not _is_known(s, models):
            continue
        t, e, _ = compose(s, data, models, laws)
        measured_e = s.trial.power_w * s.trial.latency_s
        out[f"{s.label} ({s.board_uuid})"] = (
            100 * math.log(t / s.trial.latency_s),
            100 * math.log(e / measured_e),
        )
    return out


def fit_laws(data: Data, models: Mapping[str, KernelModel], laws: Laws) -> Laws:
    """The laws' constants that bring the composed mixes closest to the measured ones.

    The regressors' targets depend on the first two; hyper-parameters are kept while these move.
    """
    from scipy.optimize import least_squares

    usable = [s for s in data.mixes if all(o.kernel in models for o in s.ops)]
    if len(usable) < FEWEST_POINTS:
        return laws

    def moved(theta: Array) -> tuple[Laws, dict[str, KernelModel]]:
        new = replace(
            laws,
            eta=float(theta[0]),
            compute_scale=float(theta[1]),
            compute_stretch=float(theta[2]),
            gap_s=float(theta[3]) * 1e-6,
            link_w=float(theta[4]),
        )
        return new, {k: retarget(m, data.ops[k], data, new) for k, m in models.items()}

    def residuals(theta: Array) -> Array:
        new, shifted = moved(theta)
        out = []
        for s in usable:
            if s.trial is None or s.trial.power_w is None:
                continue
            t, e, f = compose(s, data, shifted, new)
            out += [
                math.log(t / s.trial.latency_s),
                math.log(e / (s.trial.power_w * s.trial.latency_s)),
            ]
            if s.trial.clock_hz:
                out.append(math.log(f / clock_ratio(s, data.device)))
        return np.array(out)

    start = [laws.eta, laws.compute_scale, laws.compute_stretch, laws.gap_s * 1e6, laws.link_w]
    lowest, highest = [0.3, 0.5, -0.1, -1.0, 0.0], [2.5, 1.5, 0.2, 2.0, 60.0]
    if not any(o.type.is_collective for s in usable for o in s.ops):
        highest[-1] = 1e-9  # nothing says anything about links
    found = least_squares(
        residuals,
        np.clip(start, lowest, highest),
        bounds=(lowest, highest),
        x_scale=[1.0, 1.0, 0.1, 1.0, 20.0],
        loss="soft_l1",
        f_scale=0.03,
        diff_step=1e-3,
    )
    return moved(found.x)[0]


def _is_known(sample: Sample, models: Mapping[str, KernelModel]) -> bool:
    """Whether every kernel of a sample was calibrated."""
    return all(k in models for o in sample.ops for k in _CONSISTS_OF.get(o.kernel, (o.kernel,)))


_CONSISTS_OF = {"overlapped_all_reduce": ("gemm", "limited_all_reduce")}
# A GEMM loses at least the part of the SMs that is taken from it.
_OVERLAP_LOWEST, _OVERLAP_HIGHEST = (0.0, 0.0, 1.0, 0.0, 0.0), (2.0, 0.8, 3.0, 0.8, 10.0)


def fit_overlap(data: Data, models: Mapping[str, KernelModel], laws: Laws) -> Laws:
    """The laws with the overlap law that brings the times of overlaps closest to the measured ones.

    Their energies follow from the other laws. Without overlaps the law stays as it is.
    """
    from scipy.optimize import least_squares

    known = [s for s in data.overlaps if _is_known(s, models)]
    if len(known) < FEWEST_POINTS:
        return laws

    def with_law(theta: Array, rel_se: float = 0.0) -> Laws:
        late, slow_gemm, slow_sms, slow_collective, handover_us = map(float, theta)
        law = OverlapLaw(
            late=late,
            slow_gemm=slow_gemm,
            slow_sms=slow_sms,
            slow_collective=slow_collective,
            handover_s=handover_us * 1e-6,
            rel_se=rel_se,
        )
        return replace(laws, overlap=law)

    def residuals(theta: Array) -> Array:
        new = with_law(theta)
        pairs = [(compose(s, data, models, new)[0], s.trial) for s in known]
        return np.array([math.log(t / trial.latency_s) for t, trial in pairs if trial])

    found = least_squares(
        residuals,
        (1.0, 0.1, 1.2, 0.3, 3.0),
        bounds=(_OVERLAP_LOWEST, _OVERLAP_HIGHEST),
        loss="soft_l1",
        f_scale=0.03,
        diff_step=1e-3,
    )
    return with_law(found.x, rms(residuals(found.x)))


def composition(errors: Mapping[str, tuple[float, float]], laws: Laws) -> Laws:
    """The laws with how far composed mixes are off."""
    if len(errors) < FEWEST_POINTS:
        return laws
    values = np.array(list(errors.values())) / 100
    return replace(laws, latency_sd=rms(values[:, 0]), energy_sd=rms(values[:, 1]))


def spin_w(data: Data) -> float:
    """Above-idle watts of a board that is resident in a collective and waits for the others."""
    watts = [
        w for s in data.idles if s.label == "spin" and (w := above_idle_w(s, data)) is not None
    ]
    return max(0.0, float(np.mean(watts))) if watts else Laws().spin_w
