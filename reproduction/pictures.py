"""The paper's pictures: six pixels, Wasserstein against l-inf, one digit on four models, ten
classes, lambda and p."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from reproduction import published
from reproduction.curves import papers_attack
from reproduction.measure import predicted
from reproduction.recipe import Recipe
from reproduction.tables import Table, pack
from reproduction.workshop import Data, Subject, Workshop
from wball.attacks import PGD, Attack, AttackResult, DualAveraging
from wball.ball import LinfBall, WassersteinBall
from wball.cost import GridCost
from wball.data import dataset_info
from wball.evaluation import evaluate
from wball.provenance import describe_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _attacked(
    shop: Workshop, subject: Subject, label: str, attack: Attack, x: Tensor, y: Tensor
) -> AttackResult:
    generator = torch.Generator(x.device).manual_seed(shop.settings.seed)
    found = attack(subject.model, x, y, generator=generator)
    shop.say(f"{subject.name}, {label}: {int(found.success.sum())} of {len(x)} broken")
    return found


def _valid(
    shop: Workshop,
    subject: Subject,
    attack: Attack,
    x: Tensor,
    y: Tensor,
    radii: float | Literal["minimal"],
) -> tuple[Tensor, Tensor]:
    """The smallest radius of each image's valid example (inf: none), and the examples: those of an
    evaluation."""
    ball = attack.ball
    result = evaluate(
        subject.model, x, y, ball, radii, attack, seed=shop.settings.seed, name=subject.name
    )
    images, index = x.clone(), result.examples["index"].to(x.device)
    images[index] = result.examples["adversarial"].to(images)
    shop.say(
        f"{subject.name}, {type(attack).__name__}, {ball.unit}: {len(index)} of {len(x)} broken by valid examples"
    )
    return result.images["radius"], images


def _some(right: Tensor, *subjects: Subject) -> Tensor:
    """The indices of correctly classified images."""
    index = right.nonzero().squeeze(1)
    if not len(index):
        raise ValueError(
            f"{', '.join(s.name for s in subjects)} classify no image correctly: nothing can be shown"
        )
    return index


# ---- figure 1


def _measure_six(shop: Workshop) -> Data:
    """A row of six pixels, half of them full. Shift it by one pixel, make every pixel greyer, or
    all of them grey."""
    x = torch.tensor([[[[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]]], dtype=torch.float64)
    shifted, greyer, grey = x.roll(1, 3), 0.6 * x + 0.2, torch.full_like(x, 0.5)
    rows = []
    for name, z in (("moved by one pixel", shifted), ("greyer", greyer), ("all grey", grey)):
        ball = WassersteinBall(1.0, GridCost(11, 1.0))
        rows.append(
            {
                "name": name,
                "image": pack(z[0]),
                "wasserstein": float(ball.distance(x, z)[0]),
                "linf": float((z - x).abs().max()),
            }
        )
    return {"original": pack(x[0]), "rows": rows, "unit": WassersteinBall(1.0).unit}


def _six_tables(data: Data) -> list[Table]:
    rows = [
        [
            r["name"],
            f"{r['wasserstein']:.3f}",
            f"{r['linf']:.3f}",
            f"{r['wasserstein'] / r['linf']:.1f}",
        ]
        for r in data["rows"]
    ]
    return [
        Table(["change", f"Wasserstein ({data['unit']})", "l-inf (pixel value)", "ratio"], rows)
    ]


def _draw_six(data: Data) -> Figure:
    from reproduction.draw import sums

    rows = [
        (
            r["name"],
            data["original"],
            r["image"],
            f"W {r['wasserstein']:.2f}, l-inf {r['linf']:.2f}",
        )
        for r in data["rows"]
    ]
    return sums(rows)


SIX_PIXELS = Recipe(
    "six-pixels",
    "Wasserstein and l-inf distance on six pixels",
    "Figure 1",
    _measure_six,
    _six_tables,
    _draw_six,
    lambda data: ["For the same l-inf change, greyer pixels cost more than moved ones."],
)


# ---- figure 2


def _measure_versus(shop: Workshop) -> Data:
    """The first 6 that both attacks break at the paper's radii."""
    subject = shop.subject("mnist-standard")
    x, y = shop.pool("mnist", 10_000, 500)
    keep = _some((y == 6) & (predicted(subject.model, x) == y), subject)[:20]
    x, y = x[keep], y[keep]
    attacks = {
        "Wasserstein": (0.4, DualAveraging(WassersteinBall(0.4), steps=100, progress=False)),
        "l-inf": (0.3, PGD(LinfBall(0.3), steps=40, progress=False)),
    }
    found = {
        name: _valid(shop, subject, attack, x, y, eps) for name, (eps, attack) in attacks.items()
    }
    both = torch.stack([radius.isfinite() for radius, _ in found.values()]).all(0)
    pick = int(both.nonzero()[0, 0]) if bool(both.any()) else 0
    rows = []
    for name, (eps, _) in attacks.items():
        z = found[name][1][pick : pick + 1]
        change = (z - x[pick : pick + 1]).abs()
        ink = x[pick : pick + 1] > 0
        near = torch.nn.functional.max_pool2d(ink.float(), 5, 1, 2) > 0
        rows.append(
            {
                "name": name,
                "eps": eps,
                "image": pack(z[0]),
                "read_as": int(predicted(subject.model, z)[0]),
                "background": float(change[~near].sum() / change.sum().clamp(min=1e-12)),
            }
        )
    return {
        "original": pack(x[pick]),
        "label": int(y[pick]),
        "index": int(keep[pick]),
        "rows": rows,
        **subject.about(),
    }


