"""Progress on stderr, which attacks, evaluations, training and downloads share: a line that
overwrites itself on a terminal, and a line from time to time elsewhere.

Work may be nested: an evaluation opens a bar, and its attacks find it with :data:`AROUND` and
report their progress within the current stage, instead of opening their own bars.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

AROUND: ContextVar[Bar | None] = ContextVar("wball_progress", default=None)
"""The bar that attacks are to report to, if there is one."""
REDRAWN, WRITTEN = 0.2, 30.0
"""Seconds between two updates on a terminal, and between two lines elsewhere."""
WIDTH = 20


class Bar:
    """A count of units of work. Unless it is ``shown``, it writes nothing."""

    def __init__(self, title: str = "", total: float | None = None, shown: bool = False) -> None:
        self.shown, self._said, self._total = shown, title, total
        self._done, self._stage, self._drawn = 0.0, 0.0, False
        self._start, self._staged = (time.monotonic(), 0.0), False
        self._next = time.monotonic() + (REDRAWN if _overwrites() else WRITTEN)

    def total(self, units: float) -> None:
        """Set the total amount of work."""
        self._total = units

    def stage(self, units: float, said: str) -> None:
        """Start a stage of ``units`` of work; ``said`` is shown in front of the bar."""
        self._stage, self._said = units, said
        if not self._staged:  # what was read from files took no time
            self._start, self._staged = (time.monotonic(), self._done), True
        self._show(self._done)

    def within(self, fraction: float) -> None:
        """Set the completed fraction of the current stage."""
        self._show(self._done + self._stage * min(1.0, fraction))

    def advance(self, units: float) -> None:
        """Advance by ``units``."""
        self.move_to(self._done + units)

    def move_to(self, units: float) -> None:
        """Set the completed amount to ``units``."""
        self._done, self._stage = units, 0.0
        self._show(units)

    def text(self, done: float) -> str:
        """The line to show when this much is done."""
        if not self._total:
            return f"{self._said}  {done:.0f}"
        share, (start, before) = min(1.0, done / self._total), self._start
        line = f"{self._said}  {'=' * round(WIDTH * share):{WIDTH}} {100 * share:3.0f} %"
        if done <= before:
            return line
        left = (time.monotonic() - start) * (self._total - done) / (done - before)
        return f"{line}, about {duration(left)} left"

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self, done: float) -> None:
        now = time.monotonic()
        if not self.shown or now < self._next:
            return
        line = "".join(c for c in self.text(done) if c.isprintable())  # names may hold escapes
        if _overwrites():
            self._next, self._drawn = now + REDRAWN, True
            columns = shutil.get_terminal_size().columns
            sys.stderr.write(f"\r{line[: columns - 1]}\x1b[K")
        else:
            self._next = now + WRITTEN
            sys.stderr.write(f"wball: {line}\n")
        sys.stderr.flush()


def _overwrites() -> bool:
    """Whether stderr can overwrite a line: on a terminal, and in a notebook."""
    notebook = "ipykernel.kernelapp" in sys.modules
    return sys.stderr is not None and (sys.stderr.isatty() or notebook)


@contextmanager
def bar(
    title: str, total: float | None = None, *, show: bool | None = True, parts: bool = False
) -> Iterator[Bar]:
    """Show a bar with the remaining time, which is removed from a terminal at its end.

    ``show=None`` shows it on a terminal or in a notebook, unless the work is part of a larger one
    that has a bar. With ``parts``, attacks report to it.
    """
    if show is None:
        show = AROUND.get() is None and _overwrites()
    made = Bar(title, total, show and sys.stderr is not None)
    token = AROUND.set(made if parts and made.shown else None) if made.shown else None
    try:
        yield made
    finally:
        made.clear()
        if token is not None:
            AROUND.reset(token)


def duration(seconds: float) -> str:
    """A time in words, rounded.

    >>> duration(0.3), duration(48), duration(372), duration(9000)
    ('1 s', '48 s', '6 minutes', '2.5 hours')
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def notice(said: str, *, always: bool = False) -> None:
    """Print one line to stderr if that is a terminal, or ``always``."""
    if sys.stderr is not None and (always or sys.stderr.isatty()):
        print(f"wball: {said}", file=sys.stderr, flush=True)
