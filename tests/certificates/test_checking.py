"""The independent checker: it proves again what is certified, and never more than is true."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import tiny
from certificates.test_certify import dense_net, images
from marks import slow
from wball.certificates import (
    CertificateResult,
    VerificationStatus,
    certified_radius,
    certify,
    verify,
)
from wball.certificates.checking.lines import lines
from wball.certificates.checking.network import CurveNode, Network
from wball.certificates.program import exported
from wball.certificates.subject import subject_of


def test_plans_of_the_window_alone_are_proved_as_such() -> None:
    net, x = dense_net(1, 4, (8,), 3, 3), images(2, 1, 4, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.1, wball.GridCost(3))
    at = ball.at(0.95 * certified_radius(net, x, y, ball, plans="window", rounds=6))
    assert bool(verify(net, x, y, at, certify(net, x, y, at, plans="window")).confirmed.all())


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "softplus": F.softplus,
    "mish": F.mish,
    "softsign": F.softsign,
    "step": lambda v: torch.where(v > 0.3, v, -1.0),
    "sin": torch.sin,
    "cube": lambda v: v**3,
    "exp": torch.exp,
    "bump": lambda v: 1 / (1 + v * v),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lines_of_the_checker_hold_everywhere(name: str) -> None:
    """For the values that float32 gives, too."""

    class Scalar(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([FUNCTIONS[name](x), FUNCTIONS[name](x).flip(1)], 1)

    program = exported(Scalar(), torch.zeros(2, 200))
    curve = next(node for node in Network(program).nodes if isinstance(node, CurveNode))
    torch.manual_seed(0)
    low = (torch.randn(200) * 4).double()
    widths = torch.tensor([1e-6, 1.0, 10.0, 60.0]).repeat(50)
    high = low + torch.rand(200).double() ** 3 * widths
    found = lines(curve.function, low, high, torch.finfo(torch.float32))
    for share in torch.linspace(0, 1, 401, dtype=torch.float64):
        v = (low + share * (high - low)).float().double().clamp(low, high)
        exact = FUNCTIONS[name](v)
        for value in (exact, torch.where(v == v.float(), FUNCTIONS[name](v.float()), exact)):
            assert bool((found.under * v + found.under_shift <= value).all())
            assert bool((found.over * v + found.over_shift >= value).all())
            assert bool((found.least <= value).all()) and bool((found.most >= value).all())


@pytest.mark.parametrize("further", [1.1, *slow(1.2)])
def test_proofs_by_branch_and_bound_are_proved_again(further: float, tmp_path: Path) -> None:
    net, x = dense_net(1, 3, (8, 6), 3, 3), images(3, 1, 3, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.05)
    at = ball.at(further * certified_radius(net, x, y, ball, rounds=8))
    proof = certify(net, x, y, at, "complete", time_limit=20.0)
    assert any(proof.leaves) and bool(proof.certified.any())
    assert torch.equal(verify(net, x, y, at, proof).confirmed, proof.certified)
    proof.save(tmp_path / "proof.safetensors")
    loaded = CertificateResult.load(tmp_path / "proof.safetensors")
    assert loaded.to_dict() == proof.to_dict() and repr(loaded) == repr(proof)
    assert [image["status"] for image in loaded.to_dict()["images"]] == [
        status.name.lower() for status in proof.status
    ]
    assert [p and len(p) for p in loaded.leaves] == [p and len(p) for p in proof.leaves]
    assert torch.equal(verify(net, x, y, at, loaded).confirmed, proof.certified)
    late = verify(net, x, y, at, proof, time_limit=1e-9)
    assert not late.disagreements and "time_limit ended" in late.reason


def test_parts_that_do_not_cover_the_ball_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker cuts the ball itself: leaves that are missing, or of another network, make no
    difference."""
    monkeypatch.setattr(time, "monotonic", time.process_time)  # however busy the machine is
    net, x, y, eps = tiny(251)
    ball = wball.WassersteinBall(eps, wball.GridCost(5))
    proof = certify(net, x, y, ball, "complete", time_limit=20.0)
    assert all(parts and len(parts) > 1 for parts in proof.leaves)
    one = tuple(parts and parts[:1] for parts in proof.leaves)
    broken = ball.at(4.0 * eps)
    hopeless = certify(net, x, y, broken, "complete", time_limit=1.0)
    assert not bool(hopeless.certified.any())
    every = torch.ones_like(proof.certified)
    forged = replace(proof, leaves=one, certified=every, subject=hopeless.subject)
    assert not bool(verify(net, x, y, broken, forged).confirmed.any())
    other = dense_net(1, x.shape[2], (5,), 3, 0)  # leaves of another network
    subject = certify(other, x, y, broken, "crown").subject
    assert not bool(verify(other, x, y, broken, replace(forged, subject=subject)).confirmed.any())


