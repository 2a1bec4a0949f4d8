r"""Bounds of many nodes at once: slopes, anchors, multipliers of splits and box prices, improved by
Adam.

A split fixes the sign ``sigma`` of a unit ``v``. In that node ``m >= m - beta sigma v`` for any
``beta >= 0``: this adds ``-beta sigma`` to the coefficient of ``v``, which is carried back like any
other, so the input set need not know of splits (beta-CROWN; Wang et al., 2021). All searching is
done in float32; the bound that counts is evaluated once in float64 from what was found, and rounded
down as in :mod:`wball.certificates.relaxation`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wball.certificates.anchor import Anchor, UnitAnchor, charge, gain_bytes
from wball.certificates.complete.nodes import Nodes, State
from wball.certificates.graph import Graph, Relu, back
from wball.certificates.relaxation import (
    Bounds,
    Relaxation,
    anchored_line,
    relaxed,
    upper_line,
)
from wball.input_sets import InputSet
from wball.input_sets.rows import Charges, Rows
from wball.inputs import dot, per_image

RATES = {"alpha": 1.0, "share": 1.0, "beta": 3.0, "box": 0.07}
"""Step lengths of Adam by kind, relative; those of the box are in units of a row's largest
coefficient, those of splits in units of the coefficient that the margin has on their unit."""

FORGET = 0.9, 0.9
"""Of both of Adam's averages, each step."""

ENOUGH = 1e-3
"""The bound in float32 that is enough: what counts may be a little lower."""

CANDIDATES, TRIED = 8, 1024
"""Units whose splits are tried before one is chosen. On a hard digit of a network trained for l-inf
balls the best score alone left 53 nodes open after 96 splits, 8 candidates 12 after 149, and 24
candidates 13 in the same time. And halves that are bounded together."""


@dataclass
class Problems:
    """Pairs of an image and a competing class, with bounds of every unit.

    Attributes:
        x, y, other: images, labels, and classes, one per problem.
        source: the input set of the problems.
        bounds: of every relaxed operation, where ``m <= 0`` or everywhere.
        anchors: by operation, with the units' values at the images.
        index: the number each problem has in the search.
    """

    graph: Graph
    x: Tensor
    y: Tensor
    other: Tensor
    source: InputSet
    bounds: Bounds
    anchors: dict[int, tuple[UnitAnchor, Tensor]]
    index: Tensor

    def take(self, index: Tensor) -> Problems:
        x, y, other = (part[index] for part in (self.x, self.y, self.other))
        anchors = {k: (anchor.take(index), at[index]) for k, (anchor, at) in self.anchors.items()}
        source, bounds = self.source.take(index), self.bounds.take(index)
        return Problems(self.graph, x, y, other, source, bounds, anchors, self.index[index])

    def __len__(self) -> int:
        return self.y.shape[0]

    def copied(self) -> tuple[Problems, Bounds]:
        """The problems with bounds that may be overwritten, and these."""
        found = self.take(torch.arange(len(self), device=self.y.device))
        return found, found.bounds

    def split_layers(self) -> list[int]:
        """Positions of the operations whose units can be split."""
        return list(self.graph.names())

    def start(self) -> Nodes:
        """One node without splits for every problem, with slopes that are exact at the image."""
        state: State = {}
        for position in self.split_layers():
            low, up = (b[position].float() for b in (self.bounds.lower, self.bounds.upper))
            centre = torch.full_like(low, math.inf)
            if position in self.anchors:
                centre = self.anchors[position][1].float()
            steep = torch.where((low < centre) & (centre < up), centre > 0, up > -low)
            state["alpha", position] = steep.float()
            state["share", position] = torch.ones_like(low)
            state["beta", position] = torch.zeros_like(low)
            state["sign", position] = torch.zeros_like(low)
        everyone = torch.arange(len(self), device=self.y.device)
        prices = self.source.box_prices(
            Rows(torch.zeros_like(self.x, dtype=torch.float32), everyone)
        )
        if prices is not None:
            state["box", 0] = prices
        bound = torch.full((len(self),), -math.inf, dtype=torch.float64, device=self.y.device)
        return Nodes(everyone, bound, state)


