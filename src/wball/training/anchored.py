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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.certificates.activations import anchored_line, upper_line
from wball.certificates.graph import Activation, Conv2d, Diagonal, Graph, Input, Linear, Reshape
from wball.certificates.tracing import trace
from wball.certificates.trust import UnsupportedModule

STRAIGHT = ((-1, 0), (0, -1), (0, 1), (1, 0))
DIAGONAL = ((-1, -1), (-1, 1), (1, -1), (1, 1))
HOPS = 2
"""How many moves in a row a unit of mass can make, each at what the first one earns."""
TURN = 1.2
"""What a diagonal move earns a hidden unit, in units of the best straight one."""
ROUNDS = 8
"""Steps of the search for the price of the budget."""
ROOM = 1e-5
"""Units may move by this share of their size at least."""
PRICES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Prices that are tried for the units of the convolution, as shares of the steepest gain."""


class AnchoredBounds:
    """Bounds of the margins of a network ``Conv2d, ReLU, Flatten, Linear, ReLU, Linear``.

    Normalisation of the channels by constants may come first. The model is traced once; its parameters may change
    afterwards, and gradients reach them.
    """

    def __init__(self, model: nn.Module, like: Tensor, bf16: bool = False) -> None:
        graph = trace(model, like)
        before = [op for op in graph.ops if isinstance(op, Diagonal)]
        layers = [op for op in graph.ops if not isinstance(op, (Input, Reshape, Diagonal))]
        kinds = [type(op) for op in layers]
        plain = all(op.inputs == (k - 1,) for k, op in enumerate(graph.ops) if k)
        if kinds != [Conv2d, Activation, Linear, Activation, Linear] or not plain or not _first(graph, before):
            raise UnsupportedModule(
                "anchored training is for one convolution, ReLU, a hidden linear layer, ReLU and a linear layer, such "
                f"as mnist-shallow; this network has {', '.join(kind.__name__ for kind in kinds)}"
            )
        first, _, hidden, _, last = layers
        assert isinstance(first, Conv2d) and isinstance(hidden, Linear) and isinstance(last, Linear)
        if first.groups != 1 or first.dilation != (1, 1):
            raise UnsupportedModule(f"anchored training has no bound for groups or dilation, as in {first.name!r}")
        self.before, self.first, self.hidden, self.last = before, first, hidden, last
        self.image, self.bf16 = tuple(like.shape[1:]), bf16
        height, width = self.image[1:]
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        inside = [(row + r >= 0) & (row + r < height) & (column + c >= 0) & (column + c < width) for r, c in STRAIGHT]
        self.inside = torch.stack(inside)[:, None].to(like.device)  # (moves, 1, H, W)

    def gains(self, x: Tensor, y: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and how much the best plan can raise each of them over that of ``y``, ``(B, classes)`` each."""
        at_first, kernel, budget = self._convolved(x), self._kernel(), budget.to(x.dtype)
        fall, rise = self._first_reach(x, kernel, budget)
        first = _Lines(at_first, fall, rise)
        at_hidden = self.hidden.forward(at_first.clamp(min=0).flatten(1))
        logits = self.last.forward(at_hidden.clamp(min=0))

        per_move = self._per_move(kernel)
        gained = self._earned(self.hidden.weight.expand(x.shape[0], -1, -1), first, per_move)
        mass = HOPS * x.flatten(1)[:, None]
        rate = gained.amax(2).to(x.dtype)
        reach = _most([(rate, 1.0), (TURN * rate, math.sqrt(2))], mass, budget)
        hidden = _Lines(at_hidden, reach, reach)

        rows = self.last.weight - self.last.weight[y][:, None]
        up, down = rows.clamp(min=0), rows.clamp(max=0)
        linear = (up * hidden.beta[:, None] + down * hidden.slope[:, None]) @ self.hidden.weight
        charge = (up * hidden.omega[:, None]).to(gained.dtype) @ gained.clamp(min=0).flatten(2)
        total = self._earned(linear, first, per_move) + charge.unflatten(2, gained.shape[2:])
        total = total.to(x.dtype)
        rings = [(total.amax(2), 1.0), (self._diagonal(total).amax(2), math.sqrt(2))]
        return logits, _most(rings, mass, budget)

    def _earned(self, rows: Tensor, lines: _Lines, per_move: Tensor) -> Tensor:
        """``(B, R, moves, pixels)``: what each move out of each pixel adds to rows ``(B, R, units)`` at most."""
        dtype = torch.bfloat16 if self.bf16 else rows.dtype
        up, down = rows.to(dtype).clamp(min=0), rows.to(dtype).clamp(max=0)
        beta, slope, omega = (v.to(dtype)[:, None] for v in (lines.beta, lines.slope, lines.omega))
        out = torch.cat([up * beta + down * slope, up * omega], 2) @ per_move.to(dtype)
        return out.unflatten(2, (len(STRAIGHT), -1))

    def _diagonal(self, gains: Tensor) -> Tensor:
        """What diagonal moves earn at most: one straight move after the other, in the better order."""
        maps = gains.unflatten(3, self.image)
        height, width = self.image[1:]

        def then(one: int, two: int) -> Tensor:
            r, c = STRAIGHT[one]
            wide = F.pad(maps[:, :, two], (1,) * 4)
            return maps[:, :, one] + wide[..., 1 + r : 1 + r + height, 1 + c : 1 + c + width]

        corners = [(0, 1), (0, 2), (3, 1), (3, 2)]
        return torch.stack([torch.minimum(then(a, b), then(b, a)).flatten(2) for a, b in corners], 2)

    def _convolved(self, x: Tensor) -> Tensor:
        for op in self.before:
            x = op.forward(x)
        return self.first.forward(x)

    def _kernel(self) -> Tensor:
        kernel = self.first.weight
        for op in self.before:
            kernel = kernel * op.scale.to(kernel.dtype).view(1, -1, 1, 1)
        return kernel

    def _per_move(self, kernel: Tensor) -> Tensor:
        """What each move does to each unit, and under it the positive part: ``(2 units, moves x pixels)``."""
        units = math.prod(self.first.shape)
        every = torch.eye(units, dtype=kernel.dtype, device=kernel.device).reshape(units, *self.first.shape)
        gain = _differences(kernel, STRAIGHT).flatten(1, 2)
        out = F.conv_transpose2d(every, torch.cat([gain, gain.clamp(min=0)], 1), stride=self.first.stride)
        (top, left), (height, width) = (tuple(p + 1 for p in self.first.padding), self.image[1:])
        out = F.pad(out, (0, max(0, left + width - out.shape[3]), 0, max(0, top + height - out.shape[2])))
        out = out[:, :, top : top + height, left : left + width].unflatten(1, (2, len(STRAIGHT), -1)) * self.inside
        return out.flatten(2).transpose(0, 1).flatten(0, 1)

    def _first_reach(self, x: Tensor, kernel: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        """How far the units of the convolution can fall and rise, at the best of a few prices."""
        gain = _differences(kernel, STRAIGHT + DIAGONAL)
        fee = torch.tensor([1.0] * 4 + [math.sqrt(2)] * 4, dtype=x.dtype, device=x.device).view(1, 8, 1, 1, 1)
        padding = [p + 1 for p in self.first.padding]
        out = []
        for sign in (-1.0, 1.0):
            steep = (sign * gain / fee).flatten(1).amax(1)
            prices = [share * steep for share in PRICES]
            most = [(sign * gain - psi.view(-1, 1, 1, 1, 1) * fee).amax(1).clamp(min=0) for psi in prices]
            moved = F.conv2d(HOPS * x, torch.cat(most), stride=self.first.stride, padding=padding)
            spent = budget[:, None, None] * torch.stack(prices)
            out.append((moved.unflatten(1, (len(PRICES), -1)) + spent[..., None, None]).amin(1))
        return out[0], out[1]


class _Lines:
    """Slope, bend and the activation's own slope of each unit, ``(B, units)``."""

    def __init__(self, centre: Tensor, fall: Tensor, rise: Tensor) -> None:
        centre, room = centre.flatten(1), ROOM * (1 + centre.detach().abs().flatten(1))
        # Units that nothing can move would have 0 / 0 in the gradient of lines that are not used.
        low, up = centre - fall.flatten(1) - room, centre + rise.flatten(1) + room
        self.omega, self.beta, _, _ = anchored_line(low, up, centre, 0.0, *upper_line(low, up, 0.0))
        self.slope = (centre > 0).to(centre.dtype)


def _first(graph: Graph, before: list[Diagonal]) -> bool:
    """Whether all scaling is of the image's channels, before anything else."""
    after = [k for k, op in enumerate(graph.ops) if k and not isinstance(op, Diagonal)]
    return all(op.scale.shape[2:] == (1, 1) for op in before) and after[0] == 1 + len(before)


def _differences(kernel: Tensor, moves: tuple[tuple[int, int], ...]) -> Tensor:
    """What each move out of each place around a kernel adds to its unit, ``(F, moves, C, k + 2, k + 2)``."""
    wide, wider = F.pad(kernel, (1,) * 4), F.pad(kernel, (2,) * 4)
    height, width = wide.shape[2:]
    return torch.stack([wider[..., 1 + r : 1 + r + height, 1 + c : 1 + c + width] - wide for r, c in moves], 1)


def _most(rings: list[tuple[Tensor, float]], mass: Tensor, budget: Tensor) -> Tensor:
    r"""``min over psi of psi E + sum_i x_i max_d (G_d - psi d)^+``, ``(B, R)``, differentiable in the gains.

    ``rings`` has the best gains ``(B, R, pixels)`` of the moves of each cost ``d``.
    """
    limit = budget[:, None]

    def value(psi: Tensor) -> Tensor:
        best = torch.stack([gain - fee * psi[..., None] for gain, fee in rings]).amax(0).clamp(min=0)
        return (best * mass).sum(2) + psi * limit

    with torch.no_grad():
        low = torch.zeros_like(rings[0][0][..., 0])
        high = torch.stack([gain.amax(2) / fee for gain, fee in rings]).amax(0).clamp(min=0)
        for _ in range(ROUNDS):
            psi = 0.5 * (low + high)
            best, paid = torch.zeros_like(rings[0][0]), torch.zeros_like(rings[0][0])
            for gain, fee in rings:
                score = gain - fee * psi[..., None]
                paid = torch.where(score > best, fee, paid)
                best = torch.maximum(score, best)
            dear = (paid * mass).sum(2) > limit
            low, high = torch.where(dear, psi, low), torch.where(dear, high, psi)
    return value(high)
