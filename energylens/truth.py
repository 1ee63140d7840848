"""Truth files: measured rows in, `Measurement` values out (the truth CSV of DESIGN section 5)."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from energylens.errors import OutOfRangeError, SpecError
from energylens.results import Anchors, BoardAnchor, HostAnchor, Measurement
from energylens.spec.system import Mode, Parallelism, Phase

REQUIRED = ("record_id", "device", "engine", "spec", "phase", "mode", "batch", "prompt_len")
"""Columns without a default; of ``latency_s`` and ``energy_j`` each row needs at least one."""

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


def read_measurements(paths: Iterable[Path]) -> tuple[Measurement, ...]:
    """Read one or more truth files; rows keep the order of the files.

    Raises:
        SpecError: a file cannot be read, a column is missing, a cell is not an allowed value, or a
            ``record_id`` appears twice; the text names file, line and column.
    """
    measurements: list[Measurement] = []
    seen: dict[str, str] = {}
    for path in paths:
        before = len(measurements)
        for cells in _read_csv(path):
            measurement = _measurement(cells)
            if earlier := seen.get(measurement.record_id):
                raise cells.error("record_id", f"be unique; it is also at {earlier}")
            seen[measurement.record_id] = cells.where
            measurements.append(measurement)
        if len(measurements) == before:
            raise SpecError(f"{path}: no measured rows below the header")
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

    path: Path
    line: int
    values: Mapping[str, str]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

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


def _read_csv(path: Path) -> Iterator[_Cells]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if len(row) != len(header):
                    raise SpecError(
                        f"{path}:{reader.line_num}: {len(row)} cells below a header of "
                        f"{len(header)}; is the file cut off?"
                    )
                values = dict(zip(header, (cell.strip() for cell in row), strict=True))
                yield _Cells(path=path, line=reader.line_num, values=values)
    except OSError as error:
        raise SpecError(
            f"{path}: cannot be read ({error.strerror}); expected a truth CSV"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: not a CSV file in UTF-8 ({error})") from None


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in REQUIRED if name not in header]
    if not {"latency_s", "energy_j"} & set(header):
        missing.append("latency_s or energy_j")
    if missing:
        raise SpecError(
            f"{path}:1: column {missing[0]!r} is missing; a truth CSV needs {', '.join(REQUIRED)} "
            "and latency_s or energy_j"
        )
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise SpecError(f"{path}:1: column {twice[0]!r} appears twice; remove one")


def _measurement(cells: _Cells) -> Measurement:
    latency_s, energy_j = cells.number("latency_s"), cells.number("energy_j")
    if latency_s is None and energy_j is None:
        raise SpecError(f"{cells.where}: latency_s and energy_j are both empty; give at least one")
    parallelism = _parallelism(cells)
    return Measurement(
        record_id=cells.text("record_id"),
        device=cells.text("device"),
        engine=cells.text("engine"),
        engine_version=cells.text("engine_version", ""),
        spec=cells.text("spec"),
        precision=cells.text("precision", "bf16"),
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


def _parallelism(cells: _Cells) -> Parallelism:
    degrees = {name: cells.integer(name, 1) or 1 for name in ("tp", "ep", "pp", "dp", "replicas")}
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
