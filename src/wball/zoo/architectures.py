"""Networks by name: :func:`architectures`, :func:`build_model`.

They map images in [0, 1] to logits. Normalisation and thresholds are part of the network, so that a
radius means the same for every model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


class Normalized(nn.Module):
    """``model((x - mean) / std)``, channel by channel.

    The constants belong to the architecture: a state dict holds the weights of ``model`` only.

    >>> net = Normalized(nn.Flatten(), mean=0.5, std=0.25)
    >>> net(torch.ones(1, 1, 1, 2))
    tensor([[2., 2.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: nn.Module, mean: float | Sequence[float], std: float | Sequence[float]
    ) -> None:
        super().__init__()
        centre, scale = (torch.as_tensor(v, dtype=torch.float32).reshape(-1) for v in (mean, std))
        if len(centre) != len(scale):
            raise ValueError(
                f"mean has {len(centre)} channels and std has {len(scale)}; give one of each per channel"
            )
        if not (scale > 0).all() or not torch.isfinite(torch.cat([centre, scale])).all():
            raise ValueError(
                f"mean must be finite and std > 0 in every channel, got {mean} and {std}"
            )
        self.model = model
        self.register_buffer("mean", centre.view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", scale.view(1, -1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        channels = self.mean.shape[1]
        # A symbol of torch.fx is not a tensor and has no shape yet.
        if isinstance(x, Tensor) and channels not in (1, x.shape[1]):
            raise ValueError(f"x has {x.shape[1]} channels, but mean and std are for {channels}")
        return self.model((x - self.mean) / self.std)


class Binary(nn.Module):
    """Two logits from a model of two classes that returns one number per image: the logit of class
    1 or, with ``probability``, its probability.

    >>> Binary(nn.Flatten(), probability=True)(torch.tensor([[0.5], [1.0]])).argmax(1)
    tensor([0, 1])
    """

    def __init__(self, model: nn.Module, probability: bool = False) -> None:
        super().__init__()
        self.model, self.probability = model, probability

    def forward(self, x: Tensor) -> Tensor:
        score = self.model(x).reshape(-1)
        if self.probability:
            tiny = torch.finfo(score.dtype).tiny
            score = score.clamp(min=tiny).log() - (1 - score).clamp(min=tiny).log()
        return torch.stack([torch.zeros_like(score), score], 1)


class Binarize(nn.Module):
    """``1 where x >= 0.5, else 0``, with the gradient of the identity (straight-through).

    The true gradient is 0 almost everywhere, which would mask the model from gradient attacks.

    >>> Binarize()(torch.tensor([0.4, 0.6]))
    tensor([0., 1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return (x >= 0.5).to(x.dtype) + (x - x.detach())  # adds 0, with gradient 1


class Binarized(nn.Module):
    """The paper's binarized defence: a threshold in front of an ordinary network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.binarize, self.model = Binarize(), model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.binarize(x))


def strided(
    channels: int, convolutions: Sequence[tuple[int, int, int]], cells: int, hidden: int
) -> nn.Sequential:
    """Strided convolutions of ``(filters, kernel, stride)``, then two linear layers.

    The last convolution returns ``cells x cells`` values per filter. Moving mass over short
    distances changes the features of large filters little, and few layers need relaxing, which
    suits certificates.
    """
    layers = list[nn.Module]()
    for filters, kernel, stride in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, stride, (kernel - stride) // 2), nn.ReLU()]
        channels = filters
    layers += [nn.Flatten(), nn.Linear(channels * cells * cells, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


def mnist_cnn() -> nn.Sequential:
    """The paper's MNIST network: two strided convolutions and two linear layers."""
    return strided(1, ((16, 4, 2), (32, 4, 2)), 7, 100)


class BasicBlock(nn.Module):
    """``relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images, without pooling in the stem; parameter names as in public
    checkpoints."""

    def __init__(
        self, classes: int = 10, width: int = 64, channels: int = 3, stem: int = 3
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, stem, padding=stem // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, stride=1)
        self.layer2 = self._stage(width, 2 * width, stride=2)
        self.layer3 = self._stage(2 * width, 4 * width, stride=2)
        self.layer4 = self._stage(4 * width, 8 * width, stride=2)
        self.linear = nn.Linear(8 * width, classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.linear(out.mean((2, 3)))


@dataclass(frozen=True)
class Architecture:
    """A network that can be built by name, and the shape of its images."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    summary: str


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("mnist-cnn", mnist_cnn, (1, 28, 28), "the paper's MNIST network"),
        Architecture(
            "mnist-cnn-binarized",
            lambda: Binarized(mnist_cnn()),
            (1, 28, 28),
            "the same behind a threshold at 0.5 (straight-through gradient)",
        ),
        Architecture(
            "mnist-resnet",
            lambda: ResNet18(width=16, channels=1, stem=5),
            (1, 28, 28),
            "ResNet-18 of a quarter of the width, with a 5 x 5 stem that can blur, for robust training",
        ),
        Architecture(
            "cifar10-resnet18",
            lambda: Normalized(ResNet18(), CIFAR10_MEAN, CIFAR10_STD),
            (3, 32, 32),
            "ResNet-18 with a 3 x 3 stem, normalisation inside",
        ),
        Architecture(
            "cifar10-cnn",
            lambda: Normalized(
                strided(3, ((64, 8, 4), (96, 4, 2)), 4, 128), CIFAR10_MEAN, CIFAR10_STD
            ),
            (3, 32, 32),
            "two strided convolutions with large filters and two linear layers, for certificates, normalisation inside",
        ),
        Architecture(
            "cifar10-cnn-deep",
            lambda: Normalized(
                strided(3, ((64, 6, 2), (128, 4, 2), (192, 4, 2)), 4, 256),
                CIFAR10_MEAN,
                CIFAR10_STD,
            ),
            (3, 32, 32),
            "three strided convolutions and two linear layers, for certificates at small radii, normalisation inside",
        ),
    )
}
"""The networks by name. Yours may be added."""


def architectures() -> dict[str, Architecture]:
    """The networks that :func:`build_model` can build, by name.

    >>> [name for name in architectures() if name.startswith("mnist")]
    ['mnist-cnn', 'mnist-cnn-binarized', 'mnist-resnet']
    """
    return dict(ARCHITECTURES)


def build_model(name: str) -> nn.Module:
    """Build a network with random weights (from PyTorch's global seed), in training mode.

    >>> build_model("mnist-cnn")(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {name!r}; choose from {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name].build()
