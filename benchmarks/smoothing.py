r"""``python -m benchmarks smoothing``: certificates of Levine and Feizi, from the best of their
networks.

Each of their public networks is smoothed by flow noise of each standard deviation in ``NOISES``.
Their radius for a class of probability at least ``p`` under Laplace noise of scale ``s`` is
``s / 2 log(p / (1 - p))`` in Manhattan distance; ``tight`` is this library's radius from the same
votes. A row has the share of digits that are classified correctly and certified beyond each radius.

First all pairs of network and noise get ``--screen`` votes on a few digits. For each number of
votes and each radius, the pairs that are best by these (digits whose misses are few enough for that
many votes) are then measured with fresh votes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

import wball
from benchmarks.frame import Result, Row, attempts, options
from reproduction.leaderboard import PROTOCOLS
from wball.certificates.smoothing import laplace_radius, lower_confidence

RADII = PROTOCOLS["mnist"].certified
NOISES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
SELECT, ALPHA = 1_000, 0.05
"""Votes that choose the class, and probability that a statement is wrong: those of their script."""


@dataclass(frozen=True)
class Setting:
    """Where digits and weights are."""

    data: Path | None
    models: Path | None
    device: str
    seed: int


def networks() -> list[str]:
    """Their public networks."""
    return [name for name, entry in wball.public_models().items() if entry.noise is not None]


def authors_radius(p: float, noise: float) -> float:
    """Their radius, in the unit of the ball.

    >>> round(authors_radius(lower_confidence(10_000, 10_000, ALPHA), 0.01), 4)
    0.0203
    """
    scale = noise / math.sqrt(2)
    return scale / 2 * math.log(p / (1 - p)) / math.sqrt(2) if 0.5 < p < 1 else 0.0


@cache
def allowed_misses(noise: float, votes: int, eps: float) -> int:
    """The largest number of votes against the class that still certifies ``eps`` (-1: none does).

    >>> allowed_misses(0.01, 10_000, 0.02), allowed_misses(0.01, 10_000, 0.03)
    (0, -1)
    """
    low, high = -1, votes // 2
    while low < high:
        middle = (low + high + 1) // 2
        p = lower_confidence(votes - middle, votes, ALPHA)
        low, high = (middle, high) if authors_radius(p, noise) > eps else (low, middle - 1)
    return low


def digits(setting: Setting, images: int) -> tuple[Tensor, Tensor]:
    x, y = wball.load_dataset("mnist", setting.data)
    return x[:images].to(setting.device), y[:images].to(setting.device)


def smoothed(
    setting: Setting, name: str, noise: float
) -> tuple[wball.FlowSmoothing, torch.Generator]:
    torch.set_num_threads(1)
    model = wball.load_model(name, root=setting.models).to(setting.device).eval()
    size = 10_000 if setting.device.startswith("cuda") else 500
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    return wball.FlowSmoothing(model, noise / math.sqrt(2), size), generator


def screened(setting: Setting, name: str, noise: float, votes: int, images: int) -> Row:
    """Votes against the label, per digit."""
    (x, y), (smooth, generator) = digits(setting, images), smoothed(setting, name, noise)
    right = smooth.votes(x, votes, generator).gather(1, y[:, None])[:, 0]
    return {"misses": (votes - right).tolist()}


def measured(setting: Setting, name: str, noise: float, votes: int, images: int) -> Row:
    """Shares of digits certified at each radius, by their radius and by the tight one."""
    (x, y), (smooth, generator) = digits(setting, images), smoothed(setting, name, noise)
    found = smooth.certify(x, votes, SELECT, ALPHA, generator, time_limit=1e6)
    good = (~found.abstained & (found.prediction == y)).tolist()
    bounds = [p for p, right in zip(found.probability.tolist(), good, strict=True) if right]
    rules = {
        "authors": [authors_radius(p, noise) for p in bounds],
        "tight": [laplace_radius(p, noise / math.sqrt(2)) for p in bounds],
    }
    return {
        rule: {f"{eps:g}": sum(r > eps for r in radii) / images for eps in RADII}
        for rule, radii in rules.items()
    }


def best(screen: Iterable[Row], votes: int, count: int) -> list[tuple[str, float]]:
    """The pairs that certify most digits at some radius, by the votes of a screening."""
    chosen = dict[tuple[str, float], None]()
    for eps in RADII:
        scores = list[tuple[float, str, float]]()
        for row in screen:
            allowed = allowed_misses(row["noise"], votes, eps)
            few = allowed * row["votes"] / votes
            share = sum(misses <= few for misses in row["misses"]) if allowed >= 0 else 0
            scores.append((share, row["model"], row["noise"]))
        ranked = sorted(scores, reverse=True)[:count]
        chosen.update({(name, noise): None for share, name, noise in ranked if share})
    return list(chosen)


def main(arguments: list[str] | None = None) -> None:
    parser = options("smoothing", __doc__)
    add = parser.add_argument
    add("--screen", type=int, nargs=2, default=[1000, 100], help="votes and digits to choose by")
    add("--full", type=int, nargs=3, action="append", help="votes, digits, pairs at each radius")
    add("--networks", nargs="+", default=networks(), help="networks to smooth")
    add("--processes", type=int, default=1, help="pairs at a time")
    given = parser.parse_args(arguments)
    result = Result("smoothing", given, screen=given.screen, alpha=ALPHA)
    setting = Setting(given.data, given.models, given.device, given.seed)

    def run(stage: str, pairs: Iterable[tuple[str, float]], votes: int, images: int) -> None:
        fixed = {"stage": stage, "votes": votes, "images": images}
        tasks = [
            (name, noise, votes, images)
            for name, noise in pairs
            if not result.has(model=name, noise=noise, **fixed)
        ]
        measure = partial(screened if stage == "screen" else measured, setting)
        for (name, noise, *_), found in attempts(measure, tasks, given.processes):
            if isinstance(found, str):
                raise SystemExit(f"{name}, noise {noise:g}: {found}")
            result.add({"model": name, "noise": noise, **fixed, **found})

    run("screen", [(name, noise) for name in given.networks for noise in NOISES], *given.screen)
    screen = [row for row in result.rows if row["stage"] == "screen"]
    for votes, images, count in given.full or [[10_000, 1_000, 2], [100_000, 300, 1]]:
        run("full", best(screen, votes, count), votes, images)
