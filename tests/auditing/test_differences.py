"""Transport between large images by their differences: the whole problem's answer, or none."""

from __future__ import annotations

import ot
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wball import GridCost, WassersteinBall, audit
from wball.auditing import transport
from wball.auditing.differences import MEET, match_differences
from wball.auditing.flows import AGREE, list_moves, match

SIDE = 48
"""More pixels than :data:`wball.auditing.transport.LARGE`."""


def smooth(seed: int, *, black: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 1, SIDE // 8, SIDE // 8, generator=generator)
    image = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
    return ((image - black) / (1 - black)).clamp(0, 1)


def moved(ball: WassersteinBall, x: Tensor, seed: int) -> Tensor:
    """A point of the ball's border as an attack finds it."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    oracle = ball.oracle(x)
    for _ in range(3):
        z = oracle(20 * noise).z
    return z


def both(cost: GridCost, x: Tensor, z: Tensor) -> tuple[float | None, float, float]:
    """The cost by differences, if there is one, by the whole problem, and how close they must be."""
    a, b = (t.double().numpy().ravel() for t in (x, z))
    moves = list_moves(cost, SIDE, SIDE)
    found, whole = match_differences(moves, a, b), match(moves, a, b * (a.sum() / b.sum()))
    near = max(AGREE * float(a.sum()) * moves.dearest, MEET * whole.cost)
    return None if found is None else found.cost, whole.cost, near


@pytest.mark.parametrize("eps", [1e-3, 0.05])
@pytest.mark.parametrize("black", [0.0, 0.5])
def test_points_of_an_attack_need_no_more_than_their_differences(eps: float, black: float) -> None:
    ball, x = WassersteinBall(eps), smooth(0, black=black)
    z = moved(ball, x, 1)
    found, whole, near = both(ball.cost, x, z)
    assert found is not None
    assert abs(found - whole) <= near
    report = audit(ball, x, z)
    assert report.all_valid
    assert not audit(ball.at(float(report.distance) * (1 - 5e-4)), x, z).all_valid


@pytest.mark.parametrize("shift", [(0, 1), (1, 1), (0, 5), (3, 2)])
@pytest.mark.parametrize("cost", [GridCost(), GridCost(p=2), GridCost(window=3)], ids=str)
def test_chains_of_moves_are_not_forgotten(cost: GridCost, shift: tuple[int, int]) -> None:
    """Mass that goes further than a window relays through pixels that have some, and may be cheaper that way: whatever
    the differences alone say must be what the whole problem says."""
    x = 0.2 + 0.6 * smooth(1)
    z = x.clone()
    z[..., 20, 20] -= 0.1
    z[..., 20 + shift[0], 20 + shift[1]] += 0.1
    found, whole, near = both(cost, x, z)
    assert found is None or abs(found - whole) <= near
    distance = float(audit(WassersteinBall(1.0, cost, mass="absolute"), x, z).distance)
    assert distance == pytest.approx(whole, abs=near)


def test_a_pixel_hands_on_no_more_than_it_has() -> None:
    """Between two bright pixels lies a dim one: what is more than it has must go another, longer way."""
    x = torch.full((1, 1, SIDE, SIDE), 1e-3)
    x[..., 20, 20] = 1.0
    z = x.clone()
    z[..., 20, 20], z[..., 20, 24] = 0.5, 0.5 + 1e-3
    found, whole, near = both(GridCost(), x, z)
    assert found is None or abs(found - whole) <= near


def test_a_pixel_that_vanishes_is_no_rounding() -> None:
    """Its mass is within what the audit forgives in an image of this size, its distance is not."""
    x = torch.full((1, 1, 320, 320), 1.0)
    z = x.clone()
    z[..., 9, 9] = 1e-9
    a, b = (t.double().numpy().ravel() for t in (x, z))
    assert match_differences(list_moves(GridCost(window=3), 320, 320), a, b) is None


def test_a_wrong_answer_of_the_flow_solver_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ball, x = WassersteinBall(0.01), smooth(4)
    z = moved(ball, x, 5)
    inner = ot.emd
    worse = {
        "plan": lambda plan, log: (plan * 0.9, log),
        "prices": lambda plan, log: (plan, log | {"u": 0 * log["u"]}),
    }
    a, b = (t.double().numpy().ravel() for t in (x, z))
    moves = list_moves(ball.cost, SIDE, SIDE)
    assert match_differences(moves, a, b) is not None
    for change in worse.values():
        monkeypatch.setattr(ot, "emd", lambda *p, change=change, **k: change(*inner(*p, **k)))
        assert match_differences(moves, a, b) is None


def test_one_pixel_rounded_is_no_distance() -> None:
    """The last bit of one pixel changed, and there is nobody to give it to: the audit broke off."""
    x = 0.2 + 0.6 * smooth(1)
    z = x.clone()
    z[0, 0, 3, 4] = torch.nextafter(z[0, 0, 3, 4], torch.tensor(1.0))
    report = audit(WassersteinBall(0.01), x, z)
    assert report.all_valid and float(report.distance) < 1e-7


def test_large_images_take_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ball, x = WassersteinBall(0.01), smooth(8).expand(2, 3, -1, -1).contiguous()
    z = moved(ball, x, 9)
    monkeypatch.setattr(transport, "match", None)
    assert audit(ball, x, z).all_valid
