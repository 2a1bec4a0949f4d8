"""Signs that a robust accuracy may be an artefact of the model rather than robustness.

:func:`check_model` looks at a model before an evaluation (:class:`~wball.StandardAttack` calls it) and raises one
warning per sign. They do not stop anything: they say what the number may not mean.

==========================  ========================================  ==============================================
warning                     raised if                                 meaning and remedy
==========================  ========================================  ==============================================
TrainModeWarning            a module is in training mode              attacks evaluate the model in evaluation mode
                                                                      and put it back: results are for that mode
ProbabilitiesWarning        outputs are in [0, 1] and rows sum to 1   softmax at the end saturates and hides
                                                                      gradients: return logits
RandomModelWarning          two evaluations of one batch differ       each example is judged by one draw: average
                                                                      over draws, and attack the average
ZeroGradientWarning         some image's gradient is exactly zero     gradient masking or a non-differentiable step:
                                                                      use a smooth stand-in or a straight-through
                                                                      gradient, or a decision-based attack
NonFiniteWarning            logits or gradients have NaN or inf       the model overflows or divides by zero
FewClassesWarning           there are fewer than 4 classes            targeted DLR needs 4, and becomes the margin
==========================  ========================================  ==============================================
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


class ModelWarning(UserWarning):
    """A robust accuracy measured on this model may not mean what it seems to."""


class TrainModeWarning(ModelWarning):
    """The model is in training mode; attacks evaluate it in evaluation mode."""


class ProbabilitiesWarning(ModelWarning):
    """The outputs look like probabilities; logits are expected."""


class RandomModelWarning(ModelWarning):
    """Two evaluations of the same images differ."""


class ZeroGradientWarning(ModelWarning):
    """Some images have a gradient of exactly zero."""


class NonFiniteWarning(ModelWarning):
    """Some logits or gradients are NaN or infinite."""


class FewClassesWarning(ModelWarning):
    """Some objectives need more classes than the model has."""


def check_logits(logits: Tensor, batch: int) -> Tensor:
    """One row of at least two logits per image, or an error that says what came instead."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model must return a tensor of logits, got {type(logits).__name__}; wrap it to pick them")
    if logits.ndim != 2 or logits.shape[0] != batch or logits.shape[1] < 2:
        raise ValueError(
            f"the model must return logits of shape ({batch}, classes) with at least two classes, got "
            f"{tuple(logits.shape)}; for a single-logit binary model return stack([0, logit])"
        )
    return logits


def check_model(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, limit: int = 64
) -> tuple[type[ModelWarning], ...]:
    """Evaluate the model on up to ``limit`` images, warn about each sign found, and return their categories.

    The model's mode is respected: call it on the model as it will be attacked (:func:`~wball.attacks.base.as_found`),
    or as it came to find :class:`TrainModeWarning`.
    """
    found: dict[type[ModelWarning], str] = {}
    x, y = x[:limit].detach(), y[:limit]
    if x.shape[0] == 0:
        return ()
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        found[TrainModeWarning] = "a module is in training mode; the attack evaluates the model in evaluation mode"
    with torch.inference_mode(False), torch.enable_grad():
        z = x.clone().requires_grad_(True)
        logits = check_logits(model(z), z.shape[0])
        score = torch.logsumexp(logits.scatter(1, y[:, None], -torch.inf), 1) - logits.gather(1, y[:, None]).squeeze(1)
        gradient = torch.zeros_like(z)
        if score.requires_grad:
            gradient = torch.autograd.grad(score.sum(), z, allow_unused=True)[0]
            gradient = torch.zeros_like(z) if gradient is None else gradient
    with torch.no_grad():
        again = model(x)
    if not bool(torch.equal(torch.nan_to_num(again), torch.nan_to_num(logits.detach()))):
        drift = float((again - logits.detach()).abs().max())
        if drift > 1e-4 * float(1 + again.abs().max()):  # kernels may choose another order of summation
            found[RandomModelWarning] = f"two evaluations of the same images differ by up to {drift:.3g}"
    probabilities = (logits >= 0).all() & (logits <= 1).all() & ((logits.sum(1) - 1).abs() < 1e-4).all()
    if bool(probabilities):
        found[ProbabilitiesWarning] = "the outputs look like probabilities; return logits, softmax hides gradients"
    if not bool(logits.isfinite().all()) or not bool(gradient.isfinite().all()):
        found[NonFiniteWarning] = "logits or gradients have NaN or infinite values"
    zero = int((gradient.flatten(1) == 0).all(1).sum())
    if zero:
        found[ZeroGradientWarning] = f"the gradient is exactly zero on {zero} of {x.shape[0]} images"
    if logits.shape[1] < 4:
        found[FewClassesWarning] = f"the model has {logits.shape[1]} classes; targeted DLR needs 4 and uses the margin"
    for category, message in found.items():
        warnings.warn(message, category, stacklevel=2)
    return tuple(found)
