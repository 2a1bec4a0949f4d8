"""The attack step's oracle beside a kernel that fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from wball import WassersteinBall, audit, load_sample
from wball.solvers import oracle
from wball.solvers.oracle import TransportOracle


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
