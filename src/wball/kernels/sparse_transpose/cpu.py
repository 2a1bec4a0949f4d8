"""The sparse transposed convolution (:mod:`wball.kernels.sparse_transpose`) on a CPU.

Position by position: the live cells that it sees are listed once for all its channels. Two channels and four cells
enter one pass over the maps, so that each number read serves two products.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, split
from wball.kernels.sparse_transpose import Geometry
from wball.moves import Moves


def why_not(x: Tensor, moves: Moves | None) -> str | None:
    """Why maps like ``x`` must be refused, or ``None``."""
    return (
        None
        if x.device.type == "cpu"
        else f"the maps are on {x.device}, this kernel runs on the CPU"
    )


def sparse_transpose(
    value: Tensor, cell: Tensor, weight: Tensor, wanted: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """See :func:`wball.kernels.sparse_transpose.sparse_transpose`."""
    taps = weight.detach().permute(2, 3, 0, 1).contiguous().numpy()
    place = np.full(math.prod(geometry.after), -1)
    place[cell.numpy()] = np.arange(cell.shape[0])
    shape = np.array(
        [
            *geometry.stride,
            *geometry.padding,
            *geometry.dilation,
            geometry.groups,
            *geometry.after[1:],
        ]
    )
    reached = np.zeros(wanted.shape[0], dtype=np.bool_)
    _reach(place, taps, wanted.numpy(), shape, geometry.before[2], reached)
    found = reached.nonzero()[0]
    goes = np.full(wanted.shape[0], -1)
    goes[found] = np.arange(found.shape[0])
    maps = value.contiguous().numpy()
    out = np.zeros((found.shape[0], maps.shape[1]), dtype=maps.dtype)

    def work(start: int, stop: int) -> None:
        _positions(maps, place, taps, goes, shape, geometry.before[2], start, stop, out)

    positions = geometry.before[1] * geometry.before[2]
    split(positions, work, maps.shape[1] * weight.numel() // 4)
    return torch.from_numpy(out), torch.from_numpy(found)


@compiled()
def _reach(place, weight, wanted, shape, width, reached):  # type: ignore[no-untyped-def]
    """Mark the wanted cells that see a listed one."""
    groups, each, per = shape[6], weight.shape[3], weight.shape[2] // shape[6]
    positions = wanted.shape[0] // (each * groups)
    for at in range(positions):
        for g in range(groups):
            seen = False
            for i in range(weight.shape[0]):
                p = _line(at // width, shape[2], i * shape[4], shape[0], shape[7])
                for j in range(weight.shape[1]):
                    q = _line(at % width, shape[3], j * shape[5], shape[1], shape[8])
                    if p < 0 or q < 0 or seen:
                        continue
                    for k in range(g * per, (g + 1) * per):
                        seen = seen or place[(k * shape[7] + p) * shape[8] + q] >= 0
            if seen:
                for c in range(g * each, (g + 1) * each):
                    reached[c * positions + at] = wanted[c * positions + at]


@compiled(fastmath={"contract"})
def _positions(maps, place, weight, goes, shape, width, start, stop, out):  # type: ignore[no-untyped-def]
    """Sum up what the positions from ``start`` to ``stop`` see."""
    groups, each, per = shape[6], weight.shape[3], weight.shape[2] // shape[6]
    positions = goes.shape[0] // (each * groups)
    listed = np.empty(per * weight.shape[0] * weight.shape[1], np.int64)
    scale = np.empty((each, listed.shape[0]), weight.dtype)
    chosen, target = np.empty(each, np.int64), np.empty(each, np.int64)
    for at in range(start, stop):
        for g in range(groups):
            some = 0
            for c in range(each):
                target[some] = goes[(g * each + c) * positions + at]
                if target[some] >= 0:
                    chosen[some] = c
                    some += 1
            if some == 0:
                continue
            count = 0
            for i in range(weight.shape[0]):
                p = _line(at // width, shape[2], i * shape[4], shape[0], shape[7])
                for j in range(weight.shape[1]):
                    q = _line(at % width, shape[3], j * shape[5], shape[1], shape[8])
                    if p < 0 or q < 0:
                        continue
                    for k in range(g * per, (g + 1) * per):
                        source = place[(k * shape[7] + p) * shape[8] + q]
                        if source >= 0:
                            listed[count] = source
                            for c in range(some):
                                scale[c, count] = weight[i, j, k, chosen[c]]
                            count += 1
            for c in range(0, some - 1, 2):
                _two(
                    maps, listed, count, scale[c], scale[c + 1], out[target[c]], out[target[c + 1]]
                )
            if some % 2:
                _one(maps, listed, count, scale[some - 1], out[target[some - 1]])


@compiled(inner=True)
def _line(at, padding, tap, stride, size):  # type: ignore[no-untyped-def]
    """The line of the maps after the convolution that line ``at`` enters by a tap; -1: none."""
    line = at + padding - tap
    return line // stride if line >= 0 and line % stride == 0 and line // stride < size else -1


@compiled(inner=True, fastmath={"contract"})
def _two(value, listed, count, scale, other, first, second):  # type: ignore[no-untyped-def]
    maps = first.shape[0]
    for k in range(0, count - 3, 4):
        s0, s1, s2, s3 = scale[k], scale[k + 1], scale[k + 2], scale[k + 3]
        o0, o1, o2, o3 = other[k], other[k + 1], other[k + 2], other[k + 3]
        v0, v1, v2, v3 = (
            value[listed[k]],
            value[listed[k + 1]],
            value[listed[k + 2]],
            value[listed[k + 3]],
        )
        for n in range(maps):
            a, b, c, d = v0[n], v1[n], v2[n], v3[n]
            first[n] += (s0 * a + s1 * b) + (s2 * c + s3 * d)
            second[n] += (o0 * a + o1 * b) + (o2 * c + o3 * d)
    for k in range(count - count % 4, count):
        s0, o0, v0 = scale[k], other[k], value[listed[k]]
        for n in range(maps):
            first[n] += s0 * v0[n]
            second[n] += o0 * v0[n]


@compiled(inner=True, fastmath={"contract"})
def _one(value, listed, count, scale, out):  # type: ignore[no-untyped-def]
    maps = out.shape[0]
    for k in range(0, count - 3, 4):
        s0, s1, s2, s3 = scale[k], scale[k + 1], scale[k + 2], scale[k + 3]
        v0, v1, v2, v3 = (
            value[listed[k]],
            value[listed[k + 1]],
            value[listed[k + 2]],
            value[listed[k + 3]],
        )
        for n in range(maps):
            out[n] += (s0 * v0[n] + s1 * v1[n]) + (s2 * v2[n] + s3 * v3[n])
    for k in range(count - count % 4, count):
        s0, v0 = scale[k], value[listed[k]]
        for n in range(maps):
            out[n] += s0 * v0[n]
