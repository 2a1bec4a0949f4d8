r"""Projected gradient ascent: a steepest step, then the nearest point of the ball.

.. math::
    w = \arg\max_{\|w - z\| \le \alpha} \langle \nabla \ell(z), w \rangle, \qquad
    z \leftarrow \mathrm{proj}_{B(x, \epsilon)}(w)

The norm of the step is a choice: ``"linf"`` gives ``z + alpha * sign(g)``, ``"l2"`` gives ``z +
alpha * g / |g|_2``, and ``"wasserstein"`` moves to the farthest point of the ball of radius
``alpha`` around ``z`` itself (the paper's conjugate). On a :class:`~wball.LinfBall` the first is
the basic iterative method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wball.attacks.base import AttackBatch, State, SteppedAttack, into_box
from wball.attacks.dual_averaging import normalised
from wball.ball import Projector, WassersteinBall
from wball.cost import GridCost
from wball.inputs import check_choice, check_count, check_positive, per_image, zeros
from wball.plan import Plan
from wball.solvers.oracle import EntropicProjection


@dataclass(frozen=True)
class GrowingRadius:
    """``eps * factor^(step // every)``: a radius that grows while an image survives, as in the
    paper.

    The result's ``radius`` is the one at which each image was broken, so that one run gives the
    whole curve (:meth:`~wball.AttackResult.accuracy_at`).

    >>> GrowingRadius(factor=1.1, every=10).at(0.3, step=20)
    0.363...
    """

    factor: float = 1.1
    every: int = 10

    def __post_init__(self) -> None:
        if not check_positive("factor", self.factor) >= 1:
            raise ValueError(
                f"factor must be at least 1 so that the radius grows, got {self.factor}"
            )
        check_count("every", self.every)

    def at(self, eps: float | Tensor, step: int) -> float | Tensor:
        """The radius at a step, starting from ``eps``."""
        return eps * self.factor ** (step // self.every)


@dataclass(kw_only=True)
class _Projected(State):
    """The initial radius, and the projections."""

    eps: float | Tensor
    projector: Projector | EntropicProjection

    def parts(self) -> tuple[object, ...]:
        return self, self.projector


@dataclass(frozen=True)
class PGD(SteppedAttack):
    """Projected gradient ascent on any ball.

    Attributes:
        steps: gradient steps.
        step_size: ``alpha``: in pixel values for ``"linf"`` and ``"l2"``, in the unit of ``eps``
            for ``"wasserstein"``. ``None`` takes that of the ball, if ``step`` is its norm (see
            ``ball.ascent_step``), and 0.1 otherwise.
        step: the norm of the step. ``None`` takes that of the ball, ``"l2"`` for a
            ``WassersteinBall`` and ``"linf"`` for others; with a ``step_size`` it is ``"linf"``.
        reg: the paper's lambda, for the projection and the Wasserstein step; ``inf`` is exact.
        random_start: start at a random point of the ball.
        growth: let the radius grow from ``ball.eps``; ``None`` keeps it.
        mode: ``"paper"`` projects by the original procedure (:mod:`wball.paper`), which clamps and
            so leaves every ball: ``distance`` is then ``nan``. Only for comparison.
        tol: tolerance of the projection.
        max_iter: iterations of the projection.
    """

    step_size: float | None = None
    step: Literal["linf", "l2", "wasserstein"] | None = None
    reg: float = math.inf
    random_start: bool = False
    growth: GrowingRadius | None = None
    mode: Literal["exact", "paper"] = "exact"
    tol: float = 1e-3
    max_iter: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("reg", self.reg, inf=True)
        check_positive("tol", self.tol)
        check_count("max_iter", self.max_iter)
        if self.growth is not None and not isinstance(self.growth, GrowingRadius):
            raise TypeError(
                f"growth must be a GrowingRadius(factor, every) or None, got {self.growth!r}"
            )
        check_choice("mode", self.mode, ("exact", "paper"))
        if self.step_size is not None:
            check_positive("step_size", self.step_size)
        check_choice("step", self.step or "linf", ("linf", "l2", "wasserstein"))
        paper = isinstance(self.ball, WassersteinBall) and math.isfinite(self.reg)
        if self.mode == "paper" and not paper:
            raise ValueError(
                'mode "paper" needs a WassersteinBall and a finite reg; PGD.paper(...) has the settings'
            )

    @classmethod
    def paper(
        cls,
        dataset: Literal["mnist", "cifar10"],
        source: Literal["curves", "text", "scripts"] = "curves",
        *,
        p: float | None = None,
        **changes: Any,
    ) -> PGD:
        """The attack of the 2019 paper, including its threat model: sign steps of 0.1 and a growing
        radius.

        MNIST grows by 1.1 every 10 of 200 steps with lambda 1000; CIFAR-10 starts at 0.001 and
        grows by 1.17 every 10 of 400 steps with lambda 3000. The paper's text and its published
        scripts disagree about the rest:

        ==========  =====================  ======  =======================
        source      cost of a move         window  first radius (MNIST)
        ==========  =====================  ======  =======================
        text        its length, p = 1      5 x 5   0.3
        scripts     its square, p = 2      7 x 7   0.7 (CIFAR-10: 5 x 5)
        curves      its square, p = 2      5 x 5   0.3
        ==========  =====================  ======  =======================

        ``"curves"`` comes closest to the paper's own figures on our models, and starts low enough
        to draw them. ``docs/attacks.md`` has numbers. ``p`` and ``changes`` replace single
        settings.

        >>> PGD.paper("mnist", "scripts").ball.cost
        GridCost(window=7, p=2.0, channel_cost=None)
        """
        check_choice("dataset", dataset, ("mnist", "cifar10"))
        check_choice("source", source, ("curves", "text", "scripts"))
        eps, factor, steps, reg = (
            (0.3, 1.1, 200, 1000.0) if dataset == "mnist" else (0.001, 1.17, 400, 3000.0)
        )
        window = 5
        if source == "scripts" and dataset == "mnist":
            eps, window = 0.7, 7
        power = (1.0 if source == "text" else 2.0) if p is None else p
        settings: dict[str, Any] = {
            "ball": WassersteinBall(eps, cost=GridCost(window, power)),
            "steps": steps,
            "step": "linf",
            "step_size": 0.1,
            "reg": reg,
            "growth": GrowingRadius(factor, 10),
            "mode": "paper",
            "tol": 1e-4,
            "max_iter": 400,
        }
        return cls(**{**settings, **changes})

    def init(self, batch: AttackBatch, generator: torch.Generator) -> _Projected:
        x, ball = batch.x, batch.ball
        z, distance = x, zeros(x)
        if batch.task.start is not None or self.random_start:
            z = ball.sample(x, generator) if batch.task.start is None else batch.task.start
            distance = ball.distance(x, z).double()
        options = {"tol": self.tol, "max_iter": self.max_iter, "mode": self.mode}
        projector = ball.projector(x, self.reg, **options)
        proof: Plan | None = None
        # Projections on a GPU have no plans, and neither has a given or random starting point.
        if self.proofs and z is x and self.mode == "exact" and projector.reads_host:
            proof = batch.keep_proofs(Plan)
        return _Projected(x, ball, z, distance, proof, eps=ball.eps, projector=projector)

    def _grow(self, state: _Projected) -> None:
        """Set the radius that the schedule requires at this step."""
        if self.growth is not None:
            state.ball = state.ball.at(self.growth.at(state.eps, int(state.n_steps)))
            state.projector.within(state.ball)

    def advance(self, state: _Projected, gradient: Tensor) -> _Projected:
        self._grow(state)
        w = self._ahead(state, gradient)
        point = state.projector(w)
        state.z, state.kernel = point.z, point.kernel
        state.distance = point.cost / state.projector.unit
        if state.proof is not None and point.proof is not None:
            state.proof = point.proof.written().cancelled()
        return state

    def _ahead(self, state: _Projected, gradient: Tensor) -> Tensor:
        """The point after a gradient step, before the projection."""
        (norm, alpha), z = state.ball.ascent_step(state.x, self.steps), state.z
        step = self.step or (norm if self.step_size is None else "linf")
        if self.step_size is not None or step != norm:
            alpha = 0.1 if self.step_size is None else self.step_size
        if step == "wasserstein":
            ball = state.ball.at(alpha)
            return ball.support(into_box(z, ball.box), normalised(gradient), self.reg).point
        if isinstance(alpha, Tensor):
            alpha = per_image(alpha.to(z), z)
        if step == "linf":
            return z + alpha * gradient.sign()
        length = per_image(gradient.flatten(1).norm(dim=1), z)
        return z + alpha * gradient / length.clamp(min=torch.finfo(z.dtype).tiny)
