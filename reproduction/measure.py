"""What becomes of a model: under :func:`wball.evaluate`, under the paper's attack, and under
certificates.

Ours is :func:`wball.evaluate` and nothing else: the model is asked about the very image, and every
example that counts passes the audit. The paper's attack lets the radius grow until an image is
broken, so one run gives the whole curve; its points are clamped and lie in no ball, which is
measured, too, and is why no evaluation would count them.

Everything is kept in parts (:meth:`Workshop.part`): an interrupted recipe resumes, and recipes
share what they measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reproduction.workshop import Data, Subject, Workshop
from wball import provenance
from wball.attacks import PGD, Attack, StandardAttack
from wball.attacks.standard import Version
from wball.auditing.violations import MASS_TOL
from wball.ball import WassersteinBall
from wball.certificates import certify
from wball.certificates.certificate import Method
from wball.evaluation import Evaluation, evaluate
from wball.model import top_class
from wball.provenance import describe_settings

BATCH = {"cpu": 100, "cuda": 5000}
COLOUR_BATCH = {"cpu": 50, "cuda": 1000}
"""Images at a time. Colour images go through ResNet-18, whose activations fill the memory."""
PROOFS_AT_ONCE = 1_000
"""Images that are certified in one call."""


def evaluated(
    shop: Workshop,
    subject: Subject,
    x: Tensor,
    y: Tensor,
    radii: Sequence[float],
    ball: WassersteinBall | None = None,
    version: Version | None = None,
) -> tuple[Evaluation, float]:
    """:func:`wball.evaluate` at these radii (:class:`wball.StandardAttack`, fast in quick runs),
    and its seconds."""
    version = version or ("fast" if shop.quick else "standard")
    ball = ball or WassersteinBall(max(radii))
    attack = StandardAttack(ball, version=version, check=False, progress=False)
    depends = [*_depends(shop, subject, x, y, attack), sorted(radii), provenance.versions()]
    with (
        shop.part(f"{subject.name}.{version}-p{_power(ball):g}", depends) as folder,
        shop.noted(folder) as notes,
    ):
        options: dict[str, Any] = {
            "out": folder / "evaluation",
            "seed": shop.settings.seed,
            "name": subject.name,
        }
        result = evaluate(subject.model, x, y, ball, radii, attack, **options)
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
            parts.append(shop.once(path, measured))
    radius, off = (
        torch.cat([state[name] for state, _ in parts]) for name in ("radius", "mass_error")
    )
    found, seconds = (radius > 0) & radius.isfinite(), sum(seconds for _, seconds in parts)
    radii = [
        float(attack.growth.at(attack.ball.eps, s))
        for s in range(0, attack.steps, attack.growth.every)
    ]
    made = {
        "attack": f"PGD.paper, p = {_power(attack.ball):g}",
        "images": len(radius),
        "curve": [
            {"eps": r, "accuracy": float((radius > r * (1 + 1e-9)).double().mean())}
            for r in (0.0, *radii)
        ],
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


def _broken_at(
    model: nn.Module, attack: Attack, x: Tensor, y: Tensor, seed: int
) -> dict[str, Tensor]:
    """The radius at which each image was broken (0: wrong as it is, inf: never), and how far its
    mass is off then."""
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

    From small to large: balls are nested, so what is not certified in one is not in the next.
    """
    depends = [subject.sha256, provenance.fingerprint(x, y), method, sorted(radii), x.device.type]
    radius, spent = torch.zeros(len(x), dtype=torch.float64), 0.0
    with shop.part(f"{subject.name}.{method}", depends) as folder:
        index = torch.arange(len(x))
        for eps in sorted(radii):

            def proved(eps: float = eps, index: Tensor = index) -> dict[str, Tensor]:
                ball, parts = WassersteinBall(eps), index.to(x.device).split(PROOFS_AT_ONCE)
                proofs = [certify(subject.model, x[part], y[part], ball, method) for part in parts]
                return {"index": index, "certified": torch.cat([p.certified for p in proofs])}

            part, seconds = shop.once(folder / f"{eps:g}.safetensors", proved)
            index, spent = part["index"][part["certified"]], spent + seconds
            radius[index] = eps
    shop.say(
        f"{subject.name}, {method}: {int((radius > 0).sum())} of {len(x)} images certified ({spent:.1f} s)"
    )
    shop.spent += spent
    return radius, spent


@torch.no_grad()
def predicted(model: nn.Module, x: Tensor) -> Tensor:
    """The model's classes, a few images at a time; NaN is no class (-1)."""
    return torch.cat([top_class(model(part)) for part in x.split(_batch(x))])


def _batch(x: Tensor) -> int:
    return (COLOUR_BATCH if x.shape[1] == 3 else BATCH).get(x.device.type, 100)


def _power(ball: Any) -> float:
    return float(getattr(ball.cost, "p", 1.0))


def _depends(shop: Workshop, subject: Subject, x: Tensor, y: Tensor, attack: Attack) -> list[Any]:
    """Everything that a measurement depends on."""
    return [
        subject.sha256,
        provenance.fingerprint(x, y),
        describe_settings(attack),
        attack.describe(),
        shop.settings.seed,
        x.device.type,
    ]


def _told(subject: Subject, made: Data, seconds: float) -> str:
    last = made["curve"][-1]
    share = f"{100 * last['accuracy']:.1f} % at eps {last['eps']:.3g}"
    return f"{subject.name}, {made['attack']}: {share}, {made['images']} images ({seconds:.1f} s)"
