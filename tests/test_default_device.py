"""Calls with a default device other than the CPU: they work, or say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import wball

BALL = wball.WassersteinBall(0.05)
CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {
    "support": lambda m, x, y: BALL.support(x, x),
    "project": lambda m, x, y: BALL.project(x, x),
    "sample": lambda m, x, y: BALL.sample(x),
    "contains": lambda m, x, y: BALL.contains(x, x),
    "attack": lambda m, x, y: wball.DualAveraging(BALL, steps=2)(m, x, y),
    "certify": lambda m, x, y: wball.certify(m, x, y, BALL),
    "radius": lambda m, x, y: wball.certified_radius(m, x, y, BALL),
    "audit": lambda m, x, y: wball.audit(BALL, x, x),
    "evaluate": lambda m, x, y: wball.evaluate(m, x, y, BALL),
}


@pytest.fixture
def elsewhere() -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """A model and images on the CPU, while tensors are made on another device by default."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), torch.rand(2, 1, 3, 3)
    y = model(x).argmax(1)
    torch.set_default_device("meta")
    yield model, x, y
    torch.set_default_device(None)


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_is_named(
    name: str, elsewhere: tuple[nn.Module, Tensor, Tensor]
) -> None:
    with pytest.raises(ValueError, match="made on meta by default"):
        CALLS[name](*elsewhere)


def test_models_of_the_zoo_are_loaded_on_the_cpu(
    elsewhere: tuple[nn.Module, Tensor, Tensor],
) -> None:
    assert next(wball.load_model("mnist-standard").parameters()).device.type == "cpu"
