"""At which radius does each image fall? Under the paper's attack, and under ours.

The paper's attack lets the radius grow until an image falls, so one run gives the whole curve; its points are clamped
and lie in no ball, which is measured, too. Ours tries radii from small to large on the images that are left, and an
example counts only if the model is wrong on the very image, its mass and box hold, the attack's plan proves its
distance, and, for a sample, exact optimal transport agrees (:func:`wball.audit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wball.attacks import PGD, Attack, AttackResult, StandardAttack
from wball.attacks.standard import Version
from wball.auditing.violations import BOX_TOL, DISTANCE_TOL, MASS_TOL
from wball.ball import WassersteinBall
from wball.evaluation.check import audit_in_threads
from wball.model import top_class
from wball.paper.workshop import Clock, Subject, Workshop
from wball.training.config import Optimisation, describe
from wball.training.network import AsTrained

BATCH = {"cpu": 100, "cuda": 5000}
COLOUR_BATCH = {"cpu": 50, "cuda": 2000}
"""Images at a time. Colour images go through ResNet-18, whose activations fill the memory."""
LARGE = 500_000
"""Weights of a network that is limited by its arithmetic."""
LEAN = Optimisation(bf16=True, channels_last=True)
"""Such a network is four times as fast so on a GPU."""
SAMPLE = {1: 64, 3: 16}
"""Examples per batch and radius that exact optimal transport checks, by channels."""


@dataclass(frozen=True)
class Fall:
    """The radius at which each image fell: 0 if it is wrong as it is, inf if it withstood.

    Attributes:
        radius: per image, float64.
        radii: those that were tried.
        attack: what tried them, in words.
        checks: what is known about the examples.
        seconds: what it took.
    """

    radius: Tensor
    radii: tuple[float, ...]
    attack: str
    checks: dict[str, Any]
    seconds: float

    def accuracy_at(self, eps: float) -> float:
        """The share of images that withstood every radius up to ``eps``."""
        return float((self.radius > eps * (1 + 1e-9)).double().mean())

    def about(self) -> dict[str, Any]:
        """The curve and where it comes from, as plain data."""
        points = [{"eps": r, "accuracy": self.accuracy_at(r)} for r in (0.0, *self.radii)]
        return {
            "attack": self.attack,
            "images": len(self.radius),
            "curve": points,
            "examples": self.checks,
            "seconds": round(self.seconds, 2),
        }


def under_paper_attack(
    shop: Workshop, subject: Subject, x: Tensor, y: Tensor, attack: PGD, label: str = "paper"
) -> Fall:
    """The paper's attack with its growing radius."""
    assert attack.growth is not None
    depends = _depends(shop, subject, x, y, attack)
    parts = []
    with shop.part(f"{subject.name}.{label}", depends) as folder:
        for path, here, labels in _batches(folder, x, y):
            make = partial(_radii_and_masses, subject.model, attack, here, labels, shop.settings.seed)
            parts.append(shop.once(path, ("radius", "mass_error"), make))
    radius, off = (torch.cat([state[name] for state, _ in parts]) for name in ("radius", "mass_error"))
    examples = (radius > 0) & radius.isfinite()
    checks = {
        "found": int(examples.sum()),
        "mass_off": int((examples & (off > MASS_TOL)).sum()),
        "mean_mass_error": float(off[examples].mean()) if bool(examples.any()) else 0.0,
        "largest_mass_error": float(off.max()),
    }
    radii = tuple(float(attack.growth.at(attack.ball.eps, s)) for s in range(0, attack.steps, attack.growth.every))
    p = getattr(getattr(attack.ball, "cost", None), "p", 1.0)
    fall = Fall(radius, radii, f"PGD.paper, p = {p:g}", checks, sum(seconds for _, seconds in parts))
    return _told(shop, subject, fall)


