"""The graph of a program in normal form: one table of operators.

A value of the program at batch 1 is a value of the graph: its shape is that of one image, without a
first dimension of 1. What does not depend on the image is computed once. Operators that are linear
in what depends on the image are interpreted as they are (:class:`~.graph.Linear`); those with code
of their own are faster with it. A scalar function is fused with everything before it that is a
function of the same number, so that its lines are those of the whole (:class:`~.curves.Curve`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from wball.certificates import curves
from wball.certificates.curves import Curve, CurveStep, Value
from wball.certificates.graph import (
    Conv2d,
    Curved,
    Diagonal,
    Graph,
    Input,
    Known,
    Linear,
    Move,
    Op,
    Product,
    Relu,
    Shape,
    Sum,
)
from wball.certificates.program import (
    SAFETY,
    VIEWS,
    Program,
    UnsupportedModule,
    exported,
    place_of,
    probes,
)

aten = torch.ops.aten
OpOverload = type(aten.relu.default)

LARGEST_PRODUCT = 2**22
"""Products of pairs in one matrix product, at most."""

MATRIX = 2**25
"""Numbers of a matrix that stands for an operator, at most."""


def known(names: str) -> set[Any]:
    """Operators by name; those that this version of PyTorch does not have are left out."""
    found = set()
    for name in names.split():
        packet, overload = name.split(".")
        if hasattr(aten, packet) and hasattr(getattr(aten, packet), overload):
            found.add(getattr(getattr(aten, packet), overload))
    return found


RESHAPES = known(
    "view.default _unsafe_view.default reshape.default unsqueeze.default squeeze.dims squeeze.dim "
    "squeeze.default clone.default alias.default detach.default _to_copy.default "
    "lift_fresh_copy.default"
)
"""The same numbers in the same order."""

MOVES = known(
    "permute.default expand.default slice.Tensor select.int cat.default stack.default "
    "constant_pad_nd.default index.Tensor index_select.default gather.default flip.default "
    "roll.default repeat.default diagonal.default unfold.default im2col.default "
    "slice_scatter.default select_scatter.default copy.default pixel_shuffle.default "
    "pixel_unshuffle.default reflection_pad1d.default reflection_pad2d.default "
    "replication_pad1d.default replication_pad2d.default replication_pad3d.default "
    "upsample_nearest2d.vec upsample_nearest2d.default where.self"
)
"""Every value is one of those read, or a constant."""

SUMS = known(
    "mm.default addmm.default bmm.default mv.default dot.default convolution.default mean.default "
    "mean.dim sum.default sum.dim_IntList cumsum.default col2im.default avg_pool1d.default "
    "avg_pool2d.default avg_pool3d.default _adaptive_avg_pool2d.default "
    "_adaptive_avg_pool3d.default upsample_bilinear2d.vec _upsample_bilinear2d_aa.default"
)
"""Sums of products with constants."""

FACTORS = known("mm.default addmm.default bmm.default mv.default dot.default convolution.default")
"""Linear in one argument at a time."""

PLUS, TIMES = known("add.Tensor add.Scalar"), known("mul.Tensor mul.Scalar")

SHAPES_ONLY = known(
    "full_like.default zeros_like.default ones_like.default empty_like.default new_zeros.default "
    "new_ones.default new_full.default sym_size.int"
)
"""Operators that read a shape, not values."""

ABOVE = known("gt.Scalar ge.Scalar gt.Tensor ge.Tensor")
BELOW = known("lt.Scalar le.Scalar lt.Tensor le.Tensor")

JUMPS = ABOVE | BELOW | known("sign.default floor.default ceil.default round.default trunc.default")


def read_graph(model: Any, x: Tensor) -> Graph:
    """The graph of a model in evaluation mode, for images like ``x``."""
    return graph_of(exported(model, x), x)


def graph_of(program: Program, x: Tensor) -> Graph:
    """The graph of a program, compared with it at images and at points around them."""
    reader = _Reader(program, x.device)
    found = reader.graph()
    points = probes(x[:4]).double()
    with torch.no_grad():
        ours, theirs = found.logits(points), program.run(points)
        noise = program.run(points.to(program.dtype)).double() - theirs
    room = 1e-6 * (noise.abs().amax() + theirs.abs().amax()) + 1e-12
    finite = torch.isfinite(ours) & torch.isfinite(theirs) & torch.isfinite(room)
    if bool(((ours - theirs).abs() > SAFETY * room)[finite].any()):
        raise UnsupportedModule(
            "the program's answer for an image depends on the other images of its batch, so it has "
            "no certificate: look for means over the batch and norms without statistics"
        )
    return found


Found = int | UnsupportedModule
Factor = tuple[int, Tensor | None]
"""The position of a factor, and the flat places of its numbers in the shape of the product."""


class _Reader:
    """Turns the nodes of one program into operations.

    Attributes:
        values: constants, and what the other nodes are at batch 1 for an image of zeros.
        place: of nodes that depend on the image, the position of their operation.
        roots: the nodes of which each such node is a function number by number, nearest first.
        bent: the nodes that are such functions by a curve.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program, self.device = program, device
        self.ops: list[Op] = []
        self.place: dict[Node, Found] = {}
        self.roots: dict[Node, tuple[Node, ...]] = {}
        self.bent: set[Node] = set()
        self.values: dict[Any, Any] = {
            program.image: torch.zeros((1, *program.shape), dtype=program.dtype, device=device)
        }
        self.values |= program.constants
        self.name = "image"

    def graph(self) -> Graph:
        """The operations that the logits depend on."""
        image = self.program.image
        self.place[image] = self.add(Input("image", (), self.shape(image)))
        self.roots[image] = (image,)
        with torch.no_grad():
            for node in self.program.nodes:
                self.values[node] = self.program.apply(node, self.values, self.program.dtype)
            for node in self.program.nodes:
                if self.sources(node) and not self._is_constant(node):
                    self._read(node)
        if self.program.logits not in self.place:
            raise UnsupportedModule("the logits do not depend on the image: nothing is to prove")
        last = self.at(self.program.logits)
        dtype = torch.finfo(self.program.dtype)
        ops = _reachable(self.ops, last)
        return Graph(ops, dtype.eps / 2, min(dtype.max / 2, curves.UNKNOWN))

    # ---- nodes

    def sources(self, node: Node) -> list[Node]:
        """The distinct nodes that a node reads and that depend on the image."""
        return [n for n in node.all_input_nodes if n in self.place]

    def _is_constant(self, node: Node) -> bool:
        """Whether a node is constant for finite values."""
        infinite = len(node.args) > 1 and node.args[1] in (math.inf, -math.inf)
        return node.target in SHAPES_ONLY or (
            node.target in (aten.eq.Scalar, aten.ne.Scalar) and infinite
        )

    def at(self, node: Any) -> int:
        """The position of a node that depends on the image."""
        found = self.place[node]
        if isinstance(found, UnsupportedModule):
            raise found
        assert isinstance(found, int)
        return found

    def shape(self, node: Any) -> Shape:
        """The shape of a node's value for one image."""
        return _alone(self.values[node])

    def add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def refusal(self, node: Node, reason: str) -> UnsupportedModule:
        return UnsupportedModule(f"no bound follows {place_of(node)}: {reason}")

    def _read(self, node: Node) -> None:
        """Find the operations of a node, or why there are none."""
        self.name, sources = node.name, self.sources(node)
        held = [self.roots[n] for n in sources]
        self.roots[node] = (node,)
        if curves.known(node.target) and self._alike([*sources, node]):
            common = (n for n in held[0] if all(n in other for other in held[1:]))
            self.roots[node] = (node, *common)
        try:
            refused = [f for n in sources if isinstance(f := self.place[n], UnsupportedModule)]
            if refused and self._root(node) is None:
                raise refused[0]
            self.place[node] = found = self._position(node)
        except UnsupportedModule as refusal:
            self.place[node] = refusal
            return
        if isinstance(self.ops[found], Curved) or (
            len(self.roots[node]) > 1 and any(n in self.bent for n in sources)
        ):
            self.bent.add(node)

    def _alike(self, nodes: Sequence[Node]) -> bool:
        """Whether the values of nodes are tensors of one shape."""
        return len({tuple(getattr(self.values[n], "shape", ())) for n in nodes}) == 1

    def _root(self, node: Node) -> Node | None:
        """The farthest node of which a node is a function number by number."""
        whole = (n for n in reversed(self.roots[node][1:]) if isinstance(self.place[n], int))
        return next(whole, None)

    def _position(self, node: Node) -> int:
        """Add the operations of a node."""
        target = node.target
        if target in READERS:
            return READERS[target](self, node)
        if target in RESHAPES:
            return self._reshape(node)
        if target in MOVES or target in SUMS:
            return self._linear(node)
        if target in JUMPS:
            raise self.refusal(node, "its result jumps")
        if curves.known(target):
            return self._curve(node)
        raise self.refusal(node, "the operator is not known; wball.certificates.register adds one")

    # ---- linear operators

    def _reshape(self, node: Node) -> int:
        (source,) = self.sources(node)
        dtype = self.values[node].dtype
        if dtype not in (torch.float32, torch.float64):
            raise self.refusal(node, f"it converts to {dtype}")
        return self.reshaped(self.at(source), self.shape(node))

    def reshaped(self, source: int, shape: Shape) -> int:
        before = self.ops[source].shape
        if before == shape:
            return source
        nothing = torch.zeros(1, dtype=torch.float64, device=self.device)
        return self.add(Move(self.name, (source,), shape, (before,), None, nothing))

    def _linear(self, node: Node) -> int:
        """An operator that is linear in what depends on the image, as it is."""
        if node.target in FACTORS and len(self._nodes(node.args)) > 1:
            raise self.refusal(node, "both factors depend on the image")
        if node.target is aten.index.Tensor and self._nodes(node.args[1]):
            raise self.refusal(node, "the index depends on the image")
        return self._moved(node) if node.target in MOVES else self._summed(node)

    def _nodes(self, tree: Any) -> list[Any]:
        """The nodes in an argument that depend on the image, each as often as it occurs."""
        found: list[Any] = []
        map_arg(tree, found.append)
        return [n for n in found if n in self.place]

    def _function(self, node: Node) -> Callable[..., Tensor]:
        """A node as a function of one image's values."""
        sources = self.sources(node)
        target: Any = VIEWS.get(node.target, node.target)
        actual = [tuple(self.values[n].shape) for n in sources]

        def function(*values: Tensor) -> Tensor:
            given = dict(zip(sources, values, strict=True))
            dtype = values[0].dtype

            def fill(n: Node) -> Any:
                if n in given:
                    return given[n].reshape(actual[sources.index(n)])
                held = self.values[n]
                if not isinstance(held, Tensor) or not held.is_floating_point():
                    return held
                return held.to(dtype)

            args, kwargs = map_arg((node.args, dict(node.kwargs)), fill)
            result = target(*args, **kwargs)
            return result.reshape(_alone(result))

        return function

    def _moved(self, node: Node) -> int:
        """Which value comes from where, found by moving numbers."""
        places = tuple(self.at(n) for n in self.sources(node))
        before = tuple(self.ops[k].shape for k in places)
        sizes = [math.prod(shape) for shape in before]
        function = self._function(node)
        numbers = torch.arange(1.0, sum(sizes) + 1, dtype=torch.float64, device=self.device)
        parts = [n.reshape(s) for n, s in zip(numbers.split(sizes), before, strict=True)]
        shift = function(*map(torch.zeros_like, parts))
        index = (function(*parts) - shift).round().long().flatten() - 1
        shape = tuple(shift.shape)
        if len(places) == 1 and not bool(shift.any()) and torch.equal(index, numbers.long() - 1):
            return self.reshaped(places[0], shape)
        index = torch.where(index < 0, sum(sizes), index)
        return self.add(Move(self.name, places, shape, before, index, shift[None]))

    def _summed(self, node: Node) -> int:
        """The matrix of an operator."""
        (source,) = (self.at(n) for n in self.sources(node))
        before, shape = self.ops[source].shape, self.shape(node)
        numbers, size = math.prod(before) * math.prod(shape), math.prod(shape)
        if numbers > MATRIX:
            raise self.refusal(node, f"its matrix has {numbers} numbers, at most {MATRIX} are held")
        zero = torch.zeros(before, dtype=torch.float64, device=self.device)
        bias, pull, *_ = torch.func.vjp(self._function(node), zero)
        unit = torch.eye(size, dtype=torch.float64, device=self.device)
        (weight,) = torch.vmap(pull)(unit.reshape(size, *shape))
        return self._matrix_of(source, weight.flatten(1), bias.flatten(), shape)

    def _matrix_of(self, source: int, weight: Tensor, bias: Tensor | None, shape: Shape) -> int:
        flat = self.reshaped(source, (weight.shape[1],))
        found = self.add(Linear(self.name, (flat,), (weight.shape[0],), weight, bias))
        return self.reshaped(found, shape)

    # ---- arithmetic

    def _arithmetic(self, node: Node) -> int:
        """Sums and products: with a constant, of two values, or as a part of a curve."""
        (first, second), sources = node.args[:2], self.sources(node)
        alpha = float(node.kwargs.get("alpha", 1.0))  # type: ignore[arg-type]
        both, product = len(self._nodes(node.args)) == 2, node.target in TIMES
        bends = both and (product or any(n in self.bent for n in sources))
        if bends and self._root(node) is not None:
            return self._curve(node)
        if both and product:
            factors = [(self.at(n), self._view(n, node)) for n in (first, second)]
            return self._product(factors, self.shape(node))
        if both:
            places = tuple(self._expanded(n, node) for n in (first, second))
            return self.add(Sum(self.name, places, self.shape(node), alpha))
        ahead, place = first is sources[0], self._expanded(sources[0], node)
        constant = self._constant(second if ahead else first, node)
        one = torch.ones_like(constant)
        if product:
            return self._diagonal(place, constant, 0 * one)
        scale, times = (1.0, alpha) if ahead else (alpha, 1.0)
        return self._diagonal(place, scale * one, times * constant)

    def _constant(self, arg: Any, node: Node) -> Tensor:
        """An argument as a constant of the shape of a node's value, ``(1, *shape)``, float64."""
        found = torch.as_tensor(self.values.get(arg, arg), dtype=torch.float64, device=self.device)
        return found.expand(self.values[node].shape).reshape(1, *self.shape(node))

    def _diagonal(self, source: int, scale: Tensor, shift: Tensor) -> int:
        """``scale v + shift``."""
        shape = self.ops[source].shape
        if len(shape) == 3 and all(bool((m == m[..., :1, :1]).all()) for m in (scale, shift)):
            scale, shift = scale[..., :1, :1], shift[..., :1, :1]
        return self.add(Diagonal(self.name, (source,), shape, scale, shift))

    def _view(self, node: Any, result: Node) -> Tensor | None:
        """The flat places of a value's numbers in the shape of the result; ``None`` if that is its
        own."""
        value, whole = self.values[node], self.values[result]
        if value.shape == whole.shape:
            return None
        order = torch.arange(value.numel(), device=self.device).reshape(value.shape)
        return order.expand(whole.shape).flatten()

    def _expanded(self, node: Any, result: Node) -> int:
        """The value of a node in the shape of the result."""
        place, index = self.at(node), self._view(node, result)
        if index is None:
            return place
        shape, before = self.shape(result), self.ops[place].shape
        if index.shape[0] == math.prod(before):
            return self.reshaped(place, shape)
        shift = torch.zeros((1, *shape), dtype=torch.float64, device=self.device)
        return self.add(Move(self.name, (place,), shape, (before,), index, shift))

    def _product(self, factors: Sequence[Factor], shape: Shape) -> int:
        places = [
            self.add(Known(self.name, (place,), shape, self.ops[place].shape, view))
            for place, view in factors
        ]
        return self.add(Product(self.name, tuple(places), shape))

    # ---- functions of one number

    def _curve(self, node: Node) -> int:
        """A function of one number, with everything before it that is one."""
        root = self._root(node)
        if root is None:
            raise self.refusal(node, "it is not a function of one number of the image")
        index: dict[Any, Value] = {root: Value(0)}
        steps: list[CurveStep] = []

        def visit(n: Any) -> Any:
            if n not in self.roots:
                return self.values[n]
            if n not in index:
                args, kwargs = map_arg((n.args, dict(n.kwargs)), visit)
                kwargs = {k: v for k, v in kwargs.items() if k == "alpha"}
                steps.append(CurveStep(n.target, tuple(args), kwargs))
                index[n] = Value(len(steps))
            return index[n]

        visit(node)
        return self._curved(self.at(root), Curve(tuple(steps)))

    def _curved(self, source: int, curve: Curve) -> int:
        return self.add(Curved(self.name, (source,), self.ops[source].shape, curve))

    def _relu(self, node: Node) -> int:
        return self._bent(self.at(node.args[0]))

    def _bent(self, source: int) -> int:
        return self.add(Relu(self.name, (source,), self.ops[source].shape))

    def _where(self, node: Node) -> int:
        """``where(v > c, p, q)`` is ``q + s (v - c)^+`` if ``p - q = s (v - c)``."""
        condition, *parts = node.args
        if condition not in self.place:
            return self._linear(node)
        target, (value, limit) = condition.target, [*condition.args, None][:2]  # type: ignore[union-attr]
        straight = target in ABOVE | BELOW and value in self.place and limit not in self.place
        if not straight or not self._alike([value, node]):
            return self._curve(node)
        lines = [self._line(part, self.at(value), node) for part in parts]
        (p, q), at = lines if target in ABOVE else lines[::-1], self._constant(limit, node)
        if p is None or q is None:
            return self._curve(node)
        more = p[0] - q[0]
        if bool((more * at + p[1] - q[1]).any()):
            return self._curve(node)
        start = self._diagonal(self.at(value), torch.ones_like(at), -at)
        bent = self._diagonal(self._bent(start), more, 0 * more)
        line = self._diagonal(self.at(value), *q)
        return self.add(Sum(self.name, (line, bent), self.shape(node), 1.0))

    def _line(self, part: Any, root: int, node: Node) -> tuple[Tensor, Tensor] | None:
        """Slope and value at 0 of what is affine in the value of an operation."""
        one = self._constant(1.0, node)
        if part not in self.place:
            return 0 * one, self._constant(part, node)
        place, scale, shift = self.at(part), one, 0 * one
        while place != root:
            op = self.ops[place]
            if not isinstance(op, Diagonal):
                return None
            scale, shift = scale * op.scale, scale * op.shift + shift
            (place,) = op.inputs
        return scale, shift

    # ---- layers with weights

    def _matrix(self, node: Node) -> int:
        """``x W + b`` and products of matrices."""
        first, second = _factors(node)
        if first in self.place and second in self.place:
            return self._pairs(node, first, second)
        plain = first in self.place and self.values[second].ndim == 2 and not node.kwargs
        bias = node.args[0] if node.target is aten.addmm.default else None
        if not plain or bias in self.place or (bias is not None and self.values[bias].ndim != 1):
            return self._linear(node)
        weight = self.values[second].T
        if isinstance(second, Node) and second.target is aten.permute.default:
            weight = self.values[second.args[0]]  # a parameter stays one, for training
        shape = self.shape(node)
        source = self.reshaped(self.at(first), (*shape[:-1], weight.shape[1]))
        held = None if bias is None else self.values[bias]
        return self.add(Linear(self.name, (source,), shape, weight, held))

    def _pairs(self, node: Node, first: Any, second: Any) -> int:
        """A product of two matrices that depend on the image: all products of pairs, summed."""
        a, b = (tuple(self.values[n].shape) for n in (first, second))
        whole = (*a[:-1], b[-1], a[-1])  # (..., rows, columns, inner)
        if math.prod(whole) > LARGEST_PRODUCT or node.target not in PRODUCTS:
            raise self.refusal(node, f"both factors depend on the image ({math.prod(whole)} pairs)")
        orders = [
            torch.arange(math.prod(part), device=self.device).reshape(part) for part in (a, b)
        ]
        left, right = orders[0].unsqueeze(-2), orders[1].transpose(-1, -2).unsqueeze(-3)
        views = (part.expand(whole).flatten() for part in (left, right))
        places = (self.at(n) for n in (first, second))
        pairs = self._product(list(zip(places, views, strict=True)), whole)
        ones = torch.ones((1, a[-1]), dtype=torch.float64, device=self.device)
        found = self.add(Linear(self.name, (pairs,), (*whole[:-1], 1), ones, None))
        return self.reshaped(found, self.shape(node))

    def _convolution(self, node: Node) -> int:
        args: tuple[Any, ...] = node.args
        source, weight, bias, stride, padding, dilation, transposed, _, groups = args
        shape = self.shape(node)
        if transposed or len(shape) != 3 or self._nodes((weight, bias)):
            return self._linear(node)
        place, held = self.at(source), None if bias is None else self.values[bias]
        settings = *map(_pair, (stride, padding, dilation)), groups
        before = self.ops[place].shape
        kernel = self.values[weight]
        return self.add(Conv2d(self.name, (place,), shape, kernel, held, before, *settings))