@dataclass(frozen=True)
class Line:
    """The relaxation of one operation, used to choose splits."""

    coeff: Tensor
    slope: Tensor
    shift: Tensor
    bend: Tensor
    under: Tensor
    depth: Tensor  # positive where the unit is unstable


@dataclass(frozen=True)
class Traced:
    """Lower bounds ``(N,)`` of the margins, with the rows, charges and lines that they use."""

    value: Tensor
    rows: Rows
    charges: Charges | None
    largest: Tensor  # of minus the rows plus charges
    constant: Tensor
    weights: dict[int, Tensor]  # of units that anchors charge
    lines: dict[int, Line]


def trace_back(
    problems: Problems, nodes: Nodes, dtype: torch.dtype = torch.float32, leaves: bool = False
) -> Traced:
    """Bound the margin in every node, in that precision; in float64 the bound is sound.

    With ``leaves`` the value is differentiable in the image rows and in the weights of charges, and
    in nothing else.
    """
    graph, state, problem = problems.graph, nodes.state, nodes.problem
    charged: dict[int, tuple[Anchor, Rows]] = {}
    lines: dict[int, Line] = {}
    sizes: list[Tensor] = []

    def relax(position: int, rows: Rows) -> tuple[Tensor, list[Rows]]:
        op = graph.ops[position]
        if not isinstance(op, Relu):
            constant, parts, size = relaxed(graph, position, rows, problems.bounds)
            sizes.append(size)
            return constant, parts
        rows = rows.dense(op.shape)
        above, below = rows.coeff.clamp(max=0), rows.coeff.clamp(min=0)
        sign, alpha, share, beta = (
            state[kind, position].to(dtype) for kind in ("sign", "alpha", "share", "beta")
        )
        low, up = (
            table[position].to(dtype)[problem]
            for table in (problems.bounds.lower, problems.bounds.upper)
        )
        low = torch.where(sign > 0, low.clamp(min=0), low)
        up = torch.where(sign < 0, up.clamp(max=0), up)
        slope, shift = upper_line(low, up)
        depth, bend = torch.minimum(up, -low), torch.zeros_like(slope)
        under = torch.where(depth > 0, alpha.clamp(0.0, 1.0), slope)
        if position in problems.anchors:
            anchor, centre = problems.anchors[position]
            at = centre.to(dtype)[problem]
            bend, left, begin, _ = anchored_line(low, up, at, slope, shift)
            bend, slope = bend * share, slope + share * (left - slope)
            shift = shift + share * (begin - shift)
            charged[position] = anchor, rows.like(-above * bend)
        lines[position] = Line(rows.coeff, slope, shift, bend, under, depth)
        constant = dot(above, shift)
        sizes.append(constant.detach().abs())
        return constant, [rows.like(below * under + above * slope - sign * beta)]

    target = len(graph.ops) - 1
    spec = torch.zeros((len(nodes), graph.ops[target].shape[0]), dtype=dtype, device=problem.device)
    spec.scatter_(1, problems.other[problem][:, None], -1.0)
    spec.scatter_(1, problems.y[problem][:, None], 1.0)
    # In float32 only to search: what the model's values may be off by counts in float64.
    errors = problems.bounds.errors if dtype == torch.float64 else None
    constant, rows = back(graph, target, Rows(spec, problem), relax, errors)
    rows = rows.dense(tuple(problems.x.shape[1:]))
    if leaves:
        rows = rows.like(rows.coeff.detach().requires_grad_(True))
        charged = {
            k: (anchor, w.like(w.coeff.detach().requires_grad_(True)))
            for k, (anchor, w) in charged.items()
        }
    box = state.get(("box", 0))
    read, charges = charge(problems.source, rows, list(charged.values()))
    largest = problems.source.maximum(
        read.like(-read.coeff), charges, None if box is None else box.to(dtype)
    )
    size = (
        constant.detach().abs()
        + largest.detach().abs()
        + rows.coeff.detach().abs().flatten(1).sum(1)
    )
    rounding = (graph.allowance * torch.stack([size, *sizes]).sum(0)).to(dtype)
    weights = {k: w.coeff for k, (_, w) in charged.items()}
    value = constant - largest - rounding
    return Traced(value, rows, charges, largest, constant - rounding, weights, lines)


