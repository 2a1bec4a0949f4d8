"""``wball certify``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wball.cli import choices, options
from wball.cli.app import command, open_console, print_json
from wball.cli.models import load_models
from wball.storage.names import printable

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


@command
def certify(
    *,
    models: options.Models,
    eps: options.Eps = "0.005,0.01,0.02",
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            help="interval, dual, crown, anchored, alpha-crown or complete, or several of them, "
            "separated by commas",
        ),
    ] = "anchored",
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="time limit per image")
    ] = 60.0,
    check: Annotated[
        bool, typer.Option("--verify", help="confirm certificates with the independent checker")
    ] = False,
    save_program: Annotated[
        Path | None,
        typer.Option(
            "--save-program",
            metavar="FILE",
            help="write the exported program that the certificates are about as .pt2",
        ),
    ] = None,
    window: options.Window = 5,
    pictures: options.DataChoice,
    files: options.ModelFiles,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="write the result as .json")
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Certify that no image in the ball changes the prediction, for any transport plan.

    \b
        wball certify mnist-standard --limit 4 --eps 0.005,0.01

    MODEL is as for `wball evaluate`. Ten images are used unless --limit is given.
    """
    from rich.markup import escape
    from rich.table import Table

    from wball.certificates import certify as prove
    from wball.certificates import verify
    from wball.storage.files import write_json

    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out {out}: the file must end in .json")
    if save_program is not None and (save_program.suffix != ".pt2" or len(models) > 1):
        raise typer.BadParameter(
            f"--save-program {save_program}: the file must end in .pt2 and is for one model"
        )
    console, radii = open_console(as_json), choices.radii(eps or "")
    threat, where = choices.ball(radii[-1], window), choices.device(device)
    with choices.prints_aside(as_json):
        made = [
            (_program(spec, files, where) or net, name)
            for spec, (net, name) in zip(
                models, load_models(models, files, where, seed), strict=True
            )
        ]
        images = choices.load_images(pictures, where, seed, default_limit=10)
    contents = []
    for (net, name), way in itertools.product(made, method.split(",")):
        heading = f"{way} on {name}, {len(images.x)} images of {images.name}"
        table = Table(title=escape(heading), title_justify="left")
        table.add_column(f"eps ({threat.unit})", justify="right")
        table.add_column("certified accuracy", justify="right")
        if check:
            table.add_column("confirmed", justify="right")
        rows = []
        for r in radii:
            ball = threat.at(r)
            with choices.prints_aside(as_json):
                proof = prove(net, images.x, images.y, ball, way, time_limit=time_limit)  # type: ignore[arg-type]
                checking = time_limit * max(1, int(proof.certified.sum()))
                found = (
                    verify(net, images.x, images.y, ball, proof, time_limit=checking)  # type: ignore[arg-type]
                    if check
                    else None
                )
            row: dict[str, Any] = {"eps": r, "certified": float(proof.certified.double().mean())}
            row["images"] = proof.certified.tolist()
            for column in ("margin", "status"):
                row[column] = [image[column] for image in proof.to_dict()["images"]]
            if found is not None:
                row["confirmed"] = float(found.confirmed.double().mean())
                row["verification"] = [status.name.lower() for status in found.status]
            rows.append(row)
            shares = [row[column] for column in ("certified", "confirmed") if column in row]
            table.add_row(f"{r:g}", *(f"{100 * share:.1f} %" for share in shares))
        console.print(table)
        about = {"model": name, "data": images.name, "label": images.y.tolist()}
        about["program"] = proof.subject["program"]
        contents.append({**about, "unit": threat.unit, "method": way, "radii": rows})
    if save_program is not None and proof.program is not None:
        save_program.parent.mkdir(parents=True, exist_ok=True)
        proof.program.save(save_program)
        console.print(printable(f"written: {save_program}"), markup=False)
    content: Any = contents[0] if len(contents) == 1 else contents
    if out is not None:
        write_json(out, content)
        console.print(printable(f"written: {out}"), markup=False)
    if as_json:
        print_json(content)
    return 0


def _program(spec: str, files: options.ModelFiles, where: torch.device) -> ExportedProgram | None:
    """The program in a ``.pt2`` file, which is certified as it is."""
    if Path(spec).suffix != ".pt2" or files.mean is not None:
        return None
    from torch.export import load
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(load(spec), where)
