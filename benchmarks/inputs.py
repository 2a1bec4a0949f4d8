"""The images and directions of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.data import load_dataset, load_sample

DIRECTIONS = ("signs", "gaussian", "smooth", "heavy tails")


@dataclass(frozen=True)
class Images:
    """A source of images, the paper's ``reg`` for it, and a small and a large radius."""

    name: str
    x: Tensor
    reg: float
    radii: tuple[float, float]

    def batch(self, size: int) -> Tensor:
        """``size`` images, repeated if there are fewer."""
        return self.x[torch.arange(size, device=self.x.device) % len(self.x)].contiguous()


def mnist(data: Path | None, device: torch.device) -> Images:
    x = load_sample("mnist")[0] if data is None else load_dataset("mnist", data)[0][:1000]
    return Images("mnist", x.to(device), 1000.0, (0.05, 0.5))


def cifar10(data: Path | None, device: torch.device) -> Images:
    """CIFAR-10, or synthetic scenes of its size without ``data``."""
    x = scenes(128, 32) if data is None else load_dataset("cifar10", data)[0][:1000]
    return Images("cifar10", x.to(device), 3000.0, (0.02, 0.1))


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


def direction(x: Tensor, kind: str, seed: int) -> Tensor:
    """A random direction of one of the kinds, of unit mean square, for each image."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=random)
    made = {
        "signs": noise.sign,
        "gaussian": noise.clone,
        "smooth": lambda: F.avg_pool2d(noise, 3, 1, 1),
        "heavy tails": lambda: noise**3,
    }[kind]()
    return (made / made.square().mean().sqrt()).to(x)
