r"""An independent check of what the rest of the library claims: is this image in that ball?

For an image ``z`` in the Wasserstein ball around ``x`` three things must hold, each measured in float64:

- *mass*: ``max_c |sum z_c - sum x_c| <= 1e-5 * m`` over channels ``c``, with ``m`` the mass of ``x``;
- *box*: no pixel outside ``[lo, hi]`` by more than 1e-6 (without a box: no pixel below 0);
- *distance*: the exact optimal transport cost, in the unit of ``eps``, is at most ``eps * (1 + 1e-4)``.

For an l-infinity ball the first does not apply and the distance is the largest change of a pixel.

A distance need not be known to be known to be small: a plan that turns ``x`` into ``z`` proves that it is at most what
the plan costs, and whoever made ``z`` usually has one. It is checked by :mod:`wball.auditing.proof`. Transport
problems are then solved where there is no such proof, and for all or for a sample of the rest.

No line of these files is shared with the solvers or their kernels: the moves and what they cost are read off the ball's
cost, and the transport problem is written down here. Neither is the linear-programming code trusted: the flow it
returns is summed up and priced here (an upper bound of the distance), its dual prices are checked against every move
and summed up (a lower bound), and the two must meet.

Float32 images have equal mass only up to rounding, and so does every island of pixels that the window does not connect
to others. So ``z`` is brought to the mass of ``x`` channel by channel, and mass that no plan could place is left out if
it is at most 1e-5 of ``m``; otherwise the distance is infinite. Half a unit in the last place of ``z``'s dtype, on all
of its mass, moved by the cheapest move, is granted on top of ``eps * (1 + 1e-4)``: it only matters for radii near 0.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball import inputs
from wball.auditing.proof import AnyPlan, proved_distance
from wball.ball import LinfBall, WassersteinBall
from wball.cost import DenseCost, GroundCost

Array = NDArray[np.float64]
Index = NDArray[np.int64]

MASS_TOL = 1e-5
BOX_TOL = 1e-6
DISTANCE_TOL = 1e-4
AGREE = 1e-8  # of the mass, times the dearest move: bounds from both sides must meet this closely


@dataclass(frozen=True)
class AuditReport:
    """What an audit found, one entry per image.

    Attributes:
        mass_error: largest difference of a channel's mass, as a fraction of the image's mass (inf: not finite).
        box_violation: how far the worst pixel is outside the box (inf: not finite).
        distance: transport distance (or largest change of a pixel) in the unit of ``eps``; inf if no plan exists.
        valid: whether all three are within their tolerances.
        exact: whether ``distance`` is the exact number; if not, it is an upper bound that a checked plan proves.
        eps: the radius each image was held to.
        reasons: why an image is not valid, in words; empty for valid ones.
        unit: the unit of ``distance`` and ``eps``.
    """

    mass_error: Tensor
    box_violation: Tensor
    distance: Tensor
    valid: Tensor
    exact: Tensor
    eps: Tensor
    reasons: tuple[str, ...]
    unit: str

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def all_valid(self) -> bool:
        return bool(self.valid.all())

    @property
    def n_valid(self) -> int:
        return int(self.valid.sum())

    @property
    def n_invalid(self) -> int:
        return len(self) - self.n_valid

    def summary(self) -> str:
        """A few lines for a log: counts, the worst of each measure, and what is wrong with the first invalid images."""
        if len(self) == 0:
            return "audit of 0 images"
        lines = [f"audit of {len(self)} images: {self.n_valid} valid, {self.n_invalid} invalid"]
        lines.append(f"  mass error     at most {float(self.mass_error.max()):.3g} (allowed {MASS_TOL:g})")
        lines.append(f"  box violation  at most {float(self.box_violation.max()):.3g} (allowed {BOX_TOL:g})")
        over = torch.where(self.distance > 0, self.distance / self.eps, torch.zeros_like(self.distance))
        lines.append(
            f"  distance       at most {float(self.distance.max()):.6g} {self.unit}, {float(over.max()):.6g} x eps "
            f"(allowed {1 + DISTANCE_TOL:g} x eps)"
        )
        if not bool(self.exact.all()):
            lines[-1] += f"; exact for {int(self.exact.sum())}, an upper bound by a checked plan for the others"
        bad = [(k, reason) for k, reason in enumerate(self.reasons) if reason]
        lines += [f"  image {k}: {reason}" for k, reason in bad[:5]]
        if len(bad) > 5:
            lines.append(f"  and {len(bad) - 5} more")
        return "\n".join(lines)

    __str__ = summary

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON; infinite entries become ``None``."""

        def plain(values: Tensor) -> list[float | None]:
            return [v if math.isfinite(v) else None for v in values.tolist()]

        return {
            "unit": self.unit,
            "tolerances": {"mass": MASS_TOL, "box": BOX_TOL, "distance": DISTANCE_TOL},
            "images": len(self),
            "valid_count": self.n_valid,
            "eps": plain(self.eps),
            "mass_error": plain(self.mass_error),
            "box_violation": plain(self.box_violation),
            "distance": plain(self.distance),
            "exact": self.exact.tolist(),
            "valid": self.valid.tolist(),
            "reasons": list(self.reasons),
        }


