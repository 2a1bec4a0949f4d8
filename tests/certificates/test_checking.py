"""The independent checker: it proves again what is certified, and never more than is true."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import network_margin
from certificates.test_certify import Varied, circular, dense_net, images
from marks import slow
from wball.certificates import (
    CertificateResult,
    VerificationStatus,
    certified_radius,
    certify,
    verify,
)
from wball.certificates.checking.lines import lines, values_between


def curved(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), kind(), nn.Linear(8, 3))


NETS = {
    "circular": circular,
    "dense": lambda: dense_net(1, 4, (8, 6), 3, 0),
    "varied": Varied,
    **{
        kind.__name__: partial(curved, kind)
        for kind in (nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Hardtanh)
    },
}
BALLS = {
    "wasserstein": wball.WassersteinBall(0.05),
    "squared": wball.WassersteinBall(0.05, wball.GridCost(3, p=2.0), box=None),
    "linf": wball.LinfBall(0.02),
}


@pytest.mark.parametrize("ball", ["wasserstein", *slow("squared", "linf")])
@pytest.mark.parametrize("name", NETS)
def test_certificates_are_proved_again(name: str, ball: str) -> None:
    torch.manual_seed(0)
    net, x = NETS[name]().eval(), images(3, 1, 4, 1)
    y = net(x).argmax(1)
    at = BALLS[ball].at(0.9 * certified_radius(net, x, y, BALLS[ball], rounds=6))
    proof = certify(net, x, y, at)
    assert bool(proof.certified.all())
    found = verify(net, x, y, at, proof)
    assert bool(found.confirmed.all()) and found.disagreements == 0
    assert bool((found.margin > 0).all())


def test_plans_of_the_window_alone_are_proved_as_such() -> None:
    net, x = dense_net(1, 4, (8,), 3, 3), images(2, 1, 4, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.1, wball.GridCost(3))
    at = ball.at(0.95 * certified_radius(net, x, y, ball, plans="window", rounds=6))
    assert bool(verify(net, x, y, at, certify(net, x, y, at, plans="window")).confirmed.all())


@pytest.mark.parametrize("seed", [3, 4, *slow(0, 1, 2, 5)])
@pytest.mark.parametrize("eps", [0.1, 0.5, 2.0])
def test_claims_that_are_wrong_are_not_confirmed(seed: int, eps: float) -> None:
    """The checker computes its own bound, never above the exact minimum, whatever a certificate
    claims."""
    channels, side = (1, 3) if seed % 2 else (2, 2)
    net = dense_net(channels, side, (6, 5) if seed % 3 else (8,), 3, seed)
    x = images(1, channels, side, seed)
    y, ball = net(x).argmax(1), wball.WassersteinBall(eps)
    proof = certify(net, x, y, ball, "interval")
    if not bool(proof.certified.any()):
        assert set(verify(net, x, y, ball, proof).status) == {VerificationStatus.NOTHING}
    forged = replace(proof, certified=torch.ones_like(proof.certified))
    found, exact = verify(net, x, y, ball, forged), network_margin(net, x[0], int(y), ball)
    assert found.disagreements == int(not found.confirmed)  # a forged claim may be true
    assert float(found.margin) <= exact + 1e-7


def test_a_black_image_has_one_point() -> None:
    net = dense_net(1, 3, (6,), 3, 1)
    x = torch.zeros(1, 1, 3, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.5)
    assert bool(verify(net, x, y, ball, certify(net, x, y, ball)).confirmed.all())


@pytest.mark.parametrize("curve", ["sigmoid", "tanh", "gelu", "silu"])
def test_lines_of_the_checker_hold_everywhere(curve: str) -> None:
    torch.manual_seed(0)
    function = getattr(F, curve, None) or getattr(torch, curve)
    low = torch.randn(200, dtype=torch.float64) * 4
    high = low + torch.rand(200, dtype=torch.float64) ** 3 * torch.tensor(
        [1e-6, 1.0, 10.0, 300.0]
    ).repeat(50)
    found, (least, most) = lines(curve, low, high), values_between(curve, low, high)
    for share in torch.linspace(0, 1, 401, dtype=torch.float64):
        v = low + share * (high - low)
        value = function(v)
        assert bool((found.under * v + found.under_shift <= value + 1e-15).all())
        assert bool((found.over * v + found.over_shift >= value - 1e-15).all())
        assert bool((least <= value + 1e-15).all()) and bool((most >= value - 1e-15).all())


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


def test_parts_that_do_not_cover_the_ball_prove_nothing() -> None:
    """The checker cuts the ball itself: leaves that are missing, or of another network, make no
    difference."""
    net, x = dense_net(1, 3, (8, 6), 3, 3), images(2, 1, 3, 3)
    y, ball = net(x).argmax(1), wball.LinfBall(0.02)
    radius = certified_radius(net, x, y, ball, rounds=8)
    proof = certify(net, x, y, ball.at(1.05 * radius), "complete", time_limit=20.0)
    assert all(parts and len(parts) > 1 for parts in proof.leaves)
    one = tuple(parts and parts[:1] for parts in proof.leaves)
    broken = ball.at(4.0 * radius)
    assert not bool(certify(net, x, y, broken, "complete", time_limit=1.0).certified.any())
    forged = replace(proof, leaves=one, certified=torch.ones_like(proof.certified))
    assert not bool(verify(net, x, y, broken, forged).confirmed.any())
    other = dense_net(1, 3, (5,), 3, 0)
    assert len(verify(other, x, y, broken, forged).status) == 2  # leaves of another network


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
    class Own(wball.LinfBall):
        pass

    net, x = dense_net(1, 4, (8,), 3, 0), images(1, 1, 4, 0)
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-3)
    proof = certify(net, x, y, ball)
    found = verify(net, x, y, Own(1e-3), proof)
    assert found.status == (VerificationStatus.UNFOLLOWED,) and "Own" in found.reason
    strange = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Softmax(1))
    found = verify(strange, x, y, ball, proof)
    assert found.status == (VerificationStatus.UNFOLLOWED,) and "softmax" in found.reason
    with pytest.raises(ValueError, match="same images"):
        verify(net, x.expand(2, -1, -1, -1), y, ball, proof)
