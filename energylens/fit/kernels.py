"""Regressors of one kernel, and their errors on what they have not seen."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import Laws
from energylens.cost.features import feature_names, features, prior, shares
from energylens.cost.model import KernelModel
from energylens.cost.regress import GaussianProcess
from energylens.errors import CalibrationError
from energylens.fit.samples import Data, board_of, clock_ratio
from energylens.graph import Op
from energylens.store import Sample

Array = NDArray[np.float64]

FEWEST_POINTS = 4
REPEAT_SD, LEAST_REPEAT_SD = (0.01, 0.02), (0.004, 0.01)  # of latency and power, natural logs
IDLE_SD_W = 2.5  # idle moves by a few watts with the temperature of the board
MIN_POWER_W = 1.0  # an op that draws less above idle than this drew nothing that the meter can tell
# Features that change from step to step of one model, or follow from others.
_OF_A_STEP = frozenset({"m", "rows", "tokens", "new", "context", "batch"})
# Measured back to back: what awake links draw is not theirs, since a step is charged that once.
_LINKED = frozenset({"limited_all_reduce"})
_OF_OTHERS = frozenset({"wave", "aligned", "growth"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """Points of one kernel, and its held-out errors in percent: root mean square and largest."""

    kernel: str
    points: int
    groups: int
    latency_rms_pct: float
    latency_max_pct: float
    power_rms_pct: float
    power_max_pct: float


@dataclass(frozen=True, slots=True)
class _Reference:
    """One sample on a typical board at the maximum clock."""

    latency_s: float
    power_w: float


def _reference(sample: Sample, op: Op, data: Data, laws: Laws) -> _Reference:
    trial = sample.trial
    if trial is None or trial.power_w is None:
        raise CalibrationError(f"sample {sample.label} holds no power")
    own = board_of(data, sample.board_uuid, laws)
    p = prior(op, data.device)
    compute = min(1.0, laws.compute_scale * p.compute_share)
    f = clock_ratio(sample, data.device)
    latency = trial.latency_s / (compute / f + 1.0 - compute)
    idle_w = own.idle_w + (laws.link_w if op.kernel in _LINKED else 0.0)
    energy = max(MIN_POWER_W, trial.power_w - idle_w) * trial.latency_s / f**laws.eta
    s = shares(op, p, latency, laws.compute_scale)
    time, power = own.ratios(s.compute, s.read, s.dram)
    return _Reference(latency / time, energy / latency / power)


def _targets(samples: Sequence[Sample], data: Data, laws: Laws) -> tuple[Array, Array]:
    """log(latency / prior) and log(power / prior) of samples of one kernel, each [samples]."""
    t, p = [], []
    for s in samples:
        nominal, reference = prior(s.op, data.device), _reference(s, s.op, data, laws)
        t.append(math.log(reference.latency_s / nominal.latency_s))
        p.append(math.log(reference.power_w / (nominal.energy_j / nominal.latency_s)))
    return np.array(t), np.array(p)


def fit_kernel(
    kernel: str, samples: Sequence[Sample], data: Data, laws: Laws, before: KernelModel | None
) -> KernelModel:
    """Regressors of one kernel; hyper-parameters are searched from those of ``before``, if any."""
    x = features([s.op for s in samples], data.device)
    y_t, y_p = _targets(samples, data, laws)
    noise_t = np.array([s.trial.latency_rel_se for s in samples if s.trial])
    noise_p = np.array([_power_noise(s, data, laws) for s in samples])
    model = KernelModel(
        kernel=kernel,
        latency=_fit_gp(x, y_t, noise_t, before.latency if before else None),
        power=_fit_gp(x, y_p, noise_p, before.power if before else None),
        latency_rel_se=0.0,
        power_rel_se=0.0,
        measured=frozenset(s.op.key for s in samples),
        keys=tuple(s.op.key for s in samples),
        latency_repeat_sd=_repeat_sd(samples, y_t, LEAST_REPEAT_SD[0], REPEAT_SD[0]),
        power_repeat_sd=_repeat_sd(samples, y_p, LEAST_REPEAT_SD[1], REPEAT_SD[1]),
    )
    groups = _groups(kernel, x)
    return replace(
        model,
        latency_rel_se=rms(model.latency.leave_out(groups)),
        power_rel_se=rms(model.power.leave_out(groups)),
    )


def _repeat_sd(samples: Sequence[Sample], y: Array, least: float, otherwise: float) -> float:
    """Deviation of a measurement from another one of the same op, on whatever board.

    Args:
        samples: of one kernel.
        y: their targets, boards and clocks already taken out, [samples].
        least: a handful of pairs may agree better than measurements do.
        otherwise: where too few ops were measured twice.
    """
    groups: dict[object, list[float]] = defaultdict(list)
    for s, value in zip(samples, y, strict=True):
        groups[s.op.key].append(float(value))
    twice = [g for g in groups.values() if len(g) > 1]
    freedom = sum(len(g) - 1 for g in twice)
    if freedom < FEWEST_POINTS:
        return otherwise
    return max(least, math.sqrt(sum(len(g) * float(np.var(g)) for g in twice) / freedom))


def _power_noise(sample: Sample, data: Data, laws: Laws) -> float:
    """Relative standard error of the power above idle: from the gross power and from idle."""
    trial = sample.trial
    if trial is None or trial.power_w is None:
        raise CalibrationError(f"sample {sample.label} holds no power")
    above = max(MIN_POWER_W, trial.power_w - board_of(data, sample.board_uuid, laws).idle_w)
    return math.hypot((trial.power_rel_se or 0.0) * trial.power_w, IDLE_SD_W) / above


def _fit_gp(x: Array, y: Array, noise: Array, before: GaussianProcess | None) -> GaussianProcess:
    """Hyper-parameters by maximum likelihood (scikit-learn); evaluated by ours from then on."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    mean = float(y.mean())
    varying = np.ptp(x, axis=0) > 1e-9
    spans = np.where(varying, np.ptp(x, axis=0), 1.0)
    lengths = before.length if before else np.maximum(1.0, spans / 3)
    signal = before.signal**2 if before else 0.05
    kernel = ConstantKernel(signal, (1e-4, 10.0)) * RBF(
        lengths, [(0.4, 60.0) if v else (59.0, 60.0) for v in varying]
    ) + WhiteKernel(1e-3, (1e-5, 0.1))
    gp = GaussianProcessRegressor(
        kernel, alpha=noise**2, n_restarts_optimizer=0 if before else 2, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a bound reached is an answer
        gp.fit(x, y - mean)
    fitted = gp.kernel_
    return GaussianProcess(
        x=x,
        y=y,
        noise=np.sqrt(noise**2 + fitted.k2.noise_level),
        length=np.broadcast_to(
            np.asarray(fitted.k1.k2.length_scale, dtype=np.float64), (x.shape[1],)
        ).copy(),
        signal=math.sqrt(fitted.k1.k1.constant_value),
        mean=mean,
    )


def _groups(kernel: str, x: Array) -> NDArray[np.int64]:
    """Shape groups to hold out: points that differ in a step's sizes only are one group.

    So that the errors are those on the sizes of a model that was not calibrated. Where that leaves
    fewer than three groups, each location is one.
    """
    names = feature_names(kernel)
    own = [i for i, n in enumerate(names) if n not in _OF_A_STEP | _OF_OTHERS]
    _, groups = np.unique(np.round(x[:, own], 6), axis=0, return_inverse=True)
    if not own or len(np.unique(groups)) < 3:
        _, groups = np.unique(np.round(x, 6), axis=0, return_inverse=True)
    return np.asarray(groups, dtype=np.int64).reshape(-1)


def rms(values: Array) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(values**2)))


def held_out(model: KernelModel, samples: Sequence[Sample]) -> KernelFit:
    """Errors of a kernel's regressors on shape groups that they have not seen."""
    groups = _groups(model.kernel, model.latency.x)
    t, p = model.latency.leave_out(groups), model.power.leave_out(groups)
    return KernelFit(
        kernel=model.kernel,
        points=len(samples),
        groups=len(np.unique(groups)),
        latency_rms_pct=100 * rms(t),
        latency_max_pct=100 * float(np.abs(t).max()),
        power_rms_pct=100 * rms(p),
        power_max_pct=100 * float(np.abs(p).max()),
    )


def retarget(model: KernelModel, samples: Sequence[Sample], data: Data, laws: Laws) -> KernelModel:
    """The same regressors under other laws: hyper-parameters stay, targets move."""
    y_t, y_p = _targets(samples, data, laws)
    return replace(model, latency=model.latency.retarget(y_t), power=model.power.retarget(y_p))
