"""The Triton kernels, for CUDA devices (and, under ``TRITON_INTERPRET=1``, on the CPU for testing)."""

# mypy: ignore-errors
from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from wball.kernels.entropic_plan.triton import entropic_plan
from wball.kernels.linear_maximum.triton import linear_maximum
from wball.kernels.projected_sinkhorn.triton import MAX_VALUES, projected_sinkhorn
from wball.kernels.triton_stencil import Move

__all__ = ["MAX_VALUES", "entropic_plan", "linear_maximum", "projected_sinkhorn", "why_not"]

OLDEST = (3, 3)
"""Tuples of tensors, which hold the rings, came with this version."""


def why_not(x: Tensor, moves: Sequence[Move] | None) -> str | None:
    """Why these kernels must refuse such images, or ``None``."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST:
        return f"Triton {triton.__version__} is too old, these kernels need {'.'.join(map(str, OLDEST))}"
    if x.device.type != "cuda" and not interpreted:
        return f"Triton needs a CUDA device, the images are on {x.device} (TRITON_INTERPRET=1 interprets it on the CPU)"
    if x.dtype == torch.float64:
        return "the Triton kernels compute in float32, the images are float64"
    if moves is None:
        return "the Triton kernels serve stencil costs, not matrices"
    return None
