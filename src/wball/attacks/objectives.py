r"""What an attack climbs: functions of the logits, larger meaning closer to success.

======================  =============================================  ==========================================
name                    untargeted (true class y)                      targeted (class t)
======================  =============================================  ==========================================
``"cross-entropy"``     :math:`\log\sum_{k \ne y} e^{o_k} - o_y`       :math:`o_t - \log\sum_{k \ne t} e^{o_k}`
``"margin"``            :math:`\max_{k \ne y} o_k - o_y`               :math:`o_t - \max_{k \ne t} o_k`
``"dlr"``               margin / :math:`(o_{(1)} - o_{(3)})`           :math:`o_t - o_y` /
                                                                       :math:`(o_{(1)} - (o_{(3)} +
                                                                       o_{(4)})/2)`
``"runner-up-k"``       :math:`o_r - o_y`, r = k-th best wrong class   as ``"margin"``
                        of the clean image
======================  =============================================  ==========================================

The cross-entropy is ``softplus`` of the first, with the same gradient up to a factor ``1 - p_y``
per image. For a confident model that factor is 0 in float32, and the gradient with it. Attacks
normalise the gradient anyway, so they climb the form without the factor, and report the
cross-entropy.

A user's own objective is any callable ``(logits, y, target) -> (B,)`` with ``target`` ``None`` in
untargeted attacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _at(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label[:, None]).squeeze(1)


def _others(logits: Tensor, label: Tensor) -> Tensor:
    return logits.scatter(1, label[:, None], -torch.inf)


def cross_entropy(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """Log-odds of all wrong classes against ``y``; targeted: of ``target`` against all others.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.])
    """
    if target is not None:
        return _at(logits, target) - torch.logsumexp(_others(logits, target), 1)
    return torch.logsumexp(_others(logits, y), 1) - _at(logits, y)


def margin(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """How far the best wrong class is above ``y``; targeted: ``target`` above the best other
    one."""
    if target is not None:
        return _at(logits, target) - _others(logits, target).amax(1)
    return _others(logits, y).amax(1) - _at(logits, y)


def dlr(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """Difference of logits ratio: the margin in units of the spread of the largest logits, so
    invariant to their scale.

    The formula needs three classes, four if targeted; with fewer this is the margin.
    """
    if logits.shape[1] < (3 if target is None else 4):
        return margin(logits, y, target)
    top = logits.topk(4 if target is not None else 3, 1).values
    tiny = torch.finfo(logits.dtype).eps
    if target is not None:
        return (_at(logits, target) - _at(logits, y)) / (
            top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + tiny
        )
    return margin(logits, y) / (top[:, 0] - top[:, 2] + tiny)


@dataclass(frozen=True)
class RunnerUp:
    """The margin of one fixed wrong class over ``y``: the ``rank``-th most likely one on the clean
    image."""

    rank: int = 1

    def rival(self, clean_logits: Tensor, y: Tensor) -> Tensor:
        """The class to aim at, per image; the least likely one if there are not that many."""
        wrong = max(1, min(self.rank, clean_logits.shape[1] - 1))
        return _others(clean_logits, y).topk(wrong, 1).indices[:, -1]

    def __call__(self, logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
        """``target`` is the rival here; success does not require it to win."""
        if target is None:
            return margin(logits, y)
        return _at(logits, target) - _at(logits, y)


_NAMED: dict[str, Objective] = {"cross-entropy": cross_entropy, "margin": margin, "dlr": dlr}


def find(objective: str | Objective) -> Objective:
    """An objective by its name, or the callable itself."""
    if callable(objective):
        return objective
    if isinstance(objective, str):
        runner_up = re.fullmatch(r"runner-up-([1-9]\d*)", objective)
        if runner_up:
            return RunnerUp(int(runner_up.group(1)))
        if objective in _NAMED:
            return _NAMED[objective]
    raise ValueError(
        f'objective must be one of {", ".join(_NAMED)}, "runner-up-<k>", or a callable, got {objective!r}'
    )


def slope(value: Tensor, z: Tensor) -> Tensor:
    """The gradient of an objective at ``z``; 0 where the model cuts the graph, or torch has no
    derivative."""
    gradient = None
    if value.requires_grad:
        with suppress(NotImplementedError):
            (gradient,) = torch.autograd.grad(value.sum(), z, allow_unused=True)
    return torch.zeros_like(z) if gradient is None else gradient


def report(objective: Objective, value: Tensor, *, targeted: bool) -> Tensor:
    """The value to show for a score: the cross-entropy of ``y`` (minus that of the target) instead
    of its log-odds."""
    if objective is not cross_entropy:
        return value
    return -F.softplus(-value) if targeted else F.softplus(value)
