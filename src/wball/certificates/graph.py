"""A network as a graph of operations that know how to carry a linear bound backwards.

Sequential and residual networks, wrappers that normalise, and functional code all end up as the
same few operations (:mod:`wball.certificates.tracing`). Every operation is either *affine* in the
values it reads (its rows go back exactly: ``<a, W h + b> = <W^T a, h> + <a, b>``) or an
:class:`Activation` or :class:`Curved`, which are relaxed elsewhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.certificates.curves import CURVES, Curve
from wball.input_sets.rows import Rows, add, trim
from wball.inputs import dot

Shape = tuple[int, ...]
Interval = tuple[Tensor, Tensor]
"""Centre and radius of every coordinate."""

FOLDED = 2**27
"""Numbers that a folded convolution may hold at a time."""


@dataclass(frozen=True)
class Op(ABC):
    """One operation: ``inputs`` are the positions of its input operations, ``shape`` is that of its
    value without the batch."""

    name: str
    inputs: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Input(Op):
    """The image."""


class Affine(Op):
    """An operation that is affine in all of its inputs."""

    @abstractmethod
    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        """Carry rows back to the inputs: ``<rows, f(h_1, h_2, ...)> = constant + sum_k <rows_k,
        h_k>``. Returns the constant (N,) and the rows."""

    @abstractmethod
    def forward(self, *values: Tensor) -> Tensor:
        """Apply the operation, in the precision of the values."""

    def spread(self, *radii: Tensor) -> Tensor | None:
        """The radii of what becomes of intervals; ``None`` if the operation does not know."""
        return None

    def interval(self, *values: Interval) -> Interval | None:
        """What intervals become, coordinate by coordinate; ``None`` if that is not known."""
        radius = self.spread(*(radius for _, radius in values))
        return None if radius is None else (self.forward(*(c for c, _ in values)), radius)


def _cast(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(like.dtype)


@dataclass(frozen=True)
class Linear(Affine):
    weight: Tensor
    bias: Tensor | None

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        a = rows.coeff
        constant = a.new_zeros(a.shape[0]) if self.bias is None else dot(a, self.bias.to(a.dtype))
        return constant, [rows.like(a @ self.weight.to(a.dtype))]

    def forward(self, *values: Tensor) -> Tensor:
        return F.linear(values[0], self.weight.to(values[0].dtype), _cast(self.bias, values[0]))

    def spread(self, *radii: Tensor) -> Tensor:
        return F.linear(radii[0], self.weight.to(radii[0].dtype).abs())


@dataclass(frozen=True)
class Conv2d(Affine):
    """A convolution with zero padding. ``weight`` gives the kernel, so average pooling is also
    one."""

    before: Shape
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        a, weight = rows.coeff, self.weight.to(rows.coeff.dtype)
        constant = (
            a.new_zeros(a.shape[0]) if self.bias is None else a.sum((2, 3)) @ self.bias.to(a.dtype)
        )
        out = transposed(a, weight, self.stride, self.dilation, self.groups)
        if rows.corner is None:
            top, left = self.padding
            bottom, right = (
                self.before[k] + self.padding[k - 1] - out.shape[k + 1] for k in (1, 2)
            )
            return constant, [rows.like(F.pad(out, (-left, right, -top, bottom)))]
        corner = (
            rows.corner[0] * self.stride[0] - self.padding[0],
            rows.corner[1] * self.stride[1] - self.padding[1],
        )
        return constant, [trim(Rows(out, rows.image, corner), self.before)]

    def forward(self, *values: Tensor) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(
            values[0], self.weight.to(values[0].dtype), _cast(self.bias, values[0]), *settings
        )

    def spread(self, *radii: Tensor) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(radii[0], self.weight.to(radii[0].dtype).abs(), None, *settings)


@dataclass(frozen=True)
class Diagonal(Affine):
    """``scale * h + shift`` in every coordinate: batch norm, normalisation, arithmetic with
    constants."""

    scale: Tensor  # (1, *shape), or (1, C, 1, 1) where the same all over the map
    shift: Tensor
    summed: Tensor | None = None  # magnitudes that cancelled in the shift, if any

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        a = rows.coeff
        constant = dot(a, self._read(self.shift.to(a.dtype), rows))
        return constant, [rows.like(a * self._read(self.scale.to(a.dtype), rows))]

    def forward(self, *values: Tensor) -> Tensor:
        dtype = values[0].dtype
        return values[0] * self.scale.to(dtype) + self.shift.to(dtype)

    def spread(self, *radii: Tensor) -> Tensor:
        return radii[0] * self.scale.to(radii[0].dtype).abs()

    @staticmethod
    def _read(values: Tensor, rows: Rows) -> Tensor:
        return values if values.shape[2:] == (1, 1) else rows.read(values)


@dataclass(frozen=True)
class Sum(Affine):
    """``h_1 + sign * h_2``, such as the end of a residual branch."""

    sign: float

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        second = rows if self.sign == 1 else rows.like(rows.coeff * self.sign)
        return rows.coeff.new_zeros(rows.coeff.shape[0]), [rows, second]

    def forward(self, *values: Tensor) -> Tensor:
        return values[0] + self.sign * values[1]

    def spread(self, *radii: Tensor) -> Tensor:
        return radii[0] + radii[1]


@dataclass(frozen=True)
class Reshape(Affine):
    """The same numbers in another shape."""

    before: Shape

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        whole = rows.dense(self.shape)
        constant = whole.coeff.new_zeros(whole.coeff.shape[0])
        return constant, [whole.like(whole.coeff.reshape(-1, *self.before))]

    def forward(self, *values: Tensor) -> Tensor:
        return values[0].reshape(-1, *self.shape)

    def spread(self, *radii: Tensor) -> Tensor:
        return self.forward(*radii)


@dataclass(frozen=True)
class Generic(Affine):
    """Any other affine operation, transposed by automatic differentiation at 0."""

    before: tuple[Shape, ...]
    function: Callable[..., Tensor] = field(compare=False)
    magnitude: Callable[..., Tensor] | None = field(
        compare=False
    )  # with the absolute values of its coefficients
    call: str  # what it calls, with which constants
    constants: tuple[Tensor, ...]

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        whole = rows.dense(self.shape)
        a = whole.coeff
        zeros = [a.new_zeros((a.shape[0], *shape)) for shape in self.before]
        value, pull, *_ = torch.func.vjp(self.function, *zeros)
        return dot(a, value), [whole.like(g) for g in pull(a)]

    def forward(self, *values: Tensor) -> Tensor:
        return self.function(*values)

    def spread(self, *radii: Tensor) -> Tensor | None:
        if self.magnitude is None:
            return None
        return self.magnitude(*radii) - self.magnitude(*map(torch.zeros_like, radii))


@dataclass(frozen=True)
class Activation(Op):
    """``max(h, leak * h)`` in every coordinate: ReLU (``leak = 0``) and leaky ReLU."""

    leak: float

    def interval(self, low: Tensor, up: Tensor) -> Interval:
        """The interval of the output when the input is between ``low`` and ``up``."""
        low, up = self.value(low), self.value(up)
        return (low + up) / 2, (up - low) / 2

    def value(self, h: Tensor) -> Tensor:
        """The activation itself; 0 times infinity is 0 here."""
        return F.leaky_relu(h, self.leak) if self.leak else h.relu()


@dataclass(frozen=True)
class Curved(Op):
    """A curve of :data:`wball.certificates.curves.CURVES` in every coordinate."""

    kind: str

    @property
    def curve(self) -> Curve:
        return CURVES[self.kind]

    def interval(self, low: Tensor, up: Tensor) -> Interval:
        """The interval of the output when the input is between ``low`` and ``up``."""
        least, most = self.curve.between(low, up)
        return (least + most) / 2, (most - least) / 2


@dataclass(frozen=True)
class Graph:
    """Operations in the order they run; the last one gives the logits.

    ``slack``: what each logit that the model computes may be off by, compared with exact arithmetic
    (:func:`wball.certificates.trust.compare`). Margins are lowered by that of both logits.
    """

    ops: tuple[Op, ...]
    slack: Tensor | None = None

    @property
    def rounding(self) -> float:
        """Allowance for rounding in float64, relative to the magnitudes summed: twice the error of
        a sum with as many terms as the largest layer has values, but at least 1e-12."""
        return max(1e-12, 2.3e-16 * max(math.prod(op.shape) for op in self.ops))

    def slack_of(self, y: Tensor, other: Tensor) -> Tensor | float:
        """The largest error of the difference of two logits."""
        return 0.0 if self.slack is None else self.slack[y] + self.slack[other]

    def relaxed(self) -> list[int]:
        """Positions of the operations whose inputs need bounds, in order."""
        return [k for k, op in enumerate(self.ops) if isinstance(op, (Activation, Curved))]

    def multiplications(self) -> float:
        """Approximate number of multiplications for the bounds of all relaxed units: rows are
        carried back from each of them, on patches that grow until they cover the map."""
        total = 0.0
        for target in self.relaxed():
            sides, cost = {self.ops[target].inputs[0]: 1.0}, 0.0
            for position in range(target - 1, 0, -1):
                side, op = sides.pop(position, None), self.ops[position]
                if side is None:
                    continue
                area = math.prod(min(side, length) for length in op.shape[1:])
                cost += area * (
                    op.weight.numel() if isinstance(op, (Conv2d, Linear)) else op.shape[0]
                )
                if isinstance(op, Conv2d):
                    side = (side - 1) * op.stride[0] + op.dilation[0] * (op.weight.shape[2] - 1) + 1
                elif not isinstance(op, (Diagonal, Sum, Activation, Curved)):
                    side = math.inf
                for source in op.inputs:
                    sides[source] = max(side, sides.get(source, 0.0))
            total += 2 * math.prod(self.ops[target].shape) * cost
        return total

    @torch.no_grad()
    def values(self, x: Tensor) -> dict[int, Tensor]:
        """The input of each relaxed operation for the network input ``x``, in the precision of
        ``x``."""
        wanted = {self.ops[k].inputs[0] for k in self.relaxed()}
        found = {position: value for position, value in self._run(x) if position in wanted}
        return {k: found[self.ops[k].inputs[0]] for k in self.relaxed()}

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """The logits of the network."""
        return deque(self._run(x), maxlen=1)[0][1]

    @torch.no_grad()
    def rounded(self, x: Tensor, unit: float, generator: torch.Generator) -> Tensor:
        """The logits of the network when every operation has random errors of the size of its
        rounding.

        A sum of ``n`` products is off by about ``log2(n)`` units of the sum of their magnitudes.
        """

        def spoil(op: Op, sources: list[Tensor], value: Tensor) -> Tensor:
            if isinstance(op, Curved):
                summed: Interval | None = (value, sources[0].abs())
            elif not isinstance(op, Affine) or isinstance(op, Reshape):
                return value
            else:
                summed = op.interval(*((torch.zeros_like(h), h.abs()) for h in sources))
            if summed is None:  # with absolute coefficients unknown
                assert isinstance(op, Affine)
                size = op.forward(*(h.abs() for h in sources)).abs() + value.abs()
            else:
                size = summed[0].abs() + summed[1]
            if isinstance(op, Diagonal) and op.summed is not None:
                size = size + op.summed.to(size)
            terms = (
                op.weight[0].numel() if isinstance(op, (Linear, Conv2d)) else sources[0][0].numel()
            )
            noise = torch.randn(value.shape, dtype=value.dtype, generator=generator).to(
                value.device
            )
            return value + noise * unit * (2 + math.log2(terms + 1)) * size

        return deque(self._run(x, spoil), maxlen=1)[0][1]

    def _run(
        self, x: Tensor, spoil: Callable[[Op, list[Tensor], Tensor], Tensor] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The value of every operation, in order. Each value is deleted after its last use."""
        last = {source: position for position, op in enumerate(self.ops) for source in op.inputs}
        held: dict[int, Tensor] = {0: x}
        yield 0, x
        for position, op in enumerate(self.ops[1:], 1):
            sources = [held[k] for k in op.inputs]
            if isinstance(op, Affine):
                held[position] = op.forward(*sources)
            elif isinstance(op, Activation):
                held[position] = F.leaky_relu(sources[0], op.leak)
            else:
                assert isinstance(op, Curved)
                held[position] = op.curve.function(sources[0])
            if spoil is not None:
                held[position] = spoil(op, sources, held[position])
            yield position, held[position]
            for source in op.inputs:
                if last[source] == position:
                    held.pop(source, None)


