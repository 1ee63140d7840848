"""Calibration samples: an append-only table with a provenance sidecar.

A store is a folder with two files. ``samples.csv`` holds one line per measured point; a line is
written, flushed and synced at once, so an interrupted run loses at most the point in hand.
``provenance.json`` tells for each run on which boards, with which software and under which power
limit its lines were measured; samples of different power limits never mix.

Energies are not stored: a trial holds latency and *gross* mean board power (idle included), and who
fits them subtracts the idle power of the board's anchor.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TextIO

from energylens.anchors import anchors_from_json, anchors_to_json
from energylens.errors import CalibrationError, SpecError
from energylens.files import write_atomically
from energylens.graph import Op, make_op
from energylens.results import Anchors

_log = logging.getLogger(__name__)

SAMPLES_FILE = "samples.csv"
PROVENANCE_FILE = "provenance.json"
PROVENANCE_SCHEMA = "energylens/provenance/v1"
BLOCKS = ("op", "mix", "overlap", "host", "idle", "anchor")
_POWER_LIMIT_TOLERANCE_W = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point, measured: the result of `energylens.bench.trial.measure`.

    Attributes:
        latency_s: seconds per execution (for an idle trial: the window).
        latency_rel_se: relative standard error of it.
        power_w: gross mean board power over the window; None where no sensor gave it.
        power_rel_se: relative error of it; None without power.
        clock_hz, clock_min_hz: mean and lowest SM clock in the window.
        temperature_c: temperature at the end of the window.
        ticks: changes of the energy counter in the window (0: no counter).
        window_s: length of the window.
        instant_power_w: mean of the instant-power sensor, the cross-check of ``power_w``.
        flags: labels such as ``power_capped`` or ``not_steady``.
        valid: False where the point must not be used; ``reason`` then says why.
    """

    latency_s: float
    latency_rel_se: float
    power_w: float | None
    power_rel_se: float | None
    clock_hz: float | None
    clock_min_hz: float | None
    temperature_c: float | None
    ticks: int
    window_s: float
    instant_power_w: float | None = None
    flags: tuple[str, ...] = ()
    valid: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One calibration row: what ran, on which board, and what it took.

    Attributes:
        block: ``op`` (one op alone), ``mix`` (several ops as one captured graph), ``overlap``
            (a GEMM and the collectives beside it), ``host`` (several ops launched eagerly; what
            counts is the host), ``idle`` or ``anchor``.
        label: short name of the point, unique within its block for all but ``op``.
        ops: the op, or what the mix executes once per execution; empty for ``idle``.
        mode: launch mode (``eager``, ``cuda_graph``) of a mix or host point, else empty.
        trial: the measurement, or None where the point was skipped; ``reason`` then says why.
        board_uuid: `board_hash` of the board; several, joined by ``;``, where the op needs several.
        run_id: key of the run's provenance.
        time: end of the trial, ISO 8601 in UTC.
    """

    block: str
    label: str
    ops: tuple[Op, ...]
    trial: Trial | None
    board_uuid: str
    run_id: str
    time: str
    mode: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        """Check what the type system cannot."""
        if self.block not in BLOCKS:
            raise SpecError(
                f"block {self.block!r} of a sample is unknown; known: {', '.join(BLOCKS)}"
            )
        if self.block == "op" and len(self.ops) != 1:
            raise SpecError(f"a sample of block 'op' holds one op, not {len(self.ops)}")

    @property
    def op(self) -> Op:
        """The op of a sample of block ``op``."""
        return self.ops[0]

    @property
    def usable(self) -> bool:
        """True where the point was measured and found valid."""
        return self.trial is not None and self.trial.valid

    @property
    def key(self) -> str:
        """Content hash of the work and the board: equal for two measurements of the same thing."""
        return sample_key(self.block, self.ops, self.board_uuid, label=self.label, mode=self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Under which circumstances the samples of one run were measured.

    Attributes:
        run_id: key; `new_run_id` makes one.
        time: start of the run, ISO 8601 in UTC.
        device: canonical device name, e.g. ``h200``.
        provider: whose kernels ran, e.g. ``torch``.
        power_limit_w: enforced board power limit.
        power_mode: mode that presets clocks and cores (nvpmodel), where a board has such.
        boards: `board_hash` -> facts (name, driver, clocks, limits, ECC, power rails…).
        versions: package -> version (energylens, torch, cuda, nccl, transformers, driver).
        host: facts about the host (cpu, platform).
        seed: seed of plan order and data.
        data: distribution of the operands (DESIGN law 9).
        anchors: boards and host as measured at the start of this run.
    """

    run_id: str
    time: str
    device: str
    provider: str
    power_limit_w: float | None
    boards: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    host: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    data: str = ""
    anchors: Anchors | None = None
    power_mode: str | None = None


