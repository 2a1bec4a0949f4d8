"""ONNX models: a feed-forward classifier from a file, as a PyTorch module that has gradients.

::

    model = wball.attacks.adapters.onnx.load("classifier.onnx")     # images to logits
    result = wball.StandardAttack(ball)(model, x, y)

The file's graph is run node by node with PyTorch's own functions, so that attacks (and training) can differentiate
through it, on any device. Known are the operators that exporters write for convolutional and fully connected networks;
others are named in the error. Weights become parameters of the module. Needs ``pip install wball[onnx]``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

Attributes = dict[str, Any]
Operator = Callable[[Attributes, Sequence[Tensor | None]], Tensor]

SMALL = 64
"""Constants of whole numbers with no more entries than this stay on the CPU: they are shapes and axes."""


def load(path: str | os.PathLike[str]) -> OnnxModel:
    """The classifier in an ONNX file, in evaluation mode: one input (images), one output (logits).

    Raises ``ValueError`` if the graph has several inputs, or operators that are not known here.
    """
    proto = onnx.load(os.fspath(path))
    onnx.checker.check_model(proto)
    return OnnxModel(proto).eval()


class OnnxModel(nn.Module):
    """An ONNX graph as a module. Use :func:`load`."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        super().__init__()
        graph = proto.graph
        unknown = sorted({n.op_type for n in graph.node if n.op_type not in _OPERATORS or n.domain not in _DOMAINS})
        if unknown:
            raise ValueError(
                f"operators not known here: {', '.join(unknown)}; export with constant folding, or convert the model "
                "with onnx2torch and pass the module it returns"
            )
        weights = {w.name: numpy_helper.to_array(w) for w in graph.initializer}
        inputs = [i.name for i in graph.input if i.name not in weights]
        if len(inputs) != 1 or len(graph.output) != 1:
            raise ValueError(f"the graph must have one input and one output, got {len(inputs)} and {len(graph.output)}")
        self._input, self._output = inputs[0], graph.output[0].name
        self._small: dict[str, Tensor] = {}
        self._stored: dict[str, str] = {}
        self._nodes = [(n.op_type, _attributes(n), list(n.input), n.output[0]) for n in graph.node]
        for name, value in weights.items():
            self._keep(name, torch.from_numpy(np.array(value)))
        for kind, attributes, _, output in self._nodes:
            if kind == "Constant":
                self._keep(output, _constant(attributes))
        self._nodes = [node for node in self._nodes if node[0] != "Constant"]

    def _keep(self, name: str, value: Tensor) -> None:
        if not value.is_floating_point() and value.numel() <= SMALL:
            self._small[name] = value
            return
        own = f"value_{len(self._stored)}"  # names in the file may hold dots
        self._stored[name] = own
        if value.is_floating_point():
            self.register_parameter(own, nn.Parameter(value))
        else:
            self.register_buffer(own, value)

    def forward(self, x: Tensor) -> Tensor:
        values: dict[str, Tensor | None] = {"": None, self._input: x, **self._small}
        values |= {name: getattr(self, own) for name, own in self._stored.items()}
        for kind, attributes, inputs, output in self._nodes:
            values[output] = _OPERATORS[kind](attributes, [values[name] for name in inputs])
        logits = values[self._output]
        assert logits is not None
        return logits


def _attributes(node: onnx.NodeProto) -> Attributes:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def _constant(attributes: Attributes) -> Tensor:
    if "value" in attributes:
        return torch.from_numpy(np.array(numpy_helper.to_array(attributes["value"])))
    (value,) = attributes.values()
    return torch.tensor(value)


def _numbers(value: Tensor | None) -> list[int]:
    return [] if value is None else [int(v) for v in value.flatten().tolist()]


def _axes(a: Attributes, inputs: Sequence[Tensor | None]) -> list[int]:
    """Axes are an attribute in old files and the second input in new ones."""
    return list(a["axes"]) if "axes" in a else _numbers(inputs[1] if len(inputs) > 1 else None)


