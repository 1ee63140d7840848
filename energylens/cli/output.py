"""What every verb writes: a result on stdout, a complaint on stderr, and the exit codes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energylens.errors import SpecError

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_FAILURE, EXIT_INPUT, EXIT_INFEASIBLE, EXIT_INVALID, EXIT_INTERRUPTED = 1, 2, 3, 4, 130


def fail(what: str, message: str, code: int) -> int:
    """Write a complaint of one line to stderr and give the code back."""
    if os.environ.get("ENERGYLENS_DEBUG"):
        traceback.print_exc()
    sys.stderr.write(f"energylens: {what}: {' '.join(message.split())}\n")
    return code


def show(result: Mapping[str, Any] | RenderableType) -> None:
    """Write a result to stdout: a mapping as JSON, a text as it is, anything else as a table."""
    if isinstance(result, Mapping):
        result = json.dumps(result, indent=2, allow_nan=False)
    if not isinstance(result, str):
        from rich.console import Console
        from rich.measure import Measurement as Extent

        def console_of(width: int | None) -> Console:
            return Console(width=width, highlight=False, markup=False, emoji=False)

        wide = console_of(1000)
        needed = Extent.get(wide, wide.options, result).minimum
        console = console_of(None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
        if needed > console.width:  # a row that runs on is easier to read than one cut to pieces
            console = console_of(needed)
        with console.capture() as text:
            console.print(result)
        result = "\n".join(line.rstrip() for line in text.get().splitlines())
    try:
        sys.stdout.write(f"{result}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough; what Python flushes at exit must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_output(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that cannot be written, before the work whose result it is for."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise SpecError(f"{option}: {path} found, and must end in {', '.join(suffixes)}")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise SpecError(
            f"{option}: {path} cannot be written ({error.strerror}); choose another place"
        ) from None
    if not existed:
        path.unlink()
