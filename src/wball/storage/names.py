"""Names that users choose, made safe for file names and terminals."""

import unicodedata


def file_name(name: str) -> str:
    """A safe file name of letters, digits, ``-``, ``_`` and ``.``, without folders and not hidden.

    >>> file_name("../a b"), file_name("")
    ('a-b', 'unnamed')
    """
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".-") or "unnamed"


def printable(text: str) -> str:
    r"""Text with control characters escaped.

    Names come from command lines, files and folders. An escape sequence in them could move the
    cursor, hide lines or change the title of the window.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _harmless(c: str) -> bool:
    # Cc: control, Cf: format (such as the direction of writing), Cs: surrogates for undecodable
    # bytes.
    return c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp")
