"""Subsets of an input set of transport plans."""

from __future__ import annotations

import torch

from wball import WassersteinBall


def test_a_part_lists_its_pixels_in_the_order_of_the_whole() -> None:
    """What was listed pixel by pixel for all images stays in step with the images that are left."""
    x = torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    x[0, 0, :3, :3], x[1, 0, 4, :3], x[2, 0, 5, 5] = 0.5, 0.5, 1.0
    whole = WassersteinBall(0.1).input_set(x)
    assert whole.active is not None and whole.active.shape[2] == 9
    index = torch.tensor([2, 1])
    part = whole.take(index)
    assert part.active is not None
    assert torch.equal(part.active, whole.active[index])
    finer = whole.finer(5.0).active
    assert finer is not None and torch.equal(finer, whole.active)
