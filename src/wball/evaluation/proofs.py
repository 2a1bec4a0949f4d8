"""A sample of the certificates of an evaluation, proved again by the independent checker (:func:`wball.verify`).

A certificate that the checker looks at and does not confirm makes the evaluation unreliable: either the proof is wrong,
or the checker is too loose for it, and then it is one that nobody has checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from wball.ball import Ball
from wball.certificates import VerificationStatus, certify, verify
from wball.evaluation.result import Evaluation
from wball.evaluation.stream import Images
from wball.model import Model

SAMPLE = 4
"""Certificates that are proved again, each at the smallest radius of the evaluation.

What is claimed at a larger radius is claimed there, too. At the largest the checker may take minutes an image, and is
too loose for more of the proofs; ``wball.verify`` is there for whoever wants that.
"""


def check_certificates(
    result: Evaluation, model: Model, x: Images, y: Images, ball: Ball
) -> dict[str, Any] | None:
    """How many certificates were made again and checked, and which were not confirmed; ``None`` without certificates.

    The sample depends on the seed alone.
    """
    if result.settings["certify"] is None:
        return None
    assert isinstance(model, nn.Module)
    radius = result.images["certified"]
    claimed = (radius > 0).nonzero().squeeze(1)
    order = torch.randperm(
        len(claimed), generator=torch.Generator().manual_seed(int(result.settings["seed"]))
    )
    index = claimed[order[:SAMPLE]].sort().values
    said: dict[str, Any] = {
        "checked": 0,
        "confirmed": 0,
        "unconfirmed": [],
        "unfollowed": 0,
        "reason": "",
    }
    if index.numel() == 0:
        return said
    here = index.to(x.device)
    smallest = radius[index].clamp(max=float(min(result.settings["radii"])))
    images, labels, at = x[here], y[here], ball.at(smallest.to(x.device))
    method = result.settings["certify"]["method"]
    proof = certify(model, images, labels, at, method)  # made again for what it leaves behind
    claims = replace(proof, certified=torch.ones_like(proof.certified))
    found = verify(model, images, labels, at, claims)
    for k, status, again in zip(
        index.tolist(), found.status, proof.certified.tolist(), strict=True
    ):
        if status is VerificationStatus.CONFIRMED:
            said["confirmed"] += 1
        elif status is VerificationStatus.UNFOLLOWED or (method == "complete" and not again):
            said["unfollowed"] += 1
            said["reason"] = found.reason or "the proof was not found again in its time limit"
        else:
            said["unconfirmed"].append(k)
    return {**said, "checked": said["confirmed"] + len(said["unconfirmed"])}
