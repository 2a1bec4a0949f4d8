"""Deterministic certificates: prove that no image of a ball changes the model's answer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from wball import inputs
from wball.ball import Ball, Plans
from wball.certificates import trust
from wball.certificates.bounds import Bounds
from wball.certificates.collector import LIMIT, gain_bytes
from wball.certificates.complete import Leaf, Search, splittable
from wball.certificates.complete.bound import improve
from wball.certificates.complete.gains import grouped, open_problems
from wball.certificates.effort import ONE_PASS, Effort, Method
from wball.certificates.first_layer import FirstLayer
from wball.certificates.graph import Graph, MaxPool
from wball.certificates.relaxation import Relaxation
from wball.certificates.tracing import trace
from wball.display import Summarised, percent
from wball.input_sets import InputSet
from wball.input_sets.box import intervals
from wball.memory import free_bytes
from wball.model import ask, check_classes, evaluating

FINE = 128
"""Radii are found to a part in so many."""

CLOSE, WIDE = 2.0, 4.0
"""Lengths in pixels below which moves are told apart: what suffices for most images, and what the
others get at five times the price. More hardly tightens a bound."""

HOPELESS, HOPELESS_EVERYWHERE = (100.0, 2.0), (1000.0, 0.7)
"""Images whose bound is further below 0 than so many times their clean margin are beyond help: of
anchors, and of longer moves. First where many pixels hold no mass, then where all do: there a
network of three convolutions went from -262 to -0.38 and 0.02, and longer moves are worth no
more."""

CLIMBED = 3.0
"""Slopes are optimised for images whose bound is above minus this many times their clean margin."""

ROOM = 0.8
"""Share of a GPU's free memory that the gains of images bounded together may take."""

FLAT = 0.8
"""What a ball takes off the clean margin is taken to grow at least like this power of its radius,
where a search for the radius asks what is left to gain."""


class CertificateStatus(Enum):
    """What a certificate says about an image. The value is the explanation, with the remedy
    where there is one.
    """

    CERTIFIED = "every image of the ball gets the label"
    FALSIFIED = "an image of the ball gets another label: see counterexample"
    MISCLASSIFIED = "the model misclassifies the clean image: there is nothing to certify"
    UNKNOWN = (
        "the bound is not above 0: the ball may be safe or not; try method='alpha-crown' with more steps, "
        "method='complete' with a larger time_limit, a smaller eps"
    )

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


