"""``python -m benchmarks validity --data DIR``: attack whole test sets and audit every image that comes back.

Each attack returns one image per test image: an adversarial example, or its best attempt. All of them claim to be in
the ball, so all of them are audited: mass, box, and the exact transport distance by network simplex. Written are
``<out>.json`` and ``<out>.md``; the command fails if one image does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.origin import keep
from wball import provenance
from wball.attacks import PGD, Attack, DualAveraging, FrankWolfe, StandardAttack
from wball.auditing.audit import AuditReport, audit
from wball.auditing.violations import DISTANCE_TOL
from wball.ball import WassersteinBall
from wball.data import load_dataset
from wball.models import build_model
from wball.storage.weights import load_weights
from wball.training import preset, train
from wball.zoo import load_model

RADII = (0.01, 0.05, 0.1, 0.3)
IMAGES = {"mnist": 10_000, "cifar10": 1_000}
FEW = {"mnist": 200, "cifar10": 50}
"""Images for the attacks that solve a convex program at each step."""
KINDS = ("DualAveraging", "StandardAttack", "PGD", "FrankWolfe")
PART = {"mnist": 50, "cifar10": 4}
"""Images per piece of the audit."""


def attacks(dataset: str, images: int) -> Iterator[tuple[str, Attack, int]]:
    """Name, settings and number of images; the ball is that of the first radius."""
    ball = WassersteinBall(RADII[0])
    yield (
        "DualAveraging, 100 steps to the highest loss",
        DualAveraging(ball, until_success=False, progress=False),
        images,
    )
    yield (
        "StandardAttack, fast",
        StandardAttack(ball, version="fast", check=False, progress=False),
        images,
    )
    few = min(images, FEW[dataset])
    yield "PGD, 20 steps, lambda 1000", PGD(ball, steps=20, reg=1000.0, progress=False), few
    yield "FrankWolfe, 20 steps", FrankWolfe(ball, steps=20, progress=False), few


def network(dataset: str, given: argparse.Namespace, device: torch.device) -> tuple[nn.Module, str]:
    """The model under attack, and what to call it."""
    if dataset == "mnist":
        return load_model("mnist-standard", device=device), "mnist-standard of the zoo"
    if given.cifar10_weights is not None:
        model = build_model(given.cifar10_architecture)
        load_weights(model, given.cifar10_weights)
        return model.eval().to(
            device
        ), f"{given.cifar10_architecture} with {Path(given.cifar10_weights).name}"
    x, y = load_dataset("cifar10", given.data, "train", device=device)
    recipe = preset(
        "cifar10-standard", architecture="cifar10-resnet-small", epochs=2, seed=given.seed
    )
    # How much the model knows does not matter here.
    settings = replace(recipe.optimisation, bf16=False, channels_last=False)
    recipe = replace(recipe, optimisation=settings)
    count = 10_000 if device.type == "cuda" else 2_000
    model = train(recipe, (x[:count], y[:count]), device=device, progress=False).model
    return model.eval(), f"cifar10-resnet-small, 2 epochs on {count:,} training images"


@torch.no_grad()
def said(model: nn.Module, x: Tensor) -> Tensor:
    """The model's own decisions."""
    return torch.cat([model(part).argmax(1) for part in x.split(1000)])


def check(
    name: str,
    attack: Attack,
    eps: float,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    part: int,
    pool: Executor | None,
) -> dict[str, Any]:
    """Attack at one radius, and audit what comes back."""
    ball = WassersteinBall(eps)
    begun = time.perf_counter()
    found = attack.at(eps)(model, x, y)
    images = found.images.cpu()
    attacked = time.perf_counter()
    reports = _audited(ball, x.cpu(), images, part, pool)
    audited = time.perf_counter()
    share = torch.cat([r.distance for r in reports]) / eps
    mass = float(torch.cat([r.mass_error for r in reports]).max())
    box = float(torch.cat([r.box_violation for r in reports]).max())
    reasons = [reason for report in reports for reason in report.reasons]
    return {
        "attack": name,
        "eps": eps,
        "images": len(x),
        "withstood": found.robust_accuracy,
        "failures": sum(map(bool, reasons)),
        "largest_mass_error": mass,
        "largest_box_violation": box,
        "largest_distance_over_eps": float(share.max()),
        "mean_distance_over_eps": float(share.mean()),
        "claimed_too_little": int((found.distance.cpu() / eps < share - DISTANCE_TOL).sum()),
        "reasons": [f"image {k}: {reason}" for k, reason in enumerate(reasons) if reason][:5],
        "kernel": found.kernel,
        "attack_s": round(attacked - begun, 2),
        "audit_s": round(audited - attacked, 2),
    }


