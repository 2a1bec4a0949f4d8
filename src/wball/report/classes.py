"""Accuracy by class, and confusion of classes under attack."""

from dataclasses import dataclass

import torch

from wball.evaluation.result import Evaluation

SHOWN = 20
"""Largest number of classes in the matrix and in the table, which lists the weakest."""


@dataclass(frozen=True)
class ClassRow:
    """Accuracies of one class; ``confused`` is its most frequent wrong prediction."""

    name: str
    images: int
    clean: float
    robust: float
    confused: str | None


@dataclass(frozen=True)
class ByClass:
    """Accuracy by class at one radius.

    Attributes:
        rows: by class number; the weakest first where there are more than :data:`SHOWN` classes.
        left_out: how many classes with images are not among the rows.
        matrix: images by true class and predicted class under attack; empty for many classes.
        names: of the classes of the matrix.
    """

    eps: float
    rows: tuple[ClassRow, ...]
    left_out: int
    matrix: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]


def by_class(e: Evaluation, eps: float) -> ByClass:
    """Accuracy by class, clean and at radius ``eps``."""
    label, clean, read_as = (e.images[name] for name in ("label", "predicted", "read_as"))
    attacked = torch.where(e.broken_at(eps) & (read_as >= 0), read_as, clean)
    rows = []
    for number in label.unique().tolist():
        here = label == number
        wrong = attacked[here & (attacked != number)]
        right, robust = (float((c[here] == number).double().mean()) for c in (clean, attacked))
        confused = e.class_name(int(wrong.mode().values)) if len(wrong) else None
        rows.append(ClassRow(e.class_name(number), int(here.sum()), right, robust, confused))
    left_out = max(0, len(rows) - SHOWN)
    if left_out:
        rows = sorted(rows, key=lambda row: (row.robust, row.clean))[:SHOWN]
    numbers = sorted({*label.tolist(), *attacked.tolist()})
    shown = numbers if len(numbers) <= SHOWN else []
    matrix = [tuple(int(((label == i) & (attacked == j)).sum()) for j in shown) for i in shown]
    return ByClass(eps, tuple(rows), left_out, tuple(matrix), tuple(map(e.class_name, shown)))
