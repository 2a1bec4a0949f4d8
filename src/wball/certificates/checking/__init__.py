"""An independent checker of certificates: it computes every bound again, slowly and simply, and
never searches.

:func:`verify` reads the model again (:mod:`.network`), bounds it layer by layer (:mod:`.bounds`)
and maximises over the ball by weak duality (:mod:`.plans`), in float64 with every rounding error
accounted for. It shares the reading of the model with :func:`wball.certify`, which compares its
graph with the model at points around the images, and none of the code that computes bounds. For
``method="complete"`` it replays the parts, slopes and prices that the certificate stores; any such
numbers give a sound bound, so it need not trust them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wball import inputs
from wball.ball import Ball
from wball.certificates import trust
from wball.certificates.certificate import CertificateResult
from wball.certificates.checking.bounds import Checker, Parameters, Signs
from wball.certificates.checking.network import Bend, Network, Unfollowed
from wball.certificates.checking.plans import Cube, Transport, domain
from wball.certificates.complete import Leaf
from wball.certificates.tracing import trace
from wball.certificates.trust import UnsupportedModule
from wball.display import Explained
from wball.progress import bar

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


@dataclass(frozen=True)
class VerificationResult:
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


@torch.no_grad()
def verify(
    model: nn.Module,
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
        model: the model, run in evaluation mode.
        x: images ``(B, C, H, W)``, or histograms ``(B, n)``.
        y: labels ``(B,)``.
        ball: the threat model.
        certificate: what :func:`wball.certify` returned for them.
        time_limit: seconds per image; images that take longer are ``UNFOLLOWED``.
        progress: show a bar on stderr; ``None`` shows it on a terminal and in a notebook.
    """
    inputs.check_positive("time_limit", time_limit)
    if not isinstance(certificate, CertificateResult):
        raise TypeError(
            f"certificate must be a result of wball.certify, got {type(certificate).__name__}"
        )
    x = inputs.check_images(x, ball.box).detach()
    if certificate.certified.shape != (x.shape[0],) or y.shape != (x.shape[0],):
        raise ValueError(
            "certificate, x and y must be of the same images, got "
            f"{certificate.certified.shape[0]} certificates, {x.shape[0]} images and labels of "
            f"shape {tuple(y.shape)}"
        )
    margin = torch.full((x.shape[0],), math.nan, dtype=torch.float64)
    status = [VerificationStatus.NOTHING] * x.shape[0]
    claimed = certificate.certified.nonzero()[:, 0].tolist()
    reason, network = "", None
    try:
        if claimed:
            with trust.steady(model, [x]):
                graph = trace(model, x)
            network = Network(graph, x.device)
    except (Unfollowed, UnsupportedModule) as error:
        reason = str(error)
    title = f"verify, at most {time_limit * len(claimed):.0f} s"
    with bar(title, len(claimed), show=progress) as shown:
        for k in claimed:
            status[k] = VerificationStatus.UNFOLLOWED
            shown.advance(1)
            if network is None:
                continue
            network.deadline = time.monotonic() + time_limit
            leaves = (certificate.leaves[k] if certificate.leaves else None) or ()
            proof = _Proof(network, int(y[k]), leaves)
            one = ball.take(torch.tensor([k], device=x.device))
            try:
                domains = [domain(one, x[k], certificate.plans, near) for near in LENGTHS]
                margin[k] = proof.margin(domains)
            except Unfollowed as error:
                reason = str(error)
                continue
            proved = bool(margin[k] > 0)
            status[k] = VerificationStatus.CONFIRMED if proved else VerificationStatus.UNCONFIRMED
    confirmed = torch.tensor([s is VerificationStatus.CONFIRMED for s in status], dtype=torch.bool)
    return VerificationResult(confirmed, margin, tuple(status), reason)


Part = dict[tuple[int, int], int]
"""Signs of units: by number of the bend and place of the unit in what it reads."""


