"""Random problems and cases with closed-form answers for the tests.

Two kinds of things live here (:mod:`references` has the slow solvers that they are given to):

- :func:`random_problem` / :func:`random_problems` (seeded) and :func:`problems` (a Hypothesis
  strategy): a ball, a centre ``x``, a point ``w`` to project and a direction ``g``, over the
  regimes where solvers break.
- Hypothesis strategies that return a :class:`Known`: a pair of images whose transport distance has
  a closed form (:func:`diracs`, :func:`translations`, :func:`lines`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from wball.ball import WassersteinBall
from wball.cost import DenseCost, GridCost, GroundCost, StencilCost

Radius = Literal["tight", "loose", "inactive"]
Pixels = Literal["uniform", "sparse", "saturated", "binary", "blob", "bytes", "flat"]
Kind = Literal["grid", "stencil", "dense", "colours"]

RADII: tuple[Radius, ...] = ("tight", "loose", "inactive")
PIXELS: tuple[Pixels, ...] = ("uniform", "sparse", "saturated", "binary", "blob", "bytes", "flat")
KINDS: tuple[Kind, ...] = ("grid", "stencil", "dense", "colours")
SHAPES = ((8, 8), (5, 5), (3, 7), (6, 4), (1, 8), (7, 1), (2, 2), (4, 8))


@dataclass(frozen=True)
class Problem:
    """One image in float64: centre ``x``, a point ``w`` off it, a direction ``g``, all ``(1, C, H,
    W)``."""

    ball: WassersteinBall
    x: Tensor
    w: Tensor
    g: Tensor
    label: str

    @property
    def mass(self) -> float:
        return float(self.x.sum())


def _pixels(
    rng: np.random.Generator, kind: Pixels, shape: tuple[int, int, int]
) -> NDArray[np.float64]:
    uniform = rng.random(shape)
    if kind == "sparse":
        image = uniform * (rng.random(shape) < 0.4)
    elif kind == "saturated":
        image = np.where(rng.random(shape) < 0.5, 1.0, uniform)
    elif kind == "binary":
        image = (rng.random(shape) < 0.5).astype(np.float64)
    elif kind == "blob":
        channels, height, width = shape
        r, c = np.mgrid[:height, :width]
        centre = rng.random((channels, 2, 1, 1)) * np.array([height - 1, width - 1]).reshape(
            1, 2, 1, 1
        )
        image = np.clip(
            1.3 * np.exp(-0.4 * ((r - centre[:, 0]) ** 2 + (c - centre[:, 1]) ** 2)) - 0.1, 0, 1
        )
    elif kind == "bytes":
        image = rng.integers(0, 256, shape) / 255
    elif kind == "flat":
        image = np.full(shape, rng.choice([0.1, 0.5, 1.0]))
    else:
        image = uniform
    if image.sum() < 0.05:
        image.flat[rng.integers(image.size)] = rng.random() * 0.9 + 0.1
    return np.asarray(image, dtype=np.float64)


def _cost(
    rng: np.random.Generator, kind: Kind, window: int, p: float, shape: tuple[int, int]
) -> GroundCost:
    if kind == "grid":
        return GridCost(window, p)
    if kind == "colours":
        return GridCost(window, p, float(rng.uniform(0.2, 2.0)))
    if kind == "stencil":  # not symmetric, not a metric, some moves forbidden
        table = rng.random((3, window)) * 2 + 0.1
        table[rng.random(table.shape) < 0.25] = math.inf
        table[1, window // 2] = 0.0
        return StencilCost(tuple(map(tuple, table.tolist())))
    n = shape[0] * shape[1]
    matrix = rng.random((n, n)) * 2 + 0.05
    matrix[rng.random((n, n)) < 0.2] = math.inf
    np.fill_diagonal(matrix, 0.0)
    return DenseCost(torch.from_numpy(matrix))


def random_problem(
    seed: int,
    *,
    shape: tuple[int, int] | None = None,
    channels: int | None = None,
    window: int | None = None,
    p: float | None = None,
    radius: Radius | None = None,
    pixels: Pixels | None = None,
    kind: Kind = "grid",
    box: tuple[float, float] | None = (0.0, 1.0),
    mass: Literal["relative", "absolute"] = "relative",
) -> Problem:
    """A problem from a seed. What is not given is chosen by the seed, so that consecutive seeds
    sweep the regimes."""
    rng = np.random.default_rng([20190221, seed])
    shape = shape or SHAPES[int(rng.integers(len(SHAPES)))]
    channels = channels or ((2, 3) if kind == "colours" else (1, 3))[seed % 4 in (2, 3)]
    window = window or (3, 5)[seed % 2]
    p = p or (1.0, 2.0, 3.0)[seed % 3]
    radius = radius or RADII[(seed // 3) % 3]
    pixels = pixels or PIXELS[seed % len(PIXELS)]
    x = _pixels(rng, pixels, (channels, *shape))
    if box is not None:
        x = box[0] + (box[1] - box[0]) * x
    cost = _cost(rng, kind, window, p, shape)
    eps = {
        "tight": float(rng.uniform(0.01, 0.1)),
        "loose": float(rng.uniform(0.2, 0.8)),
        "inactive": 1.0
        + max(c for *_, c in arc_list(cost, *shape, channels)),  # no plan can spend that much
    }[radius]
    if mass == "absolute":
        eps *= float(x.sum())
    step = float(rng.choice([0.05, 0.3, 1.0]))
    w = x + step * rng.standard_normal(x.shape)
    if rng.random() < 0.3:  # a few large kicks, as a normalised gradient gives them
        w = x + 2 * step * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.2)
    g = rng.standard_normal(x.shape)
    if rng.random() < 0.3:
        g = g * (rng.random(x.shape) < 0.3)
    label = f"seed={seed} {kind} {channels}x{shape[0]}x{shape[1]} window={window} p={p:g} {radius} {pixels} step={step}"

    def image(a: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(a))[None]

    return Problem(
        WassersteinBall(eps, cost, mass=mass, box=box), image(x), image(w), image(g), label
    )


def random_problems(count: int, start: int = 0, **fixed: Any) -> list[Problem]:
    """``count`` consecutive seeds; any 126 of them see every combination of window, p, radius and
    pixel regime once."""
    return [random_problem(seed, **fixed) for seed in range(start, start + count)]


def halves(side: int = 6, channels: int = 1) -> nn.Sequential:
    """A linear model: class 1 if there is more mass on the right."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 2))
    weight = torch.linspace(-1, 1, side).repeat(side * channels)
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-weight, weight]))
        model[1].bias.zero_()
    return model.eval()


