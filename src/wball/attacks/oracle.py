"""From what an attacker has learnt to a point of the ball, for every ball.

Attacks that accumulate gradients (their own or estimated ones) hold potentials ``b`` and ask an oracle for the point of
the ball that follows them. A ball with an idea of its own has a method ``oracle(x)``: :class:`~wball.WassersteinBall`
makes a transport plan of them. For all others the point is the projection of ``x + scale * b``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wball.attacks.base import normal
from wball.ball import Ball
from wball.ball.base import Oracle


def oracle_of(ball: Ball, x: Tensor, **options: Any) -> Oracle:
    """The oracle of the ball around ``x``."""
    return ball.oracle(x, **options)


def reachable_pixels(ball: Ball, x: Tensor, generator: torch.Generator) -> Tensor:
    """1 where the ball lets a pixel change: potentials that differ everywhere move mass wherever it can go."""
    return (oracle_of(ball, x)(normal(x, generator)).z != x).to(x)
