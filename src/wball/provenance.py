"""The origin of a result: versions, device, kernel and command, so that it can be repeated.

Two runs of one command on one machine have the same provenance: it has no times or process numbers.
"""

import dataclasses
import hashlib
import math
import platform
import re
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Plain = dict[str, Any]
"""Plain data by name, as in a JSON file."""

PACKAGES = ("numba", "numpy", "POT", "safetensors", "scipy", "torch", "triton")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the packages that its numbers depend on."""
    from wball import __version__

    found = {"python": platform.python_version(), "wball": __version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["torch"] = torch.__version__
    return found


def command() -> str:
    """The command line of this process, as typed in a shell."""
    if not sys.argv or not sys.argv[0]:
        return "an interactive Python session"
    program, spec = Path(sys.argv[0]), getattr(sys.modules.get("__main__"), "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    if module == "wball" or program.name in ("wball", "wball.exe"):
        return shlex.join(["wball", *sys.argv[1:]])
    return shlex.join(["python", *(["-m", module] if module else [program.name]), *sys.argv[1:]])


def device_name(device: torch.device) -> str:
    """The name of the card for ``cuda`` devices, the type for others."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def collect(ball: Any, x: Tensor, line: str | None = None) -> Plain:
    """The provenance of a result: command (``line``, or that of this process), device, kernel and
    versions."""
    return {
        "command": command() if line is None else line,
        "device": device_name(x.device),
        "kernel": ball.kernel(x),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }


def fingerprint(*tensors: Tensor) -> str:
    """SHA-256 of tensors: shapes, types and every bit of their contents."""
    digest = hashlib.sha256()
    for tensor in tensors:
        value = tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        digest.update(f"{tuple(value.shape)} {value.dtype};".encode())
        digest.update(
            value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    return digest.hexdigest()


def describe_model(model: Any, name: str | None = None) -> Plain:
    """Name, size and checksum of a model; a function that is not a module has a name only."""
    if not isinstance(model, nn.Module):
        title = name or getattr(model, "__qualname__", "model")
        return {"name": title, "parameters": None, "sha256": None}
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(f"{key} {fingerprint(state[key])};".encode())
    return {
        "name": name or type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sha256": digest.hexdigest(),
    }


def describe_settings(settings: Any) -> Any:
    """Settings as JSON values: dataclasses become dictionaries with their type's name."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        fields = {
            f.name: describe_settings(getattr(settings, f.name))
            for f in dataclasses.fields(settings)
        }
        return {"type": type(settings).__name__, **fields}
    if isinstance(settings, (tuple, list)):
        return [describe_settings(v) for v in settings]
    if isinstance(settings, float) and not math.isfinite(settings):
        return str(settings)
    if settings is None or isinstance(settings, (bool, int, float, str)):
        return settings
    # Without addresses, which change from run to run.
    return getattr(settings, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(settings))
