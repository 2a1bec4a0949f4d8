"""How an attack looks at a model, so that it sees what to climb: logarithms, averages and stand-ins.

:func:`best_view` compares what a model's gradient predicts with what the model does when a batch of images is shaken a
little. Gradients that predict nothing (zero, saturated, shattered, cut off) are replaced by those of smooth stand-ins
(:mod:`wball.attacks.stand_ins`), or by those of detours around what hides them (:mod:`wball.attacks.detours`), whatever
predicts most. Success is always judged on the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks import objectives
from wball.attacks.base import normal
from wball.attacks.detours import Smoothed, Tapped, count_places
from wball.attacks.oracle import oracle_of
from wball.attacks.stand_ins import StandIns
from wball.ball import Ball
from wball.model import Model, ask, reached

LOOKED_AT = 32
"""Images that views are compared on: half of them as they are, half moved as an attack moves them."""
DIRECTIONS = 16
"""Random changes of each of them."""
SHAKEN = (0.02, 0.1, 0.3)
"""Their sizes, in pixel values: small for smooth models, large enough to cross a threshold for others."""
USEFUL, MOST = 0.3, 0.6
"""Cosine of predicted and measured changes, above which an image's gradient is of use, and the share of images for
which it must be. Gradients of no use pass the test on a third of the images."""
CLEAR, CLEAR_IF_RANDOM, WORTH = 0.8, 0.5, 0.1
"""Mean cosine above which no other gradients are looked for (networks without a mask reach 0.85 to 0.99, unless their
answers are random), and by how much others must be better."""
SMOOTHED = (0.02, 0.1)
"""Sizes of the noise, in pixel values, that shattered gradients are averaged over."""
ASKED_AGAIN, FEW = 7, 4
"""So often that many images are asked about again, to see whether answers are random."""
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


def best_view(model: Model, x: Tensor, y: Tensor, ball: Ball) -> View:
    """The view of a model that is ready for an attack, by what it does to the first images it gets right."""
    with torch.no_grad():
        outputs = ask(model, x[:LOOKED_AT])
        again = [ask(model, x[:LOOKED_AT])] + [ask(model, x[:FEW]) for _ in range(ASKED_AGAIN)]
        random = any(bool(answers_differ(outputs[: len(other)], other).any()) for other in again)
        probabilities = are_probabilities(outputs)

    def seen(view: Model) -> Model:
        with torch.no_grad():
            view = Logarithms(view) if are_probabilities(ask(view, x[:LOOKED_AT])) else view
        return Averaged(view) if random else view

    right = (~reached(outputs, y[:LOOKED_AT], None)).nonzero().squeeze(1)
    x, y, ball = x[right], y[right], ball.take(right)
    points = _moved(ball, x)
    own = seen(model)
    best, cosine = own, foresight(own, points, y, ball.box)
    clear = CLEAR_IF_RANDOM if random else CLEAR
    if x.shape[0] and not probabilities and bool(((outputs >= 0) & (outputs <= 1)).all()):
        # A sigmoid of each class flattens what is far from its middle; the scores behind it, if there are any, do not.
        view = seen(StandIns(model))
        other = foresight(view, points, y, ball.box)
        if float(other.mean()) > float(cosine.mean()) - WORTH:
            best, cosine = view, other
    for candidate in _others(model, x[:1]) if x.shape[0] and float(cosine.mean()) < clear else ():
        try:
            view = seen(candidate)
            other = foresight(view, points, y, ball.box)
        except RuntimeError:  # not every model runs where everything has a gradient
            continue
        if float(other.mean()) > float(cosine.mean()) + WORTH:
            best, cosine = view, other
        if float(cosine.mean()) >= clear:
            break
    useful = float((cosine > USEFUL).double().mean()) if x.shape[0] else 1.0
    return View(best, useful, best is own, random, probabilities, useful < MOST and are_labels(outputs))


def _moved(ball: Ball, x: Tensor) -> Tensor:
    """Every other image at a point of its ball, as in an attack: there pixels are neither black nor white."""
    if x.shape[0] == 0:
        return x
    points = oracle_of(ball, x)(normal(x, torch.Generator(x.device).manual_seed(0))).z.to(x)
    points[::2] = x[::2]
    return points


def _others(model: Model, one: Tensor) -> Iterator[Model]:
    """Other sources of gradients, cheap ones first."""
    yield StandIns(model)
    for inner in (StandIns(model), model):
        try:
            places = count_places(inner, one)
        except RuntimeError:
            continue
        yield from (Tapped(inner, number) for number in range(places))
    for noise in SMOOTHED:
        yield Smoothed(StandIns(model), noise)


def foresight(model: Model, x: Tensor, y: Tensor, box: tuple[float, float] | None) -> Tensor:
    """How well each image's gradient predicts what random changes do to the objective: the cosine of both, at the size
    of changes that it predicts best; 1 for no images."""
    if x.shape[0] == 0:
        return x.new_ones(1)
    best = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
    with torch.enable_grad():
        z = x.detach().clone().requires_grad_(True)
        value = objectives.cross_entropy(ask(model, z), y)
        gradient = None
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), z, allow_unused=True)
    if gradient is None:
        return best
    gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
    draws = torch.Generator(x.device).manual_seed(0)
    with torch.no_grad():
        for size in SHAKEN:
            noise = torch.randn((DIRECTIONS, *x.shape), generator=draws, device=x.device).to(x)
            asked = x + size * noise if box is None else (x + size * noise).clamp(*box)
            values = objectives.cross_entropy(ask(model, asked.flatten(0, 1)), y.repeat(DIRECTIONS))
            measured = (values.view(DIRECTIONS, -1) - value.detach()).nan_to_num(0.0, 0.0, 0.0)
            predicted = ((asked - x) * gradient).flatten(2).sum(2)
            # What all changes have in common (noise on a black background) says nothing about directions.
            predicted, measured = (change - change.mean(0) for change in (predicted, measured))
            best = torch.maximum(best, F.cosine_similarity(predicted, measured, dim=0).to(best))
    return best
