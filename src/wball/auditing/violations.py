"""How far an image is from being in a ball (:meth:`wball.ball.Ball.violations`), and tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

MASS_TOL = 1e-5
BOX_TOL = 1e-6
DISTANCE_TOL = 1e-4


@dataclass(frozen=True)
class Violations:
    """Measures of images against a ball, one entry per image, in float64.

    Attributes:
        mass_error: largest difference of a channel's mass, as a fraction of the image's mass (inf:
            not finite); 0 in balls that do not keep the mass.
        box_violation: how far the worst pixel is outside the box (inf: not finite).
        distance: distance from the centre in the unit of ``eps``; inf if it cannot be reached.
        rounding: what rounding in the image's dtype can add to the distance; granted on top of
            ``eps``.
        exact: whether ``distance`` is exact; if not, it is an upper bound by a checked plan.
    """

    mass_error: Tensor
    box_violation: Tensor
    distance: Tensor
    rounding: Tensor
    exact: Tensor

    def allowed(self, eps: float | Tensor, tol: float = DISTANCE_TOL) -> Tensor:
        """The largest distance that counts as ``eps``."""
        return (
            torch.as_tensor(eps, dtype=torch.float64, device=self.distance.device) * (1 + tol)
            + self.rounding
        )

    def within(self, eps: float | Tensor, tol: float = DISTANCE_TOL) -> Tensor:
        """Which images are in the ball of radius ``eps``, within the tolerances."""
        whole = (self.mass_error <= MASS_TOL) & (self.box_violation <= BOX_TOL)
        return whole & (self.distance <= self.allowed(eps, tol))

    def put(self, index: Tensor, part: Violations) -> Violations:
        """These with the images at ``index`` replaced."""
        pairs = ((getattr(self, f.name), getattr(part, f.name)) for f in fields(self))
        return Violations(*(mine.index_copy(0, index, theirs) for mine, theirs in pairs))

    @staticmethod
    def joined(parts: Sequence[Violations]) -> Violations:
        """Those of several batches as one."""
        return Violations(
            *(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Violations))
        )


def check_point(z: Tensor, x: Tensor) -> None:
    """Raise unless ``z`` has the type and shape of ``x``; its contents are not checked."""
    if not isinstance(z, Tensor) or not z.is_floating_point():
        kind = z.dtype if isinstance(z, Tensor) else type(z).__name__
        raise TypeError(f"z must be a floating-point torch.Tensor, got {kind}")
    if z.shape != x.shape:
        raise ValueError(f"z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")


def half_ulp(z: Tensor) -> float:
    """Half a unit in the last place at 1; half precision gets no more than float32."""
    return 0.5 * min(torch.finfo(z.dtype).eps, torch.finfo(torch.float32).eps)


def box_violation(z: Tensor, box: tuple[float, float]) -> Tensor:
    """How far the worst pixel of each image is outside ``box``, in float64; inf if not finite."""
    values = z.detach().to(torch.float64).flatten(1)
    off = torch.maximum(box[0] - values.amin(1), values.amax(1) - box[1]).clamp(min=0)
    return torch.where(values.isfinite().all(1), off, torch.inf)
