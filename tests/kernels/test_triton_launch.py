"""Launching again does what it would if Triton looked at all arguments, in its interpreter or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from wball.kernels.triton_launch import kernel

DEVICE = os.environ.get("WBALL_TEST_DEVICE", "cpu")  # tests/conftest.py asks for the interpreter on a CPU


@kernel("plain")
def _line_kernel(x_ptr, y_out, slope, plain, SIZE: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, SIZE)
    value = tl.load(x_ptr + index) * slope + plain
    tl.store(y_out + index, -value if BACK else value)


def test_triton_launches_tell_apart_whatever_is_compiled_apart() -> None:
    """Types, numbers that are 1, multiples of 16 or wider than 32 bits, and constants; twice, in two orders."""
    single, double = torch.float32, torch.float64
    cases = [
        (single, 0, 1, 3, False), (single, 1, 1, 3, False), (single, 0, 16, 3, False), (single, 0, 17, 3, False),
        (single, 0, 2.5, 3, False), (single, 0, 2**33, 3, False), (single, 0, 1, 2**33, False), (single, 0, 1, 3, True),
        (double, 0, 1, 3, False), (double, 1, 2.5, 3, True),
    ]  # fmt: skip
    for dtype, start, slope, plain, back in (*cases, *reversed(cases)):
        x = torch.arange(10, device=DEVICE).to(dtype)[start : start + 8]  # nothing depends on where that is in memory
        y = torch.zeros_like(x)
        _line_kernel[(1,)](x, y, slope, plain, SIZE=8, BACK=back, num_warps=1)
        line = x.double() * slope + plain
        torch.testing.assert_close(y.double(), -line if back else line, rtol=1e-6, atol=0.0)
