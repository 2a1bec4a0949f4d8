"""Masks: what people put before, into or after a network, knowingly or not, and what hides its
gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball import load_model
from wball.model import Model


def _outside(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
    """A step in NumPy, where no gradient follows."""
    return lambda z: torch.from_numpy(np.ascontiguousarray(function(z.detach().cpu().numpy()))).to(
        z
    )


class _Custom(torch.autograd.Function):
    """The identity with a gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wrong = {"reversed": torch.neg, "random": torch.randn_like, "zero": torch.zeros_like}
        return wrong[ctx.kind](gradient), None


class _Wrong(nn.Module):
    """The same inside a network."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, z: Tensor) -> Tensor:
        changed: Tensor = _Custom.apply(z, self.kind)
        return changed


class _Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z)


def _cosines(like: Tensor) -> Tensor:
    k, n = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    matrix = torch.cos(math.pi * (n + 0.5) * k / 8) * math.sqrt(2 / 8)
    matrix[0] /= math.sqrt(2)
    return matrix.to(like)


def _coded(z: Tensor, quality: float, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Blocks of 8 x 8 pixels in cosines, rounded to steps that grow with the frequency, as JPEG
    does."""
    padded = F.pad(z, (2, 2, 2, 2))
    matrix = _cosines(z)
    blocks = padded.unfold(2, 8, 8).unfold(3, 8, 8)
    steps = quality * (
        1 + torch.arange(8, device=z.device)[:, None] + torch.arange(8, device=z.device)
    ).to(z)
    coded = rounding(matrix @ blocks @ matrix.T / steps) * steps
    out = (matrix.T @ coded @ matrix).transpose(3, 4).reshape(padded.shape)
    return out[..., 2:-2, 2:-2].clamp(0, 1)


class _TopK(nn.Module):
    """The largest share of a layer's activations; all others are 0 (k winners take all)."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, z: Tensor) -> Tensor:
        flat = z.flatten(1)
        least = flat.topk(max(1, int(self.share * flat.shape[1])), 1).values[:, -1:]
        return torch.where(flat >= least, flat, torch.zeros_like(flat)).view_as(z)


class _Dropped(nn.Module):
    """Dropout that never stops."""

    def forward(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.3, training=True)


def _instead_of_relu(net: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    changed = copy.deepcopy(net)
    for name, child in list(changed.named_children()):
        if isinstance(child, nn.ReLU):
            setattr(changed, name, nn.Sequential(nn.ReLU(), make()))
    return changed


def _exploding(net: nn.Module) -> Model:
    """A chaotic map moves pixels by a thousandth and their gradients by many powers of ten."""

    def model(z: Tensor) -> Tensor:
        u = 0.1 + 0.8 * z
        for _ in range(60):
            u = 3.99 * u * (1 - u)
        return net(z + 1e-3 * (u - 0.5))

    return model


class _Scripted(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.round(z * 16) / 16


def _median(z: Tensor) -> Tensor:
    parts = F.pad(z, (1, 1, 1, 1), mode="reflect").unfold(2, 3, 1).unfold(3, 3, 1)
    return parts.flatten(-2).median(-1).values


def _dithered(z: Tensor) -> Tensor:
    """Two bits a pixel, with the thresholds of an ordered dither."""
    order = (
        torch.tensor(
            [[0.0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]], device=z.device
        )
        / 16
    )
    return torch.floor(z * 3 + order.repeat(7, 7).to(z) * 0.999) / 3


def _tabled(z: Tensor) -> Tensor:
    """32 levels, looked up in a table."""
    return torch.linspace(0, 1, 32, device=z.device, dtype=z.dtype)[(z * 31).round().long()]


def _in_buckets(z: Tensor) -> Tensor:
    edges = torch.linspace(0, 1, 17, device=z.device, dtype=z.dtype)[1:-1]
    return torch.bucketize(z.contiguous(), edges).to(z) / 15


def _hooked(net: nn.Module) -> Model:
    def model(z: Tensor) -> Tensor:
        h = z * 1.0
        if h.requires_grad:
            h.register_hook(torch.neg)
        return net(h)

    return model


def _resized(net: nn.Module) -> Model:
    """Smaller by up to four pixels, at a random place."""

    def model(z: Tensor) -> Tensor:
        side = int(torch.randint(24, 29, ()))
        left, top = (int(v) for v in torch.randint(0, 29 - side, (2,)))
        small = F.interpolate(z, size=(side, side), mode="bilinear")
        return net(F.pad(small, (left, 28 - side - left, top, 28 - side - top)))

    return model


def _noise_by_content(net: nn.Module) -> Model:
    """Noise that an image's own pixels seed: the same question has the same answer."""

    def model(z: Tensor) -> Tensor:
        seed = (z.detach().double().flatten(1) * torch.arange(1, 785, device=z.device)).sum(
            1, keepdim=True
        )
        noise = torch.sin(1e5 * seed + torch.arange(784, device=z.device).double() ** 2)
        return net(z + 0.1 * noise.view_as(z).to(z))

    return model


