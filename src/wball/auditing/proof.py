r"""What a transport plan proves, checked in float64 by summing it up. Nothing is solved and nobody is believed.

A plan ``P >= 0`` that uses only the moves of the cost, sends ``x`` and delivers ``z`` proves that the distance between
them is at most ``<P, C>``. It can be written out, one number per move, or in factors, a few images
(:class:`wball.plan.FactoredPlan`), from which every move is worked out here:

.. math::
    P_{ij} = scale\; x_i\, \mathrm{softmax}_j(s_j - \psi C_{ij}) \, give_i\, keep_j \quad (i \ne j)

Of opposite moves ``i -> j`` and ``j -> i`` only the difference is made. Whatever the numbers are that came with the
plan: what is left are flows ``>= 0``, and they are asked whether any pixel sends more than it has, what arrives where,
and what it costs. Float32 points miss the sums by rounding. Mass that is missing, or too much, is charged as if it
went by the dearest move, and a plan that misses more than 1e-5 of the image's mass proves nothing.

Like :mod:`wball.auditing.audit`, which uses it, this file shares no code with the solvers or their kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.cost import DenseCost, GroundCost
from wball.plan import FactoredPlan, StoredPlan

MISSING_TOL = 1e-5
"""Of the image's mass: what may be missing in the sums of a plan."""

AT_ONCE = {"cpu": 100_000, "cuda": 40_000_000}
"""Moves that are looked at at a time: a processor's cache, a GPU's memory."""


