"""What a number rests on: its confidence interval, and whether the evaluation behind it can be trusted."""

from __future__ import annotations

import math

from wball.evaluation.result import Evaluation

Interval = tuple[float, float]

NORMAL_95 = 1.959963984540054


def accuracy_interval(e: Evaluation, accuracy: float) -> Interval:
    r"""Wilson's 95 % confidence interval of an accuracy, for images that are a random sample.

    .. math:: \frac{k + z^2/2 \pm z \sqrt{k (n - k) / n + z^2 / 4}}{n + z^2}
    """
    n, z = len(e), NORMAL_95
    k = accuracy * n
    half = z * math.sqrt(max(0.0, k * (n - k) / n) + z * z / 4)
    return max(0.0, (k + z * z / 2 - half) / (n + z * z)), min(1.0, (k + z * z / 2 + half) / (n + z * z))


def reliable(e: Evaluation) -> bool:
    """Whether every claim of the evaluation held, and nothing about the model makes its accuracy doubtful."""
    return not (e.rejected or e.contradictions or e.disagreements or e.warnings)
