"""Small networks of every kind that certificates follow, for images of 1 x 4 x 4."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Step(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def headed(*layers: nn.Module) -> nn.Sequential:
    """Layers, and a linear head with three logits."""
    front = nn.Sequential(*layers).eval()
    width = front(torch.zeros(2, 1, 4, 4)).flatten(1).shape[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


def behind_a_convolution(*layers: nn.Module) -> nn.Sequential:
    return headed(nn.Conv2d(1, 4, 2), *layers)


def behind_a_matrix(*layers: nn.Module) -> nn.Sequential:
    return headed(nn.Flatten(), nn.Linear(16, 8), *layers)


class VisionTransformer(nn.Module):
    """Patches, a class token, two blocks with attention, layer normalisation and GELU."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(0.2 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.2 * torch.randn(1, 5, width))
        settings = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, **settings)  # type: ignore[arg-type]
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


class Excitation(nn.Module):
    """Channels multiplied by a gate that looks at all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = nn.Conv2d(1, 4, 2), nn.Linear(4, 2), nn.Linear(2, 4)
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        gate = torch.sigmoid(self.up(F.relu(self.down(h.mean((2, 3))))))
        return self.head((h * gate[:, :, None, None]).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0].flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[:, 0])[0][:, -1])


class Pairs(nn.Module):
    """A bilinear form of two halves of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.flatten(1).chunk(2, 1)
        return self.form(first, second)


class Hidden(nn.Module):
    """A leaky ReLU of its own, written with a comparison."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0.1, x, 0.3 * (x - 0.1) + 0.1)


class Doubled(nn.Module):
    """Half of the network with stored statistics, twice, as a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(16, 3)
        nn.init.uniform_(self.norm.running_mean, -0.3, 0.3)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        return self.head(F.max_pool2d(h + self.second(h), 2).flatten(1))


def activation(name: str, *settings: float) -> Callable[[], nn.Module]:
    return lambda: behind_a_matrix(getattr(nn, name)(*settings))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu": activation("ReLU"),
    "two relus and a pool": Doubled,
    "leaky relu by a comparison": lambda: behind_a_matrix(Hidden()),
    "prelu": activation("PReLU", 8, 0.2),
    "relu6": activation("ReLU6"),
    "hardtanh": activation("Hardtanh", -0.2, 0.3),
    "hardswish": activation("Hardswish"),
    "hardsigmoid": activation("Hardsigmoid"),
    "threshold": activation("Threshold", 0.05, 0.05),
    "rrelu": activation("RReLU"),
    "elu": activation("ELU"),
    "celu": activation("CELU", 0.5),
    "selu": activation("SELU"),
    "softplus": activation("Softplus", 2.0),
    "mish": activation("Mish"),
    "softsign": activation("Softsign"),
    "silu": activation("SiLU"),
    "gelu": activation("GELU"),
    "gelu by tanh": lambda: behind_a_matrix(nn.GELU("tanh")),
    "sigmoid": activation("Sigmoid"),
    "log sigmoid": activation("LogSigmoid"),
    "tanh": activation("Tanh"),
    "tanhshrink": activation("Tanhshrink"),
    "exp": lambda: behind_a_matrix(Step(torch.exp)),
    "log": lambda: behind_a_matrix(Step(lambda v: torch.log(v.square() + 0.5))),
    "root": lambda: behind_a_matrix(Step(lambda v: torch.sqrt(v.square() + 0.1))),
    "reciprocal": lambda: behind_a_matrix(Step(lambda v: 1 / (v.square() + 0.3))),
    "absolute": lambda: behind_a_matrix(Step(torch.abs)),
    "power": lambda: behind_a_matrix(Step(lambda v: v**3 - v**2)),
    "sine": lambda: behind_a_matrix(Step(lambda v: torch.sin(3 * v) + torch.cos(v))),
    "clamp": lambda: behind_a_matrix(Step(lambda v: v.clamp(min=-0.1))),
    "softmax": lambda: behind_a_matrix(nn.Softmax(1)),
    "log softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.LogSoftmax(1)),
    "maximum": lambda: behind_a_matrix(Step(lambda v: torch.maximum(v[:, :4], v[:, 4:]))),
    "maxout": lambda: behind_a_matrix(Step(lambda v: v.view(-1, 4, 2).amax(2))),
    "reflected frame": lambda: headed(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.ReLU()),
    "max pool": lambda: behind_a_convolution(nn.MaxPool2d(2, 1, padding=1)),
    "max pool over the edge": lambda: behind_a_convolution(nn.MaxPool2d(2, ceil_mode=True)),
    "adaptive max pool": lambda: behind_a_convolution(nn.AdaptiveMaxPool2d(2)),
    "average pool": lambda: behind_a_convolution(nn.AvgPool2d(2), nn.ReLU()),
    "batch norm": lambda: behind_a_convolution(nn.BatchNorm2d(4), nn.ReLU()),
    "layer norm": lambda: behind_a_matrix(nn.LayerNorm(8), nn.GELU()),
    "group norm": lambda: behind_a_convolution(nn.GroupNorm(2, 4), nn.ReLU()),
    "instance norm": lambda: behind_a_convolution(nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
    "local response norm": lambda: behind_a_convolution(nn.LocalResponseNorm(2)),
    "unit length": lambda: behind_a_matrix(Step(lambda v: F.normalize(v, dim=1))),
    "standardised image": lambda: headed(
        Step(lambda v: (v - v.mean((1, 2, 3), True)) / (v.std((1, 2, 3), keepdim=True) + 0.1))
    ),
    "excitation": Excitation,
    "glu": lambda: behind_a_convolution(nn.GLU(1)),
    "bilinear": Pairs,
    "attention": Attention,
    "vision transformer": VisionTransformer,
    "rnn": lambda: Recurrent(nn.RNN),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transposed convolution": lambda: headed(nn.ConvTranspose2d(1, 3, 3, 2), nn.ReLU()),
    "convolution of rows": lambda: headed(Step(lambda v: v[:, 0]), nn.Conv1d(4, 3, 2), nn.ReLU()),
    "upsampled": lambda: headed(nn.Upsample(scale_factor=2, mode="bicubic"), nn.Conv2d(1, 2, 3, 2), nn.ReLU()),
    "einsum": lambda: headed(
        Step(lambda v: torch.einsum("bchw,wd->bchd", v, torch.linspace(-1, 1, 12).view(4, 3))), nn.ReLU()
    ),
    "weighted sum": lambda: behind_a_matrix(
        Step(lambda v: torch.add(v.relu(), v.flip(1), alpha=3.0).relu())
    ),
    "moves": lambda: headed(
        Step(lambda v: torch.cat([v.rot90(1, (2, 3)), v.roll(1, 2).repeat(1, 2, 1, 1)], 1)),
        nn.Conv2d(3, 2, 2), nn.ReLU(),
    ),
    "unfolded": lambda: headed(nn.Unfold(2), Step(lambda v: v.split(3, 1)[0] - v.unbind(1)[3][:, None]), nn.ReLU()),
}  # fmt: skip
