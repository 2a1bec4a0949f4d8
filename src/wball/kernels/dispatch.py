"""Which kernel serves an operation, and how a compiled one is run: in threads, on flat images.

The inner loops exist in several versions, each with the same signature. Solvers ask for an
operation; the answer is the first kernel made for the images' device that says it can serve them.
The environment variable ``WBALL_KERNEL`` asks for one kernel instead of ``auto``, and a call that
this kernel cannot serve raises and says why.

A kernel is a module with a function named like its operation. It may have ``why_not(x, moves) ->
str | None``: the reason it must refuse such images, or ``None``. Modules are imported when they are
first asked for: neither numba nor triton slows ``import wball``.

Compiled loops work on *flat* images: cropped to the box around their mass, widened by the reach of
the moves, with contiguous channels. The margins are wide enough that a move is a constant shift of
the whole flat image, so that every inner loop runs over contiguous numbers and vectorises. Where
moves change the channel, they have room for empty channels before and after the image. The black
frame of a digit costs nothing.
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball.cost import Moves, StencilMoves

KERNELS = {"triton": "triton", "cpu": "cpu", "torch": "reference"}
"""Name of a kernel -> its file in the package of each operation. ``torch`` serves any images."""

OPERATIONS = {
    operation: {name: f"wball.kernels.{operation}.{file}" for name, file in KERNELS.items()}
    for operation in (
        "entropic_plan",
        "projected_sinkhorn",
        "proximal_newton",
        "row_maximum",
    )
}
"""Operation -> name of a kernel -> its module."""

AUTOMATIC = {"cpu": ("cpu", "torch"), "cuda": ("triton", "cpu", "torch")}
"""Device -> what ``auto`` tries, in this order. A ``cpu`` kernel that accepts images of a GPU works
on the host."""

WORTHWHILE = 200_000
"""Moves of work below which another thread costs more than it saves."""

PARTS_PER_THREAD = 4
"""Images differ in the steps they need: smaller parts even that out."""

PART = 32
"""Flat images per piece of work: their float64 copies are all the memory that grows with the
images' size."""

GROUP = 4
"""Moves a pass, and moves a ring is filled up to with moves of weight 0."""


class KernelError(RuntimeError):
    """``WBALL_KERNEL`` requests a kernel that does not exist or does not support the call."""


def requested() -> str:
    """The value of ``WBALL_KERNEL``: the name of a kernel, or ``auto``."""
    name = os.environ.get("WBALL_KERNEL", "").strip().lower() or "auto"
    if name not in ("auto", *KERNELS):
        raise KernelError(
            f"WBALL_KERNEL={name!r} is not a kernel; use one of auto, {', '.join(KERNELS)}"
        )
    return name


def choose(operation: str, x: Tensor, moves: Moves | None = None) -> str:
    """The name of the kernel to use for these images."""
    name = requested()
    if name != "auto":
        reason = why_not(operation, name, x, moves)
        if reason is not None:
            raise KernelError(
                f"WBALL_KERNEL={name} does not support this call: {reason}; "
                "unset it or use another kernel"
            )
        return name
    for name in AUTOMATIC.get(x.device.type, AUTOMATIC["cpu"]):
        module = OPERATIONS[operation][name]
        tried = module in _loaded
        if why_not(operation, name, x, moves) is None:
            return name
        if not tried and isinstance(_loaded[module], str):
            reason = f"the {name} kernel cannot be loaded, a slower one is used: {_loaded[module]}"
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return "torch"


def why_not(
    operation: str, name: str, x: Tensor | None = None, moves: Moves | None = None
) -> str | None:
    """The reason why this kernel does not support such images (without images: cannot run here at
    all), or ``None``."""
    try:
        module = load(operation, name)
    except KernelError as error:
        return str(error)
    if x is None:
        return None
    usual = _why_not_compiled if name == "cpu" else lambda *_: None
    refuses: Callable[[Tensor, Moves | None], str | None] = getattr(module, "why_not", usual)
    return refuses(x, moves)