@dataclass(frozen=True, repr=False)
class CertificateResult(Summarised):
    """What was proved about each image.

    Attributes:
        certified: bool, per image: proved that the model answers ``y`` all over the ball.
        margin: a lower bound of ``min over the ball of (logit[y] - best other logit)``, per image,
            float64. Proofs by contradiction (``method="complete"``) say only that it is positive:
            then it is the least positive number.
        status: per image, with the reason where there is no certificate.
        plans: ``"full"`` if the proof holds for every transport plan, ``"window"`` if only for the
            ball's window.
        method: the relaxation used.
        kernel: the kernel that maximised over the ball.
        seconds: wall-clock time spent on each image: what serves several images is shared equally
            by them.
        counterexample: for ``method="complete"``, images like ``x``: where the status is
            ``FALSIFIED`` a point of the ball, checked as an audit does, that the model gives
            another label; elsewhere the image itself.
        leaves: for ``method="complete"``, per image: where branch and bound certified it, the parts
            its tree ended in, class by class (:class:`~wball.certificates.complete.Leaf`); classes
            that are not among them were certified without. ``None`` elsewhere, and where there are
            too many parts to keep.
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

    def headline(self) -> dict[str, str]:
        shown = {"images": str(len(self.certified))}
        if len(self.certified):
            shown["certified accuracy"] = percent(float(self.certified.double().mean()))
            shown["median margin"] = f"{float(self.margin.median()):.4g}"
        return {**shown, "method": self.method, "plans": self.plans}


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    method: Method = "anchored",
    plans: Plans = "full",
    *,
    steps: int = 30,
    reg: float = 1000.0,
    batch_size: int | None = None,
    time_limit: float = 60.0,
) -> CertificateResult:
    r"""Lower-bound the margin of ``y`` over the ball around each image, and certify where it is above 0.

    .. math:: \min_{z \in B(x)} \; \min_{k \ne y} \; f_y(z) - f_k(z) \;\ge\; \text{margin}

    Methods, from loose to tight:

    - ``interval``: the ball is first turned into one interval per pixel, which is what makes
      certificates vacuous here;
    - ``dual``: the dual of Wong and Kolter with the ball's conjugate, ``psi`` from the Conjugate
      Sinkhorn with ``reg``;
    - ``crown``: linear relaxation with adaptive slopes over the ball itself;
    - ``anchored``: images that ``crown`` leaves open are tried again with bounds that are exact at
      the image and grow only with the mass that moves (:mod:`wball.certificates.anchor`), layer
      after layer;
    - ``alpha-crown``: images that are still open get slopes and box prices optimised in ``steps``;
    - ``complete``: what ``anchored`` leaves open is decided by branch and bound, with attacks along
      the way (:mod:`wball.certificates.complete`): certified, falsified with a ``counterexample``,
      or unknown when ``time_limit`` is up. With ``full`` plans an image is falsified only by a
      point of the ball itself, inside its window.

    The result is sound in float32 too: everything that counts is evaluated in float64 with a margin
    for rounding (see
    :mod:`wball.certificates.relaxation`). The model is bounded in evaluation mode; its mode is left
    as it was.

    Args:
        model: a feed-forward network of supported modules; raises
            :class:`~wball.certificates.graph.UnsupportedModule` otherwise.
        x: images ``(B, C, H, W)``, or histograms ``(B, n)``.
        y: labels ``(B,)``.
        ball: the threat model.
        plans: ``full`` plans, or only those inside the ball's window.
        steps: number of optimisation steps of ``alpha-crown``.
        reg: the paper's lambda, used by ``dual``.
        batch_size: images bounded together (``None``: chosen for the device).
        time_limit: for ``complete``, seconds for each image that is left open, on average: time
            that some do not need goes to others, nearest to a proof first.
    """
    x, y = _check(x, y, ball)
    effort = Effort(method, plans, steps, reg, batch_size, time_limit)
    graph = trace(model, x, ball)
    batches = x.split(batch_size or _images_at_once(x)) if x.shape[0] else ()
    with trust.steady(model, batches):
        return _certify(model, graph, x, y, ball, effort)


def _certify(
    model: nn.Module,
    graph: Graph,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    effort: Effort,
    first: FirstLayer | None = None,
    deep: Tensor | None = None,
) -> CertificateResult:
    """:func:`certify` with checked arguments and a model that was traced before.

    Images that are ``deep`` (B,) get the dearest of the anchored bounds at once, whatever cheaper
    ones say.
    """
    method, plans = effort.method, effort.plans
    if x.shape[0] == 0:
        empty = torch.zeros(0, dtype=torch.float64, device=x.device)
        return CertificateResult(empty > 0, empty, (), plans, method, "torch", empty)
    step = effort.batch_size or _images_at_once(x)
    first = first or _first_layer(graph, x, ball, plans)
    margins, cleans, known, times = [], [], [], []
    for index in torch.arange(x.shape[0], device=x.device).split(step):
        start = time.monotonic()
        clean = _clean_margin(model, x[index], y[index])
        batch = _Batch(graph, x[index], y[index], ball.take(index), effort, clean, first)
        if method == "complete":  # the other half is for attacks and the search
            batch.deadline = start + 0.5 * effort.time_limit * index.shape[0]
        found = batch.margin(None if deep is None else deep[index])
        margins.append(found)
        cleans.append(clean)
        known.append(batch.bounds.take(((found <= 0) & (clean > 0)).nonzero()[:, 0]))
        times += [(time.monotonic() - start) / index.shape[0]] * index.shape[0]
    margin, correct = torch.cat(margins), torch.cat(cleans) > 0
    certified = (margin > 0) & correct
    seconds = torch.tensor(times, dtype=torch.float64, device=x.device)
    status = tuple(
        CertificateStatus.CERTIFIED
        if c
        else CertificateStatus.UNKNOWN
        if r
        else CertificateStatus.MISCLASSIFIED
        for c, r in zip(certified.tolist(), correct.tolist(), strict=True)
    )
    result = CertificateResult(certified, margin, status, plans, method, first.kernel, seconds)
    if method != "complete":
        return result
    return _decide(model, graph, x, y, ball, result, Bounds.join(known), effort.time_limit)


def _first_layer(graph: Graph, x: Tensor, ball: Ball, plans: Plans) -> FirstLayer:
    """What serves every image and radius of a geometry, made from one image."""
    one = ball.take(torch.zeros(1, dtype=torch.long, device=x.device))
    return FirstLayer(graph, one.input_set(x[:1], plans))


def _decide(
    model: nn.Module,
    graph: Graph,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    found: CertificateResult,
    known: Bounds,
    time_limit: float,
) -> CertificateResult:
    """Branch and bound for the images that are not certified yet, of whose units bounds are
    ``known``.

    The parts of a tree name units of the graph that :func:`splittable` returns.
    """
    same, graph = graph, splittable(graph, x)
    margin, certified, status = found.margin.clone(), found.certified.clone(), list(found.status)
    counterexample, seconds = x.clone(), found.seconds.clone()
    leaves: list[tuple[Leaf, ...] | None] = [None] * x.shape[0]
    left = [k for k, s in enumerate(status) if s is CertificateStatus.UNKNOWN]
    every = torch.tensor(left, dtype=torch.long, device=x.device)
    step = 512 if x.is_cuda else 64
    for start in range(0, len(left), step):
        some = torch.arange(start, min(start + step, len(left)), device=x.device)
        index = every[some]
        sizes = _numbers_at_once(x), _searched(x), _room(x)
        search = Search(model, graph, ball.take(index), found.plans, time_limit, *sizes)
        bounds = known.take(some) if graph is same else None
        answer = search.decide(x[index], y[index], margin[index], seconds[index], bounds)
        margin[index] = torch.maximum(margin[index], answer.margin)
        certified[index], counterexample[index] = answer.proved, answer.counterexample
        seconds[index] = answer.seconds
        for n, k in enumerate(index.tolist()):
            leaves[k] = answer.leaves[n]
            if answer.proved[n] or answer.broken[n]:
                status[k] = (
                    CertificateStatus.CERTIFIED if answer.proved[n] else CertificateStatus.FALSIFIED
                )
    return replace(
        found,
        margin=margin,
        certified=certified,
        status=tuple(status),
        counterexample=counterexample,
        leaves=tuple(leaves),
        seconds=seconds,
    )


def certified_radius(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    method: Method = "anchored",
    plans: Plans = "full",
    *,
    rounds: int = 9,
    steps: int = 30,
    reg: float = 1000.0,
    batch_size: int | None = None,
    time_limit: float = 60.0,
) -> Tensor:
    """The largest ``eps`` found that is certified, per image, float64 ``(B,)``; 0 where nothing was
    proved.

    A search for the root of the margin, all images together. ``ball`` gives the geometry, its
    ``eps`` the first guess. Every returned radius was certified as it stands, as :func:`certify`
    does: stopping early makes it smaller, never wrong. An image is done when its radius is known to
    a part in :data:`FINE`, or when that is all its margin leaves to gain. The other arguments are
    those of :func:`certify`.

    Args:
        rounds: at most so many certificates are tried per image.
    """
    x, y = _check(x, y, ball)
    effort = Effort(method, plans, steps, reg, batch_size, time_limit)
    inputs.check_count("rounds", rounds)
    trial = (
        torch.as_tensor(ball.eps, dtype=torch.float64, device=x.device).expand(x.shape[0]).clone()
    )
    trial[trial == 0] = 0.01
    clean = _clean_margin(model, x, y) if x.shape[0] else trial
    found = _Bracket(
        clean,
        torch.zeros_like(trial),
        torch.full_like(trial, math.inf),
        clean.clone(),
        clean.clone(),
    )
    graph = trace(model, x, ball.at(trial))
    first: FirstLayer | None = None
    for _ in range(rounds):
        index = found.open().nonzero()[:, 0]
        if index.numel() == 0:
            break
        at = ball.at(trial[index])
        first = first or _first_layer(graph, x[index], at, plans)
        # What cheap bounds left open once they mostly leave open again; and margins of one kind can
        # be compared.
        deep = found.high[index].isfinite() if effort.method == "anchored" else None
        result = _certify(model, graph, x[index], y[index], at, effort, first, deep)
        best = (
            deep
            if deep is not None
            else torch.full_like(index, effort.method in ONE_PASS, dtype=torch.bool)
        )
        found.note(index, trial[index], result, best)
        trial = found.next()
    return found.low


class _Bracket:
    """The largest radius certified so far, the smallest that was not, and the margins at both.

    What a ball takes off the clean margin grows about like a power of its radius, which both ends
    tell; next to one end alone it is taken for 1.2.
    """

    def __init__(
        self, clean: Tensor, low: Tensor, high: Tensor, above: Tensor, below: Tensor
    ) -> None:
        self.clean, self.low, self.high, self.above, self.below = clean, low, high, above, below
        self.run = torch.zeros_like(
            low
        )  # how often in a row the answer was yes (above 0) or no (below)
        self.best = torch.zeros_like(
            low, dtype=torch.bool
        )  # the margin at the lower end is by the tightest bounds

    def open(self) -> Tensor:
        known = self.high - self.low <= self.high / FINE
        # Margins at the upper end may be of cheaper bounds: what is left to gain is judged by the
        # lower one alone.
        taken = (self.clean - self.above).clamp(min=1e-9)
        spent = self.best & (self.low > 0) & (self.clean / taken <= (1 + 1 / FINE) ** FLAT)
        return (self.clean > 0) & (self.high.isinf() | ~(known | spent))

    def note(self, index: Tensor, trial: Tensor, result: CertificateResult, best: Tensor) -> None:
        """Take down what was found at ``trial``, and where that was by the tightest bounds
        there are.
        """
        yes, no = index[result.certified], index[~result.certified]
        self.best[yes] = best[result.certified]
        self.low[yes], self.above[yes] = trial[result.certified], result.margin[result.certified]
        self.high[no], self.below[no] = trial[~result.certified], result.margin[~result.certified]
        self.run[yes] = self.run[yes].clamp(min=0) + 1
        self.run[no] = self.run[no].clamp(max=0) - 1

    def next(self) -> Tensor:
        """Where the margin should vanish, a little on the side that is wanted next.

        Between two ends that is the inner one: a radius that is certified with next to nothing left
        is what is sought.
        """
        low, high, clean = self.low, self.high, self.clean
        bounded, certified = high.isfinite(), low > 0
        taken, lost = (clean - self.above).clamp(min=1e-9), (clean - self.below).clamp(min=1e-9)
        power = (lost / taken).log() / (high / low).log()
        power = torch.where(bounded & certified & power.isfinite(), power.clamp(0.3, 6.0), 1.2)
        root = torch.where(
            certified, low * (clean / taken) ** (1 / power), high * (clean / lost) ** (1 / power)
        )
        between = bounded & certified
        outwards = torch.where(between & self.best, self.run > 1, self.run > 0)
        streak = torch.where(between & self.best & outwards, self.run - 1, self.run.abs())
        beyond = torch.where(between, 0.4 / FINE * 4 ** (streak - 1), 0.03 * 2**streak)
        root = root * torch.where(outwards, 1 + beyond, 1 / (1 + beyond))
        root = torch.where(root.isfinite(), root, 0.5 * (low + high))
        least = torch.minimum(0.5 * high / FINE, 0.5 * (high - low))
        inside = torch.minimum(torch.maximum(root, low + least), high - least)
        return torch.where(bounded, inside, torch.minimum(torch.maximum(root, 1.02 * low), 4 * low))


def _check(x: Tensor, y: Tensor, ball: Ball) -> tuple[Tensor, Tensor]:
    if not callable(getattr(ball, "input_set", None)):
        raise TypeError(
            f"ball must be a threat model that answers input_set (docs/extending.md), got {type(ball).__name__}"
        )
    x = inputs.check_images("x", x, ball.box)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    inputs.check_eps_count(ball.eps, x.shape[0])
    if not isinstance(y, Tensor) or y.is_floating_point() or y.shape != (x.shape[0],):
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"y must hold one integer label per image, shape ({x.shape[0]},), got {shape}"
        )
    return x.detach(), y.to(x.device, torch.long)


@torch.no_grad()
def _clean_margin(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """``logit[y] - best other logit`` of the images themselves, in evaluation mode."""
    with evaluating(model):
        logits = ask(model, x).to(torch.float64)
    check_classes("y", y, logits)
    own = logits.gather(1, y[:, None])[:, 0]
    return own - logits.scatter(1, y[:, None], -math.inf).amax(1)


def _images_at_once(x: Tensor) -> int:
    """Images bounded together: few on a CPU; on a GPU as many as leave half a megabyte per
    pixel for their anchors.
    """
    if x.is_cuda:
        return min(512, max(2, free_bytes(x.device) // (2**19 * x[0].numel())))
    return min(8, max(1, 2**13 // x[0].numel()))


def _searched(x: Tensor) -> int:
    """Images that branch and bound searches together: their classes have anchors and gains of
    their own.
    """
    return min(64, max(1, free_bytes(x.device) // (2**20 * x[0].numel()))) if x.is_cuda else 1


def _room(x: Tensor) -> int:
    """Bytes that gains of units searched together may take: a GPU's free memory, 2 GiB on a CPU."""
    return max(1, free_bytes(x.device)) if x.is_cuda else 2**31


