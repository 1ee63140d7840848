"""Anchor files (``energylens/anchor/v1``): what boards and a host do under a few small loads.

Light on purpose: `predict` reads these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from energylens.errors import SpecError
from energylens.files import write_atomically
from energylens.results import Anchors, BoardAnchor, HostAnchor

ANCHOR_SCHEMA = "energylens/anchor/v1"

_BOARD_FIELDS = tuple(f.name for f in fields(BoardAnchor))
_HOST_FIELDS = tuple(f.name for f in fields(HostAnchor))


def anchors_to_json(anchors: Anchors) -> dict[str, Any]:
    """The ``energylens/anchor/v1`` document of ``anchors``; what was not measured is null."""
    return {
        "schema": ANCHOR_SCHEMA,
        "boards": [asdict(board) for board in anchors.boards],
        "host": asdict(anchors.host) if anchors.host else None,
    }


def anchors_from_json(document: Any, *, where: str) -> Anchors:
    """Check and read an ``energylens/anchor/v1`` document.

    Args:
        document: parsed JSON.
        where: file (and path) for messages.

    Raises:
        SpecError: a field is missing, unknown or not a possible value.
    """
    if not isinstance(document, Mapping):
        raise SpecError(
            f"{where}: must be an object of schema {ANCHOR_SCHEMA}, not {type(document).__name__}"
        )
    if document.get("schema") != ANCHOR_SCHEMA:
        raise SpecError(
            f"{where}: schema is {document.get('schema')!r}, and must be {ANCHOR_SCHEMA!r}"
        )
    _refuse_unknown(document, ("schema", "boards", "host"), where)
    boards = document.get("boards", [])
    if not isinstance(boards, list):
        raise SpecError(f"{where}: boards must be a list, not {type(boards).__name__}")
    host = document.get("host")
    return Anchors(
        boards=tuple(_board(board, f"{where}: boards[{i}]") for i, board in enumerate(boards)),
        host=_host(host, f"{where}: host") if host is not None else None,
    )


def _refuse_unknown(entry: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise SpecError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(known)}")


def _fields(entry: Any, known: tuple[str, ...], where: str) -> Mapping[str, Any]:
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}: must be an object, not {type(entry).__name__}")
    _refuse_unknown(entry, known, where)
    return entry


def _number(entry: Mapping[str, Any], name: str, where: str) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise SpecError(
            f"{where}.{name} is {value!r}, and must be a positive number (null: not measured)"
        )
    return float(value)


def _required(entry: Mapping[str, Any], name: str, where: str) -> float:
    value = _number(entry, name, where)
    if value is None:
        raise SpecError(
            f"{where}.{name} is missing; measure it with `energylens calibrate --anchor`"
        )
    return value


def _text(entry: Mapping[str, Any], name: str, where: str) -> str | None:
    value = entry.get(name)
    if value is not None and not isinstance(value, str):
        raise SpecError(f"{where}.{name} is {value!r}, and must be a text")
    return value


def _board(entry: Any, where: str) -> BoardAnchor:
    board = _fields(entry, _BOARD_FIELDS, where)
    uuid, device = _text(board, "board_uuid", where), _text(board, "device", where)
    if not uuid or not device:
        raise SpecError(
            f"{where}.{'device' if uuid else 'board_uuid'} is missing; it must be a text"
        )
    anchor = BoardAnchor(
        board_uuid=uuid,
        device=device,
        idle_w=_required(board, "idle_w", where),
        stream_w=_required(board, "stream_w", where),
        stream_gbs=_number(board, "stream_gbs", where),
        gemv_w=_number(board, "gemv_w", where),
        gemv_gbs=_number(board, "gemv_gbs", where),
        gemm_w=_required(board, "gemm_w", where),
        gemm_mhz=_number(board, "gemm_mhz", where),
        gemm_tflops=_required(board, "gemm_tflops", where),
        temperature_c=_number(board, "temperature_c", where),
        time=_text(board, "time", where),
    )
    if anchor.stream_w <= anchor.idle_w:
        raise SpecError(
            f"{where}: stream_w is {anchor.stream_w:g}, and must be above idle_w, {anchor.idle_w:g}"
        )
    return anchor


def _host(entry: Any, where: str) -> HostAnchor:
    host = _fields(entry, _HOST_FIELDS, where)
    return HostAnchor(
        launch_us=_required(host, "launch_us", where),
        module_us=_number(host, "module_us", where),
        cpu=_text(host, "cpu", where) or "",
    )


def merge_anchors(parts: Iterable[Anchors]) -> Anchors:
    """Anchors of several files as one; the last entry for a board, and for the host, counts."""
    boards: dict[str, BoardAnchor] = {}
    host: HostAnchor | None = None
    for part in parts:
        for board in part.boards:
            boards.pop(board.board_uuid, None)
            boards[board.board_uuid] = board
        host = part.host or host
    return Anchors(boards=tuple(boards.values()), host=host)


def load_anchors(*paths: Path) -> Anchors:
    """Read anchor files; several are merged, later ones win where they name the same board.

    Raises:
        SpecError: a file is missing, is not JSON or has a wrong field.
    """
    return merge_anchors(_load(path) for path in paths)


def _load(path: Path) -> Anchors:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(
            f"{path}: no such anchor file; `energylens calibrate --anchor` makes one"
        ) from None
    except (IsADirectoryError, PermissionError) as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise SpecError(f"{path}: not JSON ({error})") from None
    return anchors_from_json(document, where=str(path))


def save_anchors(anchors: Anchors, path: Path) -> None:
    """Write an anchor file."""
    write_atomically(path, json.dumps(anchors_to_json(anchors), indent=1) + "\n")
