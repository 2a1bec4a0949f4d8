"""Threat models: the sets an attacker may choose from, and a certificate must hold for."""

from wball.ball.base import Ball, Plans
from wball.ball.linf import LinfBall
from wball.ball.wasserstein import WassersteinBall

__all__ = ["Ball", "LinfBall", "Plans", "WassersteinBall"]
