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
    """Refuse a file that cannot be written, before the work whose result it is for.

    It only looks: a folder that is missing is told and not made, as it may be a slip of the pen,
    and the work may still fail.

    Args:
        option: that named the file, for the message.
        path: the file, or None where there is none to write.
        suffixes: that it may end in; any where there are none.

    Raises:
        SpecError: the file ends in something else, or cannot be written.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise SpecError(f"{option}: {path} found, and must end in {', '.join(suffixes)}")
    if why := _unwritable(path):
        raise SpecError(f"{option}: {path} cannot be written ({why})")


def _unwritable(path: Path) -> str | None:
    """Why a file cannot be written and what to do, or None as far as can be seen."""
    folder = path.parent
    try:
        if not folder.is_dir():
            return f"there is no folder {folder}; make it, or choose another place"
        # A device such as /dev/null would give way to the file that is put in its place.
        if path.exists() and not path.is_file():
            return f"it is {'a folder' if path.is_dir() else 'no file'}; choose another name"
    except OSError as error:  # a name that is too long, say
        return f"{error.strerror}; choose another place"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission to write into {folder}; choose another place"
    if path.exists() and not os.access(path, os.W_OK):
        return "no permission to write it; choose another place"
    return None
