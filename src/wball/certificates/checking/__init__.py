"""An independent checker of certificates: it computes every bound again, slowly and simply, and
never searches.

:func:`verify` reads the exported program by itself (:mod:`.network`), bounds it layer by layer
(:mod:`.bounds`) and maximises over the ball by weak duality (:mod:`.plans`), in float64 with every
rounding error accounted for, its own and those of the program's precision. It shares no code with
the bounds of :func:`wball.certify`, but the program in normal form and the table of functions of
one number. For ``method="complete"`` it replays the parts, slopes and prices that the certificate
stores; any such numbers give a sound bound, so it need not trust them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wball import inputs
from wball.ball import Ball
from wball.certificates.certificate import CertificateResult
from wball.certificates.checking.bounds import Overflow
from wball.certificates.checking.lines import Unfollowed
from wball.certificates.checking.network import Network
from wball.certificates.checking.parts import Proof
from wball.certificates.checking.plans import domain
from wball.certificates.program import Program, UnsupportedModule, exported
from wball.certificates.subject import check_classes_of, checked, subject_of
from wball.display import Explained, Summarised
from wball.progress import bar

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["VerificationResult", "VerificationStatus", "verify"]

LENGTHS = (2.0, 3.0, 5.0)
"""Lengths below which moves are listed one by one in images of more than a few pixels, tried in
turn."""


class VerificationStatus(Explained):
    """What the checker found for an image. The value is the explanation."""

    CONFIRMED = "the checker proved the certificate again"
    NOTHING = "the certificate claims nothing about this image"
    UNCONFIRMED = (
        "the checker's own bound is not above 0: it may be looser than that of the certificate"
    )
    UNFOLLOWED = (
        "the checker does not support the ball, the model or the size of the image, or time_limit "
        "ended: the certificate was not checked"
    )


@dataclass(frozen=True, repr=False)
class VerificationResult(Summarised):
    """What an independent checker found.

    Attributes:
        confirmed: bool, per image: certified, and proved again.
        margin: the checker's own lower bound of the margin, float64; NaN where there was no claim.
        status: per image.
        reason: why the model or the ball could not be followed, if that is so.
    """

    confirmed: Tensor
    margin: Tensor
    status: tuple[VerificationStatus, ...]
    reason: str = ""

    @property
    def disagreements(self) -> int:
        """Number of certified images that the checker did not confirm."""
        return sum(1 for status in self.status if status is VerificationStatus.UNCONFIRMED)

    def headline(self) -> dict[str, str]:
        count = Counter(status.name.lower() for status in self.status)
        shown = {"images": str(len(self.status)), **{k: str(n) for k, n in count.items()}}
        return {**shown, "reason": self.reason} if self.reason else shown


@torch.no_grad()
def verify(
    model: nn.Module | ExportedProgram | Program,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    certificate: CertificateResult,
    *,
    time_limit: float = 600.0,
    progress: bool | None = None,
) -> VerificationResult:
    """Prove the certified images of ``certificate`` again, by an independent computation.

    The checker believes nothing but which images are claimed, and for which plans. It is slow and
    meant for samples. It supports Wasserstein balls of images of up to 4,096 pixels, and any other
    ball with a support function.

    Args:
        model: what was certified: a module, its program (``certificate.program``) or an
            ``ExportedProgram``. A certificate of another program, of other images, labels or of
            another ball is refused.
        x: images ``(B, C, H, W)``, or histograms ``(B, n)``.
        y: labels ``(B,)``.
        ball: the threat model.
        certificate: what :func:`wball.certify` returned for them.
        time_limit: seconds for the call. Images that are not checked by then are ``UNFOLLOWED``.
        progress: show a bar on stderr; ``None`` shows it on a terminal and in a notebook.
    """
    end = time.monotonic() + inputs.check_positive("time_limit", time_limit)
    if not isinstance(certificate, CertificateResult):
        raise TypeError(
            f"certificate must be a result of wball.certify, got {type(certificate).__name__}"
        )
    x, y = checked(x, y, ball, certificate.plans)
    margin = torch.full((x.shape[0],), math.nan, dtype=torch.float64)
    status = [VerificationStatus.NOTHING] * x.shape[0]
    reason, network = "", None
    try:
        program = model if isinstance(model, Program) else exported(model, x)
    except UnsupportedModule as error:
        program, reason = None, str(error)
    if program is not None:
        check_classes_of(program, y)
    _same_subject(certificate, x, y, ball, program)
    claimed = certificate.certified.nonzero()[:, 0].tolist()
    try:
        if claimed and program is not None:
            network = Network(program)
            network.compare(x)
    except Unfollowed as error:
        network, reason = None, str(error)
    title = f"verify, at most {time_limit:.0f} s"
    with bar(title, len(claimed), show=progress) as shown:
        for number, k in enumerate(claimed):
            status[k] = VerificationStatus.UNFOLLOWED
            shown.stage(1, title)
            if network is None:
                continue
            now = time.monotonic()
            network.deadline = now + (end - now) / (len(claimed) - number)
            leaves = (certificate.leaves[k] if certificate.leaves else None) or ()
            proof = Proof(network, int(y[k]), leaves)
            one = ball.take(torch.tensor([k], device=x.device))
            try:
                margin[k] = proof.margin(
                    domain(one, x[k], certificate.plans, near) for near in LENGTHS
                )
            except Overflow:
                margin[k] = -math.inf
            except Unfollowed as error:
                reason = str(error)
                continue
            finally:
                shown.advance(1)
            proved = bool(margin[k] > 0)
            status[k] = VerificationStatus.CONFIRMED if proved else VerificationStatus.UNCONFIRMED
    confirmed = torch.tensor([s is VerificationStatus.CONFIRMED for s in status], dtype=torch.bool)
    return VerificationResult(confirmed, margin, tuple(status), reason)


def _same_subject(
    certificate: CertificateResult, x: Tensor, y: Tensor, ball: Ball, program: Program | None
) -> None:
    """Refuse a certificate of something else, and name what differs."""
    given = subject_of(program, x, y, ball)
    other = [name for name, seen in given.items() if certificate.subject.get(name) != seen]
    if other:
        raise ValueError(
            f"the certificate is of another {' and other '.join(other)}: give verify what was "
            "certified, or certify again"
        )
