"""The authors' own weights, and ours, under the attack as their text has it and as their scripts have it."""

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
from reproduction.workshop import Data, MissingModel, Subject, Workshop
from wball.ball import WassersteinBall
from wball.models import Binarized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES, QUICK = 10_000, 10
SOURCES = ("text", "scripts")
BEFORE, INSIDE = "binarized, threshold before the attack", "binarized, threshold inside"


def measure(shop: Workshop) -> Data:
    x, y = shop.test_images("mnist", IMAGES, QUICK)
    ours, rows = {m.label: m.name for m in published.MNIST}, list[Data]()
    for claim in published.AUTHORS:
        for name, whose in ((claim.model, "authors"), (ours[claim.text], "ours")):
            try:
                subject = shop.subject(name)
            except (MissingModel, OSError) as error:
                shop.missing[name] = str(error)
                shop.say(f"{name} is left out: {error}")
                continue
            for label, here, images in _cases(claim.text, subject, x):
                curves = {
                    source: under_paper_attack(
                        shop,
                        here,
                        images,
                        y,
                        papers_attack(shop, "mnist", source=source),
                        f"paper-{source}",
                    )
                    for source in SOURCES
                }
                about = {
                    "label": label,
                    "whose": whose,
                    "published": claim.accuracy,
                    "eps": claim.eps,
                }
                rows.append({**about, **here.about(), **curves})
    if not any(row["whose"] == "authors" for row in rows):
        raise MissingModel("; ".join(shop.missing.values()))
    return {"unit": WassersteinBall(1.0).unit, "images": shop.title("mnist", len(x)), "rows": rows}


def _cases(label: str, subject: Subject, x: Tensor) -> Iterator[tuple[str, Subject, Tensor]]:
    """A model and its images; a binarized one twice.

    The authors threshold once and attack the network behind it: its images need not stay black and white.
    """
    if isinstance(subject.model, Binarized):
        behind = replace(subject, name=f"{subject.name}-before", model=subject.model.model)
        yield BEFORE, behind, subject.model.binarize(x).detach()
        label = INSIDE
    yield label, subject, x


def tables(data: Data) -> list[Table]:
    rows = {(r["label"], r.get("whose", "authors")): r for r in data["rows"]}
    whose = [w for w in ("authors", "ours") if any(key[1] == w for key in rows)]
    body = []
    for label in dict.fromkeys(r["label"] for r in data["rows"]):
        here = [rows.get((label, w)) for w in whose]
        said = next(r["published"] for r in here if r is not None)
        cells: list[str | None] = [label, percent(said, 0)]
        for r in here:
            cells.append(None if r is None else percent(r["text"]["curve"][0]["accuracy"]))
            cells += [
                None if r is None else percent(accuracy_at(r[source], r["eps"]))
                for source in SOURCES
            ]
        body.append(cells)
    titles = {"authors": "authors' weights", "ours": "our weights"}
    head = ["model", "published, eps 1"]
    for w in whose:
        head += [f"{titles[w]}: clean", *(f"{titles[w]}: {source}, eps 1" for source in SOURCES)]
    first = data["images"]
    return [Table(head, body, f"{first[:1].upper()}{first[1:]}")]


def draw(data: Data) -> Figure:
    from reproduction.draw import curves

    titles = {
        "text": "as in the text (p = 1, 5 x 5)",
        "scripts": "as in the scripts (p = 2, 7 x 7)",
    }
    rows = [r for r in data["rows"] if r.get("whose", "authors") == "authors"]
    panels = [(titles[s], [(r["label"], r[s]["curve"]) for r in rows]) for s in SOURCES]
    return curves(panels, data["unit"])


def remarks(data: Data) -> list[str]:
    said = [
        "Published: the table in the authors' README. *Text*: moves cost their length, 5 x 5 plans, radii from 0.3. "
        "*Scripts*: moves cost the square, 7 x 7 plans, radii from 0.7. Both clamp after the projection.",
    ]
    theirs = [r for r in data["rows"] if r.get("whose", "authors") == "authors"]
    between = [
        r["label"]
        for r in theirs
        if accuracy_at(r["text"], r["eps"]) <= r["published"] <= accuracy_at(r["scripts"], r["eps"])
    ]
    if between:
        said.append(f"The published figure lies between the two for: {', '.join(between)}.")
    if any(r["label"] == BEFORE for r in theirs):
        said.append(
            "The authors threshold an image once and attack the network behind it. With the threshold inside, where a "
            "defence has it, the gradient passes straight through."
        )
    ours = {r["label"]: r for r in data["rows"] if r.get("whose") == "ours"}
    apart = []
    for r in theirs:
        if (own := ours.get(r["label"])) is not None:
            gap, ball = (
                100 * (accuracy_at(a, r["eps"]) - accuracy_at(b, r["eps"]))
                for a, b in ((own["text"], r["text"]), (r["scripts"], r["text"]))
            )
            apart.append(f"{r['label']} {gap:+.1f} (scripts instead of text: {ball:+.1f})")
    if apart:
        said.append(
            "What the weights change, ours against the authors' under the attack of the text, in points, and beside it "
            f"what the ball changes on the authors' weights: {'; '.join(apart)}."
        )
    return said


RECIPE = Recipe(
    "authors-weights",
    "The authors' weights under their attack",
    "README of the code",
    measure,
    tables,
    draw,
    remarks,
)
