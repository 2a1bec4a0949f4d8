"""The model under attack: what is expected of it, and leaving it as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wball.inputs import recording

Model = Callable[[Tensor], Tensor]


def ask(model: Model, x: Tensor) -> Tensor:
    """The logits of images, in no less than their precision.

    The model gets a copy, because its first layer may work in place, in the precision of its parameters.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    own = next((p.dtype for p in parameters if p.is_floating_point()), x.dtype)
    logits = check_logits(model(x.to(own, copy=True)), x.shape[0])
    return logits.to(torch.promote_types(logits.dtype, x.dtype))


def check_logits(logits: Tensor, batch: int) -> Tensor:
    """One row of at least two logits per image, or an error that says what came instead."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model must return a tensor of logits, got {type(logits).__name__}; wrap it to pick them")
    if not logits.is_floating_point():
        raise TypeError(f"the model must return floating-point logits, got {logits.dtype}; scores, not classes")
    if logits.ndim != 2 or logits.shape[0] != batch or logits.shape[1] < 2:
        raise ValueError(
            f"the model must return logits of shape ({batch}, classes) with at least two classes, got "
            f"{tuple(logits.shape)}; for a single-logit binary model return stack([0, logit])"
        )
    return logits


def reached(logits: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
    """Whether logits meet the goal. A model that overflows is not fooled, it is broken."""
    top = top_class(logits)
    return (top >= 0) & (top == target if target is not None else top != y)


def top_class(logits: Tensor) -> Tensor:
    """The class of the largest logit; -1 where one is NaN, which is no class."""
    return torch.where(logits.isnan().any(1), -1, logits.argmax(1))


def check_classes(name: str, labels: Tensor, logits: Tensor) -> None:
    """Labels that the model has a logit for. On a GPU a wrong one would end the process, not the call."""
    if labels.numel() == 0 or recording(labels):
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise ValueError(f"{name} has labels from {low} to {high}, but the model has {logits.shape[1]} classes")


def with_modes(model: Model) -> list[nn.Module]:
    """The model's modules that can be in training mode: those of a frozen script cannot."""
    return [m for m in model.modules() if hasattr(m, "training")] if isinstance(model, nn.Module) else []


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """The model in evaluation mode, and every module in its own mode afterwards."""
    modes = [(module, module.training) for module in with_modes(model)]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def as_found(model: Model, device: torch.device) -> Iterator[None]:
    """The model in evaluation mode with frozen parameters, and everything as it was afterwards."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    flags = [p.requires_grad for p in parameters]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), evaluating(model):
        try:
            for parameter in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter, flag in zip(parameters, flags, strict=True):
                parameter.requires_grad_(flag)
