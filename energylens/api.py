"""EnergyLens as a library: names or files in, values out that pandas takes as they are.

`energylens.predict`, `energylens.explore` and `energylens.validate` are the functions of this
module, and the command line calls them too::

    import energylens, pandas as pd

    pd.DataFrame(energylens.explore("llama3_70b", gpus=8).rows())
    pd.DataFrame(energylens.predict("llama3_8b", tp=2, batch=16).rows())

A model, a device or an engine is a name, a YAML file, or the value itself. Where nothing can run,
the result is an `Infeasible` with the reason, whose ``rows`` say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from threadpoolctl import threadpool_limits

from energylens.anchors import load_anchors
from energylens.cost.bundle import Bundle
from energylens.errors import SpecError
from energylens.predict import Catalogue, predict_measurement
from energylens.predict import predict as _predict
from energylens.results import Anchors, Infeasible, Measurement, Prediction
from energylens.spec.model import Spec
from energylens.spec.system import (
    Config,
    Device,
    Engine,
    Link,
    Mode,
    Overlapping,
    Parallelism,
    Phase,
    Workload,
)

if TYPE_CHECKING:  # a prediction need not wait for what other verbs import
    from energylens.results.search import Advice, Frontier
    from energylens.validate import Validation

__all__ = ["Setting", "advise", "explore", "parallelism", "predict", "setting", "validate"]

Named = str | Path
"""By name, or a file."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _with_one_blas_thread(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The same without BLAS threads, which the caller's own work keeps.

    The matrices here have a few hundred rows: a second thread only spins, and on a loaded machine
    a search took four times as long.
    """

    @wraps(function)
    def limited(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with threadpool_limits(1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A model on a device under an engine, with all that is known about them."""

    spec: Spec
    engine: Engine
    device: Device
    bundles: tuple[Bundle, ...]
    anchors: Anchors | None
    catalogue: Catalogue

    def link(self, gpus: int) -> Link | None:
        """Interconnect of ``gpus`` of the devices, or None where nothing says how."""
        return self.catalogue.link(self.device, gpus)


def setting(
    spec: Named | Spec,
    *,
    device: Named | Device = "h200",
    engine: Named | Engine = "vllm",
    anchors: Anchors | Named | Sequence[Named] | None = None,
    bundles: Sequence[Named] = (),
    catalogue: Catalogue | None = None,
    precision: Mapping[str, str] | None = None,
) -> Setting:
    """What the names stand for.

    Args:
        spec: the model, by name or file, or the value.
        device: what it runs on, likewise.
        engine: how it becomes kernels, likewise.
        anchors: of the boards and their host; files or the value.
        bundles: calibration files to use instead of the shipped ones.
        catalogue: where names are looked up, a fresh one by default; its bundles are used.
        precision: data types to store ``weights`` or ``kv_cache`` in, instead of the spec's; what
            an entry of the spec says of its own weights stays.

    Raises:
        SpecError: a name is unknown, or anchors are of another device.
    """
    known = catalogue or Catalogue(bundle_files=tuple(Path(b) for b in bundles))
    board = device if isinstance(device, Device) else known.device(str(device))
    profile = engine if isinstance(engine, Engine) else known.engine(str(engine))
    given = _anchors(anchors)
    _check_device(given, board)
    model = spec if isinstance(spec, Spec) else known.spec(str(spec))
    return Setting(
        spec=replace(model, precision=replace(model.precision, **(precision or {}))),
        engine=profile,
        device=board,
        bundles=known.bundles(board, profile),
        anchors=given,
        catalogue=known,
    )


def parallelism(
    *,
    gpus: int | None = None,
    tp: int | None = None,
    ep: int = 1,
    pp: int | None = None,
    dp: int | None = None,
    replicas: int | None = None,
    overlap: Overlapping | None = None,
) -> Parallelism:
    """Degrees; ``gpus`` alone sets tensor parallelism, and else must be what the degrees make.

    Args:
        gpus: devices in all.
        tp: tensor parallel degree.
        ep: expert parallel degree; adds no GPUs.
        pp: pipeline parallel degree.
        dp: attention data parallel degree.
        replicas: independent copies.
        overlap: how all-reduces run, as the spec has it by default.

    Raises:
        SpecError: it is not.
    """
    given = {"tp": tp, "pp": pp, "dp": dp, "replicas": replicas}
    degrees: dict[str, Any] = {name: n for name, n in given.items() if n is not None}
    if gpus is not None and not degrees:
        degrees = {"tp": gpus}
    made = Parallelism(ep=ep, overlap=overlap, **degrees)
    if gpus is not None and gpus != made.gpus:
        raise SpecError(
            f"--gpus is {gpus}, but replicas x dp x tp x pp = {made.gpus}; "
            "change one of them, or give --gpus alone"
        )
    return made


