"""Norms of activations and of weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.kinds import CLASSES, Lambda, headed, kind, pooled


def between(norm: nn.Module) -> nn.Module:
    """A norm between two convolutions."""
    return pooled(nn.Conv2d(3, 8, 3, 2, 1), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())


NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(8),
    "batch norm without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm([8, 4, 4]),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "instance norm with stored statistics": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "local response norm": lambda: nn.LocalResponseNorm(3),
    "RMS norm": lambda: nn.RMSNorm([8, 4, 4]),
    "unit length of each place": lambda: Lambda(lambda h: F.normalize(h, dim=1)),
    "pixel norm": lambda: Lambda(lambda h: h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-8)),
    "largest value as the scale": lambda: Lambda(lambda h: h / (h.abs().amax((1, 2, 3), keepdim=True) + 1e-3)),
}  # fmt: skip

for _name, _norm in NORMS.items():
    kind("norms", _name)(lambda make=_norm: between(make()))


@kind("norms", "filter response norm with thresholds")
class FilterResponse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, CLASSES)
        self.gamma, self.beta = (nn.Parameter(v * torch.ones(1, 8, 1, 1)) for v in (1.0, 0.0))
        self.tau = nn.Parameter(torch.zeros(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h = h * torch.rsqrt(h.pow(2).mean([2, 3], keepdim=True) + 1e-6)
        return self.head(torch.max(self.gamma * h + self.beta, self.tau).mean((2, 3)))


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = weight / (weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@kind("norms", "weight standardisation with group norm")
def weight_standardised() -> nn.Module:
    return pooled(StandardisedConv(3, 8, 3, 2, 1), nn.GroupNorm(4, 8), nn.ReLU())


@kind("norms", "whitened input (ZCA)")
def whitened() -> nn.Module:
    basis = torch.linalg.qr(torch.randn(192, 192)).Q
    centre = torch.rand(192)
    return headed(Lambda(lambda x: (x.flatten(1) - centre) @ basis), nn.Linear(192, 16), nn.ReLU())


@kind("norms", "dynamic tanh instead of a norm")
class DynamicTanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.alpha = nn.Conv2d(3, 8, 3, 2), nn.Parameter(torch.ones(1) * 0.5)
        self.weight, self.bias = (
            nn.Parameter(torch.ones(8, 1, 1)),
            nn.Parameter(torch.zeros(8, 1, 1)),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.weight * torch.tanh(self.alpha * self.conv(x)) + self.bias
        return self.head(F.relu(h).mean((2, 3)))
