"""Each case's call, and the checks that follow it."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import wball
from wball.attacks import Attack
from wball.plan import Plan
from wball.solvers.problem import as_grid

from .cases import Case
from .checks import (
    Findings,
    Geometry,
    budgets,
    centres,
    check_plan,
    check_point,
    check_projection,
    check_support,
    half_ulp,
    planes,
    radii,
    transport,
)


def run(case: Case) -> Findings:
    """Make the call and check what comes back. An exception is a finding, too: every case is a valid call."""
    found = Findings()
    before = [t.detach().clone() for t in (case.x, case.w, case.g)]
    with patch.dict(os.environ, WBALL_KERNEL=case.kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            OPERATIONS[case.operation](case, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            found.expect(False, "raised", f"{type(error).__name__}: {str(error)[:200]}")
    for name, old, new in zip("xwg", before, (case.x, case.w, case.g), strict=True):
        found.expect(torch.equal(old, new.detach()), "changed", f"{name} was modified in place")
    return found


def _project(case: Case, found: Findings) -> None:
    result = case.ball.project(case.x, case.w, case.reg, tol=case.tol, max_iter=case.max_iter)
    check_projection(found, case.ball, case.x, case.w, result, case.reg, case.tol)
    if case.rng.random() < 0.1 and case.x.shape[0]:  # a warm start is as valid, and claims as much
        again = case.ball.project(
            case.x, case.w, case.reg, tol=case.tol, max_iter=case.max_iter, init=result.duals
        )
        check_projection(found, case.ball, case.x, case.w, again, case.reg, case.tol)
    _audited(case, found, result.point, result.plan)


def _support(case: Case, found: Findings) -> None:
    result = case.ball.support(case.x, case.g, case.reg, tol=case.tol, max_iter=case.max_iter)
    solve = case.small and case.rng.random() < 0.3
    check_support(found, case.ball, case.x, case.g, result, case.reg, case.tol, solve)
    _audited(case, found, result.point, result.plan)


def _audited(case: Case, found: Findings, z: Tensor, plan: object) -> None:
    """The library's own audit must come to the same verdict; small cases are solved exactly, without the plan."""
    if case.small and case.rng.random() < 0.5:
        report = wball.audit(case.ball, case.x, z)
    elif case.x[:1].numel() <= 4096:
        report = wball.audit(case.ball, case.x, z, plan=plan, exact="needed")  # type: ignore[arg-type]
    else:
        return
    found.expect(
        report.all_valid, "infeasible", f"audit: {'; '.join(r for r in report.reasons if r)}"
    )
    eps = radii(case.ball, len(case.x))
    for k, (d, e) in enumerate(zip(report.distance.tolist(), eps.tolist(), strict=True)):
        if (
            case.ball.mass == "relative"
            and e >= 1e-3
            and math.isfinite(d)
            and bool(report.exact[k])
        ):
            found.measure("audited distance / eps", d / e)
        found.expect(not math.isnan(d), "nan", f"audit: distance of image {k}")


