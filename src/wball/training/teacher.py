r"""Soft labels from a teacher model (distillation).

Hard labels make a small network overconfident and a large one memorise ambiguous images. With a
teacher ``T`` and its share ``s`` the loss compares logits with

.. math:: (1 - s)\, 1_y + s\, \mathrm{softmax}(T(x)),

where ``x`` is the augmented, clean image.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.model import ask, check_classes
from wball.training.config import TrainConfig
from wball.training.network import AsTrained


class Teacher:
    """Soft labels of a batch. Not a module, so that its weights are not trained or averaged."""

    def __init__(self, model: nn.Module, config: TrainConfig, x: Tensor, y: Tensor) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"teacher must be a torch.nn.Module, got {model!r}")
        options = config.optimisation
        layout = torch.channels_last if options.channels_last else torch.preserve_format
        own = copy.deepcopy(model).to(x.device, memory_format=layout)  # type: ignore[call-overload]
        self.share = config.loss.teacher
        self.model = AsTrained(own, options).eval().requires_grad_(False)
        try:
            check_classes("data", y, ask(self.model, x[:2]))
        except RuntimeError as error:
            raise ValueError(
                f"the teacher cannot take images of shape {tuple(x.shape[1:])}: {error}"
            ) from error

    @torch.no_grad()
    def targets(self, x: Tensor, y: Tensor) -> Tensor:
        """Labels mixed with the teacher's probabilities, ``(B, classes)``."""
        soft = self.model(x).softmax(1)
        return torch.lerp(F.one_hot(y, soft.shape[1]).to(soft.dtype), soft, self.share)
