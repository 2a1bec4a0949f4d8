"""Operators that work on each number by itself, and reductions over axes."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks.adapters.onnx.table import (
    OPERATORS,
    TYPES,
    Function,
    Given,
    numbers,
    operator,
    together,
)

_ELEMENTWISE: dict[str, Function] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Div": lambda x, y: (
        torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")
    ),
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "MatMul": torch.matmul,
    "Max": lambda *values: reduce(torch.maximum, values),
    "Min": lambda *values: reduce(torch.minimum, values),
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "Pow": lambda x, y: torch.pow(x, y).to(x.dtype),
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Sum": lambda *values: reduce(torch.add, values),
    "Tanh": torch.tanh,
    "Where": torch.where,
}


def _elementwise(run: Function) -> Function:
    return lambda *values: run(*together(*values))


OPERATORS |= {kind: _elementwise(run) for kind, run in _ELEMENTWISE.items()}


OPERATORS |= {
    "Cast": lambda x, *, to: x.to(TYPES[to]),
    "Elu": lambda x, *, alpha: F.elu(x, alpha),
    "Gelu": lambda x, *, approximate: F.gelu(x, approximate=approximate),
    "HardSigmoid": lambda x, *, alpha, beta: torch.clamp(alpha * x + beta, 0, 1),
    "LeakyRelu": lambda x, *, alpha: F.leaky_relu(x, alpha),
    "LogSoftmax": lambda x, *, axis: torch.log_softmax(x, axis),
    "Selu": lambda x, *, alpha, gamma: gamma * F.elu(x, alpha),
    "Softmax": lambda x, *, axis: torch.softmax(x, axis),
}


@operator("Clip")
def _clip(x: Tensor, low: Given = None, high: Given = None) -> Tensor:
    ends = [None if end is None else end.item() for end in (low, high)]
    return x if ends == [None, None] else torch.clamp(x, ends[0], ends[1])


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: (x * x).sum(axes, keepdim=keep).sqrt(),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
}


def _reduction(run: Callable[[Tensor, list[int], bool], Tensor]) -> Function:
    def apply(
        x: Tensor,
        given: Given = None,
        *,
        axes: list[int] | None,
        keepdims: int,
        noop_with_empty_axes: int | None,
    ) -> Tensor:
        chosen = numbers(given) or axes
        if not chosen and noop_with_empty_axes:
            return run(x[None], [0], False)  # reduce over a new axis of length 1
        return run(x, list(chosen or range(x.ndim)), bool(keepdims)).to(x.dtype)

    return apply


OPERATORS |= {kind: _reduction(run) for kind, run in _REDUCTIONS.items()}
