"""Convolutional networks before residual sums: classic ones, inception, mobile, kinds of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.kinds import CLASSES, Lambda, headed, kind, pooled, unit


@kind("classic", "LeNet-5 (tanh, average pooling)", channels=1)
def lenet() -> nn.Module:
    return headed(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), channels=1,
    )  # fmt: skip


@kind("classic", "LeNet (ReLU, max pooling)", channels=1)
class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 12, 3)
        self.drop, self.fc1, self.fc2 = nn.Dropout(0.5), nn.Linear(12, 20), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc2(self.drop(F.relu(self.fc1(x)))), dim=1)


@kind("classic", "AlexNet-like (local response norm, overlapping pools)")
def alexnet() -> nn.Module:
    return headed(
        nn.Conv2d(3, 8, 5, 1, 2), nn.ReLU(inplace=True), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Dropout(), nn.Linear(32, 24), nn.ReLU(inplace=True),
    )  # fmt: skip


@kind("classic", "VGG-like")
def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inside = 3
    for out in (6, "M", 8, 8, "M"):
        if out == "M":
            layers += [nn.MaxPool2d(2, 2)]
        else:
            assert isinstance(out, int)
            layers += [nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True)]
            inside = out
    return headed(*layers, nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Dropout())


@kind("classic", "network in network")
def nin() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, CLASSES, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


@kind("classic", "all convolutional (strides instead of pools)")
def all_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 10, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(10, CLASSES, 1), Lambda(lambda h: h.mean([2, 3])),
    )  # fmt: skip


@kind("classic", "paper's network of Wong and Kolter", channels=1)
def small() -> nn.Module:
    return headed(
        nn.Conv2d(1, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 4, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32, 20), nn.ReLU(), channels=1,
    )  # fmt: skip


class Fire(nn.Module):
    def __init__(self, inside: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inside, squeeze, 1)
        self.one, self.three = (
            nn.Conv2d(squeeze, expand, 1),
            nn.Conv2d(squeeze, expand, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x), inplace=True)
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


@kind("branches", "SqueezeNet (fire modules)")
def squeezenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), Fire(8, 4, 6), nn.MaxPool2d(2, ceil_mode=True),
        Fire(12, 4, 6), nn.Conv2d(12, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Inception(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.one = unit(inside, 4, 1)
        self.three = nn.Sequential(unit(inside, 3, 1), unit(3, 4))
        self.five = nn.Sequential(unit(inside, 2, 1), unit(2, 4, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(inside, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.children()], dim=1)


@kind("branches", "Inception")
def inception() -> nn.Module:
    return pooled(unit(3, 8, stride=2), Inception(8))


@kind("branches", "DenseNet")
class DenseNet(nn.Module):
    def __init__(self, growth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        widths = [8 + growth * k for k in range(3)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(), nn.Conv2d(w, growth, 3, padding=1))
            for w in widths
        )
        width = 8 + 3 * growth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 1), nn.AvgPool2d(2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        h = F.relu(self.transition(torch.cat(found, 1)))
        return self.head(F.adaptive_avg_pool2d(h, (1, 1)).view(x.size(0), -1))


class Separable(nn.Sequential):
    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__(unit(inside, inside, 3, stride, inside), unit(inside, out, 1))


@kind("mobile", "MobileNet v1 (depthwise separable)")
def mobilenet() -> nn.Module:
    return pooled(unit(3, 8, stride=2), Separable(8, 12), Separable(12, 16, 2))


@kind("branches", "Xception")
class Xception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 6, stride=2)
        self.body = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 12, 1), nn.BatchNorm2d(12),
            nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 12, 1),
            nn.BatchNorm2d(12), nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.skip, self.head = unit(6, 12, 1, 2, act=None), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((self.body(x) + self.skip(x)).relu().mean(dim=(2, 3)))


class Squeeze(nn.Module):
    """Channels times a gate that looks at the means of all."""

    def __init__(self, width: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = (
            nn.Conv2d(width, max(2, width // 4), 1),
            nn.Conv2d(max(2, width // 4), width, 1),
        )
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.act(self.down(self.pool(x)))))


class Inverted(nn.Module):
    """Widen, convolve each channel, narrow, with a residual sum."""

    def __init__(
        self, inside: int, out: int, stride: int, act: type[nn.Module], squeeze: nn.Module | None
    ) -> None:
        super().__init__()
        wide = 3 * inside
        middle = [squeeze] if squeeze is not None else []
        self.body = nn.Sequential(
            unit(inside, wide, 1, act=act), unit(wide, wide, 3, stride, wide, act), *middle,
            unit(wide, out, 1, act=None),
        )  # fmt: skip
        self.plain = stride == 1 and inside == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.plain else self.body(x)


@kind("mobile", "MobileNet v2 (inverted residuals, ReLU6)")
def mobilenet2() -> nn.Module:
    blocks = Inverted(6, 6, 1, nn.ReLU6, None), Inverted(6, 8, 2, nn.ReLU6, None)
    return pooled(unit(3, 6, stride=2, act=nn.ReLU6), *blocks, unit(8, 16, 1, act=nn.ReLU6))


@kind("mobile", "MobileNet v3 (hard swish, squeeze and excitation)")
def mobilenet3() -> nn.Module:
    squeeze = Squeeze(18, nn.ReLU(), nn.Hardsigmoid())
    return pooled(
        unit(3, 6, stride=2, act=nn.Hardswish), Inverted(6, 6, 1, nn.ReLU, squeeze),
        Inverted(6, 8, 2, nn.Hardswish, None),
    )  # fmt: skip


@kind("mobile", "EfficientNet (MBConv with SiLU)")
def efficientnet() -> nn.Module:
    squeeze = Squeeze(18, nn.SiLU(), nn.Sigmoid())
    return pooled(
        unit(3, 6, stride=2, act=nn.SiLU),
        Inverted(6, 6, 1, nn.SiLU, squeeze),
        unit(6, 16, 1, act=nn.SiLU),
    )


def shuffled(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.size()
    return x.view(b, groups, c // groups, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


@kind("mobile", "ShuffleNet v1 (grouped, channels shuffled)")
def shufflenet() -> nn.Module:
    return pooled(
        unit(3, 8, stride=2), unit(8, 8, 1, groups=2), Lambda(lambda h: shuffled(h, 2)),
        unit(8, 8, 3, groups=8, act=None), unit(8, 8, 1, groups=2),
    )  # fmt: skip


@kind("mobile", "ShuffleNet v2 (split, shuffled)")
class ShuffleNet2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 8, stride=2)
        self.branch = nn.Sequential(unit(4, 4, 1), unit(4, 4, 3, groups=4, act=None), unit(4, 4, 1))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for_later, now = self.stem(x).chunk(2, dim=1)
        h = shuffled(torch.cat((for_later, self.branch(now)), dim=1), 2)
        return self.head(h.mean([2, 3]))


@kind("mobile", "GhostNet")
class Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 6, stride=2)
        self.main, self.cheap = unit(6, 6, 1), unit(6, 6, 3, groups=6)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.main(self.stem(x))
        h = torch.cat([h, self.cheap(h)], dim=1)[:, :10, :, :]
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


# ---- kinds of layers


def edges(mode: str) -> nn.Module:
    return pooled(nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode), nn.ReLU())


def resized(front: nn.Module, channels: int = 3, stride: int = 1) -> nn.Module:
    return headed(front, nn.Conv2d(channels, 6, 3, stride), nn.ReLU())


LAYERS = {
    "dilated convolutions": lambda: pooled(
        nn.Conv2d(3, 8, 3, padding=2, dilation=2), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=4, dilation=4), nn.ReLU(),
    ),
    "grouped convolutions": lambda: pooled(
        nn.Conv2d(3, 12, 3, 2), nn.ReLU(), nn.Conv2d(12, 12, 3, groups=4), nn.ReLU()
    ),
    "reflected edges": lambda: edges("reflect"),
    "replicated edges": lambda: edges("replicate"),
    "circular edges": lambda: edges("circular"),
    "transposed convolution (autoencoder's classifier)": lambda: pooled(
        nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 6, 2, 2), nn.ReLU(),
        nn.Conv2d(6, 8, 3, 2), nn.ReLU(),
    ),
    "pixel shuffle": lambda: headed(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(2, 4, 3, 2), nn.ReLU()
    ),
    "pixels to channels (space to depth)": lambda: resized(nn.PixelUnshuffle(2), 12),
    "upsampling, nearest": lambda: resized(nn.Upsample(scale_factor=2), stride=4),
    "upsampling, bilinear": lambda: resized(nn.Upsample(scale_factor=2, mode="bilinear"), stride=4),
    "resized input, antialiased": lambda: resized(
        Lambda(lambda x: F.interpolate(x, size=(5, 5), mode="bilinear", antialias=True))
    ),
    "resized input, bicubic": lambda: resized(
        Lambda(lambda x: F.interpolate(x, size=(6, 6), mode="bicubic"))
    ),
    "convolutions of rows (1d)": lambda: headed(
        Lambda(lambda x: x.flatten(1, 2)), nn.Conv1d(24, 12, 3, padding=1), nn.ReLU(),
        nn.MaxPool1d(2), nn.Conv1d(12, 8, 2), nn.ReLU(),
    ),
    "three-dimensional convolution": lambda: headed(
        Lambda(lambda x: x.unsqueeze(1)), nn.Conv3d(1, 4, (2, 3, 3), (1, 2, 2)), nn.ReLU(),
        nn.AvgPool3d((1, 2, 2), 1),
    ),
    "unfolded patches and a matrix": lambda: headed(
        nn.Unfold(2, stride=2), nn.Conv1d(12, 8, 1), nn.ReLU()
    ),
}  # fmt: skip

for _name, _make in LAYERS.items():
    kind("kinds of layers", _name)(_make)


@kind("kinds of layers", "coordinates as channels (CoordConv)")
class CoordConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(5, 8, 3, 2), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h, device=x.device).view(1, 1, h, 1).expand(b, 1, h, w)
        columns = torch.linspace(-1, 1, w, device=x.device).view(1, 1, 1, w).expand(b, 1, h, w)
        return self.head(F.relu(self.conv(torch.cat([x, rows, columns], 1))).mean((2, 3)))


@kind("kinds of layers", "rotated filters (p4 group convolution)")
class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 3, 3, 3) / 5), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        turned = [F.conv2d(x, torch.rot90(self.weight, k, (2, 3)), stride=2) for k in range(4)]
        return self.head(torch.stack(turned, 0).amax(0).relu().mean((2, 3)))


@kind("kinds of layers", "mixture of kernels (dynamic convolution)")
class DynamicConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(3, 2), nn.Linear(6, CLASSES)
        self.convs = nn.ModuleList(nn.Conv2d(3, 6, 3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        share = F.softmax(self.router(x.mean((2, 3))), 1)
        parts = torch.stack([conv(x) for conv in self.convs], 1)
        h = (share[:, :, None, None, None] * parts).sum(1)
        return self.head(F.relu(h).mean((2, 3)))


@kind("kinds of layers", "kernels weighted per image (CondConv, grouped trick)")
class CondConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(3, 2), nn.Linear(6, CLASSES)
        self.weight = nn.Parameter(torch.randn(2, 6, 3, 3, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        share = torch.sigmoid(self.router(x.mean((2, 3))))
        weight = torch.einsum("be,eoihw->boihw", share, self.weight).reshape(b * 6, 3, 3, 3)
        h = F.conv2d(x.reshape(1, b * 3, 8, 8), weight, groups=b, stride=2)
        return self.head(F.relu(h.view(b, 6, 3, 3)).mean((2, 3)))


@kind("kinds of layers", "spatial transformer (grid_sample)")
class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where, self.conv, self.head = (
            nn.Linear(192, 6),
            nn.Conv2d(3, 8, 3, 2),
            nn.Linear(72, CLASSES),
        )
        nn.init.zeros_(self.where.weight)
        self.where.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.where(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        seen = F.grid_sample(x, grid, align_corners=False)
        return self.head(F.relu(self.conv(seen)).flatten(1))


@kind("kinds of layers", "fixed warp (grid_sample at constant places)")
class FixedWarp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        turn = torch.tensor([[[0.9, 0.2, 0.0], [-0.2, 0.9, 0.0]]])
        self.register_buffer("grid", F.affine_grid(turn, [1, 3, 8, 8], align_corners=False))
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(72, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.grid_sample(x, self.grid.expand(len(x), -1, -1, -1), align_corners=False)
        return self.head(F.relu(self.conv(seen)).flatten(1))


@kind("kinds of layers", "deformable sampling by gathered corners")
class Deformable(nn.Module):
    """Reads pixels at places that depend on the image, rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.head = nn.Linear(192, 8), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.sigmoid(self.offset(x.flatten(1))) * 63
        index = place.floor().long()[:, None].expand(-1, 3, -1)
        return self.head(x.flatten(2).gather(2, index).flatten(1))
