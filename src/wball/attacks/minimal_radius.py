r"""The smallest radius at which an attack succeeds, per image: the whole accuracy-versus-eps curve
from one run.

An example found at some radius is first pulled back towards its image: the ball is star-shaped
around ``x``, and ``x + s (z - x)`` has a distance of at most ``s`` times that of ``z``, so the
smallest ``s`` that still fools the model, found with forward passes alone, is a smaller radius with
its own proof. Then the interval between the largest radius at which the attack failed and the
smallest proved one is halved, for all images at once, each at its own radius.

Success is not monotone in ``eps`` for a heuristic attack, so ``radius`` is an upper bound of the
smallest radius (with an example to show), and ``failed`` the largest radius below it without an
example.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.attack import Attack, Task, check_attack
from wball.display import Summarised
from wball.inputs import per_image, positions, result_dtype, zeros
from wball.model import Model, as_found, ask, full_precision, reached

PULL_BACK_STEPS = 8
"""Halvings of the segment from an example to its image: 1/256 of its length."""
TOL = 0.01
"""An image is done when its interval is this small relative to the upper end."""


@dataclass(frozen=True, repr=False)
class MinimalRadius(Summarised):
    """The smallest radius found per image.

    Attributes:
        radius: smallest radius with an example, in the unit of ``eps``, float64; 0 where the clean
            image is already wrong, ``inf`` where nothing was found up to ``hi``.
        failed: largest radius below it at which the attack failed.
        images: the example at ``radius``, or the clean image.
        success: whether there is one.
    """

    radius: Tensor
    failed: Tensor
    images: Tensor
    success: Tensor

    def headline(self) -> dict[str, str]:
        shown = {"images": str(len(self.radius)), "broken": str(int(self.success.sum()))}
        if self.success.any():
            shown["median radius"] = f"{float(self.radius[self.success].median()):.4g}"
        return shown

    def accuracy_at(self, eps: float) -> float:
        """Share of the images without an example at a radius up to ``eps``. Meaningful up to ``hi``
        of the search."""
        return float((self.radius > eps).double().mean()) if self.radius.numel() else 1.0


def minimal_radius(
    model: Model,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    *,
    hi: float = 1.0,
    rounds: int = 6,
    target: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> MinimalRadius:
    """Search, per image, the smallest radius up to ``hi`` at which ``attack`` succeeds.

    Args:
        model: images to logits.
        x: images.
        y: their labels.
        attack: any attack; its ball's radius is replaced by those of the search.
        hi: largest radius.
        rounds: halvings after the attack at ``hi``.
        target: target classes, for a targeted search.
        generator: source of randomness.
    """
    check_attack(attack)
    inputs.check_positive("hi", hi)
    inputs.check_count("rounds", rounds, 0)
    x = inputs.check_images(x.detach() if isinstance(x, Tensor) else x, attack.ball.box)
    x = x.to(result_dtype(x))
    y = inputs.check_labels("y", y, x)
    target = None if target is None else inputs.check_labels("target", target, x)
    whole = Task(model, x, y, target)
    radius = zeros(x) + math.inf
    failed = torch.zeros_like(radius)
    images = x.clone()
    todo, eps = torch.arange(len(x), device=x.device), torch.full_like(radius, hi)
    attack = attack.at(hi).prepared(model, x, y)
    for _ in range(rounds + 1):
        if todo.numel() == 0:
            break
        task, at = whole.take(todo), eps[todo]
        result = attack.at(at)(model, task.x, task.y, target=task.target, generator=generator)
        # An attack's radius may grow by itself.
        success = result.success & (result.radius <= at)
        if result.distance[success].isnan().any():
            raise ValueError(
                "attack must prove distances, but they are NaN: PGD in mode 'paper' leaves every ball; use mode 'exact'"
            )
        found = todo[success]
        nearer, share = _pull_back(whole.take(found), result.images[success])
        distance = torch.minimum(result.distance[success], at[success]) * share
        problem = attack.ball.problem(x[found])
        if problem is not None:  # points that were pulled back were rounded once more
            again = problem.rounding_cost() / problem.unit
            distance = torch.where((share < 1) & (distance > 0), distance + again, distance)
        radius[found], images[found] = distance, nearer
        failed[todo] = torch.maximum(failed[todo], torch.where(success, 0.0, at))
        # An example may be found below a radius at which the attack failed.
        failed = torch.where(radius < failed, 0.0, failed)
        open_interval = radius.isfinite() & (radius - failed > TOL * radius)
        todo = positions(open_interval)
        eps = torch.where(open_interval, (radius + failed) / 2, eps)
    return MinimalRadius(radius, failed, images, radius.isfinite())


def _pull_back(task: Task, z: Tensor) -> tuple[Tensor, Tensor]:
    """The adversarial point nearest to the image on the segment from ``z``, by bisection, and its
    share of the way."""
    x = task.x
    low = zeros(x)
    high, best = torch.ones_like(low), z
    with as_found(task.model, x.device), full_precision(), torch.no_grad():
        for _ in range(PULL_BACK_STEPS if len(x) else 0):
            share = (low + high) / 2
            point = x + per_image(share.to(x.dtype), x) * (z - x)
            success = reached(ask(task.model, point), task.y, task.target)
            low, high = torch.where(success, low, share), torch.where(success, share, high)
            best = torch.where(per_image(success, x), point, best)
        held = task.judge(best)
    return torch.where(per_image(held, x), best, z), torch.where(held, high, 1.0)
