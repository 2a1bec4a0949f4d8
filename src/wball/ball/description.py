"""Ground costs as plain data, and back: files say what was evaluated, and reports draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wball.cost import DenseCost, GridCost, GroundCost, StencilCost
from wball.provenance import fingerprint


def describe_cost(cost: GroundCost) -> dict[str, Any]:
    """A ground cost as plain data. A matrix is too large for that: its size and checksum stand for it."""
    if isinstance(cost, DenseCost):
        return {"cost": "matrix", "size": cost.size, "sha256": fingerprint(cost.matrix)}
    if isinstance(cost, StencilCost):
        return {
            "cost": "table",
            "table": [[None if v == math.inf else v for v in row] for row in cost.table],
        }
    return {"cost": "grid", "window": cost.window, "p": float(cost.p)}


def read_cost(description: Mapping[str, Any]) -> GridCost | StencilCost | None:
    """The ground cost in what a ball's ``describe`` wrote; ``None`` if there is none that can be read back."""
    if description.get("cost") == "grid":
        return GridCost(description["window"], description["p"])
    if description.get("cost") == "table":
        rows = description["table"]
        return StencilCost(tuple(tuple(math.inf if v is None else v for v in row) for row in rows))
    return None
