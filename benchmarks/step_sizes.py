"""``python -m benchmarks step_sizes``: is the default step of PGD as strong as the best fixed one?

Held-out training digits (``--data``), bundled networks, 40 steps with exact projections. A row is a
network, a radius and a step: ``share`` is that of the largest change of an image
(``WassersteinBall.ascent_step``), ``size`` a fixed length. The default is the share
``wball.ball.STEP``.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import wball
from benchmarks.frame import Result, Row, options
from wball import ball as balls

SHARES, SIZES, SIGN = (0.2, 0.35, 0.5, 0.7, 1.0, 1.4), (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), 0.1


@dataclass(frozen=True)
class Trial:
    """A step of projected gradient ascent: its norm, a fixed size, or a share of the ball's."""

    step: str | None
    size: float | None = None
    share: float | None = None

    def attack(self, eps: float, steps: int) -> wball.PGD:
        return wball.PGD(
            wball.WassersteinBall(eps), steps=steps, step=self.step, step_size=self.size
        )


def main(arguments: list[str] | None = None) -> None:
    parser = options("step_sizes", __doc__)
    parser.add_argument(
        "--networks",
        nargs="+",
        default=["mnist-standard", "mnist-binarized", "mnist-adversarial", "mnist-certified"],
    )
    parser.add_argument("--eps", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    parser.add_argument("--images", type=int, default=200, help="digits, the last of training")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args(arguments)
    if given.data is None:
        parser.error("--data: the folder with the training digits of MNIST (wball data mnist)")
    trials = [Trial("linf", SIGN), *(Trial("l2", size) for size in SIZES)]
    trials += [Trial(None, share=share) for share in SHARES]
    result = Result("step_sizes", given, images=given.images, steps=given.steps)
    x, y = wball.load_dataset("mnist", given.data, split="train")
    x, y = (values[-given.images :].to(given.device) for values in (x, y))
    for name in given.networks:
        model = wball.load_model(name).to(given.device).eval()
        for eps in given.eps:
            for trial in trials:
                row: Row = {"model": name, "eps": eps, **vars(trial)}
                if not result.has(**row):
                    with mock.patch.object(balls, "STEP", trial.share or balls.STEP):
                        found = trial.attack(eps, given.steps)(model, x, y)
                    result.add({**row, "robust": found.robust_accuracy})
    for share in SHARES:
        print(f"share {share:g}: at most {_behind(result.rows, share):.1%} behind the best fixed")


def _behind(rows: list[Row], share: float) -> float:
    """The largest difference to the best fixed step, over networks and radii."""
    best: dict[tuple[str, float], float] = {}
    for row in rows:
        if row["size"] is not None:
            key = row["model"], row["eps"]
            best[key] = min(row["robust"], best.get(key, 1.0))
    return max(
        row["robust"] - best[row["model"], row["eps"]] for row in rows if row["share"] == share
    )


if __name__ == "__main__":
    main()
