"""What is left of a GPU, by the numbers that torch gives."""

from __future__ import annotations

import pytest
import torch

from wball.memory import free_bytes

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("taken", "reserved", "free", "share", "left"),
    [
        (0, 0, 80, 1.0, 80),  # no other process
        (10, 30, 50, 1.0, 70),  # 20 in the allocator's cache can be used again
        (10, 10, 30, 1.0, 30),  # another process holds 60
        (10, 30, 70, 0.4, 30),  # the process may have 40 of 100
        (45, 45, 55, 0.4, 0),  # and has more than that already
    ],
)
def test_free_memory_is_what_this_process_may_still_have(
    monkeypatch: pytest.MonkeyPatch, taken: int, reserved: int, free: int, share: float, left: int
) -> None:
    """Batches were sized without the process's share, and died of it."""
    said = {"memory_allocated": taken, "memory_reserved": reserved, "mem_get_info": (free, 100)}
    for name, value in {**said, "get_per_process_memory_fraction": share}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_bytes(GPU) == left
