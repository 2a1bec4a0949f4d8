r"""Small problems as linear programs: every node is bounded by the best relaxation of its kind, and leaves are exact.

Variables are the plan (or the pixels) and the outputs ``y`` of all relaxed units; an unstable unit lies in the triangle
``y >= v``, ``y >= leak v``, ``y <= line``, a split one on its half. The solver is not trusted: its multipliers are. Any
``lambda`` and ``mu <= 0`` give the lower bound

.. math::
    \lambda^T b_{eq} + \mu^T b_{ub} + \sum_k \min_{l_k \le t_k \le u_k} (c - A_{eq}^T \lambda - A_{ub}^T \mu)_k\, t_k

(Neumaier and Shcherbina, 2004), evaluated here in float64 and rounded down. That a node is empty is proved in the same
way: multipliers of the program that makes the largest violation small give ``c = 0`` a positive bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wball.certificates.bounds import ROUNDING
from wball.certificates.complete.bound import Problems
from wball.certificates.complete.nodes import Nodes
from wball.certificates.graph import Activation, Curved, Graph, MaxPool, back
from wball.input_sets.rows import Rows, units

Array = NDArray[np.float64]

MOST_UNITS = 400
"""Relaxed units up to which programs pay."""

FEASIBLE = 1e-7
"""Distance from an activation's graph at which a solution of the program is a point of the network."""


@dataclass(frozen=True)
class _Affine:
    """``constant + image z + sum_k parts[k] y_k``: values of an operation in terms of the image and relaxed outputs."""

    constant: Array
    image: Array
    parts: dict[int, Array]


@dataclass(frozen=True)
class Solved:
    """A node's sound bound, the image of the solution, the unit to split, and whether there is one."""

    bound: float
    image: Array
    position: int
    unit: int
    splits: bool


