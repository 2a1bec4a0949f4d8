"""Attacks: search the ball for an image that the model gets wrong."""

from importlib import import_module
from typing import Any

from wball.attacks.base import Attack
from wball.attacks.decision_search import DecisionSearch
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.frank_wolfe import FrankWolfe
from wball.attacks.minimal_radius import MinimalRadius, minimal_radius
from wball.attacks.pgd import PGD
from wball.attacks.result import AttackResult, AttackStatus
from wball.attacks.schedule import GrowingRadius
from wball.attacks.score_search import ScoreSearch
from wball.attacks.standard import StandardAttack

__all__ = [
    "Attack",
    "AttackResult",
    "AttackStatus",
    "DecisionSearch",
    "DualAveraging",
    "FrankWolfe",
    "GrowingRadius",
    "MinimalRadius",
    "PGD",
    "ScoreSearch",
    "StandardAttack",
    "minimal_radius",
]


def __getattr__(name: str) -> Any:
    if name != "adapters":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.adapters")
