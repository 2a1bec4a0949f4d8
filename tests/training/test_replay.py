"""An attack recorded and replayed. Without a GPU the recording is a stand-in that runs the same calls again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from training.worker import small_config, small_data, small_model
from wball import PGD, DualAveraging, WassersteinBall
from wball.attacks import objectives
from wball.attacks.base import Climb
from wball.training import Adversary, Optimisation, train
from wball.training import opponent as opponent_module
from wball.training.replay import Replay, can_replay, recorded

ATTACK = DualAveraging(WassersteinBall(0.4), steps=4, until_success=False, random_start=1.0, sweeps=2)


class _Stream:
    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


class _Graph:
    """What ``torch.cuda.CUDAGraph`` does, by calling again."""

    again: Any = None

    def register_generator_state(self, _: torch.Generator) -> None: ...

    def replay(self) -> None:
        self.again()


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(*_: Any) -> Any:
        yield

    for name, value in {
        "CUDAGraph": _Graph, "Stream": _Stream, "current_stream": _Stream, "stream": nothing, "graph": nothing
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    once = Replay._once

    def wired(self: Replay) -> tuple[torch.Tensor, torch.Tensor]:
        def again() -> None:
            z, success = once(self)
            self._z.copy_(z)
            self._success.copy_(success)

        self._graph.again = again  # type: ignore[attr-defined]
        return once(self)

    monkeypatch.setattr(Replay, "_once", wired)


@pytest.mark.usefixtures("standing_in")
def test_replays_are_the_attack_at_each_radius_seed_and_state_of_the_network() -> None:
    model = small_model().train()
    x, y = small_data(48)
    replay = Replay(ATTACK, model, x[:16], y[:16])
    eps = torch.linspace(0, 0.4, 16, dtype=torch.float64)
    for k, radius in ((1, eps), (2, 0.3), (2, eps.flip(0))):
        part = slice(16 * k, 16 * k + 16)
        draws = torch.Generator().manual_seed(k)
        expected = ATTACK.at(radius)(model, x[part], y[part], generator=draws)
        z, success = replay(x[part], y[part], radius, k)
        assert torch.equal(z, expected.images) and torch.equal(success, expected.success)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert model.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.usefixtures("standing_in")
def test_a_recording_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = small_data(16)
    monkeypatch.setattr("wball.training.replay.can_replay", lambda attack, x: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(_Graph, "replay", lambda self: None)
    monkeypatch.setattr(Replay, "_once", lambda self: (self._x.clone(), torch.zeros_like(self._y, dtype=torch.bool)))
    with pytest.warns(RuntimeWarning, match="not replayed as a CUDA graph: a replay raises the mean loss"):
        assert recorded(ATTACK, small_model(), x, y) is None


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize("radius", ["fixed", "uniform", "per-image"])
def test_training_with_replays_ends_with_the_same_weights(monkeypatch: pytest.MonkeyPatch, radius: str) -> None:
    ends = []
    for replayed in (False, True):
        options = Optimisation(lr=0.05, schedule="one-cycle", cuda_graph=replayed)
        config = small_config(epochs=2, adversary=Adversary(ATTACK, radius, ramp=0.5), optimisation=options)  # type: ignore[arg-type]
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
        if masks or name in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_what_is_recorded_never_asks_the_device_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wball.attacks.base.check_classes", lambda *_: None)  # it looks at no label while recording
    x, y = small_data(16)
    attack = DualAveraging(WassersteinBall(torch.full((16,), 0.3)), steps=3, until_success=False, random_start=1.0)
    draws = torch.Generator()
    with _Asked() as asked:
        climb = Climb(small_model(), attack.ball, x, y, None, objectives.cross_entropy, False)
        attack.run(climb, draws)
        climb.finish()
    assert asked.seen == []
    with _Asked() as asked:
        float(x.sum())
    assert asked.seen == ["_local_scalar_dense"]


def test_only_attacks_that_keep_their_batch_on_a_gpu_are_recorded() -> None:
    x = torch.zeros(1, 1, 4, 4)
    assert not can_replay(ATTACK, x)
    assert recorded(PGD(WassersteinBall(0.1), until_success=False), small_model(), x, torch.zeros(1).long()) is None