@_with_one_blas_thread
def predict(
    spec: Named | Spec,
    *,
    device: Named | Device = "h200",
    engine: Named | Engine = "vllm",
    gpus: int | None = None,
    tp: int | None = None,
    ep: int = 1,
    pp: int | None = None,
    dp: int | None = None,
    replicas: int | None = None,
    overlap: Overlapping | None = None,
    batch: int = 1,
    prompt_len: int = 1024,
    gen_len: int = 128,
    context_len: float | None = None,
    phases: Iterable[Phase | str] = tuple(Phase),
    modes: Mapping[Phase, Mode] | None = None,
    power_limit_w: float | None = None,
    routing: str | None = None,
    redundant_experts: int = 0,
    microbatches: int | None = None,
    max_num_seqs: int | None = None,
    precision: Mapping[str, str] | None = None,
    without: Iterable[str] = (),
    anchors: Anchors | Named | Sequence[Named] | None = None,
    bundles: Sequence[Named] = (),
    catalogue: Catalogue | None = None,
) -> Prediction | Infeasible:
    """Latency and energy of one configuration.

    Args:
        spec: the model.
        device: what it runs on.
        engine: how it becomes kernels.
        gpus: devices in all; alone, it sets ``tp``.
        tp: tensor parallel degree.
        ep: expert parallel degree; adds no GPUs.
        pp: pipeline parallel degree.
        dp: attention data parallel degree.
        replicas: independent copies.
        overlap: how all-reduces run, as the spec has it by default.
        batch: sequences of each replica.
        prompt_len: tokens of each prompt.
        gen_len: generated tokens of each sequence, the one that prefill makes included.
        context_len: mean KV length of the decode step, ``prompt_len + gen_len / 2`` by default.
        phases: of ``prefill``, ``decode``, ``request``.
        modes: launch mode of a phase, the engine's own by default.
        power_limit_w: of each board, the calibration's by default.
        routing: how tokens choose experts, the spec's own way by default.
        redundant_experts: experts that are held twice.
        microbatches: parts of the batch in the stages of a pipeline at a time; by default one for
            each step of the prefill, ``pp`` at most.
        max_num_seqs: most sequences that the engine is set to run at a time, its own by default.
        precision: what weights or KV cache are stored in, as for `setting`.
        without: composition laws to leave out.
        anchors: of the boards and their host, as for `setting`.
        bundles: calibration files, as for `setting`.
        catalogue: where names are looked up, as for `setting`.

    Returns:
        The prediction, or why the configuration cannot run.

    Raises:
        SpecError: an argument is wrong.
    """
    s = setting(
        spec,
        device=device,
        engine=engine,
        anchors=anchors,
        bundles=bundles,
        catalogue=catalogue,
        precision=precision,
    )
    degrees = parallelism(gpus=gpus, tp=tp, ep=ep, pp=pp, dp=dp, replicas=replicas, overlap=overlap)
    return _predict(
        s.spec,
        engine=s.engine,
        device=s.device,
        config=Config(
            parallelism=degrees,
            modes=modes or {},
            power_limit_w=power_limit_w,
            routing=routing,
            redundant_experts=redundant_experts,
            microbatches=microbatches,
            max_sequences=max_num_seqs,
        ),
        workload=Workload(
            batch=batch, prompt_len=prompt_len, gen_len=gen_len, context_len=context_len
        ),
        bundles=s.bundles,
        anchors=s.anchors,
        phases=tuple(Phase(phase) for phase in phases),
        without=frozenset(without),
        link=s.link(degrees.replica_gpus),
    )


