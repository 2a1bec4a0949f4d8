"""Mixtures, ensembles, quantised and spiking networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.kinds import CLASSES, Lambda, headed, kind, pooled

PIXELS = 192


def expert() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 12), nn.ReLU(), nn.Linear(12, CLASSES))


def convolutional() -> nn.Sequential:
    return pooled(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())


class Several(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.members = nn.ModuleList(expert() for _ in range(count))


@kind("ensembles and mixtures", "mean of logits")
class OfLogits(Several):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self.members]).mean(0)


@kind("ensembles and mixtures", "mean of probabilities")
class OfProbabilities(Several):
    def forward(self, x: Tensor) -> Tensor:
        return sum(net(x).softmax(-1) for net in self.members) / len(self.members)  # type: ignore[return-value]


@kind("ensembles and mixtures", "logarithm of the mean probability")
class OfLogProbabilities(Several):
    def forward(self, x: Tensor) -> Tensor:
        parts = torch.stack([net(x).log_softmax(-1) for net in self.members])
        return torch.logsumexp(parts, 0)


@kind("ensembles and mixtures", "median of logits")
class MedianOfLogits(Several):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self.members]).median(0).values


@kind("ensembles and mixtures", "majority vote (jumps)")
class Vote(Several):
    def forward(self, x: Tensor) -> Tensor:
        votes = torch.stack([net(x).argmax(-1) for net in self.members])
        return F.one_hot(votes, CLASSES).sum(0).float()


@kind("ensembles and mixtures", "soft mixture of experts")
class Mixture(Several):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(PIXELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        share = F.softmax(self.router(x.flatten(1)), -1)
        return (share[:, :, None] * torch.stack([net(x) for net in self.members], 1)).sum(1)


@kind("ensembles and mixtures", "hard mixture of experts (top-1)")
class HardMixture(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        which = self.router(x.flatten(1)).argmax(-1)
        parts = torch.stack([net(x) for net in self.members], 1)
        return parts[torch.arange(len(x)), which]


@kind("ensembles and mixtures", "neural decision tree (soft)")
class SoftTree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.leaves = nn.Linear(PIXELS, 3), nn.Parameter(torch.randn(4, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        right = torch.sigmoid(self.nodes(x.flatten(1)))
        left = 1 - right
        paths = [
            left[:, 0] * left[:, 1],
            left[:, 0] * right[:, 1],
            right[:, 0] * left[:, 2],
            right[:, 0] * right[:, 2],
        ]
        return torch.stack(paths, 1) @ self.leaves


@kind("ensembles and mixtures", "test-time flips")
class Flips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional()

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) + self.net(x.flip(3))) / 2


@kind("ensembles and mixtures", "test-time crops")
class Crops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        crops = [x[..., r : r + 6, c : c + 6] for r in (0, 1, 2) for c in (0, 2)]
        return torch.stack([self.net(crop) for crop in crops], 0).mean(0)


@kind("ensembles and mixtures", "Siamese comparison with a stored image")
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 12), nn.ReLU())
        self.register_buffer("shots", torch.rand(CLASSES, 3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return -(self.embed(x)[:, None] - self.embed(self.shots)[None]).abs().sum(-1)


@kind("ensembles and mixtures", "one network per channel")
class PerChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(64, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(F.relu(net(x[:, k].flatten(1))) for k, net in enumerate(self.nets))  # type: ignore[return-value]


@kind("ensembles and mixtures", "one-vs-rest logits of binary networks")
class OneVersusRest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(PIXELS, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([net(x.flatten(1)) for net in self.nets], dim=1)


# ---- numbers of few bits


def through(hard: Tensor, soft: Tensor) -> Tensor:
    """The straight-through estimator."""
    return soft + (hard - soft).detach()


@kind("few bits", "binary weights")
class BinaryWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        w = self.first.weight
        h = F.relu(F.linear(x.flatten(1), w.sign() * w.abs().mean(), self.first.bias))
        return F.linear(h, through(self.second.weight.sign(), self.second.weight), self.second.bias)


@kind("few bits", "binary activations (jumps)")
class BinaryActivations(BinaryWeights):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        return self.second(through(torch.sign(h), h.clamp(-1, 1)))


@kind("few bits", "ternary weights by thresholds")
class Ternary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        w = self.first.weight
        w = (
            torch.where(w.abs() > 0.5 * w.abs().mean(), w.sign(), torch.zeros_like(w))
            * w.abs().mean()
        )
        return self.second(F.relu(F.linear(x.flatten(1), w)))


@kind("few bits", "fake quantisation of weights")
class FakeWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(72, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.conv.weight.detach().abs().max()) / 127
        weight = torch.fake_quantize_per_tensor_affine(self.conv.weight, scale, 0, -128, 127)
        return self.head(F.relu(F.conv2d(x, weight, self.conv.bias, stride=2)).flatten(1))


@kind("few bits", "fake quantisation of weights, stored scales")
class StoredScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(72, CLASSES)
        self.register_buffer(
            "scale", self.conv.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 7
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.round(self.conv.weight / self.scale).clamp(-7, 7) * self.scale
        return self.head(F.relu(F.conv2d(x, weight, self.conv.bias, stride=2)).flatten(1))


@kind("few bits", "fake quantisation of activations (jumps)")
def fake_activations() -> nn.Module:
    def quantised(h: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(h, 0.1, 0, 0, 255)

    return headed(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), Lambda(quantised))


@kind("few bits", "dynamic int8 (torch.ao.quantization)")
def dynamic() -> nn.Module:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    net = expert().eval()
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)


@kind("few bits", "half precision (bfloat16)")
def half() -> nn.Module:
    return expert().to(torch.bfloat16)


@kind("few bits", "autocast inside the model")
class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = expert()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).float()


@kind("few bits", "double precision")
def double() -> nn.Module:
    return expert().double()


@kind("few bits", "double precision inside the model")
class DoubleInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 16), nn.Linear(16, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x.flatten(1))).double()).float()


@kind("few bits", "spiking neurons, four steps (jumps)")
class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        current = self.first(x.flatten(1))
        v, out = torch.zeros_like(current), 0.0
        for _ in range(4):
            v = 0.9 * v + current
            spike = (v > 0.5).to(v.dtype)
            v = v - 0.5 * spike
            out = out + self.second(spike)
        return out / 4  # type: ignore[return-value]


@kind("few bits", "rate-coded spiking (soft surrogate)")
class SoftSpiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        current, v, out = self.first(x.flatten(1)), 0.0, 0.0
        for _ in range(3):
            v = 0.8 * v + current
            spike = torch.sigmoid(4 * (v - 0.5))
            v, out = v * (1 - spike), out + self.second(spike)
        return out / 3  # type: ignore[return-value]


# ---- randomness and state


@kind("randomness and state", "dropout in evaluation mode")
def dropout() -> nn.Module:
    return headed(
        nn.Conv2d(3, 8, 3, 2),
        nn.Dropout2d(0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.AlphaDropout(0.1),
        nn.Linear(72, 12),
        nn.ELU(),
        nn.FeatureAlphaDropout(),
    )


@kind("randomness and state", "noise at the input")
class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = expert()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.01 * torch.randn_like(x))


@kind("randomness and state", "Monte Carlo dropout")
class MonteCarlo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x.flatten(1)))
        return torch.stack([self.second(F.dropout(h, 0.2, training=True)) for _ in range(4)]).mean(
            0
        )


@kind("randomness and state", "Bayesian layer at its mean")
class Bayesian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.rho = (
            nn.Parameter(torch.randn(CLASSES, PIXELS) / 14),
            nn.Parameter(torch.zeros(CLASSES, PIXELS)),
        )

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(self.mean) * F.softplus(self.rho) if self.training else 0.0
        return F.linear(x.flatten(1), self.mean + noise)


@kind("randomness and state", "variational code at its mean")
class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(PIXELS, 16), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = torch.tanh(self.encode(x.flatten(1))).chunk(2, 1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean) if self.training else mean
        return self.decode(z)


@kind("randomness and state", "counts its calls")
class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = expert()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


@kind("randomness and state", "mean over the batch (batch-wise centring)")
class BatchCentred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = expert()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(0, keepdim=True))
