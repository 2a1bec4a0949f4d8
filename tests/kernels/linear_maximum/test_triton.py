"""Linear maxima over the ball: the torch reference against the solver, the Triton kernel against the reference."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from wball.ball import WassersteinBall
from wball.cost import GridCost, StencilCost
from wball.kernels.linear_maximum import reference

DEVICE = os.environ.get(
    "WBALL_TEST_DEVICE", "cpu"
)  # tests/conftest.py asks for the interpreter on a CPU
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))
BALLS = [
    ((1, 6, 7), WassersteinBall(0.2, GridCost(3), box=None)),
    ((2, 5, 4), WassersteinBall(0.5, GridCost(5, p=2.0), box=None)),
    ((1, 4, 6), WassersteinBall(0.1, ONE_WAY, box=None)),
    ((1, 3, 3), WassersteinBall(9.0, GridCost(3), box=None)),  # more than can be spent
    ((3, 1, 8), WassersteinBall(0.0, GridCost(3), box=None)),
]


def rows(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Rows and images; one image is black, one row is flat."""
    random = torch.Generator().manual_seed(3)
    x = torch.rand((3, *shape), generator=random)
    x = torch.where(x < 0.3, torch.zeros(()), x)
    x[2] = 0.0
    a = torch.randn((5, *shape), generator=random)
    a[3] = 0.5
    return a.to(DEVICE), x[[0, 1, 1, 0, 2]].to(DEVICE)


@pytest.mark.parametrize(("shape", "ball"), BALLS, ids=str)
def test_reference_is_the_support_function(
    shape: tuple[int, int, int], ball: WassersteinBall
) -> None:
    a, x = (t.double() for t in rows(shape))
    moves = ball.cost.arcs(*shape[1:], x)
    ours = reference.linear_maximum(a, x, ball.budget(x), moves, point=True)
    exact = ball.support(x, a)
    torch.testing.assert_close(ours.upper, exact.value, rtol=1e-9, atol=1e-9)
    assert ours.z is not None
    torch.testing.assert_close((ours.z * a).sum((1, 2, 3)), exact.value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.z.sum((2, 3)), x.sum((2, 3)))


@pytest.mark.parametrize(("shape", "ball"), BALLS, ids=str)
def test_kernel_equals_reference(shape: tuple[int, int, int], ball: WassersteinBall) -> None:
    pytest.importorskip("triton")
    from wball.kernels.linear_maximum import triton as triton_support

    a, x = rows(shape)
    moves = ball.cost.arcs(*shape[1:], x)
    budget = ball.budget(x)
    exact = reference.linear_maximum(a.double(), x.double(), budget, moves, point=True)
    single = reference.linear_maximum(a, x, budget, moves, point=True)
    ours = triton_support.linear_maximum(a, x, budget, moves, point=True)
    assert ours.z is not None and single.z is not None
    for mine, yardstick, truth in (
        (ours.upper, single.upper, exact.upper),
        ((ours.z.double() * a).sum((1, 2, 3)), (single.z.double() * a).sum((1, 2, 3)), exact.upper),
    ):
        assert (
            float((mine - truth).abs().max()) <= 2 * float((yardstick - truth).abs().max()) + 1e-5
        )
    torch.testing.assert_close(ours.z.sum((2, 3)), x.sum((2, 3)), rtol=1e-5, atol=1e-6)
    # Any psi is a sound bound; evaluated in float64 this one is not far from the best.
    again = reference._Search(a.double(), x.double(), budget, moves.like(a.double()))
    bound = again.at(ours.psi.double()).value
    assert bool((bound >= exact.upper - 1e-9).all()) and float((bound - exact.upper).max()) <= 1e-5
