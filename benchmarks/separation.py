r"""``python -m benchmarks separation --data DIR``: how far apart are digits of different classes?

For a test image ``x``, let ``d`` be its Wasserstein distance to the nearest training image of another class, both
scaled to mass 1. The point half way lies in the ball of radius ``d / 2`` around either of them. A classifier that does
not mind brightness is wrong on one of the two there: where ``d <= 2 eps`` we call ``x`` *contested* at ``eps``. If a
fair half of such disputes is lost, robust accuracy at ``eps`` is at most ``1 - contested / 2``, whatever the training.

``d`` is exact optimal transport with Euclidean costs, minimised over the candidates whose blurred images are nearest.
So it is an upper bound of the true ``d``, and the share of contested images a lower bound.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import ot
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.origin import environment, keep
from wball.data import load_dataset

BLUR = 2.0
"""Pixels."""
RADII = (0.1, 0.3, 0.4, 0.5, 0.6, 0.75)
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


def blurred(x: Tensor) -> Tensor:
    """Images of mass 1 after a Gaussian blur, flat."""
    reach = int(3 * BLUR)
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / BLUR) ** 2)
    kernel = kernel / kernel.sum()
    x = F.conv2d(x / x.sum((1, 2, 3), keepdim=True), kernel.view(1, 1, -1, 1), padding=(reach, 0))
    return F.conv2d(x, kernel.view(1, 1, 1, -1), padding=(0, reach)).flatten(1)


def transport(a: Tensor, b: Tensor) -> float:
    """The Wasserstein distance in pixels of two images ``(H, W)`` scaled to mass 1."""
    places, masses = zip(
        *((np.argwhere(z > 0), z[z > 0].astype(np.float64)) for z in (a.numpy(), b.numpy())),
        strict=True,
    )
    weights = [m / m.sum() for m in masses]
    return float(ot.emd2(*weights, np.linalg.norm(places[0][:, None] - places[1][None], axis=-1)))


def nearest_rivals(x: Tensor, y: Tensor, others: Tensor, labels: Tensor, candidates: int) -> Tensor:
    """For each image the smallest distance found to one of ``others`` with another label."""
    features = torch.cat([blurred(part) for part in others.split(5000)])
    near = torch.cdist(blurred(x), features).masked_fill_(y[:, None] == labels[None], torch.inf)
    found = near.topk(candidates, largest=False).indices
    pairs = zip(x, found.tolist(), strict=True)
    return torch.tensor(
        [min(transport(a[0], others[j, 0]) for j in these) for a, these in pairs],
        dtype=torch.float64,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks separation", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--images", type=int, default=1000, help="test images")
    parser.add_argument(
        "--candidates",
        type=int,
        default=10,
        help="training images compared exactly with each of them",
    )
    parser.add_argument("--out", type=Path, default=Path("results") / "separation.json")
    given = parser.parse_args(arguments)
    (others, labels), (x, y) = (
        load_dataset("mnist", given.data, split) for split in ("train", "test")
    )
    x, y = x[: given.images], y[: given.images]
    distance = nearest_rivals(x, y, others, labels, given.candidates)
    contested = {f"{eps:g}": float((distance <= 2 * eps).double().mean()) for eps in RADII}
    result = {
        "environment": environment("cpu", given.data, given.out),
        "images": len(x),
        "candidates": given.candidates,
        "unit": "px (images of mass 1)",
        "distance": {f"{share:g}": float(distance.quantile(share)) for share in SHARES},
        "contested": contested,
        "ceiling": {eps: 1 - share / 2 for eps, share in contested.items()},
    }
    keep(given.out, result)
    print(json.dumps({key: result[key] for key in ("distance", "contested", "ceiling")}))


if __name__ == "__main__":
    main()
