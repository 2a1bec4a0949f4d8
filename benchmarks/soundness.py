"""``python -m benchmarks soundness``: attack certified balls, and look for a wrong certificate.

For every model and image the largest certified radius is searched for, and the ``standard`` attack
runs exactly there. Wrong would be an example inside (*contradiction*), or a point of the ball whose
margin is below the certified bound (*below the bound*), which is the sharper test. Then the same
images are attacked at a multiple of the radius, to see that the attack works. The networks are
those of the zoo, and small random ones of every supported kind of layer; the images are MNIST's.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.frame import Result, Row, options
from wball.attacks import StandardAttack
from wball.ball import WassersteinBall
from wball.certificates import certified_radius, certify
from wball.certificates.certificate import Method
from wball.data import load_dataset, load_sample
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
"""Rounding error of margins in float32, relative to the largest logit."""


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


def cases(given: Namespace) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Name, network, images and labels: random networks, then the zoo."""
    x, y = load_dataset("mnist", given.data, "test") if given.data else load_sample("mnist")
    x, y = x.to(given.device), y.to(given.device)
    small = F.avg_pool2d(x, 2)
    for seed in range(given.random):
        net = random_network(seed).to(given.device)
        some = small[torch.arange(given.small) + seed * given.small % len(x)]
        yield f"random {seed}", net, some, said(net, some)
    for name in list_models():
        if given.images and name.startswith("mnist") and name not in LEFT_OUT:
            net = load_model(name, device=given.device)
            yield name, net, x[: given.images], y[: given.images]


@torch.no_grad()
def said(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).argmax(1)


@torch.no_grad()
def margins(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The margin of each image and its largest logit, in float64."""
    logits = model(x).double()
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return logits.gather(1, y[:, None])[:, 0] - others, logits.abs().amax(1)


def check(model: nn.Module, x: Tensor, y: Tensor, method: Method, guess: float) -> Row:
    """Certify as far as possible, attack there, and compare."""
    begun = time.perf_counter()
    radius = certified_radius(model, x, y, WassersteinBall(guess), method, rounds=5)
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


def main(arguments: list[str] | None = None) -> None:
    parser = options("soundness", __doc__)
    parser.add_argument("--images", type=int, default=100, help="images per trained model")
    parser.add_argument("--random", type=int, default=24, help="random networks")
    parser.add_argument("--small", type=int, default=25, help="images per random network")
    given = parser.parse_args(arguments)
    result = Result("soundness", given, images=given.images, small=given.small)
    for name, model, x, y in cases(given):
        for method in METHODS:
            if not result.has(model=name, method=method):
                guess = next((v for k, v in FIRST.items() if k in name), 0.01)
                found = check(model, x, y, method, guess)
                result.add({"model": name, "method": method, **found})
    wrong = ("contradictions", "below_the_bound")
    total = {key: sum(row[key] for row in result.rows) for key in ("images", *wrong)}
    print(total)
    if any(total[key] for key in wrong):
        raise SystemExit("a certificate is wrong")
