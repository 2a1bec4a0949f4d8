r"""Branch and bound: decide for each image whether its label holds everywhere in the ball.

Each stage handles what the one before leaves open:

1. a quick attack, and on a GPU the standard one;
2. anchored bounds of all classes, and optimised slopes;
3. a small tree, whose nodes fix signs of units (:mod:`wball.certificates.complete.bound`): many
   open nodes per step, worst first;
4. on a CPU the standard attack;
5. bounds tightened under the condition that the margin is at most 0
   (:mod:`wball.certificates.condition`), in rounds; they hold in every open node;
6. the tree again, without a limit on splits.

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
    listed,
    open_problems,
    together,
    trace_back,
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

EARLY = 20
"""Unstable units per split of the small tree: it takes about as long as one round of tightening."""

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


@dataclass
class Answer:
    """The outcome of each image, with the ``leaves`` of trees that are small enough to keep.

    ``seconds`` is the time spent on each; images that are searched together share it equally.
    """

    margin: Tensor
    proved: Tensor
    broken: Tensor
    counterexample: Tensor
    leaves: list[tuple[Leaf, ...] | None]
    seconds: Tensor


class Search:
    """Decides images of one model and ball, ``group`` images at a time.

    ``limit`` is in seconds per image, on average over one call. ``numbers`` is the size of a chunk
    of rows, ``room`` the memory for gains of units in bytes.
    """

    def __init__(
        self,
        model: Model,
        graph: Graph,
        ball: Ball,
        plans: Plans,
        limit: float,
        numbers: int,
        group: int,
        room: int,
    ) -> None:
        self.model, self.graph, self.ball, self.plans, self.limit = model, graph, ball, plans, limit
        self.numbers, self.group, self.room, self.deadline = numbers, group, room, math.inf
        units = sum(math.prod(graph.ops[k].shape) for k in graph.relaxed())
        self.capacity = max(64, STORED // (9 * units + 4 * math.prod(graph.ops[0].shape)))

    def decide(self, x: Tensor, y: Tensor, margin: Tensor, spent: Tensor, known: Bounds) -> Answer:
        """Decide correctly classified images, closest to certification first.

        ``margin`` are bounds of their margins, ``spent`` the seconds they took so far, ``known``
        bounds of their units.
        """
        self.since = time.monotonic()
        self.deadline = self.since + float((self.limit - spent).sum())
        no_image = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        lowest = torch.full((x.shape[0],), -math.inf, dtype=torch.float64, device=x.device)
        self.x, self.y, self.known = x, y, known
        leaves: list[tuple[Leaf, ...] | None] = [None] * x.shape[0]
        self.answer = Answer(lowest, no_image, no_image.clone(), x.clone(), leaves, spent.clone())
        everyone = torch.arange(x.shape[0], device=x.device)
        for version in ("fast", "standard") if x.is_cuda else ("fast",):
            self._attack(version, everyone)
        nearest = margin.argsort(descending=True, stable=True)
        waiting = nearest[~self.answer.broken[nearest]]
        self.allowed = torch.full_like(spent, self.limit)
        for start in range(0, waiting.shape[0], self.group):
            now = waiting[start : start + self.group]
            left = float((self.limit - self.answer.seconds).sum()) / (waiting.shape[0] - start)
            self.allowed[now] = self.answer.seconds[now] + max(0.0, left)
            self._search(now)
        return self.answer

    def _search(self, left: Tensor) -> None:
        """Decide a group of images; in halves if they do not fit into a GPU's memory together.

        An image that does not fit alone stays undecided, with what was found up to then.
        """
        self.deadline = time.monotonic() + self._left(left)
        if self._late() or left.shape[0] == 0:
            return
        try:
            self._prove(left)
            self._keep_leaves(left)
            return
        except torch.OutOfMemoryError as error:
            if left.shape[0] == 1:
                warnings.warn(
                    f"an image is left undecided for lack of memory: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        torch.cuda.empty_cache()
        self._spent(left)
        if left.shape[0] == 1:
            return
        for half in left.chunk(2):
            self._search(half[~self.answer.broken[half] & ~self.answer.proved[half]])

    def _left(self, image: Tensor) -> float:
        """Seconds left for these images."""
        return float((self.allowed[image] - self.answer.seconds[image]).sum())

    def _spent(self, image: Tensor) -> None:
        """Charge the time since the last call to these images."""
        now = time.monotonic()
        image = image.unique()
        self.answer.seconds[image] += (now - self.since) / max(1, image.shape[0])
        self.since = now

    # ---- attacks

    def _attack(self, version: str, image: Tensor) -> None:
        left = image[~self.answer.broken[image] & ~self.answer.proved[image]]
        if left.numel() == 0 or self._late():
            return
        attack = StandardAttack(self.ball.take(left), version)  # type: ignore[arg-type]
        try:
            points = attack(self.model, self.x[left], self.y[left]).images
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the model has no gradients: bounds alone decide
            return
        self._consider(left, points)
        self._spent(left)

    def _consider(self, image: Tensor, z: Tensor) -> None:
        """Keep points that the model misclassifies and that pass the audit."""
        with torch.no_grad(), evaluating(self.model):
            logits = ask(self.model, z)
        wrong = (
            (logits.argmax(1) != self.y[image])
            & torch.isfinite(logits).all(1)
            & ~self.answer.broken[image]
        )
        some = wrong.nonzero()[:, 0]
        if some.numel() == 0:
            return
        ball = self.ball.take(image[some])
        valid = ball.violations(self.x[image[some]], z[some]).within(ball.eps)
        some = some[valid.to(some.device)]
        self.answer.broken[image[some]] = True
        self.answer.counterexample[image[some]] = z[some].to(self.x.dtype)

    # ---- proofs

    def _keep_leaves(self, left: Tensor) -> None:
        image, other = self.image.tolist(), self.other.tolist()
        for k in left[self.answer.proved[left]].tolist():
            found = [self.closed.leaves(n, other[n]) for n, i in enumerate(image) if i == k]
            whole = [part for part in found if part is not None]
            self.answer.leaves[k] = (
                tuple(leaf for part in whole for leaf in part) if len(whole) == len(found) else None
            )

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _relaxation(self, source: InputSet, x: Tensor) -> Relaxation:
        centre = self.graph.values(x.to(torch.float64))
        relaxation = Relaxation(self.graph, source, budget=self.numbers, centre=centre)
        relaxation.deadline = self.deadline
        return relaxation

    def _prove(self, left: Tensor) -> None:
        x, y = self.x[left], self.y[left]
        source = self.ball.take(left).input_set(x, self.plans).finer(REACH)
        relaxation = self._relaxation(source, x)
        bounds = self.known.take(left)
        anchored = source.has_plans
        if anchored:
            for position in self.graph.relaxed():
                relaxation.bound_layer(position, bounds, anchored=True)
        margins = relaxation.margins(y, bounds, anchored=anchored)
        image, other = (margins <= 0).nonzero(as_tuple=True)
        near = margins.amin(1)[image].argsort(
            descending=True, stable=True
        )  # these groups are searched first
        image, other = image[near], other[near]
        self.positive = torch.where(margins > 0, margins, math.inf).amin(
            1
        )  # over classes that are proved
        self.image, self.other, self.value = left[image], other, margins[image, other]
        self.closed = Closed(self.graph.names())
        self.worst = torch.full_like(
            self.value, math.inf
        )  # margin of the worst point tried as an example, by problem
        self._settle(left)
        self._spent(left)
        if image.numel() == 0 or self._late():
            return
        problems = open_problems(relaxation, x, y, bounds, image, other)
        del relaxation  # problems have anchors of their own
        unattacked = left[: 0 if x.is_cuda else None]
        for part in self._in_turn(problems, source):
            part = part[~self.answer.broken[self.image[part]]]
            if part.numel() == 0:
                continue
            some = problems.take(part)
            some, roots = self._note(
                some, improve(some, some.start(), ROOT_STEPS, 0.3, self.deadline)
            )
            self._spent(self.image[problems.index[part]])
            nodes = self._small_tree(some, roots)
            self._settle(left)
            self._attack("standard", unattacked)
            unattacked = left[:0]
            self._tighten(some, roots, nodes)
            self._settle(left)

    def _small_tree(self, problems: Problems, nodes: Nodes) -> Nodes:
        """Run branch and bound for about as long as one round of tightening takes."""
        live = nodes.problem.unique()
        units = sum(int(problems.bounds.unstable(k)[live].sum()) for k in problems.split_layers())
        return self._tree(problems, nodes, units / EARLY)

    def _in_turn(self, problems: Problems, source: InputSet) -> Iterator[Tensor]:
        """Groups of problems that fit into memory together over that set, each with its share of
        the remaining time."""
        last = self.deadline
        waiting = together(replace(problems, source=source), self.room) if len(problems) else []
        while waiting:
            share = waiting[0].shape[0] / sum(part.shape[0] for part in waiting)
            self.deadline = last - max(0.0, last - time.monotonic()) * (1 - share)
            yield waiting.pop(0)
        self.deadline = last

    def _settle(self, left: Tensor) -> None:
        """Combine the outcomes of the problems of each image."""
        lowest = torch.full_like(self.answer.margin, math.inf).scatter_reduce(
            0, self.image, self.value, "amin"
        )
        self.answer.margin[left] = torch.minimum(self.positive, lowest[left])
        self.answer.proved[left] = (lowest > 0)[left]

    def _note(self, problems: Problems, nodes: Nodes) -> tuple[Problems, Nodes]:
        """Record the bounds of nodes without splits. Returns the open problems and nodes."""
        self.value[problems.index] = torch.maximum(
            self.value[problems.index], nodes.bound.clamp(max=POSITIVE)
        )
        self.closed.forget(
            problems.index[nodes.bound > 0]
        )  # parts of a tree that is no longer needed
        self._close(problems, nodes)
        keep = ((nodes.bound <= 0) & ~self.answer.broken[self.image[problems.index]]).nonzero()[
            :, 0
        ]
        if keep.shape[0] == len(nodes):
            return problems, nodes
        return problems.take(keep), _numbered(nodes.take(keep))

    def _close(self, problems: Problems, nodes: Nodes) -> None:
        done = nodes.take((nodes.bound > 0).nonzero()[:, 0])
        self.closed.add(done, problems.index[done.problem])

    def _tighten(self, problems: Problems, roots: Nodes, nodes: Nodes) -> None:
        """Tighten bounds where the margin is not positive, as long as that helps, and continue to
        split the open ``nodes``."""
        live = nodes.problem.unique()
        if not live.numel():
            return
        some, tight = self._rounds(
            *self._note(problems.take(live), _numbered(roots.take(live))), PROGRESS[0]
        )
        finer = some.source.finer(FURTHER)
        for part in self._in_turn(some, finer):
            few, root = some.take(part), _numbered(tight.take(part))
            if len(few) and finer is not some.source and not self._late():
                few, root = self._note(*self._finer(few, root, finer.take(part)))
            few, root = self._rounds(few, root, PROGRESS[1])
            self._tree(few, self._again(few, _moved(nodes, problems, few)))

    def _finer(self, problems: Problems, nodes: Nodes, source: InputSet) -> tuple[Problems, Nodes]:
        """The problems over a set that lists more moves one by one, with new anchors."""
        everyone = torch.arange(len(problems), device=problems.y.device)
        relaxation, bounds = self._relaxation(source, problems.x), problems.bounds.take(everyone)
        for position in self.graph.relaxed():
            relaxation.bound_layer(position, bounds, anchored=True)
        anchors = {k: listed(*found, bounds, k, source) for k, found in relaxation.anchors.items()}
        problems = replace(problems, source=source, bounds=bounds, anchors=anchors)
        nodes = improve(problems, nodes, ROUND_STEPS, 0.3)
        self._spent(self.image[problems.index])
        return problems, nodes

    def _rounds(self, problems: Problems, nodes: Nodes, progress: float) -> tuple[Problems, Nodes]:
        """Tighten bounds and improve multipliers in turns, until a round gains less than
        ``progress``."""
        for _ in range(MOST_ROUNDS):
            if not len(nodes) or self._late():
                break
            before, image = nodes.bound, self.image[problems.index]
            tighter, empty = self._tightened(problems, nodes)
            found = improve(tighter, nodes, ROUND_STEPS, 0.3, self.deadline)
            found.bound = torch.where(empty, math.inf, found.bound)
            gained = bool((found.bound - before > progress * before.abs()).any())
            problems, nodes = self._note(tighter, found)
            self._spent(image)
            if not gained:
                break
        return problems, nodes

    def _tightened(self, problems: Problems, nodes: Nodes) -> tuple[Problems, Tensor]:
        """The problems with tighter bounds, and which of them have no image left.

        Bounds of one layer improve the row of the margin, which is the condition of the next.
        """
        source, count, centre = problems.source, len(problems), problems.x.to(torch.float64)
        relaxation = self._relaxation(source, problems.x)
        problems = replace(
            problems, bounds=problems.bounds.take(torch.arange(count, device=problems.y.device))
        )
        bounds = problems.bounds  # tightened in place
        empty = torch.zeros(count, dtype=torch.bool, device=problems.y.device)
        anchored = source.has_plans
        for position in self.graph.relaxed():
            if self._late():
                break
            row = trace_back(problems, nodes, torch.float64)
            rows = source.patched(row.rows)
            relaxation.condition = condition(
                rows, row.charges, row.largest, row.constant, centre.view_as(rows.coeff)
            )
            relaxation.bound_layer(position, bounds, anchored=anchored)
            empty |= (bounds.lower[position] > bounds.upper[position]).flatten(1).any(1)
            anchors = {k: anchor for k, anchor in problems.anchors.items() if k != position}
            if position in relaxation.anchors:
                found = listed(*relaxation.anchors[position], bounds, position, source)
                anchors[position] = relaxation.anchors[position] = found
            problems = replace(problems, anchors=anchors)
        return problems, empty

    # ---- the tree

    def _tree(self, problems: Problems, nodes: Nodes, splits: float = math.inf) -> Nodes:
        """Split until no node is open, the time limit is reached or ``splits`` splits are done.
        Returns the open nodes.

        The bound of a problem is that of its worst open node. Nodes without a unit to split wait if
        splits are limited.
        """
        batch = BATCH if self.x.is_cuda else BATCH // 16
        dead = torch.zeros(
            len(problems), dtype=torch.bool, device=self.x.device
        )  # cannot be decided by splits
        floor = torch.full((len(problems),), math.inf, dtype=torch.float64, device=self.x.device)
        limited = splits < math.inf
        waiting = nodes.take(nodes.problem[:0])
        images = self.image[problems.index[nodes.problem.unique()]].unique()
        image = self.image[problems.index].unique(return_inverse=True)[1]
        self.deadline = min(self.deadline, time.monotonic() + self._left(images))
        while len(nodes) and splits > 0 and not self._late():
            pick, rest = _turn(nodes, batch, image, self.capacity)
            now, nodes = nodes.take(pick), nodes.take(rest)
            splits -= len(now)
            position, unit, possible, z = choose_splits(problems, now)
            linear = now.take((~possible).nonzero()[:, 0])
            if limited:
                waiting = waiting.plus(linear)
            else:
                self._exhaust(problems, linear, dead, floor)
            keep = possible.nonzero()[:, 0]
            children = improve(
                problems, now.take(keep).split(position[keep], unit[keep]), NODE_STEPS, 0.2
            )
            self._candidates(problems, now.problem, z)
            self._close(problems, children)
            nodes = nodes.plus(children.unproved())
            over = dead | self.answer.broken[self.image[problems.index]]
            nodes = nodes.take((~over[nodes.problem]).nonzero()[:, 0])
            self._spent(self.image[problems.index[now.problem]])
        nodes = nodes.plus(waiting)
        floor = floor.scatter_reduce(0, nodes.problem, nodes.bound, "amin")
        broken = self.answer.broken[self.image[problems.index]]
        known = self.value[problems.index]
        self.value[problems.index] = torch.where(
            broken, known, torch.maximum(known, floor.clamp(max=POSITIVE))
        )
        return nodes

    def _again(self, problems: Problems, nodes: Nodes) -> Nodes:
        """Bound open nodes again, with new multipliers, after their problems got tighter bounds.
        Returns those still open."""
        found = nodes.take(torch.zeros_like(nodes.problem[:0]))
        every, batch = (
            torch.arange(len(nodes), device=nodes.problem.device),
            BATCH if self.x.is_cuda else BATCH // 16,
        )
        for start in range(0, len(nodes), batch):
            now = nodes.take(every[start : start + batch])
            if not self._late():
                now = improve(problems, now, NODE_STEPS, 0.2)
                self._close(problems, now)
                self._spent(self.image[problems.index[now.problem]])
            found = found.plus(now.unproved())
        return found

    def _exhaust(self, problems: Problems, nodes: Nodes, dead: Tensor, floor: Tensor) -> None:
        """Improve the multipliers of nodes without a unit to split: such nodes are linear."""
        if len(nodes):
            nodes = improve(problems, nodes, LAST_STEPS, 0.3)
            self._close(problems, nodes)
            nodes = nodes.unproved()
            dead[nodes.problem] = True
            floor.scatter_reduce_(0, nodes.problem, nodes.bound, "amin")

    def _candidates(self, problems: Problems, problem: Tensor, z: Tensor) -> None:
        """Test the image that attains the bound, projected into the ball, where the network
        misclassifies it: one per problem."""
        logits = self.graph.logits(z.to(torch.float64))
        own = logits.gather(1, problems.y[problem][:, None])[:, 0]
        margin = own - logits.gather(1, problems.other[problem][:, None])[:, 0]
        order = margin.argsort(stable=True)
        order = order[problem[order].argsort(stable=True)]
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = problem[order][1:] != problem[order][:-1]
        # A projection is dear, and points of nearby nodes are alike: the next one must be worse by
        # a tenth.
        worst = self.worst[problems.index[problem[order]]]
        enough = torch.where(
            worst.isfinite(), worst - 0.1 * worst.abs(), NEAR * margin.abs().amax().clamp(max=1.0)
        )
        chosen = order[first & (margin[order] < enough)]
        if chosen.numel() == 0:
            return
        self.worst[problems.index[problem[chosen]]] = margin[chosen]
        image = self.image[problems.index[problem[chosen]]]
        points = self.ball.take(image).project(self.x[image], z[chosen].to(self.x.dtype)).point
        self._consider(image, points.to(self.x.dtype))


def _numbered(roots: Nodes) -> Nodes:
    """One node for each problem, in their order."""
    return Nodes(torch.arange(len(roots), device=roots.problem.device), roots.bound, roots.state)


def _moved(nodes: Nodes, before: Problems, after: Problems) -> Nodes:
    """Renumber nodes of the problems ``before`` as nodes of the subset ``after``."""
    place = torch.full_like(before.index, -1)
    place[(before.index[:, None] == after.index).any(1)] = torch.arange(
        len(after), device=place.device
    )
    problem = place[nodes.problem]
    return Nodes(problem, nodes.bound, nodes.state).take((problem >= 0).nonzero()[:, 0])


def _turn(nodes: Nodes, batch: int, image: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The nodes to visit next, and the rest; ``image`` is the image of each problem, numbered from
    0.

    Half of them are taken from every problem in turn, and half from the images closest to
    certification, one after the other: most trees that stay open at the time limit are far from
    closed and would take most of the time. The worst nodes come first, or the best if memory is
    full.
    """
    key = nodes.bound if len(nodes) < capacity else -nodes.bound
    order = key.argsort(stable=True)
    grouped, rank, _ = ranked(nodes.problem[order], image.shape[0])
    turns = order[grouped[rank.argsort(stable=True)]]
    mine = image[nodes.problem]
    lacking = torch.full(image.shape, math.inf, dtype=nodes.bound.dtype, device=image.device)
    lacking = lacking.scatter_reduce(0, mine, nodes.bound, "amin")[mine]
    nearest = order[lacking[order].argsort(descending=True, stable=True)]
    first = torch.zeros_like(nodes.problem)
    first[turns[: (batch + 1) // 2]] = 1
    nearest = nearest[first[nearest].argsort(descending=True, stable=True)]
    return nearest[:batch], nearest[batch:]