@dataclass
class _Proof:
    """Proves the bound of one image's margin, part by part if the certificate has parts."""

    network: Network
    label: int
    leaves: tuple[Leaf, ...]

    def margin(self, domains: list[Cube | Transport]) -> float:
        """A lower bound of the margin: the first one above 0, or the best one found."""
        others = [k for k in range(self.network.classes) if k != self.label]
        slack = torch.tensor([self._slack(other) for other in others], dtype=torch.float64)
        best, before = torch.full((len(others),), -math.inf, dtype=torch.float64), None
        for images in domains:
            listed = images.options if isinstance(images, Transport) else 0
            if listed == before:
                continue
            whole, before = Checker(self.network, images), listed
            if whole.empty:
                raise ArithmeticError("bounds cross: the checker is wrong")
            best = torch.maximum(best, whole.margins(self.label) - slack)
            if bool((best > 0).all()):
                break
        logits = self.network.logits(whole.domain.centre)
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
        sizes = {n: len(whole.low[self._read(k)]) for n, k in enumerate(self.network.bends)}
        tensors = [*leaf.slopes.items(), *leaf.shares.items()]
        return all(unit < sizes.get(n, 0) for n, unit, _ in leaf.splits) and all(
            tensor.numel() == sizes.get(n) for n, tensor in tensors
        )

    def _slack(self, other: int) -> float:
        """The largest error of the margin as the model computes it."""
        slack = self.network.graph.slack
        assert slack is not None
        return float(slack[self.label] + slack[other])

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
        units = sum(len(known.low[self._read(node)]) for node in self.network.bends)
        for _ in range(ROUNDS if units <= SMALL or not part else 1):
            if case.empty:
                return math.inf if best == -math.inf else POSITIVE
            given = {} if leaf is None else self._parameters(case, part, leaf)
            found = case.margin(self.label, other, self._slack(other), given)
            if found.value > 0:
                return found.value if best == -math.inf else POSITIVE
            if found.value - best < -PROGRESS * best:
                break
            best = found.value
            case = Checker(self.network, known.domain, signs, case, found)
        return best

    def _signs(self, part: Part, known: Checker) -> Signs:
        signs: Signs = {}
        for (number, unit), sign in part.items():
            node = self.network.bends[number]
            signs.setdefault(node, torch.zeros_like(known.low[self._read(node)]))[unit] = sign
        return signs

    def _read(self, node: int) -> int:
        bend = self.network.nodes[node]
        assert isinstance(bend, Bend)
        return bend.before

    def _parameters(self, case: Checker, part: Part, leaf: Leaf) -> Parameters:
        """Relaxation parameters stored in a leaf. A price is used only if this part has its
        split."""
        given: Parameters = {}
        for kind, values in (("slope", leaf.slopes), ("share", leaf.shares)):
            for number, tensor in values.items():
                given[kind, self.network.bends[number]] = tensor.to("cpu", torch.float64)
        if leaf.box is not None:
            given["box", 0] = leaf.box.to("cpu", torch.float64).reshape(1, -1)
        for (number, unit, sign), price in zip(leaf.splits, leaf.prices, strict=True):
            if part.get((number, unit)) == sign:
                node = self.network.bends[number]
                prices = given.setdefault(
                    ("price", node), torch.zeros_like(case.low[self._read(node)])
                )
                prices[unit] = sign * max(0.0, price)
        return given


def _part_of(leaf: Leaf) -> Part:
    return {(number, unit): sign for number, unit, sign in leaf.splits}


def _common(part: Part, leaves: list[tuple[Part, Leaf]]) -> tuple[int, int] | None:
    """A unit that all of these leaves have split, with different signs; ``None`` if there is
    none."""
    if len(leaves) < 2:
        return None
    shared = set(leaves[0][0]).intersection(*(signs for signs, _ in leaves[1:])) - part.keys()
    both = (cut for cut in sorted(shared) if len({signs[cut] for signs, _ in leaves}) == 2)
    return next(both, None)
