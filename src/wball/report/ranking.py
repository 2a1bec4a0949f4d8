"""A ranked table of evaluations, for the page, the terminal and spreadsheets."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from wball.evaluation.exhibit import evenly
from wball.evaluation.result import PLAN, CurvePoint, Evaluation, Evaluations
from wball.storage.names import printable

TEX = str.maketrans(
    {c: f"\\{c}" for c in "_&%#${}"}
    | {c: f"{{{c}}}" for c in "[]*"}  # after a line's end they would be an argument
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)
"""How characters that mean something to TeX are written."""
COLUMNS = (
    "model", "data", "images", "unit", "eps", "accuracy", "accuracy_low", "accuracy_high",
    "certified", "broken", "median_distance", "reliable",
)  # fmt: skip
"""Columns of the CSV table."""
SHOWN = 6
"""Largest number of radii in the table; the chart and the table of values show all."""


@dataclass(frozen=True)
class Row:
    """One model in the ranking.

    Attributes:
        index: number of its evaluation.
        name: its name.
        place: rank of the model, ``None`` if there are doubts about its evaluation.
        cells: accuracies at the radii of the table; ``None`` if a radius was not evaluated.
    """

    index: int
    name: str
    place: int | None
    cells: tuple[CurvePoint | None, ...]


@dataclass(frozen=True)
class Ranking:
    """Evaluations from the most to the least robust.

    Models are ranked by robust accuracy at ``reference``, then by its mean over the shared radii,
    then by clean accuracy; ``reason`` says why at this radius. Quick looks come after reliable
    evaluations. Evaluations with doubts come last and have no rank: their accuracy may be too high.
    """

    reference: float
    reason: str
    radii: tuple[float, ...]
    rows: tuple[Row, ...]
    same_data: bool


def rank(evaluations: Evaluations, names: Sequence[str], reference: float | None = None) -> Ranking:
    """Rank evaluations, which have radii in the same unit, at ``reference`` or a middle radius."""
    shared = shared_radii(evaluations)
    every = sorted({r for e in evaluations for r in e.radii})
    reason = "the radius of the requirement"
    if reference not in shared:
        reference = shared[len(shared) // 2] if shared else every[0]
        reason = "the middle of the evaluated radii" if len(every) > 1 else "the evaluated radius"
    shown = evenly(torch.tensor(shared or every, dtype=torch.float64), SHOWN).tolist()
    if reference not in shown:
        shown = sorted({*shown[:-1], reference})

    def strength(e: Evaluation) -> tuple[float, ...]:
        at = [e.accuracy_at(r) for r in shared]
        mean = sum(at) / len(at) if at else 0.0
        here = e.accuracy_at(reference) if reference in shared else 0.0
        return (not e.doubts, e.reliable, here, mean, e.clean_accuracy)

    order = sorted(range(len(evaluations)), key=lambda k: strength(evaluations[k]), reverse=True)
    places, rows = count(1), []
    for k in order:
        e = evaluations[k]
        cells = tuple(e.curve([r])[0] if e.measured_at(r) else None for r in shown)
        rows.append(Row(k, names[k], None if e.doubts else next(places), cells))
    return Ranking(
        reference,
        reason,
        tuple(shown),
        tuple(rows),
        len({e.settings["data"]["sha256"] for e in evaluations}) == 1,
    )


def shared_radii(evaluations: Evaluations) -> list[float]:
    """Evaluated radii at which every evaluation has an accuracy, ascending."""
    top = min(float(e.settings["radii"][-1]) for e in evaluations) * (1 + 1e-9)
    return sorted({r for e in evaluations for r in e.radii if r <= top})


def ranking_csv(evaluations: Evaluations, names: Sequence[str] | None = None) -> str:
    """A CSV table with one line per model and radius; accuracies are fractions of all images."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for k, e in enumerate(evaluations):
        median, _ = median_distance(e)
        for p in e.curve():
            low, high = e.interval(p.accuracy)
            values = (p.eps, p.accuracy, low, high, p.certified, p.broken, median)
            numbers = ["" if v is None else f"{v:.6g}" for v in values]
            name = e.name if names is None else names[k]
            said = [_cell(text) for text in (name, e.settings["data"]["name"])]
            writer.writerow([*said, len(e), e.unit, *numbers, e.reliability])
    return stream.getvalue()


def images_csv(evaluations: Evaluations) -> str:
    """A CSV table with one line per model and image: its source, classes, radius and distance."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["model", *evaluations[0].columns()])
    for e in evaluations:
        for name, *values in zip(*e.columns().values(), strict=True):
            writer.writerow([_cell(e.name), _cell(name), *values])
    return stream.getvalue()


def latex_table(evaluations: Evaluations) -> str:
    """A LaTeX table (booktabs) of robust accuracy in percent by model and radius."""
    radii = [0.0, *shared_radii(evaluations)]
    head = ["model", "clean", *(f"{r:g}" for r in radii[1:])]
    rows = [
        [printable(e.name).translate(TEX), *(f"{100 * e.accuracy_at(r):.1f}" for r in radii)]
        for e in evaluations
    ]
    first, *lines = (" & ".join(row) + r" \\" for row in (head, *rows))
    begin = rf"\begin{{tabular}}{{l{'r' * len(radii)}}}"
    end = [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([begin, r"\toprule", first, r"\midrule", *lines, *end])


def median_distance(e: Evaluation) -> tuple[float | None, bool]:
    """Median distance of the adversarial examples, and whether some of the distances are upper
    bounds."""
    found = e.images["read_as"] >= 0
    distances = e.images["distance"][found]
    bounded = bool((e.images["proof"] == PLAN).any())
    return (float(distances.median()) if len(distances) else None), bounded


def _cell(text: str) -> str:
    """Escape text that spreadsheets would read as a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text