def _numbers_at_once(x: Tensor) -> int:
    """Numbers a chunk of rows may hold: what fits into a CPU's cache, or a fraction of a
    GPU's free memory.
    """
    return min(2**29, max(2**22, free_bytes(x.device) // 2**7)) if x.is_cuda else 2**22


class _Batch:
    """One batch of images and the bounds found so far."""

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: Tensor,
        ball: Ball,
        effort: Effort,
        clean: Tensor,
        first: FirstLayer,
    ) -> None:
        self.graph, self.x, self.y, self.ball, self.effort = graph, x, y, ball, effort
        self.clean, self.first, self.centre = clean, first, graph.values(x.to(torch.float64))
        self.like = torch.zeros(0, dtype=torch.float32, device=x.device)
        self.bounds, self.deadline = Bounds(), math.inf

    def _relaxation(self, source: InputSet, left: Tensor | None = None) -> Relaxation:
        budget = _numbers_at_once(self.x)
        if self.effort.method == "dual":
            return Relaxation(self.graph, source, "parallel", self.effort.reg, budget)
        centre = self.centre if left is None else {k: v[left] for k, v in self.centre.items()}
        first = self.first if source.has_plans else None
        return Relaxation(self.graph, source, budget=budget, first=first, centre=centre)

    def margin(self, deep: Tensor | None = None) -> Tensor:
        """Lower bounds of the margins; ``deep`` images get the most expensive anchored bounds
        at once.
        """
        method = self.effort.method
        source = self.ball.input_set(self.x, self.effort.plans)
        if method == "interval":
            source = intervals(source, self.x.shape[0], self.x.device)
        relaxation = self._relaxation(source)
        self.bounds = relaxation.bound_all(self.x.shape[0], self.like)
        margins = relaxation.margins(self.y, self.bounds, self.like)
        if method in ONE_PASS:
            return margins.amin(1)
        once = torch.zeros_like(self.clean, dtype=torch.bool) if deep is None else deep
        far = source.far is not None
        if source.has_plans:
            near, nearer = HOPELESS_EVERYWHERE if source.follows_far else HOPELESS
            self._tighten(margins, self._open(margins, near) & ~(once & far), CLOSE)
            if far and method != "complete":  # the search begins with that
                self._tighten(margins, self._open(margins, nearer) | once, WIDE)
        if method == "alpha-crown":
            self._tighten(margins, self._open(margins, CLIMBED), WIDE, self.effort.steps)
        return margins.amin(1)

    def _open(self, margins: Tensor, near: float) -> Tensor:
        """Images that are not certified yet and whose bound is above ``-near`` times their
        clean margin.
        """
        lowest = margins.amin(1)
        return (lowest <= 0) & (self.clean > 0) & (lowest > -near * self.clean)

    def _tighten(self, margins: Tensor, chosen: Tensor, reach: float, steps: int = 0) -> None:
        """Improve the ``chosen`` images by anchored bounds, layer by layer, and ``steps`` of
        optimisation.

        On a GPU images are bounded in groups whose gains fit into memory.
        """
        left, room = chosen.nonzero()[:, 0], ROOM * _room(self.x)
        if left.numel() == 0:
            return
        groups = [left]
        places = [k for k in self.graph.relaxed() if k not in self.first.layers]
        if self.x.is_cuda and self.first.plans and places:
            one = self.ball.take(left[:1]).input_set(self.x[left[:1]], self.effort.plans)
            units = [self.bounds.unstable(k)[left].flatten(1).sum(1) for k in places]
            size = gain_bytes(one.finer(reach)) * torch.stack(units).sum(0)
            groups = [left[part] for part in grouped(size, room)]
        for some in groups:
            self._tighten_some(margins, some, reach, steps, room)

    def _tighten_some(
        self, margins: Tensor, left: Tensor, reach: float, steps: int, room: float
    ) -> None:
        some, x, y = self.bounds.take(left), self.x[left], self.y[left]
        source = self.ball.take(left).input_set(x, self.effort.plans).finer(reach)
        relaxation = self._relaxation(source, left)
        relaxation.deadline = self.deadline
        found = margins[left]
        if source.has_plans:
            if x.is_cuda:
                each = room / (
                    gain_bytes(source) * len(self.graph.relaxed())
                )  # units, of one image
                relaxation.limit = max(LIMIT, int(each * source.gain_size) // x[0].numel())
            # Optimised slopes and searches use all bounds; so do windows of maxima.
            sparing = self.effort.method == "anchored" and not any(
                isinstance(op, MaxPool) for op in self.graph.ops
            )
            for position in self.graph.relaxed():
                relaxation.bound_layer(
                    position, some, left.shape[0], self.like, anchored=True, sparing=sparing
                )
            found = torch.maximum(found, relaxation.margins(y, some, self.like, anchored=True))
        near = (found.amin(1) > -CLIMBED * self.clean[left])[:, None]
        image, other = ((found <= 0) & near).nonzero(as_tuple=True)
        if steps and image.numel():
            problems = open_problems(relaxation, x, y, some, image, other)
            climbed = improve(problems, problems.start(), steps, 0.3).bound
            found[image, other] = torch.maximum(found[image, other], climbed)
        margins[left] = found
        self.bounds.put(left, some)