@torch.no_grad()
def improve(
    problems: Problems, nodes: Nodes, steps: int, rate: float, deadline: float = math.inf
) -> Nodes:
    """Improve the bound of every node by Adam. Keeps the best parameters and computes a sound bound
    with them."""
    first = trace_back(problems, nodes)
    best, units = first.value, _units(first)
    held = {key: value.clone() for key, value in nodes.state.items()}
    free = {
        key: (value / units.get(key, 1.0)).requires_grad_(True)
        for key, value in held.items()
        if key[0] in RATES
    }
    # A network without activations, over a set without prices, has no parameters.
    adam = (
        torch.optim.Adam([{"params": [v]} for v in free.values()], betas=FORGET) if free else None
    )
    for step in range(steps + 1):
        if adam is None or bool((best > ENOUGH).all()) or time.monotonic() > deadline:
            break
        with torch.set_grad_enabled(step < steps):
            trial = {key: value * units.get(key, 1.0) for key, value in free.items()}
            value = trace_back(problems, replace(nodes, state={**nodes.state, **trial})).value
            loss = -value.sum()
        better = (value > best).nonzero()[:, 0]
        best[better] = value.detach()[better]
        for key, tried in trial.items():
            held[key][better] = tried.detach()[better]
        if step < steps:
            adam.zero_grad()
            loss.backward()
            for group, (kind, _) in zip(adam.param_groups, free, strict=True):
                group["lr"] = rate * RATES[kind] * 0.1 ** (step / steps)
            adam.step()
            for (kind, _), value in free.items():
                value.clamp_(0.0, 1.0 if kind in ("alpha", "share") else math.inf)
    found = replace(nodes, state=held)
    value = trace_back(problems, found, torch.float64).value
    return replace(found, bound=torch.maximum(nodes.bound, value))


def _units(traced: Traced) -> State:
    """The scale of box prices and of split multipliers, so that one step length suits all."""
    rows = traced.rows.coeff.abs()
    units = {("box", 0): per_image(rows.flatten(1).amax(1).clamp(min=1e-12), rows)}
    for position, line in traced.lines.items():
        size = line.coeff.abs()
        floor = per_image(size.flatten(1).mean(1).clamp(min=1e-12), size)
        units["beta", position] = torch.maximum(size, floor)
    return units


