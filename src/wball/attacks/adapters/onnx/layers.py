"""Layers of networks: convolutions, pooling, normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks.adapters.onnx.table import Node, operator

_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_AVERAGES: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMA: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class _Windows:
    """Where the windows of a node lie in an image: their size, steps and gaps, and the padding around the image.

    ``before`` and ``after`` are the padding that the node asks for; ``reach`` is what the windows need behind the
    image, which is more where ``ceil_mode`` adds a window that hangs over, and less where the last rows are not used.
    """

    def __init__(self, node: Node, image: Sequence[int], size: Sequence[int]) -> None:
        ones = [1] * len(size)
        self.size, self.steps, self.gaps = (
            list(size),
            node["strides"] or ones,
            node["dilations"] or ones,
        )
        auto = node["auto_pad"]
        both = node["pads"] or [0] * (2 * len(size))
        self.before, self.after = list(both[: len(size)]), list(both[len(size) :])
        self.reach, self.count = [], []
        for k, length in enumerate(image):
            wide, step = self.gaps[k] * (self.size[k] - 1) + 1, self.steps[k]
            if auto in ("SAME_UPPER", "SAME_LOWER"):
                total = max(0, (math.ceil(length / step) - 1) * step + wide - length)
                less, more = total // 2, total - total // 2
                self.before[k], self.after[k] = (
                    (less, more) if auto == "SAME_UPPER" else (more, less)
                )
            elif auto == "VALID":
                self.before[k] = self.after[k] = 0
            room = length + self.before[k] + self.after[k] - wide
            windows = (math.ceil(room / step) if node["ceil_mode"] else room // step) + 1
            if (windows - 1) * step >= length + self.before[k]:  # no window begins behind the image
                windows -= 1
            self.count.append(windows)
            self.reach.append((windows - 1) * step + wide - length - self.before[k])

    @property
    def plain(self) -> list[int] | None:
        """The padding, if it is the same on both sides and one that PyTorch's pooling takes."""
        same = all(
            b == a and 2 * b <= k and r <= a
            for b, a, r, k in zip(self.before, self.after, self.reach, self.size, strict=True)
        )
        return self.before if same else None

    def padded(self, x: Tensor, value: float, after: Sequence[int] | None = None) -> Tensor:
        after = self.reach if after is None else after
        sides = [
            s for pair in zip(reversed(self.before), reversed(after), strict=True) for s in pair
        ]
        return F.pad(x, sides, value=value) if any(sides) else x

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each window of a padded image."""
        if all(gap == 1 for gap in self.gaps):
            return _AVERAGES[len(self.size)](x, self.size, self.steps) * math.prod(self.size)
        kernel = torch.ones(1, 1, *self.size, dtype=x.dtype, device=x.device)
        planes = x.reshape(-1, 1, *x.shape[2:])
        found = _CONVOLUTIONS[len(self.size)](planes, kernel, stride=self.steps, dilation=self.gaps)
        return found.reshape(*x.shape[:2], *found.shape[2:])


@operator("Conv", attributes="auto_pad dilations group kernel_shape pads strides")
def _conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    windows = _Windows(node, x.shape[2:], weight.shape[2:])
    plain = windows.before == windows.after
    return _CONVOLUTIONS[weight.ndim - 2](
        x if plain else windows.padded(x, 0.0, windows.after),
        weight,
        bias,
        stride=windows.steps,
        padding=windows.before if plain else 0,
        dilation=windows.gaps,
        groups=node["group"],
    )


@operator(
    "MaxPool",
    attributes="auto_pad ceil_mode dilations kernel_shape pads storage_order strides",
    refuse=lambda node: "with indices is not supported" if node.wants(1) else None,
)
def _max_pool(node: Node, x: Tensor) -> Tensor:
    windows, kind = _Windows(node, x.shape[2:], node["kernel_shape"]), x.dtype
    x = x if x.is_floating_point() else x.float()
    padding = windows.plain
    if padding is None:
        x, padding = windows.padded(x, -math.inf), [0] * len(windows.size)
    run = _MAXIMA[len(windows.size)]
    return run(x, windows.size, windows.steps, padding, windows.gaps).to(kind)


@operator(
    "AveragePool",
    attributes="auto_pad ceil_mode count_include_pad dilations kernel_shape pads strides",
)
def _average_pool(node: Node, x: Tensor) -> Tensor:
    windows, counted = (
        _Windows(node, x.shape[2:], node["kernel_shape"]),
        bool(node["count_include_pad"]),
    )
    plain = windows.plain
    if plain is not None and all(gap == 1 for gap in windows.gaps):
        return _AVERAGES[len(windows.size)](
            x, windows.size, windows.steps, plain, ceil_mode=False, count_include_pad=counted
        )
    inside = torch.ones_like(x[:1, :1])
    if counted:  # the padding that was asked for counts; what hangs over behind it does not
        inside = F.pad(
            inside,
            [
                s
                for pair in zip(reversed(windows.before), reversed(windows.after), strict=True)
                for s in pair
            ],
            value=1.0,
        )
        over = [r - a for r, a in zip(windows.reach, windows.after, strict=True)]
        inside = F.pad(inside, [s for extra in reversed(over) for s in (0, extra)])
    else:
        inside = windows.padded(inside, 0.0)
    return windows.sums(windows.padded(x, 0.0)) / windows.sums(inside)


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@operator("GlobalAveragePool")
def _global_average_pool(node: Node, x: Tensor) -> Tensor:
    return x.mean(_spatial(x), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(node: Node, x: Tensor) -> Tensor:
    return x.amax(_spatial(x), keepdim=True)


@operator("Gemm", attributes="alpha beta transA transB")
def _gemm(node: Node, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    left = left.T if node["transA"] else left
    alpha, beta = (v if left.is_floating_point() else int(v) for v in (node["alpha"], node["beta"]))
    if alpha == beta == 1 and (bias is None or bias.ndim == 1):
        return F.linear(left, right if node["transB"] else right.T, bias)
    product = alpha * (left @ (right.T if node["transB"] else right))
    return product if bias is None else product + beta * bias


# ---- normalisation


def _training(node: Node) -> str | None:
    return (
        "in training mode is not known here: export the model in evaluation mode"
        if node["training_mode"]
        else None
    )


def _own_statistics(node: Node) -> str | None:
    if node["spatial"] == 0:
        return "with statistics per pixel (spatial=0) is not known here"
    return _training(node)


@operator(
    "BatchNormalization",
    attributes="epsilon momentum spatial training_mode",
    refuse=_own_statistics,
)
def _batch_norm(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    # PyTorch has no gradient by running statistics.
    return F.batch_norm(
        x, mean.detach(), variance.detach(), scale, bias, training=False, eps=node["epsilon"]
    )


@operator("Dropout", attributes="ratio seed")
def _dropout(
    node: Node, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if training is not None and bool(training):
        raise ValueError(
            "Dropout in training mode is not known here: export the model in evaluation mode"
        )
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("InstanceNormalization", attributes="epsilon")
def _instance_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=node["epsilon"])


def _normalised(x: Tensor, axes: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / std`` over some axes, in float32 at least, with the mean and one over the standard deviation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(tuple(axes), keepdim=True)
    inverse = (wide - mean).square().mean(tuple(axes), keepdim=True).add(eps).rsqrt()
    return (wide - mean) * inverse, mean, inverse


@operator("LayerNormalization", attributes="axis epsilon stash_type")
def _layer_norm(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Sequence[Tensor]:
    axis = int(node["axis"]) % x.ndim
    if (
        not node.wants(1)
        and scale.shape == x.shape[axis:]
        and (bias is None or bias.shape == scale.shape)
    ):
        return (F.layer_norm(x, list(scale.shape), scale, bias, node["epsilon"]),)
    normal, mean, inverse = _normalised(x, range(axis, x.ndim), node["epsilon"])
    y = normal.to(x.dtype) * scale
    return (y if bias is None else y + bias), mean, inverse


@operator("GroupNormalization", attributes="epsilon num_groups stash_type")
def _group_norm(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = int(node["num_groups"])
    if node.version < 21:  # one number per group
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    return F.group_norm(x, groups, scale, bias, node["epsilon"])


@operator("LRN", attributes="alpha beta bias size")
def _lrn(node: Node, x: Tensor) -> Tensor:
    size = int(node["size"])
    around = [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2]
    squares = F.pad(x.square(), around).unfold(1, size, 1).sum(-1)
    return x / (node["bias"] + node["alpha"] / size * squares) ** node["beta"]
