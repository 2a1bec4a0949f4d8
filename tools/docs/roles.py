"""Docstrings use a few reStructuredText marks; the site is Markdown. Translate them."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|mod|meth|attr|data):`~?([^`]+)`")
MATH = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*| *$))*)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)
TABLE = re.compile(r"^((?:=+ +)+=+)\n(?:.*\n)+?\1\n(?:(?:.*\n)+?)\1$", re.MULTILINE)


class Roles(griffe.Extension):
    """``:class:`~a.b.C``` becomes ``C``, ``.. math::``, tables and doctests become blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = translated(obj.docstring.value)


def translated(text: str) -> str:
    text = ROLE.sub(lambda m: f"`{m[1].rsplit('.', 1)[-1] if m[0].split('`')[1].startswith('~') else m[1]}`", text)
    text = MATH.sub(lambda m: f"{m[1]}```tex\n{_indented(m[2], m[1])}\n{m[1]}```\n", text)
    text = DOCTEST.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text)
    return TABLE.sub(lambda m: f"```text\n{m[0]}\n```", text)


def _indented(formula: str, margin: str) -> str:
    return textwrap.indent(textwrap.dedent(formula).strip(), margin)
