"""What every attack promises, tried on each of them.

The mistakes this finds: a point outside the ball, a success that is none, a distance that is too
small, an image that depends on its batch, a random state or a model that is left changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wball
from contracts.attacks import ATTACKS, BALL, SOLVERS
from contracts.balls import BALLS
from contracts.balls import images as images_of
from problems import Case, ExactNet
from wball import (
    PGD,
    AttackResult,
    DualAveraging,
    FrankWolfe,
    ScoreSearch,
    StandardAttack,
    audit,
)
from wball.attacks import Attack, AttackStatus
from wball.attacks.attack import updated
from wball.attacks.base import RunnerUp
from wball.ball import WassersteinBall
from wball.kernels import dispatch
from wball.result import Duals, ProjectionResult

every_attack = pytest.mark.parametrize("name", ATTACKS)
WRONG, BLACK = 5, 3  # positions in the fixtures


def chosen(name: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """All images, or a few for attacks that solve a convex program at each step."""
    keep = [0, BLACK, WRONG, 1] if name in SOLVERS else list(range(10))
    return images[keep], labels[keep], keep


def assert_same(a: AttackResult, b: AttackResult, tol: float = 1e-5) -> None:
    torch.testing.assert_close(a.images, b.images, atol=tol, rtol=0)
    assert torch.equal(a.success, b.success) and torch.equal(a.n_steps, b.n_steps)
    assert a.status == b.status
    torch.testing.assert_close(a.distance, b.distance, atol=1e-4, rtol=0)


@every_attack
def test_result(name: str, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    attack = ATTACKS[name]
    images, labels, keep = chosen(name, images, labels)
    wrong, black = keep.index(WRONG), keep.index(BLACK)
    before = images.clone()
    result, again = (
        attack(net, images, labels, generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert_same(result, again, tol=0)
    assert torch.equal(images, before)
    assert audit(attack.ball, images, result.images).all_valid
    with torch.no_grad():
        top = net(result.images).argmax(1)
    assert torch.equal(top != labels, result.success)
    assert int(result.success.sum()) > 1, "nothing was broken: the test shows nothing"
    assert result.success[wrong] and result.distance[wrong] == 0
    assert result.status[wrong] is AttackStatus.ALREADY_WRONG and torch.equal(
        result.images[wrong], images[wrong]
    )
    assert (
        result.distance <= torch.as_tensor(attack.ball.eps, dtype=torch.float64) * (1 + 1e-6)
    ).all()
    exact = attack.ball.distance(images, result.images)
    moving = images.flatten(1).sum(1) > 0
    assert (result.distance[moving] >= exact[moving].double() - 1e-5).all()
    served = dispatch.requested() if dispatch.requested() != "auto" else "cpu"
    kernels = set(result.kernel.split("+"))
    if isinstance(attack.ball, WassersteinBall):
        assert served in kernels and kernels <= {served, "torch"}
        assert torch.equal(result.images[black], images[black])  # a ball of one point
    else:
        assert kernels == {"torch"}
    for i, status in enumerate(result.status):
        assert (status in (AttackStatus.FOUND, AttackStatus.ALREADY_WRONG)) == bool(
            result.success[i]
        )
    assert result.robust_accuracy == pytest.approx(1 - float(result.success.float().mean()))


@every_attack
def test_targeted(name: str, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    attack = ATTACKS[name]
    images, labels, _ = chosen(name, images, labels)
    with torch.no_grad():
        target = net(images).topk(2, 1).indices[:, 1]
    result = attack(net, images, labels, target=target)
    assert audit(attack.ball, images, result.images).all_valid
    with torch.no_grad():
        assert torch.equal(net(result.images).argmax(1) == target, result.success)
    assert result.success.any()


def test_default_steps_of_pgd_follow_the_radius() -> None:
    """Sign steps of 0.1 lose most of a small budget in the projection."""
    model, (x, y) = wball.load_model("mnist-standard"), wball.load_sample("mnist")
    x, y, ball = x[:20], y[:20], WassersteinBall(0.1)
    ours = PGD(ball, steps=20)(model, x, y).success
    signs = PGD(ball, steps=20, step="linf")(model, x, y).success
    assert int(ours.sum()) >= int(signs.sum()) + 6
    for eps in (0.01, 1.0, torch.rand(20)):
        norm, size = ball.at(eps).ascent_step(x, 20)
        moved = torch.as_tensor(eps).expand(20).double().clamp(max=1) * x.double().sum((1, 2, 3))
        assert norm == "l2"
        torch.testing.assert_close(size, 0.7 * (2 * moved).sqrt())
    assert wball.LinfBall(0.1).ascent_step(x, 20) == ("linf", 0.0125)


@pytest.mark.parametrize("name", ["dual averaging", "linf pgd", "linf frank-wolfe", "fast"])
def test_model_is_left_as_found(name: str, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    net.train()
    net.drop.eval()  # modes may differ between modules
    net.head.weight.requires_grad_(False)
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    running, state = net.norm.running_mean.clone(), torch.get_rng_state()
    attack = ATTACKS[name]
    with pytest.warns(wball.attacks.findings.ModelWarning) if name == "fast" else torch.no_grad():
        attack(net, images, labels)
    assert net.training and net.conv.training and not net.drop.training
    assert not net.head.weight.requires_grad and net.conv.weight.requires_grad
    assert torch.equal(net.conv.weight.grad, torch.ones_like(net.conv.weight))
    assert torch.equal(net.norm.running_mean, running)
    assert torch.equal(torch.get_rng_state(), state)


def test_model_is_left_as_found_when_it_fails(images: Tensor) -> None:
    class Fails(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                raise ZeroDivisionError
            return x.flatten(1)[:, :4]

    model, state = Fails().train(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        DualAveraging(BALL, steps=5)(model, images, torch.zeros(10, dtype=torch.long))
    assert model.training and torch.equal(torch.get_rng_state(), state)


def test_no_grad_and_inference_mode_around_the_call(case: Case) -> None:
    attack = ATTACKS["dual averaging"]
    plain = attack(*case)
    with torch.no_grad():
        assert_same(attack(*case), plain, tol=0)
    with torch.inference_mode():
        inside = attack(case.net, case.images.clone(), case.labels.clone())
    assert_same(inside, plain, tol=0)


@pytest.mark.parametrize("name", ["dual averaging", "pgd", "frank-wolfe", "fast"])
def test_one_radius_per_image(name: str, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    images, labels, keep = chosen(name, images, labels)
    for eps in torch.zeros(len(keep)).double(), torch.linspace(0, 0.5, len(keep)).double():
        result = replace(ATTACKS[name].at(eps), batch_size=3)(net, images, labels)
        assert audit(BALL.at(eps), images, result.images).all_valid
        assert (result.distance <= eps * (1 + 1e-6)).all()
        assert torch.equal(result.radius[result.distance > 0], eps[result.distance > 0])
        torch.testing.assert_close(result.images[eps == 0], images[eps == 0], atol=1e-6, rtol=0)
        if not eps.any():
            assert result.success.nonzero().flatten().tolist() == [keep.index(WRONG)]


def test_exact_projections_start_from_the_duals_of_the_last(
    net: nn.Module, images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, given = WassersteinBall.project, list[bool]()

    @wraps(project)
    def noted(*args: Any, init: Duals | None = None, **options: Any) -> ProjectionResult:
        given.append(init is not None)
        return project(*args, init=init, **options)

    monkeypatch.setattr(WassersteinBall, "project", noted)
    PGD(BALL, steps=3, until_success=False)(net, images[:2], labels[:2])
    assert given == [False, True, True]


def test_frank_wolfe_climbs_as_far_as_with_exact_corners(case: Case) -> None:
    """A step of length 1 is the oracle's corner: it gains nearly what the farthest point gains."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), case.images[:8]
    y = torch.zeros(8, dtype=torch.long)
    found = FrankWolfe(BALL, steps=1, until_success=False, objective="margin")(model, x, y)
    weight = (model[1].weight[1] - model[1].weight[0]).detach().view(1, 1, 8, 8).expand_as(x)
    exact = BALL.support(x, weight).point
    gained, most = (((z - x) * weight).flatten(1).sum(1) for z in (found.images, exact))
    assert float(gained.sum()) >= 0.98 * float(most.sum()) > 0
    assert float(found.distance.max()) <= float(BALL.eps) * (1 + 1e-6)


