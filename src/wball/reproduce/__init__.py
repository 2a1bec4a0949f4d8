"""Every table and figure of the paper by one command each: ``wball reproduce``, or ``python -m wball.reproduce``.

A recipe measures (:mod:`~wball.reproduce.measure` has both attacks), writes ``NAME.json`` with everything that its
figure needs, and is drawn from that file alone, there or on another machine.
"""

from wball.reproduce.run import RECIPES, chosen, draw, overview, reproduce, run
from wball.reproduce.workshop import MissingModel, Settings, Workshop

__all__ = ["RECIPES", "MissingModel", "Settings", "Workshop", "chosen", "draw", "overview", "reproduce", "run"]
