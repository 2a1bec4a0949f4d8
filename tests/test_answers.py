"""Models as other libraries write them: what they return is read as logits, or an error says what
came instead."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wball
from wball.model import ask

BALL = wball.WassersteinBall(0.4)
Answer = namedtuple("Answer", ["logits", "aux"])


class ModelOutput(OrderedDict[str, Any]):
    """As of Hugging Face: a dictionary with its entries as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Network(nn.Module):
    """Features and logits; ``form`` says what of them is returned, and in what."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any], classes: int = 4) -> None:
        super().__init__()
        self.features, self.head, self.form = nn.Linear(36, 8), nn.Linear(8, classes), form

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.features(x.flatten(1)))
        return self.form(h, 5 * self.head(h))


def problem(
    form: Callable[[Tensor, Tensor], Any], classes: int = 4
) -> tuple[Network, Tensor, Tensor]:
    torch.manual_seed(0)
    net, x = (
        Network(form, classes).eval(),
        torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(0)),
    )
    plain = Network(lambda _, z: z, classes)
    plain.load_state_dict(net.state_dict())
    with torch.no_grad():
        logits = plain(x)
    return net, x, logits if classes > 1 else logits.squeeze(1)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a pair with hidden states": lambda h, z: (z, (h, h)),
    "auxiliary outputs": lambda h, z: [z, z.flip(1)],
    "a named tuple": lambda h, z: Answer(z, h),
    "a dictionary": lambda h, z: {"features": h, "logits": z},
    "a ModelOutput": lambda h, z: ModelOutput(loss=None, logits=z, hidden_states=(h,)),
    "a ModelOutput without a name for logits": lambda h, z: ModelOutput(loss=None, answer=z),
    "an object": lambda h, z: SimpleNamespace(logits=z),
    "a convolutional head": lambda h, z: z[:, :, None, None],
}


def assert_evaluated(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        y = ask(model, x).argmax(1)
    ball = wball.WassersteinBall(1.0)
    result = wball.evaluate(model, x, y, ball, attack=wball.DualAveraging(ball, steps=10))
    assert result.clean_accuracy == 1.0 and not result.rejected and not result.disagreements
    broken = int((result.images["read_as"] >= 0).sum())
    assert 0 < broken == round(len(x) * (1 - result.accuracy_at(1.0)))


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_found(form: str) -> None:
    net, x, logits = problem(FORMS[form])
    torch.testing.assert_close(ask(net, x), logits)
    assert_evaluated(net, x)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda h, z: (h, z), r"tuple of a tensor \(12, 8\), a tensor \(12, 4\), and which"),
        (lambda h, z: {"a": h, "b": z}, "of 'a', 'b', and which of them"),
        (lambda h, z: None, "got NoneType; wrap it"),
        (lambda h, z: z.argmax(1), "floating-point logits, got torch.int64"),
        (
            lambda h, z: z[:, :, None].expand(-1, -1, 3),
            r"logits of shape \(12, classes\), got \(12, 4, 3\)",
        ),
    ],
)
def test_what_cannot_be_read_is_said(form: Any, said: str) -> None:
    net, x, _ = problem(form)
    with pytest.raises((TypeError, ValueError), match=said):
        ask(net, x)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("probability", [False, True])
def test_two_classes_with_one_number(shape: tuple[int, ...], probability: bool) -> None:
    """Whether it is a logit or a probability is said, not guessed from some values."""
    net, x, score = problem(lambda h, z: (z.sigmoid() if probability else z).view(shape), 1)
    with pytest.raises(ValueError, match=r"one number per image: wrap it in wball.Binary\(model\)"):
        ask(net, x)
    binary = wball.Binary(net, probability)
    expected = torch.stack([torch.zeros_like(score), score], 1)
    torch.testing.assert_close(ask(binary, x), expected, atol=1e-4, rtol=1e-4)
    y = (score > 0).long()
    attack = wball.StandardAttack(wball.WassersteinBall(1.0), version="fast", check=False)
    result = attack(binary, x, y)
    assert bool(result.success.any())
    with torch.no_grad():
        found = net(result.images).reshape(-1) - (0.5 if probability else 0.0)
    assert torch.equal((found > 0).long() != y, result.success)


def test_channels_that_do_not_fit() -> None:
    grey = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    colour = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    y = torch.zeros(3, dtype=torch.long)
    for net, channels, said in ((grey, 3, "but grey ones"), (colour, 1, "but colour ones")):
        with pytest.raises(ValueError, match=rf"images of shape \({channels}, 6, 6\), {said}"):
            wball.evaluate(net, torch.rand(3, channels, 6, 6), y, BALL)
    for net, channels in ((grey, 1), (colour, 3)):
        with pytest.raises(ValueError, match=r"but with channels first: x.permute\(0, 3, 1, 2\)"):
            wball.evaluate(net, torch.rand(3, 6, 6, channels), y, BALL)
    last = nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(72, 4))
    with pytest.raises(ValueError, match=r"wrap it, lambda x: model\(x.permute\(0, 2, 3, 1\)\)"):
        wball.evaluate(last, torch.rand(3, 3, 6, 6), y, BALL)
    with pytest.raises(ValueError, match=r"images of shape \(1, 7, 7\): "):
        wball.evaluate(grey, torch.rand(3, 1, 7, 7), y, BALL)


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "bfloat16": nn.Module.bfloat16,
    "compiled": lambda net: torch.compile(net, backend="eager"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_models_are_evaluated(name: str) -> None:
    net, x, _ = problem(lambda h, z: z)
    assert_evaluated(WRAPPED[name](net), x)


class Quantised(nn.Module):
    """Weights and activations as whole numbers, as backends for 8 bits compute: no gradient
    passes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer(
            "weight", torch.randint(-127, 128, (108, 4), generator=generator, dtype=torch.int32)
        )

    def forward(self, x: Tensor) -> Tensor:
        pixels = (255 * x.detach()).round().to(torch.int32).flatten(1)
        return (pixels[:, :, None] * self.weight).sum(1).float() / 1000


def test_quantised_models_are_attacked_without_gradients() -> None:
    net, x = Quantised(), torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    y = net(x).argmax(1)
    attack = wball.StandardAttack(wball.WassersteinBall(1.0), check=False)
    result = attack(net, x, y)
    assert bool(result.success.all()) and not bool(result.n_steps.isnan().any())
    assert wball.audit(attack.ball, x, result.images).all_valid
    assert torch.equal(net(result.images).argmax(1) != y, result.success)
