"""Kernel traces of ``torch.profiler``: kernel time by op kind, and the meter's samples beside it.

Reads the Chrome trace that ``export_chrome_trace`` writes; standard library only. What happens
between launch and kernel decides who a kernel belongs to: a kernel counts to the step in which it
was *launched* (it may run after the step's end), and to the op kind that is marked around its
launch. A mark is a ``record_function`` named ``energylens::`` and a phase (one such span is one
step) or a kind. The replay of a CUDA graph has no marks: its kernels are those of a marked eager
step of the same trace, if there is one with the same kernels in the same order. Else, and where no
kinds are marked at all, the kernel's name decides, and always where it names a collective, which
other ops launch. Other launches without a mark are sampling by their name, or overhead.

Times are those of the kernels, from a short pass: no energy is taken from it, and a board that has
rested does not reach its power limit meanwhile. So compare with a prediction without `LAWS_OFF`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import sys
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from energylens.errors import OutOfRangeError, SpecError
from energylens.files import write_atomically
from energylens.meter.base import DeviceSeries
from energylens.results import KernelRow, Kind
from energylens.spec.system import Phase
from energylens.units import HZ_PER_MHZ

MARK = "energylens::"
"""Begin of the name of a ``record_function`` that marks a step of a phase, or an op kind."""

LAWS_OFF = frozenset({"cap", "host", "gap"})
"""Composition laws that do not act on the kernels of a short profiled pass."""

NAMES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (Kind.COLLECTIVE, ("nccl", "all_reduce", "allreduce", "cross_device_reduce", "all_gather")),
    (Kind.COLLECTIVE, ("allgather", "reduce_scatter", "multimem", "nvshmem", "memcpy ptop")),
    (Kind.SAMPLING, ("gumbel", "argmax", "sampling", "multinomial", "distribution_")),
    (Kind.ROUTER, ("router",)),
    # What chooses and sorts the experts is part of the op that runs them, as in predictions.
    (Kind.MOE, ("moe", "expert", "grouped_gemm", "groupedgemm", "grouped_mm", "groupproblem")),
    (Kind.ROUTER, ("topk",)),
    (Kind.ELEMENTWISE, ("rotary", "rope", "act_and_mul")),
    (Kind.COPY, ("reshape_and_cache", "concat_and_cache", "embedding")),
    (Kind.ATTENTION, ("flash", "fmha", "attn", "attention", "mha_", "softmax", "paged")),
    (Kind.GEMM, ("nvjet", "gemm", "gemv", "splitk", "cutlass", "cublas", "cijk_", "marlin")),
    (Kind.GEMM, ("machete", "scaled_mm", "triton_tem", "dot_kernel", "wgmma")),
    (Kind.NORM, ("norm_", "_norm", "rmsnorm", "layernorm", "moments", "meanops", "rsqrt")),
    (Kind.OVERHEAD, ("fillfunctor", "memset", "memcpy htod", "memcpy dtoh")),
    (Kind.COPY, ("copy", "catarray", "index_elementwise", "indexselect", "vectorized_gather")),
    (Kind.COPY, ("scatter_gather", "transpose", "memcpy")),
    (Kind.ELEMENTWISE, ("elementwise", "triton_", "reduce_kernel", "silu", "gelu", "swiglu")),
)
"""Op kind -> parts of kernel names, tried in this order; what matches none is overhead."""

_KIND_MARKS = {MARK + kind.value: kind for kind in Kind}
_OPS = {"aten::scaled_dot_product_attention": Kind.ATTENTION}
"""Operators that are an op of their own, whichever kernels they launch."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")
_ANNOTATION, _ON_DEVICE = "user_annotation", "gpu_user_annotation"
_STEP = "ProfilerStep#"
_REPLAY = "GraphLaunch"
_US = 1e-6
_SLOW_US = 5e6  # more than the period of any sensor: samples this far away are of another time
_ARRAY = re.compile(r'"traceEvents"\s*:\s*\[\s*')


