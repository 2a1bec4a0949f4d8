"""Threat models: the sets of images that an attacker may choose from, and a certificate must hold
for.

Attacks, training, certificates and the audit only call the methods of :class:`Ball`, so a new
threat model is a subclass that answers them; ``docs/extending.md`` has an example.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from torch import Tensor

from wball import inputs
from wball.auditing.violations import (
    DISTANCE_TOL,
    Violations,
    box_violation,
    check_point,
    half_ulp,
    transport_violations,
)
from wball.cost import DenseCost, GridCost, GroundCost, StencilCost
from wball.display import Summarised
from wball.input_sets import InputSet, IntervalSet, Plans, TransportSet
from wball.inputs import dot, largest, per_image, result_dtype, want_gradient
from wball.kernels import dispatch
from wball.paper import clamped
from wball.plan import StoredPlan
from wball.result import Duals, ProjectionResult, Status, SupportResult
from wball.solvers.distance import DualPotentials, distance
from wball.solvers.gradients import (
    attached,
    differentiable_projection,
    differentiable_support,
)
from wball.solvers.oracle import (
    ROUNDINGS,
    EntropicProjection,
    OraclePoint,
    TransportOracle,
)
from wball.solvers.problem import DIVISIBLE, TIME_LIMIT, Effort, TransportProblem, as_images, masses
from wball.solvers.projection import project
from wball.solvers.support import support

__all__ = ["Ball", "LinfBall", "Oracle", "Plans", "WassersteinBall", "check_ball"]

Self = TypeVar("Self", bound="Ball")
Norm = Literal["linf", "l2"]

STEP = 0.7
"""Share of the largest change of an image that a default step of projected gradient ascent asks
for, as strong as the best fixed step at any radius (``python -m benchmarks step_sizes``)."""


class Ball(Summarised, ABC):
    """A set of images around each centre ``x``. Subclasses are frozen dataclasses with the fields
    ``eps`` and ``box``.

    Abstract methods say what the ball is. The others are asked for where they are used:
    :meth:`oracle` by most attacks and by :meth:`sample`, :meth:`project` by projected gradient
    ascent, :meth:`support` by certificates. An oracle follows from ``project`` and ``support``, if
    the ball has none of its own.

    Attributes:
        eps: radius, one number or one per image.
        box: range of the pixels, or ``None``.
        unit: unit of ``eps``, for tables and plots.
    """

    eps: float | Tensor
    box: tuple[float, float] | None

    @property
    @abstractmethod
    def unit(self) -> str: ...

    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult:
        """The point of the ball that maximises ``<g, z>``, with bounds of the maximum."""
        raise NotImplementedError(f"{type(self).__name__} has no support(x, g)")

    def project(self, x: Tensor, w: Tensor, reg: float = math.inf) -> ProjectionResult:
        """The point of the ball nearest to ``w``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no project(x, w), which PGD needs; DualAveraging, "
            "FrankWolfe and StandardAttack need an oracle(x) only"
        )

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
        plans, whose points come without proofs."""
        return None

    def oracle(self, x: Tensor, **options: Any) -> Oracle:
        """Map the potentials of an attack to points of the ball: by projection, unless a subclass
        has its own oracle. It may ignore ``options``: ``sweeps``, ``momentum``, ``roundings``."""
        return ProjectionOracle(self, x)

    def projector(
        self, x: Tensor, reg: float = math.inf, **options: Any
    ) -> Projector | EntropicProjection:
        """Projections of one point after another. It may ignore ``options``: ``tol``,
        ``max_iter``, ``mode``."""
        return Projector(self, x, reg)

    def ascent_step(self, x: Tensor, steps: int) -> tuple[Norm, float | Tensor]:
        """Default step of projected gradient ascent: its norm, and its size in pixel values, one
        number or one per image."""
        return "linf", 0.1

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random point of the ball for each image."""
        inputs.check_generator(generator)
        device = generator.device if generator is not None else x.device
        noise = torch.randn(x.shape, generator=generator, device=device).to(x)
        return self.oracle(x)(noise).z

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
        """Name of the implementation used for such images."""
        return "torch"

    def headline(self) -> dict[str, str]:
        eps = self.eps
        radius = f"one for each of {len(eps)} images" if isinstance(eps, Tensor) else f"{eps:g}"
        settings = {name: str(value) for name, value in self.describe().items() if name != "kind"}
        return {"eps": radius, **settings}


