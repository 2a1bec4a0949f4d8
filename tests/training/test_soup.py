"""Networks between two networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wball.training import mixed


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


def test_weights_and_statistics_are_on_the_line_between_both() -> None:
    first, second = network(0).eval(), network(1).train()
    second.load_state_dict(
        {
            k: v + 4 if "running" in k or "tracked" in k else v
            for k, v in second.state_dict().items()
        }
    )
    before = {k: v.clone() for k, v in first.state_dict().items()}
    found = mixed(first, second, 0.25)
    for name, value in found.state_dict().items():
        mine, theirs = before[name], second.state_dict()[name]
        torch.testing.assert_close(
            value, mine + 0.25 * (theirs - mine) if value.is_floating_point() else mine
        )
        assert torch.equal(first.state_dict()[name], mine)  # a new network
    assert not found.training
    for share, end in ((0.0, first), (1.0, second)):
        for a, b in zip(mixed(first, second, share).parameters(), end.parameters(), strict=True):
            assert torch.equal(a, b)


def test_networks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="layers of first"):
        mixed(network(0), nn.Linear(2, 2), 0.5)
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got 1.5"):
        mixed(network(0), network(1), 1.5)
