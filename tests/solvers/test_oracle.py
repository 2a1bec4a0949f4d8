"""The attack step's oracle: it spends its budget, and survives a kernel that fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from wball import WassersteinBall, audit, load_sample
from wball.solvers import oracle
from wball.solvers.oracle import TransportOracle


def test_the_budget_is_spent_after_a_few_calls() -> None:
    """Opposite flows cancel and make a point cheaper than its plan: the next plan may cost more."""
    x, ball = load_sample("mnist")[0][:3], WassersteinBall(0.1)
    ask, potentials = TransportOracle(ball.problem(x)), 3 * torch.randn(x.shape)
    points = [ask(potentials) for _ in range(6)]
    share = [(point.cost / ball.budget(x)).tolist() for point in points]
    assert min(share[-1]) > 0.98 and max(share[-1]) <= 1 and min(share[-1]) > min(share[0])
    assert all(audit(ball, x, point.z).all_valid for point in points)


@pytest.mark.parametrize("field", ["z", "net_cost"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_image_on_which_the_kernel_fails_stays_where_it_is(
    field: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ball = load_sample("mnist")[0][:3], WassersteinBall(0.1)
    potentials = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    right = TransportOracle(ball.problem(x))(potentials)
    answer = oracle.entropic_plan

    def failing(*args: Any, **settings: Any) -> Any:
        plan = answer(*args, **settings)
        broken = getattr(plan, field).clone()
        broken[1] = value
        return replace(plan, **{field: broken})

    monkeypatch.setattr(oracle, "entropic_plan", failing)
    point = TransportOracle(ball.problem(x))(potentials)
    assert (
        torch.equal(point.z[1], x[1])
        and bool(point.cost.isfinite().all())
        and audit(ball, x, point.z).all_valid
    )
    for i in (0, 2):
        assert torch.equal(point.z[i], right.z[i]) and point.cost[i] == right.cost[i]
