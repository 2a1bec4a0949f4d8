"""Deterministic certificates: prove that no image of a ball changes the model's answer."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wball import inputs
from wball.ball import Ball, Plans
from wball.certificates.anchor import LIMIT, gain_bytes, image_convolution
from wball.certificates.complete import Answer, Leaf, Search
from wball.certificates.complete.bound import grouped, improve, open_problems
from wball.certificates.complete.nodes import leaf_of
from wball.certificates.graph import Graph
from wball.certificates.operators import graph_of
from wball.certificates.program import Program, ToExport, exported
from wball.certificates.relaxation import Bounds, Lower, Relaxation
from wball.certificates.subject import (
    PLANS,
    SUBJECT,
    check_classes_of,
    check_plans,
    checked,
    subject_of,
)
from wball.display import Explained, Summarised, percent
from wball.input_sets import InputSet
from wball.input_sets.box import intervals
from wball.memory import free_bytes
from wball.model import check_classes, full_precision
from wball.progress import Bar, bar
from wball.storage.files import read_tensors, write_tensors
from wball.storage.schema import Maybe, check, finite, natural, sha256

Method = Literal["interval", "dual", "crown", "anchored", "alpha-crown", "complete"]
METHODS: tuple[Method, ...] = ("interval", "dual", "crown", "anchored", "alpha-crown", "complete")

ONE_PASS: tuple[Method, ...] = ("interval", "dual", "crown")
"""Methods that bound every image in the same way, whether or not it is certified already."""

FINE = 128
"""Relative precision of a certified radius is 1 / FINE."""

CLOSE, WIDE = 2.0, 4.0
"""Lengths in pixels below which moves are listed one by one: CLOSE is enough for most images, WIDE
costs five times as much. Longer lengths hardly tighten a bound."""

HOPELESS, HOPELESS_EVERYWHERE = (100.0, 2.0), (1000.0, 0.7)
"""Skip anchored bounds, and those with longer moves, below minus this multiple of the clean margin:
where many pixels have no mass, and where all have. In the second case anchors lifted the bound of a
network of three convolutions from -262 to 0.02, and longer moves gain less."""

CLIMBED = 3.0
"""Optimise slopes of images whose bound is above minus this multiple of their clean margin."""

BEYOND = 30.0
"""Refuse networks whose bounds would take more than this multiple of the time limit."""

ROOM = 0.8
"""Share of a GPU's free memory that the gains of images bounded together may take."""


@dataclass(frozen=True)
class CertifySettings:
    """Validated settings of :func:`certify`, where they are documented."""

    method: Method
    plans: Plans
    steps: int
    batch_size: int | None
    time_limit: float
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        check_plans(self.plans)
        inputs.check_count("steps", self.steps)
        inputs.check_positive("time_limit", self.time_limit)
        if self.batch_size is not None:
            inputs.check_count("batch_size", self.batch_size)

    def seconds(self, graph: Graph, device: torch.device) -> float:
        """A rough estimate of the time that all bounds of one image take."""
        return graph.multiplications() / (1e11 if device.type == "cuda" else 2e9)


class CertificateStatus(Explained):
    """The outcome for an image. The value is the explanation, with a remedy if there is one."""

    CERTIFIED = "every image of the ball gets the label"
    FALSIFIED = "an image of the ball gets another label: see counterexample"
    MISCLASSIFIED = "the model misclassifies the clean image: there is nothing to certify"
    UNKNOWN = (
        "the bound is not above 0: the ball may be safe or not; try method='alpha-crown' with more "
        "steps, method='complete' with a larger time_limit, a smaller eps"
    )


