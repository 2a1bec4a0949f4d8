"""Transposed convolutions, written in two ways."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from wball.input_sets import rows


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1)])
def test_folding_is_a_transposed_convolution(stride: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn((5, 3, 4, 6), dtype=torch.float64, generator=draw)
    weight = torch.randn((3, 7, 4, 3), dtype=torch.float64, generator=draw)
    expected = F.conv_transpose2d(a, weight, stride=stride)
    assert torch.allclose(rows.folded(a, weight, stride), expected, atol=1e-12)
    monkeypatch.setattr(rows, "FOLDED", 7 * 4 * 3 * 4 * 6 * 2)  # two at a time
    assert torch.allclose(rows.folded(a, weight, stride), expected, atol=1e-12)