def test_a_model_without_gradients_is_decided_by_bounds() -> None:
    """Work in place that autograd cannot follow made ``certify(method="complete")`` raise."""

    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(x * 2.0 - 0.5)
            h.mul_(1.5)
            out: Tensor = self.head(h.flatten(1))
            return out

    torch.manual_seed(0)
    net, x = Overwritten().eval(), images(2, 1, 3, 0)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.05)
    at = ball.at(1.1 * certified_radius(net, x, y, ball, "crown", rounds=6))
    proof = certify(net, x, y, at, "complete", time_limit=5.0)
    assert bool(proof.certified.any())
    # The checker's bounds of a part are looser than the search's: it confirms one of two.
    assert bool(verify(net, x, y, at, proof).confirmed.any())


def test_a_larger_layer_is_proved_again() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16**2, 2)
    )
    x = torch.zeros(1, 1, 16, 16)
    x[0, 0, 3:5, 3:5] = 1.0
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-4)
    proof = certify(net, x, y, ball)
    assert bool(proof.certified.all()) and bool(verify(net, x, y, ball, proof).confirmed.all())


def test_what_the_checker_does_not_know_is_named() -> None:
    class Own(wball.WassersteinBall):
        pass

    net, x = dense_net(1, 4, (8,), 3, 0), images(1, 1, 4, 0)
    y = net(x).argmax(1)
    proof = certify(net, x, y, Own(1e-3))
    found = verify(net, x, y, Own(1e-3), proof)
    assert found.status == (VerificationStatus.UNFOLLOWED,) and "Own" in found.reason

    class Strange(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.lgamma(1 + x.flatten(1)[:, :3])

    strange = Strange()
    subject = subject_of(exported(strange, x), x, y, Own(1e-3))
    found = verify(strange, x, y, Own(1e-3), replace(proof, subject=subject))
    assert found.status == (VerificationStatus.UNFOLLOWED,)
    assert "lgamma" in found.reason and "test_checking.py, line" in found.reason


def test_rounding_of_the_models_own_precision_is_bounded() -> None:
    """A margin that float32 loses was confirmed, if the images beside it had probed less."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[3e8, 0.0], [1e8, 0.0]]))
        net[3].weight.copy_(torch.tensor([[1.0, -3.0], [0.0, 0.0]]))
        net[3].bias.copy_(torch.tensor([0.1, 0.0]))
    x = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    y, ball = torch.zeros(2, dtype=torch.long), wball.LinfBall(1e-3)
    every = torch.ones(2, dtype=torch.bool)
    for dtype, right in ((torch.float32, False), (torch.float64, True)):
        model, given = net.to(dtype), x.to(dtype)
        forged = replace(certify(model, given, y, ball), certified=every)
        assert bool(verify(model, given, y, ball, forged).confirmed[0]) is right


def test_what_may_overflow_proves_nothing() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[0.0] * 4, [1e38] * 4]))
        net[1].bias.copy_(torch.tensor([0.0, 1.7e38]))
    x, y, ball = torch.full((1, 4), 0.2), torch.ones(1, dtype=torch.long), wball.LinfBall(0.1)
    forged = replace(certify(net, x, y, ball), certified=torch.ones(1, dtype=torch.bool))
    assert not bool(verify(net, x, y, ball, forged).confirmed.any())


def test_the_time_limit_is_that_of_the_call() -> None:
    net, x = dense_net(1, 4, (16, 16), 3, 0), images(6, 1, 4, 0)
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-4)
    proof = certify(net, x, y, ball)
    start = time.monotonic()
    found = verify(net, x, y, ball, proof, time_limit=1e-3)
    assert set(found.status) == {VerificationStatus.UNFOLLOWED} and "time_limit" in found.reason
    assert (
        time.monotonic() - start < 20 and "unfollowed 6" in repr(found) and len(repr(found)) < 200
    )