@pytest.mark.parametrize("kind", [DualAveraging, FrankWolfe, PGD, ScoreSearch])
@pytest.mark.parametrize("name", BALLS)
def test_every_ball(name: str, kind: type[Attack]) -> None:
    """Each is attacked in its own images, one of which nothing can change."""
    ball = BALLS[name]
    x = images_of(ball, 2, 1).clamp(*(ball.box or (0.0, 1.0)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(40, 4))
    y = model(x).argmax(1)
    y[5] = (y[5] + 1) % 4
    settings: dict[str, Any] = {"queries": 60} if kind is ScoreSearch else {"steps": 4}
    result = kind(ball, **settings)(model, x, y)
    report = audit(ball, x, result.images)
    assert report.all_valid and result.success[5]
    assert bool((result.distance >= report.distance - 1e-5 * (1 + report.distance)).all())
    assert torch.equal(model(result.images).argmax(1) != y, result.success)
    still = name in ("nothing can move", "no radius")
    assert (int(result.success.sum()) == 1) is still or torch.equal(result.images, x) is still


def test_until_success_false_raises_the_loss_further(case: Case) -> None:
    first = DualAveraging(BALL, steps=20)(*case)
    hardest = DualAveraging(BALL, steps=20, until_success=False)(*case)
    broken = first.success & hardest.success
    assert (hardest.loss >= first.loss - 1e-4)[broken].all()
    assert hardest.loss[broken].mean() > first.loss[broken].mean() + 0.1
    assert (hardest.n_steps <= 20).all()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(case.net(hardest.images), case.labels, reduction="none")
    torch.testing.assert_close(hardest.loss, loss, atol=1e-4, rtol=1e-4)


def test_a_confident_model_still_has_a_gradient(case: Case) -> None:
    """Cross-entropy in float32 is flat for logits like these; what the attack climbs is not."""
    scaled = lambda z: 1e4 * case.net(z)
    plain, confident = (
        ATTACKS["dual averaging"](*case),
        ATTACKS["dual averaging"](scaled, case.images, case.labels),
    )
    assert int(confident.success.sum()) >= int(plain.success.sum()) - 1
    assert AttackStatus.NO_GRADIENT not in confident.status[:3]


def test_flat_and_broken_models_are_reported(images: Tensor, labels: Tensor) -> None:
    flat = lambda z: (
        (z.flatten(1)[:, :5] * 0.0)
        + nn.functional.one_hot(labels[:1], 5) * torch.ones(z.shape[0], 1)
    )
    y = labels[:1].expand(10)
    result = ATTACKS["dual averaging"](flat, images, y)
    assert not result.success.any()
    assert set(result.status) == {AttackStatus.NO_GRADIENT}

    def broken(z: Tensor) -> Tensor:
        return flat(z) + z.flatten(1)[:, :1].sqrt() * 0.1  # infinite slope at 0

    result = ATTACKS["dual averaging"](broken, images, y)
    assert torch.isfinite(result.images).all()


def test_a_runner_up_is_chosen_on_the_clean_image() -> None:
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), torch.rand(6, 1, 4, 4)
    clean = net(x).detach()
    y, second = clean.topk(3, 1).indices[:, [0, 2]].T
    found = DualAveraging(BALL, steps=4, objective=RunnerUp(2), until_success=False)(net, x, y)
    logits = net(found.images).detach()
    gained, before = (
        v.gather(1, second[:, None])[:, 0] - v.gather(1, y[:, None])[:, 0] for v in (logits, clean)
    )
    torch.testing.assert_close(found.loss, gained)
    assert bool((gained > before).all())


