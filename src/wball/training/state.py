"""What an interrupted run needs to resume, in one file that is always complete.

Tensors and a JSON header go into one safetensors file, written beside the old one, flushed to the disk and renamed over
it: at any moment there is exactly one complete checkpoint, the old one or the new one. Nothing is pickled.

Random numbers need no state: permutations, augmentation, radii and attacks are drawn from generators seeded by the
run's seed and the number of the epoch or step (:func:`generator`), so that a repeated step repeats its numbers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wball.storage.atomic import write_whole
from wball.storage.files import DamagedFile, read_tensors, write_tensors


def generator(
    seed: int, purpose: str, number: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator of its own for a purpose and an epoch or step.

    >>> generator(0, "order", 3).initial_seed() == generator(0, "order", 3).initial_seed()
    True
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def save_state(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Replace the checkpoint at ``path``, all or nothing."""
    write_tensors(path, tensors, header)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a checkpoint."""
    try:
        tensors, header = read_tensors(path)
    except DamagedFile as error:
        raise ValueError(
            f"{error}: it is not a checkpoint of a training run; delete it to start over"
        ) from error
    if header is None:
        raise ValueError(f"{path} is not a checkpoint of a training run; delete it to start over")
    return tensors, header


def check_header(path: str, header: Any) -> None:
    """Raise unless a checkpoint's header has what a run goes on from: files may be edited by hand."""
    kinds: dict[str, Any] = {
        "config": dict,
        "history": list,
        "step": int,
        "images": int,
        "averaged": int,
    }
    for name, kind in {**kinds, "seconds": (int, float)}.items():
        value = header.get(name) if isinstance(header, dict) else None
        if not isinstance(value, kind) or (not isinstance(value, (dict, list)) and not value >= 0):
            raise ValueError(
                f"{path} is not a checkpoint of a training run (its {name} is {value!r}); delete it to start over"
            )


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
    """Exponential moving average of a model's weights and statistics. With decay 0 it is the model itself."""

    def __init__(self, model: nn.Module, copy: nn.Module, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.model = copy if decay > 0 else model
        if decay > 0:
            self.model.load_state_dict(model.state_dict())
            self.model.requires_grad_(False).eval()
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
    """Metrics as JSON lines, and in TensorBoard where that is installed.

    The file only grows; a run that goes on from a checkpoint first writes it anew from the checkpoint's ``history``, so
    that no epoch appears twice or not at all, whatever happened to the file.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]], step: int) -> None:
        path = folder / "metrics.jsonl"
        write_whole(path, b"".join(map(_line, history)))
        self._file = path.open("ab")
        self._board = _tensorboard(folder, step)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, record["step"])
            self._board.flush()  # before the checkpoint that counts on it

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _line(record: dict[str, Any]) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(
        str(folder / "tensorboard"), purge_step=step + 1
    )  # what was written at this step stays
