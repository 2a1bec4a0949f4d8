"""Ground costs: gather and scatter are adjoint, moves are what the definition says, bad tables are
refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from problems import arc_list
from wball import DenseCost, GridCost, StencilCost
from wball.cost import AWAY, GroundCost


def costs(height: int, width: int) -> list[GroundCost]:
    n = height * width
    matrix = torch.rand(n, n, dtype=torch.float64)
    matrix[torch.rand(n, n) < 0.3] = math.inf
    matrix.fill_diagonal_(0)
    table = ((math.inf, 2.0, 1.0), (0.5, 0.0, 3.0), (math.inf, math.inf, 1.5))
    return [
        GridCost(3),
        GridCost(5, 2.0),
        GridCost(11),
        GridCost(1),
        GridCost(3, 2.0, channel_cost=0.5),
        StencilCost(table),
        DenseCost(matrix),
    ]


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (5, 1), (4, 3), (3, 5)])
def test_arcs_are_the_moves_of_the_definition(shape: tuple[int, int]) -> None:
    for cost in costs(*shape):
        arcs = cost.arcs(torch.zeros((1, 1, *shape), dtype=torch.float64))
        n = shape[0] * shape[1]
        ends = arcs.gather(torch.arange(1.0, n + 1, dtype=torch.float64).reshape(1, 1, *shape))[
            0, 0
        ]
        found = set()
        for k in range(ends.shape[0]):
            for start in range(n):
                r, c = divmod(start, shape[1])
                if bool(arcs.allowed[k, r, c]):
                    price = arcs.cost.expand_as(ends)[k, r, c]
                    found.add((start, int(ends[k, r, c]) - 1, round(float(price), 9)))
        assert found == {(i, j, round(v, 9)) for i, j, v in arc_list(cost, *shape)}


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 1, 4), (2, 4, 3), (4, 3, 3)])
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0])
def test_moves_across_channels_are_those_of_the_definition(
    shape: tuple[int, int, int], p: float
) -> None:
    cost, n = GridCost(3, p, channel_cost=0.7), math.prod(shape)
    moves = cost.arcs(torch.zeros((1, *shape), dtype=torch.float64))
    ends = moves.gather(torch.arange(1.0, n + 1, dtype=torch.float64).reshape(1, *shape))[0]
    price = moves.cost.expand_as(ends)
    found = {
        (start, int(ends[c, k, i, j]) - 1, round(float(price[c, k, i, j]), 9))
        for start, (c, i, j) in enumerate(itertools.product(*map(range, shape)))
        for k in range(len(moves))
        if bool(moves.allowed[c, k, i, j])
    }
    assert found == {(i, j, round(v, 9)) for i, j, v in arc_list(cost, *shape[1:], shape[0])}


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (5, 1), (4, 3), (3, 5)])
@pytest.mark.parametrize("back", [False, True])
def test_sums_over_moves_are_those_of_the_arcs(shape: tuple[int, int], back: bool) -> None:
    values = torch.rand((2, 3, *shape), dtype=torch.float64)
    for cost in costs(*shape):
        moves = cost.arcs(values)
        rates = 1 + torch.rand((2, 1, 1, 1), dtype=torch.float64)
        weight = torch.exp(-rates[..., None] * moves.cost) * (moves.allowed & ~moves.stay())
        ends = moves.gather(values)
        expected = moves.scatter(values[:, :, None] * weight) if back else (weight * ends).sum(2)
        sums = moves.sums(values, moves.weights(rates)[AWAY], back)[:, :, 0]
        torch.testing.assert_close(sums, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(1, 6), (4, 3)])
def test_scatter_is_the_adjoint_of_gather_and_opposite_turns_arcs_round(
    shape: tuple[int, int],
) -> None:
    for cost in costs(*shape):
        image = torch.rand(2, 3, *shape, dtype=torch.float64)
        arcs = cost.arcs(image)
        flow = torch.rand_like(arcs.gather(image)) * arcs.allowed
        torch.testing.assert_close(
            (arcs.gather(image) * flow).sum(), (image * arcs.scatter(flow)).sum()
        )
        # What is sent to j by opposite arcs is what j sent.
        both = torch.where(
            arcs.opposite(torch.ones_like(flow) * arcs.allowed) * arcs.allowed > 0,
            flow,
            torch.zeros_like(flow),
        )
        torch.testing.assert_close(arcs.opposite(arcs.opposite(both)), both)
        torch.testing.assert_close(arcs.scatter(arcs.opposite(both)), both.sum(2))
        assert bool((arcs.stay().sum(-3) == 1).all())


def test_full_cost_covers_the_image() -> None:
    assert not GridCost(5).covers(28, 28)
    full = GridCost(5, 2.0).full(28, 20)
    assert full.covers(28, 20)
    assert full.p == 2.0
    assert len(GridCost(101).moves(3, 3)) == 25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GridCost(5.0), "window"),  # type: ignore[arg-type]
        *((partial(GridCost, 5, p), "p must be") for p in (0, -1.0, math.inf, math.nan)),
        *((partial(GridCost, w), f"window must be (odd|at least).*{w}") for w in (0, -3, 4, 2)),
        *((partial(GridCost, 5, 1.0, c), "channel_cost must be") for c in (0, -1.0, math.inf)),
        (lambda: StencilCost(((0.0, 1.0),)), "odd sides"),
        (lambda: StencilCost(((1.0,),)), "centre"),
        (lambda: StencilCost(((-1.0, 0.0, 1.0),)), "negative or NaN"),
        (lambda: DenseCost(torch.zeros(2, 3)), "square"),
        (lambda: DenseCost(torch.ones(2, 2)), "diagonal"),
        (lambda: DenseCost(torch.tensor([[0.0, -1.0], [1.0, 0.0]])), "negative or NaN"),
        (lambda: DenseCost(torch.zeros(4, 4)).arcs(torch.zeros(1, 1, 3, 3)), r"4 pixels.*3 x 3"),
    ],
)
def test_bad_costs_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
