r"""``python -m benchmarks predecessors``: the attacks of 2020 beside ours, at fixed radii.

Ports of three published attacks, with the settings of their scripts and the same number of
gradients each, on the public MNIST networks and at the radii of the leaderboard.

* **frank-wolfe** (Wu, Wang and Yu). The state is a transport plan ``P``, one entry per pixel and
  move of the window. A step of ``2 / (t + 2)`` towards ``argmax <G, P> + gamma H(P)`` over the
  plans of the ball, where ``G`` is the gradient of the cross-entropy with respect to the plan,
  divided by its largest entry.
* **pgd** (Wu, Wang and Yu). The same state. A step of 0.1 along ``G``, then the Euclidean
  projection onto the plans of the ball.
* **sinkhorn** (Hu et al.). The state is an image. A step of 0.06 times the mass along the gradient,
  divided by its largest entry, then projected Sinkhorn with the box (lambda 1000).

* **standard** is ours: the first members of :class:`wball.StandardAttack`, while they make no more
  gradients than the others.

The first two do not enforce the box: the network sees clipped images. Here every candidate is
replaced by the nearest image of the ball, which is audited, and counts if it is misclassified.
Candidates are tested every 10 steps, and a digit that was broken stays so at larger radii. Both
favour the predecessors, whose scripts test the last step at one radius.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.frame import Result, options
from reproduction.leaderboard import PROTOCOLS

RADII = PROTOCOLS["mnist"].radii
NETWORKS = (
    "wong2019-mnist-adversarial",
    "wu2020-mnist-adversarial",
    "hu2020-mnist-adversarial",
    "wong2019-mnist-standard",
    "levine2020-mnist-flow-0.01",
    "wong2019-mnist-linf",
    "levine2020-mnist-flow-0.005",
    "wong2019-mnist-binarized",
)
"""All public MNIST networks, most informative first."""
BATCH = 2500
"""Digits at a time: a plan has 25 numbers per pixel with mass."""
TESTED_EVERY = 10
"""Steps between tests of the candidates."""

GAMMA = 1e-3
"""Weight of the entropy in the linear oracle of Wu et al."""
HALVINGS = 14
"""Bisection steps of a price, to a quarter of GAMMA; the rest of the budget is interpolated."""
HIGHEST = 4.0
"""A price at which no mass moves: gains differ by at most 2.4, and a move costs at least 1."""
ROUNDS = 7
"""Rounds of a projection onto a simplex."""
OURS = "standard"
PLAN_STEP, IMAGE_STEP = 0.1, 0.06
CUT = 60.0 / 28**2
"""Hu et al. clip the point to this share of the mass before they project it."""


Rows = Callable[[Sequence[Tensor], Tensor], list[Tensor]]
"""The best plan for the gain of each move, and the mass of each row: a tensor a move, so that the
compiler keeps a row in registers."""


class PlanAttack:
    """State of the attacks of Wu et al. on a batch: the plan's rows for pixels that have mass."""

    def __init__(self, x: Tensor, eps: float, method: str) -> None:
        count = int((x > 0).flatten(1).sum(1).max())
        mass, pixel = x.flatten(1).topk(count)
        ends, inside, cost = window(*x.shape[2:])
        self._shape, self._method, self._cost = x.shape[1:], method, cost.to(x)
        self._ends, self._inside = (part.to(x.device)[:, pixel] for part in (ends, inside))
        self._mass, self._budget = mass, eps * mass.sum(1)
        self._plan = x.new_zeros(self._ends.shape)
        self._plan[cost.argmin()] = mass

    def images(self) -> Tensor:
        """The mass that arrives at each pixel; pixels may exceed 1."""
        arriving = self._plan.new_zeros(len(self._mass), self._shape.numel())
        for ends, arrives in zip(self._ends, self._plan, strict=True):
            arriving.scatter_add_(1, ends, arrives)
        return arriving.view(-1, *self._shape)

    def step(self, slope: Tensor, number: int) -> None:
        gain = torch.stack([slope.flatten(1).gather(1, ends) for ends in self._ends])
        if self._method == "frank-wolfe":
            gain = torch.where(self._inside, gain, -torch.inf)
            target = self._cheapest(gain, softened)
            self._plan = self._plan + 2.0 / (number + 2) * (target - self._plan)
        else:
            wanted = torch.where(self._inside, self._plan + PLAN_STEP * gain, -torch.inf)
            self._plan = self._cheapest(wanted, on_simplex)

    def _cheapest(self, gain: Tensor, rows: Rows) -> Tensor:
        """The plan of the price at which it spends the budget."""
        problem, low, width = (self._cost, self._mass), 0.0 * self._budget, HIGHEST
        for _ in range(HALVINGS):
            width /= 2
            dear = priced(rows, gain, low + width, *problem)[1] > self._budget
            low = low + width * dear
        (less, spent), (more, most) = (
            priced(rows, gain, price, *problem) for price in (low + width, low)
        )
        share = ((self._budget - spent) / (most - spent).clamp(min=1e-30)).clamp(0, 1)
        return less + share.unsqueeze(1) * (more - less)

    def keep(self, rows: Tensor) -> None:
        self._mass, self._budget = self._mass[rows], self._budget[rows]
        self._ends, self._inside, self._plan = (
            part[:, rows] for part in (self._ends, self._inside, self._plan)
        )


