r"""Linear relaxation (CROWN) of a network over an input set, with fixed or optimised slopes.

For a unit ``v`` with ``l <= v <= u``, ``l < 0 < u``, and leak ``s`` (0 for ReLU)

.. math::
    \alpha v \;\le\; \max(v, s v) \;\le\; k v + (s - k)\, l, \qquad k = \frac{u - s\,l}{u - l}, \quad s \le \alpha \le 1

holds for every ``alpha``. A row with coefficient ``a`` on the unit is bounded from below by the left line where ``a >= 0``
and by the right one where ``a < 0``; what is left at the end is a linear function of the image, and its minimum over
the ball is the support function of :mod:`wball.certify.input_set`. No interval of pixels ever appears.

Soundness. Every bound holds for *any* slopes in range, any ``psi >= 0`` and any box prices, so all searching runs in
float32 and only one final evaluation per row counts: that one is in float64 (rows, constants, input maximum), from
float64 bounds of earlier layers, and is lowered by ``ROUNDING`` times the sum of the magnitudes that entered it. The
network that is certified is the one with the given weights in exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from wball.certify.graph import Activation, Graph, MaxPool, back
from wball.certify.input_set import InputSet, Prices
from wball.certify.rows import Rows, units

ROUNDING = 1e-12
"""Allowance for float64 rounding, relative to the magnitudes summed: a few thousand times the unit round-off."""

Lower = Literal["adaptive", "parallel"]


@dataclass(frozen=True)
class Ascent:
    """How slopes and box prices are optimised: Adam steps on each row's own bound.

    Attributes:
        steps: number of steps (0: keep the initial slopes).
        rate: step length for slopes, which live in ``[leak, 1]``; decays to a tenth.
        box_rate: step length for box prices, relative to the row's largest coefficient.
        box: whether to optimise box prices at all.
    """

    steps: int = 0
    rate: float = 0.2
    box_rate: float = 0.05
    box: bool = True


@dataclass
class Bounds:
    """What each relaxed operation reads lies in ``[lower, upper]``, ``(B, *shape)``, in float64."""

    lower: dict[int, Tensor] = field(default_factory=dict)
    upper: dict[int, Tensor] = field(default_factory=dict)

    def take(self, index: Tensor) -> Bounds:
        """The bounds of a subset of the images."""
        return Bounds({k: v[index] for k, v in self.lower.items()}, {k: v[index] for k, v in self.upper.items()})

    def put(self, index: Tensor, other: Bounds) -> None:
        """Write back the bounds of a subset."""
        for position in other.lower:
            self.lower[position][index] = other.lower[position]
            self.upper[position][index] = other.upper[position]

    def unstable(self, position: int) -> Tensor:
        return (self.lower[position] < 0) & (self.upper[position] > 0)


class Relaxation:
    """Backward bounds of one graph over one input set.

    Args:
        graph: the traced network.
        source: the input set of all images.
        lower: initial lower slopes: ``adaptive`` (CROWN: 1 where ``u > -l``, else the leak) or ``parallel`` (the
            upper line's slope, as in the dual of Wong and Kolter).
        reg: finite: take ``psi`` from the entropic conjugate with this ``reg`` instead of the exact search.
        budget: how many numbers a chunk of rows may hold.
    """

    def __init__(
        self,
        graph: Graph,
        source: InputSet,
        lower: Lower = "adaptive",
        reg: float = math.inf,
        budget: int = 2**22,
    ) -> None:
        self.graph, self.source, self.kind, self.reg, self.budget = graph, source, lower, reg, budget

    # ---- one batch of rows

    def _relax(
        self, bounds: Bounds, slopes: dict[int, Tensor] | None, record: bool, scale: list[Tensor] | None = None
    ) -> Callable[[int, Rows], tuple[Tensor, Rows]]:
        """The relaxation step of :func:`wball.certify.graph.back`.

        ``slopes`` holds lower slopes per row and coefficient; missing ones take their initial value, and are
        written into it if ``record``. ``scale`` collects the magnitudes of the constants.
        """

        def relax(position: int, rows: Rows) -> tuple[Tensor, Rows]:
            op = self.graph.ops[position]
            if isinstance(op, MaxPool):
                return _relax_max_pool(op, rows, bounds.lower[position], bounds.upper[position])
            assert isinstance(op, Activation)
            dtype = rows.coeff.dtype
            low, up = bounds.lower[position].to(dtype), bounds.upper[position].to(dtype)
            slope, shift = upper_line(low, up, op.leak)
            positive, negative = rows.coeff.clamp(min=0), rows.coeff.clamp(max=0)
            if slopes is not None and position in slopes:
                under = slopes[position].to(dtype)
                crossing = rows.read(((low < 0) & (up > 0)).to(dtype)) > 0
                under = torch.where(crossing, under, rows.read(slope))
            else:
                under = rows.read(self._initial(low, up, slope, op.leak))
                if slopes is not None and record:
                    slopes[position] = under.detach().clone()
            constant = (negative * rows.read(shift)).flatten(1).sum(1)
            if scale is not None:
                scale.append(constant.abs())
            return constant, rows.like(positive * under + negative * rows.read(slope))

        return relax

    def _initial(self, low: Tensor, up: Tensor, slope: Tensor, leak: float) -> Tensor:
        if self.kind == "parallel":
            return slope
        ends = torch.where(up > -low, 1.0, leak).to(slope.dtype)
        return torch.where((low < 0) & (up > 0), ends, slope)

    def _final(self, target: int, rows: Rows, bounds: Bounds, slopes: dict[int, Tensor] | None, prices: Prices) -> Tensor:
        """The bound that counts, in float64."""
        wide = rows.like(rows.coeff.to(torch.float64))
        scale: list[Tensor] = []
        constant, at_input = back(self.graph, target, wide, self._relax(bounds, slopes, False, scale))
        largest = self.source.upper(at_input.like(-at_input.coeff), prices.to(torch.float64))
        size = constant.abs() + largest.abs() + at_input.coeff.abs().flatten(1).sum(1)
        for part in scale:
            size = size + part
        return constant - largest - ROUNDING * size

    @torch.no_grad()
    def lower_bound(self, target: int, rows: Rows, bounds: Bounds, ascent: Ascent | None = None) -> Tensor:
        """A sound lower bound of each row over the value of operation ``target``, ``(N,)`` in float64."""
        slopes: dict[int, Tensor] | None = {} if ascent is not None and ascent.steps > 0 else None
        constant, at_input = back(self.graph, target, rows, self._relax(bounds, slopes, True))
        prices = self.source.search(at_input.like(-at_input.coeff), reg=self.reg)
        first = self._final(target, rows, bounds, slopes, prices)
        if slopes is None or ascent is None:
            return first
        prices = self._climb(target, rows, bounds, slopes, at_input, ascent)
        return torch.maximum(first, self._final(target, rows, bounds, slopes, prices))

    def _climb(
        self,
        target: int,
        rows: Rows,
        bounds: Bounds,
        slopes: dict[int, Tensor],
        at_input: Rows,
        ascent: Ascent,
    ) -> Prices:
        """Improve ``slopes`` in place by Adam on the sum of the rows' bounds; return matching prices."""
        box = self.source.zero_box_prices(at_input) if ascent.box else None
        unit = at_input.coeff.abs().flatten(1).amax(1).clamp(min=1e-12)
        variables = {k: v.requires_grad_(True) for k, v in slopes.items()}
        steppers: list[dict[str, object]] = [{"params": list(variables.values()), "lr": ascent.rate}]
        if box is not None:
            unit = unit.view(-1, *[1] * (box.ndim - 1))
            share = torch.zeros_like(box).requires_grad_(True)
            steppers.append({"params": [share], "lr": ascent.box_rate})
        optimiser = torch.optim.Adam(steppers, betas=(0.9, 0.9))
        decay = 0.1 ** (1.0 / max(1, ascent.steps))
        for _ in range(ascent.steps):
            with torch.enable_grad():
                constant, image_rows = back(self.graph, target, rows, self._relax(bounds, variables, False))
            negated = image_rows.like(-image_rows.coeff.detach())
            price = None if box is None else share.detach() * unit
            prices = self.source.search(negated, price, steps=8)
            z = self.source.maximiser(negated, prices)
            with torch.enable_grad():
                # Envelope theorem: at the best psi the input maximum moves with the rows as <., z> does.
                loss = -(constant.sum() + (image_rows.coeff * z).sum())
            optimiser.zero_grad()
            loss.backward()
            if box is not None:
                share.grad = self.source.box_slope(negated, prices)
            optimiser.step()
            for group in optimiser.param_groups:
                group["lr"] *= decay
            for position, slope in variables.items():
                op = self.graph.ops[position]
                assert isinstance(op, Activation)
                slope.data.clamp_(op.leak, 1.0)
            if box is not None:
                share.data.clamp_(min=0.0)
        for position in slopes:
            slopes[position] = slopes[position].detach()
        _, image_rows = back(self.graph, target, rows, self._relax(bounds, slopes, False))
        price = None if box is None else share.detach() * unit
        return self.source.search(image_rows.like(-image_rows.coeff), price)

    # ---- whole layers

    def chunk(self, target: int, rows_of: Callable[[Tensor], Rows], bounds: Bounds, count: int) -> int:
        """How many rows over ``target`` fit into the budget, from a trial with one."""
        if count == 0:
            return 1
        largest = [1]

        def relax(position: int, rows: Rows) -> tuple[Tensor, Rows]:
            largest.append(rows.coeff[0].numel())
            constant, out = self._relax(bounds, None, False)(position, rows)
            largest.append(out.coeff[0].numel())
            return constant, out

        with torch.no_grad():
            _, at_input = back(self.graph, target, rows_of(torch.zeros(1, dtype=torch.long)), relax)
        return max(1, self.budget // max(sum(largest), self.source.floats(at_input)))

    @torch.no_grad()
    def bound_layer(self, position: int, bounds: Bounds, images: int, like: Tensor, ascent: Ascent | None = None) -> None:
        """Bound what relaxed operation ``position`` reads, for all images; with ``ascent`` only its unstable units.

        New bounds replace old ones only where they are tighter.
        """
        target = self.graph.ops[position].inputs[0]
        shape = self.graph.ops[target].shape
        size = math.prod(shape)
        if position in bounds.lower:
            wanted = bounds.unstable(position).reshape(images, size).nonzero()
            image, unit = wanted[:, 0], wanted[:, 1]
        else:
            empty = torch.full((images, *shape), math.inf, dtype=torch.float64, device=like.device)
            bounds.lower[position], bounds.upper[position] = -empty, empty
            every = torch.arange(images * size, device=like.device)
            image, unit = every // size, every % size
        image, unit = image.repeat(2), unit.repeat(2)
        sign = torch.ones(image.shape[0], device=like.device)
        sign[: image.shape[0] // 2] = -1

        def rows_of(index: Tensor) -> Rows:
            index = index.to(like.device)
            return units(shape, image[index], unit[index], sign[index], like)

        step = self.chunk(target, rows_of, bounds, image.shape[0])
        parts = [
            self.lower_bound(target, rows_of(index), bounds, ascent)
            for index in torch.arange(image.shape[0]).split(step)
        ]
        if not parts:
            return
        half = image.shape[0] // 2
        found = torch.cat(parts)
        place = (image[:half], unit[:half])
        for store, value, tighter in (
            (bounds.upper[position], -found[:half], torch.minimum),
            (bounds.lower[position], found[half:], torch.maximum),
        ):
            flat = store.view(images, size)
            flat[place] = tighter(flat[place], value)

    def bound_all(self, images: int, like: Tensor) -> Bounds:
        """Bounds for every relaxed operation, in order, with the initial slopes."""
        bounds = Bounds()
        for position in self.graph.relaxed():
            self.bound_layer(position, bounds, images, like)
        return bounds

    @torch.no_grad()
    def margins(self, y: Tensor, bounds: Bounds, like: Tensor, ascent: Ascent | None = None) -> Tensor:
        """Lower bounds of ``logit[y] - logit[k]``, ``(B, classes)``, with ``inf`` at ``k = y``."""
        target = len(self.graph.ops) - 1
        classes = self.graph.ops[target].shape[0]
        images = y.shape[0]
        every = torch.arange(images * classes, device=like.device)
        image, other = every // classes, every % classes
        keep = other != y[image]
        image, other = image[keep], other[keep]

        def rows_of(index: Tensor) -> Rows:
            index = index.to(like.device)
            coeff = torch.zeros((index.shape[0], classes), dtype=like.dtype, device=like.device)
            coeff.scatter_(1, y[image[index]][:, None], 1.0)
            coeff.scatter_(1, other[index][:, None], -1.0)
            return Rows(coeff, image[index])

        step = self.chunk(target, rows_of, bounds, image.shape[0])
        out = torch.full((images, classes), math.inf, dtype=torch.float64, device=like.device)
        for index in torch.arange(image.shape[0]).split(step):
            value = self.lower_bound(target, rows_of(index), bounds, ascent)
            out[image[index.to(like.device)], other[index.to(like.device)]] = value
        return out


def upper_line(low: Tensor, up: Tensor, leak: float) -> tuple[Tensor, Tensor]:
    """Slope and shift of the upper line, exact where the unit is stable."""
    crossing = (low < 0) & (up > 0)
    width = torch.where(crossing, up - low, torch.ones_like(up))
    slope = torch.where(crossing, (up - leak * low) / width, torch.where(low >= 0, 1.0, leak).to(up.dtype))
    shift = torch.where(crossing, (leak - slope) * low, torch.zeros_like(slope))
    return slope, shift


def _relax_max_pool(op: MaxPool, rows: Rows, lower: Tensor, upper: Tensor) -> tuple[Tensor, Rows]:
    """``max >= the entry with the largest lower bound``; ``max <= largest upper bound``, or that entry if it wins."""
    whole = rows.dense(op.shape)
    dtype, image = whole.coeff.dtype, whole.image
    low, up = op.windows(lower), op.windows(upper)
    floor, pick = low.max(-1)
    places = op.places(lower.device).expand(*low.shape)
    source = places.gather(-1, pick[..., None])[..., 0].flatten(2)
    others = up.scatter(-1, pick[..., None], -math.inf)
    sure = (floor >= others.amax(-1)).flatten(2)[image]
    ceiling = up.amax(-1).to(dtype).flatten(2)[image]
    flat = whole.coeff.flatten(2)
    kept = torch.where((flat > 0) | sure, flat, torch.zeros_like(flat))
    out = flat.new_zeros((flat.shape[0], flat.shape[1], op.before[1] * op.before[2]))
    out = out.scatter_add(2, source[image], kept)
    constant = ((flat - kept) * ceiling).flatten(1).sum(1)
    return constant, Rows(out.reshape(-1, *op.before), image)
