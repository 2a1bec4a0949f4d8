"""How an attack looks at a model: logarithms, scales, averages and stand-ins.

:func:`best_view` compares what the gradient of a model predicts with what the model does when
images are changed a little. If the gradient predicts little (zero, saturated, shattered, cut off),
the stand-ins of :mod:`wball.attacks.stand_ins` are tried, and used if they predict more.
Success is always judged on the model itself.

:func:`find_signs` looks at a model before an evaluation, with any attack.
:class:`~wball.StandardAttack` raises one :class:`ModelWarning` per sign; an evaluation lists them.

=============  ====================================  ===========================================
code           reported if                           meaning and remedy
=============  ====================================  ===========================================
train-mode     a module is in training mode          attacks evaluate the model in evaluation
                                                     mode and put it back: results are for that
                                                     mode
probabilities  outputs are in [0, 1], rows sum to 1  softmax at the end saturates and hides
                                                     gradients: return logits
random-model   two evaluations of one batch differ   each example is judged by one draw: average
                                                     over draws, and attack the average
zero-gradient  an image's gradient is exactly zero   gradient masking or a non-differentiable
                                                     step: use a smooth stand-in or a
                                                     straight-through gradient, or a
                                                     decision-based attack
non-finite     logits or gradients have NaN or inf   the model overflows or divides by zero
=============  ====================================  ===========================================
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from wball.attacks.attack import Task
from wball.attacks.base import cross_entropy, input_gradient, into_box, normal
from wball.attacks.dual_averaging import normalised
from wball.attacks.stand_ins import StandIns
from wball.ball import Ball
from wball.model import (
    Model,
    answers_differ,
    as_found,
    ask,
    check_classes,
    full_precision,
    in_training,
    reached,
)
from wball.provenance import Plain

SIGNS = 64
"""Images that :func:`find_signs` evaluates."""
LOOKED_AT = 32
"""Images that views are compared on: half of them clean, half moved as an attack moves them."""
DIRECTIONS = 16
"""Random changes of each of them."""
SHAKEN, SHAKEN_PIXELS = (0.02, 0.1, 0.3), 28 * 28
"""Sizes of the changes, in pixel values: small for smooth models, large enough to cross a
threshold. Images of more pixels than this are changed by the same distance in all."""
USEFUL, MOST = 0.3, 0.6
"""Cosine of predicted and measured changes above which an image's gradient is useful, and the share
of images for which it must be. Useless gradients pass on a third of the images."""
CLEAR, CLEAR_IF_RANDOM, WORTH, WORTH_IF_CLEAR = 0.8, 0.5, 0.1, 0.02
"""Mean cosine of clear gradients (0.85 to 0.99 on networks without a mask), and by how much
stand-ins must be better; less where gradients are clear, and differ only because a part of the
model has none."""
CANNOT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Errors of models that cannot run where everything has a gradient."""
USUAL, USUAL_WIDTH, MOST_BITS = (0.1, 1e4), 10.0, 120
"""Usual spread of an image's logits. Other logits are multiplied by a power of two."""
ASKED_AGAIN = 7
"""Repeated evaluations, to detect random answers."""
DRAWS = 8
"""Answers of a random model that an attack averages over."""
ANSWERS = 15
"""Answers of a random model that decide by majority whether an image is broken."""


def _logarithms(model: Model, x: Tensor) -> Tensor:
    """Logarithms of a model's probabilities, to be used as logits."""
    p = ask(model, x)
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _averaged(model: Model, x: Tensor) -> Tensor:
    """The mean output of a randomised model (expectation over transformation)."""
    return torch.stack([ask(model, x) for _ in range(DRAWS)]).mean(0)


def _scaled(model: Model, outputs: Tensor) -> Model:
    """The model with its logits rescaled to the usual spread, estimated from ``outputs``. The
    cross-entropy is flat where logits hardly differ, and equals a margin where they differ by
    thousands."""
    wide = outputs.amax(1) - outputs.amin(1)
    middle = float(wide.double().median()) if len(wide) else math.nan
    if not 0 < middle < math.inf or USUAL[0] <= middle <= USUAL[1]:
        return model
    bits = max(-MOST_BITS, min(MOST_BITS, round(math.log2(USUAL_WIDTH / middle))))
    return lambda x: ask(model, x) * 2.0**bits


