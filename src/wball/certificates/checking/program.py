r"""The best parameters of a bound, from a linear program: those of a part of the ball in which bounds are known.

Variables are the plan, or the pixels, and what bends put out. An activation that may bend lies above its two slopes and
below the chord and the anchored bound, a curve between its lines, the maximum of a window above its numbers, and what
bends read between its bounds. The multipliers of these constraints are the parameters of the rows of :mod:`.bounds`.
Nothing here is trusted: what counts is the bound that those rows prove with the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wball.certificates.checking.bounds import Checker, Parameters
from wball.certificates.checking.network import Affine, Bend
from wball.certificates.checking.plans import Array, Constraints, Matrix, Transport

VARIABLES, NUMBERS = 20_000, 2**22
"""Variables of a program, and numbers of the matrices of a network, up to which programs are solved."""


@dataclass(frozen=True)
class Solution:
    """Parameters of the bound, the worst image, and for every bend what its relaxation reads and puts out there."""

    given: Parameters
    image: Tensor
    at: dict[int, tuple[Tensor, Tensor]]


@dataclass
class _Block:
    """Some constraints ``rows t <= limits`` of one bend, for some of its numbers."""

    kind: str
    bend: int
    which: Tensor
    rows: Matrix
    limits: Array


class Program:
    """The linear program of one part."""

    def __init__(self, case: Checker, base: Constraints) -> None:
        from scipy import sparse  # slow to import, and rarely needed

        self.sparse, self.case, self.base = sparse, case, base
        self.plan = base.image.shape[1]
        self.free: dict[int, Tensor] = {}  # numbers of a bend that are variables
        self.start: dict[int, int] = {}
        self.many = self.plan
        for index in case.network.bends:
            self.free[index], self.start[index] = self._free(index), self.many
            self.many += self.free[index].shape[0]
        self.blocks: list[_Block] = []
        self.ceilings: list[tuple[int, Array]] = []
        self.over: list[
            tuple[Matrix, Array]
        ] = []  # every node over the variables, and its constant
        for index, node in enumerate(case.network.nodes):
            if node is None:
                wide = sparse.csr_array((base.image.shape[0], self.many - self.plan))
                self.over.append(
                    (sparse.hstack([base.image, wide]).tocsr(), np.zeros(base.image.shape[0]))
                )
            elif isinstance(node, Affine):
                self.over.append(self._affine(node))
            else:
                self.over.append(self._bend(index, node))

    @staticmethod
    def of(case: Checker) -> Program | None:
        """The program of a part, unless it is too large."""
        network, domain = case.network, case.domain
        size = sum(
            len(node.const) * math.prod(part.shape)
            for node in network.nodes
            if isinstance(node, Affine)
            for part in node.maps
        )
        plan = domain.options if isinstance(domain, Transport) else 0
        if size > NUMBERS or plan + sum(len(case.low[k]) for k in network.bends) > VARIABLES:
            return None
        base = domain.constraints()
        return None if base is None else Program(case, base)

    # ---- the network

    def _free(self, index: int) -> Tensor:
        bend = self._at(index)
        low, high = self.case.low[bend.before], self.case.high[bend.before]
        if bend.straight:
            return ((low < 0) & (high > 0)).nonzero()[:, 0]
        if bend.windows is not None:
            return (~self.case.windows(bend)[1]).nonzero()[:, 0]
        return torch.arange(math.prod(bend.shape))

    def _at(self, index: int) -> Bend:
        bend = self.case.network.nodes[index]
        assert isinstance(bend, Bend)
        return bend

    def _affine(self, node: Affine) -> tuple[Matrix, Array]:
        numbers, const = len(node.const), node.const.numpy().copy()
        total = self.sparse.csr_array((numbers, self.many))
        for part in node.maps:
            matrix = self.sparse.csr_array(part.matrix(numbers).numpy())
            rows, shift = self.over[part.source]
            total, const = total + matrix @ rows, const + matrix @ shift
        return total, const

    def _bend(self, index: int, bend: Bend) -> tuple[Matrix, Array]:
        """A bend's numbers: variables with constraints, or a multiple of what it reads."""
        case, free = self.case, self.free[index]
        rows, const = self.over[bend.before]
        low, high = case.low[bend.before], case.high[bend.before]
        out, pick = self._variables(index, math.prod(bend.shape))
        self._ranges(index, low, high, rows, const)
        if bend.windows is not None:
            likely, sure, ceiling = case.windows(bend)
            open_windows = bend.windows[free]
            window, place = (open_windows >= 0).nonzero(as_tuple=True)
            taps = open_windows[window, place].numpy()
            which = torch.stack([free[window], place])
            self._add("pick", index, which, rows[taps] - pick[window.numpy()], -const[taps])
            self.ceilings.append((self.start[index], ceiling[free].numpy()))
            known = sure.nonzero()[:, 0].numpy()
            settled = bend.windows.gather(1, likely[:, None])[:, 0][sure].numpy()
            ones = np.ones(len(known))
            chosen = self.sparse.coo_array(
                (ones, (known, settled)), shape=(len(sure), rows.shape[0])
            ).tocsr()
            return out + chosen @ rows, chosen @ const
        some = free.numpy()
        read, shift = rows[some], const[some]
        if bend.curve:
            line = case.curves[index]
            self._line(
                "under", index, free, -1.0, line.under, line.under_shift, (read, shift, pick)
            )
            self._line("over", index, free, 1.0, line.over, line.over_shift, (read, shift, pick))
            return out, np.zeros(out.shape[0])
        fixed = torch.where(low >= 0, 1.0, bend.leak)
        fixed[free] = 0.0
        scale = fixed.numpy()
        out, shifts = out + self.sparse.diags_array(scale) @ rows, scale * const
        if not free.numel():
            return out, shifts
        one, zero = (
            torch.ones(len(free), dtype=torch.float64),
            torch.zeros(len(free), dtype=torch.float64),
        )
        self._line("steep", index, free, -1.0, one, zero, (read, shift, pick))
        self._line("flat", index, free, -1.0, bend.leak * one, zero, (read, shift, pick))
        chord, over = case.chord_above(bend)
        self._line("chord", index, free, 1.0, chord[free], over[free], (read, shift, pick))
        anchored = case.anchored_above(index, bend)
        if anchored is not None:
            anchor, slope, above, more = anchored
            assert isinstance(case.domain, Transport)
            origin, option = case.domain.moves
            count = case.domain.price.shape[0]
            gain = anchor.gain.view(len(anchor.unit), count, -1)[:, origin, option] * more[:, None]
            gains = self.sparse.csr_array(gain.numpy())
            wide = [self.sparse.csr_array((gain.shape[0], count)), gains]
            wide.append(self.sparse.csr_array((gain.shape[0], self.many - self.plan)))
            unit: Any = anchor.unit.numpy()
            own: Any = torch.searchsorted(free, anchor.unit).numpy()
            parts = rows[unit], const[unit], pick[own]
            self._line(
                "anchored",
                index,
                anchor.unit,
                1.0,
                slope,
                above,
                parts,
                self.sparse.hstack(wide).tocsr(),
            )
        return out, shifts

    def _variables(self, index: int, numbers: int) -> tuple[Matrix, Matrix]:
        """The variables of a bend among its numbers, and one by one."""
        free = self.free[index].numpy()
        column, one = self.start[index] + np.arange(len(free)), np.ones(len(free))
        out = self.sparse.coo_array((one, (free, column)), shape=(numbers, self.many)).tocsr()
        pick = self.sparse.coo_array(
            (one, (np.arange(len(free)), column)), shape=(len(free), self.many)
        ).tocsr()
        return out, pick

    def _ranges(self, index: int, low: Tensor, high: Tensor, rows: Matrix, const: Array) -> None:
        if not self.case.partial:
            return  # they say nothing that the lines do not
        for kind, sign, limit in (("floor", -1.0, low), ("ceiling", 1.0, high)):
            which = torch.isfinite(limit).nonzero()[:, 0]
            some = which.numpy()
            self._add(
                kind, index, which, sign * rows[some], sign * (limit.numpy()[some] - const[some])
            )

    def _line(
        self,
        kind: str,
        index: int,
        which: Tensor,
        side: float,
        slope: Tensor,
        above: Tensor,
        parts: tuple[Matrix, Array, Matrix],
        more: Matrix | None = None,
    ) -> None:
        """``y <= slope v + above`` (side 1), plus what moves pay, or ``y >= slope v + above`` (side -1)."""
        read, shift, pick = parts
        rows = pick - self.sparse.diags_array(slope.numpy()) @ read
        if more is not None:
            rows = rows - more
        self._add(kind, index, which, side * rows, side * (above.numpy() + slope.numpy() * shift))

    def _add(self, kind: str, index: int, which: Tensor, rows: Matrix, limits: Array) -> None:
        self.blocks.append(_Block(kind, index, which, rows.tocsr(), limits))

    # ---- solving

    def solve(self, row: Tensor, elastic: bool = False) -> Solution | None:
        """The parameters of the best bound of a row ``(1, classes)`` over the logits.

        There is none in a part without images. ``elastic`` limits may be broken by an amount that is made small: the
        parameters then give the row 0 a bound above 0, which proves that there are none.
        """
        from scipy.optimize import linprog

        sparse, base, wide = self.sparse, self.base, self.many - self.plan
        goal = self.over[-1][0].T @ row[0].numpy()
        under = sparse.hstack([base.under, sparse.csr_array((base.under.shape[0], wide))])
        equal = sparse.hstack([base.equal, sparse.csr_array((base.equal.shape[0], wide))])
        ends = np.concatenate([base.ends, np.tile([-np.inf, np.inf], (wide, 1))])
        for start, ceiling in self.ceilings:
            ends[start : start + len(ceiling), 1] = ceiling
        rows = sparse.vstack([under, *(block.rows for block in self.blocks)]).tocsr()
        limits = np.concatenate([base.limits, *(block.limits for block in self.blocks)])
        if elastic:
            parts = [
                np.full(len(b.limits), -1.0 if b.kind in ("floor", "ceiling") else 0.0)
                for b in self.blocks
            ]
            column = np.concatenate([np.zeros(len(base.limits)), *parts])[:, None]
            rows = sparse.hstack([rows, sparse.csr_array(column)]).tocsr()
            equal = sparse.hstack([equal, sparse.csr_array((equal.shape[0], 1))])
            goal, ends = np.append(goal, 1.0), np.concatenate([ends, [[0.0, np.inf]]])
        pinned: dict[str, Any] = {"A_eq": equal.tocsr(), "b_eq": base.to} if len(base.to) else {}
        found = linprog(goal, A_ub=rows, b_ub=limits, bounds=ends, method="highs", **pinned)
        if found.status != 0:
            return None
        point = found.x[: self.many]
        prices = torch.from_numpy(-np.asarray(found.ineqlin.marginals)).clamp(min=0)
        first, *rest = prices.split(
            [len(base.limits), *(len(block.limits) for block in self.blocks)]
        )
        at = {}
        for index in self.case.network.bends:
            reads = self.over[self._at(index).before]
            values = [
                torch.from_numpy(part[0] @ point + part[1]) for part in (reads, self.over[index])
            ]
            at[index] = values[0], values[1]
        image = torch.from_numpy(self.over[0][0] @ point)
        return Solution(self._parameters(first, rest), image, at)

    def _parameters(self, first: Tensor, rest: list[Tensor]) -> Parameters:
        given: Parameters = {}
        by = {
            (block.kind, block.bend): (block.which, price)
            for block, price in zip(self.blocks, rest, strict=True)
        }
        for index in self.case.network.bends:
            bend = self._at(index)
            reads = len(self.case.low[bend.before])
            paid = torch.zeros(reads, dtype=torch.float64)
            for kind, sign in (("floor", 1.0), ("ceiling", -1.0)):
                if (kind, index) in by:
                    which, price = by[kind, index]
                    paid[which] += sign * price
            given["price", index] = paid[None]
            if ("pick", index) in by:
                which, price = by["pick", index]
                assert bend.windows is not None
                mean = torch.zeros(bend.windows.shape, dtype=torch.float64)
                mean[which[0], which[1]] = price
                given["pick", index] = mean
            if ("steep", index) in by:
                which, steep = by["steep", index]
                flat = by["flat", index][1]
                slope = (steep + bend.leak * flat) / (steep + flat).clamp(min=1e-300)
                given["slope", index] = torch.zeros((1, reads), dtype=torch.float64)
                given["slope", index][0, which] = slope
                share = torch.zeros(reads, dtype=torch.float64)
                if ("anchored", index) in by:
                    unit, price = by["anchored", index]
                    share[unit] = price
                    share[which] = share[which] / (share[which] + by["chord", index][1]).clamp(
                        min=1e-300
                    )
                given["share", index] = share
        if isinstance(self.case.domain, Transport):
            given["psi", 0] = first[:1]
            if self.case.domain.box is not None:
                above, below = first[1:].chunk(2)
                given["box", 0] = (above - below)[None]
        return given
