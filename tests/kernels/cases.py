"""Images, costs and kernels that the tests of several operations share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wball.cost import GridCost, GroundCost, StencilCost
from wball.kernels import dispatch

DEVICE = os.environ.get("WBALL_TEST_DEVICE", "cpu")
"""``tests/conftest.py`` asks for Triton's interpreter on a CPU."""

INTERPRETED = DEVICE == "cpu"

UNIT, WINDOW = (0.0, 1.0), GridCost(3)
ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))
"""Not symmetric; some moves have no way back."""
COLOURS = GridCost(3, channel_cost=0.6)
"""Mass may change the channel."""
FREE = StencilCost(((1.0, 2.0, 1.0), (1.0, 0.0, 0.0), (1.0, 2.0, 1.0)))
"""One step to the right costs nothing."""


def need(kernel: str) -> None:
    """Skip the test if this machine cannot run the kernel."""
    if kernel == "triton":
        pytest.importorskip("triton")
    elif kernel == "cpu" and not INTERPRETED:
        pytest.skip("compiled loops run on a CPU")


def solver(operation: str, kernel: str) -> Callable[..., Any]:
    """The function of a kernel that computes an operation."""
    need(kernel)
    function: Callable[..., Any] = getattr(dispatch.load(operation, kernel), operation)
    return function


def masses(cost: GroundCost, z: Tensor) -> Tensor:
    """What moves keep: the mass of each channel, or of each image."""
    return (
        z.double().flatten(2).sum(2)
        if cost.channel_cost is None
        else z.double().flatten(1).sum(1)[:, None]
    )


def random_images(seed: int, lit: float = 0.5, shape: tuple[int, ...] = (1, 1, 4, 5)) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=random) * (torch.rand(shape, generator=random) < lit)


def noise(seed: int, scale: float, shape: tuple[int, ...] = (1, 1, 4, 5)) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(100 + seed))


def some_empty_some_full(seed: int, shape: tuple[int, ...], share: float = 0.25) -> Tensor:
    """Random images whose pixels are empty or full with a probability; the last of several is
    black."""
    random = torch.Generator().manual_seed(seed)
    x, empty, full = (torch.rand(shape, generator=random) for _ in range(3))
    x = torch.where(full < share, 1.0, torch.where(empty < share, 0.0, x))
    if shape[0] > 1:
        x[-1] = 0.0
    return x
