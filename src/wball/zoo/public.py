"""Public models of others, by name: fetched from their authors' repositories, never part of this
package.

Every entry of ``public.json`` pins a commit and a SHA-256. A file is opened only after its digest
was found right, and then by ``torch.load(weights_only=True)``, which executes nothing. It is kept
in a folder: ``root``, or the one that the environment variable ``WBALL_MODELS`` names, or the
user's cache. A folder that has the files serves without a network.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from wball.fetch import fetch_file
from wball.storage.files import PathLike, locked


@dataclass(frozen=True)
class PublicModel:
    """A model trained by other authors.

    Attributes:
        name: name for :func:`wball.load_model`.
        authors: authors of the paper and the weights.
        year: year of the paper.
        paper: title of the paper.
        paper_url: address of the paper.
        repository: address of the authors' repository.
        commit: pinned commit of the repository.
        path: path of the weights in the repository.
        sha256: checksum of the weights file.
        dataset: data set that the model was trained on.
        architecture: name for :func:`wball.build_model`.
        summary: how the model was trained.
        licence: licence that the repository states. Without one, all rights are the authors'.
        noise: standard deviation of the smoothing noise used in training, if any.
    """

    name: str
    authors: str
    year: int
    paper: str
    paper_url: str
    repository: str
    commit: str
    path: str
    sha256: str
    dataset: str
    architecture: str
    summary: str
    licence: str
    noise: float | None = None

    @property
    def url(self) -> str:
        """Address of the weights: repository, commit and path."""
        return f"{self.repository.rstrip('/')}/raw/{self.commit}/{self.path}"

    @property
    def file(self) -> str:
        """The name of the file in a folder of models."""
        return f"{self.name}{Path(self.path).suffix}"

    def card(self) -> dict[str, Any]:
        """The model card, as plain data."""
        return {
            **{key: value for key, value in asdict(self).items() if value is not None},
            "url": self.url,
        }

    def weights(self, root: PathLike | None = None) -> Path:
        """The verified weights file, downloaded into the folder if it is not there yet."""
        folder = models_folder(root)
        target = folder / self.file
        if self._checked(target):
            return target
        with locked(folder, wait=True):
            if not self._checked(target):
                fetch_file(
                    [self.url],
                    target,
                    self.sha256,
                    f"the weights of {self.name}",
                    f"put the file into {folder} as {target.name} by hand, or set WBALL_MODELS to a folder that has it",
                )
        return target

    def _checked(self, path: Path) -> bool:
        """Whether the file exists. A file with a wrong checksum is never replaced or opened."""
        if not path.is_file():
            return False
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.sha256:
            raise ValueError(
                f"{path} is not the published file of {self.name} (sha256 {found[:12]}..., expected "
                f"{self.sha256[:12]}...): half-downloaded or changed; delete it, and it is downloaded again"
            )
        return True


@cache
def public_models() -> dict[str, PublicModel]:
    """The public models that :func:`wball.load_model` fetches, by name.

    >>> public_models()["wong2019-mnist-standard"].authors
    'Wong, Schmidt, Kolter'
    """
    content = json.loads((resources.files(__package__) / "public.json").read_text(encoding="utf-8"))
    return {entry["name"]: PublicModel(**entry) for entry in content}


def models_folder(root: PathLike | None = None) -> Path:
    """The folder of public models: ``root``, ``$WBALL_MODELS``, or one in the user's cache."""
    if root is not None:
        return Path(root)
    if named := os.environ.get("WBALL_MODELS"):
        return Path(named)
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "wball" / "models"
