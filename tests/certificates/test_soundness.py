"""No attack inside a certified ball: certificates against attacks, on random and on trained
networks."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import affine_maps, euclidean, gap, worst_plan
from certificates.test_certify import dense_net, images, lowest
from marks import slow
from reproduction.networks import SmallResNet
from wball.certificates import certified_radius, certify, relaxation, verify
from wball.certificates.anchor import ImageConvolution
from wball.certificates.certificate import Method
from wball.certificates.graph import Linear
from wball.certificates.operators import read_graph
from wball.input_sets.rows import rounded_up

IMAGES = 16


def digits(count: int) -> tuple[Tensor, Tensor]:
    """14 x 14 digits."""
    x, y = wball.load_sample("mnist")
    return F.avg_pool2d(x, 2)[:count], y[:count]


def small_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(196, 24), nn.LeakyReLU(0.1),
        nn.Linear(24, 10),
    )  # fmt: skip


@functools.cache
def trained(noise: float) -> nn.Sequential:
    net = small_net(0)
    x, y = digits(1000)
    optimiser = torch.optim.Adam(net.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(0)
    for index in torch.randperm(900, generator=generator).repeat(12).split(50):
        loss = F.cross_entropy(net(wball.flow_noise(x[index], noise, generator)), y[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


def attacked(net: nn.Module, x: Tensor, y: Tensor, ball: wball.WassersteinBall) -> Tensor:
    """Which images fall."""
    return wball.StandardAttack(ball, version="fast", check=False)(net, x, y).success


@pytest.mark.parametrize("noise", [1e-4, *slow(0.02)])
def test_certified_images_survive_the_standard_attack(noise: float) -> None:
    certificates, falls = 0, 0
    net = trained(noise)
    x, y = digits(1000)
    x, y = x[-IMAGES:], y[-IMAGES:]
    for eps in (0.002, 0.01, 0.03, 0.1, 0.3):
        ball = wball.WassersteinBall(eps)
        proof = certify(net, x, y, ball, "anchored")
        fell = attacked(net, x, y, ball)
        assert not bool((proof.certified & fell).any()), eps
        certificates += int(proof.certified.sum())
        falls += int(fell.sum())
        if not bool(proof.certified.any()):
            break  # nor in larger balls
    # Neither side is idle: there are proofs, and there are balls too large for any.
    assert certificates > IMAGES and falls > IMAGES / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist-certified", "mnist-standard"])
def test_zoo_models_at_the_edge_of_what_is_certified(name: str) -> None:
    net = wball.load_model(name)
    x, y = wball.load_sample("mnist")
    x, y = x[: IMAGES // 4], y[: IMAGES // 4]
    radius = certified_radius(net, x, y, wball.WassersteinBall(0.005), rounds=4, method="crown")
    assert float(radius.median()) > 0
    held = radius > 0
    for window in (5, 13):  # certificates hold for moves of any length
        ball = wball.WassersteinBall(radius[held], wball.GridCost(window))
        assert not bool(attacked(net, x[held], y[held], ball).any())


@pytest.mark.parametrize("method", ["crown", "anchored"])
def test_anchors_that_do_not_fit_only_loosen_the_bound(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = trained(0.02)
    x, y = digits(6)
    ball = wball.WassersteinBall(0.05)
    whole = certify(net, x, y, ball, method=method).margin
    monkeypatch.setattr(relaxation, "LIMIT", 20)  # room for a few units an image
    some = certify(net, x, y, ball, method=method)
    if method == "crown":
        assert torch.equal(some.margin, whole)
    else:
        assert bool((some.margin < whole - 1e-3).any()), "there was room for all"
    assert bool((some.margin <= whole + 1e-9).all()) and bool(torch.isfinite(some.margin).all())
    assert not bool((some.certified & attacked(net, x, y, ball)).any())


def exactly_feasible(
    plan: np.ndarray, x: np.ndarray, cost: np.ndarray, budget: float
) -> list[list[Fraction]]:
    """The image of a solver's plan in rational arithmetic, moved towards ``x`` until it is in ball
    and box exactly."""
    spent, moved = Fraction(0), []
    for mass, rows in zip(x, plan, strict=True):
        flow = [[Fraction(max(0.0, float(v))) for v in row] for row in rows]
        z = [Fraction(0)] * len(mass)
        for i, row in enumerate(flow):
            total = sum(row)
            share = Fraction(float(mass[i])) / total if total else Fraction(0)
            for j, v in enumerate(row):
                z[j] += v * share
                spent += v * share * Fraction(float(cost[i, j])) if v else 0
        moved.append(z)
    shrink = [Fraction(1)] + ([Fraction(budget) / spent] if spent > budget else [])
    for mass, z in zip(x, moved, strict=True):
        shrink += [
            (1 - Fraction(float(m))) / (v - Fraction(float(m)))
            for m, v in zip(mass, z, strict=True)
            if v > 1
        ]
    t = min(shrink)
    return [
        [(1 - t) * Fraction(float(m)) + t * v for m, v in zip(*pair, strict=True)]
        for pair in zip(x, moved, strict=True)
    ]


def exact_gap(layers: list[tuple[np.ndarray, np.ndarray]], z: list[Fraction], y: int) -> Fraction:
    """The margin of one image in rational arithmetic."""
    for depth, (weight, bias) in enumerate(layers):
        z = [
            Fraction(float(b)) + sum(Fraction(float(w)) * v for w, v in zip(row, z, strict=True))
            for row, b in zip(weight, bias, strict=True)
        ]
        z = z if depth == len(layers) - 1 else [max(Fraction(0), v) for v in z]
    return min(z[y] - v for k, v in enumerate(z) if k != y)


def test_below_points_that_are_in_the_ball_in_exact_arithmetic() -> None:
    # Solvers allow themselves 1e-6: their minimum may lie below a bound that is right. The point
    # they found, once it is in the ball to the last digit, may not.
    closest = 1.0
    for seed in range(12):
        net = dense_net(1 + seed % 2, 2 + seed % 3 // 2, (5,), 3, seed).double()
        side = 2 + seed % 3 // 2
        x = images(1, 1 + seed % 2, side, seed).double()
        y = net(x).argmax(1)
        box = (0.0, 1.0) if seed % 2 else None
        ball = wball.WassersteinBall(0.02 + 0.1 * (seed % 5), box=box)
        budget = float(ball.budget(x))
        flat, cost = x[0].flatten(1).numpy(), euclidean(side, side)
        layers = affine_maps(net)
        _, plan = worst_plan(layers, flat, int(y), cost, budget, box)
        z = exactly_feasible(plan, flat, cost, budget)
        truth = exact_gap(layers, [v for channel in z for v in channel], int(y))
        for method in ("anchored", "alpha-crown"):
            bound = certify(net, x, y, ball, method, steps=5).margin  # type: ignore[arg-type]
            assert Fraction(float(bound)) <= truth, (seed, float(bound), float(truth))
            closest = min(closest, float(truth) - float(bound))
    assert closest < 1e-6  # and the test is sharp: somewhere the bound is the minimum


def test_a_ball_of_one_point_has_the_margin_of_exact_arithmetic() -> None:
    # A black image: a referee with tolerances may be above the true margin by more than our bound
    # is below it.
    for seed in range(5):
        net = dense_net(1, 2, (12,), 3, seed).double()
        x = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
        y = net(x).argmax(1)
        bound = certify(net, x, y, wball.WassersteinBall(0.5)).margin
        exact = exact_gap(affine_maps(net), [Fraction(0)] * 4, int(y))
        assert Fraction(float(bound)) <= exact
        assert float(exact - Fraction(float(bound))) < 1e-9


def test_the_allowance_covers_the_longest_sum() -> None:
    net = dense_net(1, 2, (20_000,), 3, 0)
    assert read_graph(net, images(1, 1, 2, 0)).allowance >= 2.3e-12  # 20,000 * 2^-53 and more


@pytest.mark.slow
def test_large_layers_without_hope_keep_sound_bounds() -> None:
    torch.manual_seed(0)
    net = wball.Normalized(SmallResNet(), 0.5, 0.25).eval()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    x = torch.rand(2, 3, 32, 32)
    y = net(x).argmax(1)
    ball = wball.WassersteinBall(torch.tensor([0.01, 0.03]))
    both = certify(net, x, y, ball)
    assert bool(torch.isfinite(both.margin).all()) and not bool(both.certified.any())
    alone = certify(net, x[:1], y[:1], wball.WassersteinBall(0.01))
    torch.testing.assert_close(alone.margin, both.margin[:1], rtol=1e-6, atol=1e-6)
    assert bool((both.margin <= lowest(net, x, y, ball) + 1e-5).all())


def test_gains_in_single_precision_are_rounded_up() -> None:
    """However small: a later layer may multiply them by anything."""
    gains = torch.logspace(-60, 30, 2000, dtype=torch.float64) * (1 + 1e-9)
    found = rounded_up(gains)
    assert found.dtype == torch.float32 and bool((found.double() >= gains).all())
    normal = gains > 1.2e-38
    assert bool((found.double() <= gains * (1 + 2.0**-22))[normal].all())


@functools.cache
def leaking(leak: float) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(4, 6), nn.LeakyReLU(leak), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("leak", [0.2, *slow(0.7)])
@pytest.mark.parametrize("method", ["interval", "dual", "crown", "alpha-crown", "complete"])
def test_leaks_are_not_rounded_to_single_precision(leak: float, method: Method) -> None:
    """A leak of 0.2 was 0.200000003 in stable units: margins of float64 networks were proved 1e-10
    too high."""
    net, x = leaking(leak), torch.rand(8, 1, 2, 2, dtype=torch.float64)
    logits = net(x).detach()
    y = logits.argmax(1)
    margin = gap(logits, y)
    for ball in (wball.WassersteinBall(1e-14), wball.LinfBall(1e-14)):
        proof = certify(net, x, y, ball, method)
        assert bool((proof.margin <= margin + 1e-15).all())
        assert bool((verify(net, x, y, ball, proof).margin <= margin + 1e-15).all())


def test_a_linear_network_is_decided_completely() -> None:
    """There is nothing to split and nothing to optimise: that was an error of the optimiser."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), images(2, 1, 4, 0)
    y = net(x).argmax(1)
    for ball in (wball.LinfBall(0.0), wball.WassersteinBall(0.0, box=None)):
        radius = certified_radius(net, x, y, ball.at(0.02))
        for part, status in ((0.95, "CERTIFIED"), (1.05, "FALSIFIED")):
            found = certify(net, x, y, ball.at(part * radius), "complete", time_limit=1.0)
            assert [s.name for s in found.status] == [status] * 2


