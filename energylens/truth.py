"""Truth files: measured rows in, `Measurement` values out.

Two kinds, told apart by their names: the truth CSV, and the JSON document of a profile
(``energylens/profile/v1``), each measured phase of which is a row like those of a truth CSV. Both
are contracts of DESIGN section 5. A third, the truth CSV of overlaps, has a column ``kind`` and no
``spec``: its rows ran a GEMM on every GPU, the all-reduce of its result, or both.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from energylens.anchors import anchors_from_json
from energylens.errors import OutOfRangeError, SpecError
from energylens.measured import PROFILE_SCHEMA
from energylens.results import (
    Anchors,
    BoardAnchor,
    HostAnchor,
    KernelRow,
    Kind,
    Measurement,
    OverlapKind,
    OverlapRun,
)
from energylens.spec.system import Mode, Parallelism, Phase

REQUIRED = ("record_id", "device", "engine", "spec", "phase", "mode", "batch", "prompt_len")
"""Columns without a default; of ``latency_s`` and ``energy_j`` each row needs at least one."""

OVERLAP_REQUIRED = ("record_id", "device", "n_gpus", "kind", "tokens", "n", "k")
"""The same of a truth CSV of overlaps."""

_log = logging.getLogger(__name__)

REGIMES = ("device", "host")

_BOARD_COLUMNS = {
    "anchor_idle_w": "idle_w",
    "anchor_stream_w": "stream_w",
    "anchor_gemm_w": "gemm_w",
    "anchor_gemm_tflops": "gemm_tflops",
    "anchor_gemm_mhz": "gemm_mhz",
    "anchor_gemv_gbs": "gemv_gbs",
}
_BOARD_REQUIRED = ("anchor_idle_w", "anchor_stream_w", "anchor_gemm_w", "anchor_gemm_tflops")

_OF_A_RUN = ("engine", "engine_version", "model", "precision", "n_gpus", "energy_reason")
_OF_A_PHASE = ("latency_s", "energy_j", "mean_power_w", "sm_clock_mhz", "gpu_temp_c", "ticks")
_OF_A_BOARD = {"board_uuid": "board_uuid", "mean_power_w": "board_power_w"}
_DEVIATIONS_95 = 1.96


def read_measurements(paths: Iterable[Path]) -> tuple[Measurement, ...]:
    """Read truth CSV files and profiles (``.json``); rows keep the order of the files.

    Raises:
        SpecError: a file cannot be read, a column is missing, a cell is not an allowed value, or a
            ``record_id`` appears twice; the text names file, line (or phase) and column.
    """
    measurements: list[Measurement] = []
    seen: dict[str, str] = {}
    for path in paths:
        before = len(measurements)
        rows = _of_profile(path) if path.suffix.lower() == ".json" else _of_csv(path)
        for cells, measurement in rows:
            if earlier := seen.get(measurement.record_id):
                raise cells.error("record_id", f"be unique; it is also at {earlier}")
            seen[measurement.record_id] = cells.where
            measurements.append(measurement)
        if len(measurements) == before:
            raise SpecError(f"{path}: no measured rows")
        _warn_of_partial_anchors(path, measurements[before:])
    return tuple(measurements)


def _warn_of_partial_anchors(path: Path, measurements: Iterable[Measurement]) -> None:
    unplaced = [m for m in measurements if not (m.anchors and m.anchors.boards)]
    partial = [m for m in unplaced if _has_board_cells(m)]
    if partial:
        _log.warning(
            "%s: %d rows are predicted as a typical board: their anchors lack one of %s",
            path,
            len(partial),
            ", ".join(_BOARD_REQUIRED),
        )


def _has_board_cells(measurement: Measurement) -> bool:
    return any(measurement.labels.get(name) for name in _BOARD_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """One row as text, with the readers that turn a cell into a value or a located error."""

    where: str
    values: Mapping[str, str]

    def error(self, column: str, rule: str) -> SpecError:
        return SpecError(
            f"{self.where}: {column} is {self.values.get(column, '')!r}, and must {rule}"
        )

    def text(self, column: str, default: str | None = None) -> str:
        value = self.values.get(column, "")
        if value:
            return value
        if default is None:
            raise self.error(column, "not be empty")
        return default

    def choice(self, column: str, allowed: Iterable[str], default: str | None = None) -> str:
        value = self.text(column, default)
        if value not in allowed:
            raise self.error(column, f"be one of {', '.join(allowed)}")
        return value

    def number(self, column: str) -> float | None:
        """A finite number above 0, or None for an empty cell: a sensor that is absent is not 0."""
        return self._positive(column, self.values.get(column, ""))

    def integer(self, column: str, default: int | None = None) -> int | None:
        value = self.number(column)
        if value is None:
            return default
        if not value.is_integer():
            raise self.error(column, "be a whole number, 1 or more")
        return int(value)

    def count(self, column: str) -> int:
        value = self.integer(column)
        if value is None:
            raise self.error(column, "be a whole number, 1 or more")
        return value

    def listed(self, column: str) -> tuple[str, ...]:
        """Parts of a cell that holds one value per board, joined by ``;``."""
        cell = self.values.get(column, "")
        return tuple(part.strip() for part in cell.split(";")) if cell else ()

    def numbers(self, column: str) -> tuple[float | None, ...]:
        return tuple(self._positive(column, part) for part in self.listed(column))

    def _positive(self, column: str, text: str) -> float | None:
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise self.error(column, "be a number above 0") from None
        if not math.isfinite(value) or value <= 0:
            raise self.error(column, "be a number above 0; leave the cell empty where not measured")
        return value


def _of_csv(path: Path) -> Iterator[tuple[_Cells, Measurement]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            of_row = _overlap if "kind" in header and "spec" not in header else _measurement
            _check_header(path, header, OVERLAP_REQUIRED if of_row is _overlap else REQUIRED)
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if len(row) != len(header):
                    raise SpecError(
                        f"{path}:{reader.line_num}: {len(row)} cells below a header of "
                        f"{len(header)}; is the file cut off?"
                    )
                values = dict(zip(header, (cell.strip() for cell in row), strict=True))
                cells = _Cells(where=f"{path}:{reader.line_num}", values=values)
                yield cells, of_row(cells)
    except OSError as error:
        raise SpecError(
            f"{path}: cannot be read ({error.strerror}); expected a truth CSV"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: not a CSV file in UTF-8 ({error})") from None


def _check_header(path: Path, header: list[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in header]
    if not {"latency_s", "energy_j"} & set(header):
        missing.append("latency_s or energy_j")
    if missing:
        what = "a truth CSV" if required is REQUIRED else "a truth CSV of overlaps"
        raise SpecError(
            f"{path}:1: column {missing[0]!r} is missing; {what} needs {', '.join(required)} "
            "and latency_s or energy_j"
        )
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise SpecError(f"{path}:1: column {twice[0]!r} appears twice; remove one")


def _of_profile(path: Path) -> Iterator[tuple[_Cells, Measurement]]:
    """Each measured phase of a profile, read as if its numbers stood in a truth CSV."""
    run = _document(path)
    if not (record := _cell(run.get("record_id"), f"{path}: record_id")):
        raise SpecError(f"{path}: record_id is empty; each of its rows is named after it")
    whole = {name: _cell(run.get(name), f"{path}: {name}") for name in _OF_A_RUN}
    # What EnergyLens has no sheet of is told by the name it goes by: no row is lost for it.
    whole["spec"] = _cell(run.get("spec") or run.get("model"), f"{path}: spec")
    whole["device"] = _cell(run.get("device") or run.get("device_name"), f"{path}: device")
    for part in ("parallelism", "workload"):
        entries = _object(run.get(part), f"{path}: {part}")
        whole |= {name: _cell(value, f"{path}: {part}.{name}") for name, value in entries.items()}
    modes = _object(run.get("modes"), f"{path}: modes")
    anchors = run.get("anchors")
    boards = anchors_from_json(anchors, where=f"{path}: anchors") if anchors is not None else None
    kernels = _kernels(run.get("breakdown"), f"{path}: breakdown")
    for phase in Phase:
        if run.get(phase) is None:
            continue
        where = f"{path}: {phase}"
        found = _object(run[phase], where)
        context = found.get("context_len") if phase is Phase.DECODE else None
        mode = modes.get(phase)  # a request may leave it to its decode steps
        if phase is Phase.REQUEST:
            mode = mode or modes.get(Phase.DECODE)
        own = {
            "record_id": f"{record}-{phase}",
            "phase": phase.value,
            "mode": _cell(mode, f"{path}: modes"),
            "prefill_mode": _cell(modes.get(Phase.PREFILL), f"{path}: modes"),
            "regime": _cell(found.get("regime"), f"{where}.regime"),
            **{name: _cell(found.get(name), f"{where}.{name}") for name in _OF_A_PHASE},
            **_board_cells(found.get("per_gpu") or [], f"{where}.per_gpu"),
        }
        if phase is not Phase.DECODE or context is not None:
            own["context_len"] = _cell(context, f"{where}.context_len")
        cells = _Cells(where=where, values=whole | own)
        row = _measurement(cells)
        yield (
            cells,
            replace(
                row,
                anchors=boards,
                prefill_mode=_prefill_mode(cells, phase),
                latency_noise=_latency_noise(found, row.latency_s, where),
                energy_noise=_energy_noise(found, where),
                defect=_defect(found),
                kernels=tuple(k for k in kernels if k.phase == phase),
            ),
        )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); expected a profile") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not JSON ({error}); is the file cut off?") from None
    schema = run.get("schema") if isinstance(run, dict) else None
    if schema != PROFILE_SCHEMA:
        raise SpecError(
            f"{path}: schema is {schema!r}, and must be {PROFILE_SCHEMA!r}, as "
            "`energylens profile -o FILE` writes it"
        )
    return _object(run, str(path))


def _object(entry: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}: must be an object, not {entry!r}")
    return entry


def _cell(value: Any, where: str) -> str:
    """A value of a document as the text of a cell; repr loses no digit."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SpecError(f"{where}: must be a text or a number, not {value!r}")
    return value if isinstance(value, str) else repr(value)


