"""Figures for papers, from evaluations: accuracy against eps, and examples with their
perturbations.

Each function returns a matplotlib figure; :func:`save_figures` writes all of them. Fonts are
embedded as text; the width is that of one column.
"""

from __future__ import annotations

import io
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wball.evaluation.result import Evaluation, Evaluations
from wball.provenance import Plain
from wball.report.pictures import strongest
from wball.storage.files import PathLike, write_whole
from wball.storage.names import file_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 3.4
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07900", "#56b4e9", "#777777")
"""The colours of the page (``style.css``)."""
BANDS = 3
"""Evaluations up to which intervals are drawn as bands."""
MARKERS = "osD^vPX"
FORMATS = ("pdf", "png", "svg")
STYLE: Plain = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "wball",
    "savefig.dpi": 300,
}


def accuracy_figure(evaluations: Evaluations) -> Figure:
    """Accuracy against eps, one line per evaluation with its 95 % intervals as a band; certified
    accuracy dotted in the same colour."""
    figure = new_figure((WIDTH, 0.72 * WIDTH))
    axes = figure.subplots()
    for k, e in enumerate(evaluations):
        points = e.curve()
        style: Plain = {
            "color": COLOURS[k % len(COLOURS)],
            "marker": MARKERS[k % len(MARKERS)],
        }
        eps = [p.eps for p in points]
        if len(evaluations) <= BANDS:
            low, high = ([100 * p.interval[end] for p in points] for end in (0, 1))
            axes.fill_between(eps, low, high, color=style["color"], alpha=0.1, lw=0)
        axes.plot(
            eps, [100 * p.accuracy for p in points], label=plain(e.name), lw=1.5, ms=3.5, **style
        )
        proved = [100 * p.certified for p in points if p.certified is not None]
        if proved:
            axes.plot(
                eps, proved, ls=":", lw=1.5, ms=3, label=plain(f"{e.name} (certified)"), **style
            )
    axes.set(
        xlabel=rf"radius $\epsilon$ ({evaluations[0].unit})",
        ylabel="robust accuracy (%)",
        ylim=(-2, 102),
    )
    axes.set_xlim(left=0)
    axes.legend()
    return figure


def examples_figure(evaluation: Evaluation, count: int = 6) -> Figure:
    """Originals, perturbations on one scale, and adversarial images, from small to large
    distances."""
    index = evaluation.examples["index"]
    if len(index) == 0 or evaluation.examples["original"].ndim != 4:
        raise ValueError(f"{evaluation.name} has no examples that are images: nothing can be drawn")
    order = evaluation.images["distance"][index].argsort()
    chosen = order[torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()]
    x, z = (evaluation.examples[name][chosen].float() for name in ("original", "adversarial"))
    change = strongest(z - x)
    scale = float(change.abs().max()) or 1.0
    figure = new_figure((WIDTH, 0.62 * WIDTH * 3 / max(3, len(chosen)) * 1.9))
    grid = figure.subplots(3, len(chosen), squeeze=False)
    picture: Any = None
    for k, i in enumerate(index[chosen].tolist()):
        for row, pixels in ((0, x[k]), (2, z[k])):
            shown = pixels.permute(1, 2, 0) if len(pixels) == 3 else pixels[0]
            grid[row, k].imshow(
                shown.clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest"
            )
        picture = grid[1, k].imshow(
            change[k].numpy(), cmap="RdBu_r", vmin=-scale, vmax=scale, interpolation="nearest"
        )
        label, read_as = (
            _cut(evaluation.class_name(int(evaluation.images[name][i])))
            for name in ("label", "read_as")
        )
        grid[0, k].set_title(plain(f"{label}\n→ {read_as}"), fontsize=5, pad=2)
        distance = float(evaluation.images["distance"][i])
        grid[2, k].set_xlabel(f"{distance:.3g}", fontsize=7, labelpad=2)
    for axis in grid.flat:
        axis.set(xticks=[], yticks=[])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    figure.colorbar(picture, ax=grid[1, :], shrink=0.9, aspect=8, pad=0.02).ax.tick_params(
        labelsize=6
    )
    return figure


def save_figures(evaluations: Evaluations, folder: PathLike, kind: str = "pdf") -> list[Path]:
    """Write all figures of the evaluations, as ``pdf``, ``png`` or ``svg``, and return the
    paths."""
    if not evaluations:
        raise ValueError("evaluations is empty: there is nothing to draw")
    if kind not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, got {kind!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        figures = {"accuracy": accuracy_figure(evaluations)}
        for e in evaluations:
            if e.examples and len(e.examples["index"]) and e.examples["original"].ndim == 4:
                numbered = (
                    f"examples-{file_name(e.name)}" + (f"-{k}" if k > 1 else "") for k in count(1)
                )
                figures[next(name for name in numbered if name not in figures)] = examples_figure(e)
        return [save_figure(made, folder / f"{name}.{kind}") for name, made in figures.items()]


def save_figure(figure: Figure, path: Path, dpi: int | None = None) -> Path:
    """Write a figure atomically and without a date, so that equal figures give equal bytes."""
    kind, content = path.suffix.removeprefix("."), io.BytesIO()
    stamp = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with style():  # which fonts are embedded, and how, is decided here
        figure.savefig(content, format=kind, metadata=stamp, bbox_inches="tight", dpi=dpi)
    write_whole(path, content.getvalue())
    return path


def _cut(name: str) -> str:
    return name if len(name) <= 12 else f"{name[:11]}…"


def plain(text: str) -> str:
    """Escape text for matplotlib, which reads dollar signs as mathematics and hides labels that
    begin with _."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def new_figure(size: tuple[float, float]) -> Figure:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style() -> Any:
    """Context with the settings of all figures."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install wball[report]") from error
    return matplotlib.rc_context(STYLE)
