"""Every kind of network: certified at a small radius, proved again by the checker, and never above
a point of the ball."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wball
from certificates.exact import gap
from certificates.kinds import NETWORKS
from marks import slow
from wball.certificates import certify, verify

FAST = (
    "two relus and a pool", "leaky relu by a comparison", "elu", "mish", "gelu", "power", "softmax",
    "adaptive max pool", "group norm", "layer norm", "excitation", "glu", "attention", "weighted sum", "moves",
    "unfolded",
)  # fmt: skip
KINDS = [*FAST, *slow(*(name for name in NETWORKS if name not in FAST))]


def lowest(net: nn.Module, x: Tensor, y: Tensor, ball: wball.WassersteinBall) -> Tensor:
    """The smallest margin found by a search over vertices: from every class's gradient to the point
    of the ball that is best for it, again and again, and by random directions."""
    classes, found = net(x).shape[1], gap(net(x), y)
    directions = [torch.randn(x.shape) for _ in range(8)]
    for k in range(classes):
        z = x
        for _ in range(4):
            at = z.clone().requires_grad_(True)
            logits = net(at)
            loss = (logits[:, k] - logits.gather(1, y[:, None])[:, 0]).sum()
            (slope,) = torch.autograd.grad(loss, at)
            z = ball.support(x, slope).point
            found = torch.minimum(found, gap(net(z), y))
    for direction in directions:
        found = torch.minimum(found, gap(net(ball.support(x, direction).point), y))
    return found.detach().double()


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_networks_are_certified_and_never_broken(name: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name]().eval()
    x = torch.rand((2, 1, 4, 4), generator=torch.Generator().manual_seed(1))
    y = net(x).argmax(1)
    ball = wball.WassersteinBall(1e-4, wball.GridCost(window=7))  # every move of a 4 x 4 image
    small = certify(net, x, y, ball)
    assert bool(small.certified.all())
    assert bool(verify(net, x[:1], y[:1], ball, certify(net, x[:1], y[:1], ball)).confirmed.all())
    for eps in (1e-4, 0.01, 0.1):
        found = certify(net, x, y, ball.at(eps), "crown").margin
        reached = lowest(net, x, y, ball.at(eps))
        assert bool((found <= reached + 1e-6).all()), (eps, found, reached)
