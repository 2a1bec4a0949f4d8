"""The training losses as one module, so that data parallelism wraps the loss and the network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.ball import WassersteinBall
from wball.certificates.trust import UnsupportedModule
from wball.training.bounds import LinfBounds, linear_gain
from wball.training.config import TrainConfig
from wball.training.network import AsTrained


class Objective(nn.Module):
    """``(clean images, training images, labels, progress, radii, targets)`` to a loss.

    The training images are adversarial, noisy, or the clean ones again. Targets are probabilities
    if a teacher has a share in them (:mod:`wball.training.teacher`), else the labels. Returns the
    mean loss, the number of images predicted as their label, and which images survived: those that
    are robust to first order at their radius for :class:`~wball.training.Smooth`, else those that
    are predicted as their label.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, like: Tensor) -> None:
        super().__init__()
        self.config, self._logits = config, AsTrained(model, config.optimisation)
        self._bounds = _bounds(model, like) if config.provable is not None else None

    def forward(
        self,
        x: Tensor,
        z: Tensor,
        y: Tensor,
        progress: float,
        eps: float | Tensor = 0.0,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets = y if targets is None else targets
        if self._bounds is not None:
            loss, right = self._provable(x, y, progress)
        elif self.config.smooth is not None and (isinstance(eps, Tensor) or eps > 0):
            return self._smooth(x, z, y, targets, eps)
        else:
            loss, right = self._usual(x, z, y, targets)
        return loss, right.sum(), right

    def _usual(self, x: Tensor, z: Tensor, y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.loss.clean == 0 or z is x:
            logits = self._logits(z)
            return self._cross_entropy(logits, targets), logits.argmax(1) == y
        # One pass over both halves: batch normalisation sees them together.
        clean, hard = self._logits(torch.cat([x, z])).chunk(2)
        return self._mixed(hard, clean, targets), hard.argmax(1) == y

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=self.config.loss.label_smoothing)

    def _mixed(self, hard: Tensor, clean: Tensor, targets: Tensor) -> Tensor:
        share = self.config.loss.clean
        loss = self._cross_entropy(hard, targets)
        return (1 - share) * loss + share * self._cross_entropy(clean, targets)

    def _smooth(
        self, x: Tensor, z: Tensor, y: Tensor, targets: Tensor, eps: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = z.detach().requires_grad_(True)
        logits = self._logits(z)
        (gradient,) = torch.autograd.grad(_excess(logits, y).sum(), z, create_graph=True)
        own = F.one_hot(y, logits.shape[1]).to(logits.dtype)
        raised = logits + linear_gain(gradient, x, WassersteinBall(eps))[:, None] * (1 - own)
        loss = self._mixed(raised, logits, targets)
        return loss, (logits.argmax(1) == y).sum(), _excess(raised, y).detach() < 0

    def _provable(self, x: Tensor, y: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        settings = self.config.provable
        assert settings is not None and self._bounds is not None
        logits = self._logits(x)
        clean, ramp = self._cross_entropy(logits, y), settings.ramped(progress)
        if ramp == 0:
            return clean, logits.argmax(1) == y
        crown = settings.crown + ramp * (settings.crown_end - settings.crown)
        margins = self._bounds.margins(x, y, ramp * settings.eps, crown)
        kappa = 1 + ramp * (settings.kappa - 1)
        others = margins.scatter(1, y[:, None], torch.inf)
        return kappa * clean + (1 - kappa) * F.cross_entropy(-margins, y), others.amin(1) > 0


def _bounds(model: nn.Module, like: Tensor) -> LinfBounds:
    bounds = LinfBounds(model, like)
    for name, module in model.named_modules():
        # The trace would keep the statistics of the untrained network.
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModule(
                f"provable training has no bound for {name!r} ({type(module).__name__}), whose "
                "statistics change; use a network without batch normalisation, such as mnist-cnn or "
                "cifar10-resnet-small"
            )
    return bounds


def _excess(logits: Tensor, y: Tensor) -> Tensor:
    """``f_r - f_y`` for the most likely wrong class ``r``."""
    rival = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1)
    return (logits.gather(1, rival[:, None]) - logits.gather(1, y[:, None])).squeeze(1)
