"""ART: any attack of this library as an ``EvasionAttack`` on an ART estimator.

    from wball.attacks.adapters.art import ArtAttack
    attack = wball.StandardAttack(wball.WassersteinBall(0.1))
    adversarial = ArtAttack(classifier, attack).generate(x, y)

A ``PyTorchClassifier`` is differentiated by PyTorch through its preprocessing. Any other estimator
with class gradients (TensorFlow, scikit-learn, ...) is differentiated by its own
``class_gradient``, at the price of one gradient per class.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from art.attacks import EvasionAttack
from art.config import ART_NUMPY_DTYPE
from art.estimators import BaseEstimator
from art.estimators.classification import ClassGradientsMixin
from art.estimators.classification.pytorch import PyTorchClassifier
from art.preprocessing.preprocessing import PreprocessorPyTorch
from numpy.typing import NDArray
from torch import Tensor, nn

from wball.attacks.attack import Attack, AttackResult, attack_labels, check_attack
from wball.model import Model

Array = NDArray[Any]


class _Pulled(torch.autograd.Function):
    """``scores``, whose gradient ``pull`` maps to that of the images ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, pull: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.pull = pull
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return ctx.pull(gradients[0]), None, None


class ArtAttack(EvasionAttack):
    """An attack of this library on an ART estimator.

    Attributes:
        result: what the last ``generate`` found, with distances and status per image.
    """

    attack_params: ClassVar[list[str]] = [*EvasionAttack.attack_params, "attack", "targeted"]
    _estimator_requirements = (BaseEstimator, ClassGradientsMixin)

    def __init__(
        self, estimator: Any, attack: Attack, targeted: bool = False, seed: int = 0
    ) -> None:
        super().__init__(estimator=estimator)
        check_attack(attack)
        self.attack, self.seed = attack, seed
        self._targeted = targeted
        self.result: AttackResult | None = None

    def generate(self, x: Array, y: Array | None = None, **kwargs: Any) -> Array:
        """Adversarial examples for images ``x``, an NCHW array in the ball's box.

        ``y`` holds class indices or one-hot rows: true labels, or the targets if ``targeted``.
        Without it, an untargeted attack uses the estimator's predictions as labels, as ART's
        attacks do.
        """
        if y is None and self.targeted:
            raise ValueError("y must hold the target classes of a targeted attack")
        if y is None:
            y = self.estimator.predict(np.asarray(x, ART_NUMPY_DTYPE))
        rows = np.ndim(y) == 2 and np.shape(y)[1] > 1
        labels = np.argmax(y, axis=1) if rows else np.ravel(y)
        device = getattr(self.estimator, "device", torch.device("cpu"))
        self.result = attack_labels(
            self.attack,
            _differentiable(self.estimator),
            torch.as_tensor(np.asarray(x), device=device),
            torch.as_tensor(np.asarray(labels), dtype=torch.long, device=device),
            self.targeted,
            self.seed,
        )
        return self.result.images.cpu().numpy().astype(x.dtype)


def _differentiable(estimator: Any) -> Model:
    if isinstance(estimator, PyTorchClassifier):
        operations = list(estimator.preprocessing_operations)
        if all(isinstance(operation, PreprocessorPyTorch) for operation in operations):
            return _PyTorch(estimator.model, operations)
    return _by_class_gradient(estimator)


class _PyTorch(nn.Module):
    """The network behind its ART preprocessing."""

    def __init__(self, model: nn.Module, operations: list[Any]) -> None:
        super().__init__()
        self.model, self.operations = model, operations

    def forward(self, x: Tensor) -> Tensor:
        for operation in self.operations:
            if operation.apply_predict:
                x, _ = operation.forward(x, None)
        logits = self.model(x)
        return logits[-1] if isinstance(logits, (list, tuple)) else logits


def _by_class_gradient(estimator: Any) -> Model:
    """An estimator of another framework, with ``sum_k v_k * class_gradient_k`` for its backward
    pass."""

    def predict(x: Tensor) -> Tensor:
        images = x.detach().cpu().numpy().astype(ART_NUMPY_DTYPE)  # as ART's own attacks do

        def pull(gradient: Tensor) -> Tensor:
            with torch.enable_grad():  # the estimator may differentiate by PyTorch itself
                by_class = torch.as_tensor(np.asarray(estimator.class_gradient(images))).to(x)
            return (gradient.view(*gradient.shape, *[1] * (x.ndim - 1)) * by_class).sum(1)

        return _Pulled.apply(x, torch.as_tensor(np.asarray(estimator.predict(images))).to(x), pull)

    return predict
