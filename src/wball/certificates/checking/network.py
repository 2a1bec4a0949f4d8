"""The network of an exported program as the checker reads it, in float64 on the CPU.

The checker reads the program by itself and shares no code with the bounds of a certificate. A node
of the program that is linear in what depends on the image is interpreted as it is: automatic
differentiation transposes it, and the same node on absolute values gives the magnitudes for its
rounding errors, in float64 and in the program's own precision. The other nodes are kinks
``max(v, leak v)``, functions of one number, and products.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from wball.certificates.checking.lines import OPERATIONS, Chain, Link, Place, follow
from wball.certificates.curves import FUNCTIONS
from wball.certificates.program import Program, place_of, probes

UNIT = 2.0**-53
LARGEST = 2**20
"""Largest number of values of one layer: rows over them are held in memory."""

MATRIX = 2**20
"""Largest number of coefficients of a map that is held as a matrix."""

COMPARED = 4
"""Images at which the network is compared with the program."""

FAINT = 2.0**-100
"""Added to magnitudes: numbers that are too small for the precision are lost."""

Shape = tuple[int, ...]
aten = torch.ops.aten


class Unfollowed(TypeError):
    """The checker does not support the ball or the model. The message names the reason."""


def gamma(terms: float) -> float:
    """Relative error of a sum of ``terms`` products in any order, including the error of computing
    this bound."""
    return 2 * (terms + 4) * UNIT


@dataclass
class LinearMap:
    """An affine function of the values of the nodes ``before``, flat.

    Attributes:
        function: of whether all is absolute, and of values in their ``shapes``.
        terms: how many products are summed in one number; 0 for moves, which are exact.
    """

    before: tuple[int, ...]
    shapes: list[Shape]
    function: Callable[..., Tensor]
    terms: float

    def run(self, values: Sequence[Tensor], absolute: bool = False) -> Tensor:
        """The result, or with ``absolute`` the sum of the magnitudes that enter it."""
        shaped = (v.reshape(shape) for v, shape in zip(values, self.shapes, strict=True))
        return self.function(absolute, *shaped).reshape(-1) + (FAINT if absolute else 0.0)

    @property
    def _zeros(self) -> list[Tensor]:
        return [torch.zeros(math.prod(s), dtype=torch.float64) for s in self.shapes]

    @cached_property
    def const(self) -> Tensor:
        return self.run(self._zeros)

    @cached_property
    def summed(self) -> Tensor:
        """The magnitudes that entered the constant."""
        return self.run(self._zeros, absolute=True)

    @cached_property
    def _graph(self) -> tuple[list[Tensor], Tensor]:
        with torch.enable_grad():
            zeros = [zero.requires_grad_() for zero in self._zeros]
            return zeros, self.run(zeros)

    @cached_property
    def _matrices(self) -> Sequence[Tensor]:
        return self._pull(torch.eye(len(self.const), dtype=torch.float64))

    def transposed(self, rows: Tensor) -> Sequence[Tensor]:
        """Rows ``(R, numbers of the result)`` as rows over each of the values it reads."""
        size = len(self.const) * max(map(math.prod, self.shapes))
        if self.terms and size <= MATRIX:
            return [rows @ matrix for matrix in self._matrices]
        return self._pull(rows)

    def _pull(self, rows: Tensor) -> Sequence[Tensor]:
        zeros, result = self._graph
        found = torch.autograd.grad(
            result, zeros, rows, retain_graph=True, is_grads_batched=True, materialize_grads=True
        )
        return [part.expand(len(rows), -1) for part in found]  # one row of zeros if it is not read


@dataclass(frozen=True)
class Kink:
    """``max(v, leak v)``, called ``name`` in the program."""

    before: tuple[int]
    leak: float
    name: str


@dataclass(frozen=True)
class Bow:
    """A function of one number in every place."""

    before: tuple[int]
    chain: Chain


@dataclass(frozen=True)
class PairProduct:
    """The product of two values in every place, in the shape that ``views`` give them."""

    before: tuple[int, int]
    views: tuple[LinearMap, LinearMap]

    def seen(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [view.run([v]) for view, v in zip(self.views, values, strict=True)]


Bend = Kink | Bow | PairProduct


@dataclass
class Network:
    """Nodes in the order they run: node 0 is the image (``None``), the last one has the logits."""

    program: Program
    nodes: list[LinearMap | Bend | None] = field(default_factory=list)
    deadline: float = math.inf  # of time.monotonic

    def __post_init__(self) -> None:
        self.kind = torch.finfo(self.program.dtype)
        self.nodes = _NodeReader(self.program).network()

    @cached_property
    def kinks(self) -> dict[str, int]:
        """The nodes of kinks by their names."""
        return {node.name: k for k, node in enumerate(self.nodes) if isinstance(node, Kink)}

    def logits(self, image: Tensor) -> Tensor:
        """The logits of one image, flat."""
        held: list[Tensor] = [image.flatten().to("cpu", torch.float64)]
        for node in self.nodes[1:]:
            assert node is not None
            read = [held[k] for k in node.before]
            if isinstance(node, LinearMap):
                held.append(node.run(read))
            elif isinstance(node, Kink):
                held.append(torch.maximum(read[0], node.leak * read[0]))
            elif isinstance(node, PairProduct):
                held.append(torch.mul(*node.seen(read)))
            else:
                low, high = follow(node.chain, read[0], read[0], self.kind).value
                held.append((low + high) / 2)
        return held[-1]

    def compare(self, x: Tensor) -> None:
        """Refuse a program whose answers for a batch are not the network's, image by image."""
        program, points = self.program, probes(x[:COMPARED])
        theirs, exact = (program.run(points.to(d)).cpu() for d in (program.dtype, torch.float64))
        ours = torch.stack([self.logits(point.to(program.dtype)) for point in points])
        sizes = 16 * (theirs - exact).abs() + 64 * self.kind.eps * exact.abs()
        room = sizes[torch.isfinite(sizes)].sum()
        if not bool((((ours - exact).abs() <= room) | ours.isnan()).all()):
            raise Unfollowed(
                "the program's answer for an image depends on the other images of its batch or on "
                "memory that nobody wrote, or is not what the checker reads"
            )


