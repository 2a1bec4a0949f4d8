"""The functions of PyTorch that certificates follow, by name and by what they are to a bound."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def known(*names: str) -> dict[Any, str]:
    """The functions and methods of PyTorch that go by these names."""
    homes = (torch, F, Tensor, torch._C._nn)
    return {
        found: name
        for name in names
        for home in homes
        if callable(found := getattr(home, name, None))
    }


IDENTITIES = known(
    "contiguous",
    "clone",
    "detach",
    "float",
    "double",
    "to",
    "cpu",
    "cuda",
    "requires_grad_",
    "alias",
)
DROPOUTS = known(
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"
)
RESHAPES = known(
    "flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "view_as", "reshape_as"
)
RELUS = known("relu", "relu_")
LEAKY_RELUS = known("leaky_relu", "leaky_relu_")
CURVES = known("sigmoid", "tanh", "silu", "gelu")
CLAMPS = known("clamp", "clip", "hardtanh", "relu6")
MAX_POOLS = known("max_pool2d")
PLUS = known("add", "add_", "__add__", "__radd__", "__iadd__")
MINUS = known("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__")
FROM = known("rsub", "__rsub__")
TIMES = known(
    "mul",
    "mul_",
    "multiply",
    "multiply_",
    "__mul__",
    "__rmul__",
    "__imul__",
    "neg",
    "neg_",
    "__neg__",
)
OVER = known("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")
ARITHMETIC = (PLUS, MINUS, FROM, TIMES, OVER)
POOLS = known("avg_pool2d")
LINEARS = known("linear")
CONVOLUTIONS = known("conv2d")
NORMS: dict[Any, str] = {F.batch_norm: "batch_norm"}
JOINS = known("cat", "concat", "stack")
SIGNED = known("interpolate", "upsample")
"""Linear functions whose coefficients may be negative on their own account."""

LINEAR_FUNCTIONS = known(
    *(
        "adaptive_avg_pool2d",
        "pad",
        "conv1d",
        "conv_transpose2d",
        "mean",
        "sum",
        "matmul",
        "mm",
        "__matmul__",
    ),
    *(
        "__rmatmul__",
        "permute",
        "transpose",
        "movedim",
        "swapaxes",
        "pixel_shuffle",
        "pixel_unshuffle",
    ),
    *(
        "channel_shuffle",
        "native_channel_shuffle",
        "flip",
        "roll",
        "narrow",
        "select",
        "__getitem__",
    ),
)
DESCRIPTIONS = known(
    "size", "dim", "ndimension", "__len__", "numel", "is_floating_point", "stride", "is_contiguous"
)
ATTRIBUTES = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "is_cuda",
    "requires_grad",
    "layout",
    "is_sparse",
    "is_quantized",
)
"""What may be asked of a tensor without reading its values."""

FITTED = known("to", "type_as", "expand_as")
MADE_LIKE = known(
    "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"
)
"""Functions that take the form of a tensor for a constant: of their second argument, of their
first."""


def attribute(func: Any) -> str | None:
    """The attribute of a tensor that a call reads, if it reads one."""
    owner = getattr(func, "__self__", None)
    read = getattr(func, "__name__", "") == "__get__" and (
        inspect.isgetsetdescriptor(owner) or isinstance(owner, property)
    )
    return (
        getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", None)
        if read
        else None
    )
