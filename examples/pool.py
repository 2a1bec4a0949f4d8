"""Evaluate a large data set over a pool of workers with Dask, part by part, and merge the results.

    # two processes of this machine
    python examples/pool.py --local 2 --images 64 --parts 4 --out out/pool
    # a cluster; OUT is seen by all
    python examples/pool.py --scheduler tcp://head:8786 --parts 64 --out /shared/out

Parts are independent, so the pool only maps and merges: a part that was finished before is read
back, one that was interrupted is resumed. Replace `model` and `images` by your own; workers need
this library, not this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from distributed import Client, LocalCluster


def model():
    import wball

    return wball.load_model("mnist-standard")


def images(count: int):
    """A map-style data set: only the images of a part are read."""
    from torch.utils.data import TensorDataset

    import wball

    x, y = wball.load_sample("mnist")
    return TensorDataset(x[:count], y[:count])


def evaluate_part(part: int, parts: int, count: int, folder: str) -> str:
    """One part, on a worker: images part, part + parts, part + 2 parts, ..."""
    from torch.utils.data import Subset

    import wball

    data = images(count)
    own = Subset(data, range(part, len(data), parts))
    ball = wball.WassersteinBall(0.1)
    attack = wball.DualAveraging(ball, steps=20)  # or "fast", "standard"
    wball.evaluate(
        model(),
        own,
        ball=ball,
        radii=[0.05, 0.1],
        attack=attack,
        out=folder,
        name=wball.Names(data=f"part {part}"),
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--local", type=int, default=2, help="workers on this machine, if no scheduler is given"
    )
    parser.add_argument("--scheduler", help="address of a running Dask scheduler")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/pool"))
    given = parser.parse_args()
    pool = given.scheduler or LocalCluster(
        given.local, threads_per_worker=1, dashboard_address=None
    )
    with Client(pool) as client:
        folders = [str(given.out / f"part-{k}") for k in range(given.parts)]
        work = client.map(
            evaluate_part,
            range(given.parts),
            [given.parts] * given.parts,
            [given.images] * given.parts,
            folders,
        )
        done = client.gather(work)
    import wball

    merged = wball.merge_evaluations(done)
    merged.save(given.out / "all")
    print(merged.verdict())
    print({eps: merged.accuracy_at(eps) for eps in merged.radii})


if __name__ == "__main__":
    main()
