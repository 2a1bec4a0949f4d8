"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`) in plain PyTorch: whole batches, any device, in logs.

The yardstick of the other kernels, and what serves GPU images that are too large for one Triton program. Its decisions
are those of the compiled loops (:mod:`wball.kernels.projected_sinkhorn.cpu`), image by image; arithmetic is float64
whatever the images are. An image leaves the batch when it is done. The host reads a few numbers a sweep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wball.batch import largest, per_image
from wball.kernels.plan_rows import PlanRows, Repair, image_sums, into_box, ring_sums, solve_price
from wball.kernels.projected_sinkhorn import (
    FAR,
    MARGIN,
    MEMORY,
    WIDEST_MARGIN,
    ProjectedSinkhorn,
    Projection,
    entropy_at_rest,
)
from wball.kernels.projected_sinkhorn.excess_reference import drain
from wball.moves import Moves

MOMENTUM = 0.95
"""Largest weight of the extrapolation."""
LESS, WILD, TIMID = 0.8, 3.0, 0.1
"""Where the gap rises, steps are scaled by so much less from then on, or no more if one of them is wild. Where they are
scaled by less than ``TIMID``, they are not, and sweeps have momentum instead of a memory."""
LONGEST = 10.0
"""The memory takes potentials no further than so many times the sweep, nor than so many times ``FAR``."""
DOUBT = 3.0
"""A gap so many times the lowest one shows that the memory misleads."""
ROUNDS, DRAINED = 40, 12
"""Plans that an image may offer; so many in a row may be followed by what their repair sent back, not by a sweep."""
EAGER = 20.0
"""A plan that lacks nothing but the repair is offered at so many times the target, for what the repair sends back."""
TOO_EARLY = 5000.0
"""Where that leaves a gap so many times the allowed one, sweeps go on, and the next such offer comes later."""
AIM = 0.05
"""A repair aims at this share of the margin below ``hi``: it would come near ``hi`` forever."""
LEAST_KEPT = 0.1
"""What was sent back changes a potential by no more than this factor at a time."""
FIRST, LEAST = 0.7, 0.02
"""An image offers its plan when the estimate falls below this share of the tolerance, halved from offer to offer."""
REPAIR_SWEEPS = 40
OVERSHOOT, FROM_SWEEP = 1.0, 2
"""From this repair sweep on, pixels above ``hi`` give back their excess and as much again. Mass that circulates among
full pixels would else take forever to die out; if they gave back more, their neighbours would have more to give back
than they had."""
SCHEDULE = (
    tuple(float(sweep < REPAIR_SWEEPS) for sweep in range(REPAIR_SWEEPS + 1)),
    tuple(OVERSHOOT * (FROM_SWEEP <= sweep < REPAIR_SWEEPS) for sweep in range(REPAIR_SWEEPS + 1)),
)
"""Of each sweep: what part of what a pixel sends it counts on, and how much further than the box asks for it goes."""
SLACK, EXACT_SLACK = 5e-7, 1e-12
"""What float32 and float64 may leave above ``hi``: it is cut off, far less mass than the images are given in."""
EXCESS, HARDER = 1.5, 16.0
"""What mass above the box will cost, in units of its price: it is sent back unspent, and takes others with it. After
every plan whose repair cost too much, it counts so many times as much."""
PARTS = 0.03
"""Share of the objective's parts that counts where ``1/2 |w - z|^2`` is small next to the entropy."""
PSI_TOL = 0.2
"""The price is exact enough when what it leaves of the budget costs this share of what an offer may miss."""
RESOLUTION = 16
"""Roundings by which the cost may miss the budget at any price."""
TINY = 1e-300


def wright_omega(y: Tensor) -> Tensor:
    """The real solution ``o`` of ``o + log(o) = y``.

    >>> float(wright_omega(torch.tensor(1.0)))
    1.0
    """
    return _log_omega(y).exp()


def _log_omega(y: Tensor) -> Tensor:
    """The logarithm of Wright's omega, by Newton's method from either asymptote."""
    # For y below -1, o = e^y nearly; above, o = y - log(y) nearly. Newton in v = log(o) is globally convergent.
    y = y.clamp(min=torch.finfo(y.dtype).min)  # a column that nothing reaches has y = -inf
    low = y.clamp(max=1)
    v = torch.where(y < 1, low - torch.exp(low).clamp(max=0.5), torch.log(y.clamp(min=1)))
    for _ in range(6):
        o = torch.exp(v)
        v = v - (o + v - y) / (1 + o)
    return v


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    return _Search(problem).run()


