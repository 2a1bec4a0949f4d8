"""Exact minimum of a small ReLU network's margin over a ball, by mixed-integer programming: the
tests' referee.

Shares nothing with the library but the definition of the ball.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch import Tensor, nn

from wball import WassersteinBall


def euclidean(height: int, width: int, p: float = 1.0) -> np.ndarray:
    """Cost matrix of the grid, all pairs."""
    r, c = np.divmod(np.arange(height * width), width)
    return ((r[:, None] - r) ** 2 + (c[:, None] - c) ** 2) ** (p / 2)


def gap(logits: Tensor, y: Tensor) -> Tensor:
    """The margin: the label's logit, less the largest of the others."""
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return logits.gather(1, y[:, None])[:, 0] - others


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
        # HiGHS sometimes fails to bring a solution back through its presolve.
        for presolve in (True, False):
            result = milp(
                cost,
                constraints=LinearConstraint(matrix, self.row_low, self.row_high),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                integrality=np.array(self.binary),
                options={"mip_rel_gap": 0.0, "presolve": presolve},
            )
            if result.status == 0:
                return float(result.fun), np.asarray(result.x)
        raise RuntimeError(result.message)


def worst_plan(
    layers: list[tuple[np.ndarray, np.ndarray]],
    x: np.ndarray,
    y: int,
    cost: np.ndarray,
    budget: float,
    box: tuple[float, float] | None = (0.0, 1.0),
) -> tuple[float, np.ndarray]:
    """``min over the ball, over k != y, of logit[y] - logit[k]`` for a chain of affine maps with
    ReLU in between.

    ``x`` is ``(C, n)``: mass moves inside a channel at ``cost`` (n, n), ``inf`` forbids a move.
    Returns the minimum and its plan ``(C, n, n)``, both up to the solver's tolerances.
    """
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

    ends = np.full(channels * n, lo), np.full(channels * n, hi)
    value, best = _worst_class(program, z, *ends, layers, y)
    plan = np.zeros((channels, n, n))
    for c, i, j, v in places:
        plan[c, i, j] = best[v]
    return value, plan


def box_margin(
    layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, y: int, eps: float
) -> float:
    """The same over ``|z - x| <= eps`` with pixels in ``[0, 1]``; ``x`` is flat."""
    low, high = np.maximum(x - eps, 0.0), np.minimum(x + eps, 1.0)
    program = _Program()
    z = [program.add(a, b) for a, b in zip(low, high, strict=True)]
    return _worst_class(program, z, low, high, layers, y)[0]


def _worst_class(
    program: _Program,
    values: list[int],
    low: np.ndarray,
    high: np.ndarray,
    layers: list[tuple[np.ndarray, np.ndarray]],
    y: int,
) -> tuple[float, np.ndarray]:
    """Put the network behind variables between ``low`` and ``high``, and minimise the margin to
    each other class."""
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
            found = (
                program.minimise({out[y]: 1.0, out[k]: -1.0}) for k in range(len(out)) if k != y
            )
            return min(found, key=lambda pair: pair[0])
        active = []
        for k, v in enumerate(out):
            h, on = program.add(0.0, max(0.0, high[k])), program.add(0, 1, binary=True)
            program.constrain({h: 1.0, v: -1.0}, 0.0, np.inf)
            program.constrain({h: 1.0, v: -1.0, on: -low[k]}, -np.inf, -low[k])
            program.constrain({h: 1.0, on: -high[k]}, -np.inf, 0.0)
            active.append(h)
        values, low, high = active, np.maximum(low, 0), np.maximum(high, 0)
    raise AssertionError("no layers")


def affine_maps(net: nn.Sequential) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of a chain of linear layers."""
    return [
        (m.weight.detach().double().numpy(), m.bias.detach().double().numpy())
        for m in net
        if isinstance(m, nn.Linear)
    ]


def tiny(seed: int) -> tuple[nn.Sequential, Tensor, Tensor, float]:
    """A random network of one or two hidden layers, an image of 2 x 2 or 3 x 3 pixels, its label,
    and a radius."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    side = number(2, 4)
    widths = [side * side, *(number(3, 8) for _ in range(number(1, 3))), 3]
    net = nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        layer = nn.Linear(before, after)
        with torch.no_grad():
            layer.weight.copy_(
                torch.randn(after, before, generator=draw) * 1.5 * (2 / before) ** 0.5
            )
            layer.bias.copy_(0.3 * torch.randn(after, generator=draw))
        net.extend([nn.ReLU(), layer] if len(net) > 1 else [layer])
    x = torch.rand(1, 1, side, side, generator=draw)
    radius = float(0.02 + 0.5 * torch.rand(1, generator=draw) ** 2)
    return net.eval(), x, net(x).argmax(1), radius


def network_margin(
    net: nn.Sequential, x: Tensor, y: int, ball: WassersteinBall, cost: np.ndarray | None = None
) -> float:
    """The exact margin of a chain of linear layers over the ball around one image ``(C, H, W)``."""
    cost = euclidean(*x.shape[1:]) if cost is None else cost
    budget = float(ball.budget(x[None])[0])
    pixels = x.double().flatten(1).numpy()
    return worst_plan(affine_maps(net), pixels, y, cost, budget, ball.box)[0]
