"""How an attack looks at a model, so that it sees what to climb: logarithms, averages and stand-ins.

:func:`best_view` compares what a model's gradient predicts with what the model does when a batch of images is shaken a
little. Gradients that predict nothing (zero, saturated, shattered, cut off) are replaced by those of smooth stand-ins
(:mod:`wball.attacks.stand_ins`), or by those of detours around what hides them (:mod:`wball.attacks.detours`), whatever
predicts most. Success is always judged on the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.attacks import objectives
from wball.attacks.base import into_box, normal
from wball.attacks.detours import Smoothed, Tapped, count_places
from wball.attacks.dual_averaging import normalised
from wball.attacks.oracle import oracle_of
from wball.attacks.stand_ins import StandIns
from wball.ball import Ball
from wball.model import Model, answers_differ, ask, full_precision, judge, reached

LOOKED_AT = 32
"""Images that views are compared on: half of them as they are, half moved as an attack moves them."""
DIRECTIONS = 16
"""Random changes of each of them."""
SHAKEN = (0.02, 0.1, 0.3)
"""Their sizes, in pixel values: small for smooth models, large enough to cross a threshold for others."""
USEFUL, MOST = 0.3, 0.6
"""Cosine of predicted and measured changes, above which an image's gradient is of use, and the share of images for
which it must be. Gradients of no use pass the test on a third of the images."""
CLEAR, CLEAR_IF_RANDOM, WORTH, WORTH_IF_CLEAR = 0.8, 0.5, 0.1, 0.02
"""Mean cosine above which no other gradients are looked for (networks without a mask reach 0.85 to 0.99, unless their
answers are random), and by how much others must be better; stand-ins by less if gradients are clear: they differ only
where a part of the model has no gradient."""
CANNOT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Not every model runs where everything has a gradient."""
USUAL, USUAL_WIDTH, MOST_BITS = (0.1, 1e4), 10.0, 120
"""By how much an image's logits differ in networks that hide nothing. Others are multiplied by a power of two."""
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


class Scaled:
    """A model with its logits multiplied by a constant: the cross-entropy is flat where they hardly differ, and a
    margin where they differ by thousands."""

    def __init__(self, model: Model, factor: float) -> None:
        self.model, self.factor = model, factor

    def __call__(self, x: Tensor) -> Tensor:
        return ask(self.model, x) * self.factor


def _scaled(model: Model, outputs: Tensor) -> Model:
    """The model with logits that differ as usual, from its ``outputs``; itself if they do."""
    wide = outputs.amax(1) - outputs.amin(1)
    middle = float(wide.double().median()) if len(wide) else math.nan
    if not 0 < middle < math.inf or USUAL[0] <= middle <= USUAL[1]:
        return model
    return Scaled(
        model, 2.0 ** max(-MOST_BITS, min(MOST_BITS, round(math.log2(USUAL_WIDTH / middle))))
    )


