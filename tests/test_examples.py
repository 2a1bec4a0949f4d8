"""The scripts in ``examples/`` run as they are (``examples/pool.py``:
``tests/evaluation/test_merge.py``)."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import wball

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on this machine: what Slurm sets, and its two commands as plain
    shell."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = f'exec "{sys.executable}"'
    for name, line in {
        "scontrol": "echo 127.0.0.1",
        "srun": 'exec "$@"',
        "torchrun": f'{python} -m torch.distributed.run "$@"',
        "python": f'{python} "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{line}\n")
        (commands / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH", "")]
        ),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_ARRAY_TASK_ID": "1",
    }


def submitted(script: str, words: list[str], environment: dict[str, str], folder: Path) -> str:
    line = ["bash", str(EXAMPLES / "slurm" / script), *words]
    done = subprocess.run(
        line, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 6), (
        done.stdout + done.stderr
    )  # 6: few images are no reliable evaluation
    return done.stderr


@pytest.mark.slow
def test_slurm_scripts_run_where_slurm_does_not(cluster: dict[str, str], tmp_path: Path) -> None:
    """Two processes share one evaluation; a part of an array of jobs is one of its own."""
    attack = ["--attack", "dual-averaging", "--eps", "0.05"]
    words = f"mnist-standard --data sample --limit 4 --out {tmp_path / 'all'}".split()
    submitted("evaluate.sbatch", [*words, *attack], cluster, tmp_path)
    assert len(wball.load_evaluation(tmp_path / "all")) == 4
    pytest.importorskip("PIL")
    from PIL import Image

    x, y = wball.load_sample("mnist")
    for label in range(10):  # a folder without images is no class
        path = tmp_path / "images" / "part-1" / str(label) / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray((255 * x[y == label][0, 0]).byte().numpy()).save(path)
    words = f"mnist-standard {tmp_path / 'images'} {tmp_path / 'parts'} --grey".split()
    submitted("parts.sbatch", [*words, *attack], cluster, tmp_path)
    assert len(wball.load_evaluation(tmp_path / "parts" / "part-1")) == 10


@pytest.mark.slow
def test_a_tour_of_other_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """At toy size: models in the style of timm and transformers, and theirs where they are
    installed."""
    assert runpy.run_path(str(EXAMPLES / "tour.py"))["main"](["--images", "2"]) == 0
    said = capsys.readouterr().out
    installed = sum(find_spec(name) is not None for name in ("timm", "transformers"))
    assert (
        said.count("accuracy 100 %, robust accuracy ") >= 3 * (1 + installed) and "nan" not in said
    )
