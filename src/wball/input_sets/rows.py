"""Linear functions of a layer's values, many at a time, each stored only where it can be non-zero.

A bound is carried backwards through the network as rows ``a``: row ``n`` is the function ``<a_n,
h>``, where ``h`` is the value of some layer for image ``image[n]``. A unit of a convolution sees a
small patch of its input, so a row over a feature map keeps a patch of fixed size at its own
position; a *dense* row keeps the whole map.

Rows of an anchored relaxation come with :class:`Charges`: what moved mass pays
(:mod:`wball.certificates.anchor`). An input set adds them to what its moves earn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.inputs import per_image


@dataclass(frozen=True)
class Rows:
    """``N`` linear functions of a layer.

    Attributes:
        coeff: ``(N, D)`` over a vector layer, ``(N, C, h, w)`` over a feature map.
        image: ``(N,)``, the image each row belongs to.
        corner: top and left of each row's patch, two ``(N,)`` tensors, possibly outside the map
            (coefficients there are 0); ``None`` if the rows are dense.
    """

    coeff: Tensor
    image: Tensor
    corner: tuple[Tensor, Tensor] | None = None

    def like(self, coeff: Tensor) -> Rows:
        """Other coefficients in the same places."""
        return Rows(coeff, self.image, self.corner)

    def take(self, index: Tensor) -> Rows:
        """A subset of the rows."""
        corner = None if self.corner is None else (self.corner[0][index], self.corner[1][index])
        return Rows(self.coeff[index], self.image[index], corner)

    def read(self, layer: Tensor) -> Tensor:
        """Values of a layer (``(B, C, H, W)``, or ``B = 1`` for a map shared by all images) at the
        positions of the rows."""
        image = self.image if layer.shape[0] > 1 else torch.zeros_like(self.image)
        if self.corner is None:
            return (
                layer[image]
                if layer.shape[0] > 1
                else layer.expand(self.coeff.shape[0], *layer.shape[1:])
            )
        height, width = self.coeff.shape[-2:]
        return read_patches(layer, image, self.corner, (height, width))

    def dense(self, shape: tuple[int, ...]) -> Rows:
        """The same rows over the whole map."""
        if self.corner is None:
            return self
        top, left = self.corner
        count, channels, height, width = self.coeff.shape
        rows = top[:, None] + torch.arange(height, device=top.device)
        columns = left[:, None] + torch.arange(width, device=top.device)
        keep = inside(self.corner, (height, width), shape)
        index = rows[:, :, None] * shape[2] + columns[:, None, :]
        nowhere = shape[1] * shape[2]
        index = torch.where(keep[:, 0], index, nowhere).flatten(1)[:, None].expand(-1, channels, -1)
        out = self.coeff.new_zeros((count, channels, nowhere + 1))
        out = out.scatter(2, index, self.coeff.flatten(2))
        return Rows(out[..., :-1].reshape(count, *shape), self.image)


def read_patches(
    layer: Tensor, image: Tensor, corner: tuple[Tensor, Tensor], size: tuple[int, int]
) -> Tensor:
    """``(N, C, *size)``: the patch of ``layer[image[n]]`` at each corner, 0 outside the map."""
    padded = F.pad(layer, (size[1], size[1], size[0], size[0]))
    windows = padded.unfold(2, size[0], 1).unfold(3, size[1], 1)
    top = (corner[0] + size[0]).clamp(0, windows.shape[2] - 1)
    left = (corner[1] + size[1]).clamp(0, windows.shape[3] - 1)
    return windows.permute(0, 2, 3, 1, 4, 5)[image, top, left]


def inside(corner: tuple[Tensor, Tensor], size: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """``(N, 1, *size)``, bool: which pixels of each patch lie inside a ``(C, H, W)`` map."""
    rows = corner[0][:, None] + torch.arange(size[0], device=corner[0].device)
    columns = corner[1][:, None] + torch.arange(size[1], device=corner[1].device)
    rows_in = (rows >= 0) & (rows < shape[1])
    columns_in = (columns >= 0) & (columns < shape[2])
    return (rows_in[:, :, None] & columns_in[:, None, :])[:, None]


def units(
    shape: tuple[int, ...],
    image: Tensor,
    index: Tensor,
    sign: Tensor,
    like: Tensor,
) -> Rows:
    """Rows that read ``sign[n]`` times unit ``index[n]`` (flat position in ``shape``) of a
    layer.
    """
    count = index.shape[0]
    if len(shape) != 3:
        coeff = torch.zeros((count, math.prod(shape)), dtype=like.dtype, device=like.device)
        coeff[torch.arange(count, device=index.device), index] = sign.to(like.dtype)
        return Rows(coeff.reshape(count, *shape), image)
    channels, height, width = shape
    channel, place = index // (height * width), index % (height * width)
    coeff = torch.zeros((count, channels, 1, 1), dtype=like.dtype, device=like.device)
    coeff[torch.arange(count, device=index.device), channel, 0, 0] = sign.to(like.dtype)
    return Rows(coeff, image, (place // width, place % width))


def trim(rows: Rows, shape: tuple[int, ...]) -> Rows:
    """Set coefficients outside the map to zero. Rows become dense once their patch is as large as
    the map."""
    if rows.corner is None:
        return rows
    height, width = rows.coeff.shape[-2:]
    if height * width >= 0.7 * shape[1] * shape[2]:
        return rows.dense(shape)
    return rows.like(rows.coeff * inside(rows.corner, (height, width), shape))


def add(first: Rows, second: Rows, shape: tuple[int, ...]) -> Rows:
    """The sum of two sets of rows over the same layer."""
    if first.corner is None and second.corner is None:
        return first.like(first.coeff + second.coeff)
    if first.corner is None or second.corner is None:
        return add(first.dense(shape), second.dense(shape), shape)
    top = torch.minimum(first.corner[0], second.corner[0])
    left = torch.minimum(first.corner[1], second.corner[1])
    spans = [
        (int((r.corner[0] - top).max()), int((r.corner[1] - left).max()), *r.coeff.shape[-2:])
        for r in (first, second)
        if r.corner is not None
    ]
    constant = all(
        bool((r.corner[0] - top == s[0]).all() and (r.corner[1] - left == s[1]).all())
        for r, s in zip((first, second), spans, strict=True)
        if r.corner is not None
    )
    if not constant:
        return add(first.dense(shape), second.dense(shape), shape)
    height, width = max(s[0] + s[2] for s in spans), max(s[1] + s[3] for s in spans)

    def place(rows: Rows, span: tuple[int, int, int, int]) -> Tensor:
        down, right, h, w = span
        return F.pad(rows.coeff, (right, width - right - w, down, height - down - h))

    return trim(
        Rows(place(first, spans[0]) + place(second, spans[1]), first.image, (top, left)), shape
    )


@dataclass(frozen=True)
class Charges:
    """Charges on moved mass, per row: ``moves`` (N, C, K, S) for each listed move out of each
    source. A move that is not listed is charged at most ``out`` (N, C, S) for its source plus
    ``into`` (N, C, h, w) for its target."""

    moves: Tensor
    out: Tensor
    into: Tensor

    def plus(self, other: Charges) -> Charges:
        return Charges(self.moves + other.moves, self.out + other.out, self.into + other.into)

    def take(self, index: Tensor) -> Charges:
        """The charges of a subset of the rows."""
        return Charges(self.moves[index], self.out[index], self.into[index])

    def times(self, weight: Tensor, index: Tensor) -> Charges:
        """The charges of rows ``index``, each times its ``weight``, in the weights' precision."""

        def scaled(part: Tensor) -> Tensor:
            return per_image(weight, part) * part[index].to(weight.dtype)

        return Charges(scaled(self.moves), scaled(self.out), scaled(self.into))


def rounded_up(gains: Tensor) -> Tensor:
    """Convert gains to float32, rounding up: larger gains only loosen a bound."""
    single = gains.float()
    return torch.where(single < gains, torch.nextafter(single, single.new_tensor(math.inf)), single)


def spread(
    patches: Tensor,
    corner: tuple[Tensor, Tensor],
    image: Tensor,
    active: Tensor | None,
    shape: tuple[int, ...],
) -> Tensor:
    """Patch maps ``(N, C, K, h, w)`` read at the sources of dense rows, ``(N, C, K, S)``; 0
    outside the patches.
    """
    size = (patches.shape[-2], patches.shape[-1])
    if active is None:
        place = torch.arange(shape[1] * shape[2], device=image.device).expand(
            image.shape[0], patches.shape[1], -1
        )
    else:
        place = active[image]
    row = place // shape[2] - corner[0].view(-1, 1, 1)
    column = place % shape[2] - corner[1].view(-1, 1, 1)
    keep = (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])
    index = torch.where(keep, row * size[1] + column, 0)
    found = patches.flatten(3).gather(3, index[:, :, None].expand(-1, -1, patches.shape[2], -1))
    return found * keep[:, :, None]