def test_an_ensemble_tells_what_its_best_member_found() -> None:
    def told(status: list[AttackStatus], loss: list[float]) -> AttackResult:
        success = torch.tensor([s is AttackStatus.FOUND for s in status])
        zero = torch.zeros(len(status), dtype=torch.float64)
        images = torch.tensor(loss).view(-1, 1, 1, 1)
        return AttackResult(
            images, success, zero, torch.tensor(loss), torch.ones(len(status)), tuple(status), zero
        )

    survived, masked, broken = AttackStatus.SURVIVED, AttackStatus.NO_GRADIENT, AttackStatus.FOUND
    first = told([survived, survived, masked, masked, survived], [1.0, 2.0, 3.0, 4.0, 5.0])
    second = told([broken, masked, survived, masked], [0.5, 9.0, 0.0, 0.0])
    better = torch.tensor([True, True, False, False])
    merged = updated(first, torch.arange(4), second, better)
    assert merged.status == (broken, survived, survived, masked, survived)
    assert merged.success.tolist() == [True, False, False, False, False]
    assert merged.loss.tolist() == merged.images.flatten().tolist() == [0.5, 9.0, 3.0, 4.0, 5.0]
    assert merged.n_steps.tolist() == [2, 2, 2, 2, 1] and first.n_steps.tolist() == [1] * 5


@pytest.mark.parametrize("name", ["dual averaging", "pgd", "frank-wolfe", "fast"])
def test_a_model_may_work_in_place(name: str, net: nn.Module, images: Tensor) -> None:
    images, before = images[:2], images[:2].clone()
    y = net(2 * images - 1).argmax(1)
    result = ATTACKS[name](lambda z: net(z.mul_(2.0).sub_(1.0)), images, y)
    assert_same(result, ATTACKS[name](lambda z: net(2 * z - 1), images, y))
    assert torch.equal(images, before)


