"""How far an attack has come, on a bar of its own or within the stage of a longer work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wball import progress


class Bar:
    """Images of finished batches, and the steps of the current one."""

    def __init__(self, shown: progress.Bar, images: int, steps: int) -> None:
        self._shown, self._images, self._steps = shown, max(1, images), max(1, steps)
        self._start, self._size, self._step = 0, 0, 0

    def batch(self, start: int, size: int) -> None:
        """A batch of ``size`` images begins behind ``start`` finished ones."""
        self._start, self._size, self._step = start, size, 0

    def step(self, active: int) -> None:
        """One gradient step of ``active`` images."""
        self._step += 1
        self._shown.within(
            (self._start + self._size * min(1.0, self._step / self._steps)) / self._images
        )


@contextmanager
def bar(name: str, images: int, steps: int, show: bool) -> Iterator[Bar | None]:
    """Progress of ``steps`` steps on ``images`` images; ``None`` where nobody looks."""
    if show:
        with progress.bar(name, images, "of the images") as shown:
            shown.stage(images, name)
            yield Bar(shown, images, steps)
    else:
        outer = progress.around()
        yield None if outer is None else Bar(outer, images, steps)
