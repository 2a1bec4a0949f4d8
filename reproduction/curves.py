"""Accuracy against eps: MNIST (four models), CIFAR-10 (three), and window sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reproduction import published
from reproduction.measure import accuracy_at, curve, evaluated, under_paper_attack
from reproduction.recipe import Recipe
from reproduction.tables import Table, points
from reproduction.workshop import Data, Subject, Workshop
from wball.attacks import PGD
from wball.ball import WassersteinBall
from wball.cost import GridCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RADII = {
    "mnist": (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5),
    "cifar10": (0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
}
SHOWN = {"mnist": (0.1, 0.3, 0.5, 1.0), "cifar10": (0.005, 0.01, 0.05, 0.1)}
"""Radii of the tables and of quick runs."""
FULL, QUICK = {"mnist": 10_000, "cifar10": 10_000}, {"mnist": 40, "cifar10": 8}
STANDARD = {"mnist": 10_000, "cifar10": 1_000}
"""Test images for StandardAttack: an image that survives it costs thirteen hundred gradients of a
ResNet-18."""
WINDOWS, QUICK_WINDOWS = (3, 5, 7, 9, 11), (3, 5, 7)
WINDOW_IMAGES = 2_000


def papers_attack(shop: Workshop, dataset: str, **changes: Any) -> PGD:
    """The paper's attack; in quick runs the radius grows twice as fast."""
    attack = PGD.paper("mnist" if dataset == "mnist" else "cifar10", progress=False, **changes)
    if shop.quick:
        assert attack.growth is not None
        attack = replace(
            attack,
            steps=attack.steps // 4,
            growth=replace(attack.growth, factor=attack.growth.factor**2, every=5),
        )
    return attack


def all_attacks(shop: Workshop, dataset: str, subject: Subject) -> Data:
    """A model under the paper's attack, under a quick one of ours in the very ball of the paper's,
    and under ours."""
    attack = papers_attack(shop, dataset)
    assert isinstance(attack.ball, WassersteinBall)
    x, y = shop.test_images(dataset, FULL[dataset], QUICK[dataset])
    made = {"paper_attack": under_paper_attack(shop, subject, x, y, attack)}
    x, y = shop.test_images(dataset, STANDARD[dataset], QUICK[dataset])
    made["same_ball"] = curve(*evaluated(shop, subject, x, y, SHOWN[dataset], attack.ball, "fast"))
    radii = (SHOWN if shop.quick else RADII)[dataset]
    made["standard_attack"] = curve(*evaluated(shop, subject, x, y, radii))
    at = [
        {"eps": r, **{name: accuracy_at(one, r) for name, one in made.items()}}
        for r in SHOWN[dataset]
    ]
    return {**made, "at": at}


def _measure(dataset: str, models: Sequence[published.PaperModel], shop: Workshop) -> Data:
    labels = {m.name: m.label for m in models}
    rows = []
    for subject in shop.subjects(*labels):
        rows.append(
            {
                "label": labels[subject.name],
                **subject.about(),
                **all_attacks(shop, dataset, subject),
            }
        )
    x, _ = shop.test_images(dataset, FULL[dataset], QUICK[dataset])
    return {
        "dataset": dataset,
        "images": shop.title(dataset, len(x)),
        "unit": WassersteinBall(1.0).unit,
        "models": rows,
    }


def _tables(data: Data) -> list[Table]:
    radii = [point["eps"] for point in data["models"][0]["at"]]
    out = []
    for key, title in (
        ("paper_attack", "the paper's attack"),
        ("same_ball", "ours in the same ball"),
        ("standard_attack", "ours in the ball of the paper's text"),
    ):
        rows = [
            [
                m["label"],
                points(m[key]["curve"][0]["accuracy"]),
                *(points(_tried(m, key, p)) for p in m["at"]),
            ]
            for m in data["models"]
        ]
        about = data["models"][0][key]
        heading = f"Under {title} ({about['attack']}; {about['images']:,} images), in percent"
        out.append(Table(["model", "clean", *(f"eps {r:g}" for r in radii)], rows, heading))
    return out


def _tried(model: Data, key: str, point: Data) -> float | None:
    """The accuracy at a radius, or ``None`` below the first radius that the attack tried."""
    first = min(p["eps"] for p in model[key]["curve"] if p["eps"] > 0)
    return point[key] if point["eps"] >= first - 1e-9 else None


def _draw(data: Data) -> Figure:
    from reproduction.draw import curves

    panels = []
    for key, title in (
        ("paper_attack", "the paper's attack"),
        ("standard_attack", "ours, valid examples"),
    ):
        said = f"{title} ({data['models'][0][key]['attack']})"
        panels.append((said, [(m["label"], m[key]["curve"]) for m in data["models"]]))
    return curves(panels, "mass fraction x px$^p$", log=data["dataset"] == "cifar10")


