"""From what an attacker has learnt to a point of the ball, for every ball.

Attacks that accumulate gradients (their own or estimated ones) hold potentials ``b`` and ask an oracle for the point of
the ball that follows them. A ball with an idea of its own has a method ``oracle(x)``: :class:`~wball.WassersteinBall`
makes a transport plan of them. For all others the point is the projection of ``x + scale * b``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wball.attacks.base import normal, understood
from wball.ball import Ball
from wball.batch import per_image
from wball.solvers.oracle import OraclePoint


class Oracle(Protocol):
    """Points of a ball from potentials, for one batch of images. ``cost / unit`` is in the unit of ``eps``."""

    unit: Tensor

    def __call__(self, b: Tensor) -> OraclePoint: ...

    def take(self, index: Tensor) -> Oracle: ...


class ProjectionOracle:
    """``proj(x + scale * b)``: potentials are steps in pixel values.

    ``scale`` is the largest change of a pixel that the ball allows in a random direction, so that potentials of a few
    nats reach its border.
    """

    def __init__(self, ball: Ball, x: Tensor) -> None:
        self.ball, self.x = ball, x
        self.unit = torch.ones(x.shape[0], dtype=torch.float64, device=x.device)
        signs = torch.where(torch.arange(x[0:1].numel(), device=x.device) % 2 == 0, 1.0, -1.0).to(x)
        corner = ball.support(x, signs.view(x[0:1].shape).expand_as(x).contiguous()).point
        self._scale = (corner - x).flatten(1).abs().amax(1) if x.shape[0] else x.new_zeros(0)

    def __call__(self, b: Tensor) -> OraclePoint:
        result = self.ball.project(self.x, self.x + per_image(self._scale, self.x) * b)
        distance = self.ball.distance(self.x, result.point).to(torch.float64)
        return OraclePoint(result.point, distance, torch.ones_like(distance), result.kernel)

    def take(self, index: Tensor) -> ProjectionOracle:
        part = object.__new__(ProjectionOracle)
        part.ball, part.x, part.unit, part._scale = (
            self.ball.take(index), self.x[index], self.unit[index], self._scale[index],
        )  # fmt: skip
        return part


def oracle_of(ball: Ball, x: Tensor, **options: Any) -> Oracle:
    """The ball's own oracle (with those of the options that it takes), or else its projection."""
    own = getattr(ball, "oracle", None)
    if own is None:
        return ProjectionOracle(ball, x)
    oracle: Oracle = own(x, **understood(own, **options))
    return oracle


def reachable_pixels(ball: Ball, x: Tensor, generator: torch.Generator) -> Tensor:
    """1 where the ball lets a pixel change: potentials that differ everywhere move mass wherever it can go."""
    return (oracle_of(ball, x)(normal(x, generator)).z != x).to(x)
