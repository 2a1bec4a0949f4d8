"""Pixels that exchange mass with nobody but each other: no direction without curvature may stall a solver."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wball
from wball.result import Status

pytest.importorskip("wball.kernels.entropic_path.cpu")


def islands(shape: tuple[int, int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tiny images, mostly full; points to project that are near and far; directions."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand((count, 1, *shape), generator=random, dtype=torch.float64)
    x = torch.where(torch.rand(x.shape, generator=random) < 0.6, 1.0, x).clamp(min=0.2)
    size = 10 ** (3 * torch.rand((count, 1, 1, 1), generator=random, dtype=torch.float64) - 1.5)
    w = x + size * torch.randn(x.shape, generator=random, dtype=torch.float64)
    return x, w, torch.randn(x.shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("reg", [1e5, math.inf])
@pytest.mark.parametrize(
    ("kernel", "shape"), [("cpu", (1, 2)), ("cpu", (1, 3)), ("torch", (1, 2))], ids=str
)
def test_full_islands_converge(
    shape: tuple[int, int], reg: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    x, w, g = islands(shape, 60 if kernel == "cpu" else 20)
    for box in ((0.0, 1.0), (0.2, 1.0)):
        ball = wball.WassersteinBall(0.3, wball.GridCost(3), box=box)
        assert set(ball.project(x, w, reg).status) == {Status.CONVERGED}
        assert set(ball.support(x, g, reg).status) == {Status.CONVERGED}


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_a_tolerance_below_rounding_is_a_stall_and_not_a_matter_of_max_iter(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    random = torch.Generator().manual_seed(0)
    x = torch.rand((1, 1, 4, 4), generator=random, dtype=torch.float64)
    g = torch.randn(x.shape, generator=random, dtype=torch.float64)
    ball = wball.WassersteinBall(0.3)
    result = ball.support(x, g, tol=1e-30, max_iter=500)
    assert result.status == (Status.STALLED,)
    assert int(result.n_iter) < 500 and bool(ball.contains(x, result.point).all())
    assert "max_iter" in str(Status.STALLED) and "tol" in str(Status.STALLED)
    assert ball.project(x, g, max_iter=2).status == (Status.MAX_ITER,)
