"""The state of a run, in one checkpoint file that is always complete.

Tensors and a JSON header go into one safetensors file. It is written beside the old one and renamed
over it, so that there is always exactly one complete checkpoint. Nothing is pickled.

Random numbers need no state: permutations, augmentation and attacks are drawn from generators
seeded by the run's seed and the number of the epoch or step (:func:`generator`), so that a repeated
step repeats its numbers.

Processes started by ``torchrun`` share a run. Each global batch is split into equal shards, one per
process, and gradients are averaged. Random numbers are drawn for the global batch from the same
seeds in every process, and on GPUs batch normalisation uses the global batch
(:class:`torch.nn.SyncBatchNorm`), so that the result does not depend on the number of processes (up
to rounding, attacks with random starts, and layers such as dropout).
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch import distributed as dist

from wball.provenance import Plain
from wball.storage.files import (
    DamagedFile,
    Tensors,
    grouped,
    rank_and_size,
    read_tensors,
    write_whole,
)


def generator(
    seed: int, purpose: str, number: int, device: torch.device | str = "cpu"
) -> Generator:
    """A random generator for one purpose and one epoch or step.

    >>> generator(0, "order", 3).initial_seed() == generator(0, "order", 3).initial_seed()
    True
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def load_state(path: Path) -> tuple[Tensors, Plain]:
    """The tensors and the header of a checkpoint."""
    try:
        return read_tensors(path)
    except DamagedFile as error:
        raise ValueError(
            f"{error}: it is not a checkpoint of a training run; delete it to start over"
        ) from error


def pack_optimizer(optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's tensors (momenta, second moments, counts) by name."""
    state = optimizer.state_dict()["state"]
    return {
        f"{k}.{name}": v
        for k, entry in state.items()
        for name, v in entry.items()
        if isinstance(v, Tensor)
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Restore the tensors saved by :func:`pack_optimizer`."""
    state: dict[int, Tensors] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    # In the memory layout of the parameters, which files do not keep and fused optimizers require.
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[name] = torch.empty_like(parameter).copy_(value)


class Average:
    """Exponential moving average of a model's weights; with decay 0, the weights themselves."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.model = copy.deepcopy(model).requires_grad_(False).eval() if decay > 0 else model
        self._pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        if self.decay == 0:
            return
        self.count += 1
        keep = min(self.decay, self.count / (self.count + 10))  # early weights are soon forgotten
        for mine, theirs in self._pairs:
            if mine.is_floating_point():
                mine.lerp_(theirs, 1 - keep)
            else:
                mine.copy_(theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def write_metrics(folder: Path, history: list[Plain]) -> None:
    """Write the records of all epochs as JSON lines. A run that resumes begins with those of its
    checkpoint, so that each epoch appears once, whatever happened to the file."""
    lines = "".join(json.dumps(record) + "\n" for record in history)
    write_whole(folder / "metrics.jsonl", lines.encode())


@dataclass(frozen=True)
class World:
    """This process in its process group: its ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def shard(self, values: Tensor) -> Tensor:
        """This process's equal part of a global batch."""
        part = len(values) // self.size
        return values[self.rank * part : (self.rank + 1) * part]

    def strided(self, values: Tensor) -> Tensor:
        """This process's part of a list of any length, for counting."""
        return values[self.rank :: self.size]

    def gather(self, shard: Tensor) -> Tensor:
        """Gather the global batch from its equal parts."""
        if self.size == 1:
            return shard
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(parts, shard.contiguous())
        return torch.cat(parts)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def agreed(self, value: Any) -> Any:
        """Broadcast the main process's value to all processes."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the main process."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def current() -> World:
    """The running process group, or a world of one process."""
    return World(*rank_and_size()) if grouped() else World()


@contextmanager
def launched(device: str) -> Iterator[torch.device]:
    """Join the process group of ``torchrun``, if there is one. Yields the device of this
    process."""
    chosen = torch.device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or grouped():
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