@_with_one_blas_thread
def explore(
    spec: Named | Spec,
    *,
    gpus: int | Sequence[int],
    device: Named | Device | Sequence[Named | Device] = "h200",
    engine: Named | Engine = "vllm",
    prompt_len: int = 1024,
    gen_len: int = 128,
    batch: int | Iterable[int] | None = None,
    rate_per_s: float | None = None,
    tp: int | Iterable[int] | None = None,
    ep: int | Iterable[int] | None = None,
    dp: int | Iterable[int] | None = None,
    pp: int | Iterable[int] | None = None,
    overlap: Iterable[Overlapping | None] = (None,),
    max_ttft_s: float | None = None,
    max_tpot_s: float | None = None,
    max_power_w: float | None = None,
    min_throughput_tokens_s: float | None = None,
    objectives: str | Sequence[str] | None = None,
    price_per_gpu_hour: float | None = None,
    price_per_kwh: float | None = None,
    pue: float | None = None,
    carbon_g_per_kwh: float | None = None,
    top: int = 20,
    contexts: Iterable[int] = (),
    disaggregate: bool = False,
    precision: Mapping[str, str] | None = None,
    power_limit_w: float | None = None,
    routing: str | None = None,
    anchors: Anchors | Named | Sequence[Named] | None = None,
    bundles: Sequence[Named] = (),
    catalogue: Catalogue | None = None,
) -> Frontier | Infeasible:
    """The Pareto front of all layouts and batches of a model.

    Args:
        spec: the model.
        gpus: devices to use, which replicas fill; of several kinds one number for all, or one for
            each.
        device: what it runs on, one or several kinds to choose from.
        engine: how it becomes kernels.
        prompt_len: tokens of each prompt.
        gen_len: generated tokens of each sequence, the one that prefill makes included.
        batch: sequences of a replica, one number or all to try, 1 to 256 by default; with a rate
            the most that it runs at a time, the engine's own limit by default.
        rate_per_s: Poisson arrivals of requests, by which services are simulated for ten minutes;
            None tries batches.
        tp: tensor parallel degrees to try, all that the model allows by default.
        ep: expert parallel degrees, 1 and all workers by default.
        dp: attention data parallel degrees, all that the engine allows by default.
        pp: pipeline parallel degrees, likewise.
        overlap: how all-reduces run, all ways to try; None is the spec's own.
        max_ttft_s: longest prefill.
        max_tpot_s: longest time per token.
        max_power_w: most power of all GPUs together.
        min_throughput_tokens_s: fewest generated tokens/s of all replicas together.
        objectives: of `energylens.explore.OBJECTIVES`, the first one ranks; energy and time per
            token by default.
        price_per_gpu_hour: of one GPU.
        price_per_kwh: of energy from the grid, in the same currency.
        pue: energy from the grid over that of the GPUs.
        carbon_g_per_kwh: grams of CO2-equivalent of a kWh from the grid.
        top: most configurations to predict exactly, of each kind of device.
        contexts: at which a decode step of the exactly predicted part of the front is priced, too.
        disaggregate: try prefill and decode on GPUs of their own, too; of several kinds of device
            on those with a known link.
        precision: what weights or KV cache are stored in, as for `setting`.
        power_limit_w: of each board, the calibration's by default.
        routing: how tokens choose experts, the spec's own way by default.
        anchors: of the boards and their host, as for `setting`.
        bundles: calibration files, as for `setting`.
        catalogue: where names are looked up, as for `setting`.

    Returns:
        The front among all that fits, or why there is none.

    Raises:
        SpecError, OutOfRangeError: an argument is wrong.
    """
    from energylens.explore import DEFAULT_OBJECTIVES, Constraints, Prices, SearchSpace
    from energylens.explore import explore as search
    from energylens.explore.disaggregate import NO_LINK
    from energylens.explore.several import pairs, together
    from energylens.explore.traffic import explore_traffic as search_traffic
    from energylens.results.search import Frontier
    from energylens.serving import Traffic

    if rate_per_s is not None and disaggregate:
        raise SpecError("--rate: disaggregated services are not simulated; leave one of them out")
    if objectives is None:
        objectives = DEFAULT_OBJECTIVES
    known = catalogue or Catalogue(bundle_files=tuple(Path(b) for b in bundles))
    boards = [
        d if isinstance(d, Device) else known.device(str(d))
        for d in ((device,) if isinstance(device, str | Path | Device) else device)
    ]
    # Made once: an argument may be an iterator, and there may be several kinds of devices.
    space = SearchSpace(
        batches=range(1, 257) if batch is None else _numbers(batch) or (),
        tp=_numbers(tp),
        ep=_numbers(ep),
        dp=_numbers(dp),
        pp=_numbers(pp),
        overlap=tuple(overlap),
    )
    constraints = Constraints(
        max_ttft_s=max_ttft_s,
        max_tpot_s=max_tpot_s,
        max_power_w=max_power_w,
        min_throughput_tokens_s=min_throughput_tokens_s,
    )
    prices = Prices(
        per_gpu_hour=price_per_gpu_hour,
        per_kwh=price_per_kwh,
        pue=pue,
        carbon_g_per_kwh=carbon_g_per_kwh,
    )
    given, priced_at = _anchors(anchors), tuple(contexts)
    pools = [
        (board, count, next((n for n in range(count, 0, -1) if known.link(board, n)), None))
        for board, count in pairs(boards, (gpus,) if isinstance(gpus, int) else gpus)
    ]
    # Devices without a known link are searched without it, unless there are no others.
    some_linked = any(linked for _, count, linked in pools if count > 1)
    found: dict[str, Frontier | Infeasible] = {}
    for board, count, linked in pools:
        unlinked = disaggregate and some_linked and count > 1 and linked is None
        s = setting(
            spec,
            device=board,
            engine=engine,
            anchors=given if len(boards) == 1 else _of_device(given, board),
            catalogue=known,
            precision=precision,
        )
        common: dict[str, Any] = {
            "engine": s.engine,
            "device": s.device,
            "gpus": count,
            "constraints": constraints,
            "objectives": (objectives,) if isinstance(objectives, str) else objectives,
            "prices": prices,
            "power_limit_w": power_limit_w,
            "routing": routing,
            "bundles": s.bundles,
            "anchors": s.anchors,
            "link": s.link(linked) if linked else None,
        }
        if rate_per_s is not None:
            most = s.engine.serving.max_sequences if s.engine.serving else 1
            result = search_traffic(
                s.spec,
                traffic=Traffic(rate_per_s=rate_per_s, lengths=((prompt_len, gen_len),)),
                space=space if batch is not None else replace(space, batches=(most,)),
                **common,
            )
        else:
            result = search(
                s.spec,
                prompt_len=prompt_len,
                gen_len=gen_len,
                space=space,
                exact=top,
                contexts=priced_at,
                disaggregate=disaggregate and not unlinked,
                **common,
            )
        if isinstance(result, Frontier):
            notes = list(result.notes)
            if linked not in (None, count):
                notes.append(
                    f"no link between {count} {board.name} is known: that of {linked} stands for "
                    "it, and layouts of more are priced too well"
                )
            if unlinked:
                why = NO_LINK.format(gpus=count, device=board.name)
                notes.append(f"nothing is disaggregated: {why}")
            result = replace(
                result, notes=tuple(notes), precision=MappingProxyType(dict(precision or {}))
            )
        found[f"{count} x {board.name}"] = result
    return together(found)


