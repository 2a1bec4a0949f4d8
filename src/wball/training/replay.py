"""An attack recorded once as a whole (:mod:`wball.attacks.recording`) and replayed on every batch.

An attack that keeps its batch and never asks the device for a value always launches the same kernels, so that all of
its steps together are one launch. :class:`~wball.DualAveraging` is of that kind, and so is :class:`~wball.PGD` where
a fused kernel projects. Images that have fallen stay in the batch, which would be a waste on a large network. The graph
reads the network's parameters where they lie, so it attacks the network as it is at each replay; batch normalisation is
folded into convolutions (:mod:`wball.training.folding`) at its beginning, once for all steps.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from wball.attacks import PGD, Attack, DualAveraging, objectives
from wball.attacks.base import lists_plans
from wball.attacks.batch import AttackBatch
from wball.attacks.recording import RECORDERS
from wball.model import as_found
from wball.solvers.entropic import EntropicProjection
from wball.training.folding import Folded
from wball.training.network import AsTrained

if TYPE_CHECKING:
    from wball.ball import WassersteinBall

WARM_UP = 3
"""Runs before the recording: kernels are compiled, algorithms chosen and tables built on the way."""
AGREEMENT = 0.1
"""A replay must raise the loss by what the attack itself raises it, up to this share."""


def can_replay(attack: Attack, x: Tensor) -> bool:
    """Whether ``attack`` on images like ``x`` may be recorded."""
    if isinstance(attack, PGD):
        fused = lists_plans(attack.ball) and EntropicProjection.serves(
            cast("WassersteinBall", attack.ball).problem(x), attack.reg
        )
        return _recordable(x) and fused and attack.step != "wasserstein" and not attack.random_start
    return _recordable(x) and isinstance(attack, DualAveraging)


def _recordable(x: Tensor) -> bool:
    return x.device.type in RECORDERS


class Replay:
    """``attack`` on ``model``, for batches like ``x, y`` with one radius per image.

    Raises:
        RuntimeError: the attack could not be recorded, or the recording does not do what the attack does.
    """

    def __init__(self, attack: DualAveraging | PGD, model: AsTrained, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x.clone(), y.clone()
        self._draws = torch.Generator(x.device)
        self._model = model
        eps = torch.full_like(y, float(attack.ball.eps), dtype=torch.float64)
        self._attack = dataclasses.replace(attack, ball=attack.ball.at(eps))
        assert isinstance(self._attack.ball.eps, Tensor)
        self._eps = self._attack.ball.eps  # what is written there reaches the graph
        with as_found(model, x.device):
            self._folded = Folded(model.model, torch.bfloat16 if model.options.bf16 else None)
            self._attacked = AsTrained(self._folded, model.options)
            for _ in range(WARM_UP):
                self._make()
            self._replay = RECORDERS[x.device.type](self._make, x.device, self._draws)
        self._check(attack)

    def __call__(
        self, x: Tensor, y: Tensor, eps: Tensor | float, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The images that the attack makes, and which of them succeed."""
        self._x.copy_(x)
        self._y.copy_(y)
        if isinstance(eps, Tensor):
            self._eps.copy_(eps)
        else:
            self._eps.fill_(eps)
        self._draws.manual_seed(seed)
        self._replay()
        return self._z.clone(), self._success.clone()

    def _make(self) -> None:
        """Attack what is in the buffers. A recording writes to the same results each time."""
        attack = self._attack
        self._folded.refresh()
        objective = objectives.find(attack.objective)
        until = attack.until_success
        batch = AttackBatch(
            self._attacked, attack.ball, self._x, self._y, None, objective, until, whole=True
        )
        attack.run(batch, self._draws)
        best = batch.finish()
        self._z, self._success = best.z, best.success

    def _check(self, attack: DualAveraging | PGD) -> None:
        """Compare a replay with the attack itself at the largest radius."""
        x, y = self._x.clone(), self._y.clone()
        z, success = self(x, y, float(attack.ball.eps), seed=1)
        draws = torch.Generator(x.device).manual_seed(1)
        expected = attack(self._model, x, y, generator=draws)
        with as_found(self._model, x.device), torch.no_grad():
            objective = objectives.find(attack.objective)
            clean, ours, theirs = (
                float(objective(self._model(v), y, None).mean()) for v in (x, z, expected.images)
            )
        wrong = float((success != expected.success).double().mean())
        if not abs(ours - theirs) <= AGREEMENT * abs(theirs - clean) + 1e-3 or wrong > AGREEMENT:
            raise RuntimeError(
                f"a replay raises the mean loss from {clean:g} to {ours:g}, the attack to {theirs:g}; they disagree "
                f"on {100 * wrong:.1f} % of the images"
            )


def recorded(attack: Attack, model: AsTrained, x: Tensor, y: Tensor) -> Replay | None:
    """The attack as a graph, or ``None`` with a warning where that fails: the attack itself always works."""
    if not can_replay(attack, x):
        return None
    assert isinstance(attack, (DualAveraging, PGD))
    try:
        return Replay(attack, model, x, y)
    except (RuntimeError, AttributeError) as error:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        warnings.warn(
            f"the attack is not replayed as a CUDA graph: {error}", RuntimeWarning, stacklevel=2
        )
        return None