class Case(NamedTuple):
    """A model to attack, images, and their labels."""

    net: nn.Module
    images: Tensor
    labels: Tensor


@st.composite
def problems(draw: st.DrawFn, side: int = 8) -> Problem:
    """Hypothesis: the structure is drawn (and shrinks), the pixel values come from a drawn seed."""
    return random_problem(
        draw(st.integers(0, 2**20)),
        shape=(draw(st.integers(1, side)), draw(st.integers(1, side))),
        channels=draw(st.sampled_from((1, 3))),
        window=draw(st.sampled_from((3, 5))),
        p=draw(st.sampled_from((1.0, 2.0, 3.0))),
        radius=draw(st.sampled_from(RADII)),
        pixels=draw(st.sampled_from(PIXELS)),
        box=draw(st.sampled_from(((0.0, 1.0), None))),
        mass=draw(st.sampled_from(("relative", "absolute"))),
    )


# Closed forms
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A pair of images and what the distance between them is: total transport cost and cost per
    unit of mass."""

    cost: GridCost
    x: Tensor
    z: Tensor
    absolute: float

    @property
    def relative(self) -> float:
        return self.absolute / float(self.x.sum())

    def ball(
        self, factor: float = 1.0, mass: Literal["relative", "absolute"] = "relative"
    ) -> WassersteinBall:
        """The ball that has ``z`` on its sphere, its radius scaled by ``factor``."""
        distance = self.relative if mass == "relative" else self.absolute
        return WassersteinBall(
            distance * factor if math.isfinite(distance) else 1e3, self.cost, mass=mass
        )


def _blank(height: int, width: int, channels: int = 1) -> Tensor:
    return torch.zeros(1, channels, height, width, dtype=torch.float64)


@st.composite
def costs(draw: st.DrawFn) -> GridCost:
    return GridCost(draw(st.sampled_from((3, 5, 7))), draw(st.sampled_from((1.0, 2.0, 3.0))))


@st.composite
def diracs(draw: st.DrawFn) -> Known:
    """All mass in one pixel goes to one other pixel: ``m * d^p``, infinite if the window does not
    reach it."""
    cost, height, width = draw(costs()), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    r0, r1 = draw(st.integers(0, height - 1)), draw(st.integers(0, height - 1))
    c0, c1 = draw(st.integers(0, width - 1)), draw(st.integers(0, width - 1))
    mass = draw(st.floats(0.01, 1.0))
    x, z = _blank(height, width), _blank(height, width)
    x[0, 0, r0, c0] = mass
    z[0, 0, r1, c1] = mass
    reach = max(abs(r1 - r0), abs(c1 - c0)) <= cost.radius
    return Known(cost, x, z, mass * math.hypot(r1 - r0, c1 - c0) ** cost.p if reach else math.inf)


@st.composite
def translations(draw: st.DrawFn) -> Known:
    """A picture with a black border, shifted by ``v``: ``m * |v|^p`` for p >= 1, whatever is in it.

    A plan can do no better than its mean displacement (Jensen), and the shift attains that.
    """
    cost, channels = draw(costs()), draw(st.sampled_from((1, 3)))
    height, width, seed = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2**20)),
    )
    reach = st.integers(-cost.radius, cost.radius)
    dr, dc, pad = draw(reach), draw(reach), cost.radius
    inner = np.random.default_rng(seed).random((channels, height, width)) + 0.01
    x = _blank(height + 2 * pad, width + 2 * pad, channels)
    x[0, :, pad : pad + height, pad : pad + width] = torch.from_numpy(inner) / 1.01
    z = torch.roll(x, (dr, dc), (2, 3))
    return Known(cost, x, z, float(x.sum()) * math.hypot(dr, dc) ** cost.p)


@st.composite
def lines(draw: st.DrawFn) -> Known:
    """One row of pixels: the monotone coupling is optimal for every p >= 1 and has the shortest
    longest move.

    So the window forbids all plans if and only if it forbids that one.
    """
    cost, n, seed = draw(costs()), draw(st.integers(2, 10)), draw(st.integers(0, 2**20))
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 50, n).astype(float) for _ in range(2))
    if draw(
        st.booleans()
    ):  # stay within reach: every unit moves by at most one pixel, or not at all
        b = np.zeros(n)
        for i, units in enumerate(a):
            share = rng.multinomial(int(units), [0.25, 0.5, 0.25])
            for shift, k in zip((-1, 0, 1), share, strict=True):
                b[min(max(i + shift, 0), n - 1)] += k
    if a.sum() == 0 or b.sum() == 0:
        a = b = np.ones(n)
    a, b = a * b.sum(), b * a.sum()
    scale = 1 / max(a.max(), b.max())
    total, i, j, left, right = 0.0, 0, 0, a.copy(), b.copy()
    while i < n and j < n:
        move = min(left[i], right[j])
        if move > 0:
            total += move * abs(i - j) ** cost.p if abs(i - j) <= cost.radius else math.inf
        left[i] -= move
        right[j] -= move
        i, j = (i + 1, j) if left[i] == 0 else (i, j + 1)
    x, z = _blank(1, n), _blank(1, n)
    x[0, 0, 0], z[0, 0, 0] = torch.from_numpy(a * scale), torch.from_numpy(b * scale)
    if draw(st.booleans()):
        x, z = x.mT.contiguous(), z.mT.contiguous()
    return Known(cost, x, z, total * scale)


known = st.one_of(diracs(), translations(), lines())


def arc_list(
    cost: GroundCost, height: int, width: int, channels: int = 1
) -> list[tuple[int, int, float]]:
    """All moves ``(i, j, cost)`` a cost allows on a grid, written down from its definition: those
    of all channels if moves may change them, otherwise of one."""
    if cost.channel_cost is not None and channels > 1:
        n, power = height * width, cost.p
        plane = arc_list(GridCost(cost.window, power), height, width)
        return [
            (
                i + a * n,
                j + b * n,
                price if a == b else (price ** (1 / power) + cost.channel_cost) ** power,
            )
            for i, j, price in plane
            for a in range(channels)
            for b in range(channels)
        ]
    n = height * width
    if isinstance(cost, DenseCost):
        matrix = cost.matrix.tolist()
        return [
            (i, j, matrix[i][j]) for i in range(n) for j in range(n) if math.isfinite(matrix[i][j])
        ]
    found = []
    for i, j in itertools.product(range(n), range(n)):
        dr, dc = j // width - i // width, j % width - i % width
        if isinstance(cost, GridCost):
            value = (
                math.hypot(dr, dc) ** cost.p
                if max(abs(dr), abs(dc)) <= cost.window // 2
                else math.inf
            )
        else:
            r, c = dr + len(cost.table) // 2, dc + len(cost.table[0]) // 2
            inside = 0 <= r < len(cost.table) and 0 <= c < len(cost.table[0])
            value = cost.table[r][c] if inside else math.inf
        if math.isfinite(value):
            found.append((i, j, value))
    return found


class ExactNet(nn.Module):
    """Sums in float64, so that a batch of another size does not round the logits differently."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(196, 16, generator=generator) / 6)
        self.second = nn.Parameter(torch.randn(16, 10, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x.flatten(1).double() @ self.first.double())
        return (hidden @ self.second.double()).to(x.dtype)
