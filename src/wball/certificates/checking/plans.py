r"""The largest value of linear functions over a ball, from above.

For transport plans it follows from weak duality. A unit of mass that moves from ``i`` to ``j``
gains ``g_ij = a_j - a_i + M_ij``, where ``M_ij`` is the row's coefficient of the move. For every
price ``psi >= 0`` of the budget ``E`` and every price ``r`` of a pixel,

.. math::
    \max_P \; \langle a, z \rangle + \langle M, P \rangle \;\le\;
        \max_{lo \le z \le hi} \langle r, z \rangle + \langle a - r, x \rangle + \psi E
        + \sum_i x_i \max_j \, (g_{ij} - r_j + r_i - \psi C_{ij})^+

so prices may be any numbers, and only the last evaluation counts: in float64, with every rounding
error added. Short moves are listed one by one. Longer ones are grouped: a group costs as much as
its cheapest move and has the value of the best target in a window that contains all of them.

Any other ball answers for itself (``ball.support``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.ball import Ball, Plans, WassersteinBall
from wball.certificates.checking.lines import UNIT, Unfollowed, gamma
from wball.cost import DenseCost, GridCost, GroundCost

ALL = 128
"""Number of pixels up to which every move of an image is listed."""

GROUPS = (3.0, 4.0, 6.0, 10.0, math.inf)
"""Lengths that separate the groups of longer moves."""

SEARCH = 30
"""Steps of bisection for the price of the budget, in float32."""

PRICED, FEW = (0.25, 0.5, 0.75, 1.0), 64
"""Quantiles of a row that are tried as prices of pixels, for up to ``FEW`` rows: a pixel is charged
for what it is worth beyond the quantile, which is nothing at the last."""

LARGEST = 4096
"""Largest number of pixels of an image: its costs are held as a matrix."""


class Supported:
    """The ball around one image ``x``, by its own support function and ranges of pixels in float64,
    which may be off by the rounding of a sum of a few products a pixel.

    Attributes:
        point: the image, after a 1; ``most``: the largest magnitudes in the ball.
        low, high: the least and the largest value of every pixel, flat.
    """

    def __init__(self, ball: Ball, x: Tensor) -> None:
        self.ball, self.x = ball, x[None].to("cpu", torch.float64)
        self.point = torch.cat([torch.ones(1, dtype=torch.float64), self.x.flatten()])
        low, high = (end.flatten() for end in ball.input_set(self.x).ranges())
        self.most = torch.cat([self.point[:1], torch.maximum(low.abs(), high.abs())])
        room = gamma(16) * (self.most + self.point.abs())[1:]
        self.low, self.high = low - room, high + room

    def highest(self, rows: Tensor, prices: Tensor | None = None) -> Tensor:
        """Upper bounds of rows over the ball, (R,), without prices."""
        ball = self.ball.take(torch.zeros(len(rows), dtype=torch.long))
        x = self.x.expand(len(rows), *self.x.shape[1:])
        found = ball.support(x, rows[:, 1:].reshape(x.shape)).upper.to("cpu", torch.float64)
        return rows[:, 0] + found + gamma(16 * len(self.most)) * (rows.abs() @ self.most)


class Transport:
    """One image's Wasserstein ball: mass, moves with their costs, budget and box.

    Attributes:
        point: the image, after a 1 and before the mass of each move, which is 0 there; ``most``:
            the largest magnitudes in the ball.
        low, high: the least and the largest value of every pixel, flat.
    """

    def __init__(self, ball: WassersteinBall, x: Tensor, plans: Plans, near: float) -> None:
        """``x``: one image ``(C, H, W)`` or histogram ``(n,)``; moves shorter than ``near`` are
        listed."""
        grid = (x if x.ndim == 3 else x.reshape(1, 1, -1)).to("cpu", torch.float64)
        crosses, self.size = ball.cost.channel_cost is not None, grid.shape[1:]
        planes = grid.reshape(1 if crosses else len(grid), -1)  # that exchange no mass
        self.planes, pixels = planes.shape, planes.shape[1]
        if pixels > LARGEST:
            raise Unfollowed(f"an image of {pixels} pixels, the checker handles up to {LARGEST}")
        self.budget = float(ball.budget(x[None])[0]) * (1 + gamma(grid.numel()))
        self.plane, self.pixel = (planes > 0).nonzero(as_tuple=True)
        self.mass = planes[self.plane, self.pixel]
        cost, far = _costs(ball.cost, (len(grid) if crosses else 1, *self.size), plans)
        cost.fill_diagonal_(math.inf)
        every = pixels <= ALL or crosses or isinstance(ball.cost, DenseCost)
        power = ball.cost.p if isinstance(ball.cost, GridCost) else 1.0
        ends = [math.inf] if every else [near, *(end for end in GROUPS if end > near)]
        least = cost[self.pixel] * (1 - 8 * UNIT * (1 + power))  # more than their rounding
        self._list(least, far[self.pixel], [end**power for end in ends])
        low, top = ball.box or (0.0, math.inf)
        total = planes.sum(1, keepdim=True) * (1 + gamma(pixels))
        self.high = total.expand(-1, pixels).clamp(max=top).flatten()
        self.low = torch.full_like(self.high, max(0.0, low))
        one, moved = torch.ones(1, dtype=torch.float64), self.mass[:, None].expand(self.price.shape)
        self.point = torch.cat([one, grid.flatten(), 0 * moved.flatten()])
        self.most = torch.cat([one, self.high, moved.flatten()])

    def _list(self, cost: Tensor, far: Tensor, ends: list[float]) -> None:
        """List the moves of every source: single targets first, then groups of targets, with costs
        between two ``ends``. None costs more than it does."""
        groups = torch.bucketize(cost, torch.tensor(ends, dtype=torch.float64), right=True)
        alone = torch.where(groups == 0, cost, math.inf)
        most = max(1, int(torch.isfinite(alone).sum(1).max())) if len(cost) else 1
        prices, self.target = alone.topk(most, 1, largest=False)
        listed = [prices]
        self.reaches: list[int] = []  # the largest distance of each group in rows and columns
        for number in range(1, len(ends)):
            group = (groups == number) & torch.isfinite(cost)
            if bool(group.any()):
                self.reaches.append(int(far[group].max()))
                listed.append(torch.where(group, cost, math.inf).amin(1, keepdim=True))
        self.price = torch.cat(listed, 1)  # (sources, moves), inf where there is none

    def gains(self, rows: Tensor) -> Tensor:
        """An upper bound of what each move of a unit of mass adds, (R, sources, moves); ``-inf``
        where there is no move."""
        pixels, charges = rows[:, 1:].split([len(self.high), self.price.numel()], 1)
        maps = pixels.view(-1, *self.planes)
        stay = maps[:, self.plane, self.pixel][..., None]
        parts = [maps[:, self.plane[:, None], self.target]]
        for reach in self.reaches:
            around = maps.unflatten(2, self.size)
            around = F.max_pool2d(around, (2 * reach + 1, 1), 1, (reach, 0))
            around = F.max_pool2d(around, (1, 2 * reach + 1), 1, (0, reach))
            parts.append(around.flatten(2)[:, self.plane, self.pixel][..., None])
        moved, charges = torch.cat(parts, 2), charges.view(-1, *self.price.shape)
        gain = moved - stay + charges
        room = 8 * UNIT * (moved.abs() + stay.abs() + charges.abs())
        return torch.where(torch.isfinite(self.price), gain + room, -math.inf)

    def highest(self, rows: Tensor, prices: Tensor | None = None) -> Tensor:
        """Upper bounds of rows over the ball, (R,). They are valid for any prices of the pixels and
        of the budget."""
        if prices is None:
            maps = rows[:, 1 : 1 + len(self.high)].unflatten(1, self.planes)
            shares = PRICED if len(rows) <= FEW else PRICED[-1:]
            tried = (maps - maps.quantile(share, 2, keepdim=True) for share in shares)
            least = [self.highest(rows, price.clamp(min=0).flatten(1)) for price in tried]
            return torch.stack(least).amin(0)
        at = rows.clone()
        at[:, 1 : 1 + len(self.high)] -= prices
        paid = (prices.clamp(min=0) * self.high + prices.clamp(max=0) * self.low).sum(1)
        size = rows.abs() @ self.most + prices.abs() @ self.high
        found = at @ self.point + paid + gamma(rows.shape[1] + 4) * size
        if not len(self.mass):
            return found  # the ball is one black image
        gain = self.gains(at)
        psi = self._search(gain.float()).double()
        most = self._net(gain, psi).amax(2).clamp(min=0) @ self.mass + psi * self.budget
        return found + most * (1 + gamma(len(self.mass) + 8))

    def _net(self, gain: Tensor, psi: Tensor) -> Tensor:
        """What every move gains beyond its cost."""
        return gain * (1 + 8 * UNIT) - psi[:, None, None] * self.price.clamp(max=1e38).to(gain)

    def _search(self, gain: Tensor) -> Tensor:
        """The best price of the budget, found by bisection: the dual function is convex."""
        price, mass = self.price.clamp(1e-30, 1e38).float().expand(gain.shape), self.mass.float()
        high = torch.where(self.price > 0, gain / price, 0.0).flatten(1).amax(1).clamp(min=0)
        low, high = 0 * high, high * (1 + 1e-6)
        for _ in range(SEARCH):
            psi = (low + high) / 2
            top, choice = self._net(gain, psi).max(2)
            spent = price.gather(2, choice[..., None])[..., 0]
            over = torch.where(top > 0, spent, 0.0) @ mass > self.budget
            low, high = torch.where(over, psi, low), torch.where(over, high, psi)
        return high


def _costs(cost: GroundCost, shape: Sequence[int], plans: Plans) -> tuple[Tensor, Tensor]:
    """The cost of every move (pixels, pixels), inf where there is none, and how many rows or
    columns it goes."""
    place, steps = torch.arange(math.prod(shape)), list[Tensor]()
    for size in reversed(shape):
        at, place = place % size, place // size
        steps.insert(0, at - at[:, None])  # from, to
    far = torch.maximum(steps[1].abs(), steps[2].abs())
    if isinstance(cost, DenseCost):
        return cost.matrix.to("cpu", torch.float64).clone(), far
    channels, height, width = shape
    table = torch.full([2 * size - 1 for size in shape], math.inf, dtype=torch.float64)
    allowed = cost.full(height, width) if plans == "full" else cost
    for r, c, s, price in allowed.moves(height, width, channels):
        table[s, r, c] = price  # negative steps count from the end
    return table[tuple(steps)], far


def domain(ball: Ball, x: Tensor, plans: Plans, near: float) -> Supported | Transport:
    """The set of images around one image ``x`` (without a batch); moves shorter than ``near`` are
    listed one by one."""
    if type(ball) is WassersteinBall:
        return Transport(ball, x, plans, near)
    if isinstance(ball, WassersteinBall) or type(ball).support is Ball.support:
        raise Unfollowed(
            "ball must be a WassersteinBall, or have a support function and no plans, to be "
            f"checked, got {type(ball).__name__}"
        )
    return Supported(ball, x)
