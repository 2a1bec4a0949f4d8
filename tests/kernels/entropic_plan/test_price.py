"""The price is found from anywhere, also where the cost is flat and Newton's step points to infinity."""

from __future__ import annotations

import pytest
import torch

from wball import GridCost
from wball.kernels import dispatch


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize("start", [0.0, 1.0, 10.0, 1e4])
def test_price_of_a_potential_that_saturates(kernel: str, start: float) -> None:
    x, b = torch.zeros(1, 1, 5, 5), torch.full((1, 1, 5, 5), -60.0)
    x[0, 0, 2, 2], b[0, 0, 2, 4] = 1.0, 60.0  # until the price is about 60, all of the mass moves by 2
    budget = torch.tensor([0.1], dtype=torch.float64)
    options = {"psi": torch.tensor([start]), "q": torch.zeros_like(x), "sweeps": 0, "newton": 30}
    plan = dispatch.load("entropic_plan", kernel).entropic_plan(
        x, b, budget, GridCost(5).arcs(5, 5, x), None, **options
    )
    assert 0.099 < float(plan.cost) <= 0.1
