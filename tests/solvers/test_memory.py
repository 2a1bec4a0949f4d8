"""What projections and support functions allocate: the plans of a chunk, or none, until somebody
asks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wball
from wball.solvers import problem


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that torch makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return out


def test_an_entropic_projection_writes_its_plan_only_when_asked() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.rand((40, 1, 20, 20), generator=random)
    w = x + 0.1 * torch.randn(x.shape, generator=random)
    ball = wball.WassersteinBall(0.1)
    with Largest() as largest:
        result = ball.project(x, w, reg=1000.0, tol=1e-3)
    assert bool(result.converged.all())
    assert largest.elements <= 2 * x.numel(), (
        "two factors, and nothing the size of 25 moves a pixel"
    )
    assert result.plan is not None and result.plan is result.plan
    torch.testing.assert_close(result.plan.columns().float(), result.point, atol=1e-6, rtol=0)
    assert bool((result.plan.cost() <= ball.budget(x) * (1 + 1e-9)).all())


def test_points_and_attacks_make_nothing_larger_than_images() -> None:
    random = torch.Generator().manual_seed(0)
    x, ball = torch.rand((20, 1, 20, 20), generator=random), wball.WassersteinBall(0.1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(400, 3))
    labels = model(x).argmax(1)
    with Largest() as largest:
        ball.sample(x, random)
        wball.DualAveraging(ball, steps=3, until_success=False)(model, x, labels)
    assert largest.elements <= 2 * x.numel(), "nothing the size of 25 moves a pixel"


@pytest.mark.parametrize("work", ["support", "project"])
def test_an_exact_call_holds_the_plans_of_a_chunk_at_most(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 digits in one ``support`` call took 7.8 GB."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand((12, 1, 6, 6), generator=random)
    given = torch.randn(x.shape, generator=random)
    entries = 2 * 36 * 25  # of two images
    monkeypatch.setattr(problem, "MAX_ARC_ENTRIES", {"cpu": entries})
    ball = wball.WassersteinBall(0.1)
    with Largest() as largest:
        result = ball.support(x, given) if work == "support" else ball.project(x, x + 0.1 * given)
    assert bool(result.converged.all())
    assert largest.elements <= entries
    assert result.plan is not None and result.plan.flow.numel() == 6 * entries
    torch.testing.assert_close(result.plan.columns().float(), result.point, atol=1e-6, rtol=0)
    torch.testing.assert_close(result.plan.rows().float(), x, atol=1e-6, rtol=0)
