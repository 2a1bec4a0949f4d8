"""The cases: one number gives one call of the public API, somewhere in the space of what callers
may pass.

Shapes from 1 x 1 to 257 x 129, 1 to 16 channels, windows to 11, ``reg`` from 1e-2 to 1e9 and
infinite, radii from 0 to 1e30, pixels from denormal to saturated, every floating dtype, every
memory layout, batches of 0 and 1. Most cases are small, so that 100,000 take an hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball import DenseCost, GridCost, StencilCost, WassersteinBall
from wball.cost import GroundCost

Array = NDArray[np.float64]

OPERATIONS = {
    "project": 0.32,
    "support": 0.24,
    "distance": 0.08,
    "sample": 0.12,
    "dual averaging": 0.08,
    "score search": 0.02,
    "decision search": 0.02,
    "pgd": 0.04,
    "frank-wolfe": 0.05,
    "certify": 0.02,
}
PIXELS = (
    "uniform", "sparse", "binary", "bytes", "saturated", "flat", "one pixel", "black", "denormal", "tiny",
    "all magnitudes", "rounded below 0", "checkerboard", "one black image",
)  # fmt: skip
LAYOUTS = ("plain", "transposed", "channels last", "strided", "expanded", "offset")
DTYPES = {torch.float32: 0.5, torch.float64: 0.26, torch.float16: 0.12, torch.bfloat16: 0.12}
SIDES = ((28, 28), (1, 64), (64, 1), (33, 17), (32, 32), (5, 129))
LARGE = ((257, 129), (129, 257), (224, 1), (128, 128))


@dataclass(frozen=True)
class Case:
    """What one call gets. ``x`` is valid; ``w`` and ``g`` are finite and otherwise anything."""

    index: int
    operation: str
    ball: WassersteinBall
    x: Tensor
    w: Tensor
    g: Tensor
    reg: float
    tol: float
    max_iter: int
    kernel: str
    label: str

    @property
    def rng(self) -> np.random.Generator:
        """Randomness for what comes after the case was made."""
        return np.random.default_rng([7, self.index])

    @property
    def small(self) -> bool:
        """Whether independent programs over its plans are affordable."""
        height, width = self.x.shape[2:] if self.x.ndim == 4 else (1, self.x.shape[1])
        channels = self.x.shape[1] if self.x.ndim == 4 else 1
        return self.x[:1].numel() * _moves(self.ball.cost, height, width, channels) <= 1500


def make(seed: int, index: int) -> Case:
    """Case ``index`` of the sequence that ``seed`` starts."""
    rng = np.random.default_rng([seed, index])
    operation = _pick(rng, OPERATIONS)
    large = rng.random() < 0.004 and operation in ("project", "support", "sample", "dual averaging")
    height, width = _shape(rng, large)
    cost = _cost(rng, height, width, large)
    channels = int(rng.choice([1, 1, 1, 2, 3, 3, 4, 7, 16])) if not large else 1
    if isinstance(cost, GridCost) and channels in (2, 3, 4) and index % 3 == 0:
        cost = GridCost(min(cost.window, 5), cost.p, float(10 ** rng.uniform(-1, 0.5)))
    arcs = height * width * _moves(cost, height, width, channels)
    while channels > 1 and channels * arcs > 20_000:
        channels = {16: 7, 7: 4, 4: 3, 3: 1, 2: 1}[channels]
    heavy = channels * arcs > 20_000
    batch = int(rng.choice([0, 1, 1, 1, 2, 3], p=[0.04, 0.26, 0.25, 0.15, 0.2, 0.1]))
    batch = min(batch, 1) if heavy else batch
    histogram = isinstance(cost, DenseCost) and rng.random() < 0.5
    shape = (batch, height * width) if histogram else (batch, channels, height, width)
    box = ((0.0, 1.0), None, (0.1, 0.9), (0.0, 2.0))[int(rng.choice(4, p=[0.72, 0.16, 0.07, 0.05]))]
    dtype = _pick(rng, DTYPES)
    pixels = str(rng.choice(PIXELS))
    x = _layout(rng, _image(rng, pixels, shape, box), dtype, box)
    eps = _radius(rng, batch)
    ball = WassersteinBall(
        eps, cost, mass="relative" if rng.random() < 0.85 else "absolute", box=box
    )
    reg = math.inf if rng.random() < 0.45 else float(10 ** rng.uniform(-2, 9))
    kernel = "torch" if rng.random() < 0.05 and height * width <= 36 and channels <= 3 else "auto"
    max_iter = int(rng.choice([1, 3, 30, 200, 500], p=[0.05, 0.1, 0.2, 0.25, 0.4]))
    if heavy:
        max_iter = min(max_iter, 3 if large else 20)
    if kernel == "torch":
        max_iter = min(max_iter, 30)
    label = (
        f"case {index}: {operation} {tuple(shape)} {str(dtype)[6:]} {pixels} {cost} eps={eps} {ball.mass} "
        f"box={box} reg={reg:.4g} {kernel}"
    )
    return Case(
        index, operation, ball, x,
        _finite(x.detach().to(torch.float64) + _noise(rng, shape), x), _finite(_direction(rng, shape), x),
        reg, float(10 ** rng.uniform(-7, -2)), max_iter, kernel, label,
    )  # fmt: skip


def _pick(rng: np.random.Generator, weights: dict) -> Any:  # type: ignore[type-arg]
    odds = np.array(list(weights.values()))
    return list(weights)[int(rng.choice(len(weights), p=odds / odds.sum()))]


def _shape(rng: np.random.Generator, large: bool) -> tuple[int, int]:
    if large:
        return LARGE[int(rng.integers(len(LARGE)))]
    if rng.random() < 0.02:
        return SIDES[int(rng.integers(len(SIDES)))]
    usual, odds = (
        [1, 2, 3, 4, 5, 6, 7, 8, 11, 13],
        [0.14, 0.14, 0.14, 0.14, 0.14, 0.1, 0.1, 0.05, 0.03, 0.02],
    )
    return int(rng.choice(usual, p=odds)), int(rng.choice(usual, p=odds))


def _cost(rng: np.random.Generator, height: int, width: int, large: bool) -> GroundCost:
    kind = rng.random()
    if kind < 0.08:
        table = rng.random((3, int(rng.choice([1, 3, 5])))) * 2 + 0.05
        table[rng.random(table.shape) < 0.25] = math.inf
        table[rng.random(table.shape) < 0.05] = 0.0  # free moves
        table[1, table.shape[1] // 2] = 0.0
        return StencilCost(tuple(map(tuple, table.tolist())))
    n = height * width
    if kind < 0.16 and n <= 36:
        matrix = rng.random((n, n)) * 2 + 0.05
        matrix[rng.random((n, n)) < 0.2] = math.inf
        np.fill_diagonal(matrix, 0.0)
        return DenseCost(torch.from_numpy(matrix))
    window = int(rng.choice([1, 3, 5, 7, 9, 11], p=[0.04, 0.36, 0.36, 0.12, 0.06, 0.06]))
    if large and rng.random() < 0.9:
        window = min(window, 5)
    return GridCost(window, float(rng.choice([1.0, 2.0, 0.5, 3.0], p=[0.6, 0.25, 0.08, 0.07])))


def _moves(cost: GroundCost, height: int, width: int, channels: int) -> int:
    return cost.size if isinstance(cost, DenseCost) else len(cost.moves(height, width, channels))


def _image(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], box: tuple[float, float] | None
) -> Array:
    u = rng.random(shape)
    if kind == "sparse":
        u = u * (rng.random(shape) < 0.2)
    elif kind == "binary":
        u = (rng.random(shape) < 0.5).astype(np.float64)
    elif kind == "bytes":
        u = rng.integers(0, 256, shape) / 255
    elif kind == "saturated":
        u = np.ones(shape)
    elif kind == "flat":
        u = np.full(shape, rng.choice([0.1, 0.5, 0.999]))
    elif kind == "one pixel":
        u = np.zeros(shape)
        if u.size:
            u.reshape(shape[0], -1)[:, rng.integers(u[0].size)] = 1.0
    elif kind == "black":
        u = np.zeros(shape)
    elif kind == "denormal":
        u = u * rng.choice([1e-44, 1e-41, 1e-39, 3e-308, 1e-310, 5e-324])
    elif kind == "tiny":
        u = u * 10.0 ** rng.uniform(-30, -4)
    elif kind == "all magnitudes":
        u = 10.0 ** rng.uniform(-30, 0, shape)
    elif kind == "checkerboard":
        u = (np.add.reduce(np.indices(shape)[1:]) % 2).astype(np.float64)
    elif kind == "one black image" and shape[0]:
        u[int(rng.integers(shape[0]))] = 0.0
    if box is not None:
        u = box[0] + (box[1] - box[0]) * u
    if kind == "rounded below 0":
        u = np.where(rng.random(shape) < 0.2, (0.0 if box is None else box[0]) - 3e-8, u)
    return np.asarray(u, dtype=np.float64)


def _layout(
    rng: np.random.Generator, u: Array, dtype: torch.dtype, box: tuple[float, float] | None
) -> Tensor:
    """The same numbers, rounded to the dtype, laid out in memory in one of several ways."""
    x = torch.from_numpy(u).to(dtype)
    if box is not None:  # 0.1 and 0.9 are not numbers of every dtype
        outside = (x.double() < box[0] - 1e-6) | (x.double() > box[1] + 1e-6)
        x = torch.where(outside, torch.full_like(x, 0.5), x)
    kind = str(rng.choice(LAYOUTS))
    if kind == "transposed":
        return x.mT.contiguous().mT if x.ndim == 4 else x.T.contiguous().T
    if kind == "channels last" and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if kind == "strided":
        return torch.stack([x, torch.full_like(x, 7.0)], dim=-1)[..., 0]
    if kind == "expanded" and x.shape[0] > 1:
        return x[:1].expand(x.shape)
    if kind == "offset":
        return torch.cat([torch.full_like(x[:1], 7.0), x])[min(1, x.shape[0]) :]
    return x


def _radius(rng: np.random.Generator, batch: int) -> float | Tensor:
    def one() -> float:
        if rng.random() < 0.3:
            return float(rng.choice([0.0, 1e-12, 1e-6, 1.0, 10.0, 1e6, 1e30]))
        return float(10 ** rng.uniform(-3, 0))

    return (
        torch.tensor([one() for _ in range(batch)], dtype=torch.float64)
        if rng.random() < 0.2
        else one()
    )


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    size = float(rng.choice([0.0, 1e-9, 1e-3, 0.1, 0.1, 1.0, 1.0, 10.0, 1e3, 1e6]))
    kind = rng.random()
    noise = rng.standard_normal(shape)
    if kind < 0.3:
        noise = np.sign(noise)
    elif kind < 0.45:
        noise = noise * (rng.random(shape) < 0.1)
    elif kind < 0.5:
        noise = np.ones(shape)
    return torch.from_numpy(np.asarray(size * noise))


def _direction(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    scale = float(rng.choice([1.0, 1.0, 1.0, 1e-30, 1e-6, 1e6, 1e30]))
    kind = rng.random()
    g = rng.standard_normal(shape)
    if kind < 0.15:
        g = rng.integers(-2, 3, shape).astype(np.float64)  # ties everywhere
    elif kind < 0.2:
        g = np.zeros(shape)
    elif kind < 0.25:
        g = np.ones(shape)
    elif kind < 0.35:
        g = g * (rng.random(shape) < 0.1)
    return torch.from_numpy(np.asarray(scale * g))


def _finite(values: Tensor, x: Tensor) -> Tensor:
    top = torch.finfo(x.dtype).max if x.dtype is torch.float16 else 1e38
    return values.clamp(-top, top).to(x.dtype)
