"""Several processes that train one model, started by ``torchrun``.

Each global batch is cut into equal shards, one per process, and gradients are averaged; evaluation counts its shard and
adds up. Everything random is drawn for the global batch from the same seeds on every process, so that the result does
not depend on how many there are (up to rounding, attacks with random starts, layers such as dropout, and, on CPUs,
batch normalisation: there each process normalises by its own shard, and the main one's running statistics are kept).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class World:
    """This process among all: its ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def shard(self, values: Tensor) -> Tensor:
        """This process's equal part of a global batch."""
        part = values.shape[0] // self.size
        return values[self.rank * part : (self.rank + 1) * part]

    def strided(self, values: Tensor) -> Tensor:
        """This process's part of any number of values, for counting."""
        return values[self.rank :: self.size]

    def gather(self, shard: Tensor) -> Tensor:
        """The global batch from its equal parts."""
        if self.size == 1:
            return shard
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(parts, shard.contiguous())
        return torch.cat(parts)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def share(self, value: Any) -> Any:
        """The main process's value, on all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the main process."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def current() -> World:
    """The world of the process group that is running, or a world of one."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


@contextmanager
def launched(device: str) -> Iterator[torch.device]:
    """Join the processes that ``torchrun`` started, if it did. Yields this process's device."""
    chosen = torch.device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield chosen
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield chosen
    finally:
        dist.destroy_process_group()
