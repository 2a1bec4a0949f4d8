"""Transposed convolutions: every way of writing them is the same sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from wball.certificates import convolution

STRIDES = [(1, 1), (2, 2), (2, 1), (4, 5)]


def maps(share: float, count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn((count, 3, 4, 6), dtype=torch.float64, generator=draw)
    a *= torch.rand(a.shape, generator=draw) < share
    return a, torch.randn((3, 7, 4, 3), dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("window", [(0, 0, 9, 8), (2, 1, 4, 3), (-3, -2, 20, 25), (5, 2, 9, 9)])
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("count", [0, 5, 200])
def test_the_whole_result_is_cut_to_the_window(
    window: tuple[int, int, int, int], stride: tuple[int, int], count: int
) -> None:
    """Few maps are folded, many small ones are one product."""
    a, weight = maps(0.5, count)
    around = F.pad(F.conv_transpose2d(a, weight, stride=stride), (40, 40, 40, 40))
    top, left, height, width = window
    expected = around[..., 40 + top :, 40 + left :][..., :height, :width]
    found = convolution.windowed(a, weight, stride, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("recorded", [True, False])
def test_folding_in_parts_has_gradients(
    stride: tuple[int, int], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimised slopes on a GPU failed: parts of a tensor were written in place."""
    a, weight = maps(1.0)
    expected = F.conv_transpose2d(a, weight, stride=stride)
    assert torch.allclose(convolution.folded(a, weight, stride), expected, atol=1e-12)
    monkeypatch.setattr(convolution, "FOLDED", 7 * 4 * 3 * 4 * 6 * 2)  # two at a time
    a.requires_grad_(recorded)
    found = convolution.folded(a, weight, stride)
    assert torch.allclose(found, expected, atol=1e-12)
    if recorded:
        slopes = [
            torch.autograd.grad(each.square().sum(), a)[0]
            for each in (found, F.conv_transpose2d(a, weight, stride=stride))
        ]
        assert torch.allclose(*slopes)
