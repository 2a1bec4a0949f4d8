"""Tables for a terminal and for Markdown, and pixels in JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading. ``None`` is printed as a dash."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | None]]
    title: str = ""

    def text(self) -> str:
        """Aligned columns, the first to the left.

        >>> print(Table(["model", "clean"], [["a", "98.9 %"], ["longer", None]]).text())
        model    clean
        a       98.9 %
        longer       –
        """
        cells, width = self.measured()
        lines = [
            "  ".join([row[0].ljust(width[0]), *map(str.rjust, row[1:], width[1:])]).rstrip()
            for row in cells
        ]
        return "\n".join(([self.title] if self.title else []) + lines)

    def measured(self) -> tuple[list[list[str]], list[int]]:
        """Head and rows, with a dash for each missing value, and the widths of the columns."""
        cells = [[c if c is not None else "–" for c in row] for row in (self.head, *self.rows)]
        return cells, [max(map(len, column)) for column in zip(*cells, strict=True)]

    def markdown(self) -> str:
        """A Markdown table: the first column and wide ones (text) to the left, others (numbers) to
        the right."""
        cells, (_, *width) = self.measured()
        sides = "".join("|---:" if w < 18 else "|---" for w in width)
        head, *body = (f"| {' | '.join(row)} |" for row in cells)
        table = "\n".join([head, f"|---{sides}|", *body])
        return f"**{self.title}**\n\n{table}" if self.title else table


def percent(share: float | None, digits: int = 1) -> str | None:
    """A share as a percentage.

    >>> percent(0.981)
    '98.1 %'
    """
    return None if share is None else f"{100 * share:.{digits}f} %"


def points(share: float | None) -> str | None:
    """A share in percent, for tables whose title names the unit.

    >>> points(0.981)
    '98.1'
    """
    return None if share is None else f"{100 * share:.1f}"


def pack(images: Tensor) -> dict[str, Any]:
    """Pixels as text: half precision, little-endian, base64. Enough for a picture, and a tenth of a
    list of numbers."""
    array = images.detach().cpu().numpy().astype("<f2")
    return {"shape": list(array.shape), "float16": base64.b64encode(array.tobytes()).decode()}


def unpack(packed: dict[str, Any]) -> NDArray[np.float32]:
    """What :func:`pack` packed."""
    raw = np.frombuffer(base64.b64decode(packed["float16"]), "<f2")
    return raw.reshape(packed["shape"]).astype(np.float32)
