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
from wball.ball import Ball, Plans
from wball.certificates import trust
from wball.certificates.certificate import CertificateResult
from wball.certificates.checking.bounds import Checker
from wball.certificates.checking.cases import Cases
from wball.certificates.checking.network import Network, Unfollowed, read
from wball.certificates.checking.plans import Transport, domain
from wball.certificates.complete import Leaf
from wball.certificates.tracing import trace
from wball.certificates.trust import UnsupportedModule
from wball.model import evaluating

__all__ = ["VerificationResult", "VerificationStatus", "verify"]

LENGTHS = (2.0, 3.0, 5.0)
"""Lengths below which moves are told apart in images of more than a few pixels, tried one after another."""

HOPELESS = 100.0
"""Bounds below 0 by so many times the margin of the image itself are beyond mending."""


class VerificationStatus(Enum):
    """What the checker says about an image. The value is the explanation."""

    CONFIRMED = "the checker proved the certificate again"
    NOTHING = "the certificate claims nothing about this image"
    UNCONFIRMED = "the checker's own bound is not above 0: it may be looser than the certificate, which is not confirmed"
    UNFOLLOWED = (
        "the checker has no rule for the ball or for an operation of the model, or the image is too large: the "
        "certificate is not checked"
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


def verify(
    model: nn.Module, x: Tensor, y: Tensor, ball: Ball, certificate: CertificateResult
) -> VerificationResult:
    """Prove the certified images of ``certificate`` again, by an independent computation.

    Nothing in the certificate is believed but which images it claims, and for which plans. What a proof by branch and
    bound leaves behind (its parts, slopes and prices) says where to look, and is proved again. The checker is slow and
    meant for samples. It follows what :func:`wball.certify` does, on Wasserstein balls of images of up to 4,096 pixels
    and on l-infinity balls.

    Args:
        model: the model, run in evaluation mode.
        x: images ``(B, C, H, W)``, or histograms ``(B, n)``.
        y: labels ``(B,)``.
        ball: the threat model.
        certificate: what :func:`wball.certify` returned for them.
    """
    if not isinstance(certificate, CertificateResult):
        raise TypeError(
            f"certificate must be what wball.certify returned, got {type(certificate).__name__}"
        )
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
    try:
        reading = _readings(model, x, ball) if claimed else None
    except (Unfollowed, UnsupportedModule) as error:
        reading, reason = None, str(error)
        for k in claimed:
            status[k] = VerificationStatus.UNFOLLOWED
    if reading is None:
        claimed = []
    for k in claimed:
        one = ball.take(torch.tensor([k], device=x.device))
        try:
            leaves = certificate.leaves[k] if certificate.leaves else None
            assert reading is not None
            margin[k] = _margin(*reading, one, x[k], int(y[k]), certificate.plans, leaves)
        except Unfollowed as error:
            reason, status[k] = str(error), VerificationStatus.UNFOLLOWED
            continue
        status[k] = (
            VerificationStatus.CONFIRMED if bool(margin[k] > 0) else VerificationStatus.UNCONFIRMED
        )
    confirmed = torch.tensor([s is VerificationStatus.CONFIRMED for s in status], dtype=torch.bool)
    return VerificationResult(confirmed, margin, tuple(status), reason)


@torch.no_grad()
def _readings(model: nn.Module, x: Tensor, ball: Ball) -> tuple[Network, Tensor]:
    """The checker's own reading of the model, and what each logit may be off by as the model computes it.

    :func:`trace` refuses what it refuses for certificates. Its graph is not used, except that both
    readings must give the same logits at points of the ball, as the model does.
    """
    graph = trace(model, x, ball)
    with evaluating(model):
        network = read(model, x[:1])
    points = trust.probes(x, ball).to("cpu", torch.float64)
    assert graph.slack is not None
    slack = graph.slack.cpu()
    for point, expected in zip(points, graph.logits(points.to(x.device)).cpu(), strict=True):
        if not bool(((network.logits(point.flatten()) - expected).abs() <= slack).all()):
            raise Unfollowed("two readings of the model give different logits")
    return network, slack


def _margin(
    network: Network,
    slack: Tensor,
    ball: Ball,
    x: Tensor,
    label: int,
    plans: Plans,
    leaves: tuple[Leaf, ...] | None,
) -> float:
    """A lower bound of the margin of one image: the first that is above 0, or the best that is found."""
    others = [k for k in range(len(slack)) if k != label]
    off = slack[others] + slack[label]
    logits = network.logits(x.to("cpu", torch.float64).flatten())
    clean = float((logits[label] - logits[others]).amin())
    best, before = torch.tensor(-math.inf, dtype=torch.float64), None
    for near in LENGTHS:
        images = domain(ball, x, plans, near)
        told_apart = images.options if isinstance(images, Transport) else 0
        if told_apart == before:
            continue
        whole, before = Checker(network, images), told_apart
        best = torch.maximum(best, whole.margins(label) - off)
        if bool((best > 0).all()):
            return float(best.amin())
    if not clean > 0 or bool(best.amin() < -HOPELESS * clean):
        return float(best.amin())
    return float(_by_cases(whole, label, best, off, leaves or ()).amin())


def _by_cases(
    whole: Checker, label: int, best: Tensor, off: Tensor, leaves: tuple[Leaf, ...]
) -> Tensor:
    """Better bounds of the classes whose bound is not above 0, up to the first that stays there."""
    others = [k for k in range(len(best) + 1) if k != label]
    best = best.clone()
    for place in (best <= 0).nonzero()[:, 0].tolist():
        found = Cases(whole, label, others[place], float(off[place])).margin(leaves)
        if not found > 0:  # the bound of one part: that of the ball stays
            break
        best[place] = found
    return best
