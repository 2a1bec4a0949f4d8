"""Transport distance: against a linear program, dense POT and closed forms."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from problems import (
    KINDS,
    Known,
    Problem,
    arc_list,
    known,
    problems,
    random_problem,
    random_problems,
)
from references import reference_distance
from wball import DenseCost, GridCost, StencilCost, WassersteinBall


def planes(p: Problem, image: Tensor) -> np.ndarray:
    """The parts of an image that exchange no mass."""
    return image.reshape(1 if p.ball.cost.channel_cost else p.x.shape[1], -1).numpy()


def moved(p: Problem, seed: int = 0) -> Tensor:
    """A point of the window's reach: random rows of a plan, so that the exact distance is not what
    was spent."""
    rng = np.random.default_rng(seed)
    height, width = p.x.shape[2:]
    x = planes(p, p.x)
    z = np.zeros_like(x)
    arcs = arc_list(p.ball.cost, height, width, p.x.shape[1])
    by_source: dict[int, list[int]] = {}
    for i, j, _ in arcs:
        by_source.setdefault(i, []).append(j)
    for i, targets in by_source.items():
        for c in range(len(x)):
            share = rng.dirichlet(np.full(len(targets), 0.3))
            np.add.at(z[c], targets, x[c, i] * share)
    return torch.from_numpy(z).reshape(p.x.shape)


def dense_pot(p: Problem, z: Tensor) -> float:
    """POT on the dense matrix, with a large price on forbidden moves."""
    height, width = p.x.shape[2:]
    x, z = planes(p, p.x), planes(p, z)
    matrix = np.full((x.shape[1],) * 2, 1e4)
    for i, j, c in arc_list(p.ball.cost, height, width, p.x.shape[1]):
        matrix[i, j] = c
    total = 0.0
    for a, b in zip(x, z, strict=True):
        if a.sum() > 0:
            total += ot.emd2(a, b * a.sum() / b.sum(), matrix)
    return total / (p.mass if p.ball.mass == "relative" else 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_distance_matches_a_simplex_solver_and_dense_pot(kind: str) -> None:
    for seed in range(42):  # 126 problems in all
        p = random_problem(seed, kind=kind, box=None, mass="relative" if seed % 2 else "absolute")  # type: ignore[arg-type]
        z = moved(p, seed)
        got = float(p.ball.distance(p.x, z))
        assert got == pytest.approx(dense_pot(p, z), rel=1e-9, abs=1e-12), p.label
        if seed % 3 == 0:
            assert got == pytest.approx(reference_distance(p.ball, p.x, z), rel=1e-6, abs=1e-7), (
                p.label
            )


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0])
def test_full_plans_match_the_dense_problem(p: float) -> None:
    for seed in range(12):
        q = random_problem(seed, p=p, box=None)
        z = moved(q, seed)
        if seed % 2 == 0:
            z = torch.from_numpy(np.random.default_rng(seed).permutation(q.x.flatten()))
            z = z.reshape(q.x.shape)
            z = z * (q.x.sum((2, 3), keepdim=True) / z.sum((2, 3), keepdim=True))
        full = Problem(
            WassersteinBall(0.1, q.ball.cost.full(*q.x.shape[2:]), box=None), q.x, q.w, q.g, q.label
        )
        got = float(q.ball.distance(q.x, z, plans="full"))
        assert got == pytest.approx(dense_pot(full, z), rel=1e-9, abs=1e-12), q.label
        assert got <= float(q.ball.distance(q.x, z)) * (1 + 1e-9) + 1e-12, q.label


@settings(max_examples=150, deadline=None)
@given(known)
def test_closed_forms(case: Known) -> None:
    for mass in ("relative", "absolute"):
        ball = case.ball(mass=mass)
        want = case.relative if mass == "relative" else case.absolute
        assert float(ball.distance(case.x, case.z)) == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert bool(ball.contains(case.x, case.z)) == math.isfinite(want)
        if 0 < want < math.inf:
            assert not bool(ball.at(ball.eps * (1 - 3e-4)).contains(case.x, case.z))


@settings(max_examples=40, deadline=None)
@given(problems(side=5), st.integers(0, 1000))
def test_triangle_scaling_and_symmetry(p: Problem, seed: int) -> None:
    ball = WassersteinBall(0.1, GridCost(11, 1.0), box=None)  # covers the image: p = 1 is a metric
    y, z = moved(p, seed), moved(Problem(p.ball, moved(p, seed), p.w, p.g, p.label), seed + 1)
    xy, yz, xz = (float(ball.distance(a, b)) for a, b in ((p.x, y), (y, z), (p.x, z)))
    assert xz <= xy + yz + 1e-9
    assert float(ball.distance(y, p.x)) == pytest.approx(xy, rel=1e-9, abs=1e-12)
    assert float(ball.distance(p.x, p.x + 0.3 * (y - p.x))) == pytest.approx(
        0.3 * xy, rel=1e-8, abs=1e-11
    )


def test_common_mass_is_not_removed_inside_a_window() -> None:
    """A chain: everything moves one pixel. Without the pixel in the middle the window would not
    reach."""
    ball = WassersteinBall(1.0, GridCost(3, 1.0))
    x = torch.tensor([[[[1.0, 1.0, 0.0]]]], dtype=torch.float64)
    z = torch.tensor([[[[0.0, 1.0, 1.0]]]], dtype=torch.float64)
    assert float(ball.distance(x, z)) == pytest.approx(1.0)
    squared = WassersteinBall(1.0, GridCost(5, 2.0))
    assert float(squared.distance(x, z)) == pytest.approx(
        1.0
    )  # two short moves (1 + 1), not one of 4


def test_batch_equals_loop_and_dtype_and_histograms() -> None:
    ps = random_problems(6, shape=(5, 6), channels=3, kind="grid")
    x, z = torch.cat([p.x for p in ps]), torch.cat([moved(p, k) for k, p in enumerate(ps)])
    ball = WassersteinBall(0.1, GridCost(5, 2.0), box=None)
    together = ball.distance(x, z)
    alone = torch.cat([ball.distance(x[k : k + 1], z[k : k + 1]) for k in range(6)])
    assert torch.equal(together, alone)
    assert together.dtype == torch.float64
    assert torch.allclose(ball.distance(x.float(), z.float()), together, rtol=1e-5)
    matrix = torch.full((30, 30), math.inf, dtype=torch.float64)
    for i, j, c in arc_list(ball.cost, 5, 6):
        matrix[i, j] = c
    flat = WassersteinBall(0.1, DenseCost(matrix), box=None)
    first = flat.distance(x[:, 0].reshape(6, 30), z[:, 0].reshape(6, 30))
    assert torch.allclose(first, ball.distance(x[:, :1], z[:, :1]), rtol=1e-9)
    assert ball.distance(x[:0], z[:0]).shape == (0,)
    assert ball.contains(x[:0], z[:0]).shape == (0,)


def test_directed_and_forbidden_moves() -> None:
    right = StencilCost(((math.inf, 0.0, 2.0),))
    ball = WassersteinBall(1.0, right)
    x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    assert float(ball.distance(x, x.flip(3))) == 2.0
    assert float(ball.distance(x.flip(3), x)) == math.inf
    one_way = DenseCost(torch.tensor([[0.0, 3.0], [math.inf, 0.0]]))
    assert float(WassersteinBall(1.0, one_way).distance(x[0, 0], x.flip(3)[0, 0])) == 3.0
    assert float(WassersteinBall(1.0, one_way).distance(x.flip(3)[0, 0], x[0, 0])) == math.inf


def test_float32_islands_balance_up_to_rounding_and_lost_mass_is_far() -> None:
    """Two islands that no move connects, each off by one float32 rounding, in opposite
    directions."""
    ball = WassersteinBall(1.0, GridCost(3, 1.0))
    x = torch.zeros(1, 1, 1, 9)
    x[..., 1], x[..., 7] = 0.7, 0.3
    z = torch.zeros_like(x)
    z[..., 2], z[..., 7] = 0.7 * (1 + 1.2e-7), 0.3 * (1 - 1.2e-7)
    assert float(ball.distance(x, z)) == pytest.approx(0.7, rel=1e-6)
    assert bool(ball.contains(x, z))
    assert float(ball.distance(x, z * (1 + 5e-5))) == pytest.approx(0.7, rel=1e-3)
    assert not bool(ball.contains(x, z * (1 + 5e-5)))
    assert float(ball.distance(x, z * 1.01)) == math.inf
    swapped = z.clone()
    swapped[..., 7] += 0.01  # same total, but the islands no longer balance
    swapped[..., 2] -= 0.01
    assert float(ball.distance(x, swapped)) == math.inf


def test_black_images_and_negative_pixels() -> None:
    ball = WassersteinBall(0.1)
    black = torch.zeros(1, 1, 3, 3)
    dot = black.clone()
    dot[..., 1, 1] = 0.5
    assert ball.distance(black, black).tolist() == [0.0]
    assert ball.distance(black, dot).tolist() == [math.inf]
    assert ball.distance(dot, dot - 3e-8).tolist()[0] < 1e-6
    assert ball.distance(dot, dot - 0.1).tolist() == [math.inf]


def test_bad_arguments() -> None:
    ball, x = WassersteinBall(0.1), torch.full((1, 1, 3, 3), 0.5)
    dense = WassersteinBall(0.1, DenseCost(torch.zeros(4, 4)))
    for match, call in (
        ("plans", lambda: ball.distance(x, x, plans="local")),  # type: ignore[arg-type]
        ("shape", lambda: ball.distance(x, x[..., :2])),
        ("NaN", lambda: ball.distance(x, x * math.nan)),
        ("tol", lambda: ball.contains(x, x, tol=-1.0)),
        ("4 pixels", lambda: dense.distance(x, x)),
    ):
        with pytest.raises(ValueError, match=match):
            call()
