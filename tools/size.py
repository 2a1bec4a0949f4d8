"""Check the size of the package against its budget: ``python tools/size.py``.

Size is counted in tokens (names, operators, numbers, strings). Comments, docstrings, and whole
``assert`` and ``raise`` statements are free, so that neither words nor guards are dropped to save
tokens. A literal that is split into words counts as its words.
"""

import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "wball"
BUDGET = 246_000
"""Tokens of the whole package."""

# From Python 3.12 on an f-string is several tokens: its names count, and its text counts once.
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
COUNTED |= {getattr(tokenize, name) for name in ("FSTRING_START",) if hasattr(tokenize, name)}

SPLITTERS = ("words", "known")
"""Functions that split their argument into words, like the method ``split``."""

Place = tuple[int, int]


def free(tree: ast.AST) -> Iterator[tuple[Place, Place]]:
    """Start and end of each statement that costs nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.Raise):
            yield _span(node)
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield _span(node.body[0])


def _span(node: ast.stmt) -> tuple[Place, Place]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def split_words(tree: ast.AST) -> int:
    """Words of literals that are split, beyond the one token that each of them counts already."""
    total = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        literal: ast.AST | None = None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            literal = node.func.value
        elif getattr(node.func, "attr", getattr(node.func, "id", "")) in SPLITTERS and node.args:
            literal = node.args[0]
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
            total += max(0, len(literal.value.split()) - 1)
    return total


def count(path: Path) -> int:
    """Number of tokens in one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    spans = list(free(tree))
    with tokenize.open(path) as file:
        tokens = sum(
            token.type in COUNTED and not any(start <= token.start < end for start, end in spans)
            for token in tokenize.generate_tokens(file.readline)
        )
    return tokens + split_words(tree)


def main() -> int:
    sizes: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        folder, *rest = path.relative_to(PACKAGE).parts
        sizes[folder if rest else "modules"] += count(path)
    for name, tokens in sizes.most_common():
        print(f"{name:14}{tokens:9,}")
    total = sum(sizes.values())
    print(f"{'src/wball':14}{total:9,} of {BUDGET:,}{'  exceeded' if total > BUDGET else ''}")
    return int(total > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