def _three(net: nn.Module) -> list[nn.Module]:
    """Three networks that are much alike."""
    nets = [copy.deepcopy(net) for _ in range(3)]
    for k, one in enumerate(nets):
        for p in one.parameters():
            p.data *= 1 + 0.05 * torch.randn(
                p.shape, generator=torch.Generator().manual_seed(k)
            ).to(p)
    return nets


def _vote(net: nn.Module) -> Model:
    nets = _three(net)
    return lambda z: torch.stack([F.one_hot(one(z).argmax(1), 10).to(z) for one in nets]).sum(0)


def _saturated_mean(net: nn.Module) -> Model:
    nets = _three(net)
    return lambda z: torch.stack([(100 * one(z)).softmax(1) for one in nets]).mean(0)


def _of_three(net: nn.Module) -> Model:
    """One of three networks at random."""
    nets = _three(net)
    return lambda z: nets[int(torch.randint(0, 3, ()))](z)


def _with_precision(net: nn.Module, dtype: torch.dtype) -> Model:
    low = copy.deepcopy(net).to(dtype)
    return lambda z: low(z.to(dtype)).to(z)


def _shifted(net: nn.Module) -> Model:
    def model(z: Tensor) -> Tensor:
        across, down = (int(v) for v in torch.randint(-1, 2, (2,)))
        return net(torch.roll(z, (across, down), (2, 3)))

    return model


def _bits(z: Tensor, kept: int) -> Tensor:
    """The highest bits of a pixel's byte."""
    return ((z * 255).round().int() & (256 - 2 ** (8 - kept))).to(z) / 255


def _mantissa(z: Tensor) -> Tensor:
    """Floating-point numbers without the lower 21 bits of their mantissa."""
    return (z.float().contiguous().view(torch.int32) & -(2**21)).view(torch.float32).to(z)


def _one_hot_code(z: Tensor) -> Tensor:
    """Levels as one-hot vectors, and back by a product."""
    return F.one_hot((z * 15).round().long(), 16).to(z) @ torch.linspace(
        0, 1, 16, device=z.device, dtype=z.dtype
    )


def _embedded(z: Tensor) -> Tensor:
    levels = torch.linspace(0, 1, 16, device=z.device, dtype=z.dtype)[:, None]
    return F.embedding((z * 15).round().long(), levels).squeeze(-1)


def _unique(z: Tensor) -> Tensor:
    values, place = torch.unique((z * 16).round(), return_inverse=True)
    return values[place] / 16


def _patches(z: Tensor) -> Tensor:
    """Each block of 2 x 2 pixels becomes the nearest of 81 patterns (vector quantisation)."""
    levels = torch.linspace(0, 1, 3, device=z.device, dtype=z.dtype)
    book = torch.cartesian_prod(levels, levels, levels, levels)
    blocks = F.unfold(z, 2, stride=2).transpose(1, 2)
    nearest = book[torch.cdist(blocks, book[None]).argmin(2)]
    return F.fold(nearest.transpose(1, 2), z.shape[2:], 2, stride=2)


