"""Images and perturbations as small pictures for an HTML page."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GAIN, LOSS = (213, 94, 0), (0, 114, 178)
"""Colours of mass that arrives and leaves: vermilion and blue, told apart by the colour-blind."""

SCALES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def image_uri(x: Tensor) -> str:
    """A ``(C, H, W)`` image in [0, 1] as a PNG."""
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return _uri(pixels[0] if len(pixels) != 3 else pixels.transpose(1, 2, 0))


def change_uri(change: Tensor, scale: float) -> str:
    """A perturbation as a PNG: vermilion where mass arrives, blue where it leaves, fully opaque
    from ``scale`` on.

    Channels are averaged. What does not change is transparent, so that the picture suits light and
    dark pages.
    """
    mean = change.mean(0).numpy()
    pixels = np.zeros((*mean.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where((mean > 0)[..., None], np.array(GAIN), np.array(LOSS))
    pixels[..., 3] = np.clip(255 * np.abs(mean) / scale, 0, 255).round()
    return _uri(pixels)


def common_scale(changes: list[Tensor]) -> float:
    """A round number as the common colour scale of all pictures, set by the strongest changes."""
    tops = [float(c.mean(-3).abs().amax()) for c in changes if c.numel()]
    top = max(tops, default=1.0)
    return next((s for s in SCALES if 0.7 * top <= s), SCALES[-1])


def _uri(pixels: NDArray[np.uint8]) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
