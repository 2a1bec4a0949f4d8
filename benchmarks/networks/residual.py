"""Residual networks and what grew out of them: gates of channels, ConvNeXt, invertible blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.convolutional import Squeeze
from benchmarks.networks.kinds import CLASSES, Residual, headed, kind, pooled, unit


class Basic(nn.Module):
    """The block of ResNet v1."""

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = unit(inside, out, stride=stride), unit(out, out, act=None)
        same = stride == 1 and inside == out
        self.skip = nn.Identity() if same else unit(inside, out, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.skip(x))


class PreActivated(nn.Module):
    """The block of ResNet v2."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(self.drop(F.relu(self.norm2(h))))


class Bottleneck(nn.Module):
    def __init__(self, width: int, groups: int = 1, gate: nn.Module | None = None) -> None:
        super().__init__()
        half = width // 2
        middle = unit(width, half, 1), unit(half, half, 3, groups=groups)
        self.body = nn.Sequential(
            *middle, unit(half, width, 1, act=None), *([gate] if gate else [])
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += x
        return F.relu(out, inplace=True)


@kind("residual", "ResNet v1 (basic blocks)")
def resnet() -> nn.Module:
    return pooled(unit(3, 6), Basic(6, 8, 2), Basic(8, 8), Basic(8, 12, 2))


@kind("residual", "ResNet v2 (pre-activated)")
def resnet2() -> nn.Module:
    return pooled(
        nn.Conv2d(3, 8, 3, 2, 1), PreActivated(8), PreActivated(8), nn.BatchNorm2d(8), nn.ReLU()
    )


@kind("residual", "ResNet (bottlenecks)")
def bottlenecks() -> nn.Module:
    return pooled(unit(3, 8, stride=2), Bottleneck(8), Bottleneck(8))


@kind("residual", "Wide ResNet (dropout)")
def wide() -> nn.Module:
    return pooled(nn.Conv2d(3, 16, 3, 2, 1), PreActivated(16, 0.3), nn.BatchNorm2d(16), nn.ReLU())


@kind("residual", "ResNeXt (grouped bottlenecks)")
def resnext() -> nn.Module:
    return pooled(unit(3, 16, stride=2), Bottleneck(16, groups=4))


@kind("residual", "ResNet-D (average pooling in the shortcut)")
class ResNetD(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = unit(3, 6), nn.Sequential(unit(6, 8, stride=2), unit(8, 8, act=None))
        self.skip = nn.Sequential(
            nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), unit(6, 8, 1, act=None)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(F.relu(self.body(h) + self.skip(h)).mean((2, 3)))


@kind("residual", "SE-ResNet (squeeze and excitation)")
def se() -> nn.Module:
    return pooled(unit(3, 8, stride=2), Bottleneck(8, gate=Squeeze(8, nn.ReLU(), nn.Sigmoid())))


class EfficientChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(x, 1)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return x * torch.sigmoid(y).expand_as(x)


@kind("residual", "ECA-ResNet (efficient channel attention)")
def eca() -> nn.Module:
    return pooled(unit(3, 8, stride=2), Bottleneck(8, gate=EfficientChannel()))


class BlockAttention(nn.Module):
    """Gates by means and maxima, first of channels, then of places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, width))
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3))))
        x = x * gate[:, :, None, None]
        seen = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return x * torch.sigmoid(self.conv(seen))


@kind("residual", "CBAM-ResNet")
def cbam() -> nn.Module:
    return pooled(unit(3, 6, stride=2), Bottleneck(6, gate=BlockAttention(6)))


class SelectiveKernel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.five = unit(width, width, 3), unit(width, width, 5)
        self.squeeze, self.select = nn.Linear(width, 4), nn.Linear(4, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.stack([self.three(x), self.five(x)], 1)
        code = F.relu(self.squeeze(parts.sum(1).mean((2, 3))))
        share = self.select(code).view(-1, 2, x.shape[1]).softmax(1)
        return (parts * share[..., None, None]).sum(1)


@kind("residual", "SKNet (selective kernels)")
def sknet() -> nn.Module:
    return pooled(unit(3, 6, stride=2), SelectiveKernel(6))


class GlobalContext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask = nn.Conv2d(width, 1, 1)
        self.body = nn.Sequential(
            nn.Linear(width, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        share = self.mask(x).flatten(2).softmax(-1)
        context = torch.einsum("bcn,bkn->bc", x.flatten(2), share)
        return x + self.body(context)[:, :, None, None]


@kind("residual", "GCNet (global context)")
def gcnet() -> nn.Module:
    return pooled(unit(3, 6, stride=2), GlobalContext(6))


class RepBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.one = unit(width, width, 3, act=None), unit(width, width, 1, act=None)
        self.same = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.three(x) + self.one(x) + self.same(x))


@kind("residual", "RepVGG (three branches)")
def repvgg() -> nn.Module:
    return pooled(unit(3, 8, stride=2), RepBlock(8), RepBlock(8))


@kind("residual", "Res2Net (scales within a block)")
class Res2Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 12, stride=2)
        self.convs = nn.ModuleList(unit(4, 4) for _ in range(2))
        self.out, self.head = unit(12, 12, 1, act=None), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        parts = list(torch.split(h, 4, 1))
        for k, conv in enumerate(self.convs):
            parts[k + 1] = conv(parts[k + 1] + parts[k])
        return self.head(F.relu(h + self.out(torch.cat(parts, 1))).mean((2, 3)))


@kind("residual", "Fixup ResNet (scalar biases, no norms)")
class Fixup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = (
            nn.Conv2d(a, 8, 3, s, 1) for a, s in ((3, 2), (8, 1), (8, 1))
        )
        self.bias = nn.ParameterList([nn.Parameter(0.1 * torch.randn(1)) for _ in range(4)])
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        inner = F.relu(self.one(h + self.bias[0]) + self.bias[1])
        h = F.relu(h + self.two(inner + self.bias[2]) * self.scale + self.bias[3])
        return self.head(h.mean((2, 3)))


class StochasticDepth(nn.Module):
    def __init__(self, body: nn.Module, survives: float) -> None:
        super().__init__()
        self.body, self.survives = body, survives

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.survives * self.body(x)
        keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) < self.survives
        return x + keep * self.body(x)


@kind("residual", "stochastic depth")
def stochastic_depth() -> nn.Module:
    blocks = (
        StochasticDepth(nn.Sequential(unit(8, 8), nn.Conv2d(8, 8, 3, padding=1)), 0.8)
        for _ in range(2)
    )
    return pooled(unit(3, 8, stride=2), *blocks)


class ChannelsLast(nn.Module):
    """Layer normalisation over channels of a map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.scale * self.down(F.gelu(self.up(self.norm(h))))
        return x + h.permute(0, 3, 1, 2)


@kind("residual", "ConvNeXt")
def convnext() -> nn.Module:
    return pooled(nn.Conv2d(3, 6, 2, 2), ChannelsLast(6), NextBlock(6))


class ResponseNorm(nn.Module):
    """Global response normalisation of ConvNeXt v2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.randn(1, width, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        return self.gamma * (x * size / (size.mean(1, keepdim=True) + 1e-6)) + self.beta + x


@kind("residual", "ConvNeXt v2 (global response norm)")
def convnext2() -> nn.Module:
    body = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 12, 1), nn.GELU(), ResponseNorm(12)
    return pooled(nn.Conv2d(3, 6, 2, 2), Residual(*body, nn.Conv2d(12, 6, 1)))


@kind("residual", "ConvMixer")
def convmixer() -> nn.Module:
    return pooled(
        nn.Conv2d(3, 8, 2, 2), nn.GELU(), nn.BatchNorm2d(8),
        Residual(nn.Conv2d(8, 8, 3, groups=8, padding="same"), nn.GELU(), nn.BatchNorm2d(8)),
        nn.Conv2d(8, 8, 1), nn.GELU(), nn.BatchNorm2d(8),
    )  # fmt: skip


# ---- several scales


@kind("several scales", "U-Net with a classifier")
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = unit(3, 4), unit(4, 8)
        self.up, self.merge = nn.ConvTranspose2d(8, 4, 2, 2), unit(8, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        return self.head(self.merge(torch.cat([self.up(coarse), fine], 1)).mean((2, 3)))


@kind("several scales", "feature pyramid")
class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = unit(3, 6, stride=2), unit(6, 8, stride=2)
        self.side1, self.side2 = nn.Conv2d(6, 6, 1), nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.one(x)
        top = self.side2(self.two(fine))
        merged = self.side1(fine) + F.interpolate(top, size=fine.shape[-2:], mode="nearest")
        return self.head(torch.cat([merged.mean((2, 3)), top.amax((2, 3))], 1))


@kind("several scales", "hourglass")
class Hourglass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.low1, self.low2 = unit(3, 6, stride=2), unit(6, 6), unit(6, 6)
        self.skip, self.head = unit(6, 6), nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        low = self.low2(self.low1(F.max_pool2d(h, 2)))
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=True)
        return self.head((self.skip(h) + up).flatten(1))


@kind("several scales", "HRNet (two resolutions side by side)")
class HighResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = unit(3, 4, stride=2), unit(3, 6, stride=4)
        self.down, self.up = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fine(x), self.coarse(x)
        a, b = F.relu(a + F.interpolate(self.up(b), scale_factor=2.0)), F.relu(b + self.down(a))
        return self.head(torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1))


@kind("several scales", "spatial pyramid pooling")
class PyramidPooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 14, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x))
        levels = [F.adaptive_max_pool2d(h, k).flatten(1) for k in (1, 2, 3)]
        return self.head(torch.cat(levels, 1))


@kind("several scales", "atrous pyramid (ASPP)")
class Atrous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 6, stride=2)
        self.rates = nn.ModuleList(nn.Conv2d(6, 4, 3, padding=r, dilation=r) for r in (1, 2, 3))
        self.head = nn.Linear(18, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        image = F.interpolate(h.mean((2, 3), keepdim=True), size=h.shape[2:], mode="bilinear")
        return self.head(F.relu(torch.cat([image, *(c(h) for c in self.rates)], 1)).mean((2, 3)))


@kind("several scales", "exits at several depths, averaged")
class Exits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([unit(3, 6, stride=2), unit(6, 6), unit(6, 6)])
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], CLASSES, device=x.device, dtype=x.dtype)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            out = out + head(x.mean((2, 3)))
        return out / 3


# ---- invertible blocks and differential equations


class Reversible(nn.Module):
    def __init__(self, half: int) -> None:
        super().__init__()
        self.f, self.g = unit(half, half), unit(half, half)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.chunk(x, 2, dim=1)
        a = a + self.f(b)
        return torch.cat([a, b + self.g(a)], dim=1)


@kind("flows and equations", "RevNet (additive coupling)")
def revnet() -> nn.Module:
    return pooled(unit(3, 8, stride=2), Reversible(4), Reversible(4))


@kind("flows and equations", "affine coupling (RealNVP)")
class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 16), nn.ReLU(), nn.Linear(16, 192)) for _ in range(2)
        )
        self.head = nn.Linear(192, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.flatten(1).chunk(2, 1)
        for net in self.nets:
            scale, shift = net(a).chunk(2, 1)
            a, b = b * torch.exp(torch.tanh(scale)) + shift, a
        return self.head(torch.cat([a, b], 1))


@kind("flows and equations", "neural ODE (eight Euler steps)")
class Euler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.field, self.head = (
            nn.Linear(192, 12),
            nn.Linear(13, 12),
            nn.Linear(12, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h, steps = self.stem(x.flatten(1)), 8
        for k in range(steps):
            time = torch.full_like(h[:, :1], k / steps)
            h = h + torch.tanh(self.field(torch.cat([h, time], 1))) / steps
        return self.head(h)


@kind("flows and equations", "neural ODE (Runge-Kutta)")
class RungeKutta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(192, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def slope(self, h: Tensor) -> Tensor:
        return self.b(F.softplus(self.a(h)))

    def forward(self, x: Tensor) -> Tensor:
        h, step = self.stem(x.flatten(1)), 0.5
        for _ in range(2):
            one = self.slope(h)
            two = self.slope(h + step / 2 * one)
            three = self.slope(h + step / 2 * two)
            h = h + step / 6 * (one + 2 * two + 2 * three + self.slope(h + step * three))
        return self.head(h)


@kind("flows and equations", "deep equilibrium (unrolled)")
class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject, self.again, self.head = (
            nn.Linear(192, 16),
            nn.Linear(16, 16),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        v = self.inject(x.flatten(1))
        z = torch.zeros_like(v)
        for _ in range(6):
            z = torch.relu(0.5 * self.again(z) + v)
        return self.head(z)


@kind("flows and equations", "deep equilibrium (until it converges)")
class EquilibriumLoop(Equilibrium):
    def forward(self, x: Tensor) -> Tensor:
        v = self.inject(x.flatten(1))
        z, before = torch.relu(v), torch.zeros_like(v)
        while (z - before).abs().max() > 1e-3:
            z, before = torch.relu(0.5 * self.again(z) + v), z
        return self.head(z)


@kind("flows and equations", "Hopfield/ISTA (unrolled soft thresholds)")
class Ista(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dictionary = nn.Parameter(torch.randn(192, 16) / math.sqrt(192))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        z = v @ self.dictionary
        for _ in range(3):
            z = F.softshrink(z + 0.3 * (v - z @ self.dictionary.T) @ self.dictionary, 0.05)
        return self.head(z)


@kind("residual", "weights shared by blocks (recurrent ResNet)")
def shared() -> nn.Module:
    block = Basic(6, 6)
    return headed(unit(3, 6, stride=2), block, block, block)
