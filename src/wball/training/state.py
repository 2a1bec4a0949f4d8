"""The state of a run, in one checkpoint file that is always complete.

Tensors and a JSON header go into one safetensors file. It is written beside the old one and renamed
over it, so that there is always exactly one complete checkpoint. Nothing is pickled.

Random numbers need no state: permutations, augmentation and attacks are drawn from generators seeded
by the run's seed and the number of the epoch or step (:func:`generator`), so that a repeated step
repeats its numbers.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wball.storage.files import DamagedFile, read_tensors, write_whole


def generator(
    seed: int, purpose: str, number: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator for one purpose and one epoch or step.

    >>> generator(0, "order", 3).initial_seed() == generator(0, "order", 3).initial_seed()
    True
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a checkpoint."""
    try:
        tensors, header = read_tensors(path)
    except DamagedFile as error:
        raise ValueError(
            f"{error}: it is not a checkpoint of a training run; delete it to start over"
        ) from error
    return tensors, header


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors (momenta, second moments, counts) by name."""
    state = optimizer.state_dict()["state"]
    return {
        f"{k}.{name}": v
        for k, entry in state.items()
        for name, v in entry.items()
        if isinstance(v, Tensor)
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what :func:`pack_optimizer` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    # In the layout of their parameters, which files do not keep and fused optimizers insist on.
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                entry[name] = torch.empty_like(parameter).copy_(value)


class Average:
    """Exponential moving average of a model's weights. With decay 0 it is the model itself."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.model = copy.deepcopy(model).requires_grad_(False).eval() if decay > 0 else model
        pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))
        self._moving = [pair for pair in pairs if pair[0].is_floating_point()]
        self._counting = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        if self.decay == 0:
            return
        self.count += 1
        keep = min(self.decay, self.count / (self.count + 10))  # early weights are soon forgotten
        # A few launches for all tensors, instead of one for each.
        mine, theirs = zip(*self._moving, strict=True)
        torch._foreach_lerp_(mine, theirs, 1 - keep)
        if self._counting:
            mine, theirs = zip(*self._counting, strict=True)
            torch._foreach_copy_(mine, theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class MetricsLog:
    """Metrics as JSON lines.

    The file only grows. A run that resumes first rewrites it from the checkpoint's ``history``, so
    that each epoch appears once, whatever happened to the file.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]]) -> None:
        path = folder / "metrics.jsonl"
        write_whole(path, b"".join(map(_line, history)))
        self._file = path.open("ab")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()
