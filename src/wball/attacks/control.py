"""Control experiments: what an attack that works must do, and what a model that can be attacked
does not.

Each is a question with a known answer, asked after an attack about the images that survived it:

- in a ball so large that mass may go as far as the ground cost lets it, an attack must find an
  example wherever a cheap guess finds one: mass that drifts towards the shapes of other images
  (``full-ball-survivors``);
- more steps must not help (``loss-still-rising``);
- the model must answer with finite numbers (``non-finite``).

A model that fails none of them may still hide something, but not from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wball.attacks.base import GradientAttack
from wball.attacks.batch import Task
from wball.attacks.dual_averaging import START_NATS, normalised
from wball.attacks.findings import Finding
from wball.attacks.views import View
from wball.ball import Ball
from wball.model import Model, ask

FULL = 1e6
"""A radius that no transport reaches."""
SURVIVORS, GUESSES = 16, 4
"""Images looked at, and other images that each drifts towards."""


def missed_in_full_ball(
    attacks: Sequence[GradientAttack], view: View, task: Task, survived: Tensor
) -> Finding:
    """How many of the first survivors a cheap guess breaks in a full ball, and none of the attacks
    does."""
    here, x = survived.nonzero().squeeze(1)[:SURVIVORS], task.x
    ball = attacks[0].ball.take(here).at(FULL)
    guessed = torch.zeros(here.numel(), dtype=torch.bool, device=x.device)
    for shift in range(1, GUESSES + 1):
        guess = drifted(ball, x[here], x.roll(shift, 0)[here])
        guessed |= view.judge(task.take(here), guess)
    here = here[guessed]
    left = here
    for attack in attacks:
        if left.numel() == 0:
            break
        draws = torch.Generator(x.device).manual_seed(0)
        full = attack.at(FULL).take(left)
        assert isinstance(full, GradientAttack)
        part = task.take(left)
        found = full.attack_batch(replace(part, model=view.model), draws)
        left = left[~(found.success & view.judge(part, found.images))]
    return Finding("full-ball-survivors", left.numel(), here.numel())


def drifted(ball: Ball, x: Tensor, others: Tensor) -> Tensor:
    """The images, with their mass drawn towards the shapes of others."""
    oracle = ball.oracle(x)
    b = START_NATS * normalised(others - x)
    oracle(b)  # learns how much of the radius cancels
    return oracle(b).z.to(x)


def not_finite(model: Model, *images: Tensor) -> Finding:
    """How many images have an answer with NaN or infinity, where -inf is a class that is ruled
    out."""
    with torch.no_grad():
        bad = torch.stack([_overflows(ask(model, part)) for part in images]).any(0)
    return Finding("non-finite", int(bad.sum()), bad.numel())


def _overflows(logits: Tensor) -> Tensor:
    return (logits.isnan() | logits.isposinf()).any(1)
