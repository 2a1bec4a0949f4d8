"""Evaluations of parts of a data set, joined into one.

A data set too large for one machine is cut into parts, each part is evaluated in a folder of its own, anywhere and in
any order, and the results are joined. An image's result depends on the settings, on the image and on its batch alone,
so nothing is lost by the cut; parts with different settings, or with the same images, are refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wball.evaluation.exhibit import EXPLORER, GALLERY, spread
from wball.evaluation.folder import OtherSettings
from wball.evaluation.result import Evaluation, load_evaluation, same_json
from wball.evaluation.schema import COLUMNS
from wball.evaluation.trust import EvaluationWarning

FREE = ("data", "keep", "answers")
"""Settings that may differ from part to part."""


def merge_evaluations(parts: Sequence[Evaluation | str | os.PathLike[str]]) -> Evaluation:
    """One evaluation out of those of several parts of a data set, in the order given.

    Args:
        parts: evaluations, or their folders. Model, threat model, radii, attack, certificate, seed and versions must be
            the same; images must not.
    """
    found = [part if isinstance(part, Evaluation) else load_evaluation(part) for part in parts]
    if not found:
        raise ValueError("parts is empty: give at least one evaluation")
    names = [
        f"part {k}" if isinstance(p, Evaluation) else os.fspath(p) for k, p in enumerate(parts)
    ]
    for name, part in zip(names[1:], found[1:], strict=True):
        _check_same(names[0], found[0], name, part)
    _check_distinct(names, found)
    starts = [0, *itertools.accumulate(len(part) for part in found)]
    first = found[0]
    kept = {part.settings.get("keep") for part in found}
    data = {
        **first.settings["data"],
        "name": _common_name([str(part.settings["data"]["name"]) for part in found]),
        "images": starts[-1],
        "sha256": hashlib.sha256(
            json.dumps([p.settings["data"]["sha256"] for p in found]).encode()
        ).hexdigest(),
        "parts": [part.settings["data"]["sha256"] for part in found],
    }
    return Evaluation(
        {**first.settings, "data": data, "keep": kept.pop() if len(kept) == 1 else "sample"},
        {
            **first.provenance,
            "command": "; ".join(dict.fromkeys(str(p.provenance["command"]) for p in found)),
        },
        {name: torch.cat([part.images[name] for part in found]) for name in COLUMNS},
        tuple(
            {**entry, "index": entry["index"] + start}
            for part, start in zip(found, starts, strict=False)
            for entry in part.rejected
        ),
        _all_of([part.warnings for part in found]),
        _joined([part.examples for part in found], starts, ("index",)),
        _exhibit(found, starts),
        tuple(
            k + start
            for part, start in zip(found, starts, strict=False)
            for k in part.disagreements
        ),
        _all_of([part.notes for part in found]),
    )


def _check_same(name: str, first: Evaluation, other_name: str, other: Evaluation) -> None:
    ours, theirs = ({**e.settings, "versions": e.provenance["versions"]} for e in (first, other))
    for key in dict.fromkeys((*ours, *theirs)):
        if key not in FREE and not same_json(ours.get(key), theirs.get(key)):
            raise OtherSettings(
                f"{other_name} was evaluated with a different {key} than {name}: {theirs.get(key)!r} and "
                f"{ours.get(key)!r}; evaluate it again with the same settings"
            )
    for key in ("shape", "classes"):
        if not same_json(first.settings["data"].get(key), other.settings["data"].get(key)):
            raise OtherSettings(
                f"{other_name} has images of a different {key} than {name}; they are not one data set"
            )


def _check_distinct(names: Sequence[str], parts: Sequence[Evaluation]) -> None:
    seen: dict[str, str] = {}
    for name, part in zip(names, parts, strict=True):
        for digest in part.settings["data"].get("parts", [part.settings["data"]["sha256"]]):
            if digest in seen:
                raise ValueError(
                    f"{name} and {seen[digest]} evaluate the same images, which would count twice"
                )
            seen[digest] = name


def _common_name(names: list[str]) -> str:
    """The names of the parts, each once."""
    different = list(dict.fromkeys(names))
    return (
        different[0]
        if len(different) == 1
        else f"{different[0]} and {len(different) - 1} more parts"
    )


def _all_of(said: Sequence[Sequence[EvaluationWarning]]) -> tuple[EvaluationWarning, ...]:
    """Every warning once."""
    return tuple(dict.fromkeys(warning for part in said for warning in part))


def _joined(
    parts: Sequence[Any], starts: Sequence[int], numbers: Sequence[str]
) -> dict[str, Tensor]:
    """Tensors of the parts, one behind the other, with the numbers of images counted through."""
    stored = [
        {name: values + start if name in numbers else values for name, values in part.items()}
        for part, start in zip(parts, starts, strict=False)
        if part
    ]
    shared = [name for name in stored[0] if all(name in part for part in stored)] if stored else []
    return {name: torch.cat([part[name] for part in stored]) for name in shared}


def _exhibit(parts: Sequence[Evaluation], starts: Sequence[int]) -> dict[str, Tensor]:
    """A selection of the parts' images for the report, no larger than that of one evaluation."""
    radii = parts[0].exhibit.get("explorer_radii")
    plain = [{k: v for k, v in part.exhibit.items() if k != "explorer_radii"} for part in parts]
    images = _joined(
        [{k: v for k, v in e.items() if not k.startswith("explorer")} for e in plain],
        starts,
        ("index",),
    )
    if radii is None or not images:
        return {}
    shown = _joined(
        [
            {k: v for k, v in e.items() if k.startswith("explorer")} if "explorer" in e else {}
            for e in plain
        ],
        starts,
        ("explorer_index",),
    )
    if shown:
        chosen = spread(torch.arange(len(shown["explorer_index"])), EXPLORER)
        shown = {name: values[chosen] for name, values in shown.items()}
    needed = torch.isin(images["index"], shown.get("explorer_index", images["index"][:0]))
    others = spread((~needed).nonzero().squeeze(1), GALLERY - int(needed.sum()))
    picked = torch.cat([needed.nonzero().squeeze(1), others]).sort().values
    images = {name: values[picked] for name, values in images.items()}
    return {**images, "explorer_index": images["index"][:0], **shown, "explorer_radii": radii}
