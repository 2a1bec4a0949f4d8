"""What certificates promise, for every method, every kind of network and both kinds of balls.

Referees: mixed-integer programs (:mod:`certificates.exact`), a search over vertices of the ball,
and the independent checker, which must prove again what is certified and nothing that is false.
The mistakes this finds: a bound above the truth, a bound of nothing, a proof that its checker
cannot follow, a margin that depends on the batch, a label that is wrong and certified.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wball
from certificates.exact import affine_maps, box_margin, euclidean, gap, network_margin
from certificates.kinds import NETWORKS
from certificates.test_certify import Varied, circular, conv_net, dense_net, images
from marks import slow
from wball.ball import Ball
from wball.certificates import (
    CertificateStatus,
    VerificationStatus,
    certified_radius,
    certify,
    verify,
)

METHODS: dict[str, dict[str, Any]] = {
    "interval": {"method": "interval"},
    "dual": {"method": "dual"},
    "crown": {"method": "crown"},
    "anchored": {"method": "anchored"},
    "optimised": {"method": "alpha-crown", "steps": 2},
    "complete": {"method": "complete", "time_limit": 20.0},
}
ROUNDING = 1e-7
"""Of the solver of integer programs."""


# Against the exact minimum
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(4), *slow(4, 5)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_method_is_above_the_exact_minimum(seed: int) -> None:
    """Nor is the checker, whatever a certificate claims."""
    channels, side = (1, 3) if seed % 2 else (2, 2)
    net = dense_net(channels, side, (6, 5) if seed % 3 else (8,), 3, seed)
    x = images(3, channels, side, seed)
    y, radii, every = net(x).argmax(1), torch.tensor([0.05, 0.3, 2.0]), torch.arange(3)
    flow, box = wball.WassersteinBall(radii), wball.LinfBall(radii / 10)
    exact: dict[str, Tensor] = {
        "flow": torch.tensor([
            network_margin(net, x[k], int(y[k]), flow.take(every[k : k + 1]), euclidean(side, side))
            for k in range(3)
        ]),
        "box": torch.tensor([
            box_margin(affine_maps(net), x[k].flatten().double().numpy(), int(y[k]), float(radii[k]) / 10)
            for k in range(3)
        ]),
    }  # fmt: skip
    for name, settings in METHODS.items():
        for ball, truth in ((flow, exact["flow"]), (box, exact["box"])):
            if name == "complete" and seed > 1:
                continue
            found = certify(net, x, y, ball, **settings)
            assert bool((found.margin <= truth + ROUNDING).all()), (name, found.margin, truth)
            assert not bool((found.certified & (truth < -ROUNDING)).any()), name
    for ball, truth in ((flow, exact["flow"]), (box, exact["box"])):
        proof = certify(net, x, y, ball, "interval")
        if not bool(proof.certified.any()):
            assert set(verify(net, x, y, ball, proof).status) == {VerificationStatus.NOTHING}
        found = verify(net, x, y, ball, replace(proof, certified=torch.ones(3, dtype=torch.bool)))
        assert bool((found.margin <= truth + ROUNDING).all())
        assert found.disagreements == int((~found.confirmed).sum())  # a forged claim may be true


# Every kind of network
# --------------------------------------------------------------------------------------------------


def lowest(net: nn.Module, x: Tensor, y: Tensor, ball: Ball) -> Tensor:
    """The smallest margin found by a search over vertices: from every class's gradient to the point
    of the ball that is best for it, again and again, and by random directions."""
    classes, found = net(x).shape[1], gap(net(x), y)
    directions = [torch.randn(x.shape) for _ in range(8)]
    for k in range(classes):
        z = x
        for _ in range(4):
            at = z.clone().requires_grad_(True)
            logits = net(at)
            loss = (logits[:, k] - logits.gather(1, y[:, None])[:, 0]).sum()
            (slope,) = torch.autograd.grad(loss, at)
            z = ball.support(x, slope).point
            found = torch.minimum(found, gap(net(z), y))
    for direction in directions:
        found = torch.minimum(found, gap(net(ball.support(x, direction).point), y))
    return found.detach().double()


KINDS = {**NETWORKS, "varied": Varied, "circular": circular}
FAST = (
    "two relus and a pool", "leaky relu by a comparison", "prelu", "elu", "mish", "gelu", "power", "softmax",
    "adaptive max pool", "group norm", "layer norm", "excitation", "glu", "attention", "weighted sum",
    "moves", "unfolded", "varied", "circular",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [*filter(KINDS.get, FAST), *slow(*(name for name in KINDS if name not in FAST))]
)
def test_kinds_of_networks_are_certified_proved_again_and_never_broken(name: str) -> None:
    torch.manual_seed(0)
    net = KINDS[name]().eval()
    x = torch.rand((2, 1, 4, 4), generator=torch.Generator().manual_seed(1))
    y = net(x).argmax(1)
    ball = wball.WassersteinBall(1e-4, wball.GridCost(window=7))  # every move of a 4 x 4 image
    small = certify(net, x, y, ball)
    assert bool(small.certified.all())
    again = verify(net, x, y, ball, small)
    assert bool(again.confirmed.all()) and again.disagreements == 0 and not again.reason
    for at in (ball, ball.at(0.01), ball.at(0.1), wball.LinfBall(0.02)):
        found = certify(net, x, y, at, "crown")
        reached = lowest(net, x, y, at)
        assert bool((found.margin <= reached + 1e-6).all()), (at, found.margin, reached)
        if at.eps == 0.1 and name in NETWORKS:
            found = certify(net, x[:1], y[:1], at, "crown")
            claimed = replace(found, certified=torch.ones(1, dtype=torch.bool))
            found = verify(net, x[:1], y[:1], at, claimed)
            assert bool((found.margin <= reached[:1] + 1e-9).all())


BALLS = {
    "wasserstein": wball.WassersteinBall(0.05),
    "squared": wball.WassersteinBall(0.05, wball.GridCost(3, p=2.0), box=None),
    "linf": wball.LinfBall(0.02),
}


@pytest.mark.parametrize("ball", ["wasserstein", *slow("squared", "linf")])
@pytest.mark.parametrize(
    "name", ["dense", "tanh", *slow("varied", "circular", "gelu", "silu", "hardtanh")]
)
def test_certificates_near_the_largest_radius_are_proved_again(name: str, ball: str) -> None:
    torch.manual_seed(0)
    net = dense_net(1, 4, (8, 6), 3, 0) if name == "dense" else KINDS[name]().eval()
    x = images(3, 1, 4, 1)
    y = net(x).argmax(1)
    at = BALLS[ball].at(0.9 * certified_radius(net, x, y, BALLS[ball], rounds=6))
    proof = certify(net, x, y, at)
    assert bool(proof.certified.all())
    found = verify(net, x, y, at, proof)
    assert bool(found.confirmed.all()) and found.disagreements == 0
    assert bool((found.margin > 0).all())


# Batches, statuses and edges
# --------------------------------------------------------------------------------------------------


@functools.cache
def shared(make: Callable[..., nn.Sequential], *given: Any) -> nn.Sequential:
    """One network for all methods: exporting it takes longer than most of them."""
    return make(*given)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "complete"])
def test_an_image_does_not_depend_on_its_batch(name: str) -> None:
    net, x = shared(conv_net, 2), images(3, 1, 16, 2)
    y, eps = net(x).argmax(1), torch.tensor([0.01, 0.05, 0.3])
    ball, settings = wball.WassersteinBall(eps), METHODS[name]
    whole, again = (certify(net, x, y, ball, **settings).margin for _ in range(2))
    assert torch.equal(whole, again)
    turned = certify(net, x.flip(0), y.flip(0), wball.WassersteinBall(eps.flip(0)), **settings)
    torch.testing.assert_close(turned.margin.flip(0), whole, atol=1e-5, rtol=1e-5)
    for i in (0, 2):
        alone = certify(net, x[i : i + 1], y[i : i + 1], ball.at(float(eps[i])), **settings).margin
        torch.testing.assert_close(alone, whole[i : i + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_statuses_mode_and_edges(name: str) -> None:
    """A ball of one point, a black image, a wrong label, no images, a model in training."""
    settings = METHODS[name]
    net, x = shared(dense_net, 1, 4, (8,), 4, 4), images(3, 1, 4, 4)
    x[1] = 0.0
    net.train()
    y = net(x).argmax(1)
    y[2] = (y[2] + 1) % 4
    clean = gap(net(x).double(), y).detach()
    for ball in (wball.WassersteinBall(0.0), wball.LinfBall(0.0)):
        found = certify(net, x, y, ball, **settings)
        assert found.certified.tolist() == [True, True, False]
        assert found.status[2] is CertificateStatus.MISCLASSIFIED and net.training
        assert found.plans == "full" and found.method == settings["method"]
        torch.testing.assert_close(found.margin[:2], clean[:2], atol=1e-4, rtol=0)
        assert verify(net, x, y, ball, found).confirmed.tolist() == [True, True, False]
        none = certify(net, x[:0], y[:0], ball.at(0.1), **settings)
        assert none.certified.shape == none.margin.shape == (0,) and none.status == ()
    black = certify(net, x[1:2], y[1:2], wball.WassersteinBall(0.5), **settings)
    torch.testing.assert_close(black.margin, clean[1:2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "complete"])
def test_larger_balls_have_smaller_margins(name: str) -> None:
    net, x = shared(dense_net, 1, 4, (12, 8), 3, 5), images(4, 1, 4, 5)
    y = net(x).argmax(1)
    for ball in (wball.WassersteinBall(1.0), wball.LinfBall(1.0)):
        margins = [
            certify(net, x, y, ball.at(eps), **METHODS[name]).margin for eps in (1e-3, 0.03, 0.3)
        ]
        assert bool((margins[0] > margins[1]).all()) and bool((margins[1] > margins[2]).all())
