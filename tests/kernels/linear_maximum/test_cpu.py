"""The largest value of rows over a ball: compiled and in torch, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wball
from certificates.exact import euclidean
from wball.input_sets.rows import Rows


def picture(count: int, channels: int, side: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((count, channels, side, side), generator=generator)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.4, torch.zeros_like(x), x)


def some_rows(
    count: int, shape: tuple[int, int, int], images: int, patch: int | None, seed: int
) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, images, (count,), generator=generator)
    side = patch or shape[1]
    coeff = torch.randn((count, shape[0], side, side), generator=generator, dtype=torch.float64)
    if patch is None:
        return Rows(coeff, image)
    top, left = torch.randint(-2, shape[1] - 1, (2, count), generator=generator)
    rows = Rows(coeff, image, (top, left))
    inside = rows.inside(shape)
    assert inside is not None
    return rows.like(coeff * inside)


def by_definition(rows: Rows, x: Tensor, budget: Tensor, cost: Tensor) -> Tensor:
    """``min over psi of psi E + sum_i x_i max_j (a_j - psi C_ij)`` over all plans, by golden-section search."""
    a = rows.dense(tuple(x.shape[1:])).coeff.flatten(2)
    mass, most = x.double().flatten(2)[rows.image], budget[rows.image]

    def value(psi: Tensor) -> Tensor:
        best = (a[:, :, None, :] - psi.view(-1, 1, 1, 1) * cost).amax(3)
        return psi * most + (mass * best).sum((1, 2))

    low, high = torch.zeros_like(most), torch.full_like(most, 20.0)
    for _ in range(70):
        third = (high - low) / 3
        left = value(low + third) < value(high - third)
        low, high = torch.where(left, low, low + third), torch.where(left, high - third, high)
    return torch.minimum(value(high), value(torch.zeros_like(high)))


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("side", "channels", "patch"), [(4, 2, None), (6, 1, None), (12, 1, None), (12, 2, 4)]
)
@pytest.mark.parametrize("eps", [0.003, 0.1, 3.0])
def test_maximum(kernel: str, side: int, channels: int, patch: int | None, eps: float) -> None:
    x = picture(3, channels, side, side)
    x[2] = 0.0  # nothing to move
    ball = wball.WassersteinBall(eps, box=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WBALL_KERNEL", kernel)
        source = ball.input_set(x, "full")
    rows = some_rows(16, (channels, side, side), 3, patch, side)
    exact = by_definition(rows, x, ball.budget(x), torch.tensor(euclidean(side, side)))
    found, few = source.maximum(rows, rounds=20), source.maximum(rows, rounds=2)
    assert bool((found >= exact - 1e-9).all()) and bool((few >= exact - 1e-9).all())
    still = (rows.coeff * rows.read(x.double())).flatten(1).sum(1)
    if source.far is None:  # every move is listed
        assert bool((found - exact <= 2e-4 * (exact - still) + 1e-9).all())
    elif eps < 1:  # long moves hardly pay
        assert bool((found - exact <= 0.3 * (exact - still) + 1e-9).all())
    window = ball.input_set(x, "window").maximum(rows)
    assert bool((window <= found + 2e-4 * found.abs() + 1e-9).all())


@pytest.mark.parametrize("patch", [None, 5])
@pytest.mark.parametrize("plans", ["full", "window"])
def test_compiled_and_torch_agree(patch: int | None, plans: str) -> None:
    x = picture(4, 3, 20, 7)
    for eps in (0.0005, 0.02):
        found = {}
        for kernel in ("cpu", "torch"):
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("WBALL_KERNEL", kernel)
                source = wball.WassersteinBall(eps).input_set(x, plans)  # type: ignore[arg-type]
            found[kernel] = source.maximum(some_rows(60, (3, 20, 20), 4, patch, 1), rounds=25)
        # The search in torch runs in float32.
        torch.testing.assert_close(found["cpu"], found["torch"], rtol=2e-4, atol=2e-4)
