"""The claims of the paper beside the stored results, with one rule for what counts as the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reproduction import published, timings
from reproduction.measure import accuracy_at
from reproduction.tables import Table, percent
from reproduction.trained import SOURCES
from reproduction.workshop import Data

RULE = """\
**Same** means: accuracies differ by at most one point, or by at most two binomial standard errors of the number here.
Anything else is *different*. Statements without a number *hold* or do not. Accuracies are under the
paper's attack, on models trained here, unless stated otherwise."""

Results = Mapping[str, Data]
NEEDED = {
    "nominal-accuracies",
    "timings",
    "mnist-digits",
    "mnist-curves",
    "cifar10-curves",
    "cifar10-tricks",
    "cifar10-epochs",
    "authors-weights",
    "windows",
    "lambda-p",
    "certificates",
}
"""Recipes whose results the claims are compared with."""


@dataclass(frozen=True)
class Found:
    """An accuracy on some images."""

    share: float
    images: int

    def same(self, other: float) -> bool:
        """Whether the paper's number is the same by the rule.

        >>> Found(0.766, 1000).same(0.76), Found(0.777, 10_000).same(0.75)
        (True, False)
        """
        error = math.sqrt(self.share * (1 - self.share) / self.images)
        return abs(self.share - other) <= max(0.01, 2 * error) + 1e-12


@dataclass(frozen=True)
class Claim:
    """A claim with a number, what was found, and why they differ."""

    text: str
    paper: float
    found: Callable[[Results], Found]
    why: str = ""

    def row(self, results: Results) -> list[str | None]:
        found = self.found(results)
        verdict = "same" if found.same(self.paper) else "different"
        here = percent(found.share, 2 if self.text.startswith("Table 1") else 1)
        return [self.text, f"{100 * self.paper:.4g} %", here, verdict, self.why or None]


def _entry(results: Results, recipe: str, name: str) -> Any:
    data = results[recipe]["data"]
    return next(m for m in data.get("models", data.get("rows")) if m["name"] == name)


def _curve(recipe: str, name: str, key: str, eps: float) -> Callable[[Results], Found]:
    def found(results: Results) -> Found:
        made = _entry(results, recipe, name)[key]
        return Found(accuracy_at(made, eps), made["images"])

    return found


def _nominal(name: str) -> Callable[[Results], Found]:
    def found(results: Results) -> Found:
        row = _entry(results, "nominal-accuracies", name)
        return Found(row["accuracy"], row["images"])

    return found


def _window(model: str) -> Callable[[Results], Found]:
    def found(results: Results) -> Found:
        row = next(
            r for r in results["windows"]["data"]["rows"] if (r["label"], r["window"]) == (model, 3)
        )
        made = row["paper_attack"]
        return Found(made["curve"][-1]["accuracy"], made["images"])

    return found


WHY = {
    ("mnist-adversarial-paper", None): "Trained here.",
    ("cifar10-adversarial-paper", None): "The network of `cifar10-epochs`.",
    (
        "mnist-standard",
        1.0,
    ): "The radius grows in steps of 10 %: read at 0.94. The authors' weights are below.",
    (
        "cifar10-standard",
        0.1,
    ): "Our network has label smoothing, cutout and averaged weights; without them: next rows.",
    (
        "cifar10-linf-provable",
        0.1,
    ): "Another provably robust network: their weights are not available.",
}


def _claims() -> list[Claim]:
    """In the order of the paper."""
    made = []
    for kind, models in (("MNIST", published.MNIST), ("CIFAR-10", published.CIFAR10)):
        for m in models:
            why = WHY.get((m.name, None), "")
            made.append(Claim(f"Table 1: {kind}, {m.label}", m.accuracy, _nominal(m.name), why))
    for name, said in published.MNIST_CURVES.items():
        for eps, share in said.items():
            found = _curve("mnist-curves", name, "paper_attack", eps)
            text = f"Figure 4: `{name}`, eps {eps:g}"
            made.append(Claim(text, share, found, WHY.get((name, eps), "")))
    for name in ("cifar10-standard", "cifar10-linf-provable"):
        for eps, share in published.CIFAR10_CURVES[name].items():
            found = _curve("cifar10-curves", name, "paper_attack", eps)
            text = f"Figure 5: `{name}`, eps {eps:g}"
            made.append(Claim(text, share, found, WHY.get((name, eps), "")))
            if (name, eps) == ("cifar10-standard", 0.1):
                for source, cost in SOURCES.items():
                    plain = _curve("cifar10-tricks", "cifar10-standard-plain", source, eps)
                    made.append(Claim(f"the same without them, {source} ({cost})", share, plain))
    for source, cost in SOURCES.items():
        full = _curve("cifar10-epochs", "cifar10-adversarial-paper", source, 0.1)
        text = f"Figure 5: `cifar10-adversarial-paper`, eps 0.1, {source} ({cost})"
        made.append(Claim(text, 0.76, full, "15 epochs from random weights."))
    made += [
        Claim("Figure 7: 3 × 3 plans, standard, eps 1.83", 0.028, _window("standard")),
        Claim(
            "Figure 7: 3 × 3 plans, l-inf robust, eps 1.83",
            0.41,
            _window("l-inf robust"),
            "Another network, trained here by CROWN-IBP. Larger windows leave 2 to 3 % with p = 1, as in the paper.",
        ),
    ]
    for claim in published.AUTHORS:
        for source, cost in SOURCES.items():
            text = f"README of the code: `{claim.model}`, eps 1, {source} ({cost})"
            before = claim.model == "wong2019-mnist-binarized"  # they threshold before the attack
            made.append(
                Claim(
                    text,
                    claim.accuracy,
                    _curve("authors-weights", claim.model + "-before" * before, source, claim.eps),
                )
            )
    return made


