"""Attacks: search the ball for an image that the model gets wrong."""

from wball.attacks.base import Attack, AttackResult, AttackStatus
from wball.attacks.dual_averaging import DualAveraging

__all__ = ["Attack", "AttackResult", "AttackStatus", "DualAveraging"]