@dataclass(frozen=True, repr=False)
class CertificateResult(Summarised):
    """What was proved about each image.

    Attributes:
        certified: bool per image, true if the model provably predicts ``y`` everywhere in the ball.
        margin: a lower bound of ``min over the ball of (logit[y] - best other logit)`` per image,
            float64; ``-inf`` if ``time_limit`` ended before there was one. Proofs by contradiction
            (``method="complete"``) give the smallest positive number.
        status: :class:`CertificateStatus` per image.
        plans: ``"full"`` if the proof holds for every transport plan, ``"window"`` if it holds only
            for plans inside the ball's window. A :class:`~wball.StencilCost` has no moves beyond
            its table: there ``"full"`` means every plan of these moves.
        method: the method used.
        kernel: the kernel that maximised over the ball.
        seconds: wall-clock time per image; images that are bounded together share it equally.
        counterexample: for ``method="complete"``, images like ``x``. Where the status is
            ``FALSIFIED``, an audited point of the ball that the model misclassifies; elsewhere the
            image itself.
        leaves: what the checker needs to repeat a bound
            (:class:`~wball.certificates.complete.Leaf`), per image: the leaves of the tree of
            ``method="complete"``, the slopes of ``"alpha-crown"``. Classes that are not among them
            were certified without. ``None`` if the tree is too large to keep.
        subject: SHA-256 of what the proof is about: ``program``, ``images``, ``labels`` and
            ``ball``.
        program: the exported program that the proof is about, which can be run and saved; ``None``
            for a result that was loaded.
    """

    certified: Tensor
    margin: Tensor
    status: tuple[CertificateStatus, ...]
    plans: Plans
    method: Method
    kernel: str
    seconds: Tensor
    counterexample: Tensor | None = None
    leaves: tuple[tuple[Leaf, ...] | None, ...] = ()
    subject: Mapping[str, str] = field(default_factory=dict)
    program: Program | None = None

    def headline(self) -> dict[str, str]:
        shown = {"images": str(len(self.certified))}
        if len(self.certified):
            shown["certified accuracy"] = percent(float(self.certified.double().mean()))
            shown["median margin"] = f"{float(self.margin.median()):.4g}"
        return {**shown, "method": self.method, "plans": self.plans}

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, one entry per image, without counterexamples and leaves."""
        columns = zip(self.status, self.margin.tolist(), self.seconds.tolist(), strict=True)
        images = [
            {
                "status": status.name.lower(),
                "margin": margin if math.isfinite(margin) else None,
                "seconds": seconds,
            }
            for status, margin, seconds in columns
        ]
        return {**self._about(), "images": images}

    def _about(self) -> dict[str, str]:
        return {"method": self.method, "plans": self.plans, "kernel": self.kernel}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a safetensors file, with everything that :func:`wball.verify` needs
        but the program (``result.program.save``)."""
        tensors = {name: getattr(self, name) for name in COLUMNS}
        if self.counterexample is not None:
            tensors["counterexample"] = self.counterexample
        leaves = [
            None if found is None else [[leaf.other, leaf.splits, leaf.prices] for leaf in found]
            for found in self.leaves
        ]
        for image, found in enumerate(self.leaves):
            for number, leaf in enumerate(found or ()):
                for name, value in leaf.tensors().items():
                    tensors[f"{image}.{number}/{name}"] = value
        notes = {**self._about(), "subject": dict(self.subject), "leaves": leaves}
        status = [status.name for status in self.status]
        write_tensors(Path(path), tensors, {**notes, "status": status})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> CertificateResult:
        """Read what :meth:`save` wrote."""
        tensors, notes = read_tensors(Path(path))
        try:
            return _unpacked(tensors, notes)
        except ValueError as error:
            raise ValueError(
                f"{path} is not a certificate that CertificateResult.save wrote: {error}"
            ) from None


COLUMNS = {"certified": torch.bool, "margin": torch.float64, "seconds": torch.float64}

NOTES = {
    "method": set(METHODS),
    "plans": set(PLANS),
    "kernel": str,
    "status": [{status.name for status in CertificateStatus}],
    "subject": dict.fromkeys(SUBJECT, sha256),
    "leaves": [Maybe([(natural, [(str, natural, {1, -1})], [finite])])],
}
"""The schema of a certificate file's plain data. A leaf is its class, splits and prices."""


