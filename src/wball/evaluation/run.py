"""Evaluate a model: attack every image at every radius, audit each example, certify, store.

Radii are tried in ascending order, and an image that is broken at one of them is not attacked
again: its example is in every larger ball. Claims of an attack are checked: the model is asked
again about the stored image, and :func:`wball.audit` measures its mass and its box, and proves its
distance, by the plan that the attack returns or by exact transport. At the end the model is asked
about the clean images once more.

The folder of an evaluation holds one run: the same call resumes it, and another one is refused.
"""

import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wball import inputs, provenance
from wball.attacks import Attack, StandardAttack
from wball.attacks.attack import out_of_memory
from wball.ball import Ball, check_ball
from wball.certificates.certificate import METHODS
from wball.certificates.operators import read_graph
from wball.data import class_names
from wball.evaluation.batches import Batches, FunctionAttack, default_batch_size
from wball.evaluation.doubts import at_chance, check_certificates, look_for_missed
from wball.evaluation.exhibit import make_exhibit
from wball.evaluation.result import (
    EXAMPLES,
    EXHIBIT,
    EXPLORER,
    RESULTS,
    Evaluation,
    load_evaluation,
)
from wball.evaluation.stream import Stream, open_stream
from wball.model import Model, as_found, ask, check_classes, other_images
from wball.provenance import Plain
from wball.storage.files import (
    Log,
    PathLike,
    check_file,
    clear_parts,
    grouped,
    json_checksum,
    locked,
    rank_and_size,
    read_json,
    read_sealed,
    write_sealed,
)

BATCHES = "batches"
START_OVER = "use --overwrite (Storage(folder, overwrite=True)) to start over"


@dataclass(frozen=True)
class Storage:
    """Where an evaluation is stored.

    Attributes:
        folder: a folder for results, examples and the report's images.
        overwrite: discard earlier results in the folder.
    """

    folder: PathLike
    overwrite: bool = False


@dataclass(frozen=True)
class Names:
    """What results and reports call things.

    Attributes:
        model: name of the model (default: that of its class).
        data: name of the data.
        classes: names of the classes (default: those of the data set, or their numbers).
        images: the source of each image (default: the files of a folder, or numbers in the data).
        command: command line to record (default: that of this process).
    """

    model: str | None = None
    data: str = "data"
    classes: Sequence[str] | None = None
    images: Sequence[str] | None = None
    command: str | None = None


