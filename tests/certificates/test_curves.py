"""Curved activations: lines that hold everywhere, and certificates that no point of the ball
contradicts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import gap
from wball.certificates import UnsupportedModule, certify
from wball.certificates.curves import CURVES, Curve, Lines, curve_lines


def intervals() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    centre = 6 * torch.randn(400, dtype=torch.float64, generator=draw)
    radius = 10 ** (4 * torch.rand(400, dtype=torch.float64, generator=draw) - 2)  # 0.01 to 100
    return centre - radius, centre + radius


def holds(lines: Lines, value: Tensor, v: Tensor) -> None:
    below, above = lines.low_slope * v + lines.low_shift, lines.up_slope * v + lines.up_shift
    assert bool((below <= value).all()) and bool((value <= above).all())


@pytest.mark.parametrize("curve", CURVES.values())
def test_lines_of_curves_hold_on_the_interval(curve: Curve) -> None:
    low, up = intervals()
    lines = curve_lines(curve, low, up)
    for k in range(257):
        v = low + (up - low) * (k / 256)
        holds(lines, curve.function(v), v)
    narrow = up - low < 0.1
    gap = (lines.up_slope - lines.low_slope) * (low + up) / 2 + lines.up_shift - lines.low_shift
    assert bool((gap[narrow] < 0.01).all()), "on short intervals the lines meet"


def test_lines_of_curves_hold_without_bounds() -> None:
    far = torch.tensor([1e4], dtype=torch.float64)
    for curve in CURVES.values():
        for low, up in ((-far, far), (-far * torch.inf, far * torch.inf)):
            lines = curve_lines(curve, low, up)
            for v in (-far, -far / 3, 0 * far, far / 7, far):
                holds(lines, curve.function(v), v)


def network(kind: str) -> nn.Module:
    torch.manual_seed(1)
    layer = getattr(nn, kind)
    conv = nn.Sequential(
        nn.Conv2d(1, 4, 2), layer(), nn.Flatten(), nn.Linear(16, 8), layer(), nn.Linear(8, 3)
    )
    return conv.eval()


@pytest.mark.parametrize("kind", ["Sigmoid", "Tanh", "GELU", "SiLU", "ReLU6"])
@pytest.mark.parametrize("threat", [wball.WassersteinBall(0.1), wball.LinfBall(0.05)])
def test_no_point_of_the_ball_is_below_the_bound(kind: str, threat: wball.Ball) -> None:
    net = network(kind)
    x = torch.rand((3, 1, 3, 3), generator=torch.Generator().manual_seed(2))
    y = net(x).argmax(1)
    found = certify(net, x, y, threat)
    assert bool((found.margin > -100).all())
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        reached = gap(net(threat.sample(x, draw)).double(), y)
        assert bool((found.margin <= reached + 1e-6).all())
    tiny = certify(net, x, y, threat.at(1e-6))
    assert bool(tiny.certified.all()), "at a small radius the lines are nearly exact"


def test_an_approximate_gelu_is_refused() -> None:
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(9, 4), nn.GELU(approximate="tanh"), nn.Linear(4, 2)
    ).eval()
    with pytest.raises(UnsupportedModule, match="approximation"):
        certify(net, torch.rand(1, 1, 3, 3), torch.tensor([0]), wball.WassersteinBall(0.1))
    assert F.gelu is CURVES["gelu"].function
