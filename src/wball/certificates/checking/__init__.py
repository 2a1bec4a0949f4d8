"""An independent checker of certificates: the claim is proved again by code that shares nothing with the first proof.

:func:`verify` reads the network in its own way (:mod:`.network`), bounds it layer by layer (:mod:`.bounds`) and
maximises over the ball in its own way (:mod:`.plans`), in float64 with every rounding error accounted for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from wball import inputs
from wball.ball import Ball
from wball.certificates.certificate import CertificateResult
from wball.certificates.checking.bounds import Checker
from wball.certificates.checking.network import Unfollowed, read
from wball.certificates.checking.plans import domain
from wball.model import evaluating

__all__ = ["VerificationResult", "VerificationStatus", "verify"]

STEPS = 80
"""Gradient steps on the slopes of every row where a certificate is not confirmed without."""


class VerificationStatus(Enum):
    """What the checker says about an image. The value is the explanation."""

    CONFIRMED = "the checker proved the certificate again"
    NOTHING = "the certificate claims nothing about this image"
    UNCONFIRMED = (
        "the checker's own bound is not above 0: it may be looser than the certificate, which is not confirmed"
    )
    UNFOLLOWED = (
        "the checker has no rule for an operation of the model, or it is too large: the certificate is not checked"
    )

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


@dataclass(frozen=True)
class VerificationResult:
    """What an independent checker found.

    Attributes:
        confirmed: bool, per image: certified, and proved again.
        margin: the checker's own lower bound of the margin, float64; NaN where it did not look.
        status: per image.
        reason: why the model could not be followed, if it could not.
    """

    confirmed: Tensor
    margin: Tensor
    status: tuple[VerificationStatus, ...]
    reason: str = ""

    @property
    def disagreements(self) -> int:
        """Certified images that the checker looked at and did not confirm."""
        return sum(1 for status in self.status if status is VerificationStatus.UNCONFIRMED)


def verify(certificate: CertificateResult, model: nn.Module, x: Tensor, y: Tensor, ball: Ball) -> VerificationResult:
    """Prove the certified images of ``certificate`` again, by an independent computation.

    Nothing in the certificate is believed but which images it claims, and for which plans. The checker is slow and
    meant for samples: layers of up to some thousand units.

    Args:
        certificate: what :func:`wball.certify` returned for ``x``, ``y`` and ``ball``.
        model: the model, run in evaluation mode.
        x: images ``(B, C, H, W)``, or histograms ``(B, n)``.
        y: labels ``(B,)``.
        ball: the threat model.
    """
    x = inputs.check_images("x", x, ball.box).detach()
    if certificate.certified.shape != (x.shape[0],) or y.shape != (x.shape[0],):
        raise ValueError(
            f"certificate, x and y must be of the same images, got {certificate.certified.shape[0]} certificates, "
            f"{x.shape[0]} images and labels of shape {tuple(y.shape)}"
        )
    margin = torch.full((x.shape[0],), math.nan, dtype=torch.float64)
    status = [VerificationStatus.NOTHING] * x.shape[0]
    claimed = certificate.certified.nonzero()[:, 0].tolist()
    reason = ""
    if claimed:
        with evaluating(model):
            try:
                network = read(model, x[:1])
            except Unfollowed as error:
                reason = str(error)
                status = [
                    VerificationStatus.UNFOLLOWED if c else s
                    for c, s in zip(certificate.certified, status, strict=True)
                ]
                claimed = []
    for k in claimed:
        one = ball.take(torch.tensor([k], device=x.device))
        images = domain(one, x[k], certificate.plans)
        for steps in (0, STEPS):
            margin[k] = Checker(network, images, steps).margin(int(y[k]))
            above = bool(margin[k] > 0)
            if above:
                break
        status[k] = VerificationStatus.CONFIRMED if above else VerificationStatus.UNCONFIRMED
    confirmed = torch.tensor([s is VerificationStatus.CONFIRMED for s in status], dtype=torch.bool)
    return VerificationResult(confirmed, margin, tuple(status), reason)
