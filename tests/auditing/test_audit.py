"""The audit: agrees with the references, and notices everything that was planted."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import ot
import pytest
import torch
from torch import Tensor

import wball
from problems import KINDS, random_problem
from references import reference_distance, reference_support
from wball import AuditReport, DenseCost, GridCost, LinfBall, WassersteinBall, audit
from wball.auditing import flows
from wball.plan import Plan


def line_case(eps: float = 0.1, over: float = 1.0) -> tuple[WassersteinBall, Tensor, Tensor]:
    """A digit-like bar, a share of which moves by one pixel so that the distance is ``over *
    eps``."""
    x = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    x[:, :, 2:6, 3] = 0.5
    z = x.clone()
    z[..., 3] -= x[..., 3] * eps * over
    z[..., 4] += x[..., 3] * eps * over
    return WassersteinBall(eps), x, z


@pytest.mark.parametrize(
    "file",
    ["audit.py", "flows.py", "proof.py", "violations.py"],
)
def test_imports_nothing_it_checks(file: str) -> None:
    source = Path(wball.__file__).parent.joinpath("auditing", file).read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    allowed = (
        "wball.auditing",
        "wball.inputs",
        "wball.cost",
        "wball.display",
        "wball.plan",  # what a stored plan is; the sums are the audit's own
        "wball.ball" if file == "audit.py" else "wball.cost",
    )
    ours = {name for name in imported if name.startswith("wball.")}
    assert not [name for name in ours if not name.startswith(allowed)]


@pytest.mark.parametrize("kind", KINDS)
def test_points_on_the_ball_are_valid_and_contains_is_the_audits_answer(kind: str) -> None:
    """Inside, on and outside the ball, with lost mass, pixels outside the box and NaN."""
    for seed in range(16):
        p = random_problem(seed, kind=kind, mass="relative" if seed % 2 else "absolute")  # type: ignore[arg-type]
        on = reference_support(p.ball, p.x, p.g).point
        report = audit(p.ball, p.x, on)
        want = reference_distance(p.ball, p.x, on.clamp(min=0))
        assert float(report.distance) == pytest.approx(want, rel=1e-6, abs=1e-6), p.label
        assert report.all_valid, f"{p.label}: {report}"
        smaller = p.ball.at(float(report.distance) * (1 - 3e-4))
        assert not audit(smaller, p.x, on).all_valid or want < 1e-6
        far = p.x + 3 * (on - p.x)
        known = ((p.x, True), (on, True), (on * (1 + 7e-5), False), (on + 1e-3, False))
        for z, inside in (*known, (on * math.nan, False), (on.float(), None), (far, None)):
            found = bool(p.ball.contains(p.x, z))
            assert found == audit(p.ball, p.x, z).all_valid and inside in (None, found), p.label


@pytest.mark.parametrize("ball", [wball.WassersteinBall(0.1), wball.LinfBall(0.1)])
def test_contains_names_what_is_wrong_with_its_arguments(ball: Any) -> None:
    x = torch.rand(2, 1, 4, 4)
    with pytest.raises(TypeError, match=r"^x must be a torch.Tensor, got NoneType"):
        ball.contains(None, None)
    with pytest.raises(TypeError, match=r"^z must be a floating-point torch.Tensor, got NoneType"):
        ball.contains(x, None)
    with pytest.raises(
        ValueError, match=r"^z must have the shape of x, \(2, 1, 4, 4\), got \(1, 1, 4, 4\)"
    ):
        ball.contains(x, x[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-2, 0.1, 0.5])
def test_distance_over_by_two_parts_in_ten_thousand(eps: float, dtype: torch.dtype) -> None:
    for over in (1.0, 1 + 0.5e-4, 1 + 2e-4):
        ball, x, z = line_case(eps, over)
        report = audit(ball, x.to(dtype), z.to(dtype))
        assert report.all_valid == (over < 1 + 1e-4)
    assert "x eps" in report.reasons[0]


def test_mass_off_by_two_parts_in_a_hundred_thousand() -> None:
    ball, x, z = line_case(0.1, 0.9)
    ok, off = z.clone(), z.clone()
    ok[0, 0, 3, 3] += 0.5e-5 * float(x.sum())
    off[0, 0, 3, 3] += 2e-5 * float(x.sum())
    report = audit(ball, torch.cat([x, x]), torch.cat([ok, off]))
    assert report.valid.tolist() == [True, False]
    assert report.mass_error.tolist() == pytest.approx([0.5e-5, 2e-5], rel=1e-3)
    assert "mass is off" in report.reasons[1]


def test_mass_that_changed_channel() -> None:
    """The image's total mass is right, and each pixel is within the box."""
    ball, x, _ = line_case(0.5)
    z = x.clone()
    z[0, 0] *= 0.98
    z[0, 1] *= 1.02
    report = audit(ball, x, z)
    assert float(z.sum()) == pytest.approx(float(x.sum()))
    assert not report.all_valid
    assert float(report.distance) == math.inf
    assert float(report.mass_error) == pytest.approx(0.02 / 3)


