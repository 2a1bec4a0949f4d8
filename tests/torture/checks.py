"""Checks that follow each call, in float64 and from the definitions: no code is shared with the
library.

A finding is a line of text that begins with its kind. The kinds that matter most: ``nan`` (a result
that is not finite), ``infeasible`` (a point outside its ball), ``unsound`` (a bound that does not
hold) and ``false converged`` (``converged`` is set although the gap, computed here, is above the
tolerance).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from references import reference_support
from wball import DenseCost, GridCost, ProjectionResult, StencilCost, SupportResult, WassersteinBall
from wball.cost import GroundCost
from wball.plan import Plan

from .cases import Array, Case

Integers = NDArray[np.int64]


class Findings(list[str]):
    """What was wrong with a call; empty if nothing was."""

    def expect(self, good: object, kind: str, text: object) -> None:
        if not good:
            self.append(f"{kind}: {text}")


class Geometry:
    """The moves that a cost allows on a grid: ``source``, ``target`` and ``price`` of each."""

    def __init__(self, cost: GridCost | StencilCost | DenseCost, shape: tuple[int, ...]) -> None:
        height, width = (shape[2], shape[3]) if len(shape) == 4 else (1, shape[1])
        over = shape[1] if cost.channel_cost is not None else 1  # channels that exchange mass
        self.n = over * height * width
        self.offsets: list[tuple[int, int, int, float]] = []
        if isinstance(cost, DenseCost):
            table = cost.matrix.numpy()
            self.source, self.target = np.nonzero(np.isfinite(table))
            self.price = table[self.source, self.target]
            return
        if isinstance(cost, GridCost):
            reach = range(-(cost.window // 2), cost.window // 2 + 1)
            far = cost.channel_cost or 0.0
            moves = [
                (dr, dc, ds, (math.hypot(dr, dc) + far * (ds != 0)) ** cost.p)
                for dr in reach
                for dc in reach
                for ds in range(1 - over, over)
            ]
        else:
            rows, columns = len(cost.table) // 2, len(cost.table[0]) // 2
            cells = [(r, c, v) for r, line in enumerate(cost.table) for c, v in enumerate(line)]
            moves = [(r - rows, c - columns, 0, v) for r, c, v in cells if math.isfinite(v)]
        self.offsets = [m for m in moves if abs(m[0]) < height and abs(m[1]) < width]
        channel, row, column = np.indices((over, height, width)).reshape(3, -1)
        parts = []
        for move, (dr, dc, ds, price) in enumerate(self.offsets):
            r, c, s = row + dr, column + dc, channel + ds
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width) & (s >= 0) & (s < over)
            start, step = np.flatnonzero(inside), (ds * height + dr) * width + dc
            same = np.ones(len(start))
            parts.append((start, start + step, price * same, move + 0 * start))
        self.source, self.target, self.price, self._move = map(
            np.concatenate, zip(*parts, strict=True)
        )

    def flows(self, plan: Plan) -> Array:
        """Mass on each of these moves, ``(B, C, moves)``."""
        flow = plan.flow.detach().double().numpy()
        batch, channels, moves, height, width = flow.shape
        over = self.n // (height * width)
        flow = flow.reshape(batch, channels // over, over, moves, -1).swapaxes(2, 3)
        flow = flow.reshape(batch, channels // over, moves, self.n)
        layer = self.target  # plans list the moves of a matrix by where they end
        if self.offsets:
            place = {offset: k for k, offset in enumerate(plan.moves.offsets)}  # type: ignore[attr-defined]
            layer = np.array([place[move[:3]] for move in self.offsets])[self._move]
        return np.asarray(flow[:, :, layer, self.source])

    def sums(self, flow: Array, at: Integers) -> Array:
        """Flows summed by source or target, ``(B, C, n)``."""
        total = np.zeros((*flow.shape[:2], self.n))
        for image, channel in np.ndindex(flow.shape[:2]):
            total[image, channel] = np.bincount(at, flow[image, channel], self.n)
        return total

    def row_maximum(self, scores: Array, tau: float) -> Array:
        """``tau log sum exp(score / tau)`` over each pixel's moves, ``(C, n)``; the maximum if
        ``tau`` is 0."""
        top = np.full((len(scores), self.n), -math.inf)
        total = np.zeros_like(top)
        for channel, score in enumerate(scores):
            np.maximum.at(top[channel], self.source, score)
            if tau > 0:
                with np.errstate(under="ignore"):
                    share = np.exp((score - top[channel][self.source]) / tau)
                total[channel] = np.bincount(self.source, share, self.n)
        return top + tau * np.log(total) if tau > 0 else top


def planes(x: Tensor, cost: GroundCost) -> Array:
    """``(B, C, n)`` in float64; all channels are one if mass moves between them."""
    a = x.detach().double().numpy()
    if cost.channel_cost is not None:
        return np.asarray(a.reshape(len(a), 1, math.prod(a.shape[1:])))
    return np.asarray(
        a.reshape(*a.shape[:2], a.shape[2] * a.shape[3]) if a.ndim == 4 else a[:, None]
    )


def centre(ball: WassersteinBall, x: Tensor) -> Tensor:
    """The images as the library takes them: pixels that rounding left outside the box are
    clipped."""
    return x.detach().clamp(*(ball.box if ball.box is not None else (0.0, math.inf)))


def radii(ball: WassersteinBall, batch: int) -> Array:
    return np.broadcast_to(torch.as_tensor(ball.eps, dtype=torch.float64).numpy(), (batch,))


def half_ulp(dtype: torch.dtype) -> float:
    return 0.5 * torch.finfo(dtype).eps


def finest(dtype: torch.dtype) -> float:
    """The smallest number above 0 of results for images of this dtype."""
    return 5e-324 if dtype is torch.float64 else 2.0**-149


def budgets(ball: WassersteinBall, x: Array, dtype: torch.dtype) -> Array:
    """What may be spent; nothing on images whose pixels are a few units of the smallest number
    there is."""
    mass = x.sum((1, 2))
    budget = radii(ball, len(x)) * (mass if ball.mass == "relative" else 1.0)
    return np.where(mass < 1e6 * x[:1].size * finest(dtype), 0.0, budget)


def check_point(found: Findings, case: Case, z: Tensor) -> None:
    """Shape, dtype, finiteness, box and mass: what must hold for every point, with a plan or
    without."""
    x, ball = case.x, case.ball
    expected = x.dtype if x.dtype is torch.float64 else torch.float32
    found.expect(z.shape == x.shape and z.dtype is expected, "shape", (z.shape, z.dtype))
    found.expect(z.isfinite().all(), "nan", "the point is not finite")
    a, b = planes(centre(ball, x), ball.cost), planes(z, ball.cost)
    lo, hi = ball.box if ball.box is not None else (0.0, math.inf)
    found.expect(((b >= lo - 1e-6) & (b <= hi + 1e-6)).all(), "infeasible", "outside the box")
    error = np.abs(a.sum(2) - b.sum(2)).max(1, initial=0)
    found.expect((error <= 1e-5 * a.sum((1, 2))).all(), "infeasible", f"mass error {error}")


def check_plan(found: Findings, case: Case, z: Tensor, plan: Plan) -> tuple[Geometry, Array]:
    """The plan proves that the point is in the ball: rows, columns, cost, sign. Returns the
    flows."""
    ball, x = case.ball, case.x
    geometry, a, b = (
        Geometry(ball.cost, tuple(x.shape)),
        planes(centre(ball, x), ball.cost),
        planes(z, ball.cost),
    )
    flow, mass, budget = geometry.flows(plan), a.sum((1, 2)), budgets(ball, a, x.dtype)
    everything = plan.flow.detach().double().flatten(1).sum(1).numpy()
    rows, columns = geometry.sums(flow, geometry.source), geometry.sums(flow, geometry.target)
    cost = (flow * geometry.price).sum((1, 2))
    found.expect(np.isfinite(flow).all(), "nan", "the plan is not finite")
    allowed = np.abs(everything - flow.sum((1, 2))) <= 1e-12 * mass
    found.expect(allowed.all(), "infeasible", "mass on forbidden moves")
    least = flow.min((1, 2), initial=0)
    found.expect((least >= -1e-13 * np.maximum(mass, 1e-300)).all(), "infeasible", f"flow {least}")
    off = np.abs(rows - a).sum((1, 2))
    found.expect((off <= 1e-8 * mass).all(), "infeasible", f"rows are off by {off}")
    # Plans may miss the box by 1e-12. What a pixel keeps is a difference, rounded in proportion to
    # what it had.
    box = 0.0 if ball.box is None else 1.1e-12 * max(1.0, ball.box[1])
    slack = half_ulp(z.dtype) * np.abs(columns) + 1e-14 * (np.abs(columns) + a)
    off = np.abs(columns - b) - slack - finest(z.dtype) - box
    found.expect((off <= 0).all(), "infeasible", "the point is not the sum of the plan's columns")
    within = cost <= budget * (1 + 1e-9) + 1e-300
    found.expect(within.all(), "infeasible", f"cost {cost}, budget {budget}")
    return geometry, flow


def check_projection(found: Findings, case: Case, result: ProjectionResult) -> None:
    """The gap that the returned plan and duals prove, compared with ``gap``, ``objective`` and
    ``converged``."""
    check_point(found, case, result.point)
    stated = torch.stack([result.objective, result.gap, result.residual])
    found.expect(stated.isfinite().all(), "nan", f"objective, gap, residual: {stated.tolist()}")
    assert result.plan is not None and result.duals is not None
    geometry, flow = check_plan(found, case, result.point, result.plan)
    columns = geometry.sums(flow, geometry.target)
    given = centre(case.ball, case.x), case.w, result.duals.beta
    a, target, u = (planes(values, case.ball.cost) for values in given)
    psi, budget = result.duals.psi.double().numpy(), budgets(case.ball, a, case.x.dtype)
    found.expect(np.isfinite(u).all() and np.isfinite(psi).all(), "nan", "duals")
    free = geometry.source[(geometry.price == 0) & (geometry.source != geometry.target)]
    for k, mass in enumerate(a.sum((1, 2))):
        converged = bool(result.converged[k])
        if mass <= 0 or budget[k] <= 0:
            found.expect(np.array_equal(columns[k], a[k]), "false point", "moved without a budget")
            alone = not (a[k][:, free] > 0).any()  # otherwise another point may be nearer
            found.expect(converged or not alone, "false point", "the only point is the nearest")
            continue
        tau = 0.0 if math.isinf(case.reg) else mass / case.reg
        distance = 0.5 * np.square(target[k] - columns[k]).sum()
        entropy = tau * _entropy(flow[k], a[k][:, geometry.source])
        scores = u[k][:, geometry.target] - psi[k] * geometry.price
        rows = np.where(a[k] > 0, geometry.row_maximum(scores, tau), 0.0)
        best = np.clip(target[k] - u[k], *(case.ball.box or (0.0, math.inf)))
        terms = [0.5 * np.square(target[k] - best), u[k] * best, -a[k] * rows]
        price = psi[k] * budget[k]
        gap = distance + entropy - (sum(term.sum() for term in terms) - price)
        size = sum(np.abs(term).sum() for term in terms) + price + distance + tau * mass
        rounding = 1e-11 * size + 1e-300
        allowed = case.tol * max(distance, 0.03 * (distance + abs(entropy)))
        allowed += case.tol**2 * 0.5 * np.square(target[k] - a[k]).sum()
        allowed += 1e-18 * (1 + np.square(target[k]).sum())
        found.expect(psi[k] >= 0 and gap >= -rounding, "unsound", f"gap {gap}, psi {psi[k]}")
        slack = 1e-6 * abs(gap) + 0.01 * allowed + rounding
        found.expect(abs(float(result.gap[k]) - max(gap, 0)) <= slack, "gap", (result.gap[k], gap))
        logs = np.where(a[k] > 0, a[k] * np.log(np.where(a[k] > 0, a[k], 1.0)), 0.0)
        whole = mass * math.log(mass)
        objective = distance + entropy + tau * (logs.sum() - whole)
        slack = 1e-6 * abs(objective) + 1e-12 * tau * (np.abs(logs).sum() + abs(whole)) + rounding
        value = float(result.objective[k])
        found.expect(abs(value - objective) <= slack, "objective", (value, objective))
        good = not converged or gap <= 1.001 * allowed + rounding
        found.expect(good, "false converged", f"gap {gap}, allowed {allowed}")


def _entropy(flow: Array, sent: Array) -> float:
    positive = (flow > 0) & (sent > 0)
    return float((flow[positive] * np.log(flow[positive] / sent[positive])).sum())


def check_support(found: Findings, case: Case, result: SupportResult) -> None:
    """``value <= optimum <= upper``. A convex solver finds the optimum of some small images of
    ordinary size."""
    check_point(found, case, result.point)
    bounds = torch.stack([result.value, result.upper])
    found.expect(bounds.isfinite().all(), "nan", f"value and upper: {bounds.tolist()}")
    assert result.plan is not None
    geometry, _ = check_plan(found, case, result.point, result.plan)
    x = centre(case.ball, case.x)
    a, g, point = (planes(values, case.ball.cost) for values in (x, case.g, result.point))
    eps, solve = radii(case.ball, len(a)), case.small and case.rng.random() < 0.3
    for k, mass in enumerate(a.sum((1, 2))):
        value, upper = float(result.value[k]), float(result.upper[k])
        size, before = float((np.abs(g[k]) * (a[k] + point[k])).sum()), float((g[k] * a[k]).sum())
        rounding = (half_ulp(result.point.dtype) + 1e-12) * size + 1e-300
        here = float((g[k] * point[k]).sum())
        found.expect(abs(value - here) <= 1e-12 * size + 1e-300, "value", (value, here))
        found.expect(upper >= value - 1e-12 * size, "unsound", f"upper {upper}, value {value}")
        if not math.isinf(case.reg):
            continue
        allowed = case.tol * (abs(value - before) + 1e-2 * float((np.abs(g[k]) * a[k]).sum()))
        good = not result.converged[k] or upper - value <= 1.001 * allowed + rounding
        found.expect(good, "false converged", f"gap {upper - value}, allowed {allowed}")
        if solve and 1e-2 < mass < 1e3 and 1e-2 < np.abs(g[k]).max() < 1e3:
            reach = (1 + geometry.price.max()) * (1.0 if case.ball.mass == "relative" else mass)
            ball = case.ball.at(min(float(eps[k]), reach))
            best = reference_support(ball, x[k : k + 1], case.g[k : k + 1]).objective
            good = value <= best + 1e-6 * size + rounding and upper >= best - 1e-6 * size
            found.expect(good, "unsound", f"value {value}, optimum {best}, upper {upper}")
