"""Evaluations for a terminal: a table of accuracies, and the audit in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wball.display import percent
from wball.storage.names import printable

if TYPE_CHECKING:
    from rich.table import Table

    from wball.evaluation.result import Evaluation


def table(evaluation: Evaluation) -> Table:
    """A table of the accuracies, for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    heading = printable(
        f"{evaluation.name}: {len(evaluation)} images of {evaluation.settings['data']['name']}"
    )
    shown = Table(title=escape(heading), title_justify="left")
    shown.add_column(f"eps ({printable(evaluation.unit)})", justify="right")
    shown.add_column("accuracy", justify="right")
    shown.add_column("95 % interval", justify="right")
    proved = evaluation.settings["certify"] is not None
    if proved:
        shown.add_column("certified", justify="right")
    shown.add_column("broken", justify="right")
    for point in evaluation.curve():
        row = [f"{point.eps:g}" if point.eps else "0 (clean)", f"{100 * point.accuracy:.1f} %"]
        row += ["{:.1f}-{:.1f} %".format(*(100 * end for end in point.interval))]
        row += [f"{100 * point.certified:.1f} %"] if proved and point.certified is not None else []
        shown.add_row(*row, str(point.broken))
    return shown


def verdict(evaluation: Evaluation) -> str:
    """The audit in a sentence or two."""
    audit = evaluation.audit_summary()
    said = f"audit: {audit['valid']} of {audit['checked']} examples valid (mass, box and distance)"
    if not audit["checked"]:
        said = "audit: no examples were found"
    if audit["rejected"]:
        said += f"; {audit['rejected']} rejected and not counted"
    if audit["contradictions"]:
        said += f"; CONTRADICTION between proof and example on images {audit['contradictions'][:5]}"
    proofs = audit["certificates"]
    if proofs and proofs["checked"] + proofs["unfollowed"]:
        said += f"\ncertificates confirmed by the independent checker: {proofs['confirmed']} of {proofs['checked']}"
        if proofs["unfollowed"]:
            said += f"; {proofs['unfollowed']} could not be checked ({proofs['reason']})"
    if audit["valid"] and "cost" in evaluation.settings["ball"]:
        said += f"\ndistances {_proved_how(evaluation)}"
    if base := evaluation.baseline:
        said += (
            f"\nwithout an attack, accuracy: {percent(base['shifted'])} on images shifted by one pixel, "
            f"{percent(base['random'][evaluation.radii[-1]])} at random points of the ball of radius "
            f"{evaluation.radii[-1]:g}"
        )
    if evaluation.doubts:
        codes = ", ".join(sorted({doubt.code for doubt in evaluation.doubts}))
        said += f"\nNOT RELIABLE: {codes}; the robust accuracy may be far too high"
    elif evaluation.quick_look:
        said += (
            "\nquick look: the fast attack skips the checks for gradient masking; use the standard "
            "attack for reliable numbers"
        )
    return said


def _proved_how(evaluation: Evaluation) -> str:
    """How the distances of the valid examples were proved, in words."""
    audit = evaluation.audit_summary()
    plan, exact, both = audit["proved_by_plan"], audit["exact_transport"], audit["both"]
    if plan == both == 0:
        return f"proved by exact transport: {exact}"
    wrong = len(audit["disagreements"])
    return (
        f"proved by plan: {plan + both}, by exact transport alone: {exact - both}; "
        f"sampled exact check: {both}, disagreements: {wrong}"
    )