def _bilateral(z: Tensor) -> Tensor:
    """A filter whose weights, with no gradient, depend on how alike neighbours are."""
    parts = F.pad(z, (1, 1, 1, 1), mode="reflect").unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2)
    weights = torch.exp(-50 * (parts - z[..., None]).square()).detach()
    return (weights * parts).sum(-1) / weights.sum(-1)


def _by_hand(z: Tensor) -> Tensor:
    """Pixels as Python numbers."""
    rounded = [round(value * 32) / 32 for value in z.flatten().tolist()]
    return torch.tensor(rounded, dtype=z.dtype, device=z.device).view_as(z)


def _chosen_by_content(net: nn.Module) -> Model:
    """One of three networks, by a hash of the image."""
    nets = _three(net)

    def model(z: Tensor) -> Tensor:
        which = (z.detach().double().flatten(1).sum(1) * 1e4).long() % 3
        return torch.stack([one(z) for one in nets], 1)[
            torch.arange(len(z), device=z.device), which
        ]

    return model


def _unsure_at_random(net: nn.Module) -> Model:
    """Noise on the logits where the two likeliest classes are close."""

    def model(z: Tensor) -> Tensor:
        logits = net(z)
        top = logits.topk(2, 1).values
        close = (top[:, :1] - top[:, 1:] < 3.0).to(z)
        return logits + 3.0 * close * torch.randn_like(logits)

    return model


def _honest_on_bytes(net: nn.Module) -> Model:
    """The right gradient where all pixels are multiples of 1/255, and the opposite one
    elsewhere."""

    def model(z: Tensor) -> Tensor:
        stored = ((z * 255 - (z * 255).round()).abs() < 1e-3).flatten(1).all(1)
        sign = torch.where(stored, 1.0, -1.0).to(z).view(-1, 1, 1, 1)
        return net(z.detach() + sign * (z - z.detach()))

    return model


def _half_reversed(net: nn.Module) -> Model:
    """The opposite gradient on half of the images."""

    def model(z: Tensor) -> Tensor:
        sign = (
            torch.where((z.detach().flatten(1).sum(1) * 10).long() % 2 == 0, 1.0, -1.0)
            .to(z)
            .view(-1, 1, 1, 1)
        )
        return net(z.detach() + sign * (z - z.detach()))

    return model


def _ignoring(net: nn.Module, context: Callable[[], Any]) -> Model:
    def model(z: Tensor) -> Tensor:
        with context():
            return net(z).clone()

    return model


class _Pruned(nn.Module):
    """Activations that survive at random, the large ones more often (stochastic activation
    pruning)."""

    def forward(self, z: Tensor) -> Tensor:
        flat = z.flatten(1)
        share = flat / flat.sum(1, keepdim=True).clamp(min=1e-9)
        kept = 1 - torch.exp(-flat.shape[1] * share)
        drawn = torch.rand_like(flat) < kept
        return (flat * drawn / kept.clamp(min=1e-3)).view_as(z)


def _chosen(scores: Tensor) -> Tensor:
    """One-hot rows, without a softmax, a maximum or its position."""
    return (scores[:, :, None] >= scores[:, None, :]).all(2).to(scores)


def _with_linear_decoy(net: nn.Module) -> Model:
    """A saturated softmax, and a linear function whose gradient says nothing."""
    line = 0.02 * torch.randn(784, 10, generator=torch.Generator().manual_seed(0))

    def model(z: Tensor) -> Tensor:
        decided = (30 * net(z)).unsqueeze(1).softmax(2).squeeze(1)
        return 20 * decided + z.flatten(1) @ line.to(z)

    return model


def _beside_robust(join: Callable[[nn.Module, nn.Module, Tensor], Tensor]) -> Mask:
    """The labels of a network, and the gradient of a robust one."""

    def wrap(net: nn.Module) -> Model:
        robust = load_model("mnist-adversarial-cnn", device=next(net.parameters()).device)
        return lambda z: join(net, robust, z)

    return Mask(wrap)


