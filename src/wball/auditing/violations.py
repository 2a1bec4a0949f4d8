r"""How far an image is from being in a ball, in float64, and the tolerances of the audit.

:class:`Violations` is what every ball answers (:meth:`wball.ball.Ball.violations`).
:func:`transport_violations` is the answer of a Wasserstein ball, without solvers or kernels:

- *mass*: ``max_c |sum z_c - sum x_c| / m`` over channels ``c``, with ``m`` the mass of ``x``; if
  moves change the channel, all channels count as one, here and below;
- *box*: how far the worst pixel is outside ``[lo, hi]`` (without a box: below 0);
- *distance*: the exact optimal transport cost in the unit of ``eps``, or an upper bound that a plan
  proves (:mod:`wball.auditing.proof`).

The linear-programming code is not trusted either: the cost of its flow is an upper bound of the
distance, its dual prices give a lower bound, and the two must meet (:mod:`wball.auditing.flows`).

Float32 images have equal mass only up to rounding, and so does every set of pixels that the window
connects. So ``z`` is scaled to the mass of ``x`` in each channel, and mass that no plan could place
is ignored if it is at most 1e-5 of ``m``; otherwise the distance is infinite. Half a unit in the
last place of ``z``'s dtype, on all of its mass, moved by the cheapest move, is granted on top of
the radius. It only matters for radii near 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from wball.auditing.flows import Array, Index, ListedMoves, Matching, list_moves, match
from wball.auditing.proof import proved_distance
from wball.cost import GroundCost
from wball.inputs import as_pixels, per_image, row_major
from wball.plan import StoredPlan

MASS_TOL = 1e-5
BOX_TOL = 1e-6
DISTANCE_TOL = 1e-4
LARGE = 2048
"""Pixels per channel above which channels are matched in parallel."""


@dataclass(frozen=True)
class Violations:
    """Measures of images against a ball, one entry per image, in float64.

    Attributes:
        mass_error: largest difference of a channel's mass, as a fraction of the image's mass (inf:
            not finite); 0 in balls that do not keep the mass.
        box_violation: how far the worst pixel is outside the box (inf: not finite).
        distance: distance from the centre in the unit of ``eps``; inf if it cannot be reached.
        rounding: what rounding in the image's dtype can add to the distance; granted on top of
            ``eps``.
        exact: whether ``distance`` is exact; if not, it is an upper bound by a checked plan.
    """

    mass_error: Tensor
    box_violation: Tensor
    distance: Tensor
    rounding: Tensor
    exact: Tensor

    def allowed(self, eps: float | Tensor, tol: float = DISTANCE_TOL) -> Tensor:
        """The largest distance that counts as ``eps``."""
        return (
            torch.as_tensor(eps, dtype=torch.float64, device=self.distance.device) * (1 + tol)
            + self.rounding
        )

    def within(self, eps: float | Tensor, tol: float = DISTANCE_TOL) -> Tensor:
        """Which images are in the ball of radius ``eps``, within the tolerances."""
        whole = (self.mass_error <= MASS_TOL) & (self.box_violation <= BOX_TOL)
        return whole & (self.distance <= self.allowed(eps, tol))

    def put(self, index: Tensor, part: Violations) -> Violations:
        """A copy with the images at ``index`` replaced."""
        pairs = ((getattr(self, f.name), getattr(part, f.name)) for f in fields(self))
        return Violations(*(mine.index_copy(0, index, theirs) for mine, theirs in pairs))

    @staticmethod
    def joined(parts: Sequence[Violations]) -> Violations:
        """Concatenate the measures of several batches."""
        return Violations(
            *(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Violations))
        )


def check_point(z: Tensor, x: Tensor) -> Tensor:
    """Check that ``z`` has the shape of ``x``, and return it as floating-point pixels. Values are
    not checked."""
    z = as_pixels(z)
    if not isinstance(z, Tensor) or not z.is_floating_point():
        kind = z.dtype if isinstance(z, Tensor) else type(z).__name__
        raise TypeError(f"z must be a floating-point torch.Tensor, got {kind}")
    if z.shape != x.shape:
        raise ValueError(f"z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")
    return row_major(z)


def half_ulp(z: Tensor) -> float:
    """Half a unit in the last place at 1; half precision is treated as float32."""
    return 0.5 * min(torch.finfo(z.dtype).eps, torch.finfo(torch.float32).eps)


def box_violation(z: Tensor, box: tuple[float, float]) -> Tensor:
    """How far the worst pixel of each image is outside ``box``, in float64; inf if not finite."""
    values = z.detach().to(torch.float64).flatten(1)
    off = torch.maximum(box[0] - values.amin(1), values.amax(1) - box[1]).clamp(min=0)
    return torch.where(values.isfinite().all(1), off, torch.inf)


def transport_violations(
    cost: GroundCost,
    x: Tensor,
    z: Tensor,
    *,
    relative: bool,
    box: tuple[float, float] | None,
    plan: StoredPlan | Tensor | None = None,
) -> Violations:
    """Mass, box and distance of ``z`` around ``x``, both ``(B, C, H, W)`` or ``(B, n)``.

    Args:
        cost: what moves cost.
        x: centres.
        z: points; their contents may be anything.
        relative: whether distances are fractions of the image's mass.
        box: bounds of pixels.
        plan: plans that claim to turn ``x`` into ``z``. The distance is then the bound that they
            prove, and nothing is solved.
    """
    start, end = to_planes(x), to_planes(z)
    finite = end.isfinite().flatten(1).all(1)
    end = torch.where(per_image(finite, end), end, 0.0)
    mass = start.flatten(1).sum(1)
    parts = connected(cost, start), connected(cost, end)
    off = (parts[1].sum(2) - parts[0].sum(2)).abs().amax(1)
    moves = all_moves(cost, *start.shape[1:])
    unit = mass if relative else torch.ones_like(mass)
    if plan is None:
        pairs = zip(*(part.cpu().numpy() for part in parts), strict=True)
        costs = [transport_cost(partial(match_part, moves), *pair) for pair in pairs]
        total = torch.tensor(costs, dtype=torch.float64, device=x.device)
    else:
        total = proved_distance(cost, start, end, plan)
    return Violations(
        mass_error=torch.where(finite, over(off, mass), math.inf),
        box_violation=box_violation(z, box or (0.0, math.inf)),
        distance=torch.where(finite, over(total, unit), math.inf),
        rounding=half_ulp(z) * moves.cheapest * torch.where(unit > 0, mass / unit, 1.0),
        exact=torch.ones_like(finite) if plan is None else ~finite,
    )


def cheapest_plan(cost: GroundCost, x: Tensor, z: Tensor) -> tuple[Index, Index, Array]:
    """The moves of an optimal plan from ``x`` to ``z``, both ``(C, H, W)``: start, end and mass.

    Pixels are numbered row by row in each channel, or in the whole image if moves change the
    channel. Mass that stays, or has no move, is left out.
    """
    moves = all_moves(cost, *x.shape)
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    start, end = (connected(cost, to_planes(image[None]).cpu())[0].numpy() for image in (x, z))
    for a, b in zip(start, np.maximum(end, 0.0), strict=True):
        if a.sum() > 0 and b.sum() > 0 and not np.array_equal(a, b):
            found = match_part(moves, a, b)
            source, target = moves.source[found.arcs], moves.target[found.arcs]
            used = (found.flow > 1e-7 * a.sum()) & (source != target)
            parts.append((source[used], target[used], found.flow[used]))
    source, target, mass = (np.concatenate(part) for part in zip(*parts, strict=True))
    return source, target, mass


def to_planes(x: Tensor) -> Tensor:
    """Images in float64, ``(B, C, H, W)``; a histogram is an image of one row."""
    image = x.detach().to(torch.float64)
    return image if image.ndim == 4 else image[:, None, None, :]


def connected(cost: GroundCost, planes: Tensor) -> Tensor:
    """``(B, P, n)``: the parts of images that exchange no mass, channels unless moves change
    them."""
    return planes.flatten(2) if cost.channel_cost is None else planes.flatten(1)[:, None]


def over(total: Tensor, unit: Tensor) -> Tensor:
    """Quotients with 0 / 0 = 0 and a / 0 = inf for a > 0."""
    return torch.where(total == 0, 0.0, total / unit)


@lru_cache(maxsize=8)
def all_moves(cost: GroundCost, channels: int, height: int, width: int) -> ListedMoves:
    """:func:`list_moves`, cached for a few image sizes."""
    return list_moves(cost, channels, height, width)


def transport_cost(
    matched: Callable[[Array, Array], Matching],
    x: Array,
    z: Array,
    keep: dict[int, Matching] | None = None,
) -> float:
    """Least cost of turning ``x`` into ``z``, both ``(P, n)``, in mass units.

    It is infinite if this is impossible. ``matched`` solves the transport problem of a part, and
    ``keep`` gets its answers by the number of the part.
    """
    if float(z.min()) < -BOX_TOL:
        return math.inf
    mass, missing, pairs, parts = float(x.sum()), 0.0, [], []
    for part, (start, end) in enumerate(zip(x, np.maximum(z, 0.0), strict=True)):
        if np.array_equal(start, end):
            continue  # staying is free
        before, after = float(start.sum()), float(end.sum())
        # Ten times the tolerance, so that a distance is reported beside a slightly wrong mass.
        if abs(before - after) > 10 * MASS_TOL * mass:
            return math.inf
        if before > 0 and after > 0:
            pairs.append((start, end))
            parts.append(part)
        else:
            missing += before + after
    if len(pairs) > 1 and pairs[0][0].size > LARGE:
        with ThreadPoolExecutor(min(len(pairs), os.cpu_count() or 1)) as pool:
            found = list(pool.map(lambda pair: matched(*pair), pairs))
    else:
        found = [matched(*pair) for pair in pairs]
    if keep is not None:
        keep.update(zip(parts, found, strict=True))
    missing += sum(one.missing for one in found)
    return sum(one.cost for one in found) if missing <= MASS_TOL * mass else math.inf


def match_part(moves: ListedMoves, a: Array, b: Array) -> Matching:
    """Match ``a`` with ``b`` at the least cost, after scaling ``b`` to the mass of ``a``."""
    return match(moves, a, b * (a.sum() / b.sum()))
