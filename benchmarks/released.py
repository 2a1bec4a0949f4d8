"""The projection released with the paper, PyPI ``projected-sinkhorn`` 0.2, if it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

FOLDER = "WBALL_PROJECTED_SINKHORN"


def released_projection() -> Callable[[Tensor, Tensor, float, float, int], Tensor] | None:
    """``(x, w, eps, reg, max_iter) -> z``, or ``None`` if the package is not there.

    The package pins an old torch, but its module runs with today's. Either it is installed
    (``pip install --no-deps projected-sinkhorn``), or ``WBALL_PROJECTED_SINKHORN`` names the folder
    of ``projected_sinkhorn.py``.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        found = importlib.util.find_spec("projected_sinkhorn")
        if found is None or not found.submodule_search_locations:
            return None
        folder = found.submodule_search_locations[0]
    sys.path.insert(0, folder)  # it imports its neighbour by its bare name
    try:
        path = Path(folder) / "projected_sinkhorn.py"
        spec = importlib.util.spec_from_file_location("released_projected_sinkhorn", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)

    def project(x: Tensor, w: Tensor, eps: float, reg: float, max_iter: int) -> Tensor:
        mass = x.sum((1, 2, 3), keepdim=True)
        cost = module.wasserstein_cost(x, p=1, kernel_size=5)
        radius = x.new_full((len(x),), eps)
        z = module.projected_sinkhorn(x / mass, w / mass, cost, radius, reg, maxiters=max_iter)
        return z * mass

    return project
