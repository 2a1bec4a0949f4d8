"""``wball certify``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wball.cli import choices, options
from wball.cli.app import command, open_console, say
from wball.cli.models import load_models

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


@dataclass(frozen=True)
class Certification(options.Threat):
    """Options for what is certified, and how.

    Attributes:
        eps (X,...): radii, such as 0.05,0.1,0.2
        method (NAME): interval, dual, crown, anchored, alpha-crown or complete, or several of them,
            separated by commas
        time_limit (SECONDS): time limit per image
        check: confirm certificates with the independent checker
        out (FILE): write the result as .json
        save_program (FILE): write the exported program that the certificates are about as .pt2
        as_json: print the result as JSON and nothing else
    """

    eps: str = "0.005,0.01,0.02"
    method: str = "anchored"
    time_limit: float = 60.0
    check: bool = False
    out: Path | None = None
    save_program: Path | None = None
    as_json: bool = False


@command
def certify(
    *,
    models: options.Models,
    how: Certification,
    pictures: options.DataChoice,
    files: options.ModelFiles,
    machine: options.Machine,
) -> tuple[int, Any]:
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

    out, save_program, time_limit = how.out, how.save_program, how.time_limit
    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out {out}: the file must end in .json")
    if save_program is not None and (save_program.suffix != ".pt2" or len(models) > 1):
        raise typer.BadParameter(
            f"--save-program {save_program}: the file must end in .pt2 and is for one model"
        )
    console, radii = open_console(how.as_json), choices.radii(how.eps)
    threat, where = choices.ball(radii[-1], how), choices.device(machine.device)
    loaded = zip(models, load_models(models, files, where, machine.seed), strict=True)
    made = [(_program(spec, files, where) or net, name) for spec, (net, name) in loaded]
    images = choices.load_images(pictures, where, machine.seed, default_limit=10)
    contents = []
    for (net, name), way in itertools.product(made, how.method.split(",")):
        heading = f"{way} on {name}, {len(images.x)} images of {images.name}"
        columns = {"certified": "certified accuracy"} | (
            {"confirmed": "confirmed"} if how.check else {}
        )
        table = Table(title=escape(heading), title_justify="left")
        for column in (f"eps ({threat.unit})", *columns.values()):
            table.add_column(column, justify="right")
        rows = []
        for r in radii:
            given = net, images.x, images.y, threat.at(r)
            proof = prove(*given, way, time_limit=time_limit)  # type: ignore[arg-type]
            row: dict[str, Any] = {"eps": r, "certified": float(proof.certified.double().mean())}
            row["images"] = proof.certified.tolist()
            for column in ("margin", "status"):
                row[column] = [image[column] for image in proof.to_dict()["images"]]
            if how.check:
                checking = time_limit * max(1, int(proof.certified.sum()))
                found = verify(*given, proof, time_limit=checking)  # type: ignore[arg-type]
                row["confirmed"] = float(found.confirmed.double().mean())
                row["verification"] = [status.name.lower() for status in found.status]
            rows.append(row)
            table.add_row(f"{r:g}", *(f"{100 * row[column]:.1f} %" for column in columns))
        console.print(table)
        about = {"model": name, "data": images.name, "label": images.y.tolist()}
        about["program"] = proof.subject["program"]
        contents.append({**about, "unit": threat.unit, "method": way, "radii": rows})
    if save_program is not None and proof.program is not None:
        save_program.parent.mkdir(parents=True, exist_ok=True)
        proof.program.save(save_program)
        say(console, f"written: {save_program}")
    content: Any = contents[0] if len(contents) == 1 else contents
    if out is not None:
        write_json(out, content)
        say(console, f"written: {out}")
    return 0, content


def _program(spec: str, files: options.ModelFiles, where: torch.device) -> ExportedProgram | None:
    """The program in a ``.pt2`` file, which is certified as it is."""
    if Path(spec).suffix != ".pt2" or files.mean is not None:
        return None
    from torch.export import load
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(load(spec), where)
