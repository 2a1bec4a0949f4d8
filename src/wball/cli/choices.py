"""What names on the command line stand for: models, data, devices, threat models, attacks.

Modules that take long to import are imported inside the functions, so that ``wball --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wball.attacks import Attack
    from wball.ball import WassersteinBall
    from wball.model import Model

ATTACKS = ("standard", "fast", "dual-averaging", "pgd", "frank-wolfe")


def device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda``; under ``torchrun`` each process gets a GPU of its own."""
    import torch

    from wball.inputs import find_device

    try:
        chosen = find_device(name)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    if chosen.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        index = chosen.index if chosen.index is not None else local
        if index >= torch.cuda.device_count():
            raise typer.BadParameter(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


def model(spec: str, weights: Path | None, where: torch.device) -> tuple[Model, str]:
    """A model of the zoo, an architecture with weights, or what a function returns; and a name for it."""
    from torch import nn

    from wball.models import architectures, build_model
    from wball.storage.weights import load_weights
    from wball.zoo import list_models, load_model, public_models

    if ":" in spec:
        made = _imported(spec)
        if not isinstance(made, nn.Module):
            made = _called(spec, made)
        if not callable(made):
            raise typer.BadParameter(f"{spec} returned {type(made).__name__}; expected a model, images to logits")
        name = spec.rsplit(":", 1)[1]
    elif spec in architectures():
        if weights is None:
            raise typer.BadParameter(f"{spec} is an architecture without weights: add --weights FILE")
        made, name = build_model(spec), weights.stem
    elif spec in list_models() or spec in public_models():
        if weights is not None:
            raise typer.BadParameter(f"{spec} comes with weights; for --weights give an architecture instead")
        made, name = load_model(spec), spec
    else:
        near = difflib.get_close_matches(spec, [*list_models(), *public_models(), *architectures()], 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"the zoo has {', '.join(list_models())}."
        raise typer.BadParameter(
            f"unknown model {spec!r}: {hint} Or give an architecture with --weights FILE, or package.module:function"
        )
    if weights is not None:
        if not isinstance(made, nn.Module):
            raise typer.BadParameter(f"{spec} is no torch module, so --weights cannot be loaded into it")
        load_weights(made, weights)
        name = weights.stem
    if isinstance(made, nn.Module):
        made = made.to(where).eval()
    return made, name


def data(
    spec: str,
    root: Path,
    split: Literal["train", "test"],
    limit: int | None,
    size: int | None,
    grey: bool,
    where: torch.device,
) -> tuple[Tensor, Tensor, str, Sequence[str] | None]:
    """Images, labels, a name for them, and the names of the classes if they have any."""
    from wball.data import dataset_info, datasets, load_dataset, load_folder, load_sample, to_tensors

    classes: Sequence[str] | None = None
    known = {name.replace("-", "") for name in datasets()}
    if spec == "sample":
        x, y = load_sample("mnist")
        name, classes = "the bundled MNIST sample", dataset_info("mnist").classes
    elif spec.lower().replace("-", "").replace("_", "") in known:
        info = dataset_info(spec)
        x, y = load_dataset(info.name, root, split)
        name, classes = f"{info.title} ({split})", info.classes
    elif Path(spec).is_dir():
        x, y, classes = load_folder(spec, size=size, grey=grey)
        name = Path(spec).name
    elif ":" in spec:
        made = _imported(spec)
        made = _called(spec, made) if callable(made) else made
        try:
            x, y = to_tensors(made, limit=limit)
        except (ValueError, TypeError, OSError):
            raise
        except Exception as error:
            raise typer.BadParameter(f"--data {spec}: reading it raised {_said(error)}") from error
        name = spec.rsplit(":", 1)[1]
    else:
        raise typer.BadParameter(
            f"--data {spec}: no such folder, and no data set either; use sample, {', '.join(datasets())}, "
            "a folder of images, or package.module:function"
        )
    if limit is not None and limit < len(x):
        x, y, name = x[:limit], y[:limit], name if spec == "sample" else f"first {limit} of {name}"
    return x.to(where), y.to(where), name, classes


def radii(text: str) -> list[float]:
    """``0.1,0.2,0.5`` as numbers."""
    try:
        values = sorted({float(part) for part in text.replace(" ", ",").split(",") if part})
    except ValueError:
        raise typer.BadParameter(f"--eps {text}: expected numbers separated by commas, such as 0.1,0.2,0.5") from None
    if not values or values[0] <= 0 or not values[-1] < float("inf"):
        raise typer.BadParameter(f"--eps {text}: radii must be above 0 and finite")
    return values


def ball(eps: float, window: int, p: float, mass: str) -> WassersteinBall:
    from wball.ball import WassersteinBall
    from wball.cost import GridCost

    if mass not in ("relative", "absolute"):
        raise typer.BadParameter(f"--mass {mass}: expected relative (eps x the image's mass) or absolute")
    return WassersteinBall(eps, GridCost(window, p), "absolute" if mass == "absolute" else "relative")


def attack(name: str, threat: WassersteinBall, steps: int | None) -> Attack:
    """An attack by name. ``steps`` is for those that have a number of steps."""
    from wball.attacks import PGD, DualAveraging, FrankWolfe, StandardAttack

    if name not in ATTACKS:
        raise typer.BadParameter(f"--attack {name}: expected one of {', '.join(ATTACKS)}")
    if name in ("standard", "fast"):
        if steps is not None:
            raise typer.BadParameter(
                f"--steps does not apply to the fixed protocol {name!r}; use --attack dual-averaging"
            )
        return StandardAttack(threat, version="fast" if name == "fast" else "standard")
    settings: dict[str, Any] = {} if steps is None else {"steps": steps}
    makers: dict[str, Any] = {"dual-averaging": DualAveraging, "pgd": PGD, "frank-wolfe": FrankWolfe}
    made: Attack = makers[name](threat, **settings)
    return made


def setting(assignment: str) -> tuple[str, Any]:
    """``path=value`` with a JSON value, one of Python's ``True``, ``False``, ``None``, or a plain string."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise typer.BadParameter(f"expected PATH=VALUE, got {assignment!r}")
    try:
        return path, json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return path, text


def folder_name(name: str) -> str:
    """A model's name as the name of a folder."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".-") or "model"


def _imported(spec: str) -> Any:
    """``package.module:function`` or ``path/to/file.py:function``."""
    module, _, attribute = spec.rpartition(":")
    if not module or not attribute:
        raise typer.BadParameter(f"{spec}: expected package.module:function or file.py:function")
    try:
        if module.endswith(".py"):
            path = Path(module)
            if not path.is_file():
                raise typer.BadParameter(f"{spec}: there is no file {path}")
            found = importlib.util.spec_from_file_location(path.stem, path)
            assert found is not None and found.loader is not None
            loaded = importlib.util.module_from_spec(found)
            sys.modules.setdefault(path.stem, loaded)
            sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does: modules beside the file
            found.loader.exec_module(loaded)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")  # as `python -m` does: modules beside the user
            loaded = importlib.import_module(module)
    except typer.BadParameter:
        raise
    except (Exception, SystemExit) as error:
        raise typer.BadParameter(f"{spec}: cannot import {module} ({_said(error)})") from error
    if not hasattr(loaded, attribute):
        own = [name for name, value in vars(loaded).items() if name[0] != "_" and not isinstance(value, ModuleType)]
        near = difflib.get_close_matches(attribute, own, 1, 0.5)
        raise typer.BadParameter(
            f"{spec}: {module} has no {attribute!r}" + (f"; did you mean {near[0]}?" if near else "")
        )
    return getattr(loaded, attribute)


def _called(spec: str, function: Any) -> Any:
    """What the user's function returns; what it raises is not this library's error."""
    if not callable(function):
        raise typer.BadParameter(
            f"{spec} is not callable, but {type(function).__name__}; expected a function or a model"
        )
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise typer.BadParameter(f"{spec}: the call raised {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@contextlib.contextmanager
def prints_aside(aside: bool) -> Iterator[None]:
    """What the user's own code prints goes to stderr, where stdout is for JSON alone."""
    with contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext():
        yield


def main_process() -> bool:
    """Whether this process speaks for all of those that ``torchrun`` started."""
    from wball.processes import place

    return place()[0] == 0
