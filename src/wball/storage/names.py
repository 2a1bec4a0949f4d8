"""Names that users chose, as names of files and as text for a terminal."""

from __future__ import annotations

import unicodedata


def file_name(name: str) -> str:
    """A name with letters, digits, ``-``, ``_`` and ``.`` only, which stands in no other folder and is not hidden.

    >>> file_name("../a b"), file_name("")
    ('a-b', 'unnamed')
    """
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".-") or "unnamed"


def printable(text: str) -> str:
    r"""Text in which characters that steer a terminal are written out.

    Names come from command lines, files and folders of others; an escape sequence in them could move the cursor, hide
    lines or change the title of the window.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _harmless(c: str) -> bool:
    # Cc: control, Cf: format (direction of writing among them), Cs: stand-ins for bytes that are not text.
    return c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp")
