"""The projection without plans gives what the one with plans gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from wball import PGD, GridCost, WassersteinBall, audit
from wball.attacks import GrowingRadius
from wball.solvers.oracle import EntropicProjection


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(0)
    x = torch.rand(5, 2, 7, 8)
    x = torch.where(x < 0.4, torch.zeros_like(x), torch.where(x > 0.8, torch.ones_like(x), x))
    x[3] = 0.0
    return x


@pytest.mark.parametrize(
    "ball", [WassersteinBall(0.2), WassersteinBall(0.3, GridCost(3, 2.0)), WassersteinBall(0.0)]
)
def test_point_is_valid_and_near_the_projection(images: Tensor, ball: WassersteinBall) -> None:
    w = images + 0.1 * torch.randn_like(images).sign()
    projection = EntropicProjection(ball.problem(images), 1000.0, tol=1e-4)
    expected = ball.project(images, w, 1000.0, tol=1e-6)
    for _ in range(2):  # the second starts where the first ended
        point = projection(w)
        assert audit(ball, images, point.z).all_valid
        assert (point.cost <= projection.budget).all()
        torch.testing.assert_close(point.z, expected.point, atol=5e-3, rtol=0)
    exact = ball.distance(images, point.z) * images.double().sum((1, 2, 3))
    assert (exact <= point.cost * (1 + 1e-5) + 1e-6).all()


def test_parts_and_paper_mode(images: Tensor) -> None:
    ball = WassersteinBall(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    w, index = images + 0.1 * torch.randn_like(images).sign(), torch.tensor([4, 1])
    projection = EntropicProjection(ball.problem(images), 1000.0, tol=1e-4)
    projection(w)
    part = projection.take(index)
    torch.testing.assert_close(part(w[index]).z, projection(w).z[index], atol=1e-5, rtol=0)
    settings = {"tol": 1e-5, "max_iter": 1000, "mode": "paper"}
    point = EntropicProjection(ball.problem(images), 1000.0, **settings)(w)
    expected = ball.project(images, w, 1000.0, **settings)
    torch.testing.assert_close(point.z, expected.point, atol=2e-3, rtol=0)
    assert point.cost.isnan().all() and torch.equal(point.z[3], images[3])


@pytest.mark.parametrize("mode", ["exact", "paper"])
def test_pgd_builds_no_plan(images: Tensor, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(112, 4))
    y = model(images).argmax(1)
    attack = PGD(
        WassersteinBall(0.02), steps=12, reg=1e3, tol=1e-5, growth=GrowingRadius(1.5, 3), mode=mode
    )
    expected = attack(model, images, y)
    monkeypatch.setattr(EntropicProjection, "serves", lambda *_: True)
    monkeypatch.setattr(WassersteinBall, "project", None)
    found = attack(model, images, y)
    assert torch.equal(found.success, expected.success) and int(found.success.sum()) > 0
    assert torch.equal(found.n_steps, expected.n_steps)
    torch.testing.assert_close(found.images, expected.images, atol=1e-2, rtol=0)
    if mode == "exact":
        assert audit(attack.ball.at(found.radius), images, found.images).all_valid
        assert (found.distance <= found.radius).all()
