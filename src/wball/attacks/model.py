"""The model under attack: what is expected of it, and leaving it as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Model = Callable[[Tensor], Tensor]


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


def check_classes(name: str, labels: Tensor, logits: Tensor) -> None:
    """Labels that the model has a logit for. On a GPU a wrong one would end the process, not the call."""
    if labels.numel() == 0 or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise ValueError(f"{name} has labels from {low} to {high}, but the model has {logits.shape[1]} classes")


@contextmanager
def as_found(model: Model, device: torch.device) -> Iterator[None]:
    """The model in evaluation mode with frozen parameters, and everything as it was afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    modes, flags = [m.training for m in modules], [p.requires_grad for p in parameters]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            for module in modules:
                module.training = False
            for parameter in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for parameter, flag in zip(parameters, flags, strict=True):
                parameter.requires_grad_(flag)
