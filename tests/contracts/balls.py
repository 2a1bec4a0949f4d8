"""Balls of every kind, and images in each: the first axis of all contracts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball import DenseCost, GridCost, LinfBall, StencilCost, WassersteinBall

HEIGHT, WIDTH = 4, 5
ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))
"""Not symmetric; some moves have no way back."""
FREE = StencilCost(((1.0, 2.0, 1.0), (1.0, 0.0, 0.0), (1.0, 2.0, 1.0)))
"""One step to the right costs nothing."""
LINE = DenseCost((torch.arange(20.0)[:, None] - torch.arange(20.0)).abs())

WASSERSTEIN: dict[str, WassersteinBall] = {
    "grid": WassersteinBall(0.2),
    "small window, squares": WassersteinBall(0.3, GridCost(3, 2.0)),
    "wider than the image": WassersteinBall(0.1, GridCost(15)),
    "one way": WassersteinBall(0.1, ONE_WAY),
    "moves across channels": WassersteinBall(0.2, GridCost(3, channel_cost=0.6)),
    "free moves": WassersteinBall(0.1, FREE),
    "matrix": WassersteinBall(0.4, LINE),
    "absolute, no box": WassersteinBall(2.0, mass="absolute", box=None),
    "narrow box": WassersteinBall(0.2, GridCost(3), box=(0.25, 0.75)),
    "nothing can move": WassersteinBall(0.2, GridCost(1)),
    "no radius": WassersteinBall(0.0, GridCost(3)),
    "more than can be spent": WassersteinBall(9.0, GridCost(3)),
    "a radius for each image": WassersteinBall(torch.tensor([0.0, 0.02, 0.3, 0.1, 0.5, 5.0])),
}
BALLS = {**WASSERSTEIN, "linf": LinfBall(0.1), "linf, no box": LinfBall(0.1, box=None)}


def images(ball: WassersteinBall | LinfBall, channels: int = 1, seed: int = 0) -> Tensor:
    """Six images in the ball's box: any pixels, empty and full ones, one lit pixel, none, all, and
    one whose pixels rounding left outside the box."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand((6, channels, HEIGHT, WIDTH), generator=random)
    some = torch.rand(x.shape, generator=random)
    x[1] = torch.where(some[1] < 0.3, 0.0, torch.where(some[1] > 0.7, 1.0, x[1]))
    x[2:4] = 0.0
    x[2, :, 2, 3] = 1.0
    x[4] = 1.0
    x[5] = torch.where(some[5] < 0.3, -3e-8, torch.where(some[5] > 0.7, 1 + 3e-8, x[5]))
    if ball.box is None:
        return x.clamp(min=0)
    lo, hi = ball.box
    return lo + (hi - lo) * x
