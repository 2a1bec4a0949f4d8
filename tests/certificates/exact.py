"""Exact minimum of a small ReLU network's margin over a ball, by mixed-integer programming: the tests' referee.

Shares nothing with the library but the definition of the ball.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


def euclidean(height: int, width: int, p: float = 1.0) -> np.ndarray:
    """Cost matrix of the grid, all pairs."""
    r, c = np.divmod(np.arange(height * width), width)
    return ((r[:, None] - r) ** 2 + (c[:, None] - c) ** 2) ** (p / 2)


class _Program:
    """A mixed-integer linear program, grown variable by variable."""

    def __init__(self) -> None:
        self.low: list[float] = []
        self.high: list[float] = []
        self.binary: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.row_low: list[float] = []
        self.row_high: list[float] = []

    def add(self, low: float, high: float, binary: bool = False) -> int:
        self.low.append(low)
        self.high.append(high)
        self.binary.append(int(binary))
        return len(self.low) - 1

    def constrain(self, terms: dict[int, float], low: float, high: float) -> None:
        self.rows.append(terms)
        self.row_low.append(low)
        self.row_high.append(high)

    def minimise(self, terms: dict[int, float]) -> tuple[float, np.ndarray]:
        cost = np.zeros(len(self.low))
        for k, v in terms.items():
            cost[k] += v
        data = [(v, i, k) for i, row in enumerate(self.rows) for k, v in row.items()]
        values, i, k = zip(*data, strict=True)
        matrix = csr_array((values, (i, k)), shape=(len(self.rows), len(self.low)))
        result = milp(
            cost,
            constraints=LinearConstraint(matrix, self.row_low, self.row_high),
            bounds=Bounds(np.array(self.low), np.array(self.high)),
            integrality=np.array(self.binary),
            options={"mip_rel_gap": 0.0},
        )
        assert result.status == 0, result.message
        return float(result.fun), np.asarray(result.x)


def exact_margin(
    layers: list[tuple[np.ndarray, np.ndarray]],
    x: np.ndarray,
    y: int,
    cost: np.ndarray,
    budget: float,
    box: tuple[float, float] | None = (0.0, 1.0),
) -> float:
    """``min over the ball, over k != y, of logit[y] - logit[k]`` for a chain of affine maps with ReLU in between.

    ``x`` is ``(C, n)``: mass moves inside a channel at ``cost`` (n, n), ``inf`` forbids a move.
    """
    return worst_plan(layers, x, y, cost, budget, box)[0]


def worst_plan(
    layers: list[tuple[np.ndarray, np.ndarray]],
    x: np.ndarray,
    y: int,
    cost: np.ndarray,
    budget: float,
    box: tuple[float, float] | None = (0.0, 1.0),
) -> tuple[float, np.ndarray]:
    """The same and the plan ``(C, n, n)`` behind it, both up to the solver's tolerances."""
    channels, n = x.shape
    places: list[tuple[int, int, int, int]] = []
    program = _Program()
    spend: dict[int, float] = {}
    z: list[int] = []
    lo, hi = box if box is not None else (0.0, float(x.sum()))
    for c in range(channels):
        arcs = {}
        for i in range(n):
            for j in range(n):
                if np.isfinite(cost[i, j]):
                    arcs[i, j] = program.add(0.0, x[c, i])
                    places.append((c, i, j, arcs[i, j]))
                    spend[arcs[i, j]] = float(cost[i, j])
            program.constrain({v: 1.0 for (a, _), v in arcs.items() if a == i}, x[c, i], x[c, i])
        for j in range(n):
            z.append(program.add(lo, hi))
            terms = {v: 1.0 for (_, b), v in arcs.items() if b == j}
            program.constrain({**terms, z[-1]: -1.0}, 0.0, 0.0)
    program.constrain(spend, 0.0, budget)

    values, low, high = z, np.full(channels * n, lo), np.full(channels * n, hi)
    for depth, (weight, bias) in enumerate(layers):
        centre, radius = (low + high) / 2, (high - low) / 2
        middle, spread = weight @ centre + bias, np.abs(weight) @ radius + 1e-6
        low, high = middle - spread, middle + spread
        out = []
        for k in range(weight.shape[0]):
            v = program.add(low[k], high[k])
            terms = {values[t]: float(weight[k, t]) for t in range(len(values))}
            program.constrain({**terms, v: -1.0}, -bias[k], -bias[k])
            out.append(v)
        if depth == len(layers) - 1:
            found = (program.minimise({out[y]: 1.0, out[k]: -1.0}) for k in range(len(out)) if k != y)
            value, best = min(found, key=lambda pair: pair[0])
            plan = np.zeros((channels, n, n))
            for c, i, j, v in places:
                plan[c, i, j] = best[v]
            return value, plan
        active = []
        for k, v in enumerate(out):
            h, on = program.add(0.0, max(0.0, high[k])), program.add(0, 1, binary=True)
            program.constrain({h: 1.0, v: -1.0}, 0.0, np.inf)
            program.constrain({h: 1.0, v: -1.0, on: -low[k]}, -np.inf, -low[k])
            program.constrain({h: 1.0, on: -high[k]}, -np.inf, 0.0)
            active.append(h)
        values, low, high = active, np.maximum(low, 0), np.maximum(high, 0)
    raise AssertionError("no layers")
