"""What must hold after each call, by sums and linear programs in float64 that share no code with the library.

A finding is a line of text. Three kinds matter most and are counted apart: ``nan`` (a result that is not finite),
``infeasible`` (a point outside its ball) and ``false converged`` (a solver vouches for an image although its gap,
computed here, is above the tolerance).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog
from torch import Tensor

from wball import DenseCost, GridCost, ProjectionResult, StencilCost, SupportResult, WassersteinBall
from wball.plan import Plan

Array = NDArray[np.float64]


@dataclass
class Findings:
    """What went wrong, and how close to the limits the rest came."""

    lines: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)

    def expect(self, good: bool, kind: str, text: str) -> None:
        if not good:
            self.lines.append(f"{kind}: {text}")

    def measure(self, name: str, value: float) -> None:
        self.worst[name] = max(self.worst.get(name, 0.0), value)


class Geometry:
    """The moves of a cost on a grid, from the cost's definition: ``source``, ``target`` and ``price`` of each."""

    def __init__(self, cost: GridCost | StencilCost | DenseCost, shape: tuple[int, ...]) -> None:
        self.height, self.width = (shape[2], shape[3]) if len(shape) == 4 else (1, shape[1])
        self.n = self.height * self.width
        row, column = np.divmod(np.arange(self.n), self.width)
        if isinstance(cost, DenseCost):
            table = cost.matrix.numpy()
            self.source, self.target = np.nonzero(np.isfinite(table))
            self.price = table[self.source, self.target]
            self.layer = self.target  # plans list the moves of a matrix by where they end
            self.layers = self.n
            return
        found = []
        if isinstance(cost, GridCost):
            reach = cost.window // 2
            rows, columns = min(reach, self.height - 1), min(reach, self.width - 1)
            for dr in range(-rows, rows + 1):
                for dc in range(-columns, columns + 1):
                    found.append((dr, dc, math.hypot(dr, dc) ** cost.p))
        else:
            for r, values in enumerate(cost.table):
                for c, value in enumerate(values):
                    found.append((r - len(cost.table) // 2, c - len(values) // 2, value))
        found = [
            m
            for m in found
            if math.isfinite(m[2]) and abs(m[0]) < self.height and abs(m[1]) < self.width
        ]
        self.offsets = {(dr, dc): value for dr, dc, value in found}
        source, target, price, key = [], [], [], []
        for dr, dc, value in found:
            i = np.flatnonzero(
                (row + dr >= 0)
                & (row + dr < self.height)
                & (column + dc >= 0)
                & (column + dc < self.width)
            )
            source.append(i)
            target.append(i + dr * self.width + dc)
            price.append(np.full(len(i), value))
            key.append(np.full(len(i), len(key)))
        self.source, self.target, self.price = (
            np.concatenate(part) for part in (source, target, price)
        )
        self._key, self._moves, self.layers = np.concatenate(key), found, len(found)

    def flows(self, plan: Plan) -> Array:
        """Mass on each of this geometry's moves, ``(B, C, moves)``; all of a plan's mass must be on one of them."""
        flow = plan.flow.detach().double().cpu().numpy()
        flow = flow.reshape(*flow.shape[:3], self.n)
        if hasattr(self, "offsets"):
            place = {offset: k for k, offset in enumerate(plan.moves.offsets)}  # type: ignore[attr-defined]
            layer = np.array([place[(dr, dc)] for dr, dc, _ in self._moves], dtype=np.int64)[
                self._key
            ]
        else:
            layer = self.layer
        return np.asarray(flow[:, :, layer, self.source])

    def sums(self, flow: Array, at: NDArray[np.int64]) -> Array:
        """Flows summed by source or target, ``(B, C, n)``."""
        total = np.zeros((*flow.shape[:2], self.n))
        for b in range(flow.shape[0]):
            for c in range(flow.shape[1]):
                total[b, c] = np.bincount(at, flow[b, c], self.n)
        return total

    def row_max(self, scores: Array) -> Array:
        """The largest of ``(C, moves)`` scores of each pixel's moves, ``(C, n)``."""
        top = np.full((scores.shape[0], self.n), -math.inf)
        for c in range(scores.shape[0]):
            np.maximum.at(top[c], self.source, scores[c])
        return top

    def row_soft(self, scores: Array, tau: float) -> Array:
        """``tau log sum exp(score / tau)`` over each pixel's moves, ``(C, n)``."""
        top = self.row_max(scores)
        total = np.zeros_like(top)
        for c in range(scores.shape[0]):
            with np.errstate(under="ignore"):
                total[c] = np.bincount(
                    self.source, np.exp((scores[c] - top[c][self.source]) / tau), self.n
                )
        return top + tau * np.log(total)


def planes(x: Tensor) -> Array:
    """``(B, C, n)`` in float64."""
    a = x.detach().double().cpu().numpy()
    return np.asarray(
        a.reshape(*a.shape[:2], a.shape[2] * a.shape[3]) if a.ndim == 4 else a[:, None, :]
    )


def centres(ball: WassersteinBall, x: Tensor) -> Array:
    """The images as the library takes them: pixels that rounding left outside the box are clipped, in their dtype."""
    lo, hi = ball.box if ball.box is not None else (0.0, math.inf)
    return planes(x.detach().clamp(lo, hi))


def radii(ball: WassersteinBall, batch: int) -> Array:
    return np.broadcast_to(torch.as_tensor(ball.eps, dtype=torch.float64).numpy(), (batch,))


def budgets(ball: WassersteinBall, x: Array, dtype: torch.dtype) -> Array:
    """What may be spent; nothing on images whose pixels are a few units of the smallest number there is."""
    eps, mass = radii(ball, len(x)), x.sum((1, 2))
    least = 5e-324 if dtype is torch.float64 else 2.0**-149
    return np.where(
        mass < 1e6 * x[:1].size * least, 0.0, eps * mass if ball.mass == "relative" else eps
    )


def half_ulp(dtype: torch.dtype) -> float:
    return 0.5 * torch.finfo(dtype).eps


def check_point(found: Findings, ball: WassersteinBall, x: Tensor, z: Tensor) -> None:
    """Shape, dtype, finiteness, box and mass: what must hold for every point, plan or no plan."""
    expected = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    found.expect(z.shape == x.shape, "shape", f"{tuple(z.shape)} for {tuple(x.shape)}")
    found.expect(z.dtype == expected, "dtype", f"{z.dtype} for {x.dtype}")
    if z.numel() == 0:
        return
    found.expect(bool(z.isfinite().all()), "nan", "the point is not finite")
    lo, hi = ball.box if ball.box is not None else (0.0, math.inf)
    violation = max(lo - float(z.min()), float(z.max()) - hi, 0.0)
    found.measure("box violation", violation)
    found.expect(violation <= 1e-6, "infeasible", f"box violation {violation:.3g}")
    a, b = centres(ball, x), planes(z)
    mass = a.sum((1, 2))
    error = np.abs(a.sum(2) - b.sum(2)).max(1)
    for k in range(len(a)):
        share = error[k] / mass[k] if mass[k] > 0 else (0.0 if error[k] == 0 else math.inf)
        found.measure("mass error", share)
        found.expect(
            share <= 1e-5,
            "infeasible",
            f"mass error {share:.3g} of image {k} with mass {mass[k]:.3g}",
        )


def check_plan(
    found: Findings, ball: WassersteinBall, x: Tensor, z: Tensor, plan: Plan
) -> tuple[Geometry, Array]:
    """The plan proves that the point is in the ball: rows, columns, cost, sign. Returns the flows."""
    geometry = Geometry(ball.cost, tuple(x.shape))
    box = 0.0 if ball.box is None else 1.1e-12 * max(1.0, ball.box[1])  # plans may miss it by 1e-12
    a, b = centres(ball, x), planes(z)
    flow = geometry.flows(plan)
    mass, budget = a.sum((1, 2)), budgets(ball, a, x.dtype)
    everything = plan.flow.detach().double().flatten(1).sum(1).numpy()
    on_moves = flow.sum((1, 2))
    rows, columns = geometry.sums(flow, geometry.source), geometry.sums(flow, geometry.target)
    cost = (flow * geometry.price).sum((1, 2))
    for k in range(len(a)):
        m = mass[k]
        found.expect(
            bool(np.isfinite(flow[k]).all()), "nan", f"the plan of image {k} is not finite"
        )
        found.expect(
            abs(everything[k] - on_moves[k]) <= 1e-12 * m,
            "infeasible",
            f"image {k}: mass on forbidden moves",
        )
        found.expect(
            flow[k].min() >= -1e-13 * max(m, 1e-300),
            "infeasible",
            f"image {k}: flow {flow[k].min():.3g} < 0",
        )
        off = np.abs(rows[k] - a[k]).sum()
        found.expect(
            off <= 1e-8 * m,
            "infeasible",
            f"image {k}: rows are off by {off / m if m else off:.3g} of the mass",
        )
        denormal = torch.finfo(z.dtype).smallest_normal * torch.finfo(z.dtype).eps
        # What a pixel keeps is a difference, which float64 rounds in proportion to what it had.
        slack = (
            half_ulp(z.dtype) * np.abs(columns[k])
            + 1e-14 * (np.abs(columns[k]) + a[k])
            + denormal
            + box
        )
        over = (np.abs(columns[k] - b[k]) - slack).max()
        found.expect(
            over <= 0,
            "infeasible",
            f"image {k}: the point differs from the plan's columns by {over:.3g}",
        )
        found.expect(
            cost[k] <= budget[k] * (1 + 1e-9) + 1e-300,
            "infeasible",
            f"image {k}: cost {cost[k]:.9g} > {budget[k]:.9g}",
        )
        if budget[k] > 1e-290:
            found.measure("plan cost / budget", cost[k] / budget[k])
    return geometry, flow


def check_projection(
    found: Findings,
    ball: WassersteinBall,
    x: Tensor,
    w: Tensor,
    result: ProjectionResult,
    reg: float,
    tol: float,
) -> None:
    """The gap that the returned plan and duals prove, against what ``converged`` claims."""
    check_point(found, ball, x, result.point)
    for name in ("objective", "gap", "residual"):
        found.expect(
            bool(getattr(result, name).isfinite().all()),
            "nan",
            f"{name} is {getattr(result, name).tolist()}",
        )
    if result.plan is None or result.duals is None:
        found.expect(False, "missing", "no plan or no duals")
        return
    geometry, flow = check_plan(found, ball, x, result.point, result.plan)
    lo, hi = (
        ball.box if ball.box is not None else (0.0, math.inf)
    )  # columns of a plan are not negative
    a, target = centres(ball, x), planes(w)
    u, psi = planes(result.duals.beta), result.duals.psi.double().numpy()
    columns = geometry.sums(flow, geometry.target)
    mass, budget = a.sum((1, 2)), budgets(ball, a, x.dtype)
    claimed = result.converged.tolist()
    for k in range(len(a)):
        found.expect(
            bool(np.isfinite(u[k]).all() and np.isfinite(psi[k])), "nan", f"duals of image {k}"
        )
        if mass[k] <= 0 or budget[k] <= 0:
            found.expect(
                np.array_equal(columns[k], a[k]),
                "false point",
                f"image {k}: mass moved without a budget",
            )
            leaving = geometry.source[(geometry.price == 0) & (geometry.source != geometry.target)]
            alone = not bool(
                (a[k][:, leaving] > 0).any()
            )  # otherwise the ball has other points, and they may be nearer
            found.expect(
                claimed[k] or not alone,
                "false point",
                f"image {k}: the only point of a ball is not its nearest",
            )
            continue
        found.expect(psi[k] >= 0, "dual", f"psi of image {k} is {psi[k]}")
        tau = 0.0 if math.isinf(reg) else mass[k] / reg
        distance = 0.5 * np.square(target[k] - columns[k]).sum()
        entropy = _entropy(flow[k], a[k][:, geometry.source])
        primal = distance + tau * entropy
        scores = u[k][:, geometry.target] - psi[k] * geometry.price
        rows = geometry.row_soft(scores, tau) if tau > 0 else geometry.row_max(scores)
        best = np.clip(target[k] - u[k], lo, hi)
        rows = np.where(a[k] > 0, rows, 0.0)
        terms = (0.5 * np.square(target[k] - best), u[k] * best, a[k] * rows)
        dual = terms[0].sum() + terms[1].sum() - psi[k] * budget[k] - terms[2].sum()
        size = sum(np.abs(t).sum() for t in terms) + psi[k] * budget[k] + distance + tau * mass[k]
        gap = primal - dual
        offset = tau * (_xlogx(a[k]).sum() - a[k].sum() * math.log(mass[k]))
        spread = tau * (np.abs(_xlogx(a[k])).sum() + abs(mass[k] * math.log(mass[k])))
        objective = primal + offset
        at_centre = 0.5 * np.square(target[k] - a[k]).sum()
        allowed = tol * max(distance, 0.03 * (distance + tau * abs(entropy))) + tol**2 * at_centre
        allowed += 1e-18 * (1 + np.square(target[k]).sum())
        rounding = 1e-11 * size + 1e-300
        found.expect(
            gap >= -rounding, "unsound", f"image {k}: the dual exceeds the primal by {-gap:.3g}"
        )
        stated, value = float(result.gap[k]), float(result.objective[k])
        found.expect(
            abs(stated - max(gap, 0)) <= 1e-6 * abs(gap) + 0.01 * allowed + rounding,
            "gap",
            f"image {k}: states {stated:.6g}, is {gap:.6g}",
        )
        found.expect(
            abs(value - objective) <= 1e-6 * abs(objective) + rounding + 1e-12 * spread,
            "objective",
            f"{value:.9g}, is {objective:.9g}",
        )
        if claimed[k]:
            found.expect(
                gap <= 1.001 * allowed + rounding,
                "false converged",
                f"image {k}: gap {gap:.4g}, allowed {allowed:.4g}",
            )


def _entropy(flow: Array, sent: Array) -> float:
    positive = (flow > 0) & (sent > 0)
    return float((flow[positive] * np.log(flow[positive] / sent[positive])).sum())


def _xlogx(a: Array) -> Array:
    return np.where(a > 0, a * np.log(np.where(a > 0, a, 1.0)), 0.0)


def check_support(
    found: Findings,
    ball: WassersteinBall,
    x: Tensor,
    g: Tensor,
    result: SupportResult,
    reg: float,
    tol: float,
    solve: bool,
) -> None:
    """``value <= optimum <= upper``; ``solve`` asks a linear program (or a search for the price) for the optimum."""
    check_point(found, ball, x, result.point)
    for name in ("value", "upper"):
        found.expect(
            bool(getattr(result, name).isfinite().all()),
            "nan",
            f"{name} is {getattr(result, name).tolist()}",
        )
    if result.plan is None:
        found.expect(False, "missing", "no plan")
        return
    geometry, flow = check_plan(found, ball, x, result.point, result.plan)
    a, direction, point = centres(ball, x), planes(g), planes(result.point)
    mass, budget = a.sum((1, 2)), budgets(ball, a, x.dtype)
    columns = geometry.sums(flow, geometry.target)
    for k in range(len(a)):
        value, upper = float(result.value[k]), float(result.upper[k])
        size = float((np.abs(direction[k]) * (a[k] + point[k])).sum())
        # the point is rounded to its dtype, and value is the rounded point's
        rounding = (half_ulp(result.point.dtype) + 1e-12) * size + 1e-300
        here = float((direction[k] * point[k]).sum())
        found.expect(
            abs(value - here) <= 1e-12 * size + 1e-300,
            "value",
            f"image {k}: states {value}, is {here}",
        )
        found.expect(
            upper >= value - 1e-12 * size, "unsound", f"image {k}: upper {upper} < value {value}"
        )
        gained = abs(value - float((direction[k] * a[k]).sum()))
        allowed = tol * (gained + 1e-2 * float((np.abs(direction[k]) * a[k]).sum()))
        claimed = bool(result.converged[k])
        if claimed and math.isinf(reg):
            found.expect(
                upper - value <= 1.001 * allowed + rounding,
                "false converged",
                f"image {k}: gap {upper - value:.4g}, {allowed:.4g}",
            )
        if not solve or mass[k] <= 1e-200 or budget[k] <= 0 or size == 0:
            continue
        if math.isinf(reg):
            best = linear_optimum(geometry, ball.box, a[k], direction[k], budget[k])
            # of the program, which sees masses and gradients up to 1 and takes 1e-10 for 0
            loose = 1e-7 * size + 1e-9 * mass[k] * float(np.abs(direction[k]).max())
            found.expect(
                value <= best + loose + rounding,
                "infeasible",
                f"image {k}: value {value} > optimum {best}",
            )
            found.expect(
                upper >= best - loose, "unsound", f"image {k}: upper {upper} < optimum {best}"
            )
        elif claimed and ball.box is None:
            tau = 1 / reg
            entropic = float((direction[k] * columns[k]).sum()) - tau * _entropy(
                flow[k], a[k][:, geometry.source]
            )
            best, spread = entropic_optimum(geometry, a[k], direction[k], budget[k], tau)
            allowed = tol * (
                abs(entropic - float((direction[k] * a[k]).sum()))
                + 1e-2 * float((np.abs(direction[k]) * a[k]).sum())
            )
            found.expect(
                best - entropic <= 1.01 * allowed + 1e-10 * (size + spread), "false converged",
                f"image {k}: entropic gap {best - entropic:.4g}, allowed {allowed:.4g}",
            )  # fmt: skip


def linear_optimum(
    geometry: Geometry, box: tuple[float, float] | None, a: Array, g: Array, budget: float
) -> float:
    """``max <g, z>`` over the ball by HiGHS, all channels in one program, in units where mass and gradient are 1."""
    channels, mass, scale = len(a), float(a.sum()), float(np.abs(g).max())
    n = geometry.n
    source = np.concatenate([geometry.source + c * n for c in range(channels)])
    target = np.concatenate([geometry.target + c * n for c in range(channels)])
    price = np.tile(geometry.price, channels)
    sent = a.reshape(-1) / mass
    kept = sent[source] > 0
    source, target, price = source[kept], target[kept], price[kept]
    arcs, ones = np.arange(len(source)), np.ones(len(source))
    rows = sparse.csr_matrix((ones, (source, arcs)), (channels * n, len(arcs)))
    columns = sparse.csr_matrix((ones, (target, arcs)), (channels * n, len(arcs)))
    reach = float(price.max(initial=0.0))
    blocks, limits = [sparse.csr_matrix(price[None])], [np.array([min(budget / mass, reach)])]
    if box is not None:
        blocks.append(columns)
        limits.append(np.full(channels * n, box[1] / mass))
        if box[0] > 0:
            blocks.append(-columns)
            limits.append(np.full(channels * n, -box[0] / mass))
    objective = -(g.reshape(-1) / scale)[target]
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = linprog(
        objective,
        A_ub=sparse.vstack(blocks),
        b_ub=np.concatenate(limits),
        A_eq=rows,
        b_eq=sent,
        method="highs",
        options=tight,
    )
    if answer.status != 0:
        return math.nan
    return -float(answer.fun) * mass * scale


def entropic_optimum(
    geometry: Geometry, a: Array, g: Array, budget: float, tau: float
) -> tuple[float, float]:
    """The least ``psi budget + sum x tau log sum exp((g - psi C) / tau)`` over ``psi >= 0``, by golden sections."""
    ends = g[:, geometry.target]

    def h(psi: float) -> float:
        rows = np.where(a > 0, geometry.row_soft(ends - psi * geometry.price, tau), 0.0)
        return psi * budget + float((a * rows).sum())

    least = geometry.price[geometry.price > 0].min(initial=math.inf)
    if not math.isfinite(least):
        return h(0.0), 0.0
    spread = float(ends.max() - ends.min())
    low, high = 0.0, (2 * spread + 100 * tau) / least + 1e-300
    # in the logarithm of psi + a little: the minimiser may be at any scale
    tiny = 1e-9 * high
    left, right, ratio = math.log(tiny), math.log(high + tiny), (math.sqrt(5) - 1) / 2
    p, q = right - ratio * (right - left), left + ratio * (right - left)
    hp, hq = h(math.exp(p) - tiny), h(math.exp(q) - tiny)
    best = min(h(low), h(high), hp, hq)
    for _ in range(60):
        if hp < hq:
            right, q, hq = q, p, hp
            p = right - ratio * (right - left)
            hp = h(math.exp(p) - tiny)
            best = min(best, hp)
        else:
            left, p, hp = p, q, hq
            q = left + ratio * (right - left)
            hq = h(math.exp(q) - tiny)
            best = min(best, hq)
    return best, spread * float(a.sum())


def transport(geometry: Geometry, a: Array, b: Array) -> float:
    """The least cost of turning ``a`` into ``b`` (``(C, n)``, equal masses up to rounding) by HiGHS; inf if impossible.

    Rounding may leave islands of pixels unbalanced. So each channel may leave up to 1e-9 of the image's mass over.
    """
    mass, total = float(a.sum()), 0.0
    for start, end in zip(a, b, strict=True):
        if np.array_equal(start, end):
            continue
        if start.sum() == 0 or end.sum() == 0:
            return math.inf
        start, end = start / mass, end * (start.sum() / end.sum()) / mass
        kept = (start[geometry.source] > 0) & (end[geometry.target] > 0)
        source, target, price = geometry.source[kept], geometry.target[kept], geometry.price[kept]
        arcs, ones = np.arange(len(source)), np.ones(len(source))
        rows = sparse.csr_matrix((ones, (source, arcs)), (geometry.n, len(arcs)))
        columns = sparse.csr_matrix((ones, (target, arcs)), (geometry.n, len(arcs)))
        slack = sparse.identity(geometry.n)
        dear = 10.0 * (1 + price.max(initial=0.0)) * geometry.n
        blocks = sparse.bmat([[rows, slack, None], [columns, None, slack]])
        costs = np.concatenate([price, np.full(2 * geometry.n, dear)])
        tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        answer = linprog(
            costs, A_eq=blocks, b_eq=np.concatenate([start, end]), method="highs", options=tight
        )
        if answer.status != 0:
            return math.nan
        if answer.x[len(arcs) :].sum() > 2e-5:
            return math.inf
        total += float(answer.x[: len(arcs)] @ price)
    return total * mass
