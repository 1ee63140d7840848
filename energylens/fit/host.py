"""Host law: how long a host takes for a step, from steps that waited for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from energylens.cost.bundle import HostLaw, Laws, StepHost
from energylens.cost.features import step_shape
from energylens.cost.model import KernelModel
from energylens.fit.kernels import rms
from energylens.fit.laws import compose
from energylens.fit.samples import Data, above_idle_w, workers_of
from energylens.results import HostAnchor
from energylens.spec.system import Mode
from energylens.store import Sample

Array = NDArray[np.float64]

WHOLE = " whole "  # in the label of a host point of a whole model, whose device time counts
# Natural logs: of a composed step, of the host's time, of a run against its host's anchor.
WHOLE_STEP_SD, HOST_SD, RUN_SD = 0.012, 0.15, 0.2
EXPERT_LAYER_S = 1e-4  # a guess, where no point has experts
VISIBLY = 1.25  # a whole model's step of this many times its kernels is as uncertain as the host


def fit_host(data: Data, models: Mapping[str, KernelModel], laws: Laws) -> HostLaw | None:
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
            (serving if s.mode == Mode.SERVING else eager)[workers_of(s)].append(s)
    slowness = {r: _slowness(host, typical) for r, host in anchors.items()}
    launch_s, wait_w, deviations = {}, {}, []
    steps, lone_steps = {}, {}
    for workers, samples in eager.items():
        launch_s[workers], own = _launches(samples, slowness)
        deviations += own
    for workers, samples in serving.items():
        if alone := [s for s in samples if _is_lone(s)]:
            lone_steps[workers], own = _serving_steps(alone, data, models, laws, slowness)
            deviations += own
    lone_steps = pool_expert_layers(lone_steps)
    for workers, samples in serving.items():
        following = [s for s in samples if not _is_lone(s)]
        # Decode steps are captured and have one token a sequence: what a token and a launched layer
        # take is known from the others.
        if following and workers in lone_steps:
            steps[workers], own = _serving_steps(
                following, data, models, laws, slowness, known=lone_steps[workers]
            )
            deviations += own
    for workers, samples in (*eager.items(), *serving.items()):
        # Host points launch a step's kernels on tiny tensors: a few watts are those kernels', the
        # rest is what a board (of several: its links and spinning collectives too) draws meanwhile.
        idling = [s for s in samples if WHOLE not in s.label]
        watts = [w for s in idling if (w := above_idle_w(s, data)) is not None]
        wait_w[workers] = max(0.0, float(np.mean(watts))) if watts else 0.0
    if not wait_w:
        return None
    return HostLaw(
        launch_s=launch_s,
        wait_w=wait_w,
        anchor=typical,
        rel_se=max(0.05, rms(np.array(deviations))),
        steps=steps,
        lone_steps=lone_steps,
    )


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
    data: Data,
    models: Mapping[str, KernelModel],
    laws: Laws,
    slowness: Mapping[str, float],
    known: StepHost | None = None,
) -> tuple[StepHost, list[float]]:
    """Host time of the steps of a real engine, and the log deviations of small models' steps.

    Small models tell how the host's time grows; on whole models the device takes longer, and what
    is left over its kernels is the host's serial share. Both are fitted together; of ``known``
    steps the times per token and per layer are taken over. A host is not as slow for an engine's
    Python as for its anchor's, so each run has a factor of its own near the anchor's. The serial
    share of steps that follow each other has none: on a host 1.9 times as slow it was no longer.
    """
    from scipy.optimize import least_squares

    shapes = [step_shape(s.ops) for s in samples]
    slow = np.array([slowness.get(s.run_id, 1.0) for s in samples])
    runs, run_of = np.unique([s.run_id for s in samples], return_inverse=True)
    measured = np.array([s.trial.latency_s for s in samples if s.trial])
    whole = np.array([WHOLE in s.label for s in samples])
    waited = np.array(
        [
            m > VISIBLY * compose(s, data, models, laws)[0]
            for s, m in zip(samples, measured, strict=True)
        ]
    )
    spread = np.where(whole & ~waited, WHOLE_STEP_SD, HOST_SD)

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
        device_s, _, _ = compose(sample, data, models, laws, serial_s)
        return max(device_s + serial_s, host_s)

    def deviations(theta: Array) -> Array:
        own = law(theta)
        factors = slow * np.exp(theta[len(start) :])[run_of]
        found = [
            step_s(s, f * own.total_s(shape), (f if known is None else 1.0) * own.serial_s(shape))
            for s, f, shape in zip(samples, factors, shapes, strict=True)
        ]
        return np.asarray(np.log(np.array(found) / measured))

    # Serial share; microseconds a step, a sequence, a token, a layer, a layer of experts. A point
    # says nothing about the smaller of its device and host times, so one start can be a dead end.
    starts = np.array(
        [
            [0.2, 1500.0, 10.0, 0.1, 20.0, 1e6 * EXPERT_LAYER_S],
            [0.5, 3000.0, 100.0, 0.1, 200.0, 3e6 * EXPERT_LAYER_S],
        ]
    )[:, : None if known is None else 3]
    start = starts[0]
    highest = np.array([1.0, 1e5, 1e4, 1e2, 1e4, 1e4])[: len(start)]
    ones = np.ones(len(runs))
    fitted = min(
        (
            least_squares(
                lambda theta: np.concatenate(
                    (deviations(theta) / spread, theta[len(start) :] / RUN_SD)
                ),
                np.concatenate((begin, 0 * ones)),
                bounds=(np.concatenate((0 * start, -ones)), np.concatenate((highest, ones))),
                x_scale=np.concatenate((start, 0.1 * ones)),
                diff_step=1e-3,
                loss="soft_l1",
            )
            for begin in starts
        ),
        key=lambda found: float(found.cost),
    )
    steps = law(fitted.x)
    if known is None:
        layer_sd_s, expert_layer_sd_s = 1e-6 * standard_errors(fitted.jac)[4:6]
        steps = replace(
            steps, layer_sd_s=float(layer_sd_s), expert_layer_sd_s=float(expert_layer_sd_s)
        )
        if not any(shape.expert_layers for shape in shapes):
            steps = replace(steps, expert_layer_s=EXPERT_LAYER_S, expert_layer_sd_s=math.inf)
    return steps, list(deviations(fitted.x)[~whole])


def pool_expert_layers(steps: Mapping[int, StepHost]) -> dict[int, StepHost]:
    """One time per layer of experts for all numbers of workers, each weighted by its precision.

    Each worker runs the same Python for it, so what one number of workers leaves open another one
    may tell. Where none does, the guess stays, as uncertain as it is large.
    """
    weights = {w: 1 / max(s.expert_layer_sd_s, 1e-9) ** 2 for w, s in steps.items()}
    total = sum(weights.values())
    if not total:
        return {w: replace(s, expert_layer_sd_s=s.expert_layer_s) for w, s in steps.items()}
    mean_s = sum(weights[w] * s.expert_layer_s for w, s in steps.items()) / total
    return {
        w: replace(s, expert_layer_s=mean_s, expert_layer_sd_s=total**-0.5)
        for w, s in steps.items()
    }


def standard_errors(jacobian: Array) -> Array:
    """Of the parameters of a least-squares fit, [n], from its weighted Jacobian, [m, n].

    What no point depends on has none: it is 0.
    """
    return np.asarray(np.linalg.norm(np.linalg.pinv(jacobian), axis=1))


def _slowness(host: HostAnchor | None, typical: HostAnchor) -> float:
    """Module time of a host over the typical one's; 1 where it was not measured."""
    if host is None or not host.module_us or not typical.module_us:
        return 1.0
    return host.module_us / typical.module_us
