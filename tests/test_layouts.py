"""No public call depends on how its tensors lie in memory, and neither do a model's gradients.

The mistakes this finds: a compiled loop that is given strides it has no code for (torch calls an
image with one channel contiguous whatever the stride of that axis), a ``view`` of permuted images,
a write into memory that several images share, and inference tensors that reach autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wball
from training.worker import small_config
from wball.training import Optimisation, accuracy, robust_accuracy, train

BALL, LINF = wball.WassersteinBall(0.2, wball.GridCost(3)), wball.LinfBall(0.05)


def permuted(x: Tensor) -> Tensor:
    """Pixels in columns instead of rows."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def nhwc(x: Tensor) -> Tensor:
    """As images are decoded. A grey one has a stride of 1 along its only channel."""
    decoded = torch.empty(len(x), *x.shape[2:], x.shape[1], dtype=x.dtype)
    return decoded.copy_(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def strided(x: Tensor) -> Tensor:
    """Every other pixel of a larger image, and not from its beginning."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1)
    wide[..., 1::2] = x
    return wide[..., 1::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "nhwc": nhwc,
    "permuted": permuted,
    "strided": strided,
    "expanded": lambda x: x[:1].expand(len(x), -1, -1, -1),
    "negated": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "inference": inference,
    "graph": lambda x: x.clone().requires_grad_(True) * 1,
}


class Layers(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 3),
        )
        for p in self.net.parameters():
            p.data = 0.3 * torch.randn(p.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def attacked(attack: wball.Attack) -> Callable[..., object]:
    return lambda m, x, y, z, g: attack(m, x, y)


CALLS: dict[str, Callable[..., object]] = {
    "support": lambda m, x, y, z, g: BALL.support(x, g),
    "entropic support": lambda m, x, y, z, g: BALL.support(x, g, 100.0),
    "project": lambda m, x, y, z, g: BALL.project(x, z + g),
    "entropic project": lambda m, x, y, z, g: BALL.project(x, z + g, 100.0),
    "paper project": lambda m, x, y, z, g: BALL.project(x, z + g, 100.0, mode="paper"),
    "distance": lambda m, x, y, z, g: BALL.distance(x, z),
    "contains": lambda m, x, y, z, g: BALL.contains(x, z),
    "sample": lambda m, x, y, z, g: BALL.sample(x, torch.Generator().manual_seed(0)),
    "audit": lambda m, x, y, z, g: wball.audit(BALL, x, z),
    "linf support": lambda m, x, y, z, g: LINF.support(x, g),
    "linf project": lambda m, x, y, z, g: LINF.project(x, z + g),
    "linf distance": lambda m, x, y, z, g: LINF.distance(x, z),
    "linf audit": lambda m, x, y, z, g: wball.audit(LINF, x, z),
    "dual averaging": attacked(wball.DualAveraging(BALL, steps=3, until_success=False)),
    "pgd": attacked(wball.PGD(BALL, steps=2, until_success=False)),
    "entropic pgd": attacked(wball.PGD(BALL, steps=2, reg=100.0, until_success=False)),
    "conjugate pgd": attacked(wball.PGD(BALL, steps=2, step="wasserstein", step_size=0.1)),
    "frank-wolfe": attacked(wball.FrankWolfe(BALL, steps=2, until_success=False)),
    "linf pgd": attacked(wball.PGD(LINF, steps=2, until_success=False)),
    "score search": attacked(wball.ScoreSearch(BALL, queries=10, directions=2)),
    "decision search": attacked(wball.DecisionSearch(BALL, queries=45, directions=2)),
    "standard": attacked(wball.StandardAttack(BALL, version="fast", check=False)),
    "smallest radius": lambda m, x, y, z, g: wball.minimal_radius(
        m, x, y, wball.DualAveraging(BALL, steps=2), hi=0.5
    ),
    "certify": lambda m, x, y, z, g: wball.certify(m, x, y, BALL.at(0.01), "crown"),
    "anchored": lambda m, x, y, z, g: wball.certify(m, x, y, BALL.at(0.01), "anchored"),
    "certified radius": lambda m, x, y, z, g: wball.certified_radius(m, x, y, BALL, "crown"),
    "smoothing": lambda m, x, y, z, g: wball.FlowSmoothing(m, 0.05, 3).certify(
        x, 50, 20, generator=torch.Generator().manual_seed(0)
    ),
    "flow noise": lambda m, x, y, z, g: wball.flow_noise(x, 0.1, torch.Generator().manual_seed(0)),
    "evaluate": lambda m, x, y, z, g: dict(
        wball.evaluate(m, x, y, BALL, attack=wball.DualAveraging(BALL, steps=2)).images
    ),
    "accuracy": lambda m, x, y, z, g: accuracy(m, x, y),
    "robust accuracy": lambda m, x, y, z, g: robust_accuracy(
        m, x, y, wball.DualAveraging(BALL, steps=2)
    ),
    "to_tensors": lambda m, x, y, z, g: wball.to_tensors((x, y)),
    "train": lambda m, x, y, z, g: list(
        train(
            small_config(epochs=1, batch_size=2, optimisation=Optimisation(lr=0.01)),
            (x, y),
            model=m,
        ).model.parameters()
    ),
}


def numbers(value: Any) -> list[Tensor]:
    """All tensors and numbers of a result."""
    if isinstance(value, Tensor):
        return [value.detach().double()]
    if isinstance(value, (bool, int, float)):
        return [torch.tensor(float(value), dtype=torch.float64)]
    if isinstance(value, dict):
        return [t for name in sorted(value) for t in numbers(value[name])]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in numbers(item)]
    if is_dataclass(value):
        return [
            t
            for f in fields(value)
            if f.name not in ("proof", "seconds")
            for t in numbers(getattr(value, f.name))
        ]
    return []


@pytest.mark.parametrize("name", CALLS)
def test_the_layout_of_the_arguments_does_not_matter(name: str) -> None:
    call = CALLS[name]
    for channels in (1, 3):
        fixed = Layers(channels)  # exported once, but for images that exporters may not like

        def model(layout: str = "", channels: int = channels, fixed: Layers = fixed) -> Layers:
            fresh = name == "train" or layout == "inference"
            return Layers(channels) if fresh else fixed

        x, w = torch.rand(2, 1, channels, 6, 6).expand(-1, 2, -1, -1, -1)  # twice the same image
        x, g = x.clone(), w - 0.5
        z, y = BALL.project(x, w).point, fixed(x).argmax(1)
        expected = numbers(call(model(), x.clone(), y, z.clone(), g.clone()))
        assert expected
        for layout, lie in LAYOUTS.items():
            labels = inference(y) if layout == "inference" else torch.stack([y, y], 1)[:, 0]
            found = numbers(call(model(layout), lie(x), labels, lie(z), lie(g)))
            check_same(found, expected, f"{layout}, {channels} channels")
        fresh = model("inference")
        with torch.inference_mode():
            check_same(numbers(call(fresh, x, y, z, g)), expected, "inside inference")
        fresh = model()
        with torch.no_grad():
            check_same(numbers(call(fresh, x, y, z, g)), expected, "without gradients")


def check_same(found: list[Tensor], expected: list[Tensor], case: str) -> None:
    assert len(found) == len(expected), case
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda said: f"{case}: {said}"
        )


@pytest.mark.parametrize("name", ["project", "support", "distance", "linf project", "certify"])
def test_tensors_without_memory_are_refused(name: str) -> None:
    """``torch.vmap`` and ``torch.func.grad`` pass tensors that compiled loops cannot read."""
    x, y, model = torch.rand(2, 1, 6, 6), torch.zeros(2, dtype=torch.long), Layers(1)

    def total(z: Tensor) -> Tensor:
        return numbers(CALLS[name](model, z, y, z, z))[0].sum()

    for call in (torch.func.grad(total), torch.vmap(total)):
        with pytest.raises(TypeError, match=r"x is a tensor without memory.*call wball outside"):
            call(x)


class Graded(nn.Module):
    """Logits whose gradient comes back in a chosen layout."""

    def __init__(self, net: nn.Module, lie: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.lie = net, lie

    def forward(self, x: Tensor) -> Tensor:
        lie = self.lie

        class Laid(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return lie(gradient)

        return self.net(Laid.apply(x))


@pytest.mark.parametrize("layout", ["channels_last", "nhwc", "permuted", "strided", "negated"])
@pytest.mark.parametrize(
    "name", ["dual averaging", "pgd", "entropic pgd", "conjugate pgd", "frank-wolfe", "linf pgd"]
)
def test_the_layout_of_a_gradient_does_not_matter(name: str, layout: str) -> None:
    for channels in (1, 3):
        x, net = torch.rand(2, channels, 6, 6), Layers(channels)
        y = net(x).argmax(1)
        expected, found = (
            numbers(CALLS[name](model, x, y, x, x)) for model in (net, Graded(net, LAYOUTS[layout]))
        )
        check_same(found, expected, f"{channels} channels")


@pytest.mark.parametrize("turn", [np.s_[:, :, ::-1], np.s_[..., ::-1], np.s_[::-1]])
def test_flipped_arrays_are_read(turn: Any) -> None:
    """Their strides are negative, which torch does not take."""
    images = np.random.default_rng(0).random((4, 1, 6, 6), dtype=np.float32)
    y = Layers(1)(torch.from_numpy(images[turn].copy())).argmax(1).numpy()
    attack = wball.DualAveraging(BALL, steps=2)
    flipped, copied = (
        wball.evaluate(Layers(1), x, y, BALL, attack=attack)
        for x in (images[turn], images[turn].copy())
    )
    assert flipped.settings["data"] == copied.settings["data"]
    for one, other in zip(numbers(flipped.images), numbers(copied.images), strict=True):
        assert torch.equal(one, other)
    x, labels = wball.to_tensors((images[turn], y[::-1]))
    assert torch.equal(x, torch.from_numpy(images[turn].copy()))
    assert labels.tolist() == y[::-1].tolist()
