"""``python -m benchmarks public``: public networks under the standard attack, and what its first version made of them.

Seven numbers by which versions of :class:`wball.StandardAttack` are compared: robust accuracies of others' networks on
the first test digits. A new version may not leave more than is stated below, takes at most twice the time of version 1,
and must call each result reliable: also those of the bundled networks, which hide nothing (``zoo``).
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import environment, keep
from wball.attacks.standard import Version

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
RADII = (0.05, 0.1, 0.3, 0.5)
"""At which bundled networks are attacked."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks public", description=__doc__)
    parser.add_argument("--models", type=Path, help="folder with the weights (default: they are downloaded)")
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--only", type=int, nargs="*", choices=range(len(CHECKS)), default=list(range(len(CHECKS))))
    parser.add_argument("--zoo", type=int, default=100, metavar="N", help="bundled images for each bundled network")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / "public_checks.json")
    given = parser.parse_args(arguments)
    x, y = (part[: given.images].to(given.device) for part in wball.load_dataset("mnist", given.data))
    rows: list[dict[str, Any]] = []
    about = environment(given.device, given.data, given.out) | {"seed": 0}
    if given.models is not None:
        about["command"] = about["command"].replace(str(given.models), "MODELS")
    unit = wball.WassersteinBall(1.0).unit
    zoo: list[dict[str, Any]] = []
    result = {"environment": about, "images": len(x), "unit": unit, "rows": rows, "zoo_images": given.zoo, "zoo": zoo}
    net = wball.load_model(CHECKS[0][0], root=given.models).to(given.device)
    for version in VERSIONS:  # kernels are compiled before the first of them is timed
        measure(net, x, y, 0.5, version)
    for name, eps, stated, goal in (CHECKS[k] for k in given.only):
        net = wball.load_model(name, root=given.models).to(given.device)
        for version in VERSIONS:
            row = {"model": name, "eps": eps, "version": version, "stated": stated, "goal": goal}
            rows.append(row | measure(net, x, y, eps, version))
            keep(given.out, result)
            print(rows[-1], flush=True)
    for name in wball.list_models() if given.zoo else ():
        net = wball.load_model(name).to(given.device)
        x, y = (part[: given.zoo].to(given.device) for part in wball.load_sample(wball.model_card(name)["dataset"]))
        for eps in RADII:
            zoo.append({"model": name, "eps": eps} | measure(net, x, y, eps, "standard"))
            keep(given.out, result)
            print(zoo[-1], flush=True)


def measure(net: nn.Module, x: Tensor, y: Tensor, eps: float, version: Version) -> dict[str, Any]:
    """Robust accuracy in percent, whether it is reliable, and the time it took."""
    attack = wball.StandardAttack(wball.WassersteinBall(eps), version=version, check=False, progress=False)
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
