"""Triton kernels that are launched often: compiled once for all batches, under keys that every process finds again."""

# mypy: ignore-errors
from __future__ import annotations

import inspect
from collections.abc import Callable

import triton


def kernel(*plain: str) -> Callable[[Callable[..., None]], triton.JITFunction]:
    """``triton.jit`` that does not compile again for other values of ``plain``, nor for other batches.

    Where a batch puts its tensors in memory would else decide between versions that differ in nothing.
    """

    def wrap(function: Callable[..., None]) -> triton.JITFunction:
        addresses = [
            name
            for name in inspect.signature(function).parameters
            if name.endswith(("_ptr", "_out"))
        ]
        made = triton.jit(
            function, do_not_specialize=plain, do_not_specialize_on_alignment=addresses
        )
        if isinstance(made, triton.JITFunction):  # not in the interpreter
            made.add_pre_run_hook(lambda *_, **__: _settle(made))
        return made

    return wrap


def _settle(made: triton.JITFunction) -> None:
    """Before the first launch. At every other Triton would compare all constants of the module one by one, which takes
    as long as the launch itself; they do not change."""
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