_loaded: dict[str, ModuleType | str] = {}


def load(operation: str, name: str) -> ModuleType:
    """The kernel's module."""
    path = OPERATIONS[operation][name]
    if path not in _loaded:
        try:
            _loaded[path] = importlib.import_module(path)
        except (ImportError, OSError, RuntimeError) as error:
            _loaded[path] = f"{type(error).__name__}: {error}"
    module = _loaded[path]
    if isinstance(module, str):
        raise KernelError(module)
    return module


def _why_not_compiled(x: Tensor, moves: Moves | None) -> str | None:
    """The reason why compiled loops do not support such images, or ``None``; kernels may have
    further reasons."""
    if not isinstance(moves, StencilMoves | None):
        return "only the torch kernel supports matrix costs"
    if x.device.type != "cpu":
        return f"the images are on {x.device}, this kernel runs on the CPU"
    if x.dtype not in (torch.float32, torch.float64):
        return f"the images are {x.dtype}, this kernel takes float32 or float64"
    return None


_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def split(
    batch: int, work: Callable[[int, int], None], entries: int, most: int | None = None
) -> None:
    """``work(start, stop)`` over the batch on as many threads as torch uses, at most ``most``
    images at a time. An image is worth ``entries`` moves."""
    count = min(torch.get_num_threads(), batch, 1 + batch * entries // WORTHWHILE)
    parts = min(batch, count * PARTS_PER_THREAD if count > 1 else 1)
    parts = max(parts, -(-batch // (most or batch or 1)))
    edges = [batch * i // parts for i in range(parts + 1)] if parts else []
    if count <= 1:
        for start, stop in pairwise(edges):
            work(start, stop)
        return
    running = [_executor(count).submit(work, start, stop) for start, stop in pairwise(edges)]
    for result in running:
        result.result()


def _executor(count: int) -> ThreadPoolExecutor:
    """The thread pool of this process: threads do not survive a fork."""
    global _pool
    if _pool is None or _pool[:2] != (os.getpid(), count):
        _pool = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="wball"))
    return _pool[2]


class FlatMoves(NamedTuple):
    """The moves for compiled loops, grouped by ring; rings are padded with moves that carry no
    mass."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    channels: NDArray[np.int64]
    fee: NDArray[np.float64]  # what each move costs; inf for moves that only fill up a ring
    fee_back: NDArray[np.float64]  # of the reverse move, inf if there is none
    ring_cost: NDArray[np.float64]
    ring: NDArray[np.int64]  # where each ring begins, and where the last ends
    reach: tuple[int, int, int]  # rows, columns and channels that a move goes at most

    def memory(self, lines: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Zeros for ``lines`` flat images and one per ring: each has room for any crop of an image
        of this shape and for its margins."""
        _, channels, height, width = shape
        rows, columns, over = self.reach
        stride = width + 2 * columns
        plane = (height + 2 * rows) * stride
        length = (channels + 2 * over) * plane + 2 * (rows * stride + columns)
        return np.zeros((lines + self.ring_cost.size, length))


@lru_cache(maxsize=64)
def flat_moves(moves: StencilMoves) -> FlatMoves:
    """The moves as arrays, made once."""
    table: list[tuple[int, int, int, float, float]] = []
    edges = [0]
    for ring in moves.rings_apart:
        for k in ring:
            reverse = moves.reverse[k]
            table.append((*moves[k], math.inf if reverse is None else moves.costs[reverse]))
        table += [(0, 0, 0, math.inf, math.inf)] * (-len(ring) % GROUP)
        edges.append(len(table))
    rows, columns, channels, *fees = zip(*table, strict=True)
    costs = [moves.costs[ring[0]] for ring in moves.rings_apart]
    fee, back, ring_cost = (np.asarray(part, dtype=np.float64) for part in (*fees, costs))
    places = np.asarray(rows), np.asarray(columns), np.asarray(channels)
    return FlatMoves(*places, fee, back, ring_cost, np.asarray(edges), moves.radius)