# ---- reading


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = words(
    "view _unsafe_view reshape clone alias detach _to_copy lift_fresh_copy unsqueeze squeeze "
    "permute expand cat stack constant_pad_nd index index_select gather flip roll repeat diagonal "
    "unfold im2col slice slice_scatter select select_scatter copy pixel_shuffle pixel_unshuffle "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_nearest2d "
    "where neg split_with_sizes unbind getitem"
)
"""Operations whose values are among those they read."""

ARITHMETIC = words("add sub mul div")
MATRICES = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1}
"""Products of matrices, with the place of the first factor among the arguments."""

LINEAR = (
    words(
        "convolution mean sum cumsum col2im avg_pool1d avg_pool2d avg_pool3d upsample_bilinear2d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bilinear2d_aa"
    )
    .union(MATRICES)
    .union(MOVES, ARITHMETIC)
)
"""Linear in what depends on the image; coefficients that are not constants are not negative."""

SHAPES = words("full_like zeros_like ones_like new_zeros new_ones new_full sym_size")
"""Operations that read a shape only."""

FACTORS = {
    "convolution": slice(1, 3),
    "index": slice(1, 2),
    "index_select": slice(2, 3),
    "gather": slice(2, 3),
}
"""Arguments that must be constants."""

OTHERS = {
    "view": aten.reshape.default,
    "_unsafe_view": aten.reshape.default,
    "copy": lambda into, source: source.expand(into.shape),  # PyTorch transposes it one by one
}
UNSIGNED = {"sub": aten.add.Tensor, "neg": aten.clone.default}
"""What runs in the place of operations, and for their magnitudes."""


def _name(node: Node) -> str:
    """The name of an operator of ATen."""
    if node.target is operator.getitem:
        return "getitem"
    space, name, overload = (*str(node.target).split("."), "", "")[:3]
    return name if space == "aten" and not overload.endswith("_mode") else str(node.target)


def _nodes(tree: Any) -> list[Node]:
    """The nodes in an argument, each as often as it occurs."""
    found: list[Node] = []
    map_arg(tree, found.append)
    return found


