"""Samples -> bundle: regressors per kernel, laws from the mixes, host law from the host points.

All samples are first brought to one reference, a typical board at the maximum clock: the clock law
undoes the power cap (an op that held it alone settled at its own clock), the board's anchor undoes
the board. Both directions use the same laws, so what they get wrong for an op alone cancels when
that op is predicted on such a board again.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from energylens.cost.board import Board, Spread, board, typical_anchor
from energylens.cost.bundle import Bundle, HostLaw, Laws, StepHost
from energylens.cost.features import feature_names, features, prior, shares, step_shape
from energylens.cost.model import CostModelSet, KernelModel, Published
from energylens.cost.regress import GaussianProcess
from energylens.errors import CalibrationError
from energylens.graph import KERNELS, Op
from energylens.results import BoardAnchor, HostAnchor
from energylens.spec.load import list_resources, load_engine
from energylens.spec.system import Device, Mode
from energylens.store import Provenance, Sample, Store, check_power_limits

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

FEWEST_POINTS = 4
CAPPED_BELOW = 0.97  # of the maximum clock: the op held the power cap
# What a handful of boards cannot tell about all boards, the less so as boards of one host are
# alike: never claim a smaller spread (natural logs, watts). Four other H200s drew 569 to 673 W
# under the same stream; pairs of boards differed by 3 to 5 % in the clock that they held at the
# cap, which is a deviation of 2.5 % for one, and twice that in power.
FLOOR = Spread(memory_power=0.09, compute_power=0.05, memory_time=0.01, idle_w=4.0)
STANDS_ON: Mapping[str, tuple[str, ...]] = {"vllm": ("vllm", "torch")}
"""Provider -> whose samples its bundle is fitted on, where not on its own alone.

vLLM leaves its GEMMs to PyTorch, and how kernels compose is a property of the board.
"""
WHOLE = " whole "  # in the label of a host point of a whole model, whose device time counts
# Natural logs: of a composed step, of the host's time, of a run against its host's anchor.
WHOLE_STEP_SD, HOST_SD, RUN_SD = 0.012, 0.15, 0.2
LAYER = " layer "  # in the label of a mix that is a layer of a model, not a duty cycle
HELD_ABOVE = 0.93  # of the limit: a lower mean is not the cap's doing
REPEAT_SD, LEAST_REPEAT_SD = (0.01, 0.02), (0.004, 0.01)  # of latency and power, natural logs
IDLE_SD_W = 2.5  # idle moves by a few watts with the temperature of the board
MIN_POWER_W = 1.0  # an op that draws less above idle than this drew nothing that the meter can tell


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Data:
    """Usable samples with their boards."""

    device: Device
    runs: Sequence[Provenance]
    limit_w: float
    anchors: Mapping[str, BoardAnchor]
    typical: BoardAnchor
    ops: Mapping[str, list[Sample]]
    mixes: list[Sample]
    hosts: list[Sample]
    idles: list[Sample]


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
    data, skipped = _gather(stores, device, provider)
    laws = Laws(cap_fraction=_cap_fraction(data))
    models: dict[str, KernelModel] = {}
    for _ in range(2):  # the laws shape the regressors' targets, and the regressors the laws
        models = {
            k: _fit_kernel(k, s, data, laws, models.get(k))
            for k, s in sorted(data.ops.items())
            if len(s) >= FEWEST_POINTS
        }
        laws = _fit_laws(data, models, laws)
    errors = _mix_errors(data, models, laws)
    laws = replace(laws, **_composition_sd(errors), spin_w=_spin_w(data))
    bundle = Bundle(
        device=device.name,
        provider=provider,
        version=version or max(r.time for r in data.runs)[:10],
        power_limit_w=data.limit_w,
        boards=tuple(data.anchors.values()),
        typical=data.typical,
        spread=_spread(data, laws.eta),
        kernels={k: m for k, m in models.items() if k in _kernels_of(provider)},
        laws=laws,
        host=_fit_host(data, models, laws),
        published=published,
        one_shot=one_shot,
        versions=_merged_versions(data.runs),
    )
    fits = tuple(_held_out(m, data.ops[k]) for k, m in models.items())
    facts: dict[str, Any] = {
        "points": {f.kernel: f.points for f in fits},
        "held_out": [asdict(f) for f in fits],
        "mixes": {label: [round(t, 2), round(e, 2)] for label, (t, e) in errors.items()},
        "runs": sorted({r.run_id for r in data.runs}),
        "samples_sha256": _samples_hash(folders),
    }
    return replace(bundle, facts=facts), FitReport(kernels=fits, mixes=errors, skipped=skipped)


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


def _gather(
    stores: Sequence[Store], device: Device, provider: str
) -> tuple[_Data, Mapping[str, int]]:
    runs = _runs(stores, provider)
    limit_w, anchors = _circumstances(runs, device, ", ".join(str(s.folder) for s in stores))
    skipped: dict[str, int] = defaultdict(int)
    ops: dict[str, list[Sample]] = defaultdict(list)
    blocks: dict[str, list[Sample]] = {"mix": [], "host": [], "idle": []}
    wanted = {run.run_id: run for run in runs}
    for sample in (s for store in stores for s in store.samples if s.run_id in wanted):
        reason = _why_unused(sample, anchors)
        if reason:
            skipped[reason] += 1
        elif sample.block == "op":
            ops[sample.op.kernel].append(sample)
        elif sample.block in blocks and not _is_others_host(sample, wanted, provider):
            blocks[sample.block].append(sample)
    if not ops:
        raise CalibrationError(f"no usable samples: {dict(skipped) or 'the folders are empty'}")
    data = _Data(
        device=device,
        runs=runs,
        limit_w=limit_w,
        anchors=anchors,
        typical=typical_anchor(list(anchors.values())),
        ops=ops,
        mixes=blocks["mix"],
        hosts=blocks["host"],
        idles=blocks["idle"],
    )
    return data, dict(skipped)


def _is_others_host(sample: Sample, runs: Mapping[str, Provenance], provider: str) -> bool:
    """Whether it is a host time of another provider's engine: kernels are shared, hosts are not."""
    return sample.block == "host" and runs[sample.run_id].provider != provider