def _versus_tables(data: Data) -> list[Table]:
    rows = [
        [
            r["name"],
            f"{r['eps']:g}",
            f"{data['label']} → {r['read_as']}",
            f"{100 * r['background']:.1f} %",
        ]
        for r in data["rows"]
    ]
    return [Table(["ball", "eps", "predicted as", "change on the background"], rows)]


def _draw_versus(data: Data) -> Figure:
    from reproduction.draw import sums

    rows = [
        (
            f"{r['name']}, eps {r['eps']:g}",
            data["original"],
            r["image"],
            f"{data['label']} → {r['read_as']}",
        )
        for r in data["rows"]
    ]
    return sums(rows)


VERSUS = Recipe(
    "wasserstein-vs-linf",
    "A Wasserstein and an l-inf example of the same digit",
    "Figure 2",
    _measure_versus,
    _versus_tables,
    _draw_versus,
    lambda data: [
        "*Background* is the share of the change on pixels more than two away from any ink: moved mass stays near it."
    ],
)


# ---- figure 3


def _measure_digits(shop: Workshop) -> Data:
    """The first 5 that all four models read right and the paper's attack breaks on most of them."""
    subjects = shop.subjects(*(m.name for m in published.MNIST))
    labels = {m.name: m.label for m in published.MNIST}
    x, y = shop.pool("mnist", 10_000, 500)
    x, y = x[y == 5][:30], y[y == 5][:30]
    right = _some(torch.stack([predicted(s.model, x) == y for s in subjects]).all(0), *subjects)
    right = right[: 4 if shop.quick else 12]
    x, y = x[right], y[right]
    rows: list[dict[str, Any]] = []
    broken_by = [
        _attacked(shop, s, "the paper's attack", papers_attack(shop, "mnist"), x, y)
        for s in subjects
    ]
    broken = torch.stack([f.success for f in broken_by]).sum(0)
    pick = int(broken.argmax())
    one = slice(pick, pick + 1)
    for subject, fall in zip(subjects, broken_by, strict=True):
        steps = 30 if shop.quick else 100
        attack = DualAveraging(
            WassersteinBall(2.0), steps=steps, objective="margin", progress=False
        )
        near, example = _valid(shop, subject, attack, x[one], y[one], "minimal")
        theirs = float(fall.radius[pick]) if bool(fall.success[pick]) else math.inf
        entries = {}
        for key, radius, images in (
            ("paper_attack", theirs, fall.images[one]),
            ("ours", float(near[0]), example),
        ):
            read_as = int(predicted(subject.model, images)[0])
            found = radius if math.isfinite(radius) else None
            entries[key] = {"radius": found, "read_as": read_as, "image": pack(images[0])}
        rows.append(
            {
                "label": labels[subject.name],
                **subject.about(),
                "paper": published.DIGIT_RADII[subject.name],
                **entries,
            }
        )
    return {
        "original": pack(x[pick]),
        "label": int(y[pick]),
        "rows": rows,
        "unit": WassersteinBall(1.0).unit,
    }


