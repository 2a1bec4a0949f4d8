"""Data, models, device and folder of recipes.

A part is a file that is written atomically and named after everything that its content depends on.
An interrupted recipe resumes from its finished parts. Recipes that need the same part share it,
also across processes: the second waits for the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from reproduction.presets import LOSSES, preset, presets
from wball import provenance
from wball.data import dataset_info, load_dataset, load_sample
from wball.inputs import check_count, check_seed, find_device
from wball.storage.files import locked, read_json, read_tensors, write_json, write_tensors
from wball.storage.weights import load_weights
from wball.training.loop import train
from wball.zoo import list_models, load_model, model_card, public_models
from wball.zoo.architectures import build_model
from wball.zoo.public import PublicModel, models_folder

Data = dict[str, Any]
"""What a recipe measures: plain data, as its JSON file has them."""
ENDINGS = (".safetensors", ".pth", ".pt")
TRAINED = "trained here by its preset"


class MissingModel(ValueError):
    """A model that is neither in the zoo nor in the models' folder, and that must not be trained
    now."""


@dataclass(frozen=True)
class Settings:
    """How recipes are run.

    Attributes:
        quick: few images, and tiny models where none are at hand: minutes on two cores. The
            numbers mean little.
        data: folder with the data sets; without it the bundled MNIST digits serve (quick runs
            only).
        models: folder with trained models, ``NAME/NAME.safetensors`` (or ``.pth``, and a card
            ``NAME.json`` where the network is not the preset's), for those that are not in the
            zoo.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        seed: random seed.
        out: folder for results; parts of unfinished ones are in ``out/parts``, models trained here
            in ``out/models``.
        images: number of test images (``None``: the recipe's own).
        may_train: train models that are missing. Otherwise they are left out, and the result says
            so.
    """

    quick: bool = False
    data: Path | None = None
    models: Path | None = None
    device: str = "auto"
    seed: int = 0
    out: Path = Path("out/reproduction")
    images: int | None = None
    may_train: bool = True

    def __post_init__(self) -> None:
        if self.images is not None:
            check_count("images", self.images)
        check_seed(self.seed)


@dataclass(frozen=True)
class Subject:
    """A model that is measured: ``origin`` says where its weights come from."""

    name: str
    model: nn.Module
    architecture: str
    origin: str
    sha256: str

    def about(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "architecture": self.architecture,
            "origin": self.origin,
            "sha256": self.sha256,
        }


class Workshop:
    """Data, models and finished parts for recipes with the same settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = find_device(settings.device)
        if settings.models is not None and not settings.models.is_dir():
            raise FileNotFoundError(
                f"models {str(settings.models)!r} is not a folder: give the one with the models"
            )
        self.begin()
        self._images: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        self._subjects: dict[str, Subject] = {}
        self.public: dict[str, PublicModel] = dict(public_models())

    def begin(self) -> None:
        """A new recipe: which models it misses, what its parts took, and the commits that measured
        them."""
        self.missing: dict[str, str] = {}
        self.spent = 0.0
        self.commits: set[str] = set()

    @property
    def quick(self) -> bool:
        return self.settings.quick

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)

    # ---- data

    def test_images(self, dataset: str, full: int, quick: int) -> tuple[Tensor, Tensor]:
        """The first test images on the device: ``full`` of them, ``quick`` in a quick run, or as
        many as asked for."""
        x, y = self._loaded(dataset, "test")
        count = self.settings.images or (quick if self.quick else full)
        return x[:count], y[:count]

    def pool(self, dataset: str, full: int, quick: int) -> tuple[Tensor, Tensor]:
        """The first test images to choose from, however many are measured."""
        x, y = self._loaded(dataset, "test")
        return x[: quick if self.quick else full], y[: quick if self.quick else full]

    def title(self, dataset: str, count: int) -> str:
        """What to call the first ``count`` test images."""
        sample = "the bundled sample of " if self._bundled(dataset) else ""
        return f"first {count:,} images of {sample}the {dataset_info(dataset).title} test set"

    def _bundled(self, dataset: str) -> bool:
        return self.settings.data is None and dataset == "mnist"

    def _loaded(self, dataset: str, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        if (dataset, split) not in self._images:
            self._images[dataset, split] = self._load(dataset, split)
        return self._images[dataset, split]

    def _load(self, dataset: str, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        if self._bundled(dataset) and self.quick:
            return load_sample("mnist", device=self.device)
        if self.settings.data is None:
            raise FileNotFoundError(
                f"this recipe needs {dataset_info(dataset).title}: get it with `wball data {dataset} --data-dir data` "
                "and give --data-dir data"
            )
        return load_dataset(dataset, self.settings.data, split, device=self.device)

    # ---- models

    def subject(self, name: str) -> Subject:
        """The model of that name: from the zoo, the models' folder, an earlier training here, or
        trained now."""
        if name not in self._subjects:
            model, architecture, origin = self._find(name)
            model = model.to(self.device).eval()
            if self.device.type == "cuda":
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            about = provenance.describe_model(model, name)
            self._subjects[name] = Subject(name, model, architecture, origin, about["sha256"])
        return self._subjects[name]

    def subjects(self, *names: str) -> list[Subject]:
        """Those of the models that there are; what is missing is noted in the result."""
        found = []
        for name in names:
            try:
                found.append(self.subject(name))
            except (MissingModel, OSError) as error:
                self.missing[name] = str(error)
                self.say(f"{name} is left out: {error}")
        if not found:
            raise MissingModel(f"none of the models {', '.join(names)}: {self.missing[names[0]]}")
        return found

    def has(self, name: str) -> bool:
        """Whether a model is there without training and without a download."""
        if name in self.public:
            return (self._public_folder(name) / self.public[name].file).is_file()
        return name in list_models() or self._stored(name) is not None

    def _public_folder(self, name: str) -> Path:
        """The models' folder if it has the weights, otherwise the one of ``WBALL_MODELS``."""
        given = self.settings.models
        if given is not None and (given / self.public[name].file).is_file():
            return given
        return models_folder()

    def _find(self, name: str) -> tuple[nn.Module, str, str]:
        if name in list_models():
            return load_model(name), str(model_card(name)["architecture"]), "zoo"
        if (public := self.public.get(name)) is not None:
            weights = public.weights(self._public_folder(name))
            return (
                load_weights(build_model(public.architecture), weights),
                public.architecture,
                public.url,
            )
        stored = self._stored(name)
        if stored is not None:
            model, architecture = _load(name, stored)
            return model, architecture, "models folder"
        if name not in presets():
            raise MissingModel(
                f"{name} is not in the zoo and no preset makes it: give --models DIR with {name}/"
            )
        return self._train(name)

    def _train(self, name: str) -> tuple[nn.Module, str, str]:
        folder = self.settings.out / "models" / f"{name}-{self.settings.seed}"
        weights = folder / f"{name}.safetensors"
        if not weights.is_file() and (self.quick or not self.settings.may_train):
            raise MissingModel(
                f"neither in the zoo nor in a models' folder (--models DIR with "
                f"{name}/{name}.safetensors), and quick runs and --no-train train nothing"
            )
        with locked(folder.with_name(f".{folder.name}"), wait=True):  # the training locks folder
            if not weights.is_file():
                config = preset(name, seed=self.settings.seed)
                data, test = (self._loaded(config.dataset, kind) for kind in ("train", "test"))
                self.say(f"training {name} ({config.epochs} epochs of {len(data[0]):,} images)")
                train(
                    config, data, test, loss=LOSSES.get(name), out=folder, device=self.device,
                    progress=False,
                )  # fmt: skip
        return *_load(name, weights), TRAINED

    def _stored(self, name: str) -> Path | None:
        """The file in the models' folder: there, in a folder of its own, or as an earlier run of
        recipes left it."""
        if self.settings.models is None:
            return None
        places = (
            self.settings.models / folder / f"{name}{end}"
            for folder in (".", name, f"{name}-{self.settings.seed}")
            for end in ENDINGS
        )
        return next((path for path in places if path.is_file()), None)

    # ---- parts

    @contextmanager
    def part(self, name: str, depends: Any) -> Iterator[Path]:
        """A folder for a measurement that depends on ``depends`` alone, held for this process."""
        digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:10]
        folder = self.settings.out / "parts" / f"{name}.{digest}"
        with locked(folder, wait=True):
            yield folder

    @contextmanager
    def noted(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Seconds and commits of a part that keeps files of its own; a finished one is only
        read."""
        path, clock = folder / "notes.json", Clock(self.device)
        notes = read_json(path) if path.is_file() else {}
        if notes.get("done"):
            yield notes
        else:
            try:
                yield notes
                notes["done"] = True
            finally:
                notes["seconds"] = notes.get("seconds", 0.0) + clock.seconds()
                notes["commits"] = sorted({*notes.get("commits", ()), self.commit})
                write_json(path, notes)
        self.commits.update(notes["commits"])
        self.spent += notes["seconds"]

    def once(
        self, path: Path, measure: Callable[[], dict[str, Tensor]]
    ) -> tuple[dict[str, Tensor], float]:
        """The tensors that ``measure`` makes, on the CPU, and its seconds; kept in a file of a
        part.

        The file remembers by which commit it was measured.
        """
        if path.is_file():
            tensors, notes = read_tensors(path)
            self.commits.update(notes["commits"])
            return tensors, float(notes["seconds"])
        clock = Clock(self.device)
        tensors = {name: tensor.cpu() for name, tensor in measure().items()}
        seconds = clock.seconds()
        write_tensors(path, tensors, {"seconds": seconds, "commits": [self.commit]})
        return tensors, seconds

    @cached_property
    def commit(self) -> str:
        return commit()


def commit() -> str:
    """The commit of this repository, or ``WBALL_COMMIT`` without one."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parents[1]
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes = " with local changes" if git("status", "--porcelain", "src/wball") else ""
        return git("rev-parse", "HEAD") + changes
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("WBALL_COMMIT", "unknown")


def _load(name: str, weights: Path) -> tuple[nn.Module, str]:
    """A model with its card's architecture, or that of its preset where it has no card."""
    path = weights.with_name(f"{name}.json")
    card = read_json(path) if path.is_file() else {"architecture": preset(name).architecture}
    if not isinstance(card, dict) or not isinstance(card.get("architecture"), str):
        raise ValueError(
            f'{path} is not a model card: it has no "architecture"; correct or remove it'
        )
    return load_weights(build_model(card["architecture"]), weights), card["architecture"]


class Clock:
    """Seconds since it was made, with the device's work done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, time.perf_counter()

    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.start
