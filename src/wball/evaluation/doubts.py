"""Reasons to doubt an evaluation, each with a stable code.

============================  ===================================================================
code                          raised if
============================  ===================================================================
``missed-example``            random points of the largest ball, or points towards other images,
                              fool the model where the attack found nothing
``changed-answers``           the model answers differently about clean images when asked again
                              at the end
``clean-accuracy-at-chance``  the model classifies few clean images correctly: the data or their
                              normalisation do not fit the model
``rejected-examples``         claimed examples failed the audit; they are not counted
``contradiction``             a certificate and a valid example exclude each other
``plan-disagreement``         a plan promised a smaller distance than exact transport found
``unconfirmed-certificate``   the independent checker (:func:`wball.verify`) did not confirm a
                              certificate of the sample
============================  ===================================================================

The other codes are those of the attack and of the checks of the model
(:mod:`wball.attacks.findings`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from wball.attacks.control import drifted
from wball.attacks.findings import Finding
from wball.ball import Ball
from wball.certificates import VerificationStatus, certify, verify
from wball.evaluation.result import Evaluation, EvaluationWarning
from wball.evaluation.stream import Stream
from wball.inputs import positions
from wball.model import Model, as_found, judge

HARMLESS = frozenset({"train-mode"})
"""Codes of the checks of the model that are notes."""
DEALT_WITH = {"masked-gradients", "stand-in-gradients", "random-answers"}
"""Findings of an attack that tell more than signs in the model."""
SURVIVORS, PIXELS = 32, 200_000
"""Largest number of surviving images that are looked at, and of their pixels."""
SAMPLES, OTHERS = 8, 4
"""Random points, and points towards other images, per surviving image."""
FEW, ABOVE_CHANCE = 10, 0.2
"""Images below which an accuracy says nothing, and the least share of the way from chance to 1."""

CHECKED = 4
"""Certificates that are checked, each at the smallest radius of the evaluation: at larger radii the
checker may take minutes per image."""


def as_warnings(
    findings: Sequence[Finding], signs: Sequence[EvaluationWarning]
) -> tuple[tuple[EvaluationWarning, ...], tuple[EvaluationWarning, ...]]:
    """Convert the findings of the attack and the signs in the model to warnings and notes."""
    seen = {finding.code for finding in findings}
    signs = [
        s for s in signs if s.code not in seen and (s.code in HARMLESS or not seen & DEALT_WITH)
    ]
    said = [(f.serious, EvaluationWarning(f.code, f.message, f.remedy)) for f in findings]
    said += [(sign.code not in HARMLESS, sign) for sign in signs]
    doubts, notes = ([w for serious, w in said if serious is kind] for kind in (True, False))
    return tuple(doubts), tuple(notes)


def at_chance(result: Evaluation) -> list[EvaluationWarning]:
    """Whether the clean accuracy of an evaluation is near chance."""
    right = result.images["label"] == result.images["predicted"]
    accuracy, chance = float(right.double().mean()), 1 / len(result.settings["data"]["classes"])
    if len(right) < FEW or accuracy >= chance + ABOVE_CHANCE * (1 - chance):
        return []
    said = f"clean accuracy is only {100 * accuracy:.0f} % (chance is {100 * chance:.0f} %)"
    remedy = (
        "check that the model gets images of the size and normalisation it expects "
        "(wball.Normalized, --mean, --std), and the class numbers"
    )
    return [EvaluationWarning("clean-accuracy-at-chance", said, remedy)]


def check_certificates(
    result: Evaluation, model: Model, data: Stream, ball: Ball
) -> dict[str, Any] | None:
    """Check a sample of the certificates by :func:`wball.verify`; ``None`` without certificates.

    A certificate that the checker follows and does not confirm makes the evaluation unreliable.
    The sample depends on the seed alone.
    """
    if result.settings["certify"] is None:
        return None
    assert isinstance(model, nn.Module)
    radius, method = result.images["certified"], result.settings["certify"]["method"]
    claimed = positions(radius > 0)
    generator = Generator().manual_seed(int(result.settings["seed"]))
    index = claimed[torch.randperm(len(claimed), generator=generator)[:CHECKED]].sort().values
    confirmed, unfollowed, reason, unconfirmed = 0, 0, "", list[int]()
    if index.numel():
        images, labels = data.take(index)
        smallest = radius[index].clamp(max=float(min(result.settings["radii"])))
        at = ball.at(smallest.to(data.device))
        proof = certify(model, images, labels, at, method)  # again, for the duals to be replayed
        every = replace(proof, certified=torch.ones_like(proof.certified))
        found = verify(model, images, labels, at, every)
        again = proof.certified.tolist()
        for k, status, proved in zip(index.tolist(), found.status, again, strict=True):
            if status is VerificationStatus.CONFIRMED:
                confirmed += 1
            elif status is VerificationStatus.UNFOLLOWED or (method == "complete" and not proved):
                unfollowed += 1
                reason = found.reason or "the proof was not found again in its time limit"
            else:
                unconfirmed.append(k)
    return {
        "checked": confirmed + len(unconfirmed),
        "confirmed": confirmed,
        "unconfirmed": unconfirmed,
        "unfollowed": unfollowed,
        "reason": reason,
    }


def look_for_missed(
    result: Evaluation, model: Model, data: Stream, ball: Ball
) -> list[EvaluationWarning]:
    """Whether points that need no gradient fool the model on images that survived.

    They are random points of the largest ball, and points of it towards other images. A model that
    hides its gradients is found by them. A ball that contains every image has no survivors.
    """
    top, size = float(result.settings["radii"][-1]), int(result.settings["batch_size"])
    pixels = data.first[0].numel()
    count = max(1, min(SURVIVORS, PIXELS // pixels))
    alive = positions(~result.broken_at(top))[:count]
    if alive.numel() == 0:
        return []
    centres, labels = data.take(alive)
    largest = ball.at(top)
    generator = Generator(data.device).manual_seed(int(result.settings["seed"]))
    fooled = torch.zeros(len(alive), dtype=torch.bool, device=data.device)
    for _ in range(SAMPLES):
        fooled |= misclassified(model, largest.sample(centres, generator), labels, size)
    for shift in range(1, OTHERS + 1):
        others = data[(alive + 7919 * shift) % len(data)]
        fooled |= misclassified(model, drifted(largest, centres, others), labels, size)
    warning = EvaluationWarning(
        "missed-example",
        "random points of the ball, or points towards other images, fool the model on "
        f"{int(fooled.sum())} of {len(alive)} images that survived the attack at eps {top:g}",
        "the attack is too weak for this model: use the standard attack, more steps, or a "
        "differentiable approximation of the model",
    )
    return [warning] if fooled.any() else []


def misclassified(model: Model, points: Tensor, labels: Tensor, size: int) -> Tensor:
    with as_found(model, points.device):
        parts = zip(points.split(size), labels.split(size), strict=True)
        return torch.cat([judge(model, *part) for part in parts])
