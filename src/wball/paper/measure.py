"""What becomes of a model: under :func:`wball.evaluate`, under the paper's attack, and under certificates.

Ours is :func:`wball.evaluate` and nothing else: the model is asked about the very image, and every example that counts
passes the audit. The paper's attack lets the radius grow until an image is broken, so one run gives the whole curve;
its points are clamped and lie in no ball, which is measured, too, and is why no evaluation would count them.

Everything is kept in parts (:meth:`Workshop.part`): an interrupted recipe resumes, and recipes share what they measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wball import provenance
from wball.attacks import PGD, Attack, StandardAttack
from wball.attacks.standard import Version
from wball.auditing.violations import MASS_TOL
from wball.ball import WassersteinBall
from wball.certificates import certify
from wball.certificates.certificate import Method
from wball.evaluation import Evaluation, evaluate
from wball.model import top_class
from wball.paper.workshop import Clock, Data, Subject, Workshop
from wball.training.config import describe

BATCH = {"cpu": 100, "cuda": 5000}
COLOUR_BATCH = {"cpu": 50, "cuda": 1000}
"""Images at a time. Colour images go through ResNet-18, whose activations fill the memory."""
PROOFS_AT_ONCE = 1_000
"""Images between two states of a certificate that are kept: what an interrupted run loses."""


def evaluated(
    shop: Workshop,
    subject: Subject,
    x: Tensor,
    y: Tensor,
    radii: Sequence[float],
    ball: WassersteinBall | None = None,
    version: Version | None = None,
) -> tuple[Evaluation, float]:
    """:func:`wball.evaluate` at these radii (:class:`wball.StandardAttack`, fast in quick runs), and its seconds."""
    version = version or ("fast" if shop.quick else "standard")
    ball = ball or WassersteinBall(max(radii))
    attack = StandardAttack(ball, version=version, check=False, progress=False)
    depends = [*_depends(shop, subject, x, y, attack), sorted(radii), provenance.versions()]
    with (
        shop.part(f"{subject.name}.{version}-p{_power(ball):g}", depends) as folder,
        shop.noted(folder) as notes,
    ):
        options: dict[str, Any] = {"out": folder / "evaluation", "seed": shop.settings.seed, "name": subject.name}
        options["keep"] = "none"  # audited, counted, and not looked at again
        try:
            result = evaluate(subject.model, x, y, ball, radii, attack, **options)
        except ValueError as error:  # perhaps a damaged file
            shop.say(f"measured again: {error}")
            result = evaluate(subject.model, x, y, ball, radii, attack, overwrite=True, **options)
    shop.say(_told(subject, curve(result), notes["seconds"]))
    return result, float(notes["seconds"])


def curve(result: Evaluation, seconds: float = 0.0) -> Data:
    """The accuracies of an evaluation, and how its examples were checked, as plain data."""
    attack, audit = result.settings["attack"], result.audit_summary()
    return {
        "attack": f"{attack['name']}, {attack['version']}, p = {result.settings['ball'].get('p', 1.0):g}",
        "images": len(result),
        "curve": [{"eps": point.eps, "accuracy": point.accuracy} for point in result.curve()],
        "examples": {
            "found": audit["valid"],
            "rejected": audit["rejected"],
            "rejections": [dict(r) for r in result.rejected],
            "proved_by_plan": audit["proved_by_plan"] + audit["both"],
            "checked_exactly": audit["exact_transport"],
            "disagreements": len(audit["disagreements"]),
            **{key: value for key, value in audit.items() if key.startswith("largest_")},
        },
        "seconds": round(seconds, 2),
    }


def accuracy_at(made: Data, eps: float) -> float:
    """What a curve says about a radius: the accuracy at the largest one tried that is no larger."""
    share: float = [p["accuracy"] for p in made["curve"] if p["eps"] <= eps * (1 + 1e-9)][-1]
    return share


def under_paper_attack(
    shop: Workshop, subject: Subject, x: Tensor, y: Tensor, attack: PGD, label: str = "paper"
) -> Data:
    """The curve of the paper's attack with its growing radius."""
    assert attack.growth is not None
    size, parts = _batch(x), []
    with shop.part(f"{subject.name}.{label}", _depends(shop, subject, x, y, attack)) as folder:
        for k, (here, labels) in enumerate(zip(x.split(size), y.split(size), strict=True)):

            def measured(here: Tensor = here, labels: Tensor = labels) -> dict[str, Tensor]:
                return _broken_at(subject.model, attack, here, labels, shop.settings.seed)

            path = folder / f"batch-{k:05d}.safetensors"
            parts.append(shop.once(path, ("radius", "mass_error"), measured))
    radius, off = (torch.cat([state[name] for state, _ in parts]) for name in ("radius", "mass_error"))
    found, seconds = (radius > 0) & radius.isfinite(), sum(seconds for _, seconds in parts)
    radii = [float(attack.growth.at(attack.ball.eps, s)) for s in range(0, attack.steps, attack.growth.every)]
    made = {
        "attack": f"PGD.paper, p = {_power(attack.ball):g}",
        "images": len(radius),
        "curve": [{"eps": r, "accuracy": float((radius > r * (1 + 1e-9)).double().mean())} for r in (0.0, *radii)],
        "examples": {
            "found": int(found.sum()),
            "mass_off": int((found & (off > MASS_TOL)).sum()),
            "mean_mass_error": float(off[found].mean()) if bool(found.any()) else 0.0,
            "largest_mass_error": float(off.max()),
        },
        "seconds": round(seconds, 2),
    }
    shop.say(_told(subject, made, seconds))
    shop.spent += seconds
    return made