def _unpacked(tensors: Mapping[str, Tensor], notes: Any) -> CertificateResult:
    """The certificate in a file's tensors and plain data, after a check of both."""
    check(notes, NOTES, "the header")
    count, leaves = len(notes["status"]), notes.pop("leaves")
    if len(leaves) not in (0, count):
        raise ValueError(f"it has leaves of {len(leaves)} images, but {count} statuses")
    columns: dict[str, Any] = {}
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        leaf, _, part = name.rpartition("/")
        if leaf:
            parts[leaf][part] = value.flatten()
            continue
        like = COLUMNS.get(name, value.dtype if name == "counterexample" else None)
        flat = value.ndim == 1 or (name == "counterexample" and value.is_floating_point())
        if value.dtype != like or not flat or value.shape[0] != count:
            raise ValueError(f"its tensor {name!r} is {value.dtype} {tuple(value.shape)}")
        columns[name] = value
    if missing := COLUMNS.keys() - columns:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    status = tuple(CertificateStatus[name] for name in notes.pop("status"))
    proved = torch.tensor([s is CertificateStatus.CERTIFIED for s in status], dtype=torch.bool)
    if bool((proved != columns["certified"]).any()) or not bool(
        (columns["margin"][proved] > 0).all()
    ):
        raise ValueError("its margins or statuses contradict what it certifies")
    found = [
        None
        if some is None
        else tuple(Leaf.read(plain, parts.pop(f"{k}.{n}", {})) for n, plain in enumerate(some))
        for k, some in enumerate(leaves)
    ]
    if parts:
        raise ValueError(f"it has tensors of unknown leaves: {', '.join(sorted(parts))}")
    return CertificateResult(status=status, leaves=tuple(found), **columns, **notes)


def certify(
    model: ToExport,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    method: Method = "anchored",
    plans: Plans = "full",
    *,
    steps: int = 30,
    batch_size: int | None = None,
    time_limit: float = 60.0,
    progress: bool | None = None,
) -> CertificateResult:
    r"""Lower-bound the margin of ``y`` over the ball around each image; certify where it is above
    0.

    .. math:: \min_{z \in B(x)} \; \min_{k \ne y} \; f_y(z) - f_k(z) \;\ge\; \text{margin}

    Methods, from loose to tight:

    - ``interval``: interval bounds of every pixel first, then CROWN; nearly always vacuous here;
    - ``dual``: the dual of Wong and Kolter with the ball's conjugate;
    - ``crown``: linear relaxation with adaptive slopes over the ball itself;
    - ``anchored``: for images that ``crown`` leaves open, bounds that are exact at the image and
      grow only with the mass that moves (:mod:`wball.certificates.anchor`), layer by layer;
    - ``alpha-crown``: for images that are still open, ``steps`` of optimisation of slopes and box
      prices;
    - ``complete``: branch and bound for images that ``anchored`` leaves open, with attacks along
      the way (:mod:`wball.certificates.complete`): certified, falsified with a ``counterexample``,
      or unknown at the ``time_limit``. With ``full`` plans an image is falsified only by a point of
      the ball itself, inside its window.

    The result is sound in float32 too: what counts is evaluated in float64 with an allowance for
    rounding (see :mod:`wball.certificates.relaxation`). The model is bounded in evaluation mode;
    its mode does not change.

    Args:
        model: a module, which is exported by ``torch.export``, an ``ExportedProgram``, or the path
            of a ``.pt2`` file. The statement is about that program (``result.program``). Raises
            :class:`~wball.certificates.program.UnsupportedModule` if it cannot be exported, or if
            no bound follows one of its operators.
        x: images ``(B, C, H, W)``, or histograms ``(B, n)``.
        y: labels ``(B,)``.
        ball: the threat model.
        plans: ``full`` plans, or only those inside the ball's window. ``full`` plans of a
            :class:`~wball.StencilCost` use the moves of its table.
        steps: number of optimisation steps of ``alpha-crown``.
        batch_size: images bounded together (``None``: chosen for the device).
        time_limit: seconds per image, on average over images bounded together. Images without an
            answer by then are ``UNKNOWN``. ``complete`` gives time that some images do not need to
            the others, those closest to certification first. If the bounds of a network would take
            thirty times as long, all images are ``UNKNOWN`` at once, with a warning.
        progress: show a bar on stderr; ``None`` shows it on a terminal and in a notebook.
    """
    x, y = checked(x, y, ball, plans)
    effort = CertifySettings(method, plans, steps, batch_size, time_limit, progress)
    start = time.monotonic()
    program = exported(model, x)
    check_classes_of(program, y)
    subject = subject_of(program, x, y, ball)
    graph = _graph(program, x, effort)
    spent = (time.monotonic() - start) / max(1, x.shape[0])
    effort = replace(effort, time_limit=max(time_limit - spent, 1e-3))
    result = _certify(program, graph, x, y, ball, effort)
    exported(model, x, program)
    return replace(result, subject=subject, program=program)