def proved_distance(cost: GroundCost, x: Tensor, z: Tensor, plan: StoredPlan | Tensor) -> Tensor:
    """An upper bound of the distance from ``x`` to ``z``, per image in mass x pixels; inf where the plan proves none.

    Args:
        cost: what moves cost.
        x: centres, ``(B, C, H, W)``, float64.
        z: points, like ``x``.
        plan: a plan of each image: in factors, or its arcs, ``(B, C, K, H, W)`` in the order of ``cost.moves``.
    """
    moves = _Moves(cost, x)
    batch = x.shape[0]
    if not isinstance(plan, FactoredPlan):
        if not isinstance(plan, Tensor) and not hasattr(plan, "arcs"):
            raise TypeError(
                f"plan must be arcs (B, C, K, H, W) or a plan of wball.plan, got {type(plan).__name__}"
            )
        flow = plan if isinstance(plan, Tensor) else plan.arcs()
        expected = (*x.shape[:2], moves.listed, *x.shape[2:])
        if tuple(flow.shape) != expected:
            raise ValueError(
                f"plan must list its moves as (B, C, K, H, W) = {expected}, got {tuple(flow.shape)}"
            )
        given = [flow]
    else:
        given = [_like(plan, name, (batch,)) for name in ("psi", "scale")]
        given += [_like(plan, name, tuple(x.shape)) for name in ("potentials", "keep", "give")]
    size = max(1, AT_ONCE.get(x.device.type, AT_ONCE["cpu"]) // max(1, moves.count * x[:1].numel()))
    bounds = [torch.zeros(0, dtype=torch.float64, device=x.device)]
    for start in range(0, batch, size):
        part = slice(start, start + size)
        pieces = [values[part].detach().to(x.device, torch.float64) for values in given]
        check = _listed if len(given) == 1 else _rebuilt
        bounds.append(check(moves, x[part], z[part], *pieces))
    return torch.cat(bounds)


def _like(plan: FactoredPlan, name: str, shape: tuple[int, ...]) -> Tensor:
    values: Tensor = getattr(plan, name)
    if values.numel() != math.prod(shape) or len(values) != shape[0]:
        raise ValueError(f"plan.{name} must have shape {shape}, got {tuple(values.shape)}")
    return values.reshape(shape)


class _Moves:
    """Every move out of a pixel, as flow tensors ``(N, K, n)``: entry ``[k, i]`` is the move from ``i`` to its ``k``-th
    neighbour. For a window these are the offsets row by row, for a matrix of costs the pixels themselves."""

    def __init__(self, cost: GroundCost, x: Tensor) -> None:
        height, width = int(x.shape[2]), int(x.shape[3])
        self.grid, n = (height, width), height * width
        if isinstance(cost, DenseCost):
            self.window = None
            price = cost.matrix.to(x.device).T  # what is listed is ordered by where it goes
            back, staying = price.T, torch.eye(n, dtype=torch.bool, device=x.device)
            self.place = torch.arange(n, device=x.device)
        else:
            moves = cost.moves(height, width)
            down, right = max(abs(r) for r, _, _ in moves), max(abs(c) for _, c, _ in moves)
            self.window = (down, right)
            sides = (2 * down + 1, 2 * right + 1)
            table = torch.full((sides[0] * sides[1],), math.inf, dtype=torch.float64)
            place = torch.tensor([(r + down) * sides[1] + c + right for r, c, _ in moves])
            table[place] = torch.tensor([c for *_, c in moves], dtype=torch.float64)
            self.place = place.to(x.device)
            price = table.to(x.device).unsqueeze(1)
            back = price.flip(0)
            staying = torch.zeros_like(price, dtype=torch.bool)
            staying[len(price) // 2] = True
        self.count, self.listed = len(price), len(self.place)
        self.forbidden, self.staying = price.isinf(), staying
        self.cost = price.masked_fill(self.forbidden, 0.0)
        self.dearest = float(self.cost.max())
        self.wall, self.wall_back = (_wall(p) for p in (price, back))
        self.cost_back = back.masked_fill(back.isinf(), 0.0)

    def priced(self, score: Tensor, price: Tensor, *, back: bool = False) -> Tensor:
        """``score - price * cost`` in place, and -inf for the moves that do not exist."""
        cost, wall = (self.cost_back, self.wall_back) if back else (self.cost, self.wall)
        score.sub_(price * cost if wall is None else price * cost + wall)
        return score

    def spent(self, flow: Tensor) -> Tensor:
        """``(N, K, n) -> (N,)``: what it costs."""
        return (
            (flow * self.cost).sum((1, 2))
            if self.window is None
            else (flow.sum(2) * self.cost.T).sum(1)
        )

    def there(self, values: Tensor, outside: float) -> Tensor:
        """``(N, 1, n) -> (N, K, n)``: the value at the pixel where each move ends."""
        if self.window is None:
            return values.transpose(1, 2).expand(-1, -1, values.shape[2]).clone()
        down, right = self.window
        padded = F.pad(values.reshape(-1, *self.grid), (right, right, down, down), value=outside)
        windows = padded.unfold(1, 2 * down + 1, 1).unfold(
            2, 2 * right + 1, 1
        )  # much faster than F.unfold on a CPU
        moved = windows.permute(0, 3, 4, 1, 2).reshape(
            len(values), self.count, self.grid[0] * self.grid[1]
        )
        return (
            moved.contiguous()
        )  # in images of one row or column the windows are still views that overlap

    def arrived(self, flow: Tensor) -> Tensor:
        """``(N, K, n) -> (N, 1, n)``: what each pixel receives."""
        if self.window is None:
            return flow.sum(2).unsqueeze(1)
        (down, right), (height, width) = self.window, self.grid
        total = F.fold(flow, (height + 2 * down, width + 2 * right), (2 * down + 1, 2 * right + 1))
        return total[:, :, down : down + height, right : right + width].reshape(len(flow), 1, -1)


def _wall(price: Tensor) -> Tensor | None:
    """inf for moves that do not exist and 0 for others; ``None`` if all exist."""
    return (
        torch.zeros_like(price).masked_fill(price.isinf(), math.inf)
        if bool(price.isinf().any())
        else None
    )


def _rebuilt(
    moves: _Moves,
    x: Tensor,
    z: Tensor,
    psi: Tensor,
    scale: Tensor,
    s: Tensor,
    keep: Tensor,
    give: Tensor,
) -> Tensor:
    """The bound by a plan that is given by potentials."""
    channels = x.shape[1]
    x, z, s, keep, give = (
        values.reshape(-1, 1, x.shape[2] * x.shape[3]) for values in (x, z, s, keep, give)
    )
    psi, scale = (values.repeat_interleave(channels).view(-1, 1, 1) for values in (psi, scale))
    weight = moves.priced(moves.there(s, -math.inf), psi)
    top = weight.amax(1, keepdim=True)
    total = weight.sub_(top).exp_().sum(1, keepdim=True)
    sent = scale * x * give / total
    flow = weight.mul_(sent).mul_(moves.there(keep, 0.0))
    # The opposite move, seen from this end: its sender is there, and its end, with s and keep, is here.
    back = moves.priced(moves.there(sent.log() - top, -math.inf).add_(s), psi, back=True)
    flow = flow.sub_(back.exp_().mul_(keep)).clamp_(min=0).masked_fill_(moves.staying, 0.0)
    sends = flow.sum(1, keepdim=True)
    missing = (x - sends + moves.arrived(flow) - z).abs() + (sends - x).clamp(min=0)
    return _bound(moves, x, missing, flow, channels)


def _listed(moves: _Moves, x: Tensor, z: Tensor, listed: Tensor) -> Tensor:
    """The bound by a plan that lists its moves, those that stay included."""
    channels = x.shape[1]
    x, z = (values.reshape(-1, 1, x.shape[2] * x.shape[3]) for values in (x, z))
    flow = torch.zeros((len(x), moves.count, x.shape[2]), dtype=torch.float64, device=x.device)
    flow[:, moves.place] = listed.reshape(len(x), moves.listed, -1)
    inside = moves.there(torch.ones_like(x[:1]), 0.0) > 0
    impossible = (flow != 0) & (moves.forbidden | ~inside)
    flow = flow.clamp(min=0.0)  # what was negative shows as a miss in the sums
    missing = (flow.sum(1, keepdim=True) - x).abs() + (moves.arrived(flow) - z).abs()
    missing = missing.masked_fill(impossible.any(1, keepdim=True), math.inf)
    return _bound(moves, x, missing, flow, channels)


def _bound(moves: _Moves, x: Tensor, missing: Tensor, flow: Tensor, channels: int) -> Tensor:
    mass, lost, spent = (
        values.reshape(len(x) // channels, -1).sum(1) for values in (x, missing, moves.spent(flow))
    )
    bound = spent + lost * moves.dearest
    return torch.where(
        (lost <= MISSING_TOL * mass) & ~bound.isnan(), bound, torch.full_like(bound, math.inf)
    )
