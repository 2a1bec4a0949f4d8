"""Signs that a robust accuracy may be an artefact of the model rather than robustness.

:func:`find_signs` looks at a model before an evaluation. :class:`~wball.StandardAttack` raises one
:class:`ModelWarning` per sign; an evaluation lists them. They stop nothing: they say what the
number may not mean.

=================  ========================================  ==============================================
code               reported if                               meaning and remedy
=================  ========================================  ==============================================
train-mode         a module is in training mode              attacks evaluate the model in evaluation mode
                                                             and put it back: results are for that
                                                             mode
probabilities      outputs are in [0, 1] and rows sum to 1   softmax at the end saturates and hides
                                                             gradients: return logits
random-model       two evaluations of one batch differ       each example is judged by one draw: average
                                                             over draws, and attack the average
zero-gradient      some image's gradient is exactly zero     gradient masking or a non-differentiable step:
                                                             use a smooth stand-in or a
                                                             straight-through gradient, or a
                                                             decision-based attack
non-finite         logits or gradients have NaN or inf       the model overflows or divides by zero
=================  ========================================  ==============================================
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from wball.attacks import objectives
from wball.model import Model, as_found, ask, check_classes, in_training

LIMIT = 64
"""Images that are evaluated."""


class ModelWarning(UserWarning):
    """A robust accuracy measured on this model may not mean what it seems to."""


def find_signs(model: Model, x: Tensor, y: Tensor) -> dict[str, str]:
    """The signs found on the first images: a message for each code.

    The model is evaluated as attacks do, in evaluation mode, and left as found.
    """
    found: dict[str, str] = {}
    x, y = x[:LIMIT].detach(), y[:LIMIT]
    if x.shape[0] == 0:
        return found
    if in_training(model):
        found["train-mode"] = (
            "a module is in training mode; the attack evaluates the model in evaluation mode"
        )
    with as_found(model, x.device), torch.inference_mode(False):
        logits, gradient = _evaluate(model, x.clone(), y)
        with torch.no_grad():
            drift = float((ask(model, x) - logits).abs().nan_to_num().max())
    # Kernels may choose another order of summation.
    if drift > 1e-4 * float(1 + logits.abs().nan_to_num().max()):
        found["random-model"] = f"two evaluations of the same images differ by up to {drift:.3g}"
    if are_probabilities(logits):
        found["probabilities"] = (
            "the outputs look like probabilities; return logits, softmax hides gradients"
        )
    if not bool(logits.isfinite().all()) or not bool(gradient.isfinite().all()):
        found["non-finite"] = "logits or gradients have NaN or infinite values"
    zero = int((gradient.flatten(1) == 0).all(1).sum())
    if zero:
        found["zero-gradient"] = f"the gradient is exactly zero on {zero} of {x.shape[0]} images"
    return found


def are_probabilities(outputs: Tensor) -> bool:
    """Whether every row lies in [0, 1] and sums to 1."""
    inside = (outputs >= 0).all() & (outputs <= 1).all()
    return bool(inside & ((outputs.sum(1) - 1).abs() < 1e-4).all())


def _evaluate(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of the cross-entropy's log-odds; zero where the model cuts the
    graph."""
    with torch.enable_grad():
        z = x.requires_grad_(True)
        logits = ask(model, z)
        check_classes("y", y, logits)
        score = objectives.cross_entropy(logits, y)
        gradient = None
        if score.requires_grad:
            with suppress(NotImplementedError):  # a step that torch has no derivative for
                (gradient,) = torch.autograd.grad(score.sum(), z, allow_unused=True)
    return logits.detach(), torch.zeros_like(x) if gradient is None else gradient
