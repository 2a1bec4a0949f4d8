"""``python -m wball.demo``: evaluate bundled models on bundled digits, and write a report.

This is ``wball evaluate`` with settings that take a minute on two cores: few images and the fast
version of the standard attack. The numbers are as precise as few images allow: the report shows
confidence intervals. One model was trained for certificates; its certified accuracy is shown, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wball.ball import WassersteinBall
from wball.data import dataset_info, load_sample
from wball.evaluation import evaluate, exit_code
from wball.evaluation.requirements import EXIT_CLAIMS
from wball.report import write_report
from wball.zoo import load_model

RADII = (0.05, 0.1, 0.2, 0.3)
MODELS = ("mnist-standard", "mnist-adversarial-cnn", "mnist-certified")
"""The paper's network, trained in three ways."""
CERTIFIED = "mnist-certified"
"""The model that is certified, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return 0 if every example passed the audit, 3 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m wball.demo", description="Evaluate the bundled models."
    )
    parser.add_argument("--images", type=int, default=16, help="number of digits (default 16)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder to write to (default out/demo)"
    )
    options = parser.parse_args(arguments)
    if options.images < 1:
        parser.error(f"--images must be at least 1, got {options.images}")
    console, start = Console(highlight=False, soft_wrap=True), time.perf_counter()
    x, y = load_sample("mnist")
    x, y = x[: options.images], y[: options.images]
    ball = WassersteinBall(RADII[-1])
    console.print(
        f"{len(x)} digits, {len(MODELS)} models. An attacker may move mass within 5 x 5 pixels at radii "
        f"{', '.join(f'{r:g}' for r in RADII)} ({ball.unit}); pixels stay in [0, 1].\n",
        markup=False,
    )
    results = []
    for name in MODELS:
        result = evaluate(
            load_model(name),
            x,
            y,
            ball,
            RADII,
            "fast",
            certify=name == CERTIFIED,
            out=options.out / name,
            name=name,
            data="bundled MNIST sample",
            classes=dataset_info("mnist").classes,
            overwrite=True,
            progress=console.is_terminal,
        )
        console.print(result.table())
        console.print(f"{result.verdict()}\n", markup=False)
        results.append(result)
    report = write_report(results, options.out / "report.html")
    console.print(
        f"Open {report} in a browser.    ({time.perf_counter() - start:.1f} s)", markup=False
    )
    code = exit_code(results)
    return (
        code if code == EXIT_CLAIMS else 0
    )  # a model whose evaluation is not reliable is part of the demonstration


if __name__ == "__main__":
    raise SystemExit(main())
