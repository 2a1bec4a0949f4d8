"""Maxima of rows over a ball: sound and tight by definition, and the same by every kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from certificates.exact import euclidean
from kernels.cases import DEVICE, random_images, solver
from wball import WassersteinBall
from wball.input_sets import TransportSet
from wball.input_sets.rows import Charges, Rows, trim
from wball.kernels.row_maximum.reference import worth_of

KERNELS = ["cpu", "triton", "torch"]


def some_rows(shape: tuple[int, int, int], patch: int | None) -> Rows:
    """Sixteen rows of three images: whole images, or patches that may reach beyond the border."""
    random = torch.Generator().manual_seed(shape[1])
    image = torch.randint(0, 3, (16,), generator=random)
    side = patch or shape[1]
    coeff = torch.randn((16, shape[0], side, side), generator=random, dtype=torch.float64)
    if patch is None:
        return Rows(coeff, image)
    top, left = torch.randint(-2, shape[1] - 1, (2, 16), generator=random)
    return trim(Rows(coeff, image, (top, left)), shape)


def by_definition(rows: Rows, x: Tensor, budget: Tensor) -> Tensor:
    """``min over psi of psi E + sum_i x_i max_j (a_j - psi C_ij)`` over all plans, by ternary
    search."""
    a = rows.dense((x.shape[1], x.shape[2], x.shape[3])).coeff.flatten(2)
    mass, most = x.double().flatten(2)[rows.image], budget[rows.image]
    cost = torch.tensor(euclidean(x.shape[2], x.shape[3]))

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
def test_bounds_hold_for_all_plans(
    kernel: str,
    side: int,
    channels: int,
    patch: int | None,
    eps: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    x = random_images(side, 0.6, (3, channels, side, side))
    x[2] = 0.0  # nothing to move
    ball = WassersteinBall(eps, box=None)
    source, rows = ball.input_set(x, "full"), some_rows((channels, side, side), patch)
    exact = by_definition(rows, x, ball.budget(x))
    found, few = source.maximum(rows, rounds=20), source.maximum(rows, rounds=2)
    assert bool((found >= exact - 1e-9).all()) and bool((few >= exact - 1e-9).all())
    still = (rows.coeff * rows.read(x.double())).flatten(1).sum(1)
    if source.far is None:  # every move is listed
        assert bool((found - exact <= 2e-4 * (exact - still) + 1e-9).all())
    elif eps < 1:  # long moves hardly pay
        assert bool((found - exact <= 0.3 * (exact - still) + 1e-9).all())
    window = ball.input_set(x, "window").maximum(rows)
    assert bool((window <= found + 2e-4 * found.abs() + 1e-9).all())


def problem(kind: str) -> tuple[TransportSet, Rows, Tensor | None, Charges | None]:
    """Five rows of two images with some empty pixels, and one that is nearly empty."""
    draw = torch.Generator().manual_seed(100)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float64).to(DEVICE)

    x = random_images(0, 0.4, (3, 2, 12, 12))
    x[2] = 0.0
    x[2, 0, 3, 4] = 0.7
    source = WassersteinBall(0.2).input_set(x.to(DEVICE))
    image = torch.tensor([0, 1, 2, 0, 1], device=DEVICE)
    patches = kind.endswith("patches")
    shape = (5, 2, 2, 3) if patches else (5, 2, 12, 12)
    top, left = torch.tensor([[-1, 0, 5, 10, 3], [2, 11, 0, 4, 3]], device=DEVICE)
    rows = Rows(random(*shape) - 0.5, image, (top, left) if patches else None)
    box = 0.3 * (random(*shape) - 0.5) if kind == "priced" else None
    charges = None
    if kind.startswith("charged"):
        count = source._field(rows).mass.shape[2]
        into = source._slice(source._targets(rows, None), 0, 0).shape
        charges = Charges(
            random(5, 2, len(source.moves) - 1, count), random(5, 2, count), random(*into)
        )
    return source, rows, box, charges


@pytest.mark.parametrize("kind", ["patches", "whole", "charged", "charged patches", "priced"])
@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_kernels_agree(kernel: str, kind: str) -> None:
    """Any price is sound, a wrong sum is not: each bound is the function at the price that comes
    with it."""
    solve = solver("row_maximum", kernel)
    source, rows, box, charges = problem(kind)
    field, budget = source._field(rows, box, charges), source.budget[rows.image]
    expected = solver("row_maximum", "torch")(field, budget, source.step, 40).value
    answer = solve(field, budget, source.step, 10)
    found, psi = answer.value, answer.psi
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    again = worth_of(field, psi) + psi * budget
    torch.testing.assert_close(found, again, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_charge_that_is_no_number_is_no_bound(kernel: str) -> None:
    """Networks that overflow charge 0 times infinity; a kernel that leaves such a move out would be
    unsound."""
    solve = solver("row_maximum", kernel)
    source, rows, box, charges = problem("charged")
    assert charges is not None
    charges.moves[1, 0, 3] = math.nan
    field, budget = source._field(rows, box, charges), source.budget[rows.image]
    found = solve(field, budget, source.step, 4).value
    assert torch.isnan(found).tolist() == [False, True, False, False, False]
