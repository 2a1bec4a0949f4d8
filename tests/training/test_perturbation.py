"""Adversarial weight perturbation: where the gradient is taken, and what is left of it afterwards."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from training.worker import small_config, small_data, small_model
from wball.training import Optimisation, train
from wball.training.perturbation import perturbed


def test_weights_go_up_the_gradient_and_come_back() -> None:
    model, (x, y) = small_model(), small_data(16)
    before = copy.deepcopy(model)
    frozen = next(p for p in model.parameters() if p.dim() > 1)
    frozen.requires_grad_(False)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with perturbed(model, 0.01):
        assert F.cross_entropy(model(x), y) > loss
        for now, old in zip(model.parameters(), before.parameters(), strict=True):
            if old.dim() > 1 and now is not frozen:
                assert now.grad is not None
                torch.testing.assert_close((now - old).norm(), 0.01 * old.norm(), rtol=1e-3, atol=0)
                cosine = F.cosine_similarity((now - old).flatten(), now.grad.flatten(), 0)
                assert float(cosine.detach()) == pytest.approx(1.0, abs=1e-4)
            else:
                assert torch.equal(now, old)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )


def test_weights_come_back_after_an_error() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="no"), perturbed(model, 0.5):
        raise RuntimeError("no")
    assert torch.equal(model.weight, before)


def test_the_step_is_taken_with_the_gradient_of_the_perturbed_weights() -> None:
    x, y = small_data(8)
    options = Optimisation(
        lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", perturbation=0.05
    )
    config = small_config(epochs=1, batch_size=8, adversary=None, augment=0, optimisation=options)
    model = small_model()
    expected = copy.deepcopy(model)
    F.cross_entropy(expected(x), y).backward()
    with perturbed(expected, 0.05):
        expected.zero_grad()
        F.cross_entropy(expected(x), y).backward()
    with torch.no_grad():
        for p in expected.parameters():
            assert p.grad is not None
            p -= 0.1 * p.grad
    plain = dataclasses.replace(config, optimisation=dataclasses.replace(options, perturbation=0.0))
    other = train(plain, (x, y), model=copy.deepcopy(model)).model
    found = train(config, (x, y), model=model).model
    for a, b, c in zip(found.parameters(), expected.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(a, c, rtol=1e-4, atol=1e-6)


def test_perturbation_is_checked() -> None:
    with pytest.raises(ValueError, match="perturbation"):
        Optimisation(perturbation=1.5)
