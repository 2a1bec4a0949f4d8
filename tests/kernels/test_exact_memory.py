"""What the exact solver of a GPU keeps beside the plans."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from wball.kernels.proximal_newton.triton import _lists


def test_lists_of_moves_lie_in_the_memory_of_the_plans() -> None:
    """They were a fifth of what an exact call took."""
    flow = torch.zeros((3, 1, 25, 28, 28), dtype=torch.float64)
    staged = 30 * 30
    lists = _lists(flow, staged)
    assert (
        lists.data_ptr() == flow.data_ptr()
        and lists.stride(0) * lists.element_size() == flow[0].nbytes
    )
    assert lists.shape[1] >= 2 * 25 * staged, "two lists, with a halo"


def test_tiny_images_are_mostly_halo_and_get_lists_of_their_own() -> None:
    flow, staged = torch.zeros((3, 1, 25, 2, 2), dtype=torch.float64), 4 * 4
    lists = _lists(flow, staged)
    assert lists.data_ptr() != flow.data_ptr() and lists.shape[1] == 2 * 25 * staged
