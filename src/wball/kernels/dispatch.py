"""Kernels: the inner loops, each with the same signature as its readable version in torch.

The environment variable ``WBALL_KERNEL`` chooses: ``auto`` (default) takes the first kernel made for the images' device
that can serve the call; a name asks for that kernel, and a call it cannot serve raises and says why.

A kernel is a module with the functions of ``reference`` that it implements and with
``why_not(x, moves) -> str | None``, the reason it must refuse a call (``moves`` is ``None`` for a matrix of costs).
Modules are imported when they are first asked for: neither numba nor triton slows ``import wball``.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor

from wball.kernels.entropic_plan import reference
from wball.kernels.entropic_plan.reference import EntropicPlan, Move
from wball.moves import Moves, StencilMoves

__all__ = [
    "KERNELS",
    "EntropicPlan",
    "KernelError",
    "choose",
    "choose_path",
    "choose_projection",
    "entropic_plan",
    "entropic_plan_dense",
    "load",
    "projected_sinkhorn",
    "requested",
    "stencil",
    "why_not",
]

KERNELS = {
    "triton": "wball.kernels.triton",
    "cpu": "wball.kernels.entropic_plan.cpu",
    "torch": "wball.kernels.entropic_plan.reference",
}
"""Name -> module."""

AUTOMATIC = {"cpu": ("cpu",), "cuda": ("triton",)}
"""Device -> what ``auto`` tries before torch."""

ALIASES = {"": "auto", "numba": "cpu", "reference": "torch"}


class KernelError(RuntimeError):
    """``WBALL_KERNEL`` asks for a kernel that does not exist or cannot serve the call."""


def requested() -> str:
    """What ``WBALL_KERNEL`` asks for: the name of a kernel, or ``auto``."""
    given = os.environ.get("WBALL_KERNEL", "auto").strip().lower()
    name = ALIASES.get(given, given)
    if name != "auto" and name not in KERNELS:
        raise KernelError(f"WBALL_KERNEL={given!r} is not a kernel; use one of auto, {', '.join(KERNELS)}")
    return name


def why_not(name: str, x: Tensor | None = None, moves: Sequence[Move] | None = None) -> str | None:
    """Why kernel ``name`` cannot serve such images (without images: cannot run here at all), or ``None``."""
    try:
        module = load(name)
    except KernelError as error:
        return str(error)
    refuse = getattr(module, "why_not", None)
    return refuse(x, moves) if refuse is not None and x is not None else None


def choose(x: Tensor, moves: Sequence[Move] | None, operation: str = "entropic_plan") -> str:
    """The name of the kernel that serves these images (``moves=None`` stands for a matrix of costs).

    A kernel need not have every operation. Where the one asked for serves such images but has no version of its own,
    torch serves.
    """
    name = requested()
    if name != "auto":
        lacks = why_not(name) is None and not hasattr(load(name), operation)
        reason = why_not(name, x[:0].float() if lacks else x, moves)
        if reason is not None:
            raise KernelError(f"WBALL_KERNEL={name} cannot serve this call: {reason}; unset it or use another kernel")
        return "torch" if lacks else name
    for kernel in AUTOMATIC.get(x.device.type, ()):
        tried = kernel in _loaded
        if why_not(kernel, x, moves) is None and hasattr(load(kernel), operation):
            return kernel
        if not tried and isinstance(_loaded[kernel], str):
            slow = f"the {kernel} kernel cannot be loaded and a slower one serves instead: {_loaded[kernel]}"
            warnings.warn(slow, RuntimeWarning, stacklevel=2)
    return "torch"


def entropic_plan(
    x: Tensor, b: Tensor, budget: Tensor, moves: Sequence[Move], *args: Any, **kwargs: Any
) -> EntropicPlan:
    """The reference's function of this name by the kernel that serves ``x``; the result says which."""
    name = choose(x, moves)
    return replace(load(name).entropic_plan(x, b, budget, moves, *args, **kwargs), kernel=name)


def entropic_plan_dense(x: Tensor, *args: Any, **kwargs: Any) -> EntropicPlan:
    """:func:`wball.kernels.entropic_plan.reference.entropic_plan_dense`, for matrices of costs."""
    choose(x, None)
    return reference.entropic_plan_dense(x, *args, **kwargs)


def choose_path(x: Tensor, moves: Sequence[Move] | None) -> str:
    """The kernel that follows the exact path (:mod:`wball.kernels.entropic_path.reference`) of these images.

    For images on a GPU that is the host's: steps in float64 that differ from image to image are hundreds of small
    launches and read-backs in torch, and a few milliseconds of one core.
    """
    name = choose(x, moves, "follow_path")
    elsewhere = name == "torch" and requested() == "auto" and x.device.type != "cpu"
    return "cpu" if elsewhere and why_not("cpu", x.new_empty(0, device="cpu"), moves) is None else name


def choose_projection(x: Tensor, moves: Sequence[Move] | None) -> str:
    """The kernel that serves :func:`projected_sinkhorn` for these images."""
    name = choose(x, moves, "projected_sinkhorn")
    if name == "triton" and x[:1].numel() > load(name).MAX_VALUES:
        if requested() == name:
            raise KernelError(
                f"WBALL_KERNEL=triton cannot project images of over {load(name).MAX_VALUES} values; unset it"
            )
        return "torch"
    return name


def projected_sinkhorn(x: Tensor, w: Tensor, budget: Tensor, moves: Sequence[Move], *args: Any, **kwargs: Any) -> Any:
    """:func:`wball.kernels.projected_sinkhorn.reference.projected_sinkhorn` by the kernel that serves ``x``."""
    name = choose_projection(x, moves)
    module = importlib.import_module("wball.kernels.projected_sinkhorn.reference") if name == "torch" else load(name)
    return module.projected_sinkhorn(x, w, budget, moves, *args, **kwargs)


_loaded: dict[str, ModuleType | str] = {}


def load(name: str) -> ModuleType:
    """The kernel's module."""
    if name not in _loaded:
        try:
            _loaded[name] = importlib.import_module(KERNELS[name])
        except (ImportError, OSError, RuntimeError) as error:
            _loaded[name] = f"{type(error).__name__}: {error}"
    module = _loaded[name]
    if isinstance(module, str):
        raise KernelError(module)
    return module


def stencil(arcs: Moves) -> list[Move] | None:
    """The moves ``(dr, dc, cost)`` of a stencil cost; ``None`` for a matrix of costs."""
    if not isinstance(arcs, StencilMoves):
        return None
    return [(r, c, cost) for (r, c), cost in zip(arcs.offsets, arcs.cost.flatten().tolist(), strict=True)]
