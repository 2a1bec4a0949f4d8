"""The content of a report, as plain data for its template."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from wball.evaluation.requirements import Comparison, Requirement, Requirements
from wball.evaluation.result import Evaluation, Evaluations
from wball.provenance import Plain
from wball.report.classes import by_class
from wball.report.pictures import change_uri, image_uri
from wball.report.ranking import Ranking, median_distance, rank, ranking_csv
from wball.report.transport import plan_moves

OUTCOMES = {"broken": "broken", "survived": "survived", "wrong": "misclassified"}
IMAGES = 200
"""Largest number of images in the gallery, over all evaluations."""
TONE = {"yes": "good", "no": "bad", "quick look": ""}


def make_content(evaluations: Evaluations, requirements: Requirements = ()) -> Plain:
    """The variables of ``template.html``; ``data`` is passed to the script of the page.

    Runs are in the order of the ranking, so that colours, tables and menus agree.
    """
    if not evaluations:
        raise ValueError("evaluations is empty: there is nothing to report on")
    units = {e.unit for e in evaluations}
    if len(units) > 1:
        raise ValueError(
            f"evaluations have radii in different units ({', '.join(sorted(units))}): write two reports"
        )
    gate = next((Requirement.parse(wanted).eps for wanted in requirements), None)
    ranking = rank(evaluations, distinct_names(evaluations), gate)
    names = [row.name for row in ranking.rows]
    evaluations = [evaluations[row.index] for row in ranking.rows]
    kinds = {e.settings["ball"]["kind"] for e in evaluations}
    subject = f"{'Wasserstein a' if kinds == {'WassersteinBall'} else 'A'}dversarial robustness"
    each = max(1, IMAGES // len(evaluations))
    return {
        "checks": [
            (name, check)
            for e, name in zip(evaluations, names, strict=True)
            for check in e.check(requirements).checks
        ],
        "title": f"{subject}: {names[0] if len(names) == 1 else f'{len(names)} models'}",
        "unit": evaluations[0].unit,
        "ranking": ranking,
        "comparisons": _comparisons(evaluations, names, ranking),
        "csv": ranking_csv(evaluations, names),
        "runs": [
            _run(e, name, ranking.reference) for e, name in zip(evaluations, names, strict=True)
        ],
        "radii": sorted({0.0, *(r for e in evaluations for r in e.radii)}),
        "proved": any(e.settings["certify"] is not None for e in evaluations),
        "cards": sorted(
            (c for k, e in enumerate(evaluations) for c in _cards(e, k, each)),
            key=lambda card: card["order"][0],
        ),
        "classes": list(
            dict.fromkeys(c for e in evaluations for c in e.settings["data"]["classes"])
        ),
        "outcomes": OUTCOMES,
        "tone": TONE,
        "explorable": any(_shows_images(e) and e.explorer for e in evaluations),
        "data": {
            "unit": evaluations[0].unit,
            "runs": [
                {"name": name, "curve": _curve(e), "explorer": _explorer(e)}
                for e, name in zip(evaluations, names, strict=True)
            ],
        },
    }


def _comparisons(
    evaluations: Evaluations, names: Sequence[str], ranking: Ranking
) -> list[Comparison]:
    """Paired tests of each model with the next one in the ranking, on the same images."""
    if not (ranking.same_data and all(e.measured_at(ranking.reference) for e in evaluations)):
        return []
    pairs = zip(itertools.pairwise(evaluations), itertools.pairwise(names), strict=True)
    return [
        replace(one.compare(other, ranking.reference), names=both) for (one, other), both in pairs
    ]


def distinct_names(evaluations: Evaluations) -> list[str]:
    """Unique names of the models: a repeated name gets a number."""
    seen, names = Counter[str](), []
    for e in evaluations:
        seen[e.name] += 1
        names.append(e.name if seen[e.name] == 1 else f"{e.name} ({seen[e.name]})")
    return names


def _run(e: Evaluation, name: str, reference: float) -> Plain:
    """The template variables of one evaluation."""
    at = reference if e.measured_at(reference) else e.radii[-1]
    median, bounded = median_distance(e)
    return {
        "e": e,
        "name": name,
        "images": len(e),
        "headline": e.curve([at])[0],
        "median": median,
        "bounds": bounded,
        "by_class": by_class(e, at),
        "audit": e.audit_summary(),
    }


def _curve(e: Evaluation) -> Plain:
    """The values of the accuracy chart."""
    points = e.curve()
    if e.settings["mode"] == "minimal":
        top = float(e.settings["radii"][-1])
        at = sorted({0.0, top, *(r for r in e.images["radius"].tolist() if 0 < r <= top)})
        points = e.curve(at)
    certified = [p.certified for p in points]
    return {
        "eps": [p.eps for p in points],
        "accuracy": [_percent(p.accuracy) for p in points],
        "interval": [[_percent(end) for end in p.interval] for p in points],
        "certified": None
        if certified[0] is None
        else [_percent(c) for c in certified if c is not None],
        "broken": [p.broken for p in points],
        "images": len(e),
        "steps": e.settings["mode"] == "minimal",
    }


def _percent(part: float) -> float:
    return round(100 * part, 3)


def _shows_images(e: Evaluation) -> bool:
    """Whether there are images to show; histograms are not shown."""
    return "original" in e.exhibit and e.exhibit["original"].ndim == 4


def _cards(e: Evaluation, run: int, count: int) -> list[Plain]:
    """The gallery: broken images, smallest distance first, then those that survived or were
    misclassified. The template reads classes and radii from the evaluation."""
    if not _shows_images(e):
        return []
    examples = {int(i): k for k, i in enumerate(e.examples.get("index", torch.zeros(0)).tolist())}
    cards = []
    for k, i in enumerate(e.exhibit["index"].tolist()):
        if int(e.images["read_as"][i]) >= 0 and i not in examples:
            continue  # broken, and its example was not kept
        x, right = e.exhibit["original"][k], bool(e.images["label"][i] == e.images["predicted"][i])
        outcome = "wrong" if not right else "broken" if i in examples else "survived"
        card = {"run": run, "e": e, "index": i, "outcome": outcome, "original": image_uri(x)}
        card["order"] = list(OUTCOMES).index(outcome), float(e.images["distance"][i]), i
        if outcome == "broken":
            z = e.examples["adversarial"][examples[i]]
            card |= {"change": change_uri(z - x), "adversarial": image_uri(z)}
        cards.append(card)
    cards.sort(key=lambda card: card["order"])
    if len(cards) > count:
        cards = [cards[round(k * (len(cards) - 1) / max(1, count - 1))] for k in range(count)]
    return cards


def _explorer(e: Evaluation) -> Plain | None:
    """Images of the explorer at every radius, with the moves that lead to them."""
    if not _shows_images(e) or not e.explorer:
        return None
    shown, radii = e.explorer["index"].tolist(), e.explorer["radii"].tolist()
    where = torch.searchsorted(e.exhibit["index"], e.explorer["index"]).tolist()
    items = []
    for k, i in enumerate(shown):
        x = e.exhibit["original"][where[k]]
        label, most = int(e.images["label"][i]), (e.explorer["images"][k] - x).abs().max()
        states = []
        for z, read_as in zip(
            e.explorer["images"][k], e.explorer["read_as"][k].tolist(), strict=True
        ):
            moves = plan_moves(e.settings["ball"], x, z)
            states.append(
                {
                    "z": image_uri(z),
                    "change": change_uri(z - x, float(most)),
                    "read_as": e.class_name(read_as),
                    "wrong": read_as != label,
                    "arrows": [] if moves is None else moves.arrows,
                    "moved": None if moves is None else float(f"{moves.moved:.3g}"),
                    "farthest": None if moves is None else round(moves.farthest, 3),
                    "largest": float(f"{(z - x).abs().max():.3g}"),
                }
            )
        radius = float(e.images["radius"][i])
        items.append(
            {
                "source": e.source(i),
                "label": e.class_name(label),
                "x": image_uri(x),
                "radius": radius if math.isfinite(radius) else None,
                "states": states,
            }
        )
    height, width = (int(s) for s in e.exhibit["original"].shape[-2:])
    return {"radii": radii, "height": height, "width": width, "items": items}
