"""The leaderboard: every public model and ours under one protocol, as data (``results/leaderboard.json``).

A row is measured by :func:`wball.evaluate` (every example that counts is audited) and :func:`wball.certify` (for any
transport plan). Proof and attack check each other on the same images: a valid example inside a certified ball would be
a contradiction, and the row says how many there are.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from reproduction.measure import certified, evaluated, smoothed
from reproduction.workshop import Data, Settings, Subject, Workshop
from wball import provenance
from wball.ball import WassersteinBall
from wball.certificates.certificate import Method
from wball.certificates.trust import UnsupportedModule
from wball.evaluation import Evaluation
from wball.storage.files import locked, read_json, write_json
from wball.zoo import model_card
from wball.zoo.public import PublicModel

FORMAT = "wball-leaderboard/1"
BOARD = Path("results/leaderboard.json")
METHOD: Method = "anchored"
DEEPEST = 6
"""Convolutions and linear layers up to which certificates are tried: bounds of deeper networks take minutes."""
SAMPLES, SELECT, ALPHA = 10_000, 1_000, 0.05
"""Of Levine and Feizi's certificate, as their script has them."""


@dataclass(frozen=True)
class Protocol:
    """What every row of a data set is measured by: p = 1, 5 x 5 window, relative mass, the box [0, 1].

    Attributes:
        images: number of test images, the first ones.
        radii: of StandardAttack.
        certified: radii of the certificate.
        proofs: number of images to certify, the first ones.
        models: those of the board, most informative first.
    """

    images: int
    radii: tuple[float, ...]
    certified: tuple[float, ...]
    proofs: int
    models: tuple[str, ...]


PROTOCOLS = {
    "mnist": Protocol(
        10_000,
        (0.05, 0.1, 0.2, 0.3, 0.5),
        (0.01, 0.02, 0.05, 0.1),
        1_000,
        (
            "levine2020-mnist-flow-0.01",
            "wong2019-mnist-adversarial",
            "wu2020-mnist-adversarial",
            "hu2020-mnist-adversarial",
            "mnist-adversarial-cnn",
            "mnist-certified-far",
            "mnist-certified",
            "mnist-anchored",
            "wong2019-mnist-standard",
            "mnist-adversarial",
            "wong2019-mnist-linf",
            "wong2019-mnist-binarized",
            "levine2020-mnist-flow-0.005",
            "mnist-standard",
            "mnist-adversarial-paper",
            "mnist-linf-provable",
            "mnist-binarized",
        ),
    ),
    "cifar10": Protocol(
        1_000,
        (0.002, 0.005, 0.01, 0.02, 0.05),
        (0.0005, 0.001, 0.002, 0.005),
        100,
        ("cifar10-adversarial", "cifar10-certified", "cifar10-certified-deep", "cifar10-small"),
    ),
}
QUICK_IMAGES, QUICK_PROOFS, QUICK_SAMPLES = 20, 5, 200


def run(
    names: Sequence[str], settings: Settings, board: Path, *, shop: Workshop | None = None
) -> list[str]:
    """Measure rows and enter each into the board as soon as it is whole; the names of those that could not be made.

    An interrupted run resumes: rows that are there, on as many images of the same weights, are kept.
    """
    shop, failed = shop or Workshop(settings), []
    for name in names:
        dataset = _dataset(shop, name)
        try:
            subject = shop.subject(name)
            x, y = shop.test_images(dataset, PROTOCOLS[dataset].images, QUICK_IMAGES)
        except (ValueError, OSError) as error:  # no model, no network, half a file
            shop.say(f"{name} is left out: {error}")
            failed.append(name)
            continue
        if any(_same(row, subject, len(x), settings) for row in read(board)["rows"]):
            shop.say(f"{name} is on the board")
            continue
        shop.begin()
        enter(board, measured(shop, subject, dataset, x, y))
    return failed