def _audited(
    ball: WassersteinBall, x: Tensor, z: Tensor, part: int, pool: Executor | None
) -> list[AuditReport]:
    pieces = [
        (ball, a.numpy(), b.numpy()) for a, b in zip(x.split(part), z.split(part), strict=True)
    ]
    return [_piece(piece) for piece in pieces] if pool is None else list(pool.map(_piece, pieces))


def _piece(piece: tuple[WassersteinBall, Any, Any]) -> AuditReport:
    ball, x, z = piece
    return audit(ball, torch.from_numpy(x), torch.from_numpy(z))


@contextmanager
def _workers(count: int) -> Iterator[Executor | None]:
    """Processes that audit; none where one is enough. They never see the GPU."""
    if count < 2:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        count, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield pool


def write(out: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """What is known so far; ``out`` names the files without their endings."""
    keep(out.with_suffix(".json"), {"environment": about, "rows": rows})
    out.with_suffix(".md").write_text(table(about, rows), encoding="utf-8")


def table(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The result for people."""
    total, bad = sum(row["images"] for row in rows), sum(row["failures"] for row in rows)
    lines = [
        "# Validity of returned examples",
        "",
        f"**{total:,} images audited, {bad} failures.**",
        "",
    ]
    lines += [f"- {key}: {_flat(value)}" for key, value in about.items()]
    lines += [
        "",
        "The attacks try to change what the model says, so that no image starts out wrong and is returned as it is.",
        "Every image that came back was audited: mass per channel (1e-5 of the image's mass), box (1e-6), exact",
        "distance (eps x 1.0001). *claimed too little*: the attack's own bound was below the exact distance.",
        "",
    ]
    head = (
        "data", "attack", "eps", "images", "robust accuracy %", "failures", "mass error", "outside box",
        "distance / eps, largest", "mean", "claimed too little", "kernel", "attack s", "audit s",
    )  # fmt: skip
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = (
            row["data"], row["attack"], f"{row['eps']:g}", f"{row['images']:,}", f"{100 * row['withstood']:.1f}",
            row["failures"], f"{row['largest_mass_error']:.1e}", f"{row['largest_box_violation']:.1e}",
            f"{row['largest_distance_over_eps']:.6f}", f"{row['mean_distance_over_eps']:.4f}",
            row["claimed_too_little"], row["kernel"], row["attack_s"], row["audit_s"],
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        f"\n{row['data']}, {row['attack']}, eps {row['eps']:g}: {r}"
        for row in rows
        for r in row["reasons"]
    ]
    return "\n".join(lines) + "\n"


def _flat(value: Any) -> str:
    return (
        ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks validity", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST and CIFAR-10")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results") / "validity",
        help="files to write, without ending",
    )
    parser.add_argument("--limit", type=int, help="use only the first N images of each set")
    parser.add_argument("--sets", nargs="+", choices=list(IMAGES), default=list(IMAGES))
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=list(KINDS), help="attacks to run"
    )
    parser.add_argument("--cifar10-architecture", default="cifar10-resnet18")
    parser.add_argument(
        "--cifar10-weights",
        help="weights to load into it (default: a small network, briefly trained)",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes that audit"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    rows: list[dict[str, Any]] = []
    about = provenance.collect(WassersteinBall(1.0), torch.zeros(1, 1, 28, 28, device=device))
    about["command"] = about["command"].replace(str(given.data), "DATA")  # a folder of one machine
    about |= {"commit": provenance.commit(), "seed": given.seed}
    with _workers(given.workers) as pool:
        for data in given.sets:
            count = min(IMAGES[data], given.limit or IMAGES[data])
            x = load_dataset(data, given.data, "test", device=device)[0][:count]
            model, about[f"{data} model"] = network(data, given, device)
            y = said(model, x)
            for name, attack, images in attacks(data, count):
                if type(attack).__name__ not in given.only:
                    continue
                for eps in RADII:
                    row = check(name, attack, eps, model, x[:images], y[:images], PART[data], pool)
                    rows.append({"data": data, **row})
                    write(given.out, about, rows)
                    print(
                        f"{data} {name} eps {eps:g}: {row['images']} audited, {row['failures']} failures, "
                        f"{100 * row['withstood']:.1f} % robust accuracy, {row['attack_s']} + {row['audit_s']} s",
                        flush=True,
                    )
    print(f"written: {given.out}.json, {given.out}.md")
    bad = sum(row["failures"] for row in rows)
    if bad:
        raise SystemExit(f"{bad} images are not in their ball")
