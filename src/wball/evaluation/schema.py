"""What a results file must hold: files may be older than this version, damaged, or edited by hand.

A file that passes can be shown, compared and drawn; one that does not is refused with the name of what is wrong in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wball.ball.description import read_cost

PROOFS = (None, "plan", "exact", "plan, exact")
"""How the distance of an example was proved: by the attack's plan, by exact transport, by both."""


COLUMNS: dict[str, torch.dtype] = {
    "label": torch.long,
    "predicted": torch.long,
    "read_as": torch.long,
    "radius": torch.float64,
    "distance": torch.float64,
    "found_at": torch.float64,
    "mass_error": torch.float64,
    "box_violation": torch.float64,
    "member": torch.long,
    "n_steps": torch.long,
    "certified": torch.float64,
    "proof": torch.long,
}
"""One value per image. ``inf`` (in files: null) stands for "no example was found"; of ``proof`` files have the words in
:data:`PROOFS`, and those of earlier versions lack it."""


@dataclass(frozen=True)
class _Maybe:
    """That, or ``null``."""

    kind: Any


@dataclass(frozen=True)
class _Either:
    """Text, or that: earlier versions wrote warnings as sentences."""

    kind: Any


_WARNING = _Either({"code": str, "message": str, "remedy": str})

# A type, a list of one kind, or a dictionary of kinds by name; other names may be there, too.
_NUMBERS, _WHOLE = [_Maybe(float)], [int]
_CONTENT = {
    "settings": {
        "model": {"name": str, "parameters": _Maybe(int), "sha256": _Maybe(str)},
        "data": {"name": str, "sha256": str, "classes": [str]},
        "ball": {"kind": str, "box": _Maybe([float]), "unit": str},
        "mode": str,
        "radii": [float],
        "attack": {"name": str},
        "certify": _Maybe({"method": str, "plans": str}),
        "batch_size": int,
        "seed": int,
    },
    "provenance": {"command": str, "device": str, "kernel": str, "platform": str, "versions": dict},
    "images": {
        name: _WHOLE if dtype is torch.long else _NUMBERS
        for name, dtype in COLUMNS.items()
        if name != "proof"
    },
    "rejected": [{"index": int, "eps": float, "reason": str}],
    "warnings": [_WARNING],
}
_VERIFICATION = _Maybe(
    {"checked": int, "confirmed": int, "unconfirmed": _WHOLE, "unfollowed": int, "reason": str}
)
_BALLS = {
    "grid": {"window": int, "p": float, "mass": str},
    "table": {"table": [_NUMBERS], "mass": str},
    "matrix": {"mass": str},
}


def check_content(content: Any) -> None:
    """Raise a ``ValueError`` that names what is missing or of the wrong kind."""
    _check("", content, _CONTENT)
    settings, images = content["settings"], content["images"]
    ball, radii = settings["ball"], settings["radii"]
    if ball["kind"] == "WassersteinBall":
        _check("settings.ball", ball, {"cost": str})
        if ball["cost"] not in _BALLS:
            raise ValueError(
                f"settings.ball.cost is {ball['cost']!r}, expected one of {', '.join(_BALLS)}"
            )
        _check("settings.ball", ball, _BALLS[ball["cost"]])
        read_cost(ball)
    if ball["box"] is not None and len(ball["box"]) != 2:
        raise ValueError(f"settings.ball.box has {len(ball['box'])} numbers, expected 2")
    if not radii or radii[0] <= 0 or sorted(radii) != radii:
        raise ValueError("settings.radii must be ascending and above 0")
    if settings["attack"]["name"] == "StandardAttack":
        _check("settings.attack", settings["attack"], {"version": str})
    _check("disagreements", content.get("disagreements", []), _WHOLE)
    _check("verification", content.get("verification"), _VERIFICATION)
    _check("notes", content.get("notes", []), [_WARNING])
    _check("images.proof", images.get("proof", []), [_Maybe(str)])
    if unknown := [how for how in images.get("proof", []) if how not in PROOFS]:
        raise ValueError(f"images.proof has {unknown[0]!r}, expected one of {PROOFS}")
    lengths = {name: len(images[name]) for name in COLUMNS if name in images}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"images has columns of different lengths or none: {lengths}")


def check_pictures(
    examples: Mapping[str, Tensor],
    exhibit: Mapping[str, Tensor],
    read_as: Tensor,
    *,
    every: bool = True,
) -> str | None:
    """What is wrong with the images beside the results; ``None`` if nothing is. ``every``: all examples were kept."""
    if examples:
        if not {"index", "original", "adversarial"} <= examples.keys():
            return "the examples are not complete"
        found, valid = examples["index"], (read_as >= 0).nonzero().squeeze(1)
        if not (torch.equal(found, valid) if every else bool(torch.isin(found, valid).all())):
            return "the examples are not those of the results"
        if not len(found) == len(examples["original"]) == len(examples["adversarial"]):
            return "there are not as many images as examples"
    if not exhibit:
        return None
    if not {"index", "original", "explorer_index", "explorer_radii"} <= exhibit.keys():
        return "the exhibit is not complete"
    index, shown = exhibit["index"], exhibit["explorer_index"]
    inside = bool(((index >= 0) & (index < len(read_as))).all()) and bool((index.diff() > 0).all())
    if (
        not inside
        or len(index) != len(exhibit["original"])
        or not bool(torch.isin(shown, index).all())
    ):
        return "the exhibit is not of these images"
    size = (len(shown), len(exhibit["explorer_radii"]))
    for name in ("explorer", "explorer_read_as"):
        if name in exhibit and tuple(exhibit[name].shape[:2]) != size:
            return f"{name} has shape {tuple(exhibit[name].shape)}, expected {size} first"
    return None


def _check(where: str, value: Any, kind: Any) -> None:
    if isinstance(kind, _Maybe):
        if value is None:
            return
        kind = kind.kind
    if isinstance(kind, _Either):
        kind = str if isinstance(value, str) else kind.kind
    if isinstance(kind, dict):
        _is(where, value, dict)
        for name, inner in kind.items():
            path = f"{where}.{name}".removeprefix(".")
            if name not in value:
                raise ValueError(f"it has no {path}")
            _check(path, value[name], inner)
    elif isinstance(kind, list):
        _is(where, value, list)
        for k, item in enumerate(value):
            _check(f"{where}[{k}]", item, kind[0])
    else:
        _is(where, value, kind)


def _is(where: str, value: Any, kind: type) -> None:
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(
        value, bool
    )
    if fits and kind in (int, float):  # what a column can hold; false for NaN
        fits = -(2**63) <= value < 2**63 if kind is int else -1e300 < value < 1e300
    if not fits:
        wanted = {
            int: "a whole number",
            float: "a number",
            str: "text",
            list: "a list",
            dict: "an object",
        }[kind]
        raise ValueError(f"{where or 'the file'} is {str(value)[:40]!r}, expected {wanted}")
