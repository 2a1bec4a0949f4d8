"""Complete verification agrees with mixed-integer programming, and what it falsifies passes the
audit."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import wball
from certificates.exact import affine_maps, box_margin, network_margin, tiny
from wball.certificates import CertificateStatus, certificate, certify, relaxation
from wball.certificates.complete import bound, search
from wball.certificates.complete.bound import Problems
from wball.certificates.operators import read_graph


def agree(
    found: wball.CertificateResult,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    ball: wball.Ball,
    truth: float,
) -> str:
    """The status' name; fails where it contradicts the truth, up to the tolerances of a solver."""
    status = found.status[0]
    assert found.counterexample is not None
    if status is CertificateStatus.CERTIFIED:
        assert truth > -1e-6 and float(found.margin) > 0
    else:
        assert float(found.margin) <= truth + 1e-6
    if status is CertificateStatus.FALSIFIED:
        assert truth < 1e-6
        assert bool(wball.audit(ball, x, found.counterexample).all_valid)
        assert int(net(found.counterexample).argmax()) != int(y)
    return status.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_agree_with_mixed_integer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image is decided, in seconds of the processor: however busy the machine is."""
    monkeypatch.setattr(time, "monotonic", time.process_time)
    counts: Counter[str] = Counter()
    for seed in range(100, 108):
        net, x, y, eps = tiny(seed)
        ball = wball.WassersteinBall(eps, cost=wball.GridCost(window=5))
        truth = network_margin(net, x[0], int(y), ball)
        found = certify(net, x, y, ball, "complete", time_limit=20.0)
        counts[agree(found, net, x, y, ball, truth)] += 1
    assert not counts["UNKNOWN"] and counts["CERTIFIED"] and counts["FALSIFIED"], counts


@pytest.mark.slow
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_little_memory_costs_answers_and_makes_none_wrong(
    few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public l-inf network, all of whose classes are open at once, ran out of a GPU's
    memory."""
    monkeypatch.setattr(certificate, "_room", lambda x: 1)
    monkeypatch.setattr(search.Search, "attack", lambda *_: None)
    if few:  # gains of a few units a layer
        monkeypatch.setattr(relaxation, "LIMIT", 60)
    sizes: list[int] = []

    def spied(problems: Problems, room: int) -> list[Tensor]:
        parts = bound.together(problems, room)
        sizes.extend(part.shape[0] for part in parts)
        return parts

    monkeypatch.setattr(search, "together", spied)
    for seed, part in ((20, 1.0), (21, 0.8)):
        net, x, y, eps = tiny(seed)
        ball = wball.WassersteinBall(part * eps, cost=wball.GridCost(window=5))
        truth = network_margin(net, x[0], int(y), ball)
        asked = itertools.count()  # steps instead of seconds, however busy the machine is
        monkeypatch.setattr(search, "late", lambda _, asked=asked: next(asked) > 16)
        agree(certify(net, x, y, ball, "complete", time_limit=60.0), net, x, y, ball, truth)
    assert len(sizes) >= 3 and set(sizes) == {1}


def test_time_is_limited_and_what_was_proved_is_kept() -> None:
    net, x, y, _ = tiny(3)
    ball = wball.WassersteinBall(0.05)
    plain = certify(net, x, y, ball, "crown")
    asked = itertools.count()
    with pytest.MonkeyPatch.context() as patch:  # steps instead of seconds
        patch.setattr(search, "late", lambda _: next(asked) > 1)
        hurried = certify(net, x, y, ball, "complete")
    assert float(hurried.margin) >= float(plain.margin)
    stopped = certify(net, x, y, ball, "complete", time_limit=1e-9)
    assert stopped.status == (CertificateStatus.UNKNOWN,) and float(stopped.seconds.sum()) < 60
    with pytest.raises(ValueError, match="time_limit"):
        certify(net, x, y, ball, "complete", time_limit=0.0)


def covers(leaves: list[tuple[tuple[int, int, int], ...]]) -> bool:
    """Whether parts are all leaves of one tree of splits."""
    if () in leaves:
        return len(leaves) == 1
    common = (
        set.intersection(*({split[:2] for split in leaf} for leaf in leaves)) if leaves else set()
    )
    for unit in common:
        halves = [
            [tuple(s for s in leaf if s[:2] != unit) for leaf in leaves if (*unit, sign) in leaf]
            for sign in (1, -1)
        ]
        if all(covers(half) for half in halves):
            return True
    return False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_parts_of_a_tree_cover_the_ball() -> None:
    """Every certified image keeps the parts it was split into: none is missing, slopes are in
    range."""
    largest = 0
    for seed in (181, 21, 251):
        net, x, y, eps = tiny(seed)
        found = certify(
            net,
            x,
            y,
            wball.WassersteinBall(eps, cost=wball.GridCost(window=5)),
            "complete",
            time_limit=60.0,
        )
        leaves = found.leaves[0]
        if leaves is None:
            continue
        assert bool(found.certified[0])
        for other in {leaf.other for leaf in leaves}:
            mine = [leaf for leaf in leaves if leaf.other == other]
            assert covers([leaf.splits for leaf in mine]), (seed, other)
            largest = max(largest, len(mine))
        for leaf in leaves:
            assert all(float(s.min()) >= 0 and float(s.max()) <= 1 for s in leaf.slopes.values())
            assert len(leaf.prices) == len(leaf.splits) and all(price >= 0 for price in leaf.prices)
    assert largest >= 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_over_boxes_agree_with_mixed_integer_programs() -> None:
    names = set()
    for seed in range(6):
        net, x, y, eps = tiny(seed)
        ball = wball.LinfBall(eps / 4)
        truth = box_margin(affine_maps(net), x.flatten().double().numpy(), int(y), eps / 4)
        name = agree(certify(net, x, y, ball, "complete", time_limit=20.0), net, x, y, ball, truth)
        assert name != "UNKNOWN" or abs(truth) < 1e-4, f"seed {seed}: margin {truth}"
        names.add(name)
    assert names >= {"CERTIFIED", "FALSIFIED"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_images_closest_to_certification_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that an image does not need is shared by those after it."""
    asked: list[tuple[int, float]] = []
    net, x, y, eps = tiny(3)
    x, y = x.repeat(4, 1, 1, 1), y.repeat(4)
    ball = wball.WassersteinBall(eps, cost=wball.GridCost(window=5))
    nothing = search.Answer.start(x, torch.zeros(4, dtype=torch.float64))
    searching = search.Search(net, read_graph(net, x), ball, "full", x, y, 2**22, 2**31, nothing)
    monkeypatch.setattr(search.Search, "attack", lambda *_: None)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)

    def spend(self: search.Search, image: Tensor, seconds: float) -> None:
        asked.append((int(image), seconds))
        self.answer.seconds[image] += min(seconds, 1.0 if int(image) == 2 else 100.0)

    monkeypatch.setattr(search.Search, "search", spend)
    margin = torch.tensor([-3.0, -0.5, -0.1, -7.0], dtype=torch.float64)
    searching.decide(margin, 10.0, 1)
    assert asked == [(2, 10.0), (1, 13.0), (0, 13.0), (3, 13.0)]
