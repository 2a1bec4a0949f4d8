"""Multilayer perceptrons: activations, gates, maxima, constrained weights, features of pixels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.networks.kinds import CLASSES, SIDE, Lambda, headed, kind

PIXELS = 3 * SIDE * SIDE


def perceptron(*middle: nn.Module, width: int = 24) -> nn.Sequential:
    """A hidden layer and what comes behind it."""
    return headed(nn.Flatten(), nn.Linear(PIXELS, width), *middle)


def deep(act: type[nn.Module], **settings: float) -> nn.Sequential:
    """Two hidden layers."""
    return perceptron(act(**settings), nn.Linear(24, 16), act(**settings))


ACTIVATIONS: dict[str, tuple[type[nn.Module], dict[str, float]]] = {
    "ReLU": (nn.ReLU, {}),
    "LeakyReLU": (nn.LeakyReLU, {"negative_slope": 0.1}),
    "PReLU": (nn.PReLU, {}),
    "RReLU": (nn.RReLU, {}),
    "ReLU6": (nn.ReLU6, {}),
    "ELU": (nn.ELU, {}),
    "CELU": (nn.CELU, {"alpha": 0.5}),
    "SELU": (nn.SELU, {}),
    "GELU": (nn.GELU, {}),
    "SiLU": (nn.SiLU, {}),
    "Mish": (nn.Mish, {}),
    "Softplus": (nn.Softplus, {"beta": 5.0}),
    "Sigmoid": (nn.Sigmoid, {}),
    "LogSigmoid": (nn.LogSigmoid, {}),
    "Tanh": (nn.Tanh, {}),
    "Tanhshrink": (nn.Tanhshrink, {}),
    "Softsign": (nn.Softsign, {}),
    "Hardtanh": (nn.Hardtanh, {}),
    "Hardswish": (nn.Hardswish, {}),
    "Hardsigmoid": (nn.Hardsigmoid, {}),
    "Softshrink": (nn.Softshrink, {"lambd": 0.1}),
    "Hardshrink": (nn.Hardshrink, {"lambd": 0.1}),
    "Threshold": (nn.Threshold, {"threshold": 0.1, "value": 0.0}),
}

for _name, (_act, _settings) in ACTIVATIONS.items():
    kind("activations", _name)(lambda act=_act, settings=_settings: deep(act, **settings))

FUNCTIONS = {
    "GELU by tanh": lambda h: F.gelu(h, approximate="tanh"),
    "squared ReLU": lambda h: F.relu(h).square(),
    "exp": lambda h: torch.exp(-h.abs()),
    "Gaussian": lambda h: torch.exp(-(h**2)),
    "cosine": torch.cos,
    "arctangent": torch.atan,
    "asinh": torch.asinh,
    "signed logarithm": lambda h: h.sign() * torch.log1p(h.abs()),
    "absolute value": torch.abs,
    "snake": lambda h: h + torch.sin(h) ** 2,
    "Swish with a learnt slope": lambda h: h * torch.sigmoid(1.7 * h),
    "leaky ReLU by torch.where": lambda h: torch.where(h > 0, h, 0.2 * h),
    "leaky ReLU by torch.max": lambda h: torch.max(h, 0.2 * h),
    "ReLU by clamp": lambda h: h.clamp(min=0),
    "ReLU by a product with its mask": lambda h: h * (h > 0),
    "softmax between layers": lambda h: F.softmax(h, dim=1),
}

for _name, _function in FUNCTIONS.items():
    kind("activations", _name)(lambda f=_function: perceptron(Lambda(f)))


@kind("linear models", "linear classifier")
def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))


@kind("linear models", "linear classifier of log-probabilities")
def log_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES), nn.LogSoftmax(1))


@kind("linear models", "quadratic features")
class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2 * PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        return self.head(torch.cat([v, v**2], 1))


@kind("linear models", "normalised inputs")
class Standardised(nn.Module):
    """Subtracts the mean of a data set and divides by its deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.49, 0.48, 0.45]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.25, 0.24, 0.26]).view(1, 3, 1, 1))
        self.net = perceptron(nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / self.std)