def _distance(case: Case, found: Findings) -> None:
    """To a sample of the ball, to itself, and to an image that lost mass; exact on small images."""
    ball, x = case.ball, case.x
    z = ball.sample(x, torch.Generator().manual_seed(case.index))
    far = ball.distance(x, z)
    found.expect(
        far.shape == (x.shape[0],) and far.dtype is torch.float64,
        "shape",
        f"{far.shape} {far.dtype}",
    )
    found.expect(not bool(far.isnan().any()), "nan", f"distance {far.tolist()}")
    lo, hi = ball.box if ball.box is not None else (0.0, math.inf)
    centre = x.detach().double().clamp(lo, hi).to(x.dtype)
    own = ball.distance(x, centre)
    found.expect(bool((own <= 1e-12).all()), "distance", f"of x to itself: {own.tolist()}")
    inside = ball.contains(x, z)
    report = wball.audit(ball, x, z)
    found.expect(
        bool(inside.all()),
        "infeasible",
        f"contains says {inside.tolist()} of a sample at {far.tolist()}",
    )
    found.expect(
        report.all_valid, "infeasible", f"audit: {'; '.join(r for r in report.reasons if r)}"
    )
    both = far.isfinite() & report.distance.isfinite()
    off = (far - report.distance).abs() - 1e-6 * report.distance - 1e-9
    found.expect(
        bool((off[both] <= 0).all()),
        "distance",
        f"{far.tolist()}, audit {report.distance.tolist()}",
    )
    if not case.small or x.shape[0] == 0:
        return
    geometry, a = Geometry(ball.cost, tuple(x.shape)), centres(ball, x)
    for k in range(len(a)):
        mass = float(a[k].sum())
        if mass <= 1e-280:
            continue
        least = transport(geometry, a[k], planes(z)[k])
        if math.isnan(least):
            continue  # HiGHS gave up
        least = least / mass if ball.mass == "relative" else least
        unit = 1.0 if ball.mass == "relative" else mass
        slack = 1e-5 * least + 1e-6 * unit * (1 + geometry.price.max(initial=0.0))
        found.expect(
            abs(float(far[k]) - least) <= slack,
            "distance",
            f"image {k}: {float(far[k])}, program {least}",
        )


def _sample(case: Case, found: Findings) -> None:
    z = case.ball.sample(case.x, torch.Generator().manual_seed(case.index))
    again = case.ball.sample(case.x, torch.Generator().manual_seed(case.index))
    found.expect(torch.equal(z, again), "seed", "the same seed gave another sample")
    check_point(found, case.ball, case.x, z)
    if case.x[:1].numel() <= 400:
        report = wball.audit(case.ball, case.x, z)
        found.expect(
            report.all_valid, "infeasible", f"audit: {'; '.join(r for r in report.reasons if r)}"
        )


def _plan(case: Case, found: Findings) -> None:
    """Any rows, repaired: the plan that results is in the ball, and each operation keeps what it says it keeps."""
    ball = case.ball
    lo, hi = ball.box if ball.box is not None else (0.0, math.inf)
    x = as_grid(case.x.detach()).clamp(lo, hi)
    if bool((x.flatten(1).sum(1) < 1e-300).any()):
        return  # below are products of masses and shares, which denormal numbers cannot hold
    moves = ball.cost.arcs(x.shape[2], x.shape[3], x)
    still = Plan.identity(moves, x)
    score = torch.where(
        moves.allowed, moves.gather(as_grid(case.g.sign() * 3)) - moves.cost, -math.inf
    )
    raw = type(still)(moves, x.unsqueeze(2) * torch.softmax(score, 2))
    net = raw.cancelled()
    scale = x.flatten(1).sum(1)
    tiny = 1e-12 * scale.view(-1, 1, 1, 1) + 1e-300
    found.expect(
        bool(((net.rows() - x).abs() <= tiny).all()), "plan", "cancelling changed the rows"
    )
    found.expect(
        bool(((net.columns() - raw.columns()).abs() <= tiny).all()),
        "plan",
        "cancelling changed the columns",
    )
    found.expect(
        bool((net.cost() <= raw.cost() * (1 + 1e-9) + 1e-300).all()),
        "plan",
        "cancelling raised the cost",
    )
    eps = radii(ball, len(x))
    budget = torch.from_numpy(budgets(ball, planes(x), torch.float64))
    for plan in (raw, net, still):
        fixed = plan.repair(budget, ball.box)
        point = fixed.columns().reshape(x.shape)
        check_plan(
            found,
            wball.WassersteinBall(torch.from_numpy(eps.copy()), ball.cost, ball.mass, ball.box),
            x,
            point,
            fixed,
        )


