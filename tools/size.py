"""Check the size of the code against its ceilings: ``python tools/size.py``.

Size is counted in tokens (names, operators, numbers, strings). Comments are free and a docstring
counts as one token, so neither layout nor documentation changes the result. A package may not
exceed its ceiling, which only ever goes down.
"""

import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}

# The root modules are the files directly in src/wball; other entries include all subfolders.
ROOT_MODULES = "src/wball/*.py"
SMALL = tuple(f"src/wball/{name}" for name in ("report", "data", "storage", "ball", "zoo"))
# A package may give tokens to another as long as the sum holds.
CEILINGS: dict[tuple[str, ...], int] = {
    ("src/wball",): 249_900,
    ("src/wball/kernels",): 67_725,
    ("src/wball/certificates",): 51_673,
    ("src/wball/attacks",): 33_910,
    ("src/wball/training",): 12_290,
    ("src/wball/evaluation",): 15_760,
    (ROOT_MODULES,): 14_524,
    ("src/wball/cli",): 9_861,
    ("src/wball/input_sets",): 8_565,
    ("src/wball/solvers",): 6_751,
    ("src/wball/auditing",): 5_945,
    SMALL: 22_905,
    ("reproduction",): 20_000,
    ("tests",): 180_000,
    ("benchmarks", "tools"): 22_080,
}


def count(path: Path) -> int:
    """Number of tokens in one file."""
    with tokenize.open(path) as file:
        return sum(token.type in COUNTED for token in tokenize.generate_tokens(file.readline))


def size(place: str) -> int:
    """Number of tokens below a folder, or in the root modules."""
    files = ROOT.glob(place) if place == ROOT_MODULES else (ROOT / place).rglob("*.py")
    return sum(count(path) for path in files)


def main() -> int:
    exceeded = 0
    print(f"{'package':60}{'tokens':>10}{'ceiling':>10}")
    for places, ceiling in CEILINGS.items():
        tokens = sum(size(place) for place in places)
        mark = "  exceeded" if tokens > ceiling else ""
        exceeded += bool(mark)
        print(f"{' '.join(places):60}{tokens:10,}{ceiling:10,}{mark}")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
