"""``python -m benchmarks masks``: do models that hide their gradients fool the standard attack?

Networks that are not bundled are put behind each mask (:mod:`benchmarks.masked`) and attacked with
and without it. A mask is *opened* if at most five points more images survive than without it, and
*seen* if the result is called unreliable: two columns, since an attack that distrusts everything
opens nothing. A mask that is neither has *fooled* the attack, and so has a mask that is known to be
open and stays shut, or a bare network that is called unreliable.
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
CASES = (
    "wong2019-mnist-standard:0.15",
    "levine2020-mnist-flow-0.01:0.3",
    "wu2020-mnist-adversarial:0.5",
)
"""Networks that are not bundled and radii at which most of their digits fall. The second and the
third are robust."""
POINTS = 5.0
"""Robust accuracy may be higher by this much behind an opened mask, in points."""


@dataclass(frozen=True)
class Setting:
    """What is attacked: networks, digits and a device."""

    models: Path | None
    data: Path | None
    images: int
    device: str

    def load(self, model: str) -> tuple[nn.Module, Tensor, Tensor]:
        net = wball.load_model(model, root=self.models).to(self.device).eval()
        x, y = wball.load_dataset("mnist", self.data) if self.data else wball.load_sample("mnist")
        return net, x[: self.images].to(self.device), y[: self.images].to(self.device)


def main(arguments: list[str] | None = None) -> None:
    parser = options("masks", __doc__)
    words = {"nargs": "+", "default": CASES, "metavar": "MODEL:EPS"}
    parser.add_argument("--cases", **words, help="networks for digits, each with a radius")
    parser.add_argument("--images", type=int, default=100, help="number of digits")
    parser.add_argument("--only", nargs="+", choices=MASKS, default=list(MASKS), metavar="MASK")
    parser.add_argument("--processes", type=int, default=1, help="masks at a time")
    given = parser.parse_args(arguments)
    setting = Setting(given.models, given.data, given.images, given.device)
    result = Result("masks", given, images=given.images)
    cases = [
        (model, float(eps)) for model, _, eps in (case.rpartition(":") for case in given.cases)
    ]
    asked = [(*case, name) for name in (NONE, *given.only) for case in cases]
    tasks = [
        (model, eps, name)
        for model, eps, name in asked
        if not result.has(model=model, eps=eps, mask=name)
    ]
    failed = list[str]()
    for (model, eps, name), found in attempts(
        functools.partial(_row, setting), tasks, given.processes
    ):
        if isinstance(found, str):
            failed.append(f"{name} before {model}: {found}")
        else:
            result.add({"model": model, "eps": eps, "mask": name, **found})
    order = [NONE, *MASKS]
    result.rows.sort(key=lambda row: (row["model"], row["eps"], order.index(row["mask"])))
    bare = {(r["model"], r["eps"]): r["robust"] for r in result.rows if r["mask"] == NONE}
    for row in result.rows:
        row |= judged(row, bare[row["model"], row["eps"]])
    result.write()
    fooled = [f"{row['mask']} before {row['model']}" for row in result.rows if row["fooled"]]
    print(f"{len(fooled)} of {len(result.rows)} fooled", *fooled, sep="\n")
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(tasks)} failed", *failed]))


def judged(row: Row, bare: float) -> Row:
    """What a row says about its mask, beside the robust accuracy without one.

    An attack that calls everything unreliable is fooled by a bare network, and by every mask that
    must be opened.
    """
    alone = row["mask"] == NONE
    must_open = alone or MASKS[row["mask"]].opened
    opened = row["robust"] <= bare + POINTS + 1e-9
    fooled = not opened and (must_open or row["reliable"])
    return {
        "opened": opened,
        "unreliable": not row["reliable"],
        "must_open": must_open,
        "fooled": fooled or (alone and not row["reliable"]),
    }


_load = functools.cache(Setting.load)


def _row(setting: Setting, model: str, eps: float, name: str) -> Row:
    net, x, y = _load(setting, model)
    masked = net if name == NONE else MASKS[name].wrap(net)
    torch.manual_seed(0)
    with torch.no_grad():
        clean = float((masked(x).argmax(1) == y).double().mean())
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = wball.StandardAttack(wball.WassersteinBall(eps), check=False)(masked, x, y)
    return {
        "clean": 100 * clean,
        "robust": 100 * found.robust_accuracy,
        "reliable": found.reliable,
        "findings": {finding.code: finding.images for finding in found.findings},
        "seconds": round(time.perf_counter() - begin, 1),
    }
