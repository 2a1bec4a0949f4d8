"""Batch normalisation folded into convolutions, for attacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.worker import small_config, small_data
from wball import DualAveraging, WassersteinBall
from wball.attacks.recording import RECORDERS
from wball.models import build_model
from wball.training import Adversary, Optimisation, train
from wball.training import opponent as opponent_module
from wball.training.folding import Folded
from wball.training.replay import Replay

ATTACK = DualAveraging(
    WassersteinBall(0.4), steps=4, until_success=False, random_start=1.0, sweeps=2
)


def normalised_model(bias: bool = False) -> nn.Module:
    """A convolution, its normalisation with statistics of its own, and a linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=1, bias=bias),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(196, 10),
    )
    norm: Any = model[1]
    norm.running_mean.uniform_(-0.2, 0.2)
    norm.running_var.uniform_(0.05, 0.5)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    return model


def logits_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.clone().requires_grad_()
    logits = model(z)
    (gradient,) = torch.autograd.grad(logits.square().sum(), z)
    return logits.detach(), gradient


@pytest.mark.parametrize("bias", [False, True])
def test_a_folded_network_answers_as_the_network_does_at_each_refresh(bias: bool) -> None:
    model, (x, _) = normalised_model(bias).double().eval(), small_data(4)
    folded = Folded(model, torch.float64)
    for _ in range(2):
        for ours, theirs in zip(
            logits_and_gradient(folded, x.double()),
            logits_and_gradient(model, x.double()),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(1.5)
        assert not torch.allclose(folded(x.double()), model(x.double()))
        folded.refresh()


def test_every_normalisation_of_a_residual_network_is_folded() -> None:
    model = build_model("mnist-resnet").eval()
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == len(
        Folded(model, torch.float32)._pairs
    )
    x = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(Folded(model, torch.float32)(x), model(x), atol=1e-4, rtol=1e-3)


class _Twice(nn.Module):
    """What is normalised is used as it is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.cat([y, self.norm(y)], 1).mean((2, 3))


class _Undecided(_Twice):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def hooked() -> nn.Module:
    model = normalised_model().eval()
    model[0].register_forward_hook(lambda module, args, out: 2 * out)  # type: ignore[index]
    return model


KEPT = {
    "training": lambda: normalised_model().train(),
    "nothing to fold": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).eval(),
    "used twice": lambda: _Twice().eval(),
    "depends on values": lambda: _Undecided().eval(),
    "hooks": hooked,
    "no statistics": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False)
    ).eval(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_folded_stays_as_it_is(name: str) -> None:
    model = KEPT[name]()
    assert Folded(model)._network is model


def test_training_against_the_folded_network_ends_with_nearly_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", lambda function, *_: function)
    ends = []
    for replayed in (False, True):
        options = Optimisation(lr=0.05, schedule="one-cycle", cuda_graph=replayed)
        config = small_config(epochs=1, adversary=Adversary(ATTACK), optimisation=options)
        if replayed:
            monkeypatch.setattr(opponent_module, "recorded", Replay)
            assert Folded(normalised_model().eval())._pairs
        model = train(config, small_data(48), model=normalised_model()).model
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, atol=1e-3, rtol=1e-2)
    assert not torch.equal(*ends)
