"""Triton kernels that are launched often: compiled once for all batches, and launched again without a second look.

A launch by Triton itself takes longer on the host than the kernels of short calls take on the device: it looks at each
argument for what it could compile anew, and compares every constant of the module with what it was.
"""

# mypy: ignore-errors
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor


class Launched:
    """A kernel that remembers what was compiled for which arguments: types, whole numbers that matter, and constants.

    Args:
        made: the kernel.
        plain: names of whole numbers for which nothing is compiled anew.
    """

    def __init__(self, made: triton.JITFunction, plain: tuple[str, ...]) -> None:
        parameters = inspect.signature(made.fn).parameters
        self._made, self._names = made, tuple(parameters)
        self._plain = tuple(name in plain for name in parameters)
        self._compiled: dict[tuple[object, ...], object] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: object, **given: object) -> None:
        kinds = (_kind(value, plain) for value, plain in zip(args, self._plain, strict=False))
        key = (torch.cuda.current_device(), *kinds, *given.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._made[grid](*args, **given)
        else:
            compiled[(*grid, 1, 1)[:3]](*args, *(given[name] for name in self._names[len(args) :]))


def _kind(value: object, plain: bool) -> object:
    """What Triton compiles anew for; where tensors lie in memory is none of it (:func:`kernel`)."""
    if isinstance(value, Tensor):
        return value.dtype
    if type(value) is int:
        return value.bit_length() < 32 if plain else value
    return type(value)


def kernel(*plain: str) -> Callable[[Callable[..., None]], Launched | triton.JITFunction]:
    """``triton.jit`` that does not compile again for other values of ``plain``, nor for other batches.

    Where a batch puts its tensors in memory would else decide between versions that differ in nothing.
    """

    def wrap(function: Callable[..., None]) -> Launched | triton.JITFunction:
        addresses = [name for name in inspect.signature(function).parameters if name.endswith(("_ptr", "_out"))]
        made = triton.jit(function, do_not_specialize=plain, do_not_specialize_on_alignment=addresses)
        if not isinstance(made, triton.JITFunction):  # in the interpreter
            return made
        made.add_pre_run_hook(lambda *_, **__: _settle(made))
        return Launched(made, plain)

    return wrap


def _settle(made: triton.JITFunction) -> None:
    """Before the first launch: the key, and no more constants to compare, which never change."""
    if made.hash is None:
        settle_key(made)
        made.used_global_vals.clear()


def settle_key(function: triton.JITFunction) -> None:
    """Make the key under which a kernel is kept on disk, after those of all functions that it calls.

    Triton 3.6 puts the constants of a called function into the key if somebody else has called it before, and
    leaves them out if not: another process that used another kernel first did not find what was compiled.
    """
    if function.hash is None:
        for name in function.fn.__code__.co_names:
            called = function.fn.__globals__.get(name)
            if isinstance(called, triton.JITFunction):
                settle_key(called)
        function.cache_key  # noqa: B018, made when it is asked for