def evaluate(
    model: Model,
    x: Any,
    y: Any = None,
    ball: Ball | None = None,
    radii: Sequence[float] | float | Literal["minimal"] | None = None,
    attack: Attack | Callable[..., Tensor] | Literal["standard", "fast"] = "standard",
    *,
    certify: bool | str = False,
    exact: Literal["sample", "all"] = "sample",
    out: PathLike | Storage | None = None,
    name: str | Names | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Measure the robust accuracy of ``model`` on images ``x`` with labels ``y``.

    Args:
        model: maps images to logits; evaluated in evaluation mode and left as it was.
        x: images ``(B, C, H, W)`` in the ball's box, or 8-bit images. Or a map-style data set of
            (image, label) items or dictionaries, a ``DataLoader`` of one, NumPy arrays (also
            memory-mapped) or an ``.npz`` file: these are read batch by batch, with the same
            results; the whole set is never held in memory.
        y: class numbers ``(B,)``; left out if the data have labels.
        ball: the threat model.
        radii: radii to evaluate (default: the ball's), or ``"minimal"`` to search each image's
            smallest one up to the ball's.
        attack: ``"standard"`` (:class:`wball.StandardAttack`); ``"fast"``, a quick look that
            skips the checks for gradient masking and is never called reliable; any attack; or any
            function ``f(model, x, y) -> images``, whose images count if the model misclassifies
            them and the audit finds them inside the ball.
        certify: also certify; ``True`` or the name of a method of :func:`wball.certify`. The model
            must be a feed-forward network of supported modules. A sample of the certificates is
            checked by :func:`wball.verify`.
        exact: which examples to check by exact transport. ``"sample"``: those without a plan that
            proves their distance, and a few of the others at each radius (none of more than 20,000
            pixels, which take longer than an attack). ``"all"``: all of them, which may take longer
            than the attack. A search for the smallest radius solves all of them.
        out: a folder for results, examples and the report's images. An interrupted evaluation is
            resumed; a finished one is read back. ``Storage(folder, overwrite=True)`` starts over.
        name: name of the model, or :class:`Names` of model, data, classes and images.
        seed: random seed.
        batch_size: images per batch (default: chosen for the device and the model).
        progress: show a progress bar (default: on a terminal).

    Under ``torchrun``, or in a process group, each process computes its share of the batches
    (``out`` is then a folder that all of them see), and all return the whole result.

    >>> import wball
    >>> x, y = wball.load_sample()
    >>> model, ball = wball.load_model("mnist-standard"), wball.WassersteinBall(0.01)
    >>> evaluate(model, x[:2], y[:2], ball, attack="fast").clean_accuracy
    1.0
    """
    if ball is None:
        raise TypeError(
            "ball is missing: the threat model, such as ball=wball.WassersteinBall(0.1)"
        )
    check_ball(ball)
    inputs.check_seed(seed)
    if batch_size is not None:
        inputs.check_count("batch_size", batch_size)
    if exact not in ("sample", "all"):
        raise ValueError(f'exact must be "sample" or "all", got {exact!r}')
    images = open_stream(x, y, model, ball.box)
    if len(images) == 0:
        raise ValueError("x is empty: there is nothing to evaluate")
    names = name if isinstance(name, Names) else Names(name)
    storage = out if isinstance(out, Storage) else None if out is None else Storage(out)
    mode, points = _radii(radii, ball)
    searched = _attack(attack, ball.at(points[-1]))
    rank = rank_and_size()[0]  # the first process reads all data; the others read their own share
    digest, labels = images.survey() if rank == 0 else ("", images.take([0])[1])
    logits = probe(model, images.first, labels)
    titles: Sequence[Any] = names.classes or class_names(x) or ()
    if names.classes is None and len(titles) != logits.shape[1]:
        titles = range(logits.shape[1])
    data = {
        "name": str(names.data),
        "images": len(images),
        "shape": list(images.first.shape[1:]),
        "sha256": digest,
        "classes": [str(title) for title in titles],
    }
    settings = {
        "model": provenance.describe_model(model, names.model),
        "answers": _answers(model, images.first),
        "data": data,
        "ball": ball.describe(),
        "mode": mode,
        "radii": points,
        "attack": searched.describe(),
        "certify": _certificate(certify, model, images.first),
        "exact": "all" if mode == "minimal" else exact,
        "batch_size": batch_size or default_batch_size(images.first, model),
        "seed": seed,
    }
    run = {
        "settings": settings,
        "provenance": provenance.collect(ball, images.first, names.command),
        "names": _sources(names, images),
    }
    with (
        torch.inference_mode(False),  # attacks need gradients
        result_folder(storage) as folder,
        team() as (rank, world, meet),
        locked(folder, rank),
    ):
        if rank == 0:
            if storage is not None and storage.overwrite:
                clear(folder)
            clear_parts(folder)
            begin(folder, run, batch_size is None)
        meet()
        if not (folder / RESULTS).is_file():
            begun = read_json(folder / BATCHES / "settings.json")  # checked by the first process
            log = Log(folder / "log.jsonl", rank)
            log("start", world=world, command=begun["provenance"]["command"])
            batches = Batches(
                model, images, ball, searched, begun["settings"], folder / BATCHES, log
            )
            batches.run(rank, world, progress)
            meet()
            if rank == 0:
                _finish(batches, begun).save(folder)
                log("finish")
        if rank == 0:
            clear(folder, results=False)
        meet()
        with or_overwrite():
            return load_evaluation(folder)


def _sources(names: Names, images: Stream) -> list[str]:
    """The source of each image."""
    sources = list(names.images or map(images.name, range(len(images))))
    if len(sources) != len(images):
        raise ValueError(f"names has {len(sources)} entries for {len(images)} images")
    return sources


def _certificate(certify: bool | str, model: Model, x: Tensor) -> dict[str, str] | None:
    """The settings of the certificate. Raises its errors before the attack starts."""
    if certify is False:
        return None
    method = "anchored" if certify is True else certify
    if method not in METHODS:
        raise ValueError(f"certify must be a method, one of {', '.join(METHODS)}, got {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"certify needs a model that is a torch.nn.Module, got {type(model).__name__}"
        )
    read_graph(model, x[:1])
    return {"method": method, "plans": "full"}


def _finish(batches: Batches, begun: Plain) -> Evaluation:
    """The joined batches, with the images for the report and all warnings."""
    model, data, ball = batches.model, batches.data, batches.ball
    result = batches.joined(begun)
    result = replace(result, exhibit=make_exhibit(result, model, data, ball))
    result = replace(result, verification=check_certificates(result, model, data, ball))
    doubts = look_for_missed(result, model, data, ball) + batches.ask_again() + at_chance(result)
    return replace(result, warnings=(*result.warnings, *doubts))


def _radii(
    radii: Sequence[float] | float | str | None, ball: Ball
) -> tuple[Literal["radii", "minimal"], list[float]]:
    """Check the argument ``radii``. Returns the mode and the sorted radii."""
    minimal = isinstance(radii, str) and radii == "minimal"
    if radii is None or minimal:
        if isinstance(ball.eps, Tensor):
            raise ValueError("ball has one radius per image; give radii, or a ball with one radius")
        radii = ball.eps
    try:
        values = [float(r) for r in np.atleast_1d(np.asarray(radii, dtype=np.float64))]
    except (TypeError, ValueError):
        raise ValueError(f'radii must be numbers or "minimal", got {radii!r}') from None
    if not values or any(not 0 < r < math.inf for r in values):
        raise ValueError(f"radii must be finite and > 0, got {values}")
    return "minimal" if minimal else "radii", sorted(set(values))


def _attack(attack: Attack | Callable[..., Tensor] | str, ball: Ball) -> Attack:
    """Check the argument ``attack``, and convert it to an attack."""
    if attack in ("standard", "fast"):
        version: Any = attack
        return StandardAttack(ball, version=version, check=False, progress=False)
    if not isinstance(attack, Attack):
        if callable(attack) and not isinstance(attack, type):
            return FunctionAttack(ball, attack)
        raise (ValueError if isinstance(attack, str) else TypeError)(
            'attack must be "standard", "fast", an attack such as PGD(ball) or a function, '
            f"got {attack!r}"
        )
    theirs, ours = attack.ball.describe(), ball.describe()
    if theirs != ours:
        raise ValueError(f"attack is for another threat model than ball: {theirs} and {ours}")
    if isinstance(attack, StandardAttack):
        attack = replace(attack, check=False)  # done once, and not in each batch
    return replace(attack, progress=False)


def probe(model: Model, x: Tensor | Stream, y: Tensor) -> Tensor:
    """Logits of the first images. Raises if the model does not take them or lacks classes."""
    if isinstance(model, type) or not callable(model):
        seen = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be callable, images to logits, got {seen}")
    images = x[:2]
    with torch.no_grad(), as_found(model, images.device):
        try:
            logits = ask(model, images)
        except (ValueError, TypeError, MemoryError):
            raise
        except Exception as error:  # RuntimeError for wrong shapes, others are the model's own
            if out_of_memory(error):
                raise
            first = (str(error).strip().splitlines() or [""])[0]
            kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            raise ValueError(
                f"the model does not take images of shape {tuple(images.shape[1:])}"
                f"{other_images(model, images)}: {kind}{first}"
            ) from error
    check_classes("y", y, logits)
    return logits


def _answers(model: Model, x: Tensor) -> list[list[float | None]] | None:
    """Logits of the first images, to four digits. They identify models beyond their weights.

    ``None`` if two calls disagree.
    """
    asked = []
    with torch.no_grad(), as_found(model, x.device):
        for _ in range(2):
            torch.manual_seed(0)  # as_found restores the generators
            asked.append(ask(model, x))
    if not torch.equal(*(v.nan_to_num() for v in asked)):
        return None
    return [
        [float(f"{v:.4g}") if math.isfinite(v) else None for v in row] for row in asked[0].tolist()
    ]


class OtherSettings(ValueError):
    """The folder contains an evaluation with different settings."""


@contextmanager
def team() -> Iterator[tuple[int, int, Callable[[], None]]]:
    """The rank of this process, the number of processes, and a barrier."""
    rank, world = rank_and_size()
    if world == 1:
        yield 0, 1, lambda: None
        return
    patience = timedelta(days=30)  # the slowest process decides
    joined = grouped()
    if not joined:
        torch.distributed.init_process_group("gloo", timeout=patience)
    group: Any = torch.distributed.new_group(backend="gloo", timeout=patience) if joined else None
    try:
        yield rank, world, lambda: torch.distributed.barrier(group)
    finally:
        torch.distributed.destroy_process_group(group)


@contextmanager
def result_folder(storage: Storage | None) -> Iterator[Path]:
    """The folder of an evaluation, or a temporary one."""
    if storage is not None:
        path = Path(storage.folder)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"out must be a folder, but {path} is a file")
        yield path
        return
    if rank_and_size()[1] > 1:
        raise ValueError("out must be given if several processes share the work")
    with tempfile.TemporaryDirectory(prefix="wball-") as folder:
        yield Path(folder)


def begin(folder: Path, run: Plain, any_batch_size: bool) -> None:
    """Record the run in the folder. If the folder already contains a run, it must be the same."""
    for name in (RESULTS, EXAMPLES, EXHIBIT):
        check_file(folder / name)
    for inside in (folder / BATCHES).glob("*/"):
        if not inside.is_symlink():
            warnings.warn(f"{inside} is a folder, where batches are files; removed", stacklevel=3)
            shutil.rmtree(inside)
    for path in (folder / RESULTS, folder / BATCHES / "settings.json"):
        if path.is_file():
            with or_overwrite():
                found = read_sealed(path)
            _check_run(found, run, folder, any_batch_size)
            return
    write_sealed(folder / BATCHES / "settings.json", run)


@contextmanager
def or_overwrite() -> Iterator[None]:
    """Add to errors about unreadable files the advice to start over."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; {START_OVER}") from error


def _check_run(found: Plain, run: Plain, folder: Path, any_batch_size: bool) -> None:
    """Raise unless both runs are the same. The command may differ."""
    old, new = ({**r["settings"], **r["provenance"]} for r in (found, run))
    free = {"command", "answers", *(["batch_size"] if any_batch_size else [])}
    if (key := different_key(old, new, free)) is not None:
        raise OtherSettings(
            f"{folder} contains an evaluation with a different {key} "
            f"({difference(old.get(key), new.get(key))}); choose another folder, or {START_OVER}"
        )
    if not _alike(old["answers"], new["answers"]):
        raise OtherSettings(
            f"{folder} contains an evaluation of a different model: its weights are the same, but "
            "its logits for the first images differ; choose another folder, or " + START_OVER
        )


def different_key(one: Mapping[str, Any], other: Mapping[str, Any], free: set[str]) -> str | None:
    """The first key with different values, ignoring those that are ``free`` to differ."""
    for key in dict.fromkeys((*one, *other)):
        if key not in free and json_checksum(one.get(key)) != json_checksum(other.get(key)):
            return key
    return None


def difference(old: Any, new: Any) -> str:
    """Two settings as text; for dictionaries, the first entry that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = different_key(old, new, set())
        return f"{key}: {old.get(key)!r} there, {new.get(key)!r} here"
    return f"{old!r} there, {new!r} here"


def _alike(old: Any, new: Any) -> bool:
    """Whether stored logits agree up to differences between hardware and thread counts. Random
    models have none stored."""
    if old is None or new is None:
        return True
    one, other = (
        torch.tensor([[math.nan if v is None else v for v in row] for row in a]) for a in (old, new)
    )
    slack = 0.01 * float(one.nan_to_num().abs().max())
    return one.shape == other.shape and torch.allclose(one, other, 0.0, slack, equal_nan=True)


def clear(folder: Path, results: bool = True) -> None:
    """Remove the batches; with ``results``, everything that an evaluation wrote."""
    batches = folder / BATCHES
    if batches.is_symlink():  # the target of a link is not removed
        batches.unlink()
    elif batches.exists():
        shutil.rmtree(batches)
    if results:
        for name in (RESULTS, EXAMPLES, EXHIBIT, EXPLORER, "report.html", "log.jsonl"):
            (folder / name).unlink(missing_ok=True)
