"""From a plan to a point of the ball, also where a kernel failed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wball.cost import GridCost
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest
from wball.kernels.entropic_plan.pull_back import PulledBack, balanced, pull_back


def proposal(seed: int) -> tuple[Tensor, Tensor, EntropicPlan]:
    """Images, potentials, and columns of about their mass, which cost too much, enough and too little."""
    random, shape = torch.Generator().manual_seed(seed), (3, 2, 4, 5)
    x = torch.rand(shape, generator=random)
    b, noise = (torch.randn(shape, generator=random) for _ in range(2))
    cost = torch.tensor([5.0, 1.0, 0.1], dtype=torch.float64)
    ones, q = torch.ones_like(x), noise.clamp(max=0)
    plan = EntropicPlan(
        (x + 0.1 * noise).clamp(0, 1), 1.2 * cost, cost, torch.full((3,), 7.0), q, ones, ones
    )
    return x, 5 * b, plan


def pulled(x: Tensor, b: Tensor, plan: EntropicPlan, warm: bool = True) -> PulledBack:
    one, moves = torch.ones(3, dtype=torch.float64), GridCost(5).arcs(*x.shape[2:], x)
    request = PlanRequest(x, b, one, moves, (0.0, 1.0), psi=plan.psi, q=plan.q)
    return pull_back(request, plan, one, one if warm else None)


def test_points_spend_the_budget_and_keep_their_mass() -> None:
    x, b, plan = proposal(0)
    point, first = pulled(x, b, plan), pulled(x, b, plan, warm=False)
    assert float((point.z.double() - x.double()).sum((2, 3)).abs().max()) <= 1e-6
    assert bool((point.cost <= 1).all()) and point.scale[0] < 1 and point.scale[2] == 1
    assert point.kappa[0] < 1 < point.kappa[2]
    assert torch.equal(first.z, point.z) and torch.equal(first.kappa, point.kappa)
    assert torch.equal(balanced(x, x), torch.zeros_like(x))


@pytest.mark.parametrize("broken", ["z", "net_cost", "psi"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_on_which_a_kernel_failed_stays_where_it_is(broken: str, value: float) -> None:
    x, b, plan = proposal(4)
    getattr(plan, broken)[1].view(-1)[0] = value
    point = pulled(x, b, plan)
    assert all(
        bool(torch.isfinite(getattr(point, n)).all()) for n in ("z", "cost", "scale", "kappa")
    )
    assert float((point.z.double() - x.double()).sum((2, 3)).abs().max()) <= 1e-6
    assert float(point.z.min()) >= 0 and float(point.z.max()) <= 1
    if broken == "net_cost":
        assert torch.equal(point.z[1], x[1])
