"""The paper's algorithms against a plain transcription of the released iteration: dense matrices,
no logarithms, one image at a time."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import lambertw
from torch import Tensor, nn

import wball
from wball.kernels import log_products

Matrix = NDArray[np.float64]
COUNTS = (1, 2, 5, 20, 50)


def dense(
    cost: "wball.GridCost | wball.StencilCost | wball.DenseCost", c: int, h: int, w: int
) -> Matrix:
    """The cost of a move between all pixels of all channels; inf between channels and outside the
    window."""
    if isinstance(cost, wball.DenseCost):
        plane = cost.matrix.numpy()
    else:
        plane = np.full((h * w, h * w), np.inf)
        for dr, dc, _, value in cost.moves(h, w):
            for r in range(h):
                for k in range(w):
                    if 0 <= r + dr < h and 0 <= k + dc < w:
                        plane[r * w + k, (r + dr) * w + k + dc] = value
    whole = np.full((c * h * w, c * h * w), np.inf)
    for channel in range(c):
        part = slice(channel * h * w, (channel + 1) * h * w)
        whole[part, part] = plane
    return whole


def released(
    x: Matrix, y: Matrix, cost: Matrix, eps: float, lam: float, count: int, conjugate: bool = False
) -> Matrix:
    """``count`` rounds of the released code: its signs, its order (alpha, beta, psi), its start and
    its rule for the step of psi."""
    finite, size = np.where(np.isfinite(cost), cost, 0.0), len(x)

    def kernel(psi: float) -> Matrix:
        return np.where(np.isfinite(cost), np.exp(-psi * finite - 1), 0.0)

    with np.errstate(divide="ignore"):
        log_x = np.log(x)
    beta = -lam * y if conjugate else np.full(size, math.log(1 / size))
    psi = 1.0
    k = kernel(psi)
    for _ in range(count):
        alpha = np.log(k @ np.exp(-beta)) - log_x
        u = np.exp(-alpha)
        if not conjugate:
            beta = np.real(lambertw(lam * np.exp(lam * y) * (k.T @ u))) - lam * y
        v = np.exp(-beta)
        delta = (-eps + u @ (finite * k) @ v) / -(u @ (finite * finite * k) @ v)
        t = 1.0
        while psi - t * delta < 0 and t > 1e-2:
            t /= 2
        psi = max(psi - t * delta, 0.0)
        k = kernel(psi)
    point: Matrix = v * (k.T @ u) if conjugate else beta / lam + y
    return point


def inputs(shape: tuple[int, ...], mass: float) -> tuple[Tensor, Tensor]:
    """Images of a mass, partly black, and points near them."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.rand(shape, generator=generator, dtype=torch.float64).square()
    x = torch.where(x < 0.15, 0.0, x)
    x *= mass / x.flatten(1).sum(1).view(-1, 1, 1, 1)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, (x + 0.4 * x.mean() * noise).clamp(min=-0.01 * mass)


def one_way() -> wball.StencilCost:
    """Moves to the right cost less than moves back; there are none upwards."""
    inf = math.inf
    return wball.StencilCost(((inf, inf, inf), (1.5, 0.0, 0.5), (inf, 1.0, 2.0)))


def matrix(size: int) -> wball.DenseCost:
    cost = torch.rand(size, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    cost[0, 1:4] = math.inf
    return wball.DenseCost(cost.fill_diagonal_(0.0))


CASES = [
    pytest.param((3, 1, 7, 7), wball.GridCost(5), 1000.0, 0.1, 1.0, id="as-for-mnist"),
    pytest.param((2, 3, 6, 6), wball.GridCost(5), 3000.0, 0.01, 7.0, id="as-for-cifar10"),
    pytest.param((2, 2, 5, 8), wball.GridCost(3, 2.0), 50.0, 0.3, 0.2, id="squares"),
    pytest.param((2, 1, 6, 5), one_way(), 200.0, 0.05, 4.0, id="one-way"),
    pytest.param((2, 1, 4, 5), matrix(20), 200.0, 0.05, 4.0, id="matrix"),
]


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "logs"])
@pytest.mark.parametrize(("shape", "cost", "reg", "eps", "mass"), CASES)
def test_every_iteration_is_that_of_the_released_code(
    shape: tuple[int, ...],
    cost: wball.GridCost,
    reg: float,
    eps: float,
    mass: float,
    numbers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_products, "SPREAD", 600.0 if numbers else -1.0)
    x, w = inputs(shape, mass)
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / reg
    ball = wball.WassersteinBall(eps, cost, box=None)
    table = dense(cost, *shape[1:])
    for count in COUNTS:
        near = wball.projected_sinkhorn(x, w, ball, reg, count, tol=0)
        best = wball.conjugate_sinkhorn(x, g, ball, reg, count, tol=0)
        assert near.n_iter.tolist() == best.n_iter.tolist() == [count] * len(x)
        for i, image in enumerate(x):
            a, b = (image / mass).flatten().numpy(), (w[i] / mass).flatten().numpy()
            theirs = mass * released(a, b, table, eps, reg, count)
            np.testing.assert_allclose(near.point[i].flatten(), theirs, atol=1e-8 * mass, rtol=0)
            theirs = mass * released(a, g[i].flatten().numpy(), table, eps, reg, count, True)
            np.testing.assert_allclose(best.point[i].flatten(), theirs, atol=1e-8 * mass, rtol=0)


