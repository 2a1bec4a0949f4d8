r"""The gate: does a robust accuracy meet a requirement?

The images are a sample. A share ``k / n`` has the exact (Clopper-Pearson) interval of a binomial
probability, with quantiles of the beta distribution:

.. math:: [B^{-1}(\alpha/2;\, k,\, n - k + 1),\; B^{-1}(1 - \alpha/2;\, k + 1,\, n - k)]

The interval says nothing about the attack: a robust accuracy is an upper bound. So a requirement is
met only if the lower end of the interval meets it and the evaluation is reliable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
EXIT_CLAIMS, EXIT_UNRELIABLE, EXIT_REQUIREMENT = 3, 6, 7
"""Exit codes: a claim did not hold; an evaluation is not reliable; a requirement is not met."""

Interval = tuple[float, float]


def confidence_interval(count: int, total: int) -> Interval:
    """The 95 % Clopper-Pearson interval of ``count / total``.

    >>> [round(end, 4) for end in confidence_interval(8, 10)]
    [0.4439, 0.9748]
    """
    from scipy.special import betaincinv  # slow to import

    if not 0 <= count <= total or total < 1:
        raise ValueError(
            f"count must be in [0, total] and total at least 1, got {count} of {total}"
        )
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(betaincinv(count + 1, total - count, 1 - tail))
    return low, high


@dataclass(frozen=True)
class Requirement:
    """A share of images that must be robust (or certified) at a radius, or an evaluation that must
    not be more robust there.

    >>> Requirement.parse("certified:0.05:0.6")
    Requirement(eps=0.05, share=0.6, certified=True, baseline=None)
    >>> print(Requirement.parse("0.1:out/baseline"))
    robust accuracy not worse than out/baseline at radius 0.1
    """

    eps: float
    share: float | None
    certified: bool = False
    baseline: str | None = None

    @classmethod
    def parse(cls, text: str | Requirement) -> Requirement:
        """Read ``"0.1:0.8"`` (robust accuracy 80 % at radius 0.1), ``"certified:0.1:0.8"`` or
        ``"0.1:FOLDER"``."""
        if isinstance(text, Requirement):
            return text
        certified = text.startswith("certified:")
        radius, _, rest = text.removeprefix("certified:").partition(":")
        share: float | None
        try:
            eps, share = float(radius), _number(rest)
        except ValueError:
            eps, share = -1.0, None
        known = (share is None and rest and ":" not in rest and not certified) or (
            share is not None and 0 <= share <= 1
        )
        if not (0 <= eps < math.inf and known):
            raise ValueError(
                f"requirement {text!r} must be RADIUS:SHARE or certified:RADIUS:SHARE with a share "
                "from 0 to 1, such as 0.1:0.8, or RADIUS:FOLDER of another evaluation"
            )
        return cls(eps, share, certified, rest if share is None else None)

    def __str__(self) -> str:
        if self.share is None:
            return f"robust accuracy not worse than {self.baseline} at radius {self.eps:g}"
        kind = "certified" if self.certified else "robust"
        return f"{kind} accuracy of at least {100 * self.share:g} % at radius {self.eps:g}"


Requirements = Sequence[str | Requirement]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Comparison:
    """Two models on the same images at one radius, by an exact McNemar (sign) test.

    Attributes:
        eps: the radius.
        names: the two models.
        alone: images on which only the first model is robust, and only the second.
        p_value: probability of a difference at least this large between equally robust models.
    """

    eps: float
    names: tuple[str, str]
    alone: tuple[int, int]

    @property
    def p_value(self) -> float:
        from scipy.special import bdtr  # slow to import

        return min(1.0, 2 * float(bdtr(min(self.alone), sum(self.alone), 0.5)))

    @property
    def p_worse(self) -> float:
        """Probability that a first model as robust as the second does this badly (one-sided)."""
        from scipy.special import bdtr  # slow to import

        return float(bdtr(self.alone[0], sum(self.alone), 0.5))

    @property
    def distinguishable(self) -> bool:
        """Whether the difference is significant at the 5 % level."""
        return self.p_value < 1 - CONFIDENCE

    def __str__(self) -> str:
        one, other = self.names if self.alone[0] >= self.alone[1] else self.names[::-1]
        said = "more robust than" if self.distinguishable else "not distinguishable from"
        return (
            f"{one} is {said} {other} at radius {self.eps:g}: {max(self.alone)} images are robust only for "
            f"the first, {min(self.alone)} only for the second (paired test, p = {self.p_value:.2g})"
        )


@dataclass(frozen=True)
class Check:
    """A requirement applied to an evaluation.

    Attributes:
        requirement: the requirement.
        measured: the measured share of images; ``None`` if there is none.
        interval: its 95 % confidence interval.
        met: whether the interval's lower end meets the requirement and the evaluation is reliable.
        reason: the same as a sentence.
    """

    requirement: Requirement
    measured: float | None
    interval: Interval | None
    met: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """All requirements applied to one evaluation. ``bool(decision)``: all of them are met."""

    checks: tuple[Check, ...]

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)

    def __bool__(self) -> bool:
        return self.met

    def __str__(self) -> str:
        return "\n".join(f"{'met' if c.met else 'NOT MET'}: {c.reason}" for c in self.checks)