def test_scripted_traced_and_frozen_models(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    net.eval()
    images, labels = images[:3], labels[:3]
    script = torch.jit.script(net)
    frozen = torch.jit.freeze(script)  # its modules have no mode, and no parameters
    for model in (script, torch.jit.trace(net, images), frozen):
        result = ATTACKS["fast"](model, images, labels)
        assert_same(result, ATTACKS["fast"](net, images, labels))


@pytest.mark.parametrize(
    ("dtype", "given", "returned"),
    [
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
        (torch.float32, torch.float16, torch.float32),
    ],
)
def test_model_and_images_may_differ_in_precision(
    dtype: torch.dtype,
    given: torch.dtype,
    returned: torch.dtype,
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
) -> None:
    net, images = net.to(dtype), images.to(given)
    result = ATTACKS["dual averaging"](net, images, labels)
    assert result.images.dtype == returned
    assert result.status[0] is AttackStatus.FOUND
    with torch.no_grad():
        assert torch.equal(net(result.images.to(dtype)).argmax(1) != labels, result.success)
    assert audit(BALL, images.to(returned), result.images).all_valid


def test_a_model_without_a_graph_has_no_gradient(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    for name in ("dual averaging", "pgd", "frank-wolfe", "linf pgd"):
        attack = ATTACKS[name].at(1e-6)  # where no start is lucky
        assert attack(net, images[:1], labels[:1]).status == (AttackStatus.SURVIVED,)
        result = attack(torch.no_grad()(net), images[:1], labels[:1])
        assert not result.success.any() and result.status == (AttackStatus.NO_GRADIENT,)
        # a model that always answers right cannot be fooled by a lucky start
        result = ATTACKS[name](
            lambda z: torch.eye(5)[labels[0]].repeat(len(z), 1), images[:1], labels[:1]
        )
        assert not result.success.any() and result.status == (AttackStatus.NO_GRADIENT,)


def test_memory_runs_out(case: Case) -> None:
    net, images, labels = case

    def greedy(z: Tensor) -> Tensor:
        if z.shape[0] > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return net(z)

    attack = ATTACKS["dual averaging"]
    with pytest.warns(RuntimeWarning, match="out of memory") as told:
        result = attack(greedy, images, labels)
    assert [str(w.message).split()[-2] for w in told] == ["5", "2"]
    assert_same(result, attack(*case), tol=1e-3)
    with pytest.raises(RuntimeError, match="shapes"):  # other errors are the user's to see
        attack(lambda z: net(z) @ torch.ones(3, 3), images, labels)


def test_empty_batch(net: nn.Module) -> None:
    for attack in (ATTACKS["dual averaging"], ATTACKS["fast"], ATTACKS["linf pgd"]):
        result = attack(net, torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long))
        assert result.kernel == "none"
        assert (
            result.images.shape == (0, 1, 8, 8)
            and result.status == ()
            and result.robust_accuracy == 1.0
        )


def test_progress_bar_is_silent_unless_asked(
    case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dual averaging", "pgd", "fast"):  # not requested, not even on a terminal
        ATTACKS[name](case.net, case.images[:2], case.labels[:2])
        assert capfd.readouterr().err == ""
    monkeypatch.setattr("wball.progress._overwrites", lambda: True)  # a terminal
    monkeypatch.setattr("wball.progress.REDRAWN", 0.0)
    shown = replace(ATTACKS["dual averaging"], progress=True)(*case)
    assert "DualAveraging  =" in capfd.readouterr().err
    assert_same(shown, ATTACKS["dual averaging"](*case), tol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, x, y: (net, x, y.float()), "integer class indices"),
        (lambda net, x, y: (net, x, y[:3]), "one class per image"),
        (lambda net, x, y: (net, x * 255, y), "outside"),
        (lambda net, x, y: (net, x[:3], y[:3]), "2 values for 3 images"),
        (lambda net, x, y: (lambda z: net(z).argmax(1), x, y), "floating-point logits"),
        (lambda net, x, y: (lambda z: net(z)[:, :, None].expand(-1, -1, 2), x, y), "logits of"),
        (lambda net, x, y: (lambda z: net(z).amax(1), x, y), r"wrap it in wball.Binary\(model\)"),
        (lambda net, x, y: (net, x.numpy(), y), "torch.as_tensor"),
        (lambda net, x, y: ("net", x, y), "callable"),
    ],
)
def test_errors_of_calls_say_what_is_wrong(
    call: Callable[..., Any], message: str, net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    attack = DualAveraging(BALL.at([0.1, 0.2]) if "2 values" in message else BALL)
    with pytest.raises((ValueError, TypeError), match=message):
        attack(*call(net, images, labels))


def test_targets_and_generators_are_checked(case: Case) -> None:
    for options in ({"target": case.labels[:2]}, {"generator": 3}):
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            DualAveraging(BALL)(*case, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (DualAveraging, {"steps": 0}, "steps"),
        (DualAveraging, {"step_size": -1.0}, "step_size"),
        (DualAveraging, {"decay": 2.0}, "decay"),
        (DualAveraging, {"memory": 2.0}, "memory"),
        (DualAveraging, {"objective": "hinge"}, "objective"),
        (DualAveraging, {"sweeps": -1}, "sweeps"),
        (DualAveraging, {"random_start": float("inf")}, "random_start"),
        (ScoreSearch, {"queries": 10}, "queries"),
        (ScoreSearch, {"directions": 0}, "directions"),
        (FrankWolfe, {"steps": 0}, "steps"),
        (PGD, {"step": "l1"}, "step"),
        (PGD, {"mode": "paper"}, "finite reg"),
        (PGD, {"mode": "papper"}, "mode must be one of exact, paper, got .papper"),
        (PGD, {"max_iter": 0}, "max_iter"),
        (PGD, {"growth": 1.1}, "GrowingRadius"),
        (PGD, {"ball": 0.1}, "ball must be .* got 0.1"),
        (StandardAttack, {"version": "best"}, "version"),
    ],
)
def test_errors_of_settings_say_what_is_wrong(
    kind: Callable[..., object], settings: dict[str, Any], message: str
) -> None:
    assert settings.keys() <= {f.name for f in fields(kind)}, "any unknown option would be refused"  # type: ignore[arg-type]
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**{"ball": BALL, **settings})


