"""Pools, and fixed front ends: wavelets, Gabor filters, colours, transforms of frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.kinds import CLASSES, Lambda, headed, kind


def pooling(pool: nn.Module) -> nn.Module:
    return headed(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), pool)


def log_sum_exp(h: Tensor) -> Tensor:
    return torch.logsumexp(5 * h.flatten(2), 2) / 5


def stochastic(h: Tensor) -> Tensor:
    """Stochastic pooling at test time: values weighted by themselves."""
    parts = F.unfold(h, 2, stride=2).view(len(h), 6, 4, 16)
    return (parts**2).sum(2) / (parts.sum(2) + 1e-3)


def median(h: Tensor) -> Tensor:
    return F.unfold(h, 3, stride=2).view(len(h), 6, 9, 9).median(2).values


POOLS = {
    "max pool": lambda: nn.MaxPool2d(2),
    "max pool, overlapping": lambda: nn.MaxPool2d(3, 2, 1),
    "max pool, dilated": lambda: nn.MaxPool2d(2, 2, dilation=2),
    "average pool": lambda: nn.AvgPool2d(2),
    "average pool at the edge": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptive average pool": lambda: nn.AdaptiveAvgPool2d(3),
    "adaptive max pool": lambda: nn.AdaptiveMaxPool2d(3),
    "fractional max pool (random places)": lambda: nn.FractionalMaxPool2d(2, output_ratio=0.5),
    "Lp pool": lambda: nn.LPPool2d(2, 2),
    "log-sum-exp pool": lambda: Lambda(log_sum_exp),
    "generalised mean (GeM)": lambda: Lambda(lambda h: F.avg_pool2d(h.clamp(min=1e-2).pow(3), 4).pow(1 / 3)),
    "mean and maximum": lambda: Lambda(lambda h: 0.5 * (F.max_pool2d(h, 2) + F.avg_pool2d(h, 2))),
    "stochastic pool at test time": lambda: Lambda(stochastic),
    "median pool": lambda: Lambda(median),
    "mean and standard deviation": lambda: Lambda(
        lambda h: torch.cat([h.mean((2, 3)), (h.var((2, 3)) + 1e-3).sqrt()], 1)
    ),
    "second moments of channels (bilinear pool)": lambda: Lambda(
        lambda h: torch.bmm(h.flatten(2), h.flatten(2).transpose(1, 2)) / 64
    ),
}  # fmt: skip

for _name, _pool in POOLS.items():
    kind("pools", _name)(lambda make=_pool: pooling(make()))


@kind("pools", "blur pool")
class BlurPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        taps = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("taps", (taps[:, None] * taps / 16).expand(6, 1, 3, 3).clone())
        self.conv, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv(x)), 2, 1)
        h = F.conv2d(F.pad(h, (1, 1, 1, 1), "reflect"), self.taps, stride=2, groups=6)
        return self.head(h.flatten(1))


@kind("pools", "spatial softmax (expected places)")
class SpatialSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, 2), nn.Linear(8, CLASSES)
        self.register_buffer("places", torch.linspace(-1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        share = self.conv(x).flatten(2).softmax(-1).view(-1, 4, 3, 3)
        rows = (share.sum(3) * self.places).sum(2)
        return self.head(torch.cat([rows, (share.sum(2) * self.places).sum(2)], 1))


@kind("pools", "attention pool (gated instances)")
class AttentionPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.value, self.gate, self.score = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2)
        score = self.score(torch.tanh(self.value(h)) * torch.sigmoid(self.gate(h)))
        return self.head((torch.softmax(score, 1) * h).sum(1))


@kind("pools", "vectors of local aggregates (NetVLAD)")
class NetVlad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.assign = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 3, 1)
        self.centres, self.head = nn.Parameter(torch.randn(3, 4)), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        share = F.softmax(self.assign(h).flatten(2), 1)
        gaps = h.flatten(2)[:, None] - self.centres[None, :, :, None]
        v = (gaps * share[:, :, None]).sum(-1)
        return self.head(F.normalize(F.normalize(v, dim=2).flatten(1), dim=1))


# ---- front ends


@kind("front ends", "Haar wavelets")
class Haar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(12, 8, 3), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[..., 0::2, 0::2], x[..., 0::2, 1::2]
        c, d = x[..., 1::2, 0::2], x[..., 1::2, 1::2]
        bands = torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2
        return self.head(F.relu(self.conv(bands)).flatten(1))


def gabor_bank() -> Tensor:
    rows = torch.arange(-2, 3, dtype=torch.float32)
    y, x = rows[:, None], rows[None]
    waves = []
    for k in range(4):
        angle = math.pi * k / 4
        along = x * math.cos(angle) + y * math.sin(angle)
        for phase in (torch.cos, torch.sin):
            waves.append(torch.exp(-(x**2 + y**2) / 4) * phase(1.5 * along))
    return torch.stack(waves)[:, None]


@kind("front ends", "Gabor filters with energies")
class Gabor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", gabor_bank())
        self.head = nn.Linear(4 * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        grey = 0.3 * x[:, :1] + 0.59 * x[:, 1:2] + 0.11 * x[:, 2:]
        even, odd = F.conv2d(grey, self.bank, stride=2, padding=2).view(-1, 4, 2, 4, 4).unbind(2)
        return self.head(torch.sqrt(even**2 + odd**2 + 1e-4).flatten(1))


@kind("front ends", "scattering (two layers of moduli)")
class Scattering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", gabor_bank())
        self.head = nn.Linear(4 * 4 + 4, CLASSES)

    def moduli(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        waves = F.conv2d(x.reshape(b * c, 1, h, w), self.bank, stride=2, padding=2)
        even, odd = waves[:, 0::2], waves[:, 1::2]
        found = torch.sqrt(even.square() + odd.square() + 1e-3)
        return found.reshape(b, c * 4, *found.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        first = self.moduli(x.mean(1, keepdim=True))
        second = self.moduli(first)
        return self.head(torch.cat([first.mean((2, 3)), second.mean((2, 3))], 1))


@kind("front ends", "discrete cosine transform of blocks")
class Cosines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        k = torch.arange(4.0)
        basis = torch.cos(math.pi * (2 * k[None] + 1) * k[:, None] / 8) / 2
        self.register_buffer("basis", basis)
        self.conv, self.head = nn.Conv2d(48, 8, 1), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unfold(2, 4, 4).unfold(3, 4, 4)
        found = torch.einsum("ij,bchwjk,lk->bcilhw", self.basis, blocks, self.basis)
        return self.head(F.relu(self.conv(found.flatten(1, 3))).flatten(1))


@kind("front ends", "amplitudes of frequencies (rfft2, abs)")
class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.rfft2(x, norm="ortho").abs().flatten(1))


@kind("front ends", "Sobel edges")
class Sobel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        gx = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
        self.register_buffer("filters", torch.stack([gx, gx.T])[:, None] / 8)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv2d(x.mean(1, keepdim=True), self.filters)
        return self.head((h.pow(2).sum(1) + 1e-6).sqrt().flatten(1))


@kind("front ends", "other colours (YCbCr)")
class Colours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = [[0.299, 0.587, 0.114], [-0.169, -0.331, 0.5], [0.5, -0.419, -0.081]]
        self.register_buffer("matrix", torch.tensor(rows))
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("dc,bchw->bdhw", self.matrix, x) + 0.5
        return self.head(F.relu(self.conv(h)).mean((2, 3)))


@kind("front ends", "gamma correction and contrast")
def gamma() -> nn.Module:
    return headed(
        Lambda(lambda x: (x + 0.01).pow(1 / 2.2)),
        Lambda(torch.log1p),
        nn.Conv2d(3, 6, 3, 2),
        nn.ReLU(),
    )


@kind("front ends", "cropped and padded input")
def cropped() -> nn.Module:
    return headed(
        Lambda(lambda x: F.pad(x[:, :, 1:-1, 1:-1], (2, 2, 2, 2))), nn.Conv2d(3, 6, 3, 2), nn.ReLU()
    )


@kind("front ends", "thermometer code (jumps)")
class Thermometer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.linspace(0.1, 0.9, 4).view(1, 1, 4, 1, 1))
        self.conv, self.head = nn.Conv2d(12, 8, 3, 2), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        code = (x.unsqueeze(2) > self.levels).to(x.dtype).flatten(1, 2)
        return self.head(F.relu(self.conv(code)).mean((2, 3)))


@kind("front ends", "JPEG-like rounding (jumps)")
def rounded() -> nn.Module:
    return headed(Lambda(lambda x: torch.round(x * 16) / 16), nn.Conv2d(3, 6, 3, 2), nn.ReLU())
