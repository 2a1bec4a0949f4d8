r"""Branch and bound: decide for each image whether its label holds everywhere in the ball.

Each stage handles what the one before leaves open:

1. a quick attack, and on a GPU the standard one;
2. anchored bounds of all classes, and optimised slopes;
3. on a CPU the standard attack;
4. bounds tightened under the condition that the margin is at most 0
   (:mod:`wball.certificates.condition`), in rounds; they hold in every open node;
5. a tree whose nodes fix signs of units (:mod:`wball.certificates.complete.bound`): many open nodes
   per step, worst first.

At every step of the tree the point of the ball where the relaxation is lowest is tried as an
adversarial example. Results are kept at any time, so stopping early never makes an answer wrong.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wball.attacks import StandardAttack
from wball.ball import Ball
from wball.certificates.anchor import ranked
from wball.certificates.complete.bound import (
    Problems,
    choose_splits,
    improve,
    open_problems,
    together,
    trace_back,
    unit_anchors,
)
from wball.certificates.complete.nodes import Closed, Leaf, Nodes
from wball.certificates.condition import condition
from wball.certificates.graph import Graph
from wball.certificates.relaxation import Bounds, Relaxation
from wball.input_sets import InputSet, Plans
from wball.model import Model, ask, evaluating

REACH, FURTHER = 4.0, 6.0
"""Lengths below which moves are listed one by one: at first, and once tightening has left few
units unstable. Listing more at first would cost twice as much. Splits do not tighten the bound of
longer moves."""

ROOT_STEPS, ROUND_STEPS, NODE_STEPS, LAST_STEPS = 20, 10, 12, 100
"""Steps of Adam for a whole problem, after a round of tightening, for one node of its tree, and for
a node without units to split. With 3 steps per node the multipliers of splits hardly leave 0, and
trees grow without a better bound."""

PROGRESS, MOST_ROUNDS = (0.3, 0.05), 12
"""Tightening continues while a round lifts the bound by this share of its distance to 0, with the
first and with the second length of moves; and the maximum number of rounds."""

BATCH, STORED = 256, 2**31
"""Nodes bounded together on a GPU (a sixteenth of it on a CPU), and bytes that open nodes may take
before the search goes depth first."""

NEAR = 0.02
"""Project points whose margin is below this share of 1, or of the largest margin seen."""

POSITIVE = torch.finfo(torch.float64).tiny
"""Margin of an image certified by contradiction, which proves only that it is positive."""


@dataclass(frozen=True)
class Answer:
    """The outcome of each image, written while the search goes on.

    ``leaves`` are those of trees that are small enough to keep. ``seconds`` is the time spent on
    each; images that are searched together share it equally.
    """

    margin: Tensor
    proved: Tensor
    broken: Tensor
    counterexample: Tensor
    leaves: list[tuple[Leaf, ...] | None]
    seconds: Tensor

    @staticmethod
    def start(x: Tensor, seconds: Tensor) -> Answer:
        """Nothing is known yet; ``seconds`` is the time that each image has taken so far."""
        none = torch.zeros_like(seconds, dtype=torch.bool)
        lowest, nothing = torch.full_like(seconds, -math.inf), [None] * x.shape[0]
        return Answer(lowest, none, none.clone(), x.clone(), list(nothing), seconds.clone())


def late(deadline: float) -> bool:
    return time.monotonic() > deadline


@dataclass(frozen=True)
class Search:
    """Decides correctly classified images ``x`` of one model and ball.

    Attributes:
        numbers: size of a chunk of rows.
        room: bytes of memory for the gains of units.
        answer: what was found so far.
    """

    model: Model
    graph: Graph
    ball: Ball
    plans: Plans
    x: Tensor
    y: Tensor
    numbers: int
    room: int
    answer: Answer

    def decide(self, margin: Tensor, limit: float, group: int) -> Answer:
        """Decide the images, ``group`` at a time, closest to certification first.

        ``margin`` are bounds of their margins, ``limit`` seconds per image, on average.
        """
        start, taken = time.monotonic(), self.answer.seconds
        everyone = torch.arange(len(taken), device=taken.device)
        for version in ("fast", "standard") if self.x.is_cuda else ("fast",):
            self.attack(version, everyone, start + float((limit - taken).sum()))
        taken += (time.monotonic() - start) / max(1, len(taken))
        nearest = margin.argsort(descending=True, stable=True)
        waiting = nearest[~self.answer.broken[nearest]]
        for first in range(0, len(waiting), group):
            now = waiting[first : first + group]
            share = len(now) / (len(waiting) - first)
            self.search(now, share * float((limit - taken).sum()))
        return self.answer

    def search(self, image: Tensor, seconds: float) -> None:
        """Decide a group of images; in halves if they do not fit into a GPU's memory together.

        An image that does not fit alone stays undecided, with what was found up to then.
        """
        start = time.monotonic()
        if seconds <= 0 or not len(image):
            return
        try:
            self._prove(image, start + seconds)
            return
        except torch.OutOfMemoryError as error:
            if len(image) == 1:
                warnings.warn(
                    f"an image is left undecided for lack of memory: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        finally:
            spent = time.monotonic() - start
            self.answer.seconds[image] += spent / len(image)
        torch.cuda.empty_cache()
        for half in image.chunk(2) if len(image) > 1 else ():
            left = half[~self.answer.broken[half] & ~self.answer.proved[half]]
            self.search(left, (seconds - spent) / 2)

    # ---- attacks

    def attack(self, version: str, image: Tensor, deadline: float) -> None:
        left = image[~self.answer.broken[image] & ~self.answer.proved[image]]
        if left.numel() == 0 or late(deadline):
            return
        attack = StandardAttack(self.ball.take(left), version)  # type: ignore[arg-type]
        try:
            points = attack(self.model, self.x[left], self.y[left]).images
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the model has no gradients: bounds alone decide
            return
        self.consider(left, points)

    def consider(self, image: Tensor, z: Tensor) -> None:
        """Keep points that the model misclassifies and that pass the audit."""
        with torch.no_grad(), evaluating(self.model):
            logits = ask(self.model, z)
        wrong = (logits.argmax(1) != self.y[image]) & torch.isfinite(logits).all(1)
        some = (wrong & ~self.answer.broken[image]).nonzero()[:, 0]
        if some.numel() == 0:
            return
        ball = self.ball.take(image[some])
        valid = ball.violations(self.x[image[some]], z[some]).within(ball.eps)
        some = some[valid.to(some.device)]
        self.answer.broken[image[some]] = True
        self.answer.counterexample[image[some]] = z[some].to(self.x.dtype)

    # ---- proofs

    def relaxation(self, source: InputSet, x: Tensor, deadline: float) -> Relaxation:
        centre = self.graph.values(x.to(torch.float64))
        relaxation = Relaxation(self.graph, source, budget=self.numbers, centre=centre)
        relaxation.deadline, relaxation.single = deadline, True
        return relaxation

    def _prove(self, left: Tensor, deadline: float) -> None:
        x, y = self.x[left], self.y[left]
        source = self.ball.take(left).input_set(x, self.plans).finer(REACH)
        relaxation, bounds = self.relaxation(source, x, deadline), Bounds()
        for anchored in (False, True) if source.has_plans else (False,):
            for position in self.graph.relaxed():
                relaxation.bound_layer(position, bounds, anchored=anchored)
        margins = relaxation.margins(y, bounds, anchored=source.has_plans)
        image, other = (margins <= 0).nonzero(as_tuple=True)
        nearest = margins.amin(1)[image].argsort(descending=True, stable=True)  # searched first
        image, other = image[nearest], other[nearest]
        positive = torch.where(margins > 0, margins, math.inf).amin(1)
        value, closed = margins[image, other], Closed(self.graph.names())
        worst = torch.full_like(value, math.inf)
        group = Group(self, left, left[image], other, positive, value, worst, closed)
        group.settle()
        if len(image) and not late(deadline):
            group.prove(open_problems(relaxation, x, y, bounds, image, other), deadline)
        group.keep_leaves()


@dataclass(frozen=True)
class Group:
    """Images that are decided together. A problem is an image with another class.

    Attributes:
        left: the images.
        image, other: of every problem.
        positive: bounds of the margins over the classes that need no proof any more, per image.
        value: bounds of the margins, per problem.
        worst: margins of the worst points tried as examples, per problem.
        closed: the nodes that are proved.
    """

    search: Search
    left: Tensor
    image: Tensor
    other: Tensor
    positive: Tensor
    value: Tensor
    worst: Tensor
    closed: Closed

    def prove(self, problems: Problems, deadline: float) -> None:
        """Bound all problems, in groups that fit into memory."""
        unattacked = self.left[: 0 if self.left.is_cuda else None]
        for part, until in self._in_turn(problems, problems.source, deadline):
            some = problems.take(part)
            roots = improve(some, some.start(), ROOT_STEPS, 0.3, until)
            some, roots = self._note(some, roots)
            self.search.attack("standard", unattacked, until)
            unattacked = unattacked[:0]
            some, roots = self._rounds(*self._note(some, roots), PROGRESS[0], until)
            finer = some.source.finer(FURTHER)
            for place, end in self._in_turn(some, finer, until):
                few, root = some.take(place), _numbered(roots.take(place))
                if finer is not some.source and not late(end):
                    few, root = self._note(*self._finer(few, root, finer.take(place), end))
                self._tree(*self._rounds(few, root, PROGRESS[1], end), end)

    def settle(self) -> None:
        """Combine the outcomes of the problems of each image."""
        answer, left = self.search.answer, self.left
        lowest = torch.full_like(answer.margin, math.inf)
        lowest = lowest.scatter_reduce(0, self.image, self.value, "amin")
        answer.margin[left] = torch.minimum(self.positive, lowest[left])
        answer.proved[left] = (lowest > 0)[left]

    def keep_leaves(self) -> None:
        answer, image, other = self.search.answer, self.image.tolist(), self.other.tolist()
        for k in self.left[answer.proved[self.left]].tolist():
            found = [self.closed.leaves(n, other[n]) for n, i in enumerate(image) if i == k]
            whole = [part for part in found if part is not None]
            leaves = tuple(leaf for part in whole for leaf in part)
            answer.leaves[k] = leaves if len(whole) == len(found) else None

    def _broken(self, problems: Problems) -> Tensor:
        return self.search.answer.broken[self.image[problems.index]]

    def _in_turn(
        self, problems: Problems, source: InputSet, deadline: float
    ) -> Iterator[tuple[Tensor, float]]:
        """Groups of problems that fit into memory together over that set, each with its share of
        the remaining time."""
        every = replace(problems, source=source)
        waiting = together(every, self.search.room) if len(problems) else []
        while waiting:
            now, share = time.monotonic(), len(waiting[0]) / sum(map(len, waiting))
            part = waiting.pop(0)
            part = part[~self._broken(problems)[part]]
            if len(part):
                yield part, now + share * (deadline - now)

    def _note(self, problems: Problems, nodes: Nodes) -> tuple[Problems, Nodes]:
        """Record the bounds of nodes without splits. Returns the open problems and nodes."""
        self._raise(problems, nodes.bound)
        self._close(problems, nodes)
        keep = ((nodes.bound <= 0) & ~self._broken(problems)).nonzero()[:, 0]
        return problems.take(keep), _numbered(nodes.take(keep))

    def _raise(self, problems: Problems, bound: Tensor) -> None:
        """Keep better bounds of problems whose images are not broken."""
        known = self.value[problems.index]
        better = torch.maximum(known, bound.clamp(max=POSITIVE))
        self.value[problems.index] = torch.where(self._broken(problems), known, better)
        self.settle()

    def _close(self, problems: Problems, nodes: Nodes) -> Nodes:
        """Keep the nodes that are proved, and return the others."""
        done = nodes.bound > 0
        proved = nodes.take(done.nonzero()[:, 0])
        self.closed.add(replace(proved, problem=problems.index[proved.problem]))
        return nodes.take((~done).nonzero()[:, 0])

    def _finer(
        self, problems: Problems, nodes: Nodes, source: InputSet, deadline: float
    ) -> tuple[Problems, Nodes]:
        """The problems over a set that lists more moves one by one, with new anchors."""
        relaxation = self.search.relaxation(source, problems.x, deadline)
        problems, bounds = problems.copied()
        for position in self.search.graph.relaxed():
            relaxation.bound_layer(position, bounds, anchored=True)
        problems = replace(problems, source=source, anchors=unit_anchors(relaxation))
        return problems, improve(problems, nodes, ROUND_STEPS, 0.3)

    def _rounds(
        self, problems: Problems, nodes: Nodes, progress: float, deadline: float
    ) -> tuple[Problems, Nodes]:
        """Tighten bounds and improve multipliers in turns, until a round gains less than
        ``progress``."""
        for _ in range(MOST_ROUNDS):
            if not len(nodes) or late(deadline):
                break
            before = nodes.bound
            tighter, empty = self._tightened(problems, nodes, deadline)
            found = improve(tighter, nodes, ROUND_STEPS, 0.3, deadline)
            found = replace(found, bound=torch.where(empty, math.inf, found.bound))
            problems, nodes = self._note(tighter, found)
            if not bool((found.bound - before > progress * before.abs()).any()):
                break
        return problems, nodes

    def _tightened(
        self, problems: Problems, nodes: Nodes, deadline: float
    ) -> tuple[Problems, Tensor]:
        """The problems with tighter bounds, and which of them have no image left.

        Bounds of one layer improve the row of the margin, which is the condition of the next.
        """
        source, (problems, bounds) = problems.source, problems.copied()
        relaxation = self.search.relaxation(source, problems.x, deadline)
        empty = torch.zeros_like(problems.y, dtype=torch.bool)
        for position in self.search.graph.relaxed():
            if late(deadline):
                break
            row = trace_back(problems, nodes, torch.float64)
            rows = source.patched(row.rows)
            centre = problems.x.to(torch.float64).view_as(rows.coeff)
            relaxation.condition = condition(rows, row.charges, row.largest, row.constant, centre)
            relaxation.bound_layer(position, bounds, anchored=source.has_plans)
            empty |= (bounds.lower[position] > bounds.upper[position]).flatten(1).any(1)
            kept = {k: anchor for k, anchor in problems.anchors.items() if k > position}
            problems = replace(problems, anchors={**kept, **unit_anchors(relaxation)})
        return problems, empty

    # ---- the tree

    def _tree(self, problems: Problems, nodes: Nodes, deadline: float) -> None:
        """Split until no node is open or the time is over.

        The bound of a problem is that of its worst open node.
        """
        dead = torch.zeros_like(problems.y, dtype=torch.bool)  # cannot be decided by splits
        floor = torch.full_like(dead, math.inf, dtype=torch.float64)
        image = self.image[problems.index].unique(return_inverse=True)[1]
        while len(nodes) and not late(deadline):
            pick, rest = _turn(nodes, image, problems)
            now, nodes = nodes.take(pick), nodes.take(rest)
            position, unit, possible, z = choose_splits(problems, now)
            linear, keep = (mask.nonzero()[:, 0] for mask in (~possible, possible))
            if len(linear):  # only multipliers are left to improve
                last = improve(problems, now.take(linear), LAST_STEPS, 0.3)
                last = self._close(problems, last)
                dead[last.problem] = True
                floor.scatter_reduce_(0, last.problem, last.bound, "amin")
            children = now.take(keep).split(position[keep], unit[keep])
            children = improve(problems, children, NODE_STEPS, 0.2)
            self._candidates(problems, now.problem, z)
            nodes = nodes.plus(self._close(problems, children))
            over = dead | self._broken(problems)
            nodes = nodes.take((~over[nodes.problem]).nonzero()[:, 0])
        self._raise(problems, floor.scatter_reduce(0, nodes.problem, nodes.bound, "amin"))

    def _candidates(self, problems: Problems, problem: Tensor, z: Tensor) -> None:
        """Test the image that attains the bound, projected into the ball, where the network
        misclassifies it: one per problem."""
        logits = self.search.graph.logits(z.to(torch.float64))
        labels = torch.stack([problems.y, problems.other], 1)[problem]
        margin = logits.gather(1, labels).diff(dim=1)[:, 0].neg()
        worst = self.worst[problems.index]
        lowest = torch.full_like(worst, math.inf).scatter_reduce(0, problem, margin, "amin")
        # A projection is dear, and points of nearby nodes are alike: the next one must be worse by
        # a tenth.
        first = NEAR * margin.abs().amax().clamp(max=1.0)
        enough = torch.where(worst.isfinite(), worst - 0.1 * worst.abs(), first)
        lowest = torch.where(lowest < enough, lowest, math.nan)
        chosen = (margin == lowest[problem]).nonzero()[:, 0]
        if chosen.numel() == 0:
            return
        at = problems.index[problem[chosen]]
        self.worst[at], image = margin[chosen], self.image[at]
        x = self.search.x[image]
        points = self.search.ball.take(image).project(x, z[chosen].to(x.dtype)).point
        self.search.consider(image, points.to(x.dtype))


def _numbered(roots: Nodes) -> Nodes:
    """One node for each problem, in their order."""
    return replace(roots, problem=torch.arange(len(roots), device=roots.problem.device))


def _turn(nodes: Nodes, image: Tensor, problems: Problems) -> tuple[Tensor, Tensor]:
    """The nodes to visit next, and the rest; ``image`` is the image of each problem, numbered from
    0.

    Half of them are taken from every problem in turn, and half from the images closest to
    certification, one after the other: most trees that stay open at the time limit are far from
    closed and would take most of the time. The worst nodes come first, or the best if memory is
    full.
    """
    batch, mine = BATCH if image.is_cuda else BATCH // 16, image[nodes.problem]
    size = sum(value[0].numel() * value.element_size() for value in nodes.state.values())
    full = len(nodes) >= max(64, STORED // size)
    order = (-nodes.bound if full else nodes.bound).argsort(stable=True)
    grouped, rank, _ = ranked(nodes.problem[order], len(problems))
    turns = order[grouped[rank.argsort(stable=True)]]
    lacking = torch.full_like(image, math.inf, dtype=nodes.bound.dtype)
    lacking = lacking.scatter_reduce(0, mine, nodes.bound, "amin")[mine]
    nearest = order[lacking[order].argsort(descending=True, stable=True)]
    first = torch.zeros_like(nodes.problem)
    first[turns[: (batch + 1) // 2]] = 1
    nearest = nearest[first[nearest].argsort(descending=True, stable=True)]
    return nearest[:batch], nearest[batch:]
