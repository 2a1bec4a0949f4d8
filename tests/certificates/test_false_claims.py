"""False certificates that the checker confirmed, or would have: each test names the mistake."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

import wball
from wball.ball import Ball
from wball.certificates import VerificationResult, certify, verify
from wball.certificates.complete import Leaf
from wball.certificates.program import exported
from wball.certificates.subject import subject_of


def claimed(net: nn.Module, x: Tensor, ball: Ball, *leaves: Leaf) -> VerificationResult:
    """What the checker says of the claim that class 0 is certified for the only image."""
    y, plain = torch.zeros(1, dtype=torch.long), nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    plain = plain.to(x.dtype)
    plain(x)
    proof = certify(plain, x, y, wball.LinfBall(1e-3), "interval")
    subject = subject_of(exported(net, x), x, y, ball)
    every = torch.ones(1, dtype=torch.bool)
    forged = replace(proof, certified=every, subject=subject, leaves=(leaves,))
    return verify(net, x, y, ball, forged)


class Pixels(nn.Module):
    """``0.1`` for class 0, the value of the last pixel for class 1."""

    def forward(self, x: Tensor) -> Tensor:
        last = x.flatten(1)[:, -1]
        return torch.stack([0 * last + 0.1, last], 1)


def test_moves_that_cost_less_than_their_length_reach_their_targets() -> None:
    """Moves were sorted by what they cost, and looked for within as many pixels."""
    row = [2.5] * 13
    table = tuple(tuple(0.0 if r == c == 6 else row[c] for c in range(13)) for r in range(13))
    ball = wball.WassersteinBall(0.5, wball.StencilCost(table), box=None)
    x = torch.zeros(1, 1, 12, 12)
    x[0, 0, 5, 5] = 1.0  # all six rows and columns from the last pixel
    found = claimed(Pixels(), x, ball)
    assert not bool(found.confirmed) and float(found.margin) <= 0.1 - 0.5 / 2.5


def test_prices_of_a_box_need_a_box() -> None:
    """A leaf's prices were subtracted from the row, and without a box nobody paid them."""
    x = torch.zeros(1, 1, 3, 3)
    x[0, 0, 2, 1] = 1.0
    ball = wball.WassersteinBall(0.5, box=None)
    prices = torch.zeros(9)
    prices[-1] = 1.0
    found = claimed(Pixels(), x, ball, Leaf(1, (), (), {}, {}, prices))
    assert not bool(found.confirmed) and float(found.margin) <= 0.1 - 0.5


def test_factors_that_are_whole_numbers_have_a_magnitude() -> None:
    """``addmm(..., alpha=-1)`` had negative magnitudes, so its bounds were single points."""
    x = torch.full((1, 1, 4, 4), 0.1)

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.tensor([[1.0, 0.0]] * 16))
            self.bias = nn.Parameter(torch.tensor([4.0, 0.5]))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(torch.addmm(self.bias, x.flatten(1), self.matrix, alpha=-1))

    assert not bool(claimed(Fixed(), x, wball.LinfBall(0.3)).confirmed)
    assert bool(claimed(Fixed(), x, wball.LinfBall(0.03)).confirmed)


def test_casts_round() -> None:
    """A cast to a coarser precision counted as a move, which is exact."""

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            high = torch.relu(x.flatten(1)[:, 0] - 0.5)  # 0 wherever programs are compared
            lost = high.float().double() - high
            return torch.stack([1 + 1e12 * lost, 1e12 * lost.relu() + 0 * lost], 1)

    x = torch.full((1, 1, 2, 2), 0.45, dtype=torch.float64)
    x[0, 0, 0, 1] = 1.0
    found = claimed(Cast(), x, wball.LinfBall(0.1))
    assert not bool(found.confirmed)


def test_comparisons_with_infinity_are_not_constants() -> None:
    """They were taken for what they are at a black image, also where the number overflows."""

    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first = x.flatten(1)[:, 0]
            high = torch.where(torch.exp(1000 * (first - 0.5)) == math.inf, -1.0, 1.0)
            return torch.stack([high + 0 * first, 0 * first], 1)

    x = torch.full((1, 1, 2, 2), 0.45)
    x[0, 0, 0, 1] = 1.0
    net = Overflows()
    assert float(net(x + 0.2)[0, 0]) < 0
    assert not bool(claimed(net, x, wball.LinfBall(0.2)).confirmed)
