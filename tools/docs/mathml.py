"""Formulas as MathML, which browsers draw themselves: no script, no network."""

from __future__ import annotations

import re

INLINE = re.compile(r"(?<![$`\w])\$([^$`\n]+)\$(?![$\w])")
DISPLAY = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.DOTALL | re.MULTILINE)

PLAIN = {
    r"\tfrac": r"\frac",
    r"\operatorname*": r"\operatorname",
    r"\arg\max": r"\operatorname{argmax}",
    r"\arg\min": r"\operatorname{argmin}",
}
"""Commands that the converter does not know, and those that mean the same to a reader."""


def formula(tex: str, display: str = "block") -> str:
    """A formula as one line of HTML."""
    from latex2mathml.converter import convert

    tex = " ".join(tex.split())
    for command, known in PLAIN.items():
        tex = tex.replace(command, known)
    shown = convert(tex, display=display)
    # At the start of a line, Markdown takes <math> for a block of its own, but not <span>.
    return f'<div class="formula">{shown}</div>' if display == "block" else f"<span>{shown}</span>"


def with_formulas(markdown: str) -> str:
    """A page whose ``$$`` blocks and ``$`` spans are formulas."""
    markdown = DISPLAY.sub(lambda found: formula(found[1]), markdown)
    return INLINE.sub(lambda found: formula(found[1], "inline"), markdown)
