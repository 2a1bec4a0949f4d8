"""What an evaluation found: one row of numbers per image, the settings they belong to, and the examples themselves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wball.auditing.violations import BOX_TOL, DISTANCE_TOL, MASS_TOL
from wball.display import Summarised, percent
from wball.evaluation.schema import COLUMNS, PROOFS, check_content, check_pictures
from wball.evaluation.trust import (
    HARMLESS,
    Decision,
    EvaluationWarning,
    Interval,
    Requirement,
    confidence_interval,
    decide,
)
from wball.storage.files import read_json, read_tensors, sealed, unsealed, write_json, write_tensors
from wball.storage.pixels import as_bytes, as_pixels

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "wball-evaluation/1"
RESULTS, EXAMPLES, EXHIBIT = "results.json", "examples.safetensors", "exhibit.safetensors"

VIEWS: dict[str, Callable[..., Any]] = {}
"""How evaluations are shown: :mod:`wball.report` enters itself here. Evaluations are data and import no reports."""

PLAN, EXACT = 1, 2
"""Places in :data:`PROOFS`."""


@dataclass(frozen=True)
class CurvePoint:
    """Accuracies at one radius, as shares of all images.

    Attributes:
        eps: the radius.
        accuracy: share of images that are classified right and that no valid example was found for: an upper bound
            of the robust accuracy.
        certified: share of images proved to be classified right all over the ball: a lower bound. ``None`` if no
            certificate was asked for.
        broken: number of images with a valid example at this radius (those that are wrong without one not counted).
        interval: 95 % confidence interval of ``accuracy`` (:mod:`wball.evaluation.trust`).
        certified_interval: that of ``certified``.
        measured: whether this radius was evaluated. If not, ``accuracy`` is only what smaller radii imply: an upper
            bound that may be far too high.
    """

    eps: float
    accuracy: float
    certified: float | None
    broken: int
    interval: Interval = (0.0, 1.0)
    certified_interval: Interval | None = None
    measured: bool = True


@dataclass(frozen=True, repr=False)
class Evaluation(Summarised):
    """The result of :func:`wball.evaluate`.

    Attributes:
        settings: what was evaluated and how: model, data, threat model, radii, attack, seed.
        provenance: command, device, kernel and versions.
        images: per image, in the order of the data: ``label``; ``predicted`` class of the clean image (-1: its logits
            are NaN); ``radius``, the smallest evaluated radius with a valid example (0: the clean image is already
            wrong, inf: none found); ``distance`` of the example; ``read_as``, its class (-1: none); ``found_at``, the
            radius it was searched in; ``mass_error`` and ``box_violation`` by the audit; ``member`` of the ensemble
            that found it (-1: none, or ``certify``'s search for a counterexample); ``n_steps``, gradient steps;
            ``certified``, the largest evaluated radius with a proof (0: none); ``proof`` of the distance: 1 if the
            attack's plan proves that it is at most that, 2 if it is exact, 3 if it is exact and was compared with what
            the plan proves, 0 without example (in files: words).
        rejected: claimed examples that failed the audit, with the reason. They are not counted.
        warnings: reasons not to believe the numbers, each with a stable code, what was seen and the remedy
            (:mod:`wball.evaluation.trust`, :mod:`wball.attacks.checks`). None of them: :attr:`reliable`.
        notes: harmless notices about the model, of the same kind.
        examples: ``index``, ``original`` and ``adversarial`` images, for every valid example, or for those that
            ``settings["keep"]`` says.
        exhibit: images for a report: ``index`` and ``original`` of a selection, and under ``explorer`` the strongest
            image found for some of them at every radius.
        disagreements: images whose plan promised a smaller distance than exact transport found. Always empty, unless
            code is wrong; if it is not, no plan was believed and every example was checked by exact transport.
        verification: how many certificates of a sample the independent checker looked at and confirmed, the images it
            did not confirm, how many it could not follow and why. ``None`` if no certificate was asked for.
    """

    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    images: Mapping[str, Tensor]
    rejected: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[EvaluationWarning, ...] = ()
    examples: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    exhibit: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    disagreements: tuple[int, ...] = ()
    notes: tuple[EvaluationWarning, ...] = ()
    verification: Mapping[str, Any] | None = None

    def headline(self) -> dict[str, str]:
        shown = {
            "model": self.name,
            "images": str(len(self)),
            "clean accuracy": percent(self.clean_accuracy),
        }
        middle = self.radii[len(self.radii) // 2]
        low, high = self.interval(self.accuracy_at(middle))
        robust = (
            f"{percent(self.accuracy_at(middle))} (95 % interval {percent(low)} to {percent(high)})"
        )
        shown[f"robust accuracy at {middle:g}"] = robust
        if (proved := self.certified_at(middle)) is not None:
            shown[f"certified accuracy at {middle:g}"] = percent(proved)
        return {**shown, "reliable": "yes" if self.reliable else "no"}

    def __len__(self) -> int:
        return len(self.images["label"])

    @property
    def name(self) -> str:
        return str(self.settings["model"]["name"])

    @property
    def unit(self) -> str:
        """The unit of radii and distances."""
        return str(self.settings["ball"]["unit"])

    @property
    def radii(self) -> list[float]:
        """The evaluated radii, ascending; for a search of the smallest radius: a few, up to its end."""
        if self.settings["mode"] == "minimal":
            top = float(self.settings["radii"][-1])
            return [round(top * k / 10, 12) for k in range(1, 11)]
        return [float(r) for r in self.settings["radii"]]

    @property
    def clean_accuracy(self) -> float:
        """Share of images that the model classifies right as they are."""
        return _share(self.images["label"] == self.images["predicted"])

    def class_name(self, number: int) -> str:
        """What the data call a class."""
        classes = self.settings["data"]["classes"]
        if number < 0:
            return "no class"
        return str(classes[number]) if number < len(classes) else str(number)

    @property
    def reliable(self) -> bool:
        """Whether nothing speaks against the numbers: no warning, and every claim held."""
        return not (
            self.warnings
            or self.rejected
            or self.contradictions
            or self.disagreements
            or self.unconfirmed
        )

    def interval(self, share: float) -> Interval:
        """The 95 % confidence interval of a share of these images (:mod:`wball.evaluation.trust`)."""
        return confidence_interval(round(share * len(self)), len(self))

    def check(self, requirements: Iterable[str | Requirement] | str | Requirement) -> Decision:
        """Whether requirements are met: ``"0.1:0.8"`` (robust accuracy at radius 0.1), ``"certified:0.05:0.6"``.

        A requirement is met only if the lower end of the 95 % confidence interval meets it, and never on an evaluation
        that is not :attr:`reliable`.
        """
        return decide(self, requirements)

    def measured_at(self, eps: float) -> bool:
        """Whether radius ``eps`` was evaluated. A search for the smallest radius evaluates all of them."""
        top = float(self.settings["radii"][-1])
        if self.settings["mode"] == "minimal":
            return 0 <= eps <= top * (1 + 1e-9)
        return any(abs(eps - r) <= 1e-9 * top for r in (0.0, *self.radii))

    def accuracy_at(self, eps: float) -> float:
        """Share of images that are right and have no valid example at radius ``eps`` or below: robust accuracy.

        Only at radii that were evaluated. In between, :meth:`accuracy_bound_at` says what smaller radii imply.
        """
        if not self.measured_at(eps):
            known = ", ".join(f"{r:g}" for r in self.radii)
            raise ValueError(
                f"eps {eps:g} was not evaluated, the radii are 0, {known}; evaluate it, or ask accuracy_bound_at(eps)"
            )
        return _share(~self.broken_at(eps))

    def accuracy_bound_at(self, eps: float) -> float:
        """An upper bound of the robust accuracy at any radius: what examples at smaller radii imply.

        Nothing was searched at ``eps`` itself, so it may be far too high.
        """
        if not eps >= 0:
            raise ValueError(f"eps must be >= 0, got {eps}")
        return _share(~self.broken_at(eps))

    def broken_at(self, eps: float) -> Tensor:
        """Which images are wrong at radius ``eps``: as they are, or by a valid example."""
        wrong = self.images["label"] != self.images["predicted"]
        return wrong | (self.images["radius"] <= eps) | (self.images["distance"] <= eps)

    def certified_at(self, eps: float) -> float | None:
        """Share of images with a proof at radius ``eps`` or above; ``None`` if no certificate was asked for."""
        if self.settings["certify"] is None:
            return None
        right = self.images["label"] == self.images["predicted"]
        return _share(right & (self.images["certified"] >= eps))

    def curve(self, radii: Sequence[float] | None = None) -> list[CurvePoint]:
        """Accuracies at radius 0 and at the evaluated radii, or at those given (see :attr:`CurvePoint.measured`)."""
        points = [0.0, *self.radii] if radii is None else list(radii)
        wrong = int((self.images["label"] != self.images["predicted"]).sum())
        return [self._point(float(r), wrong) for r in points]

    def _point(self, eps: float, wrong: int) -> CurvePoint:
        accuracy, certified = self.accuracy_bound_at(eps), self.certified_at(eps)
        return CurvePoint(
            eps,
            accuracy,
            certified,
            int(self.broken_at(eps).sum()) - wrong,
            self.interval(accuracy),
            None if certified is None else self.interval(certified),
            self.measured_at(eps),
        )

    @property
    def contradictions(self) -> list[int]:
        """Images with both a proof and a valid example inside the proved radius. Always empty, unless code is wrong."""
        images = self.images
        both = (images["certified"] > 0) & (images["distance"] * (1 + 1e-9) < images["certified"])
        return both.nonzero().squeeze(1).tolist()

    @property
    def unconfirmed(self) -> list[int]:
        """Certified images of the sample that the independent checker did not confirm."""
        return list(self.verification["unconfirmed"]) if self.verification else []

    def audit_summary(self) -> dict[str, Any]:
        """How many claimed examples were checked, how many held, and the worst of each measure among those."""
        found = self.images["read_as"] >= 0
        ratio = self.images["distance"][found] / self.images["found_at"][found]
        proof = self.images["proof"][found]
        return {
            "checked": int(found.sum()) + len(self.rejected),
            "valid": int(found.sum()),
            "rejected": len(self.rejected),
            "proved_by_plan": int((proof == PLAN).sum()),
            "exact_transport": int((proof >= EXACT).sum()),
            "both": int((proof == PLAN + EXACT).sum()),
            "disagreements": list(self.disagreements),
            "largest_mass_error": _largest(self.images["mass_error"][found]),
            "largest_box_violation": _largest(self.images["box_violation"][found]),
            "largest_distance_over_radius": _largest(ratio),
            "tolerances": {"mass": MASS_TOL, "box": BOX_TOL, "distance": DISTANCE_TOL},
            "contradictions": self.contradictions,
            "certificates": None if self.verification is None else dict(self.verification),
        }

    def summary(self) -> dict[str, Any]:
        """The headline numbers as plain data."""
        return {
            "images": len(self),
            "clean_accuracy": self.clean_accuracy,
            "reliable": self.reliable,
            "unit": self.unit,
            "curve": [
                {
                    "eps": p.eps,
                    "accuracy": p.accuracy,
                    "interval": list(p.interval),
                    "certified": p.certified,
                    "certified_interval": None
                    if p.certified_interval is None
                    else list(p.certified_interval),
                    "broken": p.broken,
                }
                for p in self.curve()
            ],
            "audit": self.audit_summary(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pixels, as plain data."""
        return {
            "format": FORMAT,
            "provenance": dict(self.provenance),
            "settings": dict(self.settings),
            "summary": self.summary(),
            "reliable": self.reliable,
            "warnings": [warning.to_dict() for warning in self.warnings],
            "notes": [note.to_dict() for note in self.notes],
            "rejected": [dict(r) for r in self.rejected],
            "disagreements": list(self.disagreements),
            "verification": None if self.verification is None else dict(self.verification),
            "images": {name: self._stored(name) for name in COLUMNS},
        }

    def _stored(self, name: str) -> list[Any]:
        """A column as it stands in files; nothing was certified where no certificate was asked for."""
        if name == "certified" and self.settings["certify"] is None:
            return [None] * len(self)
        values = self.images[name]
        return [PROOFS[k] for k in values.tolist()] if name == "proof" else _plain(values)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``results.json`` and the images beside it; the results come last, so that they are never alone."""
        folder = Path(folder)
        for name, images in ((EXAMPLES, self.examples), (EXHIBIT, self.exhibit)):
            if images:
                write_tensors(
                    folder / name, {key: as_bytes(values) for key, values in images.items()}
                )
        write_json(folder / RESULTS, sealed(self.to_dict()))

    def report(
        self, path: str | os.PathLike[str], *others: Evaluation, title: str | None = None
    ) -> Path:
        """Write the report, one HTML file that needs nothing else; ``others`` are compared with this evaluation."""
        written: Path = _view("report")([self, *others], path, title=title)
        return written

    def table(self) -> Table:
        """The accuracies for a terminal."""
        table: Table = _view("table")(self)
        return table

    def verdict(self) -> str:
        """The audit in a sentence or two."""
        return str(_view("verdict")(self))


def _view(name: str) -> Callable[..., Any]:
    if name not in VIEWS:
        raise RuntimeError("reports are not loaded: import wball.report first (import wball does)")
    return VIEWS[name]


def load_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """Read an evaluation back from its folder or its ``results.json``."""
    path = Path(path)
    folder = path.parent if path.suffix == ".json" else path
    file = path if path.suffix == ".json" else path / RESULTS
    if not file.is_file():
        raise FileNotFoundError(
            f"no {RESULTS} in {folder}; give the folder that `wball evaluate --out` wrote"
        )
    content = read_json(file)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{file} is not an evaluation of this version: its format is {found!r}, expected {FORMAT!r}"
        )
    try:
        check_content(content)
    except ValueError as error:
        raise ValueError(f"{file} is not a complete evaluation: {error}") from error
    content = unsealed(file, content)
    columns = content["images"]
    # Evaluations of earlier versions do not say: they solved every transport problem.
    proofs = columns.get("proof", [None if k < 0 else PROOFS[EXACT] for k in columns["read_as"]])
    certified = [0.0 if v is None else v for v in columns["certified"]]
    columns = {**columns, "proof": [PROOFS.index(how) for how in proofs], "certified": certified}
    images = {name: _column(columns[name], dtype) for name, dtype in COLUMNS.items()}
    extra = {
        name: _pictures(folder / name) for name in (EXAMPLES, EXHIBIT) if (folder / name).is_file()
    }
    every = content["settings"].get("keep") not in ("sample", "none")
    if wrong := check_pictures(
        extra.get(EXAMPLES, {}), extra.get(EXHIBIT, {}), images["read_as"], every=every
    ):
        raise ValueError(
            f"{folder}: {wrong}; {EXAMPLES} and {EXHIBIT} belong to another {RESULTS}, or were changed"
        )
    told = [EvaluationWarning.read(stored) for stored in content["warnings"]]
    notes = [w for w in told if w.code in HARMLESS]  # earlier versions did not tell them apart
    notes += [EvaluationWarning.read(stored) for stored in content.get("notes", ())]
    return Evaluation(
        content["settings"],
        content["provenance"],
        images,
        tuple(content["rejected"]),
        tuple(w for w in told if w.code not in HARMLESS),
        extra.get(EXAMPLES, {}),
        extra.get(EXHIBIT, {}),
        tuple(content.get("disagreements", ())),
        tuple(notes),
        content.get("verification"),
    )


def _pictures(path: Path) -> dict[str, Tensor]:
    return {name: as_pixels(values) for name, values in read_tensors(path)[0].items()}


def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0


def _largest(values: Tensor) -> float | None:
    top = float(values.max()) if values.numel() else 0.0
    return top if math.isfinite(top) else None


def _plain(values: Tensor) -> list[Any]:
    if not values.is_floating_point():
        return values.tolist()
    return [v if math.isfinite(v) else None for v in values.tolist()]


def _column(values: list[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor([math.inf if v is None else v for v in values], dtype=dtype)


def same_json(one: Any, other: Any) -> bool:
    """Whether two pieces of plain data would be written as the same JSON."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