class _Net(nn.Module):
    """A small random network, odd on purpose: in train mode, with dropout, logits of any size."""

    def __init__(self, shape: tuple[int, ...], seed: int, scale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = int(np.prod(shape))
        self.hidden, self.dropout, self.out = nn.Linear(size, 5), nn.Dropout(0.3), nn.Linear(5, 3)
        for p in self.parameters():
            p.data = scale * torch.randn(p.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(torch.relu(self.hidden(x.flatten(1)))))


def _model(case: Case) -> tuple[nn.Module, Tensor]:
    net = _Net(tuple(case.x.shape[1:]), case.index, float(case.rng.choice([0.1, 1.0, 1.0, 100.0])))
    net = net.double() if case.x.dtype is torch.float64 else net
    net.eval()
    with torch.no_grad():
        x = case.x.detach().to(net.out.weight.dtype)
        y = net(x).argmax(1) if x.shape[0] else torch.zeros(0, dtype=torch.long)
    return net.train(), y


def _attack(
    make: Callable[[Case, Tensor], Attack],
) -> Callable[[Case, Findings], None]:
    def attacked(case: Case, found: Findings) -> None:
        model, y = _model(case)
        result = make(case, y)(model, case.x, y)
        z = result.images
        check_point(found, case.ball, case.x, z)
        found.expect(
            model.training and model.dropout.training, "model", "was not left in train mode"
        )
        found.expect(
            bool(result.distance.isfinite().all()), "nan", f"distance {result.distance.tolist()}"
        )
        found.expect(not bool(result.loss.isnan().any()), "nan", f"loss {result.loss.tolist()}")
        if z.shape[0] == 0:
            return
        with torch.no_grad():
            wrong = model.eval()(z).argmax(1) != y
        found.expect(
            torch.equal(wrong, result.success),
            "success",
            f"{result.success.tolist()}, is {wrong.tolist()}",
        )
        if case.x[:1].numel() > 800:
            return
        report = wball.audit(case.ball, case.x, z)
        found.expect(
            report.all_valid, "infeasible", f"audit: {'; '.join(r for r in report.reasons if r)}"
        )
        a, geometry = centres(case.ball, case.x), Geometry(case.ball.cost, tuple(case.x.shape))
        unit = np.ones(len(a)) if case.ball.mass == "relative" else a.sum((1, 2))
        slack = torch.from_numpy(
            (1e-4 * radii(case.ball, len(a)))
            + 4 * half_ulp(torch.float32) * unit * (1 + geometry.price.max())
        )
        proved = result.distance >= report.distance - slack
        found.expect(
            bool((proved | ~report.distance.isfinite()).all()), "distance",
            f"claims {result.distance.tolist()}, audit {report.distance.tolist()}",
        )  # fmt: skip
        for k, (d, e) in enumerate(
            zip(report.distance.tolist(), radii(case.ball, len(a)).tolist(), strict=True)
        ):
            if case.ball.mass == "relative" and e >= 1e-3 and math.isfinite(d):
                found.measure("audited distance / eps", d / e)
            if case.small and k == 0 and case.rng.random() < 0.3 and a[k].sum() > 1e-30:
                least = transport(geometry, a[k], planes(z)[k])
                least = least / a[k].sum() if case.ball.mass == "relative" else least
                allowed = e * (1 + 1e-4) + 2e-6 * unit[k] * (1 + geometry.price.max())
                found.expect(
                    not least > allowed,
                    "infeasible",
                    f"image {k}: a program finds {least}, eps {e}",
                )

    return attacked


def _dual_averaging(case: Case, y: Tensor) -> wball.DualAveraging:
    rng = case.rng
    return wball.DualAveraging(
        case.ball, steps=int(rng.choice([1, 2, 3])), step_size=float(rng.choice([0.1, 3.0, 100.0, 1e4])),
        random_start=float(rng.choice([0.0, 2.0])), until_success=bool(rng.random() < 0.5),
        objective=str(rng.choice(["cross-entropy", "margin"])),
    )  # fmt: skip


def _score_search(case: Case, y: Tensor) -> wball.ScoreSearch:
    rng = case.rng
    directions = int(rng.choice([1, 3]))
    return wball.ScoreSearch(
        case.ball, queries=int(rng.choice([10, 30])), directions=directions, until_success=bool(rng.random() < 0.5),
        step_size=float(rng.choice([0.1, 3.0, 100.0, 1e4])), objective=str(rng.choice(["cross-entropy", "margin"])),
    )  # fmt: skip


def _decision_search(case: Case, y: Tensor) -> wball.DecisionSearch:
    rng = case.rng
    return wball.DecisionSearch(
        case.ball, queries=int(rng.choice([45, 60])), directions=2, until_success=bool(rng.random() < 0.5),
        step_size=float(rng.choice([0.1, 3.0, 100.0])),
    )  # fmt: skip


def _pgd(case: Case, y: Tensor) -> wball.PGD:
    rng = case.rng
    return wball.PGD(
        case.ball, steps=int(rng.choice([1, 2])), step_size=float(rng.choice([1e-3, 0.1, 1.0, 100.0])),
        step=str(rng.choice(["linf", "l2", "wasserstein"])), reg=case.reg, random_start=bool(rng.random() < 0.3),
        until_success=bool(rng.random() < 0.5), max_iter=min(case.max_iter, 50),
    )  # type: ignore[arg-type]  # fmt: skip


def _frank_wolfe(case: Case, y: Tensor) -> wball.FrankWolfe:
    rng = case.rng
    return wball.FrankWolfe(
        case.ball, steps=int(rng.choice([1, 2])), rule=str(rng.choice(["harmonic", "line-search"])), reg=case.reg,
        random_start=bool(rng.random() < 0.3), until_success=bool(rng.random() < 0.5), max_iter=min(case.max_iter, 50),
    )  # type: ignore[arg-type]  # fmt: skip


def _certify(case: Case, found: Findings) -> None:
    """A bound is finite and below what any point of the ball attains: samples, corners and an attack try."""
    rng, ball, x = case.rng, case.ball, case.x
    if x[:1].numel() > 300:
        x, ball = x[:0], ball.at(0.1)
    net = _Net(tuple(x.shape[1:]), case.index, float(rng.choice([0.1, 1.0, 1.0, 100.0])))
    net = net.double() if x.dtype is torch.float64 else net
    dtype = net.out.weight.dtype
    method = str(rng.choice(["interval", "crown", "crown", "anchored", "dual", "alpha-crown"]))
    plans = str(rng.choice(["full", "window"]))
    net.eval()
    y = net(x.detach().to(dtype)).argmax(1)
    result = wball.certify(net, x, y, ball, method, plans, steps=3)  # type: ignore[arg-type]
    found.expect(
        result.margin.shape == (x.shape[0],), "shape", f"margin {tuple(result.margin.shape)}"
    )
    found.expect(not bool(result.margin.isnan().any()), "nan", f"margin {result.margin.tolist()}")
    if x.shape[0] == 0:
        return
    wide = net.double()
    tried = [x.double(), ball.sample(x.double(), torch.Generator().manual_seed(1))]
    z = x.detach().double().requires_grad_(True)
    (gradient,) = torch.autograd.grad(_margin(wide(z), y).sum(), z)
    if bool(gradient.isfinite().all()):
        tried.append(ball.support(x.double(), -gradient, tol=1e-3, max_iter=30).point)
    for point in tried:
        with torch.no_grad():
            margin = _margin(wide(point), y)
        size = 1e-6 * (margin.abs() + 1)
        if x.dtype is not torch.float64:  # the network that was bounded rounds to float32
            size = size + 1e-4 * wide(point).abs().amax(1).detach()
        found.expect(
            bool((result.margin <= margin + size).all()),
            "unsound",
            f"{method} {plans}: {result.margin.tolist()} > {margin.tolist()}",
        )


def _margin(logits: Tensor, y: Tensor) -> Tensor:
    own = logits.gather(1, y[:, None])[:, 0]
    return own - logits.scatter(1, y[:, None], -math.inf).amax(1)


OPERATIONS: dict[str, Callable[[Case, Findings], None]] = {
    "project": _project,
    "support": _support,
    "distance": _distance,
    "sample": _sample,
    "plan": _plan,
    "dual averaging": _attack(_dual_averaging),
    "score search": _attack(_score_search),
    "decision search": _attack(_decision_search),
    "pgd": _attack(_pgd),
    "frank-wolfe": _attack(_frank_wolfe),
    "certify": _certify,
}