def _certify(
    program: Program,
    graph: Graph | None,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    effort: CertifySettings,
) -> CertificateResult:
    """:func:`certify` with checked arguments and a traced model; without a graph nothing is
    certified."""
    count, kernel = x.shape[0], "torch"
    clean = torch.zeros(count, dtype=torch.float64, device=x.device)
    margin, seconds = torch.full_like(clean, -math.inf), torch.zeros_like(clean)
    leaves: list[tuple[Leaf, ...] | None] = [()] * count
    least = (
        0.0 if graph is None else count * min(effort.time_limit, effort.seconds(graph, x.device))
    )
    title = f"certify, {effort.method}, {max(1, least):.0f} to {count * effort.time_limit:.0f} s"
    with bar(title, count, show=effort.progress) as shown:
        step = effort.batch_size or _images_at_once(x)
        for index in torch.arange(count, device=x.device).split(step) if count else ():
            start = time.monotonic()
            clean[index] = _clean_margin(program, x[index], y[index])
            if graph is not None:
                share = 0.5 if effort.method == "complete" else 1.0  # the rest is for the search
                deadline = start + share * effort.time_limit * len(index)
                shown.stage(len(index), title)
                some = ball.take(index), effort, clean[index], deadline
                batch = _BoundedBatch(graph, x[index], y[index], *some)
                margin[index], kernel = batch.margin(shown), batch.source.kernel
                leaves[int(index[0]) : int(index[-1]) + 1] = batch.leaves
            shown.advance(len(index))
            seconds[index] = (time.monotonic() - start) / len(index)
    broken, counterexample = torch.zeros_like(clean, dtype=torch.bool), None
    if effort.method == "complete":
        counterexample, leaves = x.clone(), [None] * count
        left = ((margin <= 0) & (clean > 0)).nonzero()[:, 0]
        if graph is not None and len(left):
            memory, known = (_numbers_at_once(x), _room(x)), Answer.start(x[left], seconds[left])
            about = ball.take(left), effort.plans, x[left], y[left]
            search = Search(program, graph, *about, *memory, known)
            answer = search.decide(margin[left], effort.time_limit, _searched(x))
            margin[left] = torch.maximum(margin[left], answer.margin)
            counterexample[left], broken[left] = answer.counterexample, answer.broken
            seconds[left] = answer.seconds
            for n, k in enumerate(left.tolist()):
                leaves[k] = answer.leaves[n]
    certified = (margin > 0) & (clean > 0)
    of = CertificateStatus
    status = tuple(
        of.CERTIFIED if c else of.FALSIFIED if b else of.UNKNOWN if right else of.MISCLASSIFIED
        for c, b, right in torch.stack([certified, broken, clean > 0], 1).tolist()
    )
    held = counterexample, () if graph is None else tuple(leaves)
    return CertificateResult(
        certified, margin, status, effort.plans, effort.method, kernel, seconds, *held
    )


def certified_radius(
    model: ToExport,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    method: Method = "anchored",
    plans: Plans = "full",
    *,
    rounds: int = 9,
    steps: int = 30,
    batch_size: int | None = None,
    time_limit: float = 60.0,
    progress: bool | None = None,
) -> Tensor:
    """The largest certified ``eps`` found for each image, float64 ``(B,)``; 0 if there is none.

    All images are searched together, by interpolation between the largest certified and the
    smallest uncertified radius. Every returned radius was certified by :func:`certify`, so stopping
    early makes it smaller, never wrong. An image is done at a relative precision of 1 / 128.

    Args:
        ball: the geometry; its ``eps`` is the first radius tried.
        rounds: maximum number of certificates per image.
        time_limit: seconds per image, on average over all images, for all rounds together.

    The other arguments are those of :func:`certify`.
    """
    x, y = checked(x, y, ball, plans)
    effort = CertifySettings(method, plans, steps, batch_size, time_limit, False)
    inputs.check_count("rounds", rounds)
    end = time.monotonic() + time_limit * x.shape[0]
    eps = torch.as_tensor(ball.eps, dtype=torch.float64, device=x.device)
    trial = torch.where(eps > 0, eps, 0.01).expand(x.shape[0]).clone()
    program = exported(model, x)
    clean = _clean_margin(program, x, y) if x.shape[0] else trial
    low, high = torch.zeros_like(trial), torch.full_like(trial, math.inf)
    above, below = clean.clone(), clean.clone()  # margins at both ends
    graph = _graph(program, x, effort)
    if graph is None:
        return low
    title = f"certified radius, {method}, at most {time_limit * x.shape[0]:.0f} s"
    with bar(title, rounds, show=progress) as shown:
        for left in range(rounds, 0, -1):
            apart = high.isinf() | (high - low > high / FINE)
            index = (apart & (clean > 0)).nonzero()[:, 0]
            seconds = end - time.monotonic()
            if index.numel() == 0 or seconds <= 0:
                break
            some = replace(effort, time_limit=seconds / left / index.shape[0])
            result = _certify(program, graph, x[index], y[index], ball.at(trial[index]), some)
            yes, no = index[result.certified], index[~result.certified]
            low[yes], above[yes] = trial[yes], result.margin[result.certified]
            high[no], below[no] = trial[no], result.margin[~result.certified]
            trial = _next_radius(clean, low, high, clean - above, clean - below)
            shown.advance(1)
    exported(model, x, program)
    return low


