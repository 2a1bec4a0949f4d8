"""Transformers, other mixtures of places, and gates between them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.kinds import CLASSES, Lambda, Residual, kind

WIDTH, PLACES = 8, 16


class Patches(nn.Module):
    """Patches of 2 x 2 as tokens of ``WIDTH`` numbers."""

    def __init__(self, places: bool = True) -> None:
        super().__init__()
        self.map = nn.Conv2d(3, WIDTH, 2, 2)
        self.places = nn.Parameter(0.1 * torch.randn(1, PLACES, WIDTH)) if places else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.map(x).flatten(2).transpose(1, 2)
        return h if self.places is None else h + self.places


class Attention(nn.Module):
    """Attention with ``heads``; subclasses change how scores become shares."""

    def __init__(self, heads: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, w = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        h = self.mixed(*qkv.unbind(0))
        return self.out(h.transpose(1, 2).reshape(b, n, w))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


class Fused(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Cosine(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (8 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(
            -1
        ) @ v


class Biased(Attention):
    """A bias for each difference of two places, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        row, column = torch.arange(PLACES) // 4, torch.arange(PLACES) % 4
        gap = (row[:, None] - row + 3) * 7 + column[:, None] - column + 3
        self.register_buffer("gap", gap)
        self.table = nn.Parameter(0.1 * torch.randn(49, 2))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.table[self.gap.view(-1)].view(PLACES, PLACES, 2).permute(2, 0, 1)
        return (q @ k.transpose(-2, -1) / 2 + bias).softmax(-1) @ v


class Causal(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool), 1)
        return (q @ k.transpose(-2, -1)).masked_fill(mask, float("-inf")).softmax(-1) @ v


class LinearAttention(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        share = q @ k.sum(-2).unsqueeze(-1)
        return (q @ (k.transpose(-2, -1) @ v)) / share


class ReluAttention(Attention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.relu(q @ k.transpose(-2, -1)) @ v / PLACES


class SoftmaxOfChannels(Attention):
    """Efficient attention: softmax of queries and keys apart (also XCiT's direction)."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


class Rotary(Attention):
    """Rotates queries and keys by angles that grow with the place."""

    def turned(self, v: Tensor) -> Tensor:
        angle = torch.arange(v.shape[-2], dtype=v.dtype)[:, None] * torch.tensor([1.0, 0.1])
        a, b = v.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().mixed(self.turned(q), self.turned(k), v)


def feed_forward(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def transformer(mixer: nn.Module, depth: int = 1) -> nn.Module:
    """Patches, blocks with norms before, the mean of the tokens, a head."""
    blocks: list[nn.Module] = []
    for _ in range(depth):
        blocks += [
            Residual(nn.LayerNorm(WIDTH), mixer),
            Residual(nn.LayerNorm(WIDTH), feed_forward()),
        ]
    end = nn.LayerNorm(WIDTH), Lambda(lambda h: h.mean(1)), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(Patches(), *blocks, *end)


MIXERS = {
    "ViT, mean of the tokens": Attention,
    "attention by F.scaled_dot_product_attention": Fused,
    "cosine attention": Cosine,
    "relative position bias": Biased,
    "causal mask": Causal,
    "linear attention": LinearAttention,
    "ReLU attention": ReluAttention,
    "efficient attention": SoftmaxOfChannels,
    "rotary positions": Rotary,
}

for _name, _mixer in MIXERS.items():
    kind("transformers", _name)(lambda make=_mixer: transformer(make()))


@kind("transformers", "ViT, two blocks")
def two_blocks() -> nn.Module:
    return transformer(Attention(), 2)


@kind("transformers", "ViT with a class token")
class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = Patches(), nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.feed = Attention(), feed_forward()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], dim=1)
        h = h + self.attend(self.one(h))
        h = h + self.feed(self.two(h))
        return self.head(h[:, 0])


@kind("transformers", "norms after the sums (post-norm)")
class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attend, self.feed = Patches(), Attention(), feed_forward()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        h = self.one(h + self.attend(h))
        return self.head(self.two(h + self.feed(h)).mean(1))


@kind("transformers", "CaiT (layer scale, class attention)")
class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attend, self.feed = Patches(), Attention(), feed_forward()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.scales = nn.ParameterList([nn.Parameter(0.1 * torch.ones(WIDTH)) for _ in range(2)])
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        h = h + self.scales[0] * self.attend(self.norms[0](h))
        h = h + self.scales[1] * self.feed(self.norms[1](h))
        h = self.norms[2](h)
        token = self.token.expand(len(h), -1, -1)
        return self.head(self.cross(token, h, h)[0][:, 0])


class Windows(nn.Module):
    """Attention inside windows of 2 x 2 tokens, shifted or not."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.attend = shift, Attention()

    def forward(self, x: Tensor) -> Tensor:
        b, _, w = x.shape
        h = torch.roll(x.view(b, 4, 4, w), (-self.shift, -self.shift), (1, 2))
        h = h.view(b, 2, 2, 2, 2, w).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, w)
        h = self.attend(h).view(b, 2, 2, 2, 2, w).permute(0, 1, 3, 2, 4, 5).reshape(b, 4, 4, w)
        return torch.roll(h, (self.shift, self.shift), (1, 2)).view(b, PLACES, w)


@kind("transformers", "Swin (shifted windows, merged patches)")
class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.plain, self.moved = Patches(), Windows(0), Windows(1)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.merge, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        h = h + self.plain(self.norms[0](h))
        h = (h + self.moved(self.norms[1](h))).view(-1, 4, 4, WIDTH)
        parts = h[:, 0::2, 0::2], h[:, 1::2, 0::2], h[:, 0::2, 1::2], h[:, 1::2, 1::2]
        return self.head(self.merge(torch.cat(parts, -1)).flatten(1, 2).mean(1))


@kind("transformers", "axial attention")
class Axial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.rows, self.columns = Patches(), Attention(), Attention()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).view(-1, 4, 4, WIDTH)
        h = h + self.rows(h.reshape(-1, 4, WIDTH)).view_as(h)
        turned = h.transpose(1, 2)
        h = turned + self.columns(turned.reshape(-1, 4, WIDTH)).view_as(turned)
        return self.head(h.mean((1, 2)))


