"""What attacks of a user's own rely on: positions of images, the loss of a step, members of the
ensemble, balls with an oracle alone."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from wball.attacks import GradientAttack, standard
from wball.attacks.base import AttackBatch, State
from wball.attacks.dual_averaging import Potentials, normalised

BALL = wball.WassersteinBall(0.3)


def case(count: int = 10) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 4))
    x = torch.rand(count, 1, 6, 6)
    return net, x, net(x).argmax(1)


@pytest.mark.parametrize("until_success", [True, False])
def test_an_objective_with_an_index_gets_the_positions_of_its_images(until_success: bool) -> None:
    """TRADES climbs the divergence from answers of its own, in batches and as images drop out."""
    net, x, y = case()
    clean = net(torch.rand_like(x)).softmax(1).detach()  # at x itself the gradient would vanish

    def divergence(logits: Tensor, y: Tensor, target: Tensor | None, index: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(1), clean[index], reduction="none").sum(1)

    settings = {"steps": 8, "objective": divergence, "until_success": until_success}
    whole = wball.DualAveraging(BALL, **settings)(net, x, y)
    parts = wball.DualAveraging(BALL, **settings, batch_size=3)(net, x, y)
    torch.testing.assert_close(whole.images, parts.images, atol=1e-5, rtol=0)
    expected = divergence(net(whole.images), y, None, torch.arange(len(x)))
    torch.testing.assert_close(whole.loss, expected, atol=1e-4, rtol=1e-3)


@dataclass
class Paced(Potentials):
    pace: Tensor = field(kw_only=True)
    before: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class Adaptive(GradientAttack):
    """Halves the step of an image whose loss did not rise."""

    steps: int = 10
    seen: Callable[[State], None] = lambda state: None

    @property
    def n_gradients(self) -> int:
        return self.steps

    def init(self, batch: AttackBatch, generator: torch.Generator) -> Paced:
        x, oracle = batch.x, batch.ball.oracle(batch.x)
        none, pace = torch.zeros_like(oracle.unit), torch.full((len(x), 1, 1, 1), 4.0)
        lowest = torch.full((len(x),), -torch.inf)
        b = torch.zeros_like(x)
        return Paced(x, batch.ball, x, none, b=b, oracle=oracle, pace=pace, before=lowest)

    def advance(self, state: Paced, gradient: Tensor) -> State:
        assert state.loss is not None
        self.seen(state)
        rose = (state.loss > state.before).view(-1, 1, 1, 1)
        state.pace = torch.where(rose, state.pace, state.pace / 2)
        state.before = state.loss.clone()
        state.b = state.b + state.pace * normalised(gradient)
        return state.move()


def test_a_step_knows_its_loss_without_another_pass() -> None:
    net, x, y = case()
    calls = list[int]()
    net.register_forward_hook(lambda *_: calls.append(1))

    def seen(state: State) -> None:
        logits = net[3](net[2](net[1](net[0](state.z))))  # no pass of the whole network
        others = logits.scatter(1, y[:, None], -torch.inf)
        expected = torch.logsumexp(others, 1) - logits.gather(1, y[:, None])[:, 0]
        assert state.loss is not None
        torch.testing.assert_close(state.loss, expected.detach(), atol=1e-5, rtol=1e-4)

    found = Adaptive(BALL, until_success=False, seen=seen)(net, x, y)
    plain = len(calls)
    calls.clear()
    wball.DualAveraging(BALL, steps=10, until_success=False)(net, x, y)
    assert plain <= len(calls) + 1
    assert wball.audit(BALL, x, found.images).all_valid


def test_members_of_your_own_run_on_survivors_and_are_named() -> None:
    net, x, y = case()
    ball = wball.WassersteinBall(1e-4)  # nothing breaks, so every image survives

    reached = list[int]()
    extra = Adaptive(ball, steps=2, seen=lambda state: reached.append(len(state.x)))
    attack = wball.StandardAttack(ball, version="fast", extra=[extra], check=False)
    assert "Adaptive" in attack.describe()["members"][-1]
    found = attack(net, x, y)
    assert reached == [len(x)] * 2
    assert wball.audit(ball, x, found.images).all_valid


def test_an_extra_member_that_breaks_an_image_is_credited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(standard.MEMBERS, "fast", (standard.Member("margin", 1e-9, steps=1),))
    net, x, y = case()
    ball = wball.WassersteinBall(2.0)
    extra = [wball.DualAveraging(ball, steps=1, step_size=1e-9), Adaptive(ball, steps=60)]
    alone = extra[1](net, x, y)
    found = wball.StandardAttack(ball, version="fast", extra=extra, check=False)(net, x, y)
    assert int(alone.success.sum()) >= 3 and found.member is not None
    assert torch.equal(found.success, alone.success)
    assert set(found.member[found.success & (found.distance > 0)].tolist()) == {2}
    assert torch.equal(found.member >= 0, found.success)
