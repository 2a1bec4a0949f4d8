"""Slow independent references: the convex programs themselves, one image at a time, given to cvxpy
and Clarabel, and linear ones to HiGHS."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import cvxpy as cp
import numpy as np
import torch
from scipy import sparse
from scipy.optimize import linprog
from torch import Tensor

from problems import arc_list
from wball.ball import WassersteinBall


class Reference(NamedTuple):
    """An optimum by an independent solver.

    ``objective`` is in image units (see each function), ``point`` has the shape of ``x``.
    """

    objective: float
    point: Tensor


class _Program:
    """Plans of one image in mass-1 units, ``P_hat = P / m``: one variable per arc that leaves a
    pixel with mass."""

    def __init__(self, ball: WassersteinBall, x: Tensor) -> None:
        if x.shape[0] != 1:
            raise ValueError(f"references solve one image at a time, got {tuple(x.shape)}")
        image = x.detach().cpu().double()
        flat = (
            image.reshape(1, -1, x.shape[-2] * x.shape[-1])
            if x.ndim == 4
            else image.reshape(1, 1, -1)
        )
        height, width = (x.shape[-2], x.shape[-1]) if x.ndim == 4 else (1, x.shape[1])
        self.shape, (_, channels, n) = x.shape, flat.shape
        arcs = arc_list(ball.cost, height, width, channels)
        if ball.cost.channel_cost is not None:
            channels = 1  # all at once
        self.mass = float(image.sum()) or 1.0
        self.centre = flat[0].numpy().reshape(-1) / self.mass
        first = n * np.arange(channels)[:, None]  # pixel of each channel
        source, target, price = map(np.array, zip(*arcs, strict=True))
        source, target = ((first + ends).reshape(-1) for ends in (source, target))
        price = np.tile(price, channels)
        kept = self.centre[source] > 0
        source, target, self.price = source[kept], target[kept], price[kept]
        ones, size = np.ones(len(source)), (len(self.centre), len(source))
        self.rows = sparse.csr_matrix((ones, (source, np.arange(len(source)))), size)[
            self.centre > 0
        ]
        self.columns = sparse.csr_matrix((ones, (target, np.arange(len(target)))), size)
        self.plan = cp.Variable(len(source), nonneg=True)
        self.constraints: list[cp.Constraint] = [
            self.rows @ self.plan == self.centre[self.centre > 0]
        ]
        self.point = self.columns @ self.plan

    def within(self, ball: WassersteinBall) -> None:
        """Budget and box."""
        eps = float(torch.as_tensor(ball.eps))
        budget = eps if ball.mass == "relative" else eps / self.mass
        self.constraints.append(self.price @ self.plan <= budget)
        if ball.box is not None:
            lo, hi = ball.box
            self.constraints.append(self.point <= hi / self.mass)
            if lo > 0:
                self.constraints.append(self.point >= lo / self.mass)

    def minimise(self, objective: cp.Expression) -> float:
        problem = cp.Problem(cp.Minimize(objective), self.constraints)
        for tol in (
            1e-10,
            1e-8,
        ):  # the first is near what double precision can do, and sometimes beyond it
            tight = {f"tol_{name}": tol for name in ("gap_abs", "gap_rel", "feas")}
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # "solution may be inaccurate": the status says so too
                problem.solve(solver=cp.CLARABEL, max_iter=500, **tight)
            if problem.status == "optimal":
                break
        if problem.status in ("infeasible", "infeasible_inaccurate"):
            return math.inf
        if problem.status not in ("optimal", "optimal_inaccurate"):
            raise RuntimeError(f"Clarabel ended with {problem.status}")
        return float(problem.value)

    def result(self, objective: float) -> Reference:
        plan = self.mass * np.clip(np.asarray(self.plan.value), 0, None)
        point = torch.from_numpy(np.asarray(self.columns @ plan)).reshape(self.shape)
        return Reference(objective, point)


def reference_projection(
    ball: WassersteinBall, x: Tensor, w: Tensor, reg: float = math.inf
) -> Reference:
    """``min 1/2 |w - z|^2 + (m^2 / reg) sum P_hat log P_hat`` over the ball, ``P_hat = P / m`` (no
    entropy at inf).

    In mass-1 units that is ``m^2 (1/2 |w_hat - z_hat|^2 + (1/reg) sum P_hat log P_hat)``, which
    gives the conditions ``P_hat_ij ~ x_i exp(beta_j - psi C_ij)`` and ``z = clip(w - m beta / reg,
    box)``.
    """
    program = _Program(ball, x)
    program.within(ball)
    target = w.detach().cpu().double().reshape(-1).numpy() / program.mass
    # Scaled so that numbers near 1 reach the solver, whatever the mass: its tolerances are partly
    # absolute.
    scale = program.mass**2
    objective = 0.5 * scale * cp.sum_squares(program.point - target)
    if math.isfinite(reg):
        objective = objective - (scale / reg) * cp.sum(cp.entr(program.plan))
    return program.result(program.minimise(objective))


def reference_support(
    ball: WassersteinBall, x: Tensor, g: Tensor, reg: float = math.inf
) -> Reference:
    """``max <g, z> - (m / reg) sum P_hat log P_hat`` over the ball (no entropy at inf).

    For finite ``reg`` the objective includes the entropy; ``<g, point>`` is the value without it.
    """
    program = _Program(ball, x)
    program.within(ball)
    direction = g.detach().cpu().double().reshape(-1).numpy()
    objective = -(direction @ program.point)
    if math.isfinite(reg):
        objective = objective - cp.sum(cp.entr(program.plan)) / reg
    return program.result(-program.mass * program.minimise(objective))


def reference_distance(ball: WassersteinBall, x: Tensor, z: Tensor) -> float:
    """``min <P, C>`` over plans with rows ``x`` and columns ``z``, in the unit of ``ball.eps``; inf
    if there is none.

    The simplex method of HiGHS: interior points lose digits where costs of powers differ a lot.
    """
    program = _Program(ball, x)
    target = z.detach().cpu().double().reshape(-1).numpy() / program.mass
    reached = np.asarray(program.columns.sum(1)).reshape(-1) > 0
    if np.any(target[~reached] > 1e-9) or np.any(target < 0):
        return math.inf
    sums = sparse.vstack([program.rows, program.columns[reached]])
    ends = np.concatenate([program.centre[program.centre > 0], target[reached]])
    for tolerance in (1e-10, 1e-7):  # rounding of the images may leave no plan at all
        options = {"primal_feasibility_tolerance": tolerance}
        found = linprog(program.price, A_eq=sums, b_eq=ends, method="highs-ds", options=options)
        if found.status == 0:
            relative = float(program.price @ found.x)
            return relative if ball.mass == "relative" else relative * program.mass
    if found.status != 2:
        raise RuntimeError(found.message)
    return math.inf
