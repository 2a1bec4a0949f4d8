r"""Anchored bounds in the loss: what a certificate charges for units that may switch, differentiable.

Robustness to first order (:class:`~wball.training.Smooth`) sees the gradient at the image. What a certificate proves is
less, because units may switch on the way: an anchored relaxation (:mod:`wball.certificates.anchor`) charges every move
of mass for what it could gain from each unit that is not known to keep its side. A network that is to be certified must
be trained against both.

For a network of one convolution and one hidden linear layer the charges are a few matrix products. Let ``c`` be a row
over the activations of the convolution, split into ``c = c^+ + c^-``. With the lines of an anchored relaxation
(:func:`wball.certificates.activations.anchored_line`: slope ``beta``, bend ``omega``, and the activation's own slope
``s`` at the image) moving mass by the move ``e`` raises the row by at most

.. math:: G_e(c) = \langle c^+ \beta + c^- s,\; k_e \rangle + \langle c^+ \omega,\; k_e^+ \rangle

with ``k_e`` what the move does to each unit. The same for the rows of all hidden units gives their gains ``G_e^h``,
whose positive parts are in turn what the hidden layer charges:

.. math:: T_e = G_e\big(W^T (b^+ \beta + b^- s)\big) + \sum_h b_h^+ \omega_h \max(G_e^h, 0)

for ``b = f_k - f_y`` over the hidden activations. The bound of the margin is its value at the image less the most that
a plan within the budget can earn at ``T_e`` a unit of mass.

Listed are the moves to the four neighbours. A diagonal move earns at most what two of them do, and a plan may make
:data:`HOPS` moves in a row. That is good for training and for following it; certificates come from
:func:`wball.certificates.certify`.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.certificates.graph import Activation, Conv2d, Diagonal, Graph, Input, Linear, Reshape
from wball.certificates.tracing import trace
from wball.certificates.trust import UnsupportedModule
from wball.kernels import dispatch
from wball.kernels.row_maximum import Field, RowProblem, row_maximum

STRAIGHT = ((-1, 0), (0, -1), (0, 1), (1, 0))
DIAGONAL = ((-1, -1), (-1, 1), (1, -1), (1, 1))
FAR = math.sqrt(2)
HOPS = 2
"""How many moves in a row a unit of mass can make, each at what the first one earns."""
TURN = 1.2
"""What a diagonal move earns a hidden unit, in units of the best straight one."""
ROUNDS = 8
"""Rounds of the search for the price of the budget."""
ROOM = 1e-5
"""Units may move by this share of their size at least."""
PRICES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Prices that are tried for the units of the convolution, as shares of the steepest gain."""
AGREEMENT = 1e-2
"""A recording must raise logits by what the bounds themselves raise them, up to this share."""


