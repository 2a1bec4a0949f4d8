"""Reading the output of a model as logits: one row of at least two numbers per image.

Models of other libraries return tuples (auxiliary outputs, hidden states), dictionaries or objects with a field
``logits``. Convolutional heads return ``(B, K, 1, 1)``, models of two classes often one number per image. If it is
not clear which numbers are the logits, an error describes the output.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

NAMES = ("logits", "output", "outputs", "out", "scores", "predictions", "probs", "probabilities")
"""Output field names tried for logits, in this order."""
FAR = 100.0
"""Size of random images that tell a probability from a logit: a logit leaves [0, 1] for some of them."""

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


def find_logits(output: Any, batch: int) -> Tensor:
    """The tensor of logits in the output of a model."""
    if isinstance(output, Tensor):
        return output
    fields = dict(output) if isinstance(output, Mapping) else {}
    for name in NAMES:
        value = fields.get(name, getattr(output, name, None))
        if isinstance(value, Tensor):
            return value
    inside = list(output) if isinstance(output, (tuple, list)) else list(fields.values())
    tensors = [v for v in inside if isinstance(v, Tensor) and v.is_floating_point()]
    scores = [v for v in tensors if v.ndim == 2 and v.shape[0] == batch]
    # Of several outputs of one width (auxiliary classifiers) the first one is the model's.
    if scores and len({v.shape for v in scores}) == 1:
        return scores[0]
    held = [repr(name) for name in fields] or [_kind(v) for v in inside]
    seen = f" of {', '.join(held[:6])}, and which of them are logits is not clear" if held else ""
    raise TypeError(
        f"the model must return a tensor of logits, got {type(output).__name__}{seen}; "
        "wrap it to return them: lambda x: model(x)[...]"
    )


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _two_classes(model: Callable[[Tensor], Any], score: Tensor, x: Tensor) -> Tensor:
    """Two logits from one number per image: the score of class 1, or the log-odds of a probability."""
    if _is_probability(model, x):
        tiny = torch.finfo(score.dtype).tiny
        score = score.clamp(min=tiny).log() - (1 - score).clamp(min=tiny).log()
    return torch.stack([torch.zeros_like(score), score], 1)


def _is_probability(model: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether a model's one number per image stays in [0, 1] for any image; evaluated once per model."""
    with suppress(TypeError):  # not every callable can be hashed
        if model in _probabilities:
            return _probabilities[model]
    far = FAR * torch.randn((8, *x.shape[1:]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = find_logits(model(far.to(x)), 8)
    is_probability = bool(((found >= 0) & (found <= 1)).all())
    if is_probability:
        warnings.warn(
            "the model returns one probability per image: it is taken as that of class 1, "
            "and attacked by its log-odds",
            stacklevel=2,
        )
    with suppress(TypeError):
        _probabilities[model] = is_probability
    return is_probability