def _radii_and_masses(model: nn.Module, attack: PGD, x: Tensor, y: Tensor, seed: int) -> dict[str, Tensor]:
    found = attacked(model, attack, x, y, seed)
    right = predicted(model, x) == y
    return {
        "radius": torch.where(right, torch.where(found.success, found.radius, math.inf), 0.0),
        "mass_error": torch.where(found.success & right, _mass_error(x, found.images), 0.0),
    }


def under_standard_attack(
    shop: Workshop,
    subject: Subject,
    x: Tensor,
    y: Tensor,
    radii: Sequence[float],
    ball: WassersteinBall | None = None,
    version: Version | None = None,
) -> Fall:
    """:class:`wball.StandardAttack` at radii from small to large (its fast version in quick runs)."""
    version = version or ("fast" if shop.quick else "standard")
    ball = ball or WassersteinBall(max(radii))
    attack = StandardAttack(ball, version=version, check=False, progress=False)
    depends = [_depends(shop, subject, x, y, attack), sorted(radii)]
    parts = []
    p = getattr(ball.cost, "p", 1.0)
    with shop.part(f"{subject.name}.{version}-p{p:g}", depends) as folder:
        for path, here, labels in _batches(folder, x, y):
            parts.append(_climb(shop, subject, here, labels, ball, attack, sorted(radii), path))
    radius = torch.cat([state["radius"] for state, _ in parts])
    checks = {
        "found": int(((radius > 0) & radius.isfinite()).sum()),
        "rejected": sum(len(notes["rejected"]) for _, notes in parts),
        "rejections": [rejection for _, notes in parts for rejection in notes["rejected"]],
        "checked_exactly": sum(notes["exact"] for _, notes in parts),
        "largest_mass_error": max(notes["mass"] for _, notes in parts),
        "largest_box_violation": max(notes["box"] for _, notes in parts),
        "largest_distance_over_radius": max(notes["ratio"] for _, notes in parts),
    }
    name = f"StandardAttack, {version}, p = {p:g}"
    fall = Fall(radius, tuple(sorted(radii)), name, checks, sum(notes["seconds"] for _, notes in parts))
    return _told(shop, subject, fall)


