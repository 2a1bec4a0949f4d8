"""The problem that solvers are given, and helpers for layout, precision and memory.

Solvers work on ``(B, C, H, W)`` in float64 and in chunks of images; callers get their own shape and
dtype back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from wball import inputs
from wball.cost import DenseCost, GridCost, GroundCost, Moves, StencilCost
from wball.inputs import result_dtype
from wball.plan import Plan
from wball.result import Duals, ProjectionResult, Status, SupportResult, joined_kernels

ROUNDING_SHARE = 9e-5
"""Share of the radius by which rounding may exceed it; points of the ball may exceed it by 1e-4."""

DIVISIBLE = 1e8
"""Images have no budget if their mass is below this multiple of the rounding of denormal pixels."""

SUMS = 64
"""Number of roundings that a float64 sum over the moves of a pixel counts as. If moves are free,
the flows of a pixel may be much larger than the pixel itself."""

TIME_LIMIT = 20.0
"""Default time limit of solvers per image in seconds; a digit takes a millisecond."""

PRECISE = 1e-10
"""Tolerance at which tight moves are told from others, and finite differences agree."""

MAX_ARC_ENTRIES = {"cpu": 4_000_000, "cuda": 40_000_000}
"""Largest number of moves held at once, by device: 8 bytes each, in a few tensors."""


@dataclass(frozen=True)
class TransportProblem:
    """The images reached from ``x`` by moving mass at a total cost of at most ``budget``, with
    pixels kept in ``box``.

    Attributes:
        x: the centres, ``(B, C, H, W)`` or ``(B, n)``.
        cost: what moves cost.
        budget: what may be spent, per image in mass x pixels, float64.
        box: the lowest and highest value of a pixel, or ``None``.
        mass: of each image, float64.
        relative: whether the radius is in units of the image's mass.
        least: every budget that is not 0 is at least this share of the mass; 0 if unknown.
    """

    x: Tensor
    cost: GroundCost
    budget: Tensor
    box: tuple[float, float] | None
    mass: Tensor
    relative: bool
    least: float = 0.0

    @cached_property
    def unit(self) -> Tensor:
        """The divisor that converts a cost to the unit of the radius, per image: the image's mass,
        or 1."""
        return self.mass.clamp(min=1e-300) if self.relative else torch.ones_like(self.mass)

    def moves(self, grid: Tensor) -> Moves:
        """The moves on the images' grid, in the dtype and on the device of ``grid``, which is ``x``
        as images."""
        return self.cost.arcs(grid)

    @property
    def limits(self) -> tuple[float, float]:
        """The box, or ``(0, inf)`` without one, because mass is not negative."""
        return self.box or (0.0, math.inf)

    def take(self, index: Tensor | slice) -> TransportProblem:
        """The problem of a subset of the images (``index``: positions, a mask or a slice)."""
        parts = {name: getattr(self, name)[index] for name in ("x", "budget", "mass")}
        return replace(self, **parts)

    def rounding_cost(self, roundings: int = 1, z: Tensor | None = None) -> Tensor:
        r"""How much the cost of a point can grow when it is rounded to the dtype of the results, in
        mass x pixels.

        Rounding multiplies each pixel by ``1 + t_j`` with ``|t_j| <= r u``, for ``r`` roundings and
        ``u`` half a unit in the last place (denormal pixels change by a fixed amount instead).
        Scaled back to the mass of ``x``, the deviations of ``t`` from its mean remain. Numbers in
        ``[-r u, r u]`` deviate by at most ``r u`` on average, so at most

        .. math:: r\, \tfrac{u}{2}\, m

        of the mass is in wrong pixels: half of the deviation is excess in some pixels, the other
        half is missing in others. One move per unit of mass, at most the most expensive one,
        corrects it. This is proved if every move is allowed. In a window it may take several moves,
        see :func:`_moves_to_balance`. Float64 points are sums of flows in their own precision, and
        each counts as :data:`SUMS` roundings.

        Of a known point ``z`` in float64 only the pixels that differ from ``x`` are rounded, few if
        its plan is sparse. At most ``r u`` of their mass is then wrong, and reaches any pixel by
        the moves that cross the image.
        """
        x, numbers = self.x, torch.finfo(result_dtype(self.x))
        dearest, across = dearest_move(self.cost, x), _moves_across(self.cost, x)
        roundings *= SUMS if numbers.bits == 64 else 1
        wrong = 0.5 * self.mass * _moves_to_balance(self.cost, x)
        if z is not None:
            wrong = torch.minimum(wrong, masses(torch.where(z == x, 0.0, z)) * across)
        tiny = math.prod(x.shape[1:]) * numbers.smallest_normal * across
        return 0.5 * roundings * numbers.eps * dearest * (wrong + tiny)

    def spendable(self, roundings: int = 1, z: Tensor | None = None) -> Tensor:
        """The largest cost of a plan whose columns (``z``, if they are known) are in the ball even
        after rounding, per image.

        A radius is kept to 1e-4, and the cost of rounding beyond that is held back: nothing at
        common radii, a part of radii near 1e-6 in float32, and all of radii below the cost of one
        rounding.
        """
        if roundings * _largest_share(self.cost, self.x) <= ROUNDING_SHARE * self.least:
            return self.budget  # without reading the images
        held = (self.rounding_cost(roundings, z) - ROUNDING_SHARE * self.budget).clamp(min=0)
        return (self.budget - held).clamp(min=0)


def masses(x: Tensor) -> Tensor:
    """The mass of each image, float64."""
    return x.flatten(1).sum(1, dtype=torch.float64)


def as_images(values: Tensor) -> Tensor:
    """Images ``(B, C, H, W)`` in at least float32; histograms ``(B, n)`` become ``(B, 1, 1,
    n)``."""
    grid = values.detach() if values.ndim == 4 else values.detach()[:, None, None, :]
    return inputs.row_major(grid.to(result_dtype(values)))


def as_grid(values: Tensor) -> Tensor:
    """Images ``(B, C, H, W)`` in float64; histograms become images of one row."""
    return as_images(values).double()


def as_given(point: Tensor, x: Tensor, box: tuple[float, float] | None) -> Tensor:
    """A float64 grid in the shape and dtype of ``x``, with rounding kept inside the box."""
    out = point.reshape(x.shape)
    if box is not None:
        out = out.clamp(*box)
    return out.to(result_dtype(x))


def dearest_move(cost: GroundCost, x: Tensor) -> float:
    """The cost of the most expensive move that images of this size allow."""
    if isinstance(cost, DenseCost):
        return float(cost.matrix[cost.matrix.isfinite()].max())
    return _window(cost, *_sides(x))[0]


def _sides(x: Tensor) -> tuple[int, int, int]:
    """Height, width and channels of images; a histogram is one row."""
    channels, height, width = x.shape[1:] if x.ndim == 4 else (1, 1, x.shape[-1])
    return int(height), int(width), int(channels)


@lru_cache(maxsize=64)
def _window(
    cost: GridCost | StencilCost, height: int, width: int, channels: int
) -> tuple[float, int, float]:
    """The most expensive move, how far moves go along the images, and the number of pixels to cross
    if all have the same mass."""
    moves = cost.moves(height, width, channels)
    along = 0 if height > width else 1
    reach = max(1, *(abs(int(move[along])) for move in moves))
    return moves[-1][3], reach, math.sqrt(max(height, width) / min(height, width))


def _moves_to_balance(cost: GroundCost, x: Tensor) -> Tensor:
    """Estimated number of moves between pixels whose rounding errors cancel, per image, at least 1.

    Errors are of either sign, so their sum over an area grows like the root of its pixels: along a
    strip about ``sqrt(length / width)`` pixels have to be crossed. And where few pixels have most
    of the mass (an image has the errors of ``(sum x)^2 / sum x^2`` equal pixels), half the way to
    the next of them. This is not proved, but exact distances confirm it (``tests/torture``).
    """
    values = x.double().flatten(1)
    if isinstance(cost, DenseCost):
        return torch.ones_like(values[:, 0])
    _, reach, least = _window(cost, *_sides(x))
    largest = values.amax(1, keepdim=True).clamp(min=1e-300)
    equal = (values / largest).sum(1).square() / (values / largest).square().sum(1).clamp(min=1)
    apart = 0.5 * torch.sqrt(values.shape[1] / equal.clamp(min=1))
    return (apart.clamp(min=least) / reach).clamp(min=1)


def _moves_across(cost: GroundCost, x: Tensor) -> float:
    """The number of moves that cross an image."""
    if isinstance(cost, DenseCost):
        return 1.0
    return max(1.0, max(_sides(x)[:2]) / _window(cost, *_sides(x))[1])


def _largest_share(cost: GroundCost, x: Tensor) -> float:
    """The largest cost of rounding a float32 image with a budget once, as a share of its mass.

    The mass of the worst image is in one pixel; denormal pixels add less than a tenth.
    """
    if isinstance(cost, DenseCost) or x.dtype is torch.float64:
        return math.inf
    dearest, reach, least = _window(cost, *_sides(x))
    far = max(1.0, max(0.5 * math.sqrt(math.prod(x.shape[1:])), least) / reach)
    return 0.275 * torch.finfo(torch.float32).eps * dearest * far


Result = TypeVar("Result", SupportResult, ProjectionResult)


class Effort(NamedTuple):
    """The entropy of the problem, and the stopping criteria of its solver.

    Attributes:
        reg: the paper's lambda in the units of an image scaled to mass 1; ``inf`` for no entropy.
        tol: relative duality gap at which an image is done.
        max_iter: Newton steps per image.
        time_limit: seconds per image, on average over those solved together. An image that takes
            longer gets the best point found, which is in the ball, and the status ``TIME_LIMIT``.
    """

    reg: float
    tol: float
    max_iter: int
    time_limit: float

    @property
    def exact(self) -> bool:
        """Whether there is no entropy."""
        return math.isinf(self.reg)

    def for_gradients(self, x: Tensor) -> Effort:
        """The effort that gradients need: in float64, a point without visible errors."""
        return self._replace(tol=min(self.tol, PRECISE)) if x.dtype == torch.float64 else self

    def checked(self) -> Effort:
        """The same settings, after validation."""
        return Effort(
            inputs.check_positive("reg", self.reg, inf=True),
            inputs.check_positive("tol", self.tol),
            inputs.check_count("max_iter", self.max_iter),
            inputs.check_positive("time_limit", self.time_limit, inf=True),
        )


def in_chunks(
    problem: TransportProblem,
    solve: Callable[[TransportProblem, slice, Moves], tuple[Result, PackedFlow]],
) -> Result:
    """Solve the batch in slices whose arc tensors fit in memory, and join the results.

    ``solve`` gets the problem of a slice, the slice and the moves, and also returns the plans.
    """
    x, moves = problem.x, problem.moves(as_grid(problem.x[:0]))
    most = MAX_ARC_ENTRIES.get(x.device.type, MAX_ARC_ENTRIES["cpu"])
    size = max(1, most // max(1, math.prod(x.shape[1:]) * len(moves)))
    slices = [slice(start, start + size) for start in range(0, max(1, len(x)), size)]
    parts, flows = zip(*(solve(problem.take(part), part, moves) for part in slices), strict=True)
    return replace(_joined(parts), write=partial(_written, moves, flows))


def _joined(parts: Sequence[Result]) -> Result:
    """Concatenate the results of the parts of a batch, in order."""
    if len(parts) == 1:
        return parts[0]

    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], Duals):
            return Duals(*map(torch.cat, zip(*values, strict=True)))
        return torch.cat(values) if isinstance(values[0], Tensor) else sum(values, ())

    names = {item.name for item in fields(parts[0])} - {"write", "kernel"}
    every = {name: join(name) for name in names}
    return replace(parts[0], **every, kernel=joined_kernels(part.kernel for part in parts))


PackedFlow = tuple[torch.Size, Tensor, Tensor]
"""Shape, positions and masses of the moves in use, which are few of a window's."""