def _votes(net: nn.Module, robust: nn.Module, z: Tensor) -> Tensor:
    votes = [_chosen(net(share * z)) for share in (1.0, 0.97, 1.03)]
    return torch.stack(votes).sum(0) + 0.5 * robust(z).softmax(1)


def _weak_where(net: nn.Module, robust: nn.Module, z: Tensor, weak: Tensor) -> Tensor:
    return torch.where(weak[:, None], net(z), robust(z))


class _Whole(nn.Module):
    """Rounding before a network and a saturated softmax behind it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, z: Tensor) -> Tensor:
        return torch.softmax(100 * self.net(torch.round(z * 32) / 32), 1)


def _traced(net: nn.Module) -> Model:
    traced: Model = torch.jit.trace(
        _Whole(net), torch.zeros(2, 1, 28, 28, device=next(net.parameters()).device)
    )
    return traced


@dataclass(frozen=True)
class Mask:
    """``wrap`` puts a network behind the mask; ``opened``: to call the result unreliable is not
    enough."""

    wrap: Callable[[nn.Module], Model]
    opened: bool = False


MASKS: dict[str, Mask] = {
    "rounding to 1/255": Mask(lambda net: lambda z: net((z * 255).round() / 255), opened=True),
    "rounding to 1/64, bytes": Mask(
        lambda net: lambda z: net((z * 64).byte().to(z) / 64), opened=True
    ),
    "rounding to 1/8": Mask(lambda net: lambda z: net((z * 8).round() / 8), opened=True),
    "rounding to 1/3": Mask(lambda net: lambda z: net((z * 3).round() / 3), opened=True),
    "threshold at 0.5": Mask(lambda net: lambda z: net((z > 0.5).to(z)), opened=True),
    "threshold at 0.3": Mask(
        lambda net: lambda z: net(torch.where(z < 0.3, 0.0, 1.0).to(z)), opened=True
    ),
    "saturated softmax": Mask(lambda net: lambda z: (1000 * net(z)).softmax(1), opened=True),
    "saturated sigmoid": Mask(lambda net: lambda z: torch.sigmoid(net(z).double()), opened=True),
    "rounding in NumPy": Mask(
        lambda net: (lambda step: lambda z: net(step(z)))(
            _outside(lambda a: np.round(a * 255) / 255)
        ),
        opened=True,
    ),
    "threshold in NumPy": Mask(
        lambda net: (lambda step: lambda z: net(step(z)))(
            _outside(lambda a: (a > 0.5).astype(a.dtype))
        ),
        opened=True,
    ),
    "scripted rounding": Mask(
        lambda net: (lambda step: lambda z: net(step(z)))(torch.jit.script(_Scripted()))
    ),
    "JPEG-like": Mask(lambda net: lambda z: net(_coded(z, 0.05, torch.round))),
    "JPEG-like in NumPy": Mask(lambda net: lambda z: net(_coded(z, 0.05, _outside(np.round)))),
    "top-k activations, 20 %": Mask(lambda net: _instead_of_relu(net, lambda: _TopK(0.2))),
    "top-k activations, 5 %": Mask(lambda net: _instead_of_relu(net, lambda: _TopK(0.05))),
    "dropout": Mask(lambda net: _instead_of_relu(net, _Dropped)),
    "input noise": Mask(lambda net: lambda z: net(z + 0.1 * torch.randn_like(z))),
    "random shifts": Mask(_shifted),
    "shattered by a sine": Mask(lambda net: lambda z: net(z + 3e-3 * torch.sin(1e4 * z))),
    "shattered, coarser": Mask(lambda net: lambda z: net(z + 0.02 * torch.sin(500 * z))),
    "exploding gradients": Mask(_exploding),
    "NaN gradients": Mask(lambda net: lambda z: net(z + 0 * torch.sqrt(z - z))),
    "reversed gradients": Mask(lambda net: lambda z: net(_Custom.apply(z, "reversed"))),
    "random gradients": Mask(lambda net: lambda z: net(_Custom.apply(z, "random"))),
    "probabilities": Mask(lambda net: lambda z: net(z).softmax(1)),
    "probabilities of 4 decimals": Mask(
        lambda net: lambda z: _outside(lambda a: a.round(4))(net(z).softmax(1))
    ),
    "labels": Mask(lambda net: lambda z: F.one_hot(net(z).argmax(1), 10).to(z)),
    "no graph at all": Mask(
        lambda net: (
            lambda whole: lambda z: whole(torch.from_numpy(z.detach().cpu().numpy()).to(z.device))
        )(torch.jit.trace(net, torch.zeros(1, 1, 28, 28, device=next(net.parameters()).device)))
    ),
    "labels from NumPy": Mask(
        lambda net: lambda z: _outside(lambda a: np.eye(10)[a.argmax(1)])(net(z))
    ),
    "random switch of two nets": Mask(
        lambda net: lambda z: net(z if torch.rand(()) < 0.5 else F.avg_pool2d(z, 3, 1, 1) * 1.5)
    ),
    "rounding up to 1/16": Mask(lambda net: lambda z: net((z * 16).ceil() / 16), opened=True),
    "rounding of roots": Mask(
        lambda net: lambda z: net(((z + 1e-6).sqrt() * 5).round().div(5).square()), opened=True
    ),
    "rounding by a table": Mask(lambda net: lambda z: net(_tabled(z)), opened=True),
    "rounding by buckets": Mask(lambda net: lambda z: net(_in_buckets(z)), opened=True),
    "rounding by quantised tensors": Mask(
        lambda net: (
            lambda z: net(torch.quantize_per_tensor(z, 1 / 32, 0, torch.quint8).dequantize())
        ),
        opened=True,
    ),
    "thermometer code": Mask(
        lambda net: (
            lambda z: net(
                (z[..., None] > (torch.arange(8, device=z.device) + 0.5) / 8).to(z).mean(-1)
            )
        ),
        opened=True,
    ),
    "ordered dither": Mask(lambda net: lambda z: net(_dithered(z)), opened=True),
    "random dither": Mask(lambda net: lambda z: net(torch.floor(z * 7 + torch.rand_like(z)) / 7)),
    "median filter": Mask(lambda net: lambda z: net(_median(z))),
    "rounded activations": Mask(
        lambda net: _instead_of_relu(net, lambda: _Applied(lambda h: (h * 4).round() / 4))
    ),
    "saturated tanh": Mask(lambda net: lambda z: torch.tanh(net(z)), opened=True),
    "hard sigmoid": Mask(lambda net: lambda z: F.hardsigmoid(net(z) / 4), opened=True),
    "logarithms of probabilities": Mask(
        lambda net: lambda z: (1000 * net(z)).log_softmax(1), opened=True
    ),
    "temperature 1000": Mask(lambda net: lambda z: (net(z) / 1000).softmax(1), opened=True),
    "logits / 1e30": Mask(lambda net: lambda z: net(z) * 1e-30),
    "logits * 1e30": Mask(lambda net: lambda z: net(z) * 1e30),
    "logits + 1e5": Mask(lambda net: lambda z: net(z) + 1e5),
    "rounded logits": Mask(lambda net: lambda z: net(z).round()),
    "ranks of classes": Mask(lambda net: lambda z: net(z).argsort(1).argsort(1).to(z)),
    "probabilities of 2 decimals": Mask(lambda net: lambda z: net(z).softmax(1).round(decimals=2)),
    "float16": Mask(lambda net: _with_precision(net, torch.float16)),
    "bfloat16": Mask(lambda net: _with_precision(net, torch.bfloat16)),
    "detached": Mask(lambda net: lambda z: net(z.detach())),
    "detached inside": Mask(lambda net: _instead_of_relu(net, lambda: _Applied(torch.detach))),
    "zero gradients": Mask(lambda net: lambda z: net(_Custom.apply(z, "zero"))),
    "reversed gradients inside": Mask(
        lambda net: _instead_of_relu(net, lambda: _Wrong("reversed"))
    ),
    "random gradients inside": Mask(lambda net: _instead_of_relu(net, lambda: _Wrong("random"))),
    "zero gradients inside": Mask(lambda net: _instead_of_relu(net, lambda: _Wrong("zero"))),
    "reversed by a hook": Mask(_hooked),
    "random size and place": Mask(_resized),
    "one of three nets": Mask(_of_three),
    "noise by content": Mask(_noise_by_content),
    "three bits": Mask(lambda net: lambda z: net(_bits(z, 3)), opened=True),
    "shifted bits": Mask(
        lambda net: lambda z: net((((z * 255).int() >> 4) << 4).to(z) / 240), opened=True
    ),
    "short mantissa": Mask(lambda net: lambda z: net(_mantissa(z)), opened=True),
    "one-hot code": Mask(lambda net: lambda z: net(_one_hot_code(z)), opened=True),
    "embedded levels": Mask(lambda net: lambda z: net(_embedded(z)), opened=True),
    "rounding by unique values": Mask(lambda net: lambda z: net(_unique(z))),
    "rounding in Python": Mask(lambda net: lambda z: net(_by_hand(z)), opened=True),
    "patches from a book": Mask(lambda net: lambda z: net(_patches(z))),
    "bilateral filter": Mask(lambda net: lambda z: net(_bilateral(z))),
    "median filter, 3 levels": Mask(lambda net: lambda z: net((_median(z) * 2).round() / 2)),
    "random pixels": Mask(lambda net: lambda z: net(torch.bernoulli(z.clamp(0, 1)))),
    "pruned at random": Mask(lambda net: _instead_of_relu(net, _Pruned)),
    "unsure at random": Mask(_unsure_at_random),
    "one net by content": Mask(_chosen_by_content),
    "half-precision softmax": Mask(
        lambda net: lambda z: (50 * net(z)).half().softmax(1).to(z), opened=True
    ),
    "all classes alike": Mask(lambda net: lambda z: 0.1 + 1e-6 * net(z).softmax(1), opened=True),
    "softmax of softmax": Mask(
        lambda net: lambda z: (net(z) * 20).softmax(1).softmax(1), opened=True
    ),
    "traced, rounded and saturated": Mask(_traced),
    "cubed logits": Mask(lambda net: lambda z: net(z) ** 9),
    "square of a root": Mask(lambda net: lambda z: net(z.sqrt().square())),
    "logarithm of a power": Mask(
        lambda net: lambda z: net(torch.log(torch.exp(60 * z) + 1e-6) / 60)
    ),
    "reversed by detach": Mask(lambda net: lambda z: net(2 * z.detach() - z)),
    "right on bytes only": Mask(_honest_on_bytes),
    "reversed on half": Mask(_half_reversed),
    "vanishing gradients": Mask(lambda net: lambda z: net(z.detach() + 1e-30 * (z - z.detach()))),
    "no gradients wanted": Mask(lambda net: _ignoring(net, torch.no_grad)),
    "inference mode": Mask(lambda net: _ignoring(net, torch.inference_mode)),
    "shattered inside": Mask(
        lambda net: _instead_of_relu(net, lambda: _Applied(lambda h: h + 0.01 * (1e4 * h).sin()))
    ),
    "vote of three nets": Mask(_vote),
    "mean of saturated nets": Mask(_saturated_mean),
    "linear decoy": Mask(_with_linear_decoy),
    "labels beside a robust net": _beside_robust(
        lambda net, robust, z: 30 * F.one_hot(net(z).max(1).indices, 10) + robust(z)
    ),
    "choices beside a robust net": _beside_robust(
        lambda net, robust, z: 30 * _chosen(net(z)) + robust(z)
    ),
    "votes beside a robust net": _beside_robust(_votes),
    "weak on bytes only": _beside_robust(
        lambda net, robust, z: _weak_where(
            net, robust, z, ((z * 255).round() / 255 == z).flatten(1).all(1)
        )
    ),
    "weak without faint pixels": _beside_robust(
        lambda net, robust, z: _weak_where(
            net, robust, z, ((z > 0) & (z < 0.01)).flatten(1).sum(1) <= 40
        )
    ),
    "no negative logits": Mask(lambda net: lambda z: F.relu(net(z)), opened=True),
}