def _board_cells(per_gpu: Any, where: str) -> dict[str, str]:
    if not isinstance(per_gpu, list):
        raise SpecError(f"{where}: must be a list, not {per_gpu!r}")
    boards = [_object(board, f"{where}[{i}]") for i, board in enumerate(per_gpu)]
    return {
        column: ";".join(_cell(board.get(name), f"{where}.{name}") for board in boards)
        for name, column in _OF_A_BOARD.items()
    }


def _prefill_mode(cells: _Cells, phase: Phase) -> str | None:
    if phase is not Phase.REQUEST or not cells.values["prefill_mode"]:
        return None
    return cells.choice("prefill_mode", list(Mode))


def _latency_noise(found: Mapping[str, Any], mean_s: float | None, where: str) -> float | None:
    """From the interval of the mean; a lone step has none."""
    interval = _object(found.get("latency") or {}, f"{where}.latency").get("ci95")
    if interval is None or mean_s is None or found.get("n") in (None, 0, 1):
        return None
    try:
        low, high = (float(end) for end in interval)
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low <= high < math.inf:
        raise SpecError(
            f"{where}.latency.ci95: must be two numbers, the lower one first, not {interval!r}"
        )
    return (high - low) / 2 / mean_s


def _energy_noise(found: Mapping[str, Any], where: str) -> float | None:
    error = found.get("energy_rel_se")
    if error is None:
        return None
    if isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error < math.inf:
        raise SpecError(f"{where}.energy_rel_se: must be a number from 0 on, not {error!r}")
    return _DEVIATIONS_95 * error


