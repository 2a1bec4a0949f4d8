"""Pulling back: the Triton kernel against the torch version, and on plans that failed."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from wball.cost import GridCost
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest
from wball.kernels.pull_back import PulledBack, reference

DEVICE = os.environ.get(
    "WBALL_TEST_DEVICE", "cpu"
)  # tests/conftest.py asks for the interpreter on a CPU
FIELDS = ("z", "cost", "scale", "kappa", "chosen")


def proposal(
    seed: int, shape: tuple[int, int, int, int] = (3, 2, 4, 5)
) -> tuple[Tensor, Tensor, EntropicPlan]:
    """Images, potentials, and columns of about their mass, which cost too much, enough and too little."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=random)
    b, noise = (torch.randn(shape, generator=random) for _ in range(2))
    cost = torch.tensor([5.0, 1.0, 0.1], dtype=torch.float64)
    ones, q = torch.ones_like(x), noise.clamp(max=0)
    plan = EntropicPlan(
        (x + 0.1 * noise).clamp(0, 1), 1.2 * cost, cost, torch.full((3,), 7.0), q, ones, ones
    )
    return x, 5 * b, plan


def pulled(name: str, x: Tensor, b: Tensor, plan: EntropicPlan, warm: bool = True) -> PulledBack:
    kernel = pytest.importorskip(f"wball.kernels.pull_back.{name}")
    moved = EntropicPlan(
        *(
            getattr(plan, n).to(DEVICE)
            for n in ("z", "cost", "net_cost", "psi", "q", "keep", "give")
        )
    )
    one = torch.ones(3, dtype=torch.float64, device=DEVICE)
    moves = GridCost(5).arcs(*x.shape[2:], x.to(DEVICE))
    request = PlanRequest(
        x.to(DEVICE), b.to(DEVICE), one, moves, (0.0, 1.0), psi=moved.psi, q=moved.q
    )
    point: PulledBack = kernel.pull_back(request, moved, one, one if warm else None)
    return PulledBack(*(getattr(point, n).cpu() for n in FIELDS))


@pytest.mark.parametrize("seed", range(3))
def test_kernel_equals_reference(seed: int) -> None:
    x, b, plan = proposal(seed)
    ours, theirs = pulled("triton", x, b, plan), pulled("reference", x, b, plan)
    for name in FIELDS:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-6, rtol=1e-6)
    assert float((ours.z.double() - x.double()).sum((2, 3)).abs().max()) <= 1e-6, (
        "no channel gains or loses mass"
    )
    assert bool((ours.cost <= 1).all()) and ours.scale[0] < 1 and ours.scale[2] == 1
    assert ours.kappa[0] < 1 < ours.kappa[2]


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_first_plan_was_asked_for_at_the_budget(name: str) -> None:
    x, b, plan = proposal(0)
    first, given = pulled(name, x, b, plan, warm=False), pulled(name, x, b, plan)
    assert all(torch.equal(getattr(first, n), getattr(given, n)) for n in FIELDS)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("broken", ["z", "net_cost", "psi"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_on_which_a_kernel_failed_stays_where_it_is(
    name: str, broken: str, value: float
) -> None:
    x, b, plan = proposal(4)
    getattr(plan, broken)[1].view(-1)[0] = value
    point = pulled(name, x, b, plan)
    assert all(
        bool(torch.isfinite(getattr(point, n)).all()) for n in ("z", "cost", "scale", "kappa")
    )
    assert float((point.z.double() - x.double()).sum((2, 3)).abs().max()) <= 1e-6
    assert float(point.z.min()) >= 0 and float(point.z.max()) <= 1
    if broken == "net_cost":
        assert torch.equal(point.z[1], x[1])
    assert torch.equal(reference.balanced(x, x), torch.zeros_like(x))