def test_box_off_by_two_millionths() -> None:
    x = torch.full((2, 1, 4, 4), 0.5, dtype=torch.float64)
    x[:, :, 1, 1] = 1.0
    z = x.clone()
    for k, over in enumerate((0.5e-6, 2e-6)):
        z[k, 0, 1, 1] += over
        z[k, 0, 1, 2] -= over
    report = audit(WassersteinBall(0.1), x, z)
    assert report.valid.tolist() == [True, False]
    assert report.box_violation.tolist() == pytest.approx([0.5e-6, 2e-6])
    assert audit(WassersteinBall(0.1, box=None), x, z).all_valid
    below = z.clone()
    below[..., 0, 0] = -1e-3
    assert not audit(WassersteinBall(0.1, box=None), x, below).valid.any()


def test_bad_contents_are_findings_not_errors() -> None:
    ball, x, z = line_case()
    bad = torch.cat([z * math.nan, z * math.inf, -z, z * 0, z * 1e30, z, torch.rand_like(z)])
    bad[0] = z[0]
    bad[0, 0, 0, 0] = math.nan
    report = audit(ball, x.expand(7, -1, -1, -1), bad)
    assert report.valid.tolist() == [False] * 5 + [True, False]
    assert report.reasons[0] == report.reasons[1] == "NaN or infinite pixels"
    assert bool((report.distance[:5] == math.inf).all())
    assert not report.distance.isnan().any()


def test_bad_arguments_raise() -> None:
    ball, x, z = line_case()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "z must have the shape of x", {"z": z[:, :1]}),
        (TypeError, "z must be a floating-point", {"z": z.to(torch.int32)}),
        (ValueError, "x has NaN", {"x": x * math.nan}),
        (ValueError, "eps has 2 values for 1", {"ball": ball.at(torch.tensor([0.1, 0.2]))}),
        (ValueError, "exact", {"exact": "some"}),
        (TypeError, "ball must be a threat model such as", {"ball": GridCost()}),
        (ValueError, "9 pixels", {"ball": WassersteinBall(0.1, DenseCost(torch.zeros(9, 9)))}),
    ]
    for error, said, given in cases:
        with pytest.raises(error, match=said):
            audit(**{"ball": ball, "x": x, "z": z, **given})


def test_black_images_empty_batches_and_radius_zero() -> None:
    ball, x, z = line_case()
    black = torch.zeros_like(x)
    assert audit(ball, black, black).all_valid
    assert audit(ball.at(0.0), x, x).all_valid
    report = audit(ball.at(0.0), x, z)
    assert not report.all_valid
    assert report.reasons == ("distance 0.1 is more than eps = 0",)
    dot = black.clone()
    dot[0, 0, 0, 0] = 1e-3
    assert not audit(ball, black, dot).all_valid
    empty = audit(ball, x[:0], z[:0])
    assert len(empty) == 0
    assert empty.all_valid
    assert "0 images" in str(empty)
    assert len(audit(LinfBall(0.1), x[:0], z[:0])) == 0


