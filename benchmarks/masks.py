"""``python -m benchmarks masks``: do models that hide their gradients fool the standard attack?

One network is put behind each mask (:mod:`benchmarks.masked`) and attacked at several radii, as it is and masked. A
mask is *opened* if at most five points more images survive than without it, and *seen* if the result is not reliable.
Whatever is neither is a number that nobody should have believed.

The file is written after every row, and each row says at which commit it was measured. Rows that the file has are not
measured again, unless asked for (``--again``): if interrupted, rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.masked import MASKS
from benchmarks.origin import earlier, environment, keep
from benchmarks.pool import attempts

NONE = "none"
POINTS = 5.0
"""So many more images may survive behind a mask, in percent."""


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks masks", description=__doc__)
    parser.add_argument("--model", default="mnist-standard", help="a network for digits")
    parser.add_argument("--models", type=Path, help="folder with weights that are not bundled")
    parser.add_argument("--data", type=Path, help="folder with MNIST (default: the bundled digits)")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument(
        "--eps", type=float, nargs="+", default=[0.1, 0.15, 0.3], help="mass fraction x px"
    )
    parser.add_argument("--only", nargs="+", choices=MASKS, default=list(MASKS), metavar="MASK")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--processes", type=int, default=1, help="masks at a time; they share the device"
    )
    parser.add_argument("--again", action="store_true", help="measure rows that the file has, too")
    parser.add_argument("--out", type=Path, default=Path("results") / "masks.json")
    given = parser.parse_args(arguments)
    setting = Setting(given.model, given.models, given.data, given.images, given.device)
    about = environment(given.device, given.data, given.out) | {"seed": 0}
    if given.models is not None:
        about["command"] = about["command"].replace(str(given.models), "MODELS")
    same = {"model": given.model, "images": given.images, "unit": wball.WassersteinBall(1.0).unit}
    found = {(row["mask"], row["eps"]): row for row in earlier(given.out, **same).get("rows", ())}
    rows: list[dict[str, Any]] = []
    result = {"environment": about, **same, "processes": given.processes, "rows": rows}
    asked = [(name, eps) for name in (NONE, *given.only) for eps in given.eps]
    tasks = [task for task in asked if given.again or task not in found]
    failed: list[str] = []
    for (name, eps), row in attempts(functools.partial(_row, setting), tasks, given.processes):
        if isinstance(row, str):
            failed.append(f"{name} at {eps:g}: {row}")
            print(failed[-1], flush=True)
            continue
        found[name, eps] = row | {"commit": about["commit"]}
        order = [task for one in (NONE, *MASKS) for task in sorted(found) if task[0] == one]
        rows[:] = [_judged(found, *task) for task in order if (NONE, task[1]) in found]
        keep(given.out, result)
        print(
            f"{eps:<5g} {name:36} clean {row['clean']:5.1f}  robust {row['robust']:5.1f}  {row['seconds']:6.1f} s  "
            f"{'reliable' if row['reliable'] else '-':8} {row['findings']}",
            flush=True,
        )
    fooled = [f"{row['mask']} at {row['eps']:g}" for row in rows if row["fooled"]]
    print(f"{len(fooled)} of {len(rows)} fooled", *fooled, sep="\n")
    if failed:
        raise SystemExit(
            "\n".join([f"{len(failed)} of {len(tasks)} could not be measured", *failed])
        )


def _judged(
    found: dict[tuple[str, float], dict[str, Any]], name: str, eps: float
) -> dict[str, Any]:
    """A row, with what it says about its mask beside the network without one."""
    row, must_open = found[name, eps], name == NONE or MASKS[name].opened
    opened = row["robust"] <= found[NONE, eps]["robust"] + POINTS + 1e-9
    fooled = not opened and (must_open or row["reliable"])
    return (
        {"mask": name, "eps": eps}
        | row
        | {"opened": opened, "must_open": must_open, "fooled": fooled}
    )


_load = functools.cache(Setting.load)


def _row(setting: Setting, name: str, eps: float) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()