class Forward:
    """A model without gradients."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return ask(self.model, x)


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
        clear: whether gradients predict what the model does as well as those of networks that hide nothing.
    """

    model: Model
    useful: float
    own: bool
    random: bool
    probabilities: bool
    labels_only: bool = False
    clear: bool = True

    @property
    def is_useful(self) -> bool:
        return self.useful >= MOST

    def judge(self, model: Model, z: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
        """Which images meet the goal: by the majority of :data:`ANSWERS`, if answers are random."""
        with torch.no_grad():
            if not self.random:
                return judge(model, z, y, target)
            with full_precision():
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


def best_view(model: Model, x: Tensor, y: Tensor, ball: Ball) -> View:
    """The view of a model that is ready for an attack, by what it does to the first images it gets right."""
    first = x[:LOOKED_AT]
    with torch.no_grad():
        outputs = ask(model, first)
        few = [
            ask(model, x[:FEW]) for _ in range(ASKED_AGAIN)
        ]  # other sizes of a batch may round otherwise
        again = [(outputs, ask(model, first)), *((few[0], other) for other in few[1:])]
        random = any(bool(answers_differ(one, other).any()) for one, other in again)
        probabilities = are_probabilities(outputs)

    def seen(view: Model) -> Model:
        with torch.no_grad():
            view = Logarithms(view) if are_probabilities(ask(view, first)) else view
            view = _scaled(view, ask(view, first))
        return Averaged(view) if random else view

    right = (~reached(outputs, y[:LOOKED_AT], None)).nonzero().squeeze(1)
    x, y, ball = x[right], y[right], ball.take(right)
    shaken = _Shaken(_moved(ball, x), y, ball.box)
    own = seen(model)
    try:
        cosine = shaken.foresight(own, model)
    except NotImplementedError:  # a step that torch has no derivative for
        own = seen(Forward(model))
        cosine = shaken.foresight(own, model)
    best = own
    clear = CLEAR_IF_RANDOM if random else CLEAR
    open_model = StandIns(model)
    others = _others(model, open_model, x[:1], ball.box) if x.shape[0] else iter(())
    for number, (candidate, inner) in enumerate(others):
        worth = WORTH
        try:
            view = seen(candidate)
            if (
                number == 0
                and open_model.replaces_scores
                and not (probabilities and bool((outputs > 0).all()))
            ):
                # A sigmoid of each class flattens what is far from its middle, a softmax of large scores rounds to
                # 0 and 1; the scores behind it do neither.
                worth = -WORTH
            elif float(cosine.mean()) >= clear:
                if number > 0:
                    break
                worth = WORTH_IF_CLEAR
            same = inner is open_model and not open_model.replaces_scores
            other = shaken.foresight(view, model if same else inner)
        except torch.OutOfMemoryError:
            raise
        except CANNOT:
            continue
        if float(other.mean()) > float(cosine.mean()) + worth:
            best, cosine = view, other
    useful = float((cosine > USEFUL).double().mean()) if x.shape[0] else 1.0
    labels_only = useful < MOST and are_labels(outputs)
    return View(
        best, useful, best is own, random, probabilities, labels_only, float(cosine.mean()) >= clear
    )


def _moved(ball: Ball, x: Tensor) -> Tensor:
    """Every other image at a point of its ball, as in an attack: there pixels are neither black nor white."""
    if x.shape[0] == 0:
        return x
    points = oracle_of(ball, x)(normal(x, torch.Generator(x.device).manual_seed(0))).z.to(x)
    points[::2] = x[::2]
    return points


def _others(
    model: Model, open_model: StandIns, one: Tensor, box: tuple[float, float] | None
) -> Iterator[tuple[Model, Model]]:
    """Other sources of gradients, cheap ones first, and which model's values they have."""
    yield open_model, open_model
    for inner in (open_model, model):
        try:
            places = count_places(inner, one)
        except torch.OutOfMemoryError:
            raise
        except CANNOT:
            continue
        yield from ((Tapped(inner, number), inner) for number in range(places))
    for noise in SMOOTHED:
        yield Smoothed(open_model, noise, box), open_model


class _Shaken:
    """What random changes of images do to the objective, measured once for every model that has values of its own."""

    def __init__(self, x: Tensor, y: Tensor, box: tuple[float, float] | None) -> None:
        self._x, self._y, self._box = x, y, box
        self._measured: dict[
            int, tuple[Model, list[Tensor]]
        ] = {}  # keeps the model, so that no id is used twice

    def foresight(self, view: Model, values: Model) -> Tensor:
        """How well each image's gradient predicts what the changes do: the cosine of both, at the size of changes that
        it predicts best; 1 for no images. ``values`` is the model whose values the view has."""
        x = self._x
        if x.shape[0] == 0:
            return x.new_ones(1)
        best = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        with torch.enable_grad():
            z = x.detach().clone().requires_grad_(True)
            value = objectives.cross_entropy(ask(view, z), self._y)
            gradient = None
            if value.requires_grad:
                (gradient,) = torch.autograd.grad(value.sum(), z, allow_unused=True)
        if gradient is None:
            return best
        gradient = normalised(gradient.nan_to_num(0.0, 0.0, 0.0))
        if id(values) not in self._measured:
            with torch.no_grad():
                self._measured[id(values)] = (
                    values,
                    [self._change(view, asked) for asked in self._changes()],
                )
        for asked, measured in zip(self._changes(), self._measured[id(values)][1], strict=True):
            predicted = ((asked - x) * gradient).flatten(2).sum(2)
            best = torch.maximum(best, _cosine(predicted, measured).to(best))
        return best

    def _changes(self) -> Iterator[Tensor]:
        """Changed images ``(DIRECTIONS, B, ...)`` for each size, the same ones every time."""
        draws = torch.Generator(self._x.device).manual_seed(0)
        for size in SHAKEN:
            yield into_box(self._x + size * normal(self._x, draws, DIRECTIONS), self._box)

    def _change(self, view: Model, asked: Tensor) -> Tensor:
        """By how much the objective changes, ``(DIRECTIONS, B)``."""
        values = torch.stack(
            [objectives.cross_entropy(ask(view, one), self._y) for one in (self._x, *asked)]
        )
        return (values[1:] - values[:1]).nan_to_num(0.0, 0.0, 0.0)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of each image's changes ``(DIRECTIONS, B)``, whatever their scale. What all of them have in common (noise on a
    black background) says nothing about directions."""
    centred = [change.double() - change.double().mean(0) for change in (a, b)]
    scaled = [
        change / change.abs().amax(0).clamp(min=torch.finfo(torch.float64).tiny)
        for change in centred
    ]
    return F.cosine_similarity(scaled[0], scaled[1], dim=0)
