"""Numbers per image beside batches of images."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """``(B,)`` reshaped to broadcast against a tensor with a leading batch dimension."""
    return values.view(-1, *[1] * (like.ndim - 1))


def largest(values: Tensor) -> Tensor:
    """The largest magnitude per image."""
    return torch.linalg.vector_norm(values.flatten(1), math.inf, 1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product per image."""
    return (a * b).flatten(1).sum(1)


def dot_and_size(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Inner product per image, and the sum of its terms' magnitudes, to which it is rounded."""
    terms = (a * b).flatten(1)
    return terms.sum(1), torch.linalg.vector_norm(terms, 1, 1)