def back(
    graph: Graph, target: int, rows: Rows, relax: Callable[[int, Rows], tuple[Tensor, Rows]]
) -> tuple[Tensor, Rows]:
    """Carry rows over operation ``target`` back to the image: ``<rows, h> >= constant + <result,
    x>``.

    ``relax(position, rows)`` bounds an activation's rows from below by rows over what it reads.
    """
    pending: dict[int, Rows] = {target: rows}
    constant = rows.coeff.new_zeros(rows.coeff.shape[0])
    for position in range(target, 0, -1):
        here = pending.pop(position, None)
        if here is None:
            continue
        op = graph.ops[position]
        if isinstance(op, Affine):
            shift, parts = op.back(here)
        else:
            shift, part = relax(position, here)
            parts = [part]
        constant = constant + shift
        for source, part in zip(op.inputs, parts, strict=True):
            pending[source] = (
                add(pending[source], part, graph.ops[source].shape) if source in pending else part
            )
    return constant, pending[0]


def transposed(
    a: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The transposed convolution of ``a`` (N, C, h, w) without padding.

    Many small maps are multiplied by one matrix. In float64, windows of others are: on a GPU, and
    on a CPU if there are more channels after it than before (otherwise copying them takes longer).
    """
    count, *patch = a.shape
    cells = math.prod(patch)
    sides = [
        (patch[1 + k] - 1) * stride[k] + dilation[k] * (weight.shape[2 + k] - 1) + 1 for k in (0, 1)
    ]
    out = (weight.shape[1] * groups, *sides)
    if count <= 2 * cells or cells * math.prod(out) > 2**22:
        pays = a.is_cuda or weight.shape[1] > weight.shape[0]
        if pays and a.dtype == torch.float64 and dilation == (1, 1) and groups == 1:
            return folded(a, weight, stride)
        return F.conv_transpose2d(a, weight, stride=stride, dilation=dilation, groups=groups)
    # Float64 keeps the weights as they are: GPUs may round the input of float32 convolutions.
    every = torch.eye(cells, dtype=torch.float64, device=a.device).reshape(cells, *patch)
    matrix = F.conv_transpose2d(
        every, weight.double(), stride=stride, dilation=dilation, groups=groups
    )
    return (a.flatten(1) @ matrix.to(a.dtype).flatten(1)).reshape(count, *out)


def folded(a: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """The transposed convolution as one product of the windows of ``a`` for all remainders modulo
    the stride.

    Outputs with the same remainder are an ordinary convolution of ``a`` with a part of the kernel.
    """
    channels, height, width = a.shape[1:]
    down, across = stride
    tall, broad = -(-weight.shape[2] // down), -(-weight.shape[3] // across)  # windows of ``a``
    full = F.pad(weight, (0, broad * across - weight.shape[3], 0, tall * down - weight.shape[2]))
    parts = full.reshape(channels, -1, tall, down, broad, across).flip(2, 4)
    matrix = parts.permute(0, 2, 4, 1, 3, 5).reshape(channels * tall * broad, -1)
    rows, columns = height + tall - 1, width + broad - 1
    step = max(1, FOLDED // (rows * columns * (matrix.shape[0] + 2 * matrix.shape[1])))
    found = []
    for some in a.split(step):
        padded = F.pad(some, (broad - 1, broad - 1, tall - 1, tall - 1))
        windows = padded.unfold(2, tall, 1).unfold(3, broad, 1).permute(0, 2, 3, 1, 4, 5)
        out = windows.reshape(-1, matrix.shape[0]) @ matrix
        out = out.reshape(some.shape[0], rows, columns, weight.shape[1], down, across).permute(
            0, 3, 1, 4, 2, 5
        )
        found.append(out.flatten(4).flatten(2, 3))
    bottom, right = (height - 1) * down + weight.shape[2], (width - 1) * across + weight.shape[3]
    whole = found[0] if len(found) == 1 else torch.cat(found)  # a copy would take as long again
    return whole[..., :bottom, :right]
