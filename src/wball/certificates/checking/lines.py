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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wball.certificates.curves import FUNCTIONS

CELLS = 128
GROUP = 2**13
"""Units whose lines are found at a time."""

ULPS = 16
"""By how many units in the last place a function of PyTorch may be off."""

OUTWARD, LEAST = 2.0**-47, 1e-300
"""By how much intervals in float64 are rounded outward, relative and absolute."""

Pair = tuple[Tensor, Tensor]


def known(values: Tensor, otherwise: float) -> Tensor:
    """The values, with ``otherwise`` in the place of NaN."""
    return torch.where(values.isnan(), otherwise, values)


def _outward(low: Tensor, high: Tensor) -> Pair:
    low, high = low - OUTWARD * low.abs() - LEAST, high + OUTWARD * high.abs() + LEAST
    return known(low, -math.inf), known(high, math.inf)


def _hull(*values: Tensor) -> Pair:
    every = torch.stack(values)
    return every.amin(0), every.amax(0)


def _plus(a: Pair, b: Pair) -> Pair:
    return _outward(a[0] + b[0], a[1] + b[1])


def product(a: Pair, b: Pair) -> Pair:
    """The interval of products; 0 times infinity is 0."""
    return _outward(*_hull(*((p * q).nan_to_num(0.0, math.inf, -math.inf) for p in a for q in b)))


@dataclass(frozen=True)
class Span:
    """What is known about a function on intervals of its argument.

    Attributes:
        value: an interval of its values; ``slope``: of its slopes.
        error: what the value may be off by in the precision ``kind``; infinite if it may overflow.
    """

    value: Pair
    slope: Pair
    error: Tensor
    kind: torch.finfo

    @property
    def size(self) -> Tensor:
        return torch.maximum(self.value[0].abs(), self.value[1].abs()) + self.error

    def becomes(self, value: Pair, slope: Pair, error: Tensor, ulps: float = 1.0) -> Span:
        """The result of an operation that adds ``ulps`` to ``error``."""
        kind, size = self.kind, torch.maximum(value[0].abs(), value[1].abs())
        error = error * (1 + 1e-9) + ulps * kind.eps * size + kind.tiny
        error = torch.where(size <= kind.max / 2, known(error, math.inf), math.inf)
        return Span(value, slope, error, kind)


Operand = Span | Tensor | float


def _spans(*operands: Operand) -> list[Span]:
    like = next(a for a in operands if isinstance(a, Span))
    zero = torch.zeros_like(like.error)
    numbers = (
        a if isinstance(a, Span) else zero + torch.as_tensor(a, dtype=torch.float64)
        for a in operands
    )
    return [
        a if isinstance(a, Span) else Span((a, a), (zero, zero), zero, like.kind) for a in numbers
    ]


# ---- operations


def _add(a: Operand, b: Operand, *, alpha: float = 1.0) -> Span:
    scaled = _multiply(b, alpha) if alpha != 1 and isinstance(b, Span) else b
    a, b = _spans(a, scaled if isinstance(b, Span) else b * alpha)
    return a.becomes(_plus(a.value, b.value), _plus(a.slope, b.slope), a.error + b.error)


def _subtract(a: Operand, b: Operand, *, alpha: float = 1.0) -> Span:
    return _add(a, b * -alpha if not isinstance(b, Span) else _multiply(b, -alpha))


def _multiply(a: Operand, b: Operand) -> Span:
    if a is b:
        return _power(a, 2)
    a, b = _spans(a, b)
    slope = _plus(product(a.slope, b.value), product(b.slope, a.value))
    return a.becomes(product(a.value, b.value), slope, a.size * b.error + b.size * a.error)


def _apply(bounds: Callable[[Tensor, Tensor], tuple[Tensor, ...]], a: Span) -> Span:
    """The chain rule, for a function with ``bounds`` of its values and slopes on intervals."""
    least, most, fall, rise = bounds(a.value[0] - a.error, a.value[1] + a.error)
    steep = torch.maximum(fall.abs(), rise.abs())
    slope = product(_outward(fall, rise), a.slope)
    return a.becomes(_outward(least, most), slope, steep * a.error, ULPS)


def _named(name: str) -> Callable[[Span], Span]:
    function = FUNCTIONS[getattr(torch.ops.aten, name).default]
    return lambda a: _apply(function, a)


def _divide(a: Operand, b: Operand) -> Span:
    return _multiply(a, _named("reciprocal")(b) if isinstance(b, Span) else 1 / b)


