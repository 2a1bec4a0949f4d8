"""Operators that rearrange numbers, pick some of them, or make new tensors out of shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional as F

from wball.attacks.adapters.onnx.table import TYPES, Node, listed, numbers, operator, together


def constant(value: Any) -> Tensor:
    """A tensor of a file. NumPy has no bfloat16 of its own, so that goes through float32."""
    array = numpy_helper.to_array(value)
    if value.data_type not in TYPES:
        raise ValueError(f"tensor {value.name!r} has a type that is not known here, {array.dtype}")
    wanted = TYPES[value.data_type]
    return torch.from_numpy(np.array(array, np.float32 if wanted == torch.bfloat16 else None)).to(
        wanted
    )


@operator("Constant", attributes="value value_float value_floats value_int value_ints")
def _constant(node: Node) -> Tensor:
    (name,) = (k for k, v in node.attributes.items() if v is not None)
    if name == "value":
        return constant(node[name])
    kind = torch.float32 if name.startswith("value_float") else torch.int64
    return torch.tensor(node[name], dtype=kind)


@operator("ConstantOfShape", attributes="value")
def _constant_of_shape(node: Node, shape: Tensor) -> Tensor:
    value = torch.zeros(()) if node["value"] is None else constant(node["value"]).reshape(())
    return value.expand(numbers(shape)).clone()


@operator("Range")
def _range(node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(
        start.item(), limit.item(), delta.item(), dtype=start.dtype, device=start.device
    )


@operator("Shape", attributes="start end")
def _shape(node: Node, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[slice(node["start"], node["end"])], dtype=torch.int64)


# ---- shapes


@operator("Reshape", attributes="allowzero")
def _reshape(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    sizes = numbers(shape)
    if not node["allowzero"]:
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten", attributes="axis")
def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = int(node["axis"])
    axis = axis + x.ndim if axis < 0 else axis
    return (
        x.flatten(1)
        if axis == 1 and x.ndim > 1
        else x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    )


@operator("Squeeze", attributes="axes")
def _squeeze(node: Node, x: Tensor, given: Tensor | None = None) -> Tensor:
    axes = listed(node, "axes", given)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@operator("Unsqueeze", attributes="axes")
def _unsqueeze(node: Node, x: Tensor, given: Tensor | None = None) -> Tensor:
    axes = listed(node, "axes", given) or []
    for axis in sorted(k % (x.ndim + len(axes)) for k in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose", attributes="perm")
def _transpose(node: Node, x: Tensor) -> Tensor:
    return x.permute(node["perm"] or tuple(reversed(range(x.ndim))))


@operator("Expand")
def _expand(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(numbers(shape))))


@operator("Tile")
def _tile(node: Node, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(numbers(repeats))


@operator("Concat", attributes="axis")
def _concat(node: Node, *values: Tensor) -> Tensor:
    return torch.cat(together(*values), int(node["axis"]))


@operator("Split", attributes="axis split num_outputs")
def _split(node: Node, x: Tensor, given: Tensor | None = None) -> Sequence[Tensor]:
    axis, count = int(node["axis"]), len(node.outputs)
    size = x.shape[axis]
    part = math.ceil(size / count)
    sizes = listed(node, "split", given) or [
        max(0, min(part, size - k * part)) for k in range(count)
    ]
    return x.split(sizes, axis)


@operator("DepthToSpace", attributes="blocksize mode")
def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = int(node["blocksize"])
    if node["mode"] == "CRD":
        parts = x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    else:
        parts = x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // b**2, h * b, w * b)


@operator("Pad", attributes="mode pads value")
def _pad(
    node: Node,
    x: Tensor,
    pads: Tensor | None = None,
    fill: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    axes = [k % x.ndim for k in numbers(given)] if given is not None else list(range(x.ndim))
    both = listed(node, "pads", pads) or []
    sides = dict(zip(axes, zip(both[: len(axes)], both[len(axes) :], strict=True), strict=True))
    if node["mode"] == "constant":
        flat = [side for k in reversed(range(x.ndim)) for side in sides.get(k, (0, 0))]
        if fill is not None and fill.requires_grad:
            return torch.where(
                F.pad(torch.ones_like(x, dtype=torch.bool), flat), F.pad(x, flat), fill
            )
        return F.pad(x, flat, value=(node["value"] or 0.0) if fill is None else fill.item())
    for axis, (before, after) in sides.items():
        x = _pad_axis(x, axis, before, after, node["mode"])
    return x


def _pad_axis(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """One axis, longer by entries of its own (negative numbers cut off): which ones, numpy says."""
    if before < 0 or after < 0:
        x = x.narrow(axis, max(0, -before), x.shape[axis] + min(0, before) + min(0, after))
    if max(before, after) <= 0:
        return x
    places = np.pad(np.arange(x.shape[axis]), (max(0, before), max(0, after)), mode=mode)  # type: ignore[call-overload]
    return x.index_select(axis, torch.from_numpy(places).to(x.device))


# ---- picking


@operator("Slice", attributes="axes ends starts")
def _slice(
    node: Node,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    given: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first, last = listed(node, "starts", starts) or [], listed(node, "ends", ends) or []
    axes = listed(node, "axes", given) or list(range(len(first)))
    by = numbers(steps) or [1] * len(first)
    for axis, start, end, step in zip(axes, first, last, by, strict=True):
        axis, size = axis % x.ndim, x.shape[axis]
        # Python reads negative numbers as ONNX does, but for an end before the first entry.
        stop = None if step < 0 and end < -size else end
        here = range(size)[slice(start, stop, step)]
        if step > 0:
            x = x[(slice(None),) * axis + (slice(here.start, max(here.start, here.stop), step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(here), dtype=torch.long, device=x.device))
    return x


def _counted_from_the_end(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index).long()


@operator("Gather", attributes="axis")
def _gather(node: Node, x: Tensor, index: Tensor) -> Tensor:
    axis = int(node["axis"]) % x.ndim
    if index.numel() == 1 and index.device.type == "cpu":
        place = int(index) % x.shape[axis]
        return x.narrow(axis, place, 1) if index.ndim else x.select(axis, place)
    where = _counted_from_the_end(index.to(x.device), x.shape[axis])
    return x.index_select(axis, where.flatten()).reshape(
        [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]
    )


@operator("Einsum", attributes="equation")
def _einsum(node: Node, *values: Tensor) -> Tensor:
    return torch.einsum(node["equation"], *together(*values))
