"""The result of an evaluation: one row of numbers per image, the settings, and the examples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wball.auditing.violations import BOX_TOL, DISTANCE_TOL, MASS_TOL
from wball.display import Summarised, percent
from wball.evaluation.requirements import (
    CONFIDENCE,
    EXIT_CLAIMS,
    EXIT_REQUIREMENT,
    EXIT_UNRELIABLE,
    Check,
    Comparison,
    Decision,
    Interval,
    Requirement,
    Requirements,
    confidence_interval,
)
from wball.inputs import as_pixels, positions
from wball.provenance import Plain
from wball.storage.files import (
    PathLike,
    Tensors,
    as_bytes,
    json_checksum,
    read_json,
    read_sealed,
    read_tensors,
    write_sealed,
    write_tensors,
)
from wball.storage.names import printable

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = "wball-evaluation/2"
RESULTS, EXAMPLES = "results.json", "examples.safetensors"
EXHIBIT, EXPLORER = "exhibit.safetensors", "explorer.safetensors"

PROOFS = (None, "plan", "exact", "plan, exact")
"""How the distance of an example is proved, as written in files."""
PLAN, EXACT = 1, 2
"""Positions in :data:`PROOFS`."""

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
"""One value per image; see :class:`Evaluation`. ``inf`` is written as null."""


@dataclass(frozen=True)
class EvaluationWarning:
    """A reason not to believe a robust accuracy, or a harmless note about the model.

    Attributes:
        code: a stable name, such as ``"zero-gradient"``.
        message: what was seen.
        remedy: what to do about it.
    """

    code: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(frozen=True)
class CurvePoint:
    """Accuracies at one radius, as shares of all images.

    Attributes:
        eps: the radius.
        accuracy: share of images that are classified correctly and have no valid example: an upper
            bound of the robust accuracy.
        certified: share of images with a certificate: a lower bound. ``None`` without certificates.
        broken: number of images with a valid example at this radius.
        interval: 95 % confidence interval of ``accuracy``.
        certified_interval: 95 % confidence interval of ``certified``.
        measured: whether this radius was evaluated. If not, ``accuracy`` is what smaller radii
            imply, and may be far too high.
    """

    eps: float
    accuracy: float
    certified: float | None
    broken: int
    interval: Interval = (0.0, 1.0)
    certified_interval: Interval | None = None
    measured: bool = True


class AccuracyCurve(tuple[CurvePoint, ...]):
    """The accuracies of one evaluation at several radii, ascending."""

    def to_pandas(self) -> Any:
        """The curve as a ``pandas.DataFrame``, one row per radius."""
        return _data_frame([asdict(point) for point in self])

    def __repr__(self) -> str:
        return f"<AccuracyCurve: {', '.join(f'{p.eps:g}: {percent(p.accuracy)}' for p in self)}>"


@dataclass(frozen=True, repr=False)
class Evaluation(Summarised):
    """The result of :func:`wball.evaluate`.

    Attributes:
        settings: model, data, threat model, radii, attack, seed.
        provenance: command, device, kernel and versions.
        images: per image, in the order of the data: ``label``; ``predicted`` class of the clean
            image (-1: NaN); ``radius``, the smallest evaluated radius with a valid example (0: the
            clean image is misclassified, inf: none found); ``distance`` of the example;
            ``read_as``, its class (-1: none); ``found_at``, the radius of the attack that found it;
            ``mass_error`` and ``box_violation`` by the audit; ``member`` of the ensemble that found
            it (-1: none, or the search of ``certify``); ``n_steps``, gradient steps, if counted;
            ``certified``, the largest evaluated radius with a certificate (0: none); ``proof`` of
            the distance: 1 by a plan (an upper bound), 2 exact, 3 both, 0 without example.
        rejected: claimed examples that failed the audit, with the reason. They are not counted.
        warnings: reasons not to believe the numbers, with code, message and remedy
            (:mod:`wball.evaluation.doubts`).
        notes: harmless notes about the model.
        examples: ``index``, ``original`` and ``adversarial`` images of every valid example, or of
            those selected by ``settings["keep"]``.
        exhibit: images for a report (:mod:`wball.evaluation.exhibit`).
        explorer: a few images at every radius, if :func:`wball.explore` made them.
        disagreements: images whose plan promised a smaller distance than exact transport found.
            They mean an error in the library; all examples were then solved exactly.
        verification: result of the independent checker on a sample of certificates: numbers
            ``checked`` and ``confirmed``, ``unconfirmed`` images, number ``unfollowed`` and why.
        names: the source of each image, a file or its number in the data (empty: positions).
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
    names: tuple[str, ...] = ()
    explorer: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def headline(self) -> dict[str, str]:
        middle = self.radii[len(self.radii) // 2]
        low, high = self.interval(self.accuracy_at(middle))
        robust = (
            f"{percent(self.accuracy_at(middle))} (95 % interval {percent(low)} to {percent(high)})"
        )
        shown = {
            "model": self.name,
            "images": str(len(self)),
            "clean accuracy": percent(self.clean_accuracy),
            f"robust accuracy at {middle:g}": robust,
        }
        if (proved := self.certified_at(middle)) is not None:
            shown[f"certified accuracy at {middle:g}"] = percent(proved)
        return {**shown, "reliable": self.reliability}

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
        """The evaluated radii, ascending; ten of them for a search of the smallest radius."""
        if self.settings["mode"] == "minimal":
            top = float(self.settings["radii"][-1])
            return [round(top * k / 10, 12) for k in range(1, 11)]
        return [float(r) for r in self.settings["radii"]]

    @property
    def clean_accuracy(self) -> float:
        """Share of clean images that the model classifies correctly."""
        return _share(self._right)

    @property
    def _right(self) -> Tensor:
        return self.images["label"] == self.images["predicted"]

    def class_name(self, number: int) -> str:
        """The name of a class."""
        classes = self.settings["data"]["classes"]
        if number < 0:
            return "no class"
        return str(classes[number]) if number < len(classes) else str(number)

    def source(self, k: int) -> str:
        """Where image ``k`` comes from: its file, or its number in the data."""
        return self.names[k] if self.names else str(k)

    @property
    def doubts(self) -> tuple[EvaluationWarning, ...]:
        """All warnings, and all claims that did not hold."""
        return tuple(dict.fromkeys((*self.warnings, *failed_claims(self))))

    @property
    def quick_look(self) -> bool:
        """Whether the fast attack was used, which skips the checks for gradient masking."""
        return self.settings["attack"].get("version") == "fast"

    @property
    def reliable(self) -> bool:
        """Whether there are no doubts, and the evaluation is not a quick look."""
        return not self.doubts and not self.quick_look

    @property
    def reliability(self) -> str:
        """Whether the evaluation is reliable: ``"yes"``, ``"no"`` or ``"quick look"``."""
        return "no" if self.doubts else "quick look" if self.quick_look else "yes"

    def interval(self, share: float) -> Interval:
        """The 95 % confidence interval of a share of these images."""
        return confidence_interval(round(share * len(self)), len(self))

    def check(self, requirements: Iterable[str | Requirement] | str | Requirement) -> Decision:
        """Whether requirements are met: ``"0.1:0.8"`` (robust accuracy at radius 0.1),
        ``"certified:0.05:0.6"``, or ``"0.1:out/baseline"`` (not worse at radius 0.1 than the
        evaluation of the same images in that folder, by a paired test).

        A share is met only if the lower end of the 95 % confidence interval meets it, and
        only if the evaluation is :attr:`reliable`.
        """
        if isinstance(requirements, (str, Requirement)):
            requirements = [requirements]
        return Decision(tuple(self._check(Requirement.parse(wanted)) for wanted in requirements))

    def _check(self, wanted: Requirement) -> Check:
        if wanted.baseline is not None:
            return self._check_baseline(wanted, load_evaluation(wanted.baseline))
        assert wanted.share is not None
        measured = (self.certified_at if wanted.certified else self.accuracy_at)(wanted.eps)
        if measured is None:
            reason = f"{wanted}: nothing was certified; evaluate with certify=True"
            return Check(wanted, None, None, False, reason)
        low, high = self.interval(measured)
        said = f"{wanted}: {percent(measured)} (95 % interval {percent(low)} to {percent(high)})"
        if self.doubts:
            said += f", but the evaluation is not reliable: {self._codes()}"
        elif not self.reliable:
            said += ", but this is a quick look: evaluate with attack='standard'"
        elif measured >= wanted.share > low:
            said += "; the interval's lower end must meet it: evaluate more images"
        return Check(wanted, measured, (low, high), self.reliable and low >= wanted.share, said)

    def _check_baseline(self, wanted: Requirement, baseline: Evaluation) -> Check:
        found, measured = self.compare(baseline, wanted.eps), self.accuracy_at(wanted.eps)
        mine, theirs = found.alone
        said = (
            f"{wanted}: {percent(measured)} and {percent(baseline.accuracy_at(wanted.eps))}; {mine} "
            f"images are robust only for this model, {theirs} only for the baseline (paired test, "
            f"p = {found.p_worse:.2g})"
        )
        for name, e in (("the evaluation", self), ("the baseline", baseline)):
            said += "" if e.reliable else f", but {name} is not reliable ({e.reliability})"
        met = found.p_worse >= 1 - CONFIDENCE and self.reliable and baseline.reliable
        return Check(wanted, measured, self.interval(measured), met, said)

    def measured_at(self, eps: float) -> bool:
        """Whether radius ``eps`` was evaluated. A search for the smallest radius evaluates all."""
        top = float(self.settings["radii"][-1])
        if self.settings["mode"] == "minimal":
            return 0 <= eps <= top * (1 + 1e-9)
        return any(abs(eps - r) <= 1e-9 * top for r in (0.0, *self.radii))

    def accuracy_at(self, eps: float) -> float:
        """Robust accuracy at an evaluated radius: the share of images that are classified correctly
        and have no valid example at ``eps`` or below."""
        if not self.measured_at(eps):
            known = ", ".join(f"{r:g}" for r in self.radii)
            raise ValueError(
                f"eps {eps:g} was not evaluated, the radii are 0, {known}; "
                "evaluate it, or ask accuracy_bound_at(eps)"
            )
        return _share(~self.broken_at(eps))

    def accuracy_bound_at(self, eps: float) -> float:
        """An upper bound of the robust accuracy at any radius, from examples at smaller radii.

        It may be far too high, because ``eps`` itself was not attacked.
        """
        if not eps >= 0:
            raise ValueError(f"eps must be >= 0, got {eps}")
        return _share(~self.broken_at(eps))

    def broken_at(self, eps: float) -> Tensor:
        """Which images are misclassified at radius ``eps``: clean, or by a valid example."""
        return ~self._right | (self.images["radius"] <= eps) | (self.images["distance"] <= eps)

    def compare(self, other: Evaluation, eps: float) -> Comparison:
        """Whether two models, evaluated on the same images, differ in robustness at ``eps``."""
        if self.settings["data"]["sha256"] != other.settings["data"]["sha256"]:
            raise ValueError(
                "other was evaluated on different images: a paired test needs the same"
            )
        for e in (self, other):
            e.accuracy_at(eps)  # raises if the radius was not evaluated
        mine, theirs = self.broken_at(eps), other.broken_at(eps)
        alone = int((~mine & theirs).sum()), int((mine & ~theirs).sum())
        return Comparison(eps, (self.name, other.name), alone)

    def certified_at(self, eps: float) -> float | None:
        """Share of images certified at ``eps`` or above; ``None`` without certificates."""
        if self.settings["certify"] is None:
            return None
        return _share(self._right & (self.images["certified"] >= eps))

    def curve(self, radii: Sequence[float] | None = None) -> AccuracyCurve:
        """Accuracies at radius 0 and at the evaluated radii, or at the given ones."""
        return AccuracyCurve(
            self._point(float(r)) for r in ([0.0, *self.radii] if radii is None else radii)
        )

    def _point(self, eps: float) -> CurvePoint:
        """The accuracies at one radius."""
        accuracy, certified = self.accuracy_bound_at(eps), self.certified_at(eps)
        return CurvePoint(
            eps,
            accuracy,
            certified,
            int((self.broken_at(eps) & self._right).sum()),
            self.interval(accuracy),
            None if certified is None else self.interval(certified),
            self.measured_at(eps),
        )

    @property
    def baseline(self) -> Plain | None:
        """Accuracy without an attack, on up to 100 images: ``shifted`` by one pixel, and, by
        radius, at ``random`` points of the ball. ``None`` if it was not stored."""
        if "baseline" not in self.exhibit:
            return None
        shifted, *random = self.exhibit["baseline"].tolist()
        return {"shifted": shifted, "random": dict(zip(self.radii, random, strict=True))}

    @property
    def contradictions(self) -> list[int]:
        """Images with a valid example inside their certified radius: an error in the library."""
        images = self.images
        both = (images["certified"] > 0) & (images["distance"] * (1 + 1e-9) < images["certified"])
        return positions(both).tolist()

    @property
    def unconfirmed(self) -> list[int]:
        """Images of the sample whose certificate the independent checker did not confirm."""
        return list(self.verification["unconfirmed"]) if self.verification else []

    def audit_summary(self) -> Plain:
        """Numbers of claimed, valid and rejected examples, and the largest violations."""
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

    def summary(self) -> Plain:
        """The main numbers as plain data."""
        curve = [asdict(point) for point in self.curve()]
        for point in curve:
            del point["measured"]
        return {
            "images": len(self),
            "clean_accuracy": self.clean_accuracy,
            "reliable": self.reliable,
            "quick_look": self.quick_look,
            "unit": self.unit,
            **json.loads(json.dumps({"curve": curve, "baseline": self.baseline})),
            "audit": self.audit_summary(),
        }

    def to_dict(self) -> Plain:
        """Everything except the pixels, as plain data."""
        return {
            "format": FORMAT,
            "provenance": dict(self.provenance),
            "settings": dict(self.settings),
            "summary": self.summary(),
            "reliable": self.reliable,
            "warnings": [*map(asdict, self.doubts)],
            "notes": [*map(asdict, self.notes)],
            "rejected": [*map(dict, self.rejected)],
            "disagreements": list(self.disagreements),
            "verification": None if self.verification is None else dict(self.verification),
            "images": self.columns(),
        }

    def columns(self) -> dict[str, list[Any]]:
        """The table of images as written in files: ``name``, and the columns of ``images``."""
        stored = {column: self._stored(column) for column in COLUMNS}
        return {"name": [self.source(k) for k in range(len(self))], **stored}

    def to_pandas(self) -> Any:
        """The table of images as a ``pandas.DataFrame``, one row per image."""
        return _data_frame(self.columns())

    def _stored(self, name: str) -> list[Any]:
        """A column as written in files."""
        values = self.images[name].tolist()
        if name == "certified" and self.settings["certify"] is None:
            return [None] * len(self)
        if name == "proof":
            return [PROOFS[k] for k in values]
        return [v if math.isfinite(v) else None for v in values]

    def save(self, folder: PathLike) -> None:
        """Write ``results.json`` and the images beside it.

        The results are written last, and hold the checksums of the other files: images of another
        run are not accepted.
        """
        folder, files = Path(folder), {}
        for name, images in ((EXAMPLES, self.examples), (EXHIBIT, self.exhibit)):
            if images:
                files[name] = write_tensors(folder / name, _packed(images))
        self.save_explorer(folder)
        write_sealed(folder / RESULTS, {**self.to_dict(), "files": files})

    def save_explorer(self, folder: PathLike) -> None:
        """Write the images of the explorer (:func:`wball.explore`) beside the results."""
        if self.explorer:
            write_tensors(Path(folder) / EXPLORER, _packed(self.explorer), self._identity())

    def _identity(self) -> dict[str, str]:
        """Marks files that belong to these results."""
        return {"results": json_checksum([dict(self.settings), self.columns()])}

    def table(self) -> Table:
        """The accuracies for a terminal."""
        from rich.markup import escape
        from rich.table import Table

        heading = f"{self.name}: {len(self)} images of {self.settings['data']['name']}"
        shown = Table(title=escape(printable(heading)), title_justify="left")
        proved = self.settings["certify"] is not None
        columns = [f"eps ({printable(self.unit)})", "accuracy", "95 % interval"]
        for column in (*columns, *["certified"] * proved, "broken"):
            shown.add_column(column, justify="right")
        for point in self.curve():
            row = [f"{point.eps:g}" if point.eps else "0 (clean)", percent(point.accuracy)]
            row += ["{:.1f}-{:.1f} %".format(*(100 * end for end in point.interval))]
            row += [] if point.certified is None else [percent(point.certified)]
            shown.add_row(*row, str(point.broken))
        return shown

    def verdict(self) -> str:
        """The audit in a sentence or two."""
        audit = self.audit_summary()
        said = (
            f"audit: {audit['valid']} of {audit['checked']} examples valid (mass, box and distance)"
        )
        if not audit["checked"]:
            said = "audit: no examples were found"
        if audit["rejected"]:
            said += f"; {audit['rejected']} rejected and not counted"
        if audit["contradictions"]:
            said += (
                f"; CONTRADICTION between proof and example on images {audit['contradictions'][:5]}"
            )
        proofs = audit["certificates"]
        if proofs and proofs["checked"] + proofs["unfollowed"]:
            said += "\ncertificates confirmed by the independent checker: "
            said += f"{proofs['confirmed']} of {proofs['checked']}"
            if proofs["unfollowed"]:
                said += f"; {proofs['unfollowed']} could not be checked ({proofs['reason']})"
        if audit["valid"] and "cost" in self.settings["ball"]:
            plan, exact, both = (audit[k] for k in ("proved_by_plan", "exact_transport", "both"))
            said += "\ndistances proved by "
            said += (
                f"plan: {plan + both}, by exact transport alone: "
                if plan or both
                else "exact transport: "
            )
            said += str(exact - both)
            if plan or both:
                said += (
                    f"; sampled exact check: {both}, disagreements: {len(audit['disagreements'])}"
                )
        if base := self.baseline:
            said += (
                f"\nwithout an attack, accuracy: {percent(base['shifted'])} on images shifted by one pixel, "
                f"{percent(base['random'][self.radii[-1]])} at random points of the ball of radius "
                f"{self.radii[-1]:g}"
            )
        if self.doubts:
            said += f"\nNOT RELIABLE: {self._codes()}; the robust accuracy may be far too high"
        elif self.quick_look:
            said += (
                "\nquick look: the fast attack skips the checks for gradient masking; use the standard "
                "attack for reliable numbers"
            )
        return said

    def _codes(self) -> str:
        return ", ".join(sorted({doubt.code for doubt in self.doubts}))


Evaluations = Sequence[Evaluation]


def _data_frame(content: Any) -> Any:
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise ImportError("to_pandas needs pandas: pip install pandas") from error
    return DataFrame(content)


def failed_claims(result: Evaluation) -> list[EvaluationWarning]:
    """The claims of attacks and certificates that failed a check, as warnings."""
    report = "report it with the files of this evaluation: this is an error of the library"
    claims = (
        (
            result.rejected,
            "rejected-examples",
            "claimed examples failed the audit and are not counted",
            "correct the attack",
        ),
        (
            result.contradictions,
            "contradiction",
            "images have both a certificate and a valid example inside it",
            report,
        ),
        (
            result.disagreements,
            "plan-disagreement",
            "plans promised a smaller distance than exact transport found",
            report,
        ),
        (
            result.unconfirmed,
            "unconfirmed-certificate",
            "certificates were not confirmed by the independent checker",
            report,
        ),
    )
    return [
        EvaluationWarning(code, f"{len(entries)} {said}", remedy)
        for entries, code, said, remedy in claims
        if entries
    ]


def exit_code(evaluations: Evaluations, requirements: Requirements = ()) -> int:
    """0; 3 if a claim did not hold; 6 if there are doubts; 7 if a requirement is not met."""
    if any(e.rejected or e.contradictions or e.disagreements for e in evaluations):
        return EXIT_CLAIMS
    if any(e.doubts for e in evaluations):
        return EXIT_UNRELIABLE
    return 0 if all(e.check(requirements) for e in evaluations) else EXIT_REQUIREMENT


def load_evaluation(path: PathLike) -> Evaluation:
    """Read an evaluation from its folder or its ``results.json``."""
    path = Path(path)
    file = path if path.suffix == ".json" else path / RESULTS
    if not file.is_file():
        raise FileNotFoundError(
            f"no {RESULTS} in {file.parent}; give the folder that `wball evaluate --out` wrote"
        )
    content = read_json(file)
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if found != FORMAT:
        raise ValueError(
            f"{file} is not an evaluation of this version: its format is {found!r}, "
            f"expected {FORMAT!r}"
        )
    content = read_sealed(file)
    columns = content["images"]
    columns["proof"] = [PROOFS.index(how) for how in columns["proof"]]
    if content["settings"]["certify"] is None:
        columns["certified"] = [0.0] * len(columns["label"])
    found = Evaluation(
        content["settings"],
        content["provenance"],
        {name: _column(columns[name], dtype) for name, dtype in COLUMNS.items()},
        tuple(content["rejected"]),
        tuple(EvaluationWarning(**stored) for stored in content["warnings"]),
        _images(file.parent / EXAMPLES, content["files"]),
        _images(file.parent / EXHIBIT, content["files"]),
        tuple(content["disagreements"]),
        tuple(EvaluationWarning(**stored) for stored in content["notes"]),
        content["verification"],
        tuple(columns.get("name", ())),
    )
    path = file.parent / EXPLORER
    if not path.is_file():
        return found
    explorer, identity = read_tensors(path)
    belongs = identity == found._identity()
    return replace(found, explorer=_pixels(explorer)) if belongs else found


def _images(path: Path, checksums: Mapping[str, str]) -> Tensors:
    """The images beside the results; none if the file is absent."""
    if not path.is_file():
        return {}
    return _pixels(read_tensors(path, checksums.get(path.name, "none"))[0])


def _pixels(stored: Mapping[str, Tensor]) -> Tensors:
    return {name: as_pixels(values) for name, values in stored.items()}


def _packed(images: Mapping[str, Tensor]) -> Tensors:
    return {name: as_bytes(values) for name, values in images.items()}


def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0


def _largest(values: Tensor) -> float | None:
    top = float(values.max()) if values.numel() else 0.0
    return top if math.isfinite(top) else None


def _column(values: list[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor([math.inf if v is None else v for v in values], dtype=dtype)
