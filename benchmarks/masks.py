"""``python -m benchmarks masks``: do models that hide their gradients fool the standard attack?

One network is put behind each mask below and attacked at several radii, as it is and masked. A mask is *opened* if at
most five points more images survive than without it, and *seen* if the result is not reliable. Whatever is neither is a
number that nobody should have believed.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.origin import environment, keep
from wball.model import Model

POINTS = 5.0
"""So many more images may survive behind a mask, in percent."""


def _outside(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
    """A step in NumPy, where no gradient follows."""
    return lambda z: torch.from_numpy(np.ascontiguousarray(function(z.detach().cpu().numpy()))).to(z)


class _Custom(torch.autograd.Function):
    """The identity with a gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (-gradient if ctx.kind == "reversed" else torch.randn_like(gradient)), None


def _cosines(like: Tensor) -> Tensor:
    k, n = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    matrix = torch.cos(math.pi * (n + 0.5) * k / 8) * math.sqrt(2 / 8)
    matrix[0] /= math.sqrt(2)
    return matrix.to(like)


def _coded(z: Tensor, quality: float, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Blocks of 8 x 8 pixels in cosines, rounded to steps that grow with the frequency, as JPEG does."""
    padded = F.pad(z, (2, 2, 2, 2))
    matrix = _cosines(z)
    blocks = padded.unfold(2, 8, 8).unfold(3, 8, 8)
    steps = quality * (1 + torch.arange(8, device=z.device)[:, None] + torch.arange(8, device=z.device)).to(z)
    coded = rounding(matrix @ blocks @ matrix.T / steps) * steps
    out = (matrix.T @ coded @ matrix).transpose(3, 4).reshape(padded.shape)
    return out[..., 2:-2, 2:-2].clamp(0, 1)


class _TopK(nn.Module):
    """The largest share of a layer's activations; all others are 0 (k winners take all)."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, z: Tensor) -> Tensor:
        flat = z.flatten(1)
        least = flat.topk(max(1, int(self.share * flat.shape[1])), 1).values[:, -1:]
        return torch.where(flat >= least, flat, torch.zeros_like(flat)).view_as(z)


class _Dropped(nn.Module):
    """Dropout that never stops."""

    def forward(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.3, training=True)


def _instead_of_relu(net: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    changed = copy.deepcopy(net)
    for name, child in list(changed.named_children()):
        if isinstance(child, nn.ReLU):
            setattr(changed, name, nn.Sequential(nn.ReLU(), make()))
    return changed


def _exploding(net: nn.Module) -> Model:
    """A chaotic map moves pixels by a thousandth and their gradients by many powers of ten."""

    def model(z: Tensor) -> Tensor:
        u = 0.1 + 0.8 * z
        for _ in range(60):
            u = 3.99 * u * (1 - u)
        return net(z + 1e-3 * (u - 0.5))

    return model


class _Scripted(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.round(z * 16) / 16


def _shifted(net: nn.Module) -> Model:
    def model(z: Tensor) -> Tensor:
        across, down = (int(v) for v in torch.randint(-1, 2, (2,)))
        return net(torch.roll(z, (across, down), (2, 3)))

    return model


@dataclass(frozen=True)
class Mask:
    """``wrap`` puts a network behind the mask; ``opened``: to call the result unreliable is not enough."""

    wrap: Callable[[nn.Module], Model]
    opened: bool = False


MASKS: dict[str, Mask] = {
    "rounding to 1/255": Mask(lambda net: lambda z: net((z * 255).round() / 255), opened=True),
    "rounding to 1/64, bytes": Mask(lambda net: lambda z: net((z * 64).byte().to(z) / 64), opened=True),
    "rounding to 1/8": Mask(lambda net: lambda z: net((z * 8).round() / 8), opened=True),
    "rounding to 1/3": Mask(lambda net: lambda z: net((z * 3).round() / 3), opened=True),
    "threshold at 0.5": Mask(lambda net: lambda z: net((z > 0.5).to(z)), opened=True),
    "threshold at 0.3": Mask(lambda net: lambda z: net(torch.where(z < 0.3, 0.0, 1.0).to(z)), opened=True),
    "saturated softmax": Mask(lambda net: lambda z: (1000 * net(z)).softmax(1), opened=True),
    "saturated sigmoid": Mask(lambda net: lambda z: torch.sigmoid(net(z).double()), opened=True),
    "rounding in NumPy": Mask(
        lambda net: (lambda step: lambda z: net(step(z)))(_outside(lambda a: np.round(a * 255) / 255)), opened=True
    ),
    "threshold in NumPy": Mask(
        lambda net: (lambda step: lambda z: net(step(z)))(_outside(lambda a: (a > 0.5).astype(a.dtype))), opened=True
    ),
    "scripted rounding": Mask(
        lambda net: (lambda step: lambda z: net(step(z)))(torch.jit.script(_Scripted())), opened=True
    ),
    "JPEG-like": Mask(lambda net: lambda z: net(_coded(z, 0.05, torch.round))),
    "JPEG-like in NumPy": Mask(lambda net: lambda z: net(_coded(z, 0.05, _outside(np.round)))),
    "top-k activations, 20 %": Mask(lambda net: _instead_of_relu(net, lambda: _TopK(0.2))),
    "top-k activations, 5 %": Mask(lambda net: _instead_of_relu(net, lambda: _TopK(0.05))),
    "dropout": Mask(lambda net: _instead_of_relu(net, _Dropped)),
    "input noise": Mask(lambda net: lambda z: net(z + 0.1 * torch.randn_like(z))),
    "random shifts": Mask(_shifted),
    "shattered by a sine": Mask(lambda net: lambda z: net(z + 3e-3 * torch.sin(1e4 * z))),
    "shattered, coarser": Mask(lambda net: lambda z: net(z + 0.02 * torch.sin(500 * z))),
    "exploding gradients": Mask(_exploding),
    "NaN gradients": Mask(lambda net: lambda z: net(z + 0 * torch.sqrt(z - z))),
    "reversed gradients": Mask(lambda net: lambda z: net(_Custom.apply(z, "reversed"))),
    "random gradients": Mask(lambda net: lambda z: net(_Custom.apply(z, "random"))),
    "probabilities": Mask(lambda net: lambda z: net(z).softmax(1)),
    "probabilities of 4 decimals": Mask(lambda net: lambda z: _outside(lambda a: a.round(4))(net(z).softmax(1))),
    "labels": Mask(lambda net: lambda z: F.one_hot(net(z).argmax(1), 10).to(z)),
    "no graph at all": Mask(
        lambda net: (lambda whole: lambda z: whole(torch.from_numpy(z.detach().cpu().numpy()).to(z.device)))(
            torch.jit.trace(net, torch.zeros(1, 1, 28, 28, device=next(net.parameters()).device))
        )
    ),
    "labels from NumPy": Mask(lambda net: lambda z: _outside(lambda a: np.eye(10)[a.argmax(1)])(net(z))),
    "random switch of two nets": Mask(
        lambda net: lambda z: net(z if torch.rand(()) < 0.5 else F.avg_pool2d(z, 3, 1, 1) * 1.5)
    ),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks masks", description=__doc__)
    parser.add_argument("--model", default="mnist-standard", help="a network for digits")
    parser.add_argument("--models", type=Path, help="folder with weights that are not bundled")
    parser.add_argument("--data", type=Path, help="folder with MNIST (default: the bundled digits)")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--eps", type=float, nargs="+", default=[0.1, 0.15, 0.3], help="mass fraction x px")
    parser.add_argument("--only", nargs="+", choices=MASKS, default=list(MASKS), metavar="MASK")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / "masks.json")
    given = parser.parse_args(arguments)
    net = wball.load_model(given.model, root=given.models).to(given.device).eval()
    x, y = wball.load_dataset("mnist", given.data) if given.data else wball.load_sample("mnist")
    x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
    rows: list[dict[str, Any]] = []
    result = {
        "environment": environment(given.device, given.data, given.out) | {"seed": 0},
        "model": given.model,
        "images": len(x),
        "unit": wball.WassersteinBall(1.0).unit,
        "rows": rows,
    }
    if given.models is not None:
        about = result["environment"]
        about["command"] = about["command"].replace(str(given.models), "MODELS")
    masks = {"none": Mask(lambda net: net, opened=True)} | {name: MASKS[name] for name in given.only}
    for eps in given.eps:
        plain = math.inf
        for name, mask in masks.items():
            row = _row(mask.wrap(net), x, y, eps)
            plain = row["robust"] if name == "none" else plain
            opened = row["robust"] <= plain + POINTS + 1e-9
            row = {"mask": name, "eps": eps} | row | {"opened": opened, "must_open": mask.opened}
            row["fooled"] = not opened and (mask.opened or row["reliable"])
            rows.append(row)
            keep(given.out, result)
            print(
                f"{eps:<5g} {name:36} clean {row['clean']:5.1f}  robust {row['robust']:5.1f}  {row['seconds']:6.1f} s  "
                f"{'reliable' if row['reliable'] else '-':8} {'FOOLED' if row['fooled'] else ''} {row['findings']}",
                flush=True,
            )
    print(f"{sum(row['fooled'] for row in rows)} of {len(rows)} fooled")


def _row(model: Model, x: Tensor, y: Tensor, eps: float) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.no_grad():
        clean = float((model(x).argmax(1) == y).double().mean())
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = wball.StandardAttack(wball.WassersteinBall(eps), check=False)(model, x, y)
    return {
        "clean": 100 * clean,
        "robust": 100 * found.robust_accuracy,
        "reliable": found.reliable,
        "findings": {finding.code: finding.images for finding in found.findings},
        "seconds": round(time.perf_counter() - begin, 1),
    }


if __name__ == "__main__":
    main()
