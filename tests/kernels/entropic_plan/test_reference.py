"""The entropic plan against the plan written out as a matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from problems import Problem, arc_list, random_problems
from wball.ball import WassersteinBall
from wball.cost import GridCost
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest, entropic_plan


def solve(ball: WassersteinBall, x: Tensor, b: Tensor, **options: Any) -> EntropicPlan:
    psi, q = torch.full((x.shape[0],), 10.0, dtype=x.dtype), torch.zeros_like(x)
    moves = ball.cost.arcs(x.shape[-2], x.shape[-1], x)
    return entropic_plan(
        PlanRequest(x, b, ball.budget(x), moves, ball.box, psi=psi, q=q, **options)
    )


def cost_matrix(ball: WassersteinBall, height: int, width: int) -> NDArray[np.float64]:
    matrix = np.full((height * width, height * width), np.inf)
    for i, j, cost in arc_list(ball.cost, height, width):
        matrix[i, j] = cost
    return matrix


def written_out(
    ball: WassersteinBall, x: Tensor, b: Tensor, plan: EntropicPlan
) -> tuple[list[NDArray[np.float64]], ...]:
    """The plan of the first image as one matrix per channel, and the costs."""
    matrix = cost_matrix(ball, x.shape[-2], x.shape[-1])
    finite, psi = np.where(np.isfinite(matrix), matrix, 0), float(plan.psi[0])
    plans = []
    for c in range(x.shape[1]):
        mass, s = x[0, c].double().numpy().ravel(), (b + plan.q)[0, c].double().numpy().ravel()
        logits = np.where(np.isfinite(matrix), s[None, :] - psi * finite, -np.inf)
        rows = np.exp(logits - logits.max(1, keepdims=True))
        flow = mass[:, None] * rows / rows.sum(1, keepdims=True)
        flow *= (
            plan.keep[0, c].double().numpy().ravel()[None, :]
            * plan.give[0, c].double().numpy().ravel()[:, None]
        )
        np.fill_diagonal(flow, 0.0)
        np.fill_diagonal(flow, mass - flow.sum(1))
        plans.append(flow)
    return plans, [finite]


def assert_describes(problem: Problem, plan: EntropicPlan, b: Tensor, tol: float) -> None:
    plans, (cost,) = written_out(problem.ball, problem.x, b, plan)
    lo, hi = problem.ball.box or (0.0, math.inf)
    spent = net = 0.0
    for c, flow in enumerate(plans):
        assert flow.min() >= -tol, problem.label
        np.testing.assert_allclose(
            flow.sum(0), plan.z[0, c].double().numpy().ravel(), atol=tol, err_msg=problem.label
        )
        spent += float((flow * cost).sum())
        net += float((np.maximum(flow - flow.T, 0) * cost).sum())
    assert float(plan.cost) == pytest.approx(spent, rel=1e-4, abs=10 * tol), problem.label
    assert float(plan.net_cost) == pytest.approx(net, rel=1e-4, abs=10 * tol), problem.label
    assert lo <= float(plan.z.min()) and float(plan.z.max()) <= hi, problem.label
    mass = (plan.z - problem.x).sum((2, 3)).abs().max()
    assert float(mass) <= 1e-6 * problem.mass, problem.label


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("kind", ["grid", "stencil", "dense"])
@pytest.mark.parametrize("box", [(0.0, 1.0), (0.25, 0.9), None])
def test_the_images_describe_a_plan_of_the_ball(
    kind: str, box: tuple[float, float] | None, scale: float
) -> None:
    for problem in random_problems(12, kind=kind, box=box):
        b = scale * problem.g
        assert_describes(problem, solve(problem.ball, problem.x, b), b, 1e-9)


def test_float32_describes_it_too() -> None:
    for problem in random_problems(20):
        problem = problem.to(torch.float32)
        plan = solve(problem.ball, problem.x, 30 * problem.g)
        assert plan.z.dtype == torch.float32 and plan.cost.dtype == torch.float64
        assert_describes(problem, plan, 30 * problem.g, 2e-5)  # logits of size 60 in float32


def test_the_price_meets_the_budget_or_is_zero() -> None:
    for problem in random_problems(30, box=None):
        plan = solve(problem.ball, problem.x, 5 * problem.g, newton=40)
        share = float(plan.cost / problem.ball.budget(problem.x))
        assert share <= 1 + 1e-9, problem.label
        assert share >= 0.999 or float(plan.psi) == 0, problem.label


def test_the_plan_maximises_its_own_objective() -> None:
    """``<b, z> + entropy`` over plans of the same cost: no feasible shift of mass between two moves improves it."""
    rng = np.random.default_rng(0)
    for problem in random_problems(10, box=None, radius="tight"):
        b = 3 * problem.g
        plan = solve(problem.ball, problem.x, b, newton=60)
        plans, (cost,) = written_out(problem.ball, problem.x, b, plan)
        allowed = np.isfinite(cost_matrix(problem.ball, problem.x.shape[-2], problem.x.shape[-1]))
        for c, flow in enumerate(plans):
            ends = np.broadcast_to(b[0, c].numpy().ravel()[None, :], flow.shape)
            mass = flow.sum(1, keepdims=True)
            usable = allowed & (flow > 0)

            def value(
                p: NDArray[np.float64], ends: NDArray[np.float64], m: NDArray[np.float64]
            ) -> float:
                share = np.divide(p, m, out=np.ones_like(p), where=(p > 0) & (m > 0))
                return float((p * ends).sum() - (p * np.log(share)).sum())

            for _ in range(5):
                shift = np.where(usable, rng.standard_normal(flow.shape) * flow, 0.0)
                shift -= flow * np.divide(
                    shift.sum(1, keepdims=True), mass, out=np.zeros_like(mass), where=mass > 0
                )  # rows stay
                worse = flow + 1e-3 * shift
                if worse.min() < 0:
                    continue
                price = float(plan.psi) * float(((worse - flow) * cost).sum())
                assert value(worse, ends, mass) - price <= value(flow, ends, mass) + 1e-12, (
                    problem.label
                )


def test_box_potentials_leave_less_to_the_repair() -> None:
    """What the repair sends back is budget that was not spent."""
    problem = random_problems(1, pixels="saturated", radius="loose", shape=(8, 8))[0]
    budget = problem.ball.budget(problem.x)
    plans = [solve(problem.ball, problem.x, 5 * problem.g, sweeps=sweeps) for sweeps in (0, 5, 200)]
    unspent = [1 - float(plan.cost / budget) for plan in plans]
    assert unspent[0] > unspent[1] > unspent[2]
    assert unspent[2] < 0.02 < unspent[0]


def test_momentum_does_the_work_of_many_sweeps() -> None:
    """Where potentials are large and pixels full, ten steps with momentum leave less to the repair than thirty."""
    problem = random_problems(1, pixels="saturated", radius="loose", shape=(8, 8))[0]
    budget, b = problem.ball.budget(problem.x), 40 * problem.g
    plain, more = (solve(problem.ball, problem.x, b, sweeps=sweeps) for sweeps in (10, 30))
    carried = solve(problem.ball, problem.x, b, sweeps=10, momentum=0.9)
    unspent = [1 - float(plan.cost / budget) for plan in (carried, more, plain)]
    assert unspent[0] < unspent[1] < unspent[2]
    assert bool(((carried.z >= 0) & (carried.z <= 1)).all())


def test_warm_start_continues_where_the_last_call_ended() -> None:
    problem = random_problems(1, pixels="saturated", radius="loose", shape=(8, 8))[0]
    ball, x, b = problem.ball, problem.x, 5 * problem.g
    moves = ball.cost.arcs(8, 8, x)
    plan = solve(ball, x, b, sweeps=20)
    again = entropic_plan(
        PlanRequest(x, b, ball.budget(x), moves, ball.box, psi=plan.psi, q=plan.q, sweeps=0)
    )
    torch.testing.assert_close(again.z, plan.z, atol=1e-6, rtol=0)


def test_a_batch_is_a_loop() -> None:
    torch.manual_seed(1)
    x = torch.rand(4, 3, 6, 7, dtype=torch.float64)
    x[2] = 0
    b, ball = 10 * torch.randn_like(x), WassersteinBall(torch.tensor([0.1, 0.0, 0.2, 0.5]))
    together = solve(ball, x, b)
    for i in range(4):
        alone = solve(ball.take(torch.tensor([i])), x[i : i + 1], b[i : i + 1])
        torch.testing.assert_close(alone.z[0], together.z[i])
        torch.testing.assert_close(alone.net_cost[0], together.net_cost[i])


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 9), (2, 1, 9, 1), (2, 3, 2, 2), (1, 1, 1, 1), (0, 1, 4, 4)]
)
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, dtype=torch.float64)
    plan = solve(WassersteinBall(0.3, GridCost(21)), x, 20 * torch.randn_like(x))
    assert plan.z.shape == x.shape
    torch.testing.assert_close(plan.z.sum((2, 3)), x.sum((2, 3)))


def test_black_images_and_empty_rows() -> None:
    x = torch.zeros(2, 1, 6, 6)
    x[1, 0, 3, 3] = 1.0
    plan = solve(WassersteinBall(0.5), x, 5 * torch.randn_like(x))
    assert torch.equal(plan.z[0], x[0]) and float(plan.cost[0]) == 0
    assert torch.isfinite(plan.z).all() and float(plan.cost[1]) == pytest.approx(0.5, rel=2e-3)


def test_repair_goes_no_further_than_the_box_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full block whose inside would have to receive: what the last sweep must take away, it takes away in part."""
    random = torch.Generator().manual_seed(3)
    x, empty, full = (torch.rand((1, 1, 8, 9), generator=random).double() for _ in range(3))
    x = torch.where(full < 0.25, 1.0, torch.where(empty < 0.25, 0.0, x))
    b = torch.randn(x.shape, generator=random).double()
    ball = WassersteinBall(0.1)
    plans = {}
    for kernel in ("torch", "cpu"):
        monkeypatch.setenv("WBALL_KERNEL", kernel)
        plans[kernel] = solve(ball, x, b, sweeps=0)
        assert float(plans[kernel].z.max()) == pytest.approx(1.0, abs=1e-9)
        assert float(plans[kernel].cost) > 0.62 * float(
            ball.budget(x)
        )  # 0.60 with all that the sweep would take
    torch.testing.assert_close(plans["cpu"].z, plans["torch"].z, atol=1e-9, rtol=0)
    torch.testing.assert_close(plans["cpu"].keep, plans["torch"].keep, atol=1e-9, rtol=0)
