"""``python -m benchmarks masks``: do models that hide their gradients fool the standard attack?

One network is put behind each mask (:mod:`benchmarks.masked`) and attacked at several radii, with
and without the mask. A mask is *opened* if at most five points more images survive than without it,
and *seen* if the result is not reliable. A mask that is neither has *fooled* the attack.
"""

from __future__ import annotations

import functools
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import wball
from benchmarks.frame import Result, Row, attempts, options
from benchmarks.masked import MASKS

NONE = "none"
POINTS = 5.0
"""Robust accuracy may be higher by this much behind an opened mask, in points."""


@dataclass(frozen=True)
class Setting:
    """What is attacked: a network, digits and a device."""

    model: str
    models: Path | None
    data: Path | None
    images: int
    device: str

    def load(self) -> tuple[nn.Module, Tensor, Tensor]:
        net = wball.load_model(self.model, root=self.models).to(self.device).eval()
        x, y = wball.load_dataset("mnist", self.data) if self.data else wball.load_sample("mnist")
        return net, x[: self.images].to(self.device), y[: self.images].to(self.device)


def main(arguments: list[str] | None = None) -> None:
    parser = options("masks", __doc__)
    parser.add_argument("--model", default="mnist-standard", help="a network for digits")
    parser.add_argument("--images", type=int, default=100, help="number of digits")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.1, 0.15, 0.3], help="radii")
    parser.add_argument("--only", nargs="+", choices=MASKS, default=list(MASKS), metavar="MASK")
    parser.add_argument("--processes", type=int, default=1, help="masks at a time")
    given = parser.parse_args(arguments)
    setting = Setting(given.model, given.models, given.data, given.images, given.device)
    result = Result("masks", given, model=given.model, images=given.images)
    asked = [(name, eps) for name in (NONE, *given.only) for eps in given.eps]
    tasks = [(name, eps) for name, eps in asked if not result.has(mask=name, eps=eps)]
    failed = list[str]()
    for (name, eps), found in attempts(functools.partial(_row, setting), tasks, given.processes):
        if isinstance(found, str):
            failed.append(f"{name} at {eps:g}: {found}")
        else:
            result.add({"mask": name, "eps": eps, **found})
    order = [NONE, *MASKS]
    result.rows.sort(key=lambda row: (order.index(row["mask"]), row["eps"]))
    bare = {row["eps"]: row["robust"] for row in result.rows if row["mask"] == NONE}
    for row in result.rows:
        row |= judged(row, bare[row["eps"]])
    result.write()
    fooled = [f"{row['mask']} at {row['eps']:g}" for row in result.rows if row["fooled"]]
    print(f"{len(fooled)} of {len(result.rows)} fooled", *fooled, sep="\n")
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(tasks)} failed", *failed]))


def judged(row: Row, bare: float) -> Row:
    """What a row says about its mask, beside the robust accuracy without one."""
    must_open = row["mask"] == NONE or MASKS[row["mask"]].opened
    opened = row["robust"] <= bare + POINTS + 1e-9
    fooled = not opened and (must_open or row["reliable"])
    return {"opened": opened, "must_open": must_open, "fooled": fooled}


_load = functools.cache(Setting.load)


def _row(setting: Setting, name: str, eps: float) -> Row:
    net, x, y = _load(setting)
    model = net if name == NONE else MASKS[name].wrap(net)
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
