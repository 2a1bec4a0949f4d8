"""The attack step's oracle: it spends its budget, and survives a kernel that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wball import PGD, WassersteinBall, audit, load_sample
from wball.attacks import GrowingRadius
from wball.kernels.entropic_plan import cpu
from wball.solvers.oracle import EntropicProjection, TransportOracle


def test_the_budget_is_spent_after_a_few_calls() -> None:
    """Opposite flows cancel and make a point cheaper than its plan: the next plan may cost more."""
    x, ball = load_sample("mnist")[0][:3], WassersteinBall(0.1)
    ask, potentials = TransportOracle(ball.problem(x)), 3 * torch.randn(x.shape)
    points = [ask(potentials) for _ in range(6)]
    share = [(point.cost / ball.budget(x)).tolist() for point in points]
    assert min(share[-1]) > 0.98 and max(share[-1]) <= 1 and min(share[-1]) > min(share[0])
    assert all(audit(ball, x, point.z).all_valid for point in points)


@pytest.mark.parametrize("field", ["columns", "net cost"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_image_on_which_the_kernel_fails_stays_where_it_is(
    field: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ball = load_sample("mnist")[0][:3], WassersteinBall(0.1)
    potentials = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    right = TransportOracle(ball.problem(x))(potentials)
    right_answer = cpu.pulled_back

    def failing(request: Any, columns: Any, costs: Any, *rest: Any) -> Any:
        (columns if field == "columns" else costs[1])[1] = value
        return right_answer(request, columns, costs, *rest)

    monkeypatch.setattr(cpu, "pulled_back", failing)
    point = TransportOracle(ball.problem(x))(potentials)
    assert (
        torch.equal(point.z[1], x[1])
        and bool(point.cost.isfinite().all())
        and audit(ball, x, point.z).all_valid
    )
    for i in (0, 2):
        assert torch.equal(point.z[i], right.z[i]) and point.cost[i] == right.cost[i]


def test_pgd_without_plans_is_pgd_with_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    images = (1.8 * torch.rand(5, 2, 7, 8) - 0.4).clamp(0, 1)
    images[3] = 0.0
    model = nn.Sequential(nn.Flatten(), nn.Linear(112, 4))
    y = model(images).argmax(1)
    attack = PGD(WassersteinBall(0.02), steps=12, reg=1e3, tol=1e-5, growth=GrowingRadius(1.5, 3))
    expected = attack(model, images, y)
    monkeypatch.setattr(EntropicProjection, "serves", lambda *_: True)
    monkeypatch.setattr(WassersteinBall, "project", None)
    found = attack(model, images, y)
    assert torch.equal(found.success, expected.success) and int(found.success.sum()) > 0
    assert torch.equal(found.n_steps, expected.n_steps)
    torch.testing.assert_close(found.images, expected.images, atol=1e-2, rtol=0)
    assert audit(attack.ball.at(found.radius), images, found.images).all_valid
    assert (found.distance <= found.radius).all()
