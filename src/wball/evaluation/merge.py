"""Join evaluations of parts of a data set into one.

Each part is evaluated in a folder of its own, on any machine and in any order. The result of an
image depends only on the settings, the image and its batch, so joining loses nothing. Parts with
different settings, or with the same images, are refused.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wball.evaluation.result import COLUMNS, Evaluation, load_evaluation
from wball.evaluation.run import OtherSettings, difference, different_key
from wball.storage.files import PathLike, Tensors, json_checksum

FREE = {"data", "answers"}
"""Settings that may differ between parts."""


def merge_evaluations(parts: Sequence[Evaluation | PathLike]) -> Evaluation:
    """Join evaluations of several parts of a data set, in the given order.

    Args:
        parts: evaluations, or their folders. Model, threat model, radii, attack, certificate, seed
            and versions must be the same; the images must be different.
    """
    found = [part if isinstance(part, Evaluation) else load_evaluation(part) for part in parts]
    if not found:
        raise ValueError("parts is empty: give at least one evaluation")
    names = [
        f"part {k}" if isinstance(p, Evaluation) else os.fspath(p) for k, p in enumerate(parts)
    ]
    seen: dict[str, str] = {}
    for name, part in zip(names, found, strict=True):
        _check_same(names[0], found[0], name, part)
        data = part.settings["data"]
        for digest in data.get("parts", [data["sha256"]]):  # it may be the result of a merge
            if digest in seen:
                raise ValueError(
                    f"{name} and {seen[digest]} evaluate the same images, which would count twice"
                )
            seen[digest] = name
    first, starts = found[0], [0, *itertools.accumulate(len(part) for part in found)]
    titles = list(dict.fromkeys(str(part.settings["data"]["name"]) for part in found))
    more = f" and {len(titles) - 1} more parts" if len(titles) > 1 else ""
    commands = dict.fromkeys(str(part.provenance["command"]) for part in found)
    data = {
        **first.settings["data"],
        "name": titles[0] + more,
        "images": starts[-1],
        "sha256": json_checksum([part.settings["data"]["sha256"] for part in found]),
        "parts": list(seen),
    }
    moved = list(zip(found, starts, strict=False))
    sources = tuple(part.source(k) for part in found for k in range(len(part)))
    return Evaluation(
        {**first.settings, "data": data},
        {**first.provenance, "command": "; ".join(commands)},
        {name: torch.cat([part.images[name] for part in found]) for name in COLUMNS},
        tuple({**r, "index": r["index"] + start} for part, start in moved for r in part.rejected),
        tuple(dict.fromkeys(warning for part in found for warning in part.warnings)),
        _joined([part.examples for part in found], starts),
        _joined_exhibit(found, starts),
        tuple(k + start for part, start in moved for k in part.disagreements),
        tuple(dict.fromkeys(note for part in found for note in part.notes)),
        names=sources if len(set(sources)) == len(sources) else (),
        explorer=first.explorer,
    )


def _check_same(name: str, first: Evaluation, other_name: str, other: Evaluation) -> None:
    theirs, ours = ({**e.settings, "versions": e.provenance["versions"]} for e in (other, first))
    if (key := different_key(theirs, ours, FREE)) is not None:
        raise OtherSettings(
            f"{other_name} was evaluated with a different {key} than {name}: "
            f"{difference(theirs.get(key), ours.get(key))}; evaluate it with the same settings"
        )
    for key in ("shape", "classes"):
        if other.settings["data"][key] != first.settings["data"][key]:
            raise OtherSettings(f"{other_name} has images of a different {key} than {name}")


def _joined(parts: Sequence[Mapping[str, Tensor]], starts: Sequence[int]) -> Tensors:
    """Tensors of the parts, concatenated; positions of images are those in the whole."""
    stored: list[dict[str, Any]] = [
        {**part, "index": part["index"] + start}
        for part, start in zip(parts, starts, strict=False)
        if part
    ]
    return {name: torch.cat([part[name] for part in stored]) for name in (stored or [{}])[0]}


def _joined_exhibit(parts: Sequence[Evaluation], starts: Sequence[int]) -> Tensors:
    """The gallery of all parts, and the baseline of the first."""
    gallery = [
        {k: part.exhibit[k] for k in ("index", "original")} for part in parts if part.exhibit
    ]
    if len(gallery) < len(parts):
        return {}
    return {"baseline": parts[0].exhibit["baseline"], **_joined(gallery, starts)}
