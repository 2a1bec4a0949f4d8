"""Control experiments: what an attack that works must do, and what a model that can be attacked
does not.

Each is a question with a known answer, asked after an attack about the images that survived it:

- in a ball so large that mass may go as far as the ground cost lets it, an attack must find an
  example wherever a cheap guess finds one: mass that drifts towards the shapes of other images
  (``full-ball-survivors``);
- a :class:`Student`, a network that learnt the model's labels and nothing else, must not lead to
  more examples than the model's own gradients (``black-box-stronger``);
- more steps must not help (``loss-still-rising``);
- the model must answer with finite numbers (``non-finite``).

None of them knows how a model hides its gradients. A model that fails none of them may still hide
something, but not from these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.attacks.attack import Attack, Task
from wball.attacks.base import normal
from wball.attacks.dual_averaging import START_NATS, normalised
from wball.attacks.findings import Finding
from wball.attacks.views import View
from wball.ball import Ball
from wball.model import Model, ask, top_class
from wball.zoo import list_models, load_model

FULL = 1e6
"""A radius that no transport reaches."""
SURVIVORS, GUESSES = 16, 4
"""Images looked at, and other images that each drifts towards."""
LESSONS, AT_ONCE = 60, 64
"""Gradient steps between two attacks on a student, and images in each of them."""
RATE = 0.1
"""Length of these steps, in gradients."""
LARGEST = 500_000
"""Weights of a student, at most."""


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
        found = full.attack_batch(replace(part, model=view.model), draws)
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


class Student:
    """A network trained on the labels of a model, to be attacked in its place (Papernot et al.
    2017).

    Attributes:
        network: images to logits.
    """

    def __init__(self, network: nn.Module, model: Model, generator: torch.Generator) -> None:
        self.network = network
        self._model, self._draws = model, generator
        self._points, self._labels = list[Tensor](), list[Tensor]()

    def learn(self, points: Tensor) -> None:
        """Query the model for the labels of more images, and train on all labelled images by
        gradient descent."""
        with torch.no_grad():
            self._labels += [top_class(ask(self._model, part)) for part in points.split(AT_ONCE)]
        self._points.append(points)
        images, labels = torch.cat(self._points), torch.cat(self._labels)
        weights = list(self.network.requires_grad_(True).parameters())
        device = self._draws.device
        for _ in range(max(LESSONS, len(labels) // AT_ONCE)):
            some = torch.randint(len(labels), (AT_ONCE,), generator=self._draws, device=device)
            with torch.enable_grad():
                logits = self.network(images[some])
                loss = F.cross_entropy(logits, labels[some], ignore_index=-1)
                slopes = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, slope in zip(weights, slopes, strict=True):
                    weight.sub_(RATE * slope)
        self.network.requires_grad_(False)


def untaught(x: Tensor, classes: int, generator: torch.Generator) -> list[nn.Module]:
    """Initial networks for a student: bundled networks that take images of this shape, or a small
    network with random weights."""
    networks = list[nn.Module]()
    for name in list_models():
        with suppress(RuntimeError, ValueError), torch.no_grad():  # images of another shape
            network = load_model(name).to(x)
            small = sum(weight.numel() for weight in network.parameters()) <= LARGEST
            if small and network(x[:1]).shape == (1, classes):
                networks.append(network)
    if networks:
        return networks
    grid = x if x.ndim == 4 else x[:, None, None, :]
    network = nn.Sequential(
        nn.Unflatten(1, grid.shape[1:]) if x.ndim == 2 else nn.Identity(),
        nn.Conv2d(grid.shape[1], 16, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(7), nn.Flatten(),
        nn.Linear(32 * 7 * 7, 100), nn.ReLU(), nn.Linear(100, classes),
    ).to(x)  # fmt: skip
    for weight in network.parameters():
        spread = (2 / weight[0].numel()) ** 0.5 if weight.ndim > 1 else 0.0
        weight.data = spread * normal(weight.data, generator)
    return [network]
