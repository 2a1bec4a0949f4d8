"""The l-inf ball: the usual threat model, for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball import inputs
from wball.auditing.violations import Violations, box_violation, check_point, half_ulp
from wball.ball.base import Ball
from wball.input_sets import IntervalSet, Plans
from wball.inputs import result_dtype
from wball.plan import StoredPlan
from wball.result import ProjectionResult, Status, SupportResult


@dataclass(frozen=True)
class LinfBall(Ball):
    """``{z : |z - x| <= eps in every pixel, lo <= z <= hi}``: the usual threat model, for
    comparison.

    >>> ball = LinfBall(0.1)
    >>> x = torch.full((1, 1, 2, 2), 0.5)
    >>> round(float(ball.support(x, torch.ones_like(x)).value), 6)
    2.4
    """

    eps: float | Tensor
    box: tuple[float, float] | None = (0.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", inputs.check_eps(self.eps))
        object.__setattr__(self, "box", inputs.check_box(self.box))

    @property
    def unit(self) -> str:
        """The unit of ``eps``, for tables and plots."""
        return "pixel value"

    def step_size(self, steps: int) -> float | Tensor:
        return 2.5 * self.eps / steps

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and highest value of each pixel. Half precision would round them out of the
        ball: float32 then."""
        x = inputs.check_images("x", x, self.box).detach()
        inputs.check_eps_count(self.eps, x.shape[0])
        x = x.to(result_dtype(x))
        eps = torch.as_tensor(self.eps, dtype=x.dtype, device=x.device).reshape(
            -1, *[1] * (x.ndim - 1)
        )
        lo, hi = self.box if self.box is not None else (-math.inf, math.inf)
        return (x - eps).clamp(lo, hi), (x + eps).clamp(lo, hi)

    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult:
        """``max <g, z>``: each pixel goes to the end of its interval that ``g`` points to. ``reg``
        plays no role."""
        low, high = self.bounds(x)
        g = inputs.check_like("g", g, x).detach()
        point = torch.where(
            g > 0, high, torch.where(g < 0, low, x.detach().to(low).clamp(low, high))
        )
        value = (g.to(torch.float64) * point.to(torch.float64)).flatten(1).sum(1)
        n_iter = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return SupportResult(point, value, value.clone(), (Status.EXACT,) * x.shape[0], n_iter)

    def project(self, x: Tensor, w: Tensor, reg: float = math.inf) -> ProjectionResult:
        """The nearest point: clip every pixel to its interval. ``reg`` plays no role."""
        low, high = self.bounds(x)
        w = inputs.check_like("w", w, x).detach()
        point = torch.minimum(torch.maximum(w, low), high).to(low)
        objective = 0.5 * (w.to(torch.float64) - point.to(torch.float64)).flatten(1).square().sum(1)
        zero = torch.zeros_like(objective)
        n_iter = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return ProjectionResult(
            point, objective, zero, zero.clone(), (Status.EXACT,) * x.shape[0], n_iter
        )

    def distance(self, x: Tensor, z: Tensor) -> Tensor:
        """The largest change of a pixel, per image."""
        x = inputs.check_images("x", x, self.box)
        inputs.check_like("z", z, x)
        return (
            (z.detach().to(torch.float64) - x.detach().to(torch.float64)).flatten(1).abs().amax(1)
        )

    def violations(
        self, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
    ) -> Violations:
        """How far the worst pixel is outside the box, and the largest change of a pixel. ``plan``
        plays no role."""
        x = inputs.check_images("x", x, self.box)
        check_point(z, x)
        inputs.check_eps_count(self.eps, x.shape[0])
        change = (
            (z.detach().to(x.device, torch.float64) - x.detach().to(torch.float64))
            .flatten(1)
            .abs()
            .amax(1)
        )
        lo, hi = self.box if self.box is not None else (-math.inf, math.inf)
        return Violations(
            mass_error=torch.where(change.isfinite(), 0.0, math.inf).to(change),
            box_violation=box_violation(z, (lo, hi)).to(x.device),
            distance=change.nan_to_num(math.inf, math.inf),
            rounding=torch.full_like(change, half_ulp(z)),
            exact=torch.ones_like(change, dtype=torch.bool),
        )

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A uniformly random point of the ball for each image."""
        inputs.check_generator(generator)
        low, high = self.bounds(x)
        device = generator.device if generator is not None else x.device
        u = torch.rand(x.shape, dtype=torch.float32, device=device, generator=generator).to(low)
        return torch.minimum(low + u * (high - low), high)

    def input_set(self, x: Tensor, plans: Plans = "full") -> IntervalSet:
        """The ball as certificates see it; there are no ``plans`` here."""
        return IntervalSet(*self.bounds(x.to(torch.float64)))
