r"""Scalar functions: their values and slopes on intervals, and lines below and above them.

A curve is a chain of operations on one number, such as ``v * sigmoid(v)``. A :class:`Jet` carries
intervals through it: of the value, of the derivative, and of what floating point may add. With
``e`` the slopes of ``g(v) = f(v) - k v`` on a cell ``[a, b]``, ``e_- <= e <= e_+``,

.. math:: g(v) \ge \max(g(a) + e_- (v - a),\; g(b) - e_+ (b - v)),

whose minimum over the cell is known in closed form; where both slopes have one sign it is at an
end. The smallest one over the cells of an interval gives the line of slope ``k`` below the curve.
Any ``k`` is sound: of a few, the one whose line is best in the middle is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CELLS = 32
"""Cells of an interval."""

ULPS = 8.0
"""Unit roundoffs, relative, that a function of PyTorch may be off by."""

ROUGH = 32.0
"""The same for the error function, which PyTorch approximates in float32."""

SINGLE = 2.0**-24
"""The unit roundoff of float32, the coarsest precision of a model."""

LARGEST = torch.finfo(torch.float32).max / 2
"""Beyond this, values may overflow in the model's precision: nothing is known about them."""

TINY = 1e-30
"""Underflow, in unit roundoffs."""

UNKNOWN = 1e150
"""Stands for what is not known. Values beyond it prove nothing (``Graph.limit``), it vanishes when
multiplied by 0, and its square is finite."""

Bounds = tuple[Tensor, Tensor, Tensor, Tensor]
"""Least and largest value, least and largest slope."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Jet:
    """Intervals of a value and of its derivative, and the error of computing it, in unit
    roundoffs."""

    low: Tensor
    high: Tensor
    fall: Tensor
    rise: Tensor
    error: Tensor

    @property
    def size(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    def off(self, error: Tensor, ulps: float) -> Jet:
        """The jet with an error, and with that of rounding the result; infinite where the value may
        overflow."""
        error = torch.where(self.size <= LARGEST, error + ulps * self.size + TINY, math.inf)
        return replace(self, error=error.nan_to_num(math.inf, math.inf))


def jets(*values: Any) -> list[Jet]:
    """Numbers as constant jets, beside at least one jet."""
    like = next(v for v in values if isinstance(v, Jet)).low

    def constant(value: Any) -> Jet:
        found = torch.as_tensor(value, dtype=like.dtype, device=like.device)
        return Jet(found, found, *[torch.zeros_like(found)] * 3)

    return [v if isinstance(v, Jet) else constant(v) for v in values]


def interval_product(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of the products of ``[a, b]`` and ``[c, d]``; 0 times infinity is 0."""
    parts = torch.stack(torch.broadcast_tensors(a * c, a * d, b * c, b * d))
    parts = parts.nan_to_num(0.0, math.inf, -math.inf)
    return parts.amin(0), parts.amax(0)


def sorted_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.minimum(a, b), torch.maximum(a, b)


# ---- functions on intervals: least and largest value, least and largest slope


def smooth(
    function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Bounds]:
    """A monotone function whose slope is monotone, or largest at 0."""

    def bounds(low: Tensor, high: Tensor) -> Bounds:
        fall, rise = sorted_pair(slope(low), slope(high))
        nearest = torch.minimum(torch.maximum(low, 0 * low), high)
        return (
            *sorted_pair(function(low), function(high)),
            fall,
            torch.maximum(rise, slope(nearest)),
        )

    return bounds


def _reciprocal(low: Tensor, high: Tensor) -> Bounds:
    known = torch.where(low * high > 0, low, math.nan)
    return smooth(torch.reciprocal, lambda v: -v.pow(-2))(known, high)


def _relu(low: Tensor, high: Tensor) -> Bounds:
    return low.relu(), high.relu(), (low >= 0).to(low), (high > 0).to(low)


