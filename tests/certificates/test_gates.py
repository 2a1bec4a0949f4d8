"""Images that look hopeless and are not: what refinement must not give up on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wball
from wball.certificates import anchor, certificate, certify


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
        net[3].weight.copy_(
            torch.stack([-torch.ones((side // 2) ** 2), torch.zeros((side // 2) ** 2)])
        )
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
        assert anchor.LIMIT * x[0].numel() // source.gain_size >= 32 * 49


def test_a_colour_layer_fits_at_the_longest_reach_of_images_with_mass_everywhere() -> None:
    """Longer moves are two listed ones there, and need no gains: 1,536 units do not fit at a reach of 4 pixels."""
    x = torch.rand((1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    source = wball.WassersteinBall(1e-6).input_set(x).finer(certificate.CLOSE)
    assert anchor.LIMIT * x[0].numel() // source.gain_size >= 1536
    finest = source.finer(certificate.WIDE)
    assert finest.gain_size < 3.1 * source.gain_size and finest.finer(6.0) is finest


def test_bounds_that_anchors_do_not_use_may_be_left_out() -> None:
    """Lower bounds of units below 0 at the image: the margins stay as they are, and other bounds too."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(100, 30),
        nn.LeakyReLU(0.1),
        nn.Linear(30, 3),
    ).double()
    x = torch.rand(2, 1, 10, 10, dtype=torch.float64)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.05)
    graph = certificate.trace(net, x, ball)
    first = certificate._first_layer(graph, x, ball, "full")
    problem = certificate._Problem(graph, x, y, ball, "full", torch.ones(2), first)
    found, left = [], []
    for sparing in (False, True):
        relaxation = problem.relaxation(ball.input_set(x, "full"), "anchored", 1.0)
        bounds = relaxation.bound_all(2, problem.like)
        for position in graph.relaxed():
            relaxation.bound_layer(
                position, bounds, 2, problem.like, anchored=True, sparing=sparing
            )
        found.append(relaxation.margins(y, bounds, problem.like, anchored=True))
        left.append(sum(float(low.sum()) for low in bounds.lower.values()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    assert left[1] < left[0]  # some lower bounds are looser
