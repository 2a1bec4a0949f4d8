"""What attacks return, and how results of batches become one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from wball.attacks.findings import Finding, merged, reliable
from wball.display import Summarised, percent
from wball.plan import StoredPlan
from wball.result import joined_kernels


class AttackStatus(Enum):
    """How an attack ended for an image. The value is the explanation, with the remedy where there
    is one."""

    FOUND = "an adversarial example was found"
    ALREADY_WRONG = "the clean image already meets the goal: distance 0"
    SURVIVED = (
        "no adversarial example was found: more steps, restarts or StandardAttack may find one"
    )
    NO_GRADIENT = (
        "the gradient was zero or not finite: the model may mask it; try another objective"
    )

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


STATUSES = tuple(AttackStatus)


@dataclass(frozen=True, repr=False)
class AttackResult(Summarised):
    """What an attack found, in the order of the images.

    Attributes:
        images: per image the adversarial example, or the best attempt; always in the ball.
        success: whether ``images`` meets the goal (``argmax != y``, or ``argmax == target``).
        distance: upper bound of the distance from ``x`` that the attack's plan proves, in the unit
            of ``eps``, float64.
        loss: value of the objective at ``images`` (the cross-entropy, for that objective).
        n_steps: steps used, per image.
        status: how it ended, per image.
        radius: radius of the ball each image was found in (or the last one tried), float64.
        member: for ensembles, which attack found it (-1: none).
        kernel: which implementation served the ball; several are joined by ``+``, and it is
            ``"none"`` where no step was made.
        proof: the plans behind ``distance``, where the attack was asked for them (``proofs=True``)
            and knows them: ``wball.audit(ball, x, result.images, plan=result.proof,
            exact="needed")`` then has nothing to solve.
        queries: forward passes used, per image, by attacks that count them.
        rising: whether the loss was still rising over the last steps, so that as many steps again
            may break the image, by attacks that make steps.
        findings: reasons to doubt the robust accuracy, from attacks that look for them.
    """

    images: Tensor
    success: Tensor
    distance: Tensor
    loss: Tensor
    n_steps: Tensor
    status: tuple[AttackStatus, ...]
    radius: Tensor
    member: Tensor | None = None
    kernel: str = "none"
    proof: StoredPlan | None = None
    queries: Tensor | None = None
    rising: Tensor | None = None
    findings: tuple[Finding, ...] = ()

    def take(self, index: Tensor) -> AttackResult:
        """The result of a subset of the images, without plans."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        parts: dict[str, Any] = {n: t[index] for n, t in tensors.items() if isinstance(t, Tensor)}
        status = tuple(self.status[i] for i in index.tolist())
        return replace(self, status=status, proof=None, **parts)

    @property
    def reliable(self) -> bool:
        """Whether no finding says that the robust accuracy may be too high."""
        return reliable(self.findings)

    def headline(self) -> dict[str, str]:
        broken = self.distance[self.success]
        shown = {"images": str(len(self.success)), "robust accuracy": percent(self.robust_accuracy)}
        if len(broken):
            shown["median distance"] = f"{float(broken.median()):.4g}"
        return {**shown, "steps": str(int(self.n_steps.sum())), "kernel": self.kernel}

    @property
    def robust_accuracy(self) -> float:
        """The share of images that no adversarial example was found for."""
        return self.accuracy_at(math.inf)

    def accuracy_at(self, eps: float) -> float:
        """The share of images that no adversarial example was found for at a radius up to
        ``eps``."""
        if self.success.numel() == 0:
            return 1.0
        wrong = torch.tensor(
            [s is AttackStatus.ALREADY_WRONG for s in self.status], device=self.success.device
        )
        return 1.0 - float((self.success & (wrong | (self.radius <= eps))).double().mean())


def empty(x: Tensor) -> AttackResult:
    """The result of an attack on no images."""
    none = torch.zeros(0, device=x.device)
    return AttackResult(x.clone(), none.bool(), none.double(), none, none.long(), (), none.double())


def without(found: AttackResult, index: Tensor) -> AttackResult:
    """The result with no example claimed at ``index``."""
    if index.numel() == 0:
        return found
    success, status = found.success.clone(), list(found.status)
    success[index] = False
    for i in index.tolist():
        status[i] = AttackStatus.SURVIVED
    return replace(found, success=success, status=tuple(status))


def updated(best: AttackResult, index: Tensor, found: AttackResult, better: Tensor) -> AttackResult:
    """``best`` with the images at ``index`` replaced where a later attack did ``better``."""
    where = index[better]

    def put(old: Tensor, new: Tensor) -> Tensor:
        out = old.clone()
        out[where] = new[better]
        return out

    steps, queries = best.n_steps.clone(), best.queries
    steps[index] += found.n_steps
    if queries is not None and found.queries is not None:
        queries = queries.clone()
        queries[index] += found.queries
    proof = None
    if best.proof is not None and found.proof is not None:
        proof = best.proof.put(where, found.proof.take(better))
    status = list(best.status)
    for i, state, success in zip(index.tolist(), found.status, found.success.tolist(), strict=True):
        # One attack with a gradient is enough to say that the image survived.
        if success or status[i] is AttackStatus.NO_GRADIENT:
            status[i] = state
    names = ["images", "success", "distance", "loss", "radius"]
    names += ["member"] if best.member is not None and found.member is not None else []
    parts: dict[str, Any] = {name: put(getattr(best, name), getattr(found, name)) for name in names}
    return replace(
        best,
        **parts,
        n_steps=steps,
        status=tuple(status),
        kernel=joined_kernels((best.kernel, found.kernel)),
        proof=proof,
        queries=queries,
    )


def joined(parts: list[AttackResult]) -> AttackResult:
    """The results of several batches as one."""
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, Any] = {
        item.name: torch.cat([getattr(part, item.name) for part in parts])
        for item in fields(AttackResult)
        if isinstance(getattr(parts[0], item.name), Tensor)
    }
    proofs = [part.proof for part in parts if part.proof is not None]
    return AttackResult(
        **tensors,
        status=sum((part.status for part in parts), ()),
        kernel=joined_kernels(part.kernel for part in parts),
        proof=StoredPlan.joined(proofs) if len(proofs) == len(parts) else None,
        findings=merged(finding for part in parts for finding in part.findings),
    )