def _wave(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The range of the sine on intervals."""
    ends = sorted_pair(low.sin(), high.sin())

    def holds(phase: float) -> Tensor:  # whether phase + 2 pi n is inside
        turn = 2 * math.pi
        return ((high - phase) / turn).floor() >= ((low - phase) / turn).ceil()

    unknown = ~(torch.isfinite(low) & torch.isfinite(high))
    bottom, top = holds(-math.pi / 2) | unknown, holds(math.pi / 2) | unknown
    return torch.where(bottom, -1.0, ends[0]), torch.where(top, 1.0, ends[1])


def _sin(low: Tensor, high: Tensor) -> Bounds:
    return *_wave(low, high), *_wave(low + math.pi / 2, high + math.pi / 2)


def _cos(low: Tensor, high: Tensor) -> Bounds:
    return _sin(low + math.pi / 2, high + math.pi / 2)


FUNCTIONS: dict[Any, Callable[[Tensor, Tensor], Bounds]] = {
    aten.exp.default: smooth(torch.exp, torch.exp),
    aten.expm1.default: smooth(torch.expm1, torch.exp),
    aten.log.default: smooth(torch.log, torch.reciprocal),
    aten.log1p.default: smooth(torch.log1p, lambda v: 1 / (1 + v)),
    aten.sqrt.default: smooth(torch.sqrt, lambda v: 0.5 * v.rsqrt()),
    aten.rsqrt.default: smooth(torch.rsqrt, lambda v: -0.5 * v.pow(-1.5)),
    aten.reciprocal.default: _reciprocal,
    aten.tanh.default: smooth(torch.tanh, lambda v: v.cosh().pow(-2)),
    aten.sigmoid.default: smooth(torch.sigmoid, lambda v: v.sigmoid() * (-v).sigmoid()),
    aten.erf.default: smooth(torch.erf, lambda v: 2 / math.sqrt(math.pi) * (-v.square()).exp()),
    aten.atan.default: smooth(torch.atan, lambda v: 1 / (1 + v.square())),
    aten.sin.default: _sin,
    aten.cos.default: _cos,
    aten.relu.default: _relu,
}
"""Functions of one number. Where one is not defined, its bounds are NaN or infinite."""


# ---- operations on jets


def apply(target: Any, jet: Jet) -> Jet:
    """The chain rule."""
    low, high, fall, rise = FUNCTIONS[target](jet.low, jet.high)
    error = (torch.maximum(fall.abs(), rise.abs()) * jet.error).nan_to_num(0.0, math.inf)
    found = Jet(low, high, *interval_product(fall, rise, jet.fall, jet.rise), error)
    return found.off(error, ROUGH if target is aten.erf.default else ULPS)


def add(a: Any, b: Any, *, alpha: float = 1.0) -> Jet:
    a, b = jets(a, b if alpha == 1 else multiply(b, alpha))
    found = Jet(a.low + b.low, a.high + b.high, a.fall + b.fall, a.rise + b.rise, a.error)
    return found.off(a.error + b.error, 1.0)


def multiply(a: Any, b: Any) -> Any:
    if not isinstance(a, Jet) and not isinstance(b, Jet):
        return a * b
    a, b = jets(a, b)
    left = interval_product(a.fall, a.rise, b.low, b.high)
    right = interval_product(b.fall, b.rise, a.low, a.high)
    error = (a.size * b.error + b.size * a.error).nan_to_num(0.0, math.inf)
    ends = interval_product(a.low, a.high, b.low, b.high)
    return Jet(*ends, left[0] + right[0], left[1] + right[1], error).off(error, 1.0)


def power(a: Jet, exponent: float) -> Jet:
    """``a ** exponent``: whole numbers by multiplication, others where ``a`` is positive."""
    if not float(exponent).is_integer() or not 1 <= abs(exponent) <= 16:
        return apply(aten.exp.default, multiply(apply(aten.log.default, a), exponent))
    found = a
    for _ in range(abs(int(exponent)) - 1):
        found = multiply(found, a)
    if int(exponent) % 2 == 0:
        found = replace(found, low=found.low.clamp(min=0.0))
    return found if exponent > 0 else apply(aten.reciprocal.default, found)


def greater(a: Any, b: Any) -> Jet:
    """Whether ``a > b``, as 0 or 1; as an interval where both occur."""
    gap = add(a, b, alpha=-1.0)
    room = SINGLE * gap.error
    least, most = (gap.low > room).to(gap.low), (gap.high >= -room).to(gap.low)
    jump = torch.where(least == most, 0.0 * least, math.inf)
    return Jet(least, most, -jump, jump, torch.zeros_like(least))


def where(condition: Any, a: Any, b: Any) -> Jet:
    """The slope jumps where the condition does: by nothing if both parts agree there, but that is
    not looked at."""
    chosen, a, b = jets(condition, a, b)
    yes, no = chosen.low == 1, chosen.high == 0

    def pick(name: str, both: Callable[[Tensor, Tensor], Tensor], jump: float = 0.0) -> Tensor:
        first, second = getattr(a, name), getattr(b, name)
        either = both(first, second) + jump
        return torch.where(yes, first, torch.where(no, second, either))

    low, high = pick("low", torch.minimum), pick("high", torch.maximum)
    fall, rise = pick("fall", torch.minimum, -math.inf), pick("rise", torch.maximum, math.inf)
    return Jet(low, high, fall, rise, pick("error", torch.maximum))


def _same(a: Jet) -> Jet:
    return a


OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.pow.Tensor_Scalar: power,
    aten.logical_not.default: lambda a: add(1.0, a, alpha=-1.0),
    aten.logical_and.default: multiply,
    aten.where.self: where,
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default), _same),
}
"""Operations on jets and numbers, beside :data:`FUNCTIONS`."""

for _kind in ("Tensor", "Scalar"):
    for _name, _function in (("add", add), ("mul", multiply)):
        OPERATIONS[getattr(getattr(aten, _name), _kind)] = _function
    for _name in ("gt", "ge"):
        OPERATIONS[getattr(getattr(aten, _name), _kind)] = greater
    for _name in ("lt", "le"):
        OPERATIONS[getattr(getattr(aten, _name), _kind)] = lambda a, b: greater(b, a)


@dataclass(frozen=True)
class CurveStep:
    """One operation of a curve; arguments that are a :class:`Value` are those of earlier steps."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """The number that enters a curve (0), or the result of its step ``index - 1``."""

    index: int


@dataclass(frozen=True, eq=False)
class Curve:
    """A scalar function: operations on one number and constants."""

    steps: tuple[CurveStep, ...]

    @staticmethod
    def of(*targets: Any) -> Curve:
        """One function after the other."""
        return Curve(tuple(CurveStep(f, (Value(k),), {}) for k, f in enumerate(targets)))

    def __call__(self, v: Tensor) -> Tensor:
        def run(target: Any, *args: Any, **kwargs: Any) -> Any:
            real = (isinstance(a, Tensor) and a.is_floating_point() for a in args)
            cast = (a.to(v.dtype) if yes else a for a, yes in zip(args, real, strict=True))
            return target(*cast, **kwargs)

        found: Tensor = self._run(v, run)
        return found

    def jet(self, low: Tensor, high: Tensor) -> Jet:
        """Values, slopes and errors on the intervals ``[low, high]``, float64."""

        def run(target: Any, *args: Any, **kwargs: Any) -> Any:
            known = target in FUNCTIONS
            return apply(target, *args) if known else OPERATIONS[target](*args, **kwargs)

        one = torch.ones_like(low)
        jet: Jet = self._run(Jet(low, high, one, one, 0 * one), run)
        return jet

    def _run(self, value: Any, run: Callable[..., Any]) -> Any:
        values = [value]
        for step in self.steps:
            args = [values[a.index] if isinstance(a, Value) else a for a in step.args]
            values.append(run(step.target, *args, **step.kwargs))
        return values[-1]


def known(target: Any) -> bool:
    """Whether an operation may be a part of a curve."""
    return target in FUNCTIONS or target in OPERATIONS


# ---- lines


@dataclass(frozen=True)
class Lines:
    """``slope v + shift`` below and above the curve, float64, in the shape of the bounds.

    Attributes:
        least, most: the range of the values.
        error: what the value may be off by, in unit roundoffs of the model's precision.
    """

    low_slope: Tensor
    low_shift: Tensor
    up_slope: Tensor
    up_shift: Tensor
    least: Tensor
    most: Tensor
    error: Tensor


def curve_lines(curve: Curve, low: Tensor, up: Tensor) -> Lines:
    """Lines of a curve on ``[low, up]``, float64."""
    finite = torch.isfinite(low) & torch.isfinite(up)
    start, end = torch.where(finite, low, 0.0), torch.where(finite, up, 0.0)
    share = torch.linspace(0.0, 1.0, CELLS + 1, dtype=low.dtype, device=low.device)
    grid = start + share.view(-1, *[1] * low.ndim) * (end - start)
    grid[-1] = end
    at, half, unit = curve(grid), CELLS // 2, torch.finfo(low.dtype).eps / 2
    cells, whole = curve.jet(grid[:-1], grid[1:]), curve.jet(low, up)
    chord = (at[-1] - at[0]) / torch.where(end > start, end - start, 1.0)
    tangent = (cells.fall[half] + cells.rise[half - 1]) / 2
    slopes = [
        k.nan_to_num(0.0, 0.0, 0.0).clamp(-UNKNOWN, UNKNOWN) for k in (0 * low, chord, tangent)
    ]
    error = torch.where(finite, cells.error.amax(0), whole.error)
    room = 4 * unit * (cells.error.amax(0) + ULPS * at.abs().amax(0))
    below, above = list[Tensor](), list[Tensor]()
    for k in slopes:
        bottom, top = _heights(k, grid, at, cells)
        extra = room + 8 * unit * k.abs() * (start.abs() + end.abs())
        below.append(torch.where(finite, bottom - extra, -math.inf).nan_to_num(-math.inf))
        above.append(torch.where(finite, top + extra, math.inf).nan_to_num(math.inf))
    around = 4 * ULPS * unit * whole.size
    least = torch.fmax(below[0], whole.low - around).nan_to_num(-math.inf)
    most = torch.fmin(above[0], whole.high + around).nan_to_num(math.inf)
    below[0] = least = least.clamp(-UNKNOWN, UNKNOWN)
    above[0] = most = most.clamp(-UNKNOWN, UNKNOWN)
    every, under, over = torch.stack(slopes), torch.stack(below), torch.stack(above)
    middle = (start + end) / 2
    lower = (under + every * middle).argmax(0, keepdim=True)
    upper = (over + every * middle).argmin(0, keepdim=True)
    low_slope, low_shift = (part.gather(0, lower)[0] for part in (every, under))
    up_slope, up_shift = (part.gather(0, upper)[0] for part in (every, over))
    return Lines(low_slope, low_shift, up_slope, up_shift, least, most, error)


def _heights(slope: Tensor, grid: Tensor, at: Tensor, cells: Jet) -> tuple[Tensor, Tensor]:
    """The smallest and the largest height of a curve above lines of a slope through 0."""
    left, right = at[:-1] - slope * grid[:-1], at[1:] - slope * grid[1:]
    fall, rise = cells.fall - slope, cells.rise - slope
    inside = (fall < 0) & (rise > 0)
    spread = torch.where(inside, rise - fall, 1.0)
    turn = fall * rise * (grid[1:] - grid[:-1]) / spread  # negative
    dip = (left * (rise / spread) - right * (fall / spread) + turn).nan_to_num(-math.inf)
    peak = (right * (rise / spread) - left * (fall / spread) - turn).nan_to_num(math.inf)
    bottom, top = sorted_pair(left, right)
    bottom = torch.where(inside, torch.minimum(dip, bottom), bottom)
    top = torch.where(inside, torch.maximum(peak, top), top)
    # The values themselves bound a cell where the slopes are not known.
    lines = sorted_pair(slope * grid[:-1], slope * grid[1:])
    bottom = torch.fmax(bottom, cells.low - lines[1])
    return bottom.amin(0), torch.fmin(top, cells.high - lines[0]).amax(0)
