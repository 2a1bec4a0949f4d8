r"""Soft labels from a trained network (distillation): what else an image looks like, said by one that has learnt it.

A hard label asks a small network to be sure of every image, and a large one to learn doubtful images by heart. With a
teacher ``T`` the loss compares logits with

.. math:: (1 - s)\, 1_y + s\, \mathrm{softmax}(T(x)),

where ``x`` is the augmented, clean image: robust networks make robust pupils of either kind.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.model import ask, check_classes
from wball.training.config import Optimisation, TrainConfig
from wball.training.network import AsTrained


class Teacher:
    """Gives the targets of a batch. No module: its weights are nobody's to train, average or share."""

    def __init__(self, model: nn.Module, share: float, options: Optimisation, device: torch.device) -> None:
        layout = torch.channels_last if options.channels_last else torch.preserve_format
        own = copy.deepcopy(model).to(device, memory_format=layout)  # type: ignore[call-overload]
        self.share, self.model = share, AsTrained(own, options).eval().requires_grad_(False)

    @torch.no_grad()
    def targets(self, x: Tensor, y: Tensor) -> Tensor:
        """The label and what the teacher says, mixed: probabilities ``(B, classes)``."""
        said = self.model(x).softmax(1)
        return torch.lerp(F.one_hot(y, said.shape[1]).to(said.dtype), said, self.share)


def hired(model: nn.Module | None, config: TrainConfig, x: Tensor, y: Tensor) -> Teacher | None:
    """The teacher that the settings ask for, if it takes these images and knows their classes."""
    share = config.loss.teacher
    if (model is None) != (share == 0):
        raise ValueError(
            f"loss.teacher is {share:g}, and teacher is {'missing' if model is None else 'given'}: give both, the "
            "share of its answers in the labels and the network, or none"
        )
    if model is None:
        return None
    if not isinstance(model, nn.Module):
        raise TypeError(f"teacher must be a torch.nn.Module, got {model!r}")
    teacher = Teacher(model, share, config.optimisation, x.device)
    try:
        check_classes("data", y, ask(teacher.model, x[:2]))
    except RuntimeError as error:
        raise ValueError(f"the teacher cannot take images of shape {tuple(x.shape[1:])}: {error}") from error
    return teacher
