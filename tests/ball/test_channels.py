"""Moves across channels: the ball of such a cost is the ball of a matrix over all pixels of all
channels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import wball
from problems import arc_list
from references import reference_support
from wball import DenseCost, GridCost, WassersteinBall
from wball.cost import read_cost
from wball.input_sets import transport
from wball.input_sets.rows import Rows
from wball.plan import Plan
from wball.training.bounds import linear_gain

CASES = {
    "window": ((3, 3, 4), GridCost(3, channel_cost=1.0)),
    "squared": ((2, 4, 3), GridCost(5, 2.0, 0.5)),
    "cheap": ((4, 1, 3), GridCost(3, channel_cost=0.3)),
    "colours only": ((3, 2, 2), GridCost(1, channel_cost=2.0)),
}


def flat(values: Tensor) -> Tensor:
    return values.flatten(1)


def whole(cost: GridCost, shape: tuple[int, ...], full: bool = False) -> DenseCost:
    """The cost as a matrix over all pixels of all channels."""
    matrix = torch.full((math.prod(shape),) * 2, math.inf, dtype=torch.float64)
    for i, j, price in arc_list(cost.full(*shape[1:]) if full else cost, *shape[1:], shape[0]):
        matrix[i, j] = price
    return DenseCost(matrix)


def made(name: str, eps: float) -> tuple[WassersteinBall, WassersteinBall, Tensor, Tensor]:
    """The ball, that of the matrix, images with empty and full pixels, and a direction."""
    shape, cost = CASES[name]
    random = torch.Generator().manual_seed(3)
    x = torch.rand(4, *shape, generator=random, dtype=torch.float64)
    x = x * (torch.rand(x.shape, generator=random) < 0.7)
    x = torch.where(torch.rand(x.shape, generator=random) < 0.1, 1.0, x)
    ball = WassersteinBall(eps, cost)
    g = torch.randn(x.shape, generator=random, dtype=torch.float64)
    return ball, replace(ball, cost=whole(cost, shape)), x, g


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("eps", [0.05, 0.4])
def test_every_answer_is_that_of_the_matrix(name: str, eps: float) -> None:
    ours, matrix, x, g = made(name, eps)
    w = x + 0.5 * g
    a, b = ours.project(x, w, tol=1e-9), matrix.project(flat(x), flat(w), tol=1e-9)
    torch.testing.assert_close(flat(a.point), b.point, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        ours.distance(x, a.point), matrix.distance(flat(x), b.point), atol=1e-5, rtol=0
    )
    assert a.stored is not None and wball.audit(ours, x, a.point, plan=a.stored).all_valid
    soft, other = ours.project(x, w, 300.0, tol=1e-9), matrix.project(flat(x), flat(w), 300.0)
    torch.testing.assert_close(soft.objective, other.objective, atol=1e-4, rtol=1e-4)
    for reg in (math.inf, 100.0):
        a, b = (
            ball.support(images, direction, reg, tol=1e-8)
            for ball, images, direction in ((ours, x, g), (matrix, flat(x), flat(g)))
        )
        torch.testing.assert_close(a.value, b.value, atol=1e-6, rtol=1e-6)
        assert wball.audit(ours, x, a.point).all_valid
    far, full = ours.distance(x, x.roll(1, 1), plans="full"), whole(ours.cost, x.shape[1:], True)
    again = replace(matrix, cost=full).distance(flat(x), flat(x.roll(1, 1)))
    torch.testing.assert_close(far, again)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("box", [(0.0, 1.0), None, (0.1, 0.9)])
def test_points_of_the_oracle_are_proved_by_their_plans(
    name: str, box: tuple[float, float] | None
) -> None:
    ours, matrix, x, g = made(name, 0.2)
    x = x if box is None else box[0] + (box[1] - box[0]) * x
    ours, matrix = replace(ours, box=box), replace(matrix, box=box)
    oracle, other = ours.oracle(x), matrix.oracle(flat(x))
    for k in range(3):
        here, there = oracle((2 + k) * g), other(flat((2 + k) * g))
        torch.testing.assert_close(flat(here.z), there.z, atol=1e-7, rtol=0)
        proof = here.proof
        assert proof is not None
        torch.testing.assert_close(proof.columns(), here.z)
        torch.testing.assert_close(proof.net_cost(), here.cost)
        for plan in (proof, proof.written().cancelled().flow):
            report = wball.audit(ours, x, here.z, plan=plan, exact="needed")
            assert report.all_valid and not report.exact.any()
    assert ours.contains(x, ours.sample(x)).all()


def test_a_plan_that_changes_the_channel_proves_nothing_to_other_balls() -> None:
    ours, _, x, g = made("window", 0.3)
    point = ours.support(x, g).point
    inside = replace(ours, cost=GridCost(3))
    assert not inside.contains(x, point).any()
    assert (wball.audit(inside, x, point).mass_error > 1e-3).all()
    assert (wball.audit(ours, x, point).mass_error <= 1e-9).all()
    moves = ours.cost.arcs(x)
    flow = Plan.identity(moves, x).flow
    assert (ours.violations(x, x, flow).distance == 0).all()
    wrong = next(k for k, (*_, over, _) in enumerate(moves) if over == 1)
    flow[:, 2, wrong] = 1e-3  # from the last channel to the next
    assert ours.violations(x, x, flow).distance.isinf().all()


def test_one_channel_has_no_other() -> None:
    x = torch.rand(2, 1, 4, 4)
    for eps in (0.1, 0.5):
        here, there = (
            WassersteinBall(eps, cost).support(x, 1 - x)
            for cost in (GridCost(3), GridCost(3, 1.0, 0.5))
        )
        assert torch.equal(here.point, there.point)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("plans", ["window", "full"])
def test_maxima_of_rows_are_those_of_the_matrix(name: str, plans: str) -> None:
    ours, matrix, x, g = made(name, 0.2)
    matrix = replace(matrix, cost=whole(ours.cost, x.shape[1:], plans == "full"))
    every = torch.arange(len(x))
    here = ours.input_set(x, plans).maximum(Rows(g, every))  # type: ignore[arg-type]
    there = matrix.input_set(flat(x), "full").maximum(Rows(flat(g), every))
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_tiers_and_patches_bound_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer moves of a full plan in groups, and rows that see a part of the image."""
    monkeypatch.setattr(transport, "LIST_ALL", 0)
    random = torch.Generator().manual_seed(5)
    x = torch.rand(2, 3, 9, 9, generator=random, dtype=torch.float64)
    ball = WassersteinBall(0.3, GridCost(3, channel_cost=0.6), box=None)
    patch = torch.randn(2, 3, 2, 2, generator=random, dtype=torch.float64)
    corner = torch.tensor([3, 8]), torch.tensor([4, -1])
    rows = Rows(patch, torch.arange(2), corner)
    dense = rows.dense((3, 9, 9))
    for plans in ("window", "full"):
        source = ball.input_set(x, plans)  # type: ignore[arg-type]
        cost = ball.cost.full(9, 9) if plans == "full" else ball.cost
        assert isinstance(cost, GridCost)
        exact = replace(ball, cost=cost).support(x, dense.coeff).upper
        for some in (rows, dense):
            found = source.maximum(some)
            assert bool((found >= exact - 1e-9).all())
            assert bool((found <= exact + 0.2 * exact.abs()).all())


