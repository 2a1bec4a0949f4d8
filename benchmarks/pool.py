"""Rows of a table that are measured several at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any, TypeVar

Task = TypeVar("Task", bound=tuple[Any, ...])
Row = dict[str, Any]


def attempts(
    measure: Callable[..., Row], tasks: Sequence[Task], processes: int
) -> Iterator[tuple[Task, Row | str]]:
    """``measure(*task)`` of each task, as they are ready, or what went wrong with it: the others go on.

    Processes other than this one import ``measure`` anew, so it must have a name in a module, or be a
    :func:`functools.partial` of such a function.
    """
    attempt = partial(_attempt, measure)
    if processes == 1:
        yield from ((task, attempt(*task)) for task in tasks)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(attempt, *task): task for task in tasks}
        yield from ((running[done], done.result()) for done in as_completed(running))


def _attempt(measure: Callable[..., Row], *task: Any) -> Row | str:
    try:
        return measure(*task)
    except Exception as error:  # noqa: BLE001  (whatever a strange model raises, the other rows are wanted)
        return f"{type(error).__name__}: {error}"
