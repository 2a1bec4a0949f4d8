"""Certificates of random networks, attacked at their own radius: ``python -m tests.torture.networks``.

Every case is a random network over the supported layers with unusual arguments, a random ball, dtype and method. Its
images are certified as far as that goes, the certificate is attacked exactly there, and the independent checker proves
it again. Wrong would be an example inside (*broken*), or a point of the ball whose margin is below the certified one
(*below*); what the checker does not confirm is counted. A case depends on its seed alone. The summary
is written to ``results/torture_networks.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import wball
from wball import provenance
from wball.certificates import VerificationStatus, verify

from .blocks import write_json

ROOT = Path(__file__).parent.parent.parent
IMAGES = 8
KEPT = 100  # findings that are written out
METHODS = ("interval", "dual", "crown", "crown", "anchored", "alpha-crown", "complete")
COUNTS = (
    "networks", "certificates", "points tried", "broken", "below", "confirmed", "unconfirmed", "unfollowed",
    "refused", "failed", "tricks refused", "tricks accepted",
)  # fmt: skip
EFFORT = {"alpha-crown": {"steps": 5}, "complete": {"time_limit": 2.0}}


TRICKS = ("caught", "script", "array", "count")


@torch.jit.script
def _scripted(h: Tensor) -> int:
    h.add_(50 * torch.relu(h - 1.0))
    return 0


class Hostile(nn.Module):
    """A network that computes something else unseen, or will: every such model must be refused."""

    def __init__(self, net: nn.Module, trick: str) -> None:
        super().__init__()
        self.net, self.trick, self.array, self.count = net, trick, np.zeros(1), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        h, calls = x * 1.0, 0.0
        if self.trick == "script":
            _scripted(h)
        elif self.trick == "array":
            self.array += 1
            calls = self.array[0]
        elif self.trick == "count":
            calls = next(self.count)
        out: Tensor = self.net(h)
        if self.trick == "caught":
            try:
                calls = 1000.0 if bool(h.amax() > 0.9) else 0.0
            except Exception:  # noqa: BLE001 - that is the trick
                calls = 0.0
        return -out if calls > 60 else out


class Step(nn.Module):
    """A function as a module, with a name for the report."""

    def __init__(self, name: str, function: Any) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x)
        return out

    def extra_repr(self) -> str:
        return self.name


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
    curve = draw.choice(
        (
            nn.Sigmoid,
            nn.Tanh,
            nn.GELU,
            nn.SiLU,
            nn.ReLU6,
            lambda: nn.Hardtanh(-0.5, 1.5),
            lambda: nn.Hardtanh(0.0, 0.7),
        )
    )
    matrix, lines = (
        torch.randn(height, height) / height,
        torch.randn(2, channels * height, 1) / height,
    )
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
        curve(),
        curve(),
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
        Step("left", lambda h: matrix.to(h) @ h),
        Step("lines", lambda h: F.conv1d(h.flatten(1, 2), lines.to(h)).unsqueeze(2)),
        Step("clamp", lambda h: h.clamp(min=-0.2).clip(max=0.9)),
        Step("roll", lambda h: h.roll(1, 3).movedim(2, 3).swapaxes(2, 3)),
        Step("stack", lambda h: torch.stack([h, 1 - h], 2).flatten(1, 2)),
        Step("sum", lambda h: h + h.sum(1, keepdim=True) * 0.1),
        Step("divide", lambda h: -h / 3.0),
        nn.Dropout(0.5),
        Step("pad", lambda h: F.pad(h, (1, 0, 0, 1), value=0.3)),
        Step("shift", lambda h: (h - 0.3) / constant.to(h).abs().clamp(min=0.3)),
        Step("from", lambda h: 0.5 - 2 * h),
        Step("plus", lambda h: torch.add(h, constant.to(h), alpha=-2)),
        Step("mean", lambda h: h - h.mean((2, 3), keepdim=True)),
        Step("in place", lambda h: h.mul(1.5).add_(constant.to(h)).relu_()),
        Step("turn", lambda h: h.permute(0, 1, 3, 2).flip(2)),
        Step("slice", lambda h: h[:, :, : max(1, height - 1)]),
    ]  # fmt: skip
    chosen = draw.choice(choices)
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
        parts.append(Step("mask", lambda logits: logits + mask.to(logits)))
    return nn.Sequential(*parts).eval()


def a_ball(draw: random.Random) -> wball.WassersteinBall | wball.LinfBall:
    box = draw.choice(((0.0, 1.0), (0.0, 1.0), (0.0, 2.0), None))
    if draw.random() < 0.35:
        return wball.LinfBall(0.02, box=box)
    cost = wball.GridCost(draw.choice((3, 5)), p=draw.choice((1.0, 1.0, 2.0)))
    return wball.WassersteinBall(0.02, cost, box=box, mass=draw.choice(("relative", "absolute")))


@dataclass
class Counts:
    """What the cases came to."""

    numbers: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """One random network."""
        draw = random.Random(seed)
        torch.manual_seed(seed)
        side, channels = draw.choice((2, 3, 4, 5)), draw.choice((1, 1, 2))
        dtype = draw.choice((torch.float32, torch.float32, torch.float64))
        net, ball = network(draw, (channels, side, side)).to(dtype), a_ball(draw)
        x = (
            torch.rand(IMAGES, channels, side, side)
            * torch.bernoulli(torch.full((IMAGES, 1, side, side), 0.8))
        ).to(dtype)
        if draw.random() < 0.15:
            x = x.to(draw.choice((torch.float16, torch.bfloat16)))
        if draw.random() < 1 / 3:
            self._refuse(seed, Hostile(net, draw.choice(TRICKS)).eval(), x, ball)
        method, plans = draw.choice(METHODS), draw.choice(("full", "full", "window"))
        y = net(x.to(dtype)).argmax(1)
        self.numbers["networks"] += 1
        effort: Any = EFFORT.get(method, {})
        try:
            # What is decided at a radius is decided in seconds or not at all: the others search the radius.
            search = method if method != "complete" else "crown"
            radius = wball.certified_radius(
                net, x, y, ball, search, plans, rounds=6, **EFFORT.get(search, {})
            )
        except wball.certificates.UnsupportedModule as refusal:  # type: ignore[attr-defined]
            self.numbers["refused"] += 1
            self.note(seed, "refused", str(refusal))
            return
        radius = radius * (1.1 if method == "complete" else 1.0)
        held = radius > 0
        if not bool(held.any()):
            return
        x, y, at = x[held], y[held], ball.at(radius[held])
        proof = wball.certify(net, x, y, at, method, plans, **effort)
        self.numbers["certificates"] += int(proof.certified.sum())
        self.numbers[f"certificates, {type(ball).__name__}"] += int(proof.certified.sum())
        self.numbers[f"certificates, {dtype}".replace("torch.", "")] += int(proof.certified.sum())
        self.numbers[f"certificates, {method}"] += int(proof.certified.sum())
        self._attack(seed, net, x, y, at, proof)
        found = verify(net, x, y, at, proof)
        for status in found.status:
            if status is not VerificationStatus.NOTHING:
                self.numbers[status.name.lower()] += 1
        if found.disagreements:
            margins = [
                (float(a), float(b))
                for a, b in zip(found.margin, proof.margin, strict=True)
                if a <= 0
            ]
            self.note(
                seed, "unconfirmed", f"{method}: margins of the checker and of the proof {margins}"
            )
        if found.reason:
            self.note(seed, "unfollowed", found.reason)

    def _refuse(self, seed: int, net: Hostile, x: Tensor, ball: Any) -> None:
        try:
            wball.certify(net, x, torch.zeros(len(x), dtype=torch.long), ball, "interval")
        except wball.certificates.UnsupportedModule:  # type: ignore[attr-defined]
            self.numbers["tricks refused"] += 1
        else:
            self.numbers["tricks accepted"] += 1
            self.note(seed, "tricks accepted", net.trick)

    def _attack(
        self,
        seed: int,
        net: nn.Module,
        x: Tensor,
        y: Tensor,
        at: Any,
        proof: wball.CertificateResult,
    ) -> None:
        kind = wball.PGD if isinstance(at, wball.LinfBall) else wball.DualAveraging
        points: list[Tensor] = []
        try:
            points.append(kind(at, steps=10, objective="margin")(net, x, y).images)
        except RuntimeError:  # a network whose own work in place leaves it without gradients
            self.numbers["without gradients"] += 1
        points += [at.support(x, sign * torch.randn(x.shape).to(x)).point for sign in (1.0, -1.0)]
        own = next(net.parameters()).dtype
        for z in points:
            logits = net(z.to(own)).detach().double()
            margin = logits.gather(1, y[:, None])[:, 0] - logits.scatter(
                1, y[:, None], -math.inf
            ).amax(1)
            rounding = max(
                torch.finfo(own).eps, torch.finfo(z.dtype).eps
            )  # of the model, and of the point itself
            size = 64 * rounding * logits.abs().amax(1)
            self.numbers["points tried"] += z.shape[0]
            if broken := int((proof.certified & (margin < -size)).sum()):
                self.numbers["broken"] += broken
                self.note(seed, "broken", str(margin.tolist()))
            if below := int((proof.certified & (margin < proof.margin - size)).sum()):
                self.numbers["below"] += below
                self.note(seed, "below", f"{margin.tolist()} against {proof.margin.tolist()}")

    def note(self, seed: int, kind: str, text: str) -> None:
        self.findings.append({"seed": seed, "kind": kind, "text": text[:300]})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.networks", description=__doc__)
    parser.add_argument("--networks", type=int, default=1000, help="number of networks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network")
    parser.add_argument("--summary", type=Path, default=ROOT / "results" / "torture_networks.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, began = Counts(), time.process_time()
    for seed in range(options.seed, options.seed + options.networks):
        try:
            counts.run(seed)
        except Exception as error:  # noqa: BLE001 - one more finding
            counts.numbers["failed"] += 1
            counts.note(seed, "failed", f"{type(error).__name__}: {error}")
    summary = {
        "command": f"python -m tests.torture.networks --networks {options.networks} --seed {options.seed}",
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "processor_seconds": round(time.process_time() - began),
        "counts": {name: counts.numbers[name] for name in COUNTS},
        "by kind": {
            k: v for k, v in sorted(counts.numbers.items()) if k.startswith("certificates, ")
        },
        "findings": counts.findings[:KEPT],
    }
    write_json(options.summary, summary)
    print(json.dumps(summary["counts"]))


if __name__ == "__main__":
    main()