@kind("linear models", "images standardised one by one")
def standardised() -> nn.Module:
    def centred(x: Tensor) -> Tensor:
        mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
        return (x - mean) / (std + 1e-3)

    return headed(Lambda(centred), nn.Flatten(), nn.Linear(PIXELS, 24), nn.ReLU())


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.carry, self.change = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        gate = torch.sigmoid(self.carry(h) - 1.0)
        return gate * F.relu(self.change(h)) + (1 - gate) * h


@kind("gates and maxima", "highway network")
def highway() -> nn.Module:
    return perceptron(nn.ReLU(), Highway(24), Highway(24))


@kind("gates and maxima", "GLU")
def glu() -> nn.Module:
    return perceptron(nn.GLU(1), nn.Linear(12, 16), nn.GLU(1))


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.silu(self.gate(h)) * self.up(h))


@kind("gates and maxima", "SwiGLU")
def swiglu() -> nn.Module:
    return perceptron(nn.Tanh(), SwiGLU(24))


@kind("gates and maxima", "maxout")
def maxout() -> nn.Module:
    return perceptron(Lambda(lambda h: h.view(len(h), -1, 3).max(2).values))


@kind("gates and maxima", "MaxMin (GroupSort of two)")
def maxmin() -> nn.Module:
    def both(h: Tensor) -> Tensor:
        first, second = h.chunk(2, 1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)

    return perceptron(Lambda(both), nn.Linear(24, 24), Lambda(both))


@kind("gates and maxima", "GroupSort of four")
def groupsort() -> nn.Module:
    return perceptron(Lambda(lambda h: h.view(len(h), -1, 4).sort(2).values.flatten(1)))


@kind("gates and maxima", "the k largest of a layer (top-k)")
def topk() -> nn.Module:
    return perceptron(Lambda(lambda h: h.topk(8, dim=1).values))


@kind("gates and maxima", "FiLM by a second branch")
class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(PIXELS, 16), nn.Linear(PIXELS, 8)
        self.scale, self.shift = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        side = F.relu(self.side(v))
        return self.head(F.relu(self.scale(side) * self.main(v) + self.shift(side)))


@kind("gates and maxima", "bilinear layer")
class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 8), nn.Linear(PIXELS, 8)
        self.form = nn.Bilinear(8, 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        return self.form(F.relu(self.first(v)), F.relu(self.second(v)))


@kind("gates and maxima", "polynomial network (product of three maps)")
class Polynomial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(PIXELS, 12) for _ in range(3))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.maps[0](x.flatten(1))
        for layer in self.maps[1:]:
            h = layer(x.flatten(1)) * h + h
        return self.head(h)


# ---- constrained weights


def wrapped(wrap: object) -> nn.Module:
    layers = (nn.Linear(PIXELS, 24), nn.Linear(24, 24))
    first, second = map(wrap, layers)  # type: ignore[call-overload]
    return headed(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU())


@kind("constrained weights", "spectral norm")
def spectral() -> nn.Module:
    return wrapped(parametrizations.spectral_norm)


@kind("constrained weights", "spectral norm by hooks (older API)")
def spectral_hooks() -> nn.Module:
    return wrapped(nn.utils.spectral_norm)


@kind("constrained weights", "weight norm")
def weight_norm() -> nn.Module:
    return wrapped(parametrizations.weight_norm)