def kind_of(kernel: str) -> Kind:
    """Op kind of a CUDA kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in NAMES if any(p in name for p in parts)), Kind.OVERHEAD)


def kernel_table(trace_path: Path, *, phase: str = "step") -> tuple[KernelRow, ...]:
    """Kernels of each phase by name and kind, per step, the longest first.

    Memory copies and fills on the device count as kernels. Kernels that were launched outside of
    every step are left out. Without marks for phases the profiler's own steps count, and without
    those the whole trace is one step. Devices of one trace are summed.

    Args:
        trace_path: ``.json`` or ``.json.gz``.
        phase: what the steps are called where the trace marks no phases.

    Returns:
        No rows for a trace without any kernel.

    Raises:
        SpecError: the file cannot be read, is cut off or is no such trace.
    """
    trace = _read(trace_path)
    steps, on_device = _steps(trace, phase)
    kernels = [e for e in trace.events if e.cat in _DEVICE]
    launches: dict[int | None, _Event] = {
        e.link: e for e in trace.events if e.cat in _LAUNCH and e.link is not None
    }
    time_us: dict[tuple[str, Kind, str], float] = defaultdict(float)
    count: Counter[tuple[str, Kind, str]] = Counter()
    for kernel, kind in zip(kernels, _kinds(trace, kernels, launches), strict=True):
        launch = launches.get(kernel.link)
        step = _around(steps, launch.ts) if launch else _around(on_device, kernel.ts)
        if step is not None:
            time_us[step.phase, kind, kernel.name] += kernel.dur
            count[step.phase, kind, kernel.name] += 1
    if kernels and not count:
        raise SpecError(
            f"{trace_path}: none of its {len(kernels)} kernels was launched inside a marked step"
        )
    n_steps = Counter(step.phase for step in steps)
    total_us: dict[str, float] = defaultdict(float)
    for key, us in time_us.items():
        total_us[key[0]] += us
    rows = [
        KernelRow(
            phase=key[0],
            kind=key[1],
            op=key[2],
            count=count[key] / n_steps[key[0]],
            latency_s=us * _US / n_steps[key[0]],
            share=us / total_us[key[0]] if total_us[key[0]] else 0.0,
        )
        for key, us in time_us.items()
    ]
    order = list(dict.fromkeys(step.phase for step in steps))
    return tuple(sorted(rows, key=lambda r: (order.index(r.phase), -r.latency_s, r.op)))


def breakdown(rows: Iterable[KernelRow]) -> dict[str, dict[Kind, float]]:
    """Kernel seconds per step: phase -> kind -> seconds, the longest kind first."""
    sums: dict[str, dict[Kind, float]] = {}
    for row in rows:
        kinds = sums.setdefault(row.phase, {})
        kinds[row.kind] = kinds.get(row.kind, 0.0) + row.latency_s
    return {
        phase: dict(sorted(kinds.items(), key=lambda item: -item[1]))
        for phase, kinds in sums.items()
    }


def kernel_csv(rows: Iterable[KernelRow]) -> str:
    """A kernel table as CSV text."""
    text = io.StringIO()
    columns = [f.name for f in fields(KernelRow)]
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def annotate(
    trace_path: Path,
    series: Mapping[int, DeviceSeries],
    out_path: Path,
    *,
    unix_offset_s: float,
) -> None:
    """Copy a trace and add power, SM clock and temperature as counter tracks of each GPU.

    Args:
        trace_path: ``.json`` or ``.json.gz``.
        series: device ordinal in the trace -> samples of that board.
        out_path: the new trace; compressed where its name ends in ``.gz``.
        unix_offset_s: Unix time less the clock of the samples, read at the same moment:
            ``time.time() - recorder.now()``.

    Raises:
        SpecError: the trace cannot be read, is cut off or is no such trace.
        OutOfRangeError: the samples of a board are of another time than the trace.
    """
    text = _text(trace_path)
    trace = _parse(trace_path, text)
    begin = _ARRAY.search(text)
    assert begin is not None, "parsed, so it is there"
    counters = [
        json.dumps(event, allow_nan=False)
        for device, samples in series.items()
        for event in _counters(trace, device, samples, unix_offset_s)
    ]
    if counters and text[begin.end()] != "]":
        counters.append("")  # a comma before the first of the trace's own events
    cut = begin.end()
    whole = "".join((text[:cut], ",\n".join(counters), text[cut:]))
    compress = out_path.suffix == ".gz"
    write_atomically(out_path, gzip.compress(whole.encode(), mtime=0) if compress else whole)


class _Event(NamedTuple):
    """What is kept of a trace event; times in µs, ``link`` is its correlation id."""

    cat: str
    name: str
    ts: float
    dur: float
    thread: tuple[Any, Any]
    link: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    events: Sequence[_Event]
    base_ns: int
    start_us: float
    end_us: float


class _Step(NamedTuple):
    start: float
    end: float
    phase: str


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except OSError as error:
        told = error.strerror or error
        raise SpecError(f"{path}: cannot be read ({told}); expected a kernel trace") from None
    except (EOFError, zlib.error) as error:
        raise SpecError(f"{path}: cut off or damaged ({error}); profile again") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not a kernel trace in UTF-8 ({error})") from None


def _read(path: Path) -> _Trace:
    return _parse(path, _text(path))


def _parse(path: Path, text: str) -> _Trace:
    """The trace, each event shrunk or dropped as soon as it is parsed: files have many millions."""
    start, end = math.inf, -math.inf

    def shrink(item: dict[str, Any]) -> Any:
        nonlocal start, end
        if "traceEvents" in item:
            return item
        if "ph" not in item:
            return item.get("correlation")  # of the arguments, nothing else is wanted
        if item["ph"] != "X":
            return None
        try:
            ts, dur = float(item["ts"]), float(item["dur"])
        except (KeyError, TypeError, ValueError):
            ts = dur = math.nan
        if not math.isfinite(ts + dur):
            name = item.get("name")
            raise SpecError(f"{path}: event {name!r} needs numbers as ts and dur")
        start, end = min(start, ts), max(end, ts + dur)
        cat, name = str(item.get("cat", "")).lower(), str(item.get("name", ""))
        wanted = (
            cat in _DEVICE
            or cat in _LAUNCH
            or (cat in (_ANNOTATION, _ON_DEVICE) and name.startswith((MARK, _STEP)))
            or (cat == "cpu_op" and name in _OPS)
        )
        if not wanted:
            return None
        if dur < 0:
            raise SpecError(f"{path}: event {name!r} has a duration of {dur:g}; profile again")
        thread, link = (item.get("pid"), item.get("tid")), item.get("args")
        link = link if isinstance(link, int) else None
        return _Event(sys.intern(cat), sys.intern(name), ts, dur, thread, link)

    try:
        # Names of kernels and threads may hold control characters.
        document = json.loads(text, strict=False, object_hook=shrink)
    except (json.JSONDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: cut off or no JSON ({error}); profile again") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise SpecError(f"{path}: no kernel trace; it must be a JSON object with traceEvents")
    base_ns = document.get("baseTimeNanoseconds") or 0
    if not isinstance(base_ns, int):
        raise SpecError(f"{path}: baseTimeNanoseconds is {base_ns!r}, and must be a whole number")
    return _Trace(
        events=[e for e in document["traceEvents"] if isinstance(e, _Event)],
        base_ns=base_ns,
        start_us=start,
        end_us=end,
    )


def _steps(trace: _Trace, phase: str) -> tuple[list[_Step], list[_Step]]:
    """Steps by the time of launches, and by that of kernels whose launch was not recorded."""
    phases = {MARK + p.value for p in Phase}

    def spans(cat: str, marked: bool) -> list[_Step]:
        return sorted(
            _Step(e.ts, e.ts + e.dur, e.name.removeprefix(MARK) if marked else phase)
            for e in trace.events
            if e.cat == cat and (e.name in phases if marked else e.name.startswith(_STEP))
        )

    for marked in (True, False):
        if steps := spans(_ANNOTATION, marked):
            return steps, spans(_ON_DEVICE, marked) or steps
    whole = [_Step(-math.inf, math.inf, phase)]
    return whole, whole


def _around(steps: Sequence[_Step], ts: float) -> _Step | None:
    """The last step to start before ``ts``, if it had not ended."""
    at = bisect_right(steps, ts, key=lambda step: step.start) - 1
    return steps[at] if at >= 0 and ts <= steps[at].end else None


def _kinds(
    trace: _Trace, kernels: Sequence[_Event], launches: Mapping[int | None, _Event]
) -> list[Kind]:
    """The kind of each kernel, as the module says."""
    marks = _kinds_at_launch(trace.events)
    kinds = [marks.get(kernel.link) or kind_of(kernel.name) for kernel in kernels]
    if not any(e.cat == _ANNOTATION and e.name in _KIND_MARKS for e in trace.events):
        return kinds
    eager: list[tuple[float, int]] = []
    replays: dict[int | None, list[tuple[float, int]]] = defaultdict(list)
    for i, kernel in enumerate(kernels):
        launch = launches.get(kernel.link)
        if launch is None:
            continue
        if _REPLAY in launch.name:
            replays[kernel.link].append((kernel.ts, i))
        else:
            named, mark = kind_of(kernel.name), marks.get(kernel.link)
            if named is Kind.COLLECTIVE or (mark is None and named is Kind.SAMPLING):
                kinds[i] = named
            else:
                kinds[i] = mark or Kind.OVERHEAD
            eager.append((launch.ts, i))
    order = [i for _, i in sorted(eager)]
    names = [kernels[i].name for i in order]
    for replay in replays.values():
        own = [i for _, i in sorted(replay)]
        begin = _find(names, [kernels[i].name for i in own])
        if begin is not None:
            for i, same in zip(own, order[begin:], strict=False):
                kinds[i] = kinds[same]
    return kinds


def _find(names: Sequence[str], part: Sequence[str]) -> int | None:
    """Where ``part`` begins in ``names``; None where it does not occur."""
    begins = range(len(names) - len(part) + 1)
    return next((i for i in begins if names[i : i + len(part)] == part), None)


def _kinds_at_launch(events: Iterable[_Event]) -> dict[int | None, Kind]:
    """Correlation id -> kind of the innermost mark around the launch, on the launching thread."""
    kinds = _KIND_MARKS | _OPS
    threads: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)
    for event in events:
        mark = event.cat in (_ANNOTATION, "cpu_op") and event.name in kinds
        if mark or event.cat in _LAUNCH:
            threads[event.thread].append(event)
    found: dict[int | None, Kind] = {}
    for own in threads.values():
        open_marks: list[_Event] = []
        for event in sorted(own, key=lambda e: (e.ts, -e.dur)):
            while open_marks and open_marks[-1].ts + open_marks[-1].dur < event.ts:
                open_marks.pop()
            if event.cat not in _LAUNCH:
                open_marks.append(event)
            elif open_marks and event.link is not None:
                found[event.link] = kinds[open_marks[-1].name]
    return found


def _counters(
    trace: _Trace, device: int, series: DeviceSeries, unix_offset_s: float
) -> Iterator[dict[str, Any]]:
    """Counter events of one board; a sample before the trace stands at its start."""
    power = ("power", "W", series.instant_power, 1.0)
    if not series.instant_power:
        power = ("power, 1 s average", "W", series.average_power, 1.0)
    tracks = (
        power,
        ("SM clock", "MHz", series.sm_clock, 1 / HZ_PER_MHZ),
        ("temperature", "°C", series.temperature, 1.0),
    )
    base_s = trace.base_ns * 1e-9
    for name, unit, samples, factor in tracks:
        # The two large numbers first: their difference keeps the microseconds.
        stamped = [((unix_offset_s - base_s + t) / _US, v * factor) for t, v in samples]
        if not stamped or trace.end_us < trace.start_us:
            continue
        if stamped[-1][0] < trace.start_us - _SLOW_US or stamped[0][0] > trace.end_us + _SLOW_US:
            apart_s = (stamped[0][0] - trace.start_us) * _US
            raise OutOfRangeError(
                f"{series.uuid}: samples of {name} begin {apart_s:+.3g} s from the trace's start "
                "and do not overlap with it; give the offset between both clocks"
            )
        first = bisect_right(stamped, trace.start_us, key=lambda s: s[0])
        for ts, value in stamped[max(0, first - 1) :]:
            if ts > trace.end_us:
                break
            yield {
                "ph": "C",
                "cat": "meter",
                "name": f"GPU {device} {name}",
                "pid": device,
                "tid": 0,
                "ts": round(max(ts, trace.start_us), 3),
                "args": {unit: value},
            }
