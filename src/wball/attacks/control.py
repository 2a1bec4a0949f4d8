"""Control experiments: what an attack that works must do, and what a model that can be attacked
does not.

Each is a question with a known answer, asked after an attack about the images that survived it:

- in a ball so large that mass may go as far as the ground cost lets it, an attack must find an
  example wherever a cheap guess finds one: mass that drifts towards the shapes of other images
  (``full-ball-survivors``);
- a search without gradients (:class:`wball.ScoreSearch`) must not find more examples than the
  gradients (``black-box-stronger``);
- the model must answer with finite numbers (``non-finite``);
- an example should hold in the precision that the model is used in, too (``precision-dependent``).

None of them knows how a model hides its gradients. A model that fails none of them may still hide
something, but not from these.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wball.attacks.attack import Attack, AttackResult, Task
from wball.attacks.dual_averaging import START_NATS, normalised
from wball.attacks.findings import Finding
from wball.attacks.views import View
from wball.ball import Ball
from wball.model import Model, ask, reached

FULL = 1e6
"""A radius that no transport reaches."""
SURVIVORS, GUESSES = 16, 4
"""Images looked at, and other images that each drifts towards."""


def missed_in_full_ball(
    attacks: Sequence[Attack], view: View, task: Task, survived: Tensor
) -> Finding:
    """Estimate how many survivors a cheap guess breaks in the full ball although none of the
    attacks does, from the first survivors."""
    every, x = survived.nonzero().squeeze(1), task.x
    here = every[:SURVIVORS]
    ball = attacks[0].ball.take(here).at(FULL)
    guessed = torch.zeros(here.numel(), dtype=torch.bool, device=x.device)
    for shift in range(1, GUESSES + 1) if here.numel() else ():
        guess = drifted(ball, x[here], x.roll(shift, 0)[here])
        guessed |= view.judge(task.take(here), guess)
    left = here[guessed]
    for attack in attacks:
        if left.numel() == 0:
            break
        draws, part = torch.Generator(x.device).manual_seed(0), task.take(left)
        full = attack.at(FULL).take(left)
        found = full.attempt(replace(part, model=view.model), draws)
        left = left[~(found.success & view.judge(part, found.images))]
    share = left.numel() / max(1, here.numel())
    return Finding("full-ball-survivors", math.ceil(share * every.numel()), survived.numel())


def drifted(ball: Ball, x: Tensor, others: Tensor) -> Tensor:
    """Move the mass of each image towards the shapes of other images."""
    oracle = ball.oracle(x)
    b = START_NATS * normalised(others - x)
    oracle(b)  # learns how much of the radius cancels
    return oracle(b).z.to(x)


def not_finite(model: Model, *images: Tensor) -> Finding:
    """Count images whose logits contain NaN or +inf. -inf is allowed: it rules a class out."""
    with torch.no_grad():
        answers = [ask(model, part) for part in images]
    bad = torch.stack([(one.isnan() | one.isposinf()).any(1) for one in answers]).any(0)
    return Finding("non-finite", int(bad.sum()), bad.numel())


@torch.no_grad()
def precision_dependent(task: Task, best: AttackResult) -> Finding:
    """Count attempts that only one of full precision and the model as it is called accepts: on a
    GPU, PyTorch's convolutions round to TF32 by default."""
    as_called = reached(ask(task.model, best.images), task.y, task.target)
    differ = as_called != best.success
    return Finding("precision-dependent", int(differ.sum()), differ.numel())
