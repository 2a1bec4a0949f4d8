"""Table 1: accuracies of all models on clean images."""

from __future__ import annotations

from reproduction import published
from reproduction.measure import predicted
from reproduction.recipe import Recipe
from reproduction.tables import Table, percent
from reproduction.workshop import Data, Workshop
from wball.data import dataset_info


def measure(shop: Workshop) -> Data:
    rows = []
    for dataset, models in (("mnist", published.MNIST), ("cifar10", published.CIFAR10)):
        try:
            x, y = shop.test_images(dataset, 10_000, 200)
        except FileNotFoundError as error:
            shop.missing[dataset] = str(error)
            continue
        entries = {entry.name: entry for entry in models}
        for subject in shop.subjects(*entries):
            entry = entries[subject.name]
            accuracy = float((predicted(subject.model, x) == y).double().mean())
            about = {"dataset": dataset, "label": entry.label, **subject.about()}
            row = {"images": len(x), "accuracy": accuracy, "paper": entry.accuracy}
            rows.append({**about, **row})
    return {"rows": rows}


def tables(data: Data) -> list[Table]:
    head = ["data set and model", "paper", "here", "network"]
    rows = [
        [
            f"{dataset_info(row['dataset']).title}, {row['label']}",
            percent(row["paper"], 2),
            percent(row["accuracy"], 2),
            row["architecture"],
        ]
        for row in data["rows"]
    ]
    return [Table(head, rows)]


RECIPE = Recipe(
    "nominal-accuracies", "Clean accuracies", "Table 1", measure, tables, None, lambda data: []
)
