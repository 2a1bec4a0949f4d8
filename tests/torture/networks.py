"""Certificates of random networks, attacked at their own radius.

Every case is a random network of supported layers with unusual arguments, a random ball, dtype and
method. Its images are certified at the largest radius that the method allows; an attack tries that
radius, and the independent checker proves the certificate again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import wball
from certificates.exact import gap
from wball.certificates import UnsupportedModule, verify

from .checks import Findings

IMAGES, ROUNDS = 3, 4
CLEAR = 5e-3
"""Margins above this share of the largest logit must be proved again."""
METHODS = ("interval", "dual", "crown", "crown", "anchored", "alpha-crown", "complete")
EFFORT: dict[str, Any] = {"alpha-crown": {"steps": 3}, "complete": {"time_limit": 1.0}}


class Step(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x)
        return out


class Gate(nn.Module):
    """Channels times a gate that looks at all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.map = nn.Linear(channels, channels)

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(self.map(h.mean((2, 3))))[:, :, None, None]


class Attention(nn.Module):
    """Attention between the places of a map, as a residual branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 1, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(2).transpose(1, 2)
        found = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        return found.transpose(1, 2).reshape(h.shape)


GENERAL = 0.3
"""Share of the layers that are products, quotients, norms and functions of one number."""


def general(draw: random.Random, shape: tuple[int, int, int]) -> list[nn.Module]:
    """Random layers of the kinds that are relaxed by curves and products."""
    channels, height, width = shape
    names = "ELU CELU SELU Softplus Mish Hardswish Hardsigmoid Softsign LogSigmoid Tanhshrink"
    curve = getattr(nn, draw.choice(names.split()))()
    weights = nn.init.uniform_(nn.PReLU(channels).weight, -0.5, 1.5)
    power = draw.choice((2, 3, -2))
    return [
        curve,
        curve,
        nn.GELU("tanh"),
        Gate(channels),
        Attention(channels) if height * width <= 9 else nn.Identity(),
        nn.LayerNorm([channels, height, width]),
        nn.GroupNorm(draw.choice([g for g in (1, 2) if channels % g == 0]), channels),
        nn.InstanceNorm2d(channels, affine=draw.random() < 0.5) if height * width > 1 else nn.Identity(),
        nn.GLU(1) if channels % 2 == 0 else nn.Identity(),
        nn.Softmax(draw.choice((1, 2, 3))),
        nn.AdaptiveMaxPool2d(draw.choice((1, 2))),
        nn.LocalResponseNorm(2),
        Step(lambda h: F.prelu(h, weights.to(h))),
        Step(lambda h: torch.where(h > 0.2, h, 0.5 * h + 0.1)),
        Step(lambda h: h.amax(2, keepdim=True) - h.amin(3, keepdim=True)),
        Step(lambda h: torch.maximum(h, h.flip(3))),
        Step(lambda h: torch.minimum(h, 0.3 * h.flip(2) + 0.1)),
        Step(lambda h: h * h.flip(2)),
        Step(lambda h: h / (1.0 + h.square().mean((1, 2, 3), keepdim=True))),
        Step(lambda h: F.normalize(h.flatten(1), dim=1).view_as(h)),
        Step(lambda h: (h.abs() + 0.5) ** power),
        Step(lambda h: torch.sin(2 * h) + torch.cos(h)),
        Step(lambda h: torch.log1p(torch.exp(h))),
        Step(lambda h: h.matmul(h.transpose(2, 3))),
    ]  # fmt: skip


class Branches(nn.Module):
    """Two ways from the same value, joined by a sum, a difference or side by side."""

    def __init__(self, left: nn.Module, right: nn.Module, how: str) -> None:
        super().__init__()
        self.left, self.right, self.how = left, right, how

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        return torch.cat([a, b], 1) if self.how == "cat" else a + b if self.how == "sum" else a - b


def layers(draw: random.Random, shape: tuple[int, int, int]) -> nn.Module:
    """A random layer for maps of a shape."""
    channels, height, width = shape
    small = min(height, width)
    kernel = draw.randint(1, min(3, small))
    out = draw.choice((1, 2, 4))
    groups = draw.choice([g for g in (1, 2) if channels % g == 0 and out % g == 0])
    mode = draw.choice(
        ("zeros", "zeros", "reflect" if small > 2 else "zeros", "replicate", "circular")
    )
    norm = nn.BatchNorm2d(channels, affine=draw.random() < 0.7)
    nn.init.normal_(norm.running_mean, std=0.3)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.2, 3.0)  # type: ignore[arg-type]
    constant = torch.randn(channels, 1, 1)
    pool = {
        "kernel_size": min(2, small),
        "stride": draw.choice((1, 2)),
        "ceil_mode": draw.random() < 0.5,
    }
    pad = draw.choice((0, 1)) if small >= 2 else 0
    curves = (nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.SiLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 1.5))
    curve = draw.choice((*curves, nn.Hardtanh(0.0, 0.7)))
    matrix = torch.randn(height, height) / height
    lines = torch.randn(2, channels * height, 1) / height
    convolution = nn.Conv2d(
        channels, out, kernel, stride=draw.choice((1, 1, 2)), padding=draw.randint(0, kernel - 1),
        dilation=1 if kernel * 2 > small else draw.choice((1, 2)), groups=groups, bias=draw.random() < 0.8,
        padding_mode=mode,
    )  # fmt: skip
    choices: list[nn.Module] = [
        convolution,
        convolution,
        nn.utils.parametrizations.weight_norm(nn.Conv2d(channels, out, 1)),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(channels, out, 1)),
        prune.l1_unstructured(nn.Conv2d(channels, out, 1), "weight", 0.3),
        curve,
        curve,
        nn.ConvTranspose2d(channels, out, kernel, stride=draw.choice((1, 2))),
        nn.ReLU(inplace=draw.random() < 0.5),
        nn.ReLU(),
        nn.LeakyReLU(draw.choice((0.0, 0.1, 1.0))),
        norm,
        nn.MaxPool2d(padding=pad if pool["kernel_size"] == 2 else 0, **pool),
        nn.AvgPool2d(
            padding=pad if pool["kernel_size"] == 2 else 0, count_include_pad=draw.random() < 0.5,
            divisor_override=draw.choice((None, None, 1, 3)), **pool,
        ),
        nn.AdaptiveAvgPool2d(draw.choice((1, 2))),
        nn.Upsample(scale_factor=2, mode=draw.choice(("nearest", "bilinear", "bicubic", "area", "nearest-exact")))
        if small <= 4
        else nn.Identity(),
        nn.PixelUnshuffle(2) if height % 2 == width % 2 == 0 else nn.Identity(),
        nn.PixelShuffle(2) if channels % 4 == 0 else nn.ChannelShuffle(2 if channels % 2 == 0 else 1),
        Step(lambda h: matrix.to(h) @ h),
        Step(lambda h: F.conv1d(h.flatten(1, 2), lines.to(h)).unsqueeze(2)),
        Step(lambda h: h.clamp(min=-0.2).clip(max=0.9)),
        Step(lambda h: h.roll(1, 3).movedim(2, 3).swapaxes(2, 3)),
        Step(lambda h: torch.stack([h, 1 - h], 2).flatten(1, 2)),
        Step(lambda h: h + h.sum(1, keepdim=True) * 0.1),
        Step(lambda h: -h / 3.0),
        nn.Dropout(0.5),
        Step(lambda h: F.pad(h, (1, 0, 0, 1), value=0.3)),
        Step(lambda h: (h - 0.3) / constant.to(h).abs().clamp(min=0.3)),
        Step(lambda h: 0.5 - 2 * h),
        Step(lambda h: torch.add(h, constant.to(h), alpha=-2)),
        Step(lambda h: h - h.mean((2, 3), keepdim=True)),
        Step(lambda h: h.mul(1.5).add_(constant.to(h)).relu_()),
        Step(lambda h: h.permute(0, 1, 3, 2).flip(2)),
        Step(lambda h: h[:, :, : max(1, height - 1)]),
    ]  # fmt: skip
    chosen = draw.choice(general(draw, shape) if draw.random() < GENERAL else choices)
    if draw.random() < 0.2:
        same = nn.Conv2d(channels, channels, 3, padding=1)
        return Branches(same, nn.Identity(), draw.choice(("sum", "difference", "cat")))
    return chosen


def network(draw: random.Random, shape: tuple[int, int, int]) -> nn.Sequential:
    """A random network for images of a shape, with three classes."""
    parts: list[nn.Module] = []
    h = torch.zeros(1, *shape)
    for _ in range(draw.randint(1, 5)):
        layer = layers(draw, (h.shape[1], h.shape[2], h.shape[3])).eval()
        try:
            after = layer(h.clone())
        except RuntimeError:
            continue
        if not 0 < after[0].numel() <= 256:
            continue
        parts.append(layer)
        h = after
    parts.append(nn.Flatten())
    width = h[0].numel()
    for _ in range(draw.randint(0, 2)):
        parts += [
            nn.Linear(width, 6),
            draw.choice((nn.ReLU(), nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.GELU())),
        ]
        width = 6
    parts.append(nn.Linear(width, 3))
    if draw.random() < 0.15:
        mask = torch.tensor([0.0, 0.0, -1e6])
        parts.append(Step(lambda logits: logits + mask.to(logits)))
    return nn.Sequential(*parts).eval()


class Growing(nn.Module):
    """A model whose answer depends on how often it was asked."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.rest, self.calls = rest, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.rest(x)
        return out + self.calls