def _needed(inputs: Sequence[Tensor | None]) -> list[Tensor]:
    return [v for v in inputs if v is not None]


def _padded(a: Attributes, x: Tensor, window: Sequence[int], value: float) -> Tensor:
    """``x`` with the node's padding, which need not be the same on both sides."""
    count = len(window)
    steps, gaps = a.get("strides", [1] * count), a.get("dilations", [1] * count)
    auto = a.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for size, k, step, gap in zip(x.shape[2:], window, steps, gaps, strict=True):
            total = max(0, (math.ceil(size / step) - 1) * step + gap * (k - 1) + 1 - size)
            less, more = total // 2, total - total // 2
            before.append(less if auto == "SAME_UPPER" else more)
            after.append(more if auto == "SAME_UPPER" else less)
    else:
        both = a.get("pads", [0] * (2 * count))
        before, after = both[:count], both[count:]
    if not any(before) and not any(after):
        return x
    sides = [side for pair in zip(reversed(before), reversed(after), strict=True) for side in pair]
    return F.pad(x, sides, value=value)


def _conv(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    x, weight = _needed(inputs[:2])
    bias, count = (inputs[2] if len(inputs) > 2 else None), weight.ndim - 2
    run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[count]
    x = _padded(a, x, weight.shape[2:], 0.0)
    steps, gaps = a.get("strides", [1] * count), a.get("dilations", [1] * count)
    return run(x, weight, bias, stride=steps, dilation=gaps, groups=a.get("group", 1))


def _max_pool(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    (x,) = _needed(inputs)
    window = a["kernel_shape"]
    steps, gaps = a.get("strides", [1] * len(window)), a.get("dilations", [1] * len(window))
    run = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(window)]
    x = _padded(a, x, window, -math.inf)
    return run(x, window, steps, dilation=gaps, ceil_mode=bool(a.get("ceil_mode", 0)))


def _average_pool(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    (x,) = _needed(inputs)
    window = a["kernel_shape"]
    steps = a.get("strides", [1] * len(window))
    run = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(window)]

    def pool(values: Tensor) -> Tensor:
        return run(_padded(a, values, window, 0.0), window, steps, ceil_mode=bool(a.get("ceil_mode", 0)))

    # Without the padding in the count: divide by the share of the window that lies in the image.
    return pool(x) if a.get("count_include_pad", 0) else pool(x) / pool(torch.ones_like(x[:1, :1]))


def _batch_norm(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    x, scale, bias, mean, variance = _needed(inputs)
    return F.batch_norm(x, mean, variance, scale, bias, training=False, eps=a.get("epsilon", 1e-5))


def _gemm(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    left, right = _needed(inputs[:2])
    left, right = (left.T if a.get("transA", 0) else left), (right.T if a.get("transB", 0) else right)
    product = a.get("alpha", 1.0) * (left @ right)
    bias = inputs[2] if len(inputs) > 2 else None
    return product if bias is None else product + a.get("beta", 1.0) * bias


def _reshape(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    x, shape = _needed(inputs)
    sizes = _numbers(shape)
    if not a.get("allowzero", 0):
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    (x,) = _needed(inputs)
    axis = a.get("axis", 1) % (x.ndim + 1)
    return x.reshape(math.prod(x.shape[:axis]), -1) if axis else x.reshape(1, -1)


def _squeeze(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    axes, x = _axes(a, inputs), _needed(inputs)[0]
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


def _unsqueeze(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    axes, x = _axes(a, inputs), _needed(inputs)[0]
    for axis in sorted(k % (x.ndim + len(axes)) for k in axes):
        x = x.unsqueeze(axis)
    return x


def _reduce(run: Callable[..., Tensor]) -> Operator:
    def reduce(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
        axes, x = _axes(a, inputs), _needed(inputs)[0]
        return run(x, tuple(axes) if axes else tuple(range(x.ndim)), keepdim=bool(a.get("keepdims", 1)))

    return reduce


def _clip(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    low, high = (inputs[k] if len(inputs) > k else a.get(name) for k, name in ((1, "min"), (2, "max")))
    return torch.clamp(_needed(inputs)[0], low, high)


def _gather(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    x, index = _needed(inputs)
    axis, index = a.get("axis", 0), index.to(x.device)
    index = torch.where(index < 0, index + x.shape[axis], index)
    picked = x.index_select(axis, index.flatten())
    return picked.reshape([*x.shape[:axis], *index.shape, *x.shape[axis:][1:]])


def _pad(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
    x = _needed(inputs)[0]
    both = list(a["pads"]) if "pads" in a else _numbers(inputs[1])
    fill = inputs[2] if len(inputs) > 2 else None
    if len(inputs) > 3 and inputs[3] is not None or a.get("mode", "constant") != "constant":
        raise ValueError("Pad is known here with a constant value on all axes only")
    half = len(both) // 2
    sides = [side for k in reversed(range(half)) for side in (both[k], both[half + k])]
    return F.pad(x, sides, value=a.get("value", 0.0) if fill is None else float(fill.detach()))


def _one(run: Callable[[Tensor], Tensor]) -> Operator:
    return lambda a, inputs: run(_needed(inputs)[0])


def _two(run: Callable[[Any, Any], Tensor]) -> Operator:
    def apply(a: Attributes, inputs: Sequence[Tensor | None]) -> Tensor:
        left, right = _needed(inputs)
        if left.device != right.device:  # a small constant meets images
            left, right = (v.to(left.device if left.ndim > right.ndim else right.device) for v in (left, right))
        return run(left, right)

    return apply


_DOMAINS = ("", "ai.onnx")
_OPERATORS: dict[str, Operator] = {
    "Add": _two(torch.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": lambda a, i: _needed(i)[0].to(_dtype(a["to"])),
    "Clip": _clip,
    "Concat": lambda a, i: torch.cat(_needed(i), a["axis"]),
    "Constant": lambda a, i: _constant(a),
    "Conv": _conv,
    "Div": _two(lambda x, y: torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")),
    "Dropout": _one(lambda x: x),
    "Elu": lambda a, i: F.elu(_needed(i)[0], a.get("alpha", 1.0)),
    "Erf": _one(torch.erf),
    "Exp": _one(torch.exp),
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": lambda a, i: F.gelu(_needed(i)[0], approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": _one(lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True)),
    "GlobalMaxPool": _one(lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True)),
    "HardSwish": _one(F.hardswish),
    "Identity": _one(lambda x: x),
    "LeakyRelu": lambda a, i: F.leaky_relu(_needed(i)[0], a.get("alpha", 0.01)),
    "LogSoftmax": lambda a, i: F.log_softmax(_needed(i)[0], a.get("axis", -1)),
    "MatMul": _two(torch.matmul),
    "MaxPool": _max_pool,
    "Mul": _two(torch.mul),
    "Neg": _one(torch.neg),
    "Pad": _pad,
    "Pow": _two(torch.pow),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": _one(torch.relu),
    "Reshape": _reshape,
    "Shape": _one(lambda x: torch.tensor(x.shape)),
    "Sigmoid": _one(torch.sigmoid),
    "Softmax": lambda a, i: F.softmax(_needed(i)[0], a.get("axis", -1)),
    "Softplus": _one(F.softplus),
    "Sqrt": _one(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _two(torch.sub),
    "Tanh": _one(torch.tanh),
    "Transpose": lambda a, i: _needed(i)[0].permute(a.get("perm") or tuple(reversed(range(_needed(i)[0].ndim)))),
    "Unsqueeze": _unsqueeze,
}


def _dtype(code: int) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, onnx.helper.tensor_dtype_to_np_dtype(code))).dtype
