"""Which of how many processes this is: asked by training, by evaluations and by the command line, answered once."""

from __future__ import annotations

import os

from torch import distributed as dist


def grouped() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Rank and number of processes: as the process group tells them or, before there is one, ``torchrun``."""
    if grouped():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
