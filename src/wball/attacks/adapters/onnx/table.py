"""What an operator of an ONNX graph is: a function of PyTorch, the attributes it understands, and what it wants as
plain numbers.

An attribute that is not understood changes what a node computes, so a graph with one is refused when it is read.
Defaults come from the ONNX project's own definitions, in the version that the file was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor

Values = Tensor | Sequence[Tensor | None]
Function = Callable[..., Values]

TYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.BOOL: torch.bool,
}
"""Types of tensors that are computed with; no classifier needs strings, and PyTorch has little for the others."""


@dataclass(frozen=True)
class Node:
    """One node of a graph, with the attributes it has and the defaults of those it has not.

    Attributes:
        kind: name of the operator.
        version: of the operator's definition: the operator set that it came with.
        attributes: by name; ``None`` for one that is not given and has no default.
        inputs: names of the values it reads; empty for those left out.
        outputs: names of the values it writes.
    """

    kind: str
    version: int
    attributes: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.attributes.get(name)

    def wants(self, output: int) -> bool:
        """Whether this output may be read."""
        return output < len(self.outputs) and self.outputs[output] != ""


@dataclass(frozen=True)
class Operator:
    """How one kind of node is computed.

    Attributes:
        run: node and inputs to output or outputs.
        attributes: those that ``run`` understands.
        refuse: what is wrong with a node that is understood in part only; ``None`` if nothing is.
    """

    run: Function
    attributes: frozenset[str]
    refuse: Callable[[Node], str | None] = lambda node: None


OPERATORS: dict[str, Operator] = {}
"""Every operator that is known here. The modules beside this one fill it."""


def operator(
    *kinds: str, attributes: str = "", refuse: Callable[[Node], str | None] = lambda node: None
) -> Callable[[Function], Function]:
    """Enter a function into the table, under one name or several."""

    def enter(run: Function) -> Function:
        for kind in kinds:
            OPERATORS[kind] = Operator(run, frozenset(attributes.split()), refuse)
        return run

    return enter


def read_node(proto: onnx.NodeProto, opset: int) -> Node:
    """A node with its attributes. Raises ``ValueError`` if something in it is not understood."""
    if proto.domain not in ("", "ai.onnx") or proto.op_type not in OPERATORS:
        raise ValueError(
            f"operator {proto.domain + '.' if proto.domain else ''}{proto.op_type} is not known here"
        )
    known = OPERATORS[proto.op_type]
    schema = onnx.defs.get_schema(proto.op_type, opset, "")
    given = {a.name: _plain(onnx.helper.get_attribute_value(a)) for a in proto.attribute}
    unknown = sorted(given.keys() - known.attributes)
    if unknown:
        raise ValueError(
            f"attribute {unknown[0]!r} of {proto.op_type} ({proto.name or proto.output[0]}) is not known here"
        )
    defaults = {
        name: _plain(onnx.helper.get_attribute_value(a.default_value))
        if a.default_value.name
        else None
        for name, a in schema.attributes.items()
    }
    node = Node(
        proto.op_type,
        schema.since_version,
        {**defaults, **given},
        tuple(proto.input),
        tuple(proto.output),
    )
    if said := known.refuse(node):
        raise ValueError(f"{proto.op_type} ({proto.name or proto.output[0]}) {said}")
    return node


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def numbers(value: Tensor | None) -> list[int]:
    """A small tensor of whole numbers, such as a shape, as a list."""
    return [] if value is None else [int(v) for v in value.flatten().tolist()]


def listed(node: Node, name: str, value: Tensor | None) -> list[int] | None:
    """What old files give as an attribute and new ones as an input; ``None`` if it is not given."""
    if value is not None:
        return numbers(value)
    return None if node[name] is None else list(node[name])


def together(*values: Tensor) -> list[Tensor]:
    """Tensors on one device: constants and shapes stay on the CPU until they meet images."""
    where = next((v.device for v in values if v.device.type != "cpu"), None)
    # Numbers without axes may stay where they are.
    return list(values) if where is None else [v.to(where) if v.ndim else v for v in values]
