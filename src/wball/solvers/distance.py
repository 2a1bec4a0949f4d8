r"""Distance of an image from the centre of a ball: the optimal transport problem.

.. math::
    W(x, z) = \min_P \{ \langle P, C \rangle : P \ge 0,\; P 1 = x,\; P^T 1 = z \}

over plans that use only the moves of the cost (infinite if there is none), summed over channels
unless moves change those.
The result is divided by the image's mass if the ball measures radii in that unit.

The problem is solved exactly by the audit's network simplex (:mod:`wball.auditing.flows`), on the
moves between pixels with mass. :mod:`wball.auditing.violations` says how rounding is treated.

*Full plans* (``plans="full"``) solve the same problem without the window. If the cost is a metric
(p <= 1), mass common to ``x`` and ``z`` can stay, because ``i -> k`` costs no more than
``i -> j -> k``, and is removed first. This is *not* exact inside a window, which may forbid
``i -> k``, nor for p > 1. The problem is first solved on short moves. Moves that the dual prices
violate are added until there are none: the optimum is then that of all moves.

*Potentials* ``a`` and ``b`` solve the dual problem: ``a_i + b_j <= C_ij``, and their sum over the
mass is the distance. They are a subgradient of it; for ``p = 1`` and full plans ``-b = a`` is the
1-Lipschitz function of Kantorovich and Rubinstein. ``z`` is scaled to the mass of ``x``, so ``b``
is shifted such that scaling ``z`` changes nothing: ``<b, z> = 0`` in each channel.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball import inputs
from wball.auditing.flows import Array, ListedMoves, Matching, match_at, no_flow
from wball.auditing.violations import (
    all_moves,
    connected,
    match_part,
    over,
    to_planes,
    transport_cost,
)
from wball.cost import GridCost, GroundCost
from wball.inputs import per_image

FIRST_REACH = 3.7
"""Pixels that the first moves of a full plan reach: two moves in a 5 x 5 window."""
PRICE_TOL = 1e-10
"""By how much dual prices may exceed the cost of a move, as a fraction of the largest cost."""


class DualPotentials(NamedTuple):
    """Dual potentials of the distance, images like ``x``: ``<rows, x> + <columns, z>`` is the
    distance, in its unit."""

    rows: Tensor
    columns: Tensor


def distance(
    cost: GroundCost,
    x: Tensor,
    z: Tensor,
    *,
    relative: bool = True,
    plans: Literal["window", "full"] = "window",
) -> tuple[Tensor, Callable[[], DualPotentials]]:
    """Transport distance from ``x`` to ``z`` per image, float64 on ``x``'s device, and a function
    that returns its potentials.

    Args:
        cost: ground cost.
        x: non-negative images, ``(B, C, H, W)`` or ``(B, n)``.
        z: images of that shape with finite values. The distance is infinite if they have negative
            pixels or another mass.
        relative: divide by the image's mass.
        plans: ``"window"``: only the moves that ``cost`` allows. ``"full"``: a
            :class:`~wball.GridCost` without its window; other costs are not changed.

    An all-black image is at distance 0 from itself and infinitely far from all others.

    >>> x = torch.zeros(1, 1, 1, 5, dtype=torch.float64); x[..., 1] = 0.5
    >>> distance(GridCost(), x, x.roll(2, 3))[0]
    tensor([2.], dtype=torch.float64)
    """
    if plans not in ("window", "full"):
        raise ValueError(f'plans must be "window" or "full", got {plans!r}')
    z = inputs.check_like("z", inputs.as_pixels(z), x)
    start, end = to_planes(x).cpu(), to_planes(z).cpu()
    channels, height, width = (int(side) for side in start.shape[1:])
    start, end = connected(cost, start), connected(cost, end)
    if plans == "full":
        cost = cost.full(height, width)
    moves = all_moves(cost, channels, height, width)
    if isinstance(cost, GridCost) and cost.covers(height, width):
        matched = partial(_match_all, cost, height, width)
    else:
        matched = partial(match_part, moves)
    total = torch.zeros(len(x), dtype=torch.float64)
    solved: list[dict[int, Matching]] = [{} for _ in start]
    for k, (a, b) in enumerate(zip(start.numpy(), end.numpy(), strict=True)):
        total[k] = transport_cost(matched, a, b, solved[k])
    mass = start.flatten(1).sum(1)
    unit = mass if relative else torch.ones_like(mass)

    def potentials() -> DualPotentials:
        whole = torch.zeros(2, *start.shape, dtype=torch.float64)
        for k, found in enumerate(solved):
            for part, one in found.items():
                a, b = (image[k, part].numpy() for image in (start, end))
                whole[:, k, part] = torch.from_numpy(np.stack(_everywhere(moves, a, b, one)))
        whole /= per_image(unit.clamp(min=1e-300), start)
        return DualPotentials(*whole.view(2, *x.shape).to(x.device))

    return over(total, unit).to(x.device), potentials


def _everywhere(moves: ListedMoves, a: Array, b: Array, found: Matching) -> tuple[Array, Array]:
    """Potentials of all pixels: the largest ones that the prices of pixels with mass permit, 0
    where no move permits any mass."""
    rows = np.full(len(a), -math.inf)
    rows[found.rows] = found.row_prices
    columns = np.full(len(b), math.inf)
    np.minimum.at(columns, moves.target, moves.price - rows[moves.source])
    rows = np.full(len(a), math.inf)
    np.minimum.at(rows, moves.source, moves.price - columns[moves.target])
    rows, columns = (np.where(np.isfinite(part), part, 0.0) for part in (rows, columns))
    shift = float(columns @ b) / max(float(b.sum()), 1e-300)
    return rows + shift, columns - shift


def _match_all(cost: GridCost, height: int, width: int, a: Array, b: Array) -> Matching:
    """Match ``a`` with ``b`` by any moves on a grid."""
    b = b * (a.sum() / b.sum())
    if cost.p <= 1:
        common = np.minimum(a, b)
        a, b = a - common, b - common
        if not (a.any() and b.any()):
            return no_flow(0.0)
        b = b * (a.sum() / b.sum())
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)
    down = np.subtract.outer(rows // width % height, columns // width % height)
    right = np.subtract.outer(rows % width, columns % width)
    squared = (down * down + right * right).astype(np.float64)
    price = squared ** (cost.p / 2)
    if cost.channel_cost is not None:
        changes = np.not_equal.outer(rows // (height * width), columns // (height * width))
        price = np.where(changes, (np.sqrt(squared) + cost.channel_cost) ** cost.p, price)
    used = squared <= max(FIRST_REACH**2, float(squared.min()))
    while True:
        i, j = np.nonzero(used)
        # Every pair of pixels has a move, so no optimal plan leaves mass unmatched at this price.
        moves = ListedMoves(rows[i], columns[j], price[i, j])
        found = match_at(moves, a, b, 1.0 + float(price.max()))
        if found is None:
            return no_flow(math.inf)
        excess = np.add.outer(found.row_prices, found.column_prices) - price
        violated = ~used & (excess > PRICE_TOL * price.max())
        if not violated.any():
            return found
        used |= violated