class AnchoredBounds(nn.Module):
    """Bounds of the margins of a network ``Conv2d, ReLU, Flatten, Linear, ReLU, Linear``.

    Normalisation of the channels by constants may come first. The model is traced once; its parameters may change
    afterwards, and gradients reach them. With ``bf16`` gains are summed in that precision.
    """

    def __init__(self, model: nn.Module, like: Tensor, bf16: bool = False) -> None:
        super().__init__()
        graph = trace(model, like)
        before = [op for op in graph.ops if isinstance(op, Diagonal)]
        layers = [op for op in graph.ops if not isinstance(op, (Input, Reshape, Diagonal))]
        kinds = [type(op) for op in layers]
        plain = all(op.inputs == (k - 1,) for k, op in enumerate(graph.ops) if k)
        if (
            kinds != [Conv2d, Activation, Linear, Activation, Linear]
            or not plain
            or not _first(graph, before)
        ):
            raise UnsupportedModule(
                "anchored training is for one convolution, ReLU, a hidden linear layer, ReLU and a linear layer, such "
                f"as mnist-shallow; this network has {', '.join(kind.__name__ for kind in kinds)}"
            )
        first, bend, hidden, last_bend, last = layers
        assert isinstance(first, Conv2d) and isinstance(hidden, Linear) and isinstance(last, Linear)
        if first.groups != 1 or first.dilation != (1, 1):
            raise UnsupportedModule(
                f"anchored training has no bound for groups or dilation, as in {first.name!r}"
            )
        if any(isinstance(op, Activation) and op.leak for op in (bend, last_bend)):
            raise UnsupportedModule(
                f"anchored training has no bound for leaky activations, as {bend.name!r}; use ReLU"
            )
        self.model, self.first, self.hidden, self.last = (
            model,
            first,
            hidden,
            last,
        )  # the model for its parameters
        self.image, self.bf16 = tuple(like.shape[1:]), bf16
        self.kernel = dispatch.choose("row_maximum", like)
        height, width = self.image[1:]
        self.tiles = tuple(_Tiles(first, axis, side) for axis, side in enumerate((height, width)))
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        inside = [
            (row + r >= 0) & (row + r < height) & (column + c >= 0) & (column + c < width)
            for r, c in STRAIGHT
        ]
        dtype, device = first.weight.dtype, like.device

        def constant(value: Tensor) -> Tensor:
            return value.to(device, dtype)

        everywhere = torch.stack(inside)[:, None].expand(-1, self.image[0], -1, -1)
        self.inside = constant(
            self._tiled(everywhere).transpose(0, 1)
        )  # (tiles, moves, pixels of a tile)
        self.fee = constant(torch.tensor([1.0] * 4 + [FAR] * 4)).view(1, 8, 1, 1, 1)
        self.classes = torch.arange(last.shape[0], device=device)
        self.price = constant(torch.tensor(PRICES)).view(-1, 1)
        # A move out of a place adds what stands where it ends, and takes what stands there.
        steps = torch.zeros((8, 1, 3, 3))
        steps[:, 0, 1, 1] = -1.0
        for k, (r, c) in enumerate(STRAIGHT + DIAGONAL):
            steps[k, 0, 1 + r, 1 + c] = 1.0
        self.steps = constant(steps)
        scale, shift = constant(torch.ones(1, 1, 1, 1)), constant(torch.zeros(1, 1, 1, 1))
        for op in before:
            scale, shift = (
                scale * op.scale.to(dtype),
                shift * op.scale.to(dtype) + op.shift.to(dtype),
            )
        self.scale, self.shift = scale, shift

    def forward(self, x: Tensor, y: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and how much the best plan can raise each of them over that of ``y``, ``(B, classes)`` each."""
        budget = budget.to(x.dtype)
        at_first = self.first.forward(x * self.scale + self.shift)
        moves = self._differences(self.first.weight * self.scale)
        first = _Lines(at_first, *self._first_reach(x, moves, budget))
        at_hidden = self.hidden.forward(at_first.clamp(min=0).flatten(1))
        logits = self.last.forward(at_hidden.clamp(min=0))

        pattern = self._pattern(moves[:, : len(STRAIGHT)])
        gained = self._earned(
            self._by_place(self.hidden.weight).expand(x.shape[0], -1, -1, -1), first, pattern
        )
        rate = gained.amax(3).flatten(2).to(x.dtype)
        reach = _most(rate, TURN * rate, HOPS * self._tiled(x).flatten(1), budget, self.kernel)
        hidden = _Lines(at_hidden, reach, reach)

        own = (y[:, None] == self.classes).to(x.dtype)
        rows = self.last.weight - (own @ self.last.weight)[:, None]
        up, down = rows.clamp(min=0), rows.clamp(max=0)
        linear = (up * hidden.beta[:, None] + down * hidden.slope[:, None]) @ self.hidden.weight
        charge = (up * hidden.omega[:, None]).to(gained.dtype) @ gained.clamp(min=0).flatten(2)
        total = self._earned(self._by_place(linear), first, pattern) + charge.unflatten(
            2, gained.shape[2:]
        )
        straight = self._untiled(total.to(x.dtype).transpose(2, 3))
        best, turned = straight.amax(2).flatten(2), self._diagonal(straight).amax(2).flatten(2)
        return logits, _most(best, turned, HOPS * x.flatten(1), budget, self.kernel)

    def _differences(self, kernel: Tensor) -> Tensor:
        """What each move out of each place around a kernel adds to its unit, ``(F, moves, C, k + 2, k + 2)``."""
        found = F.conv2d(kernel.flatten(0, 1)[:, None], self.steps, padding=2)
        return found.unflatten(0, kernel.shape[:2]).transpose(1, 2)

    def _earned(self, rows: Tensor, lines: _Lines, pattern: Tensor) -> Tensor:
        """``(B, R, tiles, moves, pixels of a tile)``: what each move out of each pixel adds to rows at most.

        Rows come by place, ``(B, R, positions, filters)``: then a GPU need not turn the images of its convolution.
        """
        dtype = pattern.dtype
        up, down = rows.to(dtype).clamp(min=0), rows.to(dtype).clamp(max=0)
        beta, slope, omega = (
            self._by_place(v).to(dtype)[:, None] for v in (lines.beta, lines.slope, lines.omega)
        )
        seen = torch.cat([up * beta + down * slope, up * omega], 3)  # (B, R, positions, 2 filters)
        seen = seen.flatten(0, 1).unflatten(1, self.first.shape[1:]).permute(0, 3, 1, 2)
        out = F.conv2d(seen, pattern, padding=[tiles.padding for tiles in self.tiles])
        for axis, tiles in enumerate(self.tiles):
            out = out.narrow(2 + axis, tiles.margin, tiles.count)
        out = out.permute(0, 2, 3, 1).reshape(*rows.shape[:2], *self.inside.shape)
        return out * self.inside.to(dtype)

    def _by_place(self, rows: Tensor) -> Tensor:
        """Rows over units ``(..., units)`` as ``(..., positions, filters)``."""
        return rows.unflatten(-1, (self.first.shape[0], -1)).transpose(-1, -2).contiguous()

    def _tiled(self, maps: Tensor) -> Tensor:
        """Maps ``(N, C, H, W)`` as ``(N, tiles, pixels of a tile)``, with zeros beyond the image."""
        rows, columns = self.tiles
        wide = F.pad(maps, (0, columns.beyond, 0, rows.beyond))
        wide = wide.unflatten(3, (columns.count, columns.stride)).unflatten(
            2, (rows.count, rows.stride)
        )
        return wide.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _untiled(self, tiles: Tensor) -> Tensor:
        """Tiles ``(B, R, moves, tiles, pixels of a tile)`` as maps ``(B, R, moves, C, H, W)``."""
        rows, columns = self.tiles
        split = tiles.unflatten(4, (self.image[0], rows.stride, columns.stride))
        split = split.unflatten(3, (rows.count, columns.count)).permute(0, 1, 2, 5, 3, 6, 4, 7)
        maps = split.flatten(6, 7).flatten(4, 5)
        return maps[..., : self.image[1], : self.image[2]]

    def _diagonal(self, maps: Tensor) -> Tensor:
        """What diagonal moves earn at most: one straight move after the other, in the order that earns less."""
        wide = F.pad(maps, (1,) * 4)
        height, width = self.image[1:]

        def then(one: int, two: int) -> Tensor:
            r, c = STRAIGHT[one]
            return (
                maps[:, :, one] + wide[:, :, two, :, 1 + r : 1 + r + height, 1 + c : 1 + c + width]
            )

        corners = [(0, 1), (0, 2), (3, 1), (3, 2)]
        return torch.stack([torch.minimum(then(a, b), then(b, a)) for a, b in corners], 2)

    def _pattern(self, moves: Tensor) -> Tensor:
        """What each move out of each pixel of a tile does to the units around it, and its positive part, as a kernel.

        A unit and the pixels that it sees are a few tiles apart, so that what rows earn is an ordinary convolution over
        the units, with a channel for each move and pixel of a tile: ``(moves x C x pixels, 2 filters, tiles, tiles)``.
        """
        rows, columns = self.tiles
        both = torch.stack([moves, moves.clamp(min=0)])  # (2, F, moves, C, k + 2, k + 2)
        wide = F.pad(both, (*columns.around, *rows.around))
        wide = wide.unflatten(5, (-1, columns.stride)).unflatten(4, (-1, rows.stride)).flip((4, 6))
        kernel = wide.permute(2, 3, 5, 7, 0, 1, 4, 6).flatten(4, 5).flatten(0, 3)
        return kernel.to(torch.bfloat16 if self.bf16 else kernel.dtype).contiguous(
            memory_format=torch.channels_last
        )

    def _first_reach(self, x: Tensor, moves: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        """How far the units of the convolution can fall and rise, at the best of a few prices."""
        padding = [p + 1 for p in self.first.padding]
        both = torch.stack([-moves, moves])
        steep = (both / self.fee).flatten(2).amax(2)
        psi = self.price * steep[:, None]  # (2, prices, F)
        most = (both[:, None] - psi[..., None, None, None, None] * self.fee).amax(3).clamp(min=0)
        moved = F.conv2d(HOPS * x, most.flatten(0, 2), stride=self.first.stride, padding=padding)
        spent = budget[:, None, None, None] * psi
        value = (moved.unflatten(1, psi.shape) + spent[..., None, None]).amin(2)
        return value[:, 0], value[:, 1]


class _Lines:
    """Slope ``beta``, bend ``omega`` and the activation's own slope of each unit, ``(B, units)``.

    As :func:`wball.certificates.activations.anchored_line` has them for a ReLU, with a gradient everywhere: a unit that
    nothing can move would have 0 / 0 in lines that are not used.
    """

    def __init__(self, centre: Tensor, fall: Tensor, rise: Tensor) -> None:
        centre, fall, rise = (v.flatten(1) for v in (centre, fall, rise))
        room = ROOM * (1 + centre.detach().abs())
        fall, rise = fall + room, rise + room
        active = centre > 0
        crossing = ((centre < fall) & (centre > -rise)).to(centre.dtype)
        self.slope = active.to(centre.dtype)
        # Where a unit crosses: from 0 at the low end to its value, and on to its value at the high end.
        left = centre.clamp(min=0) / fall
        right = torch.where(active, torch.ones_like(centre), (centre + rise) / rise)
        self.beta = torch.lerp(self.slope, left, crossing)
        self.omega = crossing * (right - left)


def _first(graph: Graph, before: list[Diagonal]) -> bool:
    """Whether all scaling is of the image's channels, before anything else."""
    after = [k for k, op in enumerate(graph.ops) if k and not isinstance(op, Diagonal)]
    return all(op.scale.shape[2:] == (1, 1) for op in before) and after[0] == 1 + len(before)


class _Tiles:
    """The image along one axis in tiles as long as the stride, of which each unit sees those up to ``reach`` away."""

    def __init__(self, layer: Conv2d, axis: int, side: int) -> None:
        size, self.stride, padding = (
            layer.weight.shape[2 + axis],
            layer.stride[axis],
            layer.padding[axis] + 1,
        )
        positions = layer.shape[1 + axis]
        self.count = -(-side // self.stride)
        self.beyond = self.count * self.stride - side
        reach = max(
            -(-padding // self.stride), -(-(size + 2 - padding - self.stride) // self.stride)
        )
        before = self.stride * reach - padding
        self.around = before, (2 * reach + 1) * self.stride - before - (size + 2)
        self.margin = max(0, self.count - positions)
        self.padding = reach + self.margin


def _most(straight: Tensor, diagonal: Tensor, mass: Tensor, budget: Tensor, kernel: str) -> Tensor:
    r"""``min over psi of psi E + sum_i x_i max_d (G_d - psi d)^+``, ``(B, R)``, differentiable in the gains.

    ``straight`` and ``diagonal`` are the best gains ``(B, R, pixels)`` of moves of cost 1 and ``sqrt(2)``, ``mass`` is
    ``(B, pixels)``.
    """
    images, rows = straight.shape[:2]
    with torch.no_grad():
        held = mass[:, None].expand(-1, rows, -1).reshape(images * rows, 1, -1)
        worth = torch.stack([straight, diagonal], 2).flatten(0, 1)[:, None]
        steps = torch.ones_like(worth[0, 0, :, :1])
        steps[1:] *= FAR
        field = Field(held, torch.zeros_like(held), worth, steps)
        whose = torch.arange(images, device=mass.device).repeat_interleave(rows)
        problem = RowProblem(
            held,
            whose,
            None,
            mass,
            budget[whose].double(),
            (),
            (),
            1.0,
            lambda: None,
            lambda: field,
            plain=False,
        )
        psi = row_maximum(problem, ROUNDS, kernel)[1].unflatten(0, (images, rows))
    best = torch.maximum(straight - psi[..., None], diagonal - FAR * psi[..., None]).clamp(min=0)
    return (best * mass[:, None]).sum(2) + psi * budget[:, None]


def record(bounds: AnchoredBounds, x: Tensor, y: Tensor, budget: Tensor) -> None:
    """Let the bounds replay two CUDA graphs for batches like this one, forwards and backwards: else 1,000 launches.

    Where that fails, or disagrees, a warning says so, and the bounds go on as they were, which always works.
    """
    with torch.no_grad():
        expected = bounds(x, y, budget)[1]
    try:
        torch.cuda.make_graphed_callables(bounds, (x.clone(), y.clone(), budget.clone()))
        found = bounds(x, y, budget)[1].detach()
        worst = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not worst <= AGREEMENT:
            raise RuntimeError(f"a replay differs by {worst:g} of the largest gain")
    except (RuntimeError, AttributeError) as error:
        torch.cuda.synchronize(x.device)
        warnings.warn(
            f"the bounds are not replayed as a CUDA graph: {error}", RuntimeWarning, stacklevel=2
        )
        bounds.__dict__.pop("forward", None)  # what was put in its place
