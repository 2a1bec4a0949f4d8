r"""The largest value of linear functions over an input set: all that a linear relaxation asks of a
threat model.

For a row ``a`` and a Wasserstein ball with budget ``E`` and box ``[lo, hi]``, every ``psi >= 0``
and every price ``r`` (one number per pixel) gives an upper bound of the maximum:

.. math::
    \max_{z \in B} \langle a, z \rangle
    \;\le\; \psi E + \sum_i x_i \max_j \big( a_j - r_j - \psi C_{ij} \big)
        + \sum_j \big( hi\, r_j^+ - lo\, r_j^- \big)

(weak duality: ``psi`` prices the transport budget, ``r`` the box, i.e. ``inf over a1 + a2 = a`` of
``sigma_ball(a1) + sigma_box(a2)``). So a search over ``psi`` and ``r`` may stop anywhere, and may
run in float32: the bound that counts is one evaluation of the right-hand side in float64. Charges
``M_ij`` on moves, which an anchored relaxation brings along (:mod:`wball.certificates.anchor`), are
added to ``a_j``.

Full plans on a large grid: moves shorter than a *reach* are listed one by one. Longer ones are
sorted into tiers of
length: one of a tier costs at least the tier's shortest length, and the best it can do is the
    largest ``a_j - r_j``
within the tier's longest. This only ever enlarges the bound. Charged rows also tell apart the moves
that are two listed ones (:mod:`wball.input_sets.detours`), where all pixels are sources.

A move that changes the channel has one option for all channels: the largest ``a_j - r_j`` of any
channel at the pixel where it ends. This is exact, because its own channel costs less; charges and
tiers of such balls only bound from above.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.cost import DenseCost, GridCost, GroundCost, moving, rings_of
from wball.input_sets.base import ROUNDS, InputSet, Plans
from wball.input_sets.detours import Detours, constant, detours
from wball.input_sets.rows import Charges, Rows, inside, read_patches, rounded_up, spread
from wball.kernels import dispatch
from wball.kernels.row_maximum import NOWHERE, Field
from wball.kernels.row_maximum.reference import worth_of

LIST_ALL = 8192
"""Images with at most this many (pixel, move) pairs have every move listed: full plans are
then exact."""

ENOUGH = 3.0
"""The longest reach where longer moves are known as two listed ones: 4 pixels tighten bounds by a
hundredth of what 3 do, at twice the price."""


class TransportSet(InputSet):
    """A Wasserstein ball around each image: budgets ``(B,)`` in float64, moves priced by ``cost``,
    pixels in ``box``.

    ``reach`` is the length below which moves of full plans are listed one by one.
    """

    has_plans = True

    def __init__(
        self,
        x: Tensor,
        cost: GroundCost,
        budget: Tensor,
        box: tuple[float, float] | None,
        plans: Plans,
        reach: float = 3.0,
    ) -> None:
        self._given = (cost, box, plans)
        self._x, self._reach = x, reach
        self.shape = tuple(x.shape[1:])
        self.box, self.budget = box, budget
        grid = x if x.ndim == 4 else x[:, None, None, :]
        self.x = grid.double()
        height, width = grid.shape[-2:]
        self.matrix: Tensor | None = None
        self.tiers: list[
            tuple[float, int]
        ] = []  # least cost and reach in pixels of unlisted moves, sorted by length
        self.moves = []
        if isinstance(cost, DenseCost):
            if cost.size != height * width:
                raise ValueError(
                    f"the cost matrix is for {cost.size} pixels, but the images have {height * width}"
                )
            self.matrix = cost.matrix.to(x.device)
        elif isinstance(cost, GridCost) and plans == "full":
            every = cost.full(height, width).moves(height, width)
            limit = reach**cost.p if len(every) * height * width > LIST_ALL else math.inf
            self.moves = [m for m in every if m[3] < limit]
            beyond = [m[3] for m in every if m[3] >= limit]
            self.power = cost.p
            if beyond:
                self.far = min(beyond)
                self.tiers = self._tiers(reach, self.far)
        else:
            self.moves = cost.moves(height, width)
        self.crosses = cost.channel_cost is not None and grid.shape[1] > 1
        if self.crosses and isinstance(cost, GridCost):
            changed = [(r, c, 1, cost.price(r * r + c * c, True)) for r, c, *_ in self.moves]
            self.moves = sorted(self.moves + changed, key=lambda move: move[3])
            self.power = None
        self.radius = max((max(abs(r), abs(c)) for r, c, *_ in self.moves), default=0)
        self.listed = moving(self.moves)  # in the order of all lists of gains and charges
        self.rings = rings_of([price for *_, price in self.listed])
        self.active, self._held = self._list_active()
        self.kernel = dispatch.choose("row_maximum", x, cost.arcs(grid))
        self.shares_moves = self.matrix is None

    def _list_active(self) -> tuple[Tensor | None, Tensor]:
        """Positions (B, C, n) and mass of the pixels with mass, if there are few enough for
        indexing to pay off."""
        flat = self.x.flatten(2)
        if self.matrix is not None or flat.numel() == 0:
            return None, flat
        count = int((flat > 0).sum(2).max())
        if count > 0.6 * flat.shape[2] or count == 0:
            return None, flat
        mass, place = flat.topk(count, dim=2)
        return place, mass

    @property
    def detours(self) -> Detours | None:
        """Moves next in length after the listed ones, if the charges of both halves are known:
        every pixel must be a source."""
        if self.far is None or self.power is None or self.active is not None:
            return None
        return detours(
            tuple(m[:2] for m in self.listed), self.power, self.x.shape[2], self.x.shape[3]
        )

    @property
    def follows_far(self) -> bool:  # type: ignore[override]
        return self.detours is not None

    def ranges(self) -> tuple[Tensor, Tensor]:
        whole = self.x.reshape(-1, *self.shape)
        if self.box is not None:
            return torch.full_like(whole, self.box[0]), torch.full_like(whole, self.box[1])
        together = (1, 2, 3) if self.crosses else (2, 3)
        most = self.x.sum(together, keepdim=True).expand(self.x.shape) * (1 + 1e-12)
        return torch.zeros_like(whole), most.reshape(whole.shape)

    def steepest(self, rows: Rows) -> Tensor | None:
        """The largest step between neighbours, by which every pixel is reached in at most
        ``sqrt(2)`` times its distance. Whole distances cost no more than their powers. ``None``
        if it bounds nothing, or there are no neighbours.
        """
        if not self.power or self.power < 1 or math.prod(rows.coeff.shape[2:]) < 2:
            return None
        coeff = rows.coeff if rows.corner is None else F.pad(rows.coeff, [1] * 4)
        steps = [coeff.diff(dim=k).abs().flatten(1) for k in (2, 3)]
        return 1.4142135623731 * torch.cat(steps, 1).amax(1)

    def _tiers(self, reach: float, least: float = 0.0) -> list[tuple[float, int]]:
        """Group the lengths from ``reach`` on into a few tiers: the cost of the shortest length of
        each, at least ``least``, and the pixels it spans."""
        assert self.power is not None
        if reach == math.inf:
            return []
        side = max(self.x.shape[2:])
        lengths = [reach * times for times in (1, 4 / 3, 2, 10 / 3) if reach * times < side]
        lengths = lengths or [reach]
        spans = [math.ceil(length) - 1 for length in lengths[1:]] + [2 * side]
        costs = [max(least, length**self.power) for length in lengths]
        return list(zip(costs, spans, strict=True))

    # ---- from rows to fields

    def patched(self, rows: Rows, allowed: bool = True) -> Rows:
        """Rows that are dense, unless their patch with its surroundings is clearly smaller
        than the image.
        """
        if rows.coeff.ndim == 2:
            rows = rows.like(rows.coeff[:, None, None, :])
        if rows.corner is None:
            return rows
        height, width = rows.coeff.shape[-2:]
        wide = 2 * self.radius
        large = (height + wide) * (width + wide) > 0.5 * self.x.shape[2] * self.x.shape[3]
        if self.matrix is not None or large or not allowed:
            return rows.dense(tuple(self.x.shape[1:]))
        return rows

    def _targets(self, rows: Rows, box: Tensor | None, times: int = 1) -> Tensor:
        """``a - r`` on the sources' grid widened by this multiple of the radius, :data:`NOWHERE`
        outside the image.
        """
        coeff, radius = rows.coeff, self.radius
        if rows.corner is None:
            value = coeff if box is None else coeff - box
            return F.pad(value, (times * radius,) * 4, value=NOWHERE)
        value = F.pad(coeff, (radius,) * 4)
        if box is not None:
            value = value - box
        value = F.pad(value, (times * radius,) * 4)
        corner = (rows.corner[0] - (1 + times) * radius, rows.corner[1] - (1 + times) * radius)
        keep = inside(corner, (value.shape[2], value.shape[3]), self.x.shape[1:])
        return value.masked_fill(~keep, NOWHERE)

    def _slice(self, padded: Tensor, row: int, column: int) -> Tensor:
        radius = self.radius
        height, width = padded.shape[-2] - 2 * radius, padded.shape[-1] - 2 * radius
        return padded[
            ..., radius + row : radius + row + height, radius + column : radius + column + width
        ]

    def _sources(self, rows: Rows, flat: Tensor) -> Tensor:
        """Select the sources from a map on the sources' grid, ``(N, C, h, w) -> (N, C, S)``."""
        flat = flat.flatten(2)
        if rows.corner is None and self.active is not None:
            return flat.gather(2, self.active[rows.image])
        return flat

    def _moved(self, rows: Rows, padded: Tensor) -> Tensor:
        """The target value at the end of each listed move out of every source, ``(N, C, K, S)``."""
        width = padded.shape[3]
        inner = (padded.shape[2] - 2 * self.radius, width - 2 * self.radius)
        if rows.corner is None and self.active is not None:
            place = self.active[rows.image]
        else:
            place = torch.arange(inner[0] * inner[1], device=padded.device)
        centre = (place // inner[1] + self.radius) * width + place % inner[1] + self.radius
        values = padded.flatten(2)
        steps = tuple(r * width + c + s * values.shape[2] for r, c, s, _ in self.listed)
        if self.crosses:  # the best of all channels behind each channel
            values = torch.cat((values, values.amax(1, keepdim=True).expand_as(values)), 2)
        index = centre[..., None, :] + constant(steps, torch.long, padded.device)[:, None]
        if place.ndim == 1:
            return values.index_select(2, index.flatten()).unflatten(2, index.shape)
        return values.gather(2, index.flatten(2)).reshape(index.shape)

    def _mass(self, rows: Rows) -> Tensor:
        """Mass of the sources of each row, ``(N, C, S)``."""
        dtype = rows.coeff.dtype
        if rows.corner is None:
            return self._held.to(dtype)[rows.image]
        radius = self.radius
        size = (rows.coeff.shape[2] + 2 * radius, rows.coeff.shape[3] + 2 * radius)
        corner = (rows.corner[0] - radius, rows.corner[1] - radius)
        return read_patches(self.x.to(dtype), rows.image, corner, size).flatten(2)

    def _field(
        self,
        rows: Rows,
        box: Tensor | None = None,
        charges: Charges | None = None,
    ) -> Field:
        """The options of every pixel with mass. Of moves of equal cost only the best is kept."""
        mass = self._mass(rows)
        dtype = rows.coeff.dtype
        if self.matrix is not None:
            value = (rows.coeff if box is None else rows.coeff - box).flatten(2)
            free = torch.isfinite(self.matrix).T  # (targets, sources)
            worth = torch.where(free, value[..., None], NOWHERE)
            if charges is not None:
                worth = worth + charges.moves
            return Field(mass, value, worth, torch.where(free, self.matrix.T, 0.0).to(dtype))
        padded = self._targets(rows, box)
        stay = self._sources(rows, self._slice(padded, 0, 0))
        worth = self._moved(rows, padded)
        if charges is not None:
            worth = worth + charges.moves
        costs = list(self.rings)
        levels = [worth[:, :, ring].amax(2) for ring in self.rings.values()]
        far, elsewhere, away = None, None, None
        if self.far is not None:
            ends, tiers = self._slice(padded, 0, 0), self.tiers
            if charges is not None and (longer := self.detours) is not None:
                size = (ends.shape[2], ends.shape[3])
                paid = longer.worth(charges.moves, self._targets(rows, box, 2), size, self.radius)
                levels += [paid[:, :, ring].amax(2) for ring in longer.rings.values()]
                costs += list(longer.rings)
                tiers = self._tiers(longer.limit)
            if charges is not None:
                ends = ends + charges.into
            if self.crosses:
                ends = ends.amax(1, keepdim=True).expand_as(ends)
            within, around = 0, ends
            for least, wide in tiers:
                if wide < max(ends.shape[-2:]) - 1:
                    around, within = _widen(around, wide - within), wide
                    best = self._sources(rows, around)
                else:
                    best = ends.flatten(2).amax(2, keepdim=True)
                if rows.corner is not None:
                    best = best.clamp(min=0)  # pixels beyond the patch
                levels.append((best if charges is None else best + charges.out).expand_as(stay))
                costs.append(least)
            if rows.corner is not None:
                elsewhere, prices = self._elsewhere(rows)
                far = ends.flatten(2).amax(2).clamp(min=0)
                away = constant(prices, dtype, stay.device)
        cost = constant(tuple(costs), dtype, stay.device).view(-1, 1)
        options = torch.stack(levels, 2) if levels else stay[:, :, None] + NOWHERE
        return Field(
            mass, stay, options, cost if levels else cost.new_ones(1, 1), far, elsewhere, away
        )

    def _elsewhere(self, rows: Rows) -> tuple[Tensor, tuple[float, ...]]:
        """``(N, C, T)``: mass at several distances from each row's patch; and the least cost
        of coming from there.
        """
        assert rows.corner is not None
        height, width = self.x.shape[2:]
        first = rows.corner
        last = (first[0] + rows.coeff.shape[2], first[1] + rows.coeff.shape[3])
        sums = F.pad(self.x.cumsum(2).cumsum(3), (1, 0, 1, 0))

        def within(reach: int) -> Tensor:
            top, bottom = (first[0] - reach).clamp(0, height), (last[0] + reach).clamp(0, height)
            left, right = (first[1] - reach).clamp(0, width), (last[1] + reach).clamp(0, width)
            corners = [
                sums[rows.image, :, r, c]
                for r, c in ((bottom, right), (top, right), (bottom, left), (top, left))
            ]
            return corners[0] - corners[1] - corners[2] + corners[3]

        edges = [
            within(self.radius),
            *(within(wide) for _, wide in self.tiers[:-1]),
            self.x.sum((2, 3))[rows.image],
        ]
        bands = [(b - a).clamp(min=0) for a, b in pairwise(edges)]
        return torch.stack(bands, 2).to(rows.coeff.dtype), tuple(price for price, _ in self.tiers)

    # ---- the bound

    def maximum(
        self,
        rows: Rows,
        charges: Charges | None = None,
        box: Tensor | None = None,
        rounds: int = ROUNDS,
    ) -> Tensor:
        rows = rows if charges is not None else self.patched(rows)
        budget = self.budget[rows.image]
        parts = [rows.coeff] if box is None else [rows.coeff, box]
        if charges is not None:
            parts += [charges.moves, charges.out, charges.into]
        recorded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
        kernel = dispatch.load("row_maximum", self.kernel)
        with torch.set_grad_enabled(recorded):
            field = self._field(rows, box, charges)
        found = kernel.row_maximum(field, budget, self.step, rounds)
        value = found.value
        if recorded:
            value = worth_of(field, found.psi) + found.psi * budget.to(rows.coeff.dtype)
        if self.box is None:
            return value
        lo, hi = self.box
        if box is not None:
            value = value + (hi * box.clamp(min=0) + lo * box.clamp(max=0)).flatten(1).sum(1)
        if charges is not None:
            return value
        return torch.minimum(value, self._box_alone(rows))

    def _box_alone(self, rows: Rows) -> Tensor:
        """The bound with ``psi = 0`` and ``r = a``."""
        assert self.box is not None
        lo, hi = self.box
        return torch.maximum(hi * rows.coeff, lo * rows.coeff).flatten(1).sum(1)

    def gains(self, rows: Rows, charges: Charges | None) -> Charges:
        """``max(a_j - a_i + M_ij, 0)`` on the sources of dense rows: listed moves, out of a source,
        into a target.

        In float32, no number smaller than it is in the rows' precision.
        """
        rows = rows if charges is not None else self.patched(rows)
        if self.matrix is not None:
            value = rows.coeff.flatten(2)
            moves = value[:, :, :, None] - value[:, :, None, :]
            if charges is not None:
                moves = moves + charges.moves
            moves = torch.where(torch.isfinite(self.matrix.T), moves, 0.0)
            moves = rounded_up(moves.clamp(min=0))
            return Charges(
                moves,
                torch.zeros_like(value, dtype=moves.dtype),
                torch.zeros_like(rows.coeff, dtype=moves.dtype),
            )
        padded = self._targets(rows, None)
        stay = self._slice(padded, 0, 0)
        source = self._sources(rows, stay)
        moves = self._moved(rows, padded).sub_(source[:, :, None])
        out, into = -source, stay
        if charges is not None:
            moves, out, into = moves.add_(charges.moves), out + charges.out, into + charges.into
        moves, out, into = (
            rounded_up(part) for part in (moves.clamp_(min=0), out.clamp(min=0), into.clamp(min=0))
        )
        if rows.corner is None:
            return Charges(moves, out, into)
        # Outside the image NOWHERE - NOWHERE and -NOWHERE are meaningless: no mass starts there.
        corner = (rows.corner[0] - self.radius, rows.corner[1] - self.radius)
        size, shape = (stay.shape[2], stay.shape[3]), tuple(self.x.shape[1:])
        maps = torch.cat([moves, out[:, :, None]], 2)
        read = spread(maps.reshape(*maps.shape[:3], *size), corner, rows.image, self.active, shape)
        whole = Rows(into, rows.image, corner).dense(shape).coeff
        return Charges(read[:, :, :-1], read[:, :, -1], whole)

    @property
    def gain_size(self) -> int:
        """Number of values that :meth:`gains` returns per row."""
        channels, height, width = self.x.shape[1:]
        sources = height * width if self.active is None else self.active.shape[2]
        moves = sources if self.matrix is not None else len(self.moves)
        return channels * (sources * (moves + 1) + height * width)

    def take(self, index: Tensor) -> TransportSet:
        cost, box, plans = self._given
        part = TransportSet(self._x[index], cost, self.budget[index], box, plans, self._reach)
        # Anchors list gains by pixel in the order of the whole batch, so a part keeps that order.
        part.active = None if self.active is None else self.active[index]
        part._held = self._held[index]
        return part

    def finer(self, reach: float) -> TransportSet:
        cost, box, plans = self._given
        if self.detours is not None:
            reach = min(reach, ENOUGH)
        if self.far is None or reach == self._reach:
            return self
        finer = TransportSet(self._x, cost, self.budget, box, plans, reach)
        finer.active, finer._held = self.active, self._held  # ties have no fixed order
        return finer

    @property
    def step(self) -> float:
        """The smallest positive cost of a move."""
        if self.matrix is not None:
            costs = self.matrix[torch.isfinite(self.matrix) & (self.matrix > 0)]
            return float(costs.min()) if costs.numel() else 1.0
        return min([d for d in (*self.rings, self.far or 0.0) if d > 0], default=1.0)

    def box_prices(self, rows: Rows) -> Tensor | None:
        if self.box is None:
            return None
        rows = self.patched(rows)
        return torch.zeros_like(
            rows.coeff if rows.corner is None else F.pad(rows.coeff, (self.radius,) * 4)
        )

    def floats(self, rows: Rows, charged: bool = False) -> int:
        rows = self.patched(rows)
        around = 0 if rows.corner is None else 4 * self.radius
        sources = (
            rows.coeff.shape[1] * (rows.coeff.shape[2] + around) * (rows.coeff.shape[3] + around)
        )
        listed = sources
        if rows.corner is None and self.active is not None:
            listed = self.active.shape[1] * self.active.shape[2]
        if self.matrix is not None:
            return 4 * rows.coeff.shape[1] * self.matrix.numel()
        if charged:
            longer = len(self.detours or ())
            return 2 * sources + (2 * len(self.moves) + 2 * longer + 6) * max(listed, sources // 2)
        return 2 * sources + (len(self.moves) + len(self.tiers) + 4) * listed


def _widen(maps: Tensor, reach: int) -> Tensor:
    """The largest value within ``reach`` pixels in rows and columns."""
    if reach <= 0:
        return maps
    maps = F.max_pool2d(maps, (1, 2 * reach + 1), stride=1, padding=(0, reach))
    return F.max_pool2d(maps, (2 * reach + 1, 1), stride=1, padding=(reach, 0))
