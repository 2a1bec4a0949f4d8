"""The bar that long attacks show on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """How far an attack has come: images of finished batches, and the steps of the current one."""

    def __init__(self, display: Progress, task: TaskID, steps: int) -> None:
        self._display, self._task, self._steps = display, task, steps
        self._start, self._size, self._step = 0, 0, 0

    def batch(self, start: int, size: int) -> None:
        """A batch of ``size`` images begins behind ``start`` finished ones."""
        self._start, self._size, self._step = start, size, 0

    def step(self, active: int) -> None:
        """One gradient step of ``active`` images."""
        self._step += 1
        done = self._start + self._size * min(1.0, self._step / self._steps)
        self._display.update(self._task, completed=done, description=f"{active} of {self._size} withstand")


@contextmanager
def bar(name: str, images: int, steps: int) -> Iterator[Bar]:
    """A bar for ``steps`` steps on ``images`` images, which vanishes when it is done."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as display:
        yield Bar(display, display.add_task(name, total=images), steps)
