"""Moves made of two listed ones: which they are, and that bounds over them are sound and
tighter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from wball.certificates import certificate
from wball.input_sets import TransportSet
from wball.input_sets.detours import detours
from wball.input_sets.rows import Charges, Rows


@pytest.mark.parametrize("reach", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("size", [(16, 16), (3, 20)])
def test_detours_are_all_moves_up_to_a_length(reach: float, size: tuple[int, int]) -> None:
    span = range(-19, 20)
    every = [
        (r, c)
        for r in span
        for c in span
        if abs(r) < size[0] and abs(c) < size[1] and (r, c) != (0, 0)
    ]
    listed = tuple(move for move in every if math.hypot(*move) < reach)
    found = detours(listed, 1.0, *size)
    assert found is not None
    limit = found.limit
    assert set(found.offsets) == {move for move in every if reach <= math.hypot(*move) < limit}
    for (r, c), first, second, (a, b) in zip(
        found.offsets, found.first, found.second, found.halfway, strict=True
    ):
        assert listed[first] == (a, b) and listed[second] == (r - a, c - b)
        assert min(0, r) <= a <= max(0, r) and min(0, c) <= b <= max(
            0, c
        )  # the way stays between its ends
    for cost, ring in found.rings.items():
        assert all(math.isclose(math.hypot(*move), cost) for move in found.offsets[ring])


def test_every_move_may_be_a_detour() -> None:
    listed = ((0, -2), (0, -1), (0, 1), (0, 2))
    found = detours(listed, 2.0, 1, 5)
    assert found is not None and found.limit == math.inf and list(found.rings) == [9.0, 16.0]
    assert detours(((0, -1), (0, 1)), 1.0, 1, 2) is None


def charges_of(kernel: Tensor, weights: Tensor, source: TransportSet) -> Charges:
    """Units over the whole image: what they gain by a move is the sum of what they gain step by
    step, or less."""
    around = source.radius
    wide, (height, width) = F.pad(kernel, (around,) * 4), kernel.shape[2:]
    moved = torch.stack(
        [
            wide[..., around + r : around + r + height, around + c : around + c + width] - kernel
            for r, c, *_ in source.listed
        ],
        2,
    ).clamp(min=0)
    parts = (moved.flatten(3), (-kernel).clamp(min=0).flatten(2), kernel.clamp(min=0))
    return Charges(*(torch.einsum("nu,u...->n...", weights, part) for part in parts))


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_bounds_over_detours_are_sound_and_tighter(
    p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 2, 12, 12, dtype=torch.float64)
    budget = torch.tensor([3.0, 8.0], dtype=torch.float64)
    cost = wball.GridCost(5, p)
    every, near = (
        TransportSet(x, cost, budget, (0.0, 1.0), "full", reach) for reach in (99.0, 2.0)
    )
    assert near.detours is not None and every.far is None
    count = 6
    image = torch.arange(count) % 2
    coeff = F.avg_pool2d(torch.randn(count, 2, 16, 16, dtype=torch.float64), 5, 1)
    kernel = F.avg_pool2d(torch.randn(5, 2, 16, 16, dtype=torch.float64), 5, 1)
    weights = torch.rand(count, 5, dtype=torch.float64)
    rows = Rows(coeff, image)
    exact = every.maximum(rows, charges_of(kernel, weights, every), rounds=40)
    bound = near.maximum(rows, charges_of(kernel, weights, near), rounds=40)
    monkeypatch.setattr(TransportSet, "detours", None)
    loose = near.maximum(rows, charges_of(kernel, weights, near), rounds=40)
    assert bool((bound >= exact - 1e-9).all())
    assert bool((bound <= loose + 1e-6).all())
    assert p > 1 or bool((bound < loose - 1e-3).any())


def test_certificates_of_colour_images_hold_and_gain_by_detours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Patches and whole images, on the way back through two convolutions."""
    torch.manual_seed(3)
    blur = nn.Conv2d(3, 6, 8, 2, 3)
    blur.weight.data = 4 * F.avg_pool2d(torch.randn(6, 3, 12, 12), 5, 1)
    net = nn.Sequential(
        blur, nn.ReLU(), nn.Conv2d(6, 8, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).double()
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    y = net(x).argmax(1)
    for gates in ("HOPELESS", "HOPELESS_EVERYWHERE"):
        monkeypatch.setattr(certificate, gates, (1000.0, -1.0))  # what CLOSE leaves open stays open
    ball = wball.WassersteinBall(0.03)
    proof = wball.certify(net, x, y, ball)
    attacked = wball.DualAveraging(ball, steps=20)(net, x, y).images
    logits = net(attacked).detach()
    margin = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).amax(1)
    assert bool((proof.margin <= margin).all())
    monkeypatch.setattr(TransportSet, "detours", None)
    before = wball.certify(net, x, y, ball)
    assert float(proof.margin.sum()) > float(before.margin.sum()) + 0.1
