"""Input sets: what a certificate knows about a threat model. Below the ball, which makes them."""

from wball.input_sets.base import InputSet, Plans
from wball.input_sets.box import IntervalSet, SupportSet
from wball.input_sets.transport import TransportSet

__all__ = ["InputSet", "IntervalSet", "Plans", "SupportSet", "TransportSet"]