def _digit_tables(data: Data) -> list[Table]:
    def shown(entry: dict[str, Any]) -> str:
        return (
            "not found"
            if entry["radius"] is None
            else f"{entry['radius']:.3f} (→ {entry['read_as']})"
        )

    rows = [
        [r["label"], f"{r['paper']:.2f}", shown(r["paper_attack"]), shown(r["ours"])]
        for r in data["rows"]
    ]
    return [
        Table(
            ["model", "paper (another 5)", "its attack", "smallest radius found by dual averaging"],
            rows,
        )
    ]


def _draw_digits(data: Data) -> Figure:
    from reproduction.draw import sums

    rows = []
    for r in data["rows"]:
        for key, who in (("paper_attack", "paper's attack"), ("ours", "dual averaging")):
            entry = r[key]
            eps = (
                "not found"
                if entry["radius"] is None
                else f"eps {entry['radius']:.2f}, → {entry['read_as']}"
            )
            rows.append((f"{r['label']}, {who}", data["original"], entry["image"], eps))
    return sums(rows, columns=2)


DIGITS = Recipe(
    "mnist-digits",
    "One digit on four models",
    "Figure 3",
    _measure_digits,
    _digit_tables,
    _draw_digits,
    lambda data: [
        "Another machine may show another digit: the first that the paper's attack breaks on most models."
    ],
)


# ---- figure 6

GALLERY_TRIES = 5
"""Images of a class that are attacked; the first broken one is shown, as in the paper."""


def _measure_gallery(shop: Workshop) -> Data:
    """For each class the first test image that the standard model reads right and the paper's
    attack breaks."""
    subject = shop.subject("cifar10-standard")
    x, y = shop.pool("cifar10", 10_000, 400)
    right = predicted(subject.model, x) == y
    _some(right, subject)
    tried = [
        ((y == c) & right).nonzero().squeeze(1)[: 1 if shop.quick else GALLERY_TRIES]
        for c in range(10)
    ]
    index = torch.cat(tried)  # a quick model may get a class wrong throughout
    found = _attacked(
        shop, subject, "the paper's attack", papers_attack(shop, "cifar10"), x[index], y[index]
    )
    names, rows, start = dataset_info("cifar10").classes, [], 0
    for label, here in enumerate(tried):
        if not len(here):
            continue
        broken = found.success[start : start + len(here)].nonzero().squeeze(1).tolist()
        k = start + (broken[0] if broken else 0)
        image, original = found.images[k : k + 1], x[index[k]]
        rows.append(
            {
                "index": int(index[k]),
                "survived": broken[0] if broken else len(here),
                "label": names[label],
                "read_as": names[int(predicted(subject.model, image)[0])],
                "radius": float(found.radius[k]) if broken else None,
                "change": float((image[0] - original).sum(0).abs().max()),
                "original": pack(original),
                "image": pack(image[0]),
            }
        )
        start += len(here)
    return {"rows": rows, **subject.about(), "unit": WassersteinBall(1.0).unit}


def _gallery_tables(data: Data) -> list[Table]:
    rows = [
        [
            f"{r['label']} → {r['read_as']}",
            None if r["radius"] is None else f"{r['radius']:.4f}",
            f"{r['change']:.3f}",
        ]
        for r in data["rows"]
    ]
    return [Table(["image", "eps", "largest change of a pixel"], rows)]


def _draw_gallery(data: Data) -> Figure:
    from reproduction.draw import sums

    rows = [
        (
            f"{r['label']} → {r['read_as']}",
            r["original"],
            r["image"],
            "not found" if r["radius"] is None else f"eps {r['radius']:.4f}",
        )
        for r in data["rows"]
    ]
    return sums(
        rows, columns=2, scale=max(published.GALLERY_SCALE, *(r["change"] for r in data["rows"]))
    )


