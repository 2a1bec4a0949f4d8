"""Which kernel serves an operation: the inner loops exist in several versions, each with the same
signature.

:data:`OPERATIONS` is the whole register. Solvers ask for an operation; the answer is the first
kernel made for the images' device that says it can serve them. The environment variable
``WBALL_KERNEL`` asks for one kernel instead of ``auto``, and a call that this kernel cannot serve
raises and says why.

A kernel is a module with a function named like its operation. Unless it serves any images, it also
has ``why_not(x, moves) -> str | None``: the reason it must refuse such images, or ``None``. A new
kernel touches its own module and one line of the table. Modules are imported when they are first
asked for: neither numba nor triton slows ``import wball``.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from wball.moves import Moves

KERNELS = ("triton", "cpu", "torch")
"""The names of kernels. ``torch`` has every operation and serves any images."""


def _modules(operation: str, kernels: tuple[str, ...] = KERNELS) -> dict[str, str]:
    files = {name: "reference" if name == "torch" else name for name in kernels}
    return {name: f"wball.kernels.{operation}.{file}" for name, file in files.items()}


OPERATIONS: dict[str, dict[str, str]] = {
    "entropic_plan": _modules("entropic_plan"),
    "projected_sinkhorn": _modules("projected_sinkhorn"),
    "proximal_newton": _modules("proximal_newton"),
    "linear_maximum": _modules("linear_maximum"),
    "row_maximum": _modules("row_maximum"),
}
"""Operation -> name of a kernel -> its module."""

AUTOMATIC = {"cpu": ("cpu", "torch"), "cuda": ("triton", "cpu", "torch")}
"""Device -> what ``auto`` tries, in this order. A ``cpu`` kernel that accepts images of a GPU works
on the host."""

NEVER_READS = frozenset({"triton"})
"""Kernels that leave all their decisions to the GPU, so that the host waits for nothing."""


class KernelError(RuntimeError):
    """``WBALL_KERNEL`` asks for a kernel that does not exist or cannot serve the call."""


def requested() -> str:
    """What ``WBALL_KERNEL`` asks for: the name of a kernel, or ``auto``."""
    name = os.environ.get("WBALL_KERNEL", "").strip().lower() or "auto"
    if name != "auto" and not any(name in kernels for kernels in OPERATIONS.values()):
        raise KernelError(
            f"WBALL_KERNEL={name!r} is not a kernel; use one of auto, {', '.join(KERNELS)}"
        )
    return name


def choose(operation: str, x: Tensor, moves: Moves | None = None) -> str:
    """The name of the kernel that serves these images, or these maps where an operation knows no
    moves.

    A kernel need not have every operation. Where the one asked for runs on these images' device but
    has no version of this operation, torch serves.
    """
    name = requested()
    if name != "auto":
        has = name in OPERATIONS[operation]
        # Without this operation, whether the kernel runs here at all is a question of its other
        # operations.
        reason = (
            why_not(operation, name, x, moves)
            if has
            else why_not("entropic_plan", name, x[:0].float(), moves)
        )
        if reason is not None:
            raise KernelError(
                f"WBALL_KERNEL={name} cannot serve this call: {reason}; "
                "unset it or use another kernel"
            )
        return name if has else "torch"
    for name in AUTOMATIC.get(x.device.type, AUTOMATIC["cpu"]):
        if name not in OPERATIONS[operation]:
            continue
        module = OPERATIONS[operation][name]
        tried = module in _loaded
        if why_not(operation, name, x, moves) is None:
            return name
        if not tried and isinstance(_loaded[module], str):
            reason = f"the {name} kernel cannot be loaded, a slower one is used: {_loaded[module]}"
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return "torch"


def home(name: str, x: Tensor) -> torch.device:
    """Where this kernel works on these images: the compiled loops on the host, all others where the
    images are."""
    return torch.device("cpu") if name == "cpu" else x.device


def successor(operation: str, name: str, x: Tensor, moves: Moves) -> str | None:
    """The fallback kernel for unsolved images. Only kernels that cannot check their progress need
    one."""
    if name not in NEVER_READS:
        return None
    return "cpu" if why_not(operation, "cpu", x, moves) is None else "torch"


def why_not(
    operation: str, name: str, x: Tensor | None = None, moves: Moves | None = None
) -> str | None:
    """Why this kernel cannot serve such images (without images: cannot run here at all), or
    ``None``."""
    try:
        module = load(operation, name)
    except KernelError as error:
        return str(error)
    if x is None:
        return None
    refuses: Callable[[Tensor, Moves | None], str | None] | None = getattr(module, "why_not", None)
    return None if refuses is None else refuses(x, moves)


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