PRODUCTS = (aten.mm.default, aten.bmm.default)

READERS: dict[Any, Callable[[_Reader, Node], int]] = {
    **dict.fromkeys(PLUS | TIMES, _Reader._arithmetic),
    aten.relu.default: _Reader._relu,
    aten.where.self: _Reader._where,
    aten.mm.default: _Reader._matrix,
    aten.addmm.default: _Reader._matrix,
    aten.bmm.default: _Reader._matrix,
    aten.convolution.default: _Reader._convolution,
}
"""Operators with code of their own."""


def _alone(value: Tensor) -> Shape:
    """The shape of a value at batch 1 as that of one image."""
    shape = tuple(value.shape)
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _factors(node: Node) -> tuple[Any, Any]:
    """The two matrices of a product."""
    first, second = node.args[1:3] if node.target is aten.addmm.default else node.args[:2]
    return first, second


def _pair(value: Any) -> tuple[int, int]:
    return int(value[0]), int(value[-1])


def _reachable(ops: Sequence[Op], last: int) -> tuple[Op, ...]:
    """The operations that the last one reads, renumbered."""
    needed, left = set[int](), [last]
    while left:
        place = left.pop()
        if place not in needed:
            needed.add(place)
            left += ops[place].inputs
    number = {place: k for k, place in enumerate(sorted({0, *needed}))}
    return tuple(
        replace(ops[place], inputs=tuple(number[k] for k in ops[place].inputs)) for place in number
    )


def register(op: Any, bounds: Callable[[Tensor, Tensor], curves.Bounds]) -> None:
    """Teach certificates, and their checker, a function of one number.

    Args:
        op: an operator of ``torch.ops``, as it stands in an exported program.
        bounds: of intervals ``(low, high)``, float64: the least and the largest value, and the
            least and the largest slope.
    """
    if not isinstance(op, OpOverload):
        raise TypeError(
            f"op must be one of torch.ops, such as torch.ops.aten.asinh.default, got {op!r}"
        )
    curves.FUNCTIONS[op] = bounds