@kind("transformers", "pyramid vision transformer (fewer keys)")
class Reduced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.reduce = Patches(), nn.Conv2d(WIDTH, WIDTH, 2, 2)
        self.q, self.kv, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        small = self.reduce(h.transpose(1, 2).reshape(-1, WIDTH, 4, 4)).flatten(2).transpose(1, 2)
        k, v = self.kv(small).chunk(2, -1)
        share = torch.softmax(self.q(h) @ k.mT / math.sqrt(WIDTH), -1)
        return self.head((h + share @ v).mean(1))


@kind("transformers", "Perceiver (latent queries)")
class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.latents = Patches(), nn.Parameter(torch.randn(1, 4, WIDTH))
        self.cross = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.norm, self.feed = nn.LayerNorm(WIDTH), feed_forward()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.patches(x), self.latents.repeat(x.shape[0], 1, 1)
        z = z + self.cross(self.norm(z), h, h, need_weights=False)[0]
        return self.head((z + self.feed(z)).mean(1))


@kind("transformers", "nn.TransformerEncoder, norm first")
class Encoder(nn.Module):
    norm_first = True

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=self.norm_first
        )
        self.patches, self.head = Patches(), nn.Linear(WIDTH, CLASSES)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x)).mean(1))


@kind("transformers", "nn.TransformerEncoder as it comes (ReLU, norm last)")
class PlainEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = Patches(), nn.Linear(WIDTH, CLASSES)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16), 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).permute(1, 0, 2)
        return self.head(self.encoder(h).mean(0))