class _NodeReader:
    """Turns the nodes of a program into those of a network.

    Attributes:
        values: what the nodes are for an image of zeros, and constants.
        roots: of nodes that depend on the image, those of which they are functions number by
            number, the furthest one last.
        places: the places of nodes in the network.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[Node, Any] = dict(program.constants)
        on = {value.device for value in self.values.values()}
        self.values[program.image] = torch.zeros(
            (1, *program.shape), dtype=program.dtype, device=on.pop() if on else None
        )
        self.roots = {program.image: [program.image]}
        self.places = {program.image: 0}
        self.nodes: list[LinearMap | Bend | None] = [None]
        self.shapes: list[Shape] = [(1, *program.shape)]
        with torch.no_grad():
            for node in program.nodes:
                self._survey(node)

    def _survey(self, node: Node) -> None:
        """Run a node for an image of zeros, and find what it is a function of."""
        name, reads = _name(node), self._reads(node)
        value = self.program.apply(node, self.values, self.program.dtype)
        if name == "empty":
            value = torch.zeros_like(value)  # :meth:`Network.compare` sees whether it is read
        self.values[node] = value
        # Numbers that do not overflow are never infinite.
        infinite = name in ("eq", "ne") and node.args[1] in (math.inf, -math.inf)
        if not reads or name in SHAPES or infinite:
            return
        self.roots[node] = [node]
        plain = name in OPERATIONS or name == "relu" or node.target in FUNCTIONS
        if plain and {self._shape(n) for n in reads} == {self._shape(node)}:
            first, *rest = (self.roots[n] for n in reads)
            self.roots[node] += [n for n in first if all(n in more for more in rest)]

    def _reads(self, node: Any) -> list[Node]:
        """What a node reads that depends on the image, each as often as it is read."""
        return [n for n in _nodes((node.args, dict(node.kwargs))) if n in self.roots]

    def _shape(self, node: Node) -> Shape:
        return tuple(getattr(self.values[node], "shape", ()))

    def network(self) -> list[LinearMap | Bend | None]:
        """The nodes that the logits depend on."""
        logits = self.program.logits
        needed = {logits, *self._needs(logits)}
        for node in reversed(self.program.nodes):
            if node in needed:
                needed.update(self._needs(node))
        for node in self.program.nodes:
            if node in needed:
                self.places[node] = self._place(node)
        return self.nodes

    def refused(self, node: Node, reason: str) -> Unfollowed:
        return Unfollowed(f"the checker does not follow {place_of(node)}: {reason}")

    # ---- what is done with a node

    def _divides(self, node: Node) -> bool:
        return _name(node) == "div" and node.args[1] in self.roots

    def _is_curve(self, node: Node) -> bool:
        """Whether a node is read as a function of its furthest root."""
        name, reads = _name(node), self._reads(node)
        if name in ("mul", "div") and (len(reads) > 1 or self._divides(node)):
            return len(self.roots[node]) > 1
        if name == "where":
            return node.args[0] in self.roots
        if name == "_to_copy":
            return not self.values[reads[0]].is_floating_point()
        return (
            name not in LINEAR
            and (name in OPERATIONS or node.target in FUNCTIONS)
            and name != "relu"
        )

    def _needs(self, node: Node) -> list[Node]:
        """The nodes whose values a node is computed from."""
        if node not in self.roots:
            raise self.refused(node, "it does not depend on the image")
        if _name(node) == "getitem":
            return self._reads(node.args[0])
        if not self._is_curve(node):
            return self._reads(node)
        if len(self.roots[node]) == 1:
            raise self.refused(node, "a function of several values")
        return [self.roots[node][-1]]

    def _place(self, node: Node) -> int:
        name, value, needs = _name(node), self.values[node], self._needs(node)
        if self._is_curve(node):
            return self._curve(node, self.places[needs[0]])
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            raise self.refused(node, f"its values are {getattr(value, 'dtype', 'several')}")
        if name in ("relu", "leaky_relu"):
            leak: Any = 0.0 if name == "relu" else [0.01, *node.args[1:]][-1]
            if not 0 <= leak <= 1:
                raise self.refused(node, f"its slope {leak} is not between 0 and 1")
            return self.add(Kink((self.places[needs[0]],), float(leak), node.name), value.shape)
        factors = self._factors(node)
        if factors and all(n in self.roots for n in factors):
            return self._matrices(node)
        if self._divides(node) or (name == "mul" and len(needs) > 1):
            return self._product(node)
        if name in LINEAR:
            return self._linear(node)
        raise self.refused(node, "the operator is not known; wball.certificates.register adds it")

    def add(self, node: LinearMap | Bend, shape: Sequence[int]) -> int:
        if math.prod(shape) > LARGEST:
            raise Unfollowed(
                f"a layer of {math.prod(shape)} values, the checker handles up to {LARGEST}"
            )
        self.nodes.append(node)
        self.shapes.append(tuple(shape))
        return len(self.nodes) - 1

    def affine(
        self, before: Sequence[int], run: Callable[..., Tensor], shape: Shape, terms: float = 0.0
    ) -> int:
        shapes = [self.shapes[k] for k in before]
        return self.add(LinearMap(tuple(before), shapes, run, terms), shape)

    # ---- kinds of nodes

    def _curve(self, node: Node, place: int) -> int:
        """A function of one number, from its furthest root."""
        root, shape = self.roots[node][-1], self._shape(node)
        wanted, left = {node}, [node]
        while left:
            new = {n for n in self._reads(left.pop()) if n is not root} - wanted
            wanted |= new
            left += new
        found, steps = {root: Place(0)}, list[Link]()

        def operand(n: Node) -> Any:
            value = found.get(n, self.values.get(n))
            if not isinstance(value, Tensor):
                return value
            return self._number(n).expand(shape).reshape(-1)

        for n in self.program.nodes:
            if n in wanted:
                args = map_arg(n.args, operand)
                scale = {k: v for k, v in n.kwargs.items() if k == "alpha"}
                steps.append(Link(_name(n), n.target, tuple(args), scale))
                found[n] = Place(len(steps))
        return self.add(Bow((place,), tuple(steps)), shape)

    @staticmethod
    def _constant(value: Any) -> Any:
        """A value on the CPU, in float64 if it is real."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype)

    def _number(self, value: Any) -> Tensor:
        return torch.as_tensor(self.values.get(value, value)).detach().to("cpu", torch.float64)

    def _product(self, node: Node) -> int:
        """The product of two values; a divisor becomes its reciprocal."""
        if node.args[0] not in self.places:
            raise self.refused(node, "a quotient of another shape than its divisor")
        first, second = (self.places[a] for a in node.args[:2])  # type: ignore[index]
        shape = self._shape(node)
        if self._divides(node):
            inverse = Link("reciprocal", aten.reciprocal.default, (Place(0),), {})
            second = self.add(Bow((second,), (inverse,)), self.shapes[second])
        return self._multiplied(
            first, second, lambda v: v.expand(shape), lambda v: v.expand(shape), shape
        )

    def _multiplied(
        self,
        first: int,
        second: int,
        one: Callable[[Tensor], Tensor],
        other: Callable[[Tensor], Tensor],
        shape: Shape,
    ) -> int:
        views = [
            LinearMap((place,), [self.shapes[place]], lambda absolute, v, view=view: view(v), 0.0)
            for place, view in ((first, one), (second, other))
        ]
        return self.add(PairProduct((first, second), (views[0], views[1])), shape)

    def _factors(self, node: Node) -> tuple[Any, ...]:
        """The factors of a product of matrices."""
        start = MATRICES.get(_name(node), len(node.args))
        return node.args[start : start + 2]

    def _matrices(self, node: Node) -> int:
        """A product of two matrices that depend on the image: all products of pairs, summed."""
        first, second = (self.places[n] for n in self._factors(node))
        bias = self._number(node.args[0]) if _name(node) == "addmm" else torch.zeros(())
        if node.kwargs or len(self._reads(node)) > 2:
            raise self.refused(node, "a sum of matrices that depend on the image")
        a, b = self.shapes[first], self.shapes[second]
        whole = (*a[:-1], b[-1], a[-1])
        pairs = self._multiplied(
            first,
            second,
            lambda v: v.unsqueeze(-2).expand(whole),
            lambda v: v.mT.unsqueeze(-3).expand(whole),
            whole,
        )

        def total(absolute: bool, v: Tensor) -> Tensor:
            return v.sum(-1) + (bias.abs() if absolute else bias)

        return self.affine([pairs], total, self._shape(node), a[-1] + 1.0)

    def _linear(self, node: Node) -> int:
        """A node that is linear in what depends on the image, as it is."""
        part = None
        shape = self._shape(node)
        if _name(node) == "getitem":
            node, part = node.args  # type: ignore[assignment]
        name = _name(node)
        if any(n in self.roots for n in _nodes(node.args[FACTORS.get(name, slice(0, 0))])):
            raise self.refused(node, "its weights or places depend on the image")
        if name not in LINEAR:
            raise self.refused(node, "the operator is not known")
        reads = list(dict.fromkeys(self._reads(node)))
        constants = {n: self._constant(self.values[n]) for n in node.all_input_nodes}

        def run(absolute: bool, *values: Tensor) -> Tensor:
            given = dict(zip(reads, values, strict=True))

            def fill(n: Node) -> Any:
                held = given.get(n, constants[n])
                real = isinstance(held, Tensor) and held.is_floating_point()
                return held.abs() if absolute and real else held

            def unsigned(value: Any) -> Any:
                real = isinstance(value, float) or (type(value) is int and name in ARITHMETIC)
                return abs(value) if absolute and real else value

            args, kwargs = map_arg((node.args, dict(node.kwargs)), fill)
            kwargs = {k: unsigned(v) for k, v in kwargs.items() if k not in ("dtype", "device")}
            target: Any = (UNSIGNED if absolute else {}).get(name, OTHERS.get(name, node.target))
            found = target(*map(unsigned, args), **kwargs)
            return found if part is None else found[part]

        return self.affine([self.places[n] for n in reads], run, shape, self._terms(node, reads))

    def _terms(self, node: Node, reads: list[Node]) -> float:
        """How many products are summed in one number, at most; 0 for moves."""
        name, value = _name(node), self.values[node]
        if name in MOVES:
            return 0.0
        if name in ARITHMETIC:
            return 2.0
        if name in MATRICES:
            return self._shape(self._factors(node)[0])[-1] + 2.0
        if name == "convolution":
            weight = self.values[node.args[1]]  # type: ignore[index]
            return max(weight[0].numel(), weight[:, 0].numel()) + 2.0
        before = sum(self.values[n].numel() for n in reads)
        return before / (value.numel() if name in ("mean", "sum") else 1) + 2.0
