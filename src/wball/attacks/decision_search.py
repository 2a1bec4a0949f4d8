r"""Decision search: an attack that is told labels and nothing else, and shrinks the distance of
what it finds.

It starts outside the ball, at an image that the model gets wrong at some larger radius ``r``: mass
drifts towards the shapes of other images, or of random clouds. From there on every step asks for
labels of noisy copies of that image :math:`z`, which lie on both sides of the model's boundary,

.. math::
    g = \frac1n \sum_k (\phi_k - \bar\phi)\, u_k, \qquad
    \phi_k = [\, z + \sigma u_k \text{ is wrong} \,],

adds :math:`g` to the potentials as :class:`~wball.DualAveraging` does, and asks for the points of
several smaller balls that follow from them. The nearest wrong one is the next :math:`z`. Once one
lies in the ball itself, the image is broken. (Estimating a boundary's normal from labels is due to
HopSkipJump, Chen, Jordan, Wainwright 2020.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from wball.attacks.base import AttackBatch, State, into_box, normal, spread_eps
from wball.attacks.dual_averaging import START_NATS, normalised
from wball.attacks.score_search import QueryAttack, reachable_pixels
from wball.inputs import per_image, zeros

STARTS = (4.0, 8.0, 16.0, 32.0)
"""Radii of the first images, in units of the ball's."""
CLOUDS = 4
"""As many random clouds, and as many other images, are tried as shapes to drift towards."""
SHRINK = (1.0, 0.95, 0.85, 0.7, 0.5)
"""Radii tried at each step, relative to the last."""
MEMORY = 0.9
"""Of the estimated normal: a few labels say little, and the boundary turns slowly."""
FORGET = 0.2
"""Share of the potentials that a full step forgets, the shape of the start with them."""
NOISE = 0.1
"""Size of the noise at first and at most, in widths of the box; it falls to a fifth until both
answers are heard."""


@dataclass(kw_only=True)
class _Boundary(State):
    """A misclassified image and its distance from the centre. ``z`` remains the best point inside
    the ball."""

    b: Tensor
    wrong: Tensor
    radius: Tensor
    noise: Tensor
    pace: Tensor
    normal: Tensor
    reachable: Tensor
    succeeds: Callable[[Tensor], Tensor]

    def parts(self) -> tuple[object, ...]:
        return (self,)


@dataclass(frozen=True)
class DecisionSearch(QueryAttack):
    """Black-box search by predicted labels alone, on any ball with an oracle."""

    directions: int = 40
    at_start = 2 + 2 * CLOUDS * len(STARTS)
    beside = len(SHRINK) + 1

    def init(self, batch: AttackBatch, generator: Generator) -> _Boundary:
        x, ball = batch.x, batch.ball
        low, high = ball.box or (0.0, 1.0)
        none = zeros(x)
        state = _Boundary(
            x, ball, x, none, b=torch.zeros_like(x), wrong=x, radius=torch.full_like(none, torch.inf),
            noise=torch.full_like(none, NOISE * (high - low)), pace=torch.full_like(none, self.step_size),
            normal=torch.zeros_like(x), reachable=reachable_pixels(ball, x, generator), succeeds=batch.succeeds,
        )  # fmt: skip
        others = [x.roll(shift, 0) - x for shift in range(1, CLOUDS + 1)]
        for shape in (*others, *(_cloud(x, generator) for _ in range(CLOUDS))):
            b = START_NATS * normalised(shape)
            self._try(state, b, [spread_eps(ball, none) * factor for factor in STARTS])
        return state

    def gradient(self, batch: AttackBatch, state: _Boundary, generator: Generator) -> Tensor:
        batch.offer(state)
        size = per_image(state.noise.to(state.x), state.x)
        noise = state.reachable * normal(state.x, generator, self.directions)
        asked = into_box(state.wrong + size * noise, state.ball.box)
        answers = torch.stack([batch.succeeds(copy) for copy in asked]).to(state.x)
        often = answers.mean(0)
        # Near the boundary, small noise meets both labels, and large noise only wrong ones.
        one_sided = (often < 0.2) | (often > 0.8)
        low, high = state.ball.box or (0.0, 1.0)
        most = NOISE * (high - low)
        state.noise = (state.noise * torch.where(one_sided, 0.8, 1.1)).clamp(0.2 * most, most)
        centred = (answers - often).view(self.directions, -1, *[1] * (state.x.ndim - 1))
        return batch.made_step((centred * noise).mean(0))

    def advance(self, state: _Boundary, gradient: Tensor) -> _Boundary:
        state.normal = MEMORY * state.normal + normalised(gradient)
        pace = per_image(state.pace.to(state.x), state.x)
        b = (1 - FORGET * pace / self.step_size) * state.b + pace * normalised(state.normal)
        least = spread_eps(state.ball, state.radius)
        finite = state.radius.nan_to_num(posinf=1.0)
        nearer = self._try(state, b, [torch.maximum(finite * factor, least) for factor in SHRINK])
        state.pace = torch.where(nearer, state.pace * 1.2, state.pace * 0.7).clamp(
            0.1 * self.step_size, self.step_size
        )
        return state

    @staticmethod
    def _try(state: _Boundary, b: Tensor, radii: list[Tensor]) -> Tensor:
        """Query points of balls of these radii, and keep the nearest misclassified one. Returns
        where one came nearer."""
        nearer = torch.zeros_like(state.radius, dtype=torch.bool)
        inside = spread_eps(state.ball, state.radius)
        for radius in radii:
            oracle = state.ball.at(radius).oracle(state.x)
            oracle(b)  # learns how much of the radius cancels
            point = oracle(b)
            distance = point.cost / oracle.unit
            closer = state.succeeds(point.z) & (distance < state.radius)
            mask = per_image(closer, state.x)
            state.wrong, state.b = (
                torch.where(mask, point.z, state.wrong),
                torch.where(mask, b, state.b),
            )
            state.radius = torch.where(closer, distance, state.radius)
            found = closer & (radius <= inside)
            state.z = torch.where(per_image(found, state.x), point.z, state.z)
            state.distance = torch.where(found, distance, state.distance)
            state.kernel, nearer = point.kernel, nearer | closer
        return nearer


def _cloud(x: Tensor, generator: Generator) -> Tensor:
    """A smooth random shape that mass may drift towards, as it may towards other images."""
    noise = normal(x, generator)
    if x.ndim == 4:
        return F.avg_pool2d(noise, 5, 1, 2)
    return F.avg_pool1d(noise[:, None], 5, 1, 2)[:, 0]
