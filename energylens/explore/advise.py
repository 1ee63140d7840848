"""Which single change of a deployment saves most: each is predicted, and compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from energylens.errors import EnergyLensError, SpecError
from energylens.explore.front import exact_values
from energylens.lower.fuse import groups
from energylens.lower.overlap import wanted
from energylens.predict import Catalogue, predict
from energylens.results import Anchors, Infeasible, Prediction
from energylens.results.search import Advice, Change
from energylens.spec.model import Fusion, Spec
from energylens.spec.system import (
    Config,
    Device,
    Engine,
    Mode,
    Overlapping,
    Parallelism,
    Phase,
    Workload,
)
from energylens.units import BITS

COMPARED = ("energy_per_token_j", "energy_per_request_j", "tpot_s", "ttft_s", "ttlt_s")
"""Values that a change is compared by."""

_POWER_SHARES = (0.85, 0.7, 0.55, 0.4)  # of the device's limit, to try
_OVERLAPS = tuple(Overlapping(sm=n, chunks=c) for n in (8, 16) for c in (2, 4, 8))  # to try
_SMALLER = "fp8"  # weights and caches to try


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """All that a change may change."""

    spec: Spec
    engine: Engine
    device: Device
    config: Config
    workload: Workload


def advise(
    spec: Spec,
    *,
    engine: Engine,
    device: Device,
    config: Config = Config(),
    workload: Workload = Workload(),
    by: str = "energy_per_request_j",
    anchors: Anchors | None = None,
    catalogue: Catalogue | None = None,
) -> Advice | Infeasible:
    """Predict a deployment and every single change of it.

    Layouts keep the GPUs and the sequences in flight; a change of the batch does not.

    Args:
        spec: the model.
        engine: how it becomes kernels.
        device: what it runs on.
        config: degrees, launch modes, power limit.
        workload: batch of each replica and lengths.
        by: one of `COMPARED`, which ranks.
        anchors: of the boards and their host; other devices are predicted without.
        catalogue: the other engines and devices, and all calibrations.

    Returns:
        The changes, those that save most first; or why the deployment itself cannot run.

    Raises:
        SpecError: ``by`` is unknown or does not exist for the workload.
    """
    known = catalogue or Catalogue()
    if by not in COMPARED:
        raise SpecError(f"--by: unknown value {by!r}; allowed: {', '.join(COMPARED)}")
    here = Deployment(spec=spec, engine=engine, device=device, config=config, workload=workload)

    def outcome(d: Deployment) -> Prediction | Infeasible:
        # As many parts of a batch in flight as a pipeline has stages, as `explore` takes them.
        parts = min(d.config.parallelism.pp, d.workload.batch)
        return predict(
            d.spec,
            engine=d.engine,
            device=d.device,
            config=replace(d.config, microbatches=parts),
            workload=d.workload,
            bundles=known.bundles(d.device, d.engine),
            anchors=anchors if d.device is device else None,
            link=known.link(d.device, d.config.parallelism.replica_gpus),
        )

    base = outcome(here)
    if isinstance(base, Infeasible):
        return base
    values = _compared(base)
    if by not in values:
        raise SpecError(f"--by {by}: there is none where gen_len is {workload.gen_len}")
    tried, refused = [], []
    for kind, label, changed in _changes(here, known):
        change = Change(kind=kind, label=label)
        try:
            result = Infeasible(reason=changed) if isinstance(changed, str) else outcome(changed)
        except EnergyLensError as error:
            result = Infeasible(reason=str(error))
        if isinstance(result, Infeasible):
            refused.append(replace(change, reason=result.reason))
        elif _rounded(own := _compared(result)) == _rounded(values):
            refused.append(replace(change, reason="it changes nothing that is priced"))
        else:
            tried.append(replace(change, values=own, prediction=result))
    # What differs by rounding only is equal, and then ranked by the other values.
    names = (by, *values)
    tried.sort(key=lambda c: [_rounded(c.values)[n] for n in names])
    return Advice(
        base=base,
        values=values,
        by=by,
        changes=tuple(tried),
        refused=tuple(refused),
    )


def _compared(p: Prediction) -> MappingProxyType[str, tuple[float, float, float]]:
    values = exact_values(p)
    return MappingProxyType({name: values[name] for name in COMPARED if name in values})


def _rounded(
    values: Mapping[str, tuple[float, float, float]],
) -> dict[str, tuple[float, ...]]:
    """To nine digits: sums of the same ops in another order are the same."""
    return {name: tuple(float(f"{v:.9g}") for v in found) for name, found in values.items()}


def _changes(d: Deployment, known: Catalogue) -> Iterator[tuple[str, str, Deployment | str]]:
    """Kind, name and result of each change; a text where it cannot be made."""
    batch = d.workload.batch
    for other, how in ((2 * batch, "x 2"), (batch // 2, "/ 2")):
        if other:
            yield "batch", f"batch {other} ({how})", _with(d, batch=other)
    yield from _layouts(d)
    yield from _precisions(d)
    for share in _POWER_SHARES:
        watts = share * d.device.power_limit_w
        if watts < (d.config.power_limit_w or d.device.power_limit_w):
            config = replace(d.config, power_limit_w=watts)
            yield "power", f"power limit {watts:.0f} W", replace(d, config=config)
    for name in known.list("engines"):
        if name != d.engine.name:
            # Launch modes are an engine's own.
            config = replace(d.config, modes=MappingProxyType({}))
            yield "engine", f"engine {name}", replace(d, engine=known.engine(name), config=config)
    yield from _modes(d)
    yield from _fusions(d, known)
    yield from _overlaps(d)
    for name in known.list("devices"):
        if name != d.device.name:
            config = replace(d.config, power_limit_w=None)
            yield "device", f"device {name}", replace(d, device=known.device(name), config=config)


def _with(d: Deployment, *, batch: int) -> Deployment:
    return replace(d, workload=replace(d.workload, batch=batch))


def _layouts(d: Deployment) -> Iterator[tuple[str, str, Deployment | str]]:
    """All layouts on the same GPUs, with the same sequences in flight."""
    now = d.config.parallelism
    flight = d.workload.batch * now.replicas
    divisors = [n for n in range(1, now.gpus + 1) if now.gpus % n == 0]
    experts = d.spec.moe is not None
    for pp in divisors:
        for dp in divisors if experts and d.engine.dp_dispatch else (1,):
            for tp in divisors:
                if now.gpus % (pp * dp * tp):
                    continue
                for ep in sorted({1, tp * dp}) if experts else (1,):
                    replicas = now.gpus // (pp * dp * tp)
                    p = Parallelism(
                        tp=tp, ep=ep, pp=pp, dp=dp, replicas=replicas, overlap=now.overlap
                    )
                    if p == now:
                        continue
                    each = flight // replicas
                    degrees = [f"{n} {v}" for n, v in p.degrees.items() if v > 1] or ["tp 1"]
                    label = f"{', '.join(degrees)}, batch {each}"
                    if each * replicas != flight:
                        reason = f"{flight} sequences in flight do not divide over {replicas}"
                        yield "layout", ", ".join(degrees), f"{reason} replicas"
                    else:
                        config = replace(d.config, parallelism=p)
                        yield "layout", label, replace(_with(d, batch=each), config=config)


def _precisions(d: Deployment) -> Iterator[tuple[str, str, Deployment | str]]:
    now = d.spec.precision
    for role, name, precision in (
        ("weights", "weights", replace(now, weights=_SMALLER)),
        ("kv_cache", "KV cache", replace(now, kv_cache=_SMALLER)),
    ):
        if BITS[getattr(now, role)] <= BITS[_SMALLER]:
            continue
        label = f"{name} {_SMALLER}"
        if _SMALLER not in d.device.peak_flops:
            yield "precision", label, f"the datasheet of {d.device.name} has no {_SMALLER}"
        else:
            yield "precision", label, replace(d, spec=replace(d.spec, precision=precision))


def _overlaps(d: Deployment) -> Iterator[tuple[str, str, Deployment | str]]:
    """Collectives beside compute, or none of them."""
    now = d.config.parallelism
    if now.tp == 1:
        yield "overlap", "overlap", "a tensor parallel group of one has no all-reduces"
        return
    for overlap in (Overlapping(), *_OVERLAPS):
        if overlap != now.overlap and (overlap or wanted(d.spec, now)):
            label = f"overlap {overlap}" if overlap else "no overlap"
            config = replace(d.config, parallelism=replace(now, overlap=overlap))
            yield "overlap", label, replace(d, config=config)


def _modes(d: Deployment) -> Iterator[tuple[str, str, Deployment]]:
    """Other ways to launch the kernels of a step."""
    now = d.config.modes.get(Phase.DECODE) or d.engine.modes.get(Phase.DECODE, Mode.EAGER)
    others: dict[Mode, tuple[Phase, ...]]
    if d.engine.serving is not None:  # its captured graphs serve both phases, or neither
        others = dict.fromkeys((Mode.EAGER, Mode.SERVING), (Phase.PREFILL, Phase.DECODE))
    else:
        others = dict.fromkeys((Mode.EAGER, Mode.CUDA_GRAPH), (Phase.DECODE,))
    for mode, phases in others.items():
        if mode is not now:
            modes = MappingProxyType({**d.config.modes, **dict.fromkeys(phases, mode)})
            yield "mode", f"mode {mode}", replace(d, config=replace(d.config, modes=modes))


def _fusions(d: Deployment, known: Catalogue) -> Iterator[tuple[str, str, Deployment]]:
    """Kernels that other engines fuse, and this one does not."""
    own = [{e.name for e in g.members} for b in d.spec.blocks for g in groups(d.spec, d.engine, b)]
    for members in dict.fromkeys(m for n in known.list("engines") for m in known.engine(n).fusion):
        for block in d.spec.blocks:
            names = [e.name for e in block.cascade]
            name = "+".join(n for n in names if n in members)
            if set(members) <= set(names) and not any(kernel >= set(members) for kernel in own):
                own.append(set(members))  # other kinds of layers may hold the same
                fusion = (Fusion(members=members), *d.spec.fusion)
                yield "fusion", f"fuse {name}", replace(d, spec=replace(d.spec, fusion=fusion))
