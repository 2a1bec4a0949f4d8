"""Plans: rows stay, repair reaches the box and the budget from any plan, cancelling never costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wball import DenseCost, GridCost, StencilCost
from wball.cost import Moves
from wball.plan import FactoredPlan, Plan


def random_plan(seed: int, lo: float = 0.0, hi: float = 1.0) -> tuple[Tensor, Plan]:
    torch.manual_seed(seed)
    x = lo + (hi - lo) * torch.rand(3, 2, 6, 5, dtype=torch.float64)
    x[0] = x[0].round() if (lo, hi) == (0.0, 1.0) else hi
    table = ((1.0, 2.0, 0.5), (1.0, 0.0, 3.0), (1.0, 1.0, 1.0))
    cost: GridCost | StencilCost = GridCost(5) if seed % 2 else StencilCost(table)
    moves: Moves = cost.arcs(x)
    score = torch.where(
        moves.allowed, 4 * torch.randn(3, 2, moves.cost.shape[0], 6, 5, dtype=x.dtype), -torch.inf
    )
    return x, Plan(moves, x.unsqueeze(2) * torch.softmax(score, 2))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("box", [(0.0, 1.0), (0.2, 0.7), None])
def test_repair_is_feasible_to_the_last_bit(seed: int, box: tuple[float, float] | None) -> None:
    x, plan = random_plan(seed, *(box or (0.0, 1.0)))
    budget = torch.tensor([0.0, 0.5, 100.0], dtype=torch.float64)
    fixed = plan.repair(budget, box)
    torch.testing.assert_close(fixed.rows(), x, atol=1e-12, rtol=0)
    assert bool((fixed.arcs() >= 0).all())
    assert bool((fixed.cost() <= budget * (1 + 1e-12)).all())
    z = fixed.columns()
    torch.testing.assert_close(z.sum((2, 3)), x.sum((2, 3)))
    if box is not None:
        assert float(z.min()) >= box[0] - 1e-12
        assert float(z.max()) <= box[1] + 1e-12
    torch.testing.assert_close(z[0], x[0])  # no budget, no move


def test_small_excess_costs_little() -> None:
    """Full pixels in a row that overflow by 1e-6 give back about that much, not everything that
    moved."""
    x = torch.ones(1, 1, 1, 12, dtype=torch.float64)
    x[..., -1] = 0.0
    moves = GridCost(3).arcs(x)
    right = next(k for k, offset in enumerate(moves.offsets) if offset == (0, 1, 0))
    flow = Plan.identity(moves, x).flow
    flow[:, :, moves.offsets.index((0, 0, 0)), 0, :-1] -= 0.5
    flow[:, :, right, 0, :-1] += 0.5
    flow[:, :, right, 0, 3] += 1e-6
    flow[:, :, moves.offsets.index((0, 0, 0)), 0, 3] -= 1e-6
    plan = Plan(moves, flow)
    fixed = plan.repair(torch.tensor([100.0], dtype=torch.float64), (0.0, 1.0))
    assert float(fixed.columns().max()) <= 1 + 1e-12
    assert float((fixed.columns() - plan.columns()).abs().max()) <= 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_keeps_rows_and_columns_and_never_costs(seed: int) -> None:
    x, plan = random_plan(seed)
    net = plan.cancelled()
    torch.testing.assert_close(net.rows(), x)
    torch.testing.assert_close(net.columns(), plan.columns())
    assert bool((net.cost() <= plan.cost() + 1e-12).all())
    opposite = torch.minimum(net.flow, net.moves.opposite(net.flow))
    assert float(torch.where(net.moves.stay(), torch.zeros_like(opposite), opposite).max()) <= 1e-12


@pytest.mark.parametrize(
    "cost", [GridCost(5), StencilCost(((1.0, 2.0, 1.0), (1.0, 0.0, 0.5), (1.0, 2.0, 1.0)))]
)
@pytest.mark.parametrize("dense", [False, True])
def test_the_net_cost_of_factors_is_that_of_the_plan_written_out(
    cost: GridCost | StencilCost, dense: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.rand((3, 2, 4, 5), generator=random) * (
        torch.rand((3, 2, 4, 5), generator=random) < 0.6
    )
    s = 3 * torch.randn(x.shape, generator=random)
    keep, give = (torch.rand(x.shape, generator=random) for _ in range(2))
    chosen = (
        DenseCost(torch.rand((20, 20), generator=random).fill_diagonal_(0.0)) if dense else cost
    )
    psi, scale = torch.tensor([0.0, 1.5, 30.0]), torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    plan = FactoredPlan(chosen.arcs(x), x, s, psi, keep, give, scale)
    written = plan.written()
    assert dense or float(written.cancelled().cost()[0]) < float(written.cost()[0]), (
        "something cancels"
    )
    torch.testing.assert_close(plan.net_cost(), written.cancelled().cost(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(written.net_cost(), written.cancelled().cost())
    broken = replace(plan, potentials=torch.full_like(s, torch.nan), give=torch.zeros_like(give))
    assert not broken.net_cost().any(), "rows that send nothing need no potentials"