class SinkhornAttack:
    """State of the attack of Hu et al.: an image of the ball."""

    def __init__(self, x: Tensor, eps: float) -> None:
        self._x = self._point = x
        self._ball = wball.WassersteinBall(eps)

    def images(self) -> Tensor:
        return self._point

    def step(self, slope: Tensor, number: int) -> None:
        mass = self._x.sum((1, 2, 3), keepdim=True)
        wanted = torch.minimum(self._point + IMAGE_STEP * mass * slope, CUT * mass)
        self._point = self._ball.project(self._x, wanted, reg=1000.0, tol=1e-3).point

    def keep(self, rows: Tensor) -> None:
        self._x, self._point = self._x[rows], self._point[rows]


METHODS: dict[str, Callable[[Tensor, float], PlanAttack | SinkhornAttack]] = {
    "pgd": lambda x, eps: PlanAttack(x, eps, "pgd"),
    "frank-wolfe": lambda x, eps: PlanAttack(x, eps, "frank-wolfe"),
    "sinkhorn": SinkhornAttack,
}


def window(height: int, width: int, size: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """For each move and pixel: the pixel it ends at (0 outside), whether it is inside; the
    costs."""
    reach = torch.arange(size) - size // 2
    moves = torch.cartesian_prod(reach, reach)
    grid = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    ends = grid + moves.unsqueeze(1)
    inside = ((ends >= 0) & (ends < torch.tensor([height, width]))).all(2)
    return (ends[..., 0] * width + ends[..., 1]) * inside, inside, moves.double().norm(dim=1)


def softened(rows: Sequence[Tensor], total: Tensor) -> list[Tensor]:
    """``argmax <rows, p> + GAMMA H(p)`` over ``{p >= 0, sum p = total}``."""
    top = reduce(torch.maximum, rows)
    weights = [((row - top) / GAMMA).exp() for row in rows]
    share = total / sum(weights)
    return [share * weight for weight in weights]


def on_simplex(rows: Sequence[Tensor], total: Tensor) -> list[Tensor]:
    """Euclidean projection of each row onto ``{p >= 0, sum p = total}``.

    The level rises to where the entries above it exceed it by ``total``, and is there after as many
    Newton steps as entries at most; 7 steps leave an error below 1e-6.
    """
    level = reduce(torch.maximum, rows) - total
    for _ in range(ROUNDS):
        excess = sum((row - level).clamp(min=0) for row in rows) - total
        level = level + excess / sum((row > level).to(level) for row in rows).clamp(min=1)
    point = [(row - level).clamp(min=0) for row in rows]
    share = total / sum(point).clamp(min=1e-30)
    return [share * part for part in point]


@torch.compile(dynamic=True, disable=not torch.cuda.is_available())
def priced(
    rows: Rows, gain: Tensor, price: Tensor, cost: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor]:
    """The plan of each image at the price of its moves, and what these moves cost."""
    gains = [one - price.unsqueeze(1) * fee for one, fee in zip(gain, cost, strict=True)]
    plan = rows(gains, mass)
    spent = sum(part * fee for part, fee in zip(plan, cost, strict=True)).sum(1)
    return torch.stack(plan), spent


def ours(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int) -> Tensor:
    """Digits that the first members of StandardAttack break with this number of gradients."""
    found = torch.zeros_like(y, dtype=torch.bool)
    ball = wball.WassersteinBall(eps)
    for member in wball.StandardAttack(ball).members():
        steps -= member.steps
        left = (~found).nonzero().squeeze(1)
        if steps < 0 or not len(left):
            return found
        found[left] = member.on(ball)(model, x[left], y[left]).success
    return found


def broken(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, method: str, steps: int
) -> tuple[Tensor, int]:
    """Digits for which an attack finds a valid example, and the candidates that the audit
    rejects."""
    if method == OURS:
        return ours(model, x, y, eps, steps), 0
    attack, ball = METHODS[method](x, eps), wball.WassersteinBall(eps)
    found, left = torch.zeros_like(y, dtype=torch.bool), torch.arange(len(y), device=y.device)
    rejected = 0
    for number in range(steps + 1):
        z = attack.images().detach().requires_grad_(True)
        logits = model(z.clamp(0, 1))
        labels = y[left]
        if number % TESTED_EVERY == 0 or number == steps:
            fooled = (logits.argmax(1) != labels).nonzero().squeeze(1)
            index = left[fooled]
            if len(index):
                repaired, last = ball.project(x[index], z.detach()[fooled]), number == steps
                report = wball.audit(
                    ball,
                    x[index],
                    repaired.point,
                    plan=repaired.stored,
                    exact="sample" if last else "needed",
                    sample=1,
                )
                valid = report.valid.to(y.device)
                with torch.no_grad():
                    found[index] = (model(repaired.point).argmax(1) != y[index]) & valid
                rejected += int((~valid).sum())
        if number == steps:
            return found, rejected
        loss = F.cross_entropy(logits, labels, reduction="sum")
        (slope,) = torch.autograd.grad(loss, z)
        size = slope.flatten(1).abs().amax(1).clamp(min=1e-30)
        attack.step(slope / size.view(-1, 1, 1, 1), number)
        if number % TESTED_EVERY == 0:
            alive = (~found[left]).nonzero().squeeze(1)
            if not len(alive):
                return found, rejected
            attack.keep(alive)
            left = left[alive]
    raise AssertionError("the last step returns")


def main(arguments: list[str] | None = None) -> None:
    parser = options("predecessors", __doc__)
    parser.add_argument("--images", type=int, default=10000, help="number of test digits")
    parser.add_argument("--steps", type=int, default=300, help="gradient steps of each attack")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, OURS], help="attacks to run")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="networks to attack")
    given = parser.parse_args(arguments)
    result = Result("predecessors", given, steps=given.steps, tested_every=TESTED_EVERY)
    x, y = wball.load_dataset("mnist", given.data)
    x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
    torch.backends.cudnn.allow_tf32 = False  # an example must not exist in TF32 only
    order = (x > 0).flatten(1).sum(1).argsort()  # digits of a batch have about as many rows
    x, y = x[order], y[order]
    for name in given.networks:
        for method in given.methods:
            keys = [
                {"model": name, "method": method, "eps": eps, "images": len(x)} for eps in RADII
            ]
            if all(result.has(**key) for key in keys):
                continue
            model = wball.load_model(name, root=given.models).to(given.device).eval()
            with torch.no_grad():
                left = (model(x).argmax(1) == y).nonzero().squeeze(1)
            for key, eps in zip(keys, RADII, strict=True):
                begin, rejected = time.perf_counter(), 0
                survivors = [left[:0]]
                for part in left.split(BATCH) if len(left) else ():
                    found, count = broken(model, x[part], y[part], eps, method, given.steps)
                    survivors.append(part[~found])
                    rejected += count
                left = torch.cat(survivors)
                row = {"robust": 100 * len(left) / len(x), "rejected": rejected}
                if not result.has(**key):
                    seconds = round(time.perf_counter() - begin, 2)
                    result.add(key | row | {"seconds": seconds})
