"""The sweeps of the reference: rows with the price, then columns, then how far to follow them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from wball.inputs import per_image
from wball.kernels import projected_sinkhorn as settings
from wball.kernels.entropic_plan import narrowed
from wball.kernels.plan_rows import PlanRows, image_sums

TINY = 1e-300


class Unfinished(SimpleNamespace):
    """The unfinished images; the first dimension of each tensor is the image.

    ``beta`` and ``price`` are in units of ``tau``. Gaps are relative to ``size``, and an image
    offers its plan at a gap of ``target``. ``changes`` and ``steps`` are the memory of the sweeps,
    ``(B, MEMORY, n)``, and ``inverse`` 1 by the squares of ``changes``, 0 for none.
    """

    def take(self, index: Tensor) -> Unfinished:
        return Unfinished(**{name: values[index] for name, values in vars(self).items()})


class Swept(NamedTuple):
    """The plan of a sweep, and the change of ``beta`` that its columns ask for."""

    rows: PlanRows
    columns: Tensor
    relief: Tensor  # how much the margin of full columns lowers the gap, per image
    change: Tensor
    whole: Tensor  # by which a column resists a change of its potential
    resists: Tensor  # less what the rows undo


def sweep(problem: settings.Projection, s: Unfinished, step: int) -> Swept:
    """Solve rows and price, then columns. The sweeps of an image whose potentials are too far apart
    end."""
    (lo, hi), tau = problem.ends, per_image(s.tau, s.x)
    raised = narrowed(s.beta)
    s.done = (s.beta < raised).flatten(1).any(1) | (step >= problem.max_iter)
    s.beta = raised
    rows, miss = PlanRows(s.x, s.beta, problem.moves), settings.PSI_TOL * s.target * s.size / s.tau
    s.price = rows.solve_price(s.budget, s.price, 12 if step == 1 else 3, settings.PSI_TOL, miss)
    stays, columns = rows.stays, rows.columns()
    # Full columns aim below hi, by a margin in which the gap has the derivative `pressed`.
    pressed = image_sums((s.w - tau * s.beta - hi).clamp(min=0.0))
    worth = settings.MARGIN * problem.tol * s.size
    margin = torch.minimum(worth / pressed.clamp(min=TINY), (2 * worth / s.x[0].numel()).sqrt())
    margin = torch.minimum(margin, settings.MARGIN * s.budget / s.x[0].numel())
    margin = margin.clamp(max=settings.WIDEST_MARGIN * (hi - lo) if hi < math.inf else 0.0)
    log_s = torch.log(columns.clamp(min=TINY)) - s.beta
    level = log_omega(s.w / tau + log_s - torch.log(tau)) + torch.log(tau)
    bound = level.clamp(min=math.log(lo) if lo > 0 else -math.inf)
    bound = bound.minimum(per_image(torch.log(hi - margin), s.x))
    whole = columns + torch.where(bound == level, tau, 0.0)
    resists = whole - stays.square() / s.x.clamp(min=TINY)
    resists = torch.maximum(resists, 1e-9 * whole).clamp(min=TINY)
    return Swept(rows, columns, margin * pressed, bound - log_s - s.beta, whole, resists)


def log_omega(y: Tensor) -> Tensor:
    """The logarithm of Wright's omega, the solution ``v`` of ``exp(v) + v = y``, by Newton's
    method.

    >>> float(log_omega(torch.tensor(1.0)))
    0.0
    """
    y = y.clamp(min=torch.finfo(y.dtype).min)  # a column that nothing reaches has y = -inf
    v = torch.where(y < 1, y, torch.log(y.clamp(min=1)))  # above the solution, or at it
    for _ in range(6):
        below = v - 1
        v = torch.addcmul(below, y - below, torch.sigmoid(-v))
    return v


def follow(s: Unfinished, swept: Swept, begins: Tensor, slot: int) -> None:
    """The next ``beta``: a scaled step, then a conjugate one from the change of this sweep and of
    earlier ones, which are dropped for images that begin anew. ``slot`` is its place in the
    memory."""
    reach = swept.change.abs().clamp(min=settings.FAR)
    longer = per_image(s.bold, s.x) * swept.whole / swept.resists
    change = (swept.change * longer.clamp(min=1.0)).clamp(-reach, reach)
    new = s.beta + change
    latest, step = (change - s.change).flatten(1), (new - s.last).flatten(1)
    s.change, s.last = change, new
    s.metric = torch.where(per_image(begins, new), swept.resists, s.metric)
    metric = s.metric.flatten(1)
    s.inverse[:, slot] = 0.0

    def shares(values: Tensor) -> Tensor:
        return (metric * values)[:, None] @ s.changes.mT * s.inverse[:, None]

    share, now = shares(latest), s.changes[:, slot]
    whole = (metric * latest.square()).sum(1)
    s.steps[:, slot] = step - (share @ s.steps)[:, 0]
    now.copy_(latest - (share @ s.changes)[:, 0])
    size = (metric * now.square()).sum(1)
    s.inverse[:, slot] = 1 / size
    dependent = begins | (size <= settings.DEPENDENT * whole)
    s.inverse = torch.where(dependent[:, None], 0.0, s.inverse)
    s.beta = new - (shares(change.flatten(1)) @ s.steps).view_as(new)