class Oracle(Protocol):
    """Maps potentials to points of the ball, for one batch of images. ``cost / unit`` is in the
    unit of ``eps``.

    Attributes:
        reads_host: whether a call waits for the device. Steps of an attack that do not are recorded
            on a GPU.
    """

    @property
    def reads_host(self) -> bool: ...

    @property
    def unit(self) -> Tensor: ...

    def __call__(self, b: Tensor) -> OraclePoint: ...

    def along(self, g: Tensor, nats: float) -> Tensor:
        """Potentials whose point is nearly the farthest along ``g``, of a size of some ``nats``."""
        ...

    def take(self, index: Tensor) -> Oracle: ...


class Projector:
    """Projections onto a ball around ``x``, of one point after another."""

    reads_host = True

    def __init__(self, ball: Ball, x: Tensor, reg: float) -> None:
        self.ball, self.x, self.reg = ball, x, reg

    @property
    def unit(self) -> Tensor:
        return torch.ones(len(self.x), dtype=torch.float64, device=self.x.device)

    def __call__(self, w: Tensor) -> OraclePoint:
        result = self.ball.project(self.x, w, self.reg)
        distance = self.ball.distance(self.x, result.point).double()
        return OraclePoint(result.point, distance, torch.ones_like(distance), result.kernel)

    def within(self, ball: Ball) -> None:
        """Continue in a ball of another radius."""
        self.ball = ball

    def take(self: AnyProjector, index: Tensor) -> AnyProjector:
        part = copy(self)
        part.ball, part.x = self.ball.take(index), self.x[index]
        return part


AnyProjector = TypeVar("AnyProjector", bound=Projector)


class ProjectionOracle(Projector):
    """``proj(x + scale * b)``: potentials are steps in pixel values.

    ``scale`` is the largest change of a pixel that the ball allows along a fixed direction of
    alternating signs, so that potentials of a few units reach the border of the ball.
    """

    def __init__(self, ball: Ball, x: Tensor) -> None:
        super().__init__(ball, x, math.inf)
        signs = torch.where(torch.arange(x[0:1].numel(), device=x.device) % 2 == 0, 1.0, -1.0).to(x)
        corner = ball.support(x, signs.view(x[0:1].shape).expand_as(x).contiguous()).point
        self._scale = largest(corner - x)

    def __call__(self, b: Tensor) -> OraclePoint:
        return super().__call__(self.x + per_image(self._scale, self.x) * b)

    def along(self, g: Tensor, nats: float) -> Tensor:
        """Potentials of the farthest point itself, which any size reaches."""
        way = self.ball.support(self.x, g).point - self.x
        return way / per_image(self._scale.clamp(min=1e-30), way)

    def take(self, index: Tensor) -> ProjectionOracle:
        part = super().take(index)
        part._scale = self._scale[index]
        return part


class WarmProjector(Projector):
    """Projections onto a Wasserstein ball, each of which starts from the duals of the last one."""

    duals: Duals | None = None

    def __init__(
        self,
        ball: WassersteinBall,
        x: Tensor,
        reg: float,
        mode: Literal["exact", "paper"],
        **effort: Any,
    ) -> None:
        super().__init__(ball, x, reg)
        self._unit, self._mode, self._effort = ball.problem(x).unit, mode, effort

    @property
    def unit(self) -> Tensor:
        return self._unit

    def __call__(self, w: Tensor) -> OraclePoint:
        assert isinstance(self.ball, WassersteinBall)
        settings = {"mode": self._mode, "init": self.duals, **self._effort}
        result = self.ball.project(self.x, w, self.reg, **settings)
        if math.isinf(self.reg):  # entropic problems start better at their temperature
            self.duals = result.duals
        plan = result.stored
        cost = torch.full_like(self._unit, math.nan) if plan is None else plan.net_cost().double()
        return OraclePoint(result.point, cost, torch.ones_like(cost), result.kernel, plan)

    def take(self, index: Tensor) -> WarmProjector:
        part = super().take(index)
        part._unit = self._unit[index]
        part.duals = self.duals and self.duals.take(index)
        return part


