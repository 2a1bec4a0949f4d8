"""Transposed convolutions: every way of writing them is the same sum."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from wball.cost import DenseCost
from wball.kernels import dispatch
from wball.kernels.transposed_convolution import reference, transposed_convolution

STRIDES = [(1, 1), (2, 2), (2, 1), (4, 5)]


def _maps(share: float, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn((5, 3, 4, 6), dtype=dtype, generator=draw)
    a *= torch.rand(a.shape, generator=draw) < share
    return a, torch.randn((3, 7, 4, 3), dtype=dtype, generator=draw)


@pytest.mark.parametrize("stride", STRIDES)
def test_folding_is_a_transposed_convolution(
    stride: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, weight = _maps(1.0)
    expected = F.conv_transpose2d(a, weight, stride=stride)
    assert torch.allclose(reference.folded(a, weight, stride), expected, atol=1e-12)
    monkeypatch.setattr(reference, "FOLDED", 7 * 4 * 3 * 4 * 6 * 2)  # two at a time
    assert torch.allclose(reference.folded(a, weight, stride), expected, atol=1e-12)


@pytest.mark.parametrize("kernel", dispatch.OPERATIONS["transposed_convolution"])
@pytest.mark.parametrize("window", [(0, 0, 9, 8), (2, 1, 4, 3), (-3, -2, 20, 25), (5, 2, 9, 9)])
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_every_kernel_cuts_the_whole_result_to_the_window(
    kernel: str, window: tuple[int, int, int, int], stride: tuple[int, int], share: float
) -> None:
    a, weight = _maps(share)
    whole = F.conv_transpose2d(a, weight, stride=stride)
    around = F.pad(whole, (40, 40, 40, 40))
    top, left, height, width = window
    expected = around[..., 40 + top :, 40 + left :][..., :height, :width]
    found = dispatch.load("transposed_convolution", kernel).transposed_convolution(
        a, weight, stride, window
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(transposed_convolution(a[:0], weight, stride, window), expected[:0])


@pytest.mark.parametrize("name", ["auto", "cpu", "torch"])
def test_every_request_is_served_with_gradients_and_in_either_precision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", name)
    a, weight = _maps(0.5)
    out = transposed_convolution(a.requires_grad_(), weight, (2, 2), (0, 0, 10, 13))
    assert torch.autograd.grad(out.sum(), a)[0].shape == a.shape
    single = transposed_convolution(a.detach().float(), weight.float(), (2, 2), (0, 0, 10, 13))
    torch.testing.assert_close(single, out.detach().float())


def test_a_kernel_is_chosen_without_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = _maps(0.5)
    assert dispatch.choose("transposed_convolution", a) == "cpu"
    matrix = DenseCost(1 - torch.eye(24)).arcs(4, 6, a)
    assert dispatch.why_not("entropic_plan", "cpu", a, matrix) is not None, (
        "matrix costs are refused as before"
    )
    pytest.importorskip("triton")
    monkeypatch.setenv("WBALL_KERNEL", "triton")  # which has no such operation: torch serves
    there = a.to(
        "cuda" if torch.cuda.is_available() else "cpu"
    )  # where Triton runs: without a GPU it is interpreted
    assert dispatch.choose("transposed_convolution", there) == "torch"


def test_products_in_parts_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimised slopes on a GPU failed: parts of a tensor were written in place."""
    monkeypatch.setattr(reference, "FOLDED", 1)
    a, weight = (
        torch.rand(3, 2, 4, 4, dtype=torch.float64),
        torch.rand(2, 3, 5, 5, dtype=torch.float64),
    )
    slopes = []
    for folded in (True, False):
        given = a.clone().requires_grad_(True)
        out = (
            reference.folded(given, weight, (2, 2))
            if folded
            else F.conv_transpose2d(given, weight, stride=2)
        )
        slopes += torch.autograd.grad(out.square().sum(), given)
    assert torch.allclose(slopes[0], slopes[1])