def packed(flow: Tensor) -> PackedFlow:
    """Remove the unused moves from an arc tensor."""
    where = flow.flatten().nonzero().squeeze(1)
    return flow.shape, where, flow.flatten()[where]


def _written(moves: Moves, flows: Sequence[PackedFlow]) -> Plan:
    return Plan(moves, torch.cat([_unpacked(*flow) for flow in flows]))


def _unpacked(shape: torch.Size, where: Tensor, mass: Tensor) -> Tensor:
    flow = mass.new_zeros(shape)
    flow.view(-1)[where] = mass.clamp(min=0)
    return flow


def statuses(
    converged: Tensor, stalled: Callable[[], Tensor] | None = None, late: bool = False
) -> tuple[Status, ...]:
    """One status per image, from masks of the images that met the tolerance and of those that
    stopped before ``max_iter``.

    ``stalled`` is called only if some images did not meet it. ``late``: the time limit was reached
    before all images were done.
    """
    met = converged.tolist()
    if all(met):
        return (Status.CONVERGED,) * len(met)
    early = [False] * len(met) if stalled is None else stalled().tolist()
    stopped = Status.TIME_LIMIT if late else Status.STALLED
    missed = (stopped if e else Status.MAX_ITER for e in early)
    return tuple(Status.CONVERGED if c else m for c, m in zip(met, missed, strict=True))