GALLERY = Recipe(
    "cifar10-gallery",
    "CIFAR-10 examples of all ten classes",
    "Figure 6. The network is `cifar10-standard`, trained from random weights",
    _measure_gallery,
    _gallery_tables,
    _draw_gallery,
    lambda data: [
        "Shown is the first image of a class that is broken; its radius is in the figure.",
        "Largest total change of a pixel over the three channels: "
        f"{max(r['change'] for r in data['rows']):.3f} here, {published.GALLERY_SCALE} in the paper. "
        "The figure's scale is ours.",
    ],
)


# ---- figure 8

GRID_DIGITS = 100
"""One digit decides nothing about growth with p."""


def _measure_grid(shop: Workshop) -> Data:
    """One 5 and a few more digits, attacked at every lambda and p."""
    subject = shop.subject("mnist-standard")
    x, y = shop.pool("mnist", 10_000, 500)
    count = 2 if shop.quick else GRID_DIGITS
    keep = _some((y == 5) & (predicted(subject.model, x) == y), subject)[:count]
    x, y = x[keep], y[keep]
    lambdas, powers = (
        ((10.0, 100.0, 1000.0), (1.0, 2.0, 5.0))
        if shop.quick
        else (published.LAMBDAS, published.POWERS)
    )
    cells: list[dict[str, Any]] = []
    for reg in lambdas:
        for p in powers:
            attack = papers_attack(
                shop, "mnist", ball=WassersteinBall(0.3, GridCost(5, p)), reg=reg
            )
            depends = [
                "digits",
                subject.sha256,
                describe_settings(attack),
                keep.tolist(),
                shop.settings.seed,
                x.device.type,
            ]
            with shop.part(f"lambda-{reg:g}-p-{p:g}", depends) as folder:
                make = partial(_radii_and_images, subject, attack, x, y)
                stored, seconds = shop.once(folder / "part.safetensors", make)
            shop.spent += seconds
            radius = [r if math.isfinite(r) else None for r in stored["radius"].tolist()]
            cells.append({"lambda": reg, "p": p, "radius": radius, "image": stored["images"]})
        shop.say(f"lambda {reg:g}: done")
    # Show the digit that survives longest at the paper's lambda: others are broken at the first
    # radius tried.
    last = [r or 0.0 for r in next(c for c in reversed(cells) if c["p"] == 1.0)["radius"]]
    shown = last.index(max(last))
    about = {"shown": shown, "original": pack(x[shown]), "label": int(y[shown]), **subject.about()}
    packed = [{**c, "image": pack(c["image"][shown])} for c in cells]
    return {"cells": packed, "unit": WassersteinBall(1.0).unit, **about}


def _radii_and_images(subject: Subject, attack: Attack, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    found = attack(subject.model, x, y)
    return {"radius": torch.where(found.success, found.radius, math.inf), "images": found.images}


def _cell(cell: dict[str, Any]) -> str:
    found = [r for r in cell["radius"] if r is not None]
    many = f"{len(found)}/{len(cell['radius'])}"
    return many if not found else f"{statistics.median(found):.2f} ({many})"


def _grid_tables(data: Data) -> list[Table]:
    powers = list(dict.fromkeys(c["p"] for c in data["cells"]))
    rows = []
    for reg in dict.fromkeys(c["lambda"] for c in data["cells"]):
        cells = {c["p"]: c for c in data["cells"] if c["lambda"] == reg}
        rows.append([f"{reg:g}", *(_cell(cells[p]) for p in powers)])
    head = ["lambda", *(f"p = {p:g}" for p in powers)]
    return [Table(head, rows, "median radius of those broken (broken / digits)")]


def _draw_grid(data: Data) -> Figure:
    from reproduction.draw import grid

    return grid(data["cells"], data["shown"])


GRID = Recipe(
    "lambda-p",
    "Entropy lambda and ground cost p",
    "Figure 8 (appendix)",
    _measure_grid,
    _grid_tables,
    _draw_grid,
    lambda data: [
        "Exact projections (`reg=inf`, the default of this library) do not blur.",
        "A move by one pixel costs 1 for every p: once longer moves are too expensive, p changes "
        "nothing.",
    ],
)
