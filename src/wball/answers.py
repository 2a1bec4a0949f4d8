"""What a model returns, read as logits: one row of at least two numbers per image.

Models of other libraries return tuples (auxiliary outputs, hidden states), dictionaries or objects with a field
``logits``; convolutional heads return ``(B, K, 1, 1)``; models of two classes often one number per image. Where it is
not clear which numbers are the logits, an error says what came instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

NAMES = ("logits", "output", "outputs", "out", "scores", "predictions", "probs", "probabilities")
"""How fields of an answer are called that hold logits, the first that is there."""
FAR = 100.0
"""Size of the random images that tell a probability from a logit: no probability leaves [0, 1] for them."""

_probabilities: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def read_logits(model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The model's logits for images, ``(B, K)`` with at least two classes, in its own precision."""
    batch = x.shape[0]
    logits = find_logits(model(x), batch)
    if not logits.is_floating_point():
        raise TypeError(
            f"the model must return floating-point logits, got {logits.dtype}; scores, not classes"
        )
    if logits.shape in ((batch,), (batch, 1)):
        return _two_classes(model, logits.reshape(batch), x)
    if logits.ndim > 2 and logits.shape[2:].numel() == 1:
        logits = logits.flatten(1)
    if logits.ndim != 2 or logits.shape[0] != batch:
        raise ValueError(
            f"the model must return logits of shape ({batch}, classes), got {tuple(logits.shape)}"
        )
    return logits


def find_logits(answer: Any, batch: int) -> Tensor:
    """The tensor of logits in what a model returned."""
    if isinstance(answer, Tensor):
        return answer
    fields = dict(answer) if isinstance(answer, Mapping) else {}
    fields |= {
        name: getattr(answer, name)
        for name in NAMES
        if name not in fields and hasattr(answer, name)
    }
    for name in NAMES:
        if isinstance(fields.get(name), Tensor):
            return fields[name]
    inside = list(answer) if isinstance(answer, (tuple, list)) else list(fields.values())
    scores = [
        v
        for v in inside
        if isinstance(v, Tensor) and v.is_floating_point() and v.shape[:1] == (batch,)
    ]
    scores = [v for v in scores if v.ndim == 2]
    # Of several outputs of one width (auxiliary classifiers) the first one is the model's answer.
    if scores and len({v.shape for v in scores}) == 1:
        return scores[0]
    held = (
        [f"{name!r}" for name in fields]
        if isinstance(answer, Mapping)
        else [_kind(v) for v in inside]
    )
    raise TypeError(
        f"the model must return a tensor of logits, got {type(answer).__name__}"
        + (f" of {', '.join(held[:6])}, and which of them are logits is not clear" if held else "")
        + "; wrap it to return them: lambda x: model(x)[...]"
    )


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _two_classes(model: Callable[[Tensor], Any], score: Tensor, x: Tensor) -> Tensor:
    """Two logits out of one number per image: the score of class 1, or its log-odds if it is a probability."""
    if _is_probability(model, x):
        tiny = torch.finfo(score.dtype).tiny
        score = score.clamp(min=tiny).log() - (1 - score).clamp(min=tiny).log()
    return torch.stack([torch.zeros_like(score), score], 1)


def _is_probability(model: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether a model's one number per image stays in [0, 1] whatever the image; asked once per model."""
    try:
        if model in _probabilities:
            return _probabilities[model]
    except TypeError:  # neither every callable can be hashed, nor referred to weakly
        pass
    generator = torch.Generator().manual_seed(0)
    far = FAR * torch.randn((8, *x.shape[1:]), generator=generator)
    with torch.no_grad():
        found = find_logits(model(far.to(x)), 8)
    answer = bool(((found >= 0) & (found <= 1)).all())
    try:
        _probabilities[model] = answer
    except TypeError:
        return answer
    if answer:
        warnings.warn(
            "the model returns one probability per image: it is taken as that of class 1, and attacked by its log-odds",
            stacklevel=2,
        )
    return answer
