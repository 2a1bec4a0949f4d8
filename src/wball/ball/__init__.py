"""Threat models: the sets an attacker may choose from, and a certificate must hold for."""

from wball.ball.base import Ball
from wball.ball.linf import LinfBall
from wball.ball.wasserstein import WassersteinBall
from wball.input_sets import Plans

__all__ = ["Ball", "LinfBall", "Plans", "WassersteinBall"]
