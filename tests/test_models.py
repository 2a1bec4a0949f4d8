"""Architectures: shapes, parameter names of public checkpoints, gradients through the binarized
defence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reproduction.networks import SmallResNet
from wball.zoo.architectures import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    Binarized,
    Normalized,
    ResNet18,
    architectures,
    build_model,
    mnist_cnn,
)


@pytest.mark.parametrize("name", list(architectures()))
def test_every_architecture_maps_images_to_ten_logits(name: str) -> None:
    model = build_model(name).eval()
    x = torch.rand(3, *architectures()[name].shape, requires_grad=True)
    logits = model(x)
    assert logits.shape == (3, 10)
    (gradient,) = torch.autograd.grad(logits.sum(), x)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0
    # An image's logits must not depend on its batch.
    torch.testing.assert_close(model(x[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"mnist-cnn.*cifar10-resnet18"):
        build_model("mnist-cnm")


def test_paper_network_is_the_public_one() -> None:
    shapes = {k: tuple(v.shape) for k, v in mnist_cnn().state_dict().items()}
    assert shapes == {
        "0.weight": (16, 1, 4, 4),
        "0.bias": (16,),
        "2.weight": (32, 16, 4, 4),
        "2.bias": (32,),
        "5.weight": (100, 1568),
        "5.bias": (100,),
        "7.weight": (10, 100),
        "7.bias": (10,),
    }


def test_resnet18_has_the_public_names_and_size() -> None:
    model = ResNet18()
    names = {"conv1.weight", "bn1.running_var", "layer4.1.bn2.bias", "linear.bias"}
    assert names <= set(model.state_dict())
    assert sum(p.numel() for p in model.parameters()) == 11_173_962  # the published count


def drawn(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors, all of them random: fresh ones hide what they do."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(-1.0, 1.0)
    for name, tensor in model.named_buffers():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0)
    return model.eval().state_dict()


def test_resnet18_is_the_network_of_its_paper() -> None:
    """Two 3 x 3 convolutions a block, each normalised, and ReLU after the first and after the
    sum."""
    model = ResNet18(classes=4, width=2, channels=1, stem=5)
    of = drawn(model)

    def normalised(x: torch.Tensor, conv: str, bn: str, stride: int = 1) -> torch.Tensor:
        weight = of[f"{conv}.weight"]
        out = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        names = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(out, *(of[f"{bn}.{name}"] for name in names))

    x = 3 * torch.randn(2, 1, 12, 12)
    h = normalised(x, "conv1", "bn1").relu()
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            inner = normalised(h, f"{at}.conv1", f"{at}.bn1", stride).relu()
            inner = normalised(inner, f"{at}.conv2", f"{at}.bn2")
            h = (
                inner
                + (h if stride == 1 else normalised(h, f"{at}.shortcut.0", f"{at}.shortcut.1", 2))
            ).relu()
    torch.testing.assert_close(
        model(x), h.mean((2, 3)) @ of["linear.weight"].T + of["linear.bias"], rtol=1e-4, atol=1e-4
    )


def test_small_resnet_is_the_network_of_its_paper() -> None:
    model = SmallResNet()
    of = drawn(model)

    def conv(x: torch.Tensor, name: str, stride: int = 1, padding: int = 0) -> torch.Tensor:
        return F.conv2d(x, of[f"{name}.weight"], of[f"{name}.bias"], stride=stride, padding=padding)

    x = torch.rand(2, 3, 32, 32) / 100
    h = conv(x, "stem", padding=1).relu()
    for block, stride in enumerate((1, 1, 2, 2)):
        at = f"blocks.{block}"
        inner = conv(conv(h, f"{at}.conv1", stride, 1).relu(), f"{at}.conv2", padding=1)
        h = (inner + conv(h, f"{at}.shortcut", stride)).relu()
    hidden = (h.flatten(1) @ of["hidden.weight"].T + of["hidden.bias"]).relu()
    torch.testing.assert_close(
        model(x), hidden @ of["linear.weight"].T + of["linear.bias"], rtol=1e-4, atol=1e-4
    )


def test_normalized_equals_normalising_outside() -> None:
    inner = ResNet18(width=4).eval()
    x = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (CIFAR10_MEAN, CIFAR10_STD))
    model = Normalized(inner, CIFAR10_MEAN, CIFAR10_STD)
    assert torch.equal(model(x), inner((x - mean) / std))
    assert list(model.state_dict()) == [f"model.{k}" for k in inner.state_dict()]
    assert model.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (0.5, 0.0, "std > 0"),
        ((0.5, 0.5), 0.2, "one of each per channel"),
        ((0.5, 0.5), (0.2, 0.2), "3 channels"),
    ],
)
def test_normalized_refuses_nonsense(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Normalized(nn.Identity(), mean, std)(torch.rand(1, 3, 4, 4))


def test_binarized_values_are_exact_and_gradients_pass_through() -> None:
    inner = mnist_cnn()
    model = Binarized(inner)
    x = torch.rand(2, 1, 28, 28, requires_grad=True)
    x.data[0, 0, 0, 0] = 0.5  # counts as white
    hard = (x >= 0.5).float().requires_grad_()
    assert torch.equal(model.binarize(x), hard)
    logits = model(x)
    (got,) = torch.autograd.grad(logits[:, 0].sum(), x)
    (through,) = torch.autograd.grad(inner(hard)[:, 0].sum(), hard)
    assert torch.equal(got, through)
