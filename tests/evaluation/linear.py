"""A linear model whose evaluation can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import wball
from wball.attacks import Attack, AttackResult, AttackStatus
from wball.attacks.findings import Finding
from wball.evaluation import Evaluation, evaluate

BALL = wball.WassersteinBall(0.4)
RADII = [0.1, 0.2, 0.4]


def problem(count: int = 12, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Blurry two-spot images, and a linear model that weighs the left half against the right
    one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 6, 6, generator=generator).square() * 0.8
    weight = torch.linspace(-1, 1, 6).repeat(6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-weight, weight]))
        model[1].bias.zero_()
    y = model(x).argmax(1)
    y[0] = 1 - y[0]  # one image that is wrong as it is
    return model.eval(), x, y


def attack(**changes: Any) -> wball.DualAveraging:
    return wball.DualAveraging(BALL, steps=8, **changes)


def measure(model: Any, x: Tensor, y: Tensor, **options: Any) -> Evaluation:
    """The evaluation of the linear problem, with other options."""
    return evaluate(model, x, y, BALL, **{"radii": RADII, "attack": attack(), **options})


def bytes_in_classes(count: int = 14) -> tuple[nn.Module, Tensor, Tensor]:
    """8-bit images in four classes, and a linear model that knows them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(4, 36, generator=generator))
        model[1].bias.zero_()
    return model, x, model(x.float() / 255).argmax(1)


CHANGES = {
    "copy": Tensor.clone,
    "darken": lambda x: x * 0.5,
    "mirror": lambda x: x.flip(3),  # far outside the ball
}


@dataclass(frozen=True)
class Claims(Attack):
    """Claims success on every image, or on none if it changes nothing, and reports findings."""

    how: str = "copy"
    codes: tuple[str, ...] = ()

    def stored(self, found: AttackResult, *rest: Any, **more: Any) -> AttackResult:
        return found  # the base class would take false claims back

    @property
    def n_gradients(self) -> int:
        return 1

    def attack_batch(self, task: Any, *rest: Any) -> AttackResult:
        x = task.x
        found = torch.full((len(x),), self.how in CHANGES)
        one = found.double()
        status = (AttackStatus.FOUND if self.how in CHANGES else AttackStatus.SURVIVED,) * len(x)
        findings = tuple(Finding(code, len(x), len(x)) for code in self.codes)
        z = CHANGES.get(self.how, Tensor.clone)(x)
        return AttackResult(z, found, 0 * one, one, one.long(), status, one, findings=findings)