class _Priced(PlanRows):
    """Rows with what the dual needs of them: the log of their normaliser, and their cost per image."""

    def __init__(self, x: Tensor, beta: Tensor, price: Tensor, rings: Tensor, moves: Moves) -> None:
        super().__init__(x, beta, price, rings, moves)
        share = torch.softmax(rings - per_image(price, x) * moves.ring_cost, 0)
        self.cost = image_sums(x * (share * moves.ring_cost).sum(0))


@dataclass
class _Images:
    """The images under way; the first dimension of everything is the image.

    Attributes:
        place: which of the problem's images each is.
        centre: ``1/2 |w - x|^2``, and ``at_rest`` the entropy where nothing moves.
        beta, price: potentials and price, in units of ``tau``.
        size: what gaps are measured against.
        target: the part of the size at which an image offers its plan.
        severity: what mass above the box counts by then.
        lowest: the lowest gap since the memory began.
        bold: part of the scaled step that is made.
        streak: sweeps since momentum was restarted.
        eager: how many times the target is near enough for a plan that lacks only the repair; 0 once one was ready.
        offers: plans offered.
        drained: of these, how many in a row were followed by what their repair sent back; ``best`` is their lowest gap.
        last: where the last sweep ended, and ``change`` how far that was from where it began.
        metric: by what columns resisted a change when the memory began.
        held: sweeps remembered, with ``changes`` between their changes and ``steps`` between their ends.
        gram: products of the changes in the metric.
    """

    place: Tensor
    x: Tensor
    w: Tensor
    budget: Tensor
    tau: Tensor
    centre: Tensor
    at_rest: Tensor
    beta: Tensor
    price: Tensor
    size: Tensor
    target: Tensor
    severity: Tensor
    lowest: Tensor
    bold: Tensor
    streak: Tensor
    eager: Tensor
    offers: Tensor
    drained: Tensor
    best: Tensor
    last: Tensor
    change: Tensor
    metric: Tensor
    held: Tensor
    changes: Tensor
    steps: Tensor
    gram: Tensor

    def take(self, index: Tensor) -> _Images:
        return _Images(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.place)


