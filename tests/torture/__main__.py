"""The long run: ``PYTHONPATH=tests python -m torture --cases 100000 --seed 0 --jobs 2``.

Findings are printed as they come. The exit code is 1 if there were any.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from functools import partial

import torch

from .cases import OPERATIONS
from .operations import findings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--only", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    options = parser.parse_args()
    failed, work = 0, partial(findings, options.seed, options.only)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.jobs, torch.set_num_threads, (1,)) as pool:
        for done, lines in enumerate(pool.imap(work, range(options.cases), chunksize=20), 1):
            failed += bool(lines)
            if lines or done % 1000 == 0:
                print(*lines, f"{done} cases, {failed} failed", sep="\n", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
