"""Where a result comes from: versions, device, kernel and command, so that someone else can get the same numbers.

Nothing here changes between two runs of one command on one machine: times and process numbers belong into a log.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

PACKAGES = ("numpy", "POT", "safetensors", "scipy", "torch")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that its numbers depend on."""
    from wball import __version__

    found = {"python": platform.python_version(), "wball": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a build that is on the path without being installed
            found[name] = "unknown"
    found["torch"] = torch.__version__
    return found


def command() -> str:
    """The command line of this process, as one would type it."""
    if not sys.argv or not sys.argv[0]:
        return "an interactive Python session"
    program, spec = Path(sys.argv[0]), getattr(sys.modules.get("__main__"), "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    if module == "wball" or program.name in ("wball", "wball.exe"):
        return shlex.join(["wball", *sys.argv[1:]])
    return shlex.join(["python", *(["-m", module] if module else [program.name]), *sys.argv[1:]])


def commit() -> str:
    """The commit that this code was checked out from: of its repository, or what ``WBALL_COMMIT`` says."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if git(
            "ls-files", Path(__file__).name
        ):  # an installed copy may lie inside another repository
            return git("rev-parse", "HEAD") + (
                " with local changes" if git("status", "--porcelain", ".") else ""
            )
    except (OSError, subprocess.CalledProcessError):
        pass
    return os.environ.get("WBALL_COMMIT", "unknown")


def device_name(device: torch.device) -> str:
    """``cuda`` devices by the name of the card, others by their type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Served(Protocol):
    """A threat model that knows which implementation serves it."""

    def kernel(self, x: Tensor) -> str: ...


def collect(ball: Served, x: Tensor, line: str | None = None) -> dict[str, Any]:
    """Everything above as plain data. ``line``: the command, if it is not this process's own."""
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
        value = tensor.detach().to("cpu").contiguous()
        digest.update(f"{tuple(value.shape)} {value.dtype};".encode())
        digest.update(
            value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    return digest.hexdigest()


def describe_model(model: Any, name: str | None = None) -> dict[str, Any]:
    """Name, size and checksum of a model; a function that is no module has a name only."""
    title = name or (
        type(model).__name__
        if isinstance(model, nn.Module)
        else getattr(model, "__qualname__", "model")
    )
    if not isinstance(model, nn.Module):
        return {"name": title, "parameters": None, "sha256": None}
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(f"{key} {fingerprint(state[key])};".encode())
    return {
        "name": title,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sha256": digest.hexdigest(),
    }
