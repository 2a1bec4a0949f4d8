"""``python -m benchmarks art``: the ``Wasserstein`` attack of the Adversarial Robustness Toolbox.

A NumPy port of the 2019 code, the most used one. It is run with its defaults and with the paper's
settings, on a few digits, because it takes seconds a step. A row has the share of pixels that are
not numbers, how many digits it breaks, how many of these are in the ball at the largest radius
tried, and the warnings that NumPy gives. The toolbox is not a dependency: install it
(``pip install adversarial-robustness-toolbox``).
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch

import wball
from benchmarks.frame import Result, options

DEFAULTS: dict[str, Any] = {"norm": "wasserstein", "p": 2, "regularization": 3000.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": DEFAULTS,
    "paper": {"norm": "inf", "p": 1, "regularization": 1000.0},
}
EPS, FACTOR, EVERY = 0.3, 1.1, 10
"""First radius, and how it grows: the defaults of the toolbox, and the paper's on MNIST."""


def main(arguments: list[str] | None = None) -> None:
    parser = options("art", __doc__)
    parser.add_argument("--model", default="mnist-standard", help="network to attack")
    parser.add_argument("--images", type=int, default=10, help="number of bundled digits")
    parser.add_argument("--steps", type=int, default=100, help="steps of the attack")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    given = parser.parse_args(arguments)
    from art import __version__
    from art.attacks.evasion import Wasserstein
    from art.estimators.classification import PyTorchClassifier

    result = Result("art", given, model=given.model, steps=given.steps, art=__version__)
    model = wball.load_model(given.model, root=given.models).eval()
    x, y = (part[: given.images] for part in wball.load_sample("mnist"))
    loss = torch.nn.CrossEntropyLoss()
    classifier = PyTorchClassifier(model, loss, x.shape[1:], 10, clip_values=(0, 1))
    for name in given.only:
        if result.has(settings=name, images=len(x)):
            continue
        attack = Wasserstein(
            classifier, eps=EPS, eps_factor=FACTOR, eps_iter=EVERY, max_iter=given.steps,
            batch_size=len(x), verbose=False, **SETTINGS[name],
        )  # fmt: skip
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught, np.errstate(all="warn"):
            warnings.simplefilter("always")
            z = torch.from_numpy(attack.generate(x.numpy(), y.numpy())).float()
        seconds = time.perf_counter() - begin
        numbers = z.isfinite().flatten(1).all(1)
        eps = EPS * FACTOR ** ((given.steps - 1) // EVERY)
        ball = wball.WassersteinBall(eps, wball.GridCost(5, float(SETTINGS[name]["p"])))
        with torch.no_grad():
            wrong = numbers & (model(z.nan_to_num()).argmax(1) != y)
        valid = [
            bool(wball.audit(ball, x[i : i + 1], z[i : i + 1]).all_valid)
            for i in wrong.nonzero()[:, 0].tolist()
        ]
        told = {str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)}
        result.add({
            "settings": name, "images": len(x), "eps": round(eps, 4), "wrong": int(wrong.sum()),
            "valid": sum(valid), "digits_not_numbers": int((~numbers).sum()),
            "pixels_not_numbers": float((~z.isfinite()).double().mean()),
            "largest_mass_error": float((z.sum((1, 2, 3)) / x.sum((1, 2, 3)) - 1).nan_to_num().abs().max()),
            "warnings": sorted(told), "seconds": round(seconds, 1),
        })  # fmt: skip
