"""Certificates: never above the exact minimum, equal to it where nothing is relaxed, the same in
any batch."""

from __future__ import annotations

import functools
import math
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import euclidean, gap, network_margin
from marks import slow
from wball.certificates import CertificateStatus, UnsupportedModule, certified_radius, certify

WASSERSTEIN: dict[str, dict[str, Any]] = {
    "interval": {"method": "interval"},
    "dual": {"method": "dual"},
    "crown": {"method": "crown"},
    "anchored": {"method": "anchored"},
    "optimised": {"method": "alpha-crown", "steps": 2},
}


def dense_net(
    channels: int, side: int, hidden: tuple[int, ...], classes: int, seed: int
) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [channels * side * side, *hidden, classes]
    parts: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def images(count: int, channels: int, side: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((count, channels, side, side), generator=generator)
    return torch.where(
        torch.rand(x.shape, generator=generator) < 0.3, torch.zeros_like(x), x.sqrt()
    )


def referee(
    net: nn.Sequential, x: Tensor, y: Tensor, ball: wball.WassersteinBall, cost: np.ndarray
) -> Tensor:
    every = torch.arange(len(x)).split(1)
    exact = [network_margin(net, x[i[0]], int(y[i]), ball.take(i), cost) for i in every]
    return torch.tensor(exact, dtype=torch.float64)


def exact_where_nothing_is_relaxed(
    net: nn.Sequential, x: Tensor, ball: wball.WassersteinBall, cost: np.ndarray, **settings: Any
) -> None:
    y = net(x).argmax(1)
    exact = referee(net, x, y, ball, cost)
    margin = certify(net.double(), x.double(), y, ball, **settings).margin
    net.float()
    assert bool((margin <= exact + 1e-7).all())
    torch.testing.assert_close(margin, exact, atol=1e-6, rtol=0)


def test_equal_to_the_exact_minimum_where_nothing_is_relaxed() -> None:
    """Stable units over full and window plans, and a linear model at any radius and cost."""
    net, x = dense_net(1, 4, (5,), 3, 3), images(3, 1, 4, 3)
    with torch.no_grad():
        net[1].bias.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0, 9.0]))
    cost = euclidean(4, 4)
    windowed = np.where(cost < 1.5, cost, np.inf)
    ball = wball.WassersteinBall(1.0, wball.GridCost(window=3), box=None)
    for method in ("crown", "anchored"):
        exact_where_nothing_is_relaxed(net, x, ball, cost, method=method)
        exact_where_nothing_is_relaxed(net, x, ball, windowed, method=method, plans="window")
    net, x = dense_net(1, 4, (), 2, 0), images(6, 1, 4, 6)
    draw = torch.Generator().manual_seed(0)
    matrix = 3 * torch.rand((16, 16), generator=draw, dtype=torch.float64)
    matrix.fill_diagonal_(0.0)
    for eps in (0.05, 0.5):
        ball = wball.WassersteinBall(eps, wball.DenseCost(matrix), box=None)
        exact_where_nothing_is_relaxed(net, x, ball, matrix.numpy())


class Varied(nn.Module):
    """Many kinds of layers: a residual sum, concatenation, pooling of both kinds, normalisation,
    padding."""

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
        h = torch.cat([F.max_pool2d(h, 2), F.avg_pool2d(F.pad(h, (1, 1, 1, 1)), 3, 3)], 1).permute(
            0, 1, 3, 2
        )
        return self.head(h.flatten(1))


def circular() -> nn.Module:
    conv = nn.Conv2d(1, 2, 3, padding=2, padding_mode="circular")
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


def conv_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 4, 2, 1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4),
    )  # fmt: skip


@functools.cache
def made(kind: str) -> nn.Module:
    """One network for all methods: exporting it takes longer than most of them."""
    torch.manual_seed(0)
    return {"conv": lambda: conv_net(0), "varied": Varied, "circular": circular}[kind]().eval()


@pytest.mark.parametrize("name", ["dual", "crown", "anchored", "optimised"])
@pytest.mark.parametrize("kind", ["conv", "varied", "circular"])
def test_no_point_of_the_ball_beats_the_bound(kind: str, name: str) -> None:
    net, x = made(kind), images(2, 1, 16 if kind == "conv" else 4, 0)
    y = net(x).argmax(1)
    for eps in (0.02, 0.2) if kind == "conv" else (0.05,):
        ball = wball.WassersteinBall(eps)
        margin = certify(net, x, y, ball, **WASSERSTEIN[name]).margin
        reached = lowest(net, x, y, ball)
        assert bool((margin <= reached + 1e-5).all()), (eps, margin, reached)