def available(shop: Workshop, names: Iterable[str]) -> list[str]:
    """The models to run: names, cards (``.json``), or ``all`` of the protocols.

    A quick run of all models takes those that need no download.
    """
    if list(names) != ["all"]:
        return [submitted(shop, Path(n)) if n.endswith(".json") else n for n in names]
    every = [name for protocol in PROTOCOLS.values() for name in protocol.models]
    return [name for name in every if shop.has(name)] if shop.quick else every


def _same(row: Data, subject: Subject, images: int, settings: Settings) -> bool:
    return bool(
        row["name"] == subject.name
        and row["sha256"] == subject.sha256
        and row["images"] >= images
        and row["quick"] <= settings.quick
    )


def measured(shop: Workshop, subject: Subject, dataset: str, x: Tensor, y: Tensor) -> Data:
    """One row of the board."""
    protocol = PROTOCOLS[dataset]
    result, seconds = evaluated(shop, subject, x, y, protocol.radii)
    few = min(len(x), QUICK_PROOFS if shop.quick else protocol.proofs)
    row = {
        **_about(shop, subject, dataset),
        "images": len(x),
        "clean": result.clean_accuracy,
        "attack": {
            **dict(result.settings["attack"]),
            "accuracy": {f"{r:g}": result.accuracy_at(r) for r in protocol.radii},
            "audit": {
                k: v
                for k, v in result.audit_summary().items()
                if k not in ("tolerances", "contradictions")
            },
            "seconds": round(seconds, 1),
        },
        "certificate": _proofs(shop, subject, x[:few], y[:few], protocol, result),
        "smoothing": _smoothing(shop, subject, x[:few], y[:few], protocol),
    }
    row["flags"] = [f"{warning.code}: {warning.message}" for warning in result.warnings]
    if count := row["certificate"].get("contradictions", 0):
        row["flags"].append(f"{count} examples in certified balls")
    return {**row, "quick": shop.quick, "provenance": _origin(shop, subject.name, x)}


def _proofs(
    shop: Workshop, subject: Subject, x: Tensor, y: Tensor, protocol: Protocol, result: Evaluation
) -> Data:
    """Certified accuracy, and what neither proof nor attack decides, on the same images."""
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in subject.model.modules())
    if layers > DEEPEST:
        return {"skipped": f"not tried: {layers} layers"}
    try:
        radius, seconds = certified(shop, subject, x, y, METHOD, protocol.certified)
    except UnsupportedModule as error:
        return {"skipped": f"not supported: {error}"}
    broken = {r: result.broken_at(r)[: len(x)] for r in (*protocol.certified, *protocol.radii)}
    return {
        "method": METHOD,
        "plans": "any",
        "images": len(x),
        "accuracy": {f"{r:g}": float((radius >= r).double().mean()) for r in protocol.certified},
        "undecided": {
            f"{r:g}": float((~broken[r] & (radius < r)).double().mean())
            for r in protocol.certified
            if r in protocol.radii
        },
        "contradictions": int((result.images["distance"][: len(x)] * (1 + 1e-9) < radius).sum()),
        "seconds": round(seconds, 1),
    }


def _smoothing(
    shop: Workshop, subject: Subject, x: Tensor, y: Tensor, protocol: Protocol
) -> Data | None:
    """Levine and Feizi's certificate of a model that was trained for it: by their rule and by the tight one.

    Both from the same votes. Their radius for a class of probability at least ``p`` under Laplace noise of scale ``s``
    is ``s / 2 log(p / (1 - p))`` in Manhattan distance.
    """
    public = shop.public.get(subject.name)
    if public is None or public.noise is None:
        return None
    scale, samples = public.noise / math.sqrt(2), QUICK_SAMPLES if shop.quick else SAMPLES
    part, seconds = smoothed(shop, subject, x, y, scale, samples, min(samples, SELECT), ALPHA)
    p = part["probability"].clamp(0.5, 1 - 1e-12)
    theirs = scale / 2 * (p / (1 - p)).log() / math.sqrt(2)
    return {
        "images": len(x),
        "samples": samples,
        "alpha": ALPHA,
        "scale": scale,
        "authors": {f"{r:g}": float((theirs > r).double().mean()) for r in protocol.certified},
        "tight": {
            f"{r:g}": float((part["radius"] > r).double().mean()) for r in protocol.certified
        },
        "seconds": round(seconds, 1),
    }


