"""Provable defences: the paper's negative result, and what becomes of it when the ball is not turned into intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reproduction.measure import certified, curve, evaluated, predicted, smoothed
from reproduction.presets import preset, presets
from reproduction.recipe import Recipe
from reproduction.tables import Table, percent
from reproduction.workshop import Data, Subject, Workshop
from wball.ball import WassersteinBall
from wball.certificates.effort import Method
from wball.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS: tuple[Method, ...] = ("interval", "dual", "crown", "anchored")
NOISE = 0.01
"""Laplace scale of the smoothing noise for models that were trained without any."""
SAMPLES, QUICK_SAMPLES, SELECT, ALPHA = 10_000, 500, 100, 0.001
SMOOTHED = "mnist-flow-noise"
COMPARED = 500
"""Images for the methods that only serve for comparison."""


@dataclass(frozen=True)
class Case:
    """A model to prove (the first of ``models`` that is there, or else the first one, trained), and where."""

    dataset: str
    models: tuple[str, ...]
    radii: tuple[float, ...]
    quick_radii: tuple[float, ...]
    images: int
    quick_images: int
    optional: bool = False


CASES = (
    Case(
        "mnist",
        ("mnist-certified", SMOOTHED),
        (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1),
        (0.005, 0.02, 0.05),
        10_000,
        6,
    ),
    Case(
        "cifar10",
        ("cifar10-certified",),
        (0.0002, 0.0005, 0.001, 0.002, 0.005),
        (0.001,),
        1_000,
        2,
        optional=True,
    ),
)
"""The second is beyond the paper: left out where the model is not at hand."""


def measure(shop: Workshop) -> Data:
    sets = [
        _measured(shop, case)
        for case in CASES
        if not case.optional or any(map(shop.has, case.models))
    ]
    return {"unit": WassersteinBall(1.0).unit, "sets": sets}


def _measured(shop: Workshop, case: Case) -> Data:
    subject = shop.subject(next((n for n in case.models if shop.has(n)), case.models[0]))
    x, y = shop.test_images(case.dataset, case.images, case.quick_images)
    radii = case.quick_radii if shop.quick else case.radii
    rows = []
    few, labels = x[:COMPARED], y[:COMPARED]
    for method in METHODS:
        best = method == METHODS[-1]
        radius, seconds = certified(
            shop, subject, *((x, y) if best else (few, labels)), method, radii
        )
        points = [{"eps": r, "accuracy": float((radius >= r).double().mean())} for r in radii]
        clean = {
            "eps": 0.0,
            "accuracy": float((predicted(subject.model, x) == y)[: len(radius)].double().mean()),
        }
        row = {
            "method": method,
            "kind": "proof",
            "images": len(radius),
            "curve": [clean, *points],
            "seconds": seconds,
        }
        rows.append(row)
    best_proof = radius
    rows.append(_smoothed(shop, subject, few, labels, radii))
    if case.dataset == "mnist" and subject.name != SMOOTHED and shop.has(SMOOTHED):
        rows.append(_smoothed(shop, shop.subject(SMOOTHED), few, labels, radii, f" of {SMOOTHED}"))
    result, seconds = evaluated(shop, subject, x, y, radii)
    about = curve(result, seconds)
    row = {
        "method": about["attack"],
        "kind": "attack",
        "images": about["images"],
        "curve": about["curve"],
    }
    rows.append({**row, **_compared(best_proof, result, radii), "seconds": seconds})
    return {
        "dataset": case.dataset,
        "images": shop.title(case.dataset, len(x)),
        "rows": rows,
        **subject.about(),
    }


def _compared(proved: Tensor, result: Evaluation, radii: tuple[float, ...]) -> dict[str, int]:
    """How many balls with a proof were attacked, and in how many an example was found: none, or a proof is wrong."""
    broken = result.images["radius"]
    balls = sum(int(((proved >= r) & (broken >= r)).sum()) for r in radii)
    return {
        "proved_and_attacked": balls,
        "proved_and_broken": int((broken <= proved)[proved > 0].sum()),
    }


def _smoothed(
    shop: Workshop,
    subject: Subject,
    x: Tensor,
    y: Tensor,
    radii: tuple[float, ...],
    whose: str = "",
) -> dict[str, Any]:
    samples = QUICK_SAMPLES if shop.quick else SAMPLES
    scale = (preset(subject.name).noise if subject.name in presets() else 0.0) or NOISE
    part, seconds = smoothed(shop, subject, x, y, scale, samples, min(samples, SELECT), ALPHA)
    points = [{"eps": r, "accuracy": float((part["radius"] > r).double().mean())} for r in radii]
    at_zero = {"eps": 0.0, "accuracy": float((part["radius"] >= 0).double().mean())}
    return {
        "method": f"flow smoothing{whose}, scale {scale:g}",
        "kind": "probable",
        "images": len(x),
        "curve": [at_zero, *points],
        "seconds": seconds,
    }


def tables(data: Data) -> list[Table]:
    out = []
    for part in data["sets"]:
        radii = [p["eps"] for p in part["rows"][0]["curve"]]
        rows = [
            [r["method"], f"{r['images']:,}", *(percent(p["accuracy"]) for p in r["curve"])]
            for r in part["rows"]
        ]
        head = [part["name"], "images", *("clean" if r == 0 else f"eps {r:g}" for r in radii)]
        out.append(Table(head, rows, part["images"][:1].upper() + part["images"][1:]))
    return out


def draw(data: Data) -> Figure:
    from reproduction.draw import curves
    from wball.report.figures import COLOURS

    styles = {"attack": "--", "proof": "-", "probable": ":"}
    panels = [
        (part["name"], [(_label(r), r["curve"]) for r in part["rows"]]) for part in data["sets"]
    ]
    lines = {_label(r): styles[r["kind"]] for part in data["sets"] for r in part["rows"]}
    figure = curves(panels, data["unit"], line_styles=lines, share_radius=False)
    for axis, part in zip(figure.axes, data["sets"], strict=False):
        best = next(r["curve"] for r in part["rows"] if r["method"] == METHODS[-1])
        attacked = {
            p["eps"]: p["accuracy"]
            for r in part["rows"]
            if r["kind"] == "attack"
            for p in r["curve"]
        }
        both = [
            (p["eps"], 100 * p["accuracy"], 100 * attacked[p["eps"]])
            for p in best
            if p["eps"] in attacked
        ]
        if both:
            eps, low, high = zip(*both, strict=True)
            axis.fill_between(
                eps, low, high, color=COLOURS[METHODS.index("anchored")], alpha=0.15, lw=0
            )
    return figure


def _label(row: dict[str, Any]) -> str:
    """What the legend says; the area between the best proof and the attack is what nobody knows."""
    named = {
        "interval": "proved by pixel intervals",
        "dual": "proved by the dual network of section 5.3",
        "crown": "proved by CROWN over the ball",
        "anchored": "proved by anchored bounds",
    }
    said = named.get(
        row["method"], row["method"].partition(", scale")[0]
    )  # the scale differs from panel to panel
    return f"survived {said}" if row["kind"] == "attack" else said


def remarks(data: Data) -> list[str]:
    said = []
    for part in data["sets"]:
        rows = {r["method"]: r["curve"] for r in part["rows"]}
        proved = max(
            (p["eps"] for p in rows["interval"] if p["eps"] > 0 and p["accuracy"] > 0), default=None
        )
        useful = [p for p in rows["anchored"] if p["eps"] > 0 and p["accuracy"] >= 0.3]
        vacuous = (
            "intervals prove nothing at any radius tried, as the paper says"
            if proved is None
            else f"intervals prove nothing beyond eps {proved:g}"
        )
        here = f"`{part['name']}`: {vacuous}"
        if useful:
            here += (
                f"; bounds over the ball itself prove {percent(useful[-1]['accuracy'])} of the images at eps "
                f"{useful[-1]['eps']:g}, for every transport plan and without exception (`anchored`)"
            )
        attack = next(r for r in part["rows"] if r["kind"] == "attack")
        here += (
            f". {attack['method']}, attacked {attack['proved_and_attacked']:,} balls with such a proof and found "
            f"{attack['proved_and_broken'] or 'no'} examples in them"
        )
        said.append(f"{here}.")
    said.append(
        "*Flow smoothing* certifies a smoothed classifier, each image with probability 99.9 %."
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
