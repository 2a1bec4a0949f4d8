"""The flows of docs/architecture.md are the files that public calls enter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType

import pytest

import wball
from wball.training import preset, train

pytest.importorskip("numba")
PACKAGE = Path(wball.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
FLOWS = {
    title: re.findall(r"`([\w/]+\.py)`", body)
    for title, body in re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


def entered(call: Callable[[], object]) -> list[str]:
    """Files of the package in the order of their first call."""
    files = dict[str, None]()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files[frame.f_code.co_filename] = None

    call()  # imports and fills caches
    sys.setprofile(enter)
    call()
    sys.setprofile(None)
    return [Path(file).relative_to(PACKAGE).as_posix() for file in files]


def test_the_listed_files_exist() -> None:
    for title, files in FLOWS.items():
        assert f"| {title} | {len(files)} |" in PAGE
        assert all((PACKAGE / file).is_file() for file in files), title


def test_calls_enter_the_listed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # worker threads are not traced
    x, y = (part[:1] for part in wball.load_sample("mnist"))
    model, certified = map(wball.load_model, ("mnist-standard", "mnist-certified"))
    ball, config = wball.WassersteinBall(0.05), preset("mnist-adversarial", epochs=1, batch_size=1)
    store = partial(train, config, (x, y), (x, y), model=certified, checkpoint_every=1)
    calls = {
        "project, finite reg": lambda: ball.project(x, x.flip(3), reg=1000),
        "project, exact, CPU": lambda: ball.project(x, x.flip(3)),
        "a step of DualAveraging": lambda: wball.DualAveraging(ball, steps=1)(model, x, y),
        "certify": lambda: wball.certify(certified, x, y, ball),
        "evaluate": lambda: wball.evaluate(model, x, y, ball, [0.2]),
        "train": lambda: store(out=mkdtemp(dir=tmp_path)),
    }
    for title, call in calls.items():
        assert entered(call) == FLOWS[title], title
