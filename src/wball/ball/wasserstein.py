"""The Wasserstein ball: images reached by moving a little mass a little way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from wball import inputs
from wball.auditing.transport import transport_violations
from wball.auditing.violations import Violations, check_point
from wball.ball.base import Ball
from wball.cost import DenseCost, GridCost, GroundCost, StencilCost
from wball.input_sets import Plans, TransportSet
from wball.plan import StoredPlan
from wball.result import Duals, ProjectionResult, SupportResult
from wball.solvers.distance import distance
from wball.solvers.oracle import ROUNDINGS, TransportOracle
from wball.solvers.problem import DIVISIBLE, TIME_LIMIT, Effort, TransportProblem, masses
from wball.solvers.projection import project
from wball.solvers.support import support


@dataclass(frozen=True)
class WassersteinBall(Ball):
    r"""Images reached from ``x`` by moving mass at a total cost of at most ``eps``, with pixels
    kept in ``box``.

    .. math::
        B(x, \epsilon) = \{ P^T 1 : P \ge 0,\; P 1 = x,\; \langle P, C \rangle \le \epsilon\, m,\;
        lo \le P^T 1 \le hi \}

    where ``m`` is the image's mass for ``mass="relative"`` (``eps`` in mass fraction x pixels, the
    paper's unit: 0.1 moves 10 % of the mass by one pixel) and 1 for ``mass="absolute"``. Mass moves
    only inside a channel; the budget is shared by all channels. ``eps`` is one number or one per
    image.

    >>> ball = WassersteinBall(0.1)
    >>> x = torch.zeros(1, 1, 3, 3); x[..., 1, 1] = 1.0
    >>> bool(ball.contains(x, ball.project(x, torch.rand_like(x)).point))
    True
    """

    eps: float | Tensor
    cost: GroundCost = field(default_factory=GridCost)
    mass: Literal["relative", "absolute"] = "relative"
    box: tuple[float, float] | None = (0.0, 1.0)
    has_plans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", inputs.check_eps(self.eps))
        object.__setattr__(self, "box", inputs.check_box(self.box))
        if self.mass not in ("relative", "absolute"):
            raise ValueError(
                f'mass must be "relative" (eps x image mass) or "absolute", got {self.mass!r}'
            )
        if not isinstance(self.cost, (GridCost, StencilCost, DenseCost)):
            raise TypeError(
                f"cost must be a GridCost, StencilCost or DenseCost, got {type(self.cost).__name__}"
            )

    @property
    def unit(self) -> str:
        """The unit of ``eps``, for tables and plots."""
        return "mass fraction x px" if self.mass == "relative" else "mass x px"

    def budget(self, x: Tensor) -> Tensor:
        """How much cost an attacker may spend on each image, in float64.

        Nothing on images so dark (denormal numbers) that their dtype cannot split their mass.
        """
        return self._budget(x, masses(x))

    def _budget(self, x: Tensor, mass: Tensor) -> Tensor:
        inputs.check_eps_count(self.eps, x.shape[0])
        eps = self.eps.to(x.device) if isinstance(self.eps, Tensor) else self.eps
        numbers = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32)
        least = DIVISIBLE * math.prod(x.shape[1:]) * numbers.eps * numbers.smallest_normal
        if self.mass == "relative":
            return eps * torch.threshold(mass, math.nextafter(least, 0.0), 0.0)
        return eps * (mass >= least).to(torch.float64)

    def problem(self, x: Tensor) -> TransportProblem:
        """What solvers get to know: centres, moves, budget and box. Nothing of ``x`` is checked
        here."""
        x = x.detach()
        mass, relative = masses(x), self.mass == "relative"
        least = self.eps if relative and isinstance(self.eps, float) else 0.0
        return TransportProblem(
            x, self.cost, self._budget(x, mass), self.box, mass, relative, least
        )

    def support(
        self,
        x: Tensor,
        g: Tensor,
        reg: float = math.inf,
        *,
        tol: float = 1e-6,
        max_iter: int = 500,
        time_limit: float = TIME_LIMIT,
    ) -> SupportResult:
        """``max <g, z>`` over the ball; see :func:`wball.solvers.support.support`."""
        problem = self.problem(inputs.check_images("x", x, self.box, g=g))
        return support(problem, g, Effort(reg, tol, max_iter, time_limit))

    def project(
        self,
        x: Tensor,
        w: Tensor,
        reg: float = math.inf,
        *,
        tol: float = 1e-5,
        max_iter: int = 500,
        init: Duals | None = None,
        mode: Literal["exact", "paper"] = "exact",
        time_limit: float = TIME_LIMIT,
    ) -> ProjectionResult:
        """The nearest point of the ball to ``w``; see :func:`wball.solvers.projection.project`."""
        duals = {"init.beta": init.beta} if isinstance(init, Duals) else {}
        problem = self.problem(inputs.check_images("x", x, self.box, w=w, **duals))
        return project(problem, w, Effort(reg, tol, max_iter, time_limit), init, mode)

    def distance(self, x: Tensor, z: Tensor, *, plans: Plans = "window") -> Tensor:
        """Transport distance from ``x`` to ``z`` in the unit of ``eps``; see
        :mod:`wball.solvers.distance`."""
        x = inputs.check_images("x", x, self.box).detach()
        return distance(self.cost, x, z, relative=self.mass == "relative", plans=plans)

    def violations(
        self, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
    ) -> Violations:
        """Mass, box and distance of ``z``; see :mod:`wball.auditing.transport`.

        With ``plan`` nothing is solved: the distance is an upper bound that the plan proves, inf
        where it proves none.
        """
        x = inputs.check_images("x", x, self.box)
        check_point(z, x)
        inputs.check_eps_count(self.eps, x.shape[0])
        relative = self.mass == "relative"
        return transport_violations(
            self.cost, x, z.to(x.device), relative=relative, box=self.box, plan=plan
        )

    def describe(self) -> dict[str, Any]:
        """The threat model without its radius, as plain data."""
        return {**super().describe(), **self.cost.describe(), "mass": self.mass}

    def kernel(self, x: Tensor) -> str:
        """Which implementation serves such images."""
        from wball.kernels import dispatch

        height, width = (int(s) for s in x.shape[-2:]) if x.ndim == 4 else (1, int(x.shape[1]))
        return dispatch.choose("entropic_plan", x[:1], self.cost.arcs(height, width, x))

    def oracle(self, x: Tensor, **options: Any) -> TransportOracle:
        """Maps the potentials of an attack to points of the ball; options of
        :class:`~wball.solvers.oracle.TransportOracle`."""
        return TransportOracle(self.problem(x), **options)

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random point of the ball for each image: mass follows a random potential, at a random
        part of the budget.

        Pixels drift towards random neighbours, as far as the radius allows. Nothing larger than the
        images is made.
        """
        x = inputs.check_images("x", x, self.box).detach()
        inputs.check_generator(generator)
        device = generator.device if generator is not None else x.device
        potential = torch.normal(
            0.0, 3.0, x.shape, generator=generator, dtype=torch.float64, device=device
        )
        part = torch.rand(x.shape[0], generator=generator, dtype=torch.float64, device=device).to(
            x.device
        )
        # One more rounding is allowed for: callers mix samples with other points.
        oracle = self.oracle(x, roundings=ROUNDINGS + 1)
        oracle.budget = part * oracle.budget
        return oracle(potential.to(x.device)).z

    def input_set(self, x: Tensor, plans: Plans = "full") -> TransportSet:
        """The ball as certificates see it: for ``full`` plans, or for those inside its window."""
        return TransportSet(x, self.cost, self.budget(x), self.box, plans)
