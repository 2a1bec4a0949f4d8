r"""Derivatives of the solvers' answers, by the implicit function of their optimality conditions.

A projection returns ``z = clip(w - u)`` with the columns of a plan ``P`` whose rows maximise
``u_j - psi C_ij``. Let ``F`` mark the pixels strictly inside the box.

*Without entropy* the plan lives on tight moves, which connect rows and columns to components ``K``.
Around a smooth point the moves stay tight, so ``z`` moves on

.. math::
    \sum_{j \in K} z_j = \sum_{i \in K} x_i \;\; (\text{each } K), \qquad
    \sum_j c_j z_j = E + \sum_i c_i x_i \;\; (\text{if } \psi > 0),

with ``c_j = u_j / psi`` and ``c_i = max_j (u_j - psi C_ij) / psi``, so that ``C_ij = c_j - c_i`` on
tight moves. The nearest point of an affine space to ``w`` is a linear projection: a gradient ``g``
splits into its fit ``a_K + b c_j`` on ``F`` and a rest. The rest is the gradient in ``w``, and
``a_K + b (c_i + \epsilon)`` that in ``x``.

*With entropy* ``P = x softmax((u - psi C) / tau)`` is smooth, and a step ``(du, dpsi)`` of the
duals answers a step ``dw`` by

.. math::
    (M + F)\, du - k\, d\psi = F\, dw, \qquad -k^T du + V\, d\psi = 0,

with ``M`` the derivative of the columns in ``u``, ``-k`` that in ``psi``, and ``V`` minus that of
the cost. The matrix is symmetric and positive, and conjugate gradients solve it once per backward
pass.

The answers are differentiable where the tight moves and the pixels at the box do not change. At
other points these are derivatives of one of the smooth pieces that meet there.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from wball.inputs import dot, per_image
from wball.result import ProjectionResult, SupportResult
from wball.solvers.problem import Effort, TransportProblem, as_grid

FLOW = 1e-7
"""Moves count as used above this share of a pixel's mass; repairs leave smaller flows."""

INSIDE = 1e-9
"""Pixels this close to the box are at it."""

RESIDUAL, MOST = 1e-12, 2000
"""Relative residual at which conjugate gradients stop, and their iterations at most."""

Pull = Callable[[Tensor], tuple[Tensor | None, ...]]


