"""The leaderboard: every public model and ours under one protocol, as data
(``results/leaderboard.json``).

A row is measured by :func:`wball.evaluate` (every example that counts is audited) and
:func:`wball.certify` (for any transport plan). It names the version and the members of the attack,
and keeps the outcome of each image. Proof and attack check each other on the same images: an
example at a radius that is certified would be a contradiction, and the row says how many there are.
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

from reproduction.measure import certified, evaluated, predicted
from reproduction.workshop import Data, Settings, Subject, Workshop
from wball import provenance
from wball.attacks import StandardAttack
from wball.ball import WassersteinBall
from wball.certificates.certificate import Method
from wball.certificates.program import UnsupportedModule
from wball.storage.files import locked, read_json, write_json
from wball.zoo import model_card
from wball.zoo.public import PublicModel

FORMAT = "wball-leaderboard/1"
BOARD = Path("results/leaderboard.json")
METHOD: Method = "anchored"
DEEPEST = 6
"""Convolutions and linear layers up to which certificates are tried: bounds of deeper networks take
minutes."""


@dataclass(frozen=True)
class Protocol:
    """What every row of a data set is measured by: p = 1, 5 x 5 window, relative mass, the box [0,
    1].

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
        2_000,
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
            "wong2019-mnist-standard",
            "mnist-adversarial",
            "wong2019-mnist-linf",
            "wong2019-mnist-binarized",
            "levine2020-mnist-flow-0.005",
            "mnist-standard",
            "mnist-adversarial-paper",
            "mnist-linf-provable",
            "mnist-binarized",
            "levine2020-mnist-flow-0.02",
            "levine2020-mnist-laplace-0.005",
        ),
    ),
    "cifar10": Protocol(
        1_000,
        (0.002, 0.005, 0.01, 0.02, 0.05),
        (0.0005, 0.001, 0.002, 0.005),
        1_000,
        ("cifar10-adversarial", "cifar10-certified", "cifar10-certified-deep", "cifar10-small"),
    ),
}
QUICK_IMAGES, QUICK_PROOFS = 20, 5
PARTS = ("attack", "certificate")
"""What a row is made of, in the order in which it is measured."""
WRONG = "-"
"""Marks a misclassified image in a row's outcomes."""


def run(
    names: Sequence[str],
    settings: Settings,
    board: Path,
    *,
    shop: Workshop | None = None,
    parts: Sequence[str] = PARTS,
    minutes: float = math.inf,
) -> list[str]:
    """Measure rows, and return the names of models that could not be loaded.

    All rows are attacked before any is certified. A part is written as soon as it is measured. It
    is kept if it was measured with the same weights, on as many images, and by the same version and
    members of the attack, so that a run that was interrupted or ran out of ``minutes`` resumes.
    """
    shop, failed = shop or Workshop(settings), []
    end = time.monotonic() + 60 * minutes
    for part in parts:
        for name in (name for name in names if name not in failed):
            dataset = _dataset(shop, name)
            try:
                subject = shop.subject(name)
                x, y = shop.test_images(dataset, PROTOCOLS[dataset].images, QUICK_IMAGES)
            except (ValueError, OSError) as error:  # no model, no network, half a file
                shop.say(f"{name} is left out: {error}")
                failed.append(name)
                continue
            row = stored(board, subject, shop.quick)
            if is_current(shop, row, part, len(x)):
                shop.say(f"{name}: {part} is on the board")
            elif time.monotonic() > end:
                shop.say(f"{name}: {part} is left for the next run")
            else:
                shop.begin()
                enter(board, measured(shop, subject, x, y, part, row))
    return failed


def available(shop: Workshop, names: Iterable[str]) -> list[str]:
    """The models to run: names, cards (``.json``), or ``all`` of the protocols.

    A quick run of all models takes those that need no download.
    """
    if list(names) != ["all"]:
        return [submitted(shop, Path(n)) if n.endswith(".json") else n for n in names]
    every = [name for protocol in PROTOCOLS.values() for name in protocol.models]
    return [name for name in every if shop.has(name)] if shop.quick else every


def stored(board: Path, subject: Subject, quick: bool) -> Data | None:
    """The row of these weights. A quick row does not serve a full run."""
    for row in read(board)["rows"]:
        if row["name"] == subject.name and row["sha256"] == subject.sha256:
            return row if row["quick"] <= quick else None
    return None


def is_current(shop: Workshop, row: Data | None, part: str, images: int) -> bool:
    """Whether a row has this part as the protocol asks for it."""
    if row is None or part not in row:
        return False
    if part == "attack":
        ball = WassersteinBall(1.0)
        now = StandardAttack(ball, version="fast" if shop.quick else "standard").describe()
        same = all(row[part].get(k) == now[k] for k in ("version_number", "members"))
        return same and row["images"] >= images
    known = row[part]
    if "skipped" in known:
        return True
    wanted = PROTOCOLS[row["dataset"]].certified
    complete = all(f"{value:g}" in known["accuracy"] for value in wanted)
    return complete and known["images"] >= _proved(shop, row["dataset"], images)


