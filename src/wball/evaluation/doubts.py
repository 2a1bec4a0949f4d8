"""Reasons to doubt an evaluation: what the attack and the checks of the model say, and what the attack missed.

Cheap points of the ball, which need no gradient, are tried on images that survived: a model that hides its gradients
cannot hide from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wball.attacks.base import understood
from wball.attacks.findings import Finding
from wball.ball import Ball
from wball.evaluation.result import Evaluation
from wball.evaluation.stream import Images
from wball.evaluation.trust import HARMLESS, EvaluationWarning
from wball.model import Model, as_found, judge

SUPERSEDED = {
    "zero-gradient": {"masked-gradients", "stand-in-gradients"},
    "random-model": {"random-answers"},
    "non-finite": {
        "masked-gradients",
        "stand-in-gradients",
    },  # gradients; answers are a finding of their own
}
"""Signs in the model that an attack has dealt with if it reports one of these; equal codes are one anyway."""
SURVIVORS, PIXELS = 32, 200_000
"""Images looked at, of those that survived the largest radius: so many, and no more than make so many pixels."""
SAMPLES, OTHERS = 8, 4
"""Random points, and projections of images that the model takes for something else, of each."""
PROJECTED = 64 * 64 * 3
"""Pixels of an image up to which others are projected onto its ball: a projection of 224 x 224 x 3 pixels takes longer
than their attack. Larger images are left to the random points."""
ROUGHLY: dict[str, Any] = {"tol": 1e-2, "max_iter": 20}
"""How exact projections must be. All of their points are in the ball, and exact ones of large images take minutes."""
MANY = 0.2
"""Of the images shown: above that share, attacks that fail at a larger radius are no accident."""


def as_warnings(
    findings: Sequence[Finding], signs: Sequence[EvaluationWarning]
) -> tuple[tuple[EvaluationWarning, ...], tuple[EvaluationWarning, ...]]:
    """Warnings and notes, from the findings of the attack and the signs in the model."""
    seen = {finding.code for finding in findings}
    signs = [s for s in signs if not seen & (SUPERSEDED.get(s.code, set()) | {s.code})]
    doubts = [EvaluationWarning(f.code, f.message, f.remedy) for f in findings if f.serious]
    notes = [EvaluationWarning(f.code, f.message, f.remedy) for f in findings if not f.serious]
    doubts += [s for s in signs if s.code not in HARMLESS]
    notes += [s for s in signs if s.code in HARMLESS]
    return tuple(doubts), tuple(notes)


def look_for_missed(
    result: Evaluation, model: Model, x: Images, y: Images, ball: Ball
) -> tuple[EvaluationWarning, ...]:
    """Random points of the largest ball, and other images projected onto it: do they fool the model on survivors?

    In a ball that holds everything the projections are the other images themselves, so there robust accuracy must be 0.
    """
    top = float(result.settings["radii"][-1])
    count = max(1, min(SURVIVORS, PIXELS // x[:1].numel()))
    alive = (~result.broken_at(top)).nonzero().squeeze(1)[:count]
    if alive.numel() == 0:
        return ()
    here, largest = alive.to(x.device), ball.at(top)
    centres, labels = x[here], y[here].cpu()
    generator = torch.Generator(x.device).manual_seed(int(result.settings["seed"]))
    fooled, size = torch.zeros(len(alive), dtype=torch.bool), int(result.settings["batch_size"])
    for _ in range(SAMPLES):
        fooled |= _wrong(model, largest.sample(centres, generator), labels, size)
    for shift in range(1, OTHERS + 1) if x[:1].numel() <= PROJECTED else ():
        others = _others(result, labels, shift)
        if others is not None:
            fooled |= _wrong(
                model, _projected(largest, centres, x[others.to(x.device)]), labels, size
            )
    if not bool(fooled.any()):
        return ()
    return (
        EvaluationWarning(
            "missed-example",
            f"random points of the ball, or other images projected onto it, fool the model on {int(fooled.sum())} of "
            f"{len(alive)} images that survived the attack at radius {top:g}",
            "the attack does not see what the model does: use attack='standard', or one that needs no gradients",
        ),
    )


def _projected(ball: Ball, x: Tensor, w: Tensor) -> Tensor:
    return ball.project(x, w, **understood(ball.project, **ROUGHLY)).point


def _others(result: Evaluation, labels: Tensor, shift: int) -> Tensor | None:
    """For each label an image that the model predicts as another class, another one for each ``shift``."""
    predicted = result.images["predicted"]
    chosen = []
    for label in labels.tolist():
        different = (predicted != label).nonzero().squeeze(1)
        if different.numel() == 0:
            return None
        chosen.append(int(different[(shift * 7919) % len(different)]))
    return torch.tensor(chosen)


def _wrong(model: Model, points: Tensor, labels: Tensor, size: int) -> Tensor:
    with as_found(model, points.device):
        parts = zip(points.split(size), labels.to(points.device).split(size), strict=True)
        return torch.cat([judge(model, *part) for part in parts]).cpu()


def weaker_at_larger(result: Evaluation) -> tuple[EvaluationWarning, ...]:
    """Whether attacks on the images shown fail at a radius although they succeeded at a smaller one."""
    broken = result.exhibit.get("explorer_broken")
    if broken is None or broken.numel() == 0:
        return ()
    lost = (broken.long().cummax(1).values.bool() & ~broken).any(1)
    if int(lost.sum()) < 2 or float(lost.double().mean()) <= MANY:
        return ()
    return (
        EvaluationWarning(
            "larger-radius-weaker",
            f"on {int(lost.sum())} of {len(lost)} images an attack succeeds at a radius and fails at a larger one",
            "the gradients mislead the attack: look for rounding, saturation or randomness in the model",
        ),
    )
