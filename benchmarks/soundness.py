"""``python -m benchmarks soundness``: attack certified balls, and look for an image that a certificate denies.

For every model and image the largest certified radius is searched for, and the full ``standard`` ensemble attacks
exactly there. Wrong would be an example inside (*contradiction*), or a point of the ball whose margin is below the
certified bound (*below the bound*), which is the sharper test: it can fail while the label stands. Then the same images
are attacked at a multiple of the radius, to see that the attack is awake. The networks are those of the zoo, given
weights, and small random ones of every supported kind of layer; the images are MNIST's. The result is written after
every row, and a run that was interrupted resumes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.origin import environment, keep
from wball.attacks import StandardAttack
from wball.ball import WassersteinBall
from wball.certificates import certified_radius, certify
from wball.certificates.effort import Method
from wball.data import load_dataset, load_sample
from wball.models import build_model
from wball.storage.weights import load_weights
from wball.zoo import list_models, load_model

LEFT_OUT = ("mnist-binarized", "mnist-adversarial")
"""A step function has no linear relaxation, and a ResNet-18 takes minutes an image."""
FIRST = {"standard": 0.005, "adversarial": 0.01, "certified": 0.05}
"""First guesses of the radius, by what a model's name ends in."""
METHODS: tuple[Method, ...] = ("crown", "anchored")
KINDS = 4
"""Kinds of random networks."""
BEYOND = 4.0
"""Multiple of the certified radius at which the attack must get through somewhere."""
ROUNDING = 1e-4
"""Margins in float32 may be off by so much, relative to the largest logit."""


class Residual(nn.Module):
    """A random network with a residual sum, batch normalisation and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.left, self.right = (
            nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=2),
            nn.Conv2d(6, 6, 2, stride=2),
        )
        self.pool, self.head = nn.AvgPool2d(2, padding=1), nn.Linear(6 * 16, 10)
        with torch.no_grad():
            self.norm.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem(x)))
        h = F.leaky_relu(self.left(h) + self.right(h), 0.1)
        return self.head(self.pool(h).flatten(1))


def random_network(seed: int) -> nn.Module:
    """A small network for 14 x 14 images; every fourth one is alike."""
    torch.manual_seed(seed)
    kinds = (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(196, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10),
        ),
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, dilation=2), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(72, 10),
        ),
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(4, 8, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(200, 10),
        ),
        Residual,
    )  # fmt: skip
    return kinds[seed % KINDS]().eval()


def cases(
    given: argparse.Namespace,
) -> Iterator[tuple[str, nn.Module, Tensor, Tensor, Method, int]]:
    """Name, network, images, the labels it gives them, method, and rounds of the search for the radius."""
    if given.data is None:
        x, y = load_sample("mnist")
    else:
        x, y = load_dataset("mnist", given.data, "test")
    x, y = x.to(given.device), y.to(given.device)
    small = F.avg_pool2d(x, 2)
    named = [
        (n, load_model(n, device=given.device))
        for n in list_models()
        if n.startswith("mnist") and n not in LEFT_OUT
    ]
    for path in given.weights:
        named.append(
            (Path(path).stem, load_weights(build_model("mnist-cnn"), path).eval().to(given.device))
        )
    for turn in range(
        max(-(-given.random // KINDS), -(-given.images // given.block))
    ):  # some of everything first
        for seed in range(turn * KINDS, min(given.random, (turn + 1) * KINDS)):
            net = random_network(seed).to(given.device)
            some = small[seed * given.small : (seed + 1) * given.small]
            for method in METHODS:
                yield f"random {seed}", net, some, said(net, some), method, 6
        start = turn * given.block
        for method in METHODS:
            count = min(given.block, given.images - start) // (
                1 if method == "crown" else given.anchored
            )
            part = slice(start, start + max(0, count))
            for name, net in named if count > 0 else ():
                yield (
                    f"{name}, images from {start}",
                    net,
                    x[part],
                    y[part],
                    method,
                    6 if method == "crown" else 4,
                )


@torch.no_grad()
def said(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)


@torch.no_grad()
def margins(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The margin of each image and its largest logit, in float64."""
    logits = model(x).double()
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return logits.gather(1, y[:, None])[:, 0] - others, logits.abs().amax(1)


def check(
    model: nn.Module, x: Tensor, y: Tensor, method: Method, rounds: int, guess: float
) -> dict[str, Any]:
    """Certify as far as possible, attack there, and compare."""
    begun = time.perf_counter()
    radius = certified_radius(model, x, y, WassersteinBall(guess), method, rounds=rounds)
    held = (radius > 0).nonzero()[:, 0]
    x, y, radius = x[held], y[held], radius[held]
    out = {"images": len(radius), "contradictions": 0, "below_the_bound": 0}
    if len(radius) == 0:
        return out
    ball = WassersteinBall(radius)
    bound = certify(model, x, y, ball, method).margin
    certified = time.perf_counter()
    found = StandardAttack(ball, check=False, progress=False)(model, x, y)
    attained, size = margins(model, found.images, y)
    clean = margins(model, x, y)[0]
    beyond = StandardAttack(
        WassersteinBall(BEYOND * radius), version="fast", check=False, progress=False
    )(model, x, y)
    return out | {
        "contradictions": int((found.success | (attained <= 0)).sum()),
        "below_the_bound": int((attained < bound - ROUNDING * size).sum()),
        "radius": {"median": float(radius.median()), "largest": float(radius.max())},
        "bound_reached": float(((clean - attained) / (clean - bound)).clamp(0, 1).median()),
        "fell_beyond": float(beyond.success.double().mean()),
        "certify_s": round(certified - begun, 1),
        "attack_s": round(time.perf_counter() - certified, 1),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = {"models": len({row["model"].split(", images")[0] for row in rows})}
    return kinds | {
        key: sum(row[key] for row in rows)
        for key in ("images", "contradictions", "below_the_bound")
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks soundness", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with MNIST (default: the bundled sample)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--weights", nargs="*", default=[], help="more weights of the paper's MNIST network"
    )
    parser.add_argument("--images", type=int, default=100, help="images per trained model")
    parser.add_argument(
        "--anchored", type=int, default=2, help="one image in so many is certified anchored, too"
    )
    parser.add_argument("--random", type=int, default=24, help="random networks")
    parser.add_argument("--small", type=int, default=25, help="images per random network")
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no row after so long"
    )
    parser.add_argument("--out", type=Path, default=Path("results") / "soundness.json")
    given = parser.parse_args(arguments)
    about = environment(given.device, given.data, given.out, *map(Path, given.weights))
    about |= {"attack": "StandardAttack, standard, at the largest certified radius"}
    rows: list[dict[str, Any]] = (
        json.loads(given.out.read_text())["rows"] if given.out.is_file() else []
    )
    begun = time.perf_counter()
    for name, model, x, y, method, rounds in cases(given):
        if any(row["model"] == name and row["method"] == method for row in rows):
            continue
        if time.perf_counter() - begun > given.seconds:
            break
        guess = next((v for k, v in FIRST.items() if k in name), 0.01)
        rows.append({"model": name, "method": method, **check(model, x, y, method, rounds, guess)})
        keep(given.out, {"environment": about, "summary": summary(rows), "rows": rows})
        print(rows[-1], flush=True)
    total = summary(rows)
    print(total)
    if total["contradictions"] or total["below_the_bound"]:
        raise SystemExit("a certificate is wrong")


if __name__ == "__main__":
    main()
