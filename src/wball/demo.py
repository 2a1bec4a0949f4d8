"""``python -m wball.demo``: move a little mass inside ten digits, and see what a classifier makes of it.

Two ways into the ball, both without a download: its farthest point along the gradient of the loss (one call of
``support``), and a few steps up that gradient, each followed by the projection back onto the ball (``project``). Every
image is then audited by exact optimal transport.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from wball.audit import AuditReport, audit
from wball.ball import WassersteinBall
from wball.data import load_sample
from wball.zoo import load_model


def one_of_each_class(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The first digit of each class in the bundled sample that the model gets right."""
    x, y = load_sample("mnist")
    with torch.no_grad():
        right = model(x).argmax(1) == y
    index = torch.stack([torch.nonzero(right & (y == digit))[0, 0] for digit in range(10)])
    return x[index], y[index]


def loss_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the cross-entropy, scaled to a largest entry of 1 per image."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return g / g.flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, 1, 1, 1)


def climb(ball: WassersteinBall, model: nn.Module, x: Tensor, y: Tensor, steps: int, size: float = 0.3) -> Tensor:
    """Projected gradient ascent, warm-started from step to step.

    A little entropy (``reg``) makes the projection several times faster; the point is in the ball all the same.
    """
    z, duals = x, None
    for _ in range(steps):
        result = ball.project(x, z + size * loss_gradient(model, z, y), reg=1e4, init=duals)
        z, duals = result.point, result.duals
    return z


def show(console: Console, title: str, model: nn.Module, y: Tensor, z: Tensor, report: AuditReport) -> None:
    with torch.no_grad():
        confidence, predicted = model(z).softmax(1).max(1)
    table = Table(title=title, title_justify="left")
    for heading in (
        "digit",
        "read as",
        "confidence",
        f"distance ({report.unit})",
        "mass error (of mass)",
        "box violation (pixel value)",
        "audit",
    ):
        table.add_column(heading, justify="right")
    for i in range(len(y)):
        fooled = bool(predicted[i] != y[i])
        table.add_row(
            str(int(y[i])),
            f"[bold red]{int(predicted[i])}[/]" if fooled else str(int(predicted[i])),
            f"{100 * float(confidence[i]):.1f} %",
            f"{float(report.distance[i]):.4f}",
            f"{float(report.mass_error[i]):.1e}",
            f"{float(report.box_violation[i]):.1e}",
            "valid" if bool(report.valid[i]) else "[bold red]INVALID[/]",
        )
    console.print(table)
    console.print(f"  {int((predicted != y).sum())} of {len(y)} fooled, {int(report.valid.sum())} of {len(y)} valid\n")


def save_picture(path: Path, rows: Sequence[tuple[str, Tensor]]) -> None:
    """One row of images each, as grey-scale PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install wball[report]") from error

    count = len(rows[0][1])
    figure = Figure(figsize=(1.1 * count, 1.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, images) in zip(figure.subplots(len(rows), count), rows, strict=True):
        for axis, image in zip(axes, images, strict=True):
            axis.imshow(image[0].cpu().numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        axes[0].set_ylabel(label, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 if every image passed the audit."""
    parser = argparse.ArgumentParser(prog="python -m wball.demo", description="Move mass inside ten digits.")
    parser.add_argument("--eps", type=float, default=0.3, help="radius, in mass fraction x pixels (default 0.3)")
    parser.add_argument("--steps", type=int, default=5, help="steps of projected gradient ascent (default 5)")
    parser.add_argument("--model", default="mnist-standard", help="a model of the zoo (default mnist-standard)")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the picture (default out/demo.png)")
    options = parser.parse_args(arguments)

    console, start = Console(), time.perf_counter()
    ball, model = WassersteinBall(options.eps), load_model(options.model)
    x, y = one_of_each_class(model)
    console.print(
        f"Ten digits that {options.model} reads right; an attacker may move mass at a cost of {options.eps:g} "
        f"({ball.unit};\n5 x 5 window, Euclidean distance), and no pixel may leave [0, 1].\n",
        markup=False,
    )
    rows, valid = [("original", x)], True
    for title, z in (
        ("farthest point", ball.support(x, loss_gradient(model, x, y)).point),
        (f"{options.steps} projected steps", climb(ball, model, x, y, options.steps)),
    ):
        report = audit(ball, x, z)
        show(console, title, model, y, z, report)
        rows.append((title, z))
        valid &= bool(report.valid.all())
    save_picture(options.out, rows)
    console.print(f"Picture: {options.out}    ({time.perf_counter() - start:.1f} s)")
    return 0 if valid else 1


if __name__ == "__main__":
    raise SystemExit(main())
