"""Provable defences: the paper's negative result, and what becomes of it when the ball is not
turned into intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reproduction.measure import certified, curve, evaluated, predicted
from reproduction.recipe import Recipe
from reproduction.tables import Table, points
from reproduction.workshop import Data, Workshop
from wball.ball import WassersteinBall
from wball.certificates.certificate import Method
from wball.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS: tuple[Method, ...] = ("interval", "dual", "crown", "anchored")


@dataclass(frozen=True)
class Case:
    """A model to certify, the radii, and the number of images; the last two also in quick runs."""

    dataset: str
    model: str
    radii: tuple[float, ...]
    quick_radii: tuple[float, ...]
    images: int
    quick_images: int


CASES = (
    Case(
        "mnist",
        "mnist-certified",
        (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1),
        (0.005, 0.02, 0.05),
        1_000,
        6,
    ),
    Case(
        "cifar10",
        "cifar10-certified",
        (0.0002, 0.0005, 0.001, 0.002, 0.005),
        (0.001,),
        1_000,
        2,
    ),
)
"""The second is beyond the paper: left out if the model is not at hand."""


def measure(shop: Workshop) -> Data:
    sets = [_measured(shop, case) for case in CASES if shop.has(case.model)]
    return {"unit": WassersteinBall(1.0).unit, "sets": sets}


def _measured(shop: Workshop, case: Case) -> Data:
    subject = shop.subject(case.model)
    x, y = shop.test_images(case.dataset, case.images, case.quick_images)
    radii = case.quick_radii if shop.quick else case.radii
    clean, rows = float((predicted(subject.model, x) == y).double().mean()), []
    for method in METHODS:
        radius, seconds = certified(shop, subject, x, y, method, radii)
        shares = [float((radius >= r).double().mean()) for r in radii]
        rows.append(_row(method, "proof", len(radius), radii, [clean, *shares], seconds))
    result, seconds = evaluated(shop, subject, x, y, radii)
    about, compared = curve(result), _compared(radius, result, radii)
    shares = [point["accuracy"] for point in about["curve"]]
    attacked = _row(about["attack"], "attack", about["images"], radii, shares, seconds)
    rows.append({**attacked, **compared})
    images_said = shop.title(case.dataset, len(x))
    return {"dataset": case.dataset, "images": images_said, "rows": rows, **subject.about()}


def _row(
    method: str,
    kind: str,
    images: int,
    radii: tuple[float, ...],
    shares: list[float],
    seconds: float,
) -> Data:
    points = zip((0.0, *radii), shares, strict=True)
    curve = [{"eps": eps, "accuracy": share} for eps, share in points]
    return {"method": method, "kind": kind, "images": images, "curve": curve, "seconds": seconds}


def _compared(proved: Tensor, result: Evaluation, radii: tuple[float, ...]) -> dict[str, int]:
    """How many balls with a proof were attacked, and in how many an example was found: none, or a
    proof is wrong."""
    broken = result.images["radius"]
    balls = sum(int(((proved >= r) & (broken >= r)).sum()) for r in radii)
    return {
        "proved_and_attacked": balls,
        "proved_and_broken": int((broken <= proved)[proved > 0].sum()),
    }


def tables(data: Data) -> list[Table]:
    out = []
    for part in data["sets"]:
        radii = [p["eps"] for p in part["rows"][0]["curve"]]
        rows = [
            [r["method"], f"{r['images']:,}", *(points(p["accuracy"]) for p in r["curve"])]
            for r in part["rows"]
        ]
        head = [part["name"], "images", *("clean" if r == 0 else f"eps {r:g}" for r in radii)]
        title = part["images"][:1].upper() + part["images"][1:]
        out.append(Table(head, rows, f"{title}, in percent"))
    return out


def draw(data: Data) -> Figure:
    from reproduction.draw import curves

    styles = {"attack": "--", "proof": "-"}
    panels = [
        (part["name"], [(_label(r), r["curve"]) for r in part["rows"]]) for part in data["sets"]
    ]
    lines = {_label(r): styles[r["kind"]] for part in data["sets"] for r in part["rows"]}
    return curves(panels, data["unit"], line_styles=lines, share_radius=False)


def _label(row: dict[str, Any]) -> str:
    """What the legend says; the area between the best proof and the attack is undecided."""
    named = {
        "interval": "proved by pixel intervals",
        "dual": "proved by the dual network of section 5.3",
        "crown": "proved by CROWN over the ball",
        "anchored": "proved by anchored bounds",
    }
    said = named.get(row["method"], row["method"])
    return f"survived {said}" if row["kind"] == "attack" else said


def remarks(data: Data) -> list[str]:
    said = ["Proofs hold for every transport plan."]
    for part in data["sets"]:
        attack = next(r for r in part["rows"] if r["kind"] == "attack")
        said.append(
            f"`{part['name']}`: {attack['method']}, attacked {attack['proved_and_attacked']:,} "
            f"certified balls and found {attack['proved_and_broken'] or 'no'} examples in them."
        )
    return said


RECIPE = Recipe(
    "certificates",
    "Provable defences: certified accuracy against eps",
    "section 5.3, the paper's negative result",
    measure,
    tables,
    draw,
    remarks,
)
