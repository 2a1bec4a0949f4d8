"""Images and perturbations as small pictures for an HTML page."""

import base64
import io

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GAIN, LOSS = (213, 94, 0), (0, 114, 178)
"""Colours of mass that arrives and leaves: vermilion and blue, told apart by the colour-blind."""


def image_uri(x: Tensor) -> str:
    """A ``(C, H, W)`` image in [0, 1] as a PNG."""
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return _uri(pixels[0] if len(pixels) != 3 else pixels.transpose(1, 2, 0))


def change_uri(change: Tensor, most: float | None = None) -> str:
    """A perturbation as a PNG: vermilion where mass arrives, blue where it leaves, fully opaque
    where a pixel changes by ``most`` (default: the strongest change).

    The opacity grows with the root of the change, so that weak ones can be seen. Of the channels,
    the one that changes most is shown: in a mean, colours would cancel. What does not change is
    transparent, so that the picture suits light and dark pages.
    """
    shown = strongest(change).numpy()
    most = most or float(np.abs(shown).max()) or 1.0
    pixels = np.zeros((*shown.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where((shown > 0)[..., None], np.array(GAIN), np.array(LOSS))
    pixels[..., 3] = np.clip(255 * np.sqrt(np.abs(shown) / most), 0, 255).round()
    return _uri(pixels)


def strongest(change: Tensor) -> Tensor:
    """The change of the channel that changes most, ``(..., C, H, W)`` to ``(..., H, W)``."""
    return change.gather(-3, change.abs().argmax(-3, keepdim=True)).squeeze(-3)


def _uri(pixels: NDArray[np.uint8]) -> str:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
