r"""Soft labels from teacher models (distillation).

Hard labels make a small network overconfident and a large one memorise ambiguous images. With
teachers ``T_1, ..., T_n`` the loss compares logits with

.. math:: (1 - s)\, 1_y + \frac{s}{n} \sum_k \mathrm{softmax}(T_k(x)),

where ``x`` is the augmented, clean image.
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
    """Soft labels of a batch. Not a module, so that its weights are not trained or averaged."""

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
        """Labels mixed with the teachers' mean probabilities, ``(B, classes)``."""
        said = torch.stack([model(x).softmax(1) for model in self.models]).mean(0)
        return torch.lerp(F.one_hot(y, said.shape[1]).to(said.dtype), said, self.share)


def hired(
    teacher: nn.Module | Sequence[nn.Module] | None, config: TrainConfig, x: Tensor, y: Tensor
) -> Teachers | None:
    """The teachers that the settings ask for, checked on these images and labels."""
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
