"""Gradients that come from elsewhere than the model's own backward pass, for values that stay the model's own.

Stand-ins (:mod:`wball.attacks.stand_ins`) open operations whose gradient is known to be of no use. Two more ideas open
what they cannot name:

:class:`Tapped` takes the gradient at an inner place of the model that has the shape of the image, and passes it on as
that of the image. Whatever lies before that place (an ``autograd.Function`` of one's own, a scripted module, a chaotic
or oscillating transformation, a division by zero) is treated as the identity, as in BPDA.

:class:`Smoothed` averages the gradient over a little noise. Gradients that are shattered, as by top-k activations,
differ from point to point, but their mean still points uphill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from wball.attacks.base import into_box, normal
from wball.model import Model, ask

TAPS = 4
"""Places that are tried, nearest to the output first: there all of a mask lies before them."""
DRAWS = 8
"""Noisy copies that a gradient is averaged over."""


class _Detour(NamedTuple):
    """The model's values, and scores with the place at which their gradient is taken."""

    values: Tensor
    scores: Tensor
    place: Any  # a tensor, or an edge of the graph


class _Detoured(torch.autograd.Function):
    """Values on the way forward; on the way back the gradient of the scores at their place, as that of the image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, find: Callable[[Tensor], _Detour]) -> Tensor:
        ctx.zero = torch.zeros_like(x)
        with torch.enable_grad():
            ctx.detour = find(x.detach().requires_grad_(True))
        values: Tensor = ctx.detour.values.detach()
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        detour: _Detour = ctx.detour
        if not detour.scores.requires_grad:  # where the model cuts the graph
            return ctx.zero, None
        (gradient,) = torch.autograd.grad(
            detour.scores, [detour.place], gradients[0], allow_unused=True
        )
        return ctx.zero if gradient is None else gradient, None


class _WithDetour(ABC):
    """``model`` with a detour on the way back."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return ask(self.model, x)
        scores: Tensor = _Detoured.apply(x, self._find)
        return scores

    @abstractmethod
    def _find(self, x: Tensor) -> _Detour:
        """The detour from images that carry a gradient."""


class Tapped(_WithDetour):
    """``model`` with the gradient at its ``number``-th inner place that has the shape of the image."""

    def __init__(self, model: Model, number: int) -> None:
        super().__init__(model)
        self.number = number

    def _find(self, x: Tensor) -> _Detour:
        scores = ask(self.model, x)
        places = _places(scores, x)
        return _Detour(scores, scores, places[self.number] if self.number < len(places) else x)


class Smoothed(_WithDetour):
    """``model`` with gradients averaged over noise of the given size, in pixel values, inside of the box.

    An attack whose steps are recorded gives its own source of noise as ``draws``: a recording knows no other.
    """

    def __init__(
        self,
        model: Model,
        noise: float,
        box: tuple[float, float] | None = None,
        draws: torch.Generator | None = None,
    ) -> None:
        super().__init__(model)
        self.noise, self.box, self._draws = noise, box, draws

    def _find(self, x: Tensor) -> _Detour:
        with torch.no_grad():
            values = ask(self.model, x)
        self._draws = self._draws or torch.Generator(x.device).manual_seed(0)
        total = torch.zeros_like(values)
        for _ in range(DRAWS):
            noisy = x + self.noise * normal(x, self._draws)
            total = total + ask(self.model, into_box(noisy, self.box))
        return _Detour(values, total / DRAWS, x)


def count_places(model: Model, x: Tensor) -> int:
    """How many places of a model can be tapped, at most :data:`TAPS`."""
    with torch.enable_grad():
        z = x.detach().requires_grad_(True)
        return len(_places(ask(model, z), z))


def _places(scores: Tensor, x: Tensor) -> list[GradientEdge]:
    """Edges of the graph whose gradient has the shape of ``x``, nearest to the scores first; not that of ``x``."""
    found: list[GradientEdge] = []
    layer = [] if scores.grad_fn is None else [scores.grad_fn]
    seen = set(layer)
    while layer and len(found) < TAPS:
        below = []
        for node in layer:
            for number, about in enumerate(getattr(node, "_input_metadata", ())):
                if (
                    tuple(about.shape) == tuple(x.shape) and node.next_functions
                ):  # the image itself has none
                    found.append(GradientEdge(node, number))
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    below.append(after)
        layer = below
    return found[:TAPS]