def measured(
    shop: Workshop, subject: Subject, x: Tensor, y: Tensor, part: str, row: Data | None = None
) -> Data:
    """A row with one part measured now, and the other parts as they were."""
    dataset = _dataset(shop, subject.name)
    protocol, few = PROTOCOLS[dataset], _proved(shop, dataset, len(x))
    if row is None or part == "attack":
        kept = {name: row[name] for name in PARTS if row is not None and name in row}
        row = {**_about(shop, subject, dataset), **kept, **_attacked(shop, subject, x, y)}
    if part == "certificate":
        row["certificate"] = _proofs(shop, subject, x[:few], y[:few], protocol)
    proofs = row.get("certificate", {})
    row["flags"] = list(row["attack"].get("warnings", ()))
    if "outcomes" in proofs and "outcomes" in row:
        count = contradictions(row["outcomes"], proofs["outcomes"], protocol)
        proofs["contradictions"] = count
        if count:
            row["flags"].append(f"{count} examples in certified balls")
    return {**row, "quick": shop.quick, "provenance": _origin(shop, subject.name, x)}


def _proved(shop: Workshop, dataset: str, images: int) -> int:
    """Number of images to certify."""
    return min(images, QUICK_PROOFS if shop.quick else PROTOCOLS[dataset].proofs)


def _attacked(shop: Workshop, subject: Subject, x: Tensor, y: Tensor) -> Data:
    """The attack, and the ``outcomes``: per image the number of radii at which it is still
    right."""
    radii = PROTOCOLS[_dataset(shop, subject.name)].radii
    result, seconds = evaluated(shop, subject, x, y, radii)
    left = torch.stack([~result.broken_at(r) for r in (0.0, *radii)]).sum(0).tolist()
    audit = result.audit_summary()
    return {
        "images": len(x),
        "clean": result.clean_accuracy,
        "attack": {
            **dict(result.settings["attack"]),
            "accuracy": {f"{r:g}": result.accuracy_at(r) for r in radii},
            "audit": {k: audit[k] for k in audit if k not in ("tolerances", "contradictions")},
            "warnings": [f"{warning.code}: {warning.message}" for warning in result.warnings],
            "seconds": round(seconds, 1),
            "commit": shop.commit,
        },
        "outcomes": "".join(WRONG if count == 0 else str(count - 1) for count in left),
    }


def _proofs(shop: Workshop, subject: Subject, x: Tensor, y: Tensor, protocol: Protocol) -> Data:
    """Certified accuracy; ``outcomes`` has the number of certified radii per image."""
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in subject.model.modules())
    if layers > DEEPEST:
        return {"skipped": f"not tried: {layers} layers"}
    try:
        radius, seconds = certified(shop, subject, x, y, METHOD, protocol.certified)
    except UnsupportedModule as error:
        return {"skipped": f"not supported: {error}"}
    holds = torch.stack([radius >= r for r in protocol.certified])
    shares = holds.double().mean(1).tolist()
    return {
        "method": METHOD,
        "plans": "any",
        "images": len(x),
        "clean": float((predicted(subject.model, x) == y).double().mean()),
        "accuracy": {f"{r:g}": share for r, share in zip(protocol.certified, shares, strict=True)},
        "outcomes": "".join(map(str, holds.sum(0).tolist())),
        "seconds": round(seconds, 1),
        "commit": shop.commit,
    }


def contradictions(attacked: str, proved: str, protocol: Protocol) -> int:
    """Number of images with an example at a radius up to which they are certified."""
    broken_at, certified_at = (*protocol.radii, math.inf), (0.0, *protocol.certified)
    return sum(
        outcome != WRONG and broken_at[int(outcome)] <= certified_at[int(count)]
        for outcome, count in zip(attacked, proved, strict=False)
    )


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
    words = ["python", "-m", "reproduction", "leaderboard", name, "--data-dir", "DATA"]
    words += ["--quick"] if shop.quick else ["--images", str(len(x))]
    return {
        "command": shlex.join([*words, "--seed", str(shop.settings.seed)]),
        "commit": shop.commit,
        "device": provenance.device_name(shop.device),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(shop.spent, 1),
    }


def submitted(shop: Workshop, card: Path) -> str:
    """Make a model known by its card, a JSON file with the fields of
    :class:`~wball.zoo.public.PublicModel`."""
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
        return list(PROTOCOLS).index(row["dataset"]), -sum(shared(row)[1:]), row["name"]

    return sorted(rows, key=key)


def shared(row: Data) -> list[float]:
    """Clean accuracy, then robust accuracy by radius, on the images that all rows of a data set
    have: the first ones of a test set may be harder than the rest."""
    protocol = PROTOCOLS[row["dataset"]]
    outcomes = row["outcomes"][: protocol.images]
    clean = [outcome != WRONG for outcome in outcomes]
    held = [
        [outcome != WRONG and int(outcome) > place for outcome in outcomes]
        for place in range(len(protocol.radii))
    ]
    return [sum(one) / len(outcomes) for one in (clean, *held)]
