"""Operators that work on each number by itself, and reductions over axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks.adapters.onnx.table import (
    OPERATORS,
    TYPES,
    Node,
    Operator,
    listed,
    operator,
    together,
)

_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tanh": torch.tanh,
}
_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Div": lambda x, y: (
        torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")
    ),
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Pow": lambda x, y: torch.pow(x, y).to(x.dtype),
    "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
    "Sub": torch.sub,
}
_MANY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Sum": torch.add,
}


def _one(run: Callable[[Tensor], Tensor]) -> Callable[[Node, Tensor], Tensor]:
    return lambda node, x: run(x)


def _two(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Node, Tensor, Tensor], Tensor]:
    return lambda node, x, y: run(*together(x, y))


def _many(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda node, *values: reduce(run, together(*values))


OPERATORS |= {kind: Operator(_one(run), frozenset()) for kind, run in _ONE.items()}
OPERATORS |= {kind: Operator(_two(run), frozenset()) for kind, run in _TWO.items()}
OPERATORS |= {kind: Operator(_many(run), frozenset()) for kind, run in _MANY.items()}


@operator("Where")
def _where(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    condition, x, y = together(condition, x, y)
    return torch.where(condition, x, y)


@operator(
    "Cast",
    attributes="to saturate round_mode",
    refuse=lambda node: None if node["to"] in TYPES else "to a type that is not known here",
)
def _cast(node: Node, x: Tensor) -> Tensor:
    return x.to(TYPES[node["to"]])


@operator("CastLike", attributes="saturate round_mode")
def _cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


@operator("Clip", attributes="min max")
def _clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    ends: list[Any] = [
        node[name] if v is None else v if v.requires_grad else v.item()
        for v, name in ((low, "min"), (high, "max"))
    ]
    return x if ends == [None, None] else torch.clamp(x, ends[0], ends[1])


# ---- activations with parameters


@operator("Elu", attributes="alpha")
def _elu(node: Node, x: Tensor) -> Tensor:
    return F.elu(x, node["alpha"])


@operator("Gelu", attributes="approximate")
def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node["approximate"])


@operator("HardSigmoid", attributes="alpha beta")
def _hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return torch.clamp(node["alpha"] * x + node["beta"], 0, 1)


@operator("LeakyRelu", attributes="alpha")
def _leaky_relu(node: Node, x: Tensor) -> Tensor:
    return F.leaky_relu(x, node["alpha"])


@operator("Selu", attributes="alpha gamma")
def _selu(node: Node, x: Tensor) -> Tensor:
    return node["gamma"] * F.elu(x, node["alpha"])


@operator("Swish", attributes="alpha")
def _swish(node: Node, x: Tensor) -> Tensor:
    return x * torch.sigmoid(node["alpha"] * x)


def _along(run: Callable[[Tensor, int], Tensor]) -> Callable[[Node, Tensor], Tensor]:
    """Until version 13 everything from the axis on was one axis."""

    def apply(node: Node, x: Tensor) -> Tensor:
        axis = int(node["axis"])
        if node.version >= 13:
            return run(x, axis)
        axis %= x.ndim + 1
        return run(x.reshape(math.prod(x.shape[:axis]), -1), 1).reshape(x.shape)

    return apply


operator("Softmax", attributes="axis")(_along(torch.softmax))
operator("LogSoftmax", attributes="axis")(_along(torch.log_softmax))


# ---- reductions


def _number(value: Tensor) -> int:
    """The one number in a tensor."""
    return int(value.reshape(()).item())


def _extreme(
    run: Callable[..., Tensor], none: float
) -> Callable[[Tensor, list[int], bool], Tensor]:
    def apply(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if x.dtype == torch.bool:
            return apply(x.to(torch.uint8), axes, keep).to(torch.bool)
        if any(x.shape[k] == 0 for k in axes):
            whole = None if x.is_floating_point() else torch.iinfo(x.dtype)
            end = none if whole is None else whole.max if none > 0 else whole.min
            return x.sum(axes, keepdim=keep).to(x.dtype).fill_(end)
        return run(x, axes, keepdim=keep)

    return apply


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: (x * x).sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": _extreme(torch.amax, -math.inf),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": _extreme(torch.amin, math.inf),
    "ReduceProd": _product,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keepdim=keep),
}


def _reduction(run: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    def apply(node: Node, x: Tensor, given: Tensor | None = None) -> Tensor:
        axes = listed(node, "axes", given)
        if not axes and node["noop_with_empty_axes"]:
            return run(x[None], [0], False).to(x.dtype)  # each number is reduced by itself
        axes = [k % x.ndim for k in axes] if axes else list(range(x.ndim))
        # Without axes torch would take all of them, and a number has none.
        reduced = run(x, axes, bool(node["keepdims"])) if axes else run(x[None], [0], False)
        return reduced.to(x.dtype)

    return apply


for _kind, _reduce in _REDUCTIONS.items():
    operator(_kind, attributes="axes keepdims noop_with_empty_axes")(_reduction(_reduce))


def _position(largest: bool) -> Callable[[Node, Tensor], Tensor]:
    def apply(node: Node, x: Tensor) -> Tensor:
        axis, last = int(node["axis"]) % x.ndim, bool(node["select_last_index"])
        values = x.flip(axis) if last else x
        found = (torch.argmax if largest else torch.argmin)(
            values, axis, keepdim=bool(node["keepdims"])
        )
        return x.shape[axis] - 1 - found if last else found

    return apply


operator("ArgMax", attributes="axis keepdims select_last_index")(_position(True))
operator("ArgMin", attributes="axis keepdims select_last_index")(_position(False))
