"""``python -m wball.demo``: two bundled models on bundled digits, attacked and certified.

It is a ``wball evaluate`` command that takes a minute on two cores: few images, and the fast
version of the standard attack. The report shows how precise so few images are.
"""

import sys
from collections.abc import Sequence

from wball.cli import main as wball

LINE = (
    "evaluate", "mnist-standard", "mnist-certified", "--limit", "12", "--eps", "0.05,0.1,0.2",
    "--attack", "fast", "--certify", "--overwrite", "--out", "out/demo",
)  # fmt: skip


def main(more: Sequence[str] = ()) -> int:
    """Run ``wball evaluate`` on two bundled models, with ``more`` options appended."""
    return wball([*LINE, *more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
