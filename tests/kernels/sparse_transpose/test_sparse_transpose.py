"""Sparse transposed convolutions: every kernel computes the cells that matter, and no others."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from wball.kernels import dispatch
from wball.kernels.sparse_transpose import Geometry

LAYERS = {
    "stride 1": (3, 5, (7, 6), 3, (1, 1), (1, 1), (1, 1), 1),
    "stride 2": (2, 3, (8, 8), 3, (2, 2), (1, 1), (1, 1), 1),
    "groups and dilation": (4, 6, (9, 7), 3, (2, 1), (1, 0), (1, 2), 2),
    "a kernel that does not reach the border": (2, 2, (8, 7), 2, (3, 3), (0, 0), (1, 1), 1),
}


@pytest.mark.parametrize("kernel", dispatch.OPERATIONS["sparse_transpose"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_every_kernel_is_the_transposed_convolution_at_wanted_cells(
    kernel: str, name: str, share: float
) -> None:
    inner, outer, size, side, stride, padding, dilation, groups = LAYERS[name]
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn((outer, inner // groups, side, side), dtype=torch.float64, generator=draw)
    image = torch.zeros((1, inner, *size), dtype=torch.float64, requires_grad=True)
    after = F.conv2d(image, weight, None, stride, padding, dilation, groups)
    cell = (torch.rand(after.numel(), generator=draw) < share).nonzero()[:, 0]
    wanted = torch.rand(image.numel(), generator=draw) < share
    value = torch.randn((cell.shape[0], 11), dtype=torch.float64, generator=draw)
    geometry = Geometry(image.shape[1:], after.shape[1:], stride, padding, dilation, groups)
    found, at = dispatch.load("sparse_transpose", kernel).sparse_transpose(
        value, cell, weight, wanted, geometry
    )
    assert bool(wanted[at].all()) and bool((at.diff() > 0).all())
    for n in range(value.shape[1]):
        rows = (
            torch.zeros(after.numel(), dtype=torch.float64)
            .index_put((cell,), value[:, n])
            .view_as(after)
        )
        expected = torch.autograd.grad(after, image, rows, retain_graph=True)[0].flatten()
        elsewhere = expected.clone()
        elsewhere[at] = 0
        assert bool((elsewhere[wanted] == 0).all())
        torch.testing.assert_close(found[:, n], expected[at], rtol=1e-12, atol=1e-13)