def board_hash(uuid: str) -> str:
    """Stable name of a board that does not give its UUID away: 10 hex digits of its SHA-256."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:10]


def new_run_id(time: str, boards: Iterable[str], seed: int) -> str:
    """Key of a run from its start time, its boards' hashes and its seed."""
    return hashlib.sha256("|".join((time, *boards, str(seed))).encode()).hexdigest()[:12]


def sample_key(
    block: str, ops: Sequence[Op], board: str, *, label: str = "", mode: str = ""
) -> str:
    """Content hash of what is measured where, so that a resumed run knows what it has.

    An op counts by kernel, shape and dtype alone; entries of a model that run the same kernel share
    one sample.
    """

    def content(op: Op) -> tuple[object, ...]:
        return op.kernel, tuple(map(float, op.shape)), op.dtype

    if block == "op":
        work: object = content(ops[0])
    else:
        work = (label, mode, [(*content(op), op.count) for op in ops])
    return hashlib.sha256(repr((block, work, board)).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------- text form of ops

_OP = re.compile(
    r"(?P<name>[\w.+\-]+)=(?P<kernel>\w+):(?P<dtype>\w+)\((?P<sizes>[^)]*)\)"
    r"(?: x(?P<count>\d+))?(?: @(?P<launches>\d+))?"
)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def format_op(op: Op) -> str:
    """Text form of an op that `parse_op` reads, e.g. ``q=gemm:bf16(m=16,n=4096,k=4096) x2 @1``."""
    sizes = ",".join(f"{d}={_number(v)}" for d, v in op.sizes.items())
    count = f" x{op.count}" if op.count != 1 else ""
    launches = f" @{op.launches}" if op.launches != 1 else ""
    return f"{op.name}={op.kernel}:{op.dtype}({sizes}){count}{launches}"


def parse_op(text: str) -> Op:
    """The op that `format_op` wrote.

    Raises:
        SpecError: not an op, an unknown kernel, or sizes that are not the kernel's.
    """
    match = _OP.fullmatch(text.strip())
    if match is None:
        raise SpecError(
            f"{text!r} is not an op; expected e.g. 'q=gemm:bf16(m=16,n=4096,k=4096) x1 @1'"
        )
    try:
        pairs = [size.split("=") for size in match["sizes"].split(",")]
        sizes = {name: float(value) for name, value in pairs}
    except ValueError:
        raise SpecError(f"the sizes of {text!r} are not all of the form name=number") from None
    return make_op(
        match["kernel"],
        name=match["name"],
        dtype=match["dtype"],
        count=int(match["count"] or 1),
        launches=int(match["launches"] or 1),
        **sizes,
    )


# --------------------------------------------------------------------------- rows

_TRIAL_COLUMNS = tuple(f.name for f in fields(Trial) if f.name != "reason")
COLUMNS = (
    "time",
    "run_id",
    "board_uuid",
    "block",
    "label",
    "mode",
    "ops",
    *_TRIAL_COLUMNS,
    "reason",
)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ";".join(map(str, value))
    return repr(float(value)) if isinstance(value, float) else " ".join(str(value).split())


def _row(sample: Sample) -> dict[str, str]:
    row = {
        "time": sample.time,
        "run_id": sample.run_id,
        "board_uuid": sample.board_uuid,
        "block": sample.block,
        "label": _cell(sample.label),
        "mode": sample.mode,
        "ops": "; ".join(format_op(op) for op in sample.ops),
        "reason": _cell(sample.trial.reason if sample.trial else sample.reason),
    }
    if sample.trial:
        row |= {name: _cell(getattr(sample.trial, name)) for name in _TRIAL_COLUMNS}
    return row


def _positive(row: Mapping[str, str], name: str, *, optional: bool = False) -> float | None:
    text = row[name]
    if optional and not text:
        return None
    value = float(text)
    if not 0 < value < float("inf"):
        raise SpecError(f"{name} is {text}, and must be a positive number")
    return value


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise SpecError(f"valid is {text!r}, and must be true or false")
    return text == "true"


def _trial(row: Mapping[str, str]) -> Trial | None:
    if not row["latency_s"] and row["valid"] != "true":
        return None
    latency, window = _positive(row, "latency_s"), _positive(row, "window_s")
    if latency is None or window is None:
        raise SpecError("latency_s and window_s must be given")
    optional = {
        name: _positive(row, name, optional=True)
        for name in ("power_w", "instant_power_w", "clock_hz", "clock_min_hz")
    }
    return Trial(
        latency_s=latency,
        latency_rel_se=float(row["latency_rel_se"]),
        power_rel_se=float(row["power_rel_se"]) if row["power_rel_se"] else None,
        temperature_c=float(row["temperature_c"]) if row["temperature_c"] else None,
        ticks=int(row["ticks"]),
        window_s=window,
        flags=tuple(row["flags"].split(";")) if row["flags"] else (),
        valid=_flag(row["valid"]),
        reason=row["reason"],
        **optional,
    )


def _sample(row: Mapping[str, str]) -> Sample:
    trial = _trial(row)
    return Sample(
        block=row["block"],
        label=row["label"],
        ops=tuple(parse_op(text) for text in row["ops"].split("; ") if text),
        mode=row["mode"],
        trial=trial,
        board_uuid=row["board_uuid"],
        run_id=row["run_id"],
        time=row["time"],
        reason="" if trial else row["reason"],
    )


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Read a samples file.

    A last line without its line end is what an interruption leaves behind: it is dropped with a
    warning.

    Raises:
        CalibrationError: not a samples file, or a line (named by its number) that is broken or
            holds a latency or power that is not positive.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CalibrationError(f"{path}: no such file; `energylens calibrate` writes one") from None
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        _log.warning(
            "%s: the last line is cut off (%d bytes) and was dropped", path, len(data) - whole
        )
    try:
        reader = csv.reader(io.StringIO(data[:whole].decode()))
    except UnicodeDecodeError:
        raise CalibrationError(f"{path}: not a text file; samples are CSV") from None
    header = next(reader, None)
    if header is None:
        return ()
    if tuple(header) != COLUMNS:
        raise CalibrationError(
            f"{path}, line 1: not the columns of a samples file; expected {','.join(COLUMNS)}"
        )
    samples = []
    for cells in reader:
        if len(cells) != len(COLUMNS):
            raise CalibrationError(
                f"{path}, line {reader.line_num}: {len(cells)} columns instead of {len(COLUMNS)}; "
                "delete the line"
            )
        try:
            samples.append(_sample(dict(zip(COLUMNS, cells, strict=True))))
        except ValueError as error:  # SpecError is one
            raise CalibrationError(
                f"{path}, line {reader.line_num}: {error}; delete the line"
            ) from None
    return tuple(samples)


# --------------------------------------------------------------------------- provenance


def _provenance_to_json(p: Provenance) -> dict[str, Any]:
    return {
        "time": p.time,
        "device": p.device,
        "provider": p.provider,
        "power_limit_w": p.power_limit_w,
        **({"power_mode": p.power_mode} if p.power_mode is not None else {}),
        "boards": {board: dict(facts) for board, facts in p.boards.items()},
        "versions": dict(p.versions),
        "host": dict(p.host),
        "seed": p.seed,
        "data": p.data,
        "anchors": anchors_to_json(p.anchors) if p.anchors else None,
    }


def _provenance_from_json(run_id: str, entry: Any, where: str) -> Provenance:
    if not isinstance(entry, Mapping):
        raise CalibrationError(f"{where}: must be an object, not {type(entry).__name__}")
    missing = [
        name for name in ("time", "device", "provider", "power_limit_w") if name not in entry
    ]
    if missing:
        raise CalibrationError(f"{where}: {missing[0]} is missing")
    anchors = entry.get("anchors")
    return Provenance(
        run_id=run_id,
        time=str(entry["time"]),
        device=str(entry["device"]),
        provider=str(entry["provider"]),
        power_limit_w=entry["power_limit_w"],
        boards=MappingProxyType(dict(entry.get("boards", {}))),
        versions=MappingProxyType(dict(entry.get("versions", {}))),
        host=MappingProxyType(dict(entry.get("host", {}))),
        seed=int(entry.get("seed", 0)),
        data=str(entry.get("data", "")),
        power_mode=entry.get("power_mode"),
        anchors=anchors_from_json(anchors, where=f"{where}.anchors") if anchors else None,
    )


def read_provenance(path: Path) -> Mapping[str, Provenance]:
    """Read a provenance sidecar: run id -> provenance.

    Raises:
        CalibrationError: missing, not JSON, or not a provenance file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(
            f"{path}: missing; samples cannot be used without their provenance"
        ) from None
    except ValueError as error:
        raise CalibrationError(f"{path}: not JSON ({error})") from None
    if not isinstance(document, Mapping) or document.get("schema") != PROVENANCE_SCHEMA:
        raise CalibrationError(f"{path}: schema must be {PROVENANCE_SCHEMA}")
    runs = document.get("runs")
    if not isinstance(runs, Mapping):
        raise CalibrationError(f"{path}: runs must be an object")
    return MappingProxyType(
        {
            run_id: _provenance_from_json(run_id, entry, f"{path}: runs.{run_id}")
            for run_id, entry in runs.items()
        }
    )


def check_power_limits(runs: Iterable[Provenance], where: str) -> None:
    """Refuse runs of one device that were measured under different power limits or modes.

    Raises:
        CalibrationError: two limits or modes differ; the text gives both.
    """
    first: dict[str, Provenance] = {}
    for run in runs:
        other = first.setdefault(run.device, run)
        a, b = other.power_limit_w, run.power_limit_w
        if a is not None and b is not None and abs(a - b) > _POWER_LIMIT_TOLERANCE_W:
            raise CalibrationError(
                f"{where}: run {other.run_id} was measured at a power limit of {a:.0f} W and run "
                f"{run.run_id} at {b:.0f} W; keep samples of different limits in different folders"
            )
        if run.power_mode != other.power_mode:
            raise CalibrationError(
                f"{where}: run {other.run_id} was measured in power mode {other.power_mode} and "
                f"run {run.run_id} in {run.power_mode}; keep samples of different modes in "
                "different folders"
            )


class Store(AbstractContextManager["Store"]):
    """Samples and provenance of one folder; created on the first write.

    Args:
        folder: where the two files are.

    Raises:
        CalibrationError: the files that are there cannot be used, or mix power limits.
    """

    def __init__(self, folder: Path) -> None:
        """Read what is there."""
        self.folder = folder
        self._file: TextIO | None = None
        exists = self._samples_path.exists()
        self._samples = list(read_samples(self._samples_path)) if exists else []
        has_runs = self._provenance_path.exists() or self._samples
        self._runs = dict(read_provenance(self._provenance_path)) if has_runs else {}
        unknown = [s.run_id for s in self._samples if s.run_id not in self._runs]
        if unknown:
            raise CalibrationError(
                f"{self._provenance_path}: run {unknown[0]} of {SAMPLES_FILE} is not in it"
            )
        check_power_limits(self._runs.values(), str(folder))

    @property
    def _samples_path(self) -> Path:
        return self.folder / SAMPLES_FILE

    @property
    def _provenance_path(self) -> Path:
        return self.folder / PROVENANCE_FILE

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, in the order in which they were measured."""
        return tuple(self._samples)

    @property
    def runs(self) -> Mapping[str, Provenance]:
        """Run id -> provenance."""
        return MappingProxyType(self._runs)

    @property
    def done(self) -> frozenset[str]:
        """Keys of the points that were measured and found valid."""
        return frozenset(s.key for s in self._samples if s.usable)

    def begin(self, provenance: Provenance) -> None:
        """Write the provenance of a run before its first sample, or again with more in it.

        Raises:
            CalibrationError: the folder holds samples of another power limit.
        """
        runs = self._runs | {provenance.run_id: provenance}
        check_power_limits(runs.values(), str(self.folder))
        document = {
            "schema": PROVENANCE_SCHEMA,
            "runs": {run_id: _provenance_to_json(run) for run_id, run in runs.items()},
        }
        write_atomically(
            self._provenance_path, json.dumps(document, indent=1, sort_keys=True) + "\n"
        )
        self._runs = runs

    def append(self, sample: Sample) -> None:
        """Add one sample; it is on disk when this returns.

        Raises:
            CalibrationError: `begin` was not called for the sample's run, or its numbers are not
                positive.
        """
        if sample.run_id not in self._runs:
            raise CalibrationError(
                f"run {sample.run_id} has no provenance; begin the run before its first sample"
            )
        row = _row(sample)
        try:
            _trial({name: row.get(name, "") for name in COLUMNS})
        except ValueError as error:
            raise CalibrationError(f"sample {sample.label or row['ops']}: {error}") from None
        if self._file is None:
            self._file = self._open()
        csv.DictWriter(self._file, COLUMNS, restval="", lineterminator="\n").writerow(row)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._samples.append(sample)

    def _open(self) -> TextIO:
        path = self._samples_path
        if path.exists():
            _drop_cut_line(path)
        file = path.open("a", encoding="utf-8", newline="")
        if file.tell() == 0:
            csv.writer(file, lineterminator="\n").writerow(COLUMNS)
        return file

    def close(self) -> None:
        """Close the samples file; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the samples file."""
        self.close()

    def __iter__(self) -> Iterator[Sample]:
        """Over all samples, oldest first."""
        return iter(self.samples)


def _drop_cut_line(path: Path) -> None:
    """Cut a last line without its line end off, so that the next one starts on its own."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
