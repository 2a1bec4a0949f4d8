"""Docstrings use a few reStructuredText marks; the site is Markdown. Translate them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

import wball

sys.path.insert(0, str(Path(__file__).parent))
from mathml import formula

ROLE = re.compile(r":(?:class|func|mod|meth|attr|data):`~?([^`]+)`")
MATH = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*| *$))*)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
TABLE = re.compile(r"^((?:=+ +)+=+)\n(?:.*\n)+?\1\n(?:(?:.*\n)+?)\1$", re.MULTILINE)


class Roles(griffe.Extension):
    """``:class:`~a.b.C``` becomes ``C``, ``.. math::`` a formula, tables and doctests become blocks
    of code.

    Functions and classes begin with the line that imports them.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        obj.docstring.value = translated(obj.docstring.value)
        if obj.parent is not None and obj.parent.is_module and (obj.is_function or obj.is_class):
            where = "wball" if obj.name in wball.__all__ else obj.parent.path
            obj.docstring.value = (
                f"```python\nfrom {where} import {obj.name}\n```\n\n{obj.docstring.value}"
            )


def translated(text: str) -> str:
    text = ROLE.sub(
        lambda m: f"`{m[1].rsplit('.', 1)[-1] if m[0].split('`')[1].startswith('~') else m[1]}`",
        text,
    )
    text = MATH.sub(lambda m: f"\n{m[1]}{formula(m[2])}\n\n", text)
    text = DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text)
    return TABLE.sub(lambda m: f"```text\n{m[0]}\n```", text)
