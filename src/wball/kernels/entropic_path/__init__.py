"""The entropic path: the engine behind the exact support function and entropic projections."""

from __future__ import annotations

from torch import Tensor

from wball.kernels import dispatch
from wball.kernels.books import Best, Problem


def entropic_path(
    problem: Problem, start: Tensor, tau_start: Tensor, max_iter: int, best: Best, *, kernel: str
) -> Tensor:
    """Follow the path of every image and improve ``best``; returns the Newton steps used.

    Exact linear columns are tried without their box first, and without a box nothing else is.

    Args:
        problem: exact or entropic. Exact projections are a matter of :mod:`wball.kernels.proximal_newton`.
        start: column potentials to start from.
        tau_start: temperature of the first level.
        max_iter: Newton steps.
        best: what is known, improved in place.
        kernel: who serves, as :func:`wball.kernels.dispatch.choose` says.
    """
    steps: Tensor = dispatch.load("entropic_path", kernel).entropic_path(
        problem, start, tau_start, max_iter, best
    )
    return steps


def without_box(problem: Problem, max_iter: int, best: Best) -> Tensor:
    """Linear columns without their box: one scalar equation an image, solved by torch for all at once.

    Plans are repaired into the box, which leaves nothing to do for many images.
    """
    steps: Tensor = dispatch.load("entropic_path", "torch").without_box(problem, max_iter, best)
    return steps
