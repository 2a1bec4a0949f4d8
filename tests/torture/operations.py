"""Each case's call, and the checks that follow it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import ot
import torch
from torch import Tensor, nn

import wball
from certificates.exact import gap

from .cases import Case, make
from .checks import (
    Findings,
    Geometry,
    centre,
    check_point,
    check_projection,
    check_support,
    half_ulp,
    planes,
    radii,
)


def run(case: Case) -> Findings:
    """Make the call and check the result. An exception is a finding, too: every case is a valid
    call."""
    found = Findings()
    before = [t.detach().clone() for t in (case.x, case.w, case.g)]
    with patch.dict(os.environ, WBALL_KERNEL=case.kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            if case.operation in ATTACKS:
                _attack(case, found)
            else:
                OPERATIONS[case.operation](case, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            found.expect(False, "raised", f"{type(error).__name__}: {str(error)[:200]}")
    for old, new in zip(before, (case.x, case.w, case.g), strict=True):
        found.expect(torch.equal(old, new.detach()), "changed", "an argument, in place")
    return found


def findings(seed: int, only: list[str], index: int) -> list[str]:
    """What was wrong with a case; nothing if its operation is not among ``only``."""
    case = make(seed, index)
    return [f"{case.label}: {line}" for line in run(case)] if case.operation in only else []


def _project(case: Case, found: Findings) -> None:
    settings: Any = {"tol": case.tol, "max_iter": case.max_iter}
    result = case.ball.project(case.x, case.w, case.reg, **settings)
    check_projection(found, case, result)
    if case.rng.random() < 0.1 and case.x.shape[0]:  # a warm start is as valid, and claims as much
        again = case.ball.project(case.x, case.w, case.reg, init=result.duals, **settings)
        check_projection(found, case, again)
    _audit(case, found, result.point, result.plan)


def _support(case: Case, found: Findings) -> None:
    result = case.ball.support(case.x, case.g, case.reg, tol=case.tol, max_iter=case.max_iter)
    check_support(found, case, result)
    _audit(case, found, result.point, result.plan)


def _audit(case: Case, found: Findings, z: Tensor, plan: Any = None) -> Tensor | None:
    """The library's own audit must find the point valid; some small cases are solved exactly,
    without the plan."""
    if plan is None or (case.small and case.rng.random() < 0.5):
        report = wball.audit(case.ball, case.x, z)
    elif case.x[:1].numel() <= 4096:
        report = wball.audit(case.ball, case.x, z, plan=plan, exact="needed")
    else:
        return None
    found.expect(report.all_valid, "infeasible", f"audit: {report.reasons}")
    found.expect(not report.distance.isnan().any(), "nan", "audited distance")
    return report.distance


def _sample(case: Case, found: Findings) -> None:
    z, again = (
        case.ball.sample(case.x, torch.Generator().manual_seed(case.index)) for _ in range(2)
    )
    found.expect(torch.equal(z, again), "seed", "the same seed gave another sample")
    check_point(found, case, z)
    if case.x[:1].numel() <= 400:
        _audit(case, found, z)


def _distance(case: Case, found: Findings) -> None:
    """To a sample of the ball, compared with the audit, and of an image to itself."""
    ball, x = case.ball, case.x
    z = ball.sample(x, torch.Generator().manual_seed(case.index))
    far, own = ball.distance(x, z), ball.distance(x, centre(ball, x))
    audited = _audit(case, found, z)
    assert audited is not None
    found.expect(far.shape == x.shape[:1] and far.dtype is torch.float64, "shape", far)
    found.expect(not far.isnan().any(), "nan", far)
    found.expect((own <= 1e-12).all(), "distance", f"of x to itself: {own.tolist()}")
    found.expect(ball.contains(x, z).all(), "infeasible", f"contains, at {far.tolist()}")
    both = far.isfinite() & audited.isfinite()
    near = (far - audited).abs() <= 1e-6 * audited + 1e-9
    found.expect(near[both].all(), "distance", f"{far.tolist()}, audit {audited.tolist()}")
    if case.small:
        _compare_distance(case, found, z, far)


def _compare_distance(case: Case, found: Findings, z: Tensor, far: Tensor) -> None:
    """A transport problem of POT on a dense matrix: the audit has the solver of ``distance``."""
    a, b = planes(centre(case.ball, case.x), case.ball.cost), planes(z, case.ball.cost)
    geometry = Geometry(case.ball.cost, tuple(case.x.shape))
    forbidden = 10 * (1 + geometry.price.max())  # what rounding leaves over has to go somewhere
    prices = np.full((geometry.n, geometry.n), forbidden)
    prices[geometry.source, geometry.target] = geometry.price
    for k, channels in enumerate(zip(a, b, strict=True)):
        pairs = [(p, q) for p, q in zip(*channels, strict=True) if p.sum() > 0 and q.sum() > 0]
        cost = sum(
            ot.emd2(np.ascontiguousarray(p), np.ascontiguousarray(q * p.sum() / q.sum()), prices)
            for p, q in pairs
        )
        unit = a[k].sum() if case.ball.mass == "relative" else 1.0
        if unit > 1e-30 and bool(far[k].isfinite()):
            slack = (1e-5 * cost + 1e-6 * forbidden * a[k].sum()) / unit
            text = f"{float(far[k])}, POT {cost / unit}"
            found.expect(abs(float(far[k]) - cost / unit) <= slack, "distance", text)


class _Net(nn.Module):
    """A small random network, odd on purpose: in train mode, with dropout, logits of any scale."""

    def __init__(self, shape: tuple[int, ...], seed: int, scale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = int(np.prod(shape))
        self.hidden, self.dropout, self.out = nn.Linear(size, 5), nn.Dropout(0.3), nn.Linear(5, 3)
        for p in self.parameters():
            p.data = scale * torch.randn(p.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(torch.relu(self.hidden(x.flatten(1)))))


def _model(case: Case, x: Tensor) -> tuple[_Net, Tensor]:
    net = _Net(tuple(x.shape[1:]), case.index, float(case.rng.choice([0.1, 1.0, 1.0, 100.0])))
    net = net.eval().double() if x.dtype is torch.float64 else net.eval()
    with torch.no_grad():
        return net, net(x.detach().to(net.out.weight.dtype)).argmax(1)


def _attack(case: Case, found: Findings) -> None:
    """The examples are valid, ``success`` and ``distance`` are true, and the model is left as it
    was."""
    model, y = _model(case, case.x)
    model.train()
    result = ATTACKS[case.operation](case.ball, case, case.rng)(model, case.x, y)
    z = result.images
    check_point(found, case, z)
    found.expect(all(m.training for m in model.modules()), "model", "was not left in train mode")
    found.expect(result.distance.isfinite().all(), "nan", f"distance {result.distance.tolist()}")
    found.expect(not result.loss.isnan().any(), "nan", f"loss {result.loss.tolist()}")
    with torch.no_grad():
        wrong = model.eval()(z).argmax(1) != y
    found.expect(torch.equal(wrong, result.success), "success", result.success.tolist())
    if case.x[:1].numel() > 800:
        return
    audited = _audit(case, found, z)
    assert audited is not None
    a = planes(centre(case.ball, case.x), case.ball.cost)
    geometry = Geometry(case.ball.cost, tuple(case.x.shape))
    unit = np.ones(len(a)) if case.ball.mass == "relative" else a.sum((1, 2))
    rounding = 4 * half_ulp(torch.float32) * unit * (1 + geometry.price.max())
    slack = torch.from_numpy(1e-4 * radii(case.ball, len(a)) + rounding)
    proved = (result.distance >= audited - slack) | ~audited.isfinite()
    found.expect(proved.all(), "distance", f"{result.distance.tolist()}, {audited.tolist()}")


def _certify(case: Case, found: Findings) -> None:
    """A bound is finite and below what any point of the ball attains: a sample, and the corner
    against the gradient, try."""
    rng, ball, x = case.rng, case.ball, case.x
    if x[:1].numel() > 300:
        x, ball = x[:0], ball.at(0.1)
    net, y = _model(case, x)
    method = str(rng.choice(["interval", "crown", "crown", "anchored", "dual", "alpha-crown"]))
    plans = str(rng.choice(["full", "window"]))
    result = wball.certify(net, x, y, ball, method, plans, steps=3)  # type: ignore[arg-type]
    said = result.margin
    found.expect(said.shape == y.shape and not said.isnan().any(), "nan", f"margin {said.tolist()}")
    wide = net.double()
    tried = [x.double(), ball.sample(x.double(), torch.Generator().manual_seed(1))]
    z = x.detach().double().requires_grad_(True)
    (gradient,) = torch.autograd.grad(gap(wide(z), y).sum(), z)
    if bool(gradient.isfinite().all()):
        tried.append(ball.support(x.double(), -gradient, tol=1e-3, max_iter=30).point)
    for point in tried:
        with torch.no_grad():
            margin = gap(wide(point), y)
        size = 1e-6 * (margin.abs() + 1)
        if x.dtype is not torch.float64:  # the network that was bounded rounds to float32
            size = size + 1e-4 * wide(point).abs().amax(1).detach()
        text = f"{method} {plans}: {said.tolist()} > {margin.tolist()}"
        found.expect((said <= margin + size).all(), "unsound", text)


OPERATIONS: dict[str, Callable[[Case, Findings], None]] = {
    "project": _project,
    "support": _support,
    "distance": _distance,
    "sample": _sample,
    "certify": _certify,
}

STEP_SIZES = [0.1, 3.0, 100.0, 1e4]
OBJECTIVES = ["cross-entropy", "margin"]

# Values are drawn in the order of the keywords.
ATTACKS: dict[str, Callable[[wball.WassersteinBall, Case, np.random.Generator], wball.Attack]] = {
    "dual averaging": lambda ball, case, rng: wball.DualAveraging(
        ball,
        steps=int(rng.choice([1, 2, 3])),
        step_size=float(rng.choice(STEP_SIZES)),
        random_start=float(rng.choice([0.0, 2.0])),
        until_success=bool(rng.random() < 0.5),
        objective=str(rng.choice(OBJECTIVES)),
    ),
    "score search": lambda ball, case, rng: wball.ScoreSearch(
        ball,
        directions=int(rng.choice([2, 4])),
        queries=int(rng.choice([10, 30])),
        until_success=bool(rng.random() < 0.5),
        step_size=float(rng.choice(STEP_SIZES)),
        objective=str(rng.choice(OBJECTIVES)),
    ),
    "decision search": lambda ball, case, rng: wball.DecisionSearch(
        ball,
        queries=int(rng.choice([45, 60])),
        directions=2,
        until_success=bool(rng.random() < 0.5),
        step_size=float(rng.choice(STEP_SIZES[:3])),
    ),
    "pgd": lambda ball, case, rng: wball.PGD(
        ball,
        steps=int(rng.choice([1, 2])),
        step_size=float(rng.choice([1e-3, 0.1, 1.0, 100.0])),
        step=str(rng.choice(["linf", "l2", "wasserstein"])),
        reg=case.reg,
        random_start=bool(rng.random() < 0.3),
        until_success=bool(rng.random() < 0.5),
        max_iter=min(case.max_iter, 50),
    ),
    "frank-wolfe": lambda ball, case, rng: wball.FrankWolfe(
        ball,
        steps=int(rng.choice([1, 2])),
        until_success=bool(rng.random() < 0.5),
    ),
}
