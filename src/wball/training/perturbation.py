r"""Adversarial weight perturbation (Wu, Xia and Wang, 2020): descend where the weights are worst, not where they are.

Robust overfitting goes with sharp minima of the adversarial loss in weight space. For each weight matrix or filter bank
``w`` with gradient ``g`` the step is taken with the gradient at

.. math:: w + \gamma\, \|w\|\, g / \|g\|,

the point of highest loss to first order among those at relative distance ``gamma``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def perturbed(model: nn.Module, gamma: float) -> Iterator[None]:
    """The model with weights moved up their gradients by the share ``gamma`` of their norm, and then back.

    Biases and the scales of normalisation stay. On leaving, the weights are what they were, bit for bit.
    """
    # Named by their gradient: frozen and unused weights have none.
    weights: list[Tensor] = [p for p in model.parameters() if p.grad is not None and p.dim() > 1]
    if not weights:
        yield
        return
    with torch.no_grad():
        before = [p.detach().clone() for p in weights]
        slopes = [p.grad.detach() for p in weights if p.grad is not None]
        sizes, lengths = torch._foreach_norm(weights), torch._foreach_norm(slopes)
        steps = [
            gamma * size / length.clamp(min=1e-30)
            for size, length in zip(sizes, lengths, strict=True)
        ]
        torch._foreach_add_(weights, torch._foreach_mul(slopes, steps))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
