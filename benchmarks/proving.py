"""``python -m benchmarks proving``: what certificates of one image cost, and what the refinement adds.

Digits by ``mnist-certified``, with plain CROWN and as ``certify`` does it by itself; a few digits by the trained ResNet
``mnist-adversarial``, by complete verification; and one colour image by the small ResNet with random weights, at radii
from hopeless to certain: there a proof takes longest just before it succeeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.inputs import scenes
from benchmarks.origin import environment, keep
from benchmarks.timing import processor_time

DIGITS = (0.01, 0.02, 0.03, 0.05)
RESIDUAL = (1e-3, 3e-3)
COLOUR = (1e-3, 1e-4, 1e-5)


def cases(
    count: int,
) -> Iterator[tuple[str, nn.Module, Tensor, Tensor, tuple[float, ...], dict[str, Any]]]:
    """Title, model, images, labels, radii, and what is asked of ``certify``."""
    model = wball.load_model("mnist-certified")
    x, y = (part[:count] for part in wball.load_sample("mnist"))
    yield "`mnist-certified`, plain CROWN", model, x, y, DIGITS, {"method": "crown"}
    yield "`mnist-certified`, `certify` as it is", model, x, y, DIGITS, {}
    case = "`mnist-adversarial`, a ResNet of four blocks, `complete`"
    yield (
        case,
        wball.load_model("mnist-adversarial"),
        x[:3],
        y[:3],
        RESIDUAL,
        {"method": "complete"},
    )
    torch.manual_seed(0)
    model = wball.build_model("cifar10-resnet-small").eval()
    x = scenes(1, 32)
    with torch.no_grad():
        y = model(x).argmax(1)
    yield (
        "`cifar10-resnet-small`, random weights, plain CROWN",
        model,
        x,
        y,
        COLOUR,
        {"method": "crown"},
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks proving", description=__doc__)
    parser.add_argument("--images", type=int, default=60, help="of the bundled digits")
    parser.add_argument("--out", type=Path, default=Path("results") / "proving.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about = environment("cpu", None, given.out) | {"seed": 0}
    rows: list[dict[str, Any]] = []
    for case, model, x, y, radii, asked in cases(given.images):
        wball.certify(model, x[:1], y[:1], wball.WassersteinBall(radii[0]), **asked)  # compiles
        for eps in radii:
            prove = partial(wball.certify, model, x, y, wball.WassersteinBall(eps), **asked)
            took, found = processor_time(prove)
            share, each = float(found.certified.double().mean()), took / len(x)
            rows.append(
                {
                    "case": case,
                    "images": len(x),
                    "eps": eps,
                    "certified": share,
                    "seconds_per_image": each,
                }
            )
            keep(given.out, {"environment": about, "rows": rows})
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