def _defect(found: Mapping[str, Any]) -> str | None:
    if found.get("valid", True):
        return None
    return f"not valid as measured: {', '.join(map(str, found.get('flags') or ())) or 'no reason'}"


def _kernels(rows: Any, where: str) -> tuple[KernelRow, ...]:
    if rows is not None and not isinstance(rows, list):
        raise SpecError(f"{where}: must be a list or null, not {rows!r}")
    try:
        kernels = tuple(
            KernelRow(
                phase=str(row["phase"]),
                kind=Kind(row["kind"]),
                op=str(row["op"]),
                count=float(row["count"]),
                latency_s=float(row["latency_s"]),
                share=float(row["share"]),
            )
            for row in rows or ()
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"{where}: a row needs phase, kind ({', '.join(Kind)}), op, count, latency_s and "
            f"share ({error})"
        ) from None
    for i, kernel in enumerate(kernels):
        if not 0 <= kernel.latency_s < math.inf:
            raise SpecError(
                f"{where}[{i}]: latency_s is {kernel.latency_s!r}, and must be a number from 0 on"
            )
    return kernels


def _took(cells: _Cells) -> tuple[float | None, float | None]:
    """Seconds and joules of a row, at least one of which was measured."""
    latency_s, energy_j = cells.number("latency_s"), cells.number("energy_j")
    if latency_s is None and energy_j is None:
        raise SpecError(f"{cells.where}: latency_s and energy_j are both empty; give at least one")
    return latency_s, energy_j


