"""Check the size of the package and of its functions: ``python tools/size.py``.

Size is counted in tokens (names, operators, numbers, strings). Comments, docstrings, and whole
``assert`` and ``raise`` statements are free, so that neither words nor guards are dropped to save
tokens. A literal that is split into words counts as its words.

No function has a body of more than 100 lines, or more than 10 arguments; public functions and
commands may have more arguments. :data:`TOO_LARGE` lists those that still do: it only gets shorter.
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
CEILING = 251_800
"""What the package has today. General networks, images of any size and gradients came in faster
than code went out: until it is back within the budget, it only gets smaller."""

LONGEST, ARGUMENTS = 100, 10
"""Lines of a function's body, without its docstring, and its arguments."""
TOO_LARGE = {
    "kernels/entropic_plan/triton.py:_solve",
    "kernels/projected_sinkhorn/cpu.py:_project_images",
    "kernels/projected_sinkhorn/triton.py:_add_eight",
    "kernels/projected_sinkhorn/triton.py:_projection_kernel",
    "kernels/proximal_newton/triton.py:_equations",
    "kernels/proximal_newton/triton.py:_solve_kernel",
    "kernels/proximal_newton/triton_dual.py:evaluate",
    "kernels/triton_stencil.py:_add_six",
}
"""Functions that are not split yet."""

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


def public_names() -> set[str]:
    """The names in ``wball.__all__``."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    lists = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    return set(ast.literal_eval(lists[0]))


def too_large(path: Path, public: set[str]) -> Iterator[str]:
    """The functions of a file that are too long or have too many arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[int(ast.get_docstring(node, clean=False) is not None) :]
        lines = _span(body[-1])[1][0] - body[0].lineno + 1 if body else 0
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        commands = {getattr(decorator, "id", "") for decorator in node.decorator_list}
        open_ended = node.name in public or "command" in commands
        many = len([name for name in given if name not in ("self", "cls")]) > ARGUMENTS
        if lines > LONGEST or (many and not open_ended):
            yield f"{path.relative_to(PACKAGE).as_posix()}:{node.name}"


def main() -> int:
    sizes: Counter[str] = Counter()
    public, large = public_names(), set[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        large.update(too_large(path, public))
        folder, *rest = path.relative_to(PACKAGE).parts
        sizes[folder if rest else "modules"] += count(path)
    for name, tokens in sizes.most_common():
        print(f"{name:14}{tokens:9,}")
    total = sum(sizes.values())
    for name in sorted(large - TOO_LARGE):
        print(f"{name}: more than {LONGEST} lines or {ARGUMENTS} arguments")
    for name in sorted(TOO_LARGE - large):
        print(f"{name} is small enough now: take it from TOO_LARGE")
    over = f", {total - BUDGET:,} too many (today's limit {CEILING:,})" if total > BUDGET else ""
    print(f"{'src/wball':14}{total:9,} of {BUDGET:,}{over}")
    return int(total > max(BUDGET, CEILING) or large != TOO_LARGE)


if __name__ == "__main__":
    sys.exit(main())
