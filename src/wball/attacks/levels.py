r"""Examples that survive storage: images whose pixels are whole multiples of ``1 / (levels - 1)``.

An example is pulled back towards its image by a little, :math:`z_s = x + s (z - x)`, and rounded
along a space-filling curve: a pixel becomes the difference of the *rounded* sums of all pixels up
to it, so that what one pixel loses the next one on the curve gains. Every channel keeps its mass
exactly, every pixel is rounded up or down by less than a level, and so stays in the box, and mass
moves by about a pixel. The largest ``s`` is taken at which the rounded image is still in the ball,
by its exact distance, and still meets the goal. Saved as a PNG and read back, it is the same image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from wball.attacks.batch import Task
from wball.attacks.result import AttackResult, AttackStatus
from wball.ball import Ball

PULLED_BACK = (1.0, 0.99, 0.98, 0.96, 0.93, 0.9, 0.85)
"""Shares of the way from the image to the example that are tried."""


def on_levels(x: Tensor, levels: int) -> bool:
    """Whether every pixel is a multiple of ``1 / (levels - 1)``, up to rounding."""
    units = x.double() * (levels - 1)
    return x.numel() == 0 or float((units - units.round()).abs().max()) <= 1e-3


def check_on_levels(x: Tensor, levels: int) -> None:
    """Raise unless every pixel is a multiple of ``1 / (levels - 1)``, up to rounding."""
    if not on_levels(x, levels):
        raise ValueError(
            f"x must have pixels that are multiples of 1/{levels - 1} for levels={levels}, so that rounding keeps the "
            f"mass: use images as they were stored, or (x * {levels - 1}).round() / {levels - 1}"
        )


def _curve(height: int, width: int, device: torch.device) -> Tensor:
    """The pixels in Z-order: neighbours on the curve are neighbours on the grid, mostly."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    code = torch.zeros_like(row)
    for bit in range(max(height, width).bit_length()):
        code |= (((row >> bit) & 1) << (2 * bit + 1)) | (((column >> bit) & 1) << (2 * bit))
    return code.flatten().argsort().to(device)


def rounded(z: Tensor, x: Tensor, levels: int) -> Tensor:
    """``z`` on the levels, every channel with the mass of ``x`` (which is on them) if ``z`` has it,
    up to rounding.

    >>> x = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    >>> rounded(torch.tensor([[[[0.4, 0.6], [0.6, 0.4]]]]), x, 2).sum()
    tensor(2.)
    """
    grid = z if z.ndim == 4 else z[:, None, None, :]
    order = _curve(int(grid.shape[2]), int(grid.shape[3]), z.device)
    units = (grid.double() * (levels - 1)).flatten(2)[..., order]
    whole = (x.reshape(grid.shape).double() * (levels - 1)).round().flatten(2).sum(2, keepdim=True)
    sums = units.cumsum(2)
    kept = (sums[..., -1:] - whole).abs() <= (2e-5 * whole).clamp(min=0.5)
    whole = torch.where(kept, whole, sums[..., -1:].round())
    sums = (sums * (whole / sums[..., -1:].clamp(min=torch.finfo(torch.float64).tiny))).round()
    steps = torch.diff(sums, dim=2, prepend=torch.zeros_like(whole))
    out = torch.empty_like(steps)
    out[..., order] = steps
    return (out.to(z.dtype) / (levels - 1)).view(z.shape)


def to_levels(
    result: AttackResult,
    ball: Ball,
    task: Task,
    levels: int,
    judge: Callable[[Task, Tensor], Tensor],
) -> AttackResult:
    """The result with its examples on the levels; the clean image, and no success, where none could
    be kept.

    ``judge(task, images)`` says which images meet the goal.
    """
    x, already = task.x, judge(task, task.x)
    images, success = x.clone(), already.clone()
    distance = torch.zeros_like(result.distance)
    for share in PULLED_BACK:
        left = (result.success & ~success).nonzero().squeeze(1)
        if left.numel() == 0:
            break
        start = x[left]
        points = rounded(start + share * (result.images[left] - start), start, levels)
        wrong = judge(task.take(left), points)
        left, points = left[wrong], points[wrong]
        if left.numel() == 0:
            continue
        inside = ball.take(left)
        far = inside.violations(x[left], points)
        kept = far.within(inside.eps)
        where = left[kept]
        images[where], success[where], distance[where] = (
            points[kept],
            True,
            far.distance[kept].to(distance),
        )
    status = list(result.status)
    for i in already.nonzero().flatten().tolist():
        status[i] = AttackStatus.ALREADY_WRONG
    for i in (result.success & ~success).nonzero().flatten().tolist():
        status[i] = AttackStatus.SURVIVED
    return replace(
        result, images=images, success=success, distance=distance, status=tuple(status), proof=None
    )