class _Search:
    def __init__(self, problem: Projection) -> None:
        self.tol, self.max_iter = problem.tol, max(problem.max_iter, 1)
        self.lo, self.hi = problem.ends
        self.least = math.log(self.lo) if self.lo > 0 else -math.inf
        self.resolution = RESOLUTION * torch.finfo(torch.float64).eps
        exact = problem.factors or problem.x.dtype == torch.float64
        self.slack = problem.unit * (EXACT_SLACK if exact else SLACK)
        self.out = torch.float64 if exact else problem.x.dtype
        x, w, u, psi = (
            t.detach().to(torch.float64) for t in (problem.x, problem.w, *problem.start())
        )
        self.moves = problem.moves.like(x)
        budget, centre = problem.budget.to(torch.float64), 0.5 * image_sums((w - x).square())
        single = (budget <= 0) | (image_sums(x) <= 0)
        tau = torch.where(single, 1.0, problem.tau.to(torch.float64))
        at_rest = entropy_at_rest(x, problem.tau)
        # What holds for balls of one point; the others are written over.
        self.answer = ProjectedSinkhorn(
            z=x.to(self.out, copy=True),
            cost=torch.zeros_like(centre),
            u=u.to(self.out, copy=True),
            psi=psi.to(self.out, copy=True),
            objective=centre + at_rest,
            gap=torch.zeros_like(centre),
            allowed=self.tol * centre,
            residual=torch.zeros_like(centre, dtype=self.out),
            n_iter=torch.zeros_like(centre, dtype=torch.long),
            keep=torch.ones_like(x) if problem.factors else None,
            give=torch.zeros_like(x) if problem.factors else None,
        )
        none, ever = torch.zeros_like(centre), torch.full_like(centre, math.inf)
        count = torch.zeros_like(centre, dtype=torch.long)
        place = (~single).nonzero()[:, 0]
        beta = u / per_image(tau, x)
        past = x.new_zeros((len(x), MEMORY, x[0:1].numel()))
        self.images = _Images(
            place=torch.arange(len(x), device=x.device), x=x, w=w, budget=budget, tau=tau, centre=centre,
            at_rest=at_rest, beta=beta, price=psi / tau, size=centre,
            target=torch.full_like(centre, (FIRST - MARGIN) * self.tol), severity=torch.full_like(centre, EXCESS),
            lowest=ever, bold=torch.ones_like(centre), streak=none,
            eager=torch.full_like(centre, EAGER if self.lo <= 0 else 0.0), offers=count, drained=count, best=ever,
            last=beta, change=torch.zeros_like(x), metric=torch.ones_like(x), held=count, changes=past,
            steps=past.clone(), gram=x.new_zeros((len(x), MEMORY, MEMORY)),
        )  # fmt: skip
        if len(place) < len(x):
            self.images = self.images.take(place)

    def run(self) -> ProjectedSinkhorn:
        step = 0
        while len(self.images):
            step += 1
            self._sweep(step)
        return self.answer

    def _sweep(self, step: int) -> None:
        """One sweep of all images under way, and where the next starts from. Images that are done leave."""
        s = self.images
        rings = ring_sums(s.beta, self.moves)
        s.price = self._price(s, rings, 12 if step == 1 else 3)
        rows = _Priced(s.x, s.beta, s.price, rings, self.moves)
        stays = rows.flow(0)
        columns = stays + rows.received()
        margin, pressed = self._margin(s)
        new, free = self._columns(s, columns, margin)

        about, outside = self._estimate(s, rows, columns)
        about = about - margin * pressed
        ready = about + (s.severity - EXCESS) * outside <= s.target * s.size
        early = (about - EXCESS * outside <= s.target * s.size) & (
            about <= s.eager * s.target * s.size
        )
        s.eager = torch.where(ready, 0.0, s.eager)
        ready = ready | early
        misled = about > DOUBT * torch.maximum(s.lowest, s.target * s.size)
        s.lowest = torch.where(misled, about, torch.minimum(s.lowest, about))
        wild = largest(new - s.beta) > WILD
        s.bold = torch.where(misled, torch.where(wild, 0.0, LESS * s.bold), s.bold)
        timid = s.bold < TIMID
        any_ready, any_timid = torch.stack([ready.any(), timid.any()]).tolist()

        whole = columns + torch.where(free, per_image(s.tau, s.x), 0.0)
        resists = torch.maximum(whole - stays.square() / s.x.clamp(min=TINY), 1e-9 * whole).clamp(
            min=TINY
        )
        scaled = _scaled(s.beta, new, per_image(s.bold, s.x) * whole / resists)
        begins, absorbs = misled | (s.drained > 0) | (step == 1), torch.zeros_like(misled)
        left = None
        if any_ready or step >= self.max_iter:
            absorbs, sent_back, left = self._offer(rows, columns, stays, margin, ready, step)
            scaled = torch.where(per_image(absorbs, s.x), s.beta + sent_back, scaled)
            begins = torch.where(absorbs, s.drained == 0, begins)
            s.lowest = torch.where(absorbs, math.inf, s.lowest)
        s.drained = torch.where(absorbs, s.drained + 1, 0)
        s.best = torch.where(absorbs, s.best, math.inf)
        beta, last = s.beta, s.last
        s.beta = self._remembered(s, scaled, resists, begins, step % MEMORY)
        if any_timid:  # momentum, restarted when a sweep turns back
            timid = timid & ~absorbs
            turned = image_sums((new - beta) * (new - last)) < 0
            s.streak = torch.where(misled | turned, 0.0, s.streak + 1)
            weight = (s.streak / (s.streak + 3)).clamp(max=MOMENTUM)
            chosen = per_image(timid, s.x)
            s.beta = torch.where(chosen, new + per_image(weight, s.x) * (new - last), s.beta)
            s.last = torch.where(chosen, new, s.last)
        if left is not None and len(left) < len(s):
            self.images = s.take(left)

    def _price(self, s: _Images, rings: Tensor, newton: int) -> Tensor:
        """The rows' block: bracketed Newton steps on the price, in units of ``tau``, for about the gap of an offer."""

        def tolerance(price: Tensor) -> Tensor:
            worth = (s.tau * price * s.budget).clamp(min=TINY)
            return (PSI_TOL * s.target * s.size / worth).clamp(self.resolution, PSI_TOL)

        return solve_price(s.x, rings, self.moves.ring_cost, s.budget, s.price, newton, tolerance)

    def _margin(self, s: _Images) -> tuple[Tensor, Tensor]:
        """How far below ``hi`` full columns aim, and what the gap grows by where each is one below."""
        pressed = image_sums((s.w - per_image(s.tau, s.x) * s.beta - self.hi).clamp(min=0.0))
        cost = MARGIN * self.tol * s.size
        margin = torch.minimum(cost / pressed.clamp(min=TINY), (2 * cost / s.x[0].numel()).sqrt())
        return margin.clamp(
            max=WIDEST_MARGIN * (self.hi - self.lo) if self.hi < math.inf else 0.0
        ), pressed

    def _columns(self, s: _Images, columns: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
        """The columns' block: their new potentials, and where the box does not bind."""
        scale = per_image(s.tau, s.x)
        log_s, log_tau = torch.log(columns.clamp(min=TINY)) - s.beta, torch.log(scale)
        level = _log_omega(s.w / scale + log_s - log_tau) + log_tau
        bound = level.clamp(min=self.least).minimum(per_image(torch.log(self.hi - margin), s.x))
        return bound - log_s, bound == level

    def _misfit(self, s: _Images, z: Tensor) -> Tensor:
        """The first term of the gap."""
        v = s.w - per_image(s.tau, s.x) * s.beta
        c = v.clamp(self.lo, self.hi)
        away = z - c
        return image_sums(away * (0.5 * away - (v - c)))

    def _estimate(self, s: _Images, rows: _Priced, columns: Tensor) -> tuple[Tensor, Tensor]:
        """About the gap after a repair, and what mass outside the box costs: it will be sent back, unspent."""
        kept = columns.clamp(self.lo, self.hi)
        psi, outside = s.tau * s.price, image_sums((columns - kept).abs())
        unspent = ((s.budget - rows.cost).abs() - self.resolution * s.budget).clamp(min=0.0)
        gap = self._misfit(s, kept) + psi * (unspent + EXCESS * outside)
        entropy = s.tau * (
            image_sums(s.beta * columns) - s.price * rows.cost - image_sums(s.x * rows.log_sum)
        )
        s.size = self._size(s, 0.5 * image_sums((s.w - columns).square()), entropy)
        return gap, psi * outside

    def _size(self, s: _Images, distance: Tensor, entropy: Tensor) -> Tensor:
        """What a gap is measured against. The point is off by at most the root of twice the gap: not by the entropy."""
        return torch.maximum(distance, PARTS * (distance - entropy)) + self.tol * s.centre

    def _remembered(
        self, s: _Images, new: Tensor, resists: Tensor, begins: Tensor, slot: int
    ) -> Tensor:
        """Anderson's method (:mod:`wball.kernels.projected_sinkhorn.memory`): the next ``beta``."""
        change = new - s.beta
        s.changes[:, slot], s.steps[:, slot] = (
            (change - s.change).flatten(1),
            (new - s.last).flatten(1),
        )
        s.metric = torch.where(per_image(begins, new), resists.clamp(min=1e-12), s.metric)
        s.held = torch.where(begins, 0, s.held + 1)
        weighted = (
            torch.stack([s.changes[:, slot], change.flatten(1)], 2) * s.metric.flatten(1)[..., None]
        )
        products = s.changes @ weighted
        s.gram[:, slot], s.gram[:, :, slot] = products[..., 0], products[..., 0]
        valid = (slot - torch.arange(MEMORY, device=new.device)) % MEMORY < s.held[:, None]
        gram = torch.where(valid[:, None] & valid[..., None], s.gram, 0.0)
        trace = gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
        gram = gram + torch.diag_embed(torch.where(valid, 1e-10 * trace + TINY, 1.0))
        share, _ = torch.linalg.solve_ex(gram, torch.where(valid, products[..., 1], 0.0)[..., None])
        s.change, s.last = change, new
        back = (share.transpose(1, 2) @ s.steps).view_as(new)
        short = largest(back) <= LONGEST * largest(change).clamp(min=FAR)
        return torch.where(per_image(short, new), new - back, new)

    def _offer(
        self,
        rows: _Priced,
        columns: Tensor,
        stays: Tensor,
        margin: Tensor,
        ready: Tensor,
        step: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Repair and judge the plans of the images that are ready.

        Returns who goes on with what the repair sent back, by how much that changes potentials, and who goes on at all.
        """
        everyone = self.images
        index = (
            torch.arange(len(ready), device=ready.device)
            if step >= self.max_iter
            else ready.nonzero()[:, 0]
        )
        s = everyone if len(index) == len(everyone) else everyone.take(index)
        if s is not everyone:
            rows = _Priced(s.x, s.beta, s.price, ring_sums(s.beta, self.moves), self.moves)
            columns, stays, margin = columns[index], stays[index], margin[index]
        final = (s.offers + 1 >= ROUNDS) | (step >= self.max_iter)
        keep, give, received, fits, drains = self._into_box(rows, columns, stays, margin, final)
        sent, paid = rows.spent(keep)
        sent, received, cost = give * sent, keep * received, image_sums(give * paid)
        scale = (s.budget / cost.clamp(min=TINY)).clamp(max=1.0)
        share = per_image(scale, s.x)
        sent, received, cost = share * sent, share * received, scale * cost
        z = (s.x - sent + received).clamp(self.lo, self.hi)
        stay = (s.x - sent).clamp(min=0.0)
        divergence = torch.log(scale) * image_sums(sent)
        divergence = divergence + image_sums(
            torch.special.xlogy(received, keep) + torch.special.xlogy(sent, give)
        )
        divergence = divergence + image_sums(
            torch.special.xlogy(stay, stay / stays.clamp(min=TINY))
        )
        unspent = s.tau * s.price * (s.budget - cost)
        gap = self._misfit(s, z) + unspent + s.tau * divergence
        entropy = s.tau * (
            divergence + image_sums(s.beta * z) - s.price * cost - image_sums(s.x * rows.log_sum)
        )
        distance = 0.5 * image_sums((s.w - z).square())
        allowed = self.tol * self._size(s, distance, entropy)
        done = (fits & (gap <= allowed)) | final
        gap, unspent = torch.where(fits, gap, math.inf), torch.where(fits, unspent, math.inf)

        out, u = self.answer, per_image(s.tau, s.x) * s.beta
        found = {
            "z": z, "cost": cost, "u": u, "psi": s.tau * s.price, "objective": distance + entropy + s.at_rest,
            "gap": gap.clamp(min=0.0), "allowed": allowed, "residual": largest(z - (s.w - u).clamp(self.lo, self.hi)),
            "n_iter": torch.full_like(s.place, step), "keep": keep, "give": give * share,
        }  # fmt: skip
        for name, value in found.items():
            place = getattr(out, name)
            if place is not None:
                place[s.place[done]] = value[done].to(place.dtype)

        absorbs = (2 * unspent >= gap) & (s.drained < DRAINED) & (gap <= DOUBT * s.best) & drains
        absorbs = absorbs & ((s.eager == 0) | (gap <= TOO_EARLY * allowed))
        best = torch.minimum(s.best, gap)
        fails = ~done & ~absorbs & (s.eager == 0)
        target = torch.where(fails, (0.5 * s.target).clamp(min=LEAST * self.tol), s.target)
        severity = torch.where(fails, HARDER * s.severity, s.severity)
        sent_back = torch.log(keep.clamp(min=LEAST_KEPT))

        def put(values: Tensor, new: Tensor) -> Tensor:
            return values.index_copy(0, index, new)

        everyone.offers, everyone.best = (
            put(everyone.offers, s.offers + 1),
            put(everyone.best, best),
        )
        everyone.eager = put(everyone.eager, torch.where(absorbs, s.eager, 0.25 * s.eager))
        everyone.target, everyone.severity = (
            put(everyone.target, target),
            put(everyone.severity, severity),
        )
        nobody, nowhere = torch.zeros_like(ready), torch.zeros_like(everyone.x)
        return put(nobody, absorbs), put(nowhere, sent_back), (~put(nobody, done)).nonzero()[:, 0]

    def _into_box(
        self, rows: _Priced, columns: Tensor, stays: Tensor, margin: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Factors that keep the box, what each pixel would receive if it kept all, for which images they were found,
        and where ``keep`` is all that the potentials lack."""
        keep, give, received = torch.ones_like(columns), torch.ones_like(columns), columns - stays
        drains = fits = torch.zeros_like(final)
        if self.lo <= 0:
            keep, fits, drains = drain(
                rows, received, columns, self.hi - AIM * margin, self.hi + self.slack
            )
        there = fits | (drains & ~final)
        if not bool(there.all()):
            how = Repair(*SCHEDULE, self.slack, 0.0, self.slack)
            others = into_box(rows, self.lo, self.hi, how)
            mine, chosen = (keep, give, received), per_image(there, keep)
            keep, give, received = (
                torch.where(chosen, a, others[k]) for k, a in zip((0, 1, 3), mine, strict=True)
            )
            fits = fits | ~there
        return keep, give, received, fits, drains


def _scaled(beta: Tensor, new: Tensor, scale: Tensor) -> Tensor:
    """Scaled steps (:mod:`wball.kernels.projected_sinkhorn`)."""
    step = new - beta
    reach = step.abs().clamp(min=FAR)
    return beta + torch.maximum(torch.minimum(step * scale.clamp(min=1.0), reach), -reach)
