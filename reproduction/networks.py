"""Networks that no bundled model needs: importing this module adds them to
:func:`wball.architectures`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.zoo.architectures import (
    ARCHITECTURES,
    CIFAR10_MEAN,
    CIFAR10_STD,
    Architecture,
    Normalized,
)


class PlainBlock(nn.Module):
    """``relu(conv(relu(conv(x))) + shortcut(x))`` without batch normalisation.

    A block that halves the image uses even kernels (4, and 2 in the shortcut), so that each pixel
    is read equally often. A fresh block is its shortcut, which copies channels (or their means over
    2 x 2 pixels). With random kernels, interval bounds would grow about 40 times wider per block,
    too wide for certified training to begin.
    """

    def __init__(self, inputs: int, outputs: int, halve: bool) -> None:
        super().__init__()
        stride = 2 if halve else 1
        self.conv1 = nn.Conv2d(inputs, outputs, 4 if halve else 3, stride=stride, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, stride, stride=stride)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        for layer in (self.conv2, self.shortcut):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        with torch.no_grad():
            self.shortcut.weight[range(outputs), [k % inputs for k in range(outputs)]] = (
                1 / stride**2
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class SmallResNet(nn.Module):
    """The small residual network of Wong et al., "Scaling provable adversarial defenses" (2018).

    Four blocks with 16, 16, 32 and 64 filters, then linear layers of 1,000 and 10 units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(
            PlainBlock(16, 16, halve=False),
            PlainBlock(16, 16, halve=False),
            PlainBlock(16, 32, halve=True),
            PlainBlock(32, 64, halve=True),
        )
        self.hidden = nn.Linear(64 * 8 * 8, 1000)
        self.linear = nn.Linear(1000, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.blocks(F.relu(self.stem(x)))
        return self.linear(F.relu(self.hidden(out.flatten(1))))


ARCHITECTURES["cifar10-resnet-small"] = Architecture(
    "cifar10-resnet-small",
    lambda: Normalized(SmallResNet(), CIFAR10_MEAN, CIFAR10_STD),
    (3, 32, 32),
    "four residual blocks of 16, 16, 32, 64 filters without batch normalisation, normalisation inside",
)
