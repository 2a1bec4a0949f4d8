"""Reasons to doubt a robust accuracy, for machines: a stable code, how many images it was seen on,
and the remedy.

An attack that looks for such reasons returns them as ``result.findings``. Those of several batches
or radii add up by code (:func:`merged`), and a number may be relied on (:func:`reliable`) if none
of them is serious. A finding is serious if its code is, and if it was seen on more than a tolerated
share of the images: one image in a thousand that only the black-box search breaks says that the
gradients are a little worse than they could be, not that they are masked.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FEW_SURVIVORS = 0.02
"""Share of the images up to which survivors say little about an attack: they are all that it could
have missed."""


@dataclass(frozen=True)
class Code:
    """The text of a finding, and the share of images above which it is serious.

    Attributes:
        sentence: what was seen, with ``{images}`` and ``{of}``.
        remedy: what to do about it.
        tolerated: the finding is a note up to this share of images; ``None``: it is always a note.
        fewest: the smallest number of images that makes it serious.
    """

    sentence: str
    remedy: str
    tolerated: float | None = 0.0
    fewest: int = 1


CODES: dict[str, Code] = {
    # the robust accuracy may be too high
    "masked-gradients": Code(
        "{images} of {of} images survived although neither the model nor smooth stand-ins gave a useful gradient",
        "attack a differentiable approximation of what hides the gradients; see docs/attacks.md",
    ),
    "black-box-stronger": Code(
        "a search without gradients broke {images} of {of} images that survived every gradient attack",
        "gradients are misleading: attack a differentiable approximation, or raise the queries of ScoreSearch",
        tolerated=0.02,
    ),
    "random-answers": Code(
        "repeated evaluations of the model differ on {images} of {of} images",
        "success is the majority of several answers; fix the random numbers, or report the mean over many of them",
    ),
    "non-finite": Code(
        "logits are NaN or infinite on {images} of {of} images",
        "the model overflows or divides by zero: images it has no class for count as not broken",
    ),
    "full-ball-survivors": Code(
        "about {images} of {of} images survive at an unlimited radius, where the shapes of other images fool the model",
        "gradients mislead the attack: attack a differentiable approximation of the model",
        tolerated=FEW_SURVIVORS,
    ),
    "tied-answers": Code(
        "the two largest logits of {images} of {of} claimed examples are equal up to rounding; they are not counted",
        "logits hardly differ: compute them in float64, or without a large constant",
        tolerated=0.01,
        fewest=2,  # one in thousands lies on the boundary by accident
    ),
    # notes
    "stand-in-gradients": Code(
        "the model's own gradients do not predict its outputs; those of smooth stand-ins, or of earlier "
        "scores, were used on {images} of {of} images",
        "nothing to do",
        tolerated=None,
    ),
    "precision-dependent": Code(
        "{images} of {of} attempts are examples in only one of full precision and the precision that the model is "
        "used in (TF32 convolutions are PyTorch's default on GPUs)",
        "nothing to do: success is judged in full precision",
        tolerated=None,
    ),
    "probabilities": Code(
        "the outputs look like probabilities; the attack climbs their logarithms",
        "return logits: float32 probabilities round to 0 and 1",
        tolerated=None,
    ),
}
"""Every code. They are stable: scripts may test for them."""


@dataclass(frozen=True)
class Finding:
    """One finding: its code, the number of images it was seen on, and the number of images checked.

    >>> [Finding("black-box-stronger", images, 100).serious for images in (1, 10)]
    [False, True]
    """

    code: str
    images: int
    of: int

    @property
    def message(self) -> str:
        return CODES[self.code].sentence.format(images=self.images, of=self.of)

    @property
    def remedy(self) -> str:
        return CODES[self.code].remedy

    @property
    def serious(self) -> bool:
        """Whether this finding means that the robust accuracy may be too high."""
        code = CODES[self.code]
        return (
            code.tolerated is not None
            and self.images > code.tolerated * self.of
            and self.images >= code.fewest
        )


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merge the findings of several batches: numbers of images are added by code, in the order of
    :data:`CODES`. Findings seen on no image are dropped."""
    images, of = Counter[str](), Counter[str]()
    for finding in findings:
        images[finding.code] += finding.images
        of[finding.code] += finding.of
    return tuple(Finding(code, images[code], of[code]) for code in CODES if images[code])


def reliable(findings: Iterable[Finding]) -> bool:
    """Whether none of them is serious."""
    return not any(finding.serious for finding in findings)


class ModelWarning(UserWarning):
    """A robust accuracy measured on this model may not mean what it seems to."""
