"""Every projected point of an attack-like run passes the audit, at every reg, in float32.

A few images in the test suite; ``WBALL_LONG=1 pytest tests/solvers/test_validity.py`` takes 1,000 digits and 200 colour
images of CIFAR's size instead.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

import wball

LONG = bool(os.environ.get("WBALL_LONG"))
REGS = (1.0, 100.0, 3e3, 1e5, 1e7, math.inf)


def digits() -> Tensor:
    return wball.load_sample("mnist")[0][: 1000 if LONG else 16]


def colours() -> Tensor:
    """Smooth colour images with black, saturated and textured parts."""
    count = 200 if LONG else 3
    coarse = torch.rand(count, 3, 8, 8)
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    return (1.6 * smooth - 0.3 + 0.1 * torch.randn(count, 3, 32, 32)).clamp(0, 1)


@pytest.mark.parametrize("reg", REGS)
@pytest.mark.parametrize("images", [digits, colours])
def test_points_of_an_attack_are_valid(images: object, reg: float) -> None:
    x = images()  # type: ignore[operator]
    eps = torch.rand(len(x)) * 0.5
    eps[0] = 0.005
    ball = wball.WassersteinBall(eps)
    point = x
    # Two steps of a sign-gradient attack: the second starts on the ball's surface.
    for size in (0.1, 0.3):
        w = point + size * torch.randn_like(x).sign()
        result = ball.project(x, w, reg, tol=1e-3, max_iter=40)
        point = result.point
        assert bool(point.isfinite().all())
        report = wball.audit(ball, x, point)
        assert report.all_valid, report.summary()
        scale = result.objective.abs() + 0.5 * (w - x).double().square().flatten(1).sum(1)
        claimed = result.converged
        assert bool((result.gap[claimed] <= 1e-3 * scale[claimed]).all())