def _power(a: Operand, exponent: Any) -> Span:
    if not isinstance(a, Span):
        return _named("exp")(_multiply(exponent, math.log(float(a))))
    n = float(exponent)
    if not (n > 0 and n.is_integer()):
        return _named("exp")(_multiply(_named("log")(a), n))

    def bounds(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        nearest = torch.maximum(low, -high).clamp(min=0.0)
        sized, signed = (nearest, torch.maximum(low.abs(), high.abs())), (low, high)
        values, slopes = (sized, signed) if n % 2 == 0 else (signed, sized)
        return *(v**n for v in values), *(n * v ** (n - 1) for v in slopes)

    return _apply(bounds, a)


def _greater(a: Operand, b: Operand) -> Span:
    """Whether ``a > b``, as 0 or 1; the model may see it otherwise where they are nearly equal."""
    a, b = _spans(a, b)
    room = a.error + b.error
    yes, no = a.value[0] - b.value[1] > room, a.value[1] - b.value[0] < -room
    jump = torch.where(yes | no, 0.0, math.inf)
    error = torch.where(yes | no | (room == 0), 0.0, 1.0)
    return Span((yes.double(), 1 - no.double()), (-jump, jump), error, a.kind)


def _not(a: Span) -> Span:
    return replace(a, value=(1 - a.value[1], 1 - a.value[0]))


def _where(condition: Operand, a: Operand, b: Operand) -> Span:
    chosen, a, b = _spans(condition, a, b)
    low, high = _hull(a.value[0], b.value[0])[0], _hull(a.value[1], b.value[1])[1]
    error = torch.maximum(a.error, b.error) + torch.where(chosen.error > 0, high - low, 0.0)
    jump = torch.full_like(error, math.inf)

    def pick(yes: Tensor, no: Tensor, either: Tensor) -> Tensor:
        return torch.where(chosen.value[0] == 1, yes, torch.where(chosen.value[1] == 0, no, either))

    low, high = map(pick, a.value, b.value, (low, high))
    fall, rise = map(pick, a.slope, b.slope, (-jump, jump))
    return Span((low, high), (fall, rise), pick(a.error, b.error, error), a.kind)


def _same(a: Span, **settings: Any) -> Span:
    return a


OPERATIONS: dict[str, Callable[..., Span]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "div": _divide,
    "neg": lambda a: _multiply(a, -1.0),
    "pow": _power,
    "gt": _greater,
    "ge": _greater,
    "lt": lambda a, b: _greater(b, a),
    "le": lambda a, b: _greater(b, a),
    "logical_not": _not,
    "where": _where,
    **dict.fromkeys(("clone", "alias", "detach", "_to_copy"), _same),
}
"""What operations do to spans and constants, beside :data:`FUNCTIONS`."""


# ---- chains


class Place(int):
    """Which value of a chain an argument is: 0 for its argument, ``k`` for the result of step
    ``k``."""


@dataclass(frozen=True)
class Link:
    """One operation of a chain; tensors among its arguments are flat, one number for each unit."""

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def take(self, index: Tensor) -> Link:
        """The same for some of the units."""
        args = tuple(a[index] if isinstance(a, Tensor) else a for a in self.args)
        return replace(self, args=args)


Chain = tuple[Link, ...]


def follow(chain: Chain, low: Tensor, high: Tensor, kind: torch.finfo) -> Span:
    """What a chain does on the intervals ``[low, high]``."""
    one = torch.ones_like(low)
    values = [Span((low, high), (one, one), 0 * one, kind)]
    for step in chain:
        args = (values[a] if isinstance(a, Place) else a for a in step.args)
        if step.name in OPERATIONS:
            values.append(OPERATIONS[step.name](*args, **step.kwargs))
        else:
            values.append(_apply(FUNCTIONS[step.target], *args))
    return values[-1]


@dataclass(frozen=True)
class LinePair:
    """``under v + under_shift <= f(v) <= over v + over_shift``, flat, for the values that the
    model computes; they are between ``least`` and ``most``."""

    under: Tensor
    under_shift: Tensor
    over: Tensor
    over_shift: Tensor
    least: Tensor
    most: Tensor


def lines(chain: Chain, low: Tensor, high: Tensor, kind: torch.finfo) -> LinePair:
    """Of lines with a few slopes, the highest one below and the lowest one above the function,
    compared at the middle of each interval."""
    parts = [
        _lines(tuple(step.take(part) for step in chain), low[part], high[part], kind)
        for part in torch.arange(len(low)).split(GROUP)
    ]
    return LinePair(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))


def _lines(chain: Chain, low: Tensor, high: Tensor, kind: torch.finfo) -> LinePair:
    finite = torch.isfinite(low) & torch.isfinite(high)
    start, end = (torch.where(finite, side, 0.0) for side in (low, high))
    middle, half = (start + end) / 2, (end - start) / CELLS / 2
    centre = start + (2 * torch.arange(CELLS, dtype=torch.float64)[:, None] + 1) * half
    half = half * (1 + 1e-9) + 1e-15 * (start.abs() + end.abs())
    at, cell = (follow(chain, centre - r, centre + r, kind) for r in (0 * half, half))
    whole = follow(chain, low, high, kind)

    def heights(slope: Tensor) -> Pair:
        """The least and the largest height over a line through 0."""
        steep = torch.maximum((cell.slope[0] - slope).abs(), (cell.slope[1] - slope).abs())
        found = []
        for span, off in ((at, half * steep), (cell, half * slope.abs())):
            line = slope * centre
            off = off + cell.error + OUTWARD * (span.size + line.abs() + off)
            low, high = span.value[0] - line - off, span.value[1] - line + off
            found.append((known(low, -math.inf), known(high, math.inf)))
        (low, high), (least, most) = found
        return torch.maximum(low, least).amin(0), torch.minimum(high, most).amax(0)

    least, most = heights(torch.zeros_like(middle))
    ends = whole.value[0] - whole.error, whole.value[1] + whole.error
    least = known(torch.where(finite, torch.maximum(least, ends[0]), ends[0]), -math.inf)
    most = known(torch.where(finite, torch.minimum(most, ends[1]), ends[1]), math.inf)
    flat = torch.zeros_like(middle)
    found = LinePair(flat, least, flat, most, least, most)
    chord = (at.value[0][-1] - at.value[0][0]) / (centre[-1] - centre[0])
    tangent = (cell.slope[0] + cell.slope[1])[CELLS // 2] / 2
    for slope in (chord, tangent, flat + 1):
        slope = slope.nan_to_num(0.0, 0.0, 0.0)
        bottom, top = heights(slope)
        higher = finite & (bottom + slope * middle > found.under_shift + found.under * middle)
        lower = finite & (top + slope * middle < found.over_shift + found.over * middle)
        found = LinePair(
            torch.where(higher, slope, found.under),
            torch.where(higher, bottom, found.under_shift),
            torch.where(lower, slope, found.over),
            torch.where(lower, top, found.over_shift),
            least,
            most,
        )
    return found
