"""The paper's adversarial training for all of its epochs (the bundled model), beside a short one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wball.ball import WassersteinBall
from wball.paper import published
from wball.paper.curves import papers_attack
from wball.paper.measure import accuracy_at, curve, evaluated, under_paper_attack
from wball.paper.recipe import Recipe
from wball.paper.tables import Table, percent
from wball.paper.workshop import Data, Workshop
from wball.zoo import model_card

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "mnist-adversarial-paper"
RADII = (0.05, 0.1, 0.3)
IMAGES, QUICK = 2_000, 10
FEW = 4
"""Epochs of the short training."""


def measure(shop: Workshop) -> Data:
    x, y = shop.test_images("mnist", IMAGES, QUICK)
    rows = []
    short = (shop.trained(NAME, epochs=FEW), FEW)
    for subject, epochs in (short, (shop.subject(NAME), model_card(NAME)["training"]["epochs"])):
        row = {"epochs": epochs, **subject.about()}
        for source in ("text", "scripts"):
            attack = papers_attack(shop, "mnist", source=source)
            row[source] = under_paper_attack(shop, subject, x, y, attack, f"paper-{source}")
        row["standard_attack"] = curve(*evaluated(shop, subject, x, y, RADII))
        rows.append(row)
    return {"images": shop.title("mnist", len(x)), "unit": WassersteinBall(1.0).unit, "rows": rows}


def tables(data: Data) -> list[Table]:
    claim = next(c for c in published.AUTHORS if c.model == "wong2019-mnist-adversarial")
    head = ["adversarial training", "clean", "paper's attack, text, eps 1", "scripts, eps 1"]
    head += [f"StandardAttack, eps {r:g}" for r in RADII]
    rows: list[list[str | None]] = [["paper", "97.0 %", percent(claim.accuracy), None, *[None] * len(RADII)]]
    for r in data["rows"]:
        shares = [percent(accuracy_at(r[source], claim.eps)) for source in ("text", "scripts")]
        shares += [percent(accuracy_at(r["standard_attack"], eps)) for eps in RADII]
        rows.append([f"{r['epochs']} epochs", percent(r["text"]["curve"][0]["accuracy"]), *shares])
    return [Table(head, rows, f"{data['images'][:1].upper()}{data['images'][1:]}")]


def draw(data: Data) -> Figure:
    from wball.paper.draw import curves

    panels = [
        (title, [(f"{r['epochs']} epochs", r[key]["curve"]) for r in data["rows"]])
        for key, title in (("text", "the paper's attack, text"), ("standard_attack", "ours, valid examples"))
    ]
    return curves(panels, data["unit"], share_radius=False)


def remarks(data: Data) -> list[str]:
    few, full = data["rows"]
    ours = [percent(accuracy_at(r["standard_attack"], 0.1)) for r in (few, full)]
    theirs = [percent(accuracy_at(r["text"], 1.0)) for r in (few, full)]
    return [
        f"With {full['epochs']} epochs instead of {few['epochs']}, robust accuracy under StandardAttack at eps 0.1 is "
        f"{ours[1]} instead of {ours[0]}; the paper's own attack (text) leaves {theirs[1]} "
        f"at eps 1 instead of {theirs[0]}."
    ]


RECIPE = Recipe(
    "epochs", "The paper's adversarial training, all epochs", "appendix, training", measure, tables, draw, remarks
)
