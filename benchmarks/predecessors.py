r"""``python -m benchmarks predecessors``: the attacks of 2020 beside ours, at a fixed radius.

Wu, Wang and Yu keep a transport plan ``P`` of one entry per pixel and move of the window. Its image
is the sum of what arrives, clipped to the box for the network only: their iterates may exceed it.
Both of their attacks climb the cross-entropy along the gradient with respect to the plan, divided
by its largest entry:

* **Frank-Wolfe** moves by ``2 / (t + 2)`` towards ``argmax <G, P> + gamma H(P)`` over the ball;
* **PGD** adds the gradient and projects onto the plans of the ball, row by row onto a simplex.

Both prices are found by bisection. Hu et al. take l2 steps and project by projected Sinkhorn with
the box inside. Settings are those of the published scripts. Every example is taken to the nearest
image of the ball before it is judged, so that it counts only if it is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.frame import Result, options

CASES = (
    ("wong2019-mnist-adversarial", 0.1),
    ("wong2019-mnist-adversarial", 0.05),
    ("wong2019-mnist-standard", 0.1),
    ("wong2019-mnist-linf", 0.3),
    ("wong2019-mnist-binarized", 0.2),
    ("wu2020-mnist-adversarial", 0.3),
    ("hu2020-mnist-adversarial", 0.5),
    ("levine2020-mnist-flow-0.01", 0.2),
)
"""Network and radius."""
BATCH = 2000
"""Digits at a time: a plan has 25 numbers a pixel."""

GAMMA = 1e-3
"""Weight of the entropy in the linear oracle of Wu et al."""
HALVINGS = 50
"""Bisection steps of both prices."""
STEP_SIZE = 0.1
"""Of plan-space PGD, along the normalised gradient."""


@dataclass(frozen=True)
class Window:
    """All moves of a square window: offsets, and what each costs per unit of mass."""

    size: int = 5

    @property
    def costs(self) -> Tensor:
        reach = torch.arange(self.size) - self.size // 2
        return torch.cartesian_prod(reach, reach).double().norm(dim=1)

    def ends(self, image: Tensor, outside: float) -> Tensor:
        """``(B, moves, H, W)``: the value at the end of each move from each pixel."""
        margin = self.size // 2
        padded = F.pad(image, (margin,) * 4, value=outside)
        patches = padded.unfold(2, self.size, 1).unfold(3, self.size, 1)
        return patches.flatten(4).squeeze(1).movedim(3, 1)

    def arriving(self, plan: Tensor) -> Tensor:
        """``(B, 1, H, W)``: the mass that arrives at each pixel; mass never leaves the image."""
        height, width = plan.shape[2:]
        margin = self.size // 2
        folded = F.fold(
            plan.flatten(2),
            (height + 2 * margin, width + 2 * margin),
            kernel_size=self.size,
        )
        return folded[:, :, margin : margin + height, margin : margin + width]


def _price(cost: Callable[[Tensor], Tensor], budget: Tensor, highest: float) -> Tensor:
    """The smallest price at which a decreasing cost is within the budget, by bisection."""
    low, high = torch.zeros_like(budget), torch.full_like(budget, highest)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        dear = cost(middle) > budget
        low, high = torch.where(dear, middle, low), torch.where(dear, high, middle)
    return high


def _on_simplex(rows: Tensor, total: Tensor) -> Tensor:
    """Euclidean projection of ``rows[:, :, i]`` onto ``{p >= 0, sum p = total_i}``, over the moves."""
    ordered = rows.sort(1, descending=True).values
    counts = torch.arange(1, rows.shape[1] + 1, device=rows.device).view(1, -1, 1, 1)
    levels = (ordered.cumsum(1) - total) / counts
    used = (ordered > levels).sum(1, keepdim=True).clamp(min=1)
    return (rows - levels.gather(1, used - 1)).clamp(min=0)


def plan_attack(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, method: str, steps: int = 300
) -> Tensor:
    """Images of the last plan of ``"frank-wolfe"`` or ``"pgd"``; pixels may exceed 1."""
    window = Window()
    cost = window.costs.to(x).view(1, -1, 1, 1)
    budget = eps * x.flatten(1).sum(1)
    inside = window.ends(torch.ones_like(x), 0.0) > 0
    plan = torch.zeros_like(inside, dtype=x.dtype)
    plan[:, cost.numel() // 2] = x[:, 0]

    def spent(moved: Tensor) -> Tensor:
        return (moved * cost).flatten(1).sum(1)

    for step in range(steps):
        z = window.arriving(plan).detach().requires_grad_(True)
        loss = F.cross_entropy(model(z.clamp(0, 1)), y, reduction="sum")
        (slope,) = torch.autograd.grad(loss, z)
        gain = torch.where(inside, window.ends(slope, 0.0), 0.0)
        gain = gain / gain.flatten(1).abs().amax(1).clamp(min=1e-30).view(-1, 1, 1, 1)
        if method == "frank-wolfe":
            scores = torch.where(inside, gain, -torch.inf) / GAMMA

            def proposed(price: Tensor, scores: Tensor = scores) -> Tensor:
                return x * torch.softmax(scores - price.view(-1, 1, 1, 1) * cost / GAMMA, 1)

            rate = 2.0 / (step + 2)
            target = proposed(_price(lambda p: spent(proposed(p)), budget, 4.0))
            plan = plan + rate * (target - plan)
        else:
            wanted = torch.where(inside, plan + STEP_SIZE * gain, -torch.inf)

            def projected(price: Tensor, wanted: Tensor = wanted) -> Tensor:
                return _on_simplex(wanted - price.view(-1, 1, 1, 1) * cost, x)

            plan = projected(_price(lambda p: spent(projected(p)), budget, 4.0))
    return window.arriving(plan)


def sinkhorn_attack(
    model: nn.Module, x: Tensor, y: Tensor, ball: wball.WassersteinBall, steps: int = 300
) -> Tensor:
    """Images of the attack of Hu et al. at a fixed radius: an l2 step of 0.06 times the mass."""
    length = 0.06 * x.flatten(1).sum(1)
    point, duals = x, None
    for _ in range(steps):
        z = point.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(z), y, reduction="sum"), z)
        size = slope.flatten(1).norm(dim=1).clamp(min=1e-30)
        step = (length / size).view(-1, 1, 1, 1) * slope
        found = ball.project(x, point + step, reg=1000.0, tol=1e-3, init=duals)
        point, duals = found.point, found.duals
    return point


def main(arguments: list[str] | None = None) -> None:
    parser = options("predecessors", __doc__)
    parser.add_argument("--images", type=int, default=10000, help="number of test digits")
    parser.add_argument("--steps", type=int, default=300, help="gradient steps of each attack")
    parser.add_argument(
        "--methods", nargs="+", default=["frank-wolfe", "sinkhorn", "pgd"], help="attacks to run"
    )
    given = parser.parse_args(arguments)
    result = Result("predecessors", given, steps=given.steps)
    x, y = wball.load_dataset("mnist", given.data)
    x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
    for method in given.methods:
        for name, eps in CASES:
            key = {"model": name, "eps": eps, "method": method, "images": len(x)}
            if result.has(**key):
                continue
            model = wball.load_model(name, root=given.models).to(given.device).eval()
            right = torch.cat(
                [
                    survivors(model, *part, eps, method, given.steps)
                    for part in zip(x.split(BATCH), y.split(BATCH), strict=True)
                ]
            )
            result.add(key | {"robust": 100 * float(right.double().mean())})


def survivors(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, method: str, steps: int
) -> Tensor:
    """Images that are right, and stay so at the repaired example of an attack."""
    ball = wball.WassersteinBall(eps)
    if method == "sinkhorn":
        found = sinkhorn_attack(model, x, y, ball, steps)
    else:
        found = plan_attack(model, x, y, eps, method, steps)
    repaired = ball.project(x, found).point
    with torch.no_grad():
        return (model(x).argmax(1) == y) & (model(repaired).argmax(1) == y)
