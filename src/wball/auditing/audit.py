r"""An independent check of every claim: is this image in that ball?

Three conditions are computed in float64 by :meth:`wball.ball.Ball.violations`:

- *mass*: ``max_c |sum z_c - sum x_c| <= 1e-5 * m`` over channels ``c``, with ``m`` the mass of
  ``x``, in balls that keep the mass;
- *box*: no pixel is outside the ball's box by more than 1e-6;
- *distance*: the exact distance, in the unit of ``eps``, is at most ``eps * (1 + 1e-4)``, plus
  rounding.

Wasserstein balls use :mod:`wball.auditing.violations`, which imports no solver and no kernel. A
plan bounds the distance without solving for it (:mod:`wball.auditing.proof`), and attacks usually
return one. Transport problems are then solved for images without such a proof, and for all or a
sample of the others.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wball import inputs
from wball.auditing.violations import BOX_TOL, DISTANCE_TOL, MASS_TOL, Violations, check_point
from wball.ball import Ball, check_ball
from wball.display import Summarised
from wball.plan import StoredPlan


@dataclass(frozen=True, repr=False)
class AuditReport(Summarised):
    """Result of an audit, one entry per image.

    Attributes:
        mass_error: largest difference of a channel's mass, as a fraction of the image's mass (inf:
            not finite).
        box_violation: how far the worst pixel is outside the box (inf: not finite).
        distance: transport distance (or largest change of a pixel) in the unit of ``eps``; inf if
            no plan exists.
        valid: whether all three are within their tolerances.
        exact: whether ``distance`` is exact; if not, it is an upper bound by a checked plan.
        eps: radius of each image.
        reasons: why an image is not valid, in words; empty for valid ones.
        unit: the unit of ``distance`` and ``eps``.
    """

    mass_error: Tensor
    box_violation: Tensor
    distance: Tensor
    valid: Tensor
    exact: Tensor
    eps: Tensor
    reasons: tuple[str, ...]
    unit: str

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def all_valid(self) -> bool:
        return bool(self.valid.all())

    @property
    def n_valid(self) -> int:
        return int(self.valid.sum())

    @property
    def n_invalid(self) -> int:
        return len(self) - self.n_valid

    def headline(self) -> dict[str, str]:
        return {"images": str(len(self)), "valid": str(self.n_valid)}

    def summary(self) -> str:
        """Counts, the worst of each measure, and the reasons of the first invalid images."""
        if len(self) == 0:
            return "audit of 0 images"
        mass, box, far = (
            float(values.max()) for values in (self.mass_error, self.box_violation, self.distance)
        )
        over = float(torch.where(self.distance > 0, self.distance / self.eps, 0.0).max())
        lines = [
            f"audit of {len(self)} images: {self.n_valid} valid, {self.n_invalid} invalid",
            f"  mass error     at most {mass:.3g} (allowed {MASS_TOL:g})",
            f"  box violation  at most {box:.3g} (allowed {BOX_TOL:g})",
            f"  distance       at most {far:.6g} {self.unit}, {over:.6g} x eps "
            f"(allowed {1 + DISTANCE_TOL:g} x eps)",
        ]
        if not bool(self.exact.all()):
            exact = int(self.exact.sum())
            lines[-1] += f"; exact for {exact}, an upper bound by a checked plan for the others"
        bad = [(k, reason) for k, reason in enumerate(self.reasons) if reason]
        lines += [f"  image {k}: {reason}" for k, reason in bad[:5]]
        if len(bad) > 5:
            lines.append(f"  and {len(bad) - 5} more")
        return "\n".join(lines)

    __str__ = summary


def audit(
    ball: Ball,
    x: Tensor,
    z: Tensor,
    *,
    plan: StoredPlan | Tensor | None = None,
    exact: Literal["all", "needed", "sample"] = "all",
    sample: int = 100,
    generator: torch.Generator | None = None,
    workers: int = 1,
) -> AuditReport:
    """Check that each ``z`` is in the ball around its ``x``; see the module for the checks. Bad
    *contents* of ``z`` (NaN, negative pixels, lost mass) are findings, not errors. A ``z`` of the
    wrong shape and invalid centres ``x`` raise an error.

    Args:
        ball: the threat model.
        x: the centres, ``(B, C, H, W)`` or ``(B, n)``.
        z: the points to be checked.
        plan: plans that claim to turn ``x`` into ``z``: the ``plan`` of a projection or the
            ``proof`` of an attack. Every move is checked.
        exact: ``"all"``: solve the transport problem of every image. ``"needed"``: only of images
            whose plan does not prove a small enough distance. ``"sample"``: those, and ``sample``
            of the others at random.
        sample: number of images that ``"sample"`` solves although their plans are proofs.
        generator: random generator of the sample (CPU).
        workers: number of threads that solve transport problems.

    >>> from wball import WassersteinBall
    >>> x = torch.zeros(1, 1, 4, 4, dtype=torch.float64); x[..., 1, 1] = 1.0
    >>> z = 0.75 * x + 0.25 * x.roll(1, 3)
    >>> audit(WassersteinBall(0.5), x, z).valid
    tensor([True])
    >>> audit(WassersteinBall(0.1), x, z).reasons
    ('distance 0.25 is 2.5 x eps',)
    """
    check_ball(ball)
    if exact not in ("all", "needed", "sample"):
        raise ValueError(f'exact must be "all", "needed" or "sample", got {exact!r}')
    inputs.check_count("sample", sample, least=0)
    inputs.check_count("workers", workers)
    x = inputs.check_images(x, ball.box)
    z = check_point(z, x)
    inputs.check_eps_count(ball.eps, len(x))
    eps = torch.as_tensor(ball.eps, dtype=torch.float64, device=x.device).expand(len(x)).clone()
    if plan is None:
        found = _measured(ball, x, z, workers)
    else:
        found = ball.violations(x, z, plan)
        todo = ~found.exact
        if exact != "all":
            todo &= ~(found.distance <= found.allowed(eps))
        if exact == "sample":
            others = (~found.exact & ~todo).nonzero().squeeze(1)
            drawn = torch.randperm(len(others), generator=generator)[:sample].to(others.device)
            todo[others[drawn]] = True
        index = todo.nonzero().squeeze(1)
        found = found.put(index, _measured(ball.take(index), x[index], z[index], workers))
    finite = z.detach().isfinite().flatten(1).all(1)
    measures = (finite, found.mass_error, found.box_violation, found.distance, eps)
    rows = zip(*(m.tolist() for m in (*measures, found.allowed(eps))), strict=True)
    return AuditReport(
        found.mass_error,
        found.box_violation,
        found.distance,
        found.within(eps),
        found.exact,
        eps,
        tuple(_reason(*row) for row in rows),
        ball.unit,
    )


def _measured(ball: Ball, x: Tensor, z: Tensor, workers: int) -> Violations:
    """The exact violations of the ball, computed by several threads: the solver mostly releases
    Python's lock."""
    if workers == 1 or len(x) < 2:
        return ball.violations(x, z)
    parts = torch.arange(len(x), device=x.device).tensor_split(min(4 * workers, len(x)))
    with ThreadPoolExecutor(workers) as pool:
        return Violations.joined(
            list(pool.map(lambda k: ball.take(k).violations(x[k], z[k]), parts))
        )


def _reason(
    finite: bool, mass: float, box: float, distance: float, eps: float, allowed: float
) -> str:
    """The reason why an image is invalid, in words."""
    if not finite:
        return "NaN or infinite pixels"
    found = []
    if not mass <= MASS_TOL:
        found.append(f"mass is off by {mass:.3g} of the image's mass in a channel")
    if not box <= BOX_TOL:
        found.append(f"a pixel is {box:.3g} outside the box")
    if distance == math.inf:
        found.append("no plan within the moves of the cost turns x into z")
    elif not distance <= allowed:
        ratio = f"{distance / eps:.6g} x eps" if eps > 0 else "more than eps = 0"
        found.append(f"distance {distance:.6g} is {ratio}")
    return "; ".join(found)