def _runs(stores: Sequence[Store], provider: str) -> list[Provenance]:
    """Runs that the bundle of ``provider`` stands on."""
    wanted = STANDS_ON.get(provider, (provider,))
    runs = [run for store in stores for run in store.runs.values()]
    if not any(run.provider == provider for run in runs):
        others = ", ".join(sorted({run.provider for run in runs})) or "no run"
        raise CalibrationError(
            f"no run measured {provider}'s kernels (found: {others}); "
            f"`energylens calibrate --provider {provider}` measures them"
        )
    return [run for run in runs if run.provider in wanted]


def _circumstances(
    runs: Sequence[Provenance], device: Device, where: str
) -> tuple[float, Mapping[str, BoardAnchor]]:
    """Power limit of all runs, and the mean anchor of each board."""
    anchors: dict[str, list[BoardAnchor]] = defaultdict(list)
    check_power_limits(runs, where)
    for run in runs:
        if run.device != device.name:
            raise CalibrationError(f"run {run.run_id} is of {run.device}, not of {device.name}")
        for a in run.anchors.boards if run.anchors else ():
            anchors[a.board_uuid].append(a)
    algorithms = {run.versions["nccl_algo"] for run in runs if "nccl_algo" in run.versions}
    if len(algorithms) > 1:
        raise CalibrationError(
            f"collectives ran with different NCCL algorithms: {', '.join(sorted(algorithms))}; fit "
            "one at a time, the others' samples in a folder of their own (--out)"
        )
    if not anchors:
        raise CalibrationError(
            "no run has an anchor; `energylens calibrate` takes one at its start"
        )
    means = {
        u: replace(typical_anchor(a), board_uuid=u, time=a[-1].time) for u, a in anchors.items()
    }
    limits = [run.power_limit_w for run in runs if run.power_limit_w is not None]
    return (limits[0] if limits else device.power_limit_w), means


def _why_unused(sample: Sample, anchors: Mapping[str, BoardAnchor]) -> str:
    if sample.trial is None:
        return f"skipped: {sample.reason}"
    if not sample.trial.valid:
        return f"invalid: {sample.trial.reason}"
    if sample.block in ("op", "mix") and sample.trial.power_w is None:
        return "no power"
    if sample.block in ("op", "mix") and any(
        u not in anchors for u in sample.board_uuid.split(";")
    ):
        return "board without an anchor"
    return ""


