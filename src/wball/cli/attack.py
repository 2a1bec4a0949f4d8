"""``wball attack``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wball.cli import choices, options
from wball.cli.app import command, open_console, print_json
from wball.cli.models import load_models
from wball.storage.names import printable


@command
def attack(
    *,
    model: options.OneModel,
    files: options.ModelFiles,
    pictures: options.DataChoice,
    eps: options.OneEps = 0.1,
    target: Annotated[
        int | None, options.attack_option(min=0, help="class that images should be predicted as")
    ] = None,
    cost: options.GroundCost,
    attack: options.AttackName = "dual-averaging",
    steps: options.Steps = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[
        Path | None, options.output_option("--out", "-o", help="file for the images, .safetensors")
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> int:
    """Attack a few images (default: 10) at one radius, with any attack, and audit the results.

    For numbers to publish use `wball evaluate`. Here every image is shown:

        wball attack mnist-standard --eps 0.2 --limit 5
    """
    import torch
    from rich.markup import escape
    from rich.table import Table

    from wball.attacks import AttackStatus
    from wball.auditing.audit import audit
    from wball.evaluation.run import probe
    from wball.model import ask, top_class
    from wball.storage.files import write_tensors

    if out is not None and out.suffix != ".safetensors":
        raise typer.BadParameter(f"--out {out}: the file must end in .safetensors")
    console = open_console(quiet, as_json)
    threat, where = choices.ball(eps, cost), choices.device(device)
    with choices.prints_aside(as_json):
        ((net, name),) = load_models([model], files, where)
        images = choices.load_images(pictures.or_first(10), where, seed)
        x, y = images.x, images.y
        probe(net, x, y)
        goal = None if target is None else torch.full_like(y, target)
        generator = torch.Generator(where).manual_seed(seed)
        found = choices.attack(attack, threat, steps)(net, x, y, target=goal, generator=generator)
        checked = audit(threat, x, found.images)
        with torch.no_grad():
            predicted = top_class(ask(net, found.images))
    heading = f"{attack} on {name}, {len(x)} images of {images.name}, eps {eps:g} {threat.unit}"
    table = Table(title=escape(heading), title_justify="left")
    for column in (
        "image",
        "label",
        "predicted as",
        f"distance ({threat.unit})",
        "steps",
        "audit",
        "status",
    ):
        table.add_column(column, justify="left" if column == "status" else "right")
    for i in range(len(x)):
        table.add_row(
            str(i),
            str(int(y[i])),
            str(int(predicted[i])),
            f"{float(checked.distance[i]):.4f}",
            str(int(found.n_steps[i])),
            "valid" if bool(checked.valid[i]) else "[red]invalid[/]",
            found.status[i].name.lower().replace("_", " "),
        )
    console.print(table)
    counted = found.success & checked.valid.to(found.success.device)
    clean = torch.tensor([s is not AttackStatus.ALREADY_WRONG for s in found.status])
    broken = int((counted.cpu() & clean).sum())
    console.print(
        f"{broken} of {int(clean.sum())} correctly classified images broken; {checked.summary()}",
        markup=False,
    )
    if out is not None:
        write_tensors(
            out, {"original": x, "adversarial": found.images, "label": y, "success": counted}
        )
        console.print(printable(f"written: {out}"), markup=False)
    if as_json:
        print_json(
            {
                "model": name,
                "eps": eps,
                "unit": threat.unit,
                "label": y.tolist(),
                "read_as": predicted.tolist(),
                "success": counted.tolist(),
                "status": [s.name.lower() for s in found.status],
                "audit": checked.to_dict(),
            }
        )
    return 0 if checked.all_valid else 3