class _Attached(torch.autograd.Function):
    """A value that was computed without a graph, with its gradients in some inputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pull: Pull, *inputs: Tensor) -> Tensor:
        ctx.pull, ctx.like = pull, [(tensor.shape, tensor.dtype) for tensor in inputs]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = zip(ctx.pull(gradient.double()), ctx.like, strict=True)
        return None, None, *(part.reshape(shape).to(dtype) for part, (shape, dtype) in found)


def attached(value: Tensor, pull: Pull, *inputs: Tensor) -> Tensor:
    """``value`` as a differentiable function of ``inputs``.

    ``pull`` maps the gradient of the value to theirs, in float64. It is called in the backward pass
    only.
    """
    result: Tensor = _Attached.apply(value, pull, *inputs)
    return result


def differentiable_projection(
    result: ProjectionResult, problem: TransportProblem, x: Tensor, w: Tensor, effort: Effort
) -> ProjectionResult:
    """The projection of ``w`` with a point that is differentiable in ``x`` and ``w``."""
    near = _Answer(problem, result)

    def pull(gradient: Tensor) -> tuple[Tensor, ...]:
        inside = near.inside(as_grid(w) - near.u)
        if effort.exact:
            parts = _on_tight_moves(near, as_grid(gradient), inside)
        else:
            parts = _at_temperature(near, as_grid(gradient), inside, effort.reg)
        return near.or_still(as_grid(gradient), *parts)

    return replace(result, point=attached(result.point, pull, x, w))


def differentiable_support(
    result: SupportResult, problem: TransportProblem, x: Tensor, g: Tensor, effort: Effort
) -> SupportResult:
    """The support function with a value that is differentiable in ``x`` and ``g``; with entropy,
    the point is as well."""
    near = _Answer(problem, result)
    if effort.exact:

        def pull(gradient: Tensor) -> tuple[Tensor, ...]:
            scale = per_image(gradient, near.x)
            in_x = near.score().amax(2) + per_image(near.psi * near.eps, near.x)
            still = per_image(near.still, near.x)
            return scale * torch.where(still, as_grid(g), in_x), scale * as_grid(result.point)

        return replace(result, value=attached(result.value, pull, x, g))

    def pull_point(gradient: Tensor) -> tuple[Tensor, ...]:
        # Pixels inside the box follow g; the others have potentials of their own.
        inside = near.inside(as_grid(result.point))
        smooth = _Smooth(near, torch.full_like(near.psi, 1.0 / effort.reg))
        free = torch.where(inside, as_grid(gradient), 0.0)
        side = smooth.respond(free, torch.zeros_like(near.psi))
        u, psi = smooth.solve(~inside, torch.zeros_like(free), side.columns, side.paid)
        back = smooth.respond(free - u, -psi)
        in_x = back.rows - per_image(psi * near.eps, free)
        return near.or_still(as_grid(gradient), in_x, torch.where(inside, back.columns, 0.0))

    point = attached(result.point, pull_point, x, g)
    return replace(result, point=point, value=dot(g.double(), point.double()))


class _Answer:
    """The solution of a problem: duals, and what is derived from them. Images are float64 grids."""

    def __init__(self, problem: TransportProblem, result: ProjectionResult | SupportResult) -> None:
        assert result.duals is not None
        self.x, self.limits = as_grid(problem.x), problem.limits
        self.moves = problem.moves(self.x)
        self.u, self.psi = as_grid(result.duals.beta), result.duals.psi.double()
        self.mass = problem.mass
        self.still = (problem.budget <= 0) | (problem.mass <= 0)
        # What a unit of mass adds to the budget.
        budget = problem.budget / problem.unit
        self.eps = budget if problem.relative else torch.zeros_like(budget)
        self.write = result.write

    def inside(self, z: Tensor) -> Tensor:
        """Which pixels are not at the box."""
        low, high = self.limits
        return (z > low + INSIDE) & (z < high - INSIDE)

    def score(self) -> Tensor:
        """``u_j - psi C_ij`` of every move, ``-inf`` where there is none."""
        found = self.moves.gather(self.u) - per_image(self.psi, self.x)[..., None] * self.moves.cost
        return torch.where(self.moves.allowed, found, -math.inf)

    def or_still(self, gradient: Tensor, in_x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients, or those of a ball of one point, ``z = x``."""
        still = per_image(self.still, gradient)
        return torch.where(still, gradient, in_x), torch.where(still, 0.0, other)


