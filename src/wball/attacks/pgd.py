r"""Projected gradient ascent: a steepest step, then the nearest point of the ball.

.. math::
    w = \arg\max_{\|w - z\| \le \alpha} \langle \nabla \ell(z), w \rangle, \qquad
    z \leftarrow \mathrm{proj}_{B(x, \epsilon)}(w)

The norm of the step is a choice: ``"linf"`` gives ``z + alpha * sign(g)``, ``"l2"`` gives ``z + alpha * g / |g|_2``,
and ``"wasserstein"`` moves to the farthest point of the ball of radius ``alpha`` around ``z`` itself (the paper's
conjugate). On a :class:`~wball.LinfBall` the first is the basic iterative method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.base import Climb, GradientAttack, distance_bound, plan_of_nothing, spread
from wball.attacks.dual_averaging import normalised
from wball.attacks.schedule import GrowingRadius
from wball.ball import LinfBall, WassersteinBall
from wball.cost import GridCost
from wball.plan import Plan
from wball.solvers.entropic import EntropicProjection

Step = Literal["linf", "l2", "wasserstein"]


@dataclass(frozen=True)
class PGD(GradientAttack):
    """Projected gradient ascent on any ball.

    Attributes:
        steps: gradient steps.
        step_size: ``alpha``: in pixel values for ``"linf"`` and ``"l2"``, in the unit of ``eps`` for ``"wasserstein"``.
            ``None`` takes ``2.5 * eps / steps`` on a ``LinfBall``, 0.1 otherwise.
        step: the norm of the step.
        reg: the paper's lambda, for the projection and the Wasserstein step; ``inf`` is exact.
        random_start: start at a random point of the ball.
        growth: let the radius grow from ``ball.eps``; ``None`` keeps it.
        mode: ``"paper"`` projects by the original procedure, which clamps and so leaves every ball: ``distance`` is
            then ``nan``. Only for comparison.
        tol: tolerance of the projection.
        max_iter: iterations of the projection.
    """

    steps: int = 40
    step_size: float | None = None
    step: Step = "linf"
    reg: float = math.inf
    random_start: bool = False
    growth: GrowingRadius | None = None
    mode: Literal["exact", "paper"] = "exact"
    tol: float = 1e-3
    max_iter: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("steps", self.steps)
        inputs.check_positive("reg", self.reg, inf=True)
        inputs.check_positive("tol", self.tol)
        inputs.check_count("max_iter", self.max_iter)
        if self.growth is not None and not isinstance(self.growth, GrowingRadius):
            raise TypeError(f"growth must be a GrowingRadius(factor, every) or None, got {self.growth!r}")
        if self.mode not in ("exact", "paper"):
            raise ValueError(f'mode must be "exact" or "paper", got {self.mode!r}')
        if self.step_size is not None:
            inputs.check_positive("step_size", self.step_size)
        if self.step not in ("linf", "l2", "wasserstein"):
            raise ValueError(f'step must be "linf", "l2" or "wasserstein", got {self.step!r}')
        if self.step == "wasserstein" and not isinstance(self.ball, WassersteinBall):
            raise ValueError(f'step "wasserstein" needs a WassersteinBall, got {type(self.ball).__name__}')
        if self.mode == "paper" and not (isinstance(self.ball, WassersteinBall) and math.isfinite(self.reg)):
            raise ValueError('mode "paper" needs a WassersteinBall and a finite reg; PGD.paper(...) has the settings')

    @classmethod
    def paper(cls, dataset: Literal["mnist", "cifar10"], *, p: float = 2.0, **changes: Any) -> PGD:
        """The attack of the paper, threat model and all: 5 x 5 window, sign steps of 0.1, a growing radius.

        MNIST starts at 0.3 and grows by 1.1 every 10 of 200 steps with lambda 1000; CIFAR-10 starts at 0.001 and grows
        by 1.17 every 10 of 400 steps with lambda 3000. ``changes`` replace single settings.

        The paper's text says that a move costs its length (``p = 1``), its published scripts charge the square
        (``p = 2``), and its curves are those of the scripts: ``docs/attacks.md`` has the numbers. ``p`` chooses.

        >>> PGD.paper("mnist").growth
        GrowingRadius(factor=1.1, every=10)
        """
        if dataset not in ("mnist", "cifar10"):
            raise ValueError(f'dataset must be "mnist" or "cifar10", got {dataset!r}')
        eps, factor, steps, reg = (0.3, 1.1, 200, 1000.0) if dataset == "mnist" else (0.001, 1.17, 400, 3000.0)
        settings: dict[str, Any] = {
            "ball": WassersteinBall(eps, cost=GridCost(5, p)),
            "steps": steps,
            "step_size": 0.1,
            "reg": reg,
            "growth": GrowingRadius(factor, 10),
            "mode": "paper",
            "tol": 1e-4,
            "max_iter": 400,
        }
        return cls(**{**settings, **changes})

    @property
    def n_gradients(self) -> int:
        return self.steps

    def run(self, climb: Climb, generator: torch.Generator) -> None:
        z, distance = climb.x, torch.zeros(climb.x.shape[0], dtype=torch.float64, device=climb.x.device)
        if self.random_start:
            z = climb.ball.sample(climb.x, generator)
            distance = distance_bound(climb.ball, climb.x, z)
        eps, projection = climb.ball.eps, self._fused(climb)
        proof: Plan | None = None
        if self.proofs and isinstance(climb.ball, WassersteinBall) and self._proves(projection):
            proof = climb.keep_proofs(partial(plan_of_nothing, Plan, climb.ball))
        for step in range(self.steps):
            gradient = climb.gradient(z, distance, proof)
            kept = climb.survivors()
            if kept is not None:
                if climb.empty:
                    return
                z, gradient = z[kept], gradient[kept]
                projection = None if projection is None else projection.take(kept)
                eps = eps[kept.to(eps.device)] if isinstance(eps, Tensor) else eps
            if self.growth is not None and step % self.growth.every == 0:
                climb.within(climb.ball.at(self.growth.at(eps, step)))
            z, distance, plan = self._project(climb, self._ahead(climb, z, gradient), projection)
            proof = None if proof is None or plan is None else plan.cancelled()
        climb.offer(z, distance, proof)

    def _proves(self, fused: EntropicProjection | None) -> bool:
        """Whether every candidate comes with its plan: the fused projection has none, nor has a random point."""
        return fused is None and not self.random_start and self.mode == "exact"

    def _ahead(self, climb: Climb, z: Tensor, gradient: Tensor) -> Tensor:
        if self.step == "wasserstein":
            ball = climb.ball.at(0.1 if self.step_size is None else self.step_size)
            options: dict[str, Any] = {"tol": self.tol, "max_iter": self.max_iter}
            inside = z if ball.box is None else z.clamp(*ball.box)
            return ball.support(inside, normalised(gradient), self.reg, **options).point
        if self.step_size is not None:
            alpha: float | Tensor = self.step_size
        elif isinstance(climb.ball, LinfBall):
            alpha = spread(torch.as_tensor(climb.ball.eps, dtype=z.dtype, device=z.device), z) * 2.5 / self.steps
        else:
            alpha = 0.1
        if self.step == "linf":
            return z + alpha * gradient.sign()
        length = spread(gradient.flatten(1).norm(dim=1), z)
        return z + alpha * gradient / length.clamp(min=torch.finfo(z.dtype).tiny)

    def _fused(self, climb: Climb) -> EntropicProjection | None:
        """The projection without plans, where a kernel has it."""
        if not isinstance(climb.ball, WassersteinBall) or not EntropicProjection.serves(climb.ball, climb.x, self.reg):
            return None
        options: dict[str, Any] = {"tol": self.tol, "max_iter": self.max_iter, "mode": self.mode}
        return EntropicProjection(climb.ball, climb.x, self.reg, **options)

    def _project(self, climb: Climb, w: Tensor, fused: EntropicProjection | None) -> tuple[Tensor, Tensor, Plan | None]:
        if fused is not None:
            assert isinstance(climb.ball, WassersteinBall)
            if fused.ball is not climb.ball:
                fused.within(climb.ball)
            point = fused(w)
            climb.kernel = point.kernel
            return point.z, point.cost / fused.unit, None
        options: dict[str, Any] = {}
        if isinstance(climb.ball, WassersteinBall):
            options = {"tol": self.tol, "max_iter": self.max_iter, "mode": self.mode}
        result = climb.ball.project(climb.x, w, self.reg, **options)
        z, climb.kernel = result.point, result.kernel
        if self.mode == "paper":
            return z, torch.full((z.shape[0],), math.nan, dtype=torch.float64, device=z.device), None
        return z, distance_bound(climb.ball, climb.x, z, result.plan), result.plan
