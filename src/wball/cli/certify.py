"""``wball certify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from wball.cli import choices, options
from wball.cli.app import command, open_console, print_json
from wball.cli.models import load_models
from wball.storage.names import printable


@command
def certify(
    *,
    model: options.OneModel,
    files: options.ModelFiles,
    pictures: options.DataChoice,
    eps: Annotated[
        str,
        options.threat_option("--eps", "-e", metavar="X,...", help="radii, separated by commas"),
    ] = "0.005,0.01,0.02",
    cost: options.GroundCost,
    method: options.Certificate = "anchored",
    plans: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="full (any transport plan) or window (moves within the window only)",
        ),
    ] = "full",
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        options.output_option("--out", "-o", help="file for accuracies and margins, .json"),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> int:
    """Prove that no image in the ball changes the model's prediction.

    Certified accuracy of a few images (default: 10) at each radius, for any transport plan
    unless --plans window is given:

        wball certify mnist-standard --limit 4 --eps 0.005,0.01
    """
    from rich.markup import escape
    from rich.table import Table

    from wball.certificates import certify as prove
    from wball.storage.atomic import write_whole

    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out {out}: the file must end in .json")
    console = open_console(quiet, as_json)
    points, where = choices.radii(eps), choices.device(device)
    threat = choices.ball(points[-1], cost)
    with choices.prints_aside(as_json):
        ((net, name),) = load_models([model], files, where)
        images = choices.load_images(pictures.or_first(10), where, seed)
    heading = f"{method} on {name}, {len(images.x)} images of {images.name}, {plans} plans"
    table = Table(title=escape(heading), title_justify="left")
    table.add_column(f"eps ({threat.unit})", justify="right")
    table.add_column("certified accuracy", justify="right")
    rows = []
    for r in points:
        with choices.prints_aside(as_json):
            proof = prove(net, images.x, images.y, threat.at(r), method, plans)  # type: ignore[arg-type]
        accuracy = float(proof.certified.double().mean())
        rows.append(
            {
                "eps": r,
                "certified": accuracy,
                "images": proof.certified.tolist(),
                "margin": proof.margin.tolist(),
            }
        )
        table.add_row(f"{r:g}", f"{100 * accuracy:.1f} %")
    console.print(table)
    content: dict[str, Any] = {
        "model": name,
        "data": images.name,
        "label": images.y.tolist(),
        "unit": threat.unit,
        "method": method,
        "plans": plans,
        "radii": rows,
    }
    if out is not None:
        write_whole(out, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
        console.print(printable(f"written: {out}"), markup=False)
    if as_json:
        print_json(content)
    return 0