def _of_device(anchors: Anchors | None, device: Device) -> Anchors | None:
    """The boards that are of the device; the host is any device's."""
    if anchors is None:
        return None
    return replace(anchors, boards=tuple(b for b in anchors.boards if b.device == device.name))


@_with_one_blas_thread
def advise(
    spec: Named | Spec,
    *,
    device: Named | Device = "h200",
    engine: Named | Engine = "vllm",
    gpus: int | None = None,
    tp: int | None = None,
    ep: int = 1,
    pp: int | None = None,
    dp: int | None = None,
    replicas: int | None = None,
    overlap: Overlapping | None = None,
    batch: int = 1,
    prompt_len: int = 1024,
    gen_len: int = 128,
    modes: Mapping[Phase, Mode] | None = None,
    power_limit_w: float | None = None,
    routing: str | None = None,
    by: str = "energy_per_request_j",
    anchors: Anchors | Named | Sequence[Named] | None = None,
    bundles: Sequence[Named] = (),
    catalogue: Catalogue | None = None,
) -> Advice | Infeasible:
    """Which single change of a deployment saves most.

    Args:
        spec: the model.
        device: what it runs on.
        engine: how it becomes kernels.
        gpus: devices in all; alone, it sets ``tp``.
        tp: tensor parallel degree.
        ep: expert parallel degree; adds no GPUs.
        pp: pipeline parallel degree.
        dp: attention data parallel degree.
        replicas: independent copies.
        overlap: how all-reduces run, as the spec has it by default.
        batch: sequences of each replica.
        prompt_len: tokens of each prompt.
        gen_len: generated tokens of each sequence, the one that prefill makes included.
        modes: launch mode of a phase, the engine's own by default.
        power_limit_w: of each board, the calibration's by default.
        routing: how tokens choose experts, the spec's own way by default.
        by: what ranks, of `energylens.explore.advise.COMPARED`.
        anchors: of the boards and their host, as for `setting`.
        bundles: calibration files, as for `setting`.
        catalogue: where names are looked up, as for `setting`.

    Returns:
        The changes, those that save most first, or why the deployment itself cannot run.

    Raises:
        SpecError: an argument is wrong.
    """
    from energylens.explore.advise import advise as compare

    s = setting(
        spec, device=device, engine=engine, anchors=anchors, bundles=bundles, catalogue=catalogue
    )
    return compare(
        s.spec,
        engine=s.engine,
        device=s.device,
        config=Config(
            parallelism=parallelism(
                gpus=gpus, tp=tp, ep=ep, pp=pp, dp=dp, replicas=replicas, overlap=overlap
            ),
            modes=modes or {},
            power_limit_w=power_limit_w,
            routing=routing,
        ),
        workload=Workload(batch=batch, prompt_len=prompt_len, gen_len=gen_len),
        by=by,
        anchors=s.anchors,
        catalogue=s.catalogue,
    )


