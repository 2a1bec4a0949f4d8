"""Loading and saving weights. Nothing read here can execute code.

Weights are written as safetensors. ``.pth``/``.pt`` files are opened with ``weights_only=True``.
The state dict may be under ``net``, ``model``, ``state_dict`` or ``model_state_dict``, in a list,
and its names may have, or lack, prefixes such as ``module.`` of a wrapper.
"""

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wball.storage.files import CHECKSUM, PathLike, Tensors, tensor_checksum, write_whole

StateDict = Tensors
Model = TypeVar("Model", bound=nn.Module)

# Keys under which public training scripts store the weights.
_PACKED_UNDER = (
    "state_dict",
    "model_state_dict",
    "net",
    "model",
    "weights",
    "params",
    "model_state",
    "state_dict_ema",
)
_COUNTER = "num_batches_tracked"
_AVERAGED = "n_averaged"  # of torch's AveragedModel, beside the weights


def load_weights(model: Model, path: PathLike) -> Model:
    """Load a ``.safetensors``, ``.pth`` or ``.pt`` file into ``model``, in place, and return it.

    If a tensor is missing, unexpected or has a different shape, a ``ValueError`` names it and the
    model is unchanged. The dtype and device of the model are kept.
    """
    path = Path(path)
    wanted = _tensors_of(model)
    candidates = list(_state_dicts(read_weights(path)))
    if not candidates:
        raise ValueError(
            f"{path} has no state dict: expected tensors by name, or a dict with one under "
            f"{_PACKED_UNDER[0]!r}"
        )
    complaints = []
    for found in candidates:
        matched = _match(found, wanted)
        complaint = _complaint(matched, wanted)
        if not complaint:
            model.load_state_dict(matched, strict=False)  # only batch counters may be absent
            return model
        complaints.append(complaint)
    which = f" (the first of {len(candidates)} state dicts in it)" if len(candidates) > 1 else ""
    raise ValueError(
        f"the weights in {path}{which} do not fit this {type(model).__name__}: {complaints[0]}"
    )


def save_weights(
    model: nn.Module, path: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the model's weights as safetensors, atomically."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {path}")
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in _tensors_of(model).items()
    }
    # save_file would make a file that only its owner can read.
    write_whole(
        path, save(tensors, metadata={**(metadata or {}), CHECKSUM: tensor_checksum(tensors)})
    )


def _tensors_of(model: nn.Module) -> StateDict:
    """The tensors of the model's state, without ``get_extra_state``."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if lazy := [name for name, value in state.items() if is_lazy(value)]:
        raise ValueError(
            f"{lazy[0]} of {type(model).__name__} has no shape yet: call it on an image first"
        )
    return state


def read_weights(path: Path) -> Any:
    """The content of a weights file: tensors, in dictionaries and lists."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights file at {path}")
    if path.suffix.lower() == ".safetensors":
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                checksum = (file.metadata() or {}).get(CHECKSUM)  # other programs do not write one
        except (SafetensorError, json.JSONDecodeError, OSError) as error:
            raise ValueError(
                f"{path} is not a complete safetensors file ({error}): truncated or not that format"
            ) from error
        if checksum is not None and checksum != tensor_checksum(tensors):
            raise ValueError(f"{path} is damaged: the weights do not have their checksum")
        return tensors
    if path.suffix.lower() not in (".pth", ".pt", ".bin", ".ckpt", ".tar"):
        raise ValueError(
            f"{path} has an unknown ending {path.suffix!r}; expected .safetensors, .pth or .pt"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise any exception
        # torch's message advises to disable the protection, so it is not passed on.
        if isinstance(error, pickle.UnpicklingError) and (
            refused := re.search(r"GLOBAL ([\w.]+)", str(error))
        ):
            raise ValueError(
                f"{path} contains pickled Python objects ({refused[1]}), as torch.save(model) writes "
                "them, and was not loaded, because they can execute code; if you trust it, save "
                "model.state_dict() instead, or export the model as TorchScript or ONNX"
            ) from error
        raise ValueError(
            f"{path} is not a complete weights file: truncated or not that format"
        ) from error


def _state_dicts(content: Any) -> Iterator[StateDict]:
    """Every state dict inside a loaded object, outermost first.

    Objects may contain themselves or each other many times; each is visited once.
    """
    left, seen = [content], set()
    while left:
        content = left.pop()
        if id(content) in seen:
            continue
        seen.add(id(content))
        inside: Sequence[Any] = ()
        if isinstance(content, Mapping):
            inside = [
                content[k]
                for k in _PACKED_UNDER
                if k in content and not isinstance(content[k], Tensor)
            ]
            tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
            if tensors and not inside:
                yield tensors
        elif isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
            inside = content
        left.extend(reversed(inside))


def _match(found: StateDict, wanted: StateDict) -> StateDict:
    """Rename the entries of ``found`` to those of ``wanted`` if the names differ only in
    prefixes."""
    mine, theirs = _without_prefix(_essential(wanted)), _without_prefix(_essential(found))
    if mine.keys() == theirs.keys() or set(mine.values()) != set(theirs.values()):
        return found
    back = {short: key for key, short in theirs.items()}
    matched = {key: found[back[short]] for key, short in mine.items()}
    for key in wanted:  # batch counters, if the file has them
        if key.endswith(_COUNTER):
            mean = mine[key.replace(_COUNTER, "running_mean")]
            counter = back[mean].replace("running_mean", _COUNTER)
            if counter in found:
                matched[key] = found[counter]
    return matched


def _essential(state: StateDict) -> list[str]:
    """The required names. Counters are absent from old checkpoints and not used in inference."""
    return [key for key in state if not key.endswith(_COUNTER) and key != _AVERAGED]


def _without_prefix(keys: list[str]) -> dict[str, str]:
    """Each key without the leading components that all keys share (``module.``, ``model.``)."""
    parts = [key.split(".") for key in keys]
    shared = 0
    while (
        parts and all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1
    ):
        shared += 1
    return {key: ".".join(p[shared:]) for key, p in zip(keys, parts, strict=True)}


def _complaint(found: StateDict, wanted: StateDict) -> str:
    """The error message about missing, unexpected and differently shaped tensors."""
    missing = [key for key in _essential(wanted) if key not in found]
    unexpected = [key for key in _essential(found) if key not in wanted]
    both = [(key, found[key], wanted[key]) for key in _essential(wanted) if key in found]
    shapes = [
        f"{key} is {tuple(mine.shape)} in the file and {tuple(theirs.shape)} in the model"
        for key, mine, theirs in both
        if mine.shape != theirs.shape
    ]
    types = [
        f"{key} is {mine.dtype}, {mine.layout} in the file"
        for key, mine, theirs in both
        if _kind(mine) != _kind(theirs)
    ]
    kinds = {"missing ": missing, "unexpected ": unexpected, "wrong shape: ": shapes}
    kinds["wrong type: "] = types
    said = [f"{kind}{_some(names)}" for kind, names in kinds.items() if names]
    if any(re.search(r"(^|\.)(mean|std|mu|sigma)$", key) for key in unexpected):
        said.append(
            "the file has normalisation constants: wrap the model in wball.Normalized with them"
        )
    return "; ".join(said)


def _kind(value: Tensor) -> tuple[torch.layout, bool]:
    """The kind of a tensor's dtype: different kinds cannot be converted without loss."""
    return value.layout, value.is_floating_point()


def _some(items: list[str], limit: int = 6) -> str:
    """The first items of a list as text, and the number of the rest."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")
