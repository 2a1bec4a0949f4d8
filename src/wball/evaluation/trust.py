r"""What an accuracy rests on: its confidence interval, the warnings against it, and the requirements it meets.

Images are a sample, so a share ``k / n`` comes with the exact (Clopper-Pearson) interval of a binomial probability: the
values of ``p`` under which a count as low as ``k``, and one as high, has a probability of at least 2.5 %,

.. math:: [B^{-1}(\alpha/2;\, k,\, n - k + 1),\; B^{-1}(1 - \alpha/2;\, k + 1,\, n - k)]

with quantiles of the beta distribution. It says nothing about attacks: a robust accuracy is an upper bound of the true
one, and an evaluation with warnings may be far above it. So a requirement is met only if the lower end of the interval
meets it and the evaluation is reliable.

===========================  =========================================================================================
code                         raised if
===========================  =========================================================================================
``missed-example``           random points of the largest ball, or other images projected onto it, fool the model where
                             the attack found nothing; at a radius that covers everything they always do
``larger-radius-weaker``     an attack succeeds at a radius and fails at a larger one, on many of the images shown
``rejected-examples``        claimed examples failed the audit; they are not counted
``contradiction``            a certificate and a valid example exclude each other
``plan-disagreement``        a plan promised a smaller distance than exact transport found
``unconfirmed-certificate``  the independent checker (:func:`wball.verify`) did not confirm a certificate of the sample
===========================  =========================================================================================

The other codes are those of the attack (:data:`wball.attacks.findings.CODES`) and of the checks of the model
(:mod:`wball.attacks.checks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CONFIDENCE = 0.95
HARMLESS = frozenset({"train-mode", "few-classes"})
"""Codes of the model's checks that say nothing against the numbers."""
EXIT_CLAIMS, EXIT_UNRELIABLE, EXIT_REQUIREMENT = 3, 6, 7
"""Exit codes: a claim did not hold; done, but not reliable; done, but a requirement is not met."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class EvaluationWarning:
    """A reason not to believe a robust accuracy, or a harmless note about the model.

    Attributes:
        code: a stable name, such as ``"zero-gradient"``.
        message: what was seen.
        remedy: what to do about it.
    """

    code: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" ({self.remedy})" if self.remedy else "")

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "remedy": self.remedy}

    @classmethod
    def read(cls, stored: str | Mapping[str, Any]) -> EvaluationWarning:
        """What a file says. Earlier versions wrote a sentence after the name of a category."""
        if not isinstance(stored, str):
            return cls(str(stored["code"]), str(stored["message"]), str(stored["remedy"]))
        name, _, message = stored.partition(": ")
        return cls(as_code(name), message) if message else cls("warning", stored)


def as_code(name: str) -> str:
    """The stable code of a category of warnings.

    >>> as_code("ZeroGradientWarning")
    'zero-gradient'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name.removesuffix("Warning")).lower()


def claim_warnings(
    rejected: int, contradictions: int, disagreements: int, unconfirmed: int = 0
) -> tuple[EvaluationWarning, ...]:
    """Warnings about claims that did not hold, from how many of each there are."""
    report = "report it with the files of this evaluation: this is an error of the library"
    found = (
        (
            rejected,
            "rejected-examples",
            "claimed examples failed the audit and are not counted",
            "mend the attack",
        ),
        (
            contradictions,
            "contradiction",
            "images have both a certificate and a valid example inside it",
            report,
        ),
        (
            disagreements,
            "plan-disagreement",
            "plans promised a smaller distance than exact transport found",
            report,
        ),
        (
            unconfirmed,
            "unconfirmed-certificate",
            "certificates were not confirmed by the independent checker",
            report,
        ),
    )
    return tuple(
        EvaluationWarning(code, f"{count} {said}", remedy)
        for count, code, said, remedy in found
        if count
    )


def confidence_interval(count: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """The Clopper-Pearson interval of ``count / total``.

    >>> [round(end, 4) for end in confidence_interval(8, 10)]
    [0.4439, 0.9748]
    """
    from scipy.special import betaincinv  # slow to import

    if not 0 <= count <= total or total < 1:
        raise ValueError(
            f"count must be in [0, total] and total at least 1, got {count} of {total}"
        )
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, total - count + 1, tail))
    high = 1.0 if count == total else float(betaincinv(count + 1, total - count, 1 - tail))
    return low, high