@dataclass(frozen=True)
class View:
    """A function that an attack differentiates and queries in place of the model.

    Attributes:
        model: images to scores to climb.
        useful: share of images with useful gradients.
        own: whether gradients are the model's own, without stand-ins.
        random: whether repeated evaluations differ.
        probabilities: whether the model returns probabilities.
        clear: whether gradients predict the model as well as those of networks without a mask.
    """

    model: Model
    useful: float
    own: bool
    random: bool
    probabilities: bool
    clear: bool = True

    @property
    def is_useful(self) -> bool:
        return self.useful >= MOST

    def known(self) -> Plain:
        """All but the model, as plain data."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    def judge(self, task: Task, z: Tensor) -> Tensor:
        """Which images meet the goal; for random models, by a majority of :data:`ANSWERS`
        outputs."""
        if not self.random:
            return task.judge(z)
        with torch.no_grad(), full_precision():
            every = [reached(ask(task.model, z), task.y, task.target) for _ in range(ANSWERS)]
        return torch.stack(every).sum(0) * 2 > ANSWERS


def _seen(model: Model, first: Tensor, random: bool) -> Model:
    """The model, or its stand-ins, with logarithms, scale and average as its outputs need them."""
    with torch.no_grad():
        view = partial(_logarithms, model) if are_probabilities(ask(model, first)) else model
        view = _scaled(view, ask(view, first))
    return partial(_averaged, view) if random else view


def view_again(model: Model, x: Tensor, known: Plain) -> View:
    """The view of a prepared model that :func:`best_view` has chosen on the same images."""
    seen = model if known["own"] else StandIns(model)
    return View(_seen(seen, x[:LOOKED_AT], known["random"]), **known)


def best_view(model: Model, x: Tensor, y: Tensor, ball: Ball) -> View:
    """Choose the view of a prepared model, using the first images that it classifies correctly."""
    first = x[:LOOKED_AT]
    with torch.no_grad():
        outputs = ask(model, first)
        # Batches of one size are compared: others may round differently.
        again = (ask(model, first) for _ in range(ASKED_AGAIN))
        random = any(bool(answers_differ(outputs, other).any()) for other in again)
        probabilities = are_probabilities(outputs)

    right = (~reached(outputs, y[:LOOKED_AT], None)).nonzero().squeeze(1)
    view = own = _seen(model, first, random)
    if right.numel() == 0:
        return View(own, 1.0, True, random, probabilities)
    x, y, ball = x[right], y[right], ball.take(right)
    points = _moved(ball, x)
    slope = _slope(own, points, y)
    cosine = foresight(own, points, y, slope, ball)
    least = CLEAR_IF_RANDOM if random else CLEAR
    open_model = StandIns(model)
    try:
        other = _seen(open_model, first, random)
        other_slope = _slope(other, points, y)
        if open_model.replaces_scores or not torch.equal(slope, other_slope):
            worth = WORTH_IF_CLEAR if float(cosine.mean()) >= least else WORTH
            if open_model.replaces_scores and not (probabilities and (outputs > 0).all()):
                # Saturated outputs are flat or rounded to 0 and 1; the scores before them are not.
                worth = -WORTH
            better = foresight(other, points, y, other_slope, ball)
            if float(better.mean()) > float(cosine.mean()) + worth:
                view, cosine = other, better
    except torch.OutOfMemoryError:
        raise
    except CANNOT:
        pass
    useful, clear = float((cosine > USEFUL).double().mean()), float(cosine.mean()) >= least
    return View(view, useful, view is own, random, probabilities, clear)


def _moved(ball: Ball, x: Tensor) -> Tensor:
    """Replace every other image by a point of its ball, as in an attack, where few pixels are
    exactly 0 or 1."""
    points = ball.oracle(x)(normal(x, Generator(x.device).manual_seed(0))).z.to(x)
    points[::2] = x[::2]
    return points


def _slope(view: Model, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the cross-entropy, with 0 where it is not finite."""
    with torch.enable_grad():
        z = x.detach().clone().requires_grad_(True)
        slope = input_gradient(cross_entropy(ask(view, z), y), z)
    return normalised(slope.nan_to_num(0.0, 0.0, 0.0))


def foresight(view: Model, x: Tensor, y: Tensor, slope: Tensor, ball: Ball) -> Tensor:
    """How well each image's gradient predicts the effect of random changes: the cosine of predicted
    and measured changes of the objective, at the size of change that the gradient predicts best."""
    best = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    if not slope.any():
        return best
    draws = Generator(x.device).manual_seed(0)
    shrink = min(1.0, (SHAKEN_PIXELS / x[0].numel()) ** 0.5)
    for size in SHAKEN:
        asked = into_box(x + shrink * size * normal(x, draws, DIRECTIONS), ball.box)
        with torch.no_grad():
            values = [cross_entropy(ask(view, one), y) for one in (x, *asked)]
        measured = (torch.stack(values[1:]) - values[0]).nan_to_num(0.0, 0.0, 0.0)
        predicted = ((asked - x) * slope).flatten(2).sum(2)
        changes = torch.stack([predicted, measured]).double()  # (2, DIRECTIONS, B)
        changes = F.normalize(changes - changes.mean(1, keepdim=True), dim=1, eps=1e-300)
        best = torch.maximum(best, changes.prod(0).sum(0).to(best))
    return best


def find_signs(model: Model, x: Tensor, y: Tensor) -> dict[str, str]:
    """Signs of gradient masking on the first images: a message for each code. The model is run in
    evaluation mode, as in attacks, and restored."""
    found: dict[str, str] = {}
    x, y = x[:SIGNS].detach(), y[:SIGNS]
    if len(x) == 0:
        return found
    if in_training(model):
        found["train-mode"] = (
            "a module is in training mode; the attack evaluates the model in evaluation mode"
        )
    with as_found(model, x.device), torch.inference_mode(False), torch.enable_grad():
        z = x.clone().requires_grad_(True)
        logits = ask(model, z)
        check_classes("y", y, logits)
        gradient = input_gradient(cross_entropy(logits, y), z)
        logits = logits.detach()
        with torch.no_grad():
            again = ask(model, x)
    if answers_differ(logits, again).any():
        found["random-model"] = "two evaluations of the same images differ"
    if are_probabilities(logits):
        found["probabilities"] = (
            "the outputs look like probabilities; return logits, softmax hides gradients"
        )
    if not logits.isfinite().all() or not gradient.isfinite().all():
        found["non-finite"] = "logits or gradients have NaN or infinite values"
    zero = int((gradient.flatten(1) == 0).all(1).sum())
    if zero:
        found["zero-gradient"] = f"the gradient is exactly zero on {zero} of {len(x)} images"
    return found


def are_probabilities(outputs: Tensor) -> bool:
    """Whether every row lies in [0, 1] and sums to 1."""
    inside = (outputs >= 0).all() & (outputs <= 1).all()
    return bool(inside & ((outputs.sum(1) - 1).abs() < 1e-4).all())