def _cap_fraction(data: _Data) -> float:
    """Mean power over the limit of what held the cap: of mixes, as steps are, else of ops."""
    for samples in (data.mixes, [s for group in data.ops.values() for s in group]):
        held = [
            s.trial.power_w / data.limit_w
            for s in samples
            if s.trial
            and s.trial.power_w
            and _clock_ratio(s, data.device) < 1.0
            and s.trial.power_w > HELD_ABOVE * data.limit_w
        ]
        if len(held) >= FEWEST_POINTS:
            return float(np.mean(held))
    return Laws().cap_fraction


def _spread(data: _Data, eta: float) -> Spread:
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


def load_published(path: Path, device: str) -> Published | None:
    """Published collective latencies: of the newest NCCL version that has all worker counts.

    Args:
        path: CSV with the columns device, nccl_version, collective, workers, values, latency_s.
        device: name of the device.

    Returns:
        None where the table has none of the device.
    """
    import pandas as pd

    table = pd.read_csv(path, dtype={"nccl_version": str})
    table = table[table["device"] == device]
    if table.empty:
        return None
    complete = table.groupby("nccl_version")["workers"].nunique()
    best = complete[complete == complete.max()].index
    newest = max(best, key=lambda v: tuple(map(int, v.split("."))))
    return _published(table[table["nccl_version"] == newest])


def load_one_shot(path: Path) -> Published:
    """Published latencies of an all-reduce by one kernel over NVLink.

    Args:
        path: CSV with the columns device, collective, workers, values, latency_s.
    """
    import pandas as pd

    return _published(pd.read_csv(path))


def _published(table: pd.DataFrame) -> Published:
    wide = table.pivot_table(
        index=["collective", "workers"], columns="values", values="latency_s", aggfunc="median"
    ).dropna(axis=1)
    return Published(
        workers=tuple(int(n) for n in sorted(set(wide.index.get_level_values("workers")))),
        values=tuple(float(v) for v in wide.columns),
        latency_s={
            str(name): wide.loc[name].sort_index().to_numpy(dtype=np.float64)
            for name in sorted(set(wide.index.get_level_values("collective")))
        },
    )


# ---------------------------------------------------------------- one kernel


@dataclass(frozen=True, slots=True)
class _Reference:
    """One sample on a typical board at the maximum clock."""

    latency_s: float
    power_w: float


def _board(data: _Data, uuids: str, laws: Laws) -> Board:
    """The board of a sample; of several workers, their mean."""
    boards = [board(data.anchors[u], data.typical, data.device, laws.eta) for u in uuids.split(";")]
    return Board(
        idle_w=float(np.mean([b.idle_w for b in boards])),
        memory_power=float(np.mean([b.memory_power for b in boards])),
        compute_power=float(np.mean([b.compute_power for b in boards])),
        memory_time=float(np.mean([b.memory_time for b in boards])),
    )


def _clock_ratio(sample: Sample, device: Device) -> float:
    clock = sample.trial.clock_hz if sample.trial else None
    ratio = clock / device.clock_max_hz if clock else 1.0
    return ratio if ratio < CAPPED_BELOW else 1.0


def _reference(sample: Sample, op: Op, data: _Data, laws: Laws) -> _Reference:
    trial = sample.trial
    if trial is None or trial.power_w is None:
        raise CalibrationError(f"sample {sample.label} holds no power")
    own = _board(data, sample.board_uuid, laws)
    p = prior(op, data.device)
    compute = min(1.0, laws.compute_scale * p.compute_share)
    f = _clock_ratio(sample, data.device)
    latency = trial.latency_s / (compute / f + 1.0 - compute)
    energy = max(MIN_POWER_W, trial.power_w - own.idle_w) * trial.latency_s / f**laws.eta
    s = shares(op, p, latency, laws.compute_scale)
    time, power = own.ratios(s.compute, s.read, s.dram)
    return _Reference(latency / time, energy / latency / power)