@dataclass(frozen=True)
class Requirement:
    """A share of images that must be robust (or certified) at a radius.

    >>> Requirement.parse("certified:0.05:0.6")
    Requirement(eps=0.05, share=0.6, certified=True)
    """

    eps: float
    share: float
    certified: bool = False

    @classmethod
    def parse(cls, text: str | Requirement) -> Requirement:
        """``"0.1:0.8"``: robust accuracy of at least 80 % at radius 0.1. ``"certified:0.1:0.8"``: proved."""
        if isinstance(text, Requirement):
            return text
        kind, _, rest = str(text).rpartition("certified:")
        try:
            eps, share = (float(part) for part in rest.split(":"))
        except ValueError:
            eps, share = -1.0, -1.0
        if kind or not (0 <= eps < float("inf") and 0 <= share <= 1):
            raise ValueError(
                f"requirement {str(text)!r} must be RADIUS:SHARE or certified:RADIUS:SHARE with a share from 0 to 1, "
                "such as 0.1:0.8"
            )
        return cls(eps, share, str(text).startswith("certified:"))

    def __str__(self) -> str:
        kind = "certified" if self.certified else "robust"
        return f"{kind} accuracy of at least {100 * self.share:g} % at radius {self.eps:g}"


@dataclass(frozen=True)
class Check:
    """A requirement held against an evaluation.

    Attributes:
        requirement: what was asked for.
        measured: the share of images that was measured; ``None`` where nothing was.
        interval: its 95 % confidence interval.
        met: whether the interval's lower end meets the requirement and the evaluation is reliable.
        reason: the same as a sentence.
    """

    requirement: Requirement
    measured: float | None
    interval: Interval | None
    met: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        wanted = self.requirement
        return {
            "requirement": {
                "eps": wanted.eps,
                "share": wanted.share,
                "certified": wanted.certified,
            },
            "measured": self.measured,
            "interval": None if self.interval is None else list(self.interval),
            "met": self.met,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Decision:
    """All requirements held against one evaluation. ``bool(decision)`` is whether all of them are met."""

    checks: tuple[Check, ...]

    @property
    def met(self) -> bool:
        return all(check.met for check in self.checks)

    def __bool__(self) -> bool:
        return self.met

    def __str__(self) -> str:
        return "\n".join(
            f"{'met' if check.met else 'NOT MET'}: {check.reason}" for check in self.checks
        )


class Measured(Protocol):
    """What is asked of an evaluation here."""

    @property
    def reliable(self) -> bool: ...

    @property
    def warnings(self) -> tuple[EvaluationWarning, ...]: ...

    @property
    def rejected(self) -> tuple[Mapping[str, Any], ...]: ...

    @property
    def contradictions(self) -> list[int]: ...

    @property
    def disagreements(self) -> tuple[int, ...]: ...

    def accuracy_at(self, eps: float) -> float: ...

    def certified_at(self, eps: float) -> float | None: ...

    def interval(self, share: float) -> Interval: ...


def decide(
    evaluation: Measured, requirements: Iterable[str | Requirement] | str | Requirement
) -> Decision:
    """See :meth:`wball.Evaluation.check`."""
    asked = [requirements] if isinstance(requirements, (str, Requirement)) else list(requirements)
    return Decision(tuple(_held(evaluation, Requirement.parse(one)) for one in asked))


def _held(evaluation: Measured, wanted: Requirement) -> Check:
    if wanted.certified:
        measured = evaluation.certified_at(wanted.eps)
    else:
        measured = evaluation.accuracy_at(wanted.eps)
    if measured is None:
        return Check(
            wanted,
            None,
            None,
            False,
            f"{wanted}: nothing was certified; evaluate with certify=True",
        )
    low, high = evaluation.interval(measured)
    said = f"{wanted}: {100 * measured:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    if not evaluation.reliable:
        codes = ", ".join(sorted({warning.code for warning in evaluation.warnings}))
        return Check(
            wanted,
            measured,
            (low, high),
            False,
            f"{said}, but the evaluation is not reliable: {codes}",
        )
    if measured >= wanted.share > low:
        said += "; the interval's lower end must meet it: evaluate more images"
    return Check(wanted, measured, (low, high), low >= wanted.share, said)


def exit_code(
    evaluations: Sequence[Measured], requirements: Sequence[str | Requirement] = ()
) -> int:
    """0; 3 if a claim did not hold; 6 if an evaluation is not reliable; 7 if one does not meet the requirements."""
    if any(e.rejected or e.contradictions or e.disagreements for e in evaluations):
        return EXIT_CLAIMS
    if not all(e.reliable for e in evaluations):
        return EXIT_UNRELIABLE
    return 0 if all(decide(e, requirements) for e in evaluations) else EXIT_REQUIREMENT
