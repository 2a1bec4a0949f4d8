"""``python -m benchmarks public``: public networks under the standard attack, and what its first version made of them.

Seven numbers by which versions of :class:`wball.StandardAttack` are compared: robust accuracies of others' networks on
the first test digits. A new version may not leave more than is stated below, takes at most twice the time of version 1,
and must call each result reliable: also those of all networks of the zoo, which hide nothing (``zoo``).

The file is written after every row, and each row says at which commit it was measured. Rows that the file has are not
measured again: if interrupted, rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import earlier, environment, keep
from benchmarks.pool import attempts
from wball.attacks.standard import Version
from wball.storage.weights import load_weights

CHECKS: tuple[tuple[str, float, float, float], ...] = (
    ("wong2019-mnist-standard", 0.1, 31.6, 31.0),
    ("wong2019-mnist-standard", 0.25, 0.1, 0.0),
    ("wong2019-mnist-adversarial", 0.05, 1.8, 1.5),
    ("wong2019-mnist-adversarial", 0.1, 0.5, 0.3),
    ("wong2019-mnist-linf", 0.5, 0.2, 0.0),
    ("wu2020-mnist-adversarial", 0.3, 60.2, 59.5),
    ("hu2020-mnist-adversarial", 0.5, 33.6, 33.0),
)
"""Network, radius, what version 1 left of the first 1,000 test digits in percent, and what is hoped for."""
VERSIONS: tuple[Version, ...] = ("standard-1", "standard")
RADII = {"mnist": (0.1, 0.3, 0.5), "cifar10": (0.002, 0.005, 0.02)}
"""At which networks of the zoo are attacked, by data set: where some images break, and where most do."""
KEPT = Path("models")
"""Networks that are too large for the package, in a checkout: a folder with weights and a card for each."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks public", description=__doc__)
    parser.add_argument(
        "--models", type=Path, help="folder with the weights (default: they are downloaded)"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument(
        "--only", type=int, nargs="*", choices=range(len(CHECKS)), default=list(range(len(CHECKS)))
    )
    parser.add_argument(
        "--zoo",
        type=int,
        default=200,
        metavar="N",
        help="bundled images for each network of the zoo",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="networks of the zoo at a time")
    parser.add_argument("--out", type=Path, default=Path("results") / "public_checks.json")
    given = parser.parse_args(arguments)
    x, y = (
        part[: given.images].to(given.device) for part in wball.load_dataset("mnist", given.data)
    )
    about = environment(given.device, given.data, given.out) | {"seed": 0}
    if given.models is not None:
        about["command"] = about["command"].replace(str(given.models), "MODELS")
    same = {"images": len(x), "unit": wball.WassersteinBall(1.0).unit, "zoo_images": given.zoo}
    before = earlier(given.out, **same)
    rows: list[dict[str, Any]] = before.get("rows", [])
    zoo: list[dict[str, Any]] = before.get("zoo", [])
    result = {"environment": about, **same, "rows": rows, "zoo": zoo}
    done = {(row["model"], row["eps"], row["version"]) for row in rows}
    checks = [
        CHECKS[k]
        for k in given.only
        if not all((*CHECKS[k][:2], version) in done for version in VERSIONS)
    ]
    if checks:
        net = wball.load_model(checks[0][0], root=given.models).to(given.device)
        for (
            version
        ) in VERSIONS:  # kernels of every member are compiled and loaded before the first is timed
            measure(net, x, y, checks[0][1], version)
    for name, eps, stated, goal in checks:
        net = wball.load_model(name, root=given.models).to(given.device)
        for version in VERSIONS:
            row = {"model": name, "eps": eps, "version": version, "stated": stated, "goal": goal}
            rows.append(row | measure(net, x, y, eps, version) | {"commit": about["commit"]})
            keep(given.out, result)
            print(rows[-1], flush=True)
    seen = {(row["model"], row["eps"]) for row in zoo}
    networks = _zoo().items() if given.zoo else ()
    tasks = [
        (name, eps)
        for name, card in networks
        for eps in RADII[card["dataset"]]
        if (name, eps) not in seen
    ]
    failed: list[str] = []
    attack = partial(_row, given.models, given.zoo, given.device)
    for (name, eps), found in attempts(attack, tasks, given.processes):
        if isinstance(found, str):
            failed.append(f"{name} at {eps:g}: {found}")
            print(failed[-1], flush=True)
            continue
        zoo.append({"model": name, "eps": eps} | found | {"commit": about["commit"]})
        keep(given.out, result)
        print(zoo[-1], flush=True)
    if failed:
        raise SystemExit(
            "\n".join([f"{len(failed)} of {len(tasks)} could not be measured", *failed])
        )


def _zoo() -> dict[str, dict[str, Any]]:
    """The card of every network: bundled, kept in a checkout, and public."""
    cards = {
        name: wball.model_card(name) for name in (*wball.list_models(), *wball.public_models())
    }
    return cards | {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(KEPT.glob("*/*.json"))
    }


def _row(models: Path | None, images: int, device: str, name: str, eps: float) -> dict[str, Any]:
    """One network of the zoo at one radius, on bundled images."""
    card, weights = _zoo()[name], KEPT / name / f"{name}.safetensors"
    if weights.exists():
        net = wball.build_model(card["architecture"]).eval()
        load_weights(net, weights)
    else:
        net = wball.load_model(name, root=models)
    x, y = (part[:images].to(device) for part in wball.load_sample(card["dataset"]))
    return measure(net.to(device), x, y, eps, "standard")


def measure(net: nn.Module, x: Tensor, y: Tensor, eps: float, version: Version) -> dict[str, Any]:
    """Robust accuracy in percent, whether it is reliable, and the time it took."""
    attack = wball.StandardAttack(
        wball.WassersteinBall(eps), version=version, check=False, progress=False
    )
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = attack(net, x, y)
    robust = 100 * found.robust_accuracy  # reads from the device
    return {
        "robust": round(robust, 4),
        "reliable": found.reliable,
        "findings": {finding.code: finding.images for finding in found.findings},
        "seconds": round(time.perf_counter() - begin, 2),
    }


if __name__ == "__main__":
    main()