TRAPS = {
    "branch": lambda h: -h if bool((h > 0.9).any()) else h,
    "jump": lambda h: h + torch.sign(h - 0.3),
    "place": lambda h: h + h.flatten(1).argmax(1)[:, None, None, None],
    "batch": lambda h: h - h.mean(0, keepdim=True),
    "chance": lambda h: h + torch.rand_like(h),
}
"""Steps that no bound follows: a network with one of them must be refused, like one with state."""


def a_ball(draw: random.Random) -> wball.WassersteinBall | wball.LinfBall:
    box = draw.choice(((0.0, 1.0), (0.0, 1.0), (0.0, 2.0), None))
    if draw.random() < 0.35:
        return wball.LinfBall(0.02, box=box)
    cost = wball.GridCost(draw.choice((3, 5)), p=draw.choice((1.0, 1.0, 2.0)))
    return wball.WassersteinBall(0.02, cost, box=box, mass=draw.choice(("relative", "absolute")))


def trapped(draw: random.Random, net: nn.Sequential) -> tuple[str, nn.Module]:
    """A network with one of the traps, or with state."""
    name = draw.choice([*TRAPS, "state"])
    if name == "state":
        return name, Growing(net).eval()
    net.insert(draw.randrange(len(net)), Step(TRAPS[name]))
    return name, net