def _climb(
    shop: Workshop,
    subject: Subject,
    x: Tensor,
    y: Tensor,
    ball: WassersteinBall,
    attack: Attack,
    radii: Sequence[float],
    path: Path,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One batch, radius after radius; the file at ``path`` is as far as it got."""
    part = shop.kept(path, "radius")
    if part is not None:
        state, notes = part
    else:
        right = predicted(subject.model, x) == y
        state = {"radius": torch.where(right.cpu(), math.inf, 0.0).double()}
        notes = {"done": 0, "seconds": 0.0, "rejected": [], "exact": 0, "mass": 0.0, "box": 0.0, "ratio": 0.0}
    while notes["done"] < len(radii):
        clock, eps = Clock(x.device), float(radii[notes["done"]])
        left = state["radius"].isinf().nonzero().squeeze(1)
        if left.numel():
            here = left.to(x.device)
            found = attacked(subject.model, attack.at(eps), x[here], y[here], shop.settings.seed)
            good = _counted(ball.at(eps), x[here], found, notes, 4 if shop.quick else SAMPLE.get(x.shape[1], 16))
            state["radius"][left[good.cpu()]] = eps
        notes["done"] += 1
        notes["seconds"] += clock.seconds()
        shop.keep(path, state, notes)
    return state, notes


def _counted(ball: WassersteinBall, x: Tensor, found: AttackResult, notes: dict[str, Any], sample: int) -> Tensor:
    """Which examples hold; the notes learn about them."""
    eps = float(torch.as_tensor(ball.eps))
    mass = _mass_error(x, found.images)
    lo, hi = ball.box if ball.box is not None else (0.0, math.inf)
    box = torch.maximum(lo - found.images, found.images - hi).flatten(1).amax(1).clamp(min=0.0)
    sound = (mass <= MASS_TOL) & (box <= BOX_TOL) & (found.distance <= eps * (1 + DISTANCE_TOL))
    good = found.success & sound
    exact = torch.full_like(found.distance, math.nan)
    claimed = found.success.nonzero().squeeze(1)[:sample]
    if claimed.numel():
        report = audit_in_threads(ball, x[claimed], found.images[claimed])
        good[claimed] &= report.valid.to(good.device)
        exact[claimed] = report.distance.to(exact)
        notes["exact"] += len(claimed)
        notes["ratio"] = max([notes["ratio"], *(report.distance[report.valid] / eps).tolist()])
    for i in (found.success & ~good).nonzero().squeeze(1).tolist():
        seen = {"mass_error": mass[i], "box_violation": box[i], "claimed": found.distance[i], "exact": exact[i]}
        notes["rejected"].append({"eps": eps, **{name: f"{float(value):.6g}" for name, value in seen.items()}})
    if bool(good.any()):
        notes["mass"] = max(notes["mass"], float(mass[good].max()))
        notes["box"] = max(notes["box"], float(box[good].max()))
    return good


def _mass_error(x: Tensor, z: Tensor) -> Tensor:
    """The largest change of a channel's mass, as a share of the image's mass."""
    before, after = x.double().sum((2, 3)), z.double().sum((2, 3))
    return (after - before).abs().amax(1) / before.sum(1).clamp(min=1e-300)


def attacked(
    model: nn.Module, attack: Attack, x: Tensor, y: Tensor, seed: int = 0, lean: bool | None = None
) -> AttackResult:
    """The attack's result; success is what the model itself says.

    ``lean`` (by default: large networks on a GPU) attacks the network in half the precision, and in full what turns out
    not to be broken then.
    """
    generator = torch.Generator(x.device).manual_seed(seed)
    if lean is None:
        lean = x.is_cuda and sum(p.numel() for p in model.parameters()) >= LARGE
    if not lean:
        return attack(model, x, y, generator=generator)
    found = attack(AsTrained(model, LEAN), x, y, generator=generator)
    again = (found.success & (predicted(model, found.images) == y)).nonzero().squeeze(1)
    if again.numel():
        exact = attack.take(again)(model, x[again], y[again], generator=generator)
        for name in ("images", "success", "distance", "radius", "n_steps"):
            getattr(found, name)[again] = getattr(exact, name)
    return found


@torch.no_grad()
def predicted(model: nn.Module, x: Tensor) -> Tensor:
    """The model's classes, a few images at a time; NaN is no class (-1)."""
    size = (COLOUR_BATCH if x.shape[1] == 3 else BATCH).get(x.device.type, 100)
    return torch.cat([top_class(model(part)) for part in x.split(size)]) if len(x) else x.new_zeros(0).long()


def _batches(folder: Path, x: Tensor, y: Tensor) -> list[tuple[Path, Tensor, Tensor]]:
    size = (COLOUR_BATCH if x.shape[1] == 3 else BATCH).get(x.device.type, 100)
    parts = zip(x.split(size), y.split(size), strict=True)
    return [(folder / f"batch-{k:05d}.safetensors", a, b) for k, (a, b) in enumerate(parts)]


def _depends(shop: Workshop, subject: Subject, x: Tensor, y: Tensor, attack: Attack) -> list[Any]:
    """Everything that a measurement depends on."""
    return [subject.sha256, shop.fingerprint(x, y), describe(attack), shop.settings.seed, x.device.type]


def _told(shop: Workshop, subject: Subject, fall: Fall) -> Fall:
    shown = fall.radii if len(fall.radii) <= 9 else fall.radii[:: math.ceil(len(fall.radii) / 8)]
    points = ", ".join(f"{100 * fall.accuracy_at(r):.1f} at {r:.3g}" for r in shown)
    shop.say(f"{subject.name}, {fall.attack}: {points} (% of {len(fall.radius)}; {fall.seconds:.1f} s)")
    shop.spent += fall.seconds
    return fall
