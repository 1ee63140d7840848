"""How EnergyLens writes files."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file at once: a reader, or an interruption, meets the old or the new content.

    Args:
        path: file to write; its folder is made where it is missing.
        content: bytes, or text that is written as UTF-8.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
