"""How far a run is, on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from energylens.profiler.session import Progress as Shown
from energylens.profiler.session import Quiet

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

REFRESH_S = 2.0
"""Drawing costs milliseconds of the host, which eager steps wait for: do it rarely."""


class _RichBar:
    """A `Progress` on a terminal; it draws only when told to, never from a thread of its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._drawn_s = 0.0

    def start(self, text: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(text, total=1.0)
        self._draw()

    def share(self, share: float) -> None:
        if self._task is None or time.monotonic() < self._drawn_s + REFRESH_S:
            return
        self._progress.update(self._task, completed=share)
        self._draw()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        self._progress.refresh()
        self._drawn_s = time.monotonic()


@contextmanager
def bar(console: Console | None = None, *, enabled: bool = True) -> Iterator[Shown]:
    """A bar with the time left, on a terminal; only notes elsewhere, nothing if not ``enabled``."""
    if not enabled:
        yield Quiet()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    shown = console or Console(stderr=True)
    with Progress(
        *columns,
        console=shown,
        auto_refresh=False,
        transient=True,
        disable=not shown.is_terminal,
    ) as progress:
        yield _RichBar(progress)
