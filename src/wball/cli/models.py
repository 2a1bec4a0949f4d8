"""Models on the command line: a bundled name, a file, or Python code.

=========================  =======================================================================
name                       a bundled model, or a public one that is downloaded (``wball models``)
``.pt``, ``.pth``          TorchScript, or a state dict with ``--architecture``
``.safetensors``           weights, with ``--architecture``
``.pt2``                   ``torch.export``
``.onnx``                  ONNX, as a differentiable module
``mine.py``                the one obvious model in it
``mine.py:name``           a model, or a function or class that returns one
``package.module:name``    the same
=========================  =======================================================================

State dicts cannot execute code. TorchScript, exported programs and Python files can: load only
files that you trust.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import random
import sys
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from wball.cli.options import ModelFiles
from wball.storage.names import printable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wball.model import Model

FILES = (".pt", ".pth", ".pt2", ".onnx", ".safetensors")
WEIGHTS = (".pt", ".pth", ".safetensors")
"""Files that may hold weights without a network."""
OBVIOUS = ("model", "net", "get_model", "load_model", "build_model", "make_model")
"""Names that mark the model of a Python file which has several."""


def load_models(
    given: Sequence[str], how: ModelFiles, where: torch.device, seed: int
) -> list[tuple[Model, str]]:
    """Load the models onto a device, in evaluation mode, each with a unique name."""
    made = []
    for spec, architecture in zip(given, _architectures(given, how), strict=True):
        model, name = load_one(spec, seed, architecture)
        model = _normalized(model, how.mean, how.std)
        if hasattr(model, "eval") and hasattr(model, "to"):
            model = model.to(where).eval()
        made.append((model, printable(name)))
    names = [name for _, name in made]
    if len(set(names)) < len(names):  # files of one name in different folders
        names = [printable("-".join(Path(s).with_suffix("").parts[-2:])) for s in given]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"two models are called {max(names, key=names.count)}")
    return [(model, name) for (model, _), name in zip(made, names, strict=True)]


def seed_all(seed: int) -> None:
    """Seed every source of random numbers that the user's code may draw from, before it runs: the
    same command must build the same network and the same data."""
    import numpy as np
    import torch

    from wball.inputs import check_seed

    random.seed(check_seed(seed))
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the user's code may use it)
    torch.manual_seed(seed)


def _architectures(given: Sequence[str], how: ModelFiles) -> list[str | None]:
    """The network for each model: one for all weights files, or one for each of them."""
    known = list(how.architecture or ())
    files = [Path(spec).suffix.lower() in WEIGHTS for spec in given]
    if known and len(known) not in (1, sum(files)):
        raise typer.BadParameter(
            f"--architecture is given {len(known)} times for {sum(files)} weights files: give it "
            "once, or once for each of them"
        )
    if known and not any(files):
        raise typer.BadParameter(
            f"--architecture is for weights files, but {given[0]} is not one ({', '.join(WEIGHTS)})"
        )
    left = iter(known if len(known) > 1 else known * sum(files))
    return [next(left, None) if file else None for file in files]


def load_one(spec: str, seed: int, architecture: str | None = None) -> tuple[Any, str]:
    """Load the model for a command-line argument. Returns the model and its name."""
    from wball.zoo import list_models, load_model, public_models

    seed_all(seed)
    suffix = Path(spec).suffix.lower()
    if suffix in FILES and ":" not in spec.removeprefix(Path(spec).anchor):
        return _from_file(Path(spec), suffix, architecture), Path(spec).stem
    if suffix == ".py" and ":" not in spec:
        source, found = _obvious_model(Path(spec))
        return _trained(source, found, seed), Path(spec).stem
    if ":" in spec:
        return _trained(spec, find(spec), seed), spec.rsplit(":", 1)[1]
    known = [*list_models(), *public_models()]
    if spec in known:
        return load_model(spec), spec
    near = difflib.get_close_matches(spec, known, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"bundled are {', '.join(list_models())}."
    raise typer.BadParameter(
        f"unknown model {spec!r}: {hint} Or give a file ({', '.join(FILES)}; weights with "
        "--architecture), mine.py or package.module:function"
    )


def own_network(option: str, spec: str, seed: int = 0) -> nn.Module:
    """A network from Python code, ``mine.py`` or ``mine.py:function``, without changes."""
    from torch import nn

    seed_all(seed)
    if Path(spec).suffix != ".py" and ":" not in spec:
        raise typer.BadParameter(f"{option} {spec}: expected mine.py or mine.py:function")
    source, found = _obvious_model(Path(spec)) if ":" not in spec else (spec, find(spec))
    made = _model_from(source, found)
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise typer.BadParameter(f"{option} {spec}: expected a torch.nn.Module, got {kind}")
    return made


def _built(architecture: str) -> nn.Module:
    """A network without weights: a named architecture, or the user's own."""
    from wball.zoo.architectures import architectures, build_model

    if architecture in architectures():
        return build_model(architecture)
    return own_network("--architecture", architecture)


