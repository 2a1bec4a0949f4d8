"""The program that a certificate is about: exported once, the same as the model, in the precision
that it runs in."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import gap
from wball.certificates import UnsupportedModule, certificate, certified_radius, certify
from wball.certificates.operators import read_graph
from wball.certificates.program import exported

SMALL = wball.WassersteinBall(1e-5)


def dense(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def images(count: int = 4) -> Tensor:
    return torch.rand((count, 1, 4, 4), generator=torch.Generator().manual_seed(0))


class Around(nn.Module):
    """A small network, and what is computed around it."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.rest, self.function, self.calls = dense(), function, 0
        self.register_buffer("seen", torch.zeros(1))
        self.train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.rest, x)


def before(function: Callable[[Tensor], Tensor]) -> Around:
    """A network that reads what a function makes of the image."""
    return Around(lambda net, x: net(function(x)))


def plain(net: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = net(x)
    return out


def looked_up(h: Tensor) -> Tensor:
    return F.embedding((15 * h).long(), torch.arange(9.0)[:, None])[..., 0]


def test_a_program_runs_on_images_of_any_layout() -> None:
    """On a GPU, a convolution may answer in another layout than the exporter foresaw."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    x = torch.rand(2, 3, 8, 8)
    found = certify(net, x, net(x).argmax(1), wball.WassersteinBall(1e-4))
    logits = found.program(x.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(logits, net(x), atol=1e-6)


# ---- what is refused, in one sentence


class Counting(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.rest(x) + self.seen


class Growing(Around):
    """Its state is a plain number, which a program keeps at its first value."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.rest(x) * (-1) ** self.calls


class Batched(Around):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(x)
        return -out if torch.jit.is_scripting() or len(x) == 2 else out


class Precise(Around):
    """Another answer while it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rest(x)
        return -out if not torch.compiler.is_compiling() else out


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch on values": (
        lambda: before(lambda h: h if h.sum() > 3 else -h),
        "cannot read Around",
    ),
    "a condition": (
        lambda: before(lambda h: torch.cond(h.sum() > 3, torch.sin, torch.cos, (h,))),
        "torch.cond",
    ),
    "a table beyond its end": (lambda: before(looked_up), "around the images: IndexError"),
    "a branch on the batch": (lambda: Batched(plain), "Batched"),
    "a buffer": (lambda: Counting(plain), r"changes (model\.)?seen"),
    "a counter": (lambda: Growing(plain), "answers something else|cannot read"),
    "compiled only": (lambda: Precise(plain), "answers something else"),
    "a mean over the batch": (lambda: before(lambda h: h - h.mean(0, True)), "other images"),
    "chance": (lambda: before(lambda h: h + torch.rand_like(h)), "rand"),
    "dropout": (lambda: before(lambda h: F.dropout(h, 0.5)), "rand|bernoulli|dropout"),
    "an integer": (lambda: before(lambda h: h.int().float()), "converts to torch.int32"),
    "half precision": (lambda: before(lambda h: h.half().float()), "converts to torch.float16"),
    "weights in half precision": (lambda: dense().half(), r"model\.float\(\)"),
    "a script": (lambda: torch.jit.script(dense()), "TorchScript"),
    "a place from the image": (
        lambda: before(lambda h: h + h.flatten(1).argmax(1)[:, None, None, None]),
        "argmax",
    ),
    "constant logits": (
        lambda: Around(lambda net, x: torch.arange(3.0).expand(len(x), -1) * 2),
        "do not depend on the image",
    ),
    "one number": (lambda: Around(lambda net, x: net(x)[:, 0]), r"logits \(B, classes\)"),
    "two outputs": (lambda: Around(lambda net, x: (net(x), net(x)[:, :2])), "not clear"),  # type: ignore[return-value]
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_cannot_be_certified_is_said_in_one_sentence(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModule, match=message) as caught:
        certify(make(), images(), torch.zeros(4, dtype=torch.long), SMALL)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_hooks_and_unusual_calls_are_a_part_of_the_program() -> None:
    def with_other_weights(net: nn.Module, x: Tensor) -> Tensor:
        changed = {"1.weight": 2 * net[1].weight}  # type: ignore[index]
        out: Tensor = torch.func.functional_call(net, changed, (x,))
        return out

    hooked = dense()
    hooked[1].register_forward_hook(lambda module, given, out: 3 * out)
    for net in (hooked, Around(with_other_weights)):
        x = images()
        logits = net(x).detach().double()
        y = logits.argmax(1)
        found = certify(net, x, y, wball.WassersteinBall(0.0)).margin
        torch.testing.assert_close(found, gap(logits, y), atol=1e-4, rtol=0)


def test_errors_that_a_program_might_raise_are_left_out() -> None:
    """``linalg.solve`` checks its result in an operation that the logits do not read."""

    def cayley(net: nn.Module, x: Tensor) -> Tensor:
        skew, one = torch.ones(3, 3).triu(1) - torch.ones(3, 3).tril(-1), torch.eye(3)
        return net(x) @ torch.linalg.solve(one + skew, one - skew)

    net, x = Around(cayley).eval(), images()
    assert bool(certify(net, x, net(x).argmax(1), SMALL).certified.all())


def test_a_model_that_changes_while_it_is_certified_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = dense()
    original = certificate._certify

    def changed(*args: Any) -> Any:
        net[1].forward = lambda h: h[:, :8]
        return original(*args)

    monkeypatch.setattr(certificate, "_certify", changed)
    with pytest.raises(UnsupportedModule, match="answers something else"):
        certify(net, images(), net(images()).argmax(1), SMALL)


def test_logits_are_found_in_what_models_return() -> None:
    x, net = images(), dense()
    y = net(x).argmax(1)
    for function in (
        lambda net, x: {"logits": net(x), "features": x},
        lambda net, x: (net(x), x),
        lambda net, x: net(x)[:, :, None, None],
    ):
        model = Around(function)  # type: ignore[arg-type]
        assert torch.equal(certify(model, x, y, SMALL).margin, certify(net, x, y, SMALL).margin)
    graph = nn.Sequential()  # a name that PyTorch's programs have, too
    graph.add_module("graph", net)
    assert torch.equal(certify(graph, x, y, SMALL).margin, certify(net, x, y, SMALL).margin)


# ---- programs as models


def test_a_program_is_exported_once_and_follows_its_weights() -> None:
    net, x = dense(), images()
    first = exported(net, x)
    assert exported(net, x) is first
    with torch.no_grad():
        net[1].weight.mul_(2.0)
    assert exported(net, x) is first
    torch.testing.assert_close(first(x), net(x))
    net[1] = nn.Linear(16, 8)
    assert exported(net, x) is not first
    assert exported(net.double(), x.double()).dtype == torch.float64


def test_saved_programs_are_the_same_statement(tmp_path: Path) -> None:
    net, x = dense(), images()
    y = net(x).argmax(1)
    proof = certify(net, x, y, SMALL)
    assert proof.program is not None
    torch.testing.assert_close(proof.program(x), net(x))
    path = tmp_path / "net.pt2"
    proof.program.save(path)
    for model in (path, str(path), torch.export.load(path), proof.program.exported):
        again = certify(model, x, y, SMALL)
        assert again.subject == proof.subject and torch.equal(again.margin, proof.margin)
    assert float(certified_radius(path, x, y, SMALL, rounds=2).min()) > 0
    with torch.no_grad():
        net[3].bias[0] += 1e-6
    assert certify(net, x, y, SMALL).subject["program"] != proof.subject["program"]
    noisy = wball.FlowSmoothing(torch.export.load(path), 0.01)
    assert noisy.votes(x, 8, torch.Generator().manual_seed(0)).sum(1).tolist() == [8] * 4


def test_programs_with_a_fixed_batch_or_other_images_are_refused() -> None:
    net, x, y = dense(), images(), torch.zeros(4, dtype=torch.long)
    with pytest.raises(UnsupportedModule, match="dynamic batch"):
        certify(torch.export.export(net, (x,)), x, y, SMALL)
    program = exported(net, x)
    with pytest.raises(ValueError, match="images of shape"):
        certify(program.exported, x[..., :3], y, SMALL)
    with pytest.raises(TypeError, match=r"ExportedProgram or the path of a \.pt2 file"):
        certify(net.forward, x, y, SMALL)  # type: ignore[arg-type]


def test_the_compiler_is_not_loaded_before_a_model_is_exported() -> None:
    code = (
        "import sys, wball, wball.certificates\n"
        "wball.certify, wball.WassersteinBall(0.1)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the precision of the model


class Cancelling(nn.Module):
    """``h1 - 3 h2 + 0.1`` for ``h = ReLU(3e8 v x, 1e8 v x)``: lost in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        v = torch.randn(9)
        self.first, self.last = nn.Linear(9, 2, bias=False), nn.Linear(2, 2)
        with torch.no_grad():
            self.first.weight.copy_(torch.stack([3e8 * v, 1e8 * v]))
            self.last.weight.copy_(torch.tensor([[1.0, -3.0], [0.0, 0.0]]))
            self.last.bias.copy_(torch.tensor([0.1, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.flatten(1))))


@functools.cache
def cancelling() -> Cancelling:
    return Cancelling().eval()


@pytest.mark.parametrize("method", ["crown", "anchored", "alpha-crown", "complete"])
def test_what_float32_loses_is_not_certified_alone_or_in_a_batch(method: Any) -> None:
    net = cancelling()
    x = torch.rand((40, 1, 3, 3), generator=torch.Generator().manual_seed(1))
    active = (net.first(x.flatten(1))[:, 0] > 1e7).nonzero()[:, 0][:2]
    dead = (net.first(x.flatten(1))[:, 0] < -1e8).nonzero()[:, 0][:7]
    assert len(active) == 2 and len(dead) == 7
    some, ball = x[torch.cat([active, dead])], wball.WassersteinBall(0.01)
    y = torch.zeros(9, dtype=torch.long)
    found = certify(net, some, y, ball, method, time_limit=2.0)
    assert found.certified.tolist() == [False] * 2 + [True] * 7
    for k in (0, 1, 2):
        alone = certify(net, some[k : k + 1], y[:1], ball, method, time_limit=2.0)
        torch.testing.assert_close(alone.margin, found.margin[k : k + 1], rtol=1e-6, atol=1e-9)
    forged = wball.verify(net, some, y, ball, found)
    assert forged.confirmed.tolist() == found.certified.tolist()


@pytest.mark.parametrize("dead", [False, True])
def test_what_may_overflow_is_not_certified(dead: bool) -> None:
    """Also where the weights that follow are 0: 0 times infinity is not 0."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 2, bias=False), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        net[1].weight.copy_(torch.stack([torch.full((9,), 6e37), torch.full((9,), 5e37)]))
        net[2].weight.copy_(torch.zeros(2, 2) if dead else torch.eye(2))
        net[2].bias.copy_(torch.tensor([1.0, 0.0]))
    x, y = torch.full((1, 1, 3, 3), 0.5), torch.tensor([0])
    assert bool(torch.isfinite(net(x)).all())
    for ball in (wball.LinfBall(0.5), wball.WassersteinBall(0.5)):
        assert not bool(certify(net, x, y, ball).certified.any())
    assert not bool(torch.isfinite(net(torch.ones_like(x))).all())  # a point of the first ball
    with torch.no_grad():
        net[1].weight.mul_(1e-30)
    assert bool(certify(net, x, y, wball.WassersteinBall(1e-6)).certified.all())


@pytest.mark.parametrize("large", [1e6, 1e9, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_magnitudes_that_cancel_are_counted(large: float, dtype: torch.dtype) -> None:
    """Bounds exceeded the exact margin by up to 0.05, from 1e9 on."""
    x = images(8).to(dtype)
    net, plain = before(lambda h: (h * large + h) - h * large).to(dtype), dense().to(dtype)
    y = plain(x).argmax(1)
    exact = gap(plain.double()(x.double()), y).detach()
    for ball in (wball.LinfBall(1e-6), wball.WassersteinBall(1e-6)):
        found = certify(net, x, y, ball).margin
        assert bool((found <= exact).all())
        kept = dtype is torch.float64 and large < 1e15  # digits that tell the logits apart
        assert bool((found > 0.9 * exact).all()) is kept


def test_a_certificate_is_never_above_what_float32_computes() -> None:
    """Weights of very different sizes: margins that the model computes, everywhere in the ball."""
    for seed in range(4):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Flatten(), nn.Linear(16, 12), nn.Tanh() if seed % 2 else nn.ReLU(), nn.Linear(12, 3)
        ).eval()
        with torch.no_grad():
            net[1].weight.mul_(10 ** (3 * torch.rand(12, 1)))
            net[3].weight.mul_(10 ** (3 * torch.rand(1, 12)))
        x = images()
        y, ball = net(x).argmax(1), wball.WassersteinBall(1e-7)
        found = certify(net, x, y, ball).margin
        for _ in range(50):
            near = ball.support(x, torch.randn(x.shape)).point
            assert bool((found <= gap(net(near), y).double()).all())


def test_deep_networks_pass_the_comparison() -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    for _ in range(12):
        norm = nn.BatchNorm2d(1)
        nn.init.constant_(norm.running_mean, 30.0)  # type: ignore[arg-type]
        nn.init.constant_(norm.bias, 30.0)
        net.extend([nn.Conv2d(1, 1, 3, padding=1), norm, nn.ReLU()])
    net.extend([nn.Flatten(), nn.Linear(16, 3)])
    for dtype in (torch.float32, torch.float64):
        read_graph(net.eval().to(dtype), images().to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["interval", "dual", "crown", "alpha-crown"])
def test_models_with_broken_weights_certify_nothing(bad: float, method: Any) -> None:
    net, x, y = dense(), images(), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        net[1].weight[0, 0] = bad
    for ball in (wball.WassersteinBall(0.1), wball.LinfBall(0.3)):
        assert not bool(certify(net, x, y, ball, method).certified.any())