def without_window(ball: Any, plans: str, side: int) -> Any:
    """The ball of the plans that a certificate is about."""
    if plans == "window" or isinstance(ball, wball.LinfBall):
        return ball
    cost = wball.GridCost(2 * side - 1, p=ball.cost.p)
    return wball.WassersteinBall(ball.eps, cost, box=ball.box, mass=ball.mass)


def certify_and_attack(seed: int, found: Findings, traps: bool = False, checked: int = 8) -> int:
    """Number of certificates of a random network. Each is attacked, and the first ``checked`` of
    them are proved again.

    With ``traps``, a third of the networks must be refused.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    side, channels = draw.choice((2, 3, 3, 4)), draw.choice((1, 1, 2))
    dtype = draw.choice((torch.float32, torch.float32, torch.float64))
    net: Any = network(draw, (channels, side, side)).to(dtype)
    ball, trap = a_ball(draw), None
    if traps and draw.random() < 1 / 3:
        trap, net = trapped(draw, net)
    x = torch.rand(IMAGES, channels, side, side) * (torch.rand(IMAGES, 1, side, side) < 0.8)
    x = x.to(draw.choice((torch.float16, torch.bfloat16)) if draw.random() < 0.15 else dtype)
    method, plans = draw.choice(METHODS), draw.choice(("full", "full", "window"))
    y = net(x.to(dtype)).argmax(1)
    search = method if method != "complete" else "crown"  # a search over radii would take minutes
    settings = EFFORT.get(search, {})
    try:
        radius = wball.certified_radius(net, x, y, ball, search, plans, rounds=ROUNDS, **settings)
    except UnsupportedModule:
        return 0
    found.expect(trap is None, "silent", f"seed {seed}: {trap}")
    held = radius > 0
    radius = radius * (1.1 if method == "complete" else 1.0)
    x, y, at = x[held], y[held], ball.at(radius[held])
    proof = wball.certify(net, x, y, at, method, plans, **EFFORT.get(method, {}))
    wide = without_window(at, plans, side)
    attack = wball.PGD if isinstance(at, wball.LinfBall) else wball.DualAveraging
    points = [wide.support(x, sign * torch.randn(x.shape).to(x)).point for sign in (1.0, -1.0)]
    try:
        points.append(attack(wide, steps=10, objective="margin")(net, x, y).images)
    except RuntimeError as error:  # the network's own work in place leaves it without gradients
        found.expect("inplace" in str(error), "raised", f"seed {seed}: {error}")
    for z in points:
        logits = net(z.to(dtype)).detach().double()
        size = 64 * max(torch.finfo(dtype).eps, torch.finfo(z.dtype).eps) * logits.abs().amax(1)
        wrong = proof.certified & (gap(logits, y) < proof.margin.clamp(min=0) - size)
        found.expect(not wrong.any(), "unsound", f"seed {seed}: {gap(logits, y).tolist()}")
    # The checker has bounds of its own, which may be lower than a margin that is hardly positive.
    clear = proof.margin > CLEAR * net(x.to(dtype)).detach().double().abs().amax(1)
    some = replace(
        proof, certified=clear & proof.certified & (proof.certified.cumsum(0) <= checked)
    )
    again = verify(net, x, y, at, some)
    found.expect(not again.disagreements, "unconfirmed", f"seed {seed}: {again.margin}")
    return int(proof.certified.sum())


def one(seed: int) -> tuple[int, list[str]]:
    """Certificates and findings of one network."""
    torch.set_num_threads(1)
    found = Findings()
    try:
        return certify_and_attack(seed, found, traps=True, checked=1), found
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return 0, [*found, f"raised: seed {seed}: {type(error).__name__}: {error}"]


def main() -> None:
    """``PYTHONPATH=tests python -m torture.networks --networks 10000 --processes 16``."""
    parser = argparse.ArgumentParser(prog="python -m torture.networks")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time")
    parser.add_argument("--networks", type=int, default=10**6, help="number of networks")
    parser.add_argument("--processes", type=int, default=1, help="number of processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network")
    given = parser.parse_args()
    start = time.monotonic()
    seeds = range(given.seed, given.seed + given.networks)
    networks, certificates, findings = 0, 0, list[str]()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for count, lines in pool.imap_unordered(one, seeds, 4):
            seconds = time.monotonic() - start
            if seconds > 60 * given.minutes:
                break
            networks, certificates = networks + 1, certificates + count
            findings += lines
            so_far = {"networks": networks, "certificates": certificates, "findings": findings}
            print(json.dumps({**so_far, "seconds": round(seconds)}), flush=True)
        pool.terminate()


if __name__ == "__main__":
    main()