class Program:
    """The linear programs of some problems."""

    @staticmethod
    def serves(problems: Problems) -> bool:
        size = sum(math.prod(problems.graph.ops[k].shape) for k in problems.graph.relaxed())
        straight = not any(isinstance(op, Curved) for op in problems.graph.ops)
        return straight and problems.source.small and size <= MOST_UNITS

    def __init__(self, problems: Problems) -> None:
        self.problems, graph = problems, problems.graph
        self.layers = graph.relaxed()
        self.reads = {k: _affine(graph, graph.ops[k].inputs[0]) for k in self.layers}
        self.logits = _affine(graph, len(graph.ops) - 1)
        self.offsets, start = {}, 0
        for k in self.layers:
            self.offsets[k] = start
            start += math.prod(graph.ops[k].shape)
        self.units = start
        self._sets: dict[int, _Set] = {}

    def solve(self, nodes: Nodes, n: int) -> Solved:
        """Bound node ``n``."""
        problem = int(nodes.problem[n])
        if problem not in self._sets:
            self._sets[problem] = _Set(self.problems, problem)
        base = self._sets[problem]
        signs = {
            k: v[n].flatten().cpu().numpy()
            for (kind, k), v in nodes.state.items()
            if kind == "sign"
        }
        return self._solve(problem, base, signs)

    def _over(self, affine: _Affine, base: _Set) -> tuple[Array, Array]:
        """Coefficients over all variables, and the constant."""
        parts = [affine.image @ base.to_image]
        outputs = np.zeros((affine.constant.shape[0], self.units))
        for k, part in affine.parts.items():
            outputs[:, self.offsets[k] : self.offsets[k] + part.shape[1]] = part
        return np.concatenate([*parts, outputs], 1), affine.constant

    def _solve(self, problem: int, base: _Set, signs: dict[int, Array]) -> Solved:
        graph, bounds = self.problems.graph, self.problems.bounds
        many = base.to_image.shape[1]
        low, high = np.zeros(many + self.units), np.zeros(many + self.units)
        low[:many], high[:many] = base.low, base.high
        rows: list[Array] = []
        limits: list[Array] = []
        same: list[Array] = []
        values: list[Array] = []
        reads: dict[int, tuple[Array, Array]] = {}
        for k in self.layers:
            op = graph.ops[k]
            over, constant = self._over(self.reads[k], base)
            reads[k] = over, constant
            positive, negative = over.clip(min=0), over.clip(max=0)
            room = 1e-9 * (np.abs(over) @ np.maximum(np.abs(low), np.abs(high)) + np.abs(constant))
            least = constant + positive @ low + negative @ high - room
            most = constant + positive @ high + negative @ low + room
            least = np.maximum(least, bounds.lower[k][problem].flatten().cpu().numpy())
            most = np.minimum(most, bounds.upper[k][problem].flatten().cpu().numpy())
            mine = slice(many + self.offsets[k], many + self.offsets[k] + math.prod(op.shape))
            pick = np.zeros((math.prod(op.shape), low.shape[0]))
            pick[:, mine] = np.eye(math.prod(op.shape))
            if isinstance(op, MaxPool):
                places = op.places(torch.device("cpu")).numpy()  # (h, w, k)
                inner = op.before[1] * op.before[2]
                size = op.shape[1] * op.shape[2]
                for unit in range(math.prod(op.shape)):
                    taps = places.reshape(size, -1)[unit % size] + (unit // size) * inner
                    taps = np.unique(taps)
                    rows.append(over[taps] - pick[unit])
                    limits.append(-constant[taps])
                    low[many + self.offsets[k] + unit] = least[taps].max()
                    high[many + self.offsets[k] + unit] = most[taps].max()
                continue
            assert isinstance(op, Activation)
            leak, sign = op.leak, signs[k]
            above, below = (sign > 0) | (least >= 0), (sign < 0) | (most <= 0)
            split = ((sign > 0) & (least < 0)) | ((sign < 0) & (most > 0))
            if split.any():
                rows.append(-over[split] * sign[split, None])
                limits.append(constant[split] * sign[split])
            least, most = (
                np.where(sign > 0, least.clip(min=0), least),
                np.where(sign < 0, most.clip(max=0), most),
            )
            slope = np.where(above, 1.0, leak)
            fixed = above | below
            same.append(pick[fixed] - slope[fixed, None] * over[fixed])
            values.append(slope[fixed] * constant[fixed])
            ends = [np.where(fixed, slope * e, np.maximum(e, leak * e)) for e in (least, most)]
            low[mine], high[mine] = np.minimum(*ends), np.maximum(*ends)
            free = ~fixed
            if free.any():
                first, last = least[free], most[free]
                line = (last - leak * first) / (last - first)
                rows += [over[free] - pick[free], leak * over[free] - pick[free]]
                limits += [-constant[free], -leak * constant[free]]
                rows.append(pick[free] - line[:, None] * over[free])
                limits.append(line * constant[free] + (leak - line) * first)
        spec, shift = self._over(self.logits, base)
        own, other = int(self.problems.y[problem]), int(self.problems.other[problem])
        goal = spec[own] - spec[other]
        start = float(shift[own] - shift[other])
        equal = np.zeros((base.equal.shape[0], low.shape[0]))
        equal[:, :many] = base.equal
        under = np.zeros((base.below.shape[0], low.shape[0]))
        under[:, :many] = base.below
        constraints = _Constraints(
            np.concatenate([under, *rows]),
            np.concatenate([base.below_to, *limits]),
            np.concatenate([equal, *same]),
            np.concatenate([base.equal_to, *values]),
            low,
            high,
        )
        found = constraints.minimum(goal)
        if found is None:
            return Solved(
                math.inf if constraints.empty() else -math.inf, base.centre, -1, -1, False
            )
        point, bound = found
        position, unit, gap = self._loosest(reads, point, signs)
        return Solved(
            start + bound - ROUNDING * abs(start),
            base.to_image @ point[:many],
            position,
            unit,
            gap > FEASIBLE,
        )

    def _loosest(
        self, reads: dict[int, tuple[Array, Array]], point: Array, signs: dict[int, Array]
    ) -> tuple[int, int, float]:
        """The unit whose output is farthest from what its activation says."""
        found = (-1, -1, -math.inf)
        many = point.shape[0] - self.units
        for k in self.layers:
            op = self.problems.graph.ops[k]
            if not isinstance(op, Activation):
                continue
            over, constant = reads[k]
            v = over @ point + constant
            y = point[many + self.offsets[k] : many + self.offsets[k] + v.shape[0]]
            gap = np.where(signs[k] == 0, np.abs(y - np.maximum(v, op.leak * v)), -math.inf)
            unit = int(gap.argmax())
            if gap[unit] > found[2]:
                found = (k, unit, float(gap[unit]))
        return found


class _Set:
    """The input set of one problem as constraints on its own variables, which make an image linearly."""

    def __init__(self, problems: Problems, problem: int) -> None:
        found = problems.source.constraints(problem)
        self.to_image, self.low, self.high = found.to_image, found.low, found.high
        self.equal, self.equal_to, self.below, self.below_to = (
            found.equal,
            found.equal_to,
            found.below,
            found.below_to,
        )
        self.centre = problems.x[problem].flatten().double().cpu().numpy()


def _affine(graph: Graph, target: int) -> _Affine:
    """The values of operation ``target`` in terms of the image and of the outputs of relaxed operations."""
    shape = graph.ops[target].shape
    count = math.prod(shape)
    device = next(
        (v.device for op in graph.ops for v in vars(op).values() if isinstance(v, torch.Tensor)),
        None,
    )
    like = torch.zeros(0, dtype=torch.float64, device=device)
    index = torch.arange(count, device=device)
    parts: dict[int, Array] = {}

    def stop(position: int, rows: Rows) -> tuple[torch.Tensor, Rows]:
        op = graph.ops[position]
        parts[position] = rows.dense(op.shape).coeff.flatten(1).cpu().numpy()
        before = graph.ops[op.inputs[0]].shape
        return like.new_zeros(count), Rows(like.new_zeros((count, *before)), rows.image)

    with torch.no_grad():
        rows = units(
            shape, torch.zeros_like(index), index, torch.ones_like(index), like, dense=True
        )
        constant, image = back(graph, target, rows, stop)
    flat = image.dense(graph.ops[0].shape).coeff.flatten(1)
    return _Affine(constant.cpu().numpy(), flat.cpu().numpy(), parts)


@dataclass(frozen=True)
class _Constraints:
    """``under t <= under_to``, ``equal t = equal_to``, ``low <= t <= high``."""

    under: Array
    under_to: Array
    equal: Array
    equal_to: Array
    low: Array
    high: Array

    def minimum(self, goal: Array) -> tuple[Array, float] | None:
        """The minimiser of ``<goal, t>`` and a lower bound that its multipliers prove; ``None`` if there is none."""
        ranges = np.stack([self.low, self.high], 1)
        result = _solver()(
            goal, self.under, self.under_to, self.equal, self.equal_to, ranges, method="highs"
        )
        if result.status != 0:
            return None
        bound = self._proved(
            goal, np.asarray(result.ineqlin.marginals), np.asarray(result.eqlin.marginals)
        )
        return np.asarray(result.x), bound

    def empty(self) -> bool:
        """Whether it is proved that nothing satisfies the constraints."""
        if (self.low > self.high).any():
            return True
        rows = np.concatenate([self.under, self.equal, -self.equal])
        limits = np.concatenate([self.under_to, self.equal_to, -self.equal_to])
        rows = np.concatenate([rows, -np.ones((rows.shape[0], 1))], 1)
        goal = np.append(np.zeros(self.low.shape[0]), 1.0)
        ranges = np.stack([np.append(self.low, 0.0), np.append(self.high, np.inf)], 1)
        result = _solver()(goal, rows, limits, bounds=ranges, method="highs")
        if result.status != 0:
            return False
        prices = np.asarray(result.ineqlin.marginals)
        signed, plus, minus = np.split(
            prices, [self.under.shape[0], self.under.shape[0] + self.equal.shape[0]]
        )
        return self._proved(np.zeros(self.low.shape[0]), signed, plus - minus) > 0

    def _proved(self, goal: Array, signed: Array, free: Array) -> float:
        """The bound that multipliers of both kinds of constraints prove, rounded down."""
        signed = np.minimum(signed, 0.0)
        left = goal - self.equal.T @ free - self.under.T @ signed
        value = (
            free @ self.equal_to
            + signed @ self.under_to
            + np.minimum(left * self.low, left * self.high).sum()
        )
        reach = np.maximum(np.abs(self.low), np.abs(self.high))
        entered = (
            np.abs(goal)
            + np.abs(self.equal.T) @ np.abs(free)
            + np.abs(self.under.T) @ np.abs(signed)
        )
        magnitude = (
            np.abs(free) @ np.abs(self.equal_to)
            + np.abs(signed) @ np.abs(self.under_to)
            + entered @ reach
        )
        return float(value - ROUNDING * magnitude)


def _solver() -> Any:
    from scipy.optimize import linprog  # slow to import, and rarely needed

    return linprog
