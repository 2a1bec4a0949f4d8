"""The paper's adversarial training for all of its epochs; on MNIST (the bundled model) beside a short one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from reproduction import published
from reproduction.curves import papers_attack
from reproduction.measure import accuracy_at, curve, evaluated, under_paper_attack
from reproduction.presets import preset
from reproduction.recipe import Recipe
from reproduction.tables import Table, percent
from reproduction.workshop import Data, Workshop
from wball.ball import WassersteinBall

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Trained:
    """What is measured of a data set's model.

    Attributes:
        claim: what the paper says about it.
        clean: its clean accuracy in the paper.
        radii: radii for StandardAttack.
        images: test images for the paper's attack.
        ours: test images for StandardAttack, the first of those.
        few: epochs of the short training.
    """

    claim: published.Claim
    clean: float | None
    radii: tuple[float, ...]
    images: int
    ours: int
    few: int | None = None

    @property
    def name(self) -> str:
        return f"{self.claim.dataset}-adversarial-paper"


MNIST = Trained(
    published.AUTHORS[3], published.MNIST[3].accuracy, (0.05, 0.1, 0.3), 2_000, 2_000, few=4
)
CIFAR10 = Trained(
    published.CLAIMS[5], published.CIFAR10[2].accuracy, (0.005, 0.01, 0.05), 1_000, 500
)
QUICK = {"mnist": 10, "cifar10": 4}


def measure(about: Trained, shop: Workshop) -> Data:
    dataset = about.claim.dataset
    x, y = shop.test_images(dataset, about.images, QUICK[dataset])
    rows = []
    subjects = (
        [] if about.few is None else [(shop.trained(about.name, epochs=about.few), about.few)]
    )
    for subject, epochs in (*subjects, (shop.subject(about.name), preset(about.name).epochs)):
        row = {"epochs": epochs, **subject.about()}
        for source in ("text", "scripts"):
            attack = papers_attack(shop, dataset, source=source)
            row[source] = under_paper_attack(shop, subject, x, y, attack, f"paper-{source}")
        row["standard_attack"] = curve(
            *evaluated(shop, subject, x[: about.ours], y[: about.ours], about.radii)
        )
        rows.append(row)
    return {"images": shop.title(dataset, len(x)), "unit": WassersteinBall(1.0).unit, "rows": rows}


def tables(about: Trained, data: Data) -> list[Table]:
    eps, radii = about.claim.eps, about.radii
    head = [
        "adversarial training",
        "clean",
        f"paper's attack, text, eps {eps:g}",
        f"scripts, eps {eps:g}",
    ]
    head += [f"StandardAttack, eps {r:g}" for r in radii]
    said = [percent(about.clean), percent(about.claim.accuracy)]
    rows: list[list[str | None]] = [["paper", *said, None, *[None] * len(radii)]]
    for r in data["rows"]:
        shares = [percent(accuracy_at(r[source], eps)) for source in ("text", "scripts")]
        shares += [percent(accuracy_at(r["standard_attack"], radius)) for radius in radii]
        rows.append([f"{r['epochs']} epochs", percent(r["text"]["curve"][0]["accuracy"]), *shares])
    title = f"{data['images'][:1].upper()}{data['images'][1:]}"
    fewer = data["rows"][0]["standard_attack"]["images"]
    if fewer < data["rows"][0]["text"]["images"]:
        title += f"; StandardAttack on the first {fewer:,}"
    return [Table(head, rows, title)]


def draw(data: Data) -> Figure:
    from reproduction.draw import curves

    panels = [
        (title, [(f"{r['epochs']} epochs", r[key]["curve"]) for r in data["rows"]])
        for key, title in (
            ("text", "the paper's attack, text"),
            ("standard_attack", "ours, valid examples"),
        )
    ]
    return curves(panels, data["unit"], share_radius=False)


def remarks(about: Trained, data: Data) -> list[str]:
    *short, full = data["rows"]
    eps, radius = about.claim.eps, about.radii[1]
    ours = [percent(accuracy_at(r["standard_attack"], radius)) for r in (*short, full)]
    theirs = [percent(accuracy_at(r["text"], eps)) for r in (*short, full)]
    if short:
        return [
            f"With {full['epochs']} epochs instead of {short[0]['epochs']}, robust accuracy under StandardAttack at "
            f"eps {radius:g} is {ours[1]} instead of {ours[0]}; the paper's own attack (text) leaves {theirs[1]} "
            f"at eps {eps:g} instead of {theirs[0]}."
        ]
    return [
        f"After {full['epochs']} epochs the paper's own attack (text) leaves {theirs[0]} at eps {eps:g} (the paper: "
        f"{percent(about.claim.accuracy)}); valid examples leave {ours[0]} at eps {radius:g}."
    ]


def _recipe(name: str, title: str, about: Trained) -> Recipe:
    parts = partial(measure, about), partial(tables, about), draw, partial(remarks, about)
    return Recipe(name, title, "appendix, training", *parts)


MNIST_EPOCHS = _recipe("epochs", "The paper's adversarial training, all epochs", MNIST)
CIFAR10_EPOCHS = _recipe(
    "cifar10-epochs", "CIFAR-10: the paper's adversarial training, all epochs", CIFAR10
)
