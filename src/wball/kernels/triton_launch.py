"""Triton kernels that are compiled once for all batches."""

# mypy: ignore-errors
from __future__ import annotations

import inspect
from collections.abc import Callable

import triton


def kernel(*plain: str) -> Callable[[Callable[..., None]], triton.JITFunction]:
    """``triton.jit`` that does not compile again for other values of ``plain``, nor for other
    batches.

    Otherwise the addresses of a batch's tensors would select between versions that differ in
    nothing.
    """

    def wrap(function: Callable[..., None]) -> triton.JITFunction:
        names = inspect.signature(function).parameters
        addresses = [name for name in names if name.endswith(("_ptr", "_out"))]
        return triton.jit(
            function, do_not_specialize=plain, do_not_specialize_on_alignment=addresses
        )

    return wrap