def check_ball(ball: object) -> None:
    """Raise unless ``ball`` is a threat model."""
    if not isinstance(ball, Ball):
        raise TypeError(
            "ball must be a threat model such as WassersteinBall(0.1) or LinfBall(0.1), got "
            f"{ball!r}; a threat model of your own must subclass wball.ball.Ball"
        )


@dataclass(frozen=True)
class WassersteinBall(Ball):
    r"""Images reached from ``x`` by moving mass at a total cost of at most ``eps``, with pixels
    kept in ``box``.

    .. math::
        B(x, \epsilon) = \{ P^T 1 : P \ge 0,\; P 1 = x,\; \langle P, C \rangle \le \epsilon\, m,\;
        lo \le P^T 1 \le hi \}

    where ``m`` is the image's mass for ``mass="relative"`` (``eps`` in mass fraction x pixels, the
    paper's unit: 0.1 moves 10 % of the mass by one pixel) and 1 for ``mass="absolute"``. Mass moves
    only inside a channel, unless the cost has a ``channel_cost``; the budget is shared by all
    channels. ``eps`` is one number or one per image.

    >>> ball = WassersteinBall(0.1)
    >>> x = torch.zeros(1, 1, 3, 3); x[..., 1, 1] = 1.0
    >>> bool(ball.contains(x, ball.project(x, torch.rand_like(x)).point))
    True
    """

    eps: float | Tensor
    cost: GroundCost = field(default_factory=GridCost)
    mass: Literal["relative", "absolute"] = "relative"
    box: tuple[float, float] | None = (0.0, 1.0)

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
        p = getattr(self.cost, "p", None)  # of a grid; other costs have a unit of their own
        length = "cost" if p is None else "px" if p == 1 else f"px^{p:g}"
        return f"mass {'fraction ' if self.mass == 'relative' else ''}x {length}"

    def budget(self, x: Tensor) -> Tensor:
        """Cost that an attacker may spend on each image, in float64. It is 0 for images so dark
        (denormal numbers) that their dtype cannot split their mass."""
        return self._budget(x, masses(x))

    def _budget(self, x: Tensor, mass: Tensor) -> Tensor:
        inputs.check_eps_count(self.eps, x.shape[0])
        eps = self.eps.to(x.device) if isinstance(self.eps, Tensor) else self.eps
        numbers = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32)
        least = DIVISIBLE * math.prod(x.shape[1:]) * numbers.eps * numbers.smallest_normal
        if self.mass == "relative":
            return eps * torch.threshold(mass, math.nextafter(least, 0.0), 0.0)
        return eps * (mass >= least).double()

    def problem(self, x: Tensor) -> TransportProblem:
        """The problem that solvers receive: centres, moves, budget and box. ``x`` is not checked
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
        max_iter: int = 1000,
        time_limit: float = TIME_LIMIT,
    ) -> SupportResult:
        """``max <g, z>`` over the ball; see :func:`wball.solvers.support.support`. Its value is
        differentiable in ``x`` and ``g``; see :mod:`wball.solvers.gradients`."""
        x = inputs.check_images(x, self.box, g=g)
        problem, effort = self.problem(x), Effort(reg, tol, max_iter, time_limit)
        if not want_gradient(x, g):
            return support(problem, g, effort)
        effort = effort.checked().for_gradients(problem.x)
        return differentiable_support(support(problem, g, effort), problem, x, g, effort)

    def project(
        self,
        x: Tensor,
        w: Tensor,
        reg: float = math.inf,
        *,
        tol: float = 1e-5,
        max_iter: int = 1000,
        init: Duals | None = None,
        mode: Literal["exact", "paper"] = "exact",
        time_limit: float = TIME_LIMIT,
    ) -> ProjectionResult:
        """The nearest point of the ball to ``w``; see :func:`wball.solvers.projection.project`. It
        is differentiable in ``x`` and ``w``; see :mod:`wball.solvers.gradients`.

        ``mode="paper"`` is the original procedure: at most ``max_iter`` iterations of
        :func:`wball.paper.projected_sinkhorn`, then a clamp, which destroys mass. Its points are in
        no ball, and their gap is unknown (nan).
        """
        inputs.check_choice("mode", mode, ("exact", "paper"))
        w = inputs.as_pixels(w)
        duals = {"init.beta": init.beta} if isinstance(init, Duals) else {}
        x = inputs.check_images(x, self.box, w=w, **duals)
        if mode == "paper":
            return clamped(x, w, self, reg, max_iter, tol)
        problem, effort = self.problem(x), Effort(reg, tol, max_iter, time_limit)
        if not want_gradient(x, w):
            return project(problem, w, effort, init)
        effort = effort.checked().for_gradients(problem.x)
        result = project(problem, w, effort, init)
        return differentiable_projection(result, problem, x, w, effort)

    @overload
    def distance(
        self, x: Tensor, z: Tensor, *, plans: Plans = ..., potentials: Literal[False] = ...
    ) -> Tensor: ...

    @overload
    def distance(
        self, x: Tensor, z: Tensor, *, plans: Plans = ..., potentials: Literal[True]
    ) -> tuple[Tensor, DualPotentials]: ...

    def distance(
        self, x: Tensor, z: Tensor, *, plans: Plans = "window", potentials: bool = False
    ) -> Tensor | tuple[Tensor, DualPotentials]:
        """Transport distance from ``x`` to ``z`` in the unit of ``eps``; see
        :mod:`wball.solvers.distance`.

        It is differentiable in ``x`` and ``z``. With ``potentials``, the dual potentials are
        returned as well, whose sum over the mass is the distance: ``<rows, x> + <columns, z>``.
        """
        x, relative = inputs.check_images(x, self.box), self.mass == "relative"
        found, solve = distance(self.cost, x, z, relative=relative, plans=plans)
        if want_gradient(x, z):
            shared = found / masses(x.detach()).clamp(min=1e-300) if relative else 0.0 * found

            def pull(gradient: Tensor) -> tuple[Tensor, Tensor]:
                scale, prices = per_image(gradient, x), solve()
                return scale * (prices.rows - per_image(shared, x)), scale * prices.columns

            found = attached(found, pull, x, z)
        return (found, solve()) if potentials else found

    def violations(
        self, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
    ) -> Violations:
        """Mass, box and distance of ``z``; see :mod:`wball.auditing.violations`.

        With ``plan`` nothing is solved: the distance is an upper bound that the plan proves, inf
        where it proves none.
        """
        x = inputs.check_images(x, self.box)
        z = check_point(z, x)
        inputs.check_eps_count(self.eps, x.shape[0])
        relative = self.mass == "relative"
        return transport_violations(
            self.cost, x, z.to(x.device), relative=relative, box=self.box, plan=plan
        )

    def ascent_step(self, x: Tensor, steps: int) -> tuple[Norm, float | Tensor]:
        r"""A share of the largest :math:`\|z - x\|_2` that the ball could allow.

        Mass ``M`` that leaves and arrives, at most a pixel's range in each, changes an image by
        ``sqrt(2 M range)`` at most, and the budget moves ``M = budget / cheapest move``.
        """
        problem = self.problem(x)
        moved = problem.budget / problem.moves(as_images(x)).cheapest
        span = largest(x).double() if self.box is None else self.box[1] - self.box[0]
        return "l2", STEP * (2 * span * torch.minimum(moved, problem.mass)).sqrt()

    def describe(self) -> dict[str, Any]:
        """The threat model without its radius, as plain data."""
        return {**super().describe(), **self.cost.describe(), "mass": self.mass}

    def kernel(self, x: Tensor) -> str:
        """Name of the implementation used for such images."""
        grid = x[:1] if x.ndim == 4 else x[:1, None, None, :]
        return dispatch.choose("entropic_plan", x[:1], self.cost.arcs(grid))

    def oracle(self, x: Tensor, **options: Any) -> TransportOracle:
        """Maps the potentials of an attack to points of the ball; options of
        :class:`~wball.solvers.oracle.TransportOracle`."""
        return TransportOracle(self.problem(x), **options)

    def projector(
        self,
        x: Tensor,
        reg: float = math.inf,
        *,
        mode: Literal["exact", "paper"] = "exact",
        **effort: Any,
    ) -> Projector | EntropicProjection:
        """Projections of one point after another, each of which starts from the last one. Where
        Triton serves, they have no plans and nothing is read from the device."""
        problem = self.problem(x)
        if mode == "exact" and EntropicProjection.serves(problem, reg):
            return EntropicProjection(problem, reg, **effort)
        return WarmProjector(self, x, reg, mode, **effort)

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random point of the ball for each image: mass follows a random potential, at a random
        part of the budget.

        Pixels drift towards random neighbours, as far as the radius allows. Nothing larger than the
        images is made.
        """
        x = inputs.check_images(x, self.box).detach()
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
        """The ball for certificates: all transport plans for ``"full"``, those inside the window
        for ``"window"``."""
        return TransportSet(x, self.cost, self.budget(x), self.box, plans)


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

    def ascent_step(self, x: Tensor, steps: int) -> tuple[Norm, float | Tensor]:
        return "linf", 2.5 * self.eps / steps

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Lowest and highest value of each pixel. For half precision they are in float32, which
        does not round them out of the ball."""
        x = inputs.check_images(x, self.box)
        inputs.check_eps_count(self.eps, x.shape[0])
        x = x.to(result_dtype(x))
        eps = per_image(torch.as_tensor(self.eps, dtype=x.dtype, device=x.device), x)
        lo, hi = self.box or (-math.inf, math.inf)
        return (x - eps).clamp(lo, hi), (x + eps).clamp(lo, hi)

    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult:
        """``max <g, z>``: each pixel goes to the end of its interval that ``g`` points to. ``reg``
        is ignored."""
        x = inputs.as_pixels(x)
        low, high = self.bounds(x)
        g = inputs.check_like("g", g, x)
        point = torch.where(g > 0, high, torch.where(g < 0, low, x.to(low).clamp(low, high)))
        value = dot(g.double(), point.double())
        n_iter = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        upper = value.detach().clone()
        return SupportResult(point, value, upper, (Status.EXACT,) * x.shape[0], n_iter)

    def project(self, x: Tensor, w: Tensor, reg: float = math.inf) -> ProjectionResult:
        """The nearest point: clip every pixel to its interval. ``reg`` is ignored."""
        low, high = self.bounds(x)
        w = inputs.check_like("w", inputs.as_pixels(w), x)
        point = torch.minimum(torch.maximum(w, low), high).to(low)
        objective = 0.5 * (w.double() - point.double()).flatten(1).square().sum(1)
        zero = torch.zeros_like(objective)
        n_iter = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return ProjectionResult(
            point, objective, zero, zero.clone(), (Status.EXACT,) * x.shape[0], n_iter
        )

    def distance(self, x: Tensor, z: Tensor) -> Tensor:
        """The largest change of a pixel, per image."""
        x = inputs.check_images(x, self.box)
        return _largest_change(x, inputs.check_like("z", inputs.as_pixels(z), x))

    def violations(
        self, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
    ) -> Violations:
        """How far the worst pixel is outside the box, and the largest change of a pixel. ``plan``
        is ignored."""
        x = inputs.check_images(x, self.box)
        z = check_point(z, x)
        inputs.check_eps_count(self.eps, x.shape[0])
        change = _largest_change(x, z).detach()
        return Violations(
            mass_error=torch.where(change.isfinite(), 0.0, math.inf).to(change),
            box_violation=box_violation(z, self.box or (-math.inf, math.inf)).to(x.device),
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
        """The ball for certificates; ``plans`` is ignored."""
        return IntervalSet(*self.bounds(x.double()))


def _largest_change(x: Tensor, z: Tensor) -> Tensor:
    """The largest change of a pixel, per image, in float64."""
    return largest(z.to(x.device, torch.float64) - x)
