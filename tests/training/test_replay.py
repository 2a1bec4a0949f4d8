"""An attack recorded and replayed. Without a GPU the recording is a stand-in that runs the same calls again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from training.worker import small_config, small_data, small_model
from wball import PGD, DualAveraging, WassersteinBall
from wball.attacks import GrowingRadius, objectives
from wball.attacks.base import GradientAttack
from wball.attacks.batch import AttackBatch
from wball.attacks.recording import RECORDERS
from wball.kernels.projected_sinkhorn import Projection
from wball.solvers.entropic import EntropicProjection
from wball.training import Adversary, Optimisation, train
from wball.training import opponent as opponent_module
from wball.training.network import AsTrained
from wball.training.replay import Replay, can_replay, recorded

ATTACK = DualAveraging(
    WassersteinBall(0.4), steps=4, until_success=False, random_start=1.0, sweeps=2
)
ATTACKS = {
    "dual averaging": ATTACK,
    "until success": DualAveraging(WassersteinBall(0.4), steps=12, sweeps=2),
    "the paper's": PGD.paper("mnist", steps=3, growth=GrowingRadius(1.4, 2), max_iter=2).at(0.4),
}


def victim() -> AsTrained:
    return AsTrained(small_model(), Optimisation())


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that makes the same calls again."""
    monkeypatch.setitem(RECORDERS, "cpu", lambda function, *_: function)


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize("name", ATTACKS)
def test_replays_are_the_attack_at_each_radius_seed_and_state_of_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack: Any = ATTACKS[name]
    size, tries = 16, 3
    if isinstance(attack, PGD):
        monkeypatch.setenv(
            "WBALL_KERNEL", "triton"
        )  # in its interpreter, which takes a second a step
        size, tries = 2, 1
    model = victim().train()
    x, y = small_data(3 * size)
    replay = Replay(attack, model, x[:size], y[:size])
    eps = torch.linspace(0.1, 0.4, size, dtype=torch.float64)
    for k, radius in ((1, eps), (2, 0.3), (2, eps.flip(0)))[:tries]:
        part = slice(size * k, size * k + size)
        draws = torch.Generator().manual_seed(k)
        expected = attack.at(radius)(model, x[part], y[part], generator=draws)
        z, success = replay(x[part], y[part], radius, k)
        # Sums over a smaller batch round differently, once images that fell are left out.
        torch.testing.assert_close(
            z, expected.images, atol=1e-4 if attack.until_success else 0, rtol=0
        )
        assert torch.equal(success, expected.success)
        assert bool((z != x[part]).any())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert model.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.usefixtures("standing_in")
def test_a_recording_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = small_data(16)

    def idle(replay: Replay) -> None:
        replay._z, replay._success = (
            replay._x.clone(),
            torch.zeros_like(replay._y, dtype=torch.bool),
        )

    monkeypatch.setattr(Replay, "_make", idle)
    with pytest.warns(
        RuntimeWarning, match="not replayed as a CUDA graph: a replay raises the mean loss"
    ):
        assert recorded(ATTACK, victim(), x, y) is None


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize("radius", ["fixed", "uniform", "per-image"])
def test_training_with_replays_ends_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, radius: str
) -> None:
    ends = []
    for replayed in (False, True):
        options = Optimisation(lr=0.05, schedule="one-cycle", cuda_graph=replayed)
        adversary = Adversary(ATTACK, radius=radius, ramp=0.5)  # type: ignore[arg-type]
        config = small_config(epochs=2, adversary=adversary, optimisation=options)
        if replayed:
            monkeypatch.setattr(opponent_module, "recorded", Replay)
        model = train(config, small_data(48), model=small_model()).model
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


class _Asked(TorchDispatchMode):
    """Notes operations that would stall a GPU or break a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_", "index_put") and any(
            k is not None and k.dtype == torch.bool for k in args[1]
        )
        if masks or name in (
            "_local_scalar_dense",
            "nonzero",
            "is_nonzero",
            "masked_select",
            "unique",
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ATTACKS)
def test_what_is_recorded_never_asks_the_device_for_a_value(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("wball.inputs", "wball.model"):
        monkeypatch.setattr(f"{place}.recording", lambda _: True)
    x, y = small_data(16)
    attack = ATTACKS[name].at(torch.full((16,), 0.3))
    assert isinstance(attack, GradientAttack)
    if isinstance(attack, PGD):
        monkeypatch.setattr(EntropicProjection, "serves", lambda *_: True)
        monkeypatch.setattr("wball.solvers.entropic.projected_sinkhorn", _Idle)
    draws = torch.Generator()
    with _Asked() as asked:
        batch = AttackBatch(
            small_model(),
            attack.ball,
            x,
            y,
            None,
            objectives.cross_entropy,
            attack.until_success,
            whole=True,
        )
        attack.run(batch, draws)
        batch.finish()
    assert asked.seen == []
    with _Asked() as asked:
        float(x.sum())
    assert asked.seen == ["_local_scalar_dense"]


class _Idle:
    """A projection that costs nothing and does nothing: a kernel asks for no value by itself."""

    kernel = "triton"

    def __init__(self, asked: Projection) -> None:
        self.z, self.u, self.psi = asked.x, asked.u, asked.psi


def test_only_attacks_that_keep_their_batch_on_a_gpu_are_recorded() -> None:
    x = torch.zeros(1, 1, 4, 4)
    assert not can_replay(ATTACK, x)
    assert (
        recorded(PGD(WassersteinBall(0.1), until_success=False), victim(), x, torch.zeros(1).long())
        is None
    )
