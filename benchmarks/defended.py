"""``python -m benchmarks defended``: clean and robust accuracy of trained networks, chunk by chunk, into one file.

Networks are ``NAME=ARCHITECTURE:FILE``. Recipes are compared with ``--attack dual`` on images that are not reported
(``--first 1000``), the chosen one is measured with ``--attack standard`` on those that are (``--first 0``).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import earlier, environment, keep
from wball.attacks import Attack, StandardAttack
from wball.models import architectures, build_model
from wball.provenance import describe_model


def attack(kind: str, eps: float) -> Attack:
    """``dual``: 100 steps of dual averaging on the margin. Others: the standard attack of that version."""
    ball = wball.WassersteinBall(eps)
    if kind == "dual":
        return wball.DualAveraging(ball, steps=100, objective="margin", progress=False)
    return StandardAttack(ball, version=kind, progress=False)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Network:
    """``NAME=ARCHITECTURE:FILE``.

    >>> Network.of("mine=mnist-cnn:out/mine.safetensors").architecture
    'mnist-cnn'
    """

    name: str
    architecture: str
    file: Path

    @staticmethod
    def of(spec: str) -> Network:
        name, _, rest = spec.partition("=")
        architecture, _, file = rest.partition(":")
        if not file:
            raise SystemExit(f"a network is NAME=ARCHITECTURE:FILE, got {spec!r}")
        return Network(name, architecture, Path(file))

    def load(self, device: str) -> nn.Module:
        return wball.load_weights(build_model(self.architecture), self.file).to(device).eval()


@torch.no_grad()
def right(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([model(part).argmax(1) for part in x.split(500)]) == y


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks defended", description=__doc__)
    parser.add_argument("networks", nargs="+", metavar="NAME=ARCHITECTURE:FILE")
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST or CIFAR-10")
    parser.add_argument("--eps", type=float, nargs="+", required=True, help="mass fraction x px")
    parser.add_argument("--attack", choices=("dual", "fast", "standard"), default="standard")
    parser.add_argument("--first", type=int, default=0, help="test image to begin with")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument(
        "--chunk", type=int, default=250, help="images attacked before the file is written"
    )
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="seconds after which no chunk begins"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--note", help="a remark to record, such as what else the machine was doing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results") / "defended.json",
        help="goes on where it stopped",
    )
    given = parser.parse_args(arguments)
    networks, began = [Network.of(spec) for spec in given.networks], time.monotonic()
    (dataset,) = {
        "mnist" if architectures()[n.architecture].shape[0] == 1 else "cifar10" for n in networks
    }
    radii = sorted(given.eps)
    settings = {
        "dataset": dataset, "attack": given.attack, "eps": radii, "first": given.first, "images": given.images
    }  # fmt: skip
    rows: list[dict[str, Any]] = earlier(given.out, **settings).get("rows", [])
    files = (given.out, *(network.file for network in networks))
    about = (
        environment(given.device, given.data, *files)
        | {"seed": 0}
        | ({"note": given.note} if given.note else {})
    )
    content = {
        "environment": about,
        **settings,
        "unit": wball.WassersteinBall(1.0).unit,
        "rows": rows,
    }
    chosen = slice(given.first, given.first + given.images)
    x, y = (
        part[chosen].to(given.device) for part in wball.load_dataset(dataset, given.data, "test")
    )
    for network in networks:
        model = network.load(given.device)
        fingerprint = describe_model(model)["sha256"]
        key = {"network": network.name, "architecture": network.architecture, "sha256": fingerprint}
        row, known = next((r for r in rows if key.items() <= r.items()), None), right(model, x, y)
        if row is None:
            row = {
                **key,
                "attacked": 0,
                "survived": {f"{eps:g}": 0 for eps in radii},
                "seconds": 0.0,
            }
            rows.append(row)
        while row["attacked"] < len(x) and time.monotonic() - began < given.time_limit:
            first, begin = row["attacked"], time.perf_counter()
            part = torch.arange(first, min(first + given.chunk, len(x)), device=x.device)
            row["attacked"] += len(part)
            for eps in radii:  # what falls at a radius falls at all larger ones
                draws = torch.Generator(x.device).manual_seed(first)
                if len(part):
                    part = part[
                        ~attack(given.attack, eps)(model, x[part], y[part], generator=draws).success
                    ]
                row["survived"][f"{eps:g}"] += len(part)
            row["seconds"] = round(row["seconds"] + time.perf_counter() - begin, 2)
            row["clean"] = int(known[: row["attacked"]].sum()) / row["attacked"]
            row["robust"] = {eps: count / row["attacked"] for eps, count in row["survived"].items()}
            keep(given.out, content)
        print(row, flush=True)


if __name__ == "__main__":
    main()