@kind("transformers", "convolutions as queries (CvT)")
class ConvolutionalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.q, self.k, self.v = (nn.Conv2d(WIDTH, WIDTH, 3, s, 1, groups=WIDTH) for s in (1, 2, 2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        q, k, v = (part(h).flatten(2) for part in (self.q, self.k, self.v))
        share = torch.einsum("bcn,bcm->bnm", q, k).div(WIDTH**0.5).softmax(2)
        return self.head((h.flatten(2) + torch.einsum("bnm,bcm->bcn", share, v)).mean(2))


# ---- mixtures of places without attention


class TokenMixer(nn.Module):
    """An MLP over the places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = feed_forward(PLACES)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.transpose(1, 2)).transpose(1, 2)


@kind("mixers", "MLP-Mixer")
def mixer() -> nn.Module:
    return transformer(TokenMixer())


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, self.scale, x)


@kind("mixers", "ResMLP")
def resmlp() -> nn.Module:
    across = Residual(
        Affine(),
        Lambda(lambda h: h.transpose(1, 2)),
        nn.Linear(PLACES, PLACES),
        Lambda(lambda h: h.transpose(1, 2)),
    )
    end = Residual(Affine(), feed_forward()), Affine(), Lambda(lambda h: h.mean(1))
    return nn.Sequential(Patches(), across, *end, nn.Linear(WIDTH, CLASSES))


class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(PLACES, PLACES, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(x)).chunk(2, dim=-1)
        return self.down(u * self.mix(self.norm(v)))


@kind("mixers", "gMLP (spatial gates)")
def gmlp() -> nn.Module:
    end = nn.LayerNorm(WIDTH), Lambda(lambda h: h.mean(1)), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(Patches(), Residual(nn.LayerNorm(WIDTH), SpatialGate()), *end)


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2).reshape(-1, WIDTH, 4, 4)
        return (self.pool(h) - h).flatten(2).transpose(1, 2)


@kind("mixers", "PoolFormer")
def poolformer() -> nn.Module:
    return transformer(Pool())


@kind("mixers", "FNet (real part of a transform)")
def fnet() -> nn.Module:
    return transformer(Lambda(lambda h: torch.fft.fft(torch.fft.fft(h, dim=-1), dim=-2).real))


class GlobalFilter(nn.Module):
    """Multiplies frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(4, 3, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.rfft2(x.view(-1, 4, 4, WIDTH), dim=(1, 2), norm="ortho")
        h = h * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(h, s=(4, 4), dim=(1, 2), norm="ortho").reshape(-1, PLACES, WIDTH)


@kind("mixers", "GFNet (filters of frequencies)")
def gfnet() -> nn.Module:
    return transformer(GlobalFilter())


@kind("mixers", "shifted channels (S2-MLP, ShiftViT)")
def shifts() -> nn.Module:
    def shifted(h: Tensor) -> Tensor:
        maps = h.view(-1, 4, 4, WIDTH)
        parts = maps.chunk(4, -1)
        moved = [
            torch.roll(p, s, d)
            for p, (s, d) in zip(parts, ((1, 1), (-1, 1), (1, 2), (-1, 2)), strict=True)
        ]
        return torch.cat(moved, -1).reshape(-1, PLACES, WIDTH)

    return transformer(Lambda(shifted))


@kind("mixers", "non-local block")
class NonLocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.theta, self.phi, self.g = (nn.Conv2d(WIDTH, 4, 1) for _ in range(3))
        self.out, self.head = nn.Conv2d(4, WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        theta, phi, g = (part(h).flatten(2) for part in (self.theta, self.phi, self.g))
        share = torch.matmul(theta.transpose(1, 2), phi).softmax(-1)
        mixed = torch.matmul(share, g.transpose(1, 2)).transpose(1, 2).reshape(-1, 4, 4, 4)
        return self.head((h + self.out(mixed)).mean((2, 3)))


@kind("mixers", "external attention (learnt keys)")
class External(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.keys, self.values = Patches(), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        share = self.keys(h).softmax(1)
        share = share / (1e-9 + share.sum(2, keepdim=True))
        return self.head((h + self.values(share)).mean(1))


@kind("mixers", "lambda layers (linear in positions)")
class LambdaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.q, self.k, self.v = Patches(), *(nn.Linear(WIDTH, 4) for _ in range(3))
        self.places, self.head = (
            nn.Parameter(torch.randn(PLACES, PLACES, 4) / 4),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x)
        q, k, v = self.q(h), self.k(h).softmax(1), self.v(h)
        content = torch.einsum("bmk,bmv->bkv", k, v)
        places = torch.einsum("nmk,bmv->bnkv", self.places, v)
        found = torch.einsum("bnk,bkv->bnv", q, content) + torch.einsum("bnk,bnkv->bnv", q, places)
        return self.head(found.mean(1))


@kind("mixers", "convolution by graph neighbours (adjacency)")
class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        row, column = torch.arange(PLACES) // 4, torch.arange(PLACES) % 4
        near = (row[:, None] - row).abs() + (column[:, None] - column).abs() <= 1
        self.register_buffer("adjacency", near.float() / near.sum(1, keepdim=True))
        self.patches, self.a, self.b = Patches(False), nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.adjacency @ self.a(self.patches(x)))
        return (self.adjacency @ self.b(h)).mean(1)


@kind("mixers", "graph attention")
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.map = Patches(False), nn.Linear(WIDTH, 6)
        self.left, self.right, self.head = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.map(self.patches(x))
        score = F.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        return self.head(F.elu(score.softmax(-1) @ h).mean(1))


@kind("mixers", "Deep Sets of pixels")
class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x.flatten(2).transpose(1, 2)).sum(1) / 64)


@kind("mixers", "capsules (dynamic routing)")
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.weight = nn.Parameter(torch.randn(1, 8, CLASSES, 4, 4) / 3)

    def squash(self, s: Tensor) -> Tensor:
        square = (s**2).sum(-1, keepdim=True)
        return square / (1 + square) * s / torch.sqrt(square + 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        u = self.embed(x).flatten(1).view(-1, 8, 1, 1, 4)
        votes = (self.weight * u).sum(-1)  # B, in, out, 4
        logits = torch.zeros(x.shape[0], 8, CLASSES, 1, device=x.device, dtype=x.dtype)
        for _ in range(2):
            v = self.squash((logits.softmax(2) * votes).sum(1, keepdim=True))
            logits = logits + (votes * v).sum(-1, keepdim=True)
        return torch.sqrt((v.squeeze(1) ** 2).sum(-1) + 1e-4)
