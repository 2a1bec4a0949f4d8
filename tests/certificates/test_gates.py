"""Images far below 0 that anchored bounds still certify."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wball
from wball.certificates import certify


def many_units_at_zero(side: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """All units of a convolution are 0 at the image, and each takes what it becomes off the
    margin."""
    conv, head = nn.Conv2d(1, 1, 2, 2, bias=False), nn.Linear((side // 2) ** 2, 2)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]]))
        head.weight.copy_(torch.tensor([[-1.0], [0.0]]).expand_as(head.weight))
        head.bias.zero_()
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head)
    return net.eval(), torch.full((1, 1, side, side), 0.5), torch.tensor([0])


def test_anchors_prove_what_plain_bounds_miss_by_more_than_twenty_margins() -> None:
    ball = wball.WassersteinBall(0.002)
    net, x, y = many_units_at_zero(24)
    clean = net[3].bias.data
    clean[0] = 1e3
    taken = 1e3 - float(certify(net, x, y, ball, method="crown").margin)
    clean[0] = taken / 22
    assert float(certify(net, x, y, ball, method="crown").margin) < -20 * taken / 22
    assert bool(certify(net, x, y, ball).certified)
