"""The first-order robust loss: its linear maximum against the library's support function, its
gradient, its effect."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from training.worker import small_config, small_data, small_model
from wball import DenseCost, GridCost, WassersteinBall
from wball.training import Smooth, preset
from wball.training.bounds import linear_gain
from wball.training.losses import Objective


def rows(channels: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(channels)
    x = torch.rand((4, channels, 6, 7), generator=generator, dtype=torch.float64)
    x = torch.where(x < 0.4, 0.0, x)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64), x


@pytest.mark.parametrize("eps", [0.0, 0.05, 0.7, 9.0])
def test_linear_gain_is_the_support_function(eps: float) -> None:
    g, x = rows()
    ball = WassersteinBall(eps, GridCost(3), box=None)
    exact = ball.support(x, g).value - (g * x).flatten(1).sum(1)
    torch.testing.assert_close(linear_gain(g, x, ball, max_iter=60), exact, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_linear_gain_moves_mass_to_the_maximiser(dtype: torch.dtype) -> None:
    """All of it, with the pixel that hesitates between two moves: otherwise rounding decides, and
    runs differ."""
    g, x = (v.to(dtype) for v in rows(1))
    g.requires_grad_(True)
    ball = WassersteinBall(0.2, GridCost(3), box=None)
    gain = linear_gain(g, x, ball)
    (moved,) = torch.autograd.grad(gain.sum(), g)
    torch.testing.assert_close(x + moved, ball.support(x, g.detach()).point, atol=1e-4, rtol=0)
    torch.testing.assert_close((g * moved).flatten(1).sum(1), gain, atol=1e-6, rtol=1e-6)


def test_the_loss_raises_the_wrong_logits_by_the_gain() -> None:
    config = small_config(adversary=None, smooth=Smooth(WassersteinBall(0.1), ramp=0.0))
    model, (x, y) = small_model(), small_data(8)
    objective = Objective(model, config)
    loss, right, survived = objective(x, x, y, 0.5, 0.1)
    z = x.clone().requires_grad_(True)
    logits = model(z)
    total = torch.zeros(())
    for i in range(len(x)):
        wrong = [k for k in range(logits.shape[1]) if k != int(y[i])]
        rival = max(wrong, key=logits[i].tolist().__getitem__)
        (g,) = torch.autograd.grad(logits[i, rival] - logits[i, y[i]], z, retain_graph=True)
        ball = WassersteinBall(0.1, box=None)
        image, slope = x[i : i + 1].double(), g[i : i + 1].double()
        gain = ball.support(image, slope).value - (slope * image).sum()
        raised = logits[i].clone()
        raised[wrong] += gain.float()
        total = total + F.cross_entropy(raised[None], y[i : i + 1])
        assert bool(survived[i]) == (int(raised.argmax()) == int(y[i]))
    torch.testing.assert_close(loss, total / len(x), atol=1e-4, rtol=1e-4)
    assert int(right) == int((logits.argmax(1) == y).sum())
    loss.backward()
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters()
    )


def test_settings_are_checked() -> None:
    assert preset("mnist-certified").smooth is not None
    with pytest.raises(ValueError, match="ramp"):
        Smooth(WassersteinBall(0.1), ramp=2.0)
    with pytest.raises(ValueError, match="adversary and smooth exclude each other"):
        small_config(smooth=Smooth(WassersteinBall(0.1)))
    with pytest.raises(TypeError, match="cost by moves"):
        Smooth(WassersteinBall(0.1, DenseCost(torch.zeros(2, 2))))
    flat = torch.zeros(1, 1, 1, 2)
    ball = WassersteinBall(0.1, DenseCost(torch.zeros(2, 2)))
    with pytest.raises(TypeError, match="matrix"):
        linear_gain(flat, flat, ball)
