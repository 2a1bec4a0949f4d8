r"""Soft labels from a trained network (distillation): what else an image looks like, said by one that has learnt it.

A hard label asks a small network to be sure of every image, and a large one to learn doubtful images by heart. With
teachers ``T_1, ..., T_n`` the loss compares logits with

.. math:: (1 - s)\, 1_y + \frac{s}{n} \sum_k \mathrm{softmax}(T_k(x)),

where ``x`` is the augmented, clean image. Robust networks make robust pupils of either kind; a standard one beside them
knows more of what clean images are (Chen et al., 2021).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.model import ask, check_classes
from wball.training.config import Optimisation, TrainConfig
from wball.training.network import AsTrained


class Teachers:
    """Gives the targets of a batch. No module: its weights are nobody's to train, average or share."""

    def __init__(
        self, models: Sequence[nn.Module], share: float, options: Optimisation, device: torch.device
    ) -> None:
        layout = torch.channels_last if options.channels_last else torch.preserve_format
        own = (copy.deepcopy(m).to(device, memory_format=layout) for m in models)  # type: ignore[call-overload]
        self.share, self.models = (
            share,
            [AsTrained(m, options).eval().requires_grad_(False) for m in own],
        )

    @torch.no_grad()
    def targets(self, x: Tensor, y: Tensor) -> Tensor:
        """The label and what the teachers say on average, mixed: probabilities ``(B, classes)``."""
        said = torch.stack([model(x).softmax(1) for model in self.models]).mean(0)
        return torch.lerp(F.one_hot(y, said.shape[1]).to(said.dtype), said, self.share)


def hired(
    teacher: nn.Module | Sequence[nn.Module] | None, config: TrainConfig, x: Tensor, y: Tensor
) -> Teachers | None:
    """The teachers that the settings ask for, if they take these images and know their classes."""
    share = config.loss.teacher
    models = (
        [] if teacher is None else [teacher] if isinstance(teacher, nn.Module) else list(teacher)
    )
    if bool(models) != (share > 0):
        raise ValueError(
            f"loss.teacher is {share:g}, and teacher is {'given' if models else 'missing'}: give both, the "
            "share of its answers in the labels and the network, or none"
        )
    if not models:
        return None
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"teacher must be a torch.nn.Module or several, got {model!r}")
    teachers = Teachers(models, share, config.optimisation, x.device)
    for model in teachers.models:
        try:
            check_classes("data", y, ask(model, x[:2]))
        except RuntimeError as error:
            raise ValueError(
                f"the teacher cannot take images of shape {tuple(x.shape[1:])}: {error}"
            ) from error
    return teachers
