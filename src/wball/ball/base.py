"""The interface of a threat model.

A :class:`Ball` is the set of images that an attacker may choose from. Attacks, training,
certificates and the audit only call its methods, so a new threat model is a subclass that answers
them; ``docs/extending.md`` has an example.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from wball import inputs
from wball.auditing.violations import DISTANCE_TOL, Violations
from wball.display import Summarised
from wball.input_sets import InputSet, Plans
from wball.inputs import per_image
from wball.plan import StoredPlan
from wball.result import ProjectionResult, SupportResult
from wball.solvers.oracle import OraclePoint
from wball.solvers.problem import TransportProblem

Self = TypeVar("Self", bound="Ball")


class Ball(Summarised, ABC):
    """A set of images around each centre ``x``. Subclasses are frozen dataclasses with the fields
    ``eps`` and ``box``.

    Abstract methods say what the ball is. The others have defaults that suit any ball.

    Attributes:
        eps: radius, one number or one per image.
        box: range of the pixels, or ``None``.
        unit: unit of ``eps``, for tables and plots.
        has_plans: whether points of the ball come from transport plans; then :meth:`problem`
            returns the problem.
    """

    eps: float | Tensor
    box: tuple[float, float] | None
    has_plans: ClassVar[bool] = False

    @property
    @abstractmethod
    def unit(self) -> str: ...

    @abstractmethod
    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult:
        """The point of the ball that maximises ``<g, z>``, with bounds of the maximum."""

    @abstractmethod
    def project(self, x: Tensor, w: Tensor, reg: float = math.inf) -> ProjectionResult:
        """The point of the ball nearest to ``w``."""

    @abstractmethod
    def distance(self, x: Tensor, z: Tensor) -> Tensor:
        """Distance from ``x`` to ``z`` in the unit of ``eps``, per image."""

    @abstractmethod
    def violations(
        self, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
    ) -> Violations:
        """How far ``z`` is outside the ball: what :func:`wball.audit` checks."""

    def input_set(self, x: Tensor, plans: Plans = "full") -> InputSet:
        """The ball for certificates: maxima of linear functions over it, sound in floating
        point."""
        raise NotImplementedError(
            f"{type(self).__name__} has no input_set(x, plans), which certificates need"
        )

    def problem(self, x: Tensor) -> TransportProblem | None:
        """The transport problem that defines the ball around ``x``; ``None`` for balls without
        plans."""
        return None

    def oracle(self, x: Tensor, **options: Any) -> Oracle:
        """Maps the potentials of an attack to points of the ball; by projection unless a ball knows
        better."""
        return ProjectionOracle(self, x)

    def step_size(self, steps: int) -> float | Tensor:
        """Default step of projected gradient ascent, in pixel values."""
        return 0.1

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random point of the ball for each image."""
        inputs.check_generator(generator)
        device = generator.device if generator is not None else x.device
        noise = torch.randn(x.shape, generator=generator, device=device).to(x)
        return self.project(x, x + noise).point

    def contains(self, x: Tensor, z: Tensor, tol: float = DISTANCE_TOL) -> Tensor:
        """Whether ``z`` is in the ball, per image, with distances up to ``eps * (1 + tol)``: the
        audit's answer."""
        if isinstance(tol, bool) or not isinstance(tol, (int, float)):
            raise TypeError(f"tol must be a number, got {type(tol).__name__}")
        if not tol >= 0:
            raise ValueError(f"tol must be >= 0, got {tol!r}")
        return self.violations(x, z).within(self.eps, tol)

    def at(self: Self, eps: float | Tensor) -> Self:
        """The same ball with another radius."""
        return dataclasses.replace(self, eps=eps)  # type: ignore[type-var]

    def take(self: Self, index: Tensor) -> Self:
        """The ball of a subset of the images (``index``: positions or a mask)."""
        eps = self.eps
        return self.at(eps[index.to(eps.device)] if isinstance(eps, Tensor) else eps)

    def describe(self) -> dict[str, Any]:
        """The threat model without its radius, as plain data."""
        box = None if self.box is None else list(self.box)
        return {"kind": type(self).__name__, "box": box, "unit": self.unit}

    def kernel(self, x: Tensor) -> str:
        """Name of the implementation that serves such images."""
        return "torch"

    def headline(self) -> dict[str, str]:
        eps = self.eps
        radius = f"one for each of {len(eps)} images" if isinstance(eps, Tensor) else f"{eps:g}"
        settings = {name: str(value) for name, value in self.describe().items() if name != "kind"}
        return {"eps": radius, **settings}


class Oracle(Protocol):
    """Maps potentials to points of the ball, for one batch of images. ``cost / unit`` is in the
    unit of ``eps``."""

    @property
    def unit(self) -> Tensor: ...

    def __call__(self, b: Tensor) -> OraclePoint: ...

    def take(self, index: Tensor) -> Oracle: ...


class ProjectionOracle:
    """``proj(x + scale * b)``: potentials are steps in pixel values.

    ``scale`` is the largest change of a pixel that the ball allows along a fixed direction of
    alternating signs, so that potentials of a few units reach the border of the ball.
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
        part.ball, part.x = self.ball.take(index), self.x[index]
        part.unit, part._scale = self.unit[index], self._scale[index]
        return part


def check_ball(ball: object) -> None:
    """Raise unless ``ball`` is a threat model."""
    if not isinstance(ball, Ball):
        raise TypeError(
            "ball must be a threat model such as WassersteinBall(0.1) or LinfBall(0.1), got "
            f"{ball!r}; a threat model of your own must subclass wball.ball.Ball"
        )