class Minus(nn.Module):
    """What a branch adds, taken away."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x - self.inner(x)


LAYERS: dict[str, list[nn.Module]] = {
    "stride that leaves a column": [nn.Conv2d(2, 3, 3, stride=2, bias=False)],
    "groups": [nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)],
    "dilation": [nn.Conv2d(2, 3, 2, dilation=2)],
    "batch norm": [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)],
    "batch norm of a vector": [nn.Flatten(), nn.BatchNorm1d(72)],
    "batch norm without weights": [nn.BatchNorm2d(2, affine=False)],
    "mean of a part": [nn.AvgPool2d(3, 2, padding=1)],
    "mean without padding": [nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)],
    "mean over the edge": [nn.AvgPool2d(4, 3, ceil_mode=True)],
    "maximum": [nn.MaxPool2d(3, 2, padding=1)],
    "maximum over the edge": [nn.MaxPool2d(4, 3, ceil_mode=True)],
    "leak": [nn.Conv2d(2, 3, 2), nn.LeakyReLU(0.3)],
    "difference": [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), Minus(nn.Conv2d(3, 3, 3, padding=1))],
}


@pytest.mark.parametrize("kind", LAYERS)
def test_over_a_ball_of_next_to_nothing_bounds_are_the_network(kind: str) -> None:
    torch.manual_seed(2)
    x = images(3, 2, 6, 5)
    front = nn.Sequential(*LAYERS[kind]).eval()
    for module in front.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.2, 1.5)  # fresh normalisations would do nothing
    net = nn.Sequential(
        front, nn.Flatten(), nn.Linear(front(x).flatten(1).shape[1], 5), nn.ReLU(), nn.Linear(5, 3)
    )
    y = net.eval()(x).argmax(1)
    true = gap(net.double()(x.double()), y).detach()
    for name in ("interval", "dual", "crown", "anchored"):
        found = certify(net, x.double(), y, wball.WassersteinBall(1e-9), **WASSERSTEIN[name]).margin
        torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-5)


def lowest(net: nn.Module, x: Tensor, y: Tensor, ball: wball.WassersteinBall) -> Tensor:
    """Margins that a short attack finds."""
    z = wball.DualAveraging(ball, steps=8, objective="margin")(net, x, y).images
    return gap(net(z), y).detach().double()


def test_patches_give_what_dense_rows_give(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = conv_net(1), images(3, 1, 24, 1)
    net[6] = nn.Linear(6 * 9, 8)
    y = net(x).argmax(1)
    ball = wball.WassersteinBall(0.05)
    patched = certify(net, x, y, ball).margin
    from wball.certificates import relaxation

    original = relaxation.units
    monkeypatch.setattr(
        relaxation, "units", lambda shape, *args: original(shape, *args).dense(shape)
    )
    torch.testing.assert_close(certify(net, x, y, ball).margin, patched, atol=1e-5, rtol=0)


def test_methods_are_ordered_and_alpha_never_loses() -> None:
    net, x = conv_net(3), images(2, 1, 16, 3)
    y = net(x).argmax(1)
    ball = wball.WassersteinBall(0.05)
    margin = {
        name: certify(net, x, y, ball, **settings).margin for name, settings in WASSERSTEIN.items()
    }
    assert bool((margin["interval"] < margin["crown"]).all())
    assert bool((margin["dual"] <= margin["crown"] + 1e-3).all())
    assert bool((margin["anchored"] >= margin["crown"]).all())
    rounding = 1e-12  # anchored bounds leave some sums out that slopes need
    assert bool((margin["optimised"] >= margin["anchored"] - rounding).all())
    assert torch.equal(certify(net, x, y, ball).margin, margin["anchored"])


def test_optimisation_raises_what_is_still_open() -> None:
    net, x = dense_net(1, 4, (12, 10), 4, 3), images(6, 1, 4, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.8, wball.GridCost(7))
    before = certify(net, x, y, ball).margin
    after = certify(net, x, y, ball, "alpha-crown", steps=10).margin
    gained = after - before
    assert bool((gained[before <= 0] >= 0).all()) and float(gained.max()) > 1e-3
    assert bool((gained[before > 0] == 0).all())  # what is proved is left alone


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


def test_what_no_bound_follows_is_named_with_module_line_and_reason() -> None:
    x, y = images(1, 1, 4, 0), torch.tensor([0])
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), Signs(), nn.Linear(4, 2))
    where = (
        r"aten.sign.default in 2 \(test_certify.py, line \d+: return torch.sign\(x\)\): .* jumps"
    )
    with pytest.raises(UnsupportedModule, match=where):
        certify(net, x, y, wball.WassersteinBall(0.1))
    with pytest.raises(ValueError, match="method"):
        certify(net, x, y, wball.WassersteinBall(0.1), "crowning")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integer class"):
        certify(net, x, y.float(), wball.WassersteinBall(0.1))
    with pytest.raises(TypeError, match="ball must be"):
        certify(net, x, y, 0.1)  # type: ignore[arg-type]
    for size in (0, -1):
        with pytest.raises(ValueError, match="batch_size"):
            certify(net, x, y, wball.WassersteinBall(0.1), batch_size=size)


def test_the_form_of_images_and_model_does_not_matter() -> None:
    """Memory formats, precisions, wrappers, and filters that are alike."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, stride=2)
    net = nn.Sequential(
        first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)
    )
    x, last = images(2, 2, 6, 6), torch.channels_last
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.05)
    plain, tight = (certify(net, x, y, ball, method=m).margin for m in ("crown", "anchored"))
    for form in (last, torch.contiguous_format):
        net.to(memory_format=form)
        margin = certify(net, x.contiguous(memory_format=last), y, ball).margin
        torch.testing.assert_close(margin, tight, atol=1e-5, rtol=0)
    for wrapped in (nn.DataParallel(net), torch.compile(net, backend="eager")):
        assert torch.equal(certify(wrapped, x, y, ball, method="crown").margin, plain)
    for images_in, model_in in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        margin = certify(net.to(model_in), x.to(images_in), y, ball, method="crown").margin
        torch.testing.assert_close(margin, plain, atol=1e-4, rtol=0)  # float32 rounds more
    for half in (torch.float16, torch.bfloat16):
        margin = certify(net.float(), x.to(half), y, ball, method="crown").margin
        torch.testing.assert_close(margin, plain, atol=2e-2, rtol=0)
    with torch.no_grad():  # three equal filters were taken for a constant per image
        first.weight.fill_(1.0)
        second.weight.fill_(1.0)
    assert bool(torch.isfinite(certify(net, x, y, ball.at(1e-7)).margin).all())