def _dataset(shop: Workshop, name: str) -> str:
    for dataset, protocol in PROTOCOLS.items():
        if name in protocol.models:
            return dataset
    dataset = shop.public[name].dataset if name in shop.public else str(model_card(name)["dataset"])
    if dataset not in PROTOCOLS:
        raise ValueError(f"{name} is for {dataset}; the leaderboard has {', '.join(PROTOCOLS)}")
    return dataset


def _about(shop: Workshop, subject: Subject, dataset: str) -> Data:
    public = shop.public.get(subject.name)
    return {
        "name": subject.name,
        "dataset": dataset,
        "authors": "this library" if public is None else f"{public.authors} {public.year}",
        "paper": None if public is None else public.paper_url,
        "source": subject.origin if public is None else public.url,
        "architecture": subject.architecture,
        "weights": sum(p.numel() for p in subject.model.parameters()),
        "sha256": subject.sha256,
    }


def _origin(shop: Workshop, name: str, x: Tensor) -> Data:
    words = [
        *("python", "-m", "reproduction", "leaderboard"),
        name,
        "--data-dir",
        "DATA",
        *(["--quick"] if shop.quick else []),
    ]
    words += (
        ["--images", str(len(x))]
        if len(x) != PROTOCOLS[_dataset(shop, name)].images and not shop.quick
        else []
    )
    return {
        "command": shlex.join([*words, "--seed", str(shop.settings.seed)]),
        "commit": shop.commit,
        **(
            {"earlier_commits": earlier}
            if (earlier := sorted(shop.commits - {shop.commit}))
            else {}
        ),
        "device": provenance.device_name(shop.device),
        "kernel": WassersteinBall(0.1).kernel(x),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(shop.spent, 1),
    }


def submitted(shop: Workshop, card: Path) -> str:
    """Make a model known by its card, a JSON file with the fields of :class:`~wball.zoo.public.PublicModel`."""
    content = read_json(card)
    try:
        entry = PublicModel(**content)
    except TypeError as error:
        raise ValueError(
            f"{card} is not a card of a model: {error}".replace("PublicModel.__init__() ", "")
        ) from None
    shop.public[entry.name] = entry
    return entry.name


def read(board: Path) -> Data:
    """The board; an empty one if there is none yet."""
    if not board.is_file():
        return {"format": FORMAT, "rows": []}
    content = read_json(board)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{board} is not a leaderboard of this version: expected the format {FORMAT!r}"
        )
    return content


def filled(board: Path) -> Data:
    """The board, which must have rows."""
    content = read(board)
    if not content["rows"]:
        raise FileNotFoundError(
            f"no rows in {board}; run `python -m reproduction leaderboard NAME --data-dir DATA` first"
        )
    return content


def enter(board: Path, row: Data) -> None:
    """Put a row into the file, in place of an earlier one of the same model."""
    board.parent.mkdir(parents=True, exist_ok=True)
    with locked(board.parent / ".leaderboard", wait=True):
        content = read(board)
        rows = [r for r in content["rows"] if r["name"] != row["name"]]
        write_json(board, {**content, "rows": ranked([*rows, row])})


def ranked(rows: Iterable[Data]) -> list[Data]:
    """By data set, then by the mean of the robust accuracies over the protocol's radii."""

    def key(row: Data) -> tuple[int, float, str]:
        accuracies = row["attack"]["accuracy"].values()
        return (
            list(PROTOCOLS).index(row["dataset"]),
            -sum(accuracies) / len(accuracies),
            row["name"],
        )

    return sorted(rows, key=key)
