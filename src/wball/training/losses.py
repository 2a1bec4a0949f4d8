"""The training losses as one module, so that data parallelism wraps the loss and the network together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.ball import WassersteinBall
from wball.certificates.trust import UnsupportedModule
from wball.training.anchored import AnchoredBounds, record
from wball.training.bounds import LinfBounds, linear_gain
from wball.training.config import TrainConfig
from wball.training.distributed import current
from wball.training.network import AsTrained


class Objective(nn.Module):
    """``(clean images, training images, labels, progress, radii, targets) -> (mean loss, right, survived)``.

    The training images are the adversary's, or the noisy ones, or the clean ones again. Targets are probabilities where
    teachers have a share in them (:mod:`wball.training.teacher`), else the labels. ``right`` counts the images that are
    predicted as their label. ``survived`` says of each image whether it is robust to first order at its radius, where
    the loss is :class:`~wball.training.Smooth`; elsewhere it says which are right.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, like: Tensor) -> None:
        super().__init__()
        self.config, self._logits = config, AsTrained(model, config.optimisation)
        self._bounds = _bounds(model, like) if config.provable is not None else None
        anchored = config.smooth is not None and config.smooth.anchored
        # Off a GPU bfloat16 saves nothing; what several processes share is not recorded.
        low = config.optimisation.bf16 and like.is_cuda
        self._anchored = AnchoredBounds(model, like[:1], low) if anchored else None
        self._record = config.optimisation.cuda_graph and like.is_cuda and current().size == 1

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
        settings = self.config.loss
        two = settings.kind != "cross-entropy" or (settings.clean > 0 and z is not x)
        # One pass over both halves: batch normalisation sees them together.
        logits = self._logits(torch.cat([x, z]) if two else z)
        clean, hard = logits.chunk(2) if two else (logits, logits)
        right = hard.argmax(1) == y
        if settings.kind == "trades":
            return self._cross_entropy(clean, targets) + settings.beta * _divergence(
                clean, hard
            ).mean(), right
        if settings.kind == "mart":
            doubt = 1 - clean.softmax(1).gather(1, y[:, None]).squeeze(1)
            return (
                _boosted(hard, y) + settings.beta * doubt * _divergence(clean, hard)
            ).mean(), right
        loss = self._cross_entropy(hard, targets)
        if two:
            loss = (1 - settings.clean) * loss + settings.clean * self._cross_entropy(
                clean, targets
            )
        return loss, right

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=self.config.loss.label_smoothing)

    def _smooth(
        self, x: Tensor, z: Tensor, y: Tensor, targets: Tensor, eps: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ball = WassersteinBall(eps)
        if self._anchored is not None:
            budget = ball.budget(x)
            if self._record:
                self._record = False
                record(self._anchored, x, y, budget)
            logits, gain = self._anchored(x, y, budget)
        else:
            z = z.detach().requires_grad_(True)
            logits = self._logits(z)
            (gradient,) = torch.autograd.grad(_excess(logits, y).sum(), z, create_graph=True)
            own = F.one_hot(y, logits.shape[1]).to(logits.dtype)
            gain = linear_gain(gradient, x, ball)[:, None] * (1 - own)
        raised, share = logits + gain, self.config.loss.clean
        loss = self._cross_entropy(raised, targets)
        if share > 0:
            loss = (1 - share) * loss + share * self._cross_entropy(logits, targets)
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
        # Traced once, it would stay as it was then: other bounds than those of the network that is trained.
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedModule(
                f"provable training has no bound for {name!r} ({type(module).__name__}), whose statistics change; "
                "use a network without batch normalisation, such as mnist-cnn or cifar10-resnet-small"
            )
    return bounds


def _excess(logits: Tensor, y: Tensor) -> Tensor:
    """``f_r - f_y`` for the most likely wrong class ``r``."""
    rival = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1)
    return (logits.gather(1, rival[:, None]) - logits.gather(1, y[:, None])).squeeze(1)


def _divergence(clean: Tensor, hard: Tensor) -> Tensor:
    """``KL(p(clean) || p(hard))`` per image."""
    target = clean.log_softmax(1)
    return (target.exp() * (target - hard.log_softmax(1))).sum(1)


def _boosted(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy plus a penalty on the most likely wrong class, per image."""
    wrong = logits.softmax(1).scatter(1, y[:, None], 0.0).amax(1)
    return F.cross_entropy(logits, y, reduction="none") - torch.log1p(-wrong.clamp(max=1 - 1e-6))
