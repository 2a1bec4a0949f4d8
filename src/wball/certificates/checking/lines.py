r"""Lines below and above functions of one number, with every rounding error accounted for.

A function is a chain of operations on one number. A :class:`Span` carries intervals through it, all
rounded outward: of its values, of its slopes, and of what the model's precision adds to a value. An
interval is cut into cells. On a cell with centre ``c`` and half width ``r``, for
``g(v) = f(v) - k v`` and slopes of ``f`` between ``s`` and ``S``, the mean value theorem gives
``|g(v) - g(c)| <= r max(|s - k|, |S - k|)``. The least of these lower bounds over the cells is the
shift of a line with slope ``k`` below the function, the largest upper bound that of one above it.

Values and slopes of the functions themselves are those of the table in which users register more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wball.certificates.curves import FUNCTIONS

UNIT = 2.0**-53
CELLS = 128
GROUP = 2**11
"""Units whose lines are found at a time."""

ULPS = 16
"""By how many units in the last place a function of PyTorch may be off."""

OUTWARD, LEAST = 2.0**-47, 1e-300
"""By how much intervals in float64 are rounded outward, relative and absolute."""


class Unfollowed(TypeError):
    """The checker does not support the ball or the model. The message names the reason."""


def gamma(terms: float) -> float:
    """Relative error of a sum of ``terms`` products in any order, including the error of computing
    this bound."""
    return 2 * (terms + 4) * UNIT


def known(values: Tensor, otherwise: float) -> Tensor:
    """The values, with ``otherwise`` in the place of NaN."""
    return torch.where(values.isnan(), otherwise, values)


def interval(*ends: Tensor) -> Tensor:
    """The interval ``(2, ...)`` around all ``ends``, rounded outward; every number if one is
    NaN."""
    every = torch.stack(ends)
    low, high = every.amin(0), every.amax(0)
    low, high = low - OUTWARD * low.abs() - LEAST, high + OUTWARD * high.abs() + LEAST
    return torch.stack([known(low, -math.inf), known(high, math.inf)])


def product(a: Tensor, b: Tensor) -> Tensor:
    """The interval of products; 0 times infinity is 0."""
    return interval(*(a[:, None] * b).flatten(0, 1).nan_to_num(0.0, math.inf, -math.inf))


@dataclass(frozen=True)
class Span:
    """What is known about a function on intervals of its argument.

    Attributes:
        value: the interval of its values; ``slope``: of its slopes.
        error: what the value may be off by in the precision ``kind``; infinite if it may overflow.
    """

    value: Tensor
    slope: Tensor
    error: Tensor
    kind: torch.finfo

    @property
    def size(self) -> Tensor:
        return self.value.abs().amax(0) + self.error

    def becomes(self, value: Tensor, slope: Tensor, error: Tensor, ulps: float = 1.0) -> Span:
        """The result of an operation that adds ``ulps`` to ``error``."""
        kind, size = self.kind, value.abs().amax(0)
        error = error * (1 + 1e-9) + ulps * kind.eps * size + kind.tiny
        error = torch.where(size <= kind.max / 2, known(error, math.inf), math.inf)
        return Span(value, slope, error, kind)


Operand = Span | Tensor | float


def _spans(*operands: Operand) -> list[Span]:
    """Operands as spans; constants have slope 0."""
    like = next(a for a in operands if isinstance(a, Span))

    def constant(number: Tensor | float) -> Span:
        value = torch.as_tensor(number, dtype=torch.float64).expand_as(like.value)
        return Span(value, torch.zeros_like(value), torch.zeros_like(like.error), like.kind)

    return [a if isinstance(a, Span) else constant(a) for a in operands]


# ---- operations


def _add(a: Operand, b: Operand, *, alpha: float = 1.0) -> Span:
    a, b = _spans(a, b)
    b = b if alpha == 1 else _multiply(b, alpha)
    value, slope = interval(*a.value + b.value), interval(*a.slope + b.slope)
    return a.becomes(value, slope, a.error + b.error)


def _multiply(a: Operand, b: Operand) -> Span:
    if a is b:
        return _power(a, 2)
    a, b = _spans(a, b)
    slope = interval(*product(a.slope, b.value) + product(b.slope, a.value))
    return a.becomes(product(a.value, b.value), slope, a.size * b.error + b.size * a.error)


def _function_of(bounds: Callable[..., tuple[Tensor, ...]], a: Span) -> Span:
    """The chain rule, for a function with ``bounds`` of its values and slopes on intervals."""
    least, most, fall, rise = bounds(*interval(a.value[0] - a.error, a.value[1] + a.error))
    slope = interval(fall, rise)
    steep = slope.abs().amax(0)
    return a.becomes(interval(least, most), product(slope, a.slope), steep * a.error, ULPS)


def _function(name: str, a: Span) -> Span:
    return _function_of(FUNCTIONS[getattr(torch.ops.aten, name).default], a)


def _square(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    nearest, furthest = (
        torch.maximum(low, -high).clamp(min=0.0),
        torch.maximum(low.abs(), high.abs()),
    )
    return nearest**2, furthest**2, 2 * low, 2 * high


def _power(a: Any, n: Any) -> Span:
    if not isinstance(a, Span) or not isinstance(n, (int, float)):
        raise Unfollowed("the checker does not follow exponents that are not numbers")
    if n <= 0 or n % 1:
        return _function("exp", _multiply(_function("log", a), n))
    if n % 2 == 0:
        return _power(_function_of(_square, a), n / 2)
    return a if n == 1 else _multiply(_power(a, n - 1), a)


def _greater(a: Operand, b: Operand) -> Span:
    """Whether ``a > b``, as 0 or 1. Both where the model may see it either way: its choice is among
    them, and nothing is known about slopes."""
    a, b = _spans(a, b)
    room, (low, high) = a.error + b.error, interval(*a.value - b.value.flip(0))
    yes, no = low > room, high < -room
    jump = torch.where(yes | no, 0.0, math.inf)
    return Span(torch.stack([yes, ~no]).double(), torch.stack([-jump, jump]), 0 * room, a.kind)


def _where(condition: Operand, a: Operand, b: Operand) -> Span:
    chosen, a, b = _spans(condition, a, b)
    jump = torch.full_like(a.error, math.inf)

    def pick(yes: Tensor, no: Tensor, either: Tensor) -> Tensor:
        return torch.where(chosen.value[0] == 1, yes, torch.where(chosen.value[1] == 0, no, either))

    value = pick(a.value, b.value, interval(*a.value, *b.value))
    error = pick(a.error, b.error, torch.maximum(a.error, b.error))
    return Span(value, pick(a.slope, b.slope, torch.stack([-jump, jump])), error, a.kind)


OPERATIONS: dict[str, Callable[..., Span]] = {
    "add": _add,
    "sub": lambda a, b, *, alpha=1.0: _add(a, b, alpha=-alpha),
    "mul": _multiply,
    "div": lambda a, b: _multiply(a, _function("reciprocal", _spans(a, b)[1])),
    "neg": lambda a: _multiply(a, -1.0),
    "pow": _power,
    "gt": _greater,
    "ge": _greater,
    "lt": lambda a, b: _greater(b, a),
    "le": lambda a, b: _greater(b, a),
    "logical_not": lambda a: replace(a, value=1 - a.value.flip(0)),
    "where": _where,
    "_to_copy": lambda a: a.becomes(a.value, a.slope, a.error),
    **dict.fromkeys(("clone", "alias", "detach"), lambda a: a),
}
"""What operations do to spans and constants, beside :data:`FUNCTIONS`."""


def apply(name: str, target: Any, *args: Operand, **settings: Any) -> Span:
    """What an operation of the program does to spans and constants."""
    if name in OPERATIONS:
        return OPERATIONS[name](*args, **settings)
    return _function_of(FUNCTIONS[target], *args)  # type: ignore[arg-type]


# ---- lines

Function = Callable[[Span, Tensor], Span]
"""A function of one number: of a span, and of the units that it is about."""


def follow(function: Function, low: Tensor, high: Tensor, unit: Tensor, kind: torch.finfo) -> Span:
    """What a function does on the intervals ``[low, high]``."""
    value = torch.stack([low, high])
    return function(Span(value, torch.ones_like(value), 0 * low, kind), unit)


@dataclass(frozen=True)
class LinePair:
    """``under v + under_shift <= f(v) <= over v + over_shift``, flat, for the values that the
    model computes; they are between ``least`` and ``most``. No term is larger than ``size``."""

    under: Tensor
    under_shift: Tensor
    over: Tensor
    over_shift: Tensor
    least: Tensor
    most: Tensor
    size: Tensor


def lines(function: Function, low: Tensor, high: Tensor, kind: torch.finfo) -> LinePair:
    """Of lines with a few slopes, the highest one below and the lowest one above the function,
    compared at the middle of each interval."""
    units = torch.arange(len(low)).split(GROUP)
    parts = [_lines(function, low[unit], high[unit], unit, kind) for unit in units]
    return LinePair(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))


def _lines(
    function: Function, low: Tensor, high: Tensor, unit: Tensor, kind: torch.finfo
) -> LinePair:
    half = (high - low) / CELLS / 2
    centre = low + (2 * torch.arange(CELLS, dtype=torch.float64)[:, None] + 1) * half
    half = half * (1 + 1e-9) + 1e-15 * (low.abs() + high.abs())
    at, cell = (follow(function, centre - r, centre + r, unit, kind) for r in (0 * half, half))
    chord = (at.value[0, -1] - at.value[0, 0]) / (centre[-1] - centre[0])
    tangent = cell.slope[:, CELLS // 2].mean(0)
    slopes = torch.stack([0 * chord, chord, tangent]).nan_to_num(0.0, 0.0, 0.0)
    line, below, above = slopes[:, None] * centre, list[Tensor](), list[Tensor]()
    steep = (cell.slope[:, None] - slopes[:, None]).abs().amax(0)
    for span, off in ((at, half * steep), (cell, half * slopes[:, None].abs())):
        off = off + cell.error + OUTWARD * (span.size + line.abs() + off)
        below.append(known(span.value[0] - line - off, -math.inf))
        above.append(known(span.value[1] - line + off, math.inf))
    bottom, top = torch.maximum(*below).amin(1), torch.minimum(*above).amax(1)
    most = torch.maximum(low.abs(), high.abs())
    found = [bottom[0], top[0], (slopes.abs() * most + bottom.abs() + top.abs()).amax(0)]
    middle = slopes * (low + high) / 2
    for shifts, best in ((top, (top + middle).argmin(0)), (bottom, (bottom + middle).argmax(0))):
        found = [*(part.gather(0, best[None])[0] for part in (slopes, shifts)), *found]
    return LinePair(*found)
