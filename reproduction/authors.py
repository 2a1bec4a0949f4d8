"""The authors' own weights, and ours, under the attack as their text has it and as their scripts
have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from reproduction import published
from reproduction.curves import papers_attack
from reproduction.measure import accuracy_at, under_paper_attack
from reproduction.recipe import Recipe
from reproduction.tables import Table, percent
from reproduction.workshop import Data, Subject, Workshop
from wball.ball import WassersteinBall
from wball.zoo.architectures import Binarized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES, QUICK = 10_000, 10
SOURCES = ("text", "scripts")
BEFORE, INSIDE = "binarized, threshold before the attack", "binarized, threshold inside"


def measure(shop: Workshop) -> Data:
    x, y = shop.test_images("mnist", IMAGES, QUICK)
    claims, rows = {claim.model: claim for claim in published.AUTHORS}, list[Data]()
    for subject in shop.subjects(*claims):
        claim = claims[subject.name]
        for label, here, images in _cases(claim.text, subject, x):
            row = {"label": label, "published": claim.accuracy, "eps": claim.eps, **here.about()}
            for source in SOURCES:
                attack, name = papers_attack(shop, "mnist", source=source), f"paper-{source}"
                row[source] = under_paper_attack(shop, here, images, y, attack, name)
            rows.append(row)
    return {"unit": WassersteinBall(1.0).unit, "images": shop.title("mnist", len(x)), "rows": rows}


def _cases(label: str, subject: Subject, x: Tensor) -> Iterator[tuple[str, Subject, Tensor]]:
    """A model and its images; a binarized one twice.

    The authors threshold once and attack the network behind it: its images need not stay black and
    white.
    """
    if isinstance(subject.model, Binarized):
        behind = replace(subject, name=f"{subject.name}-before", model=subject.model.model)
        yield BEFORE, behind, subject.model.binarize(x).detach()
        label = INSIDE
    yield label, subject, x


def tables(data: Data) -> list[Table]:
    rows = [
        [
            r["label"],
            percent(r["published"], 0),
            percent(r["text"]["curve"][0]["accuracy"]),
            *(percent(accuracy_at(r[source], r["eps"])) for source in SOURCES),
        ]
        for r in data["rows"]
    ]
    head = ["model", "published, eps 1", "clean", *(f"{source}, eps 1" for source in SOURCES)]
    return [Table(head, rows, data["images"])]


def draw(data: Data) -> Figure:
    from reproduction.draw import curves

    titles = {
        "text": "as in the text (p = 1, 5 x 5)",
        "scripts": "as in the scripts (p = 2, 7 x 7)",
    }
    panels = [(titles[s], [(r["label"], r[s]["curve"]) for r in data["rows"]]) for s in SOURCES]
    return curves(panels, "mass fraction x px$^p$")


REMARKS = [
    "Published: the table in the authors' README. *Text*: moves cost their length, 5 x 5 plans, radii "
    "from 0.3. *Scripts*: moves cost the square, 7 x 7 plans, radii from 0.7. Both clamp after the "
    "projection.",
    "The authors threshold an image once and attack the network behind it.",
]

RECIPE = Recipe(
    "authors-weights",
    "The authors' weights under their attack",
    "README of the code",
    measure,
    tables,
    draw,
    lambda data: REMARKS,
)