def _remarks(data: Data) -> list[str]:
    theirs = [m["paper_attack"]["examples"] for m in data["models"]]
    found, lost = sum(e["found"] for e in theirs), sum(e["mass_off"] for e in theirs)
    checks = [m[k]["examples"] for m in data["models"] for k in ("same_ball", "standard_attack")]
    valid, rejected = (sum(c[key] for c in checks) for key in ("found", "rejected"))
    return [
        f"{lost:,} of the {found:,} examples of the paper's attack have another mass than their "
        "image, because of the clamp: they are in no ball.",
        f"All {valid:,} valid examples of StandardAttack keep mass and box; rejected: {rejected}.",
    ]


MNIST_CURVES = Recipe(
    "mnist-curves",
    "MNIST: accuracy against eps, four models",
    "Figure 4",
    partial(_measure, "mnist", published.MNIST),
    _tables,
    _draw,
    _remarks,
)
CIFAR10_CURVES = Recipe(
    "cifar10-curves",
    "CIFAR-10: accuracy against eps, three models",
    "Figure 5. The *adv. training* below is short, 4 epochs from `cifar10-standard`; `cifar10-epochs` "
    "has the whole one",
    partial(_measure, "cifar10", published.CIFAR10),
    _tables,
    _draw,
    _remarks,
)


# ---- window sizes


def _measure_windows(shop: Workshop) -> Data:
    entries = {published.MNIST[k].name: published.MNIST[k].label for k in (0, 2)}
    x, y = shop.test_images("mnist", WINDOW_IMAGES, 20)
    powers, windows = ((1.0,), QUICK_WINDOWS) if shop.quick else ((1.0, 2.0), WINDOWS)
    radii = (0.3, 1.0) if shop.quick else (0.1, 0.3, 0.5, 1.0)
    rows = []
    for subject in shop.subjects(*entries):
        for p, window in itertools.product(powers, windows):
            attack = papers_attack(shop, "mnist", ball=WassersteinBall(0.3, GridCost(window, p)))
            row = {"label": entries[subject.name], "window": window, "p": p, **subject.about()}
            name = f"paper-window-{window}"
            row["paper_attack"] = under_paper_attack(shop, subject, x, y, attack, name)
            ball = WassersteinBall(1.0, GridCost(window, 1.0))
            ours = evaluated(shop, subject, x, y, radii, ball, "fast") if p == 1.0 else None
            row["standard_attack"] = None if ours is None else curve(*ours)
            rows.append(row)
    return {"images": shop.title("mnist", len(x)), "unit": WassersteinBall(1.0).unit, "rows": rows}


def _window_tables(data: Data) -> list[Table]:
    radii = [p["eps"] for p in data["rows"][0]["standard_attack"]["curve"][1:3]]
    last = data["rows"][0]["paper_attack"]["curve"][-1]["eps"]
    head = ["model", "window", "p = 1", "p = 2", "in the paper"]
    head += [f"ours, eps {r:g}" for r in radii]
    squared = {(r["name"], r["window"]): r["paper_attack"] for r in data["rows"] if r["p"] == 2.0}
    rows = []
    for row in (r for r in data["rows"] if r["p"] == 1.0):
        other = squared.get((row["name"], row["window"]))
        said = published.WINDOWS.get((row["label"], row["window"]))
        rows.append(
            [
                row["label"],
                f"{row['window']} x {row['window']}",
                points(accuracy_at(row["paper_attack"], last)),
                None if other is None else points(accuracy_at(other, last)),
                points(said[1]) if said is not None else "near 0",
                *(points(p["accuracy"]) for p in row["standard_attack"]["curve"][1:3]),
            ]
        )
    attack = data["rows"][0]["standard_attack"]["attack"]
    title = f"Left by the paper's attack at eps {last:.2f}, and by {attack}; {data['images']}, in percent"
    return [Table(head, rows, title)]


def _draw_windows(data: Data) -> Figure:
    from reproduction.draw import curves

    rows = [r for r in data["rows"] if r["p"] == 1.0]
    panels = [
        (
            f"{label}, {title}",
            [
                (f"{r['window']} x {r['window']}", r[key]["curve"])
                for r in rows
                if r["label"] == label
            ],
        )
        for label in dict.fromkeys(r["label"] for r in rows)
        for key, title in (("paper_attack", "the paper's attack"), ("standard_attack", "ours"))
    ]
    return curves(panels, data["unit"])


WINDOW_SIZES = Recipe(
    "windows",
    "Size of the local transport plans",
    "Figure 7 (appendix)",
    _measure_windows,
    _window_tables,
    _draw_windows,
    lambda data: [],
)