def test_wide_kernels_count_moves_inside_them_that_are_not_listed() -> None:
    """Mass that leaves a negative weight for a positive one six pixels on: each gain alone does not
    pay the price, both together do."""
    kernel = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    kernel[0, 0, 3, 0], kernel[0, 0, 3, 6] = -1.0, 10.0
    x = torch.zeros(1, 1, 24, 24, dtype=torch.float64)
    x[0, 0, 11, 11] = 1.0
    row = torch.zeros_like(x)
    row[0, 0, 8:15, 11:18] = kernel[0, 0]
    convolution = ImageConvolution(kernel, (1, 1), (0, 0), (1, 24, 24), (1, 18, 18))
    for eps in (3.0, 6.0):
        source = wball.WassersteinBall(eps, box=None).input_set(x, "full")
        bound = convolution.gain(1.0, source, math.inf)[0, 0, 8, 11]
        full = wball.WassersteinBall(eps, wball.GridCost(47), box=None)
        risen = full.support(x, row).value - (row * x).sum()
        assert float(bound) >= float(risen) - 1e-9


def test_sums_in_any_order_round_by_no_more_than_is_allowed() -> None:
    """Ascending terms keep every partial sum below 0 until the end, descending ones above it."""
    draw = np.random.default_rng(0)
    weight = torch.from_numpy(draw.normal(size=(5, 3000)).astype(np.float32))
    read = torch.from_numpy(draw.random((1, 3000)).astype(np.float32))
    op = Linear("sum", (0,), (5,), weight, None)
    exactly = read.double(), torch.zeros(1, 3000, dtype=torch.float64)
    allowed = 2.0**-24 * torch.as_tensor(op.rounding(exactly))[0]
    terms = (weight * read).numpy()
    exact = (weight.double() * read.double()).sum(1)
    for order in (np.sort(terms), np.sort(terms)[:, ::-1], draw.permuted(terms, axis=1)):
        computed = torch.from_numpy(np.cumsum(order, 1)[:, -1].astype(np.float64))
        assert bool(((computed - exact).abs() <= allowed).all())
    assert bool((allowed < 0.6 * 2.0**-24 * 3000 * (weight * read).abs().sum(1)).all())


def test_sums_bounded_as_rows_round_by_less_and_hold_at_every_point() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)
    ).eval()
    x, ball = torch.rand(2, 1, 4, 4), wball.WassersteinBall(0.1, wball.GridCost(window=7))
    graph, known = read_graph(net, x), relaxation.Bounds()
    found = relaxation.Relaxation(graph, ball.input_set(x, "full"))
    for position in graph.relaxed():
        found.bound_layer(position, known)
    last = len(graph.ops) - 1
    found.reach(last, known)
    before = dict(known.errors)
    found.bound_sums(known)
    sums = [k for k, op in enumerate(graph.ops) if isinstance(op, Linear)]
    assert all(bool((known.errors[k] <= before[k]).all()) for k in sums)
    assert any(bool((known.errors[k] < 0.9 * before[k]).all()) for k in sums)
    for _ in range(20):
        z = ball.support(x, torch.randn(x.shape)).point
        values = graph.run(z.double())
        for k in sums:
            op, read = graph.ops[k], values[graph.ops[k].inputs[0]]
            here = graph.unit * torch.as_tensor(op.rounding((read, 0 * read)))
            assert bool((here <= known.errors[k]).all())
