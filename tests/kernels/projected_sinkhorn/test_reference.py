"""Projected Sinkhorn in plain torch: few sweeps, whole batches, large full areas. Others ask for its optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wball.ball import WassersteinBall
from wball.cost import GridCost
from wball.kernels.plan_rows import PlanRows, ring_sums
from wball.kernels.projected_sinkhorn import Projection, reference
from wball.kernels.projected_sinkhorn.excess_reference import drain


def problem(
    x: Tensor, reg: float, seed: int = 1, *, eps: float = 0.05, tol: float = 1e-4
) -> Projection:
    random = torch.Generator().manual_seed(seed)
    w = x + 0.1 * torch.randint(0, 2, x.shape, generator=random).mul(2).sub(1)
    ball, mass = WassersteinBall(eps), x.double().sum((1, 2, 3))
    moves = ball.cost.arcs(*x.shape[2:], x)
    return Projection(x, w, ball.budget(x), moves, ball.box, mass / reg, tol=tol, max_iter=400)


def full_with_a_hole(side: int) -> Tensor:
    x = torch.ones(1, 1, side, side)
    x[..., 8:20, 8:20] = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    return x


def half_full(side: int) -> Tensor:
    x = torch.ones(1, 1, side, side)
    x[..., side // 2 :] = 0.3
    return x


@pytest.mark.parametrize(
    ("x", "sweeps"), [(full_with_a_hole(48), 80), (half_full(48), 40)], ids=["hole", "half"]
)
def test_full_areas_take_few_sweeps(x: Tensor, sweeps: int) -> None:
    """Without what repairs send back: 400 were not enough for the hole."""
    answer = reference.projected_sinkhorn(problem(x, 1000.0))
    assert bool((answer.gap <= answer.allowed).all()) and int(answer.n_iter) <= sweeps


def test_excess_gets_out_of_a_full_area() -> None:
    """All flows go to the next pixels, where steps of Jacobi's method swing; at the rim there is room."""
    side, above = 24, 1e-3
    x = torch.ones(1, 1, side, side, dtype=torch.float64)
    x[..., 0, :] = x[..., -1, :] = x[..., :, 0] = x[..., :, -1] = 0.5
    moves, price = GridCost(3).arcs(side, side, x), torch.full((1,), 3.0, dtype=torch.float64)
    beta = torch.zeros_like(x)
    beta[..., 10:14, 10:14] = 0.05
    rows = PlanRows(x, beta, price, ring_sums(beta, moves), moves)
    columns = rows.columns()
    assert float(columns.max()) > 1 + above
    keep, found, possible = drain(
        rows, columns - rows.flow(0), columns, torch.full((1,), 1 - 1e-6), 1 + 1e-12
    )
    sent, received = rows.exchange(keep, torch.ones_like(x))
    z = x - sent + keep * received
    assert bool(found) and bool(possible) and float(z.max()) <= 1 + 1e-12
    assert float(keep.min()) > 0 and float((1 - keep).max()) > above
    wide = PlanRows(x, 1e3 * beta * 20, price, ring_sums(1e3 * beta * 20, moves), moves)
    assert not bool(drain(wide, columns, columns, torch.ones(1), 1.0)[2]), (
        "beyond what factors can be multiplied"
    )


def test_images_do_not_depend_on_the_batch() -> None:
    """Images leave one by one, and only those that are ready are repaired."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand((5, 2, 9, 8), generator=random).mul(2).clamp(max=1)
    x[2] = 0.0
    batch = problem(x, 300.0)
    together = reference.projected_sinkhorn(batch)
    assert len(set(together.n_iter.tolist())) > 2 and int(together.n_iter[2]) == 0
    for k in range(len(x)):
        mine = {name: getattr(batch, name)[k : k + 1] for name in ("x", "w", "budget", "tau")}
        alone = reference.projected_sinkhorn(replace(batch, **mine))
        assert int(alone.n_iter) == int(together.n_iter[k])
        torch.testing.assert_close(alone.z[0], together.z[k], rtol=0, atol=1e-6)


def test_answers_have_the_dtype_of_the_images() -> None:
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        x = torch.rand((2, 1, 7, 6), generator=random, dtype=dtype)
        answer = reference.projected_sinkhorn(problem(x, 100.0, tol=1e-6))
        assert (
            answer.z.dtype == answer.u.dtype == answer.psi.dtype == answer.residual.dtype == dtype
        )
        assert bool((answer.gap <= answer.allowed).all()), "float64 inside, whatever the images are"


def test_balls_project_by_sweeps_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It followed the path instead, which did not end in 45 s at 128 x 128 x 3."""
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    monkeypatch.delattr("wball.solvers.projection._followed")
    x = torch.rand((1, 3, 64, 64), generator=torch.Generator().manual_seed(0)).mul(1.5).clamp(max=1)
    ball = WassersteinBall(0.05)
    found = ball.project(x, problem(x, 1.0).w, reg=3000.0, tol=1e-4)
    assert bool(found.converged) and found.kernel == "torch" and int(found.n_iter) <= 20
    assert found.plan is not None
    torch.testing.assert_close(found.plan.columns(), found.point.double(), atol=1e-7, rtol=0)
