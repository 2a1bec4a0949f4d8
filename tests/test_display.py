"""What results show of themselves in a session and in a notebook."""

from __future__ import annotations

import torch
from torch import nn

import wball


def test_results_are_short_in_a_session_and_a_table_in_a_notebook() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5, 1, 6, 6, generator=generator)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2)).eval()
    y = model(x).argmax(1)
    ball = wball.WassersteinBall(0.3)
    attack = wball.DualAveraging(ball, steps=3)
    attacked = attack(model, x, y)
    certified = wball.certify(model, x, y, ball.at(0.001), "crown")
    evaluated = wball.evaluate(model, x, y, ball, [0.1, 0.3], attack, name="small <net>")
    smallest = wball.minimal_radius(model, x, y, attack, hi=0.3, rounds=2)
    for result, words in (
        (
            attacked,
            ("AttackResult", f"robust accuracy {100 * attacked.robust_accuracy:.1f} %", "images 5"),
        ),
        (certified, ("CertificateResult", "certified accuracy", "plans full")),
        (evaluated, ("Evaluation", "model small <net>", "robust accuracy at 0.3", "reliable")),
        (smallest, ("MinimalRadius", f"broken {int(smallest.success.sum())}")),
        (wball.audit(ball, x, x), ("AuditReport", "valid 5")),
        (ball.project(x, x.flip(3)), ("ProjectionResult", "converged 5")),
    ):
        assert len(repr(result)) < 250 and "\n" not in repr(result) and "tensor" not in repr(result)
        assert all(word in repr(result) for word in words)
        assert result._repr_html_().startswith("<table>") and "images" in result._repr_html_()
