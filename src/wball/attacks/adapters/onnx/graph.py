"""A graph of an ONNX file as a module: PyTorch functions run its nodes one after the other."""

from collections.abc import Iterable, Mapping, Sequence

import onnx
import torch
from torch import Tensor, nn

from wball.attacks.adapters.onnx import elementwise, layers, shapes  # noqa: F401 (they fill the table)
from wball.attacks.adapters.onnx.table import TYPES, Node, read_node


class OnnxGraph(nn.Module):
    """The nodes of a graph. Weights become parameters; values that depend on weights alone are
    computed once. Raises a ``ValueError`` that names every unsupported operator, attribute and type
    between the input and ``outputs``."""

    def __init__(
        self, proto: onnx.GraphProto, opset: int, outputs: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.outputs = list(outputs or (o.name for o in proto.output))
        self.constants: dict[str, Tensor] = {}
        self._weights: dict[str, str] = {}
        complaints = set()
        folded: dict[str, Tensor] = {}
        for weight in proto.initializer:
            try:
                folded[weight.name] = shapes.constant(weight)
            except ValueError as error:
                complaints.add(str(error))
        self.nodes: list[Node] = []
        for node in _needed(proto, self.outputs):
            try:
                self.nodes.append(read_node(node, opset))
            except ValueError as error:
                complaints.add(str(error))
        ends = [i for i in proto.input if i.name not in folded]
        for value in ends + [o for o in proto.output if o.name in self.outputs]:
            kind = value.type.tensor_type.elem_type
            if kind not in (*TYPES, onnx.TensorProto.UNDEFINED):
                complaints.add(f"{value.name!r} is not a tensor of a supported type")
        made = {i.name for i in proto.input} | folded.keys()
        made.update(name for node in self.nodes for name in node.outputs)
        read = {name for node in self.nodes for name in node.inputs if name} | set(self.outputs)
        if not complaints:
            complaints = {f"no supported node computes {name!r}" for name in read - made}
        if complaints:
            raise ValueError("; ".join(sorted(complaints)))
        self._fold(folded)

    def _fold(self, values: dict[str, Tensor]) -> None:
        """Compute the values that depend on constants alone, and keep only the constants that are
        still read."""
        left = []
        for node in self.nodes:
            if all(name in values or not name for name in node.inputs):
                with torch.no_grad():
                    values |= node.run(values)
            else:
                left.append(node)
        self.nodes = left
        read = {name for node in left for name in node.inputs}.union(self.outputs)
        for name in values:  # in the order of the file, because weights are numbered
            if name in read:
                self._keep(name, values[name])

    def _keep(self, name: str, value: Tensor) -> None:
        """Store a constant. Scalars and shapes stay on the CPU, so that reading them needs no
        synchronisation."""
        if value.ndim == 0 or not value.is_floating_point():
            self.constants[name] = value
            return
        self._weights[name] = f"value_{len(self._weights)}"  # names in the file may contain dots
        self.register_parameter(self._weights[name], nn.Parameter(value.clone()))

    def forward(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs of the graph."""
        values = {**given, **self.constants}
        values |= {name: getattr(self, own) for name, own in self._weights.items()}
        for node in self.nodes:
            values |= node.run(values)
        return [values[name] for name in self.outputs]


def _needed(proto: onnx.GraphProto, outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that these outputs depend on, in the order of the graph."""
    wanted, found = set(outputs), []
    for node in reversed(proto.node):
        if wanted.intersection(node.output):
            found.append(node)
            wanted.update(node.input)
    return found[::-1]