def audit(
    ball: WassersteinBall | LinfBall,
    x: Tensor,
    z: Tensor,
    *,
    plan: AnyPlan | None = None,
    exact: Literal["all", "needed", "sample"] = "all",
    sample: int = 100,
    generator: torch.Generator | None = None,
    workers: int = 1,
) -> AuditReport:
    """Check that each ``z`` lies in the ball around its ``x``; see the module for what is checked and how exactly.

    Bad *contents* of ``z`` (NaN, negative or lost mass, ...) are findings, never errors. A ``z`` of the wrong shape, or
    bad centres ``x``, raise.

    Args:
        ball: the threat model.
        x: the centres, ``(B, C, H, W)`` or ``(B, n)``.
        z: the points to be checked.
        plan: plans that claim to turn ``x`` into ``z``: the ``plan`` of a projection, the ``proof`` of an attack. They
            are checked move by move.
        exact: ``"all"``: solve the transport problem of every image. ``"needed"``: only where the plan does not prove
            that the distance is small enough. ``"sample"``: those, and ``sample`` of the others drawn at random.
        sample: how many images ``"sample"`` solves although their plans are proof.
        generator: draws the sample (CPU), for repeatable audits.
        workers: threads that solve transport problems; most of their time does not hold Python's lock.

    >>> x = torch.zeros(1, 1, 4, 4, dtype=torch.float64); x[..., 1, 1] = 1.0
    >>> z = 0.75 * x + 0.25 * x.roll(1, 3)
    >>> audit(WassersteinBall(0.5), x, z).valid
    tensor([True])
    >>> audit(WassersteinBall(0.1), x, z).reasons
    ('distance 0.25 is 2.5 x eps',)
    """
    if not isinstance(ball, (WassersteinBall, LinfBall)):
        raise TypeError(f"ball must be a WassersteinBall or a LinfBall, got {type(ball).__name__}")
    if exact not in ("all", "needed", "sample"):
        raise ValueError(f'exact must be "all", "needed" or "sample", got {exact!r}')
    inputs.check_count("sample", sample, least=0)
    inputs.check_count("workers", workers)
    x = inputs.check_images("x", x, ball.box)
    if not isinstance(z, Tensor) or not z.is_floating_point():
        kind = z.dtype if isinstance(z, Tensor) else type(z).__name__
        raise TypeError(f"z must be a floating-point torch.Tensor, got {kind}")
    if z.shape != x.shape:
        raise ValueError(f"z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")
    inputs.check_eps_count(ball.eps, len(x))
    start, end = _as_planes(x), _as_planes(z)
    eps = np.broadcast_to(torch.as_tensor(ball.eps, dtype=torch.float64).cpu().numpy(), (len(x),)).copy()
    finite: NDArray[np.bool_] = np.asarray(np.isfinite(end).all((1, 2, 3)))
    end = np.where(finite[:, None, None, None], end, 0.0)
    box = _box_violation(end, ball.box if ball.box is not None else (0.0, math.inf))
    solved = np.ones(len(x), dtype=bool)
    if isinstance(ball, LinfBall):
        mass = np.zeros(len(x))
        distance = np.abs(end - start).max((1, 2, 3), initial=0.0)
        rounding = np.full(len(x), _half_ulp(z))
    else:
        mass = _mass_error(start, end)
        moves = _Moves(ball.cost, start.shape[2], start.shape[3])
        whole = start.sum((1, 2, 3))
        unit = whole if ball.mass == "relative" else np.ones(len(x))
        rounding = _half_ulp(z) * moves.cheapest * np.divide(whole, unit, out=np.ones(len(x)), where=unit > 0)
        allowed = eps * (1 + DISTANCE_TOL) + rounding
        distance = np.full(len(x), math.inf)
        if plan is not None:
            device = x.device if x.is_cuda else torch.device("cpu")
            planes = torch.from_numpy(start).to(device), torch.from_numpy(end).to(device)
            distance = _eps_units(proved_distance(ball.cost, *planes, plan).cpu().numpy(), unit)
        todo = finite.copy()
        if plan is not None and exact != "all":
            todo &= ~(distance <= allowed)
        if exact == "sample":
            others = np.flatnonzero(finite & ~todo)
            drawn = torch.randperm(len(others), generator=generator)[:sample].numpy()
            todo[others[drawn]] = True
        index = np.flatnonzero(todo)
        distance[index] = _eps_units(_transport_each(moves, start[index], end[index], workers), unit[index])
        solved = todo | ~finite
    mass, box, distance = (np.where(finite, values, math.inf) for values in (mass, box, distance))
    reasons = tuple(
        _reason(bool(finite[k]), mass[k], box[k], distance[k], eps[k], eps[k] * (1 + DISTANCE_TOL) + rounding[k])
        for k in range(len(x))
    )

    def tensor(values: Array | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(x.device)

    valid = tensor(np.array([not reason for reason in reasons], dtype=bool))
    return AuditReport(
        tensor(mass), tensor(box), tensor(distance), valid, tensor(solved), tensor(eps), reasons, ball.unit
    )


def _as_planes(x: Tensor) -> Array:
    image: Array = x.detach().to("cpu", torch.float64).numpy()
    return image if image.ndim == 4 else image[:, None, None, :]


def _half_ulp(z: Tensor) -> float:
    """Half a unit in the last place at 1. Half precision gets no more than float32: it is no format for plans."""
    return 0.5 * min(torch.finfo(z.dtype).eps, torch.finfo(torch.float32).eps)


def _mass_error(x: Array, z: Array) -> Array:
    off = np.abs(z.sum((2, 3)) - x.sum((2, 3))).max(1)
    mass = x.sum((1, 2, 3))
    return np.where(off == 0, 0.0, np.divide(off, mass, out=np.full(len(x), math.inf), where=mass > 0))


def _box_violation(z: Array, box: tuple[float, float]) -> Array:
    return np.maximum(np.maximum(box[0] - z.min((1, 2, 3)), z.max((1, 2, 3)) - box[1]), 0.0)


def _eps_units(total: Array, unit: Array) -> Array:
    """Costs over masses, with 0 / 0 = 0."""
    return np.where(total == 0, 0.0, np.divide(total, unit, out=np.full(len(total), math.inf), where=unit > 0))


def _reason(finite: bool, mass: float, box: float, distance: float, eps: float, allowed: float) -> str:
    if not finite:
        return "NaN or infinite pixels"
    found = []
    if not mass <= MASS_TOL:
        found.append(f"mass is off by {mass:.3g} of the image's mass in a channel")
    if not box <= BOX_TOL:
        found.append(f"a pixel is {box:.3g} outside the box")
    if distance == math.inf:
        found.append("no plan within the moves of the cost turns x into z")
    elif not distance <= allowed:
        ratio = f"{distance / eps:.6g} x eps" if eps > 0 else "more than eps = 0"
        found.append(f"distance {distance:.6g} is {ratio}")
    return "; ".join(found)


class _Moves:
    """Every move ``source -> target`` that a cost allows on a grid, and its price."""

    def __init__(self, cost: GroundCost, height: int, width: int) -> None:
        n = height * width
        here = np.arange(n).reshape(height, width)
        if isinstance(cost, DenseCost):
            if cost.size != n:
                raise ValueError(f"the ball's cost is for {cost.size} pixels, but the images have {n}")
            price = cost.matrix.cpu().numpy().T.copy()  # row k: the moves that end in k
            target = np.repeat(np.arange(n)[:, None], n, axis=1)
        else:
            steps = cost.moves(height, width)
            price, target = np.full((len(steps), n), math.inf), np.zeros((len(steps), n), dtype=np.int64)
            for k, (down, right, value) in enumerate(steps):
                rows, columns = np.divmod(here.reshape(-1), width)
                rows, columns = rows + down, columns + right
                inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
                price[k, inside] = value
                target[k, inside] = rows[inside] * width + columns[inside]
        step, self.source = np.nonzero(np.isfinite(price))
        self.target, self.price = target[step, self.source], price[step, self.source]
        self.dearest = float(self.price.max())
        self.cheapest = float(self.price[self.price > 0].min()) if bool((self.price > 0).any()) else 0.0


def _transport_each(moves: _Moves, x: Array, z: Array, workers: int) -> Array:
    """The least cost per image, by several threads where that pays."""
    if workers == 1 or len(x) < 4:
        return np.array([_transport(moves, a, b) for a, b in zip(x, z, strict=True)])
    with ThreadPoolExecutor(min(workers, len(x))) as pool:
        return np.array(list(pool.map(lambda pair: _transport(moves, *pair), zip(x, z, strict=True))))


def _transport(moves: _Moves, x: Array, z: Array) -> float:
    """The least cost of turning ``x`` into ``z``, both ``(C, H, W)``, in mass units; inf if it cannot be done."""
    if float(z.min()) < -BOX_TOL:
        return math.inf
    mass, spent, missing = float(x.sum()), 0.0, 0.0
    for start, end in zip(x.reshape(len(x), -1), np.maximum(z, 0.0).reshape(len(z), -1), strict=True):
        if np.array_equal(start, end):
            continue  # staying is free
        before, after = float(start.sum()), float(end.sum())
        # Rounding in the sums is forgiven tenfold here so that a distance is reported beside a slightly wrong mass.
        if abs(before - after) > 10 * MASS_TOL * mass or (before == 0) != (after == 0):
            return math.inf
        if before == 0:
            continue
        cost, left = _channel(moves, start, end * (before / after))
        spent, missing = spent + cost, missing + left
    return spent if missing <= MASS_TOL * mass else math.inf


def _channel(moves: _Moves, a: Array, b: Array) -> tuple[float, float]:
    """Least cost of matching ``a`` with ``b``, and the mass that no plan can match.

    As a linear program: ``min <P, C> + M (sum r + sum s)`` with ``P 1 + r = a``, ``P^T 1 + s = b``, all >= 0. Each unit
    that is not matched appears once in ``r`` and once in ``s``; to match it instead costs at most one dearest move per
    pixel on the way, so ``M`` times two exceeds that. As a flow: ``r`` goes to, ``s`` comes from, one more node.
    """
    rows, columns = np.nonzero(a)[0], np.nonzero(b)[0]
    number = np.zeros((2, len(a)), dtype=np.int64)
    number[0, rows], number[1, columns] = np.arange(len(rows)), np.arange(len(columns))
    usable = (a[moves.source] > 0) & (b[moves.target] > 0)
    k = int(usable.sum())
    n, m = len(rows), len(columns)
    tail = np.concatenate([number[0, moves.source[usable]], np.arange(n), np.full(m, n), [n]])
    head = np.concatenate([number[1, moves.target[usable]], np.full(n, m), np.arange(m), [m]])
    mass = float(a.sum())  # the programs below see masses that sum to 1 and as much again in the extra node
    supply, demand = np.append(a[rows] / mass, 1.0), np.append(b[columns] / mass, 1.0)
    # A large M costs digits. A smaller one will do whenever all mass is matched at it, as it nearly always is.
    for length in sorted({min(n, m, 64), min(n, m)}):
        price = np.concatenate([moves.price[usable], np.full(n + m, 1.0 + moves.dearest * length), [0.0]])
        flow = _optimal_flow(tail, head, price, supply, demand, AGREE * max(moves.dearest, 1.0))
        if flow is not None:
            missing = float(flow[k:-1].sum()) / 2
            if missing <= 1e-12 or length == min(n, m):
                return mass * float(flow[:k] @ price[:k]), mass * missing
    return math.inf, 0.0


def _optimal_flow(tail: Index, head: Index, price: Array, supply: Array, demand: Array, gap: float) -> Array | None:
    """A flow on the arcs that was checked to be optimal up to ``gap``; ``None`` if no solver delivers one."""
    for solve in (_by_network_simplex, _by_linear_program):
        answer = solve(tail, head, price, supply, demand)
        if answer is None:
            continue
        flow, u, v = answer
        flow = np.maximum(flow, 0.0)
        wrong = float(np.abs(np.bincount(tail, flow, len(supply)) - supply).sum())
        wrong += float(np.abs(np.bincount(head, flow, len(demand)) - demand).sum())
        # Shift the row prices until no move is underpriced: then their sum is a lower bound whatever they were.
        slack = np.full(len(supply), math.inf)
        np.minimum.at(slack, tail, price - u[tail] - v[head])
        lower = float((u + np.minimum(slack, 0.0)) @ supply + v @ demand)
        if wrong <= AGREE and float(flow @ price) - lower <= gap:
            return flow
    return None


def _by_network_simplex(
    tail: Index, head: Index, price: Array, supply: Array, demand: Array
) -> tuple[Array, Array, Array] | None:
    """Flow on each arc and the dual prices, by POT; ``None`` where it is not installed."""
    try:
        import ot  # here and below: slow to import
    except ImportError:
        return None
    from scipy import sparse

    shape = (len(supply), len(demand))
    costs = sparse.coo_matrix((price, (tail, head)), shape=shape)
    plan, log = ot.emd(supply, demand, costs, numItermax=10**7, log=True, center_dual=False, check_marginals=False)
    plan = plan.tocoo()
    key = tail * shape[1] + head
    order = np.argsort(key)
    used = order[np.searchsorted(key, plan.row.astype(np.int64) * shape[1] + plan.col, sorter=order)]
    flow = np.zeros(len(price))
    flow[used] = plan.data
    return flow, np.asarray(log["u"]), np.asarray(log["v"])


def _by_linear_program(
    tail: Index, head: Index, price: Array, supply: Array, demand: Array
) -> tuple[Array, Array, Array] | None:
    """The same by HiGHS: slower, and only asked when the first answer did not pass."""
    from scipy import sparse
    from scipy.optimize import linprog

    arcs = np.arange(len(price))
    leaves = sparse.csr_matrix((np.ones(len(price)), (tail, arcs)), shape=(len(supply), len(price)))
    arrives = sparse.csr_matrix((np.ones(len(price)), (head, arcs)), shape=(len(demand), len(price)))
    # One of the sums follows from the others; with rounding it might contradict them.
    equalities, sums = sparse.vstack([leaves, arrives[:-1]]), np.concatenate([supply, demand[:-1]])
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = linprog(price, A_eq=equalities, b_eq=sums, method="highs", options=tight)
    if answer.x is None:
        return None
    prices = np.append(answer.eqlin.marginals, 0.0)
    return np.asarray(answer.x), prices[: len(supply)], prices[len(supply) :]
