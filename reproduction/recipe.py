"""What a recipe is: how to measure, how to tabulate, how to draw. The last two need nothing but the
stored result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reproduction.tables import Table
from reproduction.workshop import Data, Workshop

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Recipe:
    """One table or figure of the paper.

    Attributes:
        name: of the recipe and of its files.
        title: what it shows.
        place: where it is in the paper.
        measure: makes the data.
        tables: the data for a terminal and for the page.
        draw: the data as a figure, or ``None`` where a table says it all.
        remarks: sentences about the data, for the page.
    """

    name: str
    title: str
    place: str
    measure: Callable[[Workshop], Data]
    tables: Callable[[Data], list[Table]]
    draw: Callable[[Data], Figure] | None
    remarks: Callable[[Data], list[str]]
