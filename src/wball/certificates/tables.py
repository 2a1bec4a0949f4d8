"""Tables of numbers, and rows that are each multiplied by their own table.

Gains of units are such tables, and few of them are not 0: a unit of a first convolution gains from
moves next to its
window alone. On a CPU a product reads only those. And what an optimiser sends back is nearly all
zeros, because of all moves of a source only the best one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DENSE = 0.2
"""Share of numbers that are not 0 from which on a table is multiplied as a whole."""

MANY = 64
"""Rows for which a table's numbers are listed; for an optimiser, which multiplies it again
and again, always."""


@dataclass
class Tables:
    """``values`` (tables, U, M); on a CPU with lists of what is not 0, made when they are
    needed first.
    """

    values: Tensor
    lists: dict[int, tuple[Tensor, Tensor, Tensor] | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.values.shape[0]

    def times(self, table: int, weight: Tensor, again: bool = False) -> Tensor:
        """Rows ``weight`` (n, U) times one table; ``again``: it will be multiplied many times."""
        listed = (
            self._listed(table, again or weight.shape[0] >= MANY)
            if weight.device.type == "cpu"
            else None
        )
        if listed is None:
            return weight @ self.values[table].to(weight.dtype)
        unit, start, value = listed
        each = value.to(weight.dtype)
        return F.embedding_bag(
            unit, weight.T.contiguous(), start, mode="sum", per_sample_weights=each
        ).T

    def times_transposed(self, table: int, slope: Tensor) -> Tensor:
        """Rows ``slope`` (n, M), most of whose columns are 0, times a transposed table."""
        used = (slope != 0).any(0).nonzero()[:, 0]
        return slope[:, used] @ self.values[table].index_select(1, used).to(slope.dtype).T

    def _listed(self, table: int, pays: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """Units and values of what is not 0, column by column, and where columns start; ``None`` if
        that is too much.

        The numbers of a column are added in the order of units.
        """
        if table not in self.lists and pays:
            values = self.values[table]
            some = values != 0
            if int(some.sum()) > DENSE * values.numel():
                self.lists[table] = None
            else:
                column, unit = some.T.nonzero(as_tuple=True)
                start = torch.searchsorted(column, torch.arange(values.shape[1]))
                self.lists[table] = unit.int(), start.int(), values[unit, column]
        return self.lists.get(table)


class Spread:
    """Rows sorted into the tables they read, so that all of a table's rows meet it in one
    product.
    """

    def __init__(self, table: Tensor, tables: int) -> None:
        self.table, self.alone = table, tables == 1
        if self.alone or not table.numel():
            return
        first, last = int(table.min()), int(table.max())
        order, self.place, count = ranked(table - first, last - first + 1)
        self.order, self.there = order, table[order] - first
        self.tables = range(first, last + 1)
        self.back = torch.empty_like(order).scatter(
            0, order, torch.arange(order.shape[0], device=order.device)
        )
        self.counts = count.tolist()
        self.most = max(self.counts)

    def product(self, weight: Tensor, tables: Tables) -> Tensor:
        """Every row of ``weight`` (N, U) times its table, ``(N, M)``."""
        if not weight.shape[0]:
            return weight @ weight.new_zeros(tables.values.shape[1:])
        if weight.device.type == "cpu" and weight.requires_grad and torch.is_grad_enabled():
            product: Tensor = _Product.apply(weight, tables, self)
            return product
        # Where few tables have most of the rows, padding would cost more than it saves.
        if (
            self.alone
            or weight.device.type == "cpu"
            or self.most * len(self.counts) > 2 * weight.shape[0]
        ):
            return self.each(weight, tables.times)
        values = tables.values[self.tables.start : self.tables.stop]
        spread = weight.new_zeros((values.shape[0], self.most, weight.shape[1]))
        spread = spread.index_put((self.there, self.place), weight[self.order])
        product = spread @ values.to(weight.dtype)
        return product[self.there[self.back], self.place[self.back]]

    def each(self, rows: Tensor, times: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The rows of every table through ``times(table, rows)``, in their own order again."""
        if self.alone:
            return times(0, rows)
        parts = zip(self.tables, rows[self.order].split(self.counts), strict=True)
        return torch.cat([times(table, part) for table, part in parts if len(part)])[self.back]


class _Product(torch.autograd.Function):
    """The product with a gradient in the rows that passes over zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tables: Tables, spread: Spread) -> Tensor:
        ctx.tables, ctx.spread = tables, spread
        return spread.each(weight, lambda table, rows: tables.times(table, rows, again=True))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spread.each(slopes[0], ctx.tables.times_transposed), None, None


def ranked(group: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """An order sorted by group, the rank inside its group of each member in that order, and
    the size of each group.
    """
    order = group.argsort(stable=True)
    count = torch.bincount(group, minlength=groups)
    start = count.cumsum(0) - count
    return order, torch.arange(group.shape[0], device=group.device) - start[group[order]], count
