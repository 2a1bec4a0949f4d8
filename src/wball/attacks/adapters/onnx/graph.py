"""A graph of an ONNX file as a module: PyTorch functions run its nodes one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from wball.attacks.adapters.onnx import elementwise, layers, shapes  # noqa: F401 (they fill the table)
from wball.attacks.adapters.onnx.table import OPERATORS, TYPES, Node, read_node

OLDEST, NEWEST = 7, 28
"""Supported operator sets. Older ones broadcast differently; newer ones have not been tested."""
SMALL = 64
"""Integer constants up to this size stay on the CPU: they are shapes and axes."""

Scope = dict[str, Tensor | None]


class Graph(nn.Module):
    """The nodes of a graph. Weights become parameters; what depends on weights alone is computed once.

    Raises ``ValueError`` that names every unsupported operator, attribute and type on the way to
    ``outputs``.
    """

    def __init__(
        self, proto: onnx.GraphProto, opset: int, outputs: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.inputs = [i.name for i in proto.input]
        self.outputs = [o.name for o in proto.output if outputs is None or o.name in outputs]
        self._small: dict[str, Tensor] = {}
        self._stored: dict[str, str] = {}
        self._branches = nn.ModuleDict()
        complaints = []
        constants: Scope = {}
        for weight in proto.initializer:
            try:
                constants[weight.name] = shapes.constant(weight)
            except ValueError as error:
                complaints.append(str(error))
        for value in (*proto.input, *(o for o in proto.output if o.name in self.outputs)):
            kind, known = value.type.tensor_type.elem_type, (*TYPES, onnx.TensorProto.UNDEFINED)
            if value.type.WhichOneof("value") not in (None, "tensor_type") or kind not in known:
                complaints.append(f"{value.name!r} is not a tensor of a type that is known here")
        self.nodes: list[Node] = []
        for node in _needed(proto, self.outputs):
            try:
                self._add(node, opset)
            except ValueError as error:
                complaints.append(str(error))
        if complaints:
            raise ValueError("; ".join(sorted(set(complaints))))
        self._fold(constants)

    def _add(self, proto: onnx.NodeProto, opset: int) -> None:
        if proto.op_type != "If":
            self.nodes.append(read_node(proto, opset))
            return
        name = f"if_{len(self._branches)}"
        self._branches[name] = nn.ModuleDict({a.name: Graph(a.g, opset) for a in proto.attribute})
        self.nodes.append(
            Node("If", 1, {"branches": name}, tuple(proto.input), tuple(proto.output))
        )

    def _fold(self, constants: Scope) -> None:
        """Compute what depends on constants alone, and keep of the constants what is still read."""
        left = []
        for node in self.nodes:
            if node.kind != "If" and all(name in constants or not name for name in node.inputs):
                with torch.no_grad():
                    constants |= _named(node, _run(node, constants))
            else:
                left.append(node)
        self.nodes = left
        read = (
            {name for node in self.nodes for name in node.inputs} | set(self.outputs) | self.outer()
        )
        for name, value in constants.items():
            if name in read and value is not None:
                self.keep(name, value)
        self.inputs = [name for name in self.inputs if name not in constants]
        self.use(self.nodes, self.outputs)

    def use(self, nodes: Iterable[Node], outputs: list[str]) -> None:
        """Keep the nodes that these outputs need."""
        wanted, needed = set(outputs), []
        for node in reversed(list(nodes)):
            if wanted.intersection(node.outputs):
                needed.append(node)
                wanted |= self._read_by(node)
        self.nodes, self.outputs = needed[::-1], outputs
        # How often each value is read, so that it is freed after the last time.
        self._reads = Counter(name for node in self.nodes for name in self._read_by(node))
        self._reads.update(outputs)

    def outer(self) -> set[str]:
        """The values that branches read from outside."""
        return {
            name
            for branches in self._branches.values()
            for branch in _graphs(branches)
            for name in branch.wanted()
        }

    def wanted(self) -> set[str]:
        """The values that this graph does not make itself."""
        made = (
            {name for node in self.nodes for name in node.outputs}
            | self._small.keys()
            | self._stored.keys()
        )
        read = (
            {name for node in self.nodes for name in node.inputs if name}
            | set(self.outputs)
            | self.outer()
        )
        return read - made

    def _read_by(self, node: Node) -> set[str]:
        if node.kind != "If":
            return set(node.inputs)
        inside = {
            name for branch in _graphs(self._branches[node["branches"]]) for name in branch.wanted()
        }
        return set(node.inputs) | inside

    def keep(self, name: str, value: Tensor) -> None:
        """A constant. Numbers and shapes stay on the CPU, where reading them waits for nothing."""
        if value.ndim == 0 or (not value.is_floating_point() and value.numel() <= SMALL):
            self._small[name] = value
            return
        own = f"value_{len(self._stored)}"  # names in the file may hold dots
        self._stored[name] = own
        if value.is_floating_point():
            self.register_parameter(own, nn.Parameter(value.clone()))
        else:
            self.register_buffer(own, value)

    def constant(self, name: str) -> Tensor | None:
        """A small constant, if that is one."""
        return self._small.get(name)

    def forward(
        self, given: Mapping[str, Tensor], around: Mapping[str, Tensor | None] | None = None
    ) -> list[Tensor]:
        """The graph's outputs; ``around``: the values of the graph that this one is a branch of."""
        values: Scope = {**(around or {}), **given, **self._small, "": None}
        values |= {name: getattr(self, own) for name, own in self._stored.items()}
        left = Counter(self._reads)
        for node in self.nodes:
            if node.kind == "If":
                condition = values[node.inputs[0]]
                assert condition is not None
                branch = "then_branch" if bool(condition) else "else_branch"
                inner: Any = self._branches[node["branches"]]
                values |= dict(zip(node.outputs, inner[branch]({}, values), strict=True))
            else:
                values |= _named(node, _run(node, values))
            for name in self._read_by(node):
                left[name] -= 1
                if left[name] <= 0 and name not in self._small and name not in self._stored:
                    values.pop(name, None)
            values[""] = None
        found = [values[name] for name in self.outputs]
        return [value for value in found if value is not None]


def _graphs(branches: nn.Module) -> Iterator[Graph]:
    return (branch for branch in branches.children() if isinstance(branch, Graph))


def _run(node: Node, values: Mapping[str, Tensor | None]) -> Any:
    inputs = [values[name] if name else None for name in node.inputs]
    return OPERATORS[node.kind].run(node, *inputs)


def _named(node: Node, found: Any) -> Scope:
    several = found if isinstance(found, (tuple, list)) else (found,)
    return {name: value for name, value in zip(node.outputs, several, strict=False) if name}


def _needed(proto: onnx.GraphProto, outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that these outputs depend on, in their order."""
    wanted, found = set(outputs), []
    for node in reversed(proto.node):
        if wanted.intersection(node.output):
            found.append(node)
            wanted.update(_names_read(node))
    return found[::-1]


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, its branches included."""
    yield from node.input
    for attribute in node.attribute:
        yield from (output.name for output in attribute.g.output)
        for inner in attribute.g.node:
            yield from _names_read(inner)