def test_limits_are_the_entropic_projection_and_support() -> None:
    x, w = inputs((2, 2, 5, 4), 5.0)
    ball = wball.WassersteinBall(0.05, box=None)
    near = wball.projected_sinkhorn(x, w, ball, 50.0, 5000, tol=1e-12)
    exact = ball.project(x, w, 50.0, tol=1e-9)
    torch.testing.assert_close(near.point, exact.point, atol=1e-4, rtol=0)
    g = 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    best = wball.conjugate_sinkhorn(x, g, ball, 50.0, 5000, tol=1e-12)
    expected = ball.support(x, g, 50.0, tol=1e-9)
    torch.testing.assert_close(best.point, expected.point, atol=1e-4, rtol=0)
    for found in (near, best):
        assert bool(found.converged.all()) and int(found.n_iter.max()) < 5000
        assert bool((ball.distance(x, found.point.clamp(min=0)) <= 0.05 + 1e-4).all())


def test_images_stop_on_their_own() -> None:
    x, w = inputs((4, 1, 7, 7), 3.0)
    w[1] = x[1]
    ball = wball.WassersteinBall(torch.tensor([0.01, 0.02, 0.1, 1.0]))
    together = wball.projected_sinkhorn(x, w, ball, 500.0, 300, tol=1e-6)
    assert len(set(together.n_iter.tolist())) > 1
    for i in range(4):
        alone = wball.projected_sinkhorn(
            x[i : i + 1], w[i : i + 1], ball.at(float(ball.eps[i])), 500.0, 300, tol=1e-6
        )
        assert int(alone.n_iter) == int(together.n_iter[i])
        torch.testing.assert_close(alone.point[0], together.point[i], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cost", [wball.GridCost(7), matrix(16), one_way()])
def test_nothing_overflows(cost: wball.GridCost, dtype: torch.dtype) -> None:
    """Far from every bright pixel, what arrives is smaller than the image's largest by more than
    exp can say; images without mass or budget stay."""
    x, w = (image.to(dtype) for image in inputs((4, 1, 4, 4), 6.0))
    x[1] = 0.0
    x[2] = 0.0
    x[2, 0, 0, 0] = 1e-4
    w[3] *= 1e3
    for reg, eps in ((1.0, 0.3), (1e3, 1e-3), (1e5, 0.3), (1e8, 1e-3), (1e3, 0.0)):
        ball = wball.WassersteinBall(eps, cost)
        for found in (
            wball.projected_sinkhorn(x, w, ball, reg, 15),
            wball.conjugate_sinkhorn(x, w, ball, reg, 15),
            ball.project(x, w, reg, max_iter=15, mode="paper"),
        ):
            assert found.point.dtype == dtype and bool(found.point.isfinite().all())
        held = ball.project(x, w, reg, max_iter=15, mode="paper").point
        assert torch.equal(held[1], x[1]) and (eps > 0 or torch.equal(held, x.clamp(0, 1)))


def test_paper_mode_is_algorithm_2_and_a_clamp() -> None:
    x, w = (image.float() for image in inputs((3, 1, 8, 8), 20.0))
    w[0, 0, 3, 3] = 9.0
    ball = wball.WassersteinBall(0.3)
    raw = wball.projected_sinkhorn(x, w, ball, 1000.0, 40, tol=1e-5)
    found = ball.project(x, w, 1000.0, max_iter=40, tol=1e-5, mode="paper")
    assert float(raw.point.max()) > 1 and float(raw.point.min()) > -1e-6
    assert torch.equal(found.point, raw.point.clamp(0, 1)) and torch.equal(found.n_iter, raw.n_iter)
    assert found.plan is None and bool(found.gap.isnan().all())
    assert torch.equal(found.converged, raw.converged)


def test_the_papers_attack_takes_these_points() -> None:
    x, _ = wball.load_sample("mnist")
    x = x[:6]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    y = model(x).argmax(1)
    attack = wball.PGD.paper("mnist", steps=1, progress=False).at(1.0)
    gradient = torch.autograd.functional.jacobian(
        lambda z: nn.functional.cross_entropy(model(z), y, reduction="sum"), x
    )
    step = wball.projected_sinkhorn(
        x, x + 0.1 * gradient.sign(), attack.ball, 1000.0, attack.max_iter, attack.tol
    )
    found = attack(model, x, y)
    broken = found.success
    assert int(broken.sum()) > 1
    torch.testing.assert_close(found.images[broken], step.point.clamp(0, 1)[broken])


def test_odd_shapes() -> None:
    """No images, histograms, half precision."""
    ball = wball.WassersteinBall(0.2)
    empty = torch.zeros(0, 1, 4, 4)
    assert wball.projected_sinkhorn(empty, empty, ball, 10.0).point.shape == (0, 1, 4, 4)
    bins = torch.rand(3, 6).half()
    line = wball.WassersteinBall(0.2, matrix(6))
    for call in (wball.projected_sinkhorn, wball.conjugate_sinkhorn):
        found = call(bins, bins.flip(1), line, 10.0)
        assert found.point.shape == (3, 6) and found.point.dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    x, w = inputs((1, 1, 4, 4), 1.0)
    ball = wball.WassersteinBall(0.1)
    for call in (wball.projected_sinkhorn, wball.conjugate_sinkhorn):
        with pytest.raises(ValueError, match="reg must be > 0 and finite"):
            call(x, w, ball, math.inf)
        with pytest.raises(ValueError, match="max_iter must be at least 1"):
            call(x, w, ball, 10.0, 0)
        with pytest.raises(ValueError, match="tol must be at least 0"):
            call(x, w, ball, 10.0, tol=math.nan)
        with pytest.raises(ValueError, match="must have the shape of x"):
            call(x, w[..., :3], ball, 10.0)
