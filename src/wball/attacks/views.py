"""How an attack looks at a model, so that it sees what to climb: logarithms, averages and stand-ins.

:func:`best_view` compares what a model's gradient predicts with what the model does when a batch of images is shaken a
little. Gradients that predict nothing (zero, saturated, shattered, cut off) are replaced by those of smooth stand-ins
(:mod:`wball.attacks.stand_ins`), if these predict more. Success is always judged on the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks import objectives
from wball.attacks.stand_ins import StandIns
from wball.model import Model, ask, reached

LOOKED_AT = 32
"""Images that views are compared on."""
DIRECTIONS = 16
"""Random changes of each of them."""
SHAKEN = (0.02, 0.1, 0.3)
"""Their sizes, in pixel values: small for smooth models, large enough to cross a threshold for others."""
USEFUL = 0.3
"""Cosine of predicted and measured changes, above which an image's gradient is of use."""
NEARLY_ALL, MOST = 0.9, 0.6
"""Share of images whose gradients must be of use: below the first stand-ins are tried, below the second nothing else
can be said of gradients than that they are masked. Gradients of no use pass the test on a third of the images."""
DRAWS = 8
"""Answers of a random model that an attack averages over."""
ANSWERS = 15
"""Answers of a random model that decide by majority whether an image is broken."""


class Logarithms:
    """A model that returns probabilities, as logits."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        p = ask(self.model, x)
        return p.clamp(min=torch.finfo(p.dtype).tiny).log()


class Averaged:
    """The mean answer of a model that answers at random (expectation over transformation)."""

    def __init__(self, model: Model, draws: int = DRAWS) -> None:
        self.model, self.draws = model, draws

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([ask(self.model, x) for _ in range(self.draws)]).mean(0)


@dataclass(frozen=True)
class View:
    """What an attack asks instead of the model.

    Attributes:
        model: images to scores to climb.
        useful: share of images whose gradients are of use.
        own: whether gradients are the model's own, with no stand-in.
        random: whether answers differ from question to question.
        probabilities: whether the model's answers are probabilities.
        labels_only: whether they name a class and say nothing else.
    """

    model: Model
    useful: float
    own: bool
    random: bool
    probabilities: bool
    labels_only: bool = False

    @property
    def is_useful(self) -> bool:
        return self.useful >= MOST

    def judge(self, model: Model, z: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
        """Which images meet the goal: by the majority of :data:`ANSWERS`, if answers are random."""
        with torch.no_grad():
            if not self.random:
                return reached(ask(model, z), y, target)
            answers = torch.stack([reached(ask(model, z), y, target) for _ in range(ANSWERS)])
            return answers.sum(0) * 2 > ANSWERS


def plain_view(model: Model) -> View:
    """The model as it is."""
    return View(model, 1.0, True, False, False)


def are_probabilities(outputs: Tensor) -> bool:
    """Whether every row lies in [0, 1] and sums to 1."""
    inside = (outputs >= 0).all() & (outputs <= 1).all()
    return bool(inside & ((outputs.sum(1) - 1).abs() < 1e-4).all())


def are_labels(outputs: Tensor) -> bool:
    """Whether the same few numbers answer for every image, as in one-hot rows."""
    rows = outputs.sort(1).values
    return rows.shape[0] > 1 and bool((rows == rows[:1]).all())


def answers_differ(first: Tensor, again: Tensor) -> Tensor:
    """Images whose two answers differ by more than another order of summation explains."""
    drift = (first - again).abs().nan_to_num().amax(1)
    return drift > 1e-4 * (1 + first.abs().nan_to_num().max())


def best_view(model: Model, x: Tensor, y: Tensor, box: tuple[float, float] | None) -> View:
    """The view of a model that is ready for an attack, by what it does to the first images it gets right."""
    with torch.no_grad():
        outputs = ask(model, x[:LOOKED_AT])
        random = bool(answers_differ(outputs, ask(model, x[:LOOKED_AT])).any())
        probabilities = are_probabilities(outputs)

    def seen(view: Model) -> Model:
        with torch.no_grad():
            view = Logarithms(view) if are_probabilities(ask(view, x[:LOOKED_AT])) else view
        return Averaged(view) if random else view

    right = (~reached(outputs, y[:LOOKED_AT], None)).nonzero().squeeze(1)
    x, y = x[right], y[right]
    own = seen(model)
    useful = usefulness(own, x, y, box)
    if useful < NEARLY_ALL:
        try:
            stand_in = seen(StandIns(model))
            better = usefulness(stand_in, x, y, box)
        except RuntimeError:  # not every model runs where everything has a gradient
            better = 0.0
        if better > useful:
            return View(stand_in, better, False, random, probabilities)
    return View(own, useful, True, random, probabilities, are_labels(outputs))


def usefulness(model: Model, x: Tensor, y: Tensor, box: tuple[float, float] | None) -> float:
    """The share of images whose gradient predicts what small random changes do to the objective; 1 for no images."""
    if x.shape[0] == 0:
        return 1.0
    with torch.enable_grad():
        z = x.detach().clone().requires_grad_(True)
        value = objectives.cross_entropy(ask(model, z), y)
        gradient = None
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), z, allow_unused=True)
    if gradient is None:
        return 0.0
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
    draws = torch.Generator(x.device).manual_seed(0)
    best = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
    with torch.no_grad():
        for size in SHAKEN:
            noise = torch.randn((DIRECTIONS, *x.shape), generator=draws, device=x.device).to(x)
            asked = x + size * noise if box is None else (x + size * noise).clamp(*box)
            values = objectives.cross_entropy(ask(model, asked.flatten(0, 1)), y.repeat(DIRECTIONS))
            measured = (values.view(DIRECTIONS, -1) - value.detach()).nan_to_num(0.0, 0.0, 0.0)
            predicted = ((asked - x) * gradient).flatten(2).sum(2)
            # What all changes have in common (noise on a black background) says nothing about directions.
            predicted, measured = (change - change.mean(0) for change in (predicted, measured))
            best = torch.maximum(best, F.cosine_similarity(predicted, measured, dim=0))
    return float((best > USEFUL).double().mean())
