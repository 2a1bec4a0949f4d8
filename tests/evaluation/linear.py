"""A linear model whose evaluation can be computed by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import wball

BALL = wball.WassersteinBall(0.4)
RADII = [0.1, 0.2, 0.4]


def problem(count: int = 12, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Blurry two-spot images, and a linear model that weighs the left half against the right one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 6, 6, generator=generator).square() * 0.8
    weight = torch.linspace(-1, 1, 6).repeat(6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-weight, weight]))
        model[1].bias.zero_()
    y = model(x).argmax(1)
    y[0] = 1 - y[0]  # one image that is wrong as it is
    return model.eval(), x, y


def attack(**changes: Any) -> wball.DualAveraging:
    return wball.DualAveraging(BALL, steps=8, **changes)
