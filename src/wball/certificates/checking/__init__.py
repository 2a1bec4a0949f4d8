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
from wball.certificates.checking.bounds import Checker, Parameters, Signs
from wball.certificates.checking.network import Network, Unfollowed
from wball.certificates.checking.plans import Cube, Transport, domain
from wball.certificates.complete import Leaf
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

ROUNDS, PROGRESS = 12, 0.03
"""Rounds of a proof by contradiction; it ends when one lifts the bound by less than this share of
it."""

SMALL, HOPELESS = 1000, 100.0
"""Units up to which every part is tightened by contradiction, not only the ball as a whole. Bounds
below minus ``HOPELESS`` times the clean margin are not improved."""

POSITIVE = torch.finfo(torch.float64).tiny
"""Margin of a part that was proved by contradiction: nothing more is known."""


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
    meant for samples. It supports Wasserstein balls of images of up to 4,096 pixels and l-infinity
    balls.

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
            proof = _Proof(network, int(y[k]), leaves)
            one = ball.take(torch.tensor([k], device=x.device))
            try:
                domains = [domain(one, x[k], certificate.plans, near) for near in LENGTHS]
                margin[k] = proof.margin(domains)
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


Part = dict[tuple[str, int], int]
"""Signs of units: by name of the kink and place of the unit in what it reads."""


@dataclass
class _Proof:
    """Proves the bound of one image's margin, part by part if the certificate has parts."""

    network: Network
    label: int
    leaves: tuple[Leaf, ...]

    def margin(self, domains: list[Cube | Transport]) -> float:
        """A lower bound of the margin: the first one above 0, or the best one found."""
        logits = self.network.logits(domains[0].centre)
        others = [k for k in range(len(logits)) if k != self.label]
        best, before = torch.full((len(others),), -math.inf, dtype=torch.float64), None
        for images in domains:
            listed = images.options if isinstance(images, Transport) else 0
            if listed == before:
                continue
            whole, before = Checker(self.network, images), listed
            if whole.empty:
                raise ArithmeticError("bounds cross: the checker is wrong")
            best = torch.maximum(best, whole.margins(self.label))
            if bool((best > 0).all()):
                break
        clean = float(logits[self.label] - logits[others].amax())
        if float(best.amin()) < -HOPELESS * clean:
            return float(best.amin())
        for place in (best <= 0).nonzero()[:, 0].tolist():
            leaves = [
                (_part_of(leaf), leaf)
                for leaf in self.leaves
                if leaf.other == others[place] and self._fits(leaf, whole)
            ]
            found = self._part({}, whole, others[place], leaves)
            best[place] = torch.maximum(best[place], torch.tensor(found, dtype=torch.float64))
            if not found > 0:
                break
        return float(best.amin())

    def _fits(self, leaf: Leaf, whole: Checker) -> bool:
        """Whether the units that a leaf names exist in this network."""
        sizes = {name: len(whole.low[self._read(name)]) for name in self.network.kinks}
        tensors = [*leaf.slopes.items(), *leaf.shares.items()]
        if leaf.box is not None and leaf.box.numel() != len(whole.low[0]):
            return False
        return all(0 <= unit < sizes.get(name, 0) for name, unit, _ in leaf.splits) and all(
            tensor.numel() == sizes.get(name) for name, tensor in tensors
        )

    def _part(
        self, part: Part, known: Checker, other: int, leaves: list[tuple[Part, Leaf]]
    ) -> float:
        """The bound of one part inside a ``known`` one; ``leaves`` are those of the certificate in
        it.

        Every cut is made here, both sides of it, so the parts cover the ball whatever the leaves
        are.
        """
        cut = _common(part, leaves)
        if cut is None:
            return self._bounded(part, known, other, leaves[0][1] if leaves else None)
        least = math.inf
        for sign in (1, -1):
            inside = [leaf for leaf in leaves if leaf[0][cut] == sign]
            least = min(least, self._part({**part, cut: sign}, known, other, inside))
            if not least > 0:
                break
        return least

    def _bounded(self, part: Part, known: Checker, other: int, leaf: Leaf | None) -> float:
        """Bound one part, and then bound it again assuming that the margin is at most 0."""
        signs = self._signs(part, known)
        case = Checker(self.network, known.domain, signs, known)
        best = -math.inf
        units = sum(len(known.low[self._read(name)]) for name in self.network.kinks)
        for _ in range(ROUNDS if units <= SMALL or not part else 1):
            if case.empty:
                return math.inf if best == -math.inf else POSITIVE
            given = {} if leaf is None else self._parameters(case, part, leaf)
            found = case.margin(self.label, other, given)
            if found.value > 0:
                return found.value if best == -math.inf else POSITIVE
            if found.value - best < -PROGRESS * best:
                break
            best = found.value
            case = Checker(self.network, known.domain, signs, case, found)
        return best

    def _signs(self, part: Part, known: Checker) -> Signs:
        signs: Signs = {}
        for (name, unit), sign in part.items():
            zero = torch.zeros_like(known.low[self._read(name)])
            signs.setdefault(self.network.kinks[name], zero)[unit] = sign
        return signs

    def _read(self, name: str) -> int:
        node = self.network.nodes[self.network.kinks[name]]
        assert node is not None
        return node.before[0]

    def _parameters(self, case: Checker, part: Part, leaf: Leaf) -> Parameters:
        """Relaxation parameters stored in a leaf. A price is used only if this part has its
        split."""
        given: Parameters = {}
        for kind, values in (("slope", leaf.slopes), ("share", leaf.shares)):
            for name, tensor in values.items():
                given[kind, self.network.kinks[name]] = tensor.to("cpu", torch.float64)
        if leaf.box is not None:
            given["box", 0] = leaf.box.to("cpu", torch.float64).reshape(1, -1)
        for (name, unit, sign), price in zip(leaf.splits, leaf.prices, strict=True):
            if part.get((name, unit)) == sign:
                zero = torch.zeros_like(case.low[self._read(name)])
                prices = given.setdefault(("price", self.network.kinks[name]), zero)
                prices[unit] = sign * max(0.0, price)
        return given


def _part_of(leaf: Leaf) -> Part:
    return {(name, unit): sign for name, unit, sign in leaf.splits}


def _common(part: Part, leaves: list[tuple[Part, Leaf]]) -> tuple[str, int] | None:
    """A unit that all of these leaves have split, with different signs; ``None`` if there is
    none."""
    if len(leaves) < 2:
        return None
    shared = set(leaves[0][0]).intersection(*(signs for signs, _ in leaves[1:])) - part.keys()
    both = (cut for cut in sorted(shared) if len({signs[cut] for signs, _ in leaves}) == 2)
    return next(both, None)
