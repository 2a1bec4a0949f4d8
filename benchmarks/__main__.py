"""``python -m benchmarks NAME``: measure public calls, attacks and certificates.

``calls`` times the public calls and ``growth`` how they grow, ``steps`` a step of adversarial
training, ``step_sizes`` compares steps of PGD. ``public`` attacks public networks, ``masks``
networks that hide their gradients, ``photos`` a photo classifier. ``proofs`` says what certificates
decide, ``architectures`` which networks they follow, ``soundness`` attacks them. ``validity``
audits what attacks return, ``predecessors`` runs the attacks of others, ``smoothing`` their
certificates, ``art`` the port of the Adversarial Robustness Toolbox; ``colours`` lets mass change
the channel. Each has a ``--help`` of its own and writes ``results/NAME.json`` after every row.
"""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "calls",
    "growth",
    "steps",
    "step_sizes",
    "public",
    "masks",
    "photos",
    "ablation",
    "proofs",
    "validity",
    "soundness",
    "architectures",
    "predecessors",
    "smoothing",
    "art",
    "colours",
)


def main(words: list[str]) -> None:
    if not words or words[0] not in NAMES:
        raise SystemExit(f"{__doc__}\nexpected one of {', '.join(NAMES)}")
    importlib.import_module(f"benchmarks.{words[0]}").main(words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