@_with_one_blas_thread
def validate(
    truth: Named | Sequence[Named | Measurement],
    *,
    by: Sequence[str] = (),
    ignore_anchors: bool = False,
    without: Iterable[str] = (),
    max_num_seqs: int | None = None,
    anchors: Anchors | Named | Sequence[Named] | None = None,
    bundles: Sequence[Named] = (),
    catalogue: Catalogue | None = None,
) -> Validation:
    """Predictions against measurements.

    Args:
        truth: truth files, or measured rows, or both.
        by: fields that make groups.
        ignore_anchors: predict all rows for a typical board.
        without: composition laws to leave out.
        max_num_seqs: limit that rows of engines that serve were measured with, the engine's own by
            default.
        anchors: of the rows that hold none of their own.
        bundles: calibration files, as for `setting`.
        catalogue: where names are looked up, as for `setting`.

    Raises:
        SpecError: a file cannot be read, anchors are of another device than the rows, or an
            argument is wrong.
    """
    from energylens.profiler.trace import LAWS_OFF
    from energylens.truth import read_measurements
    from energylens.validate import Predict
    from energylens.validate import validate as compare

    known = catalogue or Catalogue(bundle_files=tuple(Path(b) for b in bundles))
    items = (truth,) if isinstance(truth, str | Path) else truth
    rows = [m for m in items if isinstance(m, Measurement)]
    rows += read_measurements([Path(f) for f in items if not isinstance(f, Measurement)])
    given, laws = _anchors(anchors), frozenset(without)
    for device in _known_devices(rows, known):
        _check_device(given, device)

    def predicting(laws: frozenset[str]) -> Predict:
        return lambda m, own: predict_measurement(
            m, anchors=own, without=laws, catalogue=known, max_sequences=max_num_seqs
        )

    return compare(
        [_with_anchors(m, given) for m in rows],
        predicting(laws),
        predict_kernels=predicting(laws | LAWS_OFF),
        by=by,
        ignore_anchors=ignore_anchors,
    )


def _known_devices(rows: Iterable[Measurement], catalogue: Catalogue) -> Iterator[Device]:
    """Devices of the rows; those of an unknown one are told with their reason instead."""
    for name in dict.fromkeys(m.device for m in rows):
        with suppress(SpecError):
            yield catalogue.device(name)


def _check_device(anchors: Anchors | None, device: Device) -> None:
    """Refuse boards of another device."""
    for b in anchors.boards if anchors else ():
        if b.device != device.name:
            raise SpecError(
                f"--anchor: board {b.board_uuid} is of {b.device}, but the device is "
                f"{device.name}; give anchors of that device"
            )


def _with_anchors(measurement: Measurement, given: Anchors | None) -> Measurement:
    """The row with the given boards and host where it holds none of its own."""
    own = measurement.anchors
    if given is None or own is None:
        return replace(measurement, anchors=own or given)
    merged = replace(own, boards=own.boards or given.boards, host=own.host or given.host)
    return replace(measurement, anchors=merged)


def _anchors(given: Anchors | Named | Sequence[Named] | None) -> Anchors | None:
    if given is None or isinstance(given, Anchors):
        return given
    files = (given,) if isinstance(given, str | Path) else given
    return load_anchors(*map(Path, files)) if files else None


def _numbers(given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    return given if given is None else (given,) if isinstance(given, int) else tuple(given)
