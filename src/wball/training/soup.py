r"""One network between two: weights of networks that were trained from one another, mixed.

A network that was trained on for robustness moves away from where it was most accurate. Along the straight line between
both, :math:`(1 - s)\, w_0 + s\, w_1`, the loss stays low (Wortsman et al., 2022), so that one trade-off can be chosen
without training. Statistics of batch normalisation are mixed like weights.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


@torch.no_grad()
def mixed(first: nn.Module, second: nn.Module, share: float) -> nn.Module:
    """A new network with the share ``share`` of the second's weights and statistics, the rest from the first.

    >>> a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = a.weight.data.fill_(1.0), b.weight.data.fill_(3.0)
    >>> mixed(a, b, 0.25).weight.item()
    1.5
    """
    theirs, ours = second.state_dict(), first.state_dict()
    if _shapes(theirs) != _shapes(ours):
        raise ValueError(
            "second must have the layers of first: their weights differ in name or shape"
        )
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    model = copy.deepcopy(first)
    floating = {
        k: torch.lerp(v, theirs[k].to(v), share) for k, v in ours.items() if v.is_floating_point()
    }
    model.load_state_dict({**ours, **floating})
    return model


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
