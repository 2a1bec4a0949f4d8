"""Triton kernels that are compiled once for all batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import triton
from torch import Tensor


def kernel(function: Callable[..., None]) -> triton.JITFunction:
    """``triton.jit`` that compiles again for other constants and types only.

    Otherwise Triton compiles versions for tensors at multiples of 16 bytes and for integers that
    are 1 or multiples of 16. Inside tuples this cannot be switched off. They therefore hold tensors
    that are :func:`aligned`, floats and booleans, which select nothing. Integers are arguments of
    their own.
    """
    names = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[n for n in names if not n.isupper()])


def aligned(values: Tensor) -> Tensor:
    """Contiguous values that start at a multiple of 16 bytes, as new tensors do. Slices may not."""
    values = values.contiguous()
    return values if values.data_ptr() % 16 == 0 else values.clone()
