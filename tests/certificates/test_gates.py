"""Images that look hopeless and are not: what refinement must not give up on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wball
from wball.certificates import certificate, certify, collector


def many_units_at_zero(side: int, clean: float) -> tuple[nn.Sequential, Tensor, Tensor]:
    """All units of a convolution are 0 at the image, and each takes what it becomes off a margin of ``clean``."""
    x = torch.full((1, 1, side, side), 0.5)
    conv = nn.Conv2d(1, 1, 2, 2)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]]))
        assert conv.bias is not None
        conv.bias.zero_()
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear((side // 2) ** 2, 2))
    with torch.no_grad():
        net[3].weight.copy_(torch.stack([-torch.ones((side // 2) ** 2), torch.zeros((side // 2) ** 2)]))
        net[3].bias.copy_(torch.tensor([clean, 0.0]))
    return net.eval(), x, torch.tensor([0])


def test_anchors_prove_what_plain_bounds_miss_by_more_than_twenty_margins() -> None:
    ball = wball.WassersteinBall(0.002)
    net, x, y = many_units_at_zero(24, 1e3)
    taken = 1e3 - float(certify(net, x, y, ball, method="crown").margin)
    net, x, y = many_units_at_zero(24, taken / 22)
    assert float(certify(net, x, y, ball, method="crown").margin) < -20 * taken / 22
    assert bool(certify(net, x, y, ball).certified)


def test_anchors_of_a_digits_layer_fit_at_the_wide_reach() -> None:
    """The second layer of the paper's network has 1,568 units; all may be unstable."""
    x, _ = wball.load_sample("mnist")
    for k in range(8):
        source = wball.WassersteinBall(0.1).input_set(x[k : k + 1]).finer(4.0)
        assert collector.LIMIT * x[0].numel() // source.gain_size >= 32 * 49


@pytest.mark.parametrize(("dark", "last"), [(0.0, certificate.USUAL), (0.7, certificate.WIDE)])
def test_longer_moves_are_told_apart_unless_they_are_two_listed_ones(
    dark: float, last: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mass everywhere makes many gains, and moves of up to 4 pixels hardly tighten what those of up to 3 give."""
    noise = torch.rand((1, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    net, x, y = nn.Sequential(nn.Flatten(), nn.Linear(768, 2)), (noise - dark).clamp(min=0), torch.tensor([0])
    ball = wball.WassersteinBall(0.1)
    graph = certificate.trace(net, x, ball)
    first = certificate._first_layer(graph, x, ball, "full")
    problem = certificate._Problem(graph, x, y, ball, "full", torch.ones(1, dtype=torch.float64), first)
    reaches: list[float] = []
    monkeypatch.setattr(problem, "_tighten", lambda margins, bounds, chosen, reach: reaches.append(reach))
    problem.margin("anchored", 0, 1.0)
    assert reaches == [certificate.CLOSE, last]
