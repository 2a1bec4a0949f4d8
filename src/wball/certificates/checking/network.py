"""The network of a model as the checker uses it: affine maps and bends of one image, in float64.

The reading itself is :func:`wball.certificates.tracing.trace`, which refuses what it does not
follow and compares its graph with the model at points around the images. The checker makes its own
reading of the model in this way, and shares no other code with the bounds of a certificate: a map
is the operation itself, transposed by differentiation, and its magnitudes are those of the
operation with absolute weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from wball.certificates import graph as ops
from wball.certificates.graph import Graph, Shape

UNIT = 2.0**-53
LARGEST = 2**20
"""Largest number of values of one layer: rows over them are held in memory."""

MATRIX = 2**20
"""Largest number of coefficients of a map that is held as a matrix."""

Linear = Callable[[Tensor], Tensor]


class Unfollowed(TypeError):
    """The checker does not support the ball or the model. The message names the reason."""


def gamma(terms: int) -> float:
    """Relative error of a sum of ``terms`` products in any order, including the error of computing
    this bound."""
    return 2 * (terms + 4) * UNIT


@dataclass
class Map:
    """A linear map of the value of node ``source``; ``size`` holds the absolute values of its
    coefficients."""

    source: int
    shape: Shape
    run: Linear
    size: Linear | None

    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            zero = torch.zeros((1, *self.shape), dtype=torch.float64, requires_grad=True)
            return zero, self.run(zero)

    @cached_property
    def _matrix(self) -> Tensor:
        return self._pull(torch.eye(self._graph[1].numel(), dtype=torch.float64))

    def magnitude(self, values: Tensor) -> Tensor:
        """Apply the map with absolute coefficients to flat, non-negative ``values``; flat."""
        if self.size is not None:
            return self.size(values.reshape(1, *self.shape)).flatten()
        numbers = self._graph[1].numel()
        if numbers * len(values) > MATRIX:
            raise Unfollowed(f"a map of {len(values)} to {numbers} values whose signs are unknown")
        return self._matrix.abs() @ values

    def transposed(self, rows: Tensor) -> Tensor:
        """Rows ``(R, values of the result)`` as rows ``(R, values of the source)``."""
        small = rows.shape[1] * math.prod(self.shape) <= MATRIX
        return rows @ self._matrix if small else self._pull(rows)

    def _pull(self, rows: Tensor) -> Tensor:
        zero, result = self._graph
        (found,) = torch.autograd.grad(
            result,
            zero,
            rows.reshape(-1, *result.shape),
            retain_graph=True,
            is_grads_batched=True,
        )
        return found.flatten(1)


@dataclass
class LinearSum:
    """A sum of linear maps of earlier nodes and a constant.

    Attributes:
        const: the constant, flat.
        summed: magnitudes that entered the constant, flat.
        terms: an upper bound of the number of products summed in one value.
    """

    maps: list[Map]
    const: Tensor
    summed: Tensor
    terms: int


@dataclass
class Bend:
    """A node that is not affine: ``max(v, leak v)``, or the ``curve`` of that name."""

    before: int
    leak: float = 0.0
    curve: str = ""


@dataclass
class Network:
    """Nodes in the order they run: node 0 is the image (``None``), the last one has the logits.

    ``device`` is that of the graph's weights; the checker itself runs on a CPU.
    """

    graph: Graph
    device: torch.device
    nodes: list[LinearSum | Bend | None] = field(default_factory=list)
    deadline: float = math.inf  # of time.monotonic

    def __post_init__(self) -> None:
        for op in self.graph.ops:
            if math.prod(op.shape) > LARGEST:
                raise Unfollowed(
                    f"a layer of {math.prod(op.shape)} values, the checker handles up to {LARGEST}"
                )
            self.nodes.append(_node(op, [self.graph.ops[k].shape for k in op.inputs], self.device))

    @property
    def bends(self) -> list[int]:
        return [k for k, node in enumerate(self.nodes) if isinstance(node, Bend)]

    @property
    def classes(self) -> int:
        return self.graph.ops[-1].shape[0]

    def logits(self, image: Tensor) -> Tensor:
        """The logits of one flat image."""
        shape = (1, *self.graph.ops[0].shape)
        return self.graph.logits(image.reshape(shape).to(self.device))[0].cpu()


def _node(op: ops.Op, shapes: list[Shape], device: torch.device) -> LinearSum | Bend | None:
    if isinstance(op, ops.Input):
        return None
    if isinstance(op, ops.Affine):
        return _affine(op, shapes, device)
    if isinstance(op, ops.Activation):
        return Bend(op.inputs[0], op.leak)
    assert isinstance(op, ops.Curved)
    return Bend(op.inputs[0], curve=op.kind)


def _affine(op: ops.Affine, shapes: list[Shape], device: torch.device) -> LinearSum:
    zeros = [torch.zeros((1, *shape), dtype=torch.float64, device=device) for shape in shapes]
    const = op.forward(*zeros).detach()
    summed = const.abs()
    if isinstance(op, ops.Diagonal) and op.summed is not None:
        summed = summed + op.summed.expand(const.shape)

    def only(k: int, function: Callable[..., Tensor]) -> Linear:
        at_zero = function(*zeros)
        room = 0.0 if function == op.forward else 4 * UNIT * at_zero.abs()
        return lambda t: (
            function(*zeros[:k], t.to(device), *zeros[k + 1 :]) - at_zero + room
        ).cpu()

    absolute = _absolute(op)
    maps = [
        Map(source, shape, only(k, op.forward), None if absolute is None else only(k, absolute))
        for k, (source, shape) in enumerate(zip(op.inputs, shapes, strict=True))
    ]
    terms = sum(math.prod(shape) for shape in shapes) + 8
    return LinearSum(maps, const.flatten().cpu(), summed.flatten().cpu(), terms)


def _absolute(op: ops.Affine) -> Callable[..., Tensor] | None:
    """The operation with absolute coefficients, up to a constant; ``None`` if they are unknown."""
    if isinstance(op, (ops.Linear, ops.Conv2d)):
        return replace(op, weight=op.weight.abs()).forward
    if isinstance(op, ops.Diagonal):
        return replace(op, scale=op.scale.abs()).forward
    if isinstance(op, ops.Sum):
        return replace(op, sign=1.0).forward
    if isinstance(op, ops.Generic):
        return op.magnitude
    return op.forward
