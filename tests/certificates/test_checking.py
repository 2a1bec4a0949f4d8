"""The independent checker: it proves again what is certified, and never more than is true."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import euclidean, exact_margin
from certificates.test_certify import chain, dense_net, images
from wball.certificates import VerificationStatus, certified_radius, certify, verify
from wball.certificates.checking.bounds import Checker
from wball.certificates.checking.network import read
from wball.certificates.checking.plans import domain


class Varied(nn.Module):
    """Many kinds of layers: a residual sum, concatenation, pooling of both kinds, normalisation, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.over = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.head = nn.Linear(32, 3)
        nn.init.uniform_(self.norm.running_mean, -0.1, 0.1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.over(self.norm(self.first((x - 0.2) / 0.4)))
        h = F.leaky_relu(self.second(h) + h, 0.1)
        h = torch.cat([F.max_pool2d(h, 2), F.avg_pool2d(F.pad(h, (1, 1, 1, 1)), 3, 3)], 1).permute(0, 1, 3, 2)
        return self.head(h.flatten(1))


NETS = {
    "dense": lambda: dense_net(1, 4, (8, 6), 3, 0),
    "varied": lambda: Varied(),
}
BALLS = {
    "wasserstein": wball.WassersteinBall(0.05),
    "squared": wball.WassersteinBall(0.05, wball.GridCost(3, p=2.0), box=None),
    "linf": wball.LinfBall(0.02),
}


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("name", NETS)
def test_certificates_are_proved_again(name: str, ball: str) -> None:
    torch.manual_seed(0)
    net, x = NETS[name]().eval(), images(3, 1, 4, 1)
    y = net(x).argmax(1)
    at = BALLS[ball].at(0.9 * certified_radius(net, x, y, BALLS[ball], rounds=6))
    proof = certify(net, x, y, at)
    assert bool(proof.certified.all())
    found = verify(proof, net, x, y, at)
    assert bool(found.confirmed.all()) and found.disagreements == 0
    assert bool((found.margin > 0).all())


def test_plans_of_the_window_alone_are_proved_as_such() -> None:
    net, x = dense_net(1, 4, (8,), 3, 3), images(2, 1, 4, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.1, wball.GridCost(3))
    at = ball.at(0.95 * certified_radius(net, x, y, ball, plans="window", rounds=6))
    assert bool(verify(certify(net, x, y, at, plans="window"), net, x, y, at).confirmed.all())


def test_claims_that_are_wrong_are_not_confirmed() -> None:
    net, x = dense_net(1, 4, (8, 6), 3, 0), images(3, 1, 4, 1)
    y, ball = net(x).argmax(1), wball.WassersteinBall(2.0)
    proof = certify(net, x, y, ball)
    assert not bool(proof.certified.any())
    assert set(verify(proof, net, x, y, ball).status) == {VerificationStatus.NOTHING}
    forged = replace(proof, certified=torch.ones_like(proof.certified))
    found = verify(forged, net, x, y, ball)
    assert not bool(found.confirmed.any()) and found.disagreements == 3


@pytest.mark.parametrize("seed", range(4))
def test_the_checker_is_never_above_the_exact_minimum(seed: int) -> None:
    channels, side = (1, 3) if seed % 2 else (2, 2)
    net, x = dense_net(channels, side, (6, 5) if seed % 3 else (8,), 3, seed), images(2, channels, side, seed)
    y, ball = net(x).argmax(1), wball.WassersteinBall(torch.tensor([0.1, 0.5]))
    for k in range(2):
        exact = exact_margin(
            chain(net),
            x[k].double().flatten(1).numpy(),
            int(y[k]),
            euclidean(side, side),
            float(ball.budget(x)[k]),
            ball.box,
        )
        around = domain(ball.take(torch.tensor([k])), x[k], "full")
        for steps in (0, 5):
            assert Checker(read(net, x[:1]), around, steps).margin(int(y[k])) <= exact + 1e-7


def test_a_black_image_has_one_point() -> None:
    net = dense_net(1, 3, (6,), 3, 1)
    x = torch.zeros(1, 1, 3, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.5)
    assert bool(verify(certify(net, x, y, ball), net, x, y, ball).confirmed.all())


def test_what_the_checker_does_not_know_is_named() -> None:
    class Circular(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.pad(x, (1, 1, 1, 1), mode="circular"))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    net, x = Circular(nn.Flatten(), nn.Linear(36, 3)), images(1, 1, 4, 0)
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-3)
    found = verify(certify(net, x, y, ball), net, x, y, ball)
    assert found.status == (VerificationStatus.UNFOLLOWED,) and "copy_" in found.reason
    with pytest.raises(ValueError, match="same images"):
        verify(certify(net, x, y, ball), net, x.expand(2, -1, -1, -1), y, ball)
