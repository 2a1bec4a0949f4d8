"""Networks trained as in the paper, under its attack as the text has it and as the scripts have it:
the adversarial training for all of its epochs, and standard training with and without tricks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from reproduction import published
from reproduction.curves import papers_attack
from reproduction.measure import accuracy_at, curve, evaluated, under_paper_attack
from reproduction.recipe import Recipe
from reproduction.tables import Table, percent
from reproduction.workshop import Data, Workshop
from wball.ball import WassersteinBall

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES = {"text": "p = 1", "scripts": "p = 2"}
QUICK = {"mnist": 10, "cifar10": 4}


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        dataset: of the networks.
        networks: by name, what to call them.
        shown: radii of the table for the paper's attack.
        paper: what the paper says, by radius.
        images: test images for the paper's attack.
        radii: radii for StandardAttack.
        ours: test images for StandardAttack, the first of those (0: it is not run).
    """

    dataset: str
    networks: Mapping[str, str]
    shown: tuple[float, ...]
    paper: Mapping[float, float]
    images: int
    radii: tuple[float, ...] = ()
    ours: int = 0


MNIST = Setting(
    "mnist",
    {"mnist-adversarial-paper": "15 epochs"},
    (0.5, 1.0),
    {1.0: published.AUTHORS[3].accuracy},
    2_000,
    (0.05, 0.1, 0.3),
    2_000,
)
CIFAR10 = Setting(
    "cifar10",
    {"cifar10-adversarial-paper": "15 epochs from random weights"},
    (0.01, 0.1),
    published.CIFAR10_CURVES["cifar10-adversarial-paper"],
    1_000,
    (0.005, 0.01, 0.05),
    500,
)
TRICKS = Setting(
    "cifar10",
    {
        "cifar10-standard": "with label smoothing, cutout, averaged weights",
        "cifar10-standard-plain": "without them",
    },
    (0.005, 0.01, 0.05, 0.1),
    published.CIFAR10_CURVES["cifar10-standard"],
    1_000,
)


def measure(setting: Setting, shop: Workshop) -> Data:
    dataset, rows = setting.dataset, list[Data]()
    x, y = shop.test_images(dataset, setting.images, QUICK[dataset])
    for subject in shop.subjects(*setting.networks):
        row = {"label": setting.networks[subject.name], **subject.about()}
        for source in SOURCES:
            attack = papers_attack(shop, dataset, source=source)
            row[source] = under_paper_attack(shop, subject, x, y, attack, f"paper-{source}")
        if setting.ours:
            few = slice(setting.ours)
            found = evaluated(shop, subject, x[few], y[few], setting.radii)
            row["standard_attack"] = curve(*found)
        rows.append(row)
    return {"images": shop.title(dataset, len(x)), "unit": WassersteinBall(1.0).unit, "rows": rows}


def tables(setting: Setting, data: Data) -> list[Table]:
    head = ["network", "attack", "clean", *(f"eps {eps:g}" for eps in setting.shown)]
    rows = [["paper", None, None, *(percent(setting.paper.get(eps)) for eps in setting.shown)]]
    for r in data["rows"]:
        for source, cost in SOURCES.items():
            shares = (accuracy_at(r[source], eps) for eps in (0.0, *setting.shown))
            rows.append([r["label"], f"paper's, {source} ({cost})", *map(percent, shares)])
    made = [Table(head, rows, data["images"])]
    if setting.ours:
        ours = [
            [
                r["label"],
                *(percent(accuracy_at(r["standard_attack"], eps)) for eps in setting.radii),
            ]
            for r in data["rows"]
        ]
        images = data["rows"][0]["standard_attack"]["images"]
        title = f"StandardAttack, p = 1; first {images:,} of them"
        made.append(Table(["network", *(f"eps {eps:g}" for eps in setting.radii)], ours, title))
    return made


def draw(data: Data) -> Figure:
    from reproduction.draw import curves

    panels = [
        (f"as in the {s} ({SOURCES[s]})", [(r["label"], r[s]["curve"]) for r in data["rows"]])
        for s in SOURCES
    ]
    return curves(panels, data["unit"], log=True)


def _recipe(name: str, title: str, place: str, setting: Setting) -> Recipe:
    made = partial(measure, setting), partial(tables, setting)
    return Recipe(name, title, place, *made, draw, lambda data: [])


EPOCHS = _recipe(
    "epochs", "MNIST: the paper's adversarial training, all epochs", "appendix, training", MNIST
)
CIFAR10_EPOCHS = _recipe(
    "cifar10-epochs",
    "CIFAR-10: the paper's adversarial training, all epochs",
    "Figure 5, adv. training",
    CIFAR10,
)
CIFAR10_TRICKS = _recipe(
    "cifar10-tricks",
    "CIFAR-10: what training tricks and the cost of a move change",
    "Figure 5, standard model",
    TRICKS,
)