def _targets(samples: Sequence[Sample], data: _Data, laws: Laws) -> tuple[Array, Array]:
    """log(latency / prior) and log(power / prior) of samples of one kernel, each [samples]."""
    t, p = [], []
    for s in samples:
        nominal, reference = prior(s.op, data.device), _reference(s, s.op, data, laws)
        t.append(math.log(reference.latency_s / nominal.latency_s))
        p.append(math.log(reference.power_w / (nominal.energy_j / nominal.latency_s)))
    return np.array(t), np.array(p)


def _fit_kernel(
    kernel: str, samples: Sequence[Sample], data: _Data, laws: Laws, before: KernelModel | None
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
    rms = {name: _rms(getattr(model, name).leave_out(groups)) for name in ("latency", "power")}
    return replace(model, latency_rel_se=rms["latency"], power_rel_se=rms["power"])


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


def _power_noise(sample: Sample, data: _Data, laws: Laws) -> float:
    """Relative standard error of the power above idle: from the gross power and from idle."""
    trial = sample.trial
    if trial is None or trial.power_w is None:
        raise CalibrationError(f"sample {sample.label} holds no power")
    above = max(MIN_POWER_W, trial.power_w - _board(data, sample.board_uuid, laws).idle_w)
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


# Features that change from step to step of one model, or follow from others.
_OF_A_STEP = frozenset({"m", "rows", "tokens", "new", "context", "batch"})
_OF_OTHERS = frozenset({"wave", "aligned", "growth"})


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


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _held_out(model: KernelModel, samples: Sequence[Sample]) -> KernelFit:
    groups = _groups(model.kernel, model.latency.x)
    t, p = model.latency.leave_out(groups), model.power.leave_out(groups)
    return KernelFit(
        kernel=model.kernel,
        points=len(samples),
        groups=len(np.unique(groups)),
        latency_rms_pct=100 * _rms(t),
        latency_max_pct=100 * float(np.abs(t).max()),
        power_rms_pct=100 * _rms(p),
        power_max_pct=100 * float(np.abs(p).max()),
    )


# ---------------------------------------------------------------- composition


def _compose(
    sample: Sample,
    data: _Data,
    models: Mapping[str, KernelModel],
    laws: Laws,
    pause_s: float = 0.0,
) -> tuple[float, float, float]:
    """Predicted (latency, energy with idle, clock ratio) of a sample's ops on its own board."""
    from energylens.schedule import Constants, Worker, kernel_result

    of_a_model = sample.block == "host" or LAYER in sample.label
    costs = CostModelSet(
        device=data.device,
        kernels=models,
        compute_scale=laws.compute_scale,
        compute_stretch=laws.compute_stretch if of_a_model else 0.0,
    ).costs(sample.ops)
    own = _board(data, sample.board_uuid, laws)
    local = [own.localise(c) for c in costs]
    worker = Worker(
        idle_w=own.idle_w,
        cap_w=laws.cap_fraction * data.limit_w,
        latency_s=np.array([c.latency_s for c in local]),
        energy_j=np.array([c.energy_j for c in local]),
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
    data, _ = _gather([Store(f) for f in folders], device, bundle.provider)
    seen = replace(data, typical=bundle.typical)
    return _mix_errors(seen, bundle.kernels, bundle.laws)


def _mix_errors(
    data: _Data, models: Mapping[str, KernelModel], laws: Laws
) -> dict[str, tuple[float, float]]:
    out = {}
    for s in data.mixes:
        known = all(o.kernel in models for o in s.ops)
        if s.trial is None or s.trial.power_w is None or not known:
            continue
        t, e, _ = _compose(s, data, models, laws)
        measured_e = s.trial.power_w * s.trial.latency_s
        out[f"{s.label} ({s.board_uuid})"] = (
            100 * math.log(t / s.trial.latency_s),
            100 * math.log(e / measured_e),
        )
    return out


def _fit_laws(data: _Data, models: Mapping[str, KernelModel], laws: Laws) -> Laws:
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
        return new, {k: _retarget(m, data.ops[k], data, new) for k, m in models.items()}

    def residuals(theta: Array) -> Array:
        new, shifted = moved(theta)
        out = []
        for s in usable:
            if s.trial is None or s.trial.power_w is None:
                continue
            t, e, f = _compose(s, data, shifted, new)
            out += [
                math.log(t / s.trial.latency_s),
                math.log(e / (s.trial.power_w * s.trial.latency_s)),
            ]
            if s.trial.clock_hz:
                out.append(math.log(f / _clock_ratio(s, data.device)))
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


def _retarget(
    model: KernelModel, samples: Sequence[Sample], data: _Data, laws: Laws
) -> KernelModel:
    y_t, y_p = _targets(samples, data, laws)
    return replace(model, latency=model.latency.retarget(y_t), power=model.power.retarget(y_p))


def _composition_sd(errors: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    if len(errors) < FEWEST_POINTS:
        return {}
    values = np.array(list(errors.values())) / 100
    return {"latency_sd": _rms(values[:, 0]), "energy_sd": _rms(values[:, 1])}


def _spin_w(data: _Data) -> float:
    """Above-idle watts of a board that is resident in a collective and waits for the others."""
    watts = [
        w for s in data.idles if s.label == "spin" and (w := _above_idle_w(s, data)) is not None
    ]
    return max(0.0, float(np.mean(watts))) if watts else Laws().spin_w


def _typical_host(hosts: Sequence[HostAnchor]) -> HostAnchor | None:
    """Median anchor of the hosts that ran the calibration, or None without any."""
    if not hosts:
        return None
    modules = [h.module_us for h in hosts if h.module_us]
    return HostAnchor(
        launch_us=float(np.median([h.launch_us for h in hosts])),
        module_us=float(np.median(modules)) if modules else None,
        cpu=" / ".join(dict.fromkeys(h.cpu for h in hosts)),
    )


def _fit_host(data: _Data, models: Mapping[str, KernelModel], laws: Laws) -> HostLaw | None:
    """Host law over the host points, by number of workers.

    Each run's times are brought to the median host by its own anchor first: hosts differ by up to
    twice, and the same host from hour to hour.
    """
    anchors = {r.run_id: r.anchors.host for r in data.runs if r.anchors}
    typical = _typical_host([h for h in anchors.values() if h])
    if typical is None:
        return None
    eager: dict[int, list[Sample]] = defaultdict(list)
    serving: dict[int, list[Sample]] = defaultdict(list)
    for s in data.hosts:
        if s.trial:
            (serving if s.mode == Mode.SERVING else eager)[_workers(s)].append(s)
    slowness = {r: _slowness(host, typical) for r, host in anchors.items()}
    launch_s, wait_w, deviations = {}, {}, []
    steps, lone_steps = {}, {}
    for workers, samples in eager.items():
        launch_s[workers], own = _launches(samples, slowness)
        deviations += own
    for workers, samples in serving.items():
        alone = [s for s in samples if _is_lone(s)]
        following = [s for s in samples if not _is_lone(s)]
        lone_steps[workers], lone = _serving_steps(alone, data, models, laws, slowness)
        # Decode steps are captured and have one token a sequence: what a token and a launched layer
        # take is known from the others.
        steps[workers], follow = _serving_steps(
            following, data, models, laws, slowness, known=lone_steps[workers]
        )
        deviations += [*follow, *lone]
    for workers, samples in (*eager.items(), *serving.items()):
        # Host points launch a step's kernels on tiny tensors: a few watts are those kernels', the
        # rest is what a board (of several: its links and spinning collectives too) draws meanwhile.
        idling = [s for s in samples if WHOLE not in s.label]
        watts = [w for s in idling if (w := _above_idle_w(s, data)) is not None]
        wait_w[workers] = max(0.0, float(np.mean(watts))) if watts else 0.0
    if not wait_w:
        return None
    return HostLaw(
        launch_s=launch_s,
        wait_w=wait_w,
        anchor=typical,
        rel_se=max(0.05, _rms(np.array(deviations))),
        steps=steps,
        lone_steps=lone_steps,
    )


def _launches(
    samples: Sequence[Sample], slowness: Mapping[str, float]
) -> tuple[float, list[float]]:
    """Median seconds per launch of eager steps, and the log deviations from it.

    There is no constant per step: with one, whole models of 32 layers came out a third too fast
    from points of 2 and 8 layers.
    """
    per_launch = [
        s.trial.latency_s / sum(o.count * o.launches for o in s.ops) / slowness.get(s.run_id, 1.0)
        for s in samples
        if s.trial
    ]
    median = float(np.median(per_launch))
    return median, [math.log(t / median) for t in per_launch]


def _is_lone(sample: Sample) -> bool:
    """Whether the steps of a serving host point had pauses between them: prefills do."""
    shape = step_shape(sample.ops)
    return shape.tokens > shape.sequences


def _serving_steps(
    samples: Sequence[Sample],
    data: _Data,
    models: Mapping[str, KernelModel],
    laws: Laws,
    slowness: Mapping[str, float],
    known: StepHost | None = None,
) -> tuple[StepHost, list[float]]:
    """Host time of the steps of a real engine, and the log deviations of small models' steps.

    Small models tell how the host's time grows; on whole models the device takes longer, and what
    is left over its kernels is the host's serial share. Both are fitted together; of ``known``
    steps the times per token and per layer are taken over. A host is not as slow for an engine's
    Python as for its anchor's, so each run has a factor of its own near the anchor's.
    """
    from scipy.optimize import least_squares

    shapes = [step_shape(s.ops) for s in samples]
    slow = np.array([slowness.get(s.run_id, 1.0) for s in samples])
    runs, run_of = np.unique([s.run_id for s in samples], return_inverse=True)
    measured = np.array([s.trial.latency_s for s in samples if s.trial])
    whole = np.array([WHOLE in s.label for s in samples])
    spread = np.where(whole, WHOLE_STEP_SD, HOST_SD)

    def law(theta: Array) -> StepHost:
        share, step_s, sequence_s, *more = (float(v) for v in theta[: len(start)])
        if known is not None:
            return replace(
                known, step_s=1e-6 * step_s, sequence_s=1e-6 * sequence_s, serial_share=share
            )
        token_s, layer_s, expert_layer_s = more
        return StepHost(
            step_s=1e-6 * step_s,
            sequence_s=1e-6 * sequence_s,
            token_s=1e-6 * token_s,
            layer_s=1e-6 * layer_s,
            expert_layer_s=1e-6 * expert_layer_s,
            serial_share=share,
        )

    def step_s(sample: Sample, host_s: float, serial_s: float) -> float:
        device_s, _, _ = _compose(sample, data, models, laws, serial_s)
        return max(device_s + serial_s, host_s)

    def deviations(theta: Array) -> Array:
        own = law(theta)
        factors = slow * np.exp(theta[len(start) :])[run_of]
        found = [
            step_s(s, f * own.total_s(shape), f * own.serial_s(shape))
            for s, f, shape in zip(samples, factors, shapes, strict=True)
        ]
        return np.asarray(np.log(np.array(found) / measured))

    # Serial share; microseconds a step, a sequence, a token, a layer, a layer of experts.
    start = np.array([0.2, 1500.0, 10.0, 0.1, 20.0, 100.0])[: None if known is None else 3]
    highest = np.array([1.0, 1e5, 1e4, 1e2, 1e4, 1e4])[: len(start)]
    ones = np.ones(len(runs))
    fitted = least_squares(
        lambda theta: np.concatenate((deviations(theta) / spread, theta[len(start) :] / RUN_SD)),
        np.concatenate((start, 0 * ones)),
        bounds=(np.concatenate((0 * start, -ones)), np.concatenate((highest, ones))),
        x_scale=np.concatenate((start, 0.1 * ones)),
        diff_step=1e-3,
        loss="soft_l1",
    )
    return law(fitted.x), list(deviations(fitted.x)[~whole])


def _workers(sample: Sample) -> int:
    return max((int(o.sizes["workers"]) for o in sample.ops if o.type.is_collective), default=1)


def _slowness(host: HostAnchor | None, typical: HostAnchor) -> float:
    """Module time of a host over the typical one's; 1 where it was not measured."""
    if host is None or not host.module_us or not typical.module_us:
        return 1.0
    return host.module_us / typical.module_us


def _above_idle_w(sample: Sample, data: _Data) -> float | None:
    """Mean power per board of a sample above the boards' idle, or None where it cannot be told."""
    boards = [data.anchors.get(u) for u in sample.board_uuid.split(";")]
    known = [b.idle_w for b in boards if b is not None]
    if sample.trial is None or sample.trial.power_w is None or len(known) < len(boards):
        return None
    return sample.trial.power_w - float(np.mean(known))