def _on_tight_moves(near: _Answer, g: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in ``x`` and ``w`` of a projection without entropy."""
    from scipy import sparse
    from scipy.sparse import csgraph

    assert near.write is not None
    flow, score = near.write().written().arcs().double(), near.score()
    best, choice = score.max(2)
    number = torch.arange(g.numel(), dtype=torch.float64).to(g.device).view(g.shape)
    used = (flow > FLOW * near.x[:, :, None]) & (flow > 0)
    column = near.moves.gather(number)  # where each move ends
    start, end = number[:, :, None].expand_as(flow)[used].long(), column[used].long()
    edges = torch.ones(len(start), dtype=torch.bool), (start.cpu(), g.numel() + end.cpu())
    joined = csgraph.connected_components(sparse.coo_matrix(edges, shape=(2 * g.numel(),) * 2))[1]
    parts = torch.as_tensor(joined[g.numel() :], dtype=torch.long, device=g.device)
    free, count = inside.flatten(), int(parts.max()) + 1

    def means(values: Tensor) -> Tensor:
        """The mean over the free pixels of each component; 0 where there is none."""
        total = values.new_zeros(2, count)
        total[0].index_add_(0, parts[free], values.flatten()[free])
        total[1].index_add_(0, parts[free], torch.ones_like(values.flatten()[free]))
        return total[0] / total[1].clamp(min=1)

    binding = near.psi > 0
    price = per_image(torch.where(binding, near.psi, 1.0), g)
    place = near.u / price  # c_j
    level, offset = means(g), means(place)
    rest = torch.where(inside, g - level[parts].view(g.shape), 0.0)
    along = torch.where(inside, place - offset[parts].view(g.shape), 0.0)
    size = dot(along, along)
    slope = torch.where(binding & (size > 0), dot(along, rest) / size, 0.0)
    slopes = per_image(slope, g)
    home = near.moves.gather(parts.view(g.shape).double()).gather(2, choice[:, :, None])[:, :, 0]
    home = home.long()
    in_x = level[home] - slopes * offset[home] + slopes * (best / price + per_image(near.eps, g))
    return in_x, rest - slopes * along


def _at_temperature(near: _Answer, g: Tensor, inside: Tensor, reg: float) -> tuple[Tensor, Tensor]:
    """Gradients in ``x`` and ``w`` of a projection with entropy."""
    smooth = _Smooth(near, near.mass / reg)
    free, none = torch.where(inside, g, 0.0), torch.zeros_like(near.psi)
    u, psi = smooth.solve(torch.ones_like(inside), inside.double(), free, none)
    back = smooth.respond(u, psi)
    # The temperature is a share of the image's mass.
    heat = -back.scored / (smooth.tau * reg)
    return back.rows + per_image(psi * near.eps + heat, g), torch.where(inside, g - u, 0.0)


class _Response(NamedTuple):
    """What a step of the duals does to a plan: the change of its columns, minus that of its cost,
    ``<score, change>``, and the mean of the step over each row."""

    columns: Tensor
    paid: Tensor
    scored: Tensor
    rows: Tensor


class _Smooth:
    """The plan ``x softmax((u - psi C) / tau)`` around a solution."""

    def __init__(self, near: _Answer, tau: Tensor) -> None:
        self.moves, self.tau = near.moves, torch.where(near.still, 1.0, tau)
        self._heat = per_image(self.tau, near.x)[..., None]
        score = near.score()
        self._share = torch.softmax(score / self._heat, 2)
        self._score = torch.where(self.moves.allowed, score, 0.0)
        self._flow = near.x[:, :, None] * self._share
        self._binding = near.psi > 0

    def respond(self, u: Tensor, psi: Tensor) -> _Response:
        """The response to a step ``u`` of the potentials and ``psi`` of the price."""
        psi = torch.where(self._binding, psi, 0.0)
        step = self.moves.gather(u) - per_image(psi, u)[..., None] * self.moves.cost
        rows = (self._share * step).sum(2)
        change = self._flow * (step - rows[:, :, None]) / self._heat
        paid, scored = -dot(change, self.moves.cost), dot(change, self._score)
        return _Response(self.moves.scatter(change), paid, scored, rows)

    def solve(
        self, mask: Tensor, more: Tensor, columns: Tensor, paid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The step on the masked pixels whose response, plus ``more`` times the step, is
        ``columns`` there and ``paid``: by conjugate gradients, scaled by the diagonal."""
        pixels = mask.double()
        own = (self._flow * (1 - self._share)).clamp(min=0)  # an upper bound of the diagonal
        size = self.moves.scatter(own / self._heat) + more
        ring = (self._flow * self.moves.cost.square()).sum((1, 2, 3, 4)) / self.tau
        scale = torch.where(mask & (size > 0), 1 / size, 0.0), torch.where(ring > 0, 1 / ring, 0.0)

        def both(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
            return dot(a[0], b[0]) + a[1] * b[1]

        def mixed(
            a: tuple[Tensor, Tensor], t: Tensor, b: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor]:
            return a[0] + per_image(t, a[0]) * b[0], a[1] + t * b[1]

        rest = columns * pixels, torch.where(self._binding, paid, 0.0)
        found = torch.zeros_like(columns), torch.zeros_like(paid)
        way = scale[0] * rest[0], scale[1] * rest[1]
        left = both(rest, way)
        goal = RESIDUAL**2 * left
        for _ in range(MOST):
            if bool((left <= goal).all()):
                return found
            answer = self.respond(way[0], way[1])
            image = pixels * (answer.columns + more * way[0]), answer.paid
            bend = both(way, image)
            length = torch.where(bend > 0, left / bend.clamp(min=1e-300), 0.0)
            found, rest = mixed(found, length, way), mixed(rest, -length, image)
            near = scale[0] * rest[0], scale[1] * rest[1]
            before, left = left, both(rest, near)
            way = mixed(near, torch.where(before > 0, left / before.clamp(min=1e-300), 0.0), way)
        warnings.warn(
            "the gradient of an entropic projection is not exact: its linear system is too stiff; "
            "use a smaller reg, or reg=inf",
            RuntimeWarning,
            stacklevel=2,
        )
        return found
