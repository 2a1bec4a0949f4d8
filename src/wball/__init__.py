"""wball: robustness of image classifiers to moved mass (small Wasserstein distance)."""

from wball.ball import LinfBall, WassersteinBall
from wball.ground import DenseCost, GridCost, StencilCost
from wball.result import ProjectionResult, Status, SupportResult

__version__ = "0.1.0"

__all__ = [
    "DenseCost",
    "GridCost",
    "LinfBall",
    "ProjectionResult",
    "Status",
    "StencilCost",
    "SupportResult",
    "WassersteinBall",
]
