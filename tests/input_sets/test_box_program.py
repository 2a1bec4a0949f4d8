"""Prices of the box: by strong duality they lose nothing, whatever moves there are."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from wball.input_sets.box_program import BoxProgram

SIDE = 5


def most(
    gain: np.ndarray,
    cost: np.ndarray,
    mass: np.ndarray,
    budget: float,
    box: tuple[float, float] | None,
) -> float:
    """The largest gain of a plan, by a dense linear program over all pairs of pixels."""
    count = mass.shape[0]
    allowed = np.isfinite(cost)
    leave = np.kron(np.eye(count), np.ones(count))
    arrive = np.kron(np.ones(count), np.eye(count))
    below, limits = [np.where(allowed, cost, 0.0).ravel()[None]], [[budget]]
    if box is not None:
        below += [arrive, -arrive]
        limits += [np.full(count, box[1]), np.full(count, -box[0])]
    found = linprog(
        -np.where(allowed, gain, 0.0).ravel(),
        A_ub=np.concatenate(below),
        b_ub=np.concatenate(limits),
        A_eq=leave,
        b_eq=mass,
        bounds=[(0, None if ok else 0) for ok in allowed.ravel()],
    )
    assert found.status == 0
    return -float(found.fun)


@pytest.mark.parametrize("box", [(0.0, 1.0), (0.1, 0.8)])
@pytest.mark.parametrize("far", [None, 1.5])
def test_prices_give_the_exact_maximum(far: float | None, box: tuple[float, float]) -> None:
    rng = np.random.default_rng(3)
    channels, pixels = 2, 2 * SIDE
    mass = rng.uniform(box[0], box[1], pixels)
    place, channel = np.arange(pixels) % SIDE, np.arange(pixels) // SIDE
    steps = np.array([0, -1, 1])
    to = place[:, None] + steps
    target = np.where((to >= 0) & (to < SIDE), to + SIDE * channel[:, None], -1)
    listed = np.broadcast_to(np.abs(steps).astype(float), target.shape)
    cost = np.where(channel[:, None] == channel, np.inf if far is None else far, np.inf)
    for i, k in zip(*np.nonzero(target >= 0), strict=True):
        cost[i, target[i, k]] = listed[i, k]
    program = BoxProgram(mass, target, listed, pixels, channel, channels, far, 1.2, box)
    near = np.where(cost == far, np.inf, cost)
    bound_by_box = bound_by_window = 0
    for _ in range(4):
        worth = rng.normal(size=pixels)
        prices = program.prices(worth[np.maximum(target, 0)], np.zeros(pixels), worth)
        assert prices is not None
        gain = np.broadcast_to(worth, (pixels, pixels))
        exact = most(gain, cost, mass, 1.2, box)
        paid = float((np.maximum(prices, 0) * box[1] + np.minimum(prices, 0) * box[0]).sum())
        assert most(gain - prices, cost, mass, 1.2, None) + paid == pytest.approx(exact, abs=1e-7)
        bound_by_box += most(gain, cost, mass, 1.2, None) > exact + 1e-3
        bound_by_window += exact > most(gain, near, mass, 1.2, box) + 1e-3
    assert bound_by_box >= 2 and bound_by_window >= (
        0 if far is None else 2
    )  # or nothing would be tried