def _broken_at(model: nn.Module, attack: Attack, x: Tensor, y: Tensor, seed: int) -> dict[str, Tensor]:
    """The radius at which each image was broken (0: wrong as it is, inf: never), and how far its mass is off then."""
    found = attack(model, x, y, generator=torch.Generator(x.device).manual_seed(seed))
    right = predicted(model, x) == y
    before, after = x.double().sum((2, 3)), found.images.double().sum((2, 3))
    off = (after - before).abs().amax(1) / before.sum(1).clamp(min=1e-300)
    return {
        "radius": torch.where(right, torch.where(found.success, found.radius, math.inf), 0.0),
        "mass_error": torch.where(found.success & right, off, 0.0),
    }


def certified(
    shop: Workshop, subject: Subject, x: Tensor, y: Tensor, method: Method, radii: Sequence[float]
) -> tuple[Tensor, float]:
    """The largest of the radii certified per image (0: none), and the seconds.

    By bisection: balls are nested, so a proof covers smaller ones.
    """
    levels = sorted(radii)
    depends = [subject.sha256, shop.fingerprint(x, y), method, levels, x.device.type]
    with shop.part(f"{subject.name}.{method}", depends) as folder:
        path = folder / "part.safetensors"
        part = shop.kept(path, "proved", "possible")
        if part is not None:
            state, notes = part
        else:
            none = torch.zeros(len(x), dtype=torch.long)
            state, notes = {"proved": none, "possible": torch.full_like(none, len(levels))}, {"seconds": 0.0}
        proved, possible = state["proved"], state["possible"]  # how many of the radii
        while bool((proved < possible).any()):
            clock, trial = Clock(x.device), (proved + possible + 1) // 2
            level = int(trial[proved < possible].min())
            index = ((proved < possible) & (trial == level)).nonzero().squeeze(1)[:PROOFS_AT_ONCE]
            here = index.to(x.device)
            proof = certify(subject.model, x[here], y[here], WassersteinBall(levels[level - 1]), method, refine=False)
            holds = proof.certified.cpu()
            proved[index[holds]], possible[index[~holds]] = level, level - 1
            notes["seconds"] += clock.seconds()
            shop.keep(path, state, notes)
    radius, seconds = torch.tensor([0.0, *levels], dtype=torch.float64)[proved], float(notes["seconds"])
    shares = ", ".join(f"{100 * float((radius >= r).double().mean()):.1f} at {r:g}" for r in levels)
    shop.say(f"{subject.name}, {method}: certified {shares} (% of {len(x)}; {seconds:.1f} s)")
    shop.spent += seconds
    return radius, seconds


@torch.no_grad()
def predicted(model: nn.Module, x: Tensor) -> Tensor:
    """The model's classes, a few images at a time; NaN is no class (-1)."""
    return torch.cat([top_class(model(part)) for part in x.split(_batch(x))]) if len(x) else x.new_zeros(0).long()


def _batch(x: Tensor) -> int:
    return (COLOUR_BATCH if x.shape[1] == 3 else BATCH).get(x.device.type, 100)


def _power(ball: Any) -> float:
    return float(getattr(ball.cost, "p", 1.0))


def _depends(shop: Workshop, subject: Subject, x: Tensor, y: Tensor, attack: Attack) -> list[Any]:
    """Everything that a measurement depends on."""
    return [subject.sha256, shop.fingerprint(x, y), describe(attack), shop.settings.seed, x.device.type]


def _told(subject: Subject, made: Data, seconds: float) -> str:
    points = made["curve"][1:]
    shown = points if len(points) <= 9 else points[:: math.ceil(len(points) / 8)]
    accuracies = ", ".join(f"{100 * p['accuracy']:.1f} at {p['eps']:.3g}" for p in shown)
    return f"{subject.name}, {made['attack']}: {accuracies} (% of {made['images']}; {seconds:.1f} s)"
