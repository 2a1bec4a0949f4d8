"""The time at which solvers stop and return the best result so far."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Deadline:
    """A time ``seconds`` from now; never by default."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.end

    def put_off(self, seconds: float) -> None:
        """Move the deadline: compilation time is excluded."""
        self.end += seconds

    @contextmanager
    def flag(self) -> Iterator[NDArray[Any]]:
        """An array of one number, which becomes 1 at the deadline. Compiled loops have no clock and
        read it."""
        stop = np.zeros(1, dtype=np.int64)
        if math.isinf(self.end):
            yield stop
            return
        timer = Timer(self.end - time.monotonic(), stop.fill, (1,))
        timer.daemon = True
        timer.start()
        try:
            yield stop
        finally:
            timer.cancel()
