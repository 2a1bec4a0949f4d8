"""What a certificate is about: its arguments, checked alike for every call, and their
fingerprints."""

from __future__ import annotations

import torch
from torch import Tensor

from wball import inputs
from wball.ball import Ball
from wball.certificates.program import Program
from wball.model import check_classes
from wball.provenance import fingerprint
from wball.storage.files import json_checksum

PLANS = ("full", "window")
SUBJECT = ("program", "images", "labels", "ball")


def check_plans(plans: object) -> None:
    """Raise unless ``plans`` is one of the two words, exactly."""
    if not isinstance(plans, str) or plans not in PLANS:
        raise ValueError(f'plans must be "full" or "window", got {plans!r}')


def checked(x: Tensor, y: Tensor, ball: Ball, plans: object) -> tuple[Tensor, Tensor]:
    """Images and labels of a call, after a check of all its arguments."""
    check_plans(plans)
    if not callable(getattr(ball, "input_set", None)):
        raise TypeError(
            "ball must be a threat model with a method input_set (docs/extending.md), got "
            f"{type(ball).__name__}"
        )
    x = inputs.check_images(x, ball.box)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    inputs.check_eps_count(ball.eps, x.shape[0])
    return x.detach(), inputs.check_labels("y", y, x)


def check_classes_of(program: Program, y: Tensor) -> None:
    """Raise if the program has no logit for a label."""
    check_classes("y", y, program.logits.meta["val"])


def subject_of(program: Program | None, x: Tensor, y: Tensor, ball: Ball) -> dict[str, str]:
    """SHA-256 of what a certificate is about, by name."""
    found = {} if program is None else {"program": program.fingerprint}
    found["images"], found["labels"] = fingerprint(x.double()), fingerprint(y.long())
    eps = torch.as_tensor(ball.eps, dtype=torch.float64).expand(x.shape[0])
    found["ball"] = json_checksum({**ball.describe(), "eps": fingerprint(eps)})
    return found
