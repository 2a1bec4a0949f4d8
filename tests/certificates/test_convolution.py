"""Transposed convolutions: one matrix product is the same sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from wball.certificates import graph


@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (4, 5)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("count", [0, 5, 200])
def test_every_way_is_the_same_sum(
    stride: tuple[int, int], dilation: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small maps are one product, few are folded, here two at a time."""
    monkeypatch.setattr(graph, "FOLDED", 7 * 4 * 3 * 4 * 6 * 2)
    draw = torch.Generator().manual_seed(0)
    a = torch.randn((count, 3, 4, 6), dtype=torch.float64, generator=draw).requires_grad_()
    weight = torch.randn((3, 7, 4, 3), dtype=torch.float64, generator=draw)
    expected = F.conv_transpose2d(a, weight, stride=stride, dilation=dilation)
    found = graph.transposed(a, weight, stride, dilation)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(each.square().sum(), a)[0] for each in (found, expected)]
    torch.testing.assert_close(*slopes)