def test_images_are_left_as_they_are_by_a_model_that_works_in_place() -> None:
    net, x = conv_net(2), images(2, 1, 16, 2)
    net.register_forward_pre_hook(lambda _, given: (given[0].sub_(0.1).div_(0.3),))
    y, ball, before = net(x.clone()).argmax(1), wball.WassersteinBall(0.02), x.clone()
    radius = certified_radius(net, x, y, ball, rounds=3, method="crown")
    assert torch.equal(x, before)
    assert bool(certify(net, x, y, ball.at(radius), method="crown").certified.all())
    assert bool((radius > 0).all())


def test_models_with_a_single_logit_or_frozen_in_a_script_are_refused() -> None:
    x, y, ball = images(2, 1, 4, 0), torch.zeros(2, dtype=torch.long), wball.WassersteinBall(0.01)
    with pytest.raises(ValueError, match="at least two classes"):
        certify(nn.Sequential(nn.Flatten(), nn.Linear(16, 1)), x, y, ball)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    with pytest.raises(UnsupportedModule):
        certify(torch.jit.freeze(torch.jit.script(net)), x, y, ball)


@pytest.mark.parametrize("method", ["anchored", *slow("crown")])
def test_certified_radius_is_certified_and_bracketed(method: Any) -> None:
    net, x = conv_net(5), images(4, 1, 16, 5)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.02)
    y[3] = (y[3] + 1) % 4
    radius = certified_radius(net, x, y, ball, method)
    assert float(radius[3]) == 0.0 and bool((radius[:3] > 0).all())
    for part, proved in ((1.0, True), (1.03, False)):
        at = ball.at(part * radius[:3])
        assert certify(net, x[:3], y[:3], at, method).certified.tolist() == [proved] * 3


def test_every_method_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = conv_net(5), images(2, 1, 16, 5)
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-4)
    with monkeypatch.context() as patch:
        patch.setattr("wball.certificates.certificate.BEYOND", math.inf)
        for name, settings in WASSERSTEIN.items():
            assert name == "interval" or bool(certify(net, x, y, ball, **settings).certified.all())
            found = certify(net, x, y, ball, time_limit=1e-9, **settings)
            assert found.status == (CertificateStatus.UNKNOWN,) * 2
            assert found.margin.tolist() == [-math.inf] * 2
        assert certified_radius(net, x, y, ball, time_limit=1e-9).tolist() == [0.0, 0.0]
    y[1] = (y[1] + 1) % 4  # without a single bound, the labels are known
    with pytest.warns(RuntimeWarning, match="nothing is certified: bounds of all activations"):
        found = certify(net, x, y, ball, time_limit=1e-9)
    assert [s.name for s in found.status] == ["UNKNOWN", "MISCLASSIFIED"]
    with pytest.warns(RuntimeWarning, match="hours per image, and time_limit is 1e-09 seconds"):
        assert certified_radius(net, x, y, ball, time_limit=1e-9).tolist() == [0.0, 0.0]


def test_networks_of_photos_are_refused_at_once() -> None:
    blocks = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6()]
    for _ in range(6):
        blocks += [nn.Conv2d(32, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU6()]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()
    x, start = torch.rand(1, 3, 224, 224), time.monotonic()
    with pytest.warns(RuntimeWarning, match="nothing is certified"):
        found = certify(net, x, net(x).argmax(1), wball.WassersteinBall(1e-6))
    assert found.status == (CertificateStatus.UNKNOWN,) and time.monotonic() - start < 20


def test_certificates_show_their_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wball.progress.WRITTEN", 0.0)
    net, x = conv_net(5), images(2, 1, 16, 5)
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-4)
    proof = certify(net, x, y, ball, progress=True)
    certified_radius(net, x, y, ball, rounds=1, progress=True)
    wball.verify(net, x, y, ball, proof, progress=True)
    shown = capsys.readouterr().err
    assert all(
        word in shown for word in ("certify, anchored, 1 to 1", "certified radius", "verify")
    )
    certify(net, x, y, ball)
    assert capsys.readouterr().err == ""  # neither a terminal nor a notebook
