"""A small model that attacks can break, and its images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from problems import Case


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


@pytest.fixture
def case(net: SmallNet, images: Tensor, labels: Tensor) -> Case:
    return Case(net, images, labels)
