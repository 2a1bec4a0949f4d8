"""Layers of networks: convolutions, pooling, normalisation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks.adapters.onnx.table import OPERATORS, Given, Ints, operator

_CONVOLUTIONS: dict[int, Any] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_AVERAGES: dict[int, Any] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}
_MAXIMA: dict[int, Any] = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}


def _windows(
    x: Tensor, size: Sequence[int], dilations: Ints, strides: Ints, pads: Ints, auto_pad: str
) -> tuple[list[int], ...]:
    """Dilation and stride of windows of this size, and the padding before and after each axis."""
    axes = len(size)
    gaps, steps = dilations or [1] * axes, strides or [1] * axes
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        both = pads if pads and auto_pad == "NOTSET" else [0] * (2 * axes)
        return gaps, steps, both[:axes], both[axes:]
    each = zip(x.shape[2:], size, gaps, steps, strict=True)
    total = [
        max(0, (math.ceil(n / step) - 1) * step + gap * (wide - 1) + 1 - n)
        for n, wide, gap, step in each
    ]
    less, more = [t // 2 for t in total], [t - t // 2 for t in total]
    return gaps, steps, *((less, more) if auto_pad == "SAME_UPPER" else (more, less))


def _padded(x: Tensor, before: list[int], after: list[int], value: float = 0.0) -> Tensor:
    pairs = zip(reversed(before), reversed(after), strict=True)
    return F.pad(x, [side for pair in pairs for side in pair], value=value)


def _is_pooling(before: list[int], after: list[int], size: list[int]) -> bool:
    """Whether PyTorch's pooling supports this padding."""
    return before == after and all(2 * b <= k for b, k in zip(before, size, strict=True))


@operator("Conv")
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Given = None,
    *,
    group: int,
    **windows: Any,
) -> Tensor:
    size = weight.shape[2:]
    gaps, steps, before, after = _windows(x, size, **windows)
    if before != after:
        x, before = _padded(x, before, after), [0] * len(size)
    return _CONVOLUTIONS[x.ndim](x, weight, bias, steps, before, gaps, group)


@operator("MaxPool")
def _max_pool(
    x: Tensor,
    *,
    ceil_mode: int | None,
    kernel_shape: list[int],
    **windows: Any,
) -> Tensor:
    gaps, steps, before, after = _windows(x, kernel_shape, **windows)
    if not _is_pooling(before, after, kernel_shape):
        x, before = _padded(x, before, after, -math.inf), [0] * len(kernel_shape)
    return _MAXIMA[x.ndim](x, kernel_shape, steps, before, gaps, bool(ceil_mode))


@operator("AveragePool")
def _average_pool(
    x: Tensor,
    *,
    auto_pad: str,
    ceil_mode: int | None,
    count_include_pad: int,
    kernel_shape: list[int],
    pads: Ints,
    strides: Ints,
) -> Tensor:
    pool = _AVERAGES[x.ndim]
    _, steps, before, after = _windows(x, kernel_shape, None, strides, pads, auto_pad)
    if _is_pooling(before, after, kernel_shape):
        counted = bool(count_include_pad)
        return pool(x, kernel_shape, steps, before, bool(ceil_mode), counted)
    means = pool(_padded(x, before, after), kernel_shape, steps, 0, bool(ceil_mode))
    if count_include_pad:
        return means
    inside = _padded(torch.ones_like(x[:1, :1]), before, after)
    return means / pool(inside, kernel_shape, steps, 0, bool(ceil_mode))


OPERATORS |= {
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    "InstanceNormalization": lambda x, scale, bias, *, epsilon: F.instance_norm(
        x, weight=scale, bias=bias, eps=epsilon
    ),
}


@operator("Gemm")
def _gemm(
    left: Tensor,
    right: Tensor,
    bias: Given = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
) -> Tensor:
    left, right = left.T if transA else left, right.T if transB else right
    if alpha == beta == 1 and (bias is None or bias.ndim == 1):
        return F.linear(left, right.T, bias)
    product = alpha * (left @ right)
    return product if bias is None else product + beta * bias


@operator("BatchNormalization")
def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float,
    training_mode: object,
) -> Tensor:
    # PyTorch has no gradient by running statistics.
    return F.batch_norm(x, mean.detach(), variance.detach(), scale, bias, eps=epsilon)


@operator("Dropout")
def _dropout(x: Tensor, ratio: Given = None, training: Given = None) -> Tensor:
    if training is not None and training:
        raise ValueError("Dropout is in training mode: export the model in evaluation mode")
    return x


@operator("LayerNormalization")
def _layer_norm(
    x: Tensor, scale: Tensor, bias: Given = None, *, axis: int, epsilon: float
) -> Tensor:
    sizes = x.shape[axis:]
    bias = None if bias is None else bias.expand(sizes)
    return F.layer_norm(x, sizes, scale.expand(sizes), bias, epsilon)
