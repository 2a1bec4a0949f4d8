"""Every attack, with few steps: the list that all contracts go through. A new one is added here."""

from __future__ import annotations

from wball import (
    PGD,
    DecisionSearch,
    DualAveraging,
    FrankWolfe,
    LinfBall,
    ScoreSearch,
    StandardAttack,
    WassersteinBall,
)
from wball.attacks import Attack

BALL = WassersteinBall(0.3)

ATTACKS: dict[str, Attack] = {
    "dual averaging": DualAveraging(BALL, steps=8),
    "dual averaging, random start": DualAveraging(
        BALL, steps=5, random_start=5.0, objective="margin", memory=0.9
    ),
    "pgd": PGD(BALL, steps=3),
    "pgd, entropic, l2": PGD(BALL, steps=3, step="l2", step_size=0.5, reg=1e4, random_start=True),
    "pgd, conjugate step": PGD(BALL, steps=2, step="wasserstein", step_size=0.1),
    "frank-wolfe": FrankWolfe(BALL, steps=3),
    "fast": StandardAttack(BALL, version="fast"),
    "score search": ScoreSearch(BALL, queries=250, directions=8),
    "decision search": DecisionSearch(WassersteinBall(1.0), queries=600, directions=15),
    "linf pgd": PGD(LinfBall(0.1), steps=5, random_start=True),
    "linf frank-wolfe": FrankWolfe(LinfBall(0.1), steps=5),
    "linf fast": StandardAttack(LinfBall(0.05), version="fast"),
    "linf score search": ScoreSearch(LinfBall(0.1), queries=250, directions=8),
}
SOLVERS = [name for name in ATTACKS if name.startswith(("pgd", "frank"))]
"""They solve a convex program at each step."""
