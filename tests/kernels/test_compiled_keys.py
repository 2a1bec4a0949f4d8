"""Keys of compiled kernels on disk are those of every other process, whatever ran there before."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from wball.kernels.triton_launch import settle_key

SOURCE = """
from triton import language as tl
from triton.runtime.jit import JITFunction as jit

TWICE = tl.constexpr(2)


@jit
def helper(value):
    return value * TWICE


@jit
def between(value):
    return helper(value)


@jit
def one_kernel(out_ptr):
    tl.store(out_ptr, between(1.0))


@jit
def other_kernel(out_ptr):
    tl.store(out_ptr, helper(3.0))
"""


def test_the_key_of_a_kernel_does_not_depend_on_what_ran_before(tmp_path: Path) -> None:
    """A process that projected first compiled for 12 s to draw samples, though another had done so before."""
    (tmp_path / "kernels.py").write_text(SOURCE)
    keys = []
    for order in (("one_kernel", "other_kernel"), ("other_kernel", "one_kernel")):
        spec = importlib.util.spec_from_file_location("kernels", tmp_path / "kernels.py")
        assert spec is not None and spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        for name in order:
            kernel: JITFunction = getattr(fresh, name)
            settle_key(kernel)
        keys.append((fresh.one_kernel.cache_key, fresh.other_kernel.cache_key))
    assert keys[0] == keys[1]