def test_radius_per_image_and_histograms() -> None:
    ball, x, z = line_case(0.1)
    report = audit(ball.at(torch.tensor([0.1, 0.05])), torch.cat([x, x]), torch.cat([z, z]))
    assert report.valid.tolist() == [True, False]
    assert report.eps.tolist() == pytest.approx([0.1, 0.05])
    cost = DenseCost(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    a, b = torch.tensor([[0.6, 0.4]]), torch.tensor([[0.4, 0.6]])
    assert float(audit(WassersteinBall(0.2, cost), a, b).distance) == pytest.approx(0.2, rel=1e-6)
    assert float(audit(WassersteinBall(0.2, cost), b, a).distance) == pytest.approx(0.4, rel=1e-6)


def test_linf_ball() -> None:
    x = torch.full((3, 1, 4, 4), 0.5)
    z = x.clone()
    z[0] += 0.1
    z[1, 0, 0, 0] -= 0.1003
    z[2, 0, 0, 0] = math.nan
    report = audit(LinfBall(0.1), x, z)
    assert report.valid.tolist() == [True, False, False]
    assert report.distance[:2].tolist() == pytest.approx([0.1, 0.1003], rel=1e-5)
    over = torch.full((1, 1, 2, 2), 0.99)
    assert not audit(LinfBall(0.1), over, over + 0.05).all_valid
    dark, ball = torch.full_like(x, 0.05), LinfBall(0.1, box=None)  # no box: pixels may be negative
    z = ball.support(dark, -torch.ones_like(x)).point
    assert float(z.min()) < 0 and audit(ball, dark, z).all_valid
    assert not audit(ball, dark, z - 0.01).valid.any()


MOVES = {(r, c): k for k, (r, c, *_) in enumerate(GridCost().moves(8, 8))}


def plan_of(x: Tensor, z: Tensor) -> Tensor:
    """The plan of :func:`line_case` as an arc tensor: what a pixel lost went one to the right."""
    flow = torch.zeros(1, 3, len(MOVES), 8, 8, dtype=torch.float64)
    moved = (x - z).clamp(min=0)
    flow[:, :, MOVES[0, 0]], flow[:, :, MOVES[0, 1]] = x - moved, moved
    return flow


def test_a_plan_is_proof_and_a_wrong_plan_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ball, x, z = line_case(0.1)
    exact = float(audit(ball, x, z).distance)
    good = plan_of(x, z)
    solved = []
    inner = ot.emd
    monkeypatch.setattr(ot, "emd", lambda *a, **k: solved.append(1) or inner(*a, **k))
    report = audit(ball, x, z, plan=Plan(GridCost().arcs(x), good), exact="needed")
    assert report.all_valid
    assert not solved
    assert not report.exact.any()
    assert float(report.distance) == pytest.approx(exact, rel=1e-9)
    assert "upper bound by a checked plan" in report.summary()
    assert not audit(ball, x.float(), z.float(), plan=good.float(), exact="needed").exact

    cheap = torch.zeros_like(good)  # "everything stays": costs nothing, does not arrive at z
    cheap[:, :, 0] = x
    leaky = 0.99 * good
    outside = good.clone()
    outside[0, 0, 1, 0, 0] = 1e-3  # a move out of the image
    swap = torch.zeros_like(good)  # two pixels exchange mass: no sum changes, only the cost
    for r, step in ((2, 1), (3, -1)):
        swap[0, :, MOVES[0, 0], r, 3], swap[0, :, MOVES[step, 0], r, 3] = -0.2, 0.2
    negative = good - swap
    for wrong in (cheap, leaky, outside, negative, good * math.nan):
        solved.clear()
        report = audit(ball, x, z, plan=wrong, exact="needed")
        assert solved, "a plan that proves nothing must lead to an exact solve"
        assert report.exact
        assert float(report.distance) == pytest.approx(exact, rel=1e-9)
        assert not audit(ball.at(0.05), x, z, plan=wrong, exact="needed").all_valid

    report = audit(
        ball, x, z, plan=good + swap, exact="needed"
    )  # a valid plan, but it costs too much
    assert report.all_valid
    assert report.exact
    with pytest.raises(ValueError, match="plan must list its moves"):
        audit(ball, x, z, plan=good[:, :1])


def test_exact_on_a_sample() -> None:
    ball, x, z = line_case(0.1)
    flow = plan_of(x, z).expand(10, -1, -1, -1, -1)
    xs, zs = x.expand(10, -1, -1, -1), z.expand(10, -1, -1, -1)
    generator = torch.Generator().manual_seed(0)
    report = audit(ball, xs, zs, plan=flow, exact="sample", sample=3, generator=generator)
    assert int(report.exact.sum()) == 3
    assert report.all_valid
    generator.manual_seed(0)
    again = audit(ball, xs, zs, plan=flow, exact="sample", sample=3, generator=generator)
    assert torch.equal(report.exact, again.exact)
    assert audit(ball, xs, zs, plan=flow).exact.all()
    shrunk = torch.cat([zs[:5], 0.9 * zs[5:]])
    one, many = audit(ball, xs, shrunk), audit(ball, xs, shrunk, workers=4)
    assert torch.equal(one.distance, many.distance) and one.reasons == many.reasons
    assert one.n_valid == 5
    assert audit(
        ball, xs, zs, exact="sample", sample=3
    ).exact.all()  # without plans nothing else is proof


def test_a_wrong_answer_of_the_flow_solver_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ball, x, z = line_case()
    inner = ot.emd

    def lossy(*args: object, **kwargs: object) -> object:
        plan, log = inner(*args, **kwargs)
        return plan * 0.9, log

    monkeypatch.setattr(ot, "emd", lossy)
    assert not audit(ball, x, z).all_valid


def test_mass_is_unmatched_only_if_no_flow_matches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of moves needs the largest price; islands that differ by rounding do not."""
    solved, inner = [], flows.match_at
    monkeypatch.setattr(flows, "match_at", lambda *a: solved.append(a[-1]) or inner(*a))
    x = torch.ones(1, 1, 1, 500).double()
    x[..., 300:400] = 0
    chain, islands = x.clone(), x.clone()
    chain[..., 0], chain[..., 299] = 0.5, 1.5
    islands[..., :300] *= 1.00000001
    report = audit(WassersteinBall(1.0, box=None), torch.cat([x, x]), torch.cat([chain, islands]))
    assert report.distance.tolist() == pytest.approx([0.37375, 0], abs=1e-6)  # 299 * 0.5 / 400
    small, large, again = solved
    assert small == again < large


def test_report_text() -> None:
    ball, x, z = line_case(0.1)
    report = audit(ball, x.expand(9, -1, -1, -1), torch.cat([z, z * math.nan, x, *[z * 2] * 6]))
    assert isinstance(report, AuditReport)
    assert (len(report), report.n_valid, report.n_invalid) == (9, 2, 7)
    text = str(report)
    assert "9 images: 2 valid, 7 invalid" in text
    assert "image 1: NaN" in text
    assert "and 2 more" in text
