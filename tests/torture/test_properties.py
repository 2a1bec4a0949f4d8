"""What must hold for every problem, by comparing a solver with itself: symmetries, scaling, order, convexity."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wball
from problems import Problem, problems
from wball.cost import GridCost

few = settings(max_examples=12, suppress_health_check=list(HealthCheck))
TOL = 1e-7


@few
@given(problems(side=6), st.sampled_from([(2,), (3,), (2, 3)]))
def test_flipped_problems_have_flipped_answers(p: Problem, axes: tuple[int, ...]) -> None:
    """A grid's cost does not know left from right."""
    value = p.ball.support(p.x, p.g, tol=TOL)
    other = p.ball.support(p.x.flip(axes), p.g.flip(axes), tol=TOL)
    scale = float(1 + value.value.abs() + (p.g.abs() * p.x).sum())
    assert abs(float(value.value - other.value)) <= 1e-5 * scale
    one, two = (
        p.ball.project(p.x, p.w, tol=TOL),
        p.ball.project(p.x.flip(axes), p.w.flip(axes), tol=TOL),
    )
    assert (
        float((one.point - two.point.flip(axes)).abs().max()) <= 2e-3
    )  # strongly convex: the root of the gap


@few
@given(problems(side=5), st.floats(0.01, 100.0))
def test_the_support_function_is_homogeneous_and_convex(p: Problem, t: float) -> None:
    def sigma(g: torch.Tensor) -> wball.SupportResult:
        return p.ball.support(p.x, g, tol=TOL)

    h = p.g.roll(1, 3).flip(2)
    a, b, both, scaled = sigma(p.g), sigma(h), sigma(p.g + h), sigma(t * p.g)
    scale = float(((p.g.abs() + h.abs()) * p.x).sum()) + 1e-9
    assert abs(float(scaled.value) - t * float(a.value)) <= 1e-5 * t * scale
    assert float(both.value) <= float(a.upper + b.upper) + 1e-9 * scale


@few
@given(problems(side=5), st.floats(1.1, 4.0))
def test_larger_balls_hold_more(p: Problem, factor: float) -> None:
    larger = p.ball.at(float(torch.as_tensor(p.ball.eps)) * factor)
    small, large = p.ball.support(p.x, p.g), larger.support(p.x, p.g)
    scale = float((p.g.abs() * p.x).sum()) + 1e-9
    assert float(large.upper) >= float(small.value) - 1e-9 * scale
    near, nearer = p.ball.project(p.x, p.w, tol=TOL), larger.project(p.x, p.w, tol=TOL)
    assert float(nearer.objective - nearer.gap) <= float(near.objective) + 1e-9
    assert bool(larger.contains(p.x, near.point))


@few
@given(problems(side=5))
def test_projecting_again_stays_and_brings_points_no_farther_apart(p: Problem) -> None:
    first = p.ball.project(p.x, p.w, tol=TOL).point
    again = p.ball.project(p.x, first, tol=TOL).point
    assert float((again - first).norm()) <= 1e-3 * (1 + float(first.norm()))
    v = p.w + 0.3 * p.g
    second = p.ball.project(p.x, v, tol=TOL).point
    assert float((second - first).norm()) <= float((v - p.w).norm()) + 4e-3 * (
        1 + float(p.w.norm())
    )


@few
@given(problems(side=5, boxes=False), st.floats(0.05, 20.0))
def test_units_of_brightness_do_not_matter(p: Problem, t: float) -> None:
    """Images, points and box in other units: the relative ball scales with them."""
    ball = replace(p.ball, mass="relative", eps=0.2)
    scaled = replace(ball, box=(0.0, t))
    one = ball.project(p.x, p.w, tol=TOL).point
    two = scaled.project((t * p.x).clamp(0, t), t * p.w, tol=TOL).point
    assert float((two / t - one).abs().max()) <= 3e-3
    distances = ball.distance(p.x, one), scaled.distance((t * p.x).clamp(0, t), t * one)
    torch.testing.assert_close(distances[0], distances[1], rtol=1e-6, atol=1e-9)


@few
@given(problems(side=5))
def test_channels_are_equals_and_padding_is_free(p: Problem) -> None:
    """Another order of the channels changes nothing, nor does a black border without a pull towards it."""
    order = torch.arange(p.x.shape[1]).flip(0)
    value = float(p.ball.support(p.x, p.g, tol=TOL).value)
    scale = float((p.g.abs() * p.x).sum()) + 1e-9
    assert (
        abs(float(p.ball.support(p.x[:, order], p.g[:, order], tol=TOL).value) - value)
        <= 1e-5 * scale
    )
    assert isinstance(p.ball.cost, GridCost)
    pad, free = p.ball.cost.radius, replace(p.ball, box=None)  # in a box the border would be room
    x = torch.nn.functional.pad(p.x, (pad,) * 4)
    g = torch.nn.functional.pad(p.g, (pad,) * 4, value=float(p.g.min()) - 1.0)
    wide, narrow = (
        float(free.support(x, g, tol=TOL).value),
        float(free.support(p.x, p.g, tol=TOL).value),
    )
    assert abs(wide - narrow) <= 1e-5 * scale


@few
@given(problems(side=5))
def test_every_way_to_a_point_ends_in_the_ball(p: Problem) -> None:
    x = p.x.float()
    ends = [
        p.ball.project(x, p.w.float(), max_iter=2).point,
        p.ball.support(x, p.g.float(), max_iter=1).point,
        p.ball.project(x, p.w.float(), 50.0, max_iter=3).point,
        p.ball.sample(x),
    ]
    middle = torch.stack(ends).mean(0)  # the ball is convex
    for z in (*ends, middle):
        report = wball.audit(p.ball, x, z)
        assert report.all_valid, report.summary()
