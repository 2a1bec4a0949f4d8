"""The same attack through each interface finds the same examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from problems import Case
from wball import DualAveraging, Normalized, StandardAttack, WassersteinBall, audit
from wball.attacks.adapters.torchattacks import TorchAttack

ATTACK = DualAveraging(WassersteinBall(0.3), steps=6)


def test_torchattacks(case: Case) -> None:
    net, images, labels = case
    atk = TorchAttack(net, ATTACK)
    expected = ATTACK(*case)
    assert torch.equal(atk(images, labels), expected.images)
    assert atk.result is not None and torch.equal(atk.result.success, expected.success)
    target = (net(images).argmax(1) + 1) % 5
    atk.set_mode_targeted_by_label(quiet=True)
    statistics = [value.clone() for value in net.train().buffers()]
    found = atk(images, target)
    assert all(torch.equal(a, b) for a, b in zip(statistics, net.buffers(), strict=True))
    with torch.no_grad():
        assert torch.equal(net.eval()(found).argmax(1) == target, atk.result.success)
    assert atk.result.success.any()
    with pytest.raises(TypeError, match="attack"):
        TorchAttack(net, "pgd")


def test_art(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    pytest.importorskip("art")
    from art.estimators.classification import PyTorchClassifier

    from wball.attacks.adapters import art as adapter

    settings = {"clip_values": (0, 1), "preprocessing": (0.4, 0.5), "device_type": "cpu"}
    classifier = PyTorchClassifier(net, nn.CrossEntropyLoss(), (1, 8, 8), 5, **settings)
    expected = ATTACK(Normalized(net, 0.4, 0.5), images, labels)
    attack = adapter.ArtAttack(classifier, ATTACK)
    found = attack.generate(images.numpy(), labels.numpy())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.images.numpy(), atol=1e-4)
    one_hot = np.eye(5)[labels.numpy()]
    np.testing.assert_array_equal(attack.generate(images.numpy(), one_hot), found)
    wide = attack.generate(images.double().numpy(), labels.numpy())
    assert wide.dtype == np.float64
    assert audit(ATTACK.ball, images.double(), torch.from_numpy(wide)).all_valid
    # through class gradients, as for estimators of other frameworks
    logits = adapter._by_class_gradient(classifier)
    slow = ATTACK(logits, images[:3], labels[:3])
    np.testing.assert_allclose(slow.images.numpy(), found[:3], atol=1e-3)
    # targeted, and without labels
    target = (labels + 1) % 5
    towards = adapter.ArtAttack(classifier, ATTACK, targeted=True)
    towards.generate(images.numpy(), target.numpy())
    assert torch.equal(
        torch.tensor(classifier.predict(towards.result.images.numpy()).argmax(1)) == target,
        towards.result.success,
    )
    assert towards.result.success.any()
    assert attack.generate(images.numpy()).shape == images.shape
    with pytest.raises(ValueError, match="target"):
        towards.generate(images.numpy())


def test_foolbox(case: Case) -> None:
    net, images, labels = case
    foolbox = pytest.importorskip("foolbox")
    from wball.attacks.adapters.foolbox import FoolboxAttack

    fmodel = foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu")
    attack = FoolboxAttack(ATTACK)
    raw, clipped, success = attack(fmodel, images, labels, epsilons=[0.1, 0.3])
    for eps, found, done, result in zip((0.1, 0.3), raw, success, attack.results, strict=True):
        expected = ATTACK.at(eps)(*case)
        torch.testing.assert_close(found, expected.images, atol=1e-5, rtol=0)
        assert torch.equal(done, expected.success) and torch.equal(
            result.distance, expected.distance
        )
    assert torch.equal(clipped[1], raw[1])
    one, _, done = attack(fmodel, images, foolbox.criteria.Misclassification(labels), epsilons=None)
    assert torch.equal(one, raw[1]) and done.shape == (10,)
    target = (net(images).argmax(1) + 1) % 5
    found, _, done = attack(
        fmodel, images, foolbox.criteria.TargetedMisclassification(target), epsilons=0.3
    )
    assert torch.equal(net(found).argmax(1) == target, done) and done.any()
    random = FoolboxAttack(DualAveraging(WassersteinBall(0.1), steps=3, random_start=5.0))
    repeated = random.repeat(3)
    _, _, once = random(fmodel, images, labels, epsilons=None)
    found, _, thrice = repeated(fmodel, images, labels, epsilons=None)
    alone = FoolboxAttack(random.attack, seed=2)(fmodel, images, labels, epsilons=None)[2]
    assert torch.equal(thrice & (once | alone), once | alone)
    assert torch.equal(net(found).argmax(1) != labels, thrice)
    ball = WassersteinBall(0.05)
    ensemble = FoolboxAttack(StandardAttack(ball, version="fast", proofs=True, check=False))
    ensemble(fmodel, images, labels, epsilons=None)
    (result,) = ensemble.results
    assert torch.equal(result.member >= 0, result.success)
    assert not audit(ball, images, result.images, plan=result.proof, exact="needed").exact.any()
    other = foolbox.PyTorchModel(net, bounds=(-1, 1), device="cpu")
    with pytest.raises(ValueError, match="bounds"):
        attack(other, images, labels, epsilons=0.1)
