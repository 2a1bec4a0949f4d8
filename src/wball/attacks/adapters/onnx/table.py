"""The table of ONNX operators: PyTorch functions by the name of the operator.

An operator is a function of its inputs. Its keyword-only parameters are the attributes it
understands; a node with any other attribute computes something else, so the graph is refused.
Defaults come from the ONNX project's own definitions. The keyword ``count`` is not an attribute but
the number of outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import onnx
import torch
from torch import Tensor

Function = Callable[..., Any]
Ints = list[int] | None
Given = Tensor | None
"""An input that may be left out."""

TYPES = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.BOOL: torch.bool,
}
"""Supported types of tensors."""

WINDOWS = ("auto_pad", "dilations", "pads", "strides")
"""Attributes of an operator that takes ``**windows``."""

IGNORED = frozenset(
    (
        "kernel_shape",
        "momentum",
        "num_outputs",
        "round_mode",
        "saturate",
        "seed",
        "stash_type",
        "storage_order",
    )
)
"""Attributes that change nothing, or say again what inputs say."""

OPERATORS: dict[str, Function] = {}
"""Every supported operator. The modules beside this one fill it."""


def operator(kind: str) -> Callable[[Function], Function]:
    """Register a function as the implementation of an operator."""

    def enter(run: Function) -> Function:
        OPERATORS[kind] = run
        return run

    return enter


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes:
        kind: name of the operator.
        attributes: keywords of its function; ``None`` for an attribute without a value and a
            default.
        inputs: names of the values it reads; empty for those left out.
        outputs: names of the values it writes.
    """

    kind: str
    attributes: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by their names."""
        given = [values[name] if name else None for name in self.inputs]
        found = OPERATORS[self.kind](*given, **self.attributes)
        several = (found,) if isinstance(found, Tensor) else found
        return dict(zip(self.outputs, several, strict=True))


def read_node(proto: onnx.NodeProto, opset: int) -> Node:
    """A node with its attributes. Raises ``ValueError`` if something in it is not supported."""
    if proto.domain not in ("", "ai.onnx") or proto.op_type not in OPERATORS:
        name = f"{proto.domain}.{proto.op_type}" if proto.domain else proto.op_type
        raise ValueError(f"operator {name} is not supported")
    parameters = signature(OPERATORS[proto.op_type]).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    known += [name for p in parameters if p.kind is p.VAR_KEYWORD for name in WINDOWS]
    given = {a.name: _value(a) for a in proto.attribute}
    where = f"{proto.op_type} ({proto.name or proto.output[0]})"
    for unknown in sorted(given.keys() - known - IGNORED):
        raise ValueError(f"attribute {unknown!r} of {where} is not supported")
    if given.get("training_mode"):
        raise ValueError(f"{where} is in training mode: export the model in evaluation mode")
    if given.get("to", onnx.TensorProto.FLOAT) not in TYPES:
        raise ValueError(f"{where} casts to an unsupported type")
    schema = onnx.defs.get_schema(proto.op_type, opset, "")
    values = {a.name: _value(a.default_value) for a in schema.attributes.values()}
    values |= {"count": len(proto.output), **given}
    attributes = {name: values.get(name) for name in known}
    # Further outputs, such as the mask of Dropout, are not computed.
    outputs = tuple(proto.output) if "count" in known else tuple(proto.output)[:1]
    return Node(proto.op_type, attributes, tuple(proto.input), outputs)


def _value(attribute: onnx.AttributeProto) -> Any:
    """The value of an attribute; ``None`` for a default that is not given."""
    value = onnx.helper.get_attribute_value(attribute) if attribute.name else None
    return value.decode() if isinstance(value, bytes) else value


def numbers(value: Tensor | None) -> list[int]:
    """A small tensor of integers, such as a shape, as a list."""
    return [] if value is None else [int(v) for v in value.flatten().tolist()]


def together(*values: Tensor) -> list[Tensor]:
    """Move tensors to one device: constants and shapes are on the CPU until they are combined with
    images."""
    where = next((v.device for v in values if v.device.type != "cpu"), None)
    # Numbers without axes may stay where they are.
    return list(values) if where is None else [v.to(where) if v.ndim else v for v in values]