def _next_radius(clean: Tensor, low: Tensor, high: Tensor, taken: Tensor, lost: Tensor) -> Tensor:
    """The radius at which the margin should vanish, if the loss of margin is a power of the radius.

    ``taken`` at ``low`` and ``lost`` at ``high`` give the power; one end alone is extrapolated with
    1.2. Between two ends the result keeps an eighth of their distance from both, so that the
    interval shrinks even if the power is wrong.
    """
    taken, lost = taken.clamp(min=1e-9), lost.clamp(min=1e-9)
    certified, bounded = low > 0, high.isfinite()
    power = (lost / taken).log() / (high / low).log()
    power = torch.where(certified & bounded & power.isfinite(), power.clamp(0.3, 6.0), 1.2)
    end, off = torch.where(certified, low, high), torch.where(certified, taken, lost)
    root = end * (clean / off) ** (1 / power)
    inside = low + (high - low) * ((root - low) / (high - low)).clamp(0.125, 0.875)
    beyond = torch.maximum(1.05 * low, torch.minimum(1.05 * root, 4 * low))
    return torch.where(bounded, torch.where(certified, inside, 0.95 * root.clamp(max=high)), beyond)


def _graph(program: Program, x: Tensor, effort: CertifySettings) -> Graph | None:
    """The graph of a program; ``None`` with a warning if nothing can be certified in time."""
    graph = graph_of(program, x)
    seconds = effort.seconds(graph, x.device)
    if seconds <= BEYOND * effort.time_limit:
        return graph
    warnings.warn(
        "nothing is certified: bounds of all activations of this network would take about "
        f"{seconds / 3600:,.1f} hours per image, and time_limit is {effort.time_limit:g} seconds; "
        "certify a smaller network or smaller images, or a smoothed classifier "
        "(wball.FlowSmoothing)",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


@full_precision()
@torch.no_grad()
def _clean_margin(program: Program, x: Tensor, y: Tensor) -> Tensor:
    """``logit[y] - best other logit`` of the images themselves."""
    logits = program(x).to(torch.float64)
    check_classes("y", y, logits)
    own = logits.gather(1, y[:, None])[:, 0]
    return own - logits.scatter(1, y[:, None], -math.inf).amax(1)


def _images_at_once(x: Tensor) -> int:
    """Number of images to bound together; on a GPU their anchors take half a megabyte per pixel."""
    if x.is_cuda:
        return min(512, max(2, free_bytes(x.device) // (2**19 * x.shape[1:].numel())))
    return min(8, max(1, 2**13 // x.shape[1:].numel()))


def _searched(x: Tensor) -> int:
    """Number of images that branch and bound searches together."""
    return (
        min(64, max(1, free_bytes(x.device) // (2**20 * x.shape[1:].numel()))) if x.is_cuda else 1
    )


def _room(x: Tensor) -> int:
    """Bytes available for the gains of units that are searched together: a GPU's free memory, or 2
    GiB on a CPU."""
    return max(1, free_bytes(x.device)) if x.is_cuda else 2**31


def _numbers_at_once(x: Tensor) -> int:
    """Number of values in a chunk of rows: about the size of a CPU's cache, or a share of a GPU's
    memory."""
    return min(2**29, max(2**22, free_bytes(x.device) // 2**7)) if x.is_cuda else 2**22


class _BoundedBatch:
    """One batch of images and the bounds found so far."""

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: Tensor,
        ball: Ball,
        effort: CertifySettings,
        clean: Tensor,
        deadline: float,
    ) -> None:
        self.graph, self.x, self.y, self.ball, self.effort = graph, x, y, ball, effort
        self.clean, self.deadline, self.bounds = clean, deadline, Bounds()
        self.source = ball.input_set(x, effort.plans)
        self.leaves: list[tuple[Leaf, ...]] = [()] * x.shape[0]

    def _relaxation(self, source: InputSet, x: Tensor) -> Relaxation:
        dual, budget = self.effort.method == "dual", _numbers_at_once(x)
        centre = None if dual else self.graph.values(x.to(torch.float64))
        lower: Lower = "parallel" if dual else "adaptive"
        found = Relaxation(self.graph, source, lower, budget, centre)
        found.deadline = self.deadline
        return found

    def margin(self, shown: Bar) -> Tensor:
        """Lower bounds of the margins, ``(B,)``, with progress on a bar."""
        method, source = self.effort.method, self.source
        if method == "interval":
            source = intervals(source, self.deadline)
        relaxation = self._relaxation(source, self.x)
        layers = self.graph.relaxed()
        for number, position in enumerate(layers):
            relaxation.bound_layer(position, self.bounds)
            shown.within((number + 1) / (len(layers) + 1))
        margins = relaxation.margins(self.y, self.bounds)
        if method in ONE_PASS:
            return margins.amin(1)
        if source.has_plans:
            near, nearer = HOPELESS_EVERYWHERE if source.follows_far else HOPELESS
            self._tighten(margins, near, CLOSE)
            if source.far is not None and method != "complete":  # the search begins with that
                self._tighten(margins, nearer, WIDE)
        if method == "alpha-crown":
            self._tighten(margins, CLIMBED, WIDE, self.effort.steps)
        return margins.amin(1)

    def _tighten(self, margins: Tensor, near: float, reach: float, steps: int = 0) -> None:
        """Improve images that are not certified yet, and whose bound is above ``-near`` times their
        clean margin, by anchored bounds and ``steps`` of optimisation.

        On a GPU images are bounded in groups whose gains fit into memory.
        """
        lowest, room = margins.amin(1), ROOM * _room(self.x)
        near_enough = (lowest <= 0) & (self.clean > 0) & (lowest > -near * self.clean)
        left = near_enough.nonzero()[:, 0]
        if left.numel() == 0 or time.monotonic() > self.deadline:
            return
        groups = [left]
        every = self.graph.relaxed()
        places = [k for k in every if steps or image_convolution(self.graph, k) is None]
        if self.x.is_cuda and self.source.has_plans and places:
            units = [self.bounds.unstable(k)[left].flatten(1).sum(1) for k in places]
            size = gain_bytes(self.source.finer(reach)) * torch.stack(units).sum(0)
            groups = [left[part] for part in grouped(size, room)]
        for some in groups:
            self._tighten_some(margins, some, reach, steps, room)

    def _tighten_some(
        self, margins: Tensor, left: Tensor, reach: float, steps: int, room: float
    ) -> None:
        some, x, y = self.bounds.take(left), self.x[left], self.y[left]
        source = self.ball.take(left).input_set(x, self.effort.plans).finer(reach)
        relaxation, found = self._relaxation(source, x), margins[left]
        relaxation.single = steps > 0
        if source.has_plans:
            if x.is_cuda:
                units = room / (gain_bytes(source) * len(self.graph.relaxed()))  # of one image
                relaxation.limit = max(LIMIT, int(units * source.gain_size) // x.shape[1:].numel())
            if reach == CLOSE:
                relaxation.bound_sums(some)
            for position in self.graph.relaxed():
                relaxation.bound_layer(position, some, anchored=True)
            found = torch.maximum(found, relaxation.margins(y, some, anchored=True))
        near = (found.amin(1) > -CLIMBED * self.clean[left])[:, None]
        image, other = ((found <= 0) & near).nonzero(as_tuple=True)
        if steps and image.numel() and time.monotonic() < self.deadline:
            problems = open_problems(relaxation, x, y, some, image, other)
            climbed = improve(problems, problems.start(), steps, 0.3, self.deadline)
            found[image, other] = torch.maximum(found[image, other], climbed.bound)
            for n, k in enumerate(left[image].tolist()):
                leaf = leaf_of(climbed, n, int(other[n]), self.graph.names())
                self.leaves[k] = (*self.leaves[k], leaf)
        margins[left] = found
        self.bounds.put(left, some)