def choose_splits(problems: Problems, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The unit to split in each node: its operation, its position and whether there is one; and the
    image that attains the bound.

    Of the :data:`CANDIDATES` units with the best scores, it is the one whose two children have the
    best bounds with the current multipliers, measured by the product of their gains, up to 0.
    """
    scores, before, z = _scores(problems, nodes)
    if not scores:
        nothing = torch.zeros_like(nodes.problem)
        return nothing, nothing, nothing > 0, z
    sizes = torch.tensor([score.shape[1] for score in scores], device=z.device)
    layers = torch.tensor(problems.split_layers(), device=z.device)
    operation = layers.repeat_interleave(sizes)
    place = torch.cat([torch.arange(score.shape[1], device=z.device) for score in scores])
    best, index = torch.cat(scores, 1).topk(min(CANDIDATES, place.shape[0]), 1)
    position, unit = operation[index], place[index]
    gains = torch.empty_like(best)
    for some in torch.arange(len(nodes), device=z.device).split(
        max(1, TRIED // (2 * best.shape[1]))
    ):
        each = nodes.take(some.repeat_interleave(best.shape[1])).split(
            position[some].flatten(), unit[some].flatten()
        )
        with torch.no_grad():
            after = trace_back(problems, each).value.view(2, some.shape[0], -1).clamp(max=0.0)
        least = before[some][:, None]
        gains[some] = (after - least + 1e-3 * least.abs()).clamp(min=0.0).prod(0)
    first = torch.where(best >= 0, gains, -1.0).argmax(1, keepdim=True)
    return position.gather(1, first)[:, 0], unit.gather(1, first)[:, 0], best[:, 0] >= 0, z


def _scores(problems: Problems, nodes: Nodes) -> tuple[list[Tensor], Tensor, Tensor]:
    """For each operation, the estimated gain of splitting each unit, ``(N, units)``; -1 for settled
    units.

    Also returns the bounds, and the images ``z`` that attain them. At ``z`` the line of each unit
    differs from the activation by a known amount. This error times the unit's coefficient is what
    the bound loses there. It is 0 if ``z`` happens to touch the line, so the score is its geometric
    mean with the static measure ``|coefficient| min(u, -l)``.
    """
    with torch.enable_grad():
        traced = trace_back(problems, nodes, leaves=True)
        z, *paid = torch.autograd.grad(
            traced.value.sum(), [traced.rows.coeff, *traced.weights.values()], allow_unused=True
        )
    with torch.no_grad():
        # The bound's gradient in its image rows is the image that attains it, in the weights minus
        # what its plan pays.
        pays = {k: -p for k, p in zip(traced.weights, paid, strict=True) if p is not None}
        at = problems.graph.values(z)
        scores = []
        for position in problems.split_layers():
            line, v = traced.lines.get(position), at[position]
            if line is None:  # the margin does not depend on this operation
                scores.append(torch.full_like(v, -1.0).flatten(1))
                continue
            truth = v.relu()
            upper = line.shift + line.slope * v
            if position in problems.anchors:
                centre = problems.anchors[position][1].float()[nodes.problem]
                upper = upper + line.bend * pays.get(position, (v - centre).clamp(min=0, max=1e30))
            loose = (
                torch.where(line.coeff < 0, upper - truth, truth - line.under * v).clamp(min=0)
                * line.coeff.abs()
            )
            static = line.coeff.abs() * line.depth.clamp(min=0)
            score = (loose * static).sqrt() + 1e-6 * static
            scores.append(torch.where(line.depth > 0, score, -1.0).flatten(1))
    return scores, traced.value.detach(), z.detach()


def unit_anchors(relaxation: Relaxation) -> dict[int, tuple[UnitAnchor, Tensor]]:
    """The anchors of a relaxation that lists the gains of every unit."""
    found = dict[int, tuple[UnitAnchor, Tensor]]()
    for position, (anchor, centre) in relaxation.anchors.items():
        assert isinstance(anchor, UnitAnchor)
        found[position] = anchor, centre
    return found


def open_problems(
    relaxation: Relaxation, x: Tensor, y: Tensor, bounds: Bounds, image: Tensor, other: Tensor
) -> Problems:
    """The problem of each pair of an image and a competing class ``other``."""
    graph, source = relaxation.graph, relaxation.source
    anchors, every = unit_anchors(relaxation), torch.arange(y.shape[0], device=y.device)
    problems = Problems(graph, x, y, y, source, bounds, anchors, every).take(image)
    problems.other, problems.index = other, torch.arange(image.shape[0], device=y.device)
    return problems


def grouped(size: Tensor, room: float) -> list[Tensor]:
    """Indices of consecutive items whose sizes sum up to about ``room``."""
    _, counts = ((size.cumsum(0) - size) // room).unique_consecutive(return_counts=True)
    return list(torch.arange(size.shape[0], device=size.device).split(counts.tolist()))


def together(problems: Problems, room: int) -> list[Tensor]:
    """Group problems whose gains take about ``room`` bytes: tightening gives each problem its own
    gains."""
    if not problems.anchors:
        return [torch.arange(len(problems), device=problems.y.device)]
    units = [problems.bounds.unstable(k).flatten(1).sum(1) for k in problems.anchors]
    return grouped(gain_bytes(problems.source) * torch.stack(units).sum(0), room)
