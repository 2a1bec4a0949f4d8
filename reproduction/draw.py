"""Figures in the style of the paper, from stored results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reproduction.tables import unpack
from wball.report.figures import COLOURS, MARKERS, WIDTH, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = list[dict[str, float]]


def curves(
    panels: Sequence[tuple[str, Sequence[tuple[str, Curve]]]],
    unit: str,
    *,
    log: bool = False,
    share_radius: bool = True,
    line_styles: dict[str, str] | None = None,
) -> Figure:
    """Accuracy against eps, one panel per attack or data set, the same colour for the same label
    throughout."""
    with style():
        columns = min(2, len(panels))
        lines = -(-len(panels) // columns)
        order = list(dict.fromkeys(label for _, shown in panels for label, _ in shown))
        figure = new_figure((WIDTH * columns, 0.72 * WIDTH * lines + 0.15 * -(-len(order) // 3)))
        axes = figure.subplots(lines, columns, squeeze=False, sharey=True, sharex=share_radius)
        radii = [
            p["eps"] for _, shown in panels for _, curve in shown for p in curve if p["eps"] > 0
        ]
        known = {}
        for axis, (title, shown) in zip(axes.flat, panels, strict=False):
            for label, curve in shown:
                number = order.index(label)
                eps = [p["eps"] for p in curve]
                (known[label],) = axis.plot(
                    eps,
                    [100 * p["accuracy"] for p in curve],
                    label=label,
                    lw=1.4,
                    ms=2.6,
                    ls=(line_styles or {}).get(label, "-"),
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                )
            axis.set_title(title, fontsize=8)
            axis.set(ylim=(-2, 102))
            if log:
                axis.set_xscale("symlog", linthresh=min(radii))  # linear near 0, the clean accuracy
            axis.set_xlim(left=0)
        for axis in axes[:, 0]:
            axis.set_ylabel("accuracy (%)")
        for axis in axes[-1, :]:
            axis.set_xlabel(rf"radius $\epsilon$ ({unit})")
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        # Below the panels: inside it would hide lines, and no panel need have them all.
        figure.legend(
            known.values(),
            known.keys(),
            loc="outside lower center",
            ncols=min(3, len(known)),
            fontsize=6.5,
        )
        return figure


def sums(
    rows: Sequence[tuple[str, dict[str, Any], dict[str, Any], str]],
    *,
    columns: int = 1,
    scale: float | None = None,
) -> Figure:
    """``original + change = example``, row by row; changes (summed over channels) on one diverging
    scale."""
    with style():
        images = [(unpack(a), unpack(b)) for _, a, b, _ in rows]
        top = scale or max(float(np.abs((b - a).sum(0)).max()) for a, b in images) or 1.0
        lines = -(-len(rows) // columns)
        tall = max(0.4, *(x.shape[-2] / x.shape[-1] for x, _ in images))
        figure = new_figure((0.9 * WIDTH * columns, 0.33 * WIDTH * lines * tall))
        widths = ([1.0, 1.0, 1.0, 0.15] * columns)[:-1]  # a gap between one sum and the next
        grid = figure.subplots(lines, len(widths), squeeze=False, width_ratios=widths)
        for axis in list(grid.flat):
            axis.set_visible(False)
        picture: Any = None
        for k, ((title, _, _, note), (x, z)) in enumerate(zip(rows, images, strict=True)):
            line, column = k % lines, 4 * (k // lines)
            a, b, c = grid[line, column : column + 3]
            for axis in (a, b, c):
                axis.set_visible(True)
            _show(a, x)
            picture = b.imshow(
                (z - x).sum(0), cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest"
            )
            _frame(b)
            _show(c, z)
            a.set_title(title, fontsize=6.5, loc="left", pad=2)
            c.set_title(note, fontsize=6.5, loc="right", pad=2)
            for axis, sign in ((b, "+"), (c, "=")):
                axis.text(-0.12, 0.5, sign, transform=axis.transAxes, ha="center", va="center")
        bar = figure.colorbar(
            picture, ax=grid, shrink=0.8, aspect=25 if tall > 0.5 else 8, pad=0.02
        )
        bar.ax.tick_params(labelsize=6)
        bar.set_label("change of a pixel", fontsize=6.5)
        return figure


def grid(cells: Sequence[dict[str, Any]], shown: int) -> Figure:
    """Examples by lambda (rows) and p (columns), with the radius of each; ``shown`` is the number
    of the digit."""
    with style():
        lambdas = list(dict.fromkeys(c["lambda"] for c in cells))
        powers = list(dict.fromkeys(c["p"] for c in cells))
        figure = new_figure((1.6 * WIDTH, 1.75 * WIDTH * len(lambdas) / max(1, len(powers))))
        axes = figure.subplots(len(lambdas), len(powers), squeeze=False)
        for cell in cells:
            axis = axes[lambdas.index(cell["lambda"]), powers.index(cell["p"])]
            _show(axis, unpack(cell["image"]))
            radius = cell["radius"][shown]
            axis.set_title(
                "not found" if radius is None else rf"$\epsilon$ = {radius:.2f}",
                fontsize=6.5,
                pad=2,
            )
        for k, reg in enumerate(lambdas):
            axes[k, 0].set_ylabel(rf"$\lambda$ = {reg:g}", fontsize=7)
        for k, p in enumerate(powers):
            axes[-1, k].set_xlabel(f"p = {p:g}", fontsize=7)
        return figure


def _show(axis: Any, image: Any) -> None:
    pixels = np.moveaxis(image, 0, -1) if len(image) == 3 else image[0]
    axis.imshow(np.clip(pixels, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    _frame(axis)


def _frame(axis: Any) -> None:
    """A thin frame instead of ticks: white pixels at the edge would run into the page."""
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set(visible=True, linewidth=0.4, color="#888888")