def test_an_objective_returns_one_value_per_image(case: Case) -> None:
    with pytest.raises(ValueError, match="one value per image"):
        DualAveraging(BALL, objective=lambda o, y, t: o.mean())(*case)


def test_dropping_images_late_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU finished images stay in the batch for some steps; their result must not move."""
    attacks = (ATTACKS["dual averaging"], ATTACKS["linf pgd"])
    expected = [attack(*case) for attack in attacks]
    monkeypatch.setitem(wball.attacks.base.DROP_EVERY, "cpu", 3)
    for attack, before in zip(attacks, expected, strict=True):
        assert_same(attack(*case), before, tol=1e-4)


# Seeds, batches and order
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return nn.functional.avg_pool2d(wball.load_sample("mnist")[0][:5], 2)


@pytest.mark.parametrize("name", ["dual averaging, random start", "linf pgd", "pgd, entropic, l2"])
def test_same_seed_same_bits(digits: Tensor, name: str) -> None:
    labels = ExactNet()(digits).argmax(1)

    def attacked(seed: int | None) -> Tensor:
        torch.rand(3)  # the global state plays no role
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        attack = replace(ATTACKS[name].at(0.05), until_success=False)
        return attack(ExactNet(), digits, labels, generator=generator).images

    assert torch.equal(attacked(1), attacked(1)) and torch.equal(attacked(None), attacked(None))
    assert not torch.equal(attacked(1), attacked(2))


@pytest.mark.parametrize("name", [name for name in ATTACKS if "search" not in name])
def test_batch_size_and_order_do_not_matter(digits: Tensor, name: str) -> None:
    """Searches draw their directions for the batch, so they are not asked."""
    attack = ATTACKS[name].at(0.2)
    options = {f.name for f in fields(attack)}  # type: ignore[arg-type]
    random = {"random_start": 0.0, "until_success": False}
    attack = replace(attack, **{k: v for k, v in random.items() if k in options})
    labels, order = ExactNet()(digits).argmax(1), torch.tensor([4, 2, 0, 1, 3])
    whole, turned = (
        attack(ExactNet(), digits, labels),
        attack(ExactNet(), digits[order], labels[order]),
    )
    torch.testing.assert_close(turned.images, whole.images[order], rtol=0, atol=1e-6)
    assert torch.equal(turned.success, whole.success[order])
    parts = [attack(ExactNet(), digits[k : k + 1], labels[k : k + 1]) for k in range(3)]
    torch.testing.assert_close(
        torch.cat([p.images for p in parts]), whole.images[:3], rtol=0, atol=1e-6
    )
    assert torch.equal(torch.cat([p.success for p in parts]), whole.success[:3])
