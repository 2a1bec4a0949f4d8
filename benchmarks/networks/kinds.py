"""The list of architectures, and the pieces that many of them share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

SIDE, CLASSES = 8, 10

Maker = TypeVar("Maker", bound=Callable[[], nn.Module])


@dataclass(frozen=True)
class Architecture:
    """A kind of network: ``make()`` draws its weights."""

    family: str
    name: str
    make: Callable[[], nn.Module]
    channels: int


KINDS: list[Architecture] = []


def kind(family: str, name: str, channels: int = 3) -> Callable[[Maker], Maker]:
    """Add a class or a function without arguments to the list."""

    def add(make: Maker) -> Maker:
        assert all(name != known.name for known in KINDS), name
        KINDS.append(Architecture(family, name, make, channels))
        return make

    return add


def made(architecture: Architecture, seed: int = 0) -> nn.Module:
    """A network in evaluation mode whose weights, and statistics of norms, depend on the seed."""
    torch.manual_seed(seed)
    net = architecture.make()
    for part in net.modules():
        if isinstance(getattr(part, "running_mean", None), Tensor):
            nn.init.normal_(part.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    with suppress(NotImplementedError):  # the module of a program has no modes
        net.eval()
    return net


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


class Residual(nn.Module):
    """``x + f(x)``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def headed(*layers: nn.Module, channels: int = 3) -> nn.Sequential:
    """Layers, and a linear head on what they return."""
    front = nn.Sequential(*layers).eval()
    with torch.no_grad():
        width = front(torch.rand(2, channels, SIDE, SIDE)).flatten(1).shape[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, CLASSES))


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Layers, the mean over places, and a linear head."""
    return headed(*layers, nn.AdaptiveAvgPool2d(1))


def unit(
    inside: int,
    out: int,
    size: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: Callable[[], nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution, batch normalisation, activation."""
    conv = nn.Conv2d(inside, out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), *([act()] if act else []))
