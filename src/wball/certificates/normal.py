"""Normal form: operators of PyTorch written with the few that bounds follow.

After :func:`decompositions` a program consists of operators that are linear in the image, ReLUs,
scalar functions, and products. Normalisations, softmax, pools, maxima and piecewise linear
functions are written with them, as in a textbook. The only maximum is ``b + (a - b)^+``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def decompositions() -> Any:
    """The table for ``ExportedProgram.run_decompositions``: PyTorch's own, with ours."""
    from torch.export import default_decompositions

    table = default_decompositions()
    for operator, function in NORMAL.items():
        table[operator] = function
    return table


def dims_of(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """Dimensions counted from the first one; all of them for ``None`` and an empty list."""
    some = [dims] if isinstance(dims, int) else dims
    return sorted(d % x.ndim for d in some) if some else list(range(x.ndim))


# ---- normalisation


def standardised(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / sqrt(variance + eps)``, the mean, and the reciprocal root."""
    mean = x.mean(list(dims), keepdim=True)
    centred = x - mean
    root = torch.rsqrt((centred * centred).mean(list(dims), keepdim=True) + eps)
    return centred * root, mean, root


def rescaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def channels_of(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.ndim - 2)]


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    scale, shape = torch.rsqrt(variance + eps), channels_of(x)
    centred = x - mean.reshape(shape)
    scale = scale if weight is None else weight * scale
    return rescaled(centred, scale, bias, shape), mean.new_empty(0), mean.new_empty(0)


def without_statistics(
    x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Instances are normalised like this, as the channels of a single image."""
    found, mean, root = standardised(x, [0, *range(2, x.ndim)], eps)
    return rescaled(found, weight, bias, channels_of(x)), mean, root


def layer_norm(
    x: Tensor, sizes: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    found, mean, root = standardised(x, range(x.ndim - len(sizes), x.ndim), eps)
    return rescaled(found, weight, bias, sizes), mean, root


def group_norm(
    x: Tensor, weight: Any, bias: Any, n: int, c: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    found, mean, root = standardised(x.reshape(n, groups, -1), [2], eps)
    return rescaled(found.reshape(x.shape), weight, bias, channels_of(x)), mean, root


def variance(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    dims = dims_of(x, dim)
    centred = x - x.mean(dims, keepdim=True)
    size = math.prod(x.shape[d] for d in dims)
    share = 1.0 / (size - (1 if correction is None else correction))
    return (centred * centred).sum(dims, keepdim=keepdim) * share


def length(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    dims = dims_of(x, dim)
    if order == math.inf:
        return largest(absolute(x), dims, keepdim)
    if order == 1:
        return absolute(x).sum(dims, keepdim=keepdim)
    if order != 2:
        return NotImplemented
    return torch.sqrt((x * x).sum(dims, keepdim=keepdim))


# ---- softmax


def softmax(x: Tensor, dim: int, half: Any = False) -> Tensor:
    """``1 / sum_j exp(x_j - x_i)``."""
    dim = dim % x.ndim
    gaps = x.unsqueeze(dim) - x.unsqueeze(dim + 1)
    return torch.reciprocal(torch.exp(gaps).sum(dim + 1))


def log_softmax(x: Tensor, dim: int, half: Any = False) -> Tensor:
    """In differences of two logits the sum cancels."""
    centred = x - largest(x, [dim], True)
    return centred - torch.log(torch.exp(centred).sum(dim, keepdim=True))


# ---- maxima


def maximum(a: Tensor, b: Tensor) -> Tensor:
    return b + torch.relu(a - b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return a - torch.relu(a - b)


def absolute(x: Tensor) -> Tensor:
    if not x.is_floating_point():  # places of a padding, or complex numbers
        return NotImplemented
    return 2.0 * torch.relu(x) - x


def clamp(x: Tensor, least: Any = None, most: Any = None) -> Tensor:
    """Both ends at once, so that neither ReLU reads the other."""
    if least is not None and most is not None and not isinstance(least, Tensor) and least > most:
        return torch.full_like(x, most)
    above = None if most is None or most == math.inf else torch.relu(x - most)
    if least is not None and least != -math.inf:
        x = least + torch.relu(x - least)
    return x.clone() if above is None else x - above


def clamp_tensor(x: Tensor, least: Any = None, most: Any = None) -> Tensor:
    x = x if least is None else maximum(x, least)
    return x if most is None else minimum(x, most)


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    return slope * x + (1 - slope) * torch.relu(x)


def rrelu(
    x: Tensor, noise: Any, least: float = 1 / 8, most: float = 1 / 3, *rest: Any
) -> tuple[Tensor, Tensor]:
    return leaky_relu(x, (least + most) / 2), noise


def largest(x: Tensor, dims: Any = (), keepdim: bool = False) -> Tensor:
    """Of groups of values, in rounds."""
    axes = dims_of(x, dims)
    rest = [d for d in range(x.ndim) if d not in axes]
    shape = [1 if d in axes else x.shape[d] for d in range(x.ndim)]
    found = x.permute(*rest, *axes).flatten(len(rest))
    while found.shape[-1] > 1:
        half = (found.shape[-1] + 1) // 2
        found = maximum(found[..., :half], found[..., -half:])
    return found.reshape(shape if keepdim else [x.shape[d] for d in rest])


def largest_of_one(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return largest(x, [dim], keepdim), x.argmax(dim, keepdim)


def smallest(x: Tensor, dims: Any = (), keepdim: bool = False) -> Tensor:
    return -largest(-x, dims, keepdim)


def smallest_of_one(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return smallest(x, [dim], keepdim), x.argmin(dim, keepdim)


def several(value: Any) -> list[int]:
    """A setting for both axes."""
    found = [value] if isinstance(value, int) else list(value)
    return found * 2 if len(found) == 1 else found


def max_pool2d(
    x: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Any:
    """A tournament of the values in each window, read by convolutions."""
    return tournament(padded(x, kernel, stride, padding, dilation, ceil), kernel, stride, dilation)


def padded(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    """The map with as many pixels around it as its windows read: copies of such as a window
    contains already do not change its maximum."""
    around: list[int] = []
    settings = (several(v) for v in (kernel, stride or kernel, dilation, padding))
    for side, size, step, gap, before in zip(x.shape[-2:], *settings, strict=True):
        span, length = gap * (size - 1) + 1, int(side)
        room = length + 2 * before - span
        last = -(-room // step) if ceil else room // step
        if ceil and last * step >= length + before:  # windows start inside the map
            last -= 1
        around = [before, max(0, last * step + span - length - before), *around]
    if not any(around):
        return x
    if several(dilation) != [1, 1]:
        return None
    wide = F.pad(x.reshape(-1, *x.shape[-3:]), around, mode="replicate")
    return wide.reshape(*x.shape[:-2], *wide.shape[-2:])


def tournament(x: Any, kernel: Any, stride: Any, dilation: Any) -> Any:
    if x is None:
        return NotImplemented
    size = several(kernel)
    taps, channels = math.prod(size), x.shape[-3]
    each = torch.eye(taps, dtype=x.dtype, device=x.device).reshape(taps, 1, 1, *size)

    def read(weight: Tensor) -> Tensor:
        shared = weight.expand(channels, 1, *size)
        steps = several(stride or kernel), 0, several(dilation), channels
        return F.conv2d(x, shared, None, *steps)

    players = [
        read(each[k + 1]) + torch.relu(read(each[k] - each[k + 1])) for k in range(0, taps - 1, 2)
    ]
    players += [read(each[-1])] if taps % 2 else []
    while len(players) > 1:
        first, second, *rest = players
        players = [*rest, maximum(first, second)]
    return players[0], players[0]


def adaptive_max_pool2d(x: Tensor, sizes: Any) -> tuple[Tensor, Tensor]:
    for axis, size in zip((x.ndim - 2, x.ndim - 1), sizes, strict=True):
        length = x.shape[axis]
        ends = [(k * length // size, -(-(k + 1) * length // size)) for k in range(size)]
        parts = [largest(x.narrow(axis, a, b - a), [axis], True) for a, b in ends]
        x = torch.cat(parts, axis)
    return x, x


def avg_pool2d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
    counted: bool = True, divisor: int | None = None,
) -> Tensor:  # fmt: skip
    """A convolution keeps rows to patches."""
    size, around, channels = several(kernel), several(padding), x.shape[-3]
    if ceil or (any(around) and not counted):
        return NotImplemented
    mean = torch.full((channels, 1, *size), 1.0 / (divisor or math.prod(size)), dtype=x.dtype)
    return F.conv2d(x, mean.to(x.device), None, several(stride or kernel), around, 1, channels)


# ---- functions of one number


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    below = torch.expm1(-input_scale * torch.relu(-x))
    return scale * torch.relu(x) + alpha * scale * below


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    return [x.narrow(dim, sum(sizes[:k]), size) for k, size in enumerate(sizes)]


def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [x.select(dim, k) for k in range(x.shape[dim])]


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * torch.bmm(a, b)


def trilinear(*args: Any) -> Tensor:
    """The sum of the products of three tensors."""
    parts = list(args[:3])
    for k, dims in enumerate(args[3:6]):
        for d in dims:
            parts[k] = parts[k].unsqueeze(d)
    product: Tensor = (parts[0] * parts[1] * parts[2]).sum(args[6])
    return product


def minus(a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    return torch.add(a, b, alpha=-alpha)


def over(a: Any, b: Any) -> Tensor:
    return torch.mul(a, torch.reciprocal(b) if isinstance(b, Tensor) else 1 / b)


NORMAL: dict[Any, Callable[..., Any]] = {
    aten.neg.default: lambda x: x * -1.0,
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), minus),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), over),
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: without_statistics,
    aten.native_layer_norm.default: layer_norm,
    aten.native_group_norm.default: group_norm,
    aten.var.correction: variance,
    aten.linalg_vector_norm.default: length,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: lambda x, dim, dtype=None: softmax(x, dim),
    aten._log_softmax.default: log_softmax,
    aten.maximum.default: maximum,
    aten.minimum.default: minimum,
    aten.abs.default: absolute,
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: lambda x, most: clamp(x, None, most),
    aten.clamp.Tensor: clamp_tensor,
    aten.hardtanh.default: lambda x, least=-1.0, most=1.0: clamp(x, least, most),
    aten.leaky_relu.default: leaky_relu,
    aten.amax.default: largest,
    aten.amin.default: smallest,
    aten.max.dim: largest_of_one,
    aten.min.dim: smallest_of_one,
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
    aten.avg_pool2d.default: avg_pool2d,
    aten.gelu.default: gelu,
    aten.elu.default: elu,
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.baddbmm.default: baddbmm,
    aten.split_with_sizes.default: split,
    aten.unbind.int: unbind,
    aten.empty.memory_format: lambda size, *, memory_format=None, **about: torch.zeros(
        size, **about
    ),
    aten._trilinear.default: trilinear,
}
"""What takes an operator's place; ``NotImplemented`` leaves it as it is."""