@kind("constrained weights", "orthogonal weights (Householder)")
def orthogonal() -> nn.Module:
    return wrapped(lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder"))


class CayleyLinear(nn.Module):
    """A square orthogonal matrix, the Cayley transform of a skew one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        skew = self.weight - self.weight.T
        one = torch.eye(len(skew), dtype=skew.dtype, device=skew.device)
        return F.linear(h, torch.linalg.solve(one + skew, one - skew), self.bias)


@kind("constrained weights", "Cayley layers with MaxMin (Lipschitz network)")
def cayley() -> nn.Module:
    def maxmin(h: Tensor) -> Tensor:
        pairs = h.view(len(h), -1, 2)
        return torch.cat([pairs.amax(2), pairs.amin(2)], 1)

    return perceptron(Lambda(maxmin), CayleyLinear(24), Lambda(maxmin), CayleyLinear(24))


@kind("constrained weights", "pruned weights (masks)")
def pruned() -> nn.Module:
    from torch.nn.utils import prune

    net = deep(nn.ReLU)
    for layer in net:
        if isinstance(layer, nn.Linear):
            prune.l1_unstructured(layer, "weight", 0.5)
    return net


@kind("constrained weights", "input-convex network")
class InputConvex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(PIXELS, 16), nn.Linear(PIXELS, 16)
        self.through = nn.Parameter(torch.randn(16, 16) / 4)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        h = F.relu(self.first(v))
        return self.head(F.relu(h @ F.softplus(self.through) + self.again(v)))


@kind("constrained weights", "low-rank factors")
def low_rank() -> nn.Module:
    def thin(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(a, 4, bias=False), nn.Linear(4, b))

    return headed(nn.Flatten(), thin(PIXELS, 24), nn.ReLU(), thin(24, 24), nn.ReLU())


@kind("constrained weights", "weights of a hypernetwork")
class Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(8))
        self.maker, self.head = nn.Linear(8, PIXELS * 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(torch.tanh(self.code)).view(16, PIXELS) / 10
        return self.head(F.relu(F.linear(x.flatten(1), weight)))


# ---- features of pixels and distances


@kind("features and prototypes", "SIREN")
class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(PIXELS, 24), nn.Linear(24, 24)])
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.layers:
            h = torch.sin(3.0 * layer(h))
        return self.head(h)


@kind("features and prototypes", "random Fourier features")
class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(PIXELS, 32) / 4)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x.flatten(1) @ self.frequencies
        return self.head(torch.cat([torch.sin(angles), torch.cos(angles)], -1))


@kind("features and prototypes", "RBF units")
class Radial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.rand(16, PIXELS))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gaps = x.flatten(1).unsqueeze(1) - self.centres
        return self.head(torch.exp(-gaps.pow(2).sum(-1) / 16))


@kind("features and prototypes", "RBF units by torch.cdist")
class RadialByDistance(Radial):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(-torch.cdist(x.flatten(1), self.centres) / 4))


@kind("features and prototypes", "nearest prototype (squared distances)")
class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.prototypes = nn.Linear(PIXELS, 12), nn.Parameter(torch.randn(CLASSES, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x.flatten(1)))
        return -(h[:, None] - self.prototypes[None]).square().sum(2)


@kind("features and prototypes", "cosine head")
class CosineHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.prototypes = nn.Linear(PIXELS, 12), nn.Parameter(torch.randn(CLASSES, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x.flatten(1)))
        return 16.0 * F.linear(F.normalize(h), F.normalize(self.prototypes))


@kind("features and prototypes", "cosine head by F.cosine_similarity")
class CosineSimilarity(CosineHead):
    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x.flatten(1)))
        return 16.0 * F.cosine_similarity(h[:, None], self.prototypes[None], dim=-1)


@kind("features and prototypes", "Kolmogorov-Arnold layer (Gaussian basis)")
class KolmogorovArnold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(PIXELS, 12)
        self.register_buffer("knots", torch.linspace(-1, 1, 5))
        self.weight, self.base = nn.Parameter(torch.randn(CLASSES, 60) / 4), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        bumps = torch.exp(-((h.unsqueeze(-1) - self.knots) / 0.5).pow(2))
        return F.linear(bumps.flatten(1), self.weight) + self.base(F.silu(h))


@kind("features and prototypes", "Bernstein basis of each pixel")
class Bernstein(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4 * PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        terms = [math.comb(3, k) * v**k * (1 - v) ** (3 - k) for k in range(4)]
        return self.head(torch.cat(terms, 1))
