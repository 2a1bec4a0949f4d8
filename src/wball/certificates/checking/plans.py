r"""The largest value of linear functions of a transport plan over a ball, from above, by weak
duality.

A row gives a unit of mass a value: ``w_ij = a_j + M_ij`` for a move from ``i`` to ``j``, ``a_i``
for mass that stays. For every price ``psi >= 0`` of the budget ``E`` and every price ``r`` of the
box,

.. math::
    \max_P \sum_{ij} P_{ij} w_{ij} \;\le\; \psi E + \sum_i x_i \max_j (w_{ij} - r_j - \psi C_{ij})
        + \sum_j (hi\, r_j^+ - lo\, r_j^-)

so the price may be any number, and only the last evaluation counts: in float64, with every rounding
error added. Short moves are listed one by one. Longer ones are grouped: a group costs as much as
its shortest move and has the value of the best target in a window that contains all of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.ball import LinfBall, Plans, WassersteinBall
from wball.certificates.checking.network import UNIT, Unfollowed, gamma
from wball.cost import DenseCost, GridCost

ALL = 128
"""Number of pixels up to which every move of an image is listed."""

GROUPS = (3.0, 4.0, 6.0, 10.0, math.inf)
"""Lengths that separate the groups of longer moves."""

SEARCH = 30
"""Steps of bisection for the price of the budget, in float32."""

PRICED, FEW = (0.25, 0.5, 0.75), 64
"""Quantiles of a row that are tried as prices of the box, for up to ``FEW`` rows: a pixel is
charged for what it is worth beyond the quantile."""

LARGEST = 4096
"""Largest number of pixels of an image: its costs are held as a matrix."""


class Cube:
    """``low <= z <= high`` in every pixel."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high

    @property
    def centre(self) -> Tensor:
        """An image of the set, flat."""
        return (self.low + self.high) / 2

    def ranges(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def highest(self, rows: Tensor, charges: Tensor | None, prices: Tensor | None) -> Tensor:
        """Upper bounds of ``<rows, z>``, (R,)."""
        assert charges is None and prices is None
        terms = torch.where(rows > 0, rows * self.high, rows * self.low)
        return terms.sum(1) + gamma(rows.shape[1]) * terms.abs().sum(1)


class Transport:
    """One image's Wasserstein ball: mass, moves with their costs, budget and box."""

    def __init__(self, ball: WassersteinBall, x: Tensor, plans: Plans, near: float) -> None:
        """``x``: one image ``(C, H, W)`` or histogram ``(n,)``; moves shorter than ``near`` are
        listed."""
        grid = (x if x.ndim == 3 else x.reshape(1, 1, -1)).to("cpu", torch.float64)
        self.channels, height, width = grid.shape
        crosses, self.size = ball.cost.channel_cost is not None, (height, width)
        self.pixels = height * width * (self.channels if crosses else 1)
        if self.pixels > LARGEST:
            raise Unfollowed(
                f"an image of {self.pixels} pixels, the checker handles up to {LARGEST}"
            )
        # (pixels, pixels), inf where nothing moves
        cost = _costs(ball, grid.shape, plans)
        self.x = grid.reshape(-1, self.pixels)
        self.channels = len(self.x)  # that exchange no mass
        self.box = ball.box
        self.budget = float(ball.budget(x[None])[0]) * (1 + 8 * UNIT)
        cost.fill_diagonal_(math.inf)
        channel, pixel = (self.x > 0).nonzero(as_tuple=True)
        self.channel, self.pixel, self.mass = channel, pixel, self.x[channel, pixel]
        self.cost = cost[pixel] * (1 - 8 * UNIT)  # (sources, pixels), never more than it is
        few = self.pixels <= ALL
        self.listed = few or crosses or isinstance(ball.cost, DenseCost)  # every move
        self._list(
            math.inf if self.listed else near,
            ball.cost.p if isinstance(ball.cost, GridCost) else 1.0,
        )

    def _list(self, near: float, power: float) -> None:
        """List the options of every source: single targets first, then groups of targets."""
        listed = (self.cost < near**power) & torch.isfinite(self.cost)
        most = max(1, int(listed.sum(1).max())) if self.cost.numel() else 1
        order = torch.where(listed, self.cost, math.inf).argsort(1)[:, :most]
        self.target = order
        prices = [torch.where(listed, self.cost, math.inf).gather(1, order)]
        self.windows: list[int] = []  # the largest distance of each group in rows and columns
        start = near
        for end in [e for e in GROUPS if e > near] if math.isfinite(near) else []:
            group = (
                (self.cost >= start**power) & (self.cost < end**power) & torch.isfinite(self.cost)
            )
            if bool(group.any()):
                self.windows.append(int(min(end, max(self.size))))
                prices.append(torch.where(group, self.cost, math.inf).amin(1, keepdim=True))
            start = end
        self.price = torch.cat(prices, 1)  # (sources, options)

    @property
    def centre(self) -> Tensor:
        """The image itself, flat."""
        return self.x.flatten()

    @property
    def options(self) -> int:
        return self.price.shape[0] * self.price.shape[1]

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Least and largest value of every pixel, flat."""
        total = (self.x.sum(1, keepdim=True) * (1 + gamma(self.pixels))).expand(self.x.shape)
        low, high = self.box or (0.0, math.inf)
        return torch.full_like(self.x, max(0.0, low)).flatten(), total.clamp(max=high).flatten()

    def worth(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values of staying ``(R, sources)`` and of moving ``(R, sources, options)``, for rows over
        the flat image."""
        maps = rows.view(-1, self.channels, self.pixels)
        stay = maps[:, self.channel, self.pixel]
        parts = [maps[:, self.channel[:, None], self.target]]
        image = rows.view(-1, self.channels, *self.size)
        for reach in self.windows:
            around = F.max_pool2d(image, (2 * reach + 1, 1), 1, (reach, 0))
            around = F.max_pool2d(around, (1, 2 * reach + 1), 1, (0, reach))
            parts.append(around.flatten(2)[:, self.channel, self.pixel][..., None])
        moved = torch.where(torch.isfinite(self.price), torch.cat(parts, 2), -math.inf)
        return stay, moved

    def gains(self, rows: Tensor, charges: Tensor | None) -> Tensor:
        """An upper bound of what each move adds, ``max(a_j - a_i + M_ij, 0)``, rounded up: (R,
        sources * options)."""
        stay, moved = self.worth(rows)
        gain = moved - stay[..., None]
        size = moved.abs() + stay.abs()[..., None]
        if charges is not None:
            gain, size = gain + charges.view(gain.shape), size + charges.view(gain.shape)
        gain = torch.where(torch.isfinite(moved), gain + 8 * UNIT * size, 0.0)
        return gain.clamp(min=0).flatten(1)

    def highest(self, rows: Tensor, charges: Tensor | None, prices: Tensor | None) -> Tensor:
        """Upper bounds of ``<rows, z>`` plus charges, (R,). They are valid for any prices of the
        box and the budget."""
        if self.mass.numel() == 0:
            return torch.zeros(rows.shape[0], dtype=torch.float64)  # the ball is one black image
        found = self._highest(rows, charges, prices)
        if prices is not None or self.box is None or rows.shape[0] > FEW:
            return found
        maps = rows.view(-1, self.channels, self.pixels)
        for share in PRICED:
            above = (maps - maps.quantile(share, 2, keepdim=True)).clamp(min=0).flatten(1)
            found = torch.minimum(found, self._highest(rows, charges, above))
        return found

    def _highest(self, rows: Tensor, charges: Tensor | None, prices: Tensor | None) -> Tensor:
        at = rows if prices is None else rows - prices
        stay, moved = self.worth(at)
        size = stay.abs().amax(1) + torch.where(torch.isfinite(moved), moved.abs(), 0.0).flatten(
            1
        ).amax(1)
        if charges is not None:
            moved = moved + charges.view(moved.shape)
            size = size + charges.abs().amax(1)
        price = torch.where(torch.isfinite(self.price), self.price, 0.0)
        psi = self._search(stay.float(), moved.float(), price.float()).to(torch.float64)
        value = self._dual(stay, moved, price, psi)[0]
        mass, top = self.mass.sum(), float(price.max())
        if prices is not None and self.box is not None:
            low, high = self.box
            paid = high * prices.clamp(min=0) + low * prices.clamp(max=0)
            value = value + paid.sum(1) + gamma(rows.shape[1]) * paid.abs().sum(1)
            size = size + prices.abs().amax(1)
        return value + gamma(stay.shape[1] + 8) * (size + psi * (top + 1)) * (
            mass + self.budget + 1
        )

    def _search(self, stay: Tensor, moved: Tensor, price: Tensor) -> Tensor:
        """The best price found by bisection: the dual function is convex."""
        gain = (moved - stay[..., None]) / price.clamp(min=1e-30)
        steep = torch.where(torch.isfinite(self.price) & (price > 0), gain, 0.0)
        low = torch.zeros_like(stay[:, 0])
        high = steep.flatten(1).amax(1).clamp(min=0) * (1 + 1e-6)
        best, at = self._dual(stay, moved, price, high)[0], high
        for _ in range(SEARCH):
            psi = (low + high) / 2
            value, paid = self._dual(stay, moved, price, psi)
            best, at = torch.minimum(value, best), torch.where(value < best, psi, at)
            over = paid > self.budget
            low, high = torch.where(over, psi, low), torch.where(over, high, psi)
        return at

    def _dual(
        self, stay: Tensor, moved: Tensor, price: Tensor, psi: Tensor
    ) -> tuple[Tensor, Tensor]:
        top, choice = (moved - psi.view(-1, 1, 1) * price).max(2)
        goes, mass = top > stay, self.mass.to(stay.dtype)
        spent = price.expand(moved.shape).gather(2, choice[..., None])[..., 0]
        paid = (torch.where(goes, spent, 0.0) * mass).sum(1)
        return psi * self.budget + (torch.where(goes, top, stay) * mass).sum(1), paid


def _costs(ball: WassersteinBall, shape: torch.Size, plans: Plans) -> Tensor:
    (channels, height, width), cost = shape, ball.cost
    if isinstance(cost, DenseCost):
        return cost.matrix.to("cpu", torch.float64).clone()
    place = torch.arange(height * width)
    row, column = place // width, place % width
    down, right = row[None] - row[:, None], column[None] - column[:, None]  # from, to
    if isinstance(cost, GridCost):
        squared = (down**2 + right**2).to(torch.float64)
        far = torch.maximum(down.abs(), right.abs()) > cost.radius
        far &= torch.tensor(plans != "full")
        plane = (squared ** (cost.p / 2)).masked_fill(far, math.inf)
        if cost.channel_cost is None:
            return plane
        dearer = ((squared.sqrt() + cost.channel_cost) ** cost.p) * (1 - 4 * UNIT * cost.p)
        same = torch.eye(channels, dtype=torch.bool)[:, None, :, None]
        every = torch.where(same, plane[:, None], dearer.masked_fill(far, math.inf)[:, None])
        return every.reshape(channels * len(place), -1)
    out = torch.full_like(down, math.inf, dtype=torch.float64)
    for r, c, _, d in cost.moves(height, width):
        out[(down == r) & (right == c)] = d
    return out


def domain(ball: object, x: Tensor, plans: Plans, near: float) -> Cube | Transport:
    """The set of images around one image ``x`` (without a batch); moves shorter than ``near`` are
    listed one by one."""
    if type(ball) is LinfBall:
        wide = x.to("cpu", torch.float64)
        eps = float(torch.as_tensor(ball.eps).reshape(-1)[0])
        low, high = wide - eps * (1 + 4 * UNIT), wide + eps * (1 + 4 * UNIT)
        if ball.box is not None:
            low, high = low.clamp(*ball.box), high.clamp(*ball.box)
        room = 2 * UNIT * (wide.abs() + eps)
        return Cube((low - room).flatten(), (high + room).flatten())
    if type(ball) is WassersteinBall:
        return Transport(ball, x, plans, near)
    raise Unfollowed(
        f"ball must be a WassersteinBall or LinfBall to be checked, got {type(ball).__name__}"
    )