def _from_file(path: Path, suffix: str, architecture: str | None) -> Any:
    """Load a model file of any supported format."""
    if not path.is_file():
        raise typer.BadParameter(f"no model file {path}")
    try:
        if suffix == ".onnx":
            from wball.attacks.adapters import onnx

            return onnx.load(path)
        if suffix == ".pt2":
            import torch

            module: Any = torch.export.load(str(path)).module()
            for method in ("train", "eval"):  # export replaces them by methods that raise
                vars(module).pop(method, None)
            return module
        if suffix != ".safetensors" and _is_torchscript(path):
            import torch

            return torch.jit.load(str(path), map_location="cpu")
    except (typer.BadParameter, ImportError, MemoryError):
        raise
    except Exception as error:  # parsers of three formats, each with its own exceptions
        raise typer.BadParameter(f"{path} cannot be read as a model: {said(error)}") from error
    from wball.storage.weights import load_weights, read_weights

    if architecture is None:
        read_weights(path)  # raises if the file has something else
        raise typer.BadParameter(
            f"{path} holds weights without a network: add --architecture NAME or mine.py:function"
        )
    return load_weights(_built(architecture), path)


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(entry.endswith("/constants.pkl") for entry in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _normalized(model: Any, mean: str | None, std: str | None) -> Any:
    from torch import nn

    from wball.zoo.architectures import Normalized

    if mean is None and std is None:
        return model
    if mean is None or std is None:
        raise typer.BadParameter("--mean and --std belong together: give both")
    if not isinstance(model, nn.Module):
        raise typer.BadParameter("--mean and --std need a model that is a torch.nn.Module")
    return Normalized(model, _numbers("--mean", mean), _numbers("--std", std))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError:
        raise typer.BadParameter(
            f"{option} {text}: expected numbers separated by commas, one per channel"
        ) from None


def _obvious_model(path: Path) -> tuple[str, Any]:
    """The only model that a Python file defines, an ``nn.Module`` or a function that returns one,
    and where it is."""
    from torch import nn

    loaded = _imported_file(path, str(path))
    own = {
        name: value
        for name, value in vars(loaded).items()
        if isinstance(value, nn.Module)
        or (callable(value) and getattr(value, "__module__", "") == loaded.__name__)
    }
    found = (
        [name for name, value in own.items() if isinstance(value, nn.Module)]
        or [name for name in own if name in OBVIOUS]
        or [name for name in own if not name.startswith("_")]
    )
    if len(found) != 1:
        several = (
            f"several models: say which one ({path}:{found[0]}, ...)"
            if found
            else ("no model: expected a torch.nn.Module, or a function that returns one")
        )
        raise typer.BadParameter(f"{path} defines {several}")
    return f"{path}:{found[0]}", own[found[0]]


def _model_from(spec: str, value: Any) -> Any:
    """The model that a Python object is or returns."""
    from torch import nn

    made = value if isinstance(value, nn.Module) else called(spec, value)
    if not callable(made):
        raise typer.BadParameter(
            f"{spec} returned {type(made).__name__}; expected a model, images to logits"
        )
    return made


def _trained(spec: str, value: Any, seed: int) -> Any:
    """The model that a Python object is or returns. Warns if it is a class whose weights are
    random."""
    model = _model_from(spec, value)
    if isinstance(value, type) and hasattr(model, "state_dict"):
        state = model.state_dict()
        seed_all(seed + 1)
        other = _model_from(spec, value).state_dict()
        if any(not _same(state[name], other.get(name)) for name in state):
            warnings.warn(
                f"{spec} is a class whose weights are random, so the model is untrained: give the file of its weights "
                f"as the model, with --architecture {spec}, or a function that loads them",
                stacklevel=2,
            )
    return model


def _same(one: Any, other: Any) -> bool:
    import torch

    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return not both or torch.equal(one.nan_to_num(), other.nan_to_num())


def find(spec: str) -> Any:
    """Import the object that ``package.module:name`` or ``path/to/file.py:name`` names."""
    module, _, attribute = spec.rpartition(":")
    if not module or not attribute:
        raise typer.BadParameter(f"{spec}: expected package.module:function or mine.py:function")
    if module.endswith(".py"):
        loaded = _imported_file(Path(module), spec)
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does: modules in the current folder
        try:
            loaded = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise typer.BadParameter(f"{spec}: cannot import {module} ({said(error)})") from error
    if not hasattr(loaded, attribute):
        near = difflib.get_close_matches(attribute, vars(loaded), 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(f"{spec}: {module} has no {attribute!r}{hint}")
    return getattr(loaded, attribute)


def _imported_file(path: Path, spec: str) -> ModuleType:
    """Import a Python file as a module."""
    if not path.is_file():
        raise typer.BadParameter(f"{spec}: there is no file {path}")
    try:
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        loaded = importlib.util.module_from_spec(found)
        sys.modules.setdefault(path.stem, loaded)
        sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
        found.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        raise typer.BadParameter(f"{spec}: cannot import {path} ({said(error)})") from error
    return loaded


def called(spec: str, function: Any) -> Any:
    """Call the user's function. An exception in it is reported as an error of the user's code."""
    if not callable(function):
        raise typer.BadParameter(
            f"{spec} has type {type(function).__name__}, which is not callable; expected a function or a model"
        )
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise typer.BadParameter(f"{spec}: the call raised {said(error)}") from error


def said(error: BaseException) -> str:
    """An exception as one line of text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
