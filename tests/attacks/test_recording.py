"""Recorded steps are the steps of the loop. Without a GPU a recording makes the same calls
again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from problems import Case
from wball import AttackResult, DualAveraging, FrankWolfe, WassersteinBall
from wball.attacks import Attack, recording

ATTACKS: dict[str, Attack] = {
    "dual averaging": DualAveraging(WassersteinBall(0.3), steps=20, decay=1.0),
    "with plans, to the end": DualAveraging(
        WassersteinBall(0.3), steps=15, random_start=1.0, proofs=True, until_success=False
    ),
    "batches that become smaller": DualAveraging(WassersteinBall(0.3), steps=40, step_size=0.2),
    "at noisy images": DualAveraging(WassersteinBall(0.3), steps=20, noise=0.2, clearly=1e-2),
    "frank-wolfe": FrankWolfe(WassersteinBall(0.3), steps=15, until_success=False),
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records on the CPU, too; counts recordings and replays."""
    counts = [0, 0]

    def again(function: Callable[[], None], *_: Any) -> Callable[[], None]:
        counts[0] += 1

        def replay() -> None:
            counts[1] += 1
            function()

        return replay

    monkeypatch.setitem(recording.RECORDERS, "cpu", again)
    return counts


def same(a: AttackResult, b: AttackResult) -> None:
    for name in ("images", "success", "distance", "loss", "n_steps", "radius", "queries"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.status, a.kernel) == (b.status, b.kernel)
    assert (a.proof is None) == (b.proof is None)
    if a.proof is not None and b.proof is not None:
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(a.proof.tensors(), b.proof.tensors(), strict=True)
        )


@pytest.mark.parametrize("name", ATTACKS)
def test_a_recorded_attack_returns_what_the_attack_returns(
    name: str,
    case: Case,
    replays: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wball.attacks.base.DROP_FROM", {"cpu": 0.5})
    recorded = ATTACKS[name](*case)
    made, used = replays
    assert made > 0 and used > made
    monkeypatch.delitem(recording.RECORDERS, "cpu")
    same(recorded, ATTACKS[name](*case))
    assert replays == [made, used]


@pytest.mark.gpu
def test_a_failed_recording_gives_memory_and_randomness_back() -> None:
    """The allocator took it for one under way, and kept what every later recording had used."""
    device = torch.device("cuda", torch.cuda.current_device())
    draws = torch.Generator(device).manual_seed(0)

    def reads() -> None:
        torch.randn(4, 2**20, device=device).cpu()

    def stays() -> None:
        torch.randn(64, 2**20, device=device, generator=draws)

    with pytest.raises(RuntimeError):
        recording.cuda_graph(reads, device, draws)
    torch.randn(3, device=device)
    torch.randn(3, device=device, generator=draws)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    for _ in range(3):
        recording.cuda_graph(stays, device, draws)()
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before + 2**25


def forgetful(net: nn.Module, slip: int) -> Callable[[Tensor], Tensor]:
    """A model that answers otherwise when it is asked again, by what it remembers."""
    asked = count(1)
    return lambda x: net(x if next(asked) < slip else 0.3 * x.flip(-1))


@pytest.mark.usefixtures("replays")
def test_a_recording_that_does_something_else_is_refused(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    attack = DualAveraging(WassersteinBall(0.3), steps=12, until_success=False)
    with pytest.warns(
        RuntimeWarning, match="not replayed as a CUDA graph.*a replay differs from the step itself"
    ):
        refused = attack(forgetful(net, 6), images, labels)
    assert refused.success.shape == labels.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attack(forgetful(net, 1000), images, labels)


def test_an_attack_goes_on_where_its_steps_cannot_be_recorded(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = ATTACKS["with plans, to the end"]
    expected = attack(*case)

    def fails(function: Callable[[], None], *_: Any) -> Callable[[], None]:
        function()  # leaves something in the books
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(recording.RECORDERS, "cpu", fails)
    with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing"):
        same(attack(*case), expected)


class Reading(nn.Module):
    """A model that reads from the device."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * (1.0 if float(x.sum()) >= 0 else -1.0))  # type: ignore[no-any-return]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ATTACKS)
def test_graphs_on_a_gpu(
    name: str, net: nn.Module, images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, y = net.cuda(), images.cuda().repeat(8, 1, 1, 1), labels.cuda().repeat(8)
    graphs: list[object] = []
    record = recording.cuda_graph
    monkeypatch.setitem(
        recording.RECORDERS, "cuda", lambda *given: graphs.append(given) or record(*given)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded = ATTACKS[name](net, x, y)
    assert graphs
    with pytest.warns(RuntimeWarning, match="not replayed as a CUDA graph"):
        reading = ATTACKS[name](Reading(net), x, y)
    monkeypatch.delitem(recording.RECORDERS, "cuda")
    plain = ATTACKS[name](net, x, y)
    for result in (recorded, reading):
        assert float((result.success == plain.success).double().mean()) >= 0.95
        assert (
            float(((result.images - plain.images).flatten(1).abs().amax(1) <= 1e-3).double().mean())
            >= 0.9
        )


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("fails", [3, 4, 5])
def test_an_error_of_any_step_is_that_of_the_attack(
    fails: int, net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    """The step that is recorded is one of them."""
    asked = 0

    def fails_once(x: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        if asked == fails:
            raise RuntimeError("the model's own error")
        return net(x)  # type: ignore[no-any-return]

    attack = DualAveraging(WassersteinBall(0.3), steps=20, until_success=False)
    with pytest.raises(RuntimeError, match="the model's own error"):
        attack(fails_once, images, labels)
