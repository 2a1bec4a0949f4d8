"""Architectures: shapes, parameter names of public checkpoints, gradients through the binarized defence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wball.models import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    Binarized,
    Normalized,
    ResNet18,
    SmallResNet,
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


def test_registry_cannot_be_changed_from_outside() -> None:
    architectures().clear()
    assert "mnist-cnn" in architectures()


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
    names = set(model.state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer4.1.bn2.bias", "linear.bias"} <= names
    assert {n.split(".")[0] + "." + n.split(".")[1] for n in names if "shortcut" in n} == {
        "layer2.0",
        "layer3.0",
        "layer4.0",
    }
    assert sum(p.numel() for p in model.parameters()) == 11_173_962  # the count everyone quotes for this network


def test_small_resnet_halves_the_image_twice() -> None:
    model = SmallResNet()
    x = torch.rand(1, 3, 32, 32)
    sizes = [tuple(x.shape[1:]) for x in (y for y in _stages(model, x))]
    assert sizes == [(16, 32, 32), (16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_small_resnet_names_each_of_its_parameters_in_public_checkpoints() -> None:
    names = SmallResNet.public_names()
    assert sorted(names.values()) == sorted(SmallResNet().state_dict()) and len(names) == 30
    assert names["4.Ws.0.weight"] == "blocks.0.shortcut.weight" and names["16.Ws.2.bias"] == "blocks.3.conv2.bias"


def _stages(model: SmallResNet, x: torch.Tensor) -> list[torch.Tensor]:
    out = [model.stem(x)]
    for block in model.blocks:
        out.append(block(out[-1]))
    return out


def test_normalized_equals_normalising_outside() -> None:
    inner = ResNet18(width=4).eval()
    x = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (CIFAR10_MEAN, CIFAR10_STD))
    model = Normalized(inner, CIFAR10_MEAN, CIFAR10_STD)
    assert torch.equal(model(x), inner((x - mean) / std))
    assert list(model.state_dict()) == [f"model.{k}" for k in inner.state_dict()]
    assert model.double()(x.double()).dtype == torch.float64


def test_normalized_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="std > 0"):
        Normalized(nn.Identity(), 0.5, 0.0)
    with pytest.raises(ValueError, match="one of each per channel"):
        Normalized(nn.Identity(), (0.5, 0.5), 0.2)
    with pytest.raises(ValueError, match="3 channels"):
        Normalized(nn.Identity(), (0.5, 0.5), (0.2, 0.2))(torch.rand(1, 3, 4, 4))


@pytest.mark.parametrize("straight_through", [True, False])
def test_binarized_values_are_exact_and_gradients_as_asked(straight_through: bool) -> None:
    inner = mnist_cnn()
    model = Binarized(inner, straight_through=straight_through)
    x = torch.rand(2, 1, 28, 28, requires_grad=True)
    hard = (x >= 0.5).float().requires_grad_()
    assert torch.equal(model.binarize(x), hard)
    logits = model(x)
    (got,) = torch.autograd.grad(logits[:, 0].sum(), x)
    (through,) = torch.autograd.grad(inner(hard)[:, 0].sum(), hard)
    assert torch.equal(got, through if straight_through else torch.zeros_like(x))
