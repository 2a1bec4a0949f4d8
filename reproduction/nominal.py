"""Table 1: accuracies of all models on clean images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reproduction import published
from reproduction.measure import predicted
from reproduction.presets import preset, presets
from reproduction.recipe import Recipe
from reproduction.tables import Table, percent
from reproduction.workshop import Data, MissingModel, Workshop
from wball.training.measure import verified_accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


def measure(shop: Workshop) -> Data:
    rows, left_out = [], {}
    for dataset, models in (("mnist", published.MNIST), ("cifar10", published.CIFAR10)):
        try:
            x, y = shop.test_images(dataset, 10_000, 200)
        except FileNotFoundError as error:
            left_out[dataset] = str(error)
            shop.say(f"{TITLES[dataset]} is left out: {error}")
            continue
        ours = published.OURS[dataset]
        for entry in (*models, *([ours] if shop.has(ours.name) else [])):
            try:
                subject = shop.subject(entry.name)
            except MissingModel as error:
                shop.missing[entry.name] = str(error)
                shop.say(f"{entry.name} is left out: {error}")
                continue
            proved = preset(entry.name).provable if entry.name in presets() else None
            few = 200 if shop.quick else 1000
            rows.append(
                {
                    "dataset": dataset,
                    "label": entry.label,
                    **subject.about(),
                    "images": len(x),
                    "accuracy": float((predicted(subject.model, x) == y).double().mean()),
                    "paper": entry.accuracy,
                    "linf": None if proved is None else proved.eps,
                    "verified": None
                    if proved is None
                    else verified_accuracy(subject.model, x[:few], y[:few], proved.eps),
                    "verified_images": None if proved is None else len(x[:few]),
                }
            )
    if not rows:
        raise MissingModel("; ".join([*left_out.values(), *shop.missing.values()]))
    return {"rows": rows, "left_out": left_out}


def tables(data: Data) -> list[Table]:
    head = ["data set and model", "paper", "here", "images", "network", "proved in l-inf"]
    rows = [
        [
            f"{TITLES[row['dataset']]}, {row['label']}",
            percent(row["paper"], 2),
            percent(row["accuracy"], 2),
            f"{row['images']:,}",
            row["architecture"],
            None if row["verified"] is None else _proved(row),
        ]
        for row in data["rows"]
    ]
    return [Table(head, rows)]


def _proved(row: Data) -> str:
    return f"{percent(row['verified'])} of {row['verified_images']:,} at {row['linf']:.3g}"


def remarks(data: Data) -> list[str]:
    below = [
        r for r in data["rows"] if r["paper"] is not None and r["accuracy"] < r["paper"] - 1e-9
    ]
    if not below:
        return ["Every model is at least as accurate on clean images as the paper's."]
    return [
        "Less accurate than the paper's: "
        + ", ".join(
            f"{TITLES[r['dataset']]} {r['label']} (by {100 * (r['paper'] - r['accuracy']):.2f} points)"
            for r in below
        )
        + "."
    ]


def draw(data: Data) -> Figure:
    from reproduction.draw import bars

    labels = [f"{TITLES[row['dataset']]}, {row['label']}" for row in data["rows"]]
    paper_says = [None if row["paper"] is None else 100 * row["paper"] for row in data["rows"]]
    here = [100 * row["accuracy"] for row in data["rows"]]
    return bars(
        labels, [("paper", paper_says), ("here", here)], "clean accuracy (%)", said="{:.2f}".format
    )


RECIPE = Recipe("nominal-accuracies", "Clean accuracies", "Table 1", measure, tables, draw, remarks)
