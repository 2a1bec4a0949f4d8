"""Evaluate a model: attack every image at every radius, audit each example, prove what can be proved, keep it all.

Radii are tried from small to large, and an image that falls at one of them is not attacked again: its example lies in
every larger ball, too. What an attack claims is not believed: the model is asked again about the very image that is
stored, and :func:`wball.audit` measures its mass and its box, and proves its distance: by the plan that the attack
hands over, or by exact transport where there is none. Of the examples at each radius that a plan proves, a sample is
checked by exact transport all the same.

The images are cut into batches. Whatever is random in a batch depends on the seed, the batch and the radius alone, so
the result does not depend on who computes which batch, or on how often the work was interrupted.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wball import inputs, provenance
from wball.attacks import Attack, StandardAttack
from wball.attacks.base import check_labels, out_of_memory
from wball.ball.base import Ball, check_ball
from wball.certificates.effort import METHODS
from wball.certificates.tracing import trace
from wball.data import class_names
from wball.evaluation.batches import Batches, fitting_batch_size
from wball.evaluation.doubts import look_for_missed, weaker_at_larger
from wball.evaluation.exhibit import make_exhibit
from wball.evaluation.folder import BATCHES, begin, clear, or_overwrite, result_folder, team
from wball.evaluation.options import Description, Named, Running, grouped
from wball.evaluation.proofs import check_certificates
from wball.evaluation.result import (
    RESULTS,
    Evaluation,
    load_evaluation,
)
from wball.evaluation.stream import Images, Layout, find_stream, unpacked
from wball.evaluation.trust import claim_warnings
from wball.inputs import result_dtype
from wball.model import Model, as_found, ask
from wball.processes import rank_and_size
from wball.storage.atomic import clear_parts, locked
from wball.storage.files import Log, read_json

if TYPE_CHECKING:
    from typing_extensions import Unpack


def evaluate(
    model: Model,
    x: Any,
    y: Any = None,
    ball: Ball | None = None,
    radii: Sequence[float] | float | Literal["minimal"] | None = None,
    attack: Attack | Literal["standard", "fast"] = "standard",
    *,
    certify: bool | str = False,
    exact: Literal["sample", "all"] = "sample",
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    about: Description | None = None,
    run: Running | None = None,
    **named: Unpack[Named],
) -> Evaluation:
    """How robust is ``model`` on images ``x`` with labels ``y``?

    Args:
        model: images to logits; evaluated in evaluation mode and left as it was.
        x: images ``(B, C, H, W)`` in the ball's box. Or a map-style data set of (image, label) items or dictionaries, a
            ``DataLoader`` of one, NumPy arrays (also memory-mapped) or an ``.npz`` file: these are read batch by batch,
            with the same results; the whole set is never held in memory.
        y: class numbers ``(B,)``; left out where the data bring their own.
        ball: the threat model.
        radii: radii to evaluate (default: the ball's), or ``"minimal"`` to search each image's smallest one up to the
            ball's.
        attack: ``"standard"`` (:class:`wball.StandardAttack`), its ``"fast"`` version, or any attack.
        certify: also prove what can be proved; ``True`` or the name of a method of :func:`wball.certify`. It then needs
            a model that is a feed-forward network of supported modules. A sample of the certificates is proved again by
            :func:`wball.verify`.
        exact: which examples to solve the exact transport problem of. ``"sample"``: those without a plan that proves
            their distance, and of the others 1 %, or 32 if that is more, at each radius. ``"all"``: all of them.
            Distances are then exact, and the audit may take longer than the attack. A search for the smallest radius
            solves all of them, because the distance is its result.
        out: a folder for results, examples and the report's images. An evaluation that was interrupted is
            resumed; a finished one is read back.
        seed: random seed.
        about: what results say about model and data: names, classes, command, the layout of arrays.
        run: how it is computed: batch size, 8-bit examples, which examples to keep, overwriting, progress.
        **named: fields of ``about`` (:class:`~wball.evaluation.Description`) and ``run``
            (:class:`~wball.evaluation.Running`), given as keywords of their own: ``name="mine", progress=True``.

    Under ``torchrun``, or in a process group of your own, each process takes its share of the batches (``out`` is then
    a folder all of them see), and all return the whole result.

    >>> import wball
    >>> x, y = wball.load_sample()
    >>> result = evaluate(wball.load_model("mnist-standard"), x[:2], y[:2], wball.WassersteinBall(0.01), attack="fast")
    >>> result.clean_accuracy
    1.0
    """
    if ball is None:
        raise TypeError(
            "ball is missing: the threat model, such as ball=wball.WassersteinBall(0.1)"
        )
    check_ball(ball)
    about, run = grouped(about, run, named)
    names = class_names(x)
    x, y, digest, span = _data(model, x, y, ball, about.layout)
    first = x[:2]
    mode, points = _radii(radii, ball)
    chosen = _attack(attack, ball.at(points[-1]))
    chosen = chosen if run.levels is None else replace(chosen, levels=run.levels)
    method = None if certify is False else "anchored" if certify is True else certify
    if exact not in ("sample", "all"):
        raise ValueError(f'exact must be "sample" or "all", got {exact!r}')
    inputs.check_seed(seed)
    name, command = (None if text is None else str(text) for text in (about.name, about.command))
    logits = probe(model, first, span)
    if method is not None:
        _check_provable(model, first, method)
    said: dict[str, Any] = {
        "model": provenance.describe_model(model, name),
        "answers": _answers(model, first),
        "data": {
            "name": str(about.data),
            "images": len(x),
            "shape": list(first.shape[1:]),
            "sha256": digest,
            "classes": _classes(about.classes, names, logits.shape[1]),
        },
        "ball": ball.describe(),
        "mode": mode,
        "radii": points,
        "attack": _describe(chosen),
        "certify": None if method is None else {"method": method, "plans": "full"},
        "exact": "all" if mode == "minimal" else exact,
        "batch_size": run.batch_size or fitting_batch_size(model, first),
        "seed": seed,
        "keep": run.keep,
    }
    origin = provenance.collect(ball, first, command)
    with result_folder(out) as folder, team() as (rank, world, meet), locked(folder, rank):
        if rank == 0:
            if run.overwrite:
                clear(folder)
            clear_parts(folder)
            begin(folder, {"settings": said, "provenance": origin}, run.batch_size is None)
        meet()
        if not (folder / RESULTS).is_file():
            begun = read_json(folder / BATCHES / "settings.json")  # checked by the first process
            log = Log(folder / "log.jsonl", rank)
            log("start", world=world, command=begun["provenance"]["command"])
            shard = Batches(model, x, y, ball, chosen, begun["settings"], folder / BATCHES, log)
            shard.run(rank, world, run.progress)
            meet()
            if rank == 0:
                result = shard.merged(begun["provenance"], run.progress)
                result = replace(result, exhibit=make_exhibit(result, model, x, y, ball))
                result = replace(result, verification=check_certificates(result, model, x, y, ball))
                doubts = claim_warnings(
                    len(result.rejected),
                    len(result.contradictions),
                    len(result.disagreements),
                    len(result.unconfirmed),
                )
                doubts += look_for_missed(result, model, x, y, ball) + weaker_at_larger(result)
                replace(result, warnings=result.warnings + doubts).save(folder)
                del result  # what is returned is read back, and both would be in memory
                log("finish")
        if rank == 0:
            clear(folder, results=False)
        meet()
        with or_overwrite():
            return load_evaluation(folder)


def _classes(given: Sequence[str] | None, found: Sequence[str] | None, count: int) -> list[str]:
    """Names of classes: those given, those of the data set if the model has as many, or their numbers."""
    if given is None:
        given = (
            found if found is not None and len(found) == count else [str(k) for k in range(count)]
        )
    return [str(name) for name in given]


def _radii(
    radii: Sequence[float] | float | str | None, ball: Ball
) -> tuple[Literal["radii", "minimal"], list[float]]:
    mode: Literal["radii", "minimal"] = (
        "minimal" if isinstance(radii, str) and radii == "minimal" else "radii"
    )
    if radii is None or mode == "minimal":
        if isinstance(ball.eps, Tensor):
            raise ValueError(
                "ball has one radius per image; give a single one, or the list of radii to evaluate"
            )
        radii = ball.eps
    try:
        given = radii.flatten().tolist() if isinstance(radii, (Tensor, np.ndarray)) else radii
        values = [float(r) for r in given] if isinstance(given, Sequence) else [float(given)]
    except (TypeError, ValueError):
        raise ValueError(f'radii must be numbers or "minimal", got {radii!r}') from None
    if not values or any(not 0 < r < math.inf for r in values):
        raise ValueError(f"radii must be finite and > 0, got {values}")
    return mode, sorted(set(values))


def _attack(attack: Attack | str, ball: Ball) -> Attack:
    if isinstance(attack, str):
        if attack not in ("standard", "fast"):
            raise ValueError(
                f'attack must be "standard", "fast" or an attack such as PGD(ball), got {attack!r}'
            )
        return StandardAttack(
            ball, version="fast" if attack == "fast" else "standard", check=False, progress=False
        )
    if not isinstance(attack, Attack):
        raise TypeError(
            f'attack must be "standard", "fast" or an attack, got {type(attack).__name__}'
        )
    theirs, ours = attack.ball.describe(), ball.describe()
    if theirs != ours:
        raise ValueError(f"attack is for another threat model than ball: {theirs} and {ours}")
    if isinstance(attack, StandardAttack):
        attack = replace(attack, check=False)  # done once, and not in each batch
    return replace(attack, progress=False)


def _describe(attack: Attack) -> dict[str, Any]:
    """An attack's settings as plain data."""
    plain: dict[str, Any] = {"name": type(attack).__name__}
    for item in dataclasses.fields(attack):
        value = getattr(attack, item.name)
        if item.name in ("ball", "progress", "check", "proofs", "view"):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {"name": type(value).__name__, **dataclasses.asdict(value)}
        elif not isinstance(value, (str, int, float, bool, type(None))):
            value = getattr(value, "__qualname__", repr(value))
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        plain[item.name] = value
    return plain


def _data(
    model: Model, x: Any, y: Any, ball: Ball, layout: Layout
) -> tuple[Images, Images, str, Tensor]:
    """Images and labels, their fingerprint, and the least and largest label."""
    x, y = unpacked(x, y)
    stream = find_stream(x, y, model, ball.box, layout)
    if stream is None:
        if y is None:
            raise TypeError("y is missing: the labels of the images in x")
        x = inputs.check_images("x", x.detach(), ball.box)
        x, y = x.to(result_dtype(x)), check_labels("y", y, x)
        if len(x) == 0:
            raise ValueError("x is empty: there is nothing to evaluate")
        return x, y, provenance.fingerprint(x, y), torch.stack([y.min(), y.max()])
    if len(stream) == 0:
        raise ValueError("x is empty: there is nothing to evaluate")
    if rank_and_size()[0] > 0:  # the first process looks at all of them, the others at their own
        return stream.images, stream.labels, "", stream.labels[:1]
    digest, low, high = stream.survey()
    return stream.images, stream.labels, digest, torch.tensor([low, high])


def probe(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The logits of one image: the model takes such images, and it has the labels' classes."""
    if isinstance(model, type) or not callable(model):
        seen = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be callable, images to logits, got {seen}")
    with torch.no_grad(), as_found(model, x.device):
        try:
            logits = ask(model, x[:2])
        except (ValueError, TypeError, MemoryError):
            raise
        except (
            Exception
        ) as error:  # RuntimeError is torch's word for wrong shapes, others are the model's own
            if out_of_memory(error):
                raise
            first = (str(error).strip().splitlines() or [""])[0]
            kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            taken = f"the model does not take images of shape {tuple(x.shape[1:])}{_other_images(model, x)}"
            raise ValueError(f"{taken}: {kind}{first}") from error
    low, high, classes = int(y.min()), int(y.max()), logits.shape[1]
    if low < 0 or high >= classes:
        raise ValueError(
            f"y has labels from {low} to {high}, but the model has {classes} classes (0 to {classes - 1}): "
            "the data belong to another model, or the labels need renumbering"
        )
    return logits


def _other_images(model: Model, x: Tensor) -> str:
    """What to say to a network for grey images that is given colour, and the reverse, and where channels come last."""
    if x.ndim != 4:
        return ""
    tried = {
        "one image at a time: export it with a dynamic batch axis": x[:1],
        "with channels first: x.permute(0, 3, 1, 2), or layout='NHWC'": x[:2].movedim(-1, 1),
        "grey ones: convert them, x.mean(1, keepdim=True) or --grey": x[:2].mean(1, keepdim=True),
        "colour ones: repeat the channel, x.expand(-1, 3, -1, -1), or load the images in colour": x[
            :2, [0, 0, 0]
        ],
    }
    for remedy, images in tried.items():
        try:
            ask(model, images)
        except Exception:  # noqa: BLE001 (whatever the model raises: then it is something else)
            continue
        return f", but {remedy}"
    return ""


def _answers(model: Model, x: Tensor) -> list[list[float | None]] | None:
    """The logits of the first two images, to four digits: they tell models apart whose code differs, not their weights.

    ``None`` if two calls disagree.
    """
    asked = []
    with torch.no_grad(), as_found(model, x.device):
        for _ in range(2):
            torch.manual_seed(0)  # as_found brings the generators back
            asked.append(ask(model, x[:2]))
    if not torch.equal(*(v.nan_to_num() for v in asked)):
        return None
    return [
        [float(f"{v:.4g}") if math.isfinite(v) else None for v in row] for row in asked[0].tolist()
    ]


def _check_provable(model: Model, x: Tensor, method: str) -> None:
    """Raise now what the certificate would raise after the first attack."""
    if method not in METHODS:
        raise ValueError(f"certify must be a method, one of {', '.join(METHODS)}, got {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"certify needs a model that is a torch.nn.Module, got {type(model).__name__}"
        )
    trace(model, x[:1])