def tables(results: Results) -> list[Table]:
    """Claims with a number, and others."""
    numbers = [claim.row(results) for claim in _claims()]
    head = ["claim of the paper", "paper", "here", "", "why"]
    return [Table(head, numbers), Table(["statement", "", "here"], _statements(results))]


def _statements(results: Results) -> list[list[str | None]]:
    """Statements without a number, by whether they hold here."""

    def left(name: str) -> float:
        return _curve("mnist-curves", name, "paper_attack", 0.5)(results).share

    standard, binary, linf = map(left, ("mnist-standard", "mnist-binarized", "mnist-linf-provable"))
    counts = results["timings"]["data"]["operations"]
    algorithm = next(iter(counts.values()))
    colour = next(r for r in results["timings"]["data"]["rows"] if r["dataset"] == "cifar10")
    each, (low, high) = colour["seconds"] / colour["iterations"], published.ITERATIONS
    proofs = {row["method"]: row for row in results["certificates"]["data"]["sets"][0]["rows"]}
    interval, anchored = (percent(accuracy_at(proofs[m], 0.01)) for m in ("interval", "anchored"))
    blurred = [
        sum(r is not None for r in cell["radius"])
        for cell in results["lambda-p"]["data"]["cells"]
        if cell["lambda"] <= 10
    ]
    digits = len(results["lambda-p"]["data"]["cells"][0]["radius"])
    radii = {
        r["label"]: r["paper_attack"]["radius"] for r in results["mnist-digits"]["data"]["rows"]
    }
    ours = _curve("mnist-curves", "mnist-linf-provable", "standard_attack", 0.5)(results).share
    rows = [
        (
            "Algorithm 2: 8 O(n²) operations an iteration",
            sum(algorithm.values()) == published.OPERATIONS,
            f"counted while the code runs: {timings.told(algorithm)}",
        ),
        (
            f"Section 3: {1e3 * published.SECONDS_PER_ITERATION:g} ms an iteration (100 CIFAR-10 images, Titan X)",
            each <= published.SECONDS_PER_ITERATION,
            f"{1e3 * each:.1f} ms on {results['timings']['provenance']['device']}; {colour['median_iterations']} "
            f"iterations (median) to tol {results['timings']['data']['tol']:g}, in the paper {low} to {high}",
        ),
        (
            "Figure 3: binarization makes a digit easier, the other defences harder to attack",
            radii["binarized"]
            < radii["standard"]
            < min(radii["l-inf robust"], radii["adv. training"]),
            f"another digit; standard {radii['standard']:.2f}, binarized {radii['binarized']:.2f}, l-inf robust "
            f"{radii['l-inf robust']:.2f}, adv. training {radii['adv. training']:.2f}",
        ),
        (
            'Figure 4: binarization is "only marginally better"',
            binary - standard < 0.1,
            f"{percent(binary)} against {percent(standard)} at 0.5. The threshold is inside our "
            "network, and the gradient passes straight through it; the authors threshold first",
        ),
        (
            'Figure 4: l-inf training is "substantially more robust"',
            linf - standard > 0.1,
            f"{percent(linf)} against {percent(standard)} at 0.5; under our attack with p = 1, {percent(ours)}",
        ),
        (
            "Figure 8: no example for lambda 1 and 10",
            max(blurred) == 0,
            f"{min(blurred)} to {max(blurred)} of {digits} blurred digits are misclassified, at radii of 0.7 and more",
        ),
        (
            "Section 5.3: intervals certify nothing",
            interval == "0.0 %",
            f"{interval} at 0.01 by intervals; {anchored} by bounds over the ball itself",
        ),
    ]
    return [[text, "holds" if holds else "does not hold", here] for text, holds, here in rows]
