"""The images everybody gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.data import load_dataset, load_sample


@dataclass(frozen=True)
class Images:
    """A source of images and the paper's settings for it."""

    name: str
    x: Tensor
    reg: float
    eps: float  # of projections
    eps_attack: float
    origin: str

    def batch(self, size: int) -> Tensor:
        """``size`` images, repeated if there are fewer."""
        return self.x[torch.arange(size, device=self.x.device) % len(self.x)].contiguous()


def mnist(data: Path | None, device: torch.device) -> Images:
    if data is not None:
        x, origin = load_dataset("mnist", data)[0][:1000], "MNIST test set"
    else:
        x, origin = load_sample("mnist")[0], "the bundled MNIST sample"
    return Images("mnist", x.to(device), 1000.0, 0.1, 0.1, origin)


def cifar10(data: Path | None, device: torch.device) -> Images:
    if data is not None:
        x, origin = load_dataset("cifar10", data)[0][:1000], "CIFAR-10 test set"
    else:
        x, origin = scenes(128, 32), "synthetic scenes of CIFAR-10's size (give --data for the set)"
    return Images("cifar10", x.to(device), 3000.0, 0.05, 0.02, origin)


def scenes(count: int, side: int) -> Tensor:
    """Colour images with structure at every scale and saturated spots, from a fixed seed."""
    random = torch.Generator().manual_seed(2019)
    total = torch.zeros(count, 3, side, side)
    scale = 2
    while scale <= side:
        noise = torch.randn(count, 3, scale, scale, generator=random)
        total += F.interpolate(noise, size=(side, side), mode="bilinear") / scale**0.5
        scale *= 2
    return torch.sigmoid(3 * total).sub(0.02).div(0.96).clamp(0.0, 1.0)


def disturbed(x: Tensor, size: float, seed: int) -> Tensor:
    """Points to project: every pixel off by ``size``, up or down, as after a step of the paper's attack."""
    random = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, x.shape, generator=random).mul(2).sub(1)
    return x + size * sign.to(x)


def smooth_gradients(x: Tensor, seed: int) -> Tensor:
    """What a classifier's normalised gradient looks like to the oracle: smooth over a few pixels, largest value 1."""
    random = torch.Generator().manual_seed(seed)
    g = F.avg_pool2d(torch.randn(x.shape, generator=random), 3, 1, 1).to(x)
    return g / g.abs().amax((1, 2, 3), keepdim=True)
