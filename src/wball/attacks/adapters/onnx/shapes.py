"""Operators that rearrange numbers, pick some of them, or make new tensors out of shapes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional as F

from wball.attacks.adapters.onnx.table import OPERATORS, TYPES, Given, numbers, operator, together


def constant(value: Any) -> Tensor:
    """Convert a stored tensor to PyTorch. NumPy has no bfloat16, so that type is converted through
    float32."""
    array = numpy_helper.to_array(value)
    if value.data_type not in TYPES:
        raise ValueError(f"tensor {value.name!r} has the unsupported type {array.dtype}")
    wanted = TYPES[value.data_type]
    array = np.array(array, np.float32 if wanted == torch.bfloat16 else None)
    return torch.from_numpy(array).to(wanted)


OPERATORS |= {
    "Concat": lambda *values, axis: torch.cat(together(*values), axis),
    "Einsum": lambda *values, equation: torch.einsum(equation, *together(*values)),
    "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(numbers(shape)))),
    "Shape": lambda x, *, start, end: torch.tensor(x.shape[start:end], dtype=torch.int64),
    "Transpose": lambda x, *, perm: x.permute(perm or tuple(reversed(range(x.ndim)))),
}


@operator("Constant")
def _constant(
    *,
    value: Any,
    value_float: float | None,
    value_floats: list[float] | None,
    value_int: int | None,
    value_ints: list[int] | None,
) -> Tensor:
    if value is not None:
        return constant(value)
    floats = value_float if value_floats is None else value_floats
    if floats is not None:
        return torch.tensor(floats, dtype=torch.float32)
    return torch.tensor(value_int if value_ints is None else value_ints, dtype=torch.int64)


@operator("ConstantOfShape")
def _constant_of_shape(shape: Tensor, *, value: Any) -> Tensor:
    filled = torch.zeros(()) if value is None else constant(value).reshape(())
    return filled.expand(numbers(shape)).clone()


@operator("Reshape")
def _reshape(x: Tensor, shape: Tensor, *, allowzero: int | None) -> Tensor:
    sizes = numbers(shape)
    if not allowzero:
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def _flatten(x: Tensor, *, axis: int) -> Tensor:
    if axis == 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Squeeze")
def _squeeze(x: Tensor, axes: Given = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(numbers(axes)))


@operator("Unsqueeze")
def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    places = numbers(axes)
    for axis in sorted(k % (x.ndim + len(places)) for k in places):
        x = x.unsqueeze(axis)
    return x


@operator("Split")
def _split(x: Tensor, sizes: Given = None, *, axis: int, count: int) -> Sequence[Tensor]:
    part = math.ceil(x.shape[axis] / count)
    return x.split(part if sizes is None else numbers(sizes), axis)


_PADDING = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}


@operator("Pad")
def _pad(x: Tensor, pads: Tensor, fill: Given = None, axes: Given = None, *, mode: str) -> Tensor:
    both = numbers(pads)
    places = range(x.ndim) if axes is None else [k % x.ndim for k in numbers(axes)]
    sides = dict(
        zip(places, zip(both[: len(places)], both[len(places) :], strict=True), strict=True)
    )
    flat = [side for k in reversed(range(x.ndim)) for side in sides.get(k, (0, 0))]
    if mode == "constant":
        return F.pad(x, flat, value=0.0 if fill is None else fill.item())
    if any(flat[-4:]):
        raise ValueError(f"Pad with mode {mode!r} is supported on the axes of pixels only")
    return F.pad(x, flat[:-4], _PADDING[mode])


@operator("Slice")
def _slice(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Given = None, steps: Given = None
) -> Tensor:
    first, last = numbers(starts), numbers(ends)
    places, by = numbers(axes) or range(len(first)), numbers(steps) or [1] * len(first)
    for axis, start, end, step in zip(places, first, last, by, strict=True):
        axis, size = axis % x.ndim, x.shape[axis]
        # Python reads negative numbers as ONNX does, except for an end before the first entry.
        stop = None if step < 0 and end < -size else end
        here = range(size)[slice(start, stop, step)]
        if step > 0:
            x = x[(slice(None),) * axis + (slice(here.start, max(here.start, here.stop), step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(here), dtype=torch.long, device=x.device))
    return x


@operator("Gather")
def _gather(x: Tensor, index: Tensor, *, axis: int) -> Tensor:
    axis %= x.ndim
    if index.numel() == 1 and index.device.type == "cpu":
        place = int(index) % x.shape[axis]
        return x.narrow(axis, place, 1) if index.ndim else x.select(axis, place)
    index = index.to(x.device, torch.long) % x.shape[axis]
    picked = x.index_select(axis, index.flatten())
    return picked.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])