def _measurement(cells: _Cells) -> Measurement:
    latency_s, energy_j = _took(cells)
    parallelism = _parallelism(cells)
    return Measurement(
        record_id=cells.text("record_id"),
        device=cells.text("device"),
        engine=cells.text("engine"),
        engine_version=cells.text("engine_version", ""),
        spec=cells.text("spec"),
        precision=cells.text("precision", "") or None,
        phase=cells.choice("phase", list(Phase)),
        mode=cells.choice("mode", list(Mode)),
        batch=cells.count("batch"),
        prompt_len=cells.count("prompt_len"),
        context_len=cells.number("context_len"),
        gen_len=cells.integer("gen_len"),
        latency_s=latency_s,
        energy_j=energy_j,
        parallelism=parallelism,
        regime=cells.choice("regime", REGIMES, "device"),
        power_limit_w=cells.number("power_limit_w"),
        anchors=_anchors(cells, parallelism.gpus),
        labels=MappingProxyType(dict(cells.values)),
    )


def _overlap(cells: _Cells) -> Measurement:
    """A row that ran a GEMM on every GPU, the all-reduce of its result, or both."""
    latency_s, energy_j = _took(cells)
    kind = OverlapKind(cells.choice("kind", list(OverlapKind)))
    gpus, tokens = cells.count("n_gpus"), cells.count("tokens")
    if gpus < 2 and kind is not OverlapKind.GEMM_ONLY:
        raise cells.error("n_gpus", "be 2 or more for an all-reduce")
    if kind is OverlapKind.OVERLAP:
        chunks = cells.count("chunks")
        if chunks > tokens:
            raise cells.error("chunks", f"be no more than the {tokens} tokens")
    else:
        chunks = cells.integer("chunks", 1) or 1
        if chunks != 1:
            raise cells.error("chunks", f"be 1 or empty for {kind}")
    return Measurement(
        record_id=cells.text("record_id"),
        device=cells.text("device"),
        engine="torch",
        spec="",
        phase=kind.value,
        mode=Mode.CUDA_GRAPH.value,
        batch=1,
        prompt_len=tokens,
        latency_s=latency_s,
        energy_j=energy_j,
        parallelism=Parallelism(tp=gpus),
        regime=cells.choice("regime", REGIMES, "device"),
        power_limit_w=cells.number("power_limit_w"),
        anchors=_anchors(cells, gpus),
        overlap=OverlapRun(
            kind=kind,
            tokens=tokens,
            n=cells.count("n"),
            k=cells.count("k"),
            dtype=cells.text("dtype", "bf16"),
            sms=_sms(cells),
            chunks=chunks,
        ),
        labels=MappingProxyType(dict(cells.values)),
    )


def _sms(cells: _Cells) -> int | None:
    """What the collective may take; None where NCCL was left to choose."""
    try:
        count = float(cells.values.get("ctas") or 0)
    except ValueError:
        count = math.nan
    if not (count.is_integer() and count >= 0):
        raise cells.error("ctas", "be a whole number; 0 or empty for NCCL's own choice")
    return int(count) or None


def _parallelism(cells: _Cells) -> Parallelism:
    degrees: dict[str, Any] = {
        name: cells.integer(name, 1) or 1 for name in ("tp", "ep", "pp", "dp", "replicas")
    }
    try:
        parallelism = Parallelism(**degrees)
    except OutOfRangeError as error:
        raise SpecError(f"{cells.where}: {error}") from None
    if cells.integer("n_gpus", parallelism.gpus) != parallelism.gpus:
        raise cells.error("n_gpus", f"equal replicas*dp*tp*pp, which is {parallelism.gpus}")
    return parallelism


def _anchors(cells: _Cells, gpus: int) -> Anchors | None:
    """Anchors of the row's boards; None where there are none, or not enough to place a board."""
    launch_us = cells.number("host_launch_us")
    host = HostAnchor(launch_us=launch_us) if launch_us is not None else None
    boards = _boards(cells, gpus)
    return Anchors(boards=boards, host=host) if boards or host else None


def _boards(cells: _Cells, gpus: int) -> tuple[BoardAnchor, ...]:
    columns = {name: cells.numbers(name) for name in _BOARD_COLUMNS}
    uuids = cells.listed("board_uuid")
    for name, values in (*columns.items(), ("board_uuid", uuids)):
        if len(values) not in (0, gpus):
            raise cells.error(name, f"hold one value per GPU, {gpus}, joined by ';'")
    measured = [
        {field: columns[name][i] for name, field in _BOARD_COLUMNS.items() if columns[name]}
        for i in range(gpus)
    ]
    required = [_BOARD_COLUMNS[name] for name in _BOARD_REQUIRED]
    if any(board.get(field) is None for board in measured for field in required):
        return ()
    return tuple(
        BoardAnchor(
            board_uuid=uuids[i] if uuids else "",
            device=cells.text("device"),
            **board,  # type: ignore[arg-type]
        )
        for i, board in enumerate(measured)
    )
