"""A small model that attacks can break, and an independent check that what they return lies in the ball."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ot
import pytest
import torch
from torch import Tensor, nn

from wball.ball import LinfBall, WassersteinBall
from wball.cost import DenseCost

Valid = Callable[[WassersteinBall | LinfBall, Tensor, Tensor], None]


def _distance(ball: WassersteinBall, x: Tensor, z: Tensor) -> float:
    """Exact transport cost of one image: POT on the cost matrix, forbidden moves at a price no plan would pay."""
    height, width = x.shape[-2:] if x.ndim == 3 else (1, x.shape[-1])
    if isinstance(ball.cost, DenseCost):
        matrix = ball.cost.matrix.numpy().copy()
    else:
        matrix = np.full((height * width, height * width), np.inf)
        for dr, dc, cost in ball.cost.moves(height, width):
            for r in range(max(0, -dr), min(height, height - dr)):
                for c in range(max(0, -dc), min(width, width - dc)):
                    matrix[r * width + c, (r + dr) * width + c + dc] = cost
    matrix[~np.isfinite(matrix)] = 1e4
    total = 0.0
    for a, b in zip(
        x.double().reshape(-1, height * width), z.double().reshape(-1, height * width), strict=True
    ):
        source, end = a.numpy(), b.numpy()
        if source.sum() > 0:
            i, j = source > 0, end > 0
            cost = np.ascontiguousarray(matrix[np.ix_(i, j)])
            total += float(ot.emd2(source[i], end[j] * (source.sum() / end[j].sum()), cost))
    return total


@pytest.fixture
def check_valid() -> Valid:
    """Mass per channel, box and exact distance, to the tolerances that make a point valid."""

    def check(ball: WassersteinBall | LinfBall, x: Tensor, z: Tensor) -> None:
        assert z.shape == x.shape and torch.isfinite(z).all()
        if ball.box is not None:
            lo, hi = ball.box
            assert float(z.min()) >= lo - 1e-6 and float(z.max()) <= hi + 1e-6
        if isinstance(ball, LinfBall):
            eps = torch.as_tensor(ball.eps).expand(x.shape[0])
            assert ((z - x).abs().flatten(1).amax(1) <= eps + 1e-6).all()
            return
        mass = x.double().flatten(1).sum(1)
        drift = (
            (z.double() - x.double()).flatten(2).sum(2)
            if x.ndim == 4
            else (z - x).double().sum(1, keepdim=True)
        )
        assert (drift.abs().amax(1) <= 1e-5 * mass + 1e-12).all()
        for i, budget in enumerate(ball.budget(x).tolist()):
            assert _distance(ball, x[i], z[i]) <= budget * (1 + 1e-4) + 1e-7 * float(mass[i]), (
                f"image {i}"
            )

    return check


class SmallNet(nn.Module):
    """A convolution, a dropout that must not act, and a linear layer; normalisation inside."""

    def __init__(self, channels: int = 1, classes: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6 * 64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return 4 * self.head(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


@pytest.fixture
def net() -> SmallNet:
    torch.manual_seed(3)
    return SmallNet().eval()


@pytest.fixture
def images() -> Tensor:
    """Ten 8 x 8 images: strokes with empty and full pixels, one all black, one all white."""
    torch.manual_seed(4)
    x = torch.rand(10, 1, 8, 8)
    x = torch.where(x < 0.4, torch.zeros_like(x), torch.where(x > 0.8, torch.ones_like(x), x))
    x[3], x[7] = 0.0, 1.0
    return x


@pytest.fixture
def labels(net: SmallNet, images: Tensor) -> Tensor:
    """What the model says, so that every image starts out right, but for one."""
    with torch.no_grad():
        y = net(images).argmax(1)
    y[5] = (y[5] + 1) % 5
    return y
