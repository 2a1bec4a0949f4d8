"""The network of an exported program as the checker reads it, in float64 on the CPU.

The checker reads the program by itself and shares no code with the bounds of a certificate. A node
of the program that is linear in what depends on the image is interpreted as it is: automatic
differentiation transposes it, and the same node on absolute values gives the magnitudes for its
rounding errors, in float64 and in the program's own precision. Products of two values are read in
the same way. The other nodes are kinks ``max(v, 0)`` and functions of one number.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from wball.certificates.checking.lines import OPERATIONS, Function, Span, Unfollowed, apply, follow
from wball.certificates.curves import FUNCTIONS
from wball.certificates.program import Program, place_of, probes

LARGEST = 2**20
"""Largest number of values of one layer: rows over them are held in memory."""

COMPARED = 4
"""Images at which the network is compared with the program."""

ALIKE = 2.0**12
"""Units in the last place by which their logits may differ: constants are in the program's own
precision."""

FAINT = 2.0**-100
"""Added to magnitudes: numbers that are too small for the precision are lost."""

Shape = tuple[int, ...]
Values = Sequence[Tensor]
aten = torch.ops.aten


@dataclass(frozen=True)
class LinearNode:
    """A function of the values of the nodes ``before``, flat: affine, or with ``factors`` linear in
    each of two.

    Attributes:
        function: of whether all is absolute, and of values in their ``shapes``.
        terms: how many products are summed in one number; 0 for moves, which are exact.
    """

    before: tuple[int, ...]
    shapes: list[Shape]
    function: Callable[..., Tensor]
    terms: float
    factors: bool

    def run(self, values: Values, absolute: bool = False) -> Tensor:
        """The result, or with ``absolute`` the sum of the magnitudes that enter it."""
        shaped = (v.reshape(shape) for v, shape in zip(values, self.shapes, strict=True))
        found = self.function(absolute, *shaped).reshape(-1)
        return found.abs() + FAINT if absolute else found

    def pull(self, rows: Tensor, values: Values) -> Values:
        """Rows ``(R, numbers of the result)`` as rows over each of the values it reads: the
        derivative at ``values``."""
        with torch.enable_grad():
            at = [v.clone().requires_grad_() for v in values]
            result = self.run(at)
        found = torch.autograd.grad(result, at, rows, is_grads_batched=True, materialize_grads=True)
        return [part.expand(len(rows), -1) for part in found]  # one row of zeros if it is not read


@dataclass(frozen=True)
class Kink:
    """``max(v, 0)``, called ``name`` in the program."""

    before: tuple[int]
    name: str


@dataclass(frozen=True)
class CurveNode:
    """A function of one number in every place."""

    before: tuple[int]
    function: Function


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = words(
    "view _unsafe_view reshape clone alias detach lift_fresh_copy unsqueeze squeeze permute expand "
    "cat stack constant_pad_nd index index_select gather flip roll repeat diagonal unfold im2col "
    "slice slice_scatter select select_scatter copy pixel_shuffle pixel_unshuffle "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_nearest2d "
    "where neg split_with_sizes unbind getitem"
)
"""Operations whose values are among those they read."""

ARITHMETIC = words("add sub mul div _to_copy")
FACTORS = {"mul": 0, "div": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1}
"""Products, with the place of the first factor among the arguments."""

BENT = {"div": 1, "where": 0}
"""Arguments in which an operation is not linear."""

COUNTED = ARITHMETIC.union(FACTORS)
"""Operations that multiply by or add the whole numbers among their arguments."""

LINEAR = MOVES.union(
    words(
        "convolution mean sum cumsum col2im avg_pool1d avg_pool2d avg_pool3d upsample_bilinear2d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bilinear2d_aa"
    ),
    COUNTED,
)
"""Linear in what depends on the image, if that is one factor of a product; coefficients that are
not constants are not negative."""

SHAPES = words("full_like zeros_like ones_like new_zeros new_ones new_full sym_size")
"""Operations that read a shape only."""

PLACES = words("dtype device")
"""Settings that do not change values."""

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


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Network:
    """The nodes that the logits depend on, in the order they run: node 0 is the image (``None``),
    the last one has the logits.

    Attributes:
        deadline: of ``time.monotonic``, for bounds of this network.
        values: what the nodes of the program are for an image of zeros, and constants.
        root: of nodes that depend on the image, the furthest one of which they are functions number
            by number.
        places: the places of the program's nodes in the network.
    """

    deadline = math.inf

    def __init__(self, program: Program) -> None:
        self.program, self.kind = program, torch.finfo(program.dtype)
        self.values: dict[Node, Any] = dict(program.constants)
        on = next((value.device for value in self.values.values()), None)
        self.values[program.image] = torch.zeros(
            (1, *program.shape), dtype=program.dtype, device=on
        )
        self.root, self.places = {program.image: program.image}, {program.image: 0}
        self.nodes: list[LinearNode | Kink | CurveNode | None] = [None]
        self.shapes: list[Shape] = [(1, *program.shape)]
        with torch.no_grad():
            for node in program.nodes:
                self._survey(node)
            needed = {program.logits}
            for node in reversed(program.nodes):
                needed.update(self._needs(node) if node in needed else ())
            for node in program.nodes:
                if node in needed:
                    self.places[node] = self._place(node)

    def logits(self, image: Tensor) -> Tensor:
        """The logits of one image, flat."""
        held = [image.flatten().to("cpu", torch.float64)]
        for node in self.nodes[1:]:
            assert node is not None
            read = [held[k] for k in node.before]
            if isinstance(node, LinearNode):
                held.append(node.run(read))
            elif isinstance(node, Kink):
                held.append(read[0].relu())
            else:
                unit = torch.arange(len(read[0]))
                held.append(follow(node.function, read[0], read[0], unit, self.kind).value.mean(0))
        return held[-1]

    def compare(self, x: Tensor) -> None:
        """Refuse a program whose answers for a batch are not the network's, image by image."""
        points = probes(x[:COMPARED]).to(self.program.dtype)
        theirs = self.program.run(points.double()).cpu()
        off = (torch.stack([self.logits(point) for point in points]) - theirs).abs()
        if bool((off > ALIKE * self.kind.eps * theirs.abs().nan_to_num(0.0, 0.0, 0.0).max()).any()):
            raise Unfollowed(
                "the program's answer for an image depends on the other images of its batch or on "
                "uninitialised memory, or is not what the checker reads"
            )

    # ---- what a node is

    def _survey(self, node: Node) -> None:
        """Run a node for an image of zeros, and find what it is a function of."""
        name, reads = _name(node), self._reads(node)
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random or "empty" in name:
            raise self._refused(node, "it is random, or uninitialised memory")
        value = self.values[node] = self.program.apply(node, self.values, self.program.dtype)
        if not reads or name in SHAPES:
            return
        self.root[node] = node
        plain = (name in OPERATIONS or node.target in FUNCTIONS) and not self._coarse(value)
        roots = {self.root[n] for n in reads}
        if plain and len(roots) == 1 and {self._shape(n) for n in reads} == {self._shape(node)}:
            self.root[node] = roots.pop()

    def _coarse(self, value: Any) -> bool:
        """Whether values are rounded more coarsely than the program's precision."""
        return _real(value) and torch.finfo(value.dtype).eps > self.kind.eps

    def _reads(self, node: Node) -> list[Node]:
        """What a node reads that depends on the image."""
        return [n for n in node.all_input_nodes if n in self.root]

    def _shape(self, node: Node) -> Shape:
        return tuple(getattr(self.values[node], "shape", ()))

    def _refused(self, node: Node, reason: str) -> Unfollowed:
        return Unfollowed(f"the checker does not follow {place_of(node)}: {reason}")

    def _multiplies(self, node: Node) -> bool:
        """Whether a node is a product of two values that depend on the image."""
        start = FACTORS.get(_name(node), len(node.args))
        return len(pair := node.args[start : start + 2]) == 2 and all(n in self.root for n in pair)

    def _is_curve(self, node: Node) -> bool:
        """Whether a node is read as a function of its root."""
        name, reads = _name(node), self._reads(node)
        if self.root[node] is node or name == "relu":
            return False
        bent = name in BENT and node.args[BENT[name]] in self.root or self._multiplies(node)
        return bent or name not in LINEAR or not all(_real(self.values[n]) for n in reads)

    def _needs(self, node: Node) -> list[Node]:
        """The nodes whose values a node is computed from."""
        if node not in self.root:
            raise self._refused(node, "it does not depend on the image")
        if self._is_curve(node):
            return [self.root[node]]
        return self._reads(node.args[0] if _name(node) == "getitem" else node)  # type: ignore[arg-type]

    def _place(self, node: Node) -> int:
        name, value = _name(node), self.values[node]
        if not _real(value) or self._coarse(value):
            raise self._refused(node, f"its values are {getattr(value, 'dtype', 'several')}")
        if self._is_curve(node):
            return self._add(
                CurveNode((self.places[self.root[node]],), self._function(node)), value.shape
            )
        if name == "relu":
            return self._add(Kink((self.places[self._needs(node)[0]],), node.name), value.shape)
        return self._linear(node)

    def _add(self, node: LinearNode | Kink | CurveNode, shape: Sequence[int]) -> int:
        if math.prod(shape) > LARGEST:
            raise Unfollowed(
                f"a layer of {math.prod(shape)} values, the checker handles up to {LARGEST}"
            )
        self.nodes.append(node)
        self.shapes.append(tuple(shape))
        return len(self.nodes) - 1

    # ---- kinds of nodes

    def _function(self, node: Node) -> Function:
        """A function of one number, from its root."""
        root, shape = self.root[node], self._shape(node)
        inside = [n for n in self.program.nodes if self.root.get(n) is root and n is not root]
        inside = inside[: inside.index(node) + 1]
        reads = {n for inner in inside for n in inner.all_input_nodes} - self.root.keys()
        constants = {n: self._constant(self.values[n]) for n in reads}

        def some(value: Any, unit: Tensor) -> Any:
            return value.expand(shape).flatten()[unit] if isinstance(value, Tensor) else value

        def run(span: Span, unit: Tensor) -> Span:
            held = {root: span, **{n: some(value, unit) for n, value in constants.items()}}
            for n in inside:
                scale = {k: v for k, v in n.kwargs.items() if k == "alpha"}
                args: Any = map_arg(n.args, lambda read: held[read])
                held[n] = apply(_name(n), n.target, *args, **scale)
            return held[node]

        return run

    @staticmethod
    def _constant(value: Any) -> Any:
        """A value on the CPU, in float64 if it is real."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu", torch.float64 if _real(value) else value.dtype)

    def _linear(self, node: Node) -> int:
        """A node that is linear in what depends on the image, or in each of two factors, as it
        is."""
        shape, part = self._shape(node), None
        if _name(node) == "getitem":
            node, part = node.args  # type: ignore[assignment]
        name, factors = _name(node), self._multiplies(node)
        settings = {k: v for k, v in node.kwargs.items() if k not in PLACES}
        read = list[Node]()  # each as often as it is read
        map_arg((node.args, settings), read.append)
        before = [self.places[n] for n in read if n in self.root]
        target: Any = OTHERS.get(name, node.target)
        if name == "div" and factors:
            inverse = CurveNode((before[1],), lambda v, unit: apply("div", None, 1.0, v))
            before[1] = self._add(inverse, self.shapes[before[1]])
            target = aten.mul.Tensor
        if name not in LINEAR:
            raise self._refused(
                node,
                "it is not linear in what depends on the image, and not a function of one value "
                "that is known (wball.certificates.register adds one)",
            )
        constants = {n: self._constant(self.values[n]) for n in read if n not in self.root}

        def unsigned(value: Any) -> Any:
            number = type(value) is float or (type(value) is int and name in COUNTED)
            return abs(value) if number or _real(value) else value

        def run(absolute: bool, *values: Tensor) -> Tensor:
            rest, function = iter(values), UNSIGNED.get(name, target) if absolute else target
            sign = unsigned if absolute else (lambda value: value)

            def fill(n: Node) -> Any:
                return sign(constants[n] if n in constants else next(rest))

            args, given = map_arg((node.args, settings), fill)
            found = function(*map(sign, args), **{k: sign(v) for k, v in given.items()})
            return found if part is None else found[part]

        shapes = [self.shapes[k] for k in before]
        found = LinearNode(tuple(before), shapes, run, self._terms(node), factors)
        self._check(node, found)
        return self._add(found, shape)

    def _check(self, node: Node, linear: LinearNode) -> None:
        """Refuse a node that is not what :class:`Linear` says, at random values."""
        draw = torch.Generator().manual_seed(0)
        one = [
            torch.randn(math.prod(s), dtype=torch.float64, generator=draw) for s in linear.shapes
        ]
        found, other, none = (linear.run([sign * v for v in one]) for sign in (1, -1, 0))
        most = linear.run([v.abs() for v in one], absolute=True)
        bent = 0 * most if linear.factors else found + other - 2 * none
        if not bool(((bent.abs() <= 1e-9 * most) & (found.abs() <= (1 + 1e-9) * most)).all()):
            raise self._refused(node, "it is not linear in what depends on the image")

    def _terms(self, node: Node) -> float:
        """How many products are summed in one number, at most; 0 for moves."""
        name = _name(node)
        if name in MOVES:
            return 0.0
        if name in ARITHMETIC:
            return 2.0
        if name in FACTORS:
            return self._shape(node.args[FACTORS[name]])[-1] + 2.0  # type: ignore[arg-type]
        if name == "convolution":
            weight = self.values[node.args[1]]  # type: ignore[index]
            return max(weight[0].numel(), weight[:, 0].numel()) + 2.0
        before = sum(self.values[n].numel() for n in self._reads(node))
        return before / (self.values[node].numel() if name in ("mean", "sum") else 1) + 2.0
