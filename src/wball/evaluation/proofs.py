"""A sample of the certificates of an evaluation, checked by :func:`wball.verify`.

A certificate that the checker follows and does not confirm makes the evaluation unreliable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from wball.ball import Ball
from wball.certificates import VerificationStatus, certify, verify
from wball.evaluation.result import Evaluation
from wball.evaluation.stream import Stream
from wball.model import Model

SAMPLE = 4
"""Certificates that are checked, each at the smallest radius of the evaluation: at larger radii the
checker may take minutes per image."""


def check_certificates(
    result: Evaluation, model: Model, data: Stream, ball: Ball
) -> dict[str, Any] | None:
    """Numbers of certificates checked and confirmed; ``None`` without certificates.

    The sample depends on the seed alone.
    """
    if result.settings["certify"] is None:
        return None
    assert isinstance(model, nn.Module)
    radius, method = result.images["certified"], result.settings["certify"]["method"]
    claimed = (radius > 0).nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(int(result.settings["seed"]))
    index = claimed[torch.randperm(len(claimed), generator=generator)[:SAMPLE]].sort().values
    confirmed, unfollowed, reason = 0, 0, ""
    unconfirmed: list[int] = []
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
