"""Compiling loops with numba."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import codegen, compiler, event

from wball import progress


class FirstTime(event.Listener):
    """Announces the first compilation once. Cached loops are not compiled."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: Any) -> None:
        function = getattr(event.data.get("dispatcher"), "py_func", None)
        if not self._said and getattr(function, "__module__", "").startswith("wball."):
            self._said = True
            progress.notice(
                "compiling kernels, once per machine (about 15 s, more on a busy one) ..."
            )

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", FirstTime())


class _Part(codegen.JITCodeLibrary):
    """The code of an inner function, which is optimised and translated as a part of the outermost
    one. numba would do both here as well, and again in every caller on the way.

    The names that this replaces are numba's own, the same from 0.60 to 0.68."""

    codegen = property(lambda self: self)  # asked for :meth:`set_env`
    set_env = _optimize_functions = _optimize_final_module = lambda *_: None

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _Inner(compiler.Compiler):
    def __init__(self, typing, target, _, *rest):  # type: ignore[no-untyped-def]
        super().__init__(typing, target, _Part(target.codegen(), ""), *rest)


def compiled(*, inner: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` without the interpreter lock, with numpy's division, and cached on disk where
    that is possible.

    ``inner`` functions are called by compiled ones only and become part of their callers. A cached
    function is recompiled when any file of the kernels changes; pass settings of other modules
    as arguments. numba's own parallel loops are not used: their thread pools do not survive
    a fork and may not be entered twice.
    """
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

    def wrap(function: Callable[..., Any]) -> Any:
        if inner:
            return numba.njit(no_cpython_wrapper=True, pipeline_class=_Inner, **options)(function)
        try:
            loop = numba.njit(cache=True, **options)(function)
            index = loop._cache._cache_file  # which asks about the function's own file only
            index._source_stamp = (index._source_stamp, _stamp())
            index._load_index = partial(_cached, index._load_index)
        except (
            RuntimeError,
            AttributeError,
        ):  # no writable cache, or another layout of it in numba
            return numba.njit(**options)(function)
        return loop

    return wrap


def _cached(load: Callable[[], dict[Any, str]]) -> dict[Any, str]:
    """The cached versions of a loop; none if they use types that no longer exist."""
    try:
        return load()
    except (AttributeError, ImportError):
        return {}


@cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of all kernel files, because compiled loops include functions from
    several of them."""
    seen = ((path, path.stat()) for path in sorted(Path(__file__).parent.rglob("*.py")))
    return tuple((path.name, found.st_mtime_ns, found.st_size) for path, found in seen)


EXP = tuple(1.0 / math.factorial(k) for k in range(12, -1, -1))
"""Coefficients of the series of ``exp``, the highest power first; :data:`LOG` are those of a
polynomial for ``log``."""

LOG = (
    1.479819860511658591e-01,
    1.531383769920937332e-01,
    1.818357216161805012e-01,
    2.222219843214978396e-01,
    2.857142874366239149e-01,
    3.999999999940941908e-01,
    6.666666666666735130e-01,
)


@compiled(inner=True, fastmath={"contract", "nsz"})
def exp(t):  # type: ignore[no-untyped-def]
    """``exp`` from additions and multiplications alone, so that loops over it vectorise; relative
    error 3e-16."""
    u = min(max(t, -708.0), 709.0)
    shifted = (
        u * 1.4426950408889634 + 6755399441055744.0
    )  # 1.5 * 2^52: the last bits are the integer part
    n = shifted - 6755399441055744.0
    r = (u - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
    p = 0.0
    for coefficient in EXP:
        p = p * r + coefficient
    bits = np.int64(np.float64(shifted).view(np.int64) + 1023) << 52
    return p * np.int64(bits).view(np.float64) if t > -708.0 else 0.0


@compiled(inner=True, fastmath={"contract", "nsz"})
def log(t):  # type: ignore[no-untyped-def]
    """``log`` of a positive normal number, vectorised like :func:`exp`; relative error 3e-16."""
    # t = 2^k m with m within sqrt(2) of 1; log(m) = 2 artanh(s).
    bits = np.float64(t).view(np.int64)
    above = np.int64(bits - 0x3FE6A09E667F3BCD)
    k = np.int64((above >> 52) + 0x4338000000000000).view(np.float64) - 6755399441055744.0
    m = np.int64(bits - (above & -0x10000000000000)).view(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = 0.0
    for coefficient in LOG:
        p = p * z + coefficient
    half = 0.5 * f * f
    rest = s * (half + p * z) + k * 1.90821492927058770002e-10
    return k * 0.693147180369123816490 - ((half - rest) - f)
