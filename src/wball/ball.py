"""Threat models: the sets an attacker may choose from, and a certificate must hold for.

A ball answers four questions about itself, and nothing else in the library needs to know which ball it serves:
where is its farthest point in a direction (:meth:`~Ball.support`), its nearest point to an image
(:meth:`~Ball.project`), how far is an image from the centre (:meth:`~Ball.distance`), and is it inside
(:meth:`~Ball.contains`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from wball import inputs
from wball.ground import DenseCost, GridCost, GroundCost, StencilCost
from wball.inputs import result_dtype
from wball.result import Duals, ProjectionResult, Status, SupportResult

Self = TypeVar("Self", bound="Ball")
Plans = Literal["window", "full"]


class Ball(Protocol):
    """What attacks, training and certificates ask of a threat model."""

    @property
    def eps(self) -> float | Tensor: ...

    @property
    def box(self) -> tuple[float, float] | None: ...

    @property
    def unit(self) -> str: ...

    def at(self: Self, eps: float | Tensor) -> Self: ...

    def take(self: Self, index: Tensor) -> Self: ...

    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult: ...

    def project(self, x: Tensor, w: Tensor, reg: float = math.inf) -> ProjectionResult: ...

    def distance(self, x: Tensor, z: Tensor) -> Tensor: ...

    def contains(self, x: Tensor, z: Tensor, tol: float = 1e-4) -> Tensor: ...

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor: ...


def _of(eps: float | Tensor, index: Tensor) -> float | Tensor:
    """The radii of a subset of the images; a single number serves any of them."""
    return eps[index.to(eps.device)] if isinstance(eps, Tensor) else eps


@dataclass(frozen=True)
class WassersteinBall:
    r"""Images reached from ``x`` by moving mass at a total cost of at most ``eps``, with pixels kept in ``box``.

    .. math::
        B(x, \epsilon) = \{ P^T 1 : P \ge 0,\; P 1 = x,\; \langle P, C \rangle \le \epsilon\, m,\;
        lo \le P^T 1 \le hi \}

    where ``m`` is the image's mass for ``mass="relative"`` (``eps`` in mass fraction x pixels, the paper's unit: 0.1
    moves 10 % of the mass by one pixel) and 1 for ``mass="absolute"``. Mass moves only inside a channel; the budget
    is shared by all channels. ``eps`` is one number or one per image.

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
            raise ValueError(f'mass must be "relative" (eps x image mass) or "absolute", got {self.mass!r}')
        if not isinstance(self.cost, (GridCost, StencilCost, DenseCost)):
            raise TypeError(f"cost must be a GridCost, StencilCost or DenseCost, got {type(self.cost).__name__}")

    @property
    def unit(self) -> str:
        """The unit of ``eps``, for tables and plots."""
        return "mass fraction x px" if self.mass == "relative" else "mass x px"

    def at(self, eps: float | Tensor) -> WassersteinBall:
        """The same ball with another radius."""
        return replace(self, eps=eps)

    def take(self, index: Tensor) -> WassersteinBall:
        """The ball of a subset of the images (``index``: positions or a mask)."""
        return self.at(_of(self.eps, index))

    def budget(self, x: Tensor) -> Tensor:
        """How much cost an attacker may spend on each image, in float64.

        Nothing on images so dark (denormal numbers) that their dtype cannot split their mass.
        """
        inputs.check_eps_count(self.eps, x.shape[0])
        eps = torch.as_tensor(self.eps, dtype=torch.float64, device=x.device)
        mass = x.to(torch.float64).flatten(1).sum(1)
        numbers = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32)
        divisible = mass >= 1e6 * x[0:1].numel() * numbers.eps * numbers.smallest_normal
        return torch.where(divisible, eps * mass if self.mass == "relative" else eps.expand_as(mass), 0.0)

    def support(
        self, x: Tensor, g: Tensor, reg: float = math.inf, *, tol: float = 1e-6, max_iter: int = 200
    ) -> SupportResult:
        """``max <g, z>`` over the ball; see :func:`wball.solvers.support.support`."""
        from wball.solvers.support import support

        return support(self, x, g, reg=reg, tol=tol, max_iter=max_iter)

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
    ) -> ProjectionResult:
        """The nearest point of the ball to ``w``; see :func:`wball.solvers.projection.project`."""
        from wball.solvers.projection import project

        return project(self, x, w, reg=reg, tol=tol, max_iter=max_iter, init=init, mode=mode)

    def distance(self, x: Tensor, z: Tensor, *, plans: Plans = "window", reg: float = math.inf) -> Tensor:
        """Transport distance from ``x`` to ``z`` in the unit of ``eps``; see :mod:`wball.solvers.distance`."""
        from wball.solvers.distance import distance

        return distance(self, x, z, plans=plans, reg=reg)

    def contains(self, x: Tensor, z: Tensor, tol: float = 1e-4) -> Tensor:
        """Whether mass, box and exact distance hold, per image (distance up to a factor ``1 + tol``)."""
        from wball.solvers.distance import contains

        return contains(self, x, z, tol=tol)

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random point of the ball for each image: random potentials, random share of the budget."""
        from wball.solvers.support import sample

        return sample(self, x, generator)


@dataclass(frozen=True)
class LinfBall:
    """``{z : |z - x| <= eps in every pixel, lo <= z <= hi}``: the usual threat model, for comparison.

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

    def at(self, eps: float | Tensor) -> LinfBall:
        """The same ball with another radius."""
        return replace(self, eps=eps)

    def take(self, index: Tensor) -> LinfBall:
        """The ball of a subset of the images (``index``: positions or a mask)."""
        return self.at(_of(self.eps, index))

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and highest value of each pixel. Half precision would round them out of the ball: float32 then."""
        x = inputs.check_images("x", x, self.box).detach()
        inputs.check_eps_count(self.eps, x.shape[0])
        x = x.to(result_dtype(x))
        eps = torch.as_tensor(self.eps, dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 1))
        lo, hi = self.box if self.box is not None else (-math.inf, math.inf)
        return (x - eps).clamp(lo, hi), (x + eps).clamp(lo, hi)

    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult:
        """``max <g, z>``: each pixel goes to the end of its interval that ``g`` points to. ``reg`` plays no role."""
        low, high = self.bounds(x)
        g = inputs.check_like("g", g, x).detach()
        point = torch.where(g > 0, high, torch.where(g < 0, low, x.detach().to(low).clamp(low, high)))
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
        return ProjectionResult(point, objective, zero, zero.clone(), (Status.EXACT,) * x.shape[0], n_iter)

    def distance(self, x: Tensor, z: Tensor) -> Tensor:
        """The largest change of a pixel, per image."""
        inputs.check_like("z", z, x)
        return (z.detach().to(torch.float64) - x.detach().to(torch.float64)).flatten(1).abs().amax(1)

    def contains(self, x: Tensor, z: Tensor, tol: float = 1e-4) -> Tensor:
        """Whether every pixel is within ``eps * (1 + tol)`` and the box (up to 1e-6), per image."""
        inputs.check_eps_count(self.eps, x.shape[0])
        near = self.distance(x, z) <= torch.as_tensor(self.eps, device=x.device) * (1 + tol) + 1e-6
        if self.box is None:
            return near
        lo, hi = self.box
        return near & ((z >= lo - 1e-6) & (z <= hi + 1e-6)).flatten(1).all(1)

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A uniformly random point of the ball for each image."""
        inputs.check_generator(generator)
        low, high = self.bounds(x)
        device = generator.device if generator is not None else x.device
        u = torch.rand(x.shape, dtype=torch.float32, device=device, generator=generator).to(low)
        return torch.minimum(low + u * (high - low), high)
