"""Attacks: search the ball for an image that the model gets wrong."""

from wball.attacks.attack import Attack, AttackResult, AttackStatus
from wball.attacks.base import GradientAttack
from wball.attacks.decision_search import DecisionSearch
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.frank_wolfe import FrankWolfe
from wball.attacks.minimal_radius import MinimalRadius, minimal_radius
from wball.attacks.pgd import PGD, GrowingRadius
from wball.attacks.score_search import ScoreSearch
from wball.attacks.standard import StandardAttack
from wball.lazy import submodules

__all__ = [
    "Attack",
    "AttackResult",
    "AttackStatus",
    "DecisionSearch",
    "DualAveraging",
    "FrankWolfe",
    "GradientAttack",
    "GrowingRadius",
    "MinimalRadius",
    "PGD",
    "ScoreSearch",
    "StandardAttack",
    "minimal_radius",
]

__getattr__ = submodules(__name__)
