"""Evaluations that are killed, starved or deceived lose nothing, and say in one line what happened.

Related tests: ``test_resuming.py`` (interruptions at any call, damaged files), ``test_restart.py``
(training), ``test_weights.py``, ``test_named.py`` and ``test_fetch.py`` (data sets and
downloads), ``test_cli.py`` (full disks and folders in use at the command line).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from faults import worker
from marks import slow

ROOT = Path(__file__).parent.parent
RESULTS = ("results.json", "examples.safetensors", "exhibit.safetensors")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="disturbs processes in POSIX ways")

# Processes are forked from a clean one that has done the imports, which would take most of the time
# otherwise.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["faults.worker"])


def start(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = CONTEXT.Process(target=target, args=tuple(map(_plain, arguments)), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(p for p in sys.path if p)
        )  # the clean one does not inherit sys.path
        process.start()
    return process


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def ended(process: ForkServerProcess) -> int | None:
    process.join(120)
    return process.exitcode


def until_begun(folder: Path, process: ForkServerProcess) -> None:
    while process.is_alive() and not list(folder.glob("batches/batch-*.safetensors")):
        time.sleep(0.01)


def same(one: Path, two: Path) -> bool:
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in RESULTS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ended(start(worker.run, folder)) == 0
    return folder


@pytest.mark.parametrize("how", [*slow(signal.SIGTERM), signal.SIGKILL])
def test_stopped_by_a_signal_and_started_again(
    tmp_path: Path, undisturbed: Path, how: signal.Signals
) -> None:
    process = start(worker.run, tmp_path, 0.05)
    until_begun(tmp_path, process)
    assert process.pid is not None
    os.kill(process.pid, how)
    assert ended(process) == -how
    assert not (tmp_path / "results.json").exists()
    begun = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("batches/batch-*")}
    assert begun
    assert ended(start(worker.run, tmp_path)) == 0
    assert same(tmp_path, undisturbed) and not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_one_of_two_torchrun_processes_dies(tmp_path: Path, undisturbed: Path) -> None:
    """The job fails and says so; two others continue, and end with the numbers of an undisturbed
    run.

    The images are streamed, while the undisturbed run had them in memory: the files are the same to
    the byte.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT.parent / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    line = [*launcher, str(ROOT / "faults" / "worker.py"), str(tmp_path / "shared"), "20"]
    broken = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert broken.returncode != 0 and "SIGKILL" in broken.stderr
    assert not (tmp_path / "shared" / "results.json").exists()
    processes = [start(worker.in_a_group, tmp_path / "shared", rank, True) for rank in range(2)]
    assert [ended(p) for p in processes] == [0, 0]
    assert same(tmp_path / "shared", undisturbed)
    read = {int(line) for line in (tmp_path / "shared.read-1").read_text().split()}
    assert read <= {0, 1} | {
        k for k in range(24) if k // 4 % 2 == 1
    }  # its own batches, and two images to begin with


def test_two_processes_of_a_group_share_the_work(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "shared"
    processes = [start(worker.in_a_group, folder, rank) for rank in range(2)]
    assert [ended(p) for p in processes] == [0, 0]
    assert same(folder, undisturbed)
    rows = [json.loads(row) for row in (folder / "log.jsonl").read_text().splitlines()]
    assert {(row["rank"], row["batch"]) for row in rows if row["event"] == "batch"} == {
        (b % 2, b) for b in range(6)
    }


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".examples.safetensors.123.part").write_bytes(b"half")
    worker.run(str(tmp_path))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow  # test_resuming.py: one process per folder
def test_two_processes_and_one_folder(tmp_path: Path, undisturbed: Path) -> None:
    first = start(worker.run, tmp_path, 0.02)
    until_begun(tmp_path, first)
    assert ended(start(worker.second, tmp_path)) == 4
    assert ended(first) == 0
    assert same(tmp_path, undisturbed)


@pytest.mark.slow  # test_resuming.py: files appear whole or not at all
def test_a_disk_without_room(tmp_path: Path, undisturbed: Path) -> None:
    """Nothing fits, then the first files do, then all do: what was written stays good."""
    for limit in (200, 3000):
        assert ended(start(worker.with_little_disk, tmp_path, limit)) == 28
        assert not list(tmp_path.rglob("*.part"))
    assert ended(start(worker.run, tmp_path)) == 0
    assert same(tmp_path, undisturbed)


MINE = """
import time, torch
from torch import nn

def data():
    x = torch.rand(9, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, torch.zeros(9, dtype=torch.long)

def slow():
    def model(x):
        time.sleep(0.2)
        s = x.flatten(1).sum(1)
        return torch.stack([s, -s], 1)
    return model

def hungry():
    def model(x):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. " * 3)
    return model
"""


def test_terminated_at_the_command_line(tmp_path: Path) -> None:
    """Batch systems send SIGTERM first: one line, an exit code, and nothing half-written."""
    (tmp_path / "mine.py").write_text(MINE)
    words = "evaluate mine.py:slow -d mine.py:data --eps 0.1 --attack dual-averaging --out o"
    line = [sys.executable, "-m", "wball", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        line, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "o" / "log.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("wball: interrupted") and "Traceback" not in err
    assert not (tmp_path / "o" / "results.json").exists() and not list(tmp_path.rglob("*.part"))


INTERRUPTS = {
    "while importing": """
def importing(name, *rest):
    if name == "typer":
        os.kill(os.getpid(), signal.SIGINT)
    return found(name, *rest)
""",
    "twice, and the first is lost": """
def importing(name, *rest):
    try:
        if name == "wball.cli.commands":
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
    return found(name, *rest)
""",
    "once, and it is lost": """
def importing(name, *rest):
    try:
        if name == "wball.cli.commands":
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        time.sleep(60)
    return found(name, *rest)
""",
}


@pytest.mark.parametrize("moment", INTERRUPTS)
def test_an_interrupt_is_reported_at_any_moment(moment: str) -> None:
    code = f"""
import builtins, os, signal, sys, time
from wball import cli
found = builtins.__import__
{INTERRUPTS[moment]}
signal.signal(signal.SIGINT, signal.default_int_handler)
builtins.__import__, sys.argv = importing, ["wball", "models"]
cli.entry()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent / "src")}
    line = [sys.executable, "-c", code]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr.strip() == "wball: interrupted; rerun the same command to resume"


def test_out_of_memory_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from wball.cli import main

    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    code = main(["evaluate", "mine.py:hungry", "-d", "mine.py:data", "--eps", "0.1", "--out", "o"])
    err = capsys.readouterr().err
    assert code == 5 and err.count("\n") == 1
    assert "out of memory" in err
