"""Every table and figure of the paper by one command each: ``wball reproduce``, or ``python -m wball.paper``.

A recipe measures (:mod:`~wball.paper.measure` has both attacks), writes ``NAME.json`` with everything that its
figure needs, and is drawn from that file alone, there or on another machine.
"""

from wball.paper.run import RECIPES, chosen, draw, overview, reproduce, run
from wball.paper.workshop import MissingModel, Settings, Workshop

__all__ = ["RECIPES", "MissingModel", "Settings", "Workshop", "chosen", "draw", "overview", "reproduce", "run"]
