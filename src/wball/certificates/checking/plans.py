r"""The largest value of linear functions of a transport plan over a ball, from above, by weak duality.

A row says what a unit of mass is worth where it goes: ``w_ij = a_j + M_ij`` for a move from ``i`` to ``j``, ``a_i`` for
mass that stays. For every price ``psi >= 0`` of the budget ``E`` and every price ``r`` of the box,

.. math::
    \max_P \sum_{ij} P_{ij} w_{ij} \;\le\; \psi E + \sum_i x_i \max_j (w_{ij} - r_j - \psi C_{ij})
        + \sum_j (hi\, r_j^+ - lo\, r_j^-)

so prices are searched for in any way, and only the last evaluation counts: in float64, with every rounding error added.
Moves are listed one by one where they are short, and otherwise in groups that cost what their shortest move costs and
are worth the best target in a window that contains them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from wball.ball import LinfBall, Plans, WassersteinBall
from wball.certificates.checking.network import UNIT, Unfollowed, gamma
from wball.cost import DenseCost, GridCost

Array = NDArray[np.float64]
Matrix = Any  # a sparse matrix of SciPy

ALL = 128
"""Images of at most so many pixels have every move listed."""

GROUPS = (3.0, 4.0, 6.0, 10.0, math.inf)
"""Longer moves than those listed are grouped up to these lengths."""

SEARCH, CLOSE = 20, 1e-6
"""Steps of a search for a price, and the relative gap at which it ends."""

LARGEST = 4096
"""Pixels of an image whose costs are held as a matrix."""


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

    def constraints(self) -> Constraints:
        """The set as constraints on the pixels themselves."""
        from scipy import sparse  # slow to import, and rarely needed

        pixels, none = self.low.shape[0], np.zeros(0)
        nothing = sparse.csr_array((0, pixels))
        ends = np.stack([self.low.numpy(), self.high.numpy()], 1)
        return Constraints(sparse.eye_array(pixels).tocsr(), ends, nothing, none, nothing, none)

    def highest(
        self,
        rows: Tensor,
        charges: Tensor | None = None,
        prices: Tensor | None = None,
        psi: Tensor | None = None,
    ) -> Tensor:
        """Upper bounds of ``<rows, z>``, (R,)."""
        assert charges is None and prices is None
        terms = torch.where(rows > 0, rows * self.high, rows * self.low)
        return terms.sum(1) + gamma(rows.shape[1]) * terms.abs().sum(1)


class Transport:
    """One image's Wasserstein ball: mass, moves with their costs, budget and box."""

    def __init__(self, ball: WassersteinBall, x: Tensor, plans: Plans, near: float) -> None:
        """``x``: one image ``(C, H, W)`` or histogram ``(n,)``; moves shorter than ``near`` are listed."""
        grid = (x if x.ndim == 3 else x.reshape(1, 1, -1)).to("cpu", torch.float64)
        self.channels, height, width = grid.shape
        self.pixels, self.size = height * width, (height, width)
        if self.pixels > LARGEST:
            raise Unfollowed(
                f"an image of {self.pixels} pixels, the checker handles up to {LARGEST}"
            )
        self.x = grid.reshape(self.channels, self.pixels)
        self.box = ball.box
        self.budget = float(ball.budget(x[None])[0]) * (1 + 8 * UNIT)
        cost = _costs(ball, height, width, plans)  # (pixels, pixels), inf where nothing moves
        cost.fill_diagonal_(math.inf)
        channel, pixel = (self.x > 0).nonzero(as_tuple=True)
        self.channel, self.pixel, self.mass = channel, pixel, self.x[channel, pixel]
        self.cost = cost[pixel] * (1 - 8 * UNIT)  # (sources, pixels), never more than it is
        self.listed = self.pixels <= ALL or isinstance(ball.cost, DenseCost)  # every move
        self._list(
            math.inf if self.listed else near,
            ball.cost.p if isinstance(ball.cost, GridCost) else 1.0,
        )

    def _list(self, near: float, power: float) -> None:
        """Options of every source: single targets first, then groups of targets."""
        listed = (self.cost < near**power) & torch.isfinite(self.cost)
        most = max(1, int(listed.sum(1).max())) if self.cost.numel() else 1
        order = torch.where(listed, self.cost, math.inf).argsort(1)[:, :most]
        self.target = order
        prices = [torch.where(listed, self.cost, math.inf).gather(1, order)]
        self.windows: list[
            int
        ] = []  # how far the targets of each group are at most, in rows and columns
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
        low, high = (0.0, math.inf) if self.box is None else self.box
        return torch.full_like(self.x, max(0.0, low)).flatten(), total.clamp(max=high).flatten()

    def worth(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``(R, sources)`` of staying and ``(R, sources, options)`` of moving, for rows over the flat image."""
        maps = rows.view(-1, self.channels, self.pixels)
        stay = maps[:, self.channel, self.pixel]
        parts = [maps[:, self.channel[:, None], self.target]]
        image = rows.view(-1, self.channels, *self.size)
        for reach in self.windows:
            around = _largest_around(_largest_around(image, reach, 3), reach, 2)
            parts.append(around.flatten(2)[:, self.channel, self.pixel][..., None])
        moved = torch.where(torch.isfinite(self.price), torch.cat(parts, 2), -math.inf)
        return stay, moved

    def gains(self, rows: Tensor, charges: Tensor | None) -> Tensor:
        """What a move adds at most, ``max(a_j - a_i + M_ij, 0)``, rounded up: (R, sources * options)."""
        stay, moved = self.worth(rows)
        gain = moved - stay[..., None]
        size = moved.abs() + stay.abs()[..., None]
        if charges is not None:
            gain, size = gain + charges.view(gain.shape), size + charges.view(gain.shape)
        gain = torch.where(torch.isfinite(moved), gain + 8 * UNIT * size, 0.0)
        return gain.clamp(min=0).flatten(1)

    def highest(
        self,
        rows: Tensor,
        charges: Tensor | None = None,
        prices: Tensor | None = None,
        psi: Tensor | None = None,
    ) -> Tensor:
        """Upper bounds of ``<rows, z>`` plus charges, (R,); any prices of the box and of the budget are right."""
        if self.mass.numel() == 0:
            return torch.zeros(rows.shape[0], dtype=torch.float64)  # the ball is one black image
        at = rows if prices is None else rows - prices
        stay, moved = self.worth(at)
        size = stay.abs().amax(1) + torch.where(torch.isfinite(moved), moved.abs(), 0.0).flatten(
            1
        ).amax(1)
        if charges is not None:
            moved = moved + charges.view(moved.shape)
            size = size + charges.abs().amax(1)
        price = torch.where(torch.isfinite(self.price), self.price, 0.0)
        if psi is not None:
            psi = psi.clamp(min=0)
        else:
            psi = self._search(stay.detach().float(), moved.detach().float(), price.float()).to(
                torch.float64
            )
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
        """The price of the least value of the dual function that is found.

        It is convex: next to be tried is the price at which the tangents on both sides meet, where it is least if there
        is no kink in between, and now and then the middle.
        """
        steep = torch.where(
            torch.isfinite(self.price) & (price > 0),
            (moved - stay[..., None]) / price.clamp(min=1e-300),
            0.0,
        )
        low = torch.zeros_like(stay[:, 0])
        high = steep.flatten(1).amax(1).clamp(min=0) * (1 + 1e-6)
        left, right = self._dual(stay, moved, price, low), self._dual(stay, moved, price, high)
        best, at = torch.minimum(left[0], right[0]), torch.where(right[0] < left[0], high, low)
        for step in range(SEARCH):
            slopes = self.budget - left[1], self.budget - right[1]
            meet = (left[0] - slopes[0] * low - right[0] + slopes[1] * high) / (
                slopes[1] - slopes[0]
            )
            least = left[0] + slopes[0] * (meet - low)
            inside = (meet > low) & (meet < high)
            if not bool((inside & (best - least > CLOSE * best.abs())).any()):
                break
            psi = (
                torch.where(inside, meet, 0.5 * (low + high))
                if step % 4 < 3
                else 0.5 * (low + high)
            )
            value, paid = self._dual(stay, moved, price, psi)
            best, at = torch.where(value < best, value, best), torch.where(value < best, psi, at)
            over = paid > self.budget
            low, high = torch.where(over, psi, low), torch.where(over, high, psi)
            left = torch.where(over, value, left[0]), torch.where(over, paid, left[1])
            right = torch.where(over, right[0], value), torch.where(over, right[1], paid)
        return at

    def _dual(
        self, stay: Tensor, moved: Tensor, price: Tensor, psi: Tensor
    ) -> tuple[Tensor, Tensor]:
        top, choice = (moved - psi.view(-1, 1, 1) * price).max(2)
        goes, mass = top > stay, self.mass.to(stay.dtype)
        spent = price.expand(moved.shape).gather(2, choice[..., None])[..., 0]
        paid = (torch.where(goes, spent, 0.0) * mass).sum(1)
        return psi * self.budget + (torch.where(goes, top, stay) * mass).sum(1), paid

    def constraints(self) -> Constraints | None:
        """The ball as constraints on its plans; ``None`` where moves are grouped, or nothing moves.

        Variables are what stays, source by source, and what moves, in the order of ``moves``.
        """
        count = self.price.shape[0]
        if self.windows or count == 0:
            return None
        from scipy import sparse  # slow to import, and rarely needed

        origin, option = self.moves
        source = torch.cat([torch.arange(count), origin]).numpy()
        into = torch.cat([self.pixel, self.target[origin, option]]).numpy()
        into = into + self.channel.numpy()[source] * self.pixels
        paid = np.concatenate([np.zeros(count), self.price[origin, option].numpy()])
        many, cells = source.shape[0], self.channels * self.pixels
        every, one = np.arange(many), np.ones(many)
        image = sparse.coo_array((one, (into, every)), shape=(cells, many)).tocsr()
        budget = sparse.coo_array((paid, (np.zeros(many, dtype=int), every)), shape=(1, many))
        mass = sparse.coo_array((one, (source, every)), shape=(count, many)).tocsr()
        under, limits = [budget], [np.array([self.budget])]
        if self.box is not None:
            under += [image, -image]
            limits += [np.full(cells, self.box[1]), np.full(cells, -self.box[0])]
        ends = np.stack([np.zeros(many), np.full(many, np.inf)], 1)
        rows = sparse.vstack(under).tocsr()
        return Constraints(image, ends, rows, np.concatenate(limits), mass, self.mass.numpy())

    @property
    def moves(self) -> tuple[Tensor, Tensor]:
        """Source and option of every move."""
        origin, option = torch.isfinite(self.price).nonzero(as_tuple=True)
        return origin, option


@dataclass(frozen=True)
class Constraints:
    """A set of images as a linear program: ``image @ t`` for variables with ``under t <= limits``, ``equal t = to``."""

    image: Matrix
    ends: Array
    under: Matrix
    limits: Array
    equal: Matrix
    to: Array


def _largest_around(image: Tensor, reach: int, dim: int) -> Tensor:
    """The largest of the numbers at most ``reach`` away along a dimension, by windows that double."""
    size = image.shape[dim]
    if reach >= size - 1:
        return image.amax(dim, keepdim=True).expand(image.shape)
    wide = F.pad(
        image, (reach, reach) if dim == image.ndim - 1 else (0, 0, reach, reach), value=-math.inf
    )
    window, covered = 2 * reach + 1, 1
    while 2 * covered <= window:
        count = wide.shape[dim] - covered
        wide = torch.maximum(wide.narrow(dim, 0, count), wide.narrow(dim, covered, count))
        covered *= 2
    return torch.maximum(wide.narrow(dim, 0, size), wide.narrow(dim, window - covered, size))


def _costs(ball: WassersteinBall, height: int, width: int, plans: Plans) -> Tensor:
    cost = ball.cost
    if isinstance(cost, DenseCost):
        return cost.matrix.to("cpu", torch.float64).clone()
    place = torch.arange(height * width)
    row, column = place // width, place % width
    down, right = row[None] - row[:, None], column[None] - column[:, None]  # from, to
    if isinstance(cost, GridCost) and plans == "full":
        return (down**2 + right**2).to(torch.float64) ** (cost.p / 2)
    table = {(r, c): d for r, c, d in cost.moves(height, width)}
    out = torch.full((height * width, height * width), math.inf, dtype=torch.float64)
    for (r, c), d in table.items():
        out[(down == r) & (right == c)] = d
    return out


def domain(ball: object, x: Tensor, plans: Plans, near: float = 3.0) -> Cube | Transport:
    """The set of images around one image ``x`` (without a batch); moves shorter than ``near`` are told apart."""
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
