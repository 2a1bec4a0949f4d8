"""The progress bar on stderr that attacks, evaluations, training and downloads share.

Work may be nested: an evaluation opens a bar, and its attacks find it with :data:`AROUND` and
report their progress within the current stage, instead of opening their own bars.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

AROUND: ContextVar[Bar | None] = ContextVar("wball_progress", default=None)
"""The bar that attacks are to report to, if there is one."""


class Bar:
    """A progress bar that counts units of work. Without a display it shows nothing."""

    def __init__(self, display: Progress | None = None, task: TaskID | None = None) -> None:
        self._display, self._task = display, task
        self._done, self._stage = 0.0, 0.0

    def total(self, units: float) -> None:
        """Set the total amount of work."""
        self._update(total=units)

    def stage(self, units: float, said: str) -> None:
        """Start a stage of ``units`` of work; ``said`` is shown in front of the bar."""
        self._stage = units
        if self._display is not None:
            from rich.markup import escape

            self._update(description=escape(said))

    def within(self, fraction: float) -> None:
        """Set the completed fraction of the current stage."""
        self._update(completed=self._done + self._stage * min(1.0, fraction))

    def advance(self, units: float) -> None:
        """Advance by ``units``."""
        self.move_to(self._done + units)

    def move_to(self, units: float) -> None:
        """Set the completed amount to ``units``."""
        self._done, self._stage = units, 0.0
        self._update(completed=units)

    def _update(self, **changes: float | str) -> None:
        if self._display is not None and self._task is not None:
            self._display.update(self._task, **changes)  # type: ignore[arg-type]


@contextmanager
def bar(
    title: str,
    total: float | None = None,
    unit: str = "",
    *,
    show: bool | None = True,
    parts: bool = False,
) -> Iterator[Bar]:
    """Show a bar with the remaining time, which is removed from a terminal at its end.

    ``show=None`` shows it on a terminal or in a notebook, unless the work is part of a larger one
    that has a bar. With ``parts``, attacks report to it.
    """
    notebook = "ipykernel.kernelapp" in sys.modules
    if show is None:
        show = AROUND.get() is None and (sys.stderr.isatty() or notebook)
    if not show:
        yield Bar()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %" if total is not None or unit else ""),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # Text that overwrites itself needs no widgets, which may not be installed.
    console = Console(stderr=True, force_jupyter=False, force_terminal=notebook or None)
    with Progress(*columns, console=console, transient=console.is_terminal) as display:
        made = Bar(display, display.add_task(escape(title), total=total))
        token = AROUND.set(made if parts else None)
        try:
            yield made
        finally:
            AROUND.reset(token)


def notice(said: str) -> None:
    """Print one line to stderr if that is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"wball: {said}", file=sys.stderr, flush=True)