class Small(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * 16, 6), nn.ReLU(), nn.Linear(6, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("method", ["interval", "crown", "anchored", "alpha-crown", "complete"])
@pytest.mark.parametrize("plans", ["window", "full"])
def test_certificates_bound_what_the_strongest_directions_reach(method: str, plans: str) -> None:
    model, random = Small().eval(), torch.Generator().manual_seed(1)
    x = torch.rand(4, 3, 4, 4, generator=random)
    y, eps = model(x).argmax(1), 0.02
    cost = GridCost(3, channel_cost=0.5)
    ball = WassersteinBall(eps, cost)
    found = wball.certify(model, x, y, ball, method=method, plans=plans)  # type: ignore[arg-type]
    wide = ball if plans == "window" else replace(ball, cost=cost.full(4, 4))
    for _ in range(20):
        z = wide.support(x, torch.randn(x.shape, generator=random)).point
        scores = model(z)
        others = scores.scatter(1, y[:, None], -math.inf).amax(1)
        margin = (scores.gather(1, y[:, None])[:, 0] - others).double()
        assert bool((found.margin.cpu() <= margin + 1e-6).all())
    if method == "anchored":
        assert found.certified.any()
        proof = wball.verify(model, x, y, ball, found)
        assert not proof.reason and torch.equal(proof.confirmed, found.certified)


def test_linear_networks_have_exact_margins() -> None:
    """Against the linear program, for the bounds and for the checker."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Flatten(), nn.Linear(18, 2)).double(),
        torch.rand(3, 2, 3, 3).double() / 2,
    )
    y, cost = model(x).argmax(1), GridCost(3, channel_cost=0.4)
    for plans in ("window", "full"):
        ball = WassersteinBall(0.05, cost)
        found = wball.certify(model, x, y, ball, plans=plans)  # type: ignore[arg-type]
        wide = ball if plans == "window" else replace(ball, cost=cost.full(3, 3))
        weight = model[1].weight.detach()
        for k in range(3):
            g = (weight[1 - y[k]] - weight[y[k]]).view(1, 2, 3, 3)
            bias = model[1].bias.detach()
            worst = -reference_support(wide, x[k : k + 1], g).objective
            exact = float(worst - (bias[1 - y[k]] - bias[y[k]]))
            assert float(found.margin[k]) == pytest.approx(exact, abs=1e-6)
        again = wball.verify(model, x, y, ball, found)
        assert torch.equal(again.confirmed, found.certified)


def test_attacks_training_and_evaluation_follow() -> None:
    model, x = Small().eval(), torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y, ball = model(x).argmax(1), WassersteinBall(0.3, GridCost(3, channel_cost=0.5))
    attacks: list[wball.Attack] = [
        wball.DualAveraging(ball, steps=10), wball.PGD(ball, steps=5), wball.FrankWolfe(ball, steps=5),
        wball.PGD(ball, steps=5, reg=1000.0), wball.ScoreSearch(ball, queries=60),
        wball.StandardAttack(ball, version="fast"),
    ]  # fmt: skip
    for attack in attacks:
        found = attack(model, x, y)
        assert wball.audit(ball, x, found.images).all_valid
    result = wball.evaluate(model, x, y, ball, [0.1, 0.3], attacks[-1])
    assert [point.eps for point in result.curve()] == [0.0, 0.1, 0.3]
    assert read_cost(ball.describe()) == ball.cost
    assert bool((linear_gain(torch.randn_like(x), x, ball) > 0).all())


def test_gradients_follow_moves_across_channels() -> None:
    ball, x = WassersteinBall(0.1, GridCost(3, channel_cost=0.7)), torch.rand(1, 2, 3, 3).double()
    w = (x + 0.3 * torch.randn_like(x)).requires_grad_(True)
    for reg in (math.inf, 200.0):
        direction = torch.randn_like(x)

        def value(w: Tensor, reg: float = reg, direction: Tensor = direction) -> Tensor:
            return (ball.project(x, w, reg, tol=1e-12).point * direction).sum()

        (gradient,) = torch.autograd.grad(value(w), w)
        step = 1e-4 * torch.randn_like(x)
        change = value(w.detach() + step) - value(w.detach() - step)
        assert float(change) == pytest.approx(
            2 * float((gradient * step).sum()), rel=2e-2, abs=2e-7
        )
