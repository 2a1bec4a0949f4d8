r"""Laplace noise in the flow domain, the training noise of Wasserstein smoothing (Levine and Feizi, 2020).

Each pair of neighbouring pixels exchanges a random amount of mass,

.. math::
    x' = x + m\, \mathrm{div}\, \delta, \qquad \delta_e \sim \mathrm{Laplace}(0, s) \text{ for every edge } e,

with ``m`` the image's mass, so that ``s`` is in the units of a mass-1 image. Mass is conserved in every channel; pixels
may leave [0, 1], and stay there, because clipping would not be a flow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def flow_noise(x: Tensor, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """``x`` with flow-domain Laplace noise (``generator``: on ``x``'s device).

    >>> x = torch.rand(2, 1, 5, 5)
    >>> bool(((flow_noise(x, 0.01) - x).sum((2, 3)).abs() < 1e-5).all())
    True
    """
    if not scale >= 0:
        raise ValueError(f"scale must be >= 0, got {scale}")
    batch, channels, height, width = x.shape
    size = scale * x.flatten(1).sum(1).view(-1, 1, 1, 1)

    def laplace(*shape: int) -> Tensor:
        # u in (-1/2, 1/2): -sign(u) log(1 - 2|u|) is Laplace of scale 1
        u = torch.rand(shape, dtype=x.dtype, device=x.device, generator=generator) - 0.5
        return -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.5 - 1e-7))

    down = size * laplace(batch, channels, height - 1, width)
    right = size * laplace(batch, channels, height, width - 1)
    out = x + F.pad(down, (0, 0, 1, 0)) - F.pad(down, (0, 0, 0, 1))
    return out + F.pad(right, (1, 0)) - F.pad(right, (0, 1))
