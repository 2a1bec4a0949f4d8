"""What exists besides this library: loaded from where it is installed, never part of this repository."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PeerProjection = Callable[[Tensor, Tensor, float, float, int], Tensor]
"""``(x, w, eps, reg, max_iter) -> z``"""

FOLDER = "WBALL_PROJECTED_SINKHORN"


class Absent(Exception):
    """A peer is not installed here."""


def released_projection() -> PeerProjection:
    """The paper's released code, PyPI ``projected-sinkhorn`` 0.2.

    The package pins a torch of its time, but its module runs with today's when its folder is on the path: either it is
    installed (``pip install --no-deps projected-sinkhorn``), or the variable ``WBALL_PROJECTED_SINKHORN`` names the
    folder that holds ``projected_sinkhorn.py``.
    """
    module = _released_module()

    def project(x: Tensor, w: Tensor, eps: float, reg: float, max_iter: int) -> Tensor:
        mass = x.sum((1, 2, 3), keepdim=True)
        cost = module.wasserstein_cost(x, p=1, kernel_size=5)
        radius = x.new_full((len(x),), eps)
        return (
            module.projected_sinkhorn(x / mass, w / mass, cost, radius, reg, maxiters=max_iter)
            * mass
        )

    return project


def _released_module() -> Any:
    folder = os.environ.get(FOLDER)
    if folder is None:
        spec = importlib.util.find_spec("projected_sinkhorn")
        if spec is None or not spec.submodule_search_locations:
            raise Absent(f"projected-sinkhorn is not installed and {FOLDER} is not set")
        folder = spec.submodule_search_locations[0]
    path = Path(folder) / "projected_sinkhorn.py"
    if not path.is_file():
        raise Absent(f"there is no projected_sinkhorn.py in the folder that {FOLDER} names")
    sys.path.insert(0, folder)  # it imports its neighbour by its bare name
    try:
        spec = importlib.util.spec_from_file_location("released_projected_sinkhorn", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def art_projection() -> PeerProjection:
    """The projection inside ART's ``Wasserstein`` attack, in NumPy."""
    try:
        from art.attacks.evasion import Wasserstein
    except ImportError as error:
        raise Absent(f"ART is not installed ({error})") from error
    attack = Wasserstein.__new__(Wasserstein)
    attack._estimator = types.SimpleNamespace(channels_first=True)
    attack.kernel_size = 5

    def project(x: Tensor, w: Tensor, eps: float, reg: float, max_iter: int) -> Tensor:
        attack.regularization, attack.projected_sinkhorn_max_iter = reg, max_iter
        # The distance itself (p = 1): ART's own table takes p as the exponent of the squared one.
        offset = np.arange(5) - 2
        cost = np.hypot(offset[:, None], offset[None, :])
        with np.errstate(all="ignore"):
            z = attack._projected_sinkhorn(
                w.double().cpu().numpy(), x.double().cpu().numpy(), cost, np.full(len(x), eps)
            )
        return torch.from_numpy(z).to(x)

    return project
